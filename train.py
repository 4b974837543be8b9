"""Pretrain a small GPT, dense or mixture-of-experts, in 4 bits or in BF16.

    python train.py --recipe bf16 --out out/a   # 0.9M parameters, or on a GPU 26M
    python train.py --recipe ufp4 --out out/b   # the same in 4 bits
    python train.py --resume out/b              # goes on after Ctrl-C or a crash
    python train.py --resume out/b --prompt "def "          # generates text
    torchrun --nproc-per-node 8 train.py --recipe ufp4      # on 8 GPUs

A run keeps log.jsonl and its last two checkpoints in its folder, --out, which is
out/MODEL-RECIPE-sSEED by default. The log begins with all settings, so --resume needs
only the folder. Flags beside --resume override the settings, for this start alone. If
a flag changes what is computed, the result is another run, a branch, and needs a folder
of its own:

    python train.py --resume out/a/ckpt-STEP --recipe ufp4 --out out/c

(STEP is a number such as 0000700. --save-interval says when checkpoints are made.)

A recipe (see ufp4.py) says how the linear layers inside the transformer's blocks do
their matrix products. (The recipe bf16 quantizes nothing.) All products are computed in
BF16, or on hardware without it in float32, see --dtype. Weights, optimizer, residual
stream, loss and router are always in float32.
"""
import signal
import sys

if __name__ == "__main__":      # no traceback for Ctrl-C while torch is imported
    signal.signal(signal.SIGINT, lambda *_: sys.exit("train.py: interrupted"))

import argparse
import copy
import importlib.util
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
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, fields
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
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

import ufp4
from data.prepare import decode, encode, prepare, read_tokens, vocabulary

# --- Processes -----------------------------------------------------------------------
# Under torchrun several processes train one model. FSDP2 shards it: each keeps a part
# of each weight, of its gradient and of its optimizer state. Before a block runs, FSDP2
# gathers its whole weights in float32, so they are quantized as in a single process.
# N processes compute what one does with --grad-accum N, except for random bits and the
# order of sums.

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

def say(text):
    """Print, from one process, above the progress bar."""
    if RANK == 0:
        tqdm.write(text)

def require(condition, message):
    """ValueError if the user made a mistake. main() prints the message alone."""
    if not condition:
        raise ValueError(message)

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
        if self.training:
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

    def forward(self, x):                                           # (B, T, C)
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

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
    def init_weights(self):
        """As GPT-2 does: Gaussian numbers, smaller in layers that write to the residual
        stream. The gains of norms are 1 already."""
        small = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, p in self.named_parameters():
            if p.dim() > 1:
                writes = name.endswith(("proj.weight", "fc2.weight"))
                p.normal_(std=small if writes else 0.02)

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
            batch_size=8, steps=800, lr=3e-3)
SMALL = dict(layers=8, dim=512, heads=8, hidden=1408, experts=0, top_k=0, seq_len=1024,
             batch_size=32, steps=2000, lr=1e-3)
PRESETS = {
    "nano": NANO,
    "nano-moe": dict(NANO, hidden=96, experts=16, top_k=3),
    "small": SMALL,
    "small-moe": dict(SMALL, hidden=352, experts=32, top_k=3)}

RECIPE_FIELDS = ("fmt", "scale", "rht", "sr", "gemms", "rht_block")

# Flags that may differ when --resume goes on with a run. They change no more than
# random bits, the order of sums and, by --grad-accum, what is quantized together.
MAY_CHANGE = {"out", "resume", "prompt", "with_", "device", "compile", "grad_accum",
              "data",       # the same file in another folder. Its content is compared
              "eval_interval", "save_interval", "log_interval", "sample"}

def flag(name):
    """The flag of a field. with_ is --with, as Python reserves `with`."""
    return "--" + name.strip("_").replace("_", "-")

def hardware(device):
    """-> (the name of the GPU, or else of the CPU; whether it has BF16 instructions)"""
    if device.startswith("cuda"):
        return (torch.cuda.get_device_name(device),
                torch.cuda.is_bf16_supported(including_emulation=False))
    cpu = torch.cpu.get_capabilities()
    bf16 = any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return cpu.get("cpu_name", cpu.get("architecture", "a CPU")), bf16

