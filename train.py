"""Pretrain a small GPT, dense or mixture-of-experts, in 4 bits or in BF16.

    python train.py --recipe bf16               # the baseline: nano, or small on a GPU
    python train.py --recipe ufp4               # prints its loss relative to that run
    python train.py --resume out/nano-ufp4-s0   # goes on after Ctrl-C or a crash
    python train.py --resume out/nano-ufp4-s0 --prompt "def "       # continues a text
    torchrun --nproc-per-node 8 train.py --model dense-1.5b --grad-accum 8  # 8 GPUs

A run keeps log.jsonl and its last two checkpoints in a folder, --out. The log begins
with all settings, so --resume needs only the folder. What you type besides is obeyed.
If that changes what is computed, the run is a branch and needs another folder:

    python train.py --resume out/nano-bf16-s0/ckpt-0000700 --recipe ufp4 --out out/new

A recipe (see ufp4.py) says how the linear layers of the blocks multiply. Embedding, LM
head, router and norms are never quantized. The router works in float32, the rest under
BF16 autocast where the hardware has BF16, elsewhere in float32 (--dtype).

The training loop is in train(), near the end.
"""
import signal
import sys

if __name__ == "__main__":      # Ctrl-C ends in a line, also while torch is imported
    signal.signal(signal.SIGINT, lambda *_: sys.exit("train.py: interrupted"))

import argparse
import importlib
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import threading
import time
import warnings
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from io import BytesIO
from pathlib import Path

# CPU threads that share a matrix product wait for each other in a loop, which keeps
# cores busy. Beside another program, steps then take many times as long. So let the
# threads sleep after a while. torch reads this when it is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")    # rounds of that loop

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import ufp4
from data.prepare import decode, encode, prepare, read_tokens, vocabulary

# --- Processes -----------------------------------------------------------------------
# Under torchrun several processes train one model. FSDP2 shards it: each keeps a part
# of each weight, of its gradient and of its optimizer state. To compute a block, its
# weights are gathered, in float32, so that all processes quantize the same numbers.
# Each process computes its share of the batch. So N processes match one process with
# --grad-accum N, except for random bits and the order of sums.

GPU = torch.cuda.is_available()
RANK = int(os.environ.get("RANK", 0))           # this process's number, from torchrun
WORLD = int(os.environ.get("WORLD_SIZE", 1))    # how many processes there are

def all_sum(t):
    """Sum a tensor over the processes, in place."""
    if WORLD > 1:
        dist.all_reduce(t)
    return t

def any_process(condition):
    """Whether this holds in any process. They wait for each other here, but not for a
    GPU, as the tensor is on the CPU."""
    if WORLD == 1:
        return bool(condition)
    return all_sum(torch.tensor(float(bool(condition)))).item() > 0

def fill(p, values):
    """Copy values into a parameter. Of a sharded one this process has some rows: 10
    rows on 4 processes are 3, 3, 3 and 1."""
    if WORLD > 1:
        size = math.ceil(len(values) / WORLD)
        p, values = p.to_local(), values[RANK * size:][:size]
    p.copy_(values)

def say(text):
    """Print, from one process, above the progress bar."""
    if RANK == 0:
        with tqdm.external_write_mode():
            print(text)

def require(condition, message):
    """What the user can mend is a ValueError, which main() turns into a sentence."""
    if not condition:
        raise ValueError(message)

# --- The model -----------------------------------------------------------------------
# Shapes: B sequences of T tokens, M = B T tokens in all, C = dim, V tokens in the
# vocabulary, E experts, of which each token takes k.

def rope(x, base=10000.0):
    """Rotary position embedding (arXiv 2104.09864) of x (B, heads, T, D). The pair of
    elements i and i + D/2 of token t turns by the angle t base^(-2i/D)."""
    half = x.shape[-1] // 2
    freq = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    position = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angle = position[:, None] * freq                                # (T, D/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

class Attention(nn.Module):
    def __init__(self, config, recipe):
        super().__init__()
        dim, self.heads = config.dim, config.heads
        self.qkv = ufp4.Linear(dim, 3 * dim, bias=False, recipe=recipe)
        self.proj = ufp4.Linear(dim, dim, bias=False, recipe=recipe)

    def forward(self, x):                                           # (B, T, C)
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))    # (B, T, 3, heads, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                    # (B, heads, T, D) each
        y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))

class SwiGLU(nn.Module):
    """fc2(silu(gate) * up), where one product gives gate and up (arXiv 2002.05202)."""
    def __init__(self, config, recipe):
        super().__init__()
        dim, hidden = config.dim, config.hidden
        self.fc1 = ufp4.Linear(dim, 2 * hidden, bias=False, recipe=recipe)
        self.fc2 = ufp4.Linear(hidden, dim, bias=False, recipe=recipe)

    def forward(self, x):
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)

