"""Tests of bench.py's plan, to be pasted beside its other tests (plan_part: there bench)."""
import argparse

import pytest
import torch

import plan_part
import train
from ufp4 import RECIPES


@pytest.mark.parametrize("experts", [[], ["--experts", "8", "--top-k", "3"]])
def test_activation_bytes_are_what_autograd_keeps(experts):
    """Within 3%: indices and cosines are left out."""
    s = train.parse_args(["--model", "nano", "--device", "cpu", "--dtype", "bfloat16", "--layers",
                          "2", "--hidden", "256", "--seq-len", "128", *experts])
    model = train.GPT(s, RECIPES["bf16"], 256)
    model.init_weights()
    parameters, saved = {p.numel() for p in model.parameters()}, {}

    def keep(x):
        if not (x.numel() in parameters and x.dtype == torch.bfloat16):         # a weight, cast
            saved[x.untyped_storage().data_ptr()] = x   # kept alive, so that addresses differ
        return x

    tokens = torch.randint(0, 256, (5, 128))            # 640: no activation has a weight's size
    with train.autocast(s), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(tokens, tokens).backward()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = sum(x.untyped_storage().nbytes() for address, x in saved.items() if address not in own)
    block, ends = plan_part.activation_bytes(s, RECIPES["bf16"])
    logits = 6 * 256                                    # of which the gradient isn't there yet
    assert kept == pytest.approx(640 * (2 * block + ends - logits), rel=0.03)


def test_plan_prints_sizes_memory_and_paths(capsys):
    flags = ["--model", "moe-7.9b", "--recipe", "mxfp4", "--device", "cpu"]
    plan_part.bench_plan(argparse.Namespace(gpus=8, train=flags))
    printed = capsys.readouterr().out
    assert "7.935B parameters, 1.299B active a token" in printed
    assert f"AdamW, float32{8 * 7.935e9 / 8 / 2**30:20.2f} GiB" in printed
    assert "path cublas (sm_90)" in printed and "path fp4 (sm_100)" in printed
