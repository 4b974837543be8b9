"""Pretrain a small GPT, dense or mixture-of-experts, in 4 bits or in BF16.

    python train.py --recipe ufp4               # 0.9M parameters, or on a GPU 26M
    python train.py --recipe ufp4 --lr 1e-3     # another run, in a folder of its own
    python train.py --resume out/RUN            # goes on after Ctrl-C or a crash
    python train.py --resume out/RUN --steps 900    # and for longer
    python train.py --resume out/RUN/ckpt-700 --recipe e2m1 --out out/BRANCH
    python train.py --init out/RUN --data my.txt    # a new run, from its weights
    python train.py --resume out/RUN --prompt "def "            # generates text
    torchrun --nproc-per-node 8 train.py --model dense-1.5b     # on 8 GPUs
    python train.py --model moe-124b --dry-run 512              # what it would need

A recipe (see ufp4.py) says how the linear layers inside the transformer's blocks do
their matrix products. (The recipe bf16 quantizes nothing.) All products are computed in
BF16, or on hardware without it in float32, see --dtype. Weights, optimizer, residual
stream, loss and router are always in float32.

Part I trains: model, settings, data, optimizer, validation, checkpoints, and the loop.
Part II manages runs: flags, a run's folder, Ctrl-C, the log, export, --dry-run.
"""
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # No traceback for Ctrl-C while torch is imported
    signal.signal(signal.SIGINT, lambda *_: sys.exit("train.py: interrupted"))

import argparse
import copy
import functools
import importlib.util
import itertools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import subprocess
import threading
import time
import warnings
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

# Torch's threads wait for each other in a busy loop. If another program runs, this
# makes steps many times slower. So let them sleep after some rounds
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_state_dict, set_model_state_dict)
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

def import_file(path, name):
    """Import a Python file by its place, under a name that no other module has."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

# Other packages called ufp4 or data may be installed. So import the files beside this
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import ufp4
prepare = import_file(HERE / "data" / "prepare.py", "ufp4_prepare")
UserError = prepare.UserError       # main() prints its message alone

def require(condition, message):
    """UserError if the user made a mistake."""
    if not condition:
        raise UserError(message)

# ========================== Part I: a model, and its training =========================

# --- Processes -----------------------------------------------------------------------
# Under torchrun several processes train one model. FSDP2 shards it: each keeps a part
# of each weight, of its gradient and of its optimizer state. Before a block runs, FSDP2
# gathers its whole weights in float32, so they are quantized as in a single process.
# N processes compute what one does with --grad-accum N, except for random bits and the
# order of sums. (With E8M0 scales only if N is a power of two: the loss is divided by N
# before the backward pass, and scales that are powers of two follow no other factor.)

# torch.distributed.checkpoint warns where there is one process, which is fine
warnings.filterwarnings("ignore", "torch.distributed is disabled")

GPU = torch.cuda.is_available()
RANK = int(os.environ.get("RANK", 0))           # this process's number, from torchrun
WORLD = int(os.environ.get("WORLD_SIZE", 1))    # how many processes there are

def all_sum(t):
    """Sum a tensor over the processes, in place."""
    if WORLD > 1:
        dist.all_reduce(t)
    return t

def in_any_process(condition):
    """Whether this holds in any process. (A tensor on the CPU waits for no GPU.)"""
    return all_sum(torch.tensor(float(condition))).item() > 0

def say(text):
    """Print, from one process, above the progress bar."""
    if RANK == 0:
        tqdm.write(text)

# --- The model -----------------------------------------------------------------------
# Shapes: B sequences of T tokens, M = B T tokens in all, C = dim, D = C / heads,
# V tokens in the vocabulary, E experts, of which each token goes to k.

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
    """Many small experts, and a shared one for all tokens (arXiv 2401.06066). A token
    goes to the k experts with the largest score + bias. No token is dropped. The bias,
    which no gradient trains, balances their load (arXiv 2408.15664). Outputs of experts
    are weighted by scores alone."""
    def __init__(self, config, recipe):
        super().__init__()
        dim, hidden, experts = config.dim, config.hidden, config.experts
        self.top_k = config.top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.fc1 = ExpertLinear(experts, dim, 2 * hidden, recipe)
        self.fc2 = ExpertLinear(experts, hidden, dim, recipe)
        self.shared = SwiGLU(config, recipe)
        self.register_buffer("bias", torch.zeros(experts))
        # Tokens of each expert since the last balance()
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, x):                                           # (B, T, C)
        flat = x.flatten(0, 1)                                      # (M, C)
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(self.router(flat.float()))       # (M, E), float32
        chosen = (scores + self.bias).topk(self.top_k).indices      # (M, k)
        weights = scores.gather(-1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        # Row i of (M k) rows belongs to token i // k. Sort them by expert
        expert, order = chosen.flatten().sort(stable=True)
        # offsets[e] is how many rows belong to experts 0 to e: where those of e end.
        # (bincount would make the CPU wait for a GPU)
        ids = torch.arange(len(self.bias), device=x.device)         # 0, ..., E - 1
        offsets = torch.searchsorted(expert, ids, right=True).int()         # (E)
        if self.training:       # (with --remat each token counts twice, which is fine)
            self.load += torch.diff(offsets, prepend=offsets.new_zeros(1))
        sorted_x = flat[order // self.top_k]                        # (M k, C)
        gate, up = self.fc1(sorted_x, offsets).chunk(2, -1)
        out = self.fc2(F.silu(gate) * up, offsets)                  # (M k, C)
        # Back to the order of tokens
        out = out[order.argsort()].unflatten(0, weights.shape)      # (M, k, C)
        out = (out * weights.unsqueeze(-1)).sum(1)                  # (M, C)
        return self.shared(x) + out.view(x.shape)

    @torch.no_grad()
    def balance(self, rate=1e-2):
        """Once a step: add `rate` to the bias of experts with less than the mean load,
        subtract it where it is more. Returns (largest load) / (mean load)."""
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
        self.compile_it, self.remat = config.compile, config.remat

    def forward(self, x):                                           # (B, T, C)
        compute = type(self).compute    # unbound: compiled once for all blocks
        if self.compile_it:
            compute = compiled(compute)
        if self.remat:                  # draws the same random bits again
            return checkpoint(compute, self, x, use_reentrant=False)
        return compute(self, x)

    def compute(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

compiled = functools.cache(torch.compile)

class GPT(nn.Module):
    """Pre-norm RMSNorm, RoPE, attention, SwiGLU or MoE; no biases, untied head."""
    def __init__(self, config, recipe, vocab_size):
        super().__init__()
        self.use_bf16 = config.dtype == "bfloat16"
        layers, keep, bf16 = config.layers, config.keep_bf16, ufp4.RECIPES["bf16"]
        # The last `keep` blocks are not quantized, or if it is negative, the first ones
        kept = range(layers - keep, layers) if keep >= 0 else range(-keep)
        self.embed = nn.Embedding(vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            Block(config, bf16 if i in kept else recipe) for i in range(layers))
        self.norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self, seed):
        """As GPT-2 does: Gaussian numbers, smaller in layers that write to the residual
        stream. Each row has its own seed. So a process draws only the rows of its own
        shard, and gets the same numbers however many processes there are."""
        small = 0.02 / math.sqrt(2 * len(self.blocks))
        for number, (name, p) in enumerate(self.named_parameters()):
            writes = name.endswith(("proj.weight", "fc2.weight"))
            rows, first = p, 0
            if hasattr(p, "to_local"):      # FSDP2: equal shards, but for the last ones
                rows, first = p.to_local(), RANK * math.ceil(len(p) / WORLD)
            values = np.ones(rows.shape, dtype=np.float32)          # a norm's gains
            if p.dim() > 1:
                for i in range(len(rows)):
                    generator = np.random.default_rng((seed, number, first + i))
                    values[i] = generator.standard_normal(p.shape[1:], np.float32)
                values *= small if writes else 0.02
            rows.copy_(torch.from_numpy(values))
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, tokens, targets=None):
        """tokens, targets (B, T) -> logits (B, T, V), or with targets the mean loss."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.use_bf16):
            x = self.embed(tokens)                                  # (B, T, C)
            for block in self.blocks:
                x = block(x)
            logits = self.lm_head(self.norm(x))                     # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