class ExpertLinear(nn.Module):
    """One linear layer for each expert. x has the tokens of expert 0, then those of
    expert 1, and so on; those of expert e end before row offsets[e]."""
    def __init__(self, experts, in_features, out_features, recipe):
        super().__init__()
        self.recipe = recipe
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))

    def forward(self, x, offsets):
        return ufp4.linear(x, self.weight, self.recipe, offsets)

class MoE(nn.Module):
    """Many small experts beside one that all tokens take (arXiv 2401.06066). An expert
    takes every token that chooses it: none is dropped. The load is balanced without an
    auxiliary loss (arXiv 2408.15664): each expert's score gets a bias when experts are
    chosen, and nowhere else."""
    def __init__(self, config, recipe):
        super().__init__()
        dim, hidden, experts = config.dim, config.hidden, config.experts
        self.top_k = config.top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.fc1 = ExpertLinear(experts, dim, 2 * hidden, recipe)
        self.fc2 = ExpertLinear(experts, hidden, dim, recipe)
        self.shared = SwiGLU(config, recipe)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))      # since last balance()

    def forward(self, x):                                           # (B, T, C)
        flat = x.flatten(0, 1)                                      # (M, C)
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(self.router(flat.float()))       # (M, E), float32
        chosen = (scores + self.bias).topk(self.top_k).indices      # (M, k)
        gates = scores.gather(-1, chosen)           # the weights of a token's experts
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        expert, order = chosen.flatten().sort(stable=True)          # (M k), by expert
        numbers = torch.arange(len(self.bias), device=x.device)     # 0, ..., E - 1
        # The rows of an expert end here; one without tokens ends where it begins
        offsets = torch.searchsorted(expert, numbers, right=True).int()     # (E)
        if self.training:
            # With --remat this counts each token twice. balance() compares experts only
            self.load += torch.diff(offsets, prepend=offsets.new_zeros(1))
        copies = flat.repeat_interleave(self.top_k, 0)              # (M k, C)
        gate, up = self.fc1(copies[order], offsets).chunk(2, -1)
        out = self.fc2(F.silu(gate) * up, offsets)                  # (M k, C)
        back = order.argsort()                      # the inverse of the permutation
        out = out[back].unflatten(0, gates.shape)                   # (M, k, C)
        out = (out * gates.unsqueeze(-1)).sum(1)                    # (M, C)
        return self.shared(x) + out.view(x.shape)

    @torch.no_grad()
    def balance(self, rate=1e-2):
        """Once a step: the bias of an expert that got less than its share goes up by
        `rate`, the others' down. Clears the counts. Returns the largest load divided by
        the mean load; 1 is perfect balance."""
        all_sum(self.load)
        mean, largest = self.load.mean(), self.load.max()
        self.bias += rate * torch.sign(mean - self.load)
        self.load.zero_()
        return largest / mean

class Block(nn.Module):
    def __init__(self, config, recipe):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attn = Attention(config, recipe)
        self.mlp = (MoE if config.experts else SwiGLU)(config, recipe)

    def forward(self, x):                                           # (B, T, C)
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    """Pre-norm RMSNorm, RoPE, attention, SwiGLU or MoE; no biases, untied head."""
    def __init__(self, config, recipe, vocab_size):
        super().__init__()
        self.bf16, self.remat = config.dtype == "bfloat16", config.remat
        self.embed = nn.Embedding(vocab_size, config.dim)
        self.blocks = nn.ModuleList()
        for i in range(config.layers):
            keep = config.keep_bf16
            quantized = i < config.layers - keep if keep >= 0 else i >= -keep
            self.blocks.append(Block(config, recipe if quantized
                                     else ufp4.RECIPES["bf16"]))
        self.norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self):
        """As GPT-2 does: Gaussian numbers, smaller in layers that write to the residual
        stream. They do not depend on the number of processes: each process draws all
        numbers, and fill() keeps its part."""
        for name, p in self.named_parameters():
            writes = name.endswith(("proj.weight", "fc2.weight"))
            std = 0.02 / math.sqrt(2 * len(self.blocks)) if writes else 0.02
            if p.dim() == 1:                                # a norm's gain
                fill(p, torch.ones(p.shape))
            else:
                fill(p, torch.empty(p.shape).normal_(std=std))
        for b in self.buffers():
            b.zero_()

    def forward(self, tokens, targets=None):
        """tokens, targets (B, T) -> logits (B, T, V), or with targets the mean loss."""
        kind = tokens.device.type
        # A cast weight is used once in a pass, so to cache it would only take memory
        with torch.autocast(kind, torch.bfloat16, self.bf16, cache_enabled=False):
            x = self.embed(tokens)                                  # (B, T, C)
            for block in self.blocks:
                if self.remat:      # the recomputation draws the same random bits
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
            logits = self.lm_head(self.norm(x))                     # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

# --- Settings ------------------------------------------------------------------------

NANO = dict(layers=4, dim=128, heads=4, hidden=352, experts=0, top_k=0, seq_len=256,
            batch_size=8, steps=800, lr=3e-3, warmup=80, data="python")
SMALL = dict(layers=8, dim=512, heads=8, hidden=1408, experts=0, top_k=0, seq_len=1024,
             batch_size=32, steps=2000, lr=1e-3, warmup=200, data="python")
