"""Pretrain a small GPT, dense or mixture-of-experts, in 4 bits or in BF16.

    python train.py --recipe ufp4                   # the default: nano on a CPU (minutes), small on a GPU
    python train.py --recipe bf16                   # the baseline; run first, later runs print their loss error to it
    python train.py --recipe e2m1 --model nano-moe --seed 1
    python train.py --recipe ufp4 --rht wgrad --sr none                 # an ablation
    python train.py --recipe ufp4 --resume          # goes on after Ctrl-C or a crash
    torchrun --nproc-per-node 8 train.py --model dense-1.5b         # many GPUs, or on a CPU many processes
    python train.py --model moe-7.9b --dry-run --gpus 64            # what that would take

A recipe (see ufp4.py) governs every linear layer of the blocks. Embedding, LM head, router and norms stay in high
precision. On a GPU everything computes in BF16 under autocast; on a CPU in float32, so that "bf16" names the recipe
without quantization rather than the arithmetic. (--dtype bfloat16 is faster on CPUs with instructions for it.)

A run writes to OUT: log.jsonl, the settings in its first line and one line for each logged step after it, and
checkpoints ckpt-STEP, directories of torch.distributed.checkpoint, of which the last two are kept.

Under torchrun the model is sharded with FSDP2 (fully_shard): a rank keeps a slice of each parameter, its gradient and
its optimizer state, gathers a block's weights to compute the block, and multiplies its own share of the batch.
- The weights are gathered in float32, at twice the traffic of BF16, because the quantizer must see what it sees in a
  single process, the float32 weight: then all get the same 4 bits. "Mixed precision" is the autocast after that.
- Blocks along tokens (wgrad), and the amax of a tensor for two-level (E4M3) scales, are those of what one GEMM
  multiplies: all of W; of X and dY the rank's own rows. Each product is scaled and unscaled by its own amax, so no rank
  need know another's. But for noise and the order of sums over ranks, N processes compute what one does with
  --grad-accum N.
- Noise for stochastic rounding is seeded by (seed, step, rank) at each step: ranks differ, a resumed run repeats, and a
  checkpoint need not hold the random states of a certain number of processes.
"""
import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import math
import os
import platform
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import ufp4
from data.prepare import encoding, prepare, read_tokens, vocabulary

# ---------------------------------------------------------------------------------------------------------------
# Processes: one, or those that torchrun started

RANK, WORLD, LOCAL_RANK = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
patient = None                  # a process group that waits for disks and downloads; None in a single process


def connect(s):
    """Join the other processes: gloo for CPU tensors, NCCL for GPUs'. A rank that waits a minute for another gives up,
    unless it waits on the group `patient`; there too, a rank whose connection closes is noticed at once."""
    global patient
    if s.device.startswith("cuda"):
        torch.cuda.set_device(s.device)
    try:
        dist.init_process_group(timeout=datetime.timedelta(minutes=1))
        patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=2))
    except (RuntimeError, ValueError) as e:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ValueError(f"rank {RANK} of {WORLD} can't join the others at {where}: {str(e).splitlines()[0]}") from e


def all_sum(*numbers, device):
    """Each number summed over the ranks, in float64."""
    t = torch.tensor(numbers, dtype=torch.float64, device=device)
    if WORLD > 1:
        dist.all_reduce(t)
    return t.tolist()


def on_rank_0(f):
    """Call f on rank 0 while the others wait. If it can't be done, all raise the same."""
    failed = [None]
    try:
        if RANK == 0:
            f()
    except (ValueError, OSError) as e:
        failed = [e]
    if WORLD > 1:
        dist.broadcast_object_list(failed, group=patient)
    if failed[0]:
        raise failed[0]


def local(p):
    """The rank's own rows of a parameter."""
    return p.to_local() if isinstance(p, dist.tensor.DTensor) else p


# ---------------------------------------------------------------------------------------------------------------
# The model. Shapes: B sequences of T tokens, M = B T, C = dim, E experts of hidden width H, k experts a token


def rope(x, base=10000.0):
    """Rotary position embedding (arXiv 2104.09864) of x (B, heads, T, D): pairs (i, i + D/2) turn by t base^(-2i/D)."""
    half = x.shape[-1] // 2
    freq = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Attention(nn.Module):
    def __init__(self, s, recipe):
        super().__init__()
        self.heads = s.heads
        self.qkv = ufp4.Linear(s.dim, 3 * s.dim, bias=False, recipe=recipe)
        self.proj = ufp4.Linear(s.dim, s.dim, bias=False, recipe=recipe)

    def forward(self, x):                                                   # (B, T, C)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)        # (B, heads, T, D) each
        y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """fc2(silu(gate) * up), gate and up from one GEMM (arXiv 2002.05202)."""

    def __init__(self, dim, hidden, recipe):
        super().__init__()
        self.fc1 = ufp4.Linear(dim, 2 * hidden, bias=False, recipe=recipe)
        self.fc2 = ufp4.Linear(hidden, dim, bias=False, recipe=recipe)

    def forward(self, x):
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)


