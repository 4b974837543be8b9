"""Pretrain a small GPT, dense or mixture-of-experts, in 4 bits or in BF16.

    python train.py --recipe ufp4                   # the default: nano on a CPU (minutes), small on a GPU
    python train.py --recipe bf16                   # the baseline; run first, later runs print their loss error to it
    python train.py --recipe e2m1 --model nano-moe --seed 1
    python train.py --recipe ufp4 --rht wgrad --sr none                 # an ablation
    python train.py --recipe ufp4 --resume          # goes on after Ctrl-C or a crash, bit for bit

A recipe (see ufp4.py) governs every linear layer of the blocks. Embedding, LM head, router and norms stay in high
precision. On a GPU everything computes in BF16 under autocast; on a CPU in float32, so that "bf16" names the recipe
without quantization rather than the arithmetic. (--dtype bfloat16 is faster on CPUs with instructions for it.)

A run writes to OUT: log.jsonl, the settings in its first line and one line for each logged step after it, and
checkpoints ckpt-STEP.pt, of which the last two are kept.
"""
import argparse
import dataclasses
import json
import math
import os
import pickle
import platform
import signal
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import ufp4
from data.prepare import encoding, prepare, read_tokens

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
    share, and else down. (Its authors use a rate of 1e-3; our runs are too short for that.)"""

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

    def forward(self, x):                                                   # (B, T, C)
        flat = x.flatten(0, 1)                                              # (M, C)
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(self.router(flat.float()))               # (M, E), float32
        chosen = (scores + self.bias).topk(self.top_k, -1).indices          # (M, k)
        gates = scores.gather(-1, chosen)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        order = chosen.flatten().argsort(stable=True)                       # (M k,) slots, sorted by expert
        load = (chosen.flatten()[:, None] == torch.arange(len(self.bias), device=x.device)).sum(0)
        if self.training:
            self.load += load
        offs = load.cumsum(0).to(torch.int32)
        tokens = flat[order // self.top_k]                                  # (M k, C)
        gate, up = ufp4.linear(tokens, self.fc1, self.recipe, offs).chunk(2, -1)
        out = ufp4.linear(F.silu(gate) * up, self.fc2, self.recipe, offs)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        out = out[back].unflatten(0, chosen.shape)                          # (M, k, C), the tokens' own order
        return self.shared(x) + (out * gates.unsqueeze(-1)).sum(1).view(x.shape)

    @torch.no_grad()
    def balance(self, rate):
        """Once a step: move the biases, clear the counts, return max load / mean load (1 is perfect balance)."""
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

    def forward(self, x):
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
        for name, p in self.named_parameters():
            if p.dim() > 1:                             # what writes to the residual stream starts smaller, as in GPT-2
                last = name.endswith(("proj.weight", "fc2.weight", "fc2"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * s.layers) if last else 0.02)

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
}
RESUMABLE = ("out", "device", "steps", "warmup", "eval_interval", "save_interval", "log_interval", "sample", "compile",
             "branch")
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


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):                 # "(default: None)" would say nothing
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def parse_args(argv=None):
    p = argparse.ArgumentParser(description="Pretrain a small GPT under a 4-bit recipe.", formatter_class=Help)
    on_gpu = torch.cuda.is_available()
    add = p.add_argument
    add("--recipe", default="ufp4", choices=ufp4.RECIPES, help="what is quantized how; see RECIPES in ufp4.py")
    add("--model", default="small" if on_gpu else "nano", choices=PRESETS, help="preset: sizes, steps, learning rate")
    add("--data", default="python", help="python, shakespeare, fineweb, or a text file")
    add("--out", help="directory for log and checkpoints (default: out/MODEL-RECIPE-sSEED, with any overrides)")
    add("--resume", action="store_true", help="go on from the last checkpoint in OUT")
    add("--branch", metavar="CKPT", help="start from this checkpoint of a run that may differ in its recipe")
    add("--seed", type=natural, default=0, help="of weights, batches and stochastic rounding")
    add("--device", default="cuda" if on_gpu else "cpu", help="cpu, cuda, cuda:1, ...")
    add("--dtype", choices=("float32", "bfloat16"), help="of GEMMs, by autocast (default: bfloat16, on a CPU float32)")
    add("--compile", action="store_true", help="torch.compile the whole model (the quantizer is compiled in any case)")
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
    add("--clip", type=real, default=1.0, help="largest gradient norm")
    add("--balance-rate", type=real, default=1e-2, help="MoE: what a step adds to, or takes from, an expert's bias")
    add("--eval-interval", type=positive, default=100, help="steps between validations")
    add("--eval-windows", type=positive, default=128, help="fixed validation windows of SEQ_LEN tokens")
    add("--save-interval", type=positive, default=100, help="steps between checkpoints")
    add("--log-interval", type=positive, default=10, help="steps between lines of the log")
    add("--sample", type=natural, default=200, help="tokens of text to print at the end")
    g = p.add_argument_group("overrides of the recipe's fields (default: the recipe's)")
    g.add_argument("--fmt", help="element format: e2m1, e1m2, int4, or range-restricted as in e2m1-max3")
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
    preset = dict(PRESETS[s.model])
    preset["warmup"] = min(preset["warmup"], getattr(s, "steps", preset["steps"]) // 5)
    for name, value in preset.items():
        if not hasattr(s, name):
            setattr(s, name, value)
    try:
        torch.empty(1, device=s.device)
    except (RuntimeError, AssertionError) as e:         # no such device, or not in this build of torch
        p.error(f"--device {s.device} can't be used: {str(e).splitlines()[0]}")
    s.dtype = s.dtype or ("float32" if s.device == "cpu" else "bfloat16")
    s.out = s.out or f"out/{s.model}-{variant(s, '-')}-s{s.seed}"
    if s.dim % s.heads or s.dim // s.heads % 2:
        p.error(f"--dim {s.dim} must split into --heads {s.heads} of an even width")
    if not 1 <= s.top_k <= s.experts and (s.experts or s.top_k):
        p.error(f"--top-k must be from 1 to --experts {s.experts}, got {s.top_k}")
    if s.warmup > s.steps:
        p.error(f"--warmup {s.warmup} is more than --steps {s.steps}")
    if s.resume and s.branch:
        p.error("--branch starts a run; to go on with one, give --resume without it")
    if s.keep_bf16 > s.layers:
        p.error(f"--keep-bf16 {s.keep_bf16} is more than --layers {s.layers}")
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
    """The named recipe with the overrides given; its random signs follow the seed."""
    fields = overrides(s)
    if fields and s.recipe == "bf16":
        flag = next(iter(fields)).replace("_", "-")
        raise ValueError(f"--{flag} has no effect on recipe bf16, which quantizes nothing; name another --recipe")
    return dataclasses.replace(ufp4.RECIPES[s.recipe], sign_seed=s.seed, **fields)


# ---------------------------------------------------------------------------------------------------------------
# Data: a batch is a pure function of (seed, step), so resuming needs no loader state


def get_batch(files, s, step):
    """(tokens, targets), each (batch_size, seq_len) int64 on the device."""
    rng = np.random.default_rng((s.seed, step))
    tokens = files[rng.integers(len(files))]
    starts = rng.integers(0, len(tokens) - s.seq_len, size=s.batch_size)
    return windows(tokens, starts, s)


def windows(tokens, starts, s):
    rows = np.stack([tokens[i:i + s.seq_len + 1] for i in starts]).astype(np.int64)
    rows = torch.from_numpy(rows).to(s.device)
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate(model, tokens, s):
    """Mean loss over eval_windows windows spread evenly over the validation tokens: the same for every run."""
    model.eval()
    starts = np.linspace(0, len(tokens) - s.seq_len - 1, s.eval_windows).astype(np.int64)
    losses = []
    for part in np.array_split(starts, -(-len(starts) // s.batch_size)):
        with torch.autocast(torch.device(s.device).type, torch.bfloat16, enabled=s.dtype == "bfloat16"):
            losses += [model(*windows(tokens, part, s)).item()] * len(part)
    model.train()
    return sum(losses) / len(losses)


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
    return sorted(out.glob("ckpt-*.pt"))


def save(out, step, model, optimizer, settings):
    """Write ckpt-STEP.pt and drop the third last. Diverged, and nothing is written, if a weight is not finite."""
    if not all(p.isfinite().all() for p in model.parameters()):
        raise Diverged(f"step {step}: there are weights that are not finite; not saved")
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    state = {"step": step, "settings": settings, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
             "rng": rng}
    write_atomically(out / f"ckpt-{step:07d}.pt", lambda f: torch.save(state, f))
    for old in checkpoints(out)[:-2]:
        old.unlink()


def load(path, settings, may_differ):
    """A checkpoint of a run with these settings. ValueError, saying what to do, if it can't be that."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = state["settings"]
    except FileNotFoundError as e:
        raise ValueError(f"there is no checkpoint {path}") from e
    except (RuntimeError, EOFError, KeyError, TypeError, OSError, pickle.UnpicklingError, zipfile.BadZipFile) as e:
        before = [p for p in checkpoints(path.parent) if p < path]
        hint = f"; delete it, and --resume goes on from {before[-1]}" if before else ""
        raise ValueError(f"{path} is damaged or not a checkpoint of train.py ({type(e).__name__}){hint}") from e
    differ = [f"{k} is {settings[k]!r} now and was {saved.get(k)!r}" for k in settings
              if k not in may_differ and settings[k] != saved.get(k)]
    if differ:
        raise ValueError(f"{path} belongs to a run with other settings: {'; '.join(differ)}")
    return state


