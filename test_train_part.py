"""Tests of train.py and data/prepare.py."""
import dataclasses
import functools
import http.server
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.flop_counter import FlopCounterMode

import train
import ufp4
from data import prepare
from ufp4 import RECIPES

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def seeded_and_eager():
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        yield


# --------------------------------------------------------------------------------------------------
# train.py

TINY = ("--layers 2 --dim 32 --heads 2 --hidden 32 --seq-len 32 --batch-size 4 --steps 8 "
        "--warmup 2 --eval-interval 4 --eval-windows 3 --save-interval 2 --log-interval 1 "
        "--sample 0 --device cpu --dtype float32").split()
MOE = ["--experts", "3", "--top-k", "2"]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "little.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(400)))
    return path


@pytest.fixture
def settings(text, tmp_path, monkeypatch):
    """Settings of a tiny run: settings("--recipe", ...)."""
    here = functools.partial(prepare.prepare, root=tmp_path / "data")
    monkeypatch.setattr(train, "prepare", here)
    common = [*TINY, "--data", str(text), "--out", str(tmp_path / "out/run")]
    return lambda *flags: train.parse_args([*common, *flags])


def weights(out, which=-1):
    """The model of one of a run's checkpoints, {name: whole tensor}, whatever ranks wrote it."""
    dcp_to_torch_save(train.checkpoints(Path(out))[which], Path(out) / "whole.pt")
    return torch.load(Path(out) / "whole.pt", weights_only=False)["model"]


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def records(out):
    """The log's lines after the first, less their times."""
    return [{k: v for k, v in line.items() if k != "tokens_per_s" and v is not None}
            for line in train.read_log(Path(out) / "log.jsonl")[1:]]


def said(capsys, code, run, s):
    """What train.py says when it stops with that exit code."""
    with pytest.raises(SystemExit) as stopped:
        run(s)
    assert stopped.value.code == code
    return capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--recipe", "ufp4"], ["--recipe", "bf16", *MOE],
                                   ["--recipe", "nvfp4", "--sr", "all", "--keep-bf16", "1", *MOE]])
def test_a_run_learns_logs_and_repeats(settings, flags, capsys):
    s = settings(*flags, "--steps", "14", "--lr", "2e-2", "--sample", "8", "--eval-interval", "7")
    loss = train.train(s)
    lines, kept = records(s.out), weights(s.out)
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert lines[0]["train_loss"] == pytest.approx(math.log(256), abs=0.1)      # uniform at first
    assert loss == lines[-1]["val_loss"] < 4 and "val_loss" not in lines[-2]
    assert len(train.checkpoints(Path(s.out))) == 2
    header = train.read_log(Path(s.out) / "log.jsonl")[0]
    assert header["settings"]["recipe"] == s.recipe and header["processes"] == 1
    assert header["torch"] == torch.__version__ and header["hardware"] and "commit" in header
    if s.experts:
        assert all(1 <= line["max_load"] <= 3 for line in lines)
    assert train.train(s) == loss and same_weights(weights(s.out), kept)        # the same again
    printed = capsys.readouterr().out
    assert "--- sample" in printed and "float32 on 1 x" in printed.splitlines()[0]
    assert (Path(s.out + "-previous-1") / "log.jsonl").exists()                 # set aside


def test_overrides_reach_the_recipe_and_the_blocks(settings):
    flags = "--recipe e2m1 --rht fprop,wgrad --sr none --scale e4m3 --tiles".split()
    s = settings(*flags, "--keep-bf16", "1", "--seed", "5")
    recipe = dataclasses.replace(RECIPES["e2m1"], rht=("fprop", "wgrad"), sr=(), scale="e4m3",
                                 tiles=True, sign_seed=5)
    assert train.make_recipe(s) == recipe
    for more in [], MOE:
        model = train.GPT(settings(*flags, "--keep-bf16", "1", *more), recipe, 256)
        assert type(model.lm_head) is nn.Linear
        for block, name in zip(model.blocks, ("e2m1", "bf16")):
            assert {m.recipe.name for m in block.modules() if hasattr(m, "recipe")} == {name}
    fresh = train.parse_args(["--model", "nano", "--device", "cpu", *flags, "--seed", "3"])
    assert fresh.out == "out/nano-e2m1-scale.e4m3-rht.fprop+wgrad-sr.none-tiles.True-s3"


