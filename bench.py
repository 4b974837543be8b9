"""Each claim, one command: what is measured, its table, its figure.

    python bench.py bias        bias of each bin, slopes, how it compounds (1 min)
    python bench.py sqnr        which grid suits a model's tensors, and the RHT (25 min)
    python bench.py cpu         what emulation costs on this CPU (4 min)
    python bench.py study loss      what recipes cost in loss
    python bench.py study ablate    the same, one change at a time
    python bench.py study scaling   the same by size, 20 bytes for each parameter
    python bench.py study length    by the length of the text
    python bench.py study depth     by depth: does shrinkage compound?
    python bench.py study scratch   whole runs under a recipe: why the others branch
    python bench.py study lr        is the learning rate right?
    python bench.py dispatch    what the kernels compile to on GPUs not here (5 min)
    python bench.py kernels     their speed on this GPU, against copying and cuBLAS
    python bench.py tune        which tiles are fastest on this GPU
    python bench.py plan        memory and bounds on speed of a run of train.py
    python bench.py train       train.py with the recipes below besides its own
    python bench.py runs        your own runs of train.py, as a table and as curves
    python bench.py readme      tables and figures again, from the records
    python bench.py hero        the front page's figure alone

A command prints its tables, saves them with the numbers behind them in
data/results/NAME.json, draws figures, and puts the tables into both README.md. Studies
take hours. They save each run as it ends, all in runs.json, and go on from there.
With --rows, or with flags of train.py, they have a file of their own: `--seeds 2
--steps 300` is a quick look.
"""
import argparse
import collections
import concurrent.futures
import functools
import io
import itertools
import json
import math
import operator
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path

import train                        # before torch: it sets how CPU threads wait

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import ufp4
from data.prepare import prepare, read_tokens, vocabulary
from ufp4 import FORMATS, GEMMS, OPERANDS, RECIPES, Quantizer, Recipe

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "data" / "results"
PAGES = (HERE / "README.md", RESULTS / "README.md")

# ---- Common: results on disk, tables, figures, statistics ----
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

def print_table(rows):
    """Print rows of text in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    print()

def finish(name, tables, results=None):
    """Print the tables {marker in a page: rows of text, the head first}. Save them,
    draw the figures, fill the pages."""
    for rows in tables.values():
        print_table(rows)
    results = {**(results or {}), "machine": machine(), "tables": tables}
    save(name, results)
    draw_figures(name, results, RESULTS)
    fill_pages()

def fill_tables(page):
    """A page's text, with the tables between <!-- NAME --> and <!-- /NAME --> anew."""
    tables = {}
    for path in RESULTS.glob("*.json"):
        tables |= json.loads(path.read_text()).get("tables", {})

    def block(found):
        name = found[1]
        if name not in tables:
            sys.exit(f"bench.py: no file in {RESULTS} has a table {name}; measure it")
        head, *rows = tables[name]
        rows = [head, ["---"] * len(head), *rows]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([f"<!-- {name} -->", *lines, f"<!-- /{name} -->"])
    return re.sub(r"<!-- (\S+) -->\n.*?<!-- /\1 -->", block, page, flags=re.S)

def fill_pages():
    for page in PAGES:
        page.write_text(fill_tables(page.read_text()))

def bench_readme(args):
    """Make the tables and figures anew from the records, without measuring."""
    for name in ("bias", "runs"):
        results = json.loads((RESULTS / f"{name}.json").read_text())
        if name == "runs":
            results["tables"] = study_tables(results)
        save(name, results)
        draw_figures(name, results, RESULTS)
    fill_pages()

def bench_hero(args):
    """Draw the front page's figure from the records."""
    results = json.loads((RESULTS / "runs.json").read_text())
    figure(RESULTS / "hero.png", (8.75, 4.9), draw_hero, results["runs"])
    print(RESULTS / "hero.png")

# ---- Figures: one colour for each format, and a name in words for each recipe ----
COLORS = {"BF16": "#7f7f7f", "E1M2": "#1f77b4", "E2M1": "#d62728",
          "NVFP4, MXFP4": "#d9730d", "E1M2 and E2M1": "#8a4fb5", "other": "black"}

# {a key of COLORS: {recipe: its name in figures}}
IN_WORDS = {
    "BF16": {"bf16": "bf16"},
    "E1M2": {
        "ufp4": "ufp4",
        "ufp4-int4": "ufp4 in INT4 codes",
        "ufp4-e4m3": "ufp4 with E4M3 scales",
        "ufp4-mx": "ufp4 with MX scales",
        "ufp4-rht-none": "ufp4, no RHT",
        "ufp4-rht-wgrad": "ufp4, RHT on wgrad alone",
        "ufp4-rht-dgrad-wgrad": "ufp4, RHT on dgrad and wgrad",
        "ufp4-rht-fprop-wgrad": "ufp4, RHT on fprop and wgrad",
        "ufp4-sr-none": "ufp4, no stochastic rounding",
        "ufp4-sr-x-dy": "ufp4, SR on X and dY",
        "ufp4-sr-x-w-dy": "ufp4, SR on X, W and dY",
        "ufp4-shrunk": "ufp4, rescaled to slope 0.996"},
    "E2M1": {
        "e2m1": "e2m1 (RHT on wgrad alone)",
        "e2m1-full-rht": "E2M1, RHT on all three GEMMs",
        "e2m1-debiased": "E2M1, rescaled to slope 1",
        "e2m1-max2": "E2M1 cut off above 2",
        "e2m1-max3": "E2M1 cut off above 3",
        "e2m1-max4": "E2M1 cut off above 4",
        "four-over-six": "four-over-six (E2M1)"},
    "NVFP4, MXFP4": {
        "nvfp4": "nvfp4 (E2M1, E4M3 scales)",
        "mxfp4": "mxfp4 (E2M1, MX scales)"},
    "E1M2 and E2M1": {
        "mixfp4": "mixfp4 (E1M2 or E2M1)",
        "ufp4-fprop-in-e2m1": "ufp4, but E2M1 in fprop",
        "ufp4-dgrad-in-e2m1": "ufp4, but E2M1 in dgrad",
        "ufp4-wgrad-in-e2m1": "ufp4, but E2M1 in wgrad"}}
WORDS = {recipe: name for names in IN_WORDS.values() for recipe, name in names.items()}

def kind_of(recipe, fmt=None):
    """The key of COLORS for a recipe, or for a format that replaces its own."""
    for kind, names in IN_WORDS.items():
        if recipe in names and not fmt:
            return kind
    fmt = fmt or getattr(getattr(RECIPES.get(recipe), "fmt", None), "name", "")
    for start, kind in (("e2m1", "E2M1"), ("e1m2", "E1M2"), ("int4", "E1M2")):
        if fmt.startswith(start):
            return kind
    return "other"

def legend_of_kinds(ax, kinds, **where):
    """Name the colours of these kinds in a legend, in the order of COLORS."""
    from matplotlib.lines import Line2D
    shown = [kind for kind in COLORS if kind in kinds]
    ax.legend([Line2D([], [], color=COLORS[kind], marker="o") for kind in shown], shown,
              **where)