PAPER = dict(layers=24, dim=2048, heads=16, hidden=6016, experts=0, top_k=0,
             seq_len=4096, batch_size=256, steps=30_000, lr=4e-4, warmup=2000,
             data="fineweb")
PRESETS = {
    "nano": NANO,
    "nano-moe": dict(NANO, hidden=96, experts=16, top_k=3),
    "small": SMALL,
    "small-moe": dict(SMALL, hidden=352, experts=32, top_k=3),
    # The models of the paper (see ufp4.py). It gives their numbers of parameters; the
    # rest is our choice
    "dense-1.5b": PAPER,
    "moe-7.9b": dict(PAPER, dim=2400, heads=25, hidden=320, experts=128, top_k=8,
                     batch_size=512, steps=50_000, lr=3e-4),
    "moe-124b": dict(PAPER, layers=30, dim=4096, heads=32, hidden=1024, experts=320,
                     top_k=6, batch_size=2048, steps=60_000, lr=2e-4)}

@dataclass
class Config:
    """Each field is a flag: batch_size is --batch-size. Its comment is the help."""
    recipe: str = "ufp4"            # how layers multiply, see RECIPES in ufp4.py
    model: str = "small" if GPU else "nano"     # sizes, schedule and data, see PRESETS
    data: str = None                # python, shakespeare, fineweb or a text file
    out: str = None                 # the run's folder (default: out/MODEL-RECIPE-sSEED)
    resume: str = None              # go on with the run in this folder, or in OUT
    prompt: str = None              # only continue this text, with a run of --resume
    with_: str = None               # a Python file of yours that adds to ufp4.RECIPES
    seed: int = 0                   # of weights, batches, rotations and random bits
    keep_bf16: int = 0              # how many of the last blocks are not quantized
                                    # (-N: of the first)
    device: str = "cuda" if GPU else "cpu"      # cpu, cuda, cuda:1, mps, ...
    dtype: str = None               # of products (default: bfloat16 if hardware has it)
    compile: bool = False           # torch.compile blocks (with experts only bfloat16)
    remat: bool = False             # activation checkpointing: less memory, more time
    grad_accum: int = 1             # gradient accumulation steps
    min_lr: float = 0.1             # last learning rate, as a fraction of the peak
    weight_decay: float = 0.1       # of matrices, by AdamW
    clip: float = 1.0               # largest gradient norm; 0 does not clip
    eval_interval: int = 100        # steps between validations
    eval_windows: int = 128         # validation windows of SEQ_LEN tokens
    save_interval: int = 100        # steps between checkpoints
    log_interval: int = 10          # steps between lines of the log
    sample: int = 200               # tokens of text to print at the end
    # These come from the preset if no flag is given
    layers: int = None              # number of blocks
    dim: int = None                 # width of the residual stream
    heads: int = None               # attention heads
    hidden: int = None              # width inside the MLP, or inside each expert
    experts: int = None             # experts in a block; 0 for a dense model
    top_k: int = None               # experts that each token takes
    seq_len: int = None             # tokens in a sequence
    batch_size: int = None          # sequences in a step, of all processes together
    steps: int = None               # steps in all
    lr: float = None                # peak learning rate
    warmup: int = None              # steps (default: the preset's; at most a fifth)
    # These come from the recipe if no flag is given
    fmt: str = None                 # format of the elements
    scale: str = None               # format of the scales
    block: int = None               # elements that share a scale
    rht: list = None                # GEMMs that rotate: fprop dgrad wgrad, or none
    sr: list = None                 # operands rounded stochastically: x w dy, or none
    tiles: bool = None              # square blocks in the weights
    gemms: list = None              # products that are quantized at all
    rht_block: int = None           # size of the Hadamard matrix

    @property
    def overrides(self):
        """The fields of the recipe that flags change."""
        given = {name: getattr(self, name) for name in RECIPE_FIELDS}
        return {name: value for name, value in given.items() if value is not None}

RECIPE_FIELDS = ("fmt", "scale", "block", "rht", "sr", "tiles", "gemms", "rht_block")
MAY_BE_ZERO = {"seed", "min_lr", "weight_decay", "clip", "sample",
               "experts", "top_k", "lr", "warmup"}
# Settings of how a run computes, not of what: they change no numbers, or only rounding
# and random bits (device, compile, grad_accum). A run may go on with other values of
# these. Its data may have another name, but the text is compared
HOW = {"out", "resume", "prompt", "with_", "data", "device", "compile", "remat",
       "grad_accum", "eval_interval", "save_interval", "log_interval", "sample"}

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)

def flag(name):
    return "--" + name.strip("_").replace("_", "-")

