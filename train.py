"""Pretrain a small GPT, dense or mixture-of-experts, in 4 bits or in BF16.

    python train.py --recipe bf16   # the baseline: nano, or small on a GPU
    python train.py --recipe ufp4   # also prints its loss relative to that baseline
    python train.py --recipe ufp4 --resume      # goes on after Ctrl-C or a crash
    torchrun --nproc-per-node 8 train.py --model dense-1.5b --grad-accum 8  # 8 GPUs

    # continue a text with the trained model
    python train.py --recipe ufp4 --resume --prompt "def "

A recipe (see ufp4.py) says how the linear layers of the blocks multiply. Embedding, LM
head, router and norms are never quantized. The router works in float32, the rest under
BF16 autocast where the hardware has BF16, elsewhere in float32 (--dtype).

A run writes log.jsonl and its last two checkpoints into the directory OUT.
"""
import argparse
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
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
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import ufp4
from data.prepare import check, decode, encode, prepare, read_tokens, vocabulary

GPU = torch.cuda.is_available()
RANK = int(os.environ.get("RANK", 0))           # this process's number, from torchrun
WORLD = int(os.environ.get("WORLD_SIZE", 1))    # how many processes there are

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
    def __init__(self, s, recipe):
        super().__init__()
        self.heads = s.heads
        self.qkv = ufp4.Linear(s.dim, 3 * s.dim, bias=False, recipe=recipe)
        self.proj = ufp4.Linear(s.dim, s.dim, bias=False, recipe=recipe)

    def forward(self, x):                                           # (B, T, C)
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))    # (B, T, 3, heads, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                    # (B, heads, T, D) each
        y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))

class SwiGLU(nn.Module):
    """fc2(silu(gate) * up), where one product gives gate and up (arXiv 2002.05202)."""
    def __init__(self, s, recipe):
        super().__init__()
        self.fc1 = ufp4.Linear(s.dim, 2 * s.hidden, bias=False, recipe=recipe)
        self.fc2 = ufp4.Linear(s.hidden, s.dim, bias=False, recipe=recipe)

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
    def __init__(self, s, recipe):
        super().__init__()
        self.top_k = s.top_k
        self.router = nn.Linear(s.dim, s.experts, bias=False)
        self.fc1 = ExpertLinear(s.experts, s.dim, 2 * s.hidden, recipe)
        self.fc2 = ExpertLinear(s.experts, s.hidden, s.dim, recipe)
        self.shared = SwiGLU(s, recipe)
        self.register_buffer("bias", torch.zeros(s.experts))
        self.register_buffer("load", torch.zeros(s.experts))    # since last balance()

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
        copies = flat[:, None].expand(-1, self.top_k, -1).flatten(0, 1)     # (M k, C)
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
    def __init__(self, s, recipe):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)
        self.attn = Attention(s, recipe)
        self.mlp = MoE(s, recipe) if s.experts else SwiGLU(s, recipe)

    def forward(self, x):                                           # (B, T, C)
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    """Pre-norm RMSNorm, RoPE, attention, SwiGLU or MoE; no biases, untied head."""
    def __init__(self, s, recipe, vocab_size):
        super().__init__()
        if s.dim % (2 * s.heads):
            raise ValueError(f"--dim {s.dim} must be a multiple of 2 x --heads "
                             f"{s.heads}")
        if (s.experts or s.top_k) and not 1 <= s.top_k <= s.experts:
            raise ValueError(f"--top-k {s.top_k} must be from 1 to --experts "
                             f"{s.experts}, or both must be 0")
        self.bf16 = s.dtype == "bfloat16"
        self.embed = nn.Embedding(vocab_size, s.dim)
        self.blocks = nn.ModuleList()
        for i in range(s.layers):
            quantized = i < s.layers - s.keep_bf16
            self.blocks.append(Block(s, recipe if quantized else ufp4.RECIPES["bf16"]))
        self.norm = nn.RMSNorm(s.dim)
        self.lm_head = nn.Linear(s.dim, vocab_size, bias=False)

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

def at_least(low, kind):
    """A parser of numbers that are not below `low`."""
    def number(text):
        if not kind(text) >= low:                               # NaN is not, either
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return kind(text)
    number.__name__ = "whole number" if kind is int else "number"   # for argparse
    return number

def names(text):
    """A parser of names with commas between them. "none" stands for no name."""
    return () if text == "none" else tuple(text.split(","))

