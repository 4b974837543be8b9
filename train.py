"""Pretrain a small GPT, dense or mixture-of-experts, in 4 bits or in BF16.

    python train.py --recipe bf16                   # the baseline: nano on a CPU, small on a GPU
    python train.py --recipe ufp4                   # prints its loss error to the run before
    python train.py --recipe ufp4 --resume          # goes on after Ctrl-C or a crash
    torchrun --nproc-per-node 8 train.py --model dense-1.5b     # many GPUs, or CPU processes

A recipe (see ufp4.py) governs every linear layer of the blocks. Embedding, LM head, router and
norms stay in high precision: BF16 autocast where the hardware has BF16, else float32 (--dtype).
OUT gets log.jsonl, the settings and then a line for each logged step, and the last two checkpoints.

Under torchrun FSDP2 shards the model and gathers a block's weights to compute it, in float32, so
that all ranks quantize the same numbers. Each multiplies its share of the batch: N processes do
what one does with --grad-accum N, but for noise and the order of sums.
"""
import argparse
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import ufp4
from data.prepare import check, decode, prepare, read_tokens, vocabulary

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # by torchrun
signals = []                    # Ctrl-C and SIGTERM end a run after its step, and save it

def all_sum(t):
    if WORLD > 1:                                       # in place, over the ranks
        dist.all_reduce(t)
    return t

# --- The model. B sequences of T tokens, M = B T, C = dim, E experts of width H, k for each token

def rope(x, base=10000.0):
    """Rotary position embedding (arXiv 2104.09864): in x (B, heads, T, D), pair (i, i + D/2) of
    token t turns by t base^(-2i/D)."""
    half = x.shape[-1] // 2
    freq = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

class Attention(nn.Module):
    def __init__(self, s, recipe):
        super().__init__()
        self.heads = s.heads
        self.qkv = ufp4.Linear(s.dim, 3 * s.dim, bias=False, recipe=recipe)
        self.proj = ufp4.Linear(s.dim, s.dim, bias=False, recipe=recipe)

    def forward(self, x):                                               # (B, T, C)
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))            # (B, T, 3, heads, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                            # (B, heads, T, D) each
        y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))

class SwiGLU(nn.Module):
    """fc2(silu(gate) * up), gate and up from one GEMM (arXiv 2002.05202)."""
    def __init__(self, s, recipe):
        super().__init__()
        self.fc1 = ufp4.Linear(s.dim, 2 * s.hidden, bias=False, recipe=recipe)
        self.fc2 = ufp4.Linear(s.hidden, s.dim, bias=False, recipe=recipe)

    def forward(self, x):
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)

class MoE(nn.Module):
    """Fine-grained experts beside a shared one (DeepSeekMoE, arXiv 2401.06066). Dropless: tokens
    are sorted by expert, and each expert multiplies what it gets. Balanced without an auxiliary
    loss (arXiv 2408.15664), by a bias on each expert's score, used for the choice alone."""
    def __init__(self, s, recipe):
        super().__init__()
        self.top_k, self.recipe = s.top_k, recipe
        self.router = nn.Linear(s.dim, s.experts, bias=False)
        self.fc1 = nn.Parameter(torch.empty(s.experts, 2 * s.hidden, s.dim))
        self.fc2 = nn.Parameter(torch.empty(s.experts, s.dim, s.hidden))
        self.shared = SwiGLU(s, recipe)
        self.register_buffer("bias", torch.zeros(s.experts))
        self.register_buffer("load", torch.zeros(s.experts))            # tokens since balance()

    def forward(self, x):                                               # (B, T, C)
        flat = x.flatten(0, 1)                                          # (M, C)
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(self.router(flat.float()))           # (M, E), float32
        chosen = (scores + self.bias).topk(self.top_k, -1).indices      # (M, k)
        gates = scores.gather(-1, chosen)                      # weights of a token's experts
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        expert, order = chosen.flatten().sort(stable=True)              # (M k), sorted by expert
        experts = torch.arange(len(self.bias), device=x.device)
        ends = torch.searchsorted(expert, experts, right=True).to(torch.int32)      # (E)
        if self.training:               # --remat counts each token twice: the ratios are the same
            self.load += torch.diff(ends, prepend=ends.new_zeros(1))
        tokens = flat[:, None].expand(-1, self.top_k, -1).flatten(0, 1)[order]      # (M k, C)
        gate, up = ufp4.linear(tokens, self.fc1, self.recipe, ends).chunk(2, -1)
        out = ufp4.linear(F.silu(gate) * up, self.fc2, self.recipe, ends)
        out = out[order.argsort()].unflatten(0, gates.shape)            # (M, k, C), tokens' order
        return self.shared(x) + (out * gates.unsqueeze(-1)).sum(1).view(x.shape)

    @torch.no_grad()
    def balance(self, rate=1e-2):
        """Once a step: an expert's bias goes up by `rate` if it got less than its share, else
        down. Clears the counts and returns max load / mean load (1 is perfect balance)."""
        all_sum(self.load)
        mean, worst = self.load.mean(), self.load.max()
        self.bias += rate * torch.sign(mean - self.load)
        self.load.zero_()
        return worst / mean