@dataclass
class Config:
    """Each field is a flag: batch_size is --batch-size. The comment beside it is its
    text in --help."""
    recipe: str = "ufp4"            # how layers multiply, see RECIPES in ufp4.py
    model: str = "small" if GPU else "nano"     # nano, nano-moe, small or small-moe
    data: str = "python"            # python, shakespeare, fineweb or a text file
    out: str = None                 # the run's folder (default: out/MODEL-RECIPE-sSEED)
    resume: str = None              # a run's folder or checkpoint; no value: --out's
    prompt: str = None              # generate text after this, by --resume's run
    with_: str = None               # your own Python file, which adds to ufp4.RECIPES
    seed: int = 0                   # of weights, batches, rotations and random bits
    keep_bf16: int = 0              # blocks not quantized: the last N; -N: the first N
    device: str = "cuda" if GPU else "cpu"      # cpu, cuda, cuda:1, mps, ...
    dtype: str = None               # of products (default: bfloat16 if hardware has it)
    compile: bool = False           # torch.compile the transformer's blocks
    grad_accum: int = 1             # micro-batches of a step, to save memory
    warmup: int = None              # steps (default: a tenth of the preset's, or fewer)
    final_lr_frac: float = 0.1      # final learning rate, as a fraction of the peak
    weight_decay: float = 0.1       # of matrices, by AdamW
    clip: float = 1.0               # largest gradient norm; 0 does not clip
    eval_interval: int = 100        # steps between validations
    eval_windows: int = 128         # validation windows of SEQ_LEN tokens
    save_interval: int = 100        # steps between checkpoints
    log_interval: int = 10          # steps between lines of the log
    sample: int = 200               # how many tokens to generate after --prompt
    # The preset gives these, unless a flag does
    layers: int = None              # number of blocks
    dim: int = None                 # width of the residual stream
    heads: int = None               # attention heads
    hidden: int = None              # width inside the MLP, or inside each expert
    experts: int = None             # experts in a block; 0 for a dense model
    top_k: int = None               # experts per token
    seq_len: int = None             # tokens in a sequence
    batch_size: int = None          # sequences in a step, of all processes and parts
    steps: int = None               # steps in all
    lr: float = None                # peak learning rate
    # The recipe gives these, unless a flag does
    fmt: str = None                 # format of the numbers: e2m1, e1m2 or int4
    scale: str = None               # format of the scales: fp32, e4m3 or e8m0
    rht: str = None                 # GEMMs with the RHT, such as dgrad,wgrad; or none
    sr: str = None                  # operands with SR, such as x,dy; or none
    gemms: str = None               # GEMMs that are quantized, such as dgrad,wgrad
    rht_block: int = None           # size of the Hadamard matrix: 16, 32, 64, ...

    def __post_init__(self):
        """Check, and fill in what was not given."""
        preset = ufp4.lookup("model", self.model, PRESETS)
        for name, value in preset.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.warmup is None:         # at most a fifth of --steps
            self.warmup = min(preset["steps"] // 10, self.steps // 5)
        for name in ("steps", "layers", "dim", "heads", "hidden", "seq_len",
                     "batch_size", "grad_accum", "eval_windows", "eval_interval",
                     "save_interval", "log_interval"):
            value = getattr(self, name)
            require(value > 0, f"{flag(name)} must be above 0, not {value}")
        for name in ("seed", "warmup", "clip", "final_lr_frac", "sample"):
            value = getattr(self, name)
            require(value >= 0, f"{flag(name)} must be at least 0, not {value}")
        require(self.warmup <= self.steps, "--warmup must be at most --steps")
        require(abs(self.keep_bf16) < self.layers,
                "--keep-bf16 leaves no block to quantize")
        require(self.dim % (2 * self.heads) == 0,
                "--dim must be a multiple of 2 x --heads")
        require(1 <= self.top_k <= self.experts or self.top_k == self.experts == 0,
                "--top-k must be from 1 to --experts, or both 0")
        require(self.batch_size % (WORLD * self.grad_accum) == 0,
                f"--batch-size must be a multiple of {WORLD} processes x --grad-accum")
        require(self.eval_windows % WORLD == 0,
                f"--eval-windows must be a multiple of {WORLD} processes")
        require(self.dtype in (None, "float32", "bfloat16"),
                "--dtype: float32 or bfloat16")
        try:
            if self.device == "cuda" and WORLD > 1:     # each process has its own GPU
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError) as e:
            raise ValueError(f"--device {self.device}: {str(e).splitlines()[0]}") from e
        if self.dtype is None:
            self.dtype = "bfloat16" if hardware(self.device)[1] else "float32"
        # Torch compiles its product of experts, grouped_mm, in bfloat16 alone
        require(self.dtype == "bfloat16" or not (self.compile and self.experts),
                "--compile of experts needs --dtype bfloat16")
        if self.out is None:
            self.out = f"out/{self.model}-{self.recipe}"
            for name in ("keep_bf16", *RECIPE_FIELDS):
                if getattr(self, name) != getattr(Config, name):    # not the default
                    self.out += f"-{name}.{getattr(self, name)}"
            self.out += f"-s{self.seed}"