positive, natural, real = at_least(1, int), at_least(0, int), at_least(0, float)
CHOICES = {"recipe": ufp4.RECIPES, "model": PRESETS, "dtype": ("float32", "bfloat16"),
           "fmt": ufp4.FORMATS, "scale": ufp4.SCALES}

@dataclass
class Settings:
    """Each field is a flag: batch_size is --batch-size. The annotation is the function
    that parses the flag. The comment becomes its help."""
    recipe: str = "ufp4"            # how layers multiply, see RECIPES in ufp4.py
    model: str = "small" if GPU else "nano"     # sizes, schedule and data, see PRESETS
    data: str = None                # python, shakespeare, fineweb or a text file
    out: str = None                 # directory (default: out/MODEL-RECIPE-sSEED)
    seed: natural = 0               # of weights, batches, rotations and random bits
    keep_bf16: natural = 0          # how many of the last blocks to leave unquantized
    resume: bool = False            # go on from the last checkpoint in OUT
    branch: str = None              # start from this checkpoint; its recipe may differ
    prompt: str = None              # only continue this text; with --resume or --branch
    device: str = "cuda" if GPU else "cpu"      # cpu, cuda, cuda:1, mps, ...
    dtype: str = None               # of products (default: bfloat16 if hardware has it)
    compile: bool = False           # torch.compile blocks (with experts only bfloat16)
    remat: bool = False             # activation checkpointing: less memory, more time
    grad_accum: positive = 1        # gradient accumulation steps
    min_lr: real = 0.1              # last learning rate, as a fraction of the peak
    weight_decay: real = 0.1        # of matrices, by AdamW
    clip: real = 1.0                # largest gradient norm; 0 does not clip
    eval_interval: positive = 100   # steps between validations
    eval_windows: positive = 128    # validation windows of SEQ_LEN tokens
    save_interval: positive = 100   # steps between checkpoints
    log_interval: positive = 10     # steps between lines of the log
    sample: natural = 200           # tokens of text to print at the end
    # These come from the preset if no flag is given
    layers: positive = None         # number of blocks
    dim: positive = None            # width of the residual stream
    heads: positive = None          # attention heads
    hidden: positive = None         # width inside the MLP, or inside each expert
    experts: natural = None         # experts in a block; 0 for a dense model
    top_k: natural = None           # experts that each token takes
    seq_len: positive = None        # tokens in a sequence
    batch_size: positive = None     # sequences in a step, of all processes together
    steps: positive = None          # steps in all
    lr: real = None                 # peak learning rate
    warmup: natural = None          # steps (default: the preset's; at most a fifth)
    # These come from the recipe if no flag is given
    fmt: str = None                 # format of the elements
    scale: str = None               # format of the scales
    block: positive = None          # elements that share a scale
    rht: names = None               # products that rotate: fprop,dgrad,wgrad, or none
    sr: names = None                # operands rounded stochastically: x,w,dy, or none
    tiles: bool = None              # square blocks in the weights
    rht_block: positive = None      # size of the Hadamard matrix

    @property
    def overrides(self):
        """The fields of the recipe that flags change."""
        given = {name: getattr(self, name) for name in RECIPE_FIELDS}
        return {name: value for name, value in given.items() if value is not None}

RECIPE_FIELDS = ("fmt", "scale", "block", "rht", "sr", "tiles", "rht_block")