class Block(nn.Module):
    def __init__(self, s, recipe):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)
        self.attn = Attention(s, recipe)
        self.mlp = MoE(s, recipe) if s.experts else SwiGLU(s, recipe)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    """Pre-norm RMSNorm, RoPE, causal attention, SwiGLU or MoE, no biases, untied head."""
    def __init__(self, s, recipe, vocab_size):
        super().__init__()
        if s.dim % (2 * s.heads):
            raise ValueError(f"--dim {s.dim} must split into --heads {s.heads} of an even width")
        if (s.experts or s.top_k) and not 1 <= s.top_k <= s.experts:
            raise ValueError(f"--top-k {s.top_k} must be from 1 to --experts {s.experts}, or be 0")
        recipes = [recipe] * (s.layers - s.keep_bf16) + [ufp4.RECIPES["bf16"]] * s.keep_bf16
        self.bf16 = s.dtype == "bfloat16"
        self.embed = nn.Embedding(vocab_size, s.dim)
        self.blocks = nn.ModuleList(Block(s, r) for r in recipes[-s.layers:])
        self.norm = nn.RMSNorm(s.dim)
        self.lm_head = nn.Linear(s.dim, vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self):
        """As GPT-2's: what writes to the residual stream starts smaller. A seed gives the same
        weights on any number of ranks: each draws every parameter whole and keeps its rows."""
        for name, p in self.named_parameters():
            last = name.endswith(("proj.weight", "fc2.weight", "fc2"))
            std = 0.02 / math.sqrt(2 * len(self.blocks)) if last else 0.02
            whole = torch.ones(p.shape) if p.dim() == 1 else torch.empty(p.shape).normal_(std=std)
            rows = p.to_local() if WORLD > 1 else p
            first = -(-len(whole) // WORLD) * RANK
            rows.copy_(whole[first:first + len(rows)])
        for b in self.buffers():
            b.zero_()

    def forward(self, tokens, targets=None):
        """tokens, targets (B, T) -> logits (B, T, V), or with targets the mean loss in nats."""
        with torch.autocast(tokens.device.type, torch.bfloat16, self.bf16, cache_enabled=False):
            x = self.embed(tokens)              # no cache: a cast weight is used once
            for block in self.blocks:
                x = block(x)
            logits = self.lm_head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

# --- Settings: presets, flags

def at_least(low, kind):
    def number(text):
        if not low <= (value := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"must be finite and at least {low}, got {text}")
        return value
    return number

def some_of(names):
    return lambda text: {"none": (), "all": names}.get(text, tuple(text.split(",")))

flag = argparse.BooleanOptionalAction
positive, natural, real = at_least(1, int), at_least(0, int), at_least(0, float)
GPU = torch.cuda.is_available()
# What a preset sets; hidden is the width inside the MLP or each expert, batch_size in sequences
COLUMNS = {"layers": positive, "dim": positive, "heads": positive, "hidden": positive,
           "experts": natural, "top_k": natural, "seq_len": positive, "batch_size": positive,
           "steps": positive, "lr": real, "warmup": natural}
PRESETS = {name: dict(zip((*COLUMNS, "data"), row)) for name, *row in (
    ("nano",        4,  128,  4,  352,   0, 0,  256,    8,    800, 3e-3,   80, "python"),
    ("nano-moe",    4,  128,  4,   96,  16, 3,  256,    8,    800, 3e-3,   80, "python"),
    ("small",       8,  512,  8, 1408,   0, 0, 1024,   32,   2000, 1e-3,  200, "python"),
    ("small-moe",   8,  512,  8,  352,  32, 3, 1024,   32,   2000, 1e-3,  200, "python"),
    # The paper's three, by the totals that it gives; shapes and schedules are ours
    ("dense-1.5b", 24, 2048, 16, 6016,   0, 0, 4096,  256, 30_000, 4e-4, 2000, "fineweb"),
    ("moe-7.9b",   24, 2400, 25,  320, 128, 8, 4096,  512, 50_000, 3e-4, 2000, "fineweb"),
    ("moe-124b",   30, 4096, 32, 1024, 320, 6, 4096, 2048, 60_000, 2e-4, 2000, "fineweb"))}
FIELDS = {"fmt": ufp4.FORMATS, "scale": ufp4.SCALES, "block": positive, "rht": some_of(ufp4.GEMMS),
          "sr": some_of(ufp4.OPERANDS), "tiles": flag, "rht_block": positive}      # of the recipe
SETTINGS = (                    # name, type or choices, default (None: see parse_args), help
    ("recipe", ufp4.RECIPES, "ufp4", "what is quantized how: see RECIPES in ufp4.py"),
    ("model", PRESETS, "small" if GPU else "nano", "preset: sizes, schedule, data (see PRESETS)"),
    ("data", str, None, "python, shakespeare, fineweb, or a text file (default: the model's)"),
    ("out", str, None, "directory for log and checkpoints (default: out/MODEL-RECIPE-sSEED)"),
    ("resume", flag, False, "go on from the last checkpoint in OUT"),
    ("branch", str, None, "start from this checkpoint of a run that may differ in its recipe"),
    ("seed", natural, 0, "of weights, batches and stochastic rounding"),
    ("device", str, "cuda" if GPU else "cpu", "cpu, cuda, cuda:1, ..."),
    ("dtype", ("float32", "bfloat16"), None, "of GEMMs (default: bfloat16 if the hardware has it)"),
    ("compile", flag, False, "torch.compile each block (experts need --dtype bfloat16 for that)"),
    ("grad_accum", positive, 1, "parts that a rank's share of the batch is computed in"),
    ("remat", flag, False, "keep a block's input only and compute its activations again (slower)"),
    ("keep_bf16", natural, 0, "leave this many of the last blocks unquantized"),
    ("min_lr", real, 0.1, "final learning rate, as a fraction of the peak; cosine decay"),
    ("weight_decay", real, 0.1, "AdamW, on matrices"),
    ("clip", real, 1.0, "largest gradient norm; 0: no clipping"),
    ("eval_interval", positive, 100, "steps between validations"),
    ("eval_windows", positive, 128, "fixed validation windows of SEQ_LEN tokens"),
    ("save_interval", positive, 100, "steps between checkpoints"),
    ("log_interval", positive, 10, "steps between lines of the log"),
    ("sample", natural, 200, "tokens of text to print at the end"),
    *((name, kind, None, "in place of the model's") for name, kind in COLUMNS.items()),
    *((name, kind, None, "in place of the recipe's") for name, kind in FIELDS.items()),
)
RESUMABLE = {"out", "device", "steps", "warmup", "eval_interval", "save_interval", "log_interval",
             "sample", "compile", "resume", "branch", "grad_accum", "remat"}    # with --resume
BRANCHABLE = RESUMABLE | {"recipe", "keep_bf16", "overrides", "row"}        # and with --branch

def parse_args(argv=None):
    """-> a Namespace of SETTINGS, and .overrides, the FIELDS of the recipe that flags change."""
    p = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    p.error = lambda message: stop(message, 2)
    for name, kind, default, text in SETTINGS:
        how = "action" if kind is flag else "type" if callable(kind) else "choices"
        text += "" if default in (None, False) else f" (default: {default})"
        p.add_argument("--" + name.replace("_", "-"), help=text, **{how: kind})
    given = vars(p.parse_args(argv))
    overrides = {name: given.pop(name) for name in FIELDS if name in given}
    s = {name: default for name, _, default, _ in SETTINGS if name not in FIELDS} | given
    s = argparse.Namespace(**s | PRESETS[s["model"]] | given, overrides=overrides)
    s.warmup = given.get("warmup", min(s.warmup, s.steps // 5))     # or a fifth
    if s.batch_size % (WORLD * s.grad_accum):
        p.error(f"batch size must be a multiple of {WORLD} processes x --grad-accum {s.grad_accum}")
    try:
        if s.device == "cuda" and WORLD > 1:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.empty(1, device=s.device)
    except (RuntimeError, AssertionError) as e:         # none such, or not in this build of torch
        p.error(f"--device {s.device} can't be used: {str(e).splitlines()[0]}")
    s.dtype = s.dtype or ("bfloat16" if hardware(s.device)[1] else "float32")
    s.out = s.out or f"out/{s.model}-{variant(s)}-s{s.seed}"
    return s

def hardware(device):
    """(name of the GPU or CPU, whether it has instructions for BF16)"""
    if device.startswith("cuda"):
        return (torch.cuda.get_device_name(device),
                torch.cuda.is_bf16_supported(including_emulation=False))
    cpu = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    bf16 = any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return cpu.get("cpu_name", cpu.get("architecture", "a CPU")), bf16

def variant(s):
    """The recipe's name with its overrides, e.g. ufp4-rht.wgrad-sr.none."""
    changed = s.overrides | ({"keep_bf16": s.keep_bf16} if s.keep_bf16 else {})
    text = {k: "+".join(v) or "none" if isinstance(v, tuple) else v for k, v in changed.items()}
    return "-".join([s.recipe, *(f"{k}.{v}" for k, v in text.items())])

def make_recipe(s):
    """The named recipe with the overrides given; its random signs follow the seed."""
    recipe = ufp4.RECIPES[s.recipe]
    if s.overrides and recipe.fmt is None:
        raise ValueError(f"--{', --'.join(s.overrides)} has no effect on recipe {s.recipe}")
    return replace(recipe, sign_seed=recipe.sign_seed + s.seed, **s.overrides)

# --- Data. A batch is a pure function of (seed, step), so a checkpoint's step is its place in it

def windows(files, starts, s):
    """(tokens, targets), each (rows, seq_len) int64: windows, numbered through all files."""
    rows = []
    for i in starts:
        for tokens in files:
            if i < len(tokens) - s.seq_len:
                break
            i -= len(tokens) - s.seq_len
        rows.append(tokens[i:i + s.seq_len + 1])
    rows = torch.from_numpy(np.stack(rows).astype(np.int64)).to(s.device)
    return rows[:, :-1], rows[:, 1:]

def get_batch(files, s, step, part=0):
    """A part of this rank's share of a step's random windows, which any number of ranks share."""
    count = sum(len(tokens) - s.seq_len for tokens in files)
    starts = np.random.default_rng((s.seed, step)).integers(0, count, size=s.batch_size)
    n = s.batch_size // (WORLD * s.grad_accum)
    return windows(files, starts[(part * WORLD + RANK) * n:][:n], s)

@torch.no_grad()
def evaluate(model, tokens, s):
    """Mean loss over eval_windows windows, evenly spaced, with the same noise each time. The ranks
    share them out; one that has none left computes on, for the others need its weights."""
    model.eval()
    torch.manual_seed(s.seed)
    starts = np.linspace(0, len(tokens) - s.seq_len - 1, s.eval_windows).astype(np.int64)
    n = s.batch_size // (WORLD * s.grad_accum)
    total = torch.zeros((), dtype=torch.float64, device=s.device)
    for first in range(0, len(starts), n * WORLD):
        part = starts[first + RANK * n:][:n]
        total += model(*windows([tokens], part if len(part) else starts[:1], s)) * len(part)
    model.train()
    return all_sum(total).item() / len(starts)

@torch.no_grad()
def sample(model, prompt, s, vocab_size):
    """Text: the prompt, and s.sample tokens that continue it. All ranks draw the same."""
    model.eval()
    torch.manual_seed(s.seed)
    tokens = torch.from_numpy(prompt.astype(np.int64))[None].to(s.device)
    for _ in range(s.sample):
        logits = model(tokens[:, -s.seq_len:])[:, -1].float()
        p = torch.softmax(logits / 0.8, -1)             # at temperature 0.8
        tokens = torch.cat((tokens, torch.multinomial(p, 1)), 1)
    return decode(tokens[0].tolist(), vocab_size)

# --- Checkpoints and the log

def stop(message, code=1):
    """End the run with a sentence. Where all ranks stop, rank 0 speaks, and torchrun then ends the
    others; one that stops alone speaks after a while, if torchrun hasn't ended it."""
    if RANK and not signals:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)
    if RANK == 0 or not signals:
        tqdm.write(f"train.py: {message}", file=sys.stderr)
    if WORLD > 1:                       # at once: a clean exit may wait for a rank that is gone
        os._exit(code)
    sys.exit(code)

def checkpoints(out):
    return sorted(p for p in out.glob("ckpt-*") if p.name[5:].isdigit())    # not a user's copy

def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))