# --- Settings ------------------------------------------------------------------------

NANO = dict(layers=4, dim=128, heads=4, hidden=352, experts=0, top_k=0, seq_len=256,
            batch_size=8, grad_accum=1, steps=800, lr=3e-3, data="python")
SMALL = dict(layers=8, dim=512, heads=8, hidden=1408, experts=0, top_k=0, seq_len=1024,
             batch_size=32, grad_accum=1, steps=2000, lr=1e-3, data="python")
LARGE = dict(layers=24, dim=2048, heads=16, hidden=6016, experts=0, top_k=0,
             seq_len=4096, batch_size=256, grad_accum=0, steps=30_000, lr=4e-4,
             data="fineweb")
MEDIUM = dict(SMALL, layers=12, dim=640, heads=10, hidden=1728, batch_size=480,
              grad_accum=0, steps=20_000, lr=6e-4, data="fineweb")
PRESETS = {
    "nano": NANO,
    "nano-moe": dict(NANO, hidden=96, experts=16, top_k=3),
    "small": SMALL,
    "small-moe": dict(SMALL, hidden=352, experts=32, top_k=3),
    "medium": MEDIUM,               # 124M parameters, as GPT-2's smallest model
    # The paper's models. It says only how many parameters they have in all. Their
    # shapes, batches and learning rates are our choice, and we have not trained them
    "dense-1.5b": LARGE,
    "moe-7.9b": dict(LARGE, dim=2400, heads=25, hidden=320, experts=128, top_k=8,
                     batch_size=512, steps=50_000, lr=3e-4),
    "moe-124b": dict(LARGE, layers=30, dim=4096, heads=32, hidden=1024, experts=320,
                     top_k=6, batch_size=2048, steps=60_000, lr=2e-4)}

def setting(default, text):
    """A field of Config, with its text in --help."""
    return field(default=default, metadata={"help": text})