def make_recipe(config):
    """The recipe, as changed by flags. The random signs of the RHT follow from the
    seed, and are the same in all layers and steps."""
    recipe = copy.copy(ufp4.lookup("recipe", config.recipe, ufp4.RECIPES))
    for name in RECIPE_FIELDS:
        value = getattr(config, name)
        if value is None:
            continue
        require(recipe.fmt, f"{flag(name)} has no effect: {config.recipe} quantizes "
                "nothing")
        if name in ("rht", "sr", "gemms"):
            value = () if value == "none" else tuple(value.replace(" ", "").split(","))
        setattr(recipe, name, value)
    recipe.sign_seed += config.seed
    recipe.__post_init__()              # checks the fields, and makes the signs
    return recipe

# --- Data ----------------------------------------------------------------------------

def load_data(config):
    """-> (shards to train on, validation tokens, the version of the data)"""
    if RANK == 0:
        prepare(config.data)            # one process downloads for all
    if WORLD > 1:
        dist.barrier()                  # the others wait
    paths, val_path = prepare(config.data)              # finds what is there
    shards, val = [read_tokens(path) for path in paths], read_tokens(val_path)
    for tokens in (*shards, val):
        require(len(tokens) > config.seq_len, f"{tokens.filename} has {len(tokens)} "
                "tokens, too few for a sequence: take a smaller --seq-len")
    # The data's folder is named after Python's version, or after a text's checksum
    return shards, val, f"{val_path.parent.name}-{len(shards)}"

def windows(tokens, starts, config):
    """-> inputs (B, T), and targets (B, T), which are the next tokens."""
    rows = np.stack([tokens[i:i + config.seq_len + 1] for i in starts])
    rows = torch.from_numpy(rows.astype(np.int64))
    if config.device.startswith("cuda"):
        rows = rows.pin_memory()        # so that the copy does not wait
    rows = rows.to(config.device, non_blocking=True)
    return rows[:, :-1], rows[:, 1:]

def get_batch(shards, config, step, part=0):
    """A step has batch_size random windows, in grad_accum parts, each split over the
    processes. Returns this process's share of a part. Steps take shards in turn. Seed
    and step fix the windows, so a run can be resumed."""
    shard = shards[step % len(shards)]
    generator = np.random.default_rng((config.seed, step))
    starts = generator.integers(0, len(shard) - config.seq_len, size=config.batch_size)
    size = config.batch_size // (WORLD * config.grad_accum)
    first = (part * WORLD + RANK) * size
    return windows(shard, starts[first:first + size], config)

# --- Evaluation ----------------------------------------------------------------------

@torch.no_grad()
def validate(model, val, config):
    """-> {"val_loss": ..., "noise": ..., "slope": ...} of the model, quantized as in
    training. The loss is a mean over windows spaced evenly over the text. Noise and
    slope (below 1 is shrinkage; see ufp4.noise) are means over the quantized layers,
    for this process's first batch. bf16 has none."""
    starts = np.linspace(0, len(val) - config.seq_len - 1, config.eval_windows)
    starts = np.split(starts.astype(int), WORLD)[RANK]          # this process's share
    size = config.batch_size // (WORLD * config.grad_accum)     # windows at a time
    batches = [starts[i:i + size] for i in range(0, len(starts), size)]
    model.eval()
    # If X is rounded stochastically (--sr x), take the same random bits each time
    torch.manual_seed(config.seed)
    losses = [model(*windows(val, batch, config)) * len(batch) for batch in batches]
    loss = all_sum(torch.stack(losses).sum()).item() / config.eval_windows
    layers = ufp4.noise(model, windows(val, batches[0], config)[0])
    model.train()
    found = {"val_loss": loss}
    if layers:
        found["noise"], found["slope"] = np.mean([*layers.values()], 0).tolist()
    return found

# --- A run's folder ------------------------------------------------------------------
# Checkpoints are folders of torch.distributed.checkpoint (DCP), such as ckpt-0000700.
CHECKPOINT = "ckpt-" + 7 * "[0-9]"