def parse_args(argv=None):
    """The flags as Settings. Preset and hardware fill in what they leave open."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.error = lambda message: stop(message, 2)
    comments = dict(re.findall(r"(\w+): .*# (.*)", inspect.getsource(Settings)))
    for f in fields(Settings):
        text, how = comments[f.name], {"action": argparse.BooleanOptionalAction}
        if f.type is not bool:
            how = {"type": f.type, "choices": CHOICES.get(f.name)}
            text += "" if f.default is None else f" (default: {f.default})"
        name = "--" + f.name.replace("_", "-")
        p.add_argument(name, default=f.default, help=text, **how)
    s = Settings(**vars(p.parse_args(argv)))
    preset = PRESETS[s.model]
    if s.warmup is None:
        s.warmup = min(preset["warmup"], (s.steps or preset["steps"]) // 5)
    for name, value in preset.items():
        if getattr(s, name) is None:
            setattr(s, name, value)
    if s.batch_size % (WORLD * s.grad_accum):
        p.error(f"--batch-size {s.batch_size} must be a multiple of {WORLD} processes "
                f"x --grad-accum {s.grad_accum}")
    if s.prompt is not None and not (s.prompt and (s.resume or s.branch)):
        p.error("--prompt needs a text, and --resume or --branch for a model")
    try:
        if s.device == "cuda" and WORLD > 1:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.empty(1, device=s.device)
    except (RuntimeError, AssertionError) as e:     # torch can't use such a device
        p.error(f"--device {s.device} can't be used: {str(e).splitlines()[0]}")
    s.dtype = s.dtype or ("bfloat16" if hardware(s.device)[1] else "float32")
    s.out = s.out or f"out/{s.model}-{variant(s)}-s{s.seed}"
    return s

def hardware(device):
    """-> (the name of the GPU or CPU, whether it has instructions for BF16)"""
    if device.startswith("cuda"):
        return (torch.cuda.get_device_name(device),
                torch.cuda.is_bf16_supported(including_emulation=False))
    cpu = torch.cpu.get_capabilities()
    bf16 = any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return cpu.get("cpu_name", cpu.get("architecture", "a CPU")), bf16

def variant(s):
    """The recipe's name and what flags change, e.g. ufp4-rht.wgrad-sr.none."""
    changed = s.overrides | ({"keep_bf16": s.keep_bf16} if s.keep_bf16 else {})
    parts = [s.recipe]
    for name, value in changed.items():
        text = ("+".join(value) or "none") if isinstance(value, tuple) else value
        parts.append(f"{name}.{text}")
    return "-".join(parts)

def make_recipe(s):
    """The recipe, with what flags change. Its random signs follow the seed."""
    recipe = ufp4.RECIPES[s.recipe]
    if s.overrides and recipe.fmt is None:
        raise ValueError(f"recipe {s.recipe} does not quantize, so that it has no "
                         f"{', '.join(s.overrides)}")
    return replace(recipe, sign_seed=recipe.sign_seed + s.seed, **s.overrides)

# --- Data ----------------------------------------------------------------------------

def windows(files, starts, s):
    """-> tokens (B, T), and targets (B, T), which are the next tokens. A start is the
    number of a place where a window fits, counted through file 0, then 1, and so on."""
    rows = []
    for i in starts:
        for tokens in files:
            if i < len(tokens) - s.seq_len:
                break
            i -= len(tokens) - s.seq_len
        rows.append(tokens[i:i + s.seq_len + 1])
    rows = torch.from_numpy(np.stack(rows).astype(np.int64))
    if s.device.startswith("cuda"):     # a copy of pinned memory does not wait
        rows = rows.pin_memory().to(s.device, non_blocking=True)
    rows = rows.to(s.device)
    return rows[:, :-1], rows[:, 1:]

def get_batch(files, s, step, part=0):
    """Random windows for a part of a step, this process's share of them. They depend on
    the seed and the step alone, so resuming needs only the step's number."""
    count = sum(len(tokens) - s.seq_len for tokens in files)
    generator = np.random.default_rng((s.seed, step))
    starts = generator.integers(0, count, size=s.batch_size)
    size = s.batch_size // (WORLD * s.grad_accum)
    return windows(files, starts[(part * WORLD + RANK) * size:][:size], s)

# --- Evaluation ----------------------------------------------------------------------

def validation_batches(tokens, s):
    """Yields inputs (B, T), targets (B, T) and B, for windows spaced evenly over the
    text. FSDP needs every process in every pass. So a process that has no window left
    gets a dummy, and the number 0."""
    starts = np.linspace(0, len(tokens) - s.seq_len - 1, s.eval_windows).astype(int)
    size = s.batch_size // (WORLD * s.grad_accum)
    for first in range(0, len(starts), size * WORLD):
        mine = starts[first + RANK * size:][:size]
        inputs, targets = windows([tokens], mine if len(mine) else starts[:1], s)
        yield inputs, targets, len(mine)

@torch.no_grad()
def evaluate(model, tokens, s):
    """The mean loss over the validation windows, always with the same random bits."""
    model.eval()
    torch.manual_seed(s.seed)
    losses = [model(inputs, targets) * n
              for inputs, targets, n in validation_batches(tokens, s)]
    model.train()
    return sum(all_sum(torch.stack(losses)).tolist()) / s.eval_windows

