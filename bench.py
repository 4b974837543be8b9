"""Each claim, one command: what is measured, its table, its figure.

    python bench.py bias        the grids: bias of each bin, slopes, how it compounds (1 min)
    python bench.py sqnr        which grid suits a trained model's tensors, and the RHT (25 min)
    python bench.py cpu         what emulation costs on this CPU, against BF16 steps (8 min)
    python bench.py loss        what recipes cost in loss, paired seeds (hours)
    python bench.py ablate      the same, one change at a time
    python bench.py scaling     the same against compute: five dense sizes, three mixtures
    python bench.py dispatch    what the kernels compile to on GPUs that are not here (5 min)
    python bench.py kernels     their speed on this GPU, against copying and cuBLAS
    python bench.py tune        which tiles and registers quantize fastest on this GPU
    python bench.py plan        memory and bounds on speed of a run, by the flags of train.py
    python bench.py train       train.py with the recipes below besides its own
    python bench.py readme      write the tables of both README.md anew

A command prints its tables, saves them, with the numbers behind them, in data/results/NAME.json,
and puts them into both README.md; some draw NAME.png. loss, ablate and scaling save each run as it
ends, and go on from there; --seeds 2 --steps 300 is a quick look, in a file of its own.
"""
import argparse
import collections
import concurrent.futures
import functools
import itertools
import json
import math
import operator
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
import unittest.mock
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import train
import ufp4
from data.prepare import prepare, read_tokens, vocabulary
from gpu import route
from ufp4 import FORMATS, GEMMS, OPERANDS, RECIPES, Quantizer, Recipe

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "data" / "results"
PAGES = (HERE / "README.md", RESULTS / "README.md")

# ---- Common: results on disk, tables, figures, statistics ---------------------------------------
def machine():
    """What measures, and the commit of the code that it runs."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu, has_bf16 = train.hardware("cpu")
    return {"cpu": cpu, "has_bf16": has_bf16, "cores": os.cpu_count(), "gpu": gpu,
            "torch": torch.__version__, "python": platform.python_version(),
            "commit": train.commit()}

def save(name, results):
    """Write data/results/NAME.json, a line for each record."""
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in results.items())
    part = RESULTS / f"{name}.json.tmp"
    part.write_text("{" + lines.replace("[{", "[\n{").replace("}, {", "},\n{") + "}\n")
    os.replace(part, RESULTS / f"{name}.json")

def finish(name, tables, results=None):
    """Print tables {marker in a page: rows of text, the head first}, save them, fill the pages."""
    for rows in tables.values():
        widths = [max(map(len, column)) for column in zip(*rows)]
        print(*("  ".join(map(str.ljust, row, widths)) for row in rows), "", sep="\n")
    save(name, {**(results or {}), "machine": machine(), "tables": tables})
    bench_readme()

def fill_tables(page):
    """A page's text with each block between <!-- NAME --> and <!-- /NAME --> made anew."""
    tables = {}
    for path in RESULTS.glob("*.json"):
        tables |= json.loads(path.read_text()).get("tables", {})

    def block(found):
        if found[1] not in tables:
            sys.exit(f"bench.py: no file in {RESULTS} has a table {found[1]}; measure it first")
        head, *rows = tables[found[1]]
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
        return "\n".join([f"<!-- {found[1]} -->", *lines, f"<!-- /{found[1]} -->"])
    return re.sub(r"<!-- (\S+) -->\n.*?<!-- /\1 -->", block, page, flags=re.S)

def bench_readme(args=None):
    for page in PAGES:
        page.write_text(fill_tables(page.read_text()))

def figure(name, columns, draw, *given, height=3.4):
    """draw(axes, *given) on `columns` axes side by side, into NAME.png."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(4.6 * columns, height), layout="constrained")
    draw(fig.subplots(1, columns), *given)
    fig.savefig(RESULTS / f"{name}.png", dpi=80)

# The 97.5% quantile of Student's t, by number of values (one more than degrees of freedom)
STUDENT_T = dict(enumerate((12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), 2))

def interval(values):
    """Mean and half-width of its 95% interval: None for one value, or if one is not finite."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2 or not math.isfinite(mean):
        return mean, None
    return mean, STUDENT_T.get(n, 1.96 + 2.5 / (n - 1)) * statistics.stdev(values) / math.sqrt(n)

def text(measured, digits=2):
    """(mean, half-width) as a cell in %; blank for None."""
    if measured is None:
        return ""
    mean, half = measured
    return f"{100 * mean:.{digits}f}" + ("" if half is None else f" ± {100 * half:.{digits}f}")

def spread(values, form="{:.2f}"):
    """Median (smallest to largest) as a cell."""
    middle, low, high = (form.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})"

def interleaved(functions, rounds):
    """[milliseconds of each call] of each function, called in turns, after two calls to warm up."""
    times = [[] for _ in functions]
    for _ in range(rounds + 2):
        for ms, f in zip(times, functions):
            start = time.perf_counter()
            f()
            ms.append(1e3 * (time.perf_counter() - start))
    return [ms[2:] for ms in times]

# ---- Experiments: recipes beside those of ufp4.py, which `bench.py train` knows too -------------
@dataclass(frozen=True)
class Choosing(Quantizer):
    """Each block takes fmt or `other`: what has the smaller squared error to nearest, for noise in
    the choice would bias the result."""
    other: ufp4.Format = ufp4.E1M2

    def __call__(self, x, noise=None, dim=-1):
        x = x.float() if self.signs is None else ufp4.rht(x, self.signs, dim)
        blocks, found = lambda v: v.unflatten(dim, (-1, self.block)), []
        for fmt in (self.fmt, self.other):
            nearest = Quantizer(fmt, self.scale, self.block)(x, None, dim)
            error = (blocks(nearest) - blocks(x)).double() ** 2
            q = Quantizer(fmt, self.scale, self.block, stochastic=self.stochastic)
            found.append((error.sum(dim, keepdim=True), blocks(q(x, noise, dim))))
        (error, first), (other_error, second) = found
        return torch.where(other_error < error, second, first).flatten(dim - 1, dim)

@dataclass(frozen=True)
class Sloped(Quantizer):
    """Rounded to nearest, rescaled so that <Q(x), x> / <x, x> is `slope`; SR stays as it is."""
    slope: float = 1.0

    def __call__(self, x, noise=None, dim=-1):
        q = super().__call__(x, noise, dim)
        if self.stochastic:
            return q
        x = (x if self.signs is None else ufp4.rht(x, self.signs, dim)).double()
        factor = self.slope * x.square().sum() / (q * x).sum().clamp(min=1e-300)    # zeros: 0
        return q * factor.float()

