"""Each claim, one command: what is measured, its table, its figure.

    python bench.py bias        the grids: bias of each bin, slopes, how it compounds (1 min)
    python bench.py sqnr        which grid suits a trained model's tensors, and the RHT (3 min)
    python bench.py cpu         what emulation costs on this CPU, against BF16 steps (5 min)
    python bench.py loss        what recipes cost in loss, paired seeds (hours; --quick: a look)
    python bench.py ablate      the same, one change at a time
    python bench.py scaling     the same against compute: five sizes, dense and mixtures
    python bench.py dispatch    what the kernels compile to on GPUs that are not here (5 min)
    python bench.py kernels     their speed on this GPU, against copying and cuBLAS
    python bench.py tune        which tiles and programs quantize fastest on this GPU
    python bench.py plan        memory and bounds on speed of a run, by the flags of train.py
    python bench.py train       train.py with the recipes below besides its own
    python bench.py readme      write the tables of both README.md anew

A command prints its tables and saves them, with the numbers behind them, in data/results/NAME.json;
some draw NAME.png. loss, ablate and scaling save each run as it ends, and go on where they stopped.
"""
import argparse
import collections
import concurrent.futures
import itertools
import json
import math
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

import train
import ufp4
from data.prepare import prepare, read_tokens, vocabulary
from ufp4 import FORMATS, GEMMS, OPERANDS, RECIPES, Quantizer, Recipe

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "data" / "results"
PAGES = (HERE / "README.md", RESULTS / "README.md")

# ---- Common: results on disk, tables, figures, statistics ---------------------------------------

def machine():
    """What measures, and the commit of the code that it runs."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": train.hardware("cpu")[0], "cores": os.cpu_count(), "gpu": gpu,
            "torch": torch.__version__, "python": platform.python_version(),
            "commit": train.commit()}

def save(name, results):
    """Write data/results/NAME.json, a line for each record."""
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in results.items())
    part = RESULTS / f"{name}.json.tmp"
    part.write_text("{" + lines.replace("[{", "[\n{").replace("}, {", "},\n{") + "}\n")
    os.replace(part, RESULTS / f"{name}.json")

def finish(name, tables, results=None):
    """Print tables {marker in a page: rows of text, the head first}, and save them."""
    for rows in tables.values():
        widths = [max(map(len, column)) for column in zip(*rows)]
        print(*("  ".join(map(str.ljust, row, widths)) for row in rows), "", sep="\n")
    save(name, {**(results or {}), "machine": machine(), "tables": tables})

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

def bench_readme(args):
    for page in PAGES:
        page.write_text(fill_tables(page.read_text()))

def figure(name, columns, draw, *given, height=3.4):
    """draw(axes, *given) on `columns` axes side by side, into NAME.png."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, columns, figsize=(4.6 * columns, height), layout="constrained")
    draw(axes, *given)
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
    """{name: milliseconds of each call} of functions {name: f} called in turns, after two calls to
    warm up."""
    times = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, f in functions.items():
            start = time.perf_counter()
            f()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: ms[2:] for name, ms in times.items()}

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
    """A recipe whose quantizers are of another kind, or have `more` fields set: all of them, or
    those of the GEMM or operand `where`."""
    kind: type = Quantizer
    more: tuple = ()
    where: str = ""

    def quantizer(self, operand, gemm):
        q = super().quantizer(operand, gemm)
        here = self.where in ("", operand, gemm)
        return self.kind(**vars(q) | dict(self.more)) if here else q

def experiment(name, like, kind=Quantizer, where="", **more):
    r = RECIPES[like]
    return Experiment(name, r.fmt, r.scale, r.block, r.rht, r.sr, kind=kind, where=where,
                      more=tuple(more.items()))

def varied(name, like="ufp4", **changes):
    return replace(RECIPES[like], name=f"{like}-{name}", **changes)

# The choices of arXiv 2512.02010 (a block's maximum to 6 or 4) and arXiv 2605.31035 (E2M1 or E1M2),
# all else as in e2m1
NEIGHBOURS = [experiment("four-over-six", "e2m1", Choosing, other=FORMATS["e2m1-max4"]),
              experiment("mixfp4", "e2m1", Choosing, other=ufp4.E1M2)]
# {what differs from ufp4: recipes}
ABLATIONS = {
    "RHT on": [varied("-".join(("rht", *(gemms or ["none"]))), rht=gemms) for gemms in (
        (), ("wgrad",), ("dgrad", "wgrad"), ("fprop", "wgrad"))],
    "SR on": [varied("-".join(("sr", *(operands or ["none"]))), sr=operands) for operands in (
        (), ("x", "dy"), OPERANDS)],
    "grid, slope": [RECIPES["e2m1-full-rht"],
                    experiment("e2m1-debiased", "e2m1-full-rht", Sloped, slope=1.0),
                    experiment("ufp4-shrunk", "ufp4", Sloped, slope=0.996)],
    "one GEMM in E2M1": [experiment(f"ufp4-{g}-in-e2m1", "ufp4", where=g, fmt=ufp4.E2M1)
                         for g in GEMMS],
    "one operand in E2M1": [experiment(f"ufp4-{o}-in-e2m1", "ufp4", where=o, fmt=ufp4.E2M1)
                            for o in OPERANDS],
    "range of E2M1": [RECIPES[f"e2m1-max{top}"] for top in (2, 3, 4)],
    "scales, grid": [varied(name, like, scale=scale) for like, name, scale in (
        ("ufp4", "e4m3-nearest", "e4m3"), ("e2m1", "e4m3-nearest", "e4m3"),
        ("ufp4", "e4m3-up", "e4m3_up"), ("e2m1", "e4m3-up", "e4m3_up"),
        ("ufp4", "e8m0-up", "e8m0_up"), ("e2m1", "e8m0-floor", "e8m0"))],
    "block": [varied(f"block-{n}", block=n) for n in (8, 32)],
    "Hadamard size": [varied(f"rht-block-{n}", rht_block=n) for n in (8, 32)]}