@torch.no_grad()
def fprop_noise(model, tokens):
    """How far quantization changes the layers' outputs, on tokens (B, T).

    An output is Y = slope X W^T + R, with R orthogonal to X W^T. Its noise is the power
    of R relative to that of X W^T. A slope below 1 is shrinkage. Returns means over the
    quantized layers, and the layer with most noise, for the log."""
    found = {}

    def compare(layer, inputs, y):      # torch calls this after each module
        recipe = getattr(layer, "recipe", None)
        if recipe is None or recipe.fmt is None:
            return
        x, *offsets = inputs
        # X W^T, computed without quantization, but in the run's precision
        reference = ufp4.linear(x, layer.weight, "bf16", *offsets).float()
        power = reference.square().sum()
        slope = (reference * y).sum() / power
        rest = y - slope * reference
        found[layer] = torch.stack([rest.square().sum() / power, slope])

    model.eval()
    hook = nn.modules.module.register_module_forward_hook(compare)
    with torch.compiler.set_stance("force_eager"):      # compiled code may skip hooks
        model(tokens)
    hook.remove()
    model.train()
    if not found:
        return {}
    table = torch.stack([*found.values()]).cpu()        # (layers, 2): noise and slope
    noise, slope = table.mean(0).tolist()
    worst = table[:, 0].argmax().item()
    name_of = {layer: name for name, layer in model.named_modules()}
    return {"noise": noise, "slope": slope, "worst_layer": name_of[[*found][worst]],
            "worst_noise": table[worst, 0].item()}

@torch.no_grad()
def sample(model, prompt, s, vocab_size):
    """prompt, a list of tokens, and s.sample tokens that continue it, as text."""
    model.eval()
    torch.manual_seed(s.seed)                           # all processes draw the same
    tokens = torch.tensor([prompt], device=s.device)                    # (1, T)
    for _ in range(s.sample):
        logits = model(tokens[:, -s.seq_len:])[:, -1].float()           # (1, V)
        p = torch.softmax(logits / 0.8, -1)             # at temperature 0.8
        tokens = torch.cat((tokens, torch.multinomial(p, 1)), 1)
    return decode(tokens[0].tolist(), vocab_size)

def continue_prompt(s):
    """--prompt: continue a text from a checkpoint; reads no data."""
    vocab_size = vocabulary(s.data)
    prompt = encode(s.prompt, vocab_size)
    model, _ = build(s, make_recipe(s), vocab_size)
    weights = get_model_state_dict(model)       # the model's own tensors, to be filled
    restore(s, log_settings(s, s.data), {"model": weights, "step": 0})
    print(sample(model, prompt, s, vocab_size))

# --- Training ------------------------------------------------------------------------

def learning_rate(step, s):
    """Linear warm-up, then cosine decay to min_lr * lr at the last step."""
    if step < s.warmup:
        return s.lr * (step + 1) / s.warmup
    t = (step - s.warmup) / max(1, s.steps - 1 - s.warmup)
    return s.lr * (s.min_lr + (1 - s.min_lr) * 0.5 * (1 + math.cos(math.pi * t)))

def counts(model, s):
    """-> (parameters, those that one token uses, FLOPs for one token, for bench.py). A
    weight takes 2 FLOPs forward and 4 backward, causal attention 6 T C a layer."""
    total = sum(p.numel() for p in model.parameters())
    idle = s.layers * (s.experts - s.top_k) * 3 * s.dim * s.hidden  # in other experts
    products = 6 * (total - idle - model.embed.weight.numel())
    return total, total - idle, products + 6 * s.seq_len * s.dim * s.layers

def build(s, recipe, vocab_size):
    """-> (the model, whose weights have no values yet, and its optimizer)"""
    with torch.device("meta"):          # allocates nothing until FSDP has sharded it
        model = GPT(s, recipe, vocab_size)
    for block in model.blocks:
        if s.compile:
            block.forward = torch.compile(block.forward)
        if s.remat:                     # the recomputation draws the same random bits
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if WORLD > 1:
        shard(model, s)
    model.to_empty(device=s.device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=s.lr, betas=(0.9, 0.95), fused=True,
                                    weight_decay=s.weight_decay)

signals = []        # Ctrl-C and SIGTERM are noted here; the loop stops after its step