def load_start(s, out, settings):
    """What --resume or --branch starts from; None for a fresh start."""
    if s.resume:
        paths = checkpoints(out)
        if not paths:
            raise ValueError(f"--resume: no checkpoint in {out}; start without --resume, or name another --out")
        return load(paths[-1], settings, RESUMABLE)
    if s.branch:
        return load(Path(s.branch), settings, RESUMABLE + RECIPE_FLAGS)
    return None


def start_log(out, settings, step):
    """Begin log.jsonl, or on resuming cut it back to the checkpoint's step. Returns the file, open for appending."""
    path = out / "log.jsonl"
    lines = [{"settings": settings, "torch": torch.__version__, "python": platform.python_version(),
              "threads": torch.get_num_threads()}]
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
    """Final validation loss of a finished bf16 run beside OUT with the same settings otherwise, or None."""
    same = settings.keys() - {*RECIPE_FLAGS, *RESUMABLE} | {"steps", "warmup"}
    for path in sorted(out.parent.glob("*/log.jsonl")):
        try:
            records = [json.loads(line) for line in path.read_text().splitlines()]
            other = records[0]["settings"]
            if other["recipe"] == "bf16" and records[-1]["step"] == other["steps"] and \
                    all(other.get(k) == settings[k] for k in same):
                return records[-1]["val_loss"]
        except (ValueError, KeyError, IndexError):      # another program's log, or one being written
            continue
    return None