def figure(path, size, draw, *given):
    """draw(fig, *given) on a figure of (width, height) inches, into a PNG file. With a
    palette in place of full colours the file has a third of the size."""
    import matplotlib
    from matplotlib.figure import Figure
    from PIL import Image                       # which matplotlib requires
    look = {"font.size": 12, "axes.titlesize": 12, "legend.fontsize": 11,
            "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(look):
        fig = Figure(figsize=size, layout="constrained")
        draw(fig, *given)
        fig.savefig(picture := io.BytesIO(), dpi=160)
    Image.open(picture).convert("RGB").quantize(128).save(path, optimize=True)

def draw_figures(name, results, folder):
    """Draw what the records of data/results/NAME.json show, into a folder."""
    if name == "bias":
        figure(folder / "bias.png", (10, 4.4), draw_bias, results["chain"])
    if not name.startswith("runs"):
        return
    label = name.removeprefix("runs")           # a quick look has its flags in its name
    runs, models = results["runs"], results["models"]

    def study(what, size, draw, *more):
        name = f"study-{what}{label}"
        if name in results["tables"]:
            figure(folder / f"{name}.png", size, draw, runs, *more)

    study("scaling", (6.4, 4.2), draw_scaling, models)
    study("length", (6.4, 4.2), draw_length, models)
    study("depth", (6.4, 4.2), draw_depth, models)
    study("front", (7.6, 4.2), draw_front, models)
    if "two-by-two" in results["tables"]:
        figure(folder / "hero.png", (8.75, 4.9), draw_hero, runs)
    for command, groups in GROUPS.items():
        for model in STUDIES[command]:
            shown = sum(bool(errors_of(runs, model, recipe))
                        for recipe in sum(groups.values(), []))
            study(f"{command}-{model}", (10, 2 + 0.26 * shown), draw_loss, model,
                  groups)

# The 97.5% quantile of Student's t, by the number of values: 2, 3, ..., 10
STUDENT_T = dict(enumerate((12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306,
                            2.262), 2))

def interval(values):
    """Mean and half-width of its 95% interval. That is None for one value, or if one is
    not finite."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2 or not math.isfinite(mean):
        return mean, None
    t = STUDENT_T.get(n, 1.96 + 2.5 / (n - 1))
    return mean, t * statistics.stdev(values) / math.sqrt(n)

def text(measured, digits=2):
    """(mean, half-width) as a cell in %; blank for None."""
    if measured is None:
        return ""
    mean, half = measured
    cell = f"{round(100 * mean, digits) + 0.0:.{digits}f}"      # + 0.0: not "-0.00"
    return cell if half is None else f"{cell} ± {100 * half:.{digits}f}"

def spread(values, form="{:.2f}"):
    """Median (smallest to largest) as a cell."""
    middle, low, high = (form.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})"

def interleaved(functions, rounds):
    """The milliseconds of each call of each function, called in turns. Two calls of
    each to warm up are left out."""
    times = [[] for _ in functions]
    for _ in range(rounds + 2):
        for ms, f in zip(times, functions):
            start = time.perf_counter()
            f()
            ms.append(1e3 * (time.perf_counter() - start))
    return [ms[2:] for ms in times]

# ---- Experiments: recipes beside those of ufp4.py, for `bench.py train` too ----
@dataclass(eq=False)
class Choosing(Quantizer):
    """Each block takes the format, fmt or other, that has the smaller squared error.

    The error is that of rounding to nearest. Under SR a choice by the error of the
    random result would bias it."""
    other: ufp4.Format = ufp4.E1M2

    def __call__(self, x, rand=None):
        if self.stochastic and rand is None:
            rand = ufp4.random_like(x)
        x = self.blocks(x).flatten(-2)                  # rotated, if there are signs
        errors, results = [], []
        for fmt in (self.fmt, self.other):
            nearest = Quantizer(fmt, self.scale, self.block)(x)
            error = (nearest - x).double().square().unflatten(-1, (-1, self.block))
            errors.append(error.sum(-1, keepdim=True))
            q = Quantizer(fmt, self.scale, self.block, stochastic=self.stochastic)
            results.append(q(x, rand).unflatten(-1, (-1, self.block)))
        return torch.where(errors[1] < errors[0], results[1], results[0]).flatten(-2)

@dataclass(eq=False)
class Sloped(Quantizer):
    """Rounds to nearest, and then rescales so that <Q(x), x> / <x, x> is `slope`.

    What is rounded stochastically stays as it is."""
    slope: float = 1.0

    def __call__(self, x, rand=None):
        q = super().__call__(x, rand)
        if self.stochastic:
            return q
        x = self.blocks(x).flatten(-2).double()
        product = (q * x).sum().clamp(min=1e-300)           # not 0, if all are zeros
        return q * (self.slope * x.square().sum() / product).float()

@dataclass
class Experiment(Recipe):
    """A recipe whose quantizers are of another kind, or have the fields `more`, in all
    GEMMs or only in one."""
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

def with_rht(*gemms):
    name = f"ufp4-rht-{'-'.join(gemms) or 'none'}"
    return add(replace(RECIPES["ufp4"], name=name, rht=gemms))

def with_sr(*operands):
    name = f"ufp4-sr-{'-'.join(operands) or 'none'}"
    return add(replace(RECIPES["ufp4"], name=name, sr=operands))

def one_gemm_in_e2m1(gemm):
    return experiment(f"ufp4-{gemm}-in-e2m1", "ufp4", only=gemm, fmt=ufp4.E2M1)

# {study: {what some recipes have in common: their names}}
GROUPS = {
    "loss": {
        "the method": ["ufp4", "ufp4-int4"],
        "E2M1": ["e2m1", "e2m1-full-rht"],
        "the method, other scales": ["ufp4-e4m3", "ufp4-mx"],
        "a standard": ["nvfp4", "mxfp4"],
        "a choice by block": [
            # A block's maximum goes to 6 or to 4, as in arXiv 2512.02010. The rest is
            # that of e2m1
            experiment("four-over-six", "e2m1", Choosing, other=FORMATS["e2m1-max4"]),
            # E2M1 or E1M2, as in arXiv 2605.31035
            experiment("mixfp4", "e2m1", Choosing, other=ufp4.E1M2)]},
    "ablate": {
        "the pair": ["ufp4", "e2m1"],
        "RHT on": [with_rht(), with_rht("wgrad"), with_rht("dgrad", "wgrad"),
                   with_rht("fprop", "wgrad")],
        "SR on": [with_sr(), with_sr("x", "dy"), with_sr(*OPERANDS)],
        "grid, slope": [
            "e2m1-full-rht",
            experiment("e2m1-debiased", "e2m1-full-rht", Sloped, slope=1.0),
            experiment("ufp4-shrunk", "ufp4", Sloped, slope=0.996)],
        "one GEMM in E2M1": [one_gemm_in_e2m1(gemm) for gemm in GEMMS],
        "range of E2M1": ["e2m1-max2", "e2m1-max3", "e2m1-max4"]}}

# ---- bias: the geometry of shrinkage ----
GRIDS = ("e2m1", "e1m2")

def sqnr(q, x):
    """Signal to quantization noise in dB, -10 log10(|q - x|^2 / |x|^2), as in the
    paper."""
    error, signal = (q - x).double().square().sum(), x.double().square().sum()
    return -10 * math.log10(error / signal)

def slope(q, x):
    """alpha = <Q(x), x> / <x, x> and its standard error, from the spread over rows."""
    q, x = q.double(), x.double()
    power = x.square().sum()
    alpha = (q * x).sum() / power
    rows = ((q - alpha * x) * x).sum(-1)
    return alpha.item(), (rows.square().sum().sqrt() / power).item()

def gaussian_slope(levels, block=16):
    """alpha of RTN on blocks of independent Gaussians, FP32 scales, in closed form.

    |x| has the density f. A block's maximum m has the density 16 f(m) F(m)^15. Given m,
    one value is exact and the 15 others lie in [0, m]. E[Q(x) x] is a sum over bins, as
    x f(x) integrates to -f(x)."""
    def f(x):
        return math.sqrt(2 / math.pi) * torch.exp(-x * x / 2)
    m = torch.linspace(1e-3, 9, 20_001, dtype=torch.float64)
    cdf, unit = torch.erf(m / math.sqrt(2)), m / levels[-1]
    edges = [0.0, *((a + b) / 2 for a, b in zip(levels, levels[1:])), levels[-1]]
    other = sum(q * unit * (f(low * unit) - f(high * unit))
                for q, low, high in zip(levels, edges, edges[1:]))
    mean = cdf ** (block - 1) * m * m + (block - 1) * cdf ** (block - 2) * other
    return torch.trapezoid(f(m) * mean, m).item()

def chain(fmt, depth=128, n=512):
    """X <- Q(X) Q(W)^T again and again, with the RHT on both. W is random and
    orthogonal, so that the exact chain keeps its norm. Returns a pair for each GEMM:
    <X_hat, X> / <X, X> after it, and the product of all slopes so far."""
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
        rotated = ufp4.rht(data, ufp4.random_signs(0))
        for name, v in ((kind, data), (f"{kind}, RHT", rotated)):
            slopes.append([name, *(cell(ufp4.fake_quantize(v, f), v) for f in GRIDS)])
    # Rows of different sizes, or power-of-two scales would meet one size alone
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
    finish("bias", {"slopes": slopes, "scales": scales}, {"chain": chains})

def draw_bins(ax, fmt):
    """The levels of a grid on a number line, and each level's rounding bin.

    A bin reaches l below its level and r above it. If values are spread evenly over the
    bin, their mean rounding error is (l - r) / 2. Only bins where that is not 0 have a
    colour.
    """
    levels, name, lopsided = fmt.levels, fmt.name.upper(), {}
    edges = [0, *((a + b) / 2 for a, b in zip(levels, levels[1:])), fmt.max]
    gap = 0.003 * fmt.max                       # so that one sees where a bin ends
    for q, low, high in zip(levels, edges, edges[1:]):
        error = ((q - low) - (high - q)) / 2
        color, alpha = "#e4e4e4", 1
        if 0 < q < fmt.max and error:           # the outermost bins have one side only
            lopsided[q] = error, low, high
            color, alpha = COLORS[kind_of("", fmt.name)], 0.55
        ax.barh(0, high - low - 2 * gap, left=low + gap, height=1, color=color,
                alpha=alpha)
    ax.vlines(levels, -0.5, 0.5, color="black", lw=2)
    for q, (error, _, _) in lopsided.items():
        ax.text(q, 0.58, f"{error:g}".replace("-", "\N{MINUS SIGN}"), ha="center")
    if lopsided:
        q = max(lopsided)                       # its bin has the most room for l and r
        for side, edge in zip("lr", lopsided[q][1:]):
            arrow = {"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0, "lw": 1.5}
            ax.annotate("", (edge, -0.15), (q, -0.15), arrowprops=arrow)
            ax.text((q + edge) / 2, -0.05, side, ha="center", style="italic")
        which = " and ".join(f"{q:g}" for q in lopsided)
        finding = (f"the bins of {which} are lopsided,\n"
                   "with a mean error of (l \N{MINUS SIGN} r) / 2")
    else:
        finding = "no bin is lopsided"
    ax.set_title(f"{name}: {finding}")
    ax.set(xticks=levels, xticklabels=[f"{q:g}" for q in levels], yticks=[],
           xlim=(-0.02 * fmt.max, 1.02 * fmt.max),
           ylim=(-0.5, 0.9 if lopsided else 0.6),
           xlabel=f"levels of {name} and their rounding bins")
    ax.spines["left"].set_visible(False)

def draw_bias(fig, chains):
    """Left, the bins of both grids. Right, the signal after many quantized GEMMs."""
    axes = fig.subplot_mosaic([["e2m1", "depth"], ["e1m2", "depth"]],
                              height_ratios=(1.6, 1), width_ratios=(1.1, 1))
    fig.get_layout_engine().set(hspace=0.1)
    depth, findings = axes["depth"], []
    for f in GRIDS:
        draw_bins(axes[f], FORMATS[f])
        name, color = f.upper(), COLORS[kind_of("", f)]
        signal, product = zip(*chains[f])
        gemms, change = range(1, 1 + len(signal)), signal[-1] - 1
        depth.plot(gemms, signal, color=color, lw=4, label=f"{name}, measured")
        depth.plot(gemms, product, "--", color="black", lw=1.2,
                   label="product of the slopes alpha" if f == GRIDS[-1] else None)
        depth.annotate(f"{signal[-1]:.2f}", (len(signal), signal[-1]), (4, 0),
                       textcoords="offset points", va="center", color=color)
        findings.append(f"{name} loses {-change:.0%} of the signal" if change < 0 else
                        f"{name} gains {change:.0%}")
    depth.axhline(1, color="black", lw=0.8)
    depth.set(xlabel="n, quantized GEMMs in a row", ylim=(0, None), xlim=(0, None),
              ylabel="signal left after n GEMMs (1 = all)",
              title=f"In {len(gemms)} GEMMs " + ",\n".join(findings))
    depth.legend(loc="lower left")

# ---- sqnr: does the RHT change the preferred grid? (the paper's Q1) ----
CONTRACTED = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"),
              "dy": ("dgrad", "wgrad")}

def capture(model, tokens, targets):
    """{(layer, operand): its tensor (rows, columns)}: X, W and dY of each layer."""
    got = {}

    def watch(layer, name):
        def forward_hook(layer, inputs):
            got[name, "x"] = inputs[0]
        def backward_hook(layer, _, gradients):
            got[name, "dy"] = gradients[0]
        layer.register_forward_pre_hook(forward_hook)
        layer.register_full_backward_hook(backward_hook)
        got[name, "w"] = layer.weight

    for name, layer in model.named_modules():
        if isinstance(layer, ufp4.Linear):
            watch(layer, name)
    model(tokens, targets).backward()
    return {at: x.detach().flatten(0, -2).float() for at, x in got.items()}

def load_model(flags, checkpoint):
    """(settings, data set, GPT with the checkpoint's weights) of train.py's flags."""
    s = train.parse_args(flags)
    dataset = prepare(s.data)
    model = train.GPT(s, train.make_recipe(s), dataset.vocab_size)
    train.load(checkpoint, {"model": model.state_dict()})   # into the model's tensors
    return s, dataset, model.to(s.device)

def bench_sqnr(args):
    out = HERE / "out" / "bench" / "sqnr"
    flags = [*size("nano", 6, 384, 6, 1024, steps=300), "--out", str(out),
             *"--recipe bf16 --device cpu --dtype bfloat16".split()]
    if not (out / "ckpt-0000300").exists():
        shutil.rmtree(out, ignore_errors=True)      # what a stopped run has left
        train.train(train.parse_args(flags))
    s, dataset, model = load_model(flags, out / "ckpt-0000300")
    batch = train.get_batch([read_tokens(p) for p in dataset.train], s, s.steps)
    found, signs = collections.defaultdict(list), ufp4.random_signs(0)
    for (layer, operand), x in capture(model, *batch).items():
        kind = "all layers" if operand == "w" else layer.rpartition(".")[2]
        for gemm, data in zip(CONTRACTED[operand], (x, x.T.contiguous())):
            decibels = [sqnr(ufp4.fake_quantize(v, f), v)
                        for v in (data, ufp4.rht(data, signs)) for f in GRIDS]
            found[f"{operand} of {kind}, {gemm}"].append(decibels)
    rows = [["SQNR, dB", "E2M1", "E1M2", "E2M1, RHT", "E1M2, RHT",
             "better grid changes"],
            ["the paper's input of fc2", "21.90", "19.94", "20.00", "23.19", ""]]
    for name, layers in found.items():
        changes = sum((a > b) != (c > d) for a, b, c, d in layers)
        medians = [f"{statistics.median(column):.2f}" for column in zip(*layers)]
        rows.append([name, *medians, f"{changes} of {len(layers)}"])
    finish("sqnr", {"sqnr": rows}, {"tensors": found})

# ---- cpu: what emulation costs ----
def training_step(s, recipe, vocab_size):
    """A function that makes a step of training a GPT, always on the same tokens."""
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
    where = f"{machine()['cpu']}, {torch.get_num_threads()} threads"
    rows = [[f"a step on {where}", "`bf16`, ms", "`ufp4` / `bf16`", "`e2m1` / `bf16`"]]
    for model, dtype in itertools.product(("nano", "nano-moe"),
                                          ("float32", "bfloat16")):
        s = train.parse_args(["--model", model, "--dtype", dtype, "--device", "cpu"])
        steps = [training_step(s, recipe, 256) for recipe in ("bf16", "ufp4", "e2m1")]
        bf16, *ours = interleaved(steps, 15)
        rows.append([f"`{model}`, {dtype}", spread(bf16, "{:.0f}"),
                     *(spread([a / b for a, b in zip(ms, bf16)]) for ms in ours)])
    finish("cpu", {"cpu": rows})

# ---- Studies: train many small models and compare ----
def counted(s, recipe="bf16"):
    """(GPT without values, parameters, those active for a token, FLOPs a token)"""
    with torch.device("meta"):
        recipe = ufp4.lookup("recipe", recipe, RECIPES)
        model = train.GPT(s, recipe, vocabulary(s.data))
    return model, *train.counts(model, s)

def size(preset, layers, dim, heads, hidden, per_parameter=20, rate=1.0, steps=None):
    """Flags of train.py for a model, with nano's batches and its Python text.

    It reads `per_parameter` bytes for each parameter that a token uses, unless `steps`
    is given. The learning rate falls with the square root of the width. It is `rate`
    times that where a study checks it."""
    lr = rate * 3e-3 * (128 / dim) ** 0.5
    flags = (f"--model {preset} --layers {layers} --dim {dim} --heads {heads} "
             f"--hidden {hidden} --lr {lr:.3g}").split()
    s = train.parse_args([*flags, "--device", "cpu"])
    _, _, active, _ = counted(s)
    steps = steps or round(per_parameter * active / (s.batch_size * s.seq_len))
    return [*flags, "--steps", str(steps)]

TINY, SMALL, NANO = (2, 64, 2, 176), (2, 96, 3, 256), (4, 128, 4, 352)
DEPTHS, LENGTHS = (2, 4, 8, 16, 32), (2, 6, 20, 60)
# By kind, and millions of parameters that a token uses
SIZES = {"dense-0.1m": size("nano", *TINY), "dense-0.3m": size("nano", *SMALL),
         "dense-0.9m": size("nano", *NANO), "dense-2m": size("nano", 4, 192, 6, 512),
         "moe-0.3m": size("nano-moe", 2, 96, 3, 64),
         "moe-0.9m": size("nano-moe", 4, 128, 4, 96)}
# At 0.3M, by the number of bytes for each parameter
SIZES |= {f"dense-0.3m-{n}": size("nano", *SMALL, per_parameter=n)
          for n in LENGTHS if n != 20}
# By depth, at a width of 64. All read the same text, the deeper ones thus fewer bytes
# for each parameter
SIZES |= {f"depth-{n}": size("nano", n, *TINY[1:], steps=800) for n in DEPTHS}
SIZES |= {f"{name}-lr-{how}": size("nano", *shape, rate=rate)
          for name, shape in (("dense-0.1m", TINY), ("dense-0.9m", NANO))
          for how, rate in (("half", 0.5), ("twice", 2.0))}
MODELS = {**{name: ["--model", name] for name in train.PRESETS}, **SIZES}

CORE = ("ufp4", "e2m1", "e2m1-full-rht", "nvfp4")
# With RHT on all three GEMMs: E2M1, which shrinks or does not, and E1M2
CAUSES = ("e2m1-full-rht", "e2m1-debiased", "ufp4-shrunk", "ufp4")
# The rows of the ablation that carry a claim
CLAIMS = [*CAUSES, "e2m1", "ufp4-sr-none", *GROUPS["ablate"]["RHT on"]]
# {study: {model: recipes}}
STUDIES = {
    # What recipes cost, and one change at a time
    "loss": {"dense-0.3m": sum(GROUPS["loss"].values(), [])},
    "ablate": {"nano": sum(GROUPS["ablate"].values(), []),
               "dense-0.3m": CLAIMS},
    # Does it hold with size, each model with 20 bytes a parameter?
    "scaling": {name: CORE for name in SIZES
                if re.fullmatch(r"(dense|moe)-[^-]+", name)},
    # Does the difference go on growing with the text?
    "length": {f"dense-0.3m-{n}" if n != 20 else "dense-0.3m": CORE[:2]
               for n in LENGTHS},
    # Does shrinkage compound over layers? Written down before the runs: if it does, as
    # the paper says, the effect of shrinking is positive and grows with depth, so that
    # at 32 layers its interval is above the one at 2. If the residual stream and its
    # norms undo it, the effect is within 0.05% of zero at each depth. The effect of the
    # grid says whether the method's gain depends on depth. An interval wider than 0.1%
    # at 32 layers would leave the question open.
    "depth": {f"depth-{n}": CAUSES for n in DEPTHS},
    # Whole runs under the recipe, to show why all others branch from a bf16 run
    "scratch": {"dense-0.3m": CORE[:2]},
    # Is the learning rate right?
    "lr": {name: ["bf16"] for name in SIZES if "-lr-" in name}}
# How many seeds, fixed before the runs
SEEDS = {"nano": 5, "dense-0.9m": 4, "moe-0.9m": 4, "dense-2m": 3}
SEEDS |= {name: 2 for name in STUDIES["lr"]}

def jobs_of(study, models=None, seeds=None, rows=None):
    """The runs of a study, a bf16 run first for each model and seed."""
    found = []
    for model, recipes in STUDIES[study].items():
        if models and model not in models:
            continue
        for seed in range(seeds or SEEDS.get(model, 5)):
            for recipe in ("bf16", *(rows or recipes)):
                whole = recipe == "bf16" or study == "scratch"
                found.append({"model": model, "recipe": recipe, "seed": seed,
                              "estimator": "scratch" if whole else "branched"})
    return found

def folder(args, job):
    return args.runs / "{model}-{estimator}-{recipe}-s{seed}".format(**job)

def milestones(args, job):
    """The checkpoints where others branch from a BF16 run, and at a run's end."""
    steps = train.parse_args([*MODELS[job["model"]], *args.train]).steps
    return [folder(args, job) / f"ckpt-{n:07d}" for n in (2 * steps // 3, steps)]

def bf16_of(job):
    """The run that a job branches from, and is compared with."""
    return {**job, "recipe": "bf16", "estimator": "scratch"}

def train_run(args, job):
    """One run of train.py in a process of its own. Returns what it says if it diverged,
    which is a result, too."""
    out, (branch, _) = folder(args, job), milestones(args, bf16_of(job))
    command = [sys.executable, __file__, "train", "--recipe", job["recipe"],
               *MODELS[job["model"]], *args.train, "--seed", str(job["seed"]),
               *"--sample 0 --eval-interval 1000000 --eval-windows 8".split(),
               "--save-interval", str(int(branch.name[5:])), "--out", str(out)]
    if job["estimator"] == "branched":
        command += ["--branch", str(branch)]
    if train.checkpoints(out):                      # an earlier command was stopped
        command += ["--resume"]
    elif out.exists():
        shutil.rmtree(out)
    env = {**os.environ, "OMP_NUM_THREADS": str(max(1, os.cpu_count() // args.jobs))}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode == 3 and job["recipe"] != "bf16":
        return said
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {said}")

@torch.no_grad()
def window_losses(model, tokens, s):
    """The loss of each window of the whole validation text; they do not overlap."""
    model.eval()
    torch.manual_seed(s.seed)
    starts = range(0, len(tokens) - s.seq_len, s.seq_len)
    losses = []
    for first in range(0, len(starts), 32):
        batch, targets = train.windows([tokens], starts[first:first + 32], s)
        logits = model(batch).float()
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(),
                               reduction="none")
        losses += each.view(targets.shape).double().mean(1).tolist()
    return losses

PIECES = 64                     # neighbouring windows, whose losses go together

def evaluate(args, job):
    """A finished run on the whole validation text: its loss, the loss in each of 64
    pieces of the text, and the loss of its weights in a BF16 forward pass. From its log
    the slope and the noise of fprop."""
    flags = [*MODELS[job["model"]], *args.train, "--seed", str(job["seed"]), "--recipe"]
    _, end = milestones(args, job)
    s, dataset, model = load_model([*flags, job["recipe"]], end)
    tokens = read_tokens(dataset.val[0])
    losses = window_losses(model, tokens, s)
    pieces = [piece.mean().item() for piece in np.array_split(losses, PIECES)]
    found = {"val_loss": statistics.mean(losses), "windows": len(losses),
             "pieces": [round(loss, 5) for loss in pieces]}
    if job["recipe"] != "bf16":
        *_, last = train.read_log(folder(args, job) / "log.jsonl")
        s, _, model = load_model([*flags, "bf16"], end)
        found |= {"weights_loss": statistics.mean(window_losses(model, tokens, s)),
                  "slope": last["slope"], "noise": last["noise"]}
    return found

def bf16_by_float32():
    """Products in BF16 for CPUs without such instructions, where torch's own take ten
    times as long. Products of two bfloat16 numbers are exact in float32. The sums are
    made in float32 and then rounded to bfloat16. What differs is the order of the sums,
    and the inside of attention, which stays float32."""
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

key = operator.itemgetter("model", "recipe", "estimator", "seed")   # of a job or record

def train_all(args, jobs):
    """Make the runs that data/results/NAME.json does not have; return what it then has.

    Each run is saved as it ends, and its checkpoints are removed. So a later command
    repeats a bf16 run if it needs its weights."""
    path = RESULTS / f"{args.name}.json"
    results = {"flags": args.train, "models": {}, "machines": [], "runs": []}
    if path.exists():
        results |= json.loads(path.read_text())
    runs, here, lock = {key(r): r for r in results["runs"]}, machine(), threading.Lock()
    torch.set_num_threads(max(1, os.cpu_count() // args.jobs))

    def run(job):
        diverged = train_run(args, job)
        bf16 = bf16_of(job)
        with lock:                                      # one evaluation at a time
            if diverged:
                found = {"val_loss": None, "error": diverged}
            else:
                found = evaluate(args, job)
            if job == bf16:
                results["models"].setdefault(job["model"], described(args, job))
                # Repeated on another CPU, it gives other numbers. What was compared
                # with the old ones has to be repeated, too.
                for k, r in list(runs.items()):
                    same = (r["model"], r["seed"]) == (job["model"], job["seed"])
                    if same and r["bf16_val_loss"] != found["val_loss"]:
                        del runs[k]
            if here not in results["machines"]:
                results["machines"].append(here)
            compared = found if job == bf16 else runs[key(bf16)]
            number = results["machines"].index(here)
            runs[key(job)] = {**job, "machine": number, **found,
                              "bf16_val_loss": compared["val_loss"]}
            results["runs"] = [runs[k] for k in sorted(runs)]
            save(args.name, results)
        if job != bf16:
            shutil.rmtree(folder(args, job), ignore_errors=True)
        print(*key(job), found["val_loss"], flush=True)

    failed = []

    def run_group(group):
        """All runs of one model and seed. If one fails, this says so at once, and the
        other groups go on."""
        bf16 = bf16_of(group[0])
        branch = any(job["estimator"] == "branched" and key(job) not in runs
                     for job in group)
        try:
            if (key(bf16) not in runs
                    or branch and not milestones(args, bf16)[0].exists()):
                run(bf16)
            for job in group:
                if key(job) not in runs:
                    run(job)
        except RuntimeError as e:
            print(f"bench.py: {e}", file=sys.stderr, flush=True)
            failed.append(group)
            return                              # the checkpoints stay, to go on
        shutil.rmtree(folder(args, bf16), ignore_errors=True)

    groups = {}
    for job in jobs:
        groups.setdefault((job["model"], job["seed"]), []).append(job)
    try:
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(run_group, groups.values()))
    except KeyboardInterrupt:
        sys.exit("bench.py: stopped; the same command goes on from here")
    if failed:
        sys.exit("bench.py: a run failed; the same command goes on from there")
    return results

def described(args, job):
    """What a study's tables say of a model: its settings, sizes, FLOPs and text."""
    first, *_ = train.read_log(folder(args, job) / "log.jsonl")
    settings = first["settings"]
    del settings["out"], settings["seed"]               # these are the run's own
    s = train.parse_args([*MODELS[job["model"]], *args.train])
    _, total, active, flops = counted(s)
    trained = s.steps * s.batch_size * s.seq_len
    text = sum(len(read_tokens(part)) for part in prepare(s.data).train)
    return {"settings": settings, "parameters": total, "active": active,
            "flops": flops * trained, "bytes": trained, "text": text}

def bench_study(args):
    jobs = []
    for study in args.studies:
        jobs += jobs_of(study, args.models, args.seeds, args.rows)
    results = train_all(args, {key(job): job for job in jobs}.values())
    finish(args.name, study_tables(results, args.label), results)

# ---- Studies: what the runs say ----
# The paper's loss errors of its Dense 1.5B in % (Q2), and what its ablations lose more
# than ufp4, in % (Q4)
PAPER = {"ufp4": "0.97", "e2m1": "1.26"}
PAPER_OVER_UFP4 = {"ufp4-rht-none": "+0.60", "ufp4-rht-wgrad": "+0.34",
                   "ufp4-rht-dgrad-wgrad": "+0.44", "ufp4-rht-fprop-wgrad": "+0.25",
                   "ufp4-sr-none": "+0.24"}

# Sums of loss errors
GAP = {"e2m1": 1, "ufp4": -1}
GRID = dict(zip(CAUSES, (.5, .5, -.5, -.5)))
SHRINKING = dict(zip(CAUSES, (.5, -.5, .5, -.5)))
# The last rows of a table of recipes
EFFECTS = {"effect of the grid": GRID, "effect of shrinking": SHRINKING,
           "effect of shrinking, in E2M1": {"e2m1-full-rht": 1, "e2m1-debiased": -1},
           "effect of fprop without RHT": {
               "ufp4-rht-wgrad": .5, "ufp4-rht-fprop-wgrad": -.5,
               "ufp4-rht-dgrad-wgrad": .5, "ufp4": -.5},
           "E1M2 minus E2M1, RHT on wgrad": {"ufp4-rht-wgrad": 1, "e2m1": -1},
           "E1M2 minus E2M1, RHT on all": {"ufp4": 1, "e2m1-full-rht": -1},
           "`ufp4-mx` minus `mxfp4`": {"ufp4-mx": 1, "mxfp4": -1}}

def errors_of(runs, model, recipe, estimator="branched", loss="val_loss"):
    """{seed: BF16-relative loss error} (the paper's, Q2), infinite if it diverged."""
    found = {}
    for r in runs:
        if key(r)[:3] == (model, recipe, estimator):
            diverged = r["val_loss"] is None
            error = math.inf if diverged else r[loss] / r["bf16_val_loss"] - 1
            found[r["seed"]] = error
    return found

def sums_of(runs, model, weights, estimator="branched"):
    """{seed: its loss errors, each times its weight, added up}. weights: {recipe:
    weight}. Only of seeds that have all recipes."""
    errors = {recipe: errors_of(runs, model, recipe, estimator) for recipe in weights}
    seeds = set.intersection(*map(set, errors.values()))
    return {seed: sum(weight * errors[recipe][seed]
                      for recipe, weight in weights.items()) for seed in sorted(seeds)}

def contrast(runs, model, weights, estimator="branched"):
    """The mean of these sums, and its interval over the seeds. None without seeds."""
    sums = sums_of(runs, model, weights, estimator)
    return interval(list(sums.values())) if sums else None

def sums_of_pieces(runs, model, weights):
    """The same sum for each piece of the validation text, a mean over the seeds. None
    without seeds."""
    found = {}                          # {recipe: {seed: loss error of each piece}}
    for r in runs:
        if key(r)[0] == model and r["estimator"] == "branched" and "pieces" in r:
            errors = np.array(r["pieces"]) / r["bf16_val_loss"]
            found.setdefault(r["recipe"], {})[r["seed"]] = errors
    bf16 = {r["seed"]: np.array(r["pieces"]) / r["val_loss"] for r in runs
            if key(r)[:3] == (model, "bf16", "scratch")}
    seeds = set(bf16).intersection(*(found.get(recipe, {}) for recipe in weights))
    if not seeds:
        return None
    sums = [sum(weight * (found[recipe][seed] - bf16[seed])
                for recipe, weight in weights.items()) for seed in seeds]
    return np.mean(sums, 0)

def text_error(sums):
    """The half-width of the 95% interval over the pieces of the validation text. All
    seeds share this text, so that their interval does not contain it."""
    return None if sums is None else 1.96 * sums.std(ddof=1) / math.sqrt(len(sums))

def cell(runs, model, recipe, **of):
    """The loss error in % and its number of seeds."""
    errors = errors_of(runs, model, recipe, **of).values()
    return f"{text(interval(list(errors)))} ({len(errors)})" if errors else ""

SETTLED = ["± of the text", "settled"]

def verdict(found, pieces):
    """Three cells: what was found in % with its interval over seeds, the half-width
    over the text, and whether it is settled: both errors together exclude zero."""
    if not found:
        return ["", "", ""]
    mean, half = found
    of_text = text_error(pieces)
    if half is None or of_text is None:
        return [text(found), "", "no"]
    yes = abs(mean) > math.hypot(half, of_text)
    return [text(found), f"{100 * of_text:.2f}", "yes" if yes else "no"]

def settled(runs, model, weights):
    """The verdict on a sum of loss errors, {recipe: weight}."""
    return verdict(contrast(runs, model, weights), sums_of_pieces(runs, model, weights))

def per_doubling(runs, sizes, effect):
    """The verdict on what an effect grows by when the size of {model: size} doubles:
    the slope of a straight line by least squares, for each seed that has all models."""
    doublings = np.log2(list(sizes.values()))
    weights = doublings - doublings.mean()
    weights /= (weights ** 2).sum()
    sums = [sums_of(runs, model, effect) for model in sizes]
    seeds = sorted(set.intersection(*map(set, sums)))
    pieces = [sums_of_pieces(runs, model, effect) for model in sizes]
    if not seeds or any(of is None for of in pieces):
        return verdict(None, None)
    slopes = [sum(w * of[seed] for w, of in zip(weights, sums)) for seed in seeds]
    return verdict(interval(slopes), weights @ np.array(pieces))

def reduction(runs, models):
    """By what part of itself e2m1's loss error falls with ufp4: 1 - the ratio of sums
    over the models, of each seed that has all; mean and interval. None without such
    seeds, or if a run diverged."""
    ours, theirs = ([errors_of(runs, model, recipe) for model in models]
                    for recipe in ("ufp4", "e2m1"))
    seeds = sorted(set.intersection(*map(set, ours + theirs))) if ours else ()
    parts = [1 - sum(e[s] for e in ours) / sum(e[s] for e in theirs) for s in seeds]
    return interval(parts) if parts and math.isfinite(sum(parts)) else None

def fprop_of(runs, model):
    """{recipe: (slope and noise of fprop, means over the seeds)}, without the recipes
    of which a run diverged."""
    found = collections.defaultdict(list)
    for r in runs:
        if r["model"] == model and r["estimator"] == "branched" and "noise" in r:
            found[r["recipe"]].append((r["slope"], r["noise"]))
    return {recipe: tuple(map(statistics.mean, zip(*pairs)))
            for recipe, pairs in found.items()
            if math.isfinite(contrast(runs, model, {recipe: 1})[0])}

def measured(rows):
    """A table without the columns in which nothing was measured."""
    columns = [column for column in zip(*rows) if any(column[1:])]
    return [list(row) for row in zip(*columns)]

def study_tables(results, label=""):
    """{title: table} of all that was measured. A quick look has its flags as label."""
    runs, models = results["runs"], results["models"]
    tables = {"scaling": scaling_table(runs, models),
              "length": length_table(runs, models),
              "depth": depth_table(runs, models), "lr": lr_table(runs),
              "front": front_table(runs)}
    for study, groups in GROUPS.items():
        for model in STUDIES[study]:
            tables[f"{study}-{model}"] = recipe_table(runs, model, groups)
    tables = {f"study-{name}{label}": table for name, table in tables.items()
              if len(table) > 1}
    if not label:
        tables["two-by-two"] = two_by_two_table(runs, FRONT_MODEL)
    return tables

def recipe_table(runs, model, groups):
    """A row a recipe; then effects, how far ufp4 is below e2m1, and how loss error goes
    with slope and noise of fprop."""
    rows = [[f"`{model}`", "recipe", "loss error, % (seeds)", "minus `ufp4`, %",
             *SETTLED, "of it, in the weights", "slope of fprop", "noise of fprop, %",
             "the paper, minus `ufp4`"]]
    names = sum(groups.values(), [])
    fprop = {recipe: found for recipe, found in fprop_of(runs, model).items()
             if recipe in names}
    for group, recipes in groups.items():
        for recipe in recipes:
            if not errors_of(runs, model, recipe):
                continue
            extra = ["", "", ""]
            if recipe != "ufp4":
                extra = settled(runs, model, {recipe: 1, "ufp4": -1})
            slope, noise = fprop.get(recipe, (math.nan, math.nan))
            rows.append([group, f"`{recipe}`", cell(runs, model, recipe), *extra,
                         cell(runs, model, recipe, loss="weights_loss"),
                         f"{slope:.4f}", f"{100 * noise:.3f}",
                         PAPER_OVER_UFP4.get(recipe, "")])
    if len(rows) == 1:
        return rows
    for name, effect in EFFECTS.items():
        if set(effect) <= set(names) and contrast(runs, model, effect):
            rows.append([name, "", "", *settled(runs, model, effect), *[""] * 4])
    if found := contrast(runs, model, GAP, "scratch"):
        rows.append(["`e2m1`, from scratch", "", "", text(found), *[""] * 6])
    if found := reduction(runs, [model]):
        rows.append(["`ufp4` smaller than `e2m1` by, %", "", text(found, 0), *[""] * 7])
    # Recipes that round alike, as ufp4 and ufp4-int4 do, are one point
    points = {(*found, contrast(runs, model, {recipe: 1})[0])
              for recipe, found in fprop.items()}
    if len(points) > 4:
        slopes, noises, errors = zip(*points)
        rows.append([f"correlation with loss error, over {len(points)}", *[""] * 6,
                     *(f"{statistics.correlation(v, errors):.2f}"
                       for v in (slopes, noises)), ""])
    return measured(rows)

FRONT_MODEL = "dense-0.3m"              # of the front page

def front_table(runs):
    """The front page's: a recipe, what it is, its loss error here and in the paper."""
    rows = [["recipe", "what it is", "loss error, % (seeds)", "minus `ufp4`, %",
             "the paper, 1.5B, %"], ["`bf16`", "no quantization", "0", "", "0"]]
    for recipe, what in (
            ("ufp4", "E1M2, RHT on all three GEMMs"),
            ("e2m1", "E2M1, RHT on wgrad: the paper's baseline"),
            ("e2m1-full-rht", "E2M1, RHT on all three GEMMs"),
            ("nvfp4", "after NVIDIA: E2M1, 8-bit scales, RHT on wgrad, no BF16 block")):
        extra = ""
        if recipe != "ufp4":
            extra, _, _ = settled(runs, FRONT_MODEL, {recipe: 1, "ufp4": -1})
        rows.append([f"`{recipe}`", what, cell(runs, FRONT_MODEL, recipe), extra,
                     PAPER.get(recipe, "")])
    return rows if errors_of(runs, FRONT_MODEL, "ufp4") else rows[:1]

def series(study, models):
    """The models of a study that were measured, in its order."""
    return [model for model in STUDIES[study] if model in models]

def scaling_table(runs, models):
    rows = [["model", "parameters, M", "used by a token, M", "text, MB",
             "passes over the corpus",
             *(f"`{recipe}`, % (seeds)" for recipe in CORE),
             "`e2m1` minus `ufp4`, %", *SETTLED, "`ufp4` smaller by, %"]]
    for model in series("scaling", models):
        m = models[model]
        rows.append([model, f"{m['parameters'] / 1e6:.2f}", f"{m['active'] / 1e6:.2f}",
                     f"{m['bytes'] / 1e6:.1f}", f"{m['bytes'] / m['text']:.2f}",
                     *(cell(runs, model, recipe) for recipe in CORE),
                     *settled(runs, model, GAP), text(reduction(runs, [model]), 0)])
    for kind in ("dense", "moe"):
        sizes = [m for m in series("scaling", models) if m.startswith(kind)]
        if len(sizes) > 1:
            rows.append([f"{kind}, all sizes", *[""] * (len(rows[0]) - 2),
                         text(reduction(runs, sizes), 0)])
    return measured(rows)

def lengths(models):
    """{model: bytes of text for each parameter} of the study of length."""
    return {model: models[model]["bytes"] / models[model]["active"]
            for model in series("length", models)}

def length_table(runs, models):
    rows = [["bytes a parameter", "passes over the corpus",
             *(f"`{recipe}`, % (seeds)" for recipe in CORE[:2]),
             "`e2m1` minus `ufp4`, %", *SETTLED, "`ufp4` smaller by, %"]]
    for model, per_parameter in lengths(models).items():
        m = models[model]
        rows.append([f"{per_parameter:.0f}", f"{m['bytes'] / m['text']:.2f}",
                     *(cell(runs, model, recipe) for recipe in CORE[:2]),
                     *settled(runs, model, GAP), text(reduction(runs, [model]), 0)])
    if len(rows) > 2:
        rows.append(["for each doubling", "", "", "",
                     *per_doubling(runs, lengths(models), GAP), ""])
    return measured(rows)

def depths(runs, models):
    """{model: blocks} of the study of depth: the models of which three seeds have all
    four recipes."""
    return {model: int(model.split("-")[1]) for model in series("depth", models)
            if min(len(errors_of(runs, model, recipe)) for recipe in CAUSES) >= 3}

def depth_table(runs, models):
    rows = [["blocks", "parameters, M",
             *(f"`{recipe}`, % (seeds)" for recipe in CAUSES),
             "effect of the grid, %", *SETTLED, "effect of shrinking, %", *SETTLED]]
    by_depth = depths(runs, models)
    for model, blocks in by_depth.items():
        rows.append([f"{blocks}", f"{models[model]['parameters'] / 1e6:.2f}",
                     *(cell(runs, model, recipe) for recipe in CAUSES),
                     *settled(runs, model, GRID), *settled(runs, model, SHRINKING)])
    if len(by_depth) > 1:
        rows.append(["for each doubling", *[""] * (len(CAUSES) + 1),
                     *per_doubling(runs, by_depth, GRID),
                     *per_doubling(runs, by_depth, SHRINKING)])
    return measured(rows)

def lr_table(runs):
    """What bf16 loses with half and with twice the learning rate."""
    rows = [["model", "half the learning rate", "twice the learning rate", "seeds"]]
    losses = {(r["model"], r["seed"]): r["val_loss"] for r in runs
              if r["recipe"] == "bf16"}
    for model in ("dense-0.1m", "dense-0.9m"):
        changes = {}
        for how in ("half", "twice"):
            name = f"{model}-lr-{how}"
            changes[how] = [losses[name, seed] / losses[model, seed] - 1
                            for seed in range(SEEDS[name])
                            if {(name, seed), (model, seed)} <= losses.keys()]
        if all(changes.values()):
            rows.append([model, *(f"{statistics.mean(found):+.2%} loss"
                                  for found in changes.values()),
                         str(len(changes["half"]))])
    return rows

def draw_loss(fig, runs, model, groups):
    """Left, what each recipe loses more than ufp4. Right, loss error against noise."""
    extra, scatter = fig.subplots(1, 2)
    names, kinds, points, fprop = [], set(), set(), fprop_of(runs, model)
    for recipe in dict.fromkeys(sum(groups.values(), [])):
        found = contrast(runs, model, {recipe: 100, "ufp4": -100})
        if not found or not math.isfinite(found[0]):
            continue                    # it shares no seed with ufp4, or it diverged
        kinds.add(kind_of(recipe))
        look = {"fmt": "o", "ms": 6, "color": COLORS[kind_of(recipe)]}
        if recipe != "ufp4":
            extra.errorbar(found[0], len(names), xerr=found[1] or 0, lw=2, **look)
            names.append(WORDS.get(recipe, recipe))
        if recipe in fprop:
            noise = 100 * fprop[recipe][1]
            error, half = contrast(runs, model, {recipe: 100})
            scatter.errorbar(noise, error, yerr=half or 0, lw=1, **look)
            points.add((noise, error))
    grid, shrinkage = contrast(runs, model, GRID), contrast(runs, model, SHRINKING)
    part, finding = reduction(runs, [model]), f"{model}: extra loss"
    if grid and shrinkage and set(CAUSES) <= set(sum(groups.values(), [])):
        finding = (f"{model}: E2M1's grid costs {text(grid)}%\nof the loss, "
                   f"its shrinkage {text(shrinkage)}%").replace("-0.00", "0.00")
    elif part:
        finding = (f"{model}: ufp4's loss error is\n"
                   f"{text(part, 0)}% smaller than that of e2m1")
    extra.axvline(0, color="black", lw=0.8)
    extra.set(yticks=range(len(names)), yticklabels=names, title=finding,
              ylim=(len(names) - 0.4, -0.6),
              xlabel="extra loss compared with ufp4,\n% of the BF16 loss")
    extra.grid(axis="y", color="#eeeeee")
    extra.set_axisbelow(True)
    finding = "Loss error and the noise of fprop"
    if len(points) > 4:
        finding += f":\ncorrelation {statistics.correlation(*zip(*points)):.2f}"
    scatter.set(xlim=(0, None), ylim=(0, None), title=finding,
                xlabel="noise of fprop: error power,\n% of the outputs' power",
                ylabel="loss error to BF16, %")
    scatter.locator_params(nbins=5)
    legend_of_kinds(scatter, kinds, loc="upper left", title="bars: 95% intervals")

# ---- The front page: the grid and the rotation, two by two ----
# {format: its recipe with the RHT on wgrad alone, and with the RHT on all three GEMMs}
TWO_BY_TWO = {"E2M1": ("e2m1", "e2m1-full-rht"), "E1M2": ("ufp4-rht-wgrad", "ufp4")}
ROTATED = ("RHT on wgrad alone", "RHT on all three GEMMs")

def two_by_two_table(runs, model):
    """The four loss errors, what the rotation and the uniform grid do to each, and how
    far the effect of both together is from the sum of both alone."""
    (e2m1, e2m1_rht), (e1m2, e1m2_rht) = TWO_BY_TWO.values()

    def effect(weights):
        """A difference in %, and whether its interval over seeds excludes zero."""
        mean, half = contrast(runs, model, weights)
        found = f"+{text((mean, half))}" if mean > 0 else text((mean, half))
        if half is None or abs(mean) <= half:
            return f"{found}: not settled"
        return f"{found}: {'hurts' if mean > 0 else 'helps'}"

    both = {e1m2_rht: 1, e1m2: -1, e2m1_rht: -1, e2m1: 1}
    return [["loss error, % (seeds)", *ROTATED, "what the rotation does"],
            *([fmt, *(cell(runs, model, recipe) for recipe in pair),
               effect({pair[1]: 1, pair[0]: -1})] for fmt, pair in TWO_BY_TWO.items()),
            ["what the uniform grid does", effect({e1m2: 1, e2m1: -1}),
             effect({e1m2_rht: 1, e2m1_rht: -1}),
             f"together, beyond their sum: {effect(both).split(':')[0]}"]]

# The block of the lesson of ufp4.py
SIXTEEN = torch.tensor([0.5, 10.5, 0.75, 0.25, 0.5, 1.75, 1.5, -0.25,
                        -0.75, -0.25, 1.0, -1.0, 1.25, 0.5, -1.0, -1.5])

def draw_hero(fig, runs):
    """Left, how sixteen numbers round to each grid before and after the RHT. Right, the
    loss errors of the same four combinations."""
    left, right = fig.subfigures(1, 2, width_ratios=(1.25, 1), wspace=0.03)
    draw_sixteen(left)
    draw_two_by_two(right, runs, FRONT_MODEL)

def draw_sixteen(fig):
    """A row of panels for the block before the RHT and one after it, a column for each
    grid. A number is a dot, with a line to the level that it is rounded to."""
    fig.suptitle("Sixteen numbers: before the rotation (RHT)\n"
                 "E2M1 rounds better, after it E1M2", size=13)
    panels = fig.subplots(2, 2, sharex=True, sharey="row", height_ratios=(1.15, 1))
    blocks = {"before the RHT": SIXTEEN,
              "after the RHT": ufp4.rht(SIXTEEN, ufp4.random_signs(0))}
    for row, (when, x) in zip(panels, blocks.items()):
        rounded = [ufp4.fake_quantize(x, fmt) for fmt in GRIDS]
        decibels = [sqnr(q, x) for q in rounded]
        for ax, fmt, q, db in zip(row, GRIDS, rounded, decibels):
            color = COLORS[kind_of("", fmt)]
            scale = x.abs().max() / FORMATS[fmt].max
            for level in FORMATS[fmt].levels:
                for y in (level * scale, -level * scale):
                    ax.axhline(y, color="#dcdcdc", lw=0.8, zorder=0)
            ax.vlines(range(len(x)), x, q, color=color, lw=3)
            ax.plot(q, "_", ms=9, mew=2, color=color)
            ax.plot(x, "o", ms=3.6, color="black")
            ax.text(0.97, 0.96, f"{db:.2f} dB", ha="right", va="top", color=color,
                    fontweight="bold" if db == max(decibels) else "normal",
                    transform=ax.transAxes, bbox={"fc": "white", "ec": "none", "pad": 1})
            ax.set(xticks=[], yticks=[],
                   ylim=(min(x.min(), 0) - 0.13 * x.abs().max(), 1.13 * x.max()))
        row[0].set_ylabel(when)
    for ax, fmt in zip(panels[0], GRIDS):
        kind = {"e2m1": "float grid", "e1m2": "uniform grid"}[fmt]
        ax.set_title(f"{fmt.upper()}, the {kind}", color=COLORS[kind_of("", fmt)])

def draw_two_by_two(fig, runs, model):
    """Four loss errors with their intervals: a line for each grid, from the RHT on
    wgrad alone to the RHT on all three GEMMs."""
    fig.suptitle("Training: neither uniform grid nor\n"
                 "rotation helps alone; the pair does", size=13)
    ax = fig.subplots()
    for (fmt, pair), shift in zip(TWO_BY_TWO.items(), (0.02, -0.02)):
        means, halves = zip(*(contrast(runs, model, {recipe: 100}) for recipe in pair))
        places = shift, 1 + shift                   # so that no bar hides another
        look = {"color": COLORS[fmt], "textcoords": "offset points", "va": "center"}
        ax.errorbar(places, means, yerr=[half or 0 for half in halves], fmt="o-",
                    color=COLORS[fmt], lw=2.5, ms=8, capsize=5)
        for at, mean, recipe, side in zip((0, 1), means, pair, ("right", "left")):
            name = f"\n{recipe}" if recipe in ("e2m1", "ufp4") else ""
            ax.annotate(f"{mean:.2f}{name}", (at, mean), (14 * (2 * at - 1), 0),
                        ha=side, fontweight="bold", **look)
        rises = means[1] > means[0]
        ax.annotate(fmt, (0.7, 0.3 * means[0] + 0.7 * means[1]), (-9 if rises else 9, 8),
                    ha="right" if rises else "left", **look)
    ax.set(xticks=(0, 1), xticklabels=[name.replace(" on ", " on\n", 1)
                                       for name in ROTATED],
           xlim=(-0.55, 1.5), ylabel="loss error above BF16, %; 95% intervals")

# The bars of the front page, and what stands under each
FRONT = {"bf16": "bf16\nno quantization", "ufp4": "ufp4\nuniform grid",
         "e2m1": "e2m1\nfloat grid", "nvfp4": "nvfp4\nafter NVIDIA"}

def draw_front(fig, runs, models):
    """A bar for each recipe of FRONT, and a hollow bar where the paper has a value."""
    ax, model = fig.subplots(), models[FRONT_MODEL]

    def label(at, height, what):
        ax.annotate(what, (at, height), (0, 4), textcoords="offset points", ha="center")

    for at, recipe in enumerate(FRONT):
        color, left = COLORS[kind_of(recipe)], at - 0.2 * (recipe in PAPER)
        found = contrast(runs, FRONT_MODEL, {recipe: 100})
        mean, half = found or (math.nan, None)
        if recipe == "bf16":
            label(at, 0, "0")
        elif math.isfinite(mean):
            ax.bar(left, mean, 0.36, yerr=half or 0, color=color, capsize=5)
            label(left, mean + (half or 0), f"{mean:.2f}")
            seeds = len(errors_of(runs, FRONT_MODEL, recipe))
            ax.text(left, 0.03, f"{seeds}\nseeds", ha="center", color="white")
        if recipe in PAPER:
            value = float(PAPER[recipe])
            ax.bar(at + 0.2, value, 0.34, facecolor="white", edgecolor=color, lw=2)
            label(at + 0.2, value, f"{value:.2f}")
    # two bars of no height, for the legend
    ax.bar(0, math.nan, color="#666666",
           label=f"measured here: {model['parameters'] / 1e6:.1f}M parameters, "
           f"{model['bytes'] / 1e6:.0f} MB of text,\nlast third of training "
           "under the recipe, 95% intervals over seeds")
    ax.bar(0, math.nan, facecolor="white", edgecolor="#666666", lw=2,
           label="the paper: 1.5B parameters")
    ours, finding = reduction(runs, [FRONT_MODEL]), "Loss error of three recipes"
    if ours:
        paper = 1 - float(PAPER["ufp4"]) / float(PAPER["e2m1"])
        finding = (f"ufp4 loses {text(ours, 0)}% less than e2m1; "
                   f"in the paper {paper:.0%}")
    ax.axhline(0, color="black", lw=0.8)
    ax.set(xticks=range(len(FRONT)), xticklabels=FRONT.values(), title=finding,
           xlim=(-0.5, len(FRONT) - 0.5), ylim=(0, 1.4 * ax.get_ylim()[1]),
           ylabel="loss error above BF16, %")
    ax.locator_params(axis="y", nbins=5)
    ax.legend(loc="upper left", frameon=False)

def curve(ax, places, contrasts, **look):
    """Means with 95% intervals at these places, in %; None is left out."""
    found = {at: c for at, c in zip(places, contrasts) if c}
    if found:
        means, halves = zip(*found.values())
        ax.errorbar(found.keys(), [100 * mean for mean in means],
                    yerr=[100 * (half or 0) for half in halves], fmt="o-", ms=6, lw=2,
                    elinewidth=1.5, capsize=4, **look)

def draw_scaling(fig, runs, models):
    """Loss error against size: left the dense models, right the mixtures of experts."""
    kinds = {"dense": [], "moe": []}
    for model in series("scaling", models):
        kinds[model.split("-")[0]].append(model)
    kinds = {kind: names for kind, names in kinds.items() if names}
    panels = fig.subplots(1, len(kinds), squeeze=False, sharey=True,
                          width_ratios=[1 + len(names) for names in kinds.values()])
    for ax, (kind, names) in zip(panels[0], kinds.items()):
        for shift, recipe in ((-0.06, "e2m1"), (0.06, "ufp4")):     # bars side by side
            curve(ax, [at + shift for at in range(len(names))],
                  [contrast(runs, model, {recipe: 1}) for model in names],
                  color=COLORS[kind_of(recipe)], label=recipe)
        part = reduction(runs, names)
        title = {"dense": "dense models", "moe": "mixtures"}[kind]
        ax.set(xticks=range(len(names)), xlim=(-0.5, len(names) - 0.5), ylim=(0, None),
               xticklabels=[f"{models[model]['active'] / 1e6:.1f}" for model in names],
               xlabel="million parameters\nthat a token uses",
               title=f"{title}: ufp4\nloses {text(part, 0)}% less" if part else title)
    panels[0, 0].set_ylabel("loss error to BF16, %")
    panels[0, 0].legend()

def draw_length(fig, runs, models):
    """Loss error against the length of the text."""
    ax = fig.subplots()
    by_length = lengths(models)
    names, places = list(by_length), list(by_length.values())
    for recipe in ("e2m1", "ufp4"):
        curve(ax, places, [contrast(runs, model, {recipe: 1}) for model in names],
              color=COLORS[kind_of(recipe)], label=recipe)
    first, last = (text(contrast(runs, model, GAP)) for model in (names[0], names[-1]))
    ax.set(xscale="log", xticks=places, xticklabels=[f"{n:.0f}" for n in places],
           ylim=(0, None), xlabel="bytes of text for each parameter (0.3M parameters)",
           ylabel="loss error to BF16, %",
           title=f"From {places[0]:.0f} to {places[-1]:.0f} bytes a parameter, e2m1 "
           f"minus ufp4\ngoes from {first}% to {last}%")
    ax.minorticks_off()
    ax.legend()

def draw_depth(fig, runs, models):
    """What the grid costs, and what shrinking costs, against depth."""
    ax = fig.subplots()
    by_depth = depths(runs, models)
    names, places = list(by_depth), list(by_depth.values())
    for name, effect, color in (("E2M1's grid", GRID, COLORS["E2M1"]),
                                ("shrinking", SHRINKING, "black")):
        curve(ax, places, [contrast(runs, model, effect) for model in names],
              color=color, label=f"effect of {name}")
    deepest = text(contrast(runs, names[-1], SHRINKING))
    ax.axhline(0, color="black", lw=0.8)
    ax.set(xscale="log", xticks=places, xticklabels=places, xlabel="blocks",
           ylabel="extra loss, % of the BF16 loss",
           title=f"At {places[-1]} blocks shrinking costs {deepest}%")
    ax.minorticks_off()
    ax.legend()

# ---- runs: what train.py has left in its folders ----
@dataclass
class Run:
    """What a folder's log.jsonl says of a run of train.py."""
    folder: Path
    settings: dict
    lines: list                                 # {"step", "train_loss", ...} of each

    @property
    def recipe(self):
        """The recipe with its overrides, and whether the run is a branch of another."""
        names = {f.name for f in fields(train.Settings)}
        values = {name: tuple(value) if isinstance(value, list) else value
                  for name, value in self.settings.items() if name in names}
        s = train.Settings(**values)
        return train.variant(s) + (", branched" if s.branch else "")

    @property
    def kind(self):
        """The key of COLORS."""
        return kind_of(self.settings["recipe"], self.settings["fmt"])

    @property
    def done(self):
        """Steps done, as far as the log goes."""
        return self.lines[-1]["step"] if self.lines else 0

    def logged(self, name):
        """{step: value} of the lines that have a value."""
        return {line["step"]: line[name] for line in self.lines
                if line.get(name) is not None}

    def errors(self, bf16):
        """{step: loss error} at the steps where both runs were validated."""
        losses = bf16.logged("val_loss") if bf16 else {}
        return {step: loss / losses[step] - 1
                for step, loss in self.logged("val_loss").items() if step in losses}

def read_run(folder):
    """The run in a folder, or None if its log.jsonl is not the log of a run. A last
    line that is half written is skipped."""
    try:
        first, *lines = train.read_log(folder / "log.jsonl")
        run = Run(folder, first["settings"], lines)
        run.settings["model"], run.settings["seed"], int(run.settings["steps"])
        run.recipe, run.kind, [int(line["step"]) for line in lines]
        return run
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None

def find_runs(folders):
    """(the runs in and under these folders, the folders whose log can't be read)"""
    found, unusable = {}, []
    for top in map(Path, folders):
        for log in sorted(top.rglob("log.jsonl")):
            folder = log.parent
            if folder.resolve() in found:
                continue
            if run := read_run(folder):
                found[folder.resolve()] = run
            else:
                unusable.append(folder)
    return list(found.values()), unusable

def bf16_run_of(run, others):
    """Of these runs the one that train.py would compare this run with, or None."""
    for other in others:
        if (other.done == run.settings["steps"] and other.logged("val_loss")
                and train.is_baseline(other.settings, run.settings)):
            return other
    return None

def paired(runs):
    """[(run, its bf16 run or None)]. Like train.py this looks in the folders beside."""
    @functools.cache
    def inside(parent):
        found = [read_run(log.parent) for log in sorted(parent.glob("*/log.jsonl"))]
        return [run for run in found if run]
    return [(run, bf16_run_of(run, inside(run.folder.resolve().parent)))
            for run in runs]

def runs_table(pairs):
    """A row for each (run, its bf16 run or None)."""
    rows = [["model", "recipe", "seed", "steps", "validation loss", "loss error",
             "noise, %", "tokens/s", "folder"]]
    for run, bf16 in pairs:
        def last(values, form):
            """The last of {step: value}, with its step if the run has gone on since."""
            if not values:
                return ""
            step, value = max(values.items())
            return form.format(value) + (f" at {step}" if step < run.done else "")
        if bf16 is None:
            error = "no bf16 run"
        elif bf16.folder.samefile(run.folder):
            error = "is the baseline"
        else:
            error = last(run.errors(bf16), "{:+.2%}")
        noise = {step: 100 * value for step, value in run.logged("noise").items()}
        speeds = run.logged("tokens_per_s").values()
        rows.append([
            run.settings["model"], run.recipe, str(run.settings["seed"]),
            f"{run.done} of {run.settings['steps']}",
            last(run.logged("val_loss"), "{:.4f}"), error, last(noise, "{:.3f}"),
            f"{statistics.median(speeds):,.0f}" if speeds else "", str(run.folder)])
    return measured(rows)

def bench_runs(args):
    """A table of the runs under args.dirs, and runs.png beside them."""
    runs, unusable = find_runs(args.dirs)
    for folder in unusable:
        print(f"{folder}: its log.jsonl is not the log of a run; skipped")
    for top in args.dirs:
        if not any(run.folder.is_relative_to(top) for run in runs):
            print(f"{top} has no run of train.py")
    if not runs:
        sys.exit("bench.py: no run to show; python train.py --recipe bf16 makes one")
    runs.sort(key=lambda run: (run.settings["model"], run.kind != "BF16", run.recipe,
                               run.settings["seed"]))
    pairs = paired(runs)
    print_table(runs_table(pairs))
    top = next(top for top in args.dirs if top.exists())
    path = (top.resolve().parent if (top / "log.jsonl").exists() else top) / "runs.png"
    figure(path, (9, 7.5), draw_runs, pairs)
    print(f"curves: {path}")

def draw_runs(fig, pairs):
    """Losses above, and below them the loss error of each run, both over the steps. A
    format has a colour, its recipes have different lines, and seeds look alike."""
    loss, error = fig.subplots(2, 1, sharex=True)
    models = sorted({run.settings["model"] for run, _ in pairs})
    looks, used, validated, trained = {}, collections.Counter(), [], []
    for run, bf16 in pairs:
        name = ", ".join([run.settings["model"]] * (len(models) > 1) + [run.recipe])
        new = name not in looks
        if new:
            line = ("-", "--", ":", "-.")[used[run.kind] % 4]
            looks[name] = {"color": COLORS[run.kind], "ls": line}
            used[run.kind] += 1
        percent = {step: 100 * value for step, value in run.errors(bf16).items()}
        for ax, curve in ((loss, run.logged("val_loss")), (error, percent)):
            ax.plot(curve.keys(), curve.values(), marker="o", ms=3.5, lw=2,
                    label=name if new else None, **looks[name])
        training = run.logged("train_loss")
        loss.plot(training.keys(), training.values(), lw=0.6, alpha=0.4,
                  color=COLORS[run.kind])
        validated += run.logged("val_loss").values()
        trained += training.values()
    if validated:                       # the first training losses would be far above
        low, high = min(validated + trained), max(validated)
        margin = 0.1 * (high - low) or 0.1
        loss.set_ylim(low - margin, high + margin)
    loss.set(ylabel="loss, nats a token",
             title=f"{', '.join(models)}: validation loss (thin: training loss)")
    loss.legend()
    error.axhline(0, color="black", lw=0.8, zorder=0)
    error.set(xlabel="steps", ylabel="loss error to BF16, %", xlim=(0, None),
              title="validation loss relative to the bf16 run with the same settings")

# ---- dispatch: what the kernels compile to on GPUs that need not be here ----
def calls():
    """{what is measured: the operands of rows and of columns, by their names}."""
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
        rows, cols = map(kernels.operand_of, calls()[name])
        TR, TC = kernels.SHAPES[rows is not None, cols is not None]
        options = {}
        constants = dict(ROWS=rows, COLS=cols, TR=TR, TC=TC, amax_ptr=None, stride_c=1)
        types = ("*bf16 *fp32 *fp32 *i32 *fp32 *i32 *fp32 *fp32 *u32 "
                 "i32 i32 i32 i32").split()
    else:
        path, block = kernels.route(RECIPES[name], arch), RECIPES[name].block
        (BM, BN, BK), options = kernels.product_shape(path, block, arch)
        codes, width = ("u8", BK // 2) if path == "fp4" else ("i32", BK // 8)
        constants = dict(PATH=path, BLOCK=block, BM=BM, BN=BN, BK=BK)
        scale = "fp8e4nv" if block == 16 else "u8"
        if block != 16:                             # no scale for the whole tensor
            constants |= {"a_t_ptr": None, "b_t_ptr": None}
        types = []
        for rows in (BM, BN):
            types += [f"tensordesc<{codes}[{rows}, {width}]>",
                      f"tensordesc<{scale}[{rows // 128}, {BK // block // 4}, 2, 256]>"]
        types += "*bf16 *fp32 *fp32 i32 i32 i32".split()
    function = getattr(kernels, kernel)
    types = dict(zip(function.arg_names, types)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names)
               if types[n][0] in "*i" and n not in ("a_t_ptr", "b_t_ptr")}
    cuda = arch.startswith("sm_")
    target = GPUTarget("hip", arch, 64)
    if cuda:
        target = GPUTarget("cuda", int(arch[3:]), 32)
    asm = kernels.triton.compile(ASTSource(function, types, constants, aligned),
                                 options=options, target=target).asm
    text = asm["ptx" if cuda else "amdgcn"]
    found = collections.Counter(re.findall(
        r"(?:tcgen05\.|\bw?g?)mma[._][^ ;]*|v_mfma\S*", text))
    names = [name.split(".f32")[0] for name in found]           # without the types
    result = {"instruction": " + ".join(names), "count": sum(found.values())}
    if not cuda:
        spills = re.search(r"vgpr_spill_count:\s*(\d+)", asm["amdgcn"])[1]
        return result | {"spills": int(spills)}
    ops = re.findall(r"\t(?:@!?U?P\w+ )?(?!NOP)([A-Z][\w.]+)", asm["sass"])
    if kernel == "quantize_kernel":
        result["per_element"] = len(ops) / (TR * TC / 128)      # 4 warps share a tile
    return result | {"spills": sum(op.startswith(("STL", "LDL")) for op in ops)}

def lowering(*call):
    """lower(*call) in a process of its own, without the interpreter.

    A compiler that fails an assertion ends its process: {"error": its last line}."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1"}
    code = ("import json, sys, bench; "
            "print(json.dumps(bench.lower(*json.loads(sys.argv[1]))))")
    done = subprocess.run([sys.executable, "-c", code, json.dumps(call)], cwd=HERE,
                          text=True, capture_output=True, env=env)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["it died"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])

def bench_dispatch(args):
    import kernels
    def product(arch, recipe):
        path = kernels.route(RECIPES[recipe], arch)
        if path == "cublas":
            return path
        r = lowering("matmul_kernel", recipe, arch)
        return r.get("error") or f"{path}: {r['instruction']}, {r['count']}"

    def quantizer(name, arch):
        r = lowering("quantize_kernel", name, arch)
        return r.get("error") or f"{r['per_element']:.1f}, {r['spills']}"

    def table(what, cell, rows, columns):
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            cells = {row: pool.map(cell, itertools.repeat(row), columns)
                     for row in rows}
        return [[f"{what} (Triton {kernels.triton.__version__})", *columns],
                *([row, *found] for row, found in cells.items())]
    finish("dispatch", {
        "dispatch": table("path: instruction, count", product,
                          ("sm_90", "sm_100", "sm_120", "gfx950"),
                          ("ufp4-e4m3", "ufp4-mx", "nvfp4", "mxfp4")),
        "quantize": table("instructions an element, spills", quantizer, calls(),
                          ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100"))})

# ---- kernels: speed on a GPU, as ratios to what that GPU can do; tune ----
def random_keys(device):
    """A key for rows and one for columns."""
    return torch.stack([ufp4.random_key(device) for _ in range(2)])

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
        return torch.ops.ufp4.quantize(x, 0, keys, *names)     # 0: the seed of signs
    on_gpu, keys = {"device": "cuda", "dtype": torch.bfloat16}, random_keys("cuda")
    x, w, y = (torch.randn(8192, 8192, **on_gpu) for _ in range(3))
    copied = 2 * x.nbytes / median(timed(lambda: y.copy_(x)))   # bytes a millisecond
    targets = "at least 0.75 (0.85)", "at least 0.55 (0.75)", "at least 0.40 (0.55)"
    for (name, names), target in zip(calls().items(), targets):
        ms = timed(lambda: quantize(names, x))
        moved = x.nbytes + sum(t.nbytes for t in quantize(names, x))
        row(f"quantize, {name}: share of copy bandwidth", target,
            moved / median(ms) / copied, ms)
    rotated = calls()["one orientation, nearest"]
    plain = [kernels.operand_name(Quantizer(ufp4.E1M2), "packed"), None]
    unrotated = median(timed(lambda: quantize(plain, x)))
    ms = timed(lambda: quantize(rotated, x))
    row("RHT + quantize in one kernel / quantize alone",
        "at most 1.06 (1.02), the paper's", median(ms) / unrotated, ms)
    h = ufp4.rht(torch.eye(16), RECIPES["ufp4"].signs).to(x)
    ms = timed(lambda: quantize(plain, (x.view(-1, 16) @ h).view(x.shape)))
    row("RHT, then quantize / quantize alone", "the paper's 1.62",
        median(ms) / unrotated, ms)
    a, b = (kernels.Packed(*quantize(rotated, t)[:2], None, rotated[0]) for t in (x, w))
    cublas = median(timed(lambda: torch.mm(x, w.T, out=y)))
    ms = timed(lambda: kernels.matmul(a, b, x.dtype))
    row("packed GEMM, decoded for cuBLAS: share of cuBLAS bf16", "at least 0.55",
        cublas / median(ms), ms)
    v, dy = (torch.randn(8192, 4096, **on_gpu) for _ in range(2))
    v.requires_grad_()
    layers = [ufp4.Linear(4096, 4096, bias=False, **on_gpu, recipe=recipe)
              for recipe in ("bf16", "ufp4")]

    def both_passes(layer):
        torch.autograd.grad(layer(v), (v, layer.weight), dy)
        torch.cuda.synchronize()

    steps = [functools.partial(both_passes, layer) for layer in layers]
    against_bf16("linear layer, forward + backward", "at most 1.30 (1.15)",
                 *interleaved(steps, 30))
    for name, target, flags in (
            ("`small`", "", "--model small"),
            ("`small`, compiled", "at most 1.6 (1.3)", "--model small --compile"),
            ("1B parameters, compiled", "at most 1.3 (1.15)",
             "--model small --layers 16 --dim 2048 --heads 16 --hidden 5632 "
             "--seq-len 2048 --batch-size 4 --compile")):
        flags += " --device cuda --dtype bfloat16"
        s = train.parse_args(flags.split())
        torch.compiler.reset()      # or a second model's sizes would be variables
        steps = [training_step(s, recipe, 50304) for recipe in ("bf16", "ufp4")]
        against_bf16(f"training step, {name}", target, *interleaved(steps, 30))
    finish("kernels", {"kernels": rows})

def bench_tune(args):
    """Times calls() in several tiles. kernels.SHAPES should have the best for one
    orientation, and for dY of a layer."""
    import kernels
    from triton.testing import do_bench
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    keys = random_keys("cuda")
    for name, names in calls().items():
        for tile in (32, 64), (64, 64), (32, 128), (64, 128), (128, 64):
            kernels.SHAPES = dict.fromkeys(kernels.SHAPES, tile)
            ms = do_bench(lambda: torch.ops.ufp4.quantize(x, 0, keys, *names),
                          return_mode="all")
            print(f"{spread(ms, '{:.3f}')} ms: {name}, {tile}", flush=True)

# ---- plan: what a run costs, counted, not measured ----
# Peaks in TFLOP/s without sparsity, by path of kernels.route; a path that is not here
# multiplies in BF16. From NVIDIA's data sheets of the H200 and, an eighth, the HGX B200
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
    cast = s.layers if recipe.fmt is None else s.keep_bf16      # that multiply in BF16
    # Numbers of a token in a block that the backward pass needs. The layers' inputs are
    # in 4 bits if quantized. In BF16 are qkv, the turned q and k, attention's output,
    # of an MLP gate, up and silu(gate), and what a mixture sums; in float32 the two
    # norms' inputs and outputs
    mlps = s.top_k + 1                                  # with the shared or only one
    inputs = 2 * s.dim + mlps * (s.dim + s.hidden)
    bf16 = 6 * s.dim + 3 * mlps * s.hidden + s.top_k * s.dim
    scale = 4 if recipe.scale is ufp4.scale_fp32 else 1     # bytes a block
    kept = 2 if recipe.fmt is None else 0.5 + scale / recipe.block
    block = kept * inputs + 2 * bf16 + 4 * 4 * s.dim
    blocks = 4 * s.dim * s.layers + block if s.remat else block * s.layers
    tokens = s.batch_size * s.seq_len // (gpus * s.grad_accum)
    cast_layers = min(1, cast) if s.remat else cast
    outside = total - s.layers * layer                      # embedding, head and norm
    sizes = {
        "weights, gradients and AdamW's state": 16 * total / gpus,
        # by FSDP: what is outside, with gradients; two blocks, and the gradient of one
        "gathered": 4 * (2 * outside + 3 * layer) * (gpus > 1),
        "weights cast to BF16": 2 * (model.lm_head.weight.numel()
                                     + layer * cast_layers),
        f"activations of {tokens} tokens": tokens * (
            blocks + 10 * (s.dim + vocabulary(s.data)))}
    print(f"{s.model}, {train.variant(s)}, {gpus} GPUs: {total / 1e9:.3f}B parameters, "
          f"{active / 1e9:.3f}B active a token, {flops / 1e9:.3f} GFLOPs a token, "
          f"{quantized / flops:.0%} of them in quantized layers other than experts")
    for name, size in [*sizes.items(), ("together", sum(sizes.values()))]:
        print(f"{name:37}{size / 2**30:10.2f} GiB a GPU")
    try:
        import kernels
    except ImportError as e:
        print(f"bounds on speed depend on the kernels, which cannot be imported: {e}")
        return
    for gpu, (arch, peaks) in PEAKS.items():
        path = kernels.route(recipe, arch)              # experts' products are in BF16
        seconds = quantized / peaks.get(path, peaks["bf16"])
        seconds += (flops - quantized) / peaks["bf16"]
        print(f"at most {gpus * 1e12 / seconds:,.0f} tokens/s on {gpu}, path {path} "
              f"({arch})")

def main(argv=None):
    # Saving warns of this, but one process needs none
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    parser = argparse.ArgumentParser(description="Each claim, one command.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", add_help=False, help="takes the flags of train.py")
    p = commands.add_parser("plan", allow_abbrev=False,
                            help="takes the flags of train.py too")
    p.add_argument("--gpus", type=train.positive, default=1, metavar="N")
    p = commands.add_parser("runs", help="your runs of train.py: a table and curves")
    p.add_argument("dirs", nargs="*", type=Path, default=[Path("out")], metavar="DIR",
                   help="a run's folder, or one that holds runs (default: out)")
    for name in ("bias", "sqnr", "cpu", "dispatch", "kernels", "tune", "readme",
                 "hero"):
        commands.add_parser(name)
    p = commands.add_parser("study", allow_abbrev=False,
                            epilog="More flags are for train.py.")
    p.add_argument("studies", nargs="+", choices=STUDIES)
    p.add_argument("--models", nargs="+", choices=MODELS, help="some of them")
    p.add_argument("--rows", nargs="+", choices=RECIPES, help="these recipes")
    p.add_argument("--seeds", type=train.positive, metavar="N")
    p.add_argument("--jobs", type=train.positive, metavar="N", help="runs at a time",
                   default=1 if torch.cuda.is_available() else os.cpu_count())
    args, rest = parser.parse_known_args(argv)
    has_bf16 = train.GPU or train.hardware("cpu")[1]
    if args.command in ("train", "sqnr", "study") and not has_bf16:
        bf16_by_float32()
    if args.command == "train":
        return train.main(rest)
    studies = args.command == "study"
    args.train = ["--dtype", "bfloat16", *rest] if studies else rest
    # A study with other rows or flags has files of its own
    own = [*(args.rows or []), *rest] if studies else rest
    args.label = re.sub(r"\W+", "-", " ".join(["", *own]))
    args.name, args.runs = "runs" + args.label, HERE / "out" / f"bench{args.label}"
    if rest and args.command != "plan" and not studies:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if args.command in ("kernels", "tune"):
        os.environ["UFP4_BACKEND"] = "triton"       # an error rather than the reference
        if not torch.cuda.is_available():
            parser.error("this measures a GPU, and torch finds none here; see dispatch")
    try:
        globals()[f"bench_{args.command}"](args)
    except ValueError as e:
        sys.exit(f"bench.py: {e}")

if __name__ == "__main__":
    main()