@dataclass
class Config:
    """Each field is a flag: batch_size is --batch-size."""
    recipe: str = setting("ufp4", "how layers multiply, see RECIPES in ufp4.py")
    model: str = setting("small" if GPU else "nano", ", ".join(PRESETS))
    # Where to start, and what to do
    out: str = setting(None, "the run's folder (default: out/MODEL-RECIPE-sSEED)")
    overwrite: bool = setting(False, "delete the run that is in --out")
    resume: str = setting(None, "go on with this run, a folder or a checkpoint")
    init: str = setting(None, "start with the weights of this run, checkpoint or "
                              "exported file; all else is new")
    prompt: str = setting(None, "only generate text after this, by the run of --resume")
    max_new_tokens: int = setting(200, "how many tokens --prompt generates")
    export: str = setting(None, "only write weights and settings of --resume to a file")
    dry_run: int = setting(None, "only print what a run on so many processes needs")
    with_: str = setting(None, "your own Python file, which adds to ufp4.RECIPES")
    # How to compute
    seed: int = setting(0, "of weights, batches, rotations and random bits")
    device: str = setting("cuda" if GPU else "cpu", "cpu, cuda, cuda:1, mps, ...")
    dtype: str = setting(None, "of products: float32, or bfloat16 if hardware has it")
    compile: bool = setting(False, "torch.compile the transformer's blocks")
    remat: bool = setting(False, "activation checkpointing: less memory, more time")
    keep_bf16: int = setting(0, "blocks not quantized: the last N; -N: the first N")
    # The optimizer. The schedule multiplies the learning rate of each parameter group
    schedule: str = setting("cosine", "cosine, or wsd: warm-up, constant, linear decay")
    warmup: int = setting(None, "steps (default: a tenth of the preset's steps, and at "
                                "most a fifth of --steps)")
    decay_frac: float = setting(0.2, "part of the steps in which wsd decays")
    final_lr_frac: float = setting(0.1, "last learning rate, as a fraction of the peak")
    weight_decay: float = setting(0.1, "of matrices, by AdamW")
    clip: float = setting(1.0, "largest gradient norm; 0 does not clip")
    # What is validated, logged and saved
    eval_interval: int = setting(100, "steps between validations; 0: only at the end")
    eval_windows: int = setting(None, "validation windows of SEQ_LEN tokens (default: "
                                      "128, or the next multiple of the processes)")
    log_interval: int = setting(10, "steps between lines of the log")
    save_interval: int = setting(100, "steps between checkpoints")
    keep: int = setting(2, "how many checkpoints to keep; 0: all")
    save_at: str = setting(None, "also save at these steps, such as 500,900, and keep "
                                 "these checkpoints")
    # The preset gives these, unless a flag does
    data: str = setting(None, "python, shakespeare, fineweb, a text file, or a folder "
                              "of token files")
    layers: int = setting(None, "number of blocks")
    dim: int = setting(None, "width of the residual stream")
    heads: int = setting(None, "attention heads")
    hidden: int = setting(None, "width inside the MLP (its FFN dim), or in each expert")
    experts: int = setting(None, "experts in a block; 0 for a dense model")
    top_k: int = setting(None, "experts per token")
    seq_len: int = setting(None, "tokens in a sequence")
    batch_size: int = setting(None, "sequences in a step, in all")
    grad_accum: int = setting(None, "micro-batches of a step; 0: as many as let each "
                                    "process compute one sequence at a time")
    steps: int = setting(None, "steps in all")
    lr: float = setting(None, "peak learning rate")
    # The recipe gives these, unless a flag does
    fmt: str = setting(None, "format of the numbers: e2m1, e1m2 or int4")
    scale: str = setting(None, "format of the scales: fp32, e4m3 or e8m0")
    block: int = setting(None, "how many numbers share a scale")
    rht: str = setting(None, "GEMMs with the RHT, such as dgrad,wgrad; or all, none")
    sr: str = setting(None, "operands with SR, such as x,dy; or all, none")
    gemms: str = setting(None, "GEMMs that are quantized, such as dgrad,wgrad")
    rht_block: int = setting(None, "size of the Hadamard matrix: 16, 32, 64, ...")

    def __post_init__(self):
        """Fill in what the preset gives. UserError for values that cannot be."""
        check_types(self)
        preset = PRESETS[self.model]
        for name, value in preset.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.warmup is None:         # at most a fifth of --steps
            self.warmup = min(preset["steps"] // 10, self.steps // 5)
        if self.eval_windows is None:
            self.eval_windows = math.ceil(128 / WORLD) * WORLD
        check_values(self)

    @property
    def micro_steps(self):
        """How many micro-batches make a step."""
        return self.grad_accum or max(1, self.batch_size // (self.dry_run or WORLD))

    @property
    def steps_to_save(self):
        """The steps of --save-at."""
        return [int(step) for step in self.save_at.split(",")] if self.save_at else []

RECIPE_FIELDS = ("fmt", "scale", "block", "rht", "sr", "gemms", "rht_block")

def flag(name):
    """The flag of a field. with_ is --with, as Python reserves `with`."""
    return "--" + name.strip("_").replace("_", "-")

def make_recipe(config):
    """The recipe, as changed by flags. The random signs of the RHT follow from the
    seed, and are the same in all layers and steps."""
    changes = {name: getattr(config, name) for name in RECIPE_FIELDS
               if getattr(config, name) is not None}
    for name, allowed in (("rht", ufp4.GEMMS), ("sr", ufp4.OPERANDS),
                          ("gemms", ufp4.GEMMS)):
        if name in changes:
            changes[name] = split_names(name, changes[name], allowed)
    require(config.recipe in ufp4.RECIPES, f"unknown recipe {config.recipe!r}: choose "
            f"from {', '.join(ufp4.RECIPES)}")
    recipe = ufp4.RECIPES[config.recipe]
    require(recipe.fmt or not changes, f"{' '.join(map(flag, changes))} has no effect: "
            f"{config.recipe} quantizes nothing")
    for name, table in ("fmt", ufp4.FORMATS), ("scale", ufp4.SCALES):
        require(changes.get(name) in (None, *table), f"unknown {flag(name)} "
                f"{changes.get(name)}: choose from {', '.join(table)}")
    size = changes.get("rht_block", 1)
    require(size & (size - 1) == 0, f"--rht-block {size} is not a power of two")
    # (Not by dataclasses.replace: a user's own class may carry more than these fields)
    recipe = copy.copy(recipe)
    changes["sign_seed"] = recipe.sign_seed + config.seed
    for name, value in changes.items():
        setattr(recipe, name, value)
    recipe.__post_init__()
    return recipe

def split_names(name, text, allowed):
    """"dgrad,wgrad" -> ("dgrad", "wgrad"). Also "all" and "none"."""
    if text in ("all", "none"):
        return allowed if text == "all" else ()
    names = tuple(text.replace(" ", "").split(","))
    require(set(names) <= set(allowed), f"{flag(name)} must be all, none or some of "
            f"{','.join(allowed)}, not {text}")
    return names

# --- Data ----------------------------------------------------------------------------

def load_data(config, vocab_size):
    """-> (shards to train on, validation tokens, the folder they are in)"""
    data = data_of(config)
    if RANK == 0:
        try:
            prepare.prepare(data)       # one process downloads for all
        except OSError as e:
            raise UserError(f"can't make the tokens of {data}: {e}") from e
    if WORLD > 1:
        dist.barrier()                  # the others wait
    paths, val_path = prepare.prepare(data)             # finds what is there
    shards, val = [prepare.read_tokens(p) for p in paths], prepare.read_tokens(val_path)
    check_tokens((*shards, val), config, vocab_size)
    return shards, val, val_path.parent.absolute()

def windows(tokens, starts, config):
    """-> inputs (B, T), and targets (B, T), which are the next tokens."""
    rows = np.stack([tokens[i:i + config.seq_len + 1] for i in starts])
    rows = torch.from_numpy(rows.astype(np.int64))
    if config.device.startswith("cuda"):
        rows = rows.pin_memory()        # so that the copy does not wait
    rows = rows.to(config.device, non_blocking=True)
    return rows[:, :-1], rows[:, 1:]

def get_batch(shards, config, step, micro_step=0):
    """A step has batch_size random windows, in micro_steps micro-batches, each split
    over the processes. Returns this process's share of one.

    The windows of a step are drawn with replacement from one shard. This is drawn, too:
    a shard twice as long is taken twice as often. So there are no epochs. Seed and step
    fix the windows, so a run can be resumed."""
    shard = shards[0]
    if len(shards) > 1:
        lengths = np.array([len(shard) for shard in shards])
        draw = np.random.default_rng((config.seed, step, 1))
        shard = shards[draw.choice(len(shards), p=lengths / lengths.sum())]
    generator = np.random.default_rng((config.seed, step))
    starts = generator.integers(0, len(shard) - config.seq_len, size=config.batch_size)
    size = config.batch_size // (WORLD * config.micro_steps)
    first = (micro_step * WORLD + RANK) * size
    return windows(shard, starts[first:first + size], config)

# --- Optimizer, schedule, sharding ---------------------------------------------------

def lr_factor(step, config):
    """By what the schedule multiplies the peak learning rate: linear warm-up, then
    cosine decay to final_lr_frac at the last step. Or, with wsd, 1 and then a linear
    decay in the last steps. (A run that is made longer by --steps is on the schedule of
    its new length at once, so its rate may jump. The log shows it.)"""
    warmup = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.schedule == "wsd":
        decay = max(1, round(config.decay_frac * config.steps))
        t = max(0, step + 1 - (config.steps - decay)) / decay
        fall = 1 - t                                                # from 1 to 0
    else:
        t = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
        fall = 0.5 * (1 + math.cos(math.pi * max(0, t)))            # from 1 to 0
    decayed = config.final_lr_frac + (1 - config.final_lr_frac) * fall
    return min(warmup, decayed)

def build_model(config, recipe, vocab_size):
    """The model, whose weights are still to be drawn or loaded.

    The meta device has shapes without memory. So no process ever holds the whole model:
    it is sharded there, then each process allocates its own shard."""
    with torch.device("meta"):
        model = GPT(config, recipe, vocab_size)
    if dist.is_initialized() and WORLD > 1:
        mesh = dist.device_mesh.init_device_mesh(config.device, (WORLD,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    return model.to_empty(device=config.device)

def build_optimizer(model, config):
    """AdamW, with weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True,
                                  weight_decay=config.weight_decay)
    for group in optimizer.param_groups:    # a group may have a rate of its own
        group["peak"] = group["lr"]
    return optimizer

# --- Validation and generation --------------------------------------------------------

@torch.no_grad()
def validate(model, val, config):
    """-> {"val_loss": ..., "noise": ..., "slope": ...} of the model, quantized as in
    training. The loss is a mean over windows spaced evenly over the text. Noise and
    slope (below 1 is shrinkage; see ufp4.noise) are means over the quantized layers,
    for this process's first batch. bf16 has none."""
    starts = np.linspace(0, len(val) - config.seq_len - 1, config.eval_windows)
    starts = np.split(starts.astype(int), WORLD)[RANK]          # this process's share
    size = config.batch_size // (WORLD * config.micro_steps)    # windows at a time
    batches = [starts[i:i + size] for i in range(0, len(starts), size)]
    model.eval()
    # If X is rounded stochastically (--sr x), use the same random bits each time
    torch.manual_seed(config.seed)
    losses = [model(*windows(val, batch, config)) * len(batch) for batch in batches]
    layers = ufp4.noise(model, windows(val, batches[0], config)[0])
    model.train()
    loss = all_sum(torch.stack(losses).sum()).item() / config.eval_windows
    found = {"val_loss": loss}
    if layers:
        found["noise"], found["slope"] = np.mean([*layers.values()], 0).tolist()
    return found

@torch.no_grad()
def generate(model, tokens, config):
    """Continue tokens (1, T) by --max-new-tokens."""
    model.eval()
    torch.manual_seed(config.seed)                      # all processes draw the same
    for _ in range(config.max_new_tokens):
        logits = model(tokens[:, -config.seq_len:])[:, -1].float()      # (1, V)
        p = torch.softmax(logits / 0.8, -1)             # at temperature 0.8
        tokens = torch.cat((tokens, torch.multinomial(p, 1)), 1)
    return tokens

# --- Checkpoints ---------------------------------------------------------------------
# Checkpoints are folders of torch.distributed.checkpoint (DCP), such as ckpt-0000700.
# With the weights and moments there is run.json: the settings and where the run stands.
CHECKPOINTS = "ckpt-" + 7 * "[0-9]"         # their names, for glob

def checkpoints(folder):
    """The complete checkpoints in a folder, oldest first. DCP writes .metadata last."""
    return sorted(path.parent for path in Path(folder).glob(f"{CHECKPOINTS}/.metadata"))

def state_of(model, optimizer):
    """The tensors of a checkpoint: those of the model and of the optimizer, not copies,
    so that load_checkpoint() fills them in place. (get_state_dict allocates the moments
    of an optimizer that has made no step.)"""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": {"state": moments["state"]}}

def load_checkpoint(path, state):
    """Read a checkpoint into the tensors of `state`. UserError if that fails."""
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        advice = "if it is damaged, delete it, and --resume uses the one before"
        if "Missing key" in str(error):
            advice = "another optimizer has written it, or another model"
        raise UserError(f"can't load {path}: {error!r}; {advice}") from e

def load_weights(path, model):
    """Fill a model with the weights of a checkpoint or of an exported file."""
    if Path(path).is_file():
        file = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, file["model"], options=options)
    else:
        load_checkpoint(path, {"model": model.state_dict()})

def save(config, run, model, optimizer):
    """Write ckpt-STEP, all processes together, and delete all but the last --keep and
    those of --save-at. Of a checkpoint that can't be written nothing is left."""
    out = Path(config.out)
    path = out / f"ckpt-{run['step']:07d}"
    try:
        if RANK == 0:
            path.mkdir(exist_ok=True)       # another process's dcp.save may be faster
            (path / "run.json").write_text(json.dumps(run))
        dcp.save(state_of(model, optimizer), checkpoint_id=path)
    except (OSError, dcp.CheckpointException) as e:
        error = e
        if isinstance(e, dcp.CheckpointException):
            error, _ = next(iter(e.failures.values()))
        if RANK == 0:
            shutil.rmtree(path, ignore_errors=True)
        free = shutil.disk_usage(out).free
        raise UserError(f"can't save {path}: {error} ({free / 1e6:,.0f} MB are free "
                        f"there); {what_is_saved(config)}") from e
    if RANK == 0 and config.keep:
        for old in checkpoints(out)[:-config.keep]:
            if int(old.name[5:]) not in config.steps_to_save:
                shutil.rmtree(old)

# --- The loop ------------------------------------------------------------------------

def train(config):
    """Train to the last step. Returns the last validation loss."""
    vocab_size = vocabulary_of(config)
    shards, val, data_folder = load_data(config, vocab_size)
    # The run's folder, which is locked; and the checkpoint to go on with, or None
    with run_folder(config) as (config.out, config.resume):
        # (data_folder is named after Python's version, or after a text's checksum)
        run = {"step": 0, "tokens": 0, "seconds": 0.0,          # where the run stands
               "settings": vars(config), "vocab_size": vocab_size,
               "data_folder": str(data_folder), "with_checksum": checksum(config.with_),
               "data_version": f"{data_folder.name}-{len(shards)}"}
        model = build_model(config, make_recipe(config), vocab_size)
        optimizer = build_optimizer(model, config)
        if config.resume:
            load_checkpoint(config.resume, state_of(model, optimizer))
            old = read_run(config.resume)
            run |= {name: old[name] for name in ("step", "tokens", "seconds")}
        elif config.init:
            load_weights(config.init, model)
        else:
            model.init_weights(config.seed)
        if RANK == 0:
            clear_folder(config)
        begin_log(config, run, model, shards)
        with signals_caught() as stop:          # Ctrl-C sets this Event
            val_loss = loop(model, optimizer, shards, val, config, run, stop)
    if checkpoints(config.out):         # not if a branch had no steps to train
        say(f"to generate text:  {command_of(config)} --prompt 'def '")
    say("to compare runs:   python bench.py runs")
    return val_loss

def loop(model, optimizer, shards, val, config, run, stop):
    """The steps from run["step"] on. Returns the last validation loss."""
    moes = [m for m in model.modules() if hasattr(m, "balance")]
    start, val_loss = run["step"], None
    began = time.perf_counter() - run["seconds"]
    if start == config.steps or is_due(start, config.eval_interval):
        val_loss = log_validation(model, val, config, start)
    bar = tqdm(range(start + 1, config.steps + 1), total=config.steps, initial=start,
               disable=RANK > 0)
    for step in bar:
        loss, norm = training_step(model, optimizer, shards, config, step - 1)
        imbalance = [moe.balance() for moe in moes]
        run["step"] = step
        run["tokens"] += config.batch_size * config.seq_len
        if step == start + 1:               # it has compiled: time from here on
            loss.item()                     # waits for the device
            timed_from, clock = step, time.perf_counter()

        last, stops = step == config.steps, in_any_process(stop.is_set())
        validates = (last or is_due(step, config.eval_interval)) and not stops
        saves = (last or stops or is_due(step, config.save_interval)
                 or step in config.steps_to_save)
        if not (validates or saves or is_due(step, config.log_interval)):
            continue
        # Only now wait for the device. The loss is averaged over the processes, the
        # other numbers are the same in all of them
        loss, norm = all_sum(loss).item() / WORLD, norm.item()
        run["seconds"] = time.perf_counter() - began
        record = {"step": step, "tokens": run["tokens"],
                  "seconds": round(run["seconds"], 1), "train_loss": loss,
                  "lr": optimizer.param_groups[0]["lr"], "grad_norm": norm}
        if step > timed_from:
            tokens = (step - timed_from) * config.batch_size * config.seq_len
            speed = tokens / (time.perf_counter() - clock)
            record["tokens_per_s"] = round(speed)
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
        if moes:
            record["max_load"] = max(imbalance).item()
        # It is enough to look at steps that are logged: a loss that is not finite
        # spoils all later ones, and nothing is saved before this check
        check_finite(config, step, train_loss=loss, grad_norm=norm)
        log(config, record)
        if validates:
            val_loss = log_validation(model, val, config, step, loss)
        if saves:
            save(config, run, model, optimizer)
        if stops:
            raise KeyboardInterrupt(f"stopped; {what_is_saved(config)}")
        # Validating and saving do not count in the next tokens/s
        timed_from, clock = step, time.perf_counter()
    return val_loss

def training_step(model, optimizer, shards, config, step):
    """Step number `step`, counted from 0 -> (the loss of this process, the norm of the
    gradient), tensors."""
    # The random bits of this step and process: a resumed run draws the same
    seeds = np.random.SeedSequence((config.seed, step, RANK))
    torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
    factor = lr_factor(step, config)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    loss = 0.0
    for micro_step in range(config.micro_steps):
        inputs, targets = get_batch(shards, config, step, micro_step)
        micro_loss = model(inputs, targets) / config.micro_steps
        micro_loss.backward()               # FSDP averages over processes here
        loss += micro_loss.detach()
    # Clips (not at --clip 0), and returns the norm before that
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
    norm = norm.full_tensor() if WORLD > 1 else norm            # FSDP's is sharded
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm

def log_validation(model, val, config, step, train_loss=None):
    """Validate, log and print. Returns the loss."""
    found = validate(model, val, config)
    check_finite(config, step, val_loss=found["val_loss"])
    log(config, {"step": step} | found)
    also = f"train_loss {train_loss:.4f}, " if train_loss is not None else ""
    say(f"step {step}: {also}val_loss {found['val_loss']:.4f}")
    return found["val_loss"]

def is_due(step, interval):
    return interval > 0 and step % interval == 0

class Diverged(FloatingPointError):
    """A loss that is not finite."""

def check_finite(config, step, **losses):
    """Diverged, and a line in the log, if one of these is not finite."""
    bad = ", ".join(f"{name} {value}" for name, value in losses.items()
                    if not math.isfinite(value))
    if bad:
        log(config, {"step": step, "diverged": bad})
        raise Diverged(
            f"step {step}: {bad}; --resume would repeat this, so start another run, "
            "for example with a lower --lr. (Or if the checkpoint was damaged on disk, "
            "resume the one before)")

# ================ Part II: what manages runs. You may stop here. ======================
#
# A run keeps its log and its last checkpoints in a folder, out/MODEL-RECIPE-sSEED. If
# that is taken, it is out/MODEL-RECIPE-sSEED-2, and so on. A checkpoint also holds the
# settings, so --resume needs only the folder, or one of its checkpoints. Flags beside
# --resume change the settings from there on, and the log says so. In a notebook,
# train.load("out/RUN") gives the trained model.

# --- Flags ---------------------------------------------------------------------------

# Flags that say what to do now. A run that is resumed does not inherit them
COMMANDS = ("out", "overwrite", "resume", "init", "prompt", "export", "dry_run")
# Sizes of weights, which a checkpoint fixes
SIZES = ("model", "layers", "dim", "heads", "hidden", "experts")

def parse_args(argv=()):
    """The flags as a Config. UserError or SystemExit if they are wrong."""
    p = argparse.ArgumentParser(prog="train.py", argument_default=argparse.SUPPRESS,
                                allow_abbrev=False, usage="train.py [FLAGS]")
    for f in fields(Config):
        how = ({"action": argparse.BooleanOptionalAction} if f.type is bool
               else {"type": f.type, "metavar": f.name.strip("_").upper()})
        if f.name == "dry_run":
            how |= {"nargs": "?", "const": WORLD, "metavar": "PROCESSES"}
        text = f.metadata["help"]
        if f.default is not None:
            text += f" (default: {f.default})"
        elif f.name in NANO:
            text += " (default: as --model has it)"
        elif f.name in RECIPE_FIELDS:
            text += " (default: as --recipe has it)"
        p.add_argument(flag(f.name), dest=f.name, help=text, **how)
    given = vars(p.parse_args(argv))
    # Absolute paths, as --resume may be called in another folder
    if given.get("data") not in (None, *prepare.NAMES) and Path(given["data"]).exists():
        given["data"] = os.path.abspath(given["data"])
    if given.get("with_"):
        given["with_"] = str(Path(given["with_"]).resolve())
    config = Config(**inherit(given))
    import_with(config.with_)
    make_recipe(config)                     # checks it
    if config.export:
        config.device = "cpu"
    if not config.dry_run:
        choose_device(config)
    return config

def inherit(given):
    """The flags that are given, and what --resume or --init adds to them."""
    require(len({"resume", "init"} & given.keys()) < 2, "--resume goes on with a run, "
            "--init starts one: give one of them")
    for name in ("prompt", "export"):
        require(name not in given or "resume" in given,
                f"{flag(name)} needs --resume with a run or a checkpoint")
    if not {"resume", "init"} & given.keys():
        return given
    how = "resume" if "resume" in given else "init"
    path = by_first_process(find_checkpoint, given[how])
    require(how == "init" or path.is_dir(),
            f"--resume {path}: a file has weights alone, --init starts a run with them")
    old = settings_of(read_run(path))
    for name in SIZES:
        require(name not in given or given[name] == old[name],
                f"{flag(name)} {given.get(name)}: {path} has {old[name]}")
    if how == "init":
        old = {name: old[name] for name in (*SIZES, "top_k")}
    if "recipe" in given:       # a new recipe drops the old run's --fmt, --rht, ...
        old = {name: old[name] for name in old.keys() - set(RECIPE_FIELDS)}
    if old.get("save_at") and "save_at" in given:   # what was kept is kept
        steps = f"{old['save_at']},{given['save_at']}".split(",")
        given["save_at"] = ",".join(dict.fromkeys(steps))       # each once
    # (To try the default would take memory on the first GPU, in each process)
    device = old.get("device", Config.device)
    if "device" not in given and device != Config.device and not has_device(device):
        say(f"the run was on {device}, which is not here")
        del old["device"], old["dtype"]     # which the device chooses
    # A folder stays a folder. Its newest checkpoint is looked for again once that is
    # locked, as another process may have saved one
    is_run = how == "resume" and path.parent == Path(given[how])
    source = given[how] if is_run else path
    return old | given | {how: str(source)}     # of two dicts the later one wins

def check_types(config):
    for f in fields(config):
        value = getattr(config, f.name)
        kinds = (int, float) if f.type is float else f.type
        require(value is None or isinstance(value, kinds),
                f"{flag(f.name)} is {value!r}, which is no {f.type.__name__}")
    require(config.model in PRESETS, f"unknown model {config.model!r}: choose from "
            f"{', '.join(PRESETS)}")

def check_values(config):
    """Check what can be checked without data or a device."""
    for name in ("steps", "layers", "dim", "heads", "hidden", "seq_len",
                 "batch_size", "eval_windows", "log_interval", "save_interval",
                 "block", "rht_block", "dry_run"):
        value = getattr(config, name)
        require(value is None or value > 0, f"{flag(name)} must be above 0, not "
                f"{value}")
    try:
        config.steps_to_save
    except ValueError:
        raise UserError("--save-at takes steps, such as 500,900, not "
                        f"{config.save_at!r}") from None
    for name in ("seed", "lr", "warmup", "clip", "final_lr_frac", "max_new_tokens",
                 "eval_interval", "keep", "weight_decay", "grad_accum"):
        value = getattr(config, name)
        require(value >= 0, f"{flag(name)} must be at least 0, not {value}")
    processes = config.dry_run or WORLD
    for name in ("out", "export"):
        require(getattr(config, name) != "", f"{flag(name)} needs a name")
    require(config.out or not config.overwrite, "--overwrite needs --out, the run that "
            "it deletes")
    require(config.warmup <= config.steps, f"--warmup {config.warmup} must be at most "
            f"--steps {config.steps}")
    require(0 < config.decay_frac <= 1, "--decay-frac must be above 0 and at most 1, "
            f"not {config.decay_frac}")
    require(abs(config.keep_bf16) < config.layers, f"--keep-bf16 {config.keep_bf16} "
            f"leaves no block to quantize, of {config.layers}")
    require(config.dim % (2 * config.heads) == 0,
            f"--dim {config.dim} must be a multiple of 2 x --heads {config.heads}")
    require(1 <= config.top_k <= config.experts or config.top_k == config.experts == 0,
            f"--top-k {config.top_k} must be from 1 to --experts {config.experts}, or "
            "both 0")
    accum = f" x --grad-accum {config.grad_accum}" if config.grad_accum else ""
    require(config.batch_size % (processes * config.micro_steps) == 0,
            f"--batch-size {config.batch_size} must be a multiple of {processes} "
            f"processes{accum}")
    require(config.dry_run or config.eval_windows % WORLD == 0, f"--eval-windows "
            f"{config.eval_windows} must be a multiple of {WORLD} processes")
    require(config.schedule in ("cosine", "wsd"),
            f"--schedule must be cosine or wsd, not {config.schedule}")
    require(config.dtype in (None, "float32", "bfloat16"),
            f"--dtype must be float32 or bfloat16, not {config.dtype}")

def by_first_process(f, *args):
    """f(*args) as process 0 finds it, or its UserError, in all processes. (What others
    see of a network disk may be older.)"""
    found, error = None, None
    if RANK == 0:
        try:
            found = f(*args)
        except UserError as e:
            error = e
    if dist.is_initialized():
        both = [found, error]
        dist.broadcast_object_list(both)
        found, error = both
    if error:
        raise error
    return found

def settings_of(run):
    """The settings that a run hands on, as far as this version has them."""
    names = {f.name for f in fields(Config)} - set(COMMANDS)
    return {name: value for name, value in run["settings"].items() if name in names}

def import_with(path):
    """Import the file of --with, if there is one. It adds to ufp4.RECIPES, may replace
    functions of this module, and can import files beside it."""
    if path:
        require(Path(path).is_file(), f"there is no file {path}: give --with FILE")
        require(path.endswith(".py"), f"{path} is not a Python file")
        sys.path.insert(0, str(Path(path).parent))
        import_file(path, f"with_{Path(path).stem}")

def checksum(path):
    """Of a user's file, or None."""
    return f"{zlib.crc32(Path(path).read_bytes()):08x}" if path else None

def hardware(device):
    """-> (the name of the GPU, or else of the CPU; whether it has BF16 instructions)"""
    if device.startswith("cuda"):
        return (torch.cuda.get_device_name(device),
                torch.cuda.is_bf16_supported(including_emulation=False))
    cpu = torch.cpu.get_capabilities()
    bf16 = any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return cpu.get("cpu_name", cpu.get("architecture", "a CPU")), bf16

def has_device(name):
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError):
        return False
    return True

def choose_device(config):
    """Check --device, and choose --dtype if it is not given."""
    try:
        if config.device == "cuda" and WORLD > 1:   # each process has its own GPU
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.empty(1, device=config.device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device {config.device}: {str(e).splitlines()[0]}") from e
    if config.dtype is None:
        config.dtype = "bfloat16" if hardware(config.device)[1] else "float32"
    # Torch compiles its product of experts, grouped_mm, in bfloat16 alone
    require(config.dtype == "bfloat16" or not (config.compile and config.experts),
            "--compile of experts needs --dtype bfloat16")

# --- A run's folder ------------------------------------------------------------------

def find_checkpoint(path):
    """The checkpoint that a path means: the newest one of a run's folder, or itself.
    ckpt-700 finds ckpt-0000700. An exported file is returned as it is."""
    path = Path(path)
    if path.is_file():
        return path
    saved = checkpoints(path)
    if saved:
        return saved[-1]
    if re.fullmatch(r"ckpt-\d+", path.name):
        path = path.with_name(f"ckpt-{int(path.name[5:]):07d}")
    others = ", ".join(other.name for other in checkpoints(path.parent))
    require((path / ".metadata").exists(), f"there is no checkpoint in {path}"
            + (f"; {path.parent} has {others}" if others else ""))
    return path

def read_run(path):
    """What a checkpoint or an exported file says about its run."""
    try:
        if Path(path).is_file():
            file = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
            require("settings" in file, "--export did not write it")
            return {name: file[name] for name in file.keys() - {"model"}}
        return json.loads((Path(path) / "run.json").read_text())
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as e:
        raise UserError(f"can't read the settings in {path}, which is damaged, or no "
                        f"checkpoint or exported file: {e}") from e

def read_source(config):
    """What the checkpoint of --resume or --init says of its run, a dict, or None."""
    source = config.resume or config.init
    if source:
        return by_first_process(lambda: read_run(find_checkpoint(source)))

def vocabulary_of(config):
    """The vocabulary size. UserError if --resume or --init has another."""
    old = read_source(config)
    if old and config.data == old["settings"]["data"]:  # it may be gone by now
        return old["vocab_size"]
    prepare.check_name(config.data)
    vocab_size = prepare.vocabulary(config.data)
    if old:
        require(vocab_size == old["vocab_size"], f"--data {config.data} has a "
                f"vocabulary of {vocab_size}, and {config.resume or config.init} one "
                f"of {old['vocab_size']}")
    return vocab_size

def data_of(config):
    """The data set. When a run goes on, its own folder of tokens, if that is there."""
    old = read_source(config) if config.resume else None
    if (old and old["settings"]["data"] == config.data
            and prepare.has_tokens(old["data_folder"])):
        return old["data_folder"]
    return config.data

def check_tokens(files, config, vocab_size):
    """UserError if a file has too few tokens, or one beyond the vocabulary."""
    for tokens in files:
        require(len(tokens) > config.seq_len, f"{tokens.filename} has {len(tokens)} "
                "tokens, too few for a sequence: use a smaller --seq-len")
        # Tokens of a user's own are read through, each process a part of them. Of our
        # own data sets the first part is enough
        end = prepare.CHUNK if config.data in prepare.NAMES else len(tokens)
        for first in range(RANK * prepare.CHUNK, end, WORLD * prepare.CHUNK):
            largest = tokens[first:first + prepare.CHUNK].max()
            require(largest < vocab_size, f"{tokens.filename} has the token {largest}, "
                    f"and its vocabulary only {vocab_size}")

@contextmanager
def run_folder(config):
    """Yields the run's folder, which is locked as long as the context lasts, and the
    checkpoint that the run starts from, or None."""
    locks = []                  # the folder is locked as long as this file is open
    try:
        yield by_first_process(choose_folder, config, locks)
    finally:
        for lock in locks:
            lock.close()

def choose_folder(config, locks):
    """-> (the run's folder, which is locked; the checkpoint to start from, or None)

        --out FOLDER                            that folder
        --resume RUN, or its last checkpoint    the run's own: it goes on
        --resume of an earlier checkpoint       a new one beside it: a branch
        none of these                           default_name(), or with -2, -3, ...

    UserError if another process trains there, or if it holds another run or later steps
    of this one, which only --overwrite deletes."""
    source = Path(config.resume) if config.resume else None
    is_run = source is not None and not (source / ".metadata").exists()
    try:
        if config.out:
            out = Path(config.out)
            out.mkdir(parents=True, exist_ok=True)
            lock_folder(out, locks)
        elif is_run or (source and checkpoints(source.parent)[-1:] == [source]):
            out = source if is_run else source.parent           # the run goes on
            lock_folder(out, locks)
        elif source:
            out = new_folder(os.path.abspath(source.parent), locks)
            say(f"{source.parent} has later checkpoints, so this branch has a folder "
                f"of its own, {out}")
        else:
            out = new_folder(default_name(config), locks)
            if str(out) != default_name(config):
                say(f"{default_name(config)} is taken, so this run is in {out}")
    except OSError as e:
        where = config.out or config.resume or "out"
        raise UserError(f"can't train in {where}: {e}") from e
    checkpoint = find_checkpoint(source) if source else None
    step = read_run(checkpoint)["step"] if source else 0
    require(step <= config.steps, f"{checkpoint} is at step {step}, beyond --steps "
            f"{config.steps}")
    others, goes_on = what_is_there(out, checkpoint)
    if others or ((out / "log.jsonl").exists() and not goes_on):
        resume = f"--resume {out} goes on with it, " if checkpoints(out) else ""
        require(config.overwrite, f"{out} holds a run: {resume}--overwrite deletes it, "
                "and without --out the new run gets a folder of its own")
    return str(out), checkpoint and str(checkpoint)

def what_is_there(out, checkpoint):
    """-> (checkpoints of other runs, or later ones; whether a run goes on here)"""
    goes_on = checkpoint is not None and out.samefile(checkpoint.parent)
    return [path for path in checkpoints(out)
            if not goes_on or path.name > checkpoint.name], goes_on

def clear_folder(config):
    """Delete what --overwrite names, and what a process that was killed has left: half
    a checkpoint, half a line of the log."""
    out, checkpoint = Path(config.out), config.resume and Path(config.resume)
    others, goes_on = what_is_there(out, checkpoint)
    half = set(out.glob(CHECKPOINTS)) - set(checkpoints(out))
    for path in (*others, *half):
        shutil.rmtree(path)
    log_file = out / "log.jsonl"
    if log_file.exists():
        whole_lines = log_file.read_bytes().rfind(b"\n") + 1
        os.truncate(log_file, whole_lines if goes_on else 0)

def default_name(config):
    """out/MODEL-RECIPE-sSEED. Flags that change the recipe stand behind it, such as
    ufp4-rht.wgrad."""
    name = f"out/{config.model}-{config.recipe}"
    for field_name in ("keep_bf16", *RECIPE_FIELDS):
        value = getattr(config, field_name)
        if value:
            name += f"-{field_name}.{value}"
    return f"{name}-s{config.seed}"

def new_folder(name, locks):
    """The first folder without a run in it: name, or name-2, name-3, ..., locked."""
    for number in itertools.count(1):
        path = Path(name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock_folder(path, locks)
        except (FileExistsError, UserError):    # a file, or a run that just begins
            continue
        if not checkpoints(path) and not (path / "log.jsonl").exists():
            return path
        locks.pop().close()

def lock_folder(out, locks):
    """Add to locks a file that is locked as long as it is open. UserError if it is
    locked already, in this process or another."""
    lock = open(out / "lock", "w")
    try:
        import fcntl
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(f"another process trains in {out}; use another --out") from None
    except (ImportError, OSError):          # Windows and some network disks
        say(f"nothing can be locked in {out}: let no other process train there")
    locks.append(lock)

# --- Ctrl-C --------------------------------------------------------------------------

@contextmanager
def signals_caught():
    """Yields an Event. Ctrl-C (SIGINT) sets it, and so do SIGTERM, SIGHUP of a terminal
    that closes, and SIGUSR1, which clusters send as a warning. The run then saves and
    stops after its step. A second Ctrl-C or SIGTERM ends the process at once. (Under
    torchrun the second Ctrl-C does: it arrives as SIGTERM.)

    Python calls a handler between two of its instructions, so the answer may take as
    long as a compiler does."""
    stop = threading.Event()
    # Python allows signal handlers in the main thread alone
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")          # Windows lacks two
    before = {number: signal.getsignal(number) for name in names
              if (number := getattr(signal, name, None)) is not None}
    # (nohup lets programs ignore one)
    caught = [n for n, old in before.items() if old != signal.SIG_IGN]
    in_notebook = hasattr(sys, "ps1")               # whose process must live on
    again = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT:
             signal.default_int_handler if in_notebook else signal.SIG_DFL}

    def handler(number, frame):
        stop.set()
        for other in caught:
            signal.signal(other, again.get(other, signal.SIG_IGN))
        if WORLD > 1:       # a cluster sends it to all, and torchrun sends it again
            signal.signal(number, signal.SIG_IGN)
        say(f"{signal.Signals(number).name}: stopping after this step; Ctrl-C "
            f"{'again ' if number == signal.SIGINT else ''}to stop now")

    for number in caught:
        signal.signal(number, handler)
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)

class Unbroken:
    """A text stream that goes on if nobody reads it: a terminal that has closed, or a
    `tee` that has ended, is no reason to lose a run."""
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        try:
            self.stream.write(text)
        except OSError:
            self.stream = open(os.devnull, "w")
        return len(text)

    def flush(self):
        try:
            self.stream.flush()
        except OSError:
            self.stream = open(os.devnull, "w")

    def __getattr__(self, name):
        return getattr(self.stream, name)

# --- The log -------------------------------------------------------------------------

def begin_log(config, run, model, shards):
    """Log and print what runs, and what is not as it was before."""
    old = read_run(config.resume) if config.resume else None

    def compared(of):
        names = "data_version", "with_checksum"
        return settings_of(of) | {name: of.get(name) for name in names}

    now, before = compared(run), compared(old or run)
    changed = {name: [before[name], now[name]] for name in before.keys() & now.keys()
               if before[name] != now[name]}
    name = hardware(config.device)[0]
    log(config, {"settings": run["settings"], "start": run["step"], "changed": changed,
                 "data_version": run["data_version"], "commit": git_commit(),
                 "processes": WORLD, "torch": torch.__version__, "hardware": name})
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{config.model}, {parameters / 1e6:.2f}M parameters, recipe {config.recipe}, "
        f"{config.dtype} on {WORLD} x {name}, steps {run['step']} to {config.steps}, "
        f"{config.out}")
    for name, (was, value) in changed.items():
        if name == "with_checksum":
            say(f"changed: {config.with_} is not as it was")
        else:
            say(f"changed: {name} is {value}, and was {was}")
    there = sum(map(len, shards))
    read = config.steps * config.batch_size * config.seq_len
    say(f"data: {there:,} tokens in {run['data_folder']}, and {config.steps} steps "
        f"read {read:,}, {read / there:.1f} times as many")
    if make_recipe(config).fmt and run["step"] < config.steps:
        say("first the quantizers are compiled, which takes up to a minute")

def log(config, record):
    """Append a dict to the log, as a line. One write, so that it is never half there
    if the process is killed."""
    if RANK == 0:
        path = Path(config.out) / "log.jsonl"
        try:
            with open(path, "ab", buffering=0) as file:
                file.write(f"{json.dumps(record)}\n".encode())
        except OSError as e:
            raise UserError(f"can't write {path}: {e}; {what_is_saved(config)}") from e

def read_log(path):
    """-> [header, step, step, ...], dicts. Each start of a run logs a header. This
    returns the last one, with the step and --init of the first, and all that was ever
    changed. A step may have several lines. What was logged after the step at which a
    run was resumed does not count."""
    header, steps = None, {}
    for text in Path(path).read_text(errors="replace").splitlines():
        try:
            record = json.loads(text)
        except ValueError:              # half a line, of a process that was killed
            continue
        if not isinstance(record, dict):
            continue
        if "step" in record:
            steps[record["step"]] = steps.get(record["step"], {}) | record
        elif "settings" in record:
            steps = {n: old for n, old in steps.items() if n <= record["start"]}
            if header:
                record["start"] = header["start"]
                record["settings"]["init"] = header["settings"].get("init")
                record["changed"] = header["changed"] | record["changed"]
            header = record
    require(header, f"{path} is damaged: it has no settings")
    return [header, *(steps[n] for n in sorted(steps))]

def what_is_saved(config):
    """For whoever stops a run: its newest checkpoint, and how to go on."""
    saved = checkpoints(config.out)
    if not saved:
        return "nothing is saved"
    return (f"step {int(saved[-1].name[5:])} is saved; to go on: "
            f"{command_of(config)}")

def command_of(config):
    """The command that resumes the run, for a shell."""
    program = "python"
    if WORLD > 1:
        here = os.environ.get("LOCAL_WORLD_SIZE", WORLD)    # torchrun sets it
        program = f"torchrun --nproc-per-node {here}"
    return f"{program} train.py --resume {shlex.quote(str(config.out))}"

def git_commit():
    """The commit of this code, "-dirty" if it was changed; None outside of git."""
    command = "git describe --always --dirty --abbrev=40 --exclude=*"   # no tags
    done = subprocess.run(command, shell=True, cwd=HERE, capture_output=True, text=True)
    return done.stdout.strip() or None

# --- A trained model -----------------------------------------------------------------

def load(path, device="cpu", **settings):
    """The model of a run, of a checkpoint or of an exported file, for a notebook. Its
    settings are in model.config. They are those of the run, but for `settings`: with
    recipe="e2m1" its weights are used in E2M1, and --rht and the like, which changed
    the recipe of the run, are dropped."""
    path = find_checkpoint(path)
    run = read_run(path)
    old = settings_of(run) | {"device": device, "compile": False}
    if "recipe" in settings:
        old = {name: old[name] for name in old.keys() - set(RECIPE_FIELDS)}
    config = Config(**old | settings)
    is_needed = config.recipe not in ufp4.RECIPES or "with_" in settings
    if config.with_ and not is_needed and not Path(config.with_).is_file():
        warnings.warn(f"{config.with_} is gone, so {path} is loaded without it")
    elif config.with_:
        import_with(config.with_)
        if "with_" not in settings and run.get("with_checksum") not in (
                None, checksum(config.with_)):
            warnings.warn(f"{config.with_} is not as it was when {path} was trained")
    model = build_model(config, make_recipe(config), run["vocab_size"])
    load_weights(path, model)
    model.config = config
    return model.eval()

def export(path, file):
    """Write the weights and settings of a run or checkpoint to one file, for load().
    UserError if it can't be written."""
    require(WORLD == 1, "--export is for one process: python train.py, not torchrun")
    path = find_checkpoint(path)
    weights = load(path).state_dict()
    try:
        with prepare.whole(Path(file)) as temporary:
            torch.save(read_run(path) | {"model": weights}, temporary)
    except (OSError, RuntimeError) as e:                # RuntimeError: a full disk
        raise UserError(f"can't write {file}: {e}") from e
    say(f"{file} has the weights of {path}; train.load({file!r}) makes a model of it")

def answer_prompt(config):
    """--prompt: continue a text, and print both. Needs no data."""
    path = find_checkpoint(config.resume)
    vocab_size = read_run(path)["vocab_size"]
    require(prepare.vocabulary(config.data) == vocab_size, "can't find the vocabulary "
            f"of {path}: --data {config.data} has another, or is gone")
    # A shell without a UTF-8 locale gives bytes that Python could not decode
    prompt = os.fsencode(config.prompt).decode(errors="replace")
    tokens = prepare.encode(prompt or "\n", config.data)
    config.compile = False              # would take longer than the text
    model = build_model(config, make_recipe(config), vocab_size)
    load_weights(path, model)
    tokens = generate(model, torch.tensor([tokens], device=config.device), config)
    say(prepare.decode(tokens[0].tolist(), config.data))

# --- --dry-run -----------------------------------------------------------------------

def count_parameters(config, model):
    """-> (all of them, those that a token uses: the others are in experts)"""
    total = sum(p.numel() for p in model.parameters())
    unused = config.experts - config.top_k
    return total, total - config.layers * unused * 3 * config.dim * config.hidden

def activation_bytes(config, vocab_size):
    """What autograd saves for the backward pass, for each token of a micro-batch."""
    dim, hidden, k = config.dim, config.hidden, config.top_k
    size = 4 if config.dtype == "float32" else 2                    # bytes a number
    block = 4 * 4 * dim                 # inputs and outputs of both norms, in float32
    # In --dtype: inputs of qkv, fc1 and proj; q, k, v before and after RoPE
    block += size * (2 + 6 + 1) * dim
    # Inputs and outputs of experts; and in the MLP and in each expert four of `hidden`
    block += size * (2 * k * dim + 4 * (k + 1) * hidden)
    if k and make_recipe(config).fmt:       # padded inputs, and where each row was
        block += size * k * (dim + hidden) + 2 * 8 * k
    blocks = config.layers * block
    if config.remat:            # each block's input, and all of the block at work
        blocks = config.layers * 4 * dim + block
    return blocks + 12 * dim + 8 * vocab_size       # the head: logits, their gradient

def dry_run(config):
    """--dry-run: print what a run needs. The model is on the meta device, so this takes
    neither data nor memory."""
    vocab_size, processes = vocabulary_of(config), config.dry_run
    with torch.device("meta"):
        model = GPT(config, ufp4.RECIPES["bf16"], vocab_size)
    total, active = count_parameters(config, model)
    # FSDP2 cuts each parameter along its first dimension. To compute a block, it
    # gathers the block's weights, and those of the next meanwhile; and the gradients
    parameters = [*model.parameters()]
    shard = sum(math.ceil(len(p) / processes) * p[0].numel() for p in parameters)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    tokens = config.batch_size * config.seq_len
    micro = tokens // (processes * config.micro_steps)
    head = vocab_size * config.dim
    # Of layers that are not quantized, autocast keeps copies for the backward pass
    copied, is_bf16 = head, make_recipe(config).fmt is None
    if is_bf16:
        copied += block * (1 if config.remat else config.layers)
    memory = {"weights": 4 * shard, "gradients": 4 * shard, "moments": 8 * shard,
              "blocks that FSDP2 gathers": 3 * 4 * block if processes > 1 else 0,
              "embedding, head, their gradients": 2 * 8 * head if processes > 1 else 0,
              "BF16 copies of weights": 0 if config.dtype == "float32" else 2 * copied,
              "activations": micro * activation_bytes(config, vocab_size),
              "the loss, at its peak": micro * 8 * vocab_size}
    say(f"{config.model}: {total / 1e6:,.2f}M parameters, of which a token uses "
        f"{active / 1e6:,.2f}M (vocabulary: {vocab_size:,})")
    say(f"memory of each process, of {processes}, in GB:")
    for what, size in (*memory.items(), ("in all", sum(memory.values()))):
        say(f"    {what:32} {size / 1e9:9.3f}")
    say(f"activations are what autograd saves of a micro-batch of {micro:,} tokens, "
        f"in {config.dtype or 'bfloat16'};\n--remat lowers them, and --grad-accum if "
        "that is more than a sequence")
    say(f"tokens: {config.steps:,} steps of {tokens:,}, {config.steps * tokens:,} in "
        "all")

# --- The command ---------------------------------------------------------------------

def main(argv=()):
    """The command. In a notebook: train.main(["--recipe", "ufp4"]), which returns the
    last validation loss. A user's mistake is one sentence, any other error a traceback.
    """
    if hasattr(sys.stdout, "reconfigure"):      # what a terminal can't show becomes "?"
        sys.stdout.reconfigure(errors="replace")
    try:
        if WORLD > 1:
            dist.init_process_group()       # gloo for CPU tensors, NCCL for a GPU's
        config = parse_args(argv)
        if config.dry_run:
            return dry_run(config)
        if config.export:
            return export(config.resume, config.export)
        loss = train(config) if config.prompt is None else answer_prompt(config)
        if WORLD > 1:
            dist.destroy_process_group()
        return loss
    except Diverged as e:
        print(f"train.py: {e}", file=sys.stderr)
        sys.exit(3)                         # bench.py recognizes this code
    except UserError as e:
        sys.exit(f"train.py: {e}")
    except KeyboardInterrupt as e:
        sys.exit(f"train.py: {str(e) or 'interrupted'}")

if __name__ == "__main__":
    # A file of --with may `import train`: it gets this module, not a second copy
    sys.modules["train"] = sys.modules["__main__"]
    sys.stdout, sys.stderr = Unbroken(sys.stdout), Unbroken(sys.stderr)
    main(sys.argv[1:])