@dataclass(frozen=True)
class Experiment(Recipe):
    """A recipe whose quantizers are of another kind, or have `more` set, in all GEMMs or in one."""
    kind: type = Quantizer
    more: tuple = ()
    only: str = ""

    def quantizer(self, operand, gemm):
        q = super().quantizer(operand, gemm)
        return self.kind(**vars(q) | dict(self.more)) if self.only in ("", gemm) else q

def add(recipe):
    RECIPES[recipe.name] = recipe
    return recipe.name

def experiment(name, like, kind=Quantizer, only="", **more):
    r = RECIPES[like]
    return add(Experiment(name, r.fmt, r.scale, r.block, r.rht, r.sr, kind=kind,
                          more=tuple(more.items()), only=only))

# {command: {what some recipes have in common: their names}}
UFP4 = RECIPES["ufp4"]
GROUPS = {"loss": {
    "the method": ["ufp4", "ufp4-int4"],
    "E2M1": ["e2m1", "e2m1-full-rht"],
    "the method, other scales": ["ufp4-e4m3", "ufp4-mx"],
    "a standard": ["nvfp4", "mxfp4"],
    # arXiv 2512.02010 (a block's maximum to 6 or 4) and arXiv 2605.31035, all else as in e2m1
    "a choice by block": [experiment("four-over-six", "e2m1", Choosing, other=FORMATS["e2m1-max4"]),
                          experiment("mixfp4", "e2m1", Choosing, other=ufp4.E1M2)]},
"ablate": {
    "the pair": ["ufp4", "e2m1"],
    "RHT on": [add(replace(UFP4, name=f"ufp4-rht-{'-'.join(gemms) or 'none'}", rht=gemms))
               for gemms in ((), ("wgrad",), ("dgrad", "wgrad"), ("fprop", "wgrad"))],
    "SR on": [add(replace(UFP4, name=f"ufp4-sr-{'-'.join(which) or 'none'}", sr=which))
              for which in ((), ("x", "dy"), OPERANDS)],
    "grid, slope": ["e2m1-full-rht",
                    experiment("e2m1-debiased", "e2m1-full-rht", Sloped, slope=1.0),
                    experiment("ufp4-shrunk", "ufp4", Sloped, slope=0.996)],
    "one GEMM in E2M1": [experiment(f"ufp4-{gemm}-in-e2m1", "ufp4", only=gemm, fmt=ufp4.E2M1)
                         for gemm in GEMMS],
    "range of E2M1": ["e2m1-max2", "e2m1-max3", "e2m1-max4"]}}

# ---- bias: the geometry of shrinkage ------------------------------------------------------------
GRIDS = ("e2m1", "e1m2")

def sqnr(q, x):
    """Signal to quantization noise in dB, -10 log10(|q - x|^2 / |x|^2), as in the paper."""
    return -10 * math.log10((q - x).double().square().sum() / x.double().square().sum())

def slope(q, x):
    """alpha = <Q(x), x> / <x, x> and its standard error, from the spread over rows."""
    q, x = q.double(), x.double()
    power = x.square().sum()
    alpha = (q * x).sum() / power
    return alpha.item(), (((q - alpha * x) * x).sum(-1).square().sum().sqrt() / power).item()

def gaussian_slope(levels, block=16):
    """alpha of RTN on blocks of independent Gaussians under fp32 scales, in closed form.

    Given a block's maximum m (density 16 f(m) F(m)^15, with |x| of density f), one value is exact,
    the 15 others lie in [0, m]. E[Q(x) x] sums over the bins, as x f(x) integrates to -f(x).
    """
    def f(x):
        return math.sqrt(2 / math.pi) * torch.exp(-x * x / 2)
    m = torch.linspace(1e-3, 9, 20_001, dtype=torch.float64)
    cdf, unit = torch.erf(m / math.sqrt(2)), m / levels[-1]
    edges = [0.0, *((a + b) / 2 for a, b in zip(levels, levels[1:])), levels[-1]]
    other = sum(q * unit * (f(a * unit) - f(b * unit)) for q, a, b in zip(levels, edges, edges[1:]))
    mean = cdf ** (block - 1) * m * m + (block - 1) * cdf ** (block - 2) * other
    return torch.trapezoid(f(m) * mean, m).item()

def chain(fmt, depth=128, n=512):
    """X <- Q(X) Q(W)^T again and again, W random orthogonal (so that the exact chain keeps its
    norm), RHT on both -> [after each GEMM, (<X_hat, X> / <X, X>, product of all slopes so far)]."""
    g, signs = torch.Generator().manual_seed(0), ufp4.random_signs(0)
    exact = approx = torch.randn(n, n, generator=g)
    slopes, found = [], []
    for _ in range(depth):
        w = torch.linalg.qr(torch.randn(n, n, generator=g))[0]
        x, r = ufp4.rht(approx, signs), ufp4.rht(w, signs)
        qx, qw = ufp4.fake_quantize(x, fmt), ufp4.fake_quantize(r, fmt)
        slopes.append(slope(qx, x)[0] * slope(qw, r)[0])
        exact, approx = exact @ w.T, qx @ qw.T
        found.append((slope(approx, exact)[0], math.prod(slopes)))
    return found

def bench_bias(args):
    g, shape = torch.Generator().manual_seed(0), (8192, 512)
    x, gate, up = (torch.randn(shape, generator=g) for _ in range(3))
    cell = lambda q, x: "{:.4f} ± {:.4f}".format(slope(q, x)[0], 2 * slope(q, x)[1])
    slopes = [["slope alpha ± two standard errors, FP32 scales", "E2M1", "E1M2"],
              ["Gaussian, in closed form",
               *(f"{gaussian_slope(FORMATS[f].levels):.4f}" for f in GRIDS)]]
    for kind, data in (("Gaussian", x), ("SwiGLU-like", nn.functional.silu(gate) * up)):
        for name, v in ((kind, data), (f"{kind}, RHT", ufp4.rht(data, ufp4.random_signs(0)))):
            slopes.append([name, *(cell(ufp4.fake_quantize(v, f), v) for f in GRIDS)])
    # rows of sizes spread over a factor of 2, or power-of-two scales would meet one size alone
    x = x * torch.rand((shape[0], 1), generator=g).exp2()
    scales = [["block scales", *(f"{f.upper()} {what}" for f in GRIDS
                                 for what in ("nearest", "SR", "SQNR, dB"))]]
    for scale in ufp4.SCALES:
        scales.append([f"`{scale}`"])
        for f in GRIDS:
            nearest = ufp4.fake_quantize(x, f, scale)
            noisy = ufp4.fake_quantize(x, f, scale, stochastic=True, generator=g)
            scales[-1] += [cell(nearest, x), cell(noisy, x), f"{sqnr(nearest, x):.2f}"]
    chains = {f: chain(f) for f in GRIDS}
    figure("bias", 2, draw_bias, chains)
    finish("bias", {"slopes": slopes, "scales": scales}, {"chain": chains})