def typed_flags(argv):
    """{field of Config: value} of the flags that were typed, and of no others."""
    p = Parser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    comments = dict(re.findall(r"(\w+): .*# (.*)", inspect.getsource(Config)))
    for f in fields(Config):
        text = comments[f.name]
        how = {"type": f.type, "metavar": f.name.strip("_").upper()}
        if f.type is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif f.type is list:
            how = {"nargs": "+"}
        elif f.name == "resume":
            how = {"nargs": "?", "const": ""}
        if f.default is not None and f.type is not bool:
            text += f" (default: {f.default})"
        p.add_argument(flag(f.name), dest=f.name, help=text, **how)
    if argv is None and "kernel_launcher" in sys.argv[0]:
        argv = []                       # sys.argv has the flags of a notebook's kernel
    typed = vars(p.parse_args(argv))
    for name, value in typed.items():
        if isinstance(value, list):     # names with spaces or commas between them
            names = " ".join(value).replace(",", " ").split()
            typed[name] = [] if names == ["none"] else names
    return typed

def parse_args(argv=None):
    """The flags as a Config. What they leave open comes from the run of --resume, or
    from preset and hardware. ValueError if something can't be."""
    typed = typed_flags(argv)
    if "resume" not in typed:
        require("prompt" not in typed, "--prompt needs a model: add --resume RUN")
        return complete(Config(**typed))
    where = typed.pop("resume") or complete(Config(**typed)).out
    path = find_checkpoint(Path(where))
    before = read_log(path.parent / "log.jsonl")[0]["settings"]
    # Another recipe or preset comes without what flags had changed in the old one
    kept = dict(before)
    for name, its_fields in ("recipe", RECIPE_FIELDS), ("model", NANO):
        if typed.get(name, before[name]) != before[name]:
            kept = {k: v for k, v in kept.items() if k not in its_fields}
    kept = {**kept, "out": str(path.parent), **typed, "resume": str(path)}
    config = complete(Config(**kept))
    if goes_on(config) and config.prompt is None:
        changed = [flag(name) for name, value in vars(config).items()
                   if name not in HOW and value != before.get(name)]
        require(not changed, f"{', '.join(changed)} would change the run in "
                f"{config.out}; to branch from it, add --out with a new folder")
    return config