def train(s):
    """Set up, train and report. Returns the last validation loss."""
    if not s.resume:
        check_unused(Path(s.out))
    # A wrong flag should be found before a download, so the model comes first. Its
    # vocabulary follows from the name of the data set.
    recipe, vocab_size = make_recipe(s), vocabulary(s.data)
    model, optimizer = build(s, recipe, vocab_size)
    if RANK == 0:
        prepare(s.data)                 # one process downloads for all
    wait_for_all()
    dataset = prepare(s.data)           # the files are there now
    check(dataset, s.seq_len + 1)
    files, val = [read_tokens(p) for p in dataset.train], read_tokens(dataset.val[0])
    # For the log: the name of the data's folder, which has the checksum of a text file
    settings = log_settings(s, f"{dataset.train[0].parent.name}-{len(files)}")
    if s.resume or s.branch:
        start = restore(s, settings, state_of(model, optimizer))
    else:
        start = 0
        torch.manual_seed(s.seed)
        model.init_weights()
    if RANK == 0:
        start_log(s, settings, start)
    total, active, _ = counts(model, s)
    # Only one process prints, see main()
    print(f"{s.model}, {total / 1e6:.2f}M parameters, {active / 1e6:.2f}M active a "
          f"token, recipe {variant(s)}, {s.dtype} on {WORLD} x "
          f"{hardware(s.device)[0]}, steps {start} to {s.steps}, to {s.out}")
    if recipe.fmt is not None and s.device == "cpu":
        print("the first step compiles the quantizer, which takes up to a minute "
              "unless it is cached")

    if start < s.steps:
        signals.clear()
        previous = {n: signal.signal(n, lambda number, _: signals.append(number))
                    for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            val_loss = training_loop(s, model, optimizer, files, val, start)
        finally:
            for n, handler in previous.items():
                signal.signal(n, handler)
    else:                               # the run has finished before
        val_loss = evaluate(model, val, s)
    print(f"validation loss {val_loss:.4f} nats a token")
    if s.recipe != "bf16":
        print(loss_error(s, settings, val_loss))
    if s.sample:
        text = sample(model, val[:32].tolist(), s, vocab_size)
        print(f"--- sample\n{text}\n---")
    return val_loss

def training_loop(s, model, optimizer, files, val, start):
    """Train from step `start` on. Returns the last validation loss."""
    moes = [m for m in model.modules() if isinstance(m, MoE)]
    unread, clock = [], time.perf_counter()
    bar = tqdm(range(start, s.steps), initial=start, total=s.steps, disable=RANK > 0)
    for step in bar:
        bits = np.random.SeedSequence((s.seed, step, RANK)).generate_state(1, np.uint64)
        torch.manual_seed(int(bits[0]))             # this step's and process's own
        lr = learning_rate(step, s)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = 0.0
        for part in range(s.grad_accum):
            tokens, targets = get_batch(files, s, step, part)
            part_loss = model(tokens, targets) / s.grad_accum
            part_loss.backward()                    # FSDP averages over processes here
            loss += part_loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), s.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        loads = [moe.balance() for moe in moes]
        unread.append(torch.stack((loss, whole(norm), *loads)))     # read below

        done = step + 1
        stops, last = any_process(signals), done == s.steps
        validates = last or done % s.eval_interval == 0
        saves = last or stops or done % s.save_interval == 0
        if not (validates or saves or done % s.log_interval == 0):
            continue
        # Wait for the device, and read the results of all steps since the last read:
        # means over the processes. No checkpoint follows numbers that are not finite.
        rows = (all_sum(torch.stack(unread)) / WORLD).tolist()
        for number, (loss, norm, *_) in enumerate(rows, done - len(rows) + 1):
            if not math.isfinite(loss + norm):
                diverged(f"step {number}: loss {loss}, gradient norm {norm}")
        loss, norm, *loads = rows[-1]
        speed = len(rows) * s.batch_size * s.seq_len / (time.perf_counter() - clock)
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", False)
        line = {"step": done, "train_loss": loss, "val_loss": None, "lr": lr,
                "grad_norm": norm, "max_load": max(loads, default=None),
                "tokens_per_s": round(speed)}
        if validates:
            line |= validate(s, model, val, done)
        log(s, line)
        if saves:
            save(s, done, model, optimizer)
        if stops and not last:
            stop(f"stopped after step {done} and saved; add --resume to the same "
                 "command", 130)
        unread, clock = [], time.perf_counter()     # leaves out saving and validating
    return line["val_loss"]

def validate(s, model, val, step):
    """-> the validation loss and the noise of the forward pass, for the log"""
    val_loss = evaluate(model, val, s)
    if not math.isfinite(val_loss):
        diverged(f"step {step}: validation loss {val_loss}")
    tokens, _, _ = next(validation_batches(val, s))
    return {"val_loss": val_loss} | fprop_noise(model, tokens)