def test_a_recipe_of_ones_own_class_trains_and_its_row_is_recorded(settings, monkeypatch, capsys):
    @dataclasses.dataclass(frozen=True)
    class Mine(ufp4.Recipe):
        swap: tuple = ()

    flags = ["--recipe", "mine", "--seed", "5", "--sr", "dy", "--steps", "2"]
    monkeypatch.setitem(RECIPES, "mine", Mine("mine", sign_seed=2, swap=(ufp4.FORMATS["int4"],)))
    train.train(settings(*flags))
    row = train.read_log(Path(settings().out) / "log.jsonl")[0]["settings"]
    assert {k[7:]: v for k, v in row.items() if k.startswith("recipe.")} == {
        "name": "mine", "fmt": "e1m2", "scale": "fp32", "block": 16, "rht": [], "sr": ["dy"],
        "tiles": False, "rht_block": 16, "sign_seed": 7, "swap": ["int4"]}
    monkeypatch.setitem(RECIPES, "mine", Mine("mine", sign_seed=2))             # a row, edited
    error = said(capsys, 1, train.train, settings(*flags, "--resume"))
    assert "recipe.swap is [] now and was ['int4']" in error


def test_learning_rate_warms_up_and_decays(settings):
    s = settings("--steps", "100", "--warmup", "10", "--lr", "1", "--min-lr", "0.2")
    lrs = [train.learning_rate(i, s) for i in range(100)]
    assert lrs[0] == 0.1 and lrs[9] == lrs[10] == 1.0 and lrs[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in zip(lrs[10:], lrs[11:]))
    assert train.parse_args(["--model", "nano", "--device", "cpu", "--steps", "20"]).warmup == 4


def test_what_the_optimizer_gets(settings, monkeypatch):
    """The step's learning rate, decay for matrices alone, a clipped gradient, noise of its own."""
    steps, real = [], torch.optim.AdamW.step

    def step(self, closure=None):
        groups = self.param_groups
        for p, decay in ((p, g["weight_decay"]) for g in groups for p in g["params"]):
            assert decay == (0.3 if p.dim() > 1 else 0)
        norm = math.sqrt(sum(p.grad.square().sum().item() for g in groups for p in g["params"]))
        if groups[0]["lr"]:                             # DCP, too, steps, at 0
            steps.append(([g["lr"] for g in groups], norm, torch.initial_seed()))
        return real(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    flags = ["--recipe", "bf16", *MOE, "--balance-rate", "0.5", "--weight-decay", "0.3"]
    for seed, clip in ("0", "0"), ("1", "0.01"):                                # 0: no clipping
        s = settings(*flags, "--clip", clip, "--seed", seed)
        train.train(s)
        norms = [norm for _, norm, _ in steps[-8:]]
        logged = [line["grad_norm"] for line in records(s.out)]
        assert norms == pytest.approx(logged if clip == "0" else 8 * [0.01], rel=1e-5)
        assert min(logged) > 0.1
    assert [lrs for lrs, *_ in steps] == [[train.learning_rate(i, s)] * 2 for i in range(8)] * 2
    assert len({seed for *_, seed in steps}) == 16
    for name, v in weights(s.out).items():              # the loads: counted, used and cleared
        assert not name.endswith("mlp.load") or not v.any()
        assert not name.endswith("mlp.bias") or v.abs().max() >= 0.5


def test_validation_is_the_mean_of_evenly_spaced_windows(settings):
    s = settings("--recipe", "bf16", *MOE, "--grad-accum", "2")
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    model, ids = train.GPT(s, RECIPES["bf16"], 256), torch.from_numpy(tokens.astype(np.int64))
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p *= 3                                      # so that windows differ
        nll = [model(ids[None, i:i + 32], ids[None, i + 1:i + 33]).item() for i in (0, 483, 967)]
    for block in model.blocks:
        block.mlp.load.zero_()
    assert train.evaluate(model, tokens, s) == pytest.approx(sum(nll) / 3, rel=1e-5)
    assert model.training and not any(block.mlp.load.any() for block in model.blocks)


def test_attention_is_causal_and_rope_is_relative(settings):
    model = train.GPT(settings(), RECIPES["bf16"], 256)
    a = torch.randint(0, 256, (1, 32))
    b = a.clone()
    b[0, 20:] = 0
    x, y = model(a)[0], model(b)[0]
    assert torch.equal(x[:20], y[:20]) and not torch.equal(x[20:], y[20:])
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 1, 40, 16)
    scores = (train.rope(q) @ train.rope(k).mT)[0, 0]
    for d in 0, 3, 11:                                  # depend on the distance alone
        diagonal = scores.diagonal(-d)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert not torch.allclose(scores[5, 0], scores[0, 0], atol=1e-2)