RECIPES.update({r.name: r for rows in (NEIGHBOURS, *ABLATIONS.values()) for r in rows})

# ---- bias: the geometry of shrinkage ------------------------------------------------------------

GRIDS = ("e2m1", "e1m2")

def bin_bias(fmt):
    """Mean of rho(t) - t over t spread evenly over each interior bin, beside (l - r) / 2."""
    f, bins = FORMATS[fmt], []
    for a, q, b in zip(f.levels, f.levels[1:], f.levels[2:]):
        left, right = (q - a) / 2, (b - q) / 2
        t = q - left + (left + right) * (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
        measured = (ufp4.round_to_grid(t.float(), f).double() - t).mean().item()
        bins.append({"level": q, "closed": (left - right) / 2, "measured": measured})
    return bins

def sqnr(q, x):
    """Signal to quantization noise in dB, -10 log10(|q - x|^2 / |x|^2), as in the paper."""
    return -10 * math.log10((q - x).double().square().sum() / x.double().square().sum())

def slope(q, x):
    """alpha = <Q(x), x> / <x, x> and its standard error, from the spread over rows."""
    q, x = q.double(), x.double()
    power = x.square().sum()
    alpha = (q * x).sum() / power
    return alpha.item(), (((q - alpha * x) * x).sum(-1).square().sum().sqrt() / power).item()

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
               *(f"{ufp4.gaussian_slope(FORMATS[f].levels):.4f}" for f in GRIDS)]]
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
    bins, chains = ({f: make(f) for f in GRIDS} for make in (bin_bias, chain))
    finish("bias", {"slopes": slopes, "scales": scales}, {"bins": bins, "chain": chains})
    figure("bias", 3, draw_bias, bins, chains)

def draw_bias(axes, biases, chains):
    bins, bias, depth = axes
    for y, f, color in ((1, "e2m1", "C3"), (0, "e1m2", "C0")):
        levels = [q / FORMATS[f].max for q in FORMATS[f].levels]
        edges = [0, *((a + b) / 2 for a, b in zip(levels, levels[1:])), 1]
        bins.stairs([y + 0.25] * 8, edges, baseline=y - 0.25, fill=True, color=color, alpha=0.3)
        bins.vlines(edges, y - 0.25, y + 0.25, color="w", lw=3)
        bins.vlines(levels, y - 0.33, y + 0.33, color="k", lw=1.5)
        at, closed, measured = ([r[k] / FORMATS[f].max for r in biases[f]]
                                for k in ("level", "closed", "measured"))
        bias.plot(at, closed, "o", mfc="none", ms=9, color=color, label=f"{f.upper()}, (l - r) / 2")
        bias.plot(at, measured, ".", color=color, label="measured")
        measured, product = zip(*chains[f])
        gemms = range(1, 1 + len(measured))
        depth.plot(gemms, measured, color=color, label=f"{f.upper()} measured")
        depth.plot(gemms, product, "--", color=color, label="product of alphas")
    bins.set(yticks=(0, 1), yticklabels=("E1M2", "E2M1"), xlabel="value / block maximum",
             title="Levels (lines) and rounding bins")
    bias.set(xlabel="value / block maximum", ylabel="mean rounding error / block maximum",
             title="Bias of each bin")
    depth.set(xlabel="quantized GEMMs in a row", ylabel="attenuation of the signal",
              title="Shrinkage compounds")
    for ax in (bias, depth):
        ax.legend(fontsize=8)

# ---- sqnr: does the RHT change the preferred grid? (the paper's Q1) -----------------------------

CONTRACTED = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}

def all_sqnr(x):
    """SQNR in dB of x (R, K) in blocks along K: E2M1, E1M2, and both with the RHT."""
    rotated = ufp4.rht(x, ufp4.random_signs(0))
    return [sqnr(ufp4.fake_quantize(v, f), v) for v in (x, rotated) for f in GRIDS]

def capture(model, tokens, targets):
    """{(layer, operand): its tensor (rows, columns)}: X, W and dY of every quantizable layer."""
    kept = {}
    for name, m in model.named_modules():
        if isinstance(m, ufp4.Linear):
            kept[name, "w"] = m.weight
            m.register_forward_pre_hook(lambda m, x, at=(name, "x"): kept.update({at: x[0]}))
            m.register_full_backward_hook(lambda m, dx, dy, at=(name, "dy"):
                                          kept.update({at: dy[0]}))
    model(tokens, targets).backward()
    return {at: x.detach().flatten(0, -2) for at, x in kept.items()}