def save(out, step, settings, model, optimizer):
    """Write ckpt-STEP, all ranks together, under another name first; drop the third last."""
    state = {"step": step, "settings": json.dumps(settings), **state_of(model, optimizer)}
    dcp.save(state, checkpoint_id=out / "saving")
    if RANK == 0:
        (out / "saving").rename(out / f"ckpt-{step:07d}")
        for old in checkpoints(out)[:-2]:
            shutil.rmtree(old)

def load(path, state):
    """Read a checkpoint into a state dict's tensors. (Its pickles can run code: is it trusted?)"""
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.CheckpointException as e:
        reason = next(iter(e.failures.values()))[0]
        before = [p for p in checkpoints(path.parent) if p < path]
        hint = f"; delete it, and --resume goes on from {before[-1]}" if before else ""
        stop(f"{path} is missing, damaged or not a checkpoint of train.py ({reason!r}){hint}")

def differences(settings, saved, may_differ):
    return [f"{k} is {settings.get(k)!r} now and was {saved.get(k)!r}" for k in settings | saved
            if k not in may_differ and json.dumps(settings.get(k)) != json.dumps(saved.get(k))]

def start(s, settings, model, optimizer):
    """Give the model its values: random ones, or with --resume or --branch those of a checkpoint
    of a run with the same settings. Returns how many steps it has done."""
    if not s.resume and not s.branch:
        torch.manual_seed(s.seed)
        model.init_weights()
        return 0
    kept = checkpoints(Path(s.out))
    if s.resume and not kept:
        stop(f"--resume: no checkpoint in {s.out}; start without --resume, or name another --out")
    path = kept[-1] if s.resume else Path(s.branch)
    load(path, saved := {"step": 0, "settings": ""})
    differ = differences(settings, json.loads(saved["settings"]),
                         RESUMABLE if s.resume else BRANCHABLE)
    if differ:
        stop(f"{path} belongs to a run with other settings: {'; '.join(differ)}")
    load(path, state_of(model, optimizer))
    return saved["step"]