# ---------------------------------------------------------------------------------------------------------------
# Training


def learning_rate(step, s):
    """Linear warm-up, then cosine decay to min_lr * lr at the last step."""
    if step < s.warmup:
        return s.lr * (step + 1) / s.warmup
    t = (step - s.warmup) / max(1, s.steps - 1 - s.warmup)
    return s.lr * (s.min_lr + (1 - s.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, t))))


def train(s):
    """Run the settings; returns the final validation loss."""
    recipe = make_recipe(s)
    out = Path(s.out)
    dataset = prepare(s.data)
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(s).items() if k != "resume"}
    settings["data"] = dataset.train[0].parent.name     # of a text file, this has its checksum: other text, other run
    state = load_start(s, out, settings)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()                     # fails now rather than at the first checkpoint
        (out / ".writable").unlink()
    except OSError as e:
        raise OSError(f"can't write to --out {out}: {e.strerror}") from e
    files, val = [read_tokens(p) for p in dataset.train], read_tokens(dataset.val[0])
    for split, tokens in [("training", f) for f in files] + [("validation", val)]:
        if len(tokens) < s.seq_len + 1:
            raise ValueError(f"the {split} text of {s.data} has {len(tokens)} tokens, fewer than one context and its "
                             f"target, {s.seq_len + 1}; give more text or a smaller --seq-len")

    torch.manual_seed(s.seed)                           # weights; then every draw of stochastic rounding
    model = GPT(s, recipe, dataset.vocab_size).to(s.device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": s.weight_decay},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=s.lr, betas=(s.beta1, s.beta2), fused=True)
    moes = [m for m in model.modules() if isinstance(m, MoE)]
    n = sum(p.numel() for p in model.parameters())
    idle = sum(m.fc1.numel() + m.fc2.numel() for m in moes) * (1 - s.top_k / max(1, s.experts))
    print(f"{s.model}, {n / 1e6:.2f}M parameters" + (f" ({(n - idle) / 1e6:.2f}M active a token)" if moes else "") +
          f", recipe {variant(s, ' ')}, data {s.data}, {s.device}, {s.steps} steps of {s.batch_size} x {s.seq_len} "
          f"tokens, to {out}")
    first = 0
    if not s.resume:
        set_aside(out)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"]["cpu"])
        if "cuda" in state["rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["rng"]["cuda"])
        first = state["step"]
        print(f"going on after step {first}")
    log = start_log(out, settings, first)
    run = torch.compile(model) if s.compile else model

    if s.recipe != "bf16":
        print("the first step compiles the quantizer, which takes a while (less when it is cached)")
    stop = []
    handlers = {sig: signal.signal(sig, lambda *_: stop.append(1)) for sig in (signal.SIGINT, signal.SIGTERM)}
    val_loss = evaluate(run, val, s) if first >= s.steps else None
    bar = tqdm(range(first, s.steps), initial=first, total=s.steps, unit="step", dynamic_ncols=True)
    clock, tokens_seen = time.perf_counter(), 0
    try:
        for step in bar:
            lr = learning_rate(step, s)
            for group in optimizer.param_groups:
                group["lr"] = lr
            with torch.autocast(torch.device(s.device).type, torch.bfloat16, enabled=s.dtype == "bfloat16"):
                loss = run(*get_batch(files, s, step))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), s.clip).item()
            train_loss = loss.item()
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
                    val_loss = evaluate(run, val, s)    # the clock stands still
                    if not math.isfinite(val_loss):
                        raise Diverged(f"step {done}: the validation loss is {val_loss}; this step is not saved")
                record = {"step": done, "train_loss": train_loss, "val_loss": val_loss, "lr": lr, "grad_norm": norm,
                          "tokens_per_s": round(rate)}
                if moes:
                    record["max_load"] = max(load_ratio)
                log.write(json.dumps(record) + "\n")
                bar.set_postfix_str(f"loss {train_loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
                if val_loss is not None:
                    tqdm.write(f"step {done}: train loss {train_loss:.4f}, validation loss {val_loss:.4f}" +
                               (f", largest load {max(load_ratio):.2f} x mean" if moes else ""))
                clock, tokens_seen = time.perf_counter(), 0
            if done % s.save_interval == 0 or last or stop:
                before = time.perf_counter()
                save(out, done, model, optimizer, settings)
                clock += time.perf_counter() - before
            if stop and not last:
                bar.close()
                print(f"stopped after step {done} and saved; add --resume to the same command to go on")
                sys.exit(130)
    finally:
        for sig, handler in handlers.items():
            signal.signal(sig, handler)
        log.close()

    report(s, settings, model, val, dataset, val_loss)
    return val_loss


def report(s, settings, model, val, dataset, val_loss):
    """The end of a run: loss, the paper's figure of merit where there is a bf16 run to compare with, some text."""
    print(f"validation loss {val_loss:.4f} nats a token")
    reference = bf16_loss(Path(s.out), settings)
    if s.recipe != "bf16" and reference is not None:
        print(f"BF16-relative loss error {abs(val_loss - reference) / reference:.2%} (bf16: {reference:.4f})")
    elif s.recipe != "bf16":
        print(f"no finished bf16 run with the same settings beside {s.out}: run --recipe bf16 too for the loss error")
    if s.sample:
        model.eval()
        prompt = torch.from_numpy(val[:32].astype(np.int64))[None].to(s.device)
        generator = torch.Generator(s.device).manual_seed(s.seed)
        with torch.autocast(torch.device(s.device).type, torch.bfloat16, enabled=s.dtype == "bfloat16"):
            tokens = model.generate(prompt, s.sample, s.seq_len, generator)[0].tolist()
        try:
            text = encoding(dataset.encoding).decode(tokens, errors="replace")
        except Exception as e:                          # GPT-2's vocabulary is a download of tiktoken's
            text = f"({dataset.encoding} vocabulary not available: {type(e).__name__}) {tokens}"
        print(f"--- sample\n{text}\n---")


if __name__ == "__main__":
    arguments = parse_args()
    try:
        train(arguments)
    except Diverged as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(3)
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted")