def draw_bias(axes, chains):
    """Left, the bins, and the mean error in each that is lopsided, (l - r) / 2. Right, chains."""
    bins, depth = axes
    for y, f, color in ((1, "e2m1", "C3"), (0, "e1m2", "C0")):
        levels, top = torch.tensor(FORMATS[f].levels), FORMATS[f].max
        edges = torch.tensor([0, *(levels[1:] + levels[:-1]) / 2, top]) / top
        bins.stairs([y + 0.25] * 8, edges, baseline=y - 0.25, fill=True, color=color, alpha=0.3)
        bins.vlines(edges, y - 0.25, y + 0.25, color="w", lw=3)
        bins.vlines(levels / top, y - 0.33, y + 0.33, color="k", lw=1.5)
        for q, error in zip(levels[1:], (levels.diff()[:-1] - levels.diff()[1:]) / 4):
            if error:
                bins.text(q / top, y + 0.37, f"{error:g}", ha="center")
        measured, product = zip(*chains[f])
        gemms = range(1, 1 + len(measured))
        depth.plot(gemms, measured, color=color, label=f"{f.upper()} measured")
        depth.plot(gemms, product, "--", color=color, label="product of alphas")
    bins.set(yticks=(0, 1), yticklabels=("E1M2", "E2M1"), xlabel="value / block maximum",
             ylim=(-0.5, 1.6), title="Levels (lines), rounding bins, mean errors")
    depth.set(xlabel="quantized GEMMs in a row", ylabel="attenuation of the signal",
              title="Shrinkage compounds")
    depth.legend(fontsize=8)

# ---- lesson: python ufp4.py ---------------------------------------------------------------------

def lesson():
    """One block under both grids, without and with the RHT; then the slopes of the grids."""
    def show(name, cells):
        cells = [c if isinstance(c, str) else f"{c:.2f}" for c in cells]
        print(f"{name:4}" + "".join(f"{c:>6}" for c in cells))
    signs = ufp4.random_signs(0)
    x = torch.tensor([0.5, 10.5, 0.75, 0.25, 0.5, 1.75, 1.5, -0.25,        # a typical such block
                      -0.75, -0.25, 1.0, -1.0, 1.25, 0.5, -1.0, -1.5])
    for v in (x, ufp4.rht(x, signs)):
        print("A block of sixteen numbers, one of them an outlier" if v is x else
              "\nThe same block, x S H: the outlier is spread out")
        show("S", ["+" if sign > 0 else "-" for sign in signs])
        show("x", v)
        for fmt in (ufp4.E2M1, ufp4.E1M2):
            quantizer = Quantizer(fmt)
            s, codes, decoded = quantizer.snap(v)[1].item(), quantizer.pack(v).codes, quantizer(v)
            levels = " ".join(f"{level:g}" for level in fmt.levels)
            print(f"  {fmt.name}: levels {levels}; amax {v.abs().max():.3f} / {fmt.max:g} = s = "
                  f"{s:.4f}; SQNR {sqnr(decoded, v):.2f} dB")
            show("x/s", v / s)
            show("code", [f"{c:04b}" for byte in codes.tolist() for c in (byte & 15, byte >> 4)])
            show("Q(x)", decoded)
            show("err", decoded - v)
    print("\nRounding shrinks where r > l: mean error (l - r) / 2 in the bin of each inner level")
    million = torch.randn(62_500, 16, generator=torch.Generator().manual_seed(0))
    for fmt in (ufp4.E2M1, ufp4.E1M2):
        bins = zip(fmt.levels, fmt.levels[1:], fmt.levels[2:])
        show(fmt.name, [(2 * q - a - b) / 4 for a, q, b in bins])
        alpha = slope(Quantizer(fmt)(million), million)[0]
        print(f"     alpha on a million Gaussians: {alpha:.4f}, "
              f"in closed form {gaussian_slope(fmt.levels):.4f}")

# ---- sqnr: does the RHT change the preferred grid? (the paper's Q1) -----------------------------
CONTRACTED = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}

def capture(model, tokens, targets):
    """{(layer, operand): its tensor (rows, columns)}: X, W and dY of every quantizable layer."""
    got = {}
    for name, m in model.named_modules():
        if isinstance(m, ufp4.Linear):
            got[name, "w"] = m.weight
            m.register_forward_pre_hook(lambda m, x, at=(name, "x"): got.update({at: x[0]}))
            m.register_full_backward_hook(lambda m, _, dy, at=(name, "dy"): got.update({at: dy[0]}))
    model(tokens, targets).backward()
    return {at: x.detach().flatten(0, -2).float() for at, x in got.items()}

def load_model(flags, checkpoint):
    """(settings, data set, GPT with the checkpoint's weights) of train.py with these flags."""
    s = train.parse_args(flags)
    dataset = prepare(s.data)
    model = train.GPT(s, train.make_recipe(s), dataset.vocab_size)
    train.load(checkpoint, {"model": model.state_dict()})               # into the model's tensors
    return s, dataset, model.to(s.device)

def bench_sqnr(args):
    out = HERE / "out" / "bench" / "sqnr"
    flags = [*MODELS["dense-10m"], "--out", str(out),
             *"--recipe bf16 --steps 300 --device cpu --dtype bfloat16".split()]
    if not (out / "ckpt-0000300").exists():
        train.train(train.parse_args(flags))
    s, dataset, model = load_model(flags, out / "ckpt-0000300")
    batch = train.get_batch([read_tokens(p) for p in dataset.train], s, s.steps)
    found, signs = collections.defaultdict(list), ufp4.random_signs(0)
    for (layer, operand), x in capture(model, *batch).items():
        kind = "all layers" if operand == "w" else layer.rpartition(".")[2]
        for gemm, data in zip(CONTRACTED[operand], (x, x.T.contiguous())):
            found[f"{operand} of {kind}, {gemm}"].append(
                [sqnr(ufp4.fake_quantize(v, f), v) for v in (data, ufp4.rht(data, signs))
                 for f in GRIDS])
    rows = [["SQNR, dB", "E2M1", "E1M2", "E2M1, RHT", "E1M2, RHT", "better grid changes"],
            ["the paper's input of fc2", "21.90", "19.94", "20.00", "23.19", ""]]
    for name, layers in found.items():
        changes = sum((a > b) != (c > d) for a, b, c, d in layers)
        rows.append([name, *(f"{statistics.median(column):.2f}" for column in zip(*layers)),
                     f"{changes} of {len(layers)}"])
    finish("sqnr", {"sqnr": rows}, {"tensors": found})