def start_log(s, settings, step):
    """Begin log.jsonl; an earlier run's OUT is renamed. On resuming, cut it back to `step`."""
    out, n = Path(s.out), 1
    log, part = out / "log.jsonl", out / "log.jsonl.tmp"
    if (log.exists() or checkpoints(out)) and not s.resume:
        while (previous := out.with_name(f"{out.name}-previous-{n}")).exists():
            n += 1
        out.rename(previous)
        print(f"{out} held an earlier run; that is now {previous}")
    out.mkdir(parents=True, exist_ok=True)
    lines = [{"settings": settings, "commit": commit(), "torch": torch.__version__,
              "hardware": hardware(s.device)[0], "processes": WORLD}]
    if log.exists():
        lines += [line for line in read_log(log)[1:] if line["step"] <= step]
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.replace(part, log)

def read_log(path):
    return [json.loads(line) for line in path.open() if line.endswith("\n")]     # the whole ones

def commit():
    """The commit of this code, with "-dirty" if it was changed; None if that can't be known."""
    done = subprocess.run("git describe --always --dirty --abbrev=40 --exclude='*'", shell=True,
                          cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or None

def loss_error(s, settings, val_loss):
    """How far a loss is from that of a finished bf16 run beside OUT with the same settings."""
    wanted = settings | {"recipe": "bf16", "overrides": {}, "keep_bf16": 0, "branch": None}
    may_differ = RESUMABLE - {"steps", "warmup", "branch"} | {"row"}
    for path in sorted(Path(s.out).parent.glob("*/log.jsonl")):
        with suppress(OSError, ValueError, TypeError, KeyError):    # another program's, or no run
            first, *_, last = read_log(path)
            if last["step"] == s.steps and not differences(wanted, first["settings"], may_differ):
                bf16 = last["val_loss"]
                return f"BF16-relative loss error {val_loss / bf16 - 1:+.2%} (bf16: {bf16:.4f})"
    return "for its loss error, finish a run of --recipe bf16 with the same settings beside it"

# --- Training

def counts(model, s):
    """(parameters, those active for a token, FLOPs a token). A weight that multiplies takes 2 FLOPs
    forward and 4 backward; causal attention 6 T C a layer."""
    total = sum(p.numel() for p in model.parameters())
    idle = s.layers * (s.experts - s.top_k) * 3 * s.dim * s.hidden      # others' experts
    flops = 6 * (total - idle - model.embed.weight.numel()) + 6 * s.seq_len * s.dim * s.layers
    return total, total - idle, flops

# Dense BF16 FLOP/s, by NVIDIA's data sheets, of SXM modules
PEAKS = {"NVIDIA A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "B300": 2250e12}

def learning_rate(step, s):
    """Linear warm-up, then cosine decay to min_lr * lr at the last step."""
    if step < s.warmup:
        return s.lr * (step + 1) / s.warmup
    t = (step - s.warmup) / max(1, s.steps - 1 - s.warmup)
    return s.lr * (s.min_lr + (1 - s.min_lr) * 0.5 * (1 + math.cos(math.pi * t)))

def build(s, recipe, vocab_size):
    """The model, sharded over the ranks, without values yet, and its optimizer."""
    with torch.device("meta"):
        model = GPT(s, recipe, vocab_size)
    for block in model.blocks:
        if s.remat:                     # keep its input alone; backward draws the same noise again
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if s.compile:
            block.compile()
    if WORLD > 1:
        mesh = dist.device_mesh.init_device_mesh(torch.device(s.device).type, (WORLD,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    model.to_empty(device=s.device)
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=s.lr, betas=(0.9, 0.95), fused=True,
                                    weight_decay=s.weight_decay)

def train(s):
    """Run the settings; returns the final validation loss."""
    recipe, out = make_recipe(s), Path(s.out)
    model, optimizer = build(s, recipe, vocabulary(s.data))
    if RANK == 0:
        check(prepare(s.data), s.seq_len + 1)
    all_sum(torch.zeros(1))                             # the others wait
    dataset = prepare(s.data)
    handlers = {n: signal.signal(n, lambda n, _: signals.append(n)) for n in (2, 15)}   # INT, TERM
    files, val = [read_tokens(path) for path in dataset.train], read_tokens(dataset.val[0])
    row = {k: str(getattr(v, "name", getattr(v, "__name__", v))) for k, v in vars(recipe).items()}
    settings = vars(s) | {"data": f"{dataset.train[0].parent.name}-{len(files)}", "row": row}
    first = start(s, settings, model, optimizer)
    if RANK == 0:
        start_log(s, settings, first)
    moes = [m for m in model.modules() if isinstance(m, MoE)]
    total, active, flops = counts(model, s)
    name = hardware(s.device)[0]
    peak = WORLD * sum(f for gpu, f in PEAKS.items() if gpu in name and s.dtype == "bfloat16")
    print(f"{s.model}, {total / 1e6:.2f}M parameters, {active / 1e6:.2f}M active a token, recipe "
          f"{variant(s)}, {s.dtype} on {WORLD} x {name}, data {s.data}, steps "
          f"{first} to {s.steps} of {s.batch_size} x {s.seq_len} tokens, to {out}")
    if recipe.fmt and s.device == "cpu":
        print("the first step compiles the quantizer, which takes a minute or two if not cached")
    val_loss = evaluate(model, val, s) if first >= s.steps else None
    bar = tqdm(range(first, s.steps), initial=first, total=s.steps, disable=RANK > 0)
    tokens, seconds = 0, 0.0            # since the last line of the log
    for step in bar:
        clock = time.perf_counter()
        lr = learning_rate(step, s)
        for group in optimizer.param_groups:
            group["lr"] = lr
        noise = np.random.SeedSequence((s.seed, step, RANK))    # its own for each step and rank
        torch.manual_seed(int(noise.generate_state(1, np.uint64)[0]))
        loss = 0.0
        for part in range(s.grad_accum):
            part_loss = model(*get_batch(files, s, step, part)) / s.grad_accum
            part_loss.backward()                        # FSDP averages over the ranks here
            loss += part_loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), s.clip or math.inf)
        norm = (norm.full_tensor() if WORLD > 1 else norm).item()
        sums = torch.tensor((loss.item(), len(signals)), dtype=torch.float64, device=s.device)
        loss, stopping = (all_sum(sums) / WORLD).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            stop(f"step {step + 1}: the loss is {loss}, the gradient norm {norm}; the last good "
                 f"checkpoint: {(checkpoints(out) or ['none'])[-1]}", 3)
        optimizer.step()
        optimizer.zero_grad()
        max_load = max((m.balance().item() for m in moes), default=None)
        tokens += s.batch_size * s.seq_len
        seconds += time.perf_counter() - clock

        step, val_loss = step + 1, None                 # steps done
        if step % s.eval_interval == 0 or step == s.steps:
            val_loss = evaluate(model, val, s)
            if not math.isfinite(val_loss):
                stop(f"step {step}: the validation loss is {val_loss}; this step is not saved", 3)
            tqdm.write(f"step {step}: train loss {loss:.4f}, validation loss {val_loss:.4f}")
        if step % s.log_interval == 0 or val_loss is not None:
            speed, tokens, seconds = tokens / seconds, 0, 0.0
            line = {"step": step, "train_loss": loss, "val_loss": val_loss, "lr": lr,
                    "grad_norm": norm, "max_load": max_load, "tokens_per_s": round(speed),
                    "mfu": flops * speed / peak if peak else None}
            if RANK == 0:
                with open(out / "log.jsonl", "a") as log:
                    log.write(json.dumps(line) + "\n")
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
        if step % s.save_interval == 0 or step == s.steps or stopping:
            save(out, step, settings, model, optimizer)
        if stopping and step < s.steps:
            stop(f"stopped after step {step} and saved; add --resume to the same command", 130)
    for n, handler in handlers.items():
        signal.signal(n, handler)
    print(f"validation loss {val_loss:.4f} nats a token")
    if s.recipe != "bf16":
        print(loss_error(s, settings, val_loss))
    if s.sample:
        print(f"--- sample\n{sample(model, val[:32], s, dataset.vocab_size)}\n---")
    return val_loss

def main(argv=None):
    """Train. What the user can mend is one sentence and exit code 1; 3 if the loss diverged."""
    if RANK:
        sys.stdout = open(os.devnull, "w")
    sys.stdout.reconfigure(errors="replace", line_buffering=True)   # "?" for what it can't show
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP, in a single process
    logging.disable()                                   # what DCP logs of errors, stop() says
    try:
        s = parse_args(argv)
        if WORLD > 1:
            dist.init_process_group()
        train(s)
        if WORLD > 1:
            dist.destroy_process_group()
    except (ValueError, OSError) as e:
        stop(e)
    except dcp.CheckpointException as e:
        stop(f"can't write a checkpoint: {next(iter(e.failures.values()))[0]}")
    except RuntimeError as e:
        if WORLD == 1 or not (isinstance(e, dist.DistError) or "gloo" in str(e)):
            raise
        stop("another process has stopped; --resume goes on from the last checkpoint")

if __name__ == "__main__":
    main()