def test_initial_weights_have_gpt2s_deviations(settings):
    s = settings("--dim", "64", "--hidden", "64", *MOE)
    model = train.GPT(s, RECIPES["bf16"], 256)
    model.init_weights()
    for name, p in model.named_parameters():            # 2 layers, 2 last matrices in each
        std = 0.02 / (2 if name.endswith(("proj.weight", "fc2", "fc2.weight")) else 1)
        assert (p == 1).all() if p.dim() == 1 else p.std().item() == pytest.approx(std, rel=0.15)


def test_moe_is_the_weighted_sum_of_chosen_experts(settings):
    """Against a loop over tokens; and balancing moves each bias against its load."""
    moe = train.MoE(settings("--experts", "6", "--top-k", "2"), RECIPES["bf16"])
    for p in moe.parameters():
        nn.init.normal_(p, std=0.3)
    moe.bias += torch.randn(6) * 0.1
    x, loads = torch.randn(2, 7, 32), torch.zeros(6)
    expected = moe.shared(x)
    for b, t in np.ndindex(2, 7):
        scores = torch.sigmoid(moe.router.weight @ x[b, t])
        chosen = sorted(range(6), key=lambda e: -(scores + moe.bias)[e].item())[:2]
        for e in chosen:
            gate, up = (moe.fc1[e] @ x[b, t]).chunk(2)
            gain = scores[e] / scores[chosen].sum()
            expected[b, t] += gain * (moe.fc2[e] @ (F.silu(gate) * up))
            loads[e] += 1
    assert torch.allclose(moe(x), expected, atol=1e-5) and torch.equal(moe.load, loads)
    bias, mean = moe.bias.clone(), loads.mean()
    assert moe.balance(1e-3).item() == pytest.approx((loads.max() / mean).item())
    assert torch.allclose(moe.bias - bias, 1e-3 * torch.sign(mean - loads), atol=1e-7)
    assert not moe.load.any()


def test_batches_are_random_windows_that_ranks_and_parts_share_out(settings, monkeypatch):
    s = settings("--batch-size", "12")
    shards = [np.arange(n, dtype=np.uint16) + 1000 * i for i, n in enumerate((400, 97, 330))]
    x, y = train.get_batch(shards, s, 3)
    assert torch.equal(y, x + 1) and x.shape == (12, 32)                # targets: the next tokens
    assert torch.equal(x, train.get_batch(shards, s, 3)[0])
    assert not torch.equal(x, train.get_batch(shards, s, 4)[0])
    other = settings("--batch-size", "12", "--seed", "1")
    assert not torch.equal(x, train.get_batch(shards, other, 3)[0])
    starts = torch.cat([train.get_batch(shards, s, step)[0][:, 0] for step in range(1500)])
    windows = [1000 * i + j for i, n in enumerate((400, 97, 330)) for j in range(n - 32)]
    assert sorted(set(starts.tolist())) == windows                      # each window of each file
    monkeypatch.setattr(train, "WORLD", 3)
    s.grad_accum, rows = 2, []
    for part, rank in np.ndindex(2, 3):
        monkeypatch.setattr(train, "RANK", rank)
        rows.append(train.get_batch(shards, s, 3, part)[0])
    assert torch.equal(torch.cat(rows), x)