def checkpoints(folder):
    """The complete checkpoints in a folder, oldest first. DCP writes .metadata last."""
    return sorted(path.parent for path in Path(folder).glob(f"{CHECKPOINT}/.metadata"))

def read_log(path):
    """-> [header, step, step, ...], dicts. Each start of a run logs a header with its
    settings. The first is returned. A step that was redone counts once."""
    header, steps = None, {}
    for text in Path(path).read_text(errors="replace").splitlines():
        try:
            record = json.loads(text)
        except ValueError:              # half a line, of a process that was killed
            continue
        if "step" in record:
            steps[record["step"]] = record
        else:
            header = header or record
    require(header, f"{path} is damaged: it has no settings")
    return [header, *(steps[n] for n in sorted(steps))]

def resumed(given):
    """The flags that are given, and for all others the settings of --resume's run, as a
    dict."""
    path = Path(given.get("resume") or given.get("out") or Config(**given).out)
    if checkpoints(path):                               # it is a run's folder
        path = checkpoints(path)[-1]
    require((path / ".metadata").exists(), f"there is no checkpoint in {path}")
    old = read_log(path.parent / "log.jsonl")[0]["settings"]
    for name in ("model", "layers", "dim", "heads", "hidden", "experts", "top_k"):
        require(name not in given or given[name] == old[name],
                f"{flag(name)} {given.get(name)}: {path} has {old[name]}")
    if "recipe" in given:       # a new recipe drops the old run's --fmt, --rht, ...
        old |= dict.fromkeys(RECIPE_FIELDS)
    # Of two dicts the later one wins
    return old | {"out": str(path.parent)} | given | {"resume": str(path)}

def goes_on(config):
    """Whether --resume names the newest checkpoint in --out, and so goes on with that
    run. If not, another run begins in --out."""
    saved = checkpoints(config.out)
    return bool(config.resume and saved) and saved[-1].samefile(config.resume)