class MoE(nn.Module):
    """Fine-grained experts beside a shared one (DeepSeekMoE, arXiv 2401.06066). Dropless: tokens are sorted by expert
    and each expert multiplies what it gets, however many. Balanced without an auxiliary loss (arXiv 2408.15664): a
    bias on each expert's score, used for the choice alone, goes up by --balance-rate when the expert got less than its
    share, and else down. (Its authors use a rate of 1e-3; our runs are too short for that.)
    Under --remat each token counts twice, which changes neither the sign of a difference nor a ratio."""

    def __init__(self, s, recipe):
        super().__init__()
        self.top_k, self.recipe = s.top_k, recipe
        self.router = nn.Linear(s.dim, s.experts, bias=False)
        self.fc1 = nn.Parameter(torch.empty(s.experts, 2 * s.hidden, s.dim))
        self.fc2 = nn.Parameter(torch.empty(s.experts, s.dim, s.hidden))
        self.shared = SwiGLU(s.dim, s.hidden, recipe)
        self.register_buffer("bias", torch.zeros(s.experts))
        self.register_buffer("load", torch.zeros(s.experts))                # tokens each expert got since balance()
        ufp4.check_features(2 * s.hidden, s.dim, recipe, "an expert's fc1")
        ufp4.check_features(s.dim, s.hidden, recipe, "an expert's fc2")

    def route(self, x):
        """x (M, C) -> gates (M, k), the weights of a token's experts; order (M k,), slots sorted by expert; offs (E,),
        where each expert's slots end. Costs a sort of M k choices and a binary search an expert."""
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(self.router(x.float()))                  # (M, E), float32
        chosen = (scores + self.bias).topk(self.top_k, -1).indices          # (M, k)
        gates = scores.gather(-1, chosen)
        expert, order = chosen.flatten().sort(stable=True)
        offs = torch.searchsorted(expert, torch.arange(len(self.bias), device=x.device), right=True).to(torch.int32)
        if self.training:
            self.load += torch.diff(offs, prepend=offs.new_zeros(1))
        return (gates / gates.sum(-1, keepdim=True)).to(x.dtype), order, offs

    def forward(self, x):                                                   # (B, T, C)
        flat = x.flatten(0, 1)                                              # (M, C)
        gates, order, offs = self.route(flat)
        tokens = flat[order // self.top_k]                                  # (M k, C)
        gate, up = ufp4.linear(tokens, self.fc1, self.recipe, offs).chunk(2, -1)
        out = ufp4.linear(F.silu(gate) * up, self.fc2, self.recipe, offs)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        out = out[back].unflatten(0, gates.shape)                           # (M, k, C), the tokens' own order
        return self.shared(x) + (out * gates.unsqueeze(-1)).sum(1).view(x.shape)

    @torch.no_grad()
    def balance(self, rate):
        """Once a step: move the biases by the load of all ranks, clear the counts, return max load / mean load (1 is
        perfect balance)."""
        if WORLD > 1:
            dist.all_reduce(self.load)
        mean = self.load.mean()
        worst = self.load.max() / mean
        self.bias += rate * torch.sign(mean - self.load)
        self.load.zero_()
        return worst


class Block(nn.Module):
    def __init__(self, s, recipe):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)
        self.attn = Attention(s, recipe)
        self.mlp = MoE(s, recipe) if s.experts else SwiGLU(s.dim, s.hidden, recipe)
        self.remat = s.remat

    def forward(self, x):
        """With --remat only x is kept, and the backward pass computes the rest again, with the same noise."""
        if self.remat and self.training:
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)

    def layers(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder-only transformer: pre-norm RMSNorm, RoPE, causal attention, SwiGLU or MoE, no biases, untied head."""

    def __init__(self, s, recipe, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, s.dim)
        self.blocks = nn.ModuleList(Block(s, recipe if i < s.layers - s.keep_bf16 else ufp4.RECIPES["bf16"])
                                    for i in range(s.layers))
        self.norm = nn.RMSNorm(s.dim)
        self.lm_head = nn.Linear(s.dim, vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """A seed gives the same weights on any number of processes: each parameter in turn is drawn whole on the CPU,
        and a rank keeps its rows of it. So no rank ever holds more than one whole parameter."""
        for name, p in self.named_parameters():
            if p.dim() > 1:                             # what writes to the residual stream starts smaller, as in GPT-2
                last = name.endswith(("proj.weight", "fc2.weight", "fc2"))
                std = 0.02 / math.sqrt(2 * len(self.blocks)) if last else 0.02
                whole = nn.init.normal_(torch.empty(p.shape), std=std)
                rows = -(-len(whole) // WORLD) * RANK if isinstance(p, dist.tensor.DTensor) else 0
                local(p).copy_(whole[rows:rows + len(local(p))])
            else:
                local(p).fill_(1.0)
        for b in self.buffers():
            b.zero_()

    def forward(self, tokens, targets=None):
        """tokens, targets (B, T) int64 -> logits (B, T, V), or with targets the mean loss in nats a token, float32."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens, n, context, generator, temperature=0.8):
        """Sample n tokens after tokens (1, T)."""
        for _ in range(n):
            p = torch.softmax(self(tokens[:, -context:])[:, -1].float() / temperature, -1)
            tokens = torch.cat((tokens, torch.multinomial(p, 1, generator=generator)), 1)
        return tokens


# ---------------------------------------------------------------------------------------------------------------
# Settings: presets, flags

PRESETS = {
    #                  layers    dim       heads     hidden       experts      top_k      context        a step
    "nano":       dict(layers=4, dim=128, heads=4, hidden=352, experts=0, top_k=0, seq_len=256, batch_size=8,
                       steps=800, lr=3e-3, warmup=80),
    "nano-moe":   dict(layers=4, dim=128, heads=4, hidden=96, experts=16, top_k=3, seq_len=256, batch_size=8,
                       steps=800, lr=3e-3, warmup=80),
    "small":      dict(layers=8, dim=512, heads=8, hidden=1408, experts=0, top_k=0, seq_len=1024, batch_size=32,
                       steps=2000, lr=1e-3, warmup=200),
    "small-moe":  dict(layers=8, dim=512, heads=8, hidden=352, experts=32, top_k=3, seq_len=1024, batch_size=32,
                       steps=2000, lr=1e-3, warmup=200),
    # The paper's three sizes, at GPT-2's vocabulary of 50257, embedding and head included: 1.50B; 7.93B, 1.30B of them
    # active; 123.6B, 5.11B active. The paper gives the totals; shapes and schedules are ours.
    "dense-1.5b": dict(layers=24, dim=2048, heads=16, hidden=6016, experts=0, top_k=0, seq_len=4096, batch_size=256,
                       steps=30_000, lr=4e-4, warmup=2000, data="fineweb"),
    "moe-7.9b":   dict(layers=24, dim=2400, heads=25, hidden=320, experts=128, top_k=8, seq_len=4096, batch_size=512,
                       steps=50_000, lr=3e-4, warmup=2000, data="fineweb"),
    "moe-124b":   dict(layers=30, dim=4096, heads=32, hidden=1024, experts=320, top_k=6, seq_len=4096, batch_size=2048,
                       steps=60_000, lr=2e-4, warmup=2000, data="fineweb"),
}
RESUMABLE = ("out", "device", "steps", "warmup", "eval_interval", "save_interval", "log_interval", "sample", "compile",
             "branch", "grad_accum", "remat")
RECIPE_FLAGS = ("recipe", "fmt", "scale", "block", "rht", "sr", "two_d", "rht_block", "swap", "alpha", "keep_bf16")


class Diverged(ValueError):
    """Training has met a number that is not finite."""


def positive(text):
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {n}")
    return n


def natural(text):
    if (n := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {n}")
    return n


def real(text):
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number, at least 0, got {text}")
    return value


def some_of(names):
    """An argument type: "none", "all", or a comma-separated choice of names."""
    def parse(text):
        chosen = {"none": (), "all": names}.get(text, tuple(text.split(",")))
        if not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"takes none, all, or some of {','.join(names)}; got {text}")
        return tuple(n for n in names if n in chosen)
    return parse


class Parser(argparse.ArgumentParser):
    def error(self, message):
        only_rank_0()
        super().error(message)


def only_rank_0():
    """Before an error message. Rank 0 goes ahead and exits, and torchrun then ends the ranks that wait here to say the
    same; one that waits in vain has trouble of its own, and speaks."""
    time.sleep(5 if RANK else 0)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):                 # "(default: None)" would say nothing
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def parse_args(argv=None):
    p = Parser(description="Pretrain a GPT under a 4-bit recipe.", formatter_class=Help)
    on_gpu = torch.cuda.is_available()
    add = p.add_argument
    add("--recipe", default="ufp4", choices=ufp4.RECIPES, help="what is quantized how; see RECIPES in ufp4.py")
    add("--model", default="small" if on_gpu else "nano", choices=PRESETS, help="preset: sizes, steps, learning rate")
    add("--data", default=argparse.SUPPRESS, help="python, shakespeare, fineweb, or a text file (default: python; for "
        "the paper's sizes fineweb)")
    add("--out", help="directory for log and checkpoints, of one run at a time (default: out/MODEL-RECIPE-sSEED, with "
        "any overrides)")
    add("--resume", action="store_true", help="go on from the last checkpoint in OUT")
    add("--branch", metavar="CKPT", help="start from this checkpoint of a run that may differ in its recipe; with "
        "--resume, which goes on from the run's own, it is not read")
    add("--seed", type=natural, default=0, help="of weights, batches and stochastic rounding")
    add("--device", default="cuda" if on_gpu else "cpu", help="cpu, cuda, cuda:1, ...")
    add("--dtype", choices=("float32", "bfloat16"), help="of GEMMs, by autocast (default: bfloat16, on a CPU float32)")
    add("--compile", action="store_true", help="torch.compile each block (the quantizer is compiled in any case)")
    add("--grad-accum", type=positive, default=1, help="parts that a rank's share of the batch is computed in")
    add("--remat", action="store_true", help="keep a block's input only, and compute its activations again (slower)")
    add("--dry-run", action="store_true", help="print sizes, memory and the speed to hope for; train nothing")
    add("--gpus", type=positive, help="with --dry-run: on how many GPUs")
    g = p.add_argument_group("sizes and schedule (default: the preset's)")
    for name, kind, text in (
            ("layers", positive, "transformer blocks"), ("dim", positive, "width of the residual stream"),
            ("heads", positive, "attention heads"), ("hidden", positive, "width inside the MLP, or inside each expert"),
            ("experts", natural, "experts a layer; 0: dense"), ("top-k", natural, "experts a token goes to"),
            ("seq-len", positive, "context, in tokens"), ("batch-size", positive, "sequences a step"),
            ("steps", positive, "optimizer steps"), ("lr", real, "peak learning rate"),
            ("warmup", natural, "steps of linear warm-up; the preset's is cut to a fifth of --steps")):
        g.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text)
    add("--min-lr", type=real, default=0.1, help="final learning rate, as a fraction of the peak; cosine decay")
    add("--weight-decay", type=real, default=0.1, help="AdamW, on matrices")
    add("--beta1", type=real, default=0.9, help="AdamW")
    add("--beta2", type=real, default=0.95, help="AdamW")
    add("--clip", type=real, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--balance-rate", type=real, default=1e-2, help="MoE: what a step adds to, or takes from, an expert's bias")
    add("--eval-interval", type=positive, default=100, help="steps between validations")
    add("--eval-windows", type=positive, default=128, help="fixed validation windows of SEQ_LEN tokens")
    add("--save-interval", type=positive, default=100, help="steps between checkpoints")
    add("--log-interval", type=positive, default=10, help="steps between lines of the log")
    add("--sample", type=natural, default=200, help="tokens of text to print at the end")
    g = p.add_argument_group("overrides of the recipe's fields (default: the recipe's)")
    g.add_argument("--fmt", help="element format: e2m1, e1m2, int4, a part as in e2m1-max3, a choice as in e2m1+e1m2")
    g.add_argument("--scale", choices=ufp4.SCALES, help="block scales")
    g.add_argument("--block", type=positive, help="values that share a scale")
    g.add_argument("--rht", type=some_of(ufp4.GEMMS), help="GEMMs with RHT: none, all, or e.g. fprop,wgrad")
    g.add_argument("--rht-block", type=positive, help="size of the Hadamard matrix")
    g.add_argument("--sr", type=some_of(ufp4.OPERANDS), help="operands with SR: none, all, or e.g. x,dy")
    g.add_argument("--swap", type=lambda t: tuple(t.split(",")), help="other formats for some GEMMs or operands, e.g. "
                   "fprop:e2m1 or x:e2m1,w:e2m1")
    g.add_argument("--alpha", type=real, help="slope to give each operand rounded to nearest; 1 undoes shrinkage")
    g.add_argument("--two-d", action=argparse.BooleanOptionalAction, help="block x block scales for weights")
    add("--keep-bf16", type=natural, default=0, help="leave this many of the last blocks unquantized")
    s = p.parse_args(argv)
    preset = {"data": "python", **PRESETS[s.model]}
    preset["warmup"] = min(preset["warmup"], getattr(s, "steps", preset["steps"]) // 5)
    s = argparse.Namespace(**preset | vars(s))
    s.device = f"cuda:{LOCAL_RANK}" if s.device == "cuda" and WORLD > 1 else s.device
    try:
        torch.empty(1, device=s.device)
    except (RuntimeError, AssertionError, ImportError) as e:        # no such device, or not in this build of torch
        p.error(f"--device {s.device} can't be used: {str(e).splitlines()[0]}")
    s.dtype = s.dtype or ("float32" if s.device == "cpu" else "bfloat16")
    s.out = s.out or f"out/{s.model}-{variant(s, '-')}-s{s.seed}"
    if s.dim % s.heads or s.dim // s.heads % 2:
        p.error(f"--dim {s.dim} must split into --heads {s.heads} of an even width")
    if not 1 <= s.top_k <= s.experts and (s.experts or s.top_k):
        p.error(f"--top-k must be {f'from 1 to --experts {s.experts}' if s.experts else '0 without --experts'}, got "
                f"{s.top_k}")
    if s.warmup > s.steps:
        p.error(f"--warmup {s.warmup} is more than --steps {s.steps}")
    if s.keep_bf16 > s.layers:
        p.error(f"--keep-bf16 {s.keep_bf16} is more than --layers {s.layers}")
    if s.gpus and not s.dry_run:
        p.error("--gpus is for --dry-run; to train on several, start train.py with torchrun --nproc-per-node")
    s.gpus = s.gpus or WORLD
    if s.batch_size % (s.gpus * s.grad_accum):
        p.error(f"--batch-size {s.batch_size} must be a multiple of {s.gpus} processes x --grad-accum {s.grad_accum}")
    if s.compile and s.experts and s.dtype != "bfloat16":
        p.error("--compile with experts needs --dtype bfloat16, the only one in which torch compiles grouped products")
    if s.compile and not ufp4.can_compile(s.device):
        p.error("--compile can't be used: torch.compile does not work here (see the warning)")
    return s


def overrides(s):
    """The recipe's fields that flags changed."""
    return {k: getattr(s, k) for k in RECIPE_FLAGS[1:-1] if getattr(s, k) is not None}


def variant(s, separator):
    """The recipe's name with its overrides, e.g. ufp4-rht.wgrad-sr.none."""
    fields = {**overrides(s), **({"keep_bf16": s.keep_bf16} if s.keep_bf16 else {})}
    text = [f"{k}.{'+'.join(v) or 'none' if isinstance(v, tuple) else v}" for k, v in fields.items()]
    return separator.join([s.recipe, *text])


def make_recipe(s):
    """The named recipe with the overrides given; its random signs follow the seed, which is added to its own."""
    fields = overrides(s)
    if fields and s.recipe == "bf16":
        flag = next(iter(fields)).replace("_", "-")
        raise ValueError(f"--{flag} has no effect on recipe bf16, which quantizes nothing; name another --recipe")
    recipe = ufp4.RECIPES[s.recipe]
    return dataclasses.replace(recipe, sign_seed=recipe.sign_seed + s.seed, **fields)


# ---------------------------------------------------------------------------------------------------------------
# Data: a batch is a pure function of (seed, step), so a checkpoint's step is its position in the data


def batch_rows(files, s, step):
    """The windows of a step's whole batch, [(tokens, start)]. Of small texts, at random. Of FineWeb, each window of
    SEQ_LEN once an epoch, in an order drawn from (seed, epoch): step counts on from window step * batch_size."""
    if s.data != "fineweb":
        rng = np.random.default_rng((s.seed, step))
        return [(files[0], i) for i in rng.integers(0, len(files[0]) - s.seq_len, size=s.batch_size)]
    counts = np.array([(len(f) - 1) // s.seq_len for f in files])               # windows of each shard
    ends = counts.cumsum()
    epochs, places = np.divmod(step * s.batch_size + np.arange(s.batch_size), ends[-1])
    chosen = [shuffled(s.seed, epoch, ends[-1])[place] for epoch, place in zip(epochs.tolist(), places)]
    shards = np.searchsorted(ends, chosen, side="right")
    return [(files[f], (i - ends[f] + counts[f]) * s.seq_len) for i, f in zip(chosen, shards)]


@functools.lru_cache(maxsize=2)
def shuffled(seed, epoch, n):
    return np.random.default_rng((seed, epoch)).permutation(n)


def get_batch(files, s, step, part=0):
    """(tokens, targets) of one part of this rank's share of the step's batch, each (rows, seq_len) int64 on the device.
    However many ranks and parts there are, together they are the same batch."""
    n = s.batch_size // (WORLD * s.grad_accum)
    first = (part * WORLD + RANK) * n
    return windows(batch_rows(files, s, step)[first:first + n], s)


def windows(rows, s):
    rows = np.stack([tokens[i:i + s.seq_len + 1] for tokens, i in rows]).astype(np.int64)
    rows = torch.from_numpy(rows).to(s.device)
    return rows[:, :-1], rows[:, 1:]


def autocast(s):
    """BF16 GEMMs if --dtype says so. No cache of cast weights: each is used once, and FSDP wants its memory back."""
    return torch.autocast(torch.device(s.device).type, torch.bfloat16, enabled=s.dtype == "bfloat16",
                          cache_enabled=False)


@torch.no_grad()
def evaluate(model, tokens, s):
    """Mean loss over eval_windows windows spread evenly over the validation tokens: the same for every run. With SR on
    X or W the noise is the same each time, for a seed. The ranks share the windows out; one without a window computes
    some anyway, since the others wait for its shards of the weights."""
    model.eval()
    torch.manual_seed(s.seed)
    rows = [(tokens, i) for i in np.linspace(0, len(tokens) - s.seq_len - 1, s.eval_windows).astype(np.int64)]
    rounds = -(-len(rows) // (s.batch_size // s.grad_accum))
    cuts = [len(rows) * i // (rounds * WORLD) for i in range(rounds * WORLD + 1)]
    total = 0.0
    for i in range(RANK, rounds * WORLD, WORLD):
        part = rows[cuts[i]:cuts[i + 1]]
        with autocast(s):
            total += model(*windows(part or rows[:1], s)).item() * len(part)
    model.train()
    return all_sum(total, device=s.device)[0] / len(rows)


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints and logs


def write_atomically(path, write):
    """write(file) under a temporary name, flushed to disk, then renamed: path is whole, or as it was."""
    part = path.with_name(path.name + ".tmp")
    with open(part, "wb") as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def checkpoints(out):
    return sorted(p for p in out.glob("ckpt-*") if p.name[5:].isdigit())        # not what a user made of one


def save(out, step, model, optimizer, settings):
    """Write ckpt-STEP, all ranks together, and drop the third last. Written under another name and renamed when whole.
    Diverged, and nothing is written, if a weight is not finite; OSError if it can't be written."""
    bad = sum(not local(p).isfinite().all() for p in model.parameters())
    if all_sum(bad, device=next(model.parameters()).device)[0]:
        raise Diverged(f"step {step}: there are weights that are not finite; not saved")
    part = out / "saving"
    if RANK == 0:
        shutil.rmtree(part, ignore_errors=True)         # what a kill left behind
    try:
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=part,
                 process_group=patient)
    except dcp.CheckpointException as e:
        reason = next(iter(e.failures.values()))[0]
        raise OSError(f"step {step}: can't write a checkpoint to {out}: {reason}") from e

    def finish():
        text = json.dumps({"step": step, "settings": settings})
        write_atomically(part / "settings.json", lambda f: f.write(text.encode()))
        os.rename(part, out / f"ckpt-{step:07d}")
        for old in checkpoints(out)[:-2]:
            shutil.rmtree(old)
    on_rank_0(finish)


def damaged(path, error):
    before = [p for p in checkpoints(path.parent) if p < path]
    hint = f"; delete it, and --resume goes on from {before[-1]}" if before else ""
    return ValueError(f"{path} is damaged or not a checkpoint of train.py ({type(error).__name__}){hint}")


def find(path, settings, may_differ):
    """(path, step) of a checkpoint of a run with these settings. ValueError, saying what to do, if it can't be that."""
    try:
        state = json.loads((path / "settings.json").read_text())
        step, saved = state["step"], state["settings"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        if not path.exists():
            raise ValueError(f"there is no checkpoint {path}") from e
        raise damaged(path, e) from e
    differ = [f"{k} is {settings[k]!r} now and was {saved.get(k)!r}" for k in settings
              if k not in may_differ and settings[k] != saved.get(k)]
    if step > settings["steps"]:
        differ.append(f"--steps is {settings['steps']} and its last step {step}")
    if differ:
        raise ValueError(f"{path} belongs to a run with other settings: {'; '.join(differ)}")
    return path, step


def load(path, model, optimizer):
    """Fill model and optimizer, sharded over any number of ranks, from a checkpoint of any number. ValueError if it is
    damaged. Its .metadata is a pickle, which can run code: load no checkpoint that you don't trust."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    try:
        dcp.load(state, checkpoint_id=path, process_group=patient)
    except dcp.CheckpointException as e:
        raise damaged(path, next(iter(e.failures.values()))[0]) from e
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def load_start(s, out, settings):
    """(path, step) that --resume or --branch starts from; None for a fresh start."""
    if s.resume:
        paths = checkpoints(out)
        if not paths:
            raise ValueError(f"--resume: no checkpoint in {out}; start without --resume, or name another --out")
        return find(paths[-1], settings, RESUMABLE)
    if s.branch:
        return find(Path(s.branch), settings, (*RESUMABLE, *RECIPE_FLAGS, "recipe_row"))
    return None


def start_log(out, settings, step):
    """Begin log.jsonl, or on resuming cut it back to the checkpoint's step. Returns the file, open for appending; the
    other ranks write to nowhere."""
    if RANK:
        return open(os.devnull, "w")
    path = out / "log.jsonl"
    lines = [{"settings": settings, "torch": torch.__version__, "python": platform.python_version(),
              "threads": torch.get_num_threads(), "processes": WORLD}]
    if step and path.exists():
        for text in path.read_text().splitlines():
            try:
                record = json.loads(text)
            except ValueError:                          # the line that a crash cut short
                break
            if record.get("step", math.inf) <= step:
                lines.append(record)
    write_atomically(path, lambda f: f.write("".join(json.dumps(r) + "\n" for r in lines).encode()))
    return open(path, "a", buffering=1)


def set_aside(out):
    """Move an earlier run's files out of the way rather than overwrite them."""
    files = checkpoints(out) + [p for p in [out / "log.jsonl"] if p.exists()]
    if files:
        n = 1
        while (out / f"previous-{n}").exists():
            n += 1
        (out / f"previous-{n}").mkdir()
        for p in files:
            os.replace(p, out / f"previous-{n}" / p.name)
        print(f"{out} held an earlier run; it is now in {out / f'previous-{n}'}")


def bf16_loss(out, settings):
    """Final validation loss of a finished bf16 run beside OUT with the same settings otherwise, set aside or not; None
    without one. A branched one may have begun in 4 bits, and doesn't count."""
    same = settings.keys() - {*RECIPE_FLAGS, *RESUMABLE, "recipe_row"} | {"steps", "warmup"}
    for path in sorted(out.parent.glob("*/log.jsonl")) + sorted(out.parent.glob("*/previous-*/log.jsonl")):
        try:
            records = [json.loads(line) for line in path.read_text().splitlines()]
            other = records[0]["settings"]
            if other["recipe"] == "bf16" and not other["branch"] and records[-1]["step"] == other["steps"] and \
                    all(other.get(k) == settings[k] for k in same):
                return records[-1]["val_loss"]
        except (OSError, ValueError, TypeError, KeyError, IndexError):          # another's log, or one being written
            continue
    return None


# ---------------------------------------------------------------------------------------------------------------
# What a run costs: counted, not measured

# Dense peaks in TFLOP/s by path of kernels.route. From NVIDIA's data sheets: H200 (half the figures with sparsity), and
# an eighth of HGX B200's and HGX B300's (FP4: 72 and 108 PFLOP/s dense). A path that isn't listed multiplies in BF16.
PEAKS = {"H200": ("sm_90", {"bf16": 989}),
         "B200": ("sm_100", {"bf16": 2250, "fp8": 4500, "fp4": 9000}),
         "B300": ("sm_103", {"bf16": 2250, "fp8": 4500, "fp4": 13500})}


def counts(model, s):
    """Parameters in all, and active for a token; FLOPs a token, forward and backward, of quantized layers and of the
    rest, experts included: their grouped products decode to BF16. A weight that multiplies takes 2 FLOPs forward and 4
    backward; causal attention 6 T C a layer."""
    total = sum(p.numel() for p in model.parameters())
    active = total - sum((m.fc1.numel() + m.fc2.numel()) * (s.experts - s.top_k) // s.experts
                         for m in model.modules() if isinstance(m, MoE))
    quantized = sum(m.weight.numel() for m in model.modules() if isinstance(m, ufp4.Linear) and m.recipe.fmt)
    others = model.embed.weight.numel() + sum(p.numel() for p in model.parameters() if p.dim() == 1)
    rest = active - others - quantized                                         # norms, too, don't multiply matrices
    return total, active, 6 * quantized, 6 * rest + 6 * s.seq_len * s.dim * s.layers


def fastest(quantized, rest, path, peaks):
    """Tokens/s of one GPU at its peak: quantized products on a path of kernels.route, the rest in BF16."""
    return 1e12 / (quantized / peaks.get(path, peaks["bf16"]) + rest / peaks["bf16"])


def activation_bytes(s, recipe):
    """Bytes a token that the backward pass needs, in BF16 autocast: (of a block, of what follows the blocks). A
    quantized layer keeps its input as codes and scales, another in BF16. In BF16, too, attention keeps qkv, the turned
    q and k and its output; an MLP gate, up and silu(gate); a mixture what it sums. In float32 a norm keeps two
    tensors, the router one. A logit takes 10 bytes with its gradient. --compile may fuse some of this away."""
    kept = 2 if recipe.fmt is None else 0.5 + {"fp32": 4}.get(recipe.scale[:4], 1) / recipe.block
    mlps = s.top_k + 1                                                          # with the shared one; or the only one
    inputs = 2 * s.dim + mlps * (s.dim + s.hidden)
    others = 2 * (6 * s.dim + 3 * mlps * s.hidden + s.top_k * s.dim) + 4 * s.dim * (5 if s.experts else 4)
    return kept * inputs + others, (2 + 8) * s.dim + 10 * vocabulary(s.data)


def dry_run(s):
    """Print what the settings would take on s.gpus GPUs."""
    import kernels
    recipe = make_recipe(s)
    with torch.device("meta"):
        model = GPT(s, recipe, vocabulary(s.data))
    total, active, quantized, rest = counts(model, s)
    blocks = sum(p.numel() for p in model.blocks.parameters())
    # What FSDP gathers, float32: embedding, head and their gradients; a block's weights, the next's, and its gradient.
    gathered = 4 * (2 * (total - blocks) + 3 * blocks // s.layers) if s.gpus > 1 else 0
    # Autograd keeps a BF16 cast of each weight that is not quantized, the head's included, until it has been used.
    plain = blocks if recipe.fmt is None else blocks * s.keep_bf16 // s.layers
    casts = 2 * (model.lm_head.weight.numel() + plain // (s.layers if s.remat else 1))
    block, ends = activation_bytes(s, recipe)
    tokens = s.batch_size * s.seq_len // (s.gpus * s.grad_accum)
    kept = tokens * ((4 * s.dim * s.layers + block if s.remat else block * s.layers) + ends)
    print(f"{s.model}, recipe {variant(s, ' ')}, vocabulary {vocabulary(s.data)}: {total / 1e9:.3f}B parameters, "
          f"{active / 1e9:.3f}B active a token")
    print(f"{s.gpus} GPUs, {s.batch_size} x {s.seq_len} tokens a step, {tokens} a GPU at a time" +
          (", --remat" if s.remat else ""))
    rows = (("weights, float32", 4 * total / s.gpus), ("gradients, float32", 4 * total / s.gpus),
            ("AdamW, float32", 8 * total / s.gpus), ("gathered for the moment", gathered),
            ("weights cast to BF16", casts), ("activations", kept))
    for name, size in (*rows, ("together", sum(size for _, size in rows))):
        print(f"  {name:24s}{size / 2**30:10.2f} GiB a GPU")
    flops = quantized + rest
    print(f"{flops / 1e9:.3f} GFLOPs a token, {quantized / flops:.0%} of them in quantized layers other than experts")
    for name, (arch, peaks) in PEAKS.items():
        path = kernels.route(recipe, arch)[0]
        speed = s.gpus * fastest(quantized, rest, path, peaks)
        print(f"  {name}: at most {speed:,.0f} tokens/s on path {path} ({arch}), if every product ran at its peak")


# ---------------------------------------------------------------------------------------------------------------
# Training


def learning_rate(step, s):
    """Linear warm-up, then cosine decay to min_lr * lr at the last step."""
    if step < s.warmup:
        return s.lr * (step + 1) / s.warmup
    t = (step - s.warmup) / max(1, s.steps - 1 - s.warmup)
    return s.lr * (s.min_lr + (1 - s.min_lr) * 0.5 * (1 + math.cos(math.pi * t)))


def build(s, recipe, vocab_size):
    """The model, sharded over the ranks, without values yet."""
    with torch.device("meta"):
        model = GPT(s, recipe, vocab_size)
    if s.compile:
        for block in model.blocks:
            block.compile()
    if WORLD > 1:
        mesh = dist.device_mesh.init_device_mesh(torch.device(s.device).type, (WORLD,))
        for module in (*model.blocks, model):           # gathered as they are, in float32 (see the top); summed so too
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return model.to_empty(device=s.device)


def check_data(s):
    """Make the data set; ValueError if a file is damaged or of another vocabulary."""
    dataset = prepare(s.data)
    for path in dataset.train + dataset.val:
        read_tokens(path, dataset.vocab_size)


def check_out(out):
    """OSError now, rather than at the first checkpoint, if OUT can't be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as e:
        raise OSError(f"can't write to --out {out}: {e.strerror}") from e


def noise_seed(s, step):
    """A seed for this rank's noise in a step: another for each."""
    return int(np.random.SeedSequence((s.seed, step, RANK)).generate_state(1, np.uint64)[0])


def train(s):
    """Run the settings; returns the final validation loss."""
    recipe = make_recipe(s)
    out = Path(s.out)
    on_rank_0(lambda: check_data(s))
    dataset = prepare(s.data)
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(s).items()
                if k not in ("resume", "dry_run", "gpus")}
    settings["recipe_row"] = json.loads(json.dumps(ufp4.RECIPES[s.recipe].key))     # the flags' values are there too
    settings["data"] = dataset.train[0].parent.name     # of a text file, this has its checksum: other text, other run
    if s.data == "fineweb":
        settings["data"] += f"-{len(dataset.train)}"    # other shards, another order of windows
    start = load_start(s, out, settings)
    on_rank_0(lambda: check_out(out))
    files, val = [read_tokens(p) for p in dataset.train], read_tokens(dataset.val[0])
    for split, tokens in [("training", f) for f in files] + [("validation", val)]:
        if len(tokens) < s.seq_len + 1:
            raise ValueError(f"the {split} text of {s.data} has {len(tokens)} tokens, fewer than one context and its "
                             f"target, {s.seq_len + 1}; give more text or a smaller --seq-len")

    model = build(s, recipe, dataset.vocab_size)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": s.weight_decay},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=s.lr, betas=(s.beta1, s.beta2), fused=True)
    moes = [m for m in model.modules() if isinstance(m, MoE)]
    total, active, *flops = counts(model, s)
    print(f"{s.model}, {total / 1e6:.2f}M parameters" + (f" ({active / 1e6:.2f}M active a token)" if moes else "") +
          f", recipe {variant(s, ' ')}, data {s.data}, {s.device}, {s.steps} steps of {s.batch_size} x {s.seq_len} "
          f"tokens, to {out}" + (f", {WORLD} processes" if WORLD > 1 else ""))
    first = 0
    if start is None:
        torch.manual_seed(s.seed)
        for m in model.modules():                       # in vain: so a seed's weights are those of the recorded runs,
            if isinstance(m, (nn.Linear, nn.Embedding)):        # whose layers drew some when they were built
                draw = torch.Tensor.uniform_ if isinstance(m, nn.Linear) else torch.Tensor.normal_
                draw(torch.empty(m.weight.shape))
        model.init_weights()
    else:
        path, first = start
        load(path, model, optimizer)
        print(f"going on after step {first}")
    if not s.resume:
        on_rank_0(lambda: set_aside(out))
    log = start_log(out, settings, first)
    if WORLD > 1:
        dist.barrier(patient)                           # some may have drawn their weights long before others
    gpu = torch.cuda.get_device_name(s.device).split() if s.dtype == "bfloat16" and s.device.startswith("cuda") else ()
    route = ufp4.choose_path(recipe.key, torch.device(s.device), torch.bfloat16) if gpu and recipe.fmt else None
    best = [WORLD * fastest(*flops, route, peaks) for name, (_, peaks) in PEAKS.items() if name in gpu]    # for MFU

    if s.recipe != "bf16":
        print("the first step compiles the quantizer, which takes a while (less when it is cached)")
    stop = []
    handlers = {sig: signal.signal(sig, lambda *_: stop.append(1)) for sig in (signal.SIGINT, signal.SIGTERM)}
    val_loss = evaluate(model, val, s) if first >= s.steps else None
    bar = tqdm(range(first, s.steps), initial=first, total=s.steps, unit="step", dynamic_ncols=True, disable=RANK > 0)
    clock, tokens_seen = time.perf_counter(), 0
    try:
        for step in bar:
            lr = learning_rate(step, s)
            for group in optimizer.param_groups:
                group["lr"] = lr
            torch.manual_seed(noise_seed(s, step))
            losses = []
            # A weight's 4 bits serve all parts; not under FSDP, where they would keep what it gathers for the moment.
            with ufp4.quantized_once() if s.grad_accum > 1 and WORLD == 1 else contextlib.nullcontext():
                for part in range(s.grad_accum):
                    with autocast(s):
                        loss = model(*get_batch(files, s, step, part)) / s.grad_accum
                    loss.backward()                     # sums over ranks here: no rank keeps a whole gradient
                    losses.append(loss.detach())
            norm = nn.utils.clip_grad_norm_(model.parameters(), s.clip or math.inf)
            norm = (norm.full_tensor() if WORLD > 1 else norm).item()
            train_loss, stopping = all_sum(sum(losses).item() / WORLD, len(stop), device=s.device)
            if not (math.isfinite(train_loss) and math.isfinite(norm)):
                kept = checkpoints(out)
                raise Diverged(f"step {step + 1}: the loss is {train_loss} and the gradient norm {norm}; stopped "
                               f"before this update. Last good checkpoint: {kept[-1] if kept else 'none yet'}")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            load_ratio = [m.balance(s.balance_rate).item() for m in moes]
            tokens_seen += s.batch_size * s.seq_len
            done = step + 1
            last = done == s.steps
            bar.set_postfix_str(f"loss {train_loss:.3f}", refresh=False)
            if done % s.log_interval == 0 or done % s.eval_interval == 0 or last:
                rate, val_loss = tokens_seen / (time.perf_counter() - clock), None
                if done % s.eval_interval == 0 or last:
                    val_loss = evaluate(model, val, s)  # the clock stands still
                    if not math.isfinite(val_loss):
                        raise Diverged(f"step {done}: the validation loss is {val_loss}; this step is not saved")
                record = {"step": done, "train_loss": train_loss, "val_loss": val_loss, "lr": lr, "grad_norm": norm,
                          "tokens_per_s": round(rate), **{"mfu": rate / b for b in best}}
                if moes:
                    record["max_load"] = max(load_ratio)
                log.write(json.dumps(record) + "\n")
                bar.set_postfix_str(f"loss {train_loss:.3f}, {rate:,.0f} tokens/s" +
                                    "".join(f", MFU {rate / b:.1%}" for b in best), refresh=False)
                if val_loss is not None:
                    tqdm.write(f"step {done}: train loss {train_loss:.4f}, validation loss {val_loss:.4f}" +
                               (f", largest load {max(load_ratio):.2f} x mean" if moes else ""))
                clock, tokens_seen = time.perf_counter(), 0
            if done % s.save_interval == 0 or last or stopping:
                before = time.perf_counter()
                save(out, done, model, optimizer, settings)
                clock += time.perf_counter() - before
            if stopping and not last:
                bar.close()
                print(f"stopped after step {done} and saved; add --resume to the same command to go on")
                sys.exit(130)
    finally:
        if WORLD == 1:                                  # torchrun sends SIGTERM when a rank is lost: it must not end
            for sig, handler in handlers.items():       # this one before main() has said what happened
                signal.signal(sig, handler)
        log.close()

    report(s, settings, model, val, dataset, val_loss)
    return val_loss


def report(s, settings, model, val, dataset, val_loss):
    """The end of a run: loss, the paper's figure of merit where there is a bf16 run to compare with, some text."""
    print(f"validation loss {val_loss:.4f} nats a token")
    reference = bf16_loss(Path(s.out), settings)
    if s.recipe != "bf16" and reference is not None:
        print(f"BF16-relative loss error {val_loss / reference - 1:+.2%} (bf16: {reference:.4f})")
    elif s.recipe != "bf16":
        print(f"no finished bf16 run with the same settings beside {s.out}: run --recipe bf16 too for the loss error")
    if s.sample:
        model.eval()
        prompt = torch.from_numpy(val[:32].astype(np.int64))[None].to(s.device)
        generator = torch.Generator(s.device).manual_seed(s.seed)
        with autocast(s):
            tokens = model.generate(prompt, s.sample, s.seq_len, generator)[0].tolist()
        try:
            text = encoding(dataset.encoding).decode(tokens, errors="replace")
        except Exception as e:                          # GPT-2's vocabulary is a download of tiktoken's
            text = f"({dataset.encoding} vocabulary not available: {type(e).__name__}) {tokens}"
        text = f"--- sample\n{text}\n---"
        charset = sys.stdout.encoding or "utf-8"
        print(text.encode(charset, "replace").decode(charset))                  # a terminal may lack the characters


def main(argv=None):
    """Train. What the user can mend is one sentence and exit code 1, a run that diverged 3; rank 0 speaks for all."""
    sys.stdout = open(os.devnull, "w") if RANK else sys.stdout
    warnings.filterwarnings("ignore", "torch.distributed is disabled")          # DCP, in a single process
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)        # load() says what is wrong
    s = parse_args(argv)
    try:
        if s.dry_run:
            return dry_run(s)
        if WORLD > 1:
            connect(s)
        train(s)
        if WORLD == 1:
            return
        dist.barrier(patient)
        dist.destroy_process_group()
        message, code = None, 0
    except (ValueError, OSError, ImportError) as error:
        only_rank_0()
        message, code = error, 3 if isinstance(error, Diverged) else 1
    except KeyboardInterrupt:
        only_rank_0()
        message, code = "interrupted", 1
    except (RuntimeError, dcp.CheckpointException) as error:
        lost = isinstance(error, dist.DistError) or "gloo" in str(error)        # a connection closed, or timed out
        if WORLD == 1 or not lost:
            raise
        message, code = f"rank {RANK} stops, for another has stopped or can't be reached; --resume goes on from the " \
                        f"last checkpoint in {s.out} ({str(error).split('. ')[0]})", 1
    if message:
        print(f"train.py: {message}", file=sys.stderr)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)                                      # no waiting for ranks that are gone, nor for gloo's threads


if __name__ == "__main__":
    main()