@pytest.mark.parametrize("model,total,active", [
    ("nano", 0.87e6, 0.87e6), ("nano-moe", 2.84e6, 0.93e6), ("small", 25.97e6, 25.97e6),
    ("small-moe", 151.5e6, 26.1e6), ("dense-1.5b", 1.5e9, 1.5e9), ("moe-7.9b", 7.9e9, 1.3e9),
    ("moe-124b", 124e9, 5.1e9)])
def test_presets_have_their_size_within_a_percent(model, total, active):
    """The last three are the paper's. Against a sum by hand, too."""
    s = train.parse_args(["--model", model, "--device", "cpu"])
    c, h, e, v = s.dim, s.hidden, s.experts, 50257 if s.data == "fineweb" else 256
    layer = [4 * c * c + 2 * c + 3 * c * h * (k + 1 if e else 1) + c * e for k in (e, s.top_k)]
    n, a = (s.layers * x + c + 2 * v * c for x in layer)
    assert n == pytest.approx(total, rel=0.01) and a == pytest.approx(active, rel=0.01)
    with torch.device("meta"):
        assert train.counts(train.GPT(s, RECIPES["ufp4"], v), s)[:2] == (n, a)


def test_flops_are_what_torch_counts(settings):
    """Of the matrix products of a step (torch's counter leaves experts' and attention's out)."""
    s = settings("--dim", "64", "--hidden", "128", "--seq-len", "64", *MOE)
    model, tokens = train.GPT(s, RECIPES["bf16"], 256), torch.randint(0, 256, (2, 64))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    aten = torch.ops.aten
    counted = sum(counter.get_flop_counts()["Global"].get(op, 0) for op in (aten.mm, aten.addmm))
    norms, attention = 6 * 5 * 64, 2 * 6 * 64 * 64
    experts = 2 * 6 * s.top_k * 3 * 64 * 128
    assert 128 * (train.counts(model, s)[2] - norms - attention - experts) == counted


def test_dtype_follows_the_hardware_and_mfu_its_peak(settings, monkeypatch):
    monkeypatch.setattr(train, "hardware", lambda device: ("Tesla T4", False))
    assert train.parse_args(["--device", "cpu"]).dtype == "float32"
    monkeypatch.setattr(train, "hardware", lambda device: ("NVIDIA H100 80GB HBM3", True))
    assert train.parse_args(["--device", "cpu"]).dtype == "bfloat16"
    s = settings("--recipe", "bf16", "--dtype", "bfloat16", "--steps", "2")
    seen, real = set(), F.linear
    monkeypatch.setattr(F, "linear", lambda *args: seen.add(real(*args).dtype) or real(*args))
    train.train(s)
    assert seen == {torch.bfloat16}
    line = train.read_log(Path(s.out) / "log.jsonl")[-1]
    flops = train.counts(train.GPT(s, RECIPES["bf16"], 256), s)[2]
    assert line["mfu"] == pytest.approx(flops * line["tokens_per_s"] / 989e12, rel=0.01)


def test_rematerialization_draws_the_same_noise(settings, tmp_path):
    """Noise in the forward pass (--sr all) and in the backward: the same run, bit for bit."""
    flags = ["--recipe", "ufp4", "--sr", "all", *MOE, "--grad-accum", "2", "--steps", "3"]
    plain, remat = (settings(*flags, *more, "--out", str(tmp_path / "out" / name))
                    for name, more in (("plain", []), ("remat", ["--remat"])))
    train.train(plain), train.train(remat)
    assert same_weights(weights(plain.out), weights(remat.out))
    assert records(plain.out) == records(remat.out)