def load_model(flags, checkpoint):
    """(settings, data set, GPT with the checkpoint's weights) of train.py with these flags."""
    s = train.parse_args(flags)
    dataset = prepare(s.data)
    model = train.GPT(s, train.make_recipe(s), dataset.vocab_size)
    train.load(checkpoint, {"model": model.state_dict()})               # into the model's tensors
    return s, dataset, model.to(s.device)

def bench_sqnr(args):
    out = HERE / "out" / "bench" / "sqnr"
    flags = ["--out", str(out), *"--model nano --recipe bf16 --steps 300".split(),
             *"--device cpu --dtype float32".split()]
    if not (out / "ckpt-0000300").exists():
        train.train(train.parse_args(flags))
    s, dataset, model = load_model(flags, out / "ckpt-0000300")
    batch = train.get_batch([read_tokens(p) for p in dataset.train], s, s.steps)
    tensors = [{"layer": layer, "operand": operand, "gemm": gemm, "sqnr": all_sqnr(data)}
               for (layer, operand), x in capture(model, *batch).items()
               for gemm, data in zip(CONTRACTED[operand], (x, x.T.contiguous()))]
    finish("sqnr", {"sqnr": sqnr_table(tensors)}, {"tensors": tensors})

def sqnr_table(tensors):
    """Medians over the layers of a kind; of how many the better grid changes with the RHT."""
    rows = [["SQNR, dB", "E2M1", "E1M2", "E2M1, RHT", "E1M2, RHT", "better grid changes"],
            ["the paper's input of fc2", "21.90", "19.94", "20.00", "23.19", ""]]
    groups = collections.defaultdict(list)
    for r in (r for r in tensors if r["gemm"] == "fprop" or r["operand"] == "dy"):
        kind = "all layers" if r["operand"] == "w" else r["layer"].rpartition(".")[2]
        groups[f"{r['operand']} of {kind}, {r['gemm']}"].append(r["sqnr"])
    for name, found in groups.items():
        flips = sum((a > b) != (c > d) for a, b, c, d in found)
        rows.append([name, *(f"{statistics.median(column):.2f}" for column in zip(*found)),
                     f"{flips} of {len(found)}"])
    return rows

# ---- cpu: what emulation costs ------------------------------------------------------------------