def claim(config, data_version):
    """Lock the run's folder for this process. Returns the lock, an open file.
    ValueError if the folder holds another run, or if settings would change the run."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / "lock", "w")
    try:
        import fcntl
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process trains in {out}; take another --out")
    except (ImportError, OSError):      # Windows and some network disks have no locks
        pass
    same_run = goes_on(config)
    require(same_run or not checkpoints(out), f"{out} holds a run: --resume {out} goes "
            "on with it, --out with a new folder begins another")
    if config.resume:
        old = read_log(Path(config.resume).parent / "log.jsonl")[0]
        changed = [flag(name) for name, value in old["settings"].items()
                   if name not in MAY_CHANGE and value != getattr(config, name)]
        if same_run:
            if with_version(config) != old.get("with_version"):
                changed.append(f"{config.with_}, which was edited,")
            require(not changed, f"{', '.join(changed)} would change the run in {out}; "
                    "to branch from it, add --out with a new folder")
        # A branch may take other --data, but not a text that was edited since
        if same_run or config.data == old["settings"]["data"]:
            require(data_version == old["data_version"], f"--data {config.data} is "
                    f"{data_version} now and was {old['data_version']}")
    return lock

def state_of(model, optimizer, step=0):
    """What a checkpoint holds, a dict. Its tensors are those of the model and the
    optimizer, not copies (get_state_dict makes a new optimizer's moments). So load()
    fills these in place. Random bits and batches follow from seed and step."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}

def save(config, step, model, optimizer):
    """Write ckpt-STEP, all processes together. Keep only the last two checkpoints."""
    out = Path(config.out)
    dcp.save(state_of(model, optimizer, step), checkpoint_id=out / f"ckpt-{step:07d}")
    if RANK == 0:
        for path in set(out.glob(CHECKPOINT)) - set(checkpoints(out)[-2:]):
            shutil.rmtree(path)

def load(path, state):
    """Read a checkpoint into the tensors of `state`, and set state["step"]. ValueError
    if that fails."""
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        raise ValueError(f"can't load {path}: {error!r}; if it is damaged, delete it, "
                         "and --resume takes the one before") from e

def log(config, record, mode="a"):
    """Append a dict to the log, as a line, or with mode "w" begin a new log."""
    if RANK == 0:
        with open(Path(config.out) / "log.jsonl", mode) as file:
            file.write(json.dumps(record) + "\n")

def with_version(config):
    """A checksum of the file of --with."""
    return config.with_ and zlib.crc32(Path(config.with_).read_bytes())

def git_commit():
    """The commit of this code, "-dirty" if it was changed; None outside of git."""
    command = "git describe --always --dirty --abbrev=40 --exclude=*"   # no tags
    done = subprocess.run(command, shell=True, cwd=Path(__file__).parent,
                          capture_output=True, text=True)
    return done.stdout.strip() or None

# --- The run -------------------------------------------------------------------------

def learning_rate(step, config):
    """Linear warm-up, then cosine decay to final_lr_frac * lr at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    t = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    fall = 0.5 * (1 + math.cos(math.pi * t))                        # from 1 to 0
    return config.lr * (config.final_lr_frac + (1 - config.final_lr_frac) * fall)

def build(config, recipe, vocab_size):
    """-> (the model, its optimizer)"""
    model = GPT(config, recipe, vocab_size)     # all of it on the CPU, in each process
    torch.manual_seed(config.seed)
    model.init_weights()
    if config.compile:
        for block in model.blocks:
            block.compile()
    if WORLD > 1:
        mesh = dist.device_mesh.init_device_mesh(config.device, (WORLD,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    model.to(config.device)             # after sharding: a GPU never holds all of it
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True,
                                    weight_decay=config.weight_decay)

@contextmanager
def signals_caught():
    """Yields a list. Inside the `with`, Ctrl-C and SIGTERM only add to it."""
    caught, before = [], {}
    # Python allows signal handlers in the main thread alone
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda *got: caught.append(got))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

def train(config):
    """Train from the start or from a checkpoint to the last step. Returns the last
    validation loss, or None if no step was left."""
    recipe = make_recipe(config)
    model, optimizer = build(config, recipe, vocabulary(config.data))
    shards, val, data_version = load_data(config)
    # The folder is locked as long as this file is open
    lock = claim(config, data_version) if RANK == 0 else None
    start, val_loss = 0, None
    if config.resume:
        state = state_of(model, optimizer)
        load(config.resume, state)
        start = state["step"]
        require(goes_on(config) or start < config.steps,
                f"{config.resume} is at step {start}: a branch needs more --steps, or "
                "an earlier checkpoint")
    name = hardware(config.device)[0]
    header = {"settings": vars(config), "data_version": data_version,
              "with_version": with_version(config), "start": start,
              "commit": git_commit(), "processes": WORLD, "torch": torch.__version__,
              "hardware": name}
    log(config, header, "a" if goes_on(config) else "w")
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{config.model}, {parameters / 1e6:.2f}M parameters, recipe {config.recipe}, "
        f"{config.dtype} on {WORLD} x {name}, steps {start} to {config.steps}, "
        f"{config.out}")
    if recipe.fmt and start < config.steps:
        say("the first step compiles the quantizers, which takes up to a minute once")

    moes = [m for m in model.modules() if isinstance(m, MoE)]
    bar = tqdm(total=config.steps, initial=start, disable=RANK > 0)
    last_logged, clock = start, time.perf_counter()
    with bar, signals_caught() as signals:
        for step in range(start, config.steps):
            # The random bits of this step and process: a resumed run draws the same
            seeds = np.random.SeedSequence((config.seed, step, RANK))
            torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
            lr = learning_rate(step, config)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = 0.0
            for part in range(config.grad_accum):
                inputs, targets = get_batch(shards, config, step, part)
                part_loss = model(inputs, targets) / config.grad_accum
                part_loss.backward()        # FSDP averages over processes here
                loss += part_loss.detach()
            # Clips (not at --clip 0), and returns the norm before that
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
            norm = norm.full_tensor() if WORLD > 1 else norm        # FSDP's is sharded
            optimizer.step()
            optimizer.zero_grad()
            imbalance = [moe.balance() for moe in moes]
            bar.update()

            done = step + 1
            last = done == config.steps
            # Did any process get a signal? (A tensor on the CPU: no wait for the GPU)
            stops = all_sum(torch.tensor(len(signals))).item() > 0
            saves = last or stops or done % config.save_interval == 0
            validates = last or done % config.eval_interval == 0
            if not (saves or validates or done % config.log_interval == 0):
                continue
            # Only now wait for the device. The loss is averaged over the processes, the
            # other numbers are the same in all of them
            loss, norm = all_sum(loss).item() / WORLD, norm.item()
            seconds = time.perf_counter() - clock
            speed = (done - last_logged) * config.batch_size * config.seq_len / seconds
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
            record = {"step": done, "train_loss": loss, "lr": lr, "grad_norm": norm,
                      "tokens_per_s": round(speed)}
            if moes:
                record["max_load"] = max(imbalance).item()
            if validates:
                record |= validate(model, val, config)
                val_loss = record["val_loss"]
                say(f"step {done}: train_loss {loss:.4f}, val_loss {val_loss:.4f}")
            # It is enough to look at steps that are logged: a loss that is not finite
            # spoils all later ones, and nothing is saved before this check
            if not math.isfinite(loss + norm + record.get("val_loss", 0)):
                raise FloatingPointError(
                    f"not finite: {record}; --resume would repeat this, so start "
                    "another run, for example with a lower --lr")
            log(config, record)
            if saves:
                save(config, done, model, optimizer)
            if stops and not last:
                raise KeyboardInterrupt(f"stopped after step {done} and saved; "
                                        f"--resume {config.out} goes on")
            # Validating and saving do not count in the next tokens/s
            last_logged, clock = done, time.perf_counter()

    say(f"to generate text: --resume {config.out} --prompt TEXT; to compare runs: "
        "python bench.py runs")
    return val_loss

@torch.no_grad()
def sample(config):
    """--prompt: continue the text by --sample tokens, and print both."""
    vocab_size = vocabulary(config.data)
    config.compile = False              # would take longer than the text
    model, _ = build(config, make_recipe(config), vocab_size)
    load(config.resume, {"model": model.state_dict()})
    model.eval()
    torch.manual_seed(config.seed)                      # all processes draw the same
    tokens = encode(config.prompt or "\n", vocab_size)
    tokens = torch.tensor([tokens], device=config.device)               # (1, T)
    for _ in range(config.sample):
        logits = model(tokens[:, -config.seq_len:])[:, -1].float()      # (1, V)
        p = torch.softmax(logits / 0.8, -1)             # at temperature 0.8
        tokens = torch.cat((tokens, torch.multinomial(p, 1)), 1)
    say(decode(tokens[0].tolist(), vocab_size))

# --- The command ---------------------------------------------------------------------

def parse_args(argv=()):
    """The flags as a Config. ValueError or SystemExit if they are wrong."""
    p = argparse.ArgumentParser(prog="train.py", argument_default=argparse.SUPPRESS,
                                allow_abbrev=False, usage="train.py [FLAGS]")
    source = inspect.getsource(Config)
    comments = dict(re.findall(r"^    (\w+): .*# (.*)", source, re.M))
    for f in fields(Config):
        how = ({"action": argparse.BooleanOptionalAction} if f.type is bool
               else {"type": f.type, "metavar": f.name.strip("_").upper()})
        if f.name == "resume":
            how |= {"nargs": "?", "const": ""}
        elif f.default is not None:
            comments[f.name] += f" (default: {f.default})"
        p.add_argument(flag(f.name), dest=f.name, help=comments[f.name], **how)
    given = vars(p.parse_args(argv))
    if "resume" in given or "prompt" in given:
        given = resumed(given)
    if given.get("with_"):
        given["with_"] = str(Path(given["with_"]).resolve())
        import_file(given["with_"])
    return Config(**given)

def import_file(path):
    """Run a user's file, which adds to ufp4.RECIPES. It can import files beside it."""
    sys.path.insert(0, str(Path(path).parent))
    name = f"with_{Path(path).stem}"        # a name that no other module has
    spec = importlib.util.spec_from_file_location(name, path)
    require(spec, f"--with {path}: not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

def main(argv=()):
    """The command. In a notebook: train.main(["--recipe", "ufp4"])."""
    if hasattr(sys.stdout, "reconfigure"):      # what a terminal can't show becomes "?"
        sys.stdout.reconfigure(errors="replace")
    try:
        config = parse_args(argv)
        if WORLD > 1:
            dist.init_process_group()       # gloo for CPU tensors, NCCL for a GPU's
        train(config) if config.prompt is None else sample(config)
        if WORLD > 1:
            dist.destroy_process_group()
    except FloatingPointError as e:
        print(f"train.py: {e}", file=sys.stderr)
        sys.exit(3)                         # bench.py recognizes this code
    except dcp.CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        sys.exit(f"train.py: can't save a checkpoint: {error!r}; --resume {config.out} "
                 "goes on from the one before")
    except (ValueError, OSError, ImportError, KeyboardInterrupt) as e:
        sys.exit(f"train.py: {str(e) or 'interrupted'}")

if __name__ == "__main__":
    # A file of --with may `import train`: it gets this module, not a second copy
    sys.modules["train"] = sys.modules["__main__"]
    main(sys.argv[1:])