def diverged(what):
    """End the run. No checkpoint has been made of the numbers that are not finite."""
    stop(f"{what}; --resume would repeat the same numbers, so start another run with a "
         "changed setting, such as a lower --lr", 3)

# --- Checkpoints and the log ---------------------------------------------------------
# A step is validated, logged, then saved. So each checkpoint has its line in the log.
# The price: a run that dies while it validates trains again from the checkpoint before.
# --resume drops the log's lines after that.

def checkpoints(out):
    """The checkpoints in OUT, oldest first. Copies under longer names don't count."""
    return sorted(out.glob("ckpt-???????"))

def check_unused(out):
    """Refuse to start a run where there is one."""
    log = out / "log.jsonl"
    if checkpoints(out):
        raise ValueError(f"{out} holds a run; add --resume to go on with it, delete "
                         "it, or name another --out")
    if log.exists() and len(read_log(log)) > 1:         # some steps, but no checkpoint
        raise ValueError(f"{out} holds the log of a run without checkpoints; delete "
                         "it, or name another --out")

def state_of(model, optimizer, step=0):
    """What a checkpoint holds, as a dict. The tensors are those of model and optimizer
    themselves, so load() fills these in place. AdamW would make its moments at its
    first step only; get_state_dict makes them now."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}

def save(s, step, model, optimizer):
    """Write ckpt-STEP, all processes together, and keep the last two. A checkpoint gets
    its name when it is whole."""
    out, part = Path(s.out), Path(s.out) / "saving"
    state = state_of(model, optimizer, step)
    if RANK == 0 and part.exists():     # a process that was killed has left it
        shutil.rmtree(part)
    wait_for_all()
    dcp.save(state, checkpoint_id=part)
    if RANK == 0:
        part.rename(out / f"ckpt-{step:07d}")
        for old in checkpoints(out)[:-2]:
            shutil.rmtree(old)

def load(path, state):
    """Read a checkpoint into the tensors of `state`, in place, and replace its other
    values. It has pickles, which can run any code: load only what you trust."""
    dcp.load(state, checkpoint_id=path)

def restore(s, settings, state):
    """Load the checkpoint that --resume or --branch means into `state`, if its run had
    the same settings. The log beside it has them. Returns its number of steps."""
    if s.resume:
        kept, may_differ = checkpoints(Path(s.out)), FREE
        path = kept[-1] if kept else Path(s.out) / "ckpt-*"    # for the message
    else:
        path, may_differ = Path(s.branch), BRANCHABLE
    if not path.exists():
        raise ValueError(f"there is no checkpoint {path}")
    before = read_log(path.parent / "log.jsonl")[0]["settings"]
    if s.resume:                # for start_log(): what began as a branch stays one
        settings["branch"] = before["branch"]
    if s.prompt is not None:    # no data is read
        may_differ = may_differ | {"data"}
    if differs := difference(settings, before, may_differ):
        raise ValueError(f"{path} belongs to a run with other settings: {differs}")
    load(path, state)
    if not s.resume and s.prompt is None and state["step"] >= s.steps:
        raise ValueError(f"{path} has made {state['step']} steps, so --steps {s.steps} "
                         "leaves none for a branch")
    return state["step"]

def start_log(s, settings, step):
    """Begin log.jsonl with the settings. --resume keeps the lines up to its step. The
    log is replaced when the new one is whole."""
    path, part = Path(s.out) / "log.jsonl", Path(s.out) / "log.jsonl.tmp"
    lines = [{"settings": settings, "commit": commit(), "torch": torch.__version__,
              "hardware": hardware(s.device)[0], "processes": WORLD}]
    if s.resume:
        lines += [line for line in read_log(path)[1:] if line["step"] <= step]
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.replace(part, path)

def log(s, line):
    """Append a line, a dict, to the log. Print it if it has a validation loss."""
    if RANK == 0:
        with open(Path(s.out) / "log.jsonl", "a") as lines:
            lines.write(json.dumps(line) + "\n")
    if line["val_loss"] is not None:
        tqdm.write(", ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}"
                             for k, v in line.items() if v is not None))

def read_log(path):
    """-> the lines of a log: the settings, then a dict for each step that was logged.
    A process that was killed may leave half a line at the end, which does not count."""
    lines = Path(path).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]

def commit():
    """The commit of this code, "-dirty" if it was changed; None if git can't say."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40",
                               "--exclude=*"],          # no tag in its place
                              cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:                                     # git is not installed
        return None
    return done.stdout.strip() or None