def complete(c):
    """Fill in what preset and hardware decide in a Config, and check all of it."""
    if c.with_:
        sys.path.insert(0, str(Path(c.with_).resolve().parent))
        importlib.import_module(Path(c.with_).stem)
    preset = ufp4.lookup("model", c.model, PRESETS)
    if c.warmup is None:
        c.warmup = min(preset["warmup"], (c.steps or preset["steps"]) // 5)
    for name, value in preset.items():
        if getattr(c, name) is None:
            setattr(c, name, value)
    for f in fields(Config):
        if f.name == "keep_bf16":
            continue
        least, value = 0 if f.name in MAY_BE_ZERO else 1, getattr(c, f.name)
        if f.type in (int, float) and value is not None:        # NaN is not, either
            require(value >= least, f"{flag(f.name)} {value} must be at least {least}")
    require(c.dim % (2 * c.heads) == 0,
            f"--dim {c.dim} must be a multiple of 2 x --heads {c.heads}")
    require(1 <= c.top_k <= c.experts or c.top_k == c.experts == 0,
            f"--top-k {c.top_k} must be from 1 to --experts {c.experts}, or both 0")
    require(c.batch_size % (WORLD * c.grad_accum) == 0,
            f"--batch-size {c.batch_size} must be a multiple of {WORLD} processes x "
            f"--grad-accum {c.grad_accum}")
    require(c.eval_windows % WORLD == 0,
            f"--eval-windows {c.eval_windows} must be a multiple of {WORLD} processes")
    require(c.warmup <= c.steps, f"--warmup {c.warmup} must be at most --steps "
            f"{c.steps}, or the learning rate never reaches --lr")
    require(make_recipe(c).fmt is None or abs(c.keep_bf16) < c.layers,
            f"--keep-bf16 {c.keep_bf16} leaves none of {c.layers} blocks to quantize: "
            "take --recipe bf16")
    require(c.dtype in (None, "float32", "bfloat16"),
            f"--dtype {c.dtype} must be float32 or bfloat16")
    require(c.prompt != "", "--prompt needs a text")
    if c.device == "cuda" and WORLD > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        torch.empty(1, device=c.device)
    except (RuntimeError, AssertionError) as e:     # torch can't use such a device
        raise ValueError(f"--device {c.device} can't be used: "
                         f"{str(e).splitlines()[0]}; try --device cpu") from e
    c.dtype = c.dtype or ("bfloat16" if hardware(c.device)[1] else "float32")
    c.out = c.out or f"out/{c.model}-{variant(c)}-s{c.seed}"
    return c

def hardware(device):
    """-> (the name of the GPU or CPU, whether it has instructions for BF16)"""
    if device.startswith("cuda"):
        return (torch.cuda.get_device_name(device),
                torch.cuda.is_bf16_supported(including_emulation=False))
    cpu = torch.cpu.get_capabilities()
    bf16 = any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return cpu.get("cpu_name", cpu.get("architecture", "a CPU")), bf16

def variant(config):
    """The recipe's name and what flags change, e.g. ufp4-rht.wgrad-sr.none."""
    kept = {"keep_bf16": config.keep_bf16} if config.keep_bf16 else {}
    parts = [config.recipe]
    for name, value in (config.overrides | kept).items():
        text = ("+".join(value) or "none") if isinstance(value, list) else value
        parts.append(f"{name}.{text}")
    return "-".join(parts)

def make_recipe(config):
    """The recipe, with what flags change. Its random signs follow the seed."""
    recipe = ufp4.lookup("recipe", config.recipe, ufp4.RECIPES)
    require(recipe.fmt is not None or not config.overrides,
            f"recipe {config.recipe} does not quantize, so that it has no "
            f"{', '.join(config.overrides)}")
    changed = {name: tuple(value) if isinstance(value, list) else value
               for name, value in config.overrides.items()}
    return replace(recipe, sign_seed=recipe.sign_seed + config.seed, **changed)

# --- Data ----------------------------------------------------------------------------

def load_data(config):
    """-> (shards to train on, validation tokens, the name and version of the data)"""
    if RANK == 0:
        prepare(config.data)            # one process downloads for all
    any_process(False)                  # the others wait
    data = prepare(config.data)
    shards, val = [read_tokens(path) for path in data.train], read_tokens(data.val[0])
    for tokens in [*shards, val]:
        require(len(tokens) > config.seq_len, f"{tokens.filename} has {len(tokens)} "
                "tokens, too few for a sequence and its last target: give more text, "
                "or a smaller --seq-len")
    # The folder's name has Python's version, or the checksum of a text
    return shards, val, f"{data.train[0].parent.name}-{len(shards)}"

def windows(shards, starts, config):
    """-> tokens (B, T), and targets (B, T), which are the next tokens. A start is the
    number of a place where a window fits, counted through all shards."""
    rows = []
    for i in starts:
        for tokens in shards:
            if i < len(tokens) - config.seq_len:
                break
            i -= len(tokens) - config.seq_len
        rows.append(tokens[i:i + config.seq_len + 1])
    rows = torch.from_numpy(np.stack(rows).astype(np.int64))
    if config.device.startswith("cuda"):    # a copy of pinned memory does not wait
        rows = rows.pin_memory().to(config.device, non_blocking=True)
    rows = rows.to(config.device)
    return rows[:, :-1], rows[:, 1:]

def get_batch(shards, config, step, part=0):
    """Random windows for a part of a step, this process's share of them. They depend on
    the seed and the step alone, so resuming needs only the step's number."""
    count = sum(len(tokens) - config.seq_len for tokens in shards)
    generator = np.random.default_rng((config.seed, step))
    starts = generator.integers(0, count, size=config.batch_size)
    size = config.batch_size // (WORLD * config.grad_accum)
    return windows(shards, starts[(part * WORLD + RANK) * size:][:size], config)

# --- Evaluation ----------------------------------------------------------------------

def validation_starts(val, config):
    """Where windows start that are spaced evenly over the text: this process's share of
    each batch. FSDP needs all processes in each pass, so all have the same number."""
    starts = np.linspace(0, len(val) - config.seq_len - 1, config.eval_windows)
    size = config.batch_size // config.grad_accum
    batches = np.split(starts.astype(int), range(size, config.eval_windows, size))
    return [np.split(batch, WORLD)[RANK] for batch in batches]

@torch.no_grad()
def evaluate(model, val, config):
    """The mean loss over the validation windows, always with the same random bits."""
    model.eval()
    torch.manual_seed(config.seed)
    losses = []
    for starts in tqdm(validation_starts(val, config), "validating", leave=False,
                       disable=RANK > 0):
        losses.append(model(*windows([val], starts, config)) * len(starts))
    model.train()
    return sum(all_sum(torch.stack(losses)).tolist()) / config.eval_windows

def validate(model, val, config):
    """What the log says of a validation: the loss, means of the layers' noise in the
    forward pass and of their slopes (see ufp4.noise), and the layer with most noise."""
    line = {"val_loss": evaluate(model, val, config)}
    inputs, _ = windows([val], validation_starts(val, config)[0], config)
    if found := ufp4.noise(model, inputs):
        noises, slopes = zip(*found.values())
        worst = max(found, key=found.get)
        line |= {"noise": sum(noises) / len(found), "slope": sum(slopes) / len(found),
                 "worst_layer": worst, "worst_noise": found[worst][0]}
    return line

@torch.no_grad()
def sample(model, prompt, config, vocab_size):
    """prompt, a list of tokens, and --sample tokens that continue it, as text."""
    model.eval()
    torch.manual_seed(config.seed)                      # all processes draw the same
    tokens = torch.tensor([prompt], device=config.device)               # (1, T)
    for _ in tqdm(range(config.sample), "sampling", leave=False, disable=RANK > 0):
        logits = model(tokens[:, -config.seq_len:])[:, -1].float()      # (1, V)
        p = torch.softmax(logits / 0.8, -1)             # at temperature 0.8
        tokens = torch.cat((tokens, torch.multinomial(p, 1)), 1)
    return decode(tokens[0].tolist(), vocab_size)

# --- Checkpoints and the log ---------------------------------------------------------
# A step is validated, logged, then saved. So each checkpoint has its line in the log.
# The price: a run that dies while it validates trains again from the checkpoint before.

CKPT = "ckpt-" + 7 * "[0-9]"            # ckpt-STEP, as a pattern

def checkpoints(folder):
    """The whole checkpoints in a folder, oldest first. DCP writes .metadata last."""
    return sorted(path.parent for path in Path(folder).glob(CKPT + "/.metadata"))

def find_checkpoint(path):
    """path, or if it is a run's folder the last checkpoint in it."""
    folder = path.parent if path.name.startswith("ckpt-") else path
    whole = checkpoints(folder)
    found = whole[-1] if whole and path == folder else path
    names = ", ".join(each.name for each in whole) or "none; to start, omit --resume"
    require(found in whole, f"--resume {path}: there is no such checkpoint; whole ones "
            f"in {folder}: {names}")
    return found

def goes_on(config):
    """Whether a run goes on in its own folder, from its last checkpoint."""
    last = checkpoints(config.out)[-1:]
    return config.resume is not None and last == [Path(config.resume)]

def claim(config):
    """Lock the run's folder for this process, as long as the result is held. Deletes
    half a checkpoint, which a killed process has left."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / "lock", "w")
    try:
        import fcntl
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process trains in {out}: wait for it, or name "
                         "another folder by --out") from None
    except (ImportError, OSError):      # Windows and some network disks have no locks
        pass
    require(goes_on(config) or not checkpoints(out), f"{out} holds a run: --resume "
            f"{out} goes on with it, --out with a new folder begins another")
    for path in set(out.glob(CKPT)) - set(checkpoints(out)):
        say(f"{path} is half a checkpoint, and is deleted")
        shutil.rmtree(path)
    return lock

def state_of(model, optimizer, step=0):
    """What a checkpoint holds, as a dict. The tensors are those of model and optimizer
    themselves, so load() fills these in place. AdamW would make its moments at its
    first step only; get_state_dict makes them now."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}

def save(config, step, model, optimizer):
    """Write ckpt-STEP, all processes together, and keep the last two."""
    path = Path(config.out) / f"ckpt-{step:07d}"
    try:
        dcp.save(state_of(model, optimizer, step), checkpoint_id=path)
    except CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        raise OSError(f"could not save {path} ({error!r}); when that is mended, go on "
                      f"from the checkpoint before by --resume {config.out}") from e
    if RANK == 0:
        for old in checkpoints(config.out)[:-2]:
            shutil.rmtree(old)

def load(path, state):
    """Read a checkpoint into the tensors of `state`, in place, and replace its other
    values. ValueError if it is damaged or has another model.

    It has pickles, which can run any code: load only what you trust."""
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
        # Each tensor is a zip archive in a file, with checksums that torch ignores
        for part in list(metadata.storage_data.values())[RANK::WORLD]:
            with open(path / part.relative_path, "rb") as file:
                file.seek(part.offset)
                archive = zipfile.ZipFile(BytesIO(file.read(part.length)))
            require(archive.testzip() is None, "a checksum is wrong")
    except Exception as e:
        raise ValueError(f"{path} is damaged ({e}); delete it, and --resume "
                         f"{path.parent} takes the checkpoint before it") from e
    there = {name.removeprefix("model."): tuple(kind.size) for name, kind
             in metadata.state_dict_metadata.items() if name.startswith("model.")}
    here = {name: tuple(p.shape) for name, p in state["model"].items()}
    for name in there | here:
        require(there.get(name) == here.get(name),
                f"{path} has another model: {name} is {there.get(name)} there and "
                f"{here.get(name)} here; leave out the flags that change the model")
    dcp.load(state, checkpoint_id=path)

def restore(config, text, model, optimizer):
    """Load the checkpoint of --resume. Returns its number of steps, and whether the run
    is a branch, or goes on with one."""
    path, state = Path(config.resume), state_of(model, optimizer)
    before = read_log(path.parent / "log.jsonl")[0]
    other_data = config.data != before["settings"]["data"] and not goes_on(config)
    require(text == before["text"] or other_data,
            f"--data {config.data} is {text} now and was {before['text']} in "
            f"{path.parent}; to branch from it, add another --data and --out")
    load(path, state)
    require(state["step"] < config.steps or goes_on(config), f"{path} has made "
            f"{state['step']} steps: a branch needs more than --steps {config.steps}")
    return state["step"], not goes_on(config) or before["branched"]

def log(config, line):
    """Append a line, a dict, to the log. Print it if it has a validation loss."""
    path, text = Path(config.out) / "log.jsonl", json.dumps(line) + "\n"
    if "settings" in line and path.exists():
        text = "\n" + text              # ends half a line of a process that was killed
    if RANK == 0:
        with open(path, "a") as file:
            file.write(text)
    if line.get("val_loss") is not None:
        say(", ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}"
                      for k, v in line.items() if v is not None))