def training_step(s, recipe, vocab_size):
    """A function that takes a whole step of training a GPT, always on the same random tokens."""
    torch.manual_seed(0)
    model, optimizer = train.build(s, RECIPES[recipe], vocab_size)
    model.init_weights()
    tokens = torch.randint(vocab_size, (s.batch_size, s.seq_len), device=s.device)

    def step():
        model(tokens, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return step

def bench_cpu(args):
    rows = [[f"a step on {machine()['cpu']}, {torch.get_num_threads()} threads", "`bf16`, ms",
             "`ufp4` / `bf16`", "`e2m1` / `bf16`"]]
    for model, dtype in itertools.product(("nano", "nano-moe"), ("float32", "bfloat16")):
        s = train.parse_args(["--model", model, "--dtype", dtype, "--device", "cpu"])
        steps = {r: training_step(s, r, 256) for r in ("bf16", "ufp4", "e2m1")}
        bf16, *ours = interleaved(steps, 15).values()
        rows.append([f"`{model}`, {dtype}", spread(bf16, "{:.0f}"),
                     *(spread([a / b for a, b in zip(ms, bf16)]) for ms in ours)])
    finish("cpu", {"cpu": rows})

# ---- loss, ablate, scaling: train many small models and compare ---------------------------------

# What a model is here: flags of train.py. SIZES have nano's steps, batches and learning rate.
SIZES = {kind: {f"{kind}-{dim}": f"--model {preset} --layers {layers} --dim {dim} --heads {heads} "
                f"--hidden {hidden}".split() for layers, dim, heads, hidden in shapes}
         for kind, preset, shapes in (
    ("dense", "nano", ((2, 32, 2, 96), (3, 64, 2, 176), (3, 96, 3, 256), (4, 128, 4, 352),
                       (5, 160, 5, 448))),
    ("moe", "nano-moe", ((1, 32, 2, 32), (2, 48, 3, 32), (3, 64, 2, 48), (3, 96, 3, 64),
                         (4, 128, 4, 96))))}
# One size with a third of the learning rate, four times the text, or nano's parameters in 16 blocks
VARIED = {name: [*SIZES["dense"]["dense-64"], *flags] for name, *flags in (
    ("dense-64-slow", "--lr", "1e-3"), ("dense-64-long", "--steps", "3200"),
    ("nano-deep", "--layers", "16"))}
MODELS = {**{name: ["--model", name] for name in ("nano", "nano-moe", "small", "small-moe")},
          **SIZES["dense"], **SIZES["moe"], **VARIED}

def folder(args, job):
    """Where a run goes: with other flags for train.py, such as --quick's, somewhere else."""
    flags = re.sub(r"\W+", "-", " ".join(["", *args.train]))
    return args.runs / ("{model}-{estimator}-{recipe}-s{seed}".format(**job) + flags)

def weights(args, job):
    """The checkpoints where others branch from a BF16 run, and at the end of any run."""
    steps = train.parse_args([*MODELS[job["model"]], *args.train]).steps
    return [folder(args, job) / f"ckpt-{n:07d}" for n in (2 * steps // 3, steps)]

def bf16_of(job):
    """The run that a job branches from, or is compared with."""
    return {**job, "recipe": "bf16", "estimator": "scratch"}

def train_run(args, job):
    """One run of train.py in a process of its own -> its results."""
    out, branch = folder(args, job), weights(args, bf16_of(job))[0]
    command = [sys.executable, __file__, "train", "--recipe", job["recipe"], *MODELS[job["model"]],
               *args.train, *f"--seed {job['seed']} --sample 0 --eval-interval 1000000".split(),
               "--save-interval", str(int(branch.name[5:])), "--out", str(out)]
    # A stopped BF16 run starts anew: going on, it might drop the checkpoint to branch from.
    whole = all(path.exists() for path in weights(args, job))
    if train.checkpoints(out) and (whole or job["recipe"] != "bf16"):
        command += ["--resume"]
    elif job["estimator"] == "branched":
        command += ["--branch", str(branch)]
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
    s, dataset, model = load_model([*flags, "bf16"], weights(args, job)[-1])
    tokens = read_tokens(dataset.val[0])
    weights_loss = train.evaluate(model, tokens, s)
    s, _, model = load_model([*flags, job["recipe"]], weights(args, bf16_of(job))[-1])
    own_loss, found = output_noise(lambda: train.evaluate(model, tokens, s))
    slope, noise = map(statistics.mean, zip(*found))
    return {"weights_loss": weights_loss, "own_loss": own_loss, "slope": slope, "noise": noise}

def key(r):
    """Of a job, and of the record that it leaves."""
    return r["model"], r["recipe"], r["estimator"], r["seed"]

def train_all(args, recipes):
    """Run models x seeds x estimators x recipes, less what data/results/NAME.json has -> (NAME,
    what it then has). A BF16 run is repeated where others need its weights, but its folder is gone;
    so each record has the BF16 loss that it is compared with."""
    name = args.command
    if args.quick:
        name, args.seeds, args.estimators = f"{name}-quick", 2, ["branched"]
        args.train = [*args.train, "--steps", "300"]
    path = RESULTS / f"{name}.json"
    results = {"flags": args.train, "settings": {}, "machines": [], "runs": []}
    if path.exists():
        results = json.loads(path.read_text())
    if results["flags"] != args.train:
        sys.exit(f"bench.py: {path} has runs with other flags for train.py; move it away first")
    runs, here = {key(r): r for r in results["runs"]}, machine()
    lock = threading.Lock()

    def run(job):
        found = train_run(args, job)
        with lock:                                      # one evaluation at a time
            if job["estimator"] == "branched" and found["val_loss"] is not None:
                found |= forward_passes(args, job)
            first, *_, last = train.read_log(folder(args, bf16_of(job)) / "log.jsonl")
            if here not in results["machines"]:
                results["machines"].append(here)
            results["settings"].setdefault(job["model"], first["settings"])
            runs[key(job)] = {**job, "machine": results["machines"].index(here), **found,
                              "bf16_val_loss": last["val_loss"]}
            results["runs"] = [runs[k] for k in sorted(runs)]
            save(name, results)
        print(*key(job), found["val_loss"], flush=True)

    baselines, jobs = [], []
    for seed, model in itertools.product(range(args.seeds), args.models):
        new = [{"model": model, "recipe": recipe, "estimator": estimator, "seed": seed}
               for estimator in args.estimators for recipe in args.rows or recipes
               if (model, recipe, estimator, seed) not in runs]
        bf16 = bf16_of({"model": model, "seed": seed})
        at_hand = all(path.exists() for path in weights(args, bf16))
        if key(bf16) not in runs or new and not at_hand:
            baselines.append(bf16)
        jobs += new
    try:
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for batch in (baselines, jobs):             # jobs need their baselines' checkpoints
                list(pool.map(run, batch))              # the first to fail cancels the others
    except (KeyboardInterrupt, RuntimeError) as e:
        sys.exit(f"bench.py: stopped; the same command goes on from here. {e}")
    return name, results

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

# {command: {what some recipes have in common: their names}}
GROUPS = {"loss": {"the method": ["ufp4", "ufp4-int4"], "E2M1": ["e2m1", "e2m1-full-rht"],
                   "a standard": ["nvfp4", "mxfp4"],
                   "a choice by block": ["four-over-six", "mixfp4"]},
          "ablate": {"the pair": ["ufp4", "e2m1"],
                     **{what: [r.name for r in rows] for what, rows in ABLATIONS.items()}}}
# The paper's: BF16-relative loss errors in % (Q2), and Dense 1.5B's losses over ufp4's (Q4)
PAPER = {"loss": {"ufp4": "0.97", "e2m1": "1.26"},
         "loss-nano-moe": {"ufp4": "1.85", "e2m1": "2.36"},
         "ablate": {"ufp4-rht-none": "+0.60", "ufp4-rht-wgrad": "+0.34", "ufp4-sr-none": "+0.24",
                    "ufp4-rht-dgrad-wgrad": "+0.44", "ufp4-rht-fprop-wgrad": "+0.25"}}
# Grid x slope, RHT on all three GEMMs: E2M1, which shrinks, and does not; E1M2 likewise
CAUSES = ("e2m1-full-rht", "e2m1-debiased", "ufp4-shrunk", "ufp4")

def bench_loss(args):
    groups = GROUPS[args.command]
    name, results = train_all(args, sum(groups.values(), []))
    finish(name, loss_tables(name, results["runs"], groups), results)
    for model in args.models:
        figure(name if model == "nano" else f"{name}-{model}", 2, draw_loss, results["runs"],
               model, groups, height=3.4 if args.command == "loss" else 7)

bench_ablate = bench_loss

def loss_tables(name, runs, groups):
    """Of every model in the file."""
    cause, noise = f"cause-{name}", f"noise-{name}"
    tables = {cause: [["loss error, % (seeds)", *(f"`{recipe}`" for recipe in CAUSES),
                       "effect of the grid", "of shrinking"]],
              noise: [["recipes of", "correlation of loss error and noise", "and shrinkage",
                       "loss error / noise"]]}
    for model in sorted({r["model"] for r in runs}):
        title = name if model == "nano" else f"{name}-{model}"
        tables[title] = recipe_table(runs, model, groups, PAPER.get(title, {}))
        if all(errors_of(runs, model, recipe) for recipe in CAUSES):
            tables[cause].append([f"`{model}`", *(cell(runs, model, recipe) for recipe in CAUSES),
                                  *(text(contrast(runs, model, dict(zip(CAUSES, signs))))
                                    for signs in ((.5, .5, -.5, -.5), (.5, -.5, .5, -.5)))])
        fprop = fprop_of(runs, model)
        if len(fprop) > 2:
            slopes, noises = zip(*fprop.values())
            errors = [contrast(runs, model, {recipe: 1})[0] for recipe in fprop]
            tables[noise].append([
                f"`{model}`: {len(fprop)}", f"{statistics.correlation(noises, errors):.2f}",
                f"{-statistics.correlation(slopes, errors):.2f}",
                spread([e / n for e, n in zip(errors, noises)])])
    return {title: rows for title, rows in tables.items() if len(rows) > 1}

def recipe_table(runs, model, groups, published):
    """Without the columns in which nothing was measured."""
    rows = [[f"`{model}`: loss error, % (seeds)", "recipe", "from scratch", "branched",
             "less `e2m1`", "less `ufp4`", "of it, in the weights", "forward noise alone",
             "slope of fprop", "noise of fprop, %", "the paper's"]]
    fprop = fprop_of(runs, model)
    for group, recipes in groups.items():
        for recipe in recipes:
            row, (slope, noise) = (runs, model, recipe), fprop.get(recipe, (None, None))
            cells = [cell(*row, estimator="scratch"), cell(*row), less(*row, "e2m1"),
                     less(*row, "ufp4"), cell(*row, loss="weights_loss"),
                     cell(*row, loss="own_loss"), f"{slope:.4f}" if slope else "",
                     f"{100 * noise:.3f}" if noise else ""]
            if any(cells):
                rows.append([group, f"`{recipe}`", *cells, published.get(recipe, "")])
    return [list(row) for row in zip(*(column for column in zip(*rows) if any(column[1:])))]

def draw_loss(axes, runs, model, groups):
    """Left, loss errors less ufp4's. Right, loss error against the noise of fprop. A colour a
    group."""
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

def bench_scaling(args):
    name, results = train_all(args, ("ufp4", "e2m1"))
    costs = costs_of(results)
    finish(name, {name: scaling_table(results["runs"], costs)}, results)
    figure(name, 1, draw_scaling, results["runs"], costs)

def costs_of(results):
    """{model: (parameters, training FLOPs)} of what was trained."""
    have, costs = {r["model"] for r in results["runs"]}, {}
    for model in (m for m in MODELS if m in have):
        s = train.parse_args([*MODELS[model], *results["flags"]])
        with torch.device("meta"):
            gpt = train.GPT(s, RECIPES["bf16"], vocabulary(s.data))
        total, _, flops = train.counts(gpt, s)
        costs[model] = total, flops * s.steps * s.batch_size * s.seq_len
    return costs

def reduction(runs, models):
    """By what part of itself e2m1's loss error, branched, falls with ufp4, over all pairs of the
    models: 1 - the ratio of means, and half its 95% interval over seeds (the delta method; models
    share a seed's batches). None without pairs, or if a run diverged."""
    pairs = []
    for model in models:
        better, worse = (errors_of(runs, model, recipe) for recipe in ("ufp4", "e2m1"))
        pairs += [(s, better[s], worse[s]) for s in better.keys() & worse.keys()]
    rest, total = sum(b for _, b, _ in pairs), sum(w for *_, w in pairs)
    if not pairs or not math.isfinite(rest + total):
        return None
    off = collections.Counter()                         # of each seed; together they are 0
    for s, b, w in pairs:
        off[s] += (rest / total * w - b) / total
    return 1 - rest / total, interval([v * len(off) for v in off.values()])[1]

def change(runs, recipe, log_c):
    """Of the loss error with log10 C, {model: log10 C}: by least squares through the sizes of each
    seed that has all of them; mean and interval."""
    errors = [errors_of(runs, model, recipe) for model in log_c]
    lines = [statistics.linear_regression([*log_c.values()], [e[seed] for e in errors]).slope
             for seed in set.intersection(*map(set, errors))]
    return interval(lines) if lines else None

def scaling_table(runs, costs):
    rows = [["size", "parameters", "FLOPs", "`e2m1`, % (seeds)", "`ufp4`, % (seeds)",
             "`ufp4` less `e2m1`", "smaller by, %"]]
    for model, (total, flops) in costs.items():
        rows.append([model, f"{total:,}", f"{flops:.1e}", cell(runs, model, "e2m1"),
                     cell(runs, model, "ufp4"), less(runs, model, "ufp4", "e2m1"),
                     text(reduction(runs, [model]), digits=0)])
    for kind in SIZES:
        log_c = {m: math.log10(costs[m][1]) for m in SIZES[kind] if m in costs}
        if len(log_c) > 2:
            rows.append([f"{kind}: change for tenfold FLOPs; all sizes", "", "",
                         *(text(change(runs, recipe, log_c)) for recipe in ("e2m1", "ufp4")), "",
                         text(reduction(runs, log_c), digits=0)])
    return rows

def draw_scaling(ax, runs, costs):
    for kind, style in zip(SIZES, ("o-", "o--")):
        flops = {m: costs[m][1] for m in SIZES[kind] if contrast(runs, m, {"ufp4": 1, "e2m1": 1})}
        for recipe, color in (("ufp4", "C0"), ("e2m1", "C3")) if flops else ():
            means, halves = zip(*(contrast(runs, m, {recipe: 100}) for m in flops))
            ax.errorbar(flops.values(), means, yerr=[half or 0 for half in halves], fmt=style,
                        ms=3, color=color, capsize=3, label=f"{recipe}, {kind}")
    ax.set(xscale="log", xlabel="training FLOPs", ylabel="loss error to BF16, %")
    ax.legend(fontsize=7)

# ---- dispatch: what the kernels compile to on GPUs that need not be here ------------------------

def calls():
    """{what: two Quantizers of ufp4 and the forms of what they make, for kernels.quantize_plan}."""
    q, packed = RECIPES["ufp4"].quantizer, ("packed", "packed")
    return {"one orientation, nearest": (q("x", "fprop"), None, packed),
            "both orientations, nearest": (q("x", "fprop"), q("x", "wgrad"), packed),
            "both orientations, stochastic": (q("dy", "dgrad"), q("dy", "wgrad"), packed),
            "dY of a layer": (q("dy", "dgrad"), q("dy", "wgrad"), ("decoded", "decoded"))}

def lower(kernel, name, arch):
    """Compile quantize_kernel for one of calls(), or matmul_kernel for a recipe, -> {tensor-core
    instructions, their count, a quantizer's instructions for an element, those that spill}."""
    import kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    if kernel == "quantize_kernel":
        S = kernels.quantize_plan(*calls()[name], torch.bfloat16)
        constants, options = {"S": S, "amax_ptr": None, "stride_c": 1}, {"maxnreg": S.registers}
        types = "*bf16 *fp32 *fp32 *i32 *fp32 *i32 *fp32 *i32 i32 i32 i32 i32".split()
    else:
        q = RECIPES[name].quantizer("x", "fprop")
        swizzled = kernels.quantize_plan(q, None, ("swizzled", ""), torch.bfloat16).rows
        S = kernels.product_plan(swizzled, arch)
        constants, options = {"S": S}, {"num_warps": S.warps, "num_stages": S.stages}
        codes, width = ("u8", S.BK // 2) if S.path == "fp4" else ("i32", S.BK // 8)
        scale, groups = "fp8e4nv" if swizzled.stored == "e4m3" else "u8", S.BK // q.block // 4
        types = [f"tensordesc<{t}>" for rows in (S.BM, S.BN) for t in (
            f"{codes}[{rows}, {width}]", f"{scale}[{rows // 128}, {groups}, 2, 256]")]
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
    names = " + ".join(name.split(".f32")[0] for name in found)         # less the types
    result = {"instruction": names, "count": sum(found.values())}
    if not cuda:
        return result | {"spills": int(re.search(r"vgpr_spill_count:\s*(\d+)", asm["amdgcn"])[1])}
    ops = re.findall(r"\t(?:@!?U?P\w+ )?(?!NOP)([A-Z][\w.]+)", asm["sass"])
    if kernel == "quantize_kernel":
        result["per_element"] = len(ops) / (S.TR * S.TC / 128)          # 4 warps share a tile
    return result | {"spills": sum(op.startswith(("STL", "LDL")) for op in ops)}

def lowering(*call):
    """lower(*call) in a process of its own, without the interpreter: a compiler that fails an
    assertion takes its process along. {"error": its last line} if it fails."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1"}
    code = "import json, sys, bench; print(json.dumps(bench.lower(*json.loads(sys.argv[1]))))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(call)], cwd=HERE, text=True,
                          capture_output=True, env=env)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines() or ["it died"]
    return {"error": lines[-1]} if done.returncode else json.loads(lines[-1])

def bench_dispatch(args):
    import kernels
    recipes = ("ufp4-e4m3", "ufp4-mx", "nvfp4", "mxfp4")
    archs = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
    def product(recipe, arch):
        path = kernels.route(RECIPES[recipe], arch)[0]
        if path == "cublas":
            return path
        r = lowering("matmul_kernel", recipe, arch)
        return r.get("error") or f"{path}: {r['instruction']}, {r['count']}"

    def quantizer(name, arch):
        r = lowering("quantize_kernel", name, arch)
        return r.get("error") or f"{r['per_element']:.1f}, {r['spills']}"
    version, again = f"(Triton {kernels.triton.__version__})", itertools.repeat
    dispatch = [[f"path: instruction, count {version}", *(f"`{r}`" for r in recipes)]]
    quantize = [[f"instructions an element, spills {version}", *archs]]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for arch in ("sm_90", "sm_100", "sm_120", "gfx950"):
            dispatch.append([arch, *pool.map(product, recipes, again(arch))])
        for name in calls():
            quantize.append([name, *pool.map(quantizer, again(name), archs)])
    finish("dispatch", {"dispatch": dispatch, "quantize": quantize})

# ---- kernels: speed on a GPU, as ratios to what that GPU can do; tune ---------------------------

def gpu_time(f, alone=True):
    """Milliseconds of each call of f(): of the GPU `alone`, or with Python's time."""
    if alone:
        import triton.testing
        return triton.testing.do_bench(f, return_mode="all")
    return interleaved({"": lambda: (f(), torch.cuda.synchronize())}, 30)[""]

def bench_kernels(args):
    import kernels
    rows, median = [["on a GPU", "target (aim)", torch.cuda.get_device_name()]], statistics.median

    def row(name, target, f, value, alone=True):
        """Times f; value(milliseconds) is what is aimed at."""
        ms = gpu_time(f, alone)
        rows.append([name, target, f"{value(median(ms)):.2f}; {spread(ms, '{:.3f}')} ms"])

    def quantize(call, x):
        return torch.ops.ufp4.quantize(x, key, kernels.quantize_plan(*call, x.dtype).name)
    on_gpu, key = {"device": "cuda", "dtype": torch.bfloat16}, ufp4.random_key("cuda")
    x, w, y = (torch.randn(8192, 8192, **on_gpu) for _ in range(3))
    copied = 2 * x.nbytes / median(gpu_time(lambda: y.copy_(x)))            # bytes a millisecond
    targets = "at least 0.75 (0.85)", "at least 0.55 (0.75)", "at least 0.40 (0.55)"
    for (name, call), target in zip(calls().items(), targets):
        moved = x.nbytes + sum(t.nbytes for t in quantize(call, x))
        row(f"quantize, {name}: share of copy bandwidth", target, lambda: quantize(call, x),
            lambda ms: moved / ms / copied)
    rotated = calls()["one orientation, nearest"]
    plain = replace(rotated[0], signs=None), *rotated[1:]
    unrotated = median(gpu_time(lambda: quantize(plain, x)))
    row("RHT + quantize in one kernel / quantize alone", "at most 1.06 (1.02), the paper's",
        lambda: quantize(rotated, x), lambda ms: ms / unrotated)
    h = (torch.tensor(rotated[0].signs)[:, None] * ufp4.hadamard(16)).to(x)
    row("RHT, then quantize / quantize alone", "the paper's 1.62",
        lambda: quantize(plain, (x.view(-1, 16) @ h).view(x.shape)), lambda ms: ms / unrotated)
    name = kernels.quantize_plan(*rotated, x.dtype).rows.name
    a, b = (kernels.Packed(*quantize(rotated, t)[:2], None, name, x.dtype) for t in (x, w))
    cublas = median(gpu_time(lambda: torch.mm(x, w.T, out=y)))
    row("packed GEMM, decoded for cuBLAS: share of cuBLAS bf16", "at least 0.55",
        lambda: kernels.matmul(a, b), lambda ms: cublas / ms)

    def against_bf16(name, target, bf16, ours, alone=False):
        base = median(gpu_time(bf16, alone))
        row(f"{name}, `ufp4` / bf16", target, ours, lambda ms: ms / base, alone)
    v, dy = (torch.randn(8192, 4096, **on_gpu) for _ in range(2))
    v.requires_grad_()
    layers = [ufp4.Linear(4096, 4096, bias=False, **on_gpu, recipe=r) for r in ("bf16", "ufp4")]
    passes = [lambda layer=layer: torch.autograd.grad(layer(v), (v, layer.weight), dy)
              for layer in layers]
    against_bf16("linear layer, forward + backward", "at most 1.30 (1.15)", *passes)
    against_bf16("the same, of the GPU's time alone", "", *passes, alone=True)
    for name, target, flags in (
            ("`small`", "at most 1.6 (1.3)", "--model small"),
            ("1B parameters", "at most 1.3 (1.15)", "--model small --layers 16 --dim 2048 "
             "--heads 16 --hidden 5632 --seq-len 2048 --batch-size 4")):
        s = train.parse_args(f"{flags} --compile --device cuda --dtype bfloat16".split())
        torch.compiler.reset()          # or this model's sizes would be variables after another's
        against_bf16(f"training step, {name}, compiled", target,
                     *(training_step(s, recipe, 50304) for recipe in ("bf16", "ufp4")))
    finish("kernels", {"kernels": rows})

def bench_tune(args):
    """Times calls() in several shapes, of which kernels.SHAPES should have the best."""
    import kernels
    x, key = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), ufp4.random_key("cuda")
    shapes = itertools.product(((32, 128), (64, 64), (64, 128)), (1, 2), ((8, 64), (4, 128)))
    for (name, call), (tile, stages, rest) in itertools.product(calls().items(), shapes):
        made = kernels.quantize_plan(*call, x.dtype)
        plan = kernels.Plan(made.rows, made.cols, *tile, stages, *rest)
        ms = gpu_time(lambda: torch.ops.ufp4.quantize(x, key, plan.name))
        print(f"{spread(ms, '{:.3f}')} ms: {name}, {(*tile, stages, *rest)}", flush=True)

# ---- plan: what a run costs, counted, not measured ----------------------------------------------

# Dense peaks in TFLOP/s by path of kernels.route, where another multiplies in BF16; from NVIDIA's
# data sheets: H200 (half the figures with sparsity), an eighth of HGX B200's.
PEAKS = {"H200": ("sm_90", {"bf16": 989}),
         "B200": ("sm_100", {"bf16": 2250, "fp8": 4500, "fp4": 9000})}

def activation_bytes(s, recipe):
    """Bytes a token that the backward pass needs, in BF16 autocast: (of a block, of what follows
    the blocks). A quantized layer keeps its input in 4 bits; attention qkv, the turned q and k and
    its output; an MLP gate, up and silu(gate); in float32, a norm two tensors, the router one."""
    scale_bytes = 4 if recipe.scale is ufp4.fp32 else 1
    kept = 2 if recipe.fmt is None else 0.5 + scale_bytes / recipe.block
    mlps = s.top_k + 1                                  # with the shared one; or the only one
    inputs = 2 * s.dim + mlps * (s.dim + s.hidden)
    bf16 = 6 * s.dim + 3 * mlps * s.hidden + s.top_k * s.dim            # with what a mixture sums
    float32 = 5 * s.dim if s.experts else 4 * s.dim
    return kept * inputs + 2 * bf16 + 4 * float32, (2 + 8) * s.dim + 10 * vocabulary(s.data)

def bench_plan(args):
    """What train.py with the flags args.train would take on args.gpus GPUs."""
    import kernels
    s, gpus = train.parse_args(args.train), args.gpus
    recipe = train.make_recipe(s)
    with torch.device("meta"):
        model = train.GPT(s, recipe, vocabulary(s.data))
    total, active, flops = train.counts(model, s)
    quantized = 6 * sum(m.weight.numel() for m in model.modules()
                        if isinstance(m, ufp4.Linear) and m.recipe.fmt is not None)
    layer = sum(p.numel() for p in model.blocks.parameters()) / s.layers
    block, ends = activation_bytes(s, recipe)
    tokens = s.batch_size * s.seq_len // (gpus * s.grad_accum)
    kept = 4 * s.dim * s.layers + block if s.remat else block * s.layers
    cast = s.layers if recipe.fmt is None else s.keep_bf16      # layers that multiply in BF16
    sizes = {"weights and gradients, float32": 8 * total / gpus,
             "state of AdamW, float32": 8 * total / gpus,
             # by FSDP: embedding, head and their gradients; two blocks, and the gradient of one
             "gathered, float32": 4 * (2 * (total - s.layers * layer) + 3 * layer) * (gpus > 1),
             "weights cast to BF16": 2 * (model.lm_head.weight.numel()
                                          + layer * (min(1, cast) if s.remat else cast)),
             f"activations of {tokens} tokens": tokens * (kept + ends)}
    sizes["together"] = sum(sizes.values())
    print(f"{s.model}, {train.variant(s)}, {gpus} GPUs: {total / 1e9:.3f}B parameters, "
          f"{active / 1e9:.3f}B active a token")
    for name, size in sizes.items():
        print(f"{name:33}{size / 2**30:10.2f} GiB a GPU")
    print(f"{flops / 1e9:.3f} GFLOPs a token, {quantized / flops:.0%} of them in quantized layers "
          "other than experts")
    for gpu, (arch, peaks) in PEAKS.items():
        path = kernels.route(recipe, arch)[0]           # experts' products are in BF16
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
    models = {"loss": ["nano"], "ablate": ["nano"],
              "scaling": [*SIZES["dense"], *SIZES["moe"], *VARIED]}
    for name in models:
        p = commands.add_parser(name, allow_abbrev=False)
        p.add_argument("--models", nargs="+", default=models[name], choices=MODELS)
        p.add_argument("--seeds", type=train.positive, default=5, metavar="N")
        p.add_argument("--rows", nargs="+", choices=RECIPES, help="some of the table's recipes")
        p.add_argument("--estimators", nargs="+", choices=("scratch", "branched"),
                       default=["branched"], help="whole runs; or the last third of the steps, "
                       "from the BF16 run's checkpoint")
        p.add_argument("--jobs", type=train.positive, metavar="N", help="runs at a time",
                       default=1 if torch.cuda.is_available() else os.cpu_count())
        p.add_argument("--quick", action="store_true", help="300 steps, 2 seeds")
        p.set_defaults(runs=HERE / "out" / "bench")
        p.epilog = "More flags are for train.py."
    args, rest = parser.parse_known_args(argv)
    if args.command == "train":
        return train.main(rest)
    args.train = rest
    if rest and args.command not in ("plan", *models):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if args.command in ("kernels", "tune"):
        os.environ["UFP4_BACKEND"] = "triton"           # an error rather than the reference
        if not torch.cuda.is_available():
            parser.error("this measures a GPU, and torch finds none here; see dispatch")
    globals()[f"bench_{args.command}"](args)

if __name__ == "__main__":
    main()