# ---- cpu: what emulation costs ------------------------------------------------------------------
def training_step(s, recipe, vocab_size):
    """A function that makes a whole step of training a GPT, always on the same random tokens."""
    torch.manual_seed(0)
    model, optimizer = train.build(s, RECIPES[recipe], vocab_size)
    model.init_weights()
    tokens = torch.randint(vocab_size, (s.batch_size, s.seq_len), device=s.device)

    def step():
        model(tokens, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if s.device == "cuda":
            torch.cuda.synchronize()
    return step

def bench_cpu(args):
    rows = [[f"a step on {machine()['cpu']}, {torch.get_num_threads()} threads", "`bf16`, ms",
             "`ufp4` / `bf16`", "`e2m1` / `bf16`"]]
    for model, dtype in itertools.product(("nano", "nano-moe"), ("float32", "bfloat16")):
        s = train.parse_args(["--model", model, "--dtype", dtype, "--device", "cpu"])
        steps = [training_step(s, recipe, 256) for recipe in ("bf16", "ufp4", "e2m1")]
        bf16, *ours = interleaved(steps, 15)
        rows.append([f"`{model}`, {dtype}", spread(bf16, "{:.0f}"),
                     *(spread([a / b for a, b in zip(ms, bf16)]) for ms in ours)])
    finish("cpu", {"cpu": rows})

# ---- loss, ablate, scaling: train many small models and compare ---------------------------------
def size(preset, layers, dim, heads, hidden, steps=800):
    """Flags of train.py. `nano`'s text and schedule at every size: more compute is a larger model,
    not more text, for a CPU's sake. The learning rate falls with the square root of the width."""
    lr = 3e-3 * (128 / dim) ** 0.5      # check at two sizes: scaling --models SIZE --lr LR
    return (f"--model {preset} --layers {layers} --dim {dim} --heads {heads} --hidden {hidden} "
            f"--steps {steps} --lr {lr:.2e}").split()

# By kind and millions of parameters; a third part of a name says what else differs
SIZES = {"dense-0.3m": size("nano", 2, 96, 3, 256),
         "dense-0.3m-long": size("nano", 2, 96, 3, 256, steps=3200),
         "dense-0.9m": size("nano", 4, 128, 4, 352),
         "dense-2m": size("nano", 4, 192, 6, 512),
         "dense-5m": size("nano", 6, 256, 8, 704),
         "dense-10m": size("nano", 6, 384, 6, 1024),
         "moe-1m": size("nano-moe", 3, 96, 3, 64),
         "moe-3m": size("nano-moe", 4, 128, 4, 96),
         "moe-10m": size("nano-moe", 6, 192, 6, 160)}
MODELS = {**{name: ["--model", name] for name in train.PRESETS}, **SIZES}

def folder(args, job):
    return args.runs / "{model}-{estimator}-{recipe}-s{seed}".format(**job)

def milestones(args, job):
    """The checkpoints where others branch from a BF16 run, and at the end of any run."""
    steps = train.parse_args([*MODELS[job["model"]], *args.train]).steps
    return [folder(args, job) / f"ckpt-{n:07d}" for n in (2 * steps // 3, steps)]

def bf16_of(job):
    """The run that a job branches from, or is compared with."""
    return {**job, "recipe": "bf16", "estimator": "scratch"}

def train_run(args, job):
    """One run of train.py in a process of its own -> its results."""
    out, (branch, _) = folder(args, job), milestones(args, bf16_of(job))
    command = [sys.executable, __file__, "train", "--recipe", job["recipe"], *MODELS[job["model"]],
               *args.train, *f"--seed {job['seed']} --sample 0 --eval-interval 1000000".split(),
               "--save-interval", str(int(branch.name[5:])), "--out", str(out)]
    if job["estimator"] == "branched":
        command += ["--branch", str(branch)]
    if milestones(args, job)[-1].exists():
        command += ["--resume"]                 # another command ran it: to be evaluated
    env = {**os.environ, "OMP_NUM_THREADS": str(max(1, os.cpu_count() // args.jobs))}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode == 3 and job["recipe"] != "bf16":                # diverged: a result too
        return {"val_loss": None, "error": said}
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {said}")
    return {"val_loss": train.read_log(out / "log.jsonl")[-1]["val_loss"]}

def output_noise(run):
    """(run(), [(slope, noise) of each quantized product in it]): what quantization does to fprop.
    Y = slope X W^T + R with R orthogonal to X W^T; noise = |R|^2 / |X W^T|^2."""
    found, linear = [], ufp4.linear

    def compared(x, w, recipe, ends=None):
        y, exact = linear(x, w, recipe, ends), linear(x, w, "bf16", ends).float()
        power = exact.square().sum()
        slope = (exact * y).sum() / power
        found.append((slope.item(), ((y - slope * exact).square().sum() / power).item()))
        return y
    with unittest.mock.patch.object(ufp4, "linear", compared):
        return run(), found

def forward_passes(args, job):
    """The parts of a branched run's gap: the loss of its weights in a BF16 forward pass, and of the
    BF16 run's weights in its own, with the slope and noise there, means over the layers."""
    flags = [*MODELS[job["model"]], *args.train, "--seed", str(job["seed"]), "--recipe"]
    s, dataset, model = load_model([*flags, "bf16"], milestones(args, job)[-1])
    tokens = read_tokens(dataset.val[0])
    weights_loss = train.evaluate(model, tokens, s)
    s, _, model = load_model([*flags, job["recipe"]], milestones(args, bf16_of(job))[-1])
    own_loss, found = output_noise(lambda: train.evaluate(model, tokens, s))
    slope, noise = map(statistics.mean, zip(*found))
    return {"weights_loss": weights_loss, "own_loss": own_loss, "slope": slope, "noise": noise}

def bf16_by_float32():
    """Where a CPU has no instructions for BF16, and torch takes ten times as long: the products of
    bfloat16 numbers in float32, in which they are exact, and each sum rounded to bfloat16. What
    differs is the order of sums, and attention's inside, which stays float32."""
    def rounded(f):
        def product(*tensors, **options):
            tensors = [t for t in tensors if t is not None]             # no bias
            bf16 = any(t.dtype == torch.bfloat16 for t in tensors)
            if not bf16 and not torch.is_autocast_enabled("cpu"):
                return f(*tensors, **options)
            with torch.autocast("cpu", enabled=False):
                return f(*(t.bfloat16().float() for t in tensors), **options).bfloat16()
        return product
    for name in ("linear", "grouped_mm", "scaled_dot_product_attention"):
        setattr(F, name, rounded(getattr(F, name)))

key = operator.itemgetter("model", "recipe", "estimator", "seed")  # of a job, and of its record

def train_all(args, recipes):
    """Run seeds x models x estimators x recipes, less what data/results/NAME.json has -> what it
    then has. A BF16 run is repeated where others need its weights, but its folder is gone; so each
    record has the BF16 loss that it is compared with."""
    path = RESULTS / f"{args.name}.json"
    results = {"flags": args.train, "settings": {}, "machines": [], "runs": []}
    if path.exists():
        results |= json.loads(path.read_text())
    if results["flags"] != args.train:
        sys.exit(f"bench.py: {path} has runs with other flags for train.py; move it away first")
    runs, here, lock = {key(r): r for r in results["runs"]}, machine(), threading.Lock()

    def run(job):
        found = train_run(args, job)
        with lock:                                      # one evaluation at a time
            if job["estimator"] == "branched" and found["val_loss"] is not None:
                found |= forward_passes(args, job)
            first, *_, last = train.read_log(folder(args, bf16_of(job)) / "log.jsonl")
            del first["settings"]["out"]                        # where this machine had it
            results["settings"].setdefault(job["model"], first["settings"])
            if here not in results["machines"]:
                results["machines"].append(here)
            runs[key(job)] = {**job, "machine": results["machines"].index(here), **found,
                              "bf16_val_loss": last["val_loss"]}
            results["runs"] = [runs[k] for k in sorted(runs)]
            save(args.name, results)
        print(*key(job), found["val_loss"], flush=True)

    def run_all_of(seed, model):
        jobs = [{"model": model, "recipe": recipe, "estimator": estimator, "seed": seed}
                for estimator in args.estimators for recipe in args.rows or recipes]
        new, bf16 = [job for job in jobs if key(job) not in runs], bf16_of(jobs[0])
        if key(bf16) not in runs or new and not milestones(args, bf16)[0].exists():
            run(bf16)
        for job in new:
            run(job)

    try:
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            each = itertools.product(range(args.seeds), args.models)
            list(pool.map(run_all_of, *zip(*each)))     # the first to fail cancels the others
    except (KeyboardInterrupt, RuntimeError) as e:
        sys.exit(f"bench.py: stopped; the same command goes on from here. {e}")
    return results

def errors_of(runs, model, recipe, estimator="branched", loss="val_loss"):
    """{seed: BF16-relative loss error} (the paper's, Q2), infinite if the run diverged."""
    return {r["seed"]: math.inf if r["val_loss"] is None else r[loss] / r["bf16_val_loss"] - 1
            for r in runs if key(r)[:3] == (model, recipe, estimator) and loss in r}

def contrast(runs, model, weights):
    """Mean and interval of a sum of loss errors, branched, {recipe: weight} over the seeds that
    have all; None without such seeds."""
    errors = {recipe: errors_of(runs, model, recipe) for recipe in weights}
    sums = [sum(weight * errors[recipe][seed] for recipe, weight in weights.items())
            for seed in sorted(set.intersection(*map(set, errors.values())))]
    return interval(sums) if sums else None

def cell(runs, model, recipe, **of):
    """The loss error in % and its number of seeds."""
    errors = errors_of(runs, model, recipe, **of).values()
    return f"{text(interval(list(errors)))} ({len(errors)})" if errors else ""

def less(runs, model, recipe, other):
    """The paired difference of two recipes' loss errors in %."""
    return "" if recipe == other else text(contrast(runs, model, {recipe: 1, other: -1}))

def fprop_of(runs, model):
    """{recipe: (slope and noise of fprop on the BF16 runs' weights, means over seeds)}, without
    those of which a run diverged."""
    found = collections.defaultdict(list)
    for r in runs:
        if r["model"] == model and "noise" in r:
            found[r["recipe"]].append((r["slope"], r["noise"]))
    return {recipe: tuple(map(statistics.mean, zip(*pairs))) for recipe, pairs in found.items()
            if math.isfinite(contrast(runs, model, {recipe: 1})[0])}

# ---- loss: recipes; ablate: one change at a time ------------------------------------------------
# The paper's: BF16-relative loss errors in % (Q2), and Dense 1.5B's losses over ufp4's (Q4)
PAPER = {("loss", "nano"): {"ufp4": "0.97", "e2m1": "1.26"},
         ("loss", "nano-moe"): {"ufp4": "1.85", "e2m1": "2.36"},
         ("ablate", "nano"): {
             "ufp4-rht-none": "+0.60", "ufp4-rht-wgrad": "+0.34", "ufp4-rht-dgrad-wgrad": "+0.44",
             "ufp4-rht-fprop-wgrad": "+0.25", "ufp4-sr-none": "+0.24"}}
# With RHT on all three GEMMs: E2M1, which shrinks or does not, and E1M2. Effects: sums of errors
CAUSES = ("e2m1-full-rht", "e2m1-debiased", "ufp4-shrunk", "ufp4")
EFFECTS = {"effect of the grid": dict(zip(CAUSES, (.5, .5, -.5, -.5))),
           "effect of shrinking": dict(zip(CAUSES, (.5, -.5, .5, -.5))),
           "effect of fprop without RHT": {"ufp4-rht-wgrad": .5, "ufp4-rht-fprop-wgrad": -.5,
                                           "ufp4-rht-dgrad-wgrad": .5, "ufp4": -.5}}

def bench_loss(args):
    groups = GROUPS[args.command]
    recipes = sum(groups.values(), [])
    results = train_all(args, recipes)
    for model in args.models:
        figure(f"{args.name}-{model}", 2, draw_loss, results["runs"], model, groups,
               height=1.4 + 0.2 * len(recipes))
    finish(args.name, loss_tables(args.name, results["runs"], groups), results)

bench_ablate = bench_loss

def loss_tables(name, runs, groups):
    """{title: table} of every model."""
    return {f"{name}-{model}": recipe_table(runs, model, groups, PAPER.get((name, model), {}))
            for model in sorted({r["model"] for r in runs})}

def measured(rows):
    """A table without the columns in which nothing was measured."""
    return [list(row) for row in zip(*(column for column in zip(*rows) if any(column[1:])))]

def recipe_table(runs, model, groups, published):
    """A row a recipe; then EFFECTS, how far ufp4 is below e2m1, and how loss error goes with slope
    and noise of fprop."""
    rows = [[f"`{model}`: loss error, % (seeds)", "recipe", "from scratch", "branched",
             "less `e2m1`", "less `ufp4`", "of it, in the weights", "forward noise alone",
             "slope of fprop", "noise of fprop, %", "the paper's"]]
    fprop = fprop_of(runs, model)
    for group, recipe in ((group, r) for group, recipes in groups.items() for r in recipes):
        row, (slope, noise) = (runs, model, recipe), fprop.get(recipe, (None, None))
        cells = [cell(*row, estimator="scratch"), cell(*row), less(*row, "e2m1"),
                 less(*row, "ufp4"), cell(*row, loss="weights_loss"), cell(*row, loss="own_loss"),
                 f"{slope:.4f}" if slope else "", f"{100 * noise:.3f}" if noise else ""]
        if any(cells):
            rows.append([group, f"`{recipe}`", *cells, published.get(recipe, "")])
    for name, effect in EFFECTS.items():
        if found := contrast(runs, model, effect):
            rows.append([name, "", "", text(found), *[""] * 7])
    if found := reduction(runs, [model]):
        rows.append(["`ufp4` smaller than `e2m1` by, %", "", "", text(found, 0), *[""] * 7])
    if len(fprop) > 4:
        errors = [contrast(runs, model, {recipe: 1})[0] for recipe in fprop]
        found = (f"{statistics.correlation(v, errors):.2f}" for v in zip(*fprop.values()))
        rows.append([f"correlation with branched, over {len(fprop)}", *[""] * 7, *found, ""])
    return measured(rows)

def draw_loss(axes, runs, model, groups):
    """Loss errors less ufp4's; loss error against the noise of fprop. A colour a group."""
    (differences, scatter), names, fprop = axes, [], fprop_of(runs, model)
    for at, recipes in enumerate(groups.values()):
        look = {"fmt": "o", "ms": 4, "color": f"C{at % 10}"}
        for recipe in recipes:
            found = contrast(runs, model, {recipe: 100, "ufp4": -100})
            if recipe != "ufp4" and found:
                differences.errorbar(found[0], -len(names), xerr=found[1] or 0, **look)
                names.append(recipe)
            if recipe in fprop:
                error, half = contrast(runs, model, {recipe: 100})
                scatter.errorbar(100 * fprop[recipe][1], error, yerr=half or 0, lw=0.8, **look)
    differences.axvline(0, color="k", lw=0.6)
    differences.set(yticks=range(0, -len(names), -1), yticklabels=names,
                    title=f"{model}, branched", xlabel="loss error less ufp4's, % of BF16's loss")
    scatter.set(xlabel="noise of fprop, % of its outputs' power", ylabel="loss error to BF16, %",
                xlim=(0, None), ylim=(0, None), title="Loss error against noise")

# ---- scaling: against compute -------------------------------------------------------------------
SCALED = ("e2m1", "ufp4", "e2m1-full-rht")

def counted(s, recipe="bf16"):
    """(GPT without values, parameters, those active for a token, FLOPs a token)"""
    with torch.device("meta"):
        model = train.GPT(s, ufp4.named("recipe", recipe, RECIPES), vocabulary(s.data))
    return model, *train.counts(model, s)

def bench_scaling(args):
    results = train_all(args, SCALED)
    costs = results.get("costs", {})                    # {model: parameters, training FLOPs}
    for model in args.models:
        s = train.parse_args([*MODELS[model], *args.train])
        _, total, _, flops = counted(s)
        costs[model] = [total, flops * s.steps * s.batch_size * s.seq_len]
    costs = dict(sorted(costs.items(), key=lambda item: (item[0].split("-")[0], item[1])))
    figure(args.name, 1, draw_scaling, results["runs"], costs)
    table = scaling_table(results["runs"], costs)
    finish(args.name, {args.name: table}, results | {"costs": costs})

def sizes_of(kind, costs):
    """{model: training FLOPs} of the dense models, or the mixtures, that differ in size alone."""
    return {model: flops for model, (_, flops) in costs.items()
            if re.fullmatch(f"{kind}-[^-]+", model)}

def reduction(runs, models):
    """By what part of itself e2m1's loss error, branched, falls with ufp4: 1 - the ratio of sums
    over the models, of each seed that has all; mean and interval. None without, or if one diverged.
    """
    ours, theirs = ([errors_of(runs, model, recipe) for model in models]
                    for recipe in ("ufp4", "e2m1"))
    seeds = sorted(set.intersection(*map(set, ours + theirs))) if ours else ()
    parts = [1 - sum(e[s] for e in ours) / sum(e[s] for e in theirs) for s in seeds]
    return interval(parts) if parts and math.isfinite(sum(parts)) else None

def scaling_table(runs, costs):
    rows = [["size", "parameters", "FLOPs", *(f"`{recipe}`, % (seeds)" for recipe in SCALED),
             "`ufp4` less `e2m1`", "smaller by, %"]]
    for model, (total, flops) in costs.items():
        rows.append([model, f"{total:,}", f"{flops:.1e}",
                     *(cell(runs, model, recipe) for recipe in SCALED),
                     less(runs, model, "ufp4", "e2m1"), text(reduction(runs, [model]), digits=0)])
    for kind in ("dense", "moe"):
        if found := reduction(runs, sizes_of(kind, costs)):
            rows.append([f"{kind}, all sizes", *[""] * (len(SCALED) + 3), text(found, digits=0)])
    return measured(rows)

def draw_scaling(ax, runs, costs):
    looks = itertools.product((("dense", "o-"), ("moe", "o--")), zip(SCALED, ("C3", "C0", "C1")))
    for (kind, style), (recipe, color) in looks:
        found = {c: contrast(runs, m, {recipe: 100}) for m, c in sizes_of(kind, costs).items()}
        found = {c: error for c, error in found.items() if error}
        if found:
            means, halves = zip(*found.values())
            ax.errorbar(found.keys(), means, yerr=[half or 0 for half in halves], fmt=style, ms=3,
                        color=color, capsize=3, label=f"{recipe}, {kind}")
    ax.set(xscale="log", xlabel="training FLOPs", ylabel="loss error to BF16, %")
    ax.legend(fontsize=7)

# ---- dispatch: what the kernels compile to on GPUs that need not be here ------------------------
def calls():
    """What is measured -> the operands of rows and of columns, by their names."""
    import kernels
    q, name = RECIPES["ufp4"].quantizer, kernels.operand_name
    x, dy = [q("x", "fprop"), q("x", "wgrad")], [q("dy", "dgrad"), q("dy", "wgrad")]
    return {"one orientation, nearest": [name(x[0], "packed"), None],
            "both orientations, nearest": [name(q, "packed") for q in x],
            "both orientations, stochastic": [name(q, "packed") for q in dy],
            "dY of a layer": [name(q, "decoded") for q in dy]}

def lower(kernel, name, arch):
    """Compile quantize_kernel for one of calls(), or matmul_kernel for a recipe.

    Returns tensor-core instructions and their count, a quantizer's instructions for an
    element, and how many instructions move registers to memory or back (spills)."""
    import kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    if kernel == "quantize_kernel":
        rows, cols = map(kernels.OPERANDS.get, calls()[name])
        (TR, TC), options = kernels.SHAPES[rows is not None, cols is not None]
        constants = dict(ROWS=rows, COLS=cols, TR=TR, TC=TC, amax_ptr=None, stride_c=1)
        types = "*bf16 *fp32 *fp32 *i32 *fp32 *i32 *fp32 *fp32 *u32 i32 i32 i32 i32".split()
    else:
        path, block = route(RECIPES[name], arch), RECIPES[name].block
        (BM, BN, BK), options = kernels.product_shape(path, block, arch)
        codes, width = ("u8", BK // 2) if path == "fp4" else ("i32", BK // 8)
        scale, none = ("fp8e4nv", {}) if block == 16 else ("u8", {"a_t_ptr": None, "b_t_ptr": None})
        types = [f"tensordesc<{t}>" for rows in (BM, BN) for t in (
            f"{codes}[{rows}, {width}]", f"{scale}[{rows // 128}, {BK // block // 4}, 2, 256]")]
        constants = dict(PATH=path, BLOCK=block, BM=BM, BN=BN, BK=BK, **none)
        types += "*bf16 *fp32 *fp32 i32 i32 i32".split()
    function = getattr(kernels, kernel)
    types = dict(zip(function.arg_names, types)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names)
               if types[n][0] in "*i" and n not in ("a_t_ptr", "b_t_ptr")}
    cuda = arch.startswith("sm_")
    asm = kernels.triton.compile(
        ASTSource(function, types, constants, aligned), options=options,
        target=GPUTarget("cuda", int(arch[3:]), 32) if cuda else GPUTarget("hip", arch, 64)).asm
    found = collections.Counter(re.findall(r"(?:tcgen05\.|\bw?g?)mma[._][^ ;]*|v_mfma\S*",
                                           asm["ptx" if cuda else "amdgcn"]))
    result = {"instruction": " + ".join(name.split(".f32")[0] for name in found),  # less the types
              "count": sum(found.values())}
    if not cuda:
        return result | {"spills": int(re.search(r"vgpr_spill_count:\s*(\d+)", asm["amdgcn"])[1])}
    ops = re.findall(r"\t(?:@!?U?P\w+ )?(?!NOP)([A-Z][\w.]+)", asm["sass"])
    if kernel == "quantize_kernel":
        result["per_element"] = len(ops) / (TR * TC / 128)          # 4 warps share a tile
    return result | {"spills": sum(op.startswith(("STL", "LDL")) for op in ops)}

def lowering(*call):
    """lower(*call) in a process of its own, without the interpreter.

    A compiler that fails an assertion ends its process. {"error": its last line} then."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1"}
    code = "import json, sys, bench; print(json.dumps(bench.lower(*json.loads(sys.argv[1]))))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(call)], cwd=HERE, text=True,
                          capture_output=True, env=env)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines() or ["it died"]
    return {"error": lines[-1]} if done.returncode else json.loads(lines[-1])

def bench_dispatch(args):
    import kernels
    def product(arch, recipe):
        path = route(RECIPES[recipe], arch)
        if path == "cublas":
            return path
        r = lowering("matmul_kernel", recipe, arch)
        return r.get("error") or f"{path}: {r['instruction']}, {r['count']}"

    def quantizer(name, arch):
        r = lowering("quantize_kernel", name, arch)
        return r.get("error") or f"{r['per_element']:.1f}, {r['spills']}"

    def table(what, cell, rows, columns):
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            cells = {row: pool.map(cell, itertools.repeat(row), columns) for row in rows}
        return [[f"{what} (Triton {kernels.triton.__version__})", *columns],
                *([row, *found] for row, found in cells.items())]
    finish("dispatch", {
        "dispatch": table("path: instruction, count", product,
                          ("sm_90", "sm_100", "sm_120", "gfx950"),
                          ("ufp4-e4m3", "ufp4-mx", "nvfp4", "mxfp4")),
        "quantize": table("instructions an element, spills", quantizer, calls(),
                          ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100"))})

# ---- kernels: speed on a GPU, as ratios to what that GPU can do; tune ---------------------------
def bench_kernels(args):
    import kernels
    from triton.testing import do_bench
    timed, median = functools.partial(do_bench, return_mode="all"), statistics.median
    rows = [["on a GPU", "target (aim)", torch.cuda.get_device_name()]]

    def row(name, target, value, ms):
        rows.append([name, target, f"{value:.2f}; {spread(ms, '{:.3f}')} ms"])

    def against_bf16(name, target, bf16, ours):
        row(f"{name}, `ufp4` / bf16", target, median(ours) / median(bf16), ours)

    def quantize(names, x):
        return torch.ops.ufp4.quantize(x, signs, keys, *names)
    on_gpu, signs = {"device": "cuda", "dtype": torch.bfloat16}, RECIPES["ufp4"].signs.cuda()
    keys = torch.stack([ufp4.random_key("cuda") for _ in range(2)])
    x, w, y = (torch.randn(8192, 8192, **on_gpu) for _ in range(3))
    copied = 2 * x.nbytes / median(timed(lambda: y.copy_(x)))            # bytes a millisecond
    targets = "at least 0.75 (0.85)", "at least 0.55 (0.75)", "at least 0.40 (0.55)"
    for (name, names), target in zip(calls().items(), targets):
        ms = timed(lambda: quantize(names, x))
        moved = x.nbytes + sum(t.nbytes for t in quantize(names, x))
        row(f"quantize, {name}: share of copy bandwidth", target, moved / median(ms) / copied, ms)
    rotated = calls()["one orientation, nearest"]
    plain = [kernels.operand_name(Quantizer(), "packed"), None]
    unrotated, ms = median(timed(lambda: quantize(plain, x))), timed(lambda: quantize(rotated, x))
    row("RHT + quantize in one kernel / quantize alone", "at most 1.06 (1.02), the paper's",
        median(ms) / unrotated, ms)
    h = ufp4.rht(torch.eye(16), RECIPES["ufp4"].signs).to(x)        # the RHT as a matrix
    ms = timed(lambda: quantize(plain, (x.view(-1, 16) @ h).view(x.shape)))
    row("RHT, then quantize / quantize alone", "the paper's 1.62", median(ms) / unrotated, ms)
    a, b = (kernels.Packed(*quantize(rotated, t)[:2], None, rotated[0]) for t in (x, w))
    cublas = median(timed(lambda: torch.mm(x, w.T, out=y)))
    ms = timed(lambda: kernels.matmul(a, b, x.dtype))
    row("packed GEMM, decoded for cuBLAS: share of cuBLAS bf16", "at least 0.55",
        cublas / median(ms), ms)
    v, dy = (torch.randn(8192, 4096, **on_gpu) for _ in range(2))
    v.requires_grad_()
    layers = [ufp4.Linear(4096, 4096, bias=False, **on_gpu, recipe=r) for r in ("bf16", "ufp4")]
    passes = [lambda layer=layer: torch.autograd.grad(layer(v), (v, layer.weight), dy)
              for layer in layers]
    waiting = [lambda f=f: (f(), torch.cuda.synchronize()) for f in passes]
    against_bf16("linear layer, forward + backward", "at most 1.30 (1.15)",
                 *interleaved(waiting, 30))
    against_bf16("the same, of the GPU's time alone", "", *map(timed, passes))
    for name, target, flags in (
            ("`small`", "at most 1.6 (1.3)", "--model small"),
            ("1B parameters", "at most 1.3 (1.15)", "--model small --layers 16 --dim 2048 "
             "--heads 16 --hidden 5632 --seq-len 2048 --batch-size 4")):
        s = train.parse_args(f"{flags} --compile --device cuda --dtype bfloat16".split())
        torch.compiler.reset()          # or this model's sizes would be variables after another's
        steps = [training_step(s, recipe, 50304) for recipe in ("bf16", "ufp4")]
        against_bf16(f"training step, {name}, compiled", target, *interleaved(steps, 30))
    finish("kernels", {"kernels": rows})

def bench_tune(args):
    """Time calls() with several tiles and registers. gpu.SHAPES should have the fastest."""
    import kernels
    from triton.testing import do_bench
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    signs = RECIPES["ufp4"].signs.cuda()
    keys = torch.stack([ufp4.random_key("cuda") for _ in range(2)])
    for name, names in calls().items():
        for tile, registers in itertools.product(((32, 128), (64, 64), (64, 128)), (64, 128)):
            kernels.SHAPES = dict.fromkeys(kernels.SHAPES, (tile, {"maxnreg": registers}))
            ms = do_bench(lambda: torch.ops.ufp4.quantize(x, signs, keys, *names),
                          return_mode="all")
            print(f"{spread(ms, '{:.3f}')} ms: {name}, {tile}, {registers} registers", flush=True)

# ---- plan: what a run costs, counted, not measured ----------------------------------------------
# Dense peaks in TFLOP/s by path of gpu.py, where another multiplies in BF16; from NVIDIA's
# data sheets: H200 (half the figures with sparsity), an eighth of HGX B200's.
PEAKS = {"H200": ("sm_90", {"bf16": 989}),
         "B200": ("sm_100", {"bf16": 2250, "fp8": 4500, "fp4": 9000})}

def bench_plan(args):
    """What train.py with the flags args.train would take on args.gpus GPUs."""
    s, gpus = train.parse_args(args.train), args.gpus
    recipe = train.make_recipe(s)
    model, total, active, flops = counted(s, recipe)
    quantized = 6 * sum(m.weight.numel() for m in model.modules()
                        if isinstance(m, ufp4.Linear) and m.recipe.fmt is not None)
    layer = sum(p.numel() for p in model.blocks.parameters()) / s.layers
    cast = s.layers if recipe.fmt is None else s.keep_bf16      # layers that multiply in BF16
    # Numbers of a token in a block that the backward pass needs: the layers' inputs, in 4 bits if
    # quantized; in BF16 qkv, the turned q and k, attention's output, of an MLP gate, up and
    # silu(gate), and what a mixture sums; in float32 the two norms' inputs and outputs
    mlps = s.top_k + 1                                          # with the shared or only one
    inputs = 2 * s.dim + mlps * (s.dim + s.hidden)
    bf16 = 6 * s.dim + 3 * mlps * s.hidden + s.top_k * s.dim
    scale = 4 if recipe.scale is ufp4.scale_fp32 else 1                     # bytes a block
    kept = 2 if recipe.fmt is None else 0.5 + scale / recipe.block
    block = kept * inputs + 2 * bf16 + 4 * 4 * s.dim
    blocks = 4 * s.dim * s.layers + block if s.remat else block * s.layers
    tokens = s.batch_size * s.seq_len // (gpus * s.grad_accum)
    sizes = {"weights, gradients and AdamW's state": 16 * total / gpus,
             # by FSDP: embedding, head and their gradients; two blocks, and the gradient of one
             "gathered": 4 * (2 * (total - s.layers * layer) + 3 * layer) * (gpus > 1),
             "weights cast to BF16": 2 * (model.lm_head.weight.numel()
                                          + layer * (min(1, cast) if s.remat else cast)),
             f"activations of {tokens} tokens": tokens * (
                 blocks + 10 * (s.dim + vocabulary(s.data)))}
    print(f"{s.model}, {train.variant(s)}, {gpus} GPUs: {total / 1e9:.3f}B parameters, "
          f"{active / 1e9:.3f}B active a token, {flops / 1e9:.3f} GFLOPs a token, "
          f"{quantized / flops:.0%} of them in quantized layers other than experts")
    for name, size in [*sizes.items(), ("together", sum(sizes.values()))]:
        print(f"{name:37}{size / 2**30:10.2f} GiB a GPU")
    for gpu, (arch, peaks) in PEAKS.items():
        path = route(recipe, arch)              # experts' products are in BF16
        seconds = quantized / peaks.get(path, peaks["bf16"]) + (flops - quantized) / peaks["bf16"]
        print(f"at most {gpus * 1e12 / seconds:,.0f} tokens/s on {gpu}, path {path} ({arch})")

def main(argv=None):
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP, in a single process
    parser = argparse.ArgumentParser(description="Each claim, one command.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", add_help=False, help="takes the flags of train.py")
    p = commands.add_parser("plan", allow_abbrev=False, help="takes the flags of train.py too")
    p.add_argument("--gpus", type=train.positive, default=1, metavar="N")
    for name in ("bias", "sqnr", "cpu", "dispatch", "kernels", "tune", "readme"):
        commands.add_parser(name)
    studies = {"loss": (["nano"], 10), "ablate": (["nano"], 10), "scaling": ([*SIZES], 5)}
    for name, (models, seeds) in studies.items():
        p = commands.add_parser(name, allow_abbrev=False, epilog="More flags are for train.py.")
        p.add_argument("--models", nargs="+", default=models, choices=MODELS)
        p.add_argument("--seeds", type=train.positive, default=seeds, metavar="N")
        p.add_argument("--rows", nargs="+", choices=RECIPES, help="some of the table's recipes")
        p.add_argument("--estimators", nargs="+", choices=("scratch", "branched"),
                       default=["branched"], help="whole runs; or the last third of the steps, "
                       "from the BF16 run's checkpoint")
        p.add_argument("--jobs", type=train.positive, metavar="N", help="runs at a time",
                       default=1 if torch.cuda.is_available() else os.cpu_count())
    args, rest = parser.parse_known_args(argv)
    if args.command in ("train", "sqnr", *studies) and not (train.GPU or train.hardware("cpu")[1]):
        bf16_by_float32()
    if args.command == "train":
        return train.main(rest)
    args.train = ["--dtype", "bfloat16", *rest] if args.command in studies else rest
    label = re.sub(r"\W+", "-", " ".join(["", *rest]))       # other flags, other files
    args.name, args.runs = args.command + label, HERE / "out" / f"bench{label}"
    if rest and args.command not in ("plan", *studies):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if args.command in ("kernels", "tune"):
        os.environ["UFP4_BACKEND"] = "triton"           # an error rather than the reference
        if not torch.cuda.is_available():
            parser.error("this measures a GPU, and torch finds none here; see dispatch")
    try:
        globals()[f"bench_{args.command}"](args)
    except ValueError as e:
        sys.exit(f"bench.py: {e}")

if __name__ == "__main__":
    main()