def read_log(path):
    """-> [what the last start wrote: settings and so on, a dict for each logged step].
    What was logged after the step that a start goes on from does not count."""
    starts, steps = [], {}
    for text in Path(path).read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:              # empty, or half a line
            continue
        if "step" in line:
            steps[line["step"]] = line
        else:
            starts.append(line)
            steps = {n: step for n, step in steps.items() if n <= line.get("start", 0)}
    require(starts and all("text" in line for line in starts), f"{path} is damaged, or "
            f"no log of this train.py: delete {Path(path).parent}, or name another "
            "folder")
    return [starts[-1], *steps.values()]

def commit():
    """The commit of this code, "-dirty" if it was changed; None if git can't say."""
    command = "git describe --always --dirty --abbrev=40 --exclude=*"   # no tag
    if shutil.which("git") is None:
        return None
    done = subprocess.run(command.split(), cwd=Path(__file__).parent,
                          capture_output=True, text=True)
    return done.stdout.strip() or None

def is_baseline(bf16, run):
    """Whether a run is to be compared with the run `bf16`, by what their logs begin
    with: all but the recipe is the same, and that one is no branch."""
    differs = HOW | {"recipe", "keep_bf16", *RECIPE_FIELDS}
    return (bf16["settings"]["recipe"] == "bf16" and not bf16["branched"]
            and bf16["text"] == run["text"]
            and all(bf16["settings"].get(name) == value
                    for name, value in run["settings"].items() if name not in differs))