# --- Comparing runs ------------------------------------------------------------------
# --resume may change these settings. They change no numbers, or only their rounding and
# random bits (device, compile and grad_accum, which also sets the tokens of `noise`).
# --branch need not be given again.
FREE = {"out", "device", "eval_interval", "save_interval", "log_interval", "sample",
        "compile", "remat", "grad_accum", "resume", "branch", "prompt"}
RECIPE_FLAGS = {"recipe", "keep_bf16", *RECIPE_FIELDS}
# --branch may also change the recipe, and the length of the schedule
BRANCHABLE = FREE | RECIPE_FLAGS | {"steps", "warmup"}

def log_settings(s, text):
    """The settings for the log, as JSON gives them back: it turns tuples into lists.
    `text` names the data set with its version."""
    return json.loads(json.dumps(asdict(s) | {"data": text}))

def difference(now, before, may_differ):
    """The first setting that two runs differ in, in words; None if there is none."""
    for name, value in now.items():
        if name not in may_differ and value != before.get(name):
            return f"{name} is {value!r} now and was {before.get(name)!r}"

def is_baseline(bf16, settings):
    """Whether a run with the settings `bf16` is the one to compare another run with: a
    bf16 run whose other settings are the same, and which is no branch."""
    return (bf16["recipe"] == "bf16" and bf16["branch"] is None
            and difference(settings, bf16, FREE | RECIPE_FLAGS) is None)

def loss_error(s, settings, val_loss):
    """How a loss compares with that of a finished bf16 run beside OUT, in words."""
    for path in sorted(Path(s.out).parent.glob("*/log.jsonl")):
        try:
            first, *_, last = read_log(path)
            bf16 = last["val_loss"]
            if last["step"] == s.steps and is_baseline(first["settings"], settings):
                return (f"BF16-relative loss error {val_loss / bf16 - 1:+.2%} "
                        f"(bf16: {bf16:.4f})")
        except (OSError, ValueError, TypeError, KeyError):
            continue                    # a run that has just begun, or no log of ours
    return ("to see the loss error, finish a run of --recipe bf16 with the same "
            "settings in a directory beside this one")

# --- Start and stop ------------------------------------------------------------------

def stop(message, code=1):
    """End the process with a sentence. Code 1 or 2: the user can fix it. 3: the loss
    diverged. 130: a signal came."""
    if RANK == 0 or code in (1, 2):     # an error may be in one process only
        tqdm.write(f"train.py: {message}", file=sys.stderr)
    sys.exit(code)

def main(argv=None):
    """The command. What the user can fix is one sentence, not a traceback."""
    if RANK:
        sys.stdout = open(os.devnull, "w")              # one process prints
    # A character of a sample that the terminal can't show becomes "?"
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    # Saving warns of this, but one process needs none
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        s = parse_args(argv)
        if WORLD > 1:
            dist.init_process_group()       # gloo for CPU tensors, NCCL for a GPU's
        if s.prompt is None:
            train(s)
        else:
            continue_prompt(s)
        if WORLD > 1:
            dist.destroy_process_group()
    except (ValueError, OSError) as e:
        stop(e)

# --- Many processes ------------------------------------------------------------------
# FSDP2 shards the model: each process keeps a part of each weight, and of its gradient
# and optimizer state. To compute a block, its weights are gathered, in float32, so that
# all processes quantize the same numbers. Each process computes its share of the batch.
# So N processes match one process with --grad-accum N, except for random bits and the
# order of sums.

def shard(model, s):
    kind = torch.device(s.device).type
    mesh = dist.device_mesh.init_device_mesh(kind, (WORLD,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)

def fill(p, values):
    """Copy values into a parameter. Of a sharded one this process has some rows: 10
    rows on 4 processes are 3, 3, 3 and 1."""
    if WORLD > 1:
        size = math.ceil(len(values) / WORLD)
        p, values = p.to_local(), values[RANK * size:][:size]
    p.copy_(values)

def whole(norm):
    """A norm of sharded gradients comes in parts."""
    return norm.full_tensor() if WORLD > 1 else norm

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

def wait_for_all():
    any_process(False)

if __name__ == "__main__":
    main()