def test_a_damaged_checkpoint_is_refused_and_the_one_before_goes_on(settings, capsys):
    s = settings("--recipe", "bf16")
    train.train(s)
    whole = weights(s.out)
    older, newer = train.checkpoints(Path(s.out))
    for file in newer / "__0_0.distcp", newer / ".metadata":
        content = file.read_bytes()
        for damage in content[:len(content) // 2], content[:-1], b"", b"not a checkpoint", None:
            file.unlink()
            if damage is not None:
                file.write_bytes(damage)
            error = said(capsys, 1, train.train, settings("--recipe", "bf16", "--resume"))
            assert re.search(f"{newer.name} is .*damaged.* goes on from .*{older.name}", error)
            file.write_bytes(content)
    shutil.rmtree(newer)
    shutil.copytree(older, older.with_name("ckpt-best"))        # a user's own: left alone
    train.train(settings("--recipe", "bf16", "--resume"))
    assert [p.name for p in train.checkpoints(Path(s.out))] == [older.name, newer.name]
    assert same_weights(weights(s.out), whole) and older.with_name("ckpt-best").exists()


def test_resume_refuses_another_run_and_branch_another_model(settings, text, tmp_path, capsys):
    bf16 = ["--recipe", "bf16", "--data", str(tmp_path / "mine.txt")]
    (tmp_path / "mine.txt").write_text(text.read_text())
    refused = lambda *flags: said(capsys, 1, train.train, settings(*bf16, *flags))
    assert "no checkpoint in" in refused("--resume")
    train.train(settings(*bf16))
    start = str(train.checkpoints(tmp_path / "out/run")[0])                     # of step 6
    assert "dim is 64 now and was 32" in refused("--resume", "--dim", "64")
    assert "recipe.fmt is 'e1m2' now and was None" in refused("--resume", "--recipe", "ufp4")
    assert "lr is 0.5 now" in refused("--branch", start, "--lr", "0.5")
    assert "nothing is missing" in refused("--branch", str(tmp_path / "nothing"))
    for recipe in "bf16", "e2m1":
        out = ["--out", str(tmp_path / "out" / recipe)]
        train.train(settings(*bf16, *out, "--branch", start, "--recipe", recipe))
        assert [line["step"] for line in records(tmp_path / "out" / recipe)] == [7, 8]
        same = same_weights(weights(tmp_path / "out" / recipe), weights(tmp_path / "out/run"))
        assert same == (recipe == "bf16")
    (tmp_path / "mine.txt").write_text(text.read_text().upper())
    assert "data is 'mine-" in refused("--resume")                              # another text


def test_loss_error_is_relative_to_the_bf16_run_beside(settings, tmp_path, capsys):
    def run(name, *flags):
        return train.train(settings("--out", str(tmp_path / "out" / name), *flags))

    bf16 = run("b", "--recipe", "bf16")
    (tmp_path / "out/another").mkdir()
    (tmp_path / "out/another/log.jsonl").write_text("[1, 2]\n")                 # another program's
    run("../start", "--recipe", "e2m1")
    start = str(train.checkpoints(tmp_path / "start")[0])
    run("a", "--recipe", "bf16", "--branch", start)                             # in part in 4 bits
    capsys.readouterr()
    loss = run("e", "--recipe", "e2m1")
    assert f"loss error {(loss - bf16) / bf16:+.2%}" in capsys.readouterr().out
    run("e2", "--recipe", "e2m1", "--seed", "2")
    assert "for its loss error, finish a run of --recipe bf16" in capsys.readouterr().out
    log = tmp_path / "out/b/log.jsonl"
    log.write_text("".join(log.open().readlines()[:5]))                         # stopped at step 4
    mine = train.read_log(tmp_path / "out/e/log.jsonl")[0]["settings"]
    assert train.bf16_loss(tmp_path / "out/e", mine) is None


def test_a_loss_that_is_not_finite_stops_the_run_unsaved(settings, monkeypatch, capsys):
    s, real, calls = settings("--recipe", "bf16", "--steps", "6"), train.GPT.forward, []

    def forward(self, tokens, targets=None):
        calls.append(self.training)
        return real(self, tokens, targets) * (math.nan if bad() else 1)

    monkeypatch.setattr(train.GPT, "forward", forward)
    bad = lambda: sum(calls) == 5                       # in the fifth step
    error = said(capsys, 3, train.train, s)
    assert "step 5: the loss is nan" in error and "ckpt-0000004" in error
    assert [line["step"] for line in records(s.out)] == [1, 2, 3, 4]
    calls.clear()
    bad = lambda: not calls[-1]                         # in evaluation
    assert "step 4: the validation loss is nan" in said(capsys, 3, train.train, s)
    assert [p.name for p in train.checkpoints(Path(s.out))] == ["ckpt-0000002"]


@pytest.mark.parametrize("flags,code,message", [
    ("--recipe fp4", 2, "invalid choice: 'fp4'"), ("--steps 0", 2, "at least 1, got 0"),
    ("--lr nan", 2, "finite and at least 0, got nan"), ("--device warp", 2, "can't be used"),
    ("--rht forward", 2, "some of fprop, dgrad, wgrad"), ("--dim 40", 2, "in_features = 40"),
    ("--heads 3", 2, "--dim 32 must split into --heads 3"),
    ("--experts 4 --top-k 5", 2, "--top-k 5 must be from 1 to --experts 4"),
    ("--grad-accum 3", 2, "must be a multiple of 1 processes x --grad-accum 3"),
    ("--recipe bf16 --fmt e2m1", 2, "--fmt has no effect on recipe bf16"),
    ("--data nothing.txt", 1, "no data set or file is called 'nothing.txt'"),
    ("--seq-len 20000", 1, "fewer than a context and its target, 20001"),
    ("--out /dev/null/run", 1, "/dev/null/run")])
def test_bad_input_is_one_clear_sentence(settings, text, capsys, flags, code, message):
    common = [*TINY, "--data", str(text), "--out", os.devnull]
    error = said(capsys, code, train.main, [*common, *flags.split()])
    assert message in error and error.startswith("train.py: ") and error.count("\n") == 1


def test_the_commit_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "__file__", str(tmp_path / "train.py"))
    assert train.commit() is None
    (tmp_path / "train.py").write_text("1")
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=b"]
    for command in ["init", "-q"], ["add", "train.py"], ["commit", "-qm", "c"], ["tag", "v1"]:
        subprocess.run([*git, *command], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    assert train.commit() == head
    (tmp_path / "train.py").write_text("2")
    assert train.commit() == head + "-dirty"


# --------------------------------------------------------------------------------------------------
# train.py in processes of its own

KILLED_IN_SAVE = """
import os
real = train.dcp.save
def save(state, checkpoint_id, **kwargs):
    if state["step"] == 4 and train.RANK == train.WORLD - 1:
        (checkpoint_id / "__0_0.distcp").parent.mkdir(exist_ok=True)
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        os.kill(os.getpid(), 9)
    real(state, checkpoint_id=checkpoint_id, **kwargs)
train.dcp.save = save
"""
SEEDS = """
import torch
real = torch.optim.AdamW.step
def step(self, closure=None):
    if self.param_groups[0]["lr"]:      # DCP, too, steps, at 0
        print(torch.initial_seed(), file=open(f"seeds-{train.RANK}", "a"))
    return real(self, closure)
torch.optim.AdamW.step = step
"""


def start_train(flags, text, tmp_path, preamble="", ranks=1):
    """train.py on `ranks` CPU processes, with something changed."""
    (tmp_path / "run.py").write_text(
        f"import functools, sys\nsys.path.insert(0, {str(HERE)!r})\nimport train\n{preamble}\n"
        "train.torch.compiler.set_stance('force_eager')\n"
        f"train.prepare = functools.partial(train.prepare, root={str(tmp_path / 'data')!r})\n"
        f"train.main({[*TINY, '--data', str(text), *flags]!r})\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen([sys.executable, *(torchrun if ranks > 1 else []), tmp_path / "run.py"],
                            cwd=tmp_path, text=True, stderr=subprocess.PIPE)


def test_killed_and_resumed_ends_with_the_same_weights(settings, text, tmp_path):
    """kill -9 in the middle of a save, two steps after the last; with noise, bit for bit."""
    out, whole = tmp_path / "out/killed", settings(*MOE, "--out", str(tmp_path / "out/whole"))
    train.train(whole)
    process = start_train([*MOE, "--out", str(out)], text, tmp_path, KILLED_IN_SAVE)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == -signal.SIGKILL, error
    assert [p.name for p in train.checkpoints(out)] == ["ckpt-0000002"]
    assert records(out) == records(whole.out)[:4]
    with open(out / "log.jsonl", "a") as log:
        log.write('{"step": 5, "tra')                   # as a kill in its midst would leave it
    train.train(settings(*MOE, "--out", str(out), "--resume"))
    assert same_weights(weights(out), weights(whole.out)) and records(out) == records(whole.out)


def test_ctrl_c_saves_and_says_how_to_go_on(text, tmp_path):
    out = tmp_path / "out"
    flags = ["--recipe", "bf16", "--steps", "100000", "--save-interval", "100000"]
    process = start_train([*flags, "--out", str(out)], text, tmp_path)
    while not (out / "log.jsonl").exists() or len(train.read_log(out / "log.jsonl")) < 4:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 130 and "and saved; add --resume" in error
    assert int(train.checkpoints(out)[-1].name[5:]) == records(out)[-1]["step"]


def test_two_processes_are_one_with_two_parts_also_after_losing_one(settings, text, tmp_path):
    """Bit for bit, 3 experts on 2 ranks included: the halves of a batch are multiplied and summed
    alike, whoever computes them. (The gradient's norm is summed in another order: no clipping.)
    When a rank is killed, the other stops and says so, and two go on."""
    flags = [*MOE, "--recipe", "ufp4", "--sr", "none", "--clip", "0"]
    one = settings(*flags, "--grad-accum", "2", "--out", str(tmp_path / "one"))
    out = tmp_path / "two"
    train.train(one)
    for more, preamble in ([], KILLED_IN_SAVE), (["--resume"], SEEDS):
        process = start_train([*flags, *more, "--out", str(out)], text, tmp_path, preamble, ranks=2)
        error = process.communicate(timeout=300)[1]
        assert bool(process.returncode) == (not more), error
        if not more:
            assert error.count("train.py: another process has stopped") == 1
            assert [p.name for p in train.checkpoints(out)] == ["ckpt-0000002"]
    assert same_weights(weights(out), weights(one.out))
    for a, b in zip(records(out), records(one.out), strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    seeds = [(tmp_path / f"seeds-{rank}").read_text().split() for rank in (0, 1)]
    assert len({*seeds[0], *seeds[1]}) == len(seeds[0] + seeds[1]) == 12


def test_a_rank_that_meets_what_rank_0_meets_leaves_in_silence(settings, monkeypatch, capsys):
    monkeypatch.setattr(train, "RANK", 1)
    assert said(capsys, 0, train.parse_args, ["--steps", "0"]) == ""


# --------------------------------------------------------------------------------------------------
# data/prepare.py


def test_python_data_is_the_standard_library_split_by_file(tmp_path):
    d = prepare.prepare("python", root=tmp_path)
    train_text, val_text = (bytes(prepare.read_tokens(path)[:].astype(np.uint8)).decode()
                            for path in d.train + d.val)
    source = Path(dataclasses.__file__).read_text()     # a file goes to one side whole
    assert (source in train_text) != (source in val_text)
    assert 5e6 < len(train_text) and 0.02 < len(val_text) / len(train_text) < 0.1


def test_own_text_is_bytes_and_follows_its_content(tmp_path):
    path = tmp_path / "my.txt"
    for content in "naïve <|endoftext|> ☃\n".encode() * 50, bytes(range(256)) * 4:
        path.write_bytes(content)
        d = prepare.prepare(str(path), root=tmp_path)
        parts = [prepare.read_tokens(p[0]).tolist() for p in (d.train, d.val)]
        assert bytes(parts[0] + parts[1]) == content and len(parts[0]) == len(content) * 9 // 10
        assert prepare.encoding(d.encoding).decode_bytes(parts[0] + parts[1]) == content
    stamp = d.val[0].stat().st_mtime_ns
    assert prepare.prepare(str(path), root=tmp_path).val[0].stat().st_mtime_ns == stamp # made once
    for nothing in b"", b" \n", b"a":
        path.write_bytes(nothing)
        with pytest.raises(ValueError, match="holds no text"):
            prepare.prepare(str(path), root=tmp_path)


def test_a_token_file_that_is_damaged_or_of_another_vocabulary_is_named(tmp_path):
    path = tmp_path / "a.bin"
    prepare.write_tokens(path, [1, 2, 50257, 3])
    assert prepare.read_tokens(path).tolist() == [1, 2, 50257, 3]
    with pytest.raises(ValueError, match="a.bin has a token 50257, beyond the vocabulary of 50257"):
        prepare.read_tokens(path, 50257)
    whole = path.read_bytes()
    for damaged, message in (whole[:-2], "damaged"), (b"\0" + whole[1:], "not a"), (b"", "not a"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"a.bin is {message}"):
            prepare.read_tokens(path)


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files`, with byte ranges unless `ranges` is off; breaks off after `limit` bytes."""
    files, ranges, limit, asked = {}, True, None, []

    def do_GET(self):
        body, start = self.files.get(self.path), 0
        self.asked.append(self.headers.get("Range"))
        if body is None:
            return self.send_error(404)
        if self.ranges and (r := self.headers.get("Range")):
            start = int(r.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:][:self.limit])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Server,), {"files": {}, "asked": []})
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    handler.url = f"http://127.0.0.1:{httpd.server_port}"
    yield handler
    httpd.shutdown()
    httpd.server_close()


def test_fineweb_downloads_resumes_and_checks(server, tmp_path):
    prepare.write_tokens(tmp_path / "shard.bin", np.arange(200_000) % 50257)
    body = (tmp_path / "shard.bin").read_bytes()
    server.files.update({"/fineweb_val_000000.bin": body, "/fineweb_train_000001.bin": body})
    server.limit = 150_000
    with pytest.raises(OSError, match="broke off|could not download"):
        prepare.prepare("fineweb", root=tmp_path, url=server.url)
    path = tmp_path / "fineweb/fineweb_val_000000.bin"
    kept = path.with_name(path.name + ".part").stat().st_size
    assert not path.exists() and 0 < kept <= 150_000    # never half there under its name
    server.limit = None
    d = prepare.prepare("fineweb", root=tmp_path, url=server.url)
    assert f"bytes={kept}-" in server.asked and d.vocab_size == 50257
    assert d.val[0].read_bytes() == d.train[0].read_bytes() == body
    count = len(server.asked)
    prepare.prepare("fineweb", root=tmp_path, url=server.url)
    assert len(server.asked) == count                   # nothing is fetched twice
    for ranges, left in (False, body[:500]), (True, body + b"more"), (True, body):
        server.ranges = ranges
        path.with_name("a.bin.part").write_bytes(left)
        prepare.download(f"{server.url}/fineweb_val_000000.bin", path.with_name("a.bin"))
        assert path.with_name("a.bin").read_bytes() == body


def test_a_wrong_or_missing_file_says_what_to_do(server, tmp_path):
    server.files["/bad.bin"] = b"<html>please log in</html>" * 100
    with pytest.raises(OSError, match="not what it should be"):
        prepare.download(f"{server.url}/bad.bin", tmp_path / "bad.bin", prepare.read_tokens)
    assert not list(tmp_path.glob("bad.bin*"))
    for url, message in (f"{server.url}/gone", "404.*--data"), ("http://127.0.0.1:9/x", "--data"):
        with pytest.raises(OSError, match=message):
            prepare.download(url, tmp_path / "x.bin")