def loss_error(config, val_loss):
    """How a loss compares with that of a finished bf16 run beside OUT, in words."""
    run = read_log(Path(config.out) / "log.jsonl")[0]
    if is_baseline(run, run):
        return "other recipes with these settings are compared with this run"
    for path in sorted(Path(config.out).parent.glob("*/log.jsonl")):
        try:
            first, *_, last = read_log(path)
            if is_baseline(first, run) and last["step"] == config.steps:
                return ("BF16-relative loss error "
                        f"{val_loss / last['val_loss'] - 1:+.2%}, to {path.parent}")
        except (ValueError, KeyError):
            continue                    # a run that has just begun, or no log of ours
    return ("to see the loss error, finish a run of --recipe bf16 with the same "
            "settings in a folder beside this one")

# --- The run -------------------------------------------------------------------------

def learning_rate(step, config):
    """Linear warm-up, then cosine decay to min_lr * lr at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    t = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    fall = 0.5 * (1 + math.cos(math.pi * t))                        # from 1 to 0
    return config.lr * (config.min_lr + (1 - config.min_lr) * fall)

def counts(model, config):
    """-> (parameters, those that one token uses, FLOPs for one token, for bench.py). A
    weight takes 2 FLOPs forward and 4 backward, causal attention 6 T C a layer."""
    c, total = config, sum(p.numel() for p in model.parameters())
    idle = c.layers * (c.experts - c.top_k) * 3 * c.dim * c.hidden  # in other experts
    products = 6 * (total - idle - model.embed.weight.numel())
    return total, total - idle, products + 6 * c.seq_len * c.dim * c.layers

def build(config, recipe, vocab_size):
    """-> (the model, whose weights have no values yet, and its optimizer)"""
    with torch.device("meta"):          # allocates nothing until FSDP has sharded it
        model = GPT(config, recipe, vocab_size)
    if config.compile:
        for block in model.blocks:
            block.compile()
    if WORLD > 1:
        kind = torch.device(config.device).type
        mesh = dist.device_mesh.init_device_mesh(kind, (WORLD,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    model.to_empty(device=config.device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True,
                                    weight_decay=config.weight_decay)

def announce(config, model, start):
    total, active, _ = counts(model, config)
    say(f"{config.model}, {total / 1e6:.2f}M parameters, {active / 1e6:.2f}M active a "
        f"token, recipe {variant(config)}, {config.dtype} on {WORLD} x "
        f"{hardware(config.device)[0]}, steps {start} to {config.steps}, {config.out}")
    if config.device == "cpu" and make_recipe(config).fmt is not None:
        say("the first step compiles the quantizers, up to a minute if not yet cached")

@contextmanager
def signals_noted():
    """Yields a list that Ctrl-C and SIGTERM are added to. They do nothing else."""
    found, handlers = [], {}
    if threading.current_thread() is threading.main_thread():   # no other may do this
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, lambda *got: found.append(got))
    try:
        yield found
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

def train(config):
    """Train from the start or from a checkpoint to the last step, and report. Returns
    the last validation loss."""
    # The model needs no data. So a wrong flag is found before a download
    recipe, vocab_size = make_recipe(config), vocabulary(config.data)
    model, optimizer = build(config, recipe, vocab_size)
    lock = claim(config) if RANK == 0 else None     # held until train() returns
    shards, val, text = load_data(config)
    if config.resume:
        start, branched = restore(config, text, model, optimizer)
    else:
        start, branched = 0, False
        torch.manual_seed(config.seed)
        model.init_weights()
    log(config, {"settings": asdict(config), "text": text, "start": start,
                 "branched": branched, "commit": commit(), "processes": WORLD,
                 "torch": torch.__version__, "hardware": hardware(config.device)[0]})
    announce(config, model, start)

    moes = [m for m in model.modules() if isinstance(m, MoE)]
    bar = tqdm(total=config.steps, initial=start, disable=RANK > 0)
    done, unread, clock = start, [], time.perf_counter()
    with bar, signals_noted() as signals:
        for step in range(start, config.steps):
            # The random bits of this step and process: a resumed run draws the same
            bits = np.random.SeedSequence((config.seed, step, RANK))
            torch.manual_seed(int(bits.generate_state(1, np.uint64)[0]))
            lr = learning_rate(step, config)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = 0.0
            for part in range(config.grad_accum):
                tokens, targets = get_batch(shards, config, step, part)
                part_loss = model(tokens, targets) / config.grad_accum
                part_loss.backward()        # FSDP averages over processes here
                loss += part_loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
            norm = norm.full_tensor() if WORLD > 1 else norm
            optimizer.step()
            optimizer.zero_grad()
            loads = [moe.balance() for moe in moes]
            unread.append(torch.stack((loss, norm, *loads)))        # read below
            bar.update()

            done = step + 1
            last, stops = done == config.steps, any_process(signals)
            saves = last or stops or done % config.save_interval == 0
            validates = last or done % config.eval_interval == 0
            if not (saves or validates or done % config.log_interval == 0):
                continue
            # Wait for the device, and read all steps since the last read: means over
            # the processes. No checkpoint follows a number that is not finite
            rows = (all_sum(torch.stack(unread)) / WORLD).tolist()
            for number, (loss, norm, *_) in enumerate(rows, done - len(rows) + 1):
                if not math.isfinite(loss + norm):
                    raise FloatingPointError(f"step {number}: loss {loss}, gradient "
                                             f"norm {norm}")
            loss, norm, *loads = rows[-1]
            seconds = time.perf_counter() - clock
            speed = len(rows) * config.batch_size * config.seq_len / seconds
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", False)
            line = {"step": done, "train_loss": loss, "val_loss": None, "lr": lr,
                    "grad_norm": norm, "max_load": max(loads, default=None),
                    "tokens_per_s": round(speed)}
            if validates:
                line |= validate(model, val, config)
                if not math.isfinite(line["val_loss"]):
                    raise FloatingPointError(f"step {done}: validation loss "
                                             f"{line['val_loss']}")
            log(config, line)
            if saves:
                save(config, done, model, optimizer)
            if stops:
                break
            unread, clock = [], time.perf_counter()     # leaves out validating, saving

    if done < config.steps:
        stop(f"stopped after step {done} and saved; --resume {config.out} goes on")
    finished_before = start == config.steps
    val_loss = evaluate(model, val, config) if finished_before else line["val_loss"]
    say(f"validation loss {val_loss:.4f} nats a token")
    say(loss_error(config, val_loss))
    if config.sample:
        text = sample(model, val[:32].tolist(), config, vocab_size)
        say(f"--- sample\n{text}\n---")
    return val_loss

def talk(config):
    """--prompt: continue a text from a checkpoint. This reads no data."""
    vocab_size = vocabulary(config.data)
    prompt = encode(config.prompt, vocab_size)
    config.compile = False              # would take longer than the text
    model, _ = build(config, make_recipe(config), vocab_size)
    load(Path(config.resume), {"model": get_model_state_dict(model)})
    say(sample(model, prompt, config, vocab_size))

def stop(message, code=1):
    """End the process with a sentence. Code 1: the user can go on or mend it. 3: the
    loss diverged."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:          # torchrun prints this below its own messages
        Path(report).write_text(json.dumps({"message": f"train.py: {message}",
                                            "timestamp": int(time.time())}))
    if RANK == 0 or not report:
        print(f"train.py: {message}", file=sys.stderr)
    sys.exit(code)

def main(argv=None):
    """The command. In a notebook: train.main(["--recipe", "ufp4"])."""
    if hasattr(sys.stdout, "reconfigure"):      # what a terminal can't show becomes "?"
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    # Saving warns of this, but one process needs none
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        config = parse_args(argv)
        if WORLD > 1:
            dist.init_process_group()       # gloo for CPU tensors, NCCL for a GPU's
        train(config) if config.prompt is None else talk(config)
        if WORLD > 1:
            dist.destroy_process_group()
    except FloatingPointError as e:
        stop(f"{e}; --resume would repeat the same numbers, so start another run with "
             "a changed setting, such as a lower --lr", 3)
    except (ValueError, OSError, ImportError) as e:
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        about_it = cache and str(getattr(e, "filename", "")).startswith(cache)
        stop(f"TORCHINDUCTOR_CACHE_DIR can't be used: {e}" if about_it else e)

if __name__ == "__main__":
    sys.modules["train"] = sys.modules["__main__"]      # a file of --with imports train
    main()
