"""Each claim, one command: what is measured, its table, its figure.

    python bench.py study quick     the paper's finding on a laptop (5 min)
    python bench.py study loss      formats and scales: how much recipes raise the loss
    python bench.py study scaling   by size, 20 bytes of text per parameter
    python bench.py study small     the finding at 26M parameters, for a GPU
    python bench.py study length    by the length of the text
    python bench.py study depth     by depth: does shrinkage compound?
    python bench.py study dose      noise and shrinkage in doses: which raises the loss?
    python bench.py study norms     the same shrinkage in a model without norms
    python bench.py study ablate    one change at a time, as in the paper's search
    python bench.py study nano      more of them, on a larger model and less text
    python bench.py study rht-block   the size of the Hadamard matrix
    python bench.py study repair    what lowers the loss error most
    python bench.py study use       weights trained under one recipe, used under another
    python bench.py study early     the finding, with 4 bits right after warm-up
    python bench.py study early-changes     single changes, from there
    python bench.py study heal      how many steps of BF16 at the end undo the error
    python bench.py study switch    trained otherwise, with the last steps in E2M1
    python bench.py study scales    block scales that hardware has, or will have
    python bench.py use RUN     the weights of a run of yours under other recipes
    python bench.py sqnr DIR    which grid suits the tensors of a run, and the RHT
    python bench.py lm MODEL    a language model of Hugging Face's under each recipe
                                (20 min for 135M parameters)
    python bench.py cpu         what emulation takes on this CPU (4 min)
    python bench.py dispatch    what the kernels compile to on GPUs not here (2 min)
    python bench.py kernels     their speed on this GPU, against copying and cuBLAS
    python bench.py runs        your own runs of train.py, as a table and as curves
    python bench.py train       train.py with the recipes below besides its own
    python bench.py readme      tables and figures again, from the records

`study` and `train` take `--with mine.py`, a file that adds recipes of yours. So
`study quick --with mine.py --rows ufp4 mine` measures your recipe beside ufp4. All
studies but quick take hours. They keep each run, and go on after Ctrl-C. More flags are
for train.py: `study loss --seeds 2 --steps 300` is a quick look.

What is measured goes to out/bench, in the folder where you stand. With --record it goes
to data/results beside this file, and from there into the README.md there.
"""
import argparse
import collections
import concurrent.futures
import difflib
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import types
import warnings
import zlib
from dataclasses import dataclass, fields, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))       # train.py and ufp4.py are those beside this file
import train                        # before torch: it sets how CPU threads wait

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import ufp4
# data/prepare.py, which train.py imports under this name
from ufp4_prepare import encode, prepare, read_tokens, vocabulary
from ufp4 import FORMATS, GEMMS, RECIPES, Quantizer, Recipe

# Runs and what is measured go to where one stands, as those of train.py do
RECORDS, OUT = HERE / "data" / "results", Path("out") / "bench"

# ---- Records, tables and figures ----

def machine():
    """What measures, and the commit of the code that it runs."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu, has_bf16 = train.hardware("cpu")
    return {"cpu": cpu, "has_bf16": has_bf16, "cores": os.cpu_count(), "gpu": gpu,
            "torch": torch.__version__, "python": platform.python_version(),
            "commit": train.git_commit()}

def save(path, results):
    """Write a dict as JSON, a line for each record."""
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in results.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".tmp")
    part.write_text("{" + lines.replace("[{", "[\n{").replace("}, {", "},\n{") + "}\n")
    os.replace(part, path)

def read(name):
    return json.loads((RECORDS / f"{name}.json").read_text())

def print_table(rows):
    """Print rows of text in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    print()

def finish(args, name, tables, more={}):
    """Print the tables {marker in the page: rows of text, the head first}. Save them
    with what is behind them as NAME.json. Returns the folder that it is in."""
    for rows in tables.values():
        print_table(rows)
    folder = RECORDS if args.record else OUT
    save(folder / f"{name}.json", {**more, "machine": machine(), "tables": tables})
    if args.record:
        fill_page()
    print(f"saved in {folder}")
    return folder

def fill_page():
    """Put the tables of the records into their README.md, between <!-- NAME --> and
    <!-- /NAME -->."""
    page, results = RECORDS / "README.md", Results(read("runs"))
    tables = corrected(results, page_tables)
    for path in RECORDS.glob("*.json"):
        tables |= json.loads(path.read_text()).get("tables", {})

    def block(found):
        head, *rows = tables[found[1]]
        lines = ["| " + " | ".join(row) + " |"
                 for row in (head, ["---"] * len(head), *rows)]
        return "\n".join([f"<!-- {found[1]} -->", *lines, f"<!-- /{found[1]} -->"])

    page.write_text(re.sub(r"<!-- (\S+) -->\n.*?<!-- /\1 -->", block, page.read_text(),
                           flags=re.S))

def text(measured, digits=2):
    """(mean, half-width of its interval) as a cell in %; blank for None."""
    if measured is None:
        return ""
    mean, half = measured
    cell = f"{round(100 * mean, digits) + 0.0:.{digits}f}"      # + 0.0: not "-0.00"
    return cell if half is None else f"{cell} ± {100 * half:.{digits}f}"

def last_line(said):
    """The last line that a process has said. A progress bar ends its line with \\r."""
    return (said.strip().splitlines() or ["it died without a word"])[-1]

def figure(path, size, draw, *given):
    """draw(fig, *given) on a figure of (width, height) inches, into a file."""
    import matplotlib
    from matplotlib.figure import Figure
    with matplotlib.rc_context({"font.size": 12, "axes.titlesize": 12,
                                "axes.spines.top": False, "axes.spines.right": False}):
        fig = Figure(figsize=size, layout="constrained")
        draw(fig, *given)
        fig.savefig(path, dpi=120)
    print(f"figure: {os.path.relpath(path)}")

# ---- Experiments: recipes beside those of ufp4.py ----

@dataclass(eq=False)
class Sloped(Quantizer):
    """Rounds to nearest, and then rescales so that <Q(x), x> / <x, x> is `slope`.

    What is rounded stochastically stays as it is."""
    slope: float = 1.0

    def __call__(self, x, rand=None):
        q = super().__call__(x, rand)
        if self.stochastic:
            return q
        x = Quantizer(None, signs=self.signs)(x).double()
        product = (q * x).sum().clamp(min=1e-300)           # not 0, if all are zeros
        return q * (self.slope * x.square().sum() / product).float()

@dataclass(eq=False)
class Noisy(Quantizer):
    """Adds Gaussian noise to Q(x), so that the error has `times` its own power, in each
    block."""
    times: float = 1.0

    def __call__(self, x, rand=None):
        q = super().__call__(x, rand)
        error = q - Quantizer(None, signs=self.signs)(x)
        power = error.unflatten(-1, (-1, self.block)).square().mean(-1, keepdim=True)
        noise = torch.randn_like(q).unflatten(-1, (-1, self.block))
        return q + ((self.times - 1) * power).sqrt().mul(noise).flatten(-2)

@dataclass
class Experiment(Recipe):
    """A recipe with another quantizer in some places: in GEMMs, or for pairs of an
    operand and a GEMM. Its class is `kind`, and it has the fields in `given`."""
    places: tuple = GEMMS
    kind: type = Quantizer
    given: dict = None

    def quantizer(self, operand, gemm):
        q = super().quantizer(operand, gemm)
        if gemm in self.places or (operand, gemm) in self.places:
            q = self.kind(**vars(q) | self.given)
        return q

def experiment(name, like, places=GEMMS, kind=Quantizer, **given):
    """Add such a recipe to RECIPES."""
    copied = {f.name: getattr(RECIPES[like], f.name) for f in fields(Recipe)}
    RECIPES[name] = Experiment(**copied | {"name": name}, places=places, kind=kind,
                               given=given)

@dataclass(eq=False)
class Choosing(Quantizer):
    """Each block takes the format, fmt or other, that has the smaller squared error.

    The error is that of rounding to nearest. Under SR a choice by the error of the
    random result would bias it."""
    other: ufp4.Format = ufp4.E1M2

    def levels_and_scales(self, x, rand=None):
        found, errors = [], []
        for fmt in (self.fmt, self.other):
            nearest = Quantizer(fmt, self.scale, self.block)
            level, s = nearest.levels_and_scales(x)
            error = (level * s).flatten(-2) - x
            errors.append(error.square().unflatten(-1, (-1, self.block)).sum(-1, True))
            if self.stochastic:
                q = Quantizer(fmt, self.scale, self.block, stochastic=True)
                level, s = q.levels_and_scales(x, rand)
            found.append((level, s))
        (level, s), (other_level, other_s) = found
        other = errors[1] < errors[0]
        return torch.where(other, other_level, level), torch.where(other, other_s, s)

# ---- Other block scales, as rules like those of ufp4.py ----

def scale_power(amax, g_max):
    """The power of two that is nearest to amax / g_max, by its logarithm."""
    s = torch.exp2(torch.log2(amax / g_max).round().clamp(-126, 127))
    return torch.where(amax < math.inf, s, math.nan)

def scale_hif4(amax, g_max):
    """The scales of HiFloat4 (arXiv 2602.11287), for blocks of 4.

    64 numbers share s, in E6M2: an 8-bit float without a sign, with three significant
    bits. The largest of them becomes the largest level times 4 s. Of each 8 numbers one
    bit says whether their scale is 2 s. It is, if their largest is at least 4 s. Of
    each 4 numbers one bit says whether theirs is twice as large again. It is, if their
    largest is at least twice their scale. In all these are 4.5 bits a number."""
    n = amax.shape[-2]                                      # amax (..., K/4, 1)
    of_4 = F.pad(amax, (0, 0, 0, -n % 16)).unflatten(-2, (-1, 8, 2))
    of_8 = of_4.amax(-2, keepdim=True)
    of_64 = of_8.amax(-3, keepdim=True)                     # (..., K/64, 1, 1, 1)
    mantissa, exponent = torch.frexp(of_64 / (4 * g_max))
    s = torch.ldexp((8 * mantissa).round() / 8, exponent).clamp(2.0**-48, 49152.0)
    s = torch.where(of_64 < math.inf, s, math.nan)
    s = torch.where(of_8 >= 4 * s, 2 * s, s)
    s = torch.where(of_4 >= 2 * s, 2 * s, s)
    return s.flatten(-4, -2)[..., :n, :]

# E2M1 that does not shrink, and E1M2 that shrinks as E2M1 does on Gaussian data
for like in ("e2m1", "e2m1-full-rht"):
    experiment(f"{like}-debiased", like, kind=Sloped, slope=1.0)
experiment("ufp4-shrunk", "ufp4", kind=Sloped, slope=0.996)
for gemm in GEMMS:
    experiment(f"ufp4-{gemm}-in-e2m1", "ufp4", (gemm,), fmt=ufp4.E2M1)
# E2M1 up to 2, 3 or 4, where it is uniform or nearly so. Can that replace a uniform
# format? (Section 4 of the paper, Q4)
for top in (2, 3, 4):
    fmt = ufp4.Format(f"e2m1-max{top}", tuple(v for v in ufp4.E2M1.levels if v <= top))
    experiment(fmt.name, "e2m1-full-rht", fmt=fmt)
experiment("e2m1-max4-rht-wgrad", "e2m1", fmt=fmt)
# Its largest number at level 6 or at level 4, in each block (arXiv 2512.02010)
experiment("four-over-six", "e2m1", kind=Choosing, other=fmt)
# Doses: more noise in fprop; a smaller slope in fprop, or wherever rounding is to
# nearest
for times in (1.25, 1.5, 2, 3):
    experiment(f"ufp4-noise-{times}", "ufp4", ("fprop",), Noisy, times=times)
for slope in (0.996, 0.98, 0.95, 0.9):
    experiment(f"ufp4-slope-{slope}", "ufp4", ("fprop",), Sloped, slope=slope)
for slope in (0.98, 0.9):
    experiment(f"ufp4-slope-{slope}-all", "ufp4", kind=Sloped, slope=slope)
# SR for one operand of one GEMM more than dY
for like in ("ufp4", "e2m1"):
    for place in (("x", "wgrad"), ("w", "dgrad")):
        experiment(f"{like}-sr-dy-{'-'.join(place)}", like, (place,), stochastic=True)
# Square tiles of W share a scale
experiment("e2m1-tiles", "e2m1", (("w", "fprop"), ("w", "dgrad")),
           scale=ufp4.Tiles(ufp4.scale_fp32))
# W in 4 bits; X in fprop is not rounded
for like in ("e2m1", "e2m1-full-rht", "ufp4"):
    experiment(f"{like}-weights", like, (("x", "fprop"),), fmt=None)
# Other scales under the uniform grid
experiment("ufp4-mx-nearest", "ufp4-mx", scale=scale_power)
experiment("ufp4-hif4", "ufp4", scale=scale_hif4, block=4)
# A rotation without random signs
experiment("ufp4-no-signs", "ufp4", signs=16 * (1.0,))
OURS = dict(RECIPES)                    # without those of a user's file

NORM = nn.RMSNorm

class NoNorm(nn.RMSNorm):
    """Stands for a norm: times a constant, which nothing divides out again. With 7 a
    model of 2 blocks trains as well as with norms."""

    def forward(self, x):
        return 7 * self.weight * x

def set_norms(model):
    """Make models of this process with norms, or those of `no-norms` without."""
    train.nn.RMSNorm = NoNorm if model == "no-norms" else NORM

# ---- Studies as data: models, rows, and which rows on which models ----

def sized(preset, layers, dim, heads, hidden, steps):
    """Flags of train.py for a model. The learning rate falls with the square root of
    the width."""
    lr = 3e-3 * (128 / dim) ** 0.5
    return (f"--model {preset} --layers {layers} --dim {dim} --heads {heads} "
            f"--hidden {hidden} --steps {steps} --lr {lr:.3g}").split()

# By kind, and by how many parameters a token uses. They read 20 bytes per parameter,
# or as many as stand at the end of the name
MODELS = {"nano": ["--model", "nano"],
          "small": "--model small --steps 1500 --compile".split(),
          "dense-0.1m": sized("nano", 2, 64, 2, 176, 1303),
          "dense-0.3m": sized("nano", 2, 96, 3, 256, 2645),
          "dense-0.3m-2": sized("nano", 2, 96, 3, 256, 264),
          "dense-0.3m-6": sized("nano", 2, 96, 3, 256, 793),
          "dense-0.3m-60": sized("nano", 2, 96, 3, 256, 7934),
          "dense-0.9m": sized("nano", 4, 128, 4, 352, 8491),
          "moe-0.3m": sized("nano-moe", 2, 96, 3, 64, 2675),
          "no-norms-0.3m": sized("no-norms", 2, 96, 3, 256, 2645),
          "all-128": sized("nano", 2, 128, 4, 384, 800)}    # multiples of 128
train.PRESETS["no-norms"] = train.NANO
DEPTHS = (2, 4, 8, 16, 32)          # blocks. All read the same text
MODELS |= {f"depth-{n}": sized("nano", n, 64, 2, 176, 800) for n in DEPTHS}
SCALING = ("dense-0.1m", "dense-0.3m", "dense-0.9m", "moe-0.3m")

# What train.py is told for a row of a table. A recipe's own name needs nothing here
ROWS = {f"{recipe}-{field}-{value.replace(',', '-')}":
        f"--recipe {recipe} --{field} {value}"
        for recipe, field, *values in (
            ("ufp4", "rht", "none", "wgrad", "dgrad,wgrad", "fprop,wgrad"),
            ("e2m1", "rht", "none", "dgrad,wgrad", "fprop,wgrad"),
            ("ufp4", "sr", "none", "x,dy", "x,w,dy"), ("e2m1", "sr", "none"),
            ("ufp4", "rht-block", "32", "64", "128"), ("ufp4-mx", "block", "16"),
            ("ufp4-weights", "rht", "wgrad")) for value in values}

# What might lower a recipe's loss error. A late change is made for the last sixth, or
# for as many steps as it says
REPAIRS = {"fprop-bf16": "--gemms dgrad,wgrad",
           "late-fprop-bf16": "--gemms dgrad,wgrad", "late-bf16": "--recipe bf16",
           "last-block-bf16": "--keep-bf16 1", "first-block-bf16": "--keep-bf16 -1"}
REPAIRED = ("ufp4", "nvfp4")
HEALED, HEALINGS = ("e2m1", "ufp4", "nvfp4"), (10, 30, 100, 440)
for recipe in HEALED:
    ROWS |= {f"{recipe}-{what}": f"--recipe {recipe} {flags}"
             for what, flags in REPAIRS.items()}
    ROWS |= {f"{recipe}-late-bf16-{steps}": "--recipe bf16" for steps in HEALINGS}
# Weights that will be used in E2M1, trained otherwise, but for the last steps. Written
# down before the runs: if a hundred steps bring those of ufp4 to within 0.1% of those
# of e2m1, a run need not be in the format of its use. If bf16's get as far, it need not
# be in 4 bits at all
SWITCHES = [f"{recipe}-late-e2m1-{steps}" for recipe in ("ufp4", "bf16")
            for steps in (30, 100)]
ROWS |= {row: "--recipe e2m1" for row in SWITCHES}

def row_flags(row):
    """A row is called by a recipe, by a name in ROWS, or as in "ufp4 --keep-bf16 1"."""
    return ROWS.get(row, f"--recipe {row}").split()

# {format: its row with the RHT on wgrad alone, and with the RHT on all three GEMMs}
TWO_BY_TWO = {"e2m1": ("e2m1", "e2m1-full-rht"), "e1m2": ("ufp4-rht-wgrad", "ufp4")}
SQUARE = sum(TWO_BY_TWO.values(), ())           # the four rows of the two by two
# Rows that start right after warm-up, not at the last third
EARLY = [f"{row}-early" for row in SQUARE]
EARLY_CHANGES = {f"{recipe}-early": [f"{recipe}-{what}-early" for what in whats]
                 for recipe, whats in (("ufp4", ("sr-none", "rht-fprop", "fprop-bf16")),
                                       ("e2m1", ("sr-none", "rht-none", "fprop-bf16")))}
ROWS["ufp4-rht-fprop"] = "--recipe ufp4 --rht fprop"
for row in (*EARLY, *sum(EARLY_CHANGES.values(), [])):
    ROWS[row] = " ".join(row_flags(row.removesuffix("-early")))
# What trained weights are used under. In a forward pass only fprop matters: ufp4 is
# E1M2 rotated, ufp4-rht-wgrad E1M2 not rotated, e2m1-full-rht and e2m1 the same of E2M1
TRAINED = (*SQUARE, "nvfp4", "ufp4-e4m3")
USES = ("bf16", *TRAINED, "e2m1-weights", "ufp4-weights-rht-wgrad")
SHORT_TEXTS = "validation text", "other code"       # 500 windows of each
# With the RHT on all three GEMMs: E2M1, which shrinks or does not, and E1M2
CAUSES = ("e2m1-full-rht", "e2m1-full-rht-debiased", "ufp4-shrunk", "ufp4")
DOSES = ("ufp4", "ufp4-noise-1.25", "ufp4-noise-1.5", "ufp4-noise-2", "ufp4-noise-3")
GAP = {"e2m1": 1, "ufp4": -1}
PAIRS = {"dense-0.1m": "0.1M", "dense-0.3m": "0.3M",
         "nano": "`nano`", "small-training": "26M, training loss"}
# What both changes of the baseline do beyond the sum of both alone
INTERACTION = {"ufp4": 1, "ufp4-rht-wgrad": -1, "e2m1-full-rht": -1, "e2m1": 1}
CHANGES = {"uniform grid alone": {"ufp4-rht-wgrad": 1, "e2m1": -1},
           "full rotation alone": {"e2m1-full-rht": 1, "e2m1": -1},
           "both": {"ufp4": 1, "e2m1": -1}, "interaction": INTERACTION}

@dataclass
class Study:
    """Rows on models. The table of one model has a line a row, and the difference to
    the row that its group is called after. The table of several models has a line a
    model, and a column a row and effect."""
    models: dict                    # {model: how the table calls it}, or just models
    groups: dict                    # {row: the rows that are compared with it}. These
                                    # may be {row: what the paper says of it}
    effects: dict = None            # {name: {row: weight}}
    beyond: bool = False            # whether there is a column of beyond_line()
    what: str = "model"             # what the models are called by
    seeds: range = range(5)
    uses: tuple = ()                # rows under which the trained weights are validated
                                    # on SHORT_TEXTS, besides BF16 on the whole text
    averaged: tuple = ()            # rows whose weights are averaged at the end

    @property
    def rows(self):
        return tuple(row for rows in self.groups.values() for row in rows)

STUDIES = {
    "quick": Study(("nano",), {"ufp4": SQUARE}, seeds=range(1)),
    "small": Study(("small",), {"ufp4": SQUARE}),
    "loss": Study(("dense-0.3m",), {
        "ufp4": ("ufp4", "ufp4-rht-wgrad", "e2m1", "e2m1-full-rht"),
        "nvfp4": ("nvfp4", "ufp4-e4m3"),
        "mxfp4": ("mxfp4", "ufp4-mx")}, beyond=True),
    "scaling": Study({name: name for name in SCALING}, {
        "ufp4": ("ufp4", "ufp4-rht-wgrad", "e2m1", "e2m1-full-rht", "nvfp4")},
        {"`e2m1` minus `ufp4`, %": GAP}),
    "length": Study({"dense-0.3m-2": 2, "dense-0.3m-6": 6, "dense-0.3m": 20,
                     "dense-0.3m-60": 60}, {"ufp4": ("ufp4", "e2m1")},
                    {"`e2m1` minus `ufp4`, %": GAP}, what="bytes per parameter"),
    "depth": Study({f"depth-{n}": n for n in DEPTHS}, {"ufp4": CAUSES}, {
        "effect of the grid, %": dict(zip(CAUSES, (.5, .5, -.5, -.5))),
        "effect of shrinking, %": dict(zip(CAUSES, (.5, -.5, .5, -.5)))},
        what="blocks"),
    "dose": Study(("dense-0.3m",), {
        "ufp4": (*DOSES, "ufp4-slope-0.996", "ufp4-slope-0.98", "ufp4-slope-0.95",
                 "ufp4-slope-0.9", "ufp4-shrunk", "ufp4-slope-0.98-all",
                 "ufp4-slope-0.9-all"),
        "e2m1": ("e2m1", "e2m1-debiased"),
        "e2m1-full-rht": ("e2m1-full-rht", "e2m1-full-rht-debiased")}, beyond=True),
    "norms": Study({"dense-0.3m": "with norms", "no-norms-0.3m": "without norms"},
                   {"ufp4": ("ufp4", "ufp4-slope-0.98", "ufp4-slope-0.9")},
                   {f"slope {slope} minus `ufp4`, %": {f"ufp4-slope-{slope}": 1,
                                                       "ufp4": -1}
                    for slope in (0.98, 0.9)}),
    # What the paper says: its search at 0.6B (Appendix B) in words, its ablation at
    # 1.5B (Q4) in numbers
    "ablate": Study(("dense-0.3m",), {
        "e2m1": {"e2m1": "", "e2m1-rht-none": "hurts",
                 "e2m1-rht-dgrad-wgrad": "hurts in the end",
                 "e2m1-rht-fprop-wgrad": "hurts", "e2m1-full-rht": "hurts",
                 "e2m1-max4-rht-wgrad": "not chosen", "e2m1-sr-none": "hurts",
                 "e2m1-sr-dy-x-wgrad": "hurts a little",
                 "e2m1-sr-dy-w-dgrad": "hurts a little", "e2m1-tiles": "not chosen"},
        "ufp4": {"ufp4": "", "ufp4-rht-none": "+0.60", "ufp4-rht-wgrad": "+0.34",
                 "ufp4-rht-dgrad-wgrad": "+0.44", "ufp4-rht-fprop-wgrad": "+0.25",
                 "ufp4-no-signs": "", "ufp4-sr-none": "+0.24",
                 "ufp4-sr-dy-x-wgrad": "", "ufp4-sr-dy-w-dgrad": ""}}),
    "rht-block": Study(("all-128",), {
        "ufp4": ("ufp4", "ufp4-rht-block-32", "ufp4-rht-block-64",
                 "ufp4-rht-block-128")}),
    "nano": Study(("nano",), {
        "ufp4": ("ufp4", "e2m1", "ufp4-rht-wgrad", "e2m1-full-rht", "ufp4-sr-none",
                 "ufp4-sr-x-dy", "ufp4-sr-x-w-dy", "ufp4-fprop-in-e2m1",
                 "ufp4-dgrad-in-e2m1", "ufp4-wgrad-in-e2m1", "e2m1-max2", "e2m1-max3",
                 "e2m1-max4")}),
    "repair": Study(("dense-0.3m",), {
        recipe: (recipe, *(f"{recipe}-{what}" for what in REPAIRS))
        for recipe in REPAIRED}),
    # The others have the seeds 0 to 4. These are new ones, so that what both have
    # measured can be taken together
    "use": Study(("dense-0.3m",), {"ufp4": TRAINED}, seeds=range(5, 10), uses=USES),
    "heal": Study(("dense-0.3m",), {
        recipe: (recipe, *(f"{recipe}-late-bf16-{steps}" for steps in HEALINGS))
        for recipe in HEALED}, seeds=range(5, 10), averaged=("bf16", *HEALED)),
    "switch": Study(("dense-0.3m",), {"e2m1": ("e2m1", *SWITCHES)}, seeds=range(5, 10)),
    "early": Study(("dense-0.3m",), {"ufp4-early": EARLY}, seeds=range(5, 10)),
    "early-changes": Study(("dense-0.3m",), {
        row: (row, *changes) for row, changes in EARLY_CHANGES.items()},
        seeds=range(5, 10)),
    "scales": Study(("dense-0.3m",), {
        "ufp4": ("ufp4", "ufp4-e4m3", "ufp4-hif4", "ufp4-mx", "ufp4-mx-nearest",
                 "ufp4-mx-block-16"),
        "e2m1": ("e2m1", "four-over-six"), "mxfp4": ("mxfp4",)},
        seeds=range(5, 10))}

# ---- Jobs: a job is a process of train.py that leaves a result ----

def start_of(row, s):
    """-> (the row from whose checkpoint a row starts, the step of that), with settings
    s. A row trains the last third of the steps, from the bf16 run with its seed. This
    cancels most of what differs from seed to seed by chance. An early row starts right
    after warm-up. A late row starts from the recipe that it changes."""
    if row == "bf16":
        return None, 0
    base, late, change = row.partition("-late-")
    if late:
        steps = change.rpartition("-")[2]
        return base, (s.steps - int(steps) if steps.isdigit()
                      else 5 * math.ceil(s.steps / 6))      # for the last sixth
    return "bf16", s.warmup if row.endswith("-early") else 2 * s.steps // 3

def averaged_steps(s):
    """The steps whose weights are averaged: eight, evenly over the last tenth."""
    return [s.steps - n * (s.steps // 80) for n in range(8)]

class Job:
    """A row on a model with a seed. Its folder has what it has found: result.json, of
    training, and used.json, of its weights under other recipes."""

    def __init__(self, args, jobs, model, row, seed):
        self.key = self.model, self.row, self.seed = model, row, seed
        flags = [*MODELS[model], *row_flags(row), "--seed", str(seed), *args.train]
        self.settings = s = train.parse_args(flags)
        base, self.first = start_of(row, s)
        self.base = None
        if base:
            self.base = job_of(args, jobs, model, base, seed)
            if not self.base.first < self.first < s.steps:
                raise ValueError(f"{row} starts at step {self.first} of {s.steps}, and "
                                 f"{base} at {self.base.first}: it needs more --steps")
            self.base.kept.add(self.first)
        self.wave = self.base.wave + 1 if base else 0
        self.steps = s.steps - self.first               # its own
        self.kept = {s.steps}       # steps whose checkpoints are needed
        self.uses = {}              # {text: rows under which its weights are validated}
        # It validates once, at the end: on the whole text, and in `quick` on a quarter
        self.windows = (len(read_tokens(prepare(s.data)[1])) - 1) // s.seq_len
        if args.study == "quick":
            self.windows = max(1, self.windows // 4)
        flags += f"--eval-interval 0 --eval-windows {self.windows} --with".split()
        # "" is no file. A resumed run would take that of the run that it starts from
        flags.append(str(args.file) if row.split()[0] not in OURS and row not in ROWS
                     else "")
        # What a run computes is in the name of its folder: its flags and their files
        files = [Path(text).read_bytes() for text in flags if Path(text).is_file()]
        mark = zlib.crc32(b"".join([" ".join(flags).encode(), *files]))
        name = re.sub(r"[^\w.]+", "-", f"{model}-{row}")
        self.folder = OUT / "runs" / f"{name}-s{seed}-{mark:08x}"
        self.flags = [*flags, "--out", str(self.folder)]

    def saved(self, step):
        return self.folder / f"ckpt-{step:07d}"

    def command(self):
        """The command line: the one place that knows how train.py is called."""
        flags = [*self.flags, "--save-at", ",".join(map(str, sorted(self.kept)))]
        if train.checkpoints(self.folder):              # an earlier command was stopped
            flags += ["--resume", str(self.folder)]
        else:                   # it may have left a log, though no checkpoint
            flags.append("--overwrite")
            if self.base:
                flags += ["--resume", str(self.base.saved(self.first))]
        return [sys.executable, __file__, "train", *flags]

    def found(self, name):
        """What it has left in a file, or {}."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def result(self):
        """What the run has found, or None as long as something is missing."""
        result, used = self.found("result"), self.found("used")
        if not result or (result["loss"] and (self.lacking() or self.unused())):
            return None
        return result | {"used": used}

    def lacking(self):
        """The steps whose checkpoints are needed and not there."""
        there = train.checkpoints(self.folder)
        return [step for step in self.kept if self.saved(step) not in there]

    def unused(self):
        """{text: the rows under which its weights are still to be validated}."""
        used = self.found("used")
        missing = {text: [row for row in rows if row not in used.get(text, {})]
                   for text, rows in self.uses.items()}
        return {text: rows for text, rows in missing.items() if rows}

    def done(self):
        """How many of its steps are done."""
        try:
            *_, last = train.read_log(self.folder / "log.jsonl")
        except (OSError, ValueError):                   # it has not begun
            return 0
        return max(0, last.get("step", 0) - self.first)

    def made_by(self):
        """machine(), with the commit and torch with which it was trained."""
        header, *_ = train.read_log(self.folder / "log.jsonl")
        return machine() | {name: header.get(name) for name in ("commit", "torch")}

    def gaps(self):
        """By what part of BF16's its training loss is higher, in each eighth of its
        steps; None if it does not start from the bf16 run, or has too few lines in its
        log. Both read the same text."""
        if not (self.base and self.base.row == "bf16" and self.found("result")["loss"]):
            return None
        ours, theirs = (logged(train.read_log(job.folder / "log.jsonl"), "train_loss")
                        for job in (self, self.base))
        # Only those that each run logs. A checkpoint comes with a line of its own, too
        steps = [step for step in ours if step > self.first and step in theirs
                 and step % self.settings.log_interval == 0]
        if len(steps) < 8:
            return None
        return [sum(map(ours.get, part)) / sum(map(theirs.get, part)) - 1
                for part in np.array_split(steps, 8)]

    def run(self, threads):
        """Train and validate, unless that is done. RuntimeError if it fails. A loss
        that diverges is a result: None."""
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}

        def process(command):
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            said = last_line(done.stderr).removeprefix("train.py: ")
            diverged = done.returncode == 3 and self.row != "bf16"
            if done.returncode and not diverged:
                raise RuntimeError(f"{self.model}, {self.row}, seed {self.seed}: "
                                   f"{said}")
            return diverged, said if diverged else done.stdout

        result = self.found("result")
        if not result or (result["loss"] and self.lacking()):
            if result:                  # other studies have kept what is there
                self.kept |= {int(path.name[5:]) for path in
                              train.checkpoints(self.folder)}
            if self.lacking():
                self.forget_after(min(self.lacking()))
            diverged, said = process(self.command())
            if diverged:
                result = {"loss": None, "error": said}
            else:
                *_, last = train.read_log(self.folder / "log.jsonl")
                if result and result["loss"] != last["val_loss"]:
                    self.forget_after(-1)
                    raise RuntimeError(
                        f"{self.folder}, trained once more, has another loss, as if by "
                        "another torch: delete it, and the folders that start from it")
                result = {"loss": last["val_loss"], "slope": last.get("slope"),
                          "noise": last.get("noise")}
            save(self.folder / "result.json", result)
            for path in train.checkpoints(self.folder):
                if int(path.name[5:]) not in self.kept:
                    shutil.rmtree(path)
        for text, rows in (self.unused() if result["loss"] else {}).items():
            windows = 500 if text in SHORT_TEXTS else self.windows
            steps = averaged_steps(self.settings) if text == "averaged" else ()
            given = str(self.saved(self.settings.steps)), rows, windows, text, steps
            code = (f"import json, sys; sys.path.insert(0, {str(HERE)!r})\n"
                    "import bench; given = json.loads(sys.argv[1])\n"
                    "print(json.dumps(bench.losses_under(*given)))")
            _, said = process([sys.executable, "-c", code, json.dumps(given)])
            used = self.found("used")
            used[text] = used.get(text, {}) | json.loads(last_line(said))
            save(self.folder / "used.json", used)

    def forget_after(self, step):
        """Delete later checkpoints: the run goes on from before, and makes this one."""
        for path in train.checkpoints(self.folder):
            if int(path.name[5:]) > step:
                shutil.rmtree(path)

def job_of(args, jobs, model, row, seed):
    """The one job of this row. jobs: those that there are, to which it is added."""
    if (model, row, seed) not in jobs:
        job = Job(args, jobs, model, row, seed)         # after the one it starts from
        jobs[job.key] = job
    return jobs[model, row, seed]

def losses_under(path, rows, windows, text=None, steps=()):
    """{row: the validation loss of a checkpoint's weights under the recipe of a row}.

    text: "other code", or else the run's own validation text. steps: the weights are
    the mean over these steps of the run."""
    path = Path(path)
    s = train.parse_args(["--resume", str(path)])
    vocab_size, found = train.read_run(path)["vocab_size"], {}
    _, tokens, _ = train.load_data(s, vocab_size)
    if text == "other code":
        tokens = np.array(encode(other_code(), s.data))
    for row in rows:
        model = load_under(path, row, s.device)
        model.config.eval_windows = windows
        if steps:
            average_weights(model, path.parent, steps)
        found[row] = train.validate(model, tokens, model.config)["val_loss"]
    return found

def load_under(path, row, device="cpu"):
    """The model of a checkpoint, whose layers follow the recipe of a row."""
    set_norms(train.read_run(path)["settings"]["model"])
    given = vars(train.parse_args([*row_flags(row), "--device", device]))
    names = "recipe", "keep_bf16", *train.RECIPE_FIELDS
    return train.load(path, device, **{name: given[name] for name in names})

def average_weights(model, folder, steps):
    """Give the model the mean of a run's weights at some steps."""
    mean = {name: 0 for name in model.state_dict()}
    for step in steps:
        train.load_weights(folder / f"ckpt-{step:07d}", model)
        for name, value in model.state_dict().items():
            mean[name] = mean[name] + value.double() / len(steps)
    model.load_state_dict(mean)

def other_code():
    """A text that no model has seen: the source of torch.nn."""
    files = sorted(Path(nn.__file__).parent.rglob("*.py"))
    return "\n".join(path.read_text() for path in files)

def cost(job):
    """About how long a job takes, in steps of BF16. One in 4 bits takes twice that."""
    return job.steps * (1 if job.settings.recipe == "bf16" else 2)

def run_all(args, jobs):
    """Run all jobs, args.jobs at a time: the bf16 runs, then the rows that start from
    them, then the late rows. If one fails, all go on that do not start from it. Returns
    what failed, as text."""
    for model in dict.fromkeys(job.model for job in jobs):
        rows = dict.fromkeys(job.row for job in jobs if job.model == model)
        seeds = dict.fromkeys(job.seed for job in jobs)
        print(f"{model}: {', '.join(rows)}; seeds {', '.join(map(str, seeds))}")
    there = sum(bool(job.result()) for job in jobs)
    print(f"{len(jobs)} runs, of which {there} are there already, in {OUT / 'runs'}")
    waves = [[job for job in jobs if job.wave == wave] for wave in range(3)]
    total = sum(job.steps for job in jobs)
    slow = sum(map(cost, jobs)) / total         # the mean cost of a step
    failed = []
    with (concurrent.futures.ThreadPoolExecutor(args.jobs) as pool,
          tqdm(total=total, unit=" steps") as bar):
        def show():
            """Move the bar by what is done, in steps of the mean cost."""
            done = sum(cost(job) * job.done() / job.steps for job in jobs)
            bar.update(round(done / slow) - bar.n)

        for wave in waves:
            wave = [job for job in wave                 # what they start from is there
                    if job.base is None or (job.base.result() or {}).get("loss")]
            threads = max(1, os.cpu_count() // max(1, min(args.jobs, len(wave))))
            runs = [pool.submit(job.run, threads) for job in wave]
            try:
                while concurrent.futures.wait(runs, 1).not_done:
                    show()
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                sys.exit("bench.py: stopped; the same command goes on from here")
            show()
            failed += [str(error) for run in runs if (error := run.exception())]
    return "\n".join(f"bench.py: {error}" for error in failed)

def try_rows(jobs):
    """Make one step with each recipe of a user's, as an error would else come late."""
    for job in {(job.model, job.row): job for job in jobs}.values():
        if job.row not in ROWS and job.row.split()[0] not in OURS:
            s = job.settings
            training_step(s, train.make_recipe(s), vocabulary(s.data))()

# ---- What the runs say: one statistic over {(model, row): weight} ----

def tail(t, df):
    """How likely Student's t with df degrees of freedom is beyond t or -t.

    With t = sqrt(df) tan(u) its density is proportional to cos(u)^(df - 1)."""
    u = np.linspace(math.atan(t / math.sqrt(df)), math.pi / 2, 10_001)
    density = np.cos(u) ** (df - 1)
    beyond = (density[1:] + density[:-1]).mean() / 2 * (u[-1] - u[0])
    log_of_all = math.lgamma(df / 2) - math.lgamma((df + 1) / 2)
    return beyond / (math.sqrt(math.pi) / 2 * math.exp(log_of_all))

@functools.cache
def quantile(df):
    """The t beyond which, or beyond -t, are 5%: by halving an interval."""
    low, high = 1.9, 13.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, df) > 0.05 else (low, middle)
    return low

def interval(values):
    """Mean and half-width of its 95% interval. That is None for one value, or if one is
    not finite."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2 or not math.isfinite(mean):
        return mean, None
    return mean, quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)

def on(model, weights):
    """{row: weight} on a model, as {(model, row): weight}."""
    return {(model, row): weight for row, weight in weights.items()}

def slopes(x):
    """How much each y counts in the slope of the straight line of least squares through
    the points (x, y)."""
    off = np.array(x) - np.mean(x)
    return off / (off ** 2).sum()

def doubling(sizes, effect):
    """By how much an effect {row: weight} grows when a model's size doubles, as
    weights. sizes: {model: size}."""
    return {(model, row): slope * weight
            for model, slope in zip(sizes, slopes(np.log2([*sizes.values()])))
            for row, weight in effect.items()}

class Results:
    """The runs of studies, and what they say.

    errors: {(model, row): {seed: BF16-relative loss error}} (the paper's, Q2), infinite
    if the run diverged. At (model, row, use, text) that of its weights under the recipe
    `use`, on a text; the error is above the bf16 run in BF16 on this text.

    pooled: whether rows have one standard deviation, from all of a model."""

    def __init__(self, records, pooled=True):
        self.models, self.runs, self.errors = records["models"], records["runs"], {}
        self.pooled, self.tested, self.lasting = pooled, {}, set()
        bf16 = {(r["model"], r["seed"], text): uses["bf16"] for r in self.runs
                if r["row"] == "bf16" for text, uses in r.get("used", {}).items()}
        for r in self.runs:
            at, seed = (r["model"], r["row"]), r["seed"]
            error = math.inf if r["loss"] is None else r["loss"] / r["bf16"] - 1
            self.errors.setdefault(at, {})[seed] = error
            for text, uses in r.get("used", {}).items():
                base = bf16[r["model"], seed, text.replace("averaged", "validation")]
                for use, loss in uses.items():
                    self.errors.setdefault((*at, use, text), {})[seed] = loss / base - 1

    def sums(self, weights):
        """{seed: its loss errors, each times its weight, added up}, of the seeds that
        have all. So differences are paired by seed."""
        errors = [self.errors.get(at, {}) for at in weights]
        seeds = sorted(set.intersection(*map(set, errors)))
        return {seed: sum(weight * of[seed] for weight, of in
                          zip(weights.values(), errors)) for seed in seeds}

    def estimate(self, weights):
        """-> (the mean of these sums over the seeds, its standard error, the degrees of
        freedom of that). The error is None if it can't be known."""
        sums = [*self.sums(weights).values()]
        if not sums or not all(map(math.isfinite, sums)):
            return (math.nan if not sums else math.inf), None, 0
        mean, groups = statistics.mean(sums), collections.defaultdict(dict)
        for (model, row, *use), weight in weights.items():
            if weight:
                rows = groups[group_of(model, row)]
                rows.setdefault(row, {})[tuple(use)] = weight
        variances = []
        for group, rows in groups.items():
            uses, shares = in_common(rows)
            variance, df = 0.0, 0
            if (self.pooled and uses and abs(sum(shares)) < 1e-9
                    and "bf16" not in rows):
                variance, df = self.variance(group, tuple(uses.items()))
            variances.append((variance * sum(n * n for n in shares) / len(sums), df))
        if variances and all(df > 0 for _, df in variances):
            total = sum(variance for variance, _ in variances)
            df = total ** 2 / max(1e-300, sum(v * v / df for v, df in variances))
            return mean, math.sqrt(total), max(1, df)
        if len(sums) < 2:
            return mean, None, 0
        return mean, statistics.stdev(sums) / math.sqrt(len(sums)), len(sums) - 1

    @functools.cache
    def variance(self, group, uses):
        """-> (the variance of a loss error that has an effect of its row and one of its
        seed, from all rows of a group; its degrees of freedom). uses: ((use of the
        weights, its part), ...), as what is tested may be a sum over some.

        Rows that start at the same step have it in common, as far as we see. Those that
        end in BF16 do not, nor does BF16 itself."""
        cells = [(row, seed, error)
                 for model, row in {at[:2] for at in self.errors} if row != "bf16"
                 and group_of(model, row) == group
                 for seed, error in self.sums({(model, row, *use): part
                                               for use, part in uses}).items()
                 if math.isfinite(error)]
        if group[1] == "late" or len(cells) < 2:
            return 0.0, 0
        rows, seeds, errors = zip(*cells)
        effects = np.array([[*(row == other for other in sorted({*rows})),
                             *(seed == other for other in sorted({*seeds}))]
                            for row, seed in zip(rows, seeds)], dtype=float)
        fitted, _, rank, _ = np.linalg.lstsq(effects, np.array(errors), rcond=None)
        df = len(errors) - int(rank)
        return ((errors - effects @ fitted) ** 2).sum() / max(df, 1), df

    def contrast(self, weights):
        """The mean of these sums and its 95% interval; None if no seed has all."""
        mean, error, df = self.estimate(weights)
        if math.isnan(mean):
            return None
        return mean, None if error is None else quantile(round(df, 2)) * error

    def p(self, weights):
        """How likely a difference at least as large is by chance. It is noted."""
        mean, error, df = self.estimate(weights)
        if error is None:
            return None
        at = tuple(sorted(weights.items(), key=str))
        self.tested[at] = tail(abs(mean) / max(error, 1e-300), df)
        return self.tested[at]

    def correct(self):
        """Note which of the differences that were tested remain settled if one counts
        how many they are: Holm's correction, by which one in twenty times a single one
        is settled by chance."""
        left = len(self.tested)
        for at, p in sorted(self.tested.items(), key=lambda found: found[1]):
            if p > 0.05 / left:
                break
            self.lasting.add(at)
            left -= 1

    def cell(self, weights):
        """What was found in %. A row's loss error has its number of seeds."""
        found = text(self.contrast(weights))
        if found and [*weights.values()] == [1]:
            found += f" ({len(self.sums(weights))})"
        return found

    def effect(self, weights, words=("hurts", "helps")):
        """The same of a difference, with a word on what it does to the loss, if there
        is more than one seed. "hurts?" is settled alone, but not among all that were
        tested: see correct()."""
        mean, half = self.contrast(weights) or (None, None)
        if mean is None:
            return ""
        found, p = f"{'+' * (round(mean, 4) > 0)}{text((mean, half))}", self.p(weights)
        if p is None:
            return found
        lasts = tuple(sorted(weights.items(), key=str)) in self.lasting
        said = words[0] if mean > 0 else words[-1]
        return f"{found}: {said + '?' * (not lasts) if p < 0.05 else 'not settled'}"

    def reduction(self, model):
        """By what part of itself e2m1's loss error is smaller with ufp4."""
        ours, theirs = (self.sums({(model, row): 1}) for row in ("ufp4", "e2m1"))
        parts = [1 - ours[seed] / theirs[seed] for seed in ours if seed in theirs]
        return interval(parts) if parts else None

    def fprop(self, model):
        """{row: (slope of fprop, noise of fprop)}, means over the seeds that have
        them: a bf16 run or one that diverged has none."""
        found = {}
        for r in self.runs:
            if r["model"] == model and r.get("noise"):
                found.setdefault(r["row"], []).append((r["slope"], r["noise"]))
        return {row: tuple(map(statistics.mean, zip(*of))) for row, of in found.items()}

def group_of(model, row):
    """Which rows have one variance: those of a model that start at the same step."""
    kind = "late" if "-late-" in row else "early" if row.endswith("-early") else ""
    return model, kind

def in_common(rows):
    """-> ({use: its part}, [how much each row counts]), if weights {row: {use: weight}}
    are such products; or (None, [])."""
    uses = next(iter(rows.values()))
    first = next(iter(uses))
    shares = [of.get(first, 0) / uses[first] for of in rows.values()]
    for of, share in zip(rows.values(), shares):
        if of.keys() != uses.keys() or not all(
                math.isclose(of[use], share * part) for use, part in uses.items()):
            return None, []
    return uses, shares

def corrected(results, make):
    """make(results), tables, after correct()."""
    make(results)
    results.correct()
    return make(results)

# ---- Tables ----

def tables_of(results, studies, all_rows=True):
    """{marker in the page: table} of what was measured. all_rows: with a table of each
    study's rows, also if MORE_TABLES has others for it."""
    tables = {}
    for name, study in studies.items():
        if len(study.models) > 1:
            tables[name] = models_table(results, study)
        elif all_rows or name not in MORE_TABLES:
            tables[name] = rows_table(results, study)
        for marker, more in MORE_TABLES.get(name, {}).items():
            tables[marker] = more(results, next(iter(study.models)))
    for name, model in (("two-by-two", "dense-0.3m"), ("two-by-two-nano", "nano")):
        if all((model, row) in results.errors for row in SQUARE):
            tables[name] = two_by_two_table(results, model)
    return tables

def page_tables(results):
    """The tables of the page. Only together do they say how much was tested."""
    return tables_of(results, STUDIES, False) | {"pairs": pairs_table(results)}

def without_blanks(table, names=1):
    """The table without lines that have nothing but their names, which are the first
    cells, and without columns that have nothing below their head."""
    head, *lines = table
    lines = [line for line in lines if any(line[names:])]
    columns = [column for column in zip(head, *lines) if any(column[1:])]
    return [list(row) for row in zip(*columns)]

def rows_table(results, study):
    """The rows of a study with one model."""
    (model,) = study.models
    fprop, lines = results.fprop(model), []
    for base, rows in study.groups.items():
        for row in rows:
            slope, noise = fprop.get(row, (None, None))
            minus = ""
            if row != base:
                minus = results.effect(on(model, {row: 1, base: -1}))
            lines.append([
                f"`{row}`", results.cell({(model, row): 1}),
                f"`{base}`" if minus else "", minus,
                "" if noise is None else f"{100 * noise:.3f}",
                "" if slope is None else f"{slope:.4f}",
                results.cell({(model, row, "bf16", "validation"): 1}),
                beyond_line(results, model, row) if study.beyond else "",
                rows[row] if isinstance(rows, dict) else ""])
    return without_blanks([
        ["row", f"`{model}`: loss error, % (seeds)", "against", "minus that, %",
         "noise of fprop, %", "slope of fprop", "weights used in BF16, % (seeds)",
         "beyond the line, %", "the paper"],
        *lines])

def beyond_line(results, model, row):
    """How far a row's loss error is above the straight line of least squares through
    the doses of noise, as a cell. Rows that shrink on purpose have none."""
    fprop = results.fprop(model)
    if not {row, *DOSES} <= set(fprop) or "-slope-" in row:
        return ""
    noises = [fprop[dose][1] for dose in DOSES]
    off = fprop[row][1] - np.mean(noises)
    weights = {(model, dose): -1 / len(DOSES) - off * slope
               for dose, slope in zip(DOSES, slopes(noises))}
    weights[model, row] = weights.get((model, row), 0) + 1
    return results.cell(weights)

def models_table(results, study):
    """The models of a study. Of models that are called by numbers the last line says
    how effects grow when these double."""
    found = {name: size for name, size in study.models.items()
             if (name, "bf16") in results.errors}
    effects, lines = study.effects or {}, []
    for name, size in found.items():
        losses = [r["loss"] for r in results.runs
                  if (r["model"], r["row"]) == (name, "bf16")]
        loss, half = interval(losses)
        m = results.models[name]
        lines.append([str(size), f"{m['parameters'] / 1e6:.2f}",
                      f"{m['bytes'] / 1e6:.1f}",
                      f"{loss:.3f}" + (f" ± {half:.3f}" if half else ""),
                      *(results.cell({(name, row): 1}) for row in study.rows),
                      *(results.cell(on(name, effect)) for effect in effects.values()),
                      text(results.reduction(name), 0) if GAP in effects.values()
                      else ""])
    if len(found) > 1 and all(isinstance(size, int) for size in found.values()):
        lines.append(["for each doubling", *[""] * (3 + len(study.rows)),
                      *(results.cell(doubling(found, effect))
                        for effect in effects.values()), ""])
    return without_blanks([
        [study.what, "parameters, M", "text, MB", "loss of `bf16`",
         *(f"`{row}`, % (seeds)" for row in study.rows), *effects,
         "`ufp4` smaller by, %"], *lines])

def two_by_two_table(results, model, head=("loss error, % (seeds)",
                     "RHT on wgrad alone", "RHT on all three GEMMs")):
    """The four loss errors, what the rotation and the uniform grid do to each, and what
    both together do beyond the sum of both alone."""
    (e2m1, e2m1_rht), (e1m2, e1m2_rht) = TWO_BY_TWO.values()

    def effect(weights):
        return results.effect(on(model, weights))

    both = results.effect(on(model, INTERACTION), ("settled",))
    return [[*head, "what the rotation does"],
            *([fmt.upper(), results.cell({(model, plain): 1}),
               results.cell({(model, rotated): 1}), effect({rotated: 1, plain: -1})]
              for fmt, (plain, rotated) in TWO_BY_TWO.items()),
            ["what the uniform grid does", effect({e1m2: 1, e2m1: -1}),
             effect({e1m2_rht: 1, e2m1_rht: -1}), f"interaction {both}"]]

def pairs_table(results, pairs=PAIRS):
    """What each change of e2m1 does, and both, for several models."""
    lines = []
    for model, name in pairs.items():
        changes = [on(model, change) for change in CHANGES.values()]
        lines.append([name, *map(results.effect, changes[:-1]),
                      results.effect(changes[-1], ("settled",)),
                      text(results.reduction(model), 0)])
    return [["change of `e2m1`, %", *CHANGES, "`ufp4` smaller by, %"], *lines]

def shrinking_table(results, _):
    """The effects of study depth for all models that have its rows, and their means."""
    effects = STUDIES["depth"].effects
    models = [name for name in results.models
              if all((name, row) in results.errors for row in CAUSES)]
    lines = [[f"`{name}`", *(results.effect(on(name, effect), ("settled",))
                             for effect in effects.values())] for name in models]
    if not models:
        return [["model"]]
    means = []
    for effect in effects.values():
        mean = {at: weight / len(models) for name in models
                for at, weight in on(name, effect).items()}
        means.append(results.effect(mean, ("settled",)))
    lines.append(["mean", *means])
    return [["model", *effects], *lines]

# What the weights keep. We wrote down before the runs what each outcome would mean:
#
# - The weights decide: under each use, also those that were not trained under, the
#   order of the recipes is the same. Then train in UFP4, and use the weights in what
#   the hardware has.
# - Matching decides: each use is best for weights that were trained under it. Models
#   adapt to their own rounding. Then train in what you will use.
# - Use decides: weights that never saw 4 bits already show the order. Then it is enough
#   to round after training in BF16, and no training is needed to choose a format.
#
# parts_table() measures these three: how much of the lead each makes.

def matrix_table(results, model, text=SHORT_TEXTS[0]):
    """Loss errors of weights trained under one recipe (lines) and used under another
    (columns). The last line says what training in UFP4 is worth in each use."""
    lines = [[f"`{row}`", *(results.cell({(model, row, use, text): 1}).split(" (")[0]
                            for use in USES)] for row in ("bf16", *TRAINED)]
    lines.append(["`ufp4` minus `e2m1`", *(results.effect({
        (model, "ufp4", use, text): 1, (model, "e2m1", use, text): -1})
        for use in USES)])
    return without_blanks([
        ["trained under; used under:", *(f"`{use}`" for use in USES)], *lines])

def other_matrix_table(results, model):
    return matrix_table(results, model, SHORT_TEXTS[1])

def parts_table(results, model):
    """By how much e2m1, trained and used, is above ufp4, trained and used; and what
    makes it.

    With L(trained, used), the part of training is the mean over both uses of L(e2m1, .)
    - L(ufp4, .), that of use the mean over both trainings of L(., e2m1) - L(., ufp4).
    Their sum is the lead. Matching is by how much the two crossed cells are above the
    two matched ones, in the mean."""
    lines = []
    for text in SHORT_TEXTS:
        def at(signs):
            cells = [(trained, used) for trained in ("e2m1", "ufp4")
                     for used in ("e2m1", "ufp4")]
            return {(model, *cell, text): sign / 2 for cell, sign in zip(cells, signs)}
        afterwards = {(model, "bf16", use, text): sign for use, sign in GAP.items()}
        lines.append([text, *(results.effect(weights, ("settled",)) for weights in (
            at((2, 0, 0, -2)), at((1, 1, -1, -1)), at((1, -1, 1, -1)),
            at((-1, 1, 1, -1)), afterwards))])
    return without_blanks([
        ["text", "lead of `ufp4`, %", "made by training", "by use", "by matching",
         "if `bf16` is trained"], *lines])

def columns_table(results, model):
    """The two by two in 4 bits, and its two parts: what is wrong with the weights,
    which is their loss error in BF16, and what the forward pass in 4 bits adds."""
    lines = []
    for start, rows in (("last third", SQUARE), ("after warm-up", EARLY)):
        changes = [{rows[SQUARE.index(row)]: weight for row, weight in change.items()}
                   for change in CHANGES.values()]
        for what, signs in (("in 4 bits", (1, 0)), ("weights, in BF16", (0, 1)),
                            ("forward pass", (1, -1))):
            def at(weights):
                found = {(model, row): signs[0] * w for row, w in weights.items()}
                found |= {(model, row, "bf16", "validation"): signs[1] * w
                          for row, w in weights.items()}
                return found    # also what has weight 0: all are of the same seeds
            lines.append([start, what, *(results.cell(at({row: 1})).split(" (")[0]
                                         for row in rows),
                          *(results.effect(at(change)) for change in changes[:-1]),
                          results.effect(at(changes[-1]), ("settled",))])
    return without_blanks([
        ["4 bits from", "loss error, %", *(f"`{row}`" for row in SQUARE), *CHANGES],
        *lines], 2)

def healing_table(results, model):
    """Loss errors of runs that end in BF16, by how many steps, and of averages of the
    weights over the last tenth of the steps. Those are above an average of BF16's, and
    the last column says what that does to BF16."""
    def places(row):
        yield "none, used in 4 bits", (model, row)
        yield "none", (model, row, "bf16", "validation")
        for steps in HEALINGS:
            yield f"{steps} steps", (model, f"{row}-late-bf16-{steps}")
        yield "average, used in 4 bits", (model, row, row, "averaged")
        yield "average", (model, row, "bf16", "averaged")
    lines, exact = [], (model, "bf16", "bf16", "averaged")
    for at in zip(*map(places, HEALED)):
        (name, e2m1), (_, ufp4), (_, nvfp4) = at
        mean = name.startswith("average")
        base = {exact: -1 if mean else 0}   # with weight 0: all are of the same seeds
        lines.append([name, *(results.cell({place: 1} | base) for _, place in at),
                      results.effect({e2m1: 1, ufp4: -1, exact: 0}),
                      results.effect({nvfp4: 1, ufp4: -1, exact: 0}),
                      results.cell({exact: 1}).split(" (")[0] if mean else ""])
    return without_blanks([
        ["the end in BF16", *(f"`{row}`, %" for row in HEALED),
         "`e2m1` minus `ufp4`", "`nvfp4` minus `ufp4`", "`bf16`"], *lines])

def gaps_table(results, model):
    """By how much training losses are above BF16's, in eighths of the 4-bit steps."""
    gaps, lines = {}, []
    for r in results.runs:
        if r["model"] == model and r.get("gaps"):
            gaps.setdefault(r["row"], {})[r["seed"]] = np.array(r["gaps"])
    for start, rows in (("last third", SQUARE), ("after warm-up", EARLY)):
        if not all(row in gaps for row in rows):
            continue
        for row, name in zip(rows, SQUARE):
            mean = np.mean([*gaps[row].values()], 0)
            lines.append([start, f"`{name}`", *(f"{100 * gap:.2f}" for gap in mean)])
        ours, theirs = (gaps[rows[SQUARE.index(name)]] for name in ("ufp4", "e2m1"))
        lead = [theirs[seed] - ours[seed] for seed in sorted(ours.keys() & theirs)]
        lines.append([start, "`e2m1` minus `ufp4`",
                      *(text(interval([*of])) for of in zip(*lead))])
    return without_blanks([
        ["4 bits from", "training loss above `bf16`, %",
         *(f"{n}/8" for n in range(1, 9))], *lines], 2)

MORE_TABLES = {
    "use": {"matrix": matrix_table, "matrix-other": other_matrix_table,
            "parts": parts_table, "columns": columns_table, "gaps": gaps_table},
    "depth": {"shrinking": shrinking_table},
    "early": {"columns": columns_table, "gaps": gaps_table},
    "heal": {"healing": healing_table}}

# ---- Figures ----

COLORS = {"e1m2": "#1f77b4", "e2m1": "#d62728"}

def draw_causes(fig, results, model):
    """Left, loss error against the noise of fprop, with a line through the doses of
    noise. Right, against what fprop shrinks its outputs by, doses of that alone."""
    fig.suptitle("Noise in fprop raises the loss, shrinkage hardly does")
    left, right = fig.subplots(1, 2, sharey=True)
    fprop = results.fprop(model)
    rows = [row for row in {*STUDIES["dose"].rows, *STUDIES["loss"].rows}
            if not row.endswith(("debiased", "shrunk"))]
    for row in sorted(rows):
        error, half = (100 * value for value in results.contrast({(model, row): 1}))
        slope, noise = fprop[row]
        color = COLORS["e1m2" if row.startswith("ufp4") else "e2m1"]
        style = {"yerr": half, "lw": 1, "color": color}
        if "-noise-" in row:
            left.errorbar(100 * noise, error, fmt="s", ms=4, **style)
        elif "-slope-" not in row:
            left.errorbar(100 * noise, error, fmt="o", **style)
            away = {"ufp4-mx": (-48, -12), "mxfp4": (7, 4), "e2m1": (7, -10),
                    "ufp4-rht-wgrad": (-60, 14), "e2m1-full-rht": (5, -13),
                    "nvfp4": (7, 1)}.get(row, (7, -3))
            left.annotate(row, (100 * noise, error), away, color=color, fontsize=9,
                          textcoords="offset points")
        if "-slope-" in row or row == "ufp4":
            right.errorbar(100 * (1 - slope), error, fmt="s", ms=4, **style)
            below = row == "ufp4" or "all" in row       # its name
            away = -20 if "996" in row else -14, -18 if below else 10
            right.annotate(row.removeprefix("ufp4-"), (100 * (1 - slope), error),
                           away, fontsize=9, textcoords="offset points")
    noises, errors = zip(*((100 * fprop[row][1],
                            100 * results.contrast({(model, row): 1})[0])
                           for row in DOSES))
    left.plot(noises, np.polyval(np.polyfit(noises, errors, 1), noises), lw=1)
    left.set(xlabel="noise of fprop: error power, % of the outputs'\n"
                    "(squares: ufp4 with added noise)",
             ylabel="loss error above BF16, %", xlim=(0.35, 1.7), ylim=(1.2, None))
    right.set(xlabel="what fprop shrinks its outputs by, %\n"
                     "(ufp4, made to shrink)")

def draw_hero(fig, results):
    """Left, how sixteen numbers round to each grid before and after the RHT. Right,
    what both changes of e2m1 do to the loss, alone and together."""
    left, right = fig.subfigures(1, 2, width_ratios=(1.25, 1), wspace=0.03)
    draw_sixteen(left)
    draw_changes(right, results, "dense-0.3m")

def draw_changes(fig, results, model):
    """By how much changes of e2m1 change its loss, if the weights are used in 4 bits as
    in training, and in BF16."""
    fig.suptitle("Training: neither uniform grid nor\n"
                 "rotation helps alone; the pair does")
    ax, names = fig.subplots(), [*CHANGES][:3]
    for shift, what, use, alpha in ((-0.17, "used in 4 bits", (), 1),
                                    (0.17, "same weights in BF16",
                                     ("bf16", "validation"), 0.4)):
        found = [results.contrast({(model, row, *use): 100 * weight for row, weight in
                                   CHANGES[name].items()}) for name in names]
        if None in found:
            continue
        means, halves = zip(*found)
        ax.bar(np.arange(3) + shift, means, 0.32, yerr=halves, capsize=4, alpha=alpha,
               color=["#888888", "#888888", COLORS["e1m2"]], label=what)
        for x, mean, half in zip(np.arange(3) + shift, means, halves):
            y = mean + half + 0.02 if mean > 0 else mean - half - 0.02
            ax.text(x, y, f"{mean:+.2f}", ha="center", fontsize=10,
                    va="bottom" if mean > 0 else "top")
    ax.axhline(0, color="black", lw=1)
    ax.margins(y=0.12)
    ax.legend(frameon=False, loc="lower left", fontsize=10)
    ax.set(xticks=range(3), xticklabels=["uniform\ngrid alone", "full rotation\nalone",
                                         "both\n(ufp4)"],
           ylabel="change of the loss of e2m1, %")

GRIDS = {"e2m1": "float grid", "e1m2": "uniform grid"}

def draw_sixteen(fig):
    """A row of panels for the block before the RHT and one after it, a column for each
    grid. A number is a dot, three times its error a bar below."""
    fig.suptitle("An example: E2M1 rounds sixteen numbers\n"
                 "better before the rotation (RHT), E1M2 after it")
    panels = fig.subplots(2, 2, sharex=True, sharey="row", height_ratios=(1.15, 1))
    blocks = {"before the RHT": ufp4.SIXTEEN,
              "after the RHT": ufp4.rotate(ufp4.SIXTEEN, ufp4.random_signs(0))}
    for row, (when, x) in zip(panels, blocks.items()):
        for ax, fmt in zip(row, GRIDS):
            q, color = ufp4.fake_quantize(x, fmt), COLORS[fmt]
            scale = x.abs().max() / FORMATS[fmt].max
            for level in FORMATS[fmt].levels:
                for y in (level * scale, -level * scale):
                    ax.axhline(y, color="#dcdcdc", lw=0.8, zorder=0)
            floor = min(x.min(), 0) - 0.5 * x.abs().max()
            ax.axhline(0, color="#777777", lw=1, zorder=0)
            ax.axhline(floor, color="#777777", lw=1)
            ax.bar(range(len(x)), 3 * (q - x), bottom=floor, color=color)
            ax.plot(x, "o", ms=3.6, color="black")
            ax.text(0.97, 0.96, f"signal over error\n{sqnr(q, x):.1f} decibels",
                    ha="right", va="top", color=color, fontweight="bold", fontsize=10,
                    transform=ax.transAxes)
            largest = x[x.abs().argmax()]
            ax.set(xticks=[], yticks=[floor, 0, largest],
                   yticklabels=["errors x 3", "0", f"{largest:.1f}"],
                   ylim=(floor - 0.35 * x.abs().max(), 1.9 * x.abs().max()))
        row[0].set_ylabel(when)
    for ax, (fmt, what) in zip(panels[0], GRIDS.items()):
        ax.set_title(f"{fmt.upper()}, the {what}", color=COLORS[fmt])

def draw_forest(fig, results):
    """The lead of ufp4 and the interaction, for all models."""
    models = [model for model in results.models
              if results.contrast(on(model, GAP)) is not None]
    panels = fig.subplots(1, 2, sharey=True)
    for ax, weights, title in ((panels[0], GAP, "Loss of e2m1 minus that of ufp4, %"),
                               (panels[1], INTERACTION, "Interaction of grid and "
                                "rotation, %")):
        for y, model in enumerate(reversed(models)):
            found = results.contrast(on(model, weights))
            if found:
                ax.errorbar(100 * found[0], y, xerr=100 * (found[1] or 0), fmt="o",
                            color="black", capsize=3)
        ax.axvline(0, color="#777777", lw=1)
        ax.set(title=title, yticks=range(len(models)), yticklabels=reversed(models))

def draw_rows(fig, results, model):
    """The loss error of each row: a dot with its interval."""
    ax, rows = fig.subplots(), [row for name, row, *use in results.errors
                                if name == model and row != "bf16" and not use]
    for y, row in enumerate(reversed(rows)):
        mean, half = results.contrast({(model, row): 100})
        ax.errorbar(mean, y, xerr=half, fmt="o", color="black", capsize=5)
    ax.set(yticks=range(len(rows)), yticklabels=reversed(rows),
           xlabel="loss error above BF16, %; 95% intervals over seeds")

def draw_two_by_two(fig, results, model):
    """Four loss errors with their intervals: a line for each grid, from the RHT on
    wgrad alone to the RHT on all three GEMMs."""
    ax = fig.subplots()
    for (fmt, pair), shift in zip(TWO_BY_TWO.items(), (0.02, -0.02)):
        means, halves = zip(*(results.contrast({(model, row): 100}) for row in pair))
        # Shifted, so that no bar hides another
        ax.errorbar((shift, 1 + shift), means, yerr=halves if halves[0] else None,
                    fmt="o-", color=COLORS[fmt], lw=2.5, ms=8, capsize=5,
                    label=fmt.upper())
        for x, mean, row, side in zip((-0.12, 1.12), means, pair, ("right", "left")):
            name = f"\n{row}" if row in ("e2m1", "ufp4") else ""
            ax.text(x, mean, f"{mean:.2f}{name}", ha=side, va="center",
                    color=COLORS[fmt], fontweight="bold")
    fig.suptitle("Training: loss error\nby grid and rotation")
    ax.legend(frameon=False)
    ax.set(xticks=(0, 1), xlim=(-0.55, 1.5),
           xticklabels=("RHT on\nwgrad alone", "RHT on\nall three GEMMs"),
           ylabel="loss error above BF16, %" + "; 95% intervals" * bool(halves[0]))

# ---- study: the command ----

def records_of(args, jobs, old):
    """The records `old`, in the form of runs.json, with what jobs have found. A run has
    the loss of the bf16 run that it is compared with."""
    models, machines = dict(old["models"]), list(old["machines"])
    runs = {(r["model"], r["row"], r["seed"]): r for r in old["runs"]}
    found = {job.key: job.result() for job in jobs}
    jobs = [job for job in jobs                 # that are there, as what they need is
            if found[job.key] and found.get((job.key[0], "bf16", job.key[2]))]
    for name in {job.key[0] for job in jobs}:
        flags = [*MODELS[name], *args.train]
        s = train.parse_args(flags)
        with torch.device("meta"):                      # without values
            model = train.GPT(s, RECIPES["bf16"], vocabulary(s.data))
        models[name] = {"flags": flags,
                        "parameters": sum(p.numel() for p in model.parameters()),
                        "bytes": s.steps * s.batch_size * s.seq_len}
    for job in jobs:
        name, row, seed = job.key
        run = {"model": name, "row": row, "seed": seed,
               "bf16": found[name, "bf16", seed]["loss"], **found[job.key],
               "gaps": job.gaps()}
        was = runs.get(job.key, run)
        if (was["loss"], was["bf16"]) != (run["loss"], run["bf16"]):
            raise ValueError(
                f"the records have {name}, {row}, seed {seed} with another loss: to "
                "replace it, first take the runs of this seed out of runs.json")
        used = was.get("used", {})      # maybe on texts that this study does not use
        run["used"] = used | {text: used.get(text, {}) | uses
                              for text, uses in run.get("used", {}).items()}
        made = job.made_by()
        if made not in machines:
            machines.append(made)
        runs[job.key] = run | {"machine": machines.index(made)}
    return {"models": models, "machines": machines,
            "runs": [runs[at] for at in sorted(runs)]}

def check_name(kind, name, names):
    """ValueError for a name that there is not, with those that are like it."""
    if name not in names:
        near = difflib.get_close_matches(name, names) or names
        raise ValueError(f"unknown {kind} {name!r}: choose from {', '.join(near)}")

def jobs_of(args, study):
    """The jobs of a study. ValueError for a model or row that there is not."""
    jobs = {}
    for model in args.models or study.models:
        check_name("model", model, study.models)
        for row in ("bf16", *study.rows):
            check_name("row", row if row in ROWS else row.split()[0], RECIPES | ROWS)
            for n in range(args.seeds or len(study.seeds)):
                job = job_of(args, jobs, model, row, study.seeds.start + n)
                job.uses["validation"] = ["bf16"]
                if study.uses:
                    job.uses |= dict.fromkeys(SHORT_TEXTS, study.uses)
                if row in study.averaged:
                    job.uses["averaged"] = row, "bf16"
                    job.kept |= {*averaged_steps(job.settings)}
    return [*jobs.values()]

# Flags of train.py that a study sets itself
SET_BY_STUDY = {"--seed", "--recipe", "--model", "--out", "--overwrite", "--resume",
                "--init", "--prompt", "--export", "--dry-run", "--eval-interval",
                "--eval-windows", "--save-at"}
SAME_IN_ALL = {"--data", "--steps", "--seq-len", "--batch-size"}

def bench_study(args):
    """Train what is not there yet, some rows on some models; print and draw what the
    runs say. A row is a recipe, a name such as ufp4-rht-wgrad, or a recipe with flags
    of train.py: --rows ufp4 "ufp4 --keep-bf16 1"."""
    if args.record and (args.train or args.file):
        raise ValueError("--record takes no --with and no flags of train.py")
    if args.record and args.study == "quick":
        raise ValueError("--record: quick validates on a quarter of the text; study "
                         "nano has its rows")
    for flags, names in ((args.train, SET_BY_STUDY), (" ".join(args.rows or []).split(),
                                                      SET_BY_STUDY | SAME_IN_ALL)):
        taken = [text for text in flags if text.split("=")[0] in names]
        if taken:
            raise ValueError(f"a study sets {', '.join(taken)} itself, for all rows")
    if args.file:
        train.import_with(args.file.resolve())
    changed = [name for name in OURS if RECIPES[name] is not OURS[name]]
    if changed:
        raise ValueError(f"{args.file} changes the recipe {', '.join(changed)}, with "
                         "which others are compared: add one by another name")
    study = STUDIES[args.study]
    mine = [name for name in RECIPES if name not in OURS]
    taken = [name for name in mine if name in ROWS or group_of("", name)[1]]
    if taken:
        raise ValueError(f"rows of bench.py are called {', '.join(taken)}: choose "
                         "other names, without -late- and -early")
    if args.rows or mine:
        rows = args.rows or [*study.rows, *mine]
        study = replace(study, groups={rows[0]: rows})
    jobs = jobs_of(args, study)
    try_rows(jobs)
    failed = run_all(args, jobs)
    if args.record and failed:
        sys.exit(failed)
    old = read("runs") if args.record else {"models": {}, "machines": [], "runs": []}
    records = records_of(args, jobs, old)
    if args.record:
        save(RECORDS / "runs.json", records)
        return bench_readme(args)
    results = Results(records)
    tables = corrected(results, functools.partial(tables_of, studies={
        args.study: study}))
    for table in tables.values():
        print_table(table)
    if args.seeds == 1 or len(study.seeds) == 1 and not args.seeds:
        print("One seed settles nothing. --seeds 5 tells more.")
    if len(study.models) == 1 and results.errors:
        (model,) = study.models
        two_by_two = args.study == "quick" and all(
            math.isfinite(results.estimate({(model, row): 1})[0]) for row in SQUARE)
        figure(OUT / f"{args.study}.png", (5, 4.9),
               draw_two_by_two if two_by_two else draw_rows, results, model)
    if failed:
        sys.exit(f"{failed}\nbench.py: the same command tries these again")

def bench_readme(args):
    """Make the tables and figures of data/results anew, without measuring."""
    results = Results(read("runs"))
    figure(RECORDS / "causes.png", (10, 4.5), draw_causes, results, "dense-0.3m")
    medians = read("sqnr")["medians"]
    figure(RECORDS / "sqnr.png", (10, 6), draw_sqnr, medians)
    figure(RECORDS / "slopes.png", (12, 6), draw_slopes, medians)
    figure(RECORDS / "lm.png", (14, 7), draw_lm, read("lm"))
    figure(RECORDS / "hero.png", (9.5, 5.2), draw_hero, results)
    figure(RECORDS / "forest.png", (10, 4.5), draw_forest, results)
    fill_page()

# ---- use: trained weights under other recipes ----

def bench_use(args):
    """The weights of a run of train.py under recipes that it need not have been trained
    under: validation loss, noise and slope in fprop, and the cosine of the gradients
    (dW of all layers but experts, as one vector) with those in BF16."""
    path = train.find_checkpoint(args.run)
    s = train.parse_args(["--resume", str(path)])
    shards, val, _ = train.load_data(s, train.read_run(path)["vocab_size"])
    if args.text:
        val = np.array(encode(args.text.read_text(), s.data))
    own = s.recipe
    for name in ("keep_bf16", *train.RECIPE_FIELDS):
        if getattr(s, name):
            own += f" {train.flag(name)} {getattr(s, name)}"
    rows, found = args.recipes or (own, *TRAINED), {}
    for row in tqdm(dict.fromkeys(("bf16", *rows)), unit=" recipes"):
        check_name("row", row if row in ROWS else row.split()[0], RECIPES | ROWS)
        model = load_under(path, row, s.device)
        model.config.eval_windows = args.windows
        found[row] = train.validate(model, val, model.config)
        dw = gradients(model, *train.get_batch(shards, s, s.steps))
        found[row]["dw"] = torch.cat([grad.flatten() for grad in dw.values()])
    table = [["used under", "validation loss", "above BF16, %", "noise of fprop, %",
              "slope of fprop", "cosine of dW with BF16's"]]
    bf16 = found["bf16"]
    for row, of in found.items():
        error = of["val_loss"] / bf16["val_loss"] - 1
        table.append([f"`{row}`", f"{of['val_loss']:.4f}", f"{100 * error:+.2f}",
                      f"{100 * of['noise']:.3f}" if "noise" in of else "",
                      f"{of['slope']:.4f}" if "noise" in of else "",
                      f"{F.cosine_similarity(of['dw'], bf16['dw'], 0):.4f}"])
    print(f"{path}, trained under {own}")
    finish(args, "use", {"use-command": table}, {"run": str(path)})

# ---- sqnr: does the RHT change the preferred grid? (the paper's Q1) ----

def sqnr(q, x):
    """Signal to quantization noise in dB, -10 log10(|q - x|^2 / |x|^2), as in the
    paper."""
    error, signal = (q - x).double().square().sum(), x.double().square().sum()
    return -10 * math.log10(error / signal)

def capture(model, *batch):
    """{layer: {"x", "w", "dy": its tensor (rows, columns)}} of each linear layer, when
    model(*batch) is the loss."""
    got = collections.defaultdict(dict)

    def keep(layer, inputs, y, found):
        found.update(x=inputs[0], w=layer.weight)
        y.register_hook(lambda dy: found.update(dy=dy))

    hooks = [layer.register_forward_hook(functools.partial(keep, found=got[name]))
             for name, layer in model.named_modules() if isinstance(layer, ufp4.Linear)]
    model(*batch).mean().backward()
    for hook in hooks:
        hook.remove()
    return {name: {operand: x.detach().flatten(0, -2).float()
                   for operand, x in found.items()} for name, found in got.items()}

def used(x, fmt):
    """B_eff of the paper (section 2): exp(entropy of the eight codes) / 8."""
    codes = ufp4.quantize(x, fmt).codes.flatten()
    count = torch.cat((codes & 7, codes >> 4 & 7)).bincount(minlength=8)
    p = count[count > 0] / count.sum()
    return math.exp(-(p * p.log()).sum()) / 8

def measure(x, w, dy):
    """{operand and its GEMM: [(SQNR, B_eff, slope)], result of a GEMM: [(SQNR,)]}, each
    with E2M1, E1M2, and both after the RHT. All is rounded to nearest."""
    found, signs = collections.defaultdict(list), ufp4.random_signs(0)
    for gemm, result, names, a, b in (("fprop", "Y", ("X", "W"), x, w),
                                      ("dgrad", "dX", ("dY", "W"), dy, w.T),
                                      ("wgrad", "dW", ("dY", "X"), dy.T, x.T)):
        plain = [a.contiguous(), b.contiguous()]
        for operands in (plain, [ufp4.rotate(v, signs) for v in plain]):
            for fmt in GRIDS:
                rounded = [ufp4.fake_quantize(v, fmt) for v in operands]
                for name, v, q in zip(names, operands, rounded):
                    found[f"{name}, {gemm}"].append(
                        (sqnr(q, v), used(v, fmt), ufp4.slope(q, v)))
                found[result].append((sqnr(rounded[0] @ rounded[1].T, a @ b.T),))
    return found

def bench_sqnr(args):
    """Which grid suits the tensors of a run of train.py, at its last checkpoint, before
    and after the RHT: signal over noise, and the share of the codes that is used."""
    s = train.parse_args(["--resume", str(args.dir)])
    set_norms(s.model)
    model = train.load(s.resume, s.device)
    shards, _, _ = train.load_data(s, model.embed.num_embeddings)
    found = sqnr_of(model, *train.get_batch(shards, s, s.steps))
    rows = sqnr_table(found, ("X, fprop of fc1", "dY, wgrad of fc1", "X, fprop of fc2",
                              "Y of fc2", "dX of fc2", "dW of fc2"))
    rows.append(["X, fprop of fc2, the paper", "21.90", "19.94 (0.56)", "20.00",
                 "23.19 (0.97)"])
    folder = finish(args, "sqnr", {"sqnr": rows},
                    {"run": str(args.dir), "medians": found})
    figure(folder / "sqnr.png", (10, 6), draw_sqnr, found)
    figure(folder / "slopes.png", (12, 6), draw_slopes, found)

def kind(layer):
    """What layers of all blocks are called: q_proj of model.layers.3.self_attn.q_proj.
    """
    return layer.rpartition(".")[2]

def sqnr_of(model, *batch):
    """{what of a kind of layer: the median of measure() over these layers}."""
    layers = collections.defaultdict(list)
    for name, tensors in tqdm(capture(model, *batch).items(), unit=" layers"):
        for what, values in measure(**tensors).items():
            layers[f"{what} of {kind(name)}"].append(values)
    return {what: np.median(values, 0).round(4).tolist()
            for what, values in layers.items()}

def sqnr_table(medians, whats):
    rows = [["SQNR, dB (B_eff)", "E2M1", "E1M2", "E2M1, RHT", "E1M2, RHT"]]
    for what in whats:
        rows.append([what, *(" ".join([f"{db:.2f}", *(f"({b:.2f})" for b in rest[:1])])
                             for db, *rest in medians[what])])
    return rows

def draw_sqnr(fig, medians):
    """By how many decibels E1M2 has less noise than E2M1, without the RHT and with it:
    a line a kind of layer, a column an operand or the result of a GEMM."""
    whats, kinds = (list(dict.fromkeys(of)) for of in
                    zip(*(name.split(" of ") for name in medians)))
    for first, (ax, when) in zip((0, 2), zip(fig.subplots(2, 1, sharex=True),
                                             ("without the RHT", "with the RHT"))):
        lead = np.array([[medians[f"{what} of {kind}"][first + 1][0]
                          - medians[f"{what} of {kind}"][first][0] for what in whats]
                         for kind in kinds])
        ax.imshow(lead, cmap="RdBu", vmin=-5, vmax=5, aspect="auto")
        for (y, x), value in np.ndenumerate(lead):
            ax.text(x, y, f"{value:+.1f}", ha="center", va="center",
                    color="white" if abs(value) > 3 else "black")
        ax.set(xticks=range(len(whats)), yticks=range(len(kinds)), yticklabels=kinds,
               xticklabels=[what.replace(", ", "\n") for what in whats])
        ax.set_title(f"Decibels by which E1M2 is ahead of E2M1, {when}")

def slopes_table(medians):
    """What operands shrink by, in %, from their slopes."""
    whats = [what for what, values in medians.items() if len(values[0]) > 2]
    return [["shrinks by, %", "E2M1", "E2M1, RHT", "E1M2", "E1M2, RHT"],
            *([what, *(f"{100 * (1 - medians[what][n][2]):.2f}" for n in (0, 2, 1, 3))]
              for what in whats)]

def draw_slopes(fig, medians):
    """What operands shrink by: a panel a grid, before and after the RHT, a line a kind
    of layer, a column an operand and its GEMM."""
    places = [what.split(" of ") for what in medians if len(medians[what][0]) > 2]
    whats, kinds = (list(dict.fromkeys(of)) for of in zip(*places))
    panels = fig.subplots(2, 2, sharex=True, sharey=True)
    for ax, (grid, when) in zip(panels.flat, ((0, "as it is"), (2, "after the RHT"),
                                              (1, "as it is"), (3, "after the RHT"))):
        shrinks = np.array([[100 * (1 - medians[f"{what} of {kind}"][grid][2])
                             for what in whats] for kind in kinds])
        ax.imshow(shrinks, cmap="PuOr_r", vmin=-1, vmax=1, aspect="auto")
        for (y, x), value in np.ndenumerate(shrinks):
            ax.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=10,
                    color="white" if abs(value) > 0.7 else "black")
        fmt = [*GRIDS][grid % 2]
        ax.set_title(f"{fmt.upper()}, {when}: shrinks by, %", color=COLORS[fmt])
        ax.set(xticks=range(len(whats)), yticks=range(len(kinds)), yticklabels=kinds,
               xticklabels=[what.replace(", ", "\n") for what in whats])

# ---- lm: a language model of Hugging Face's under each recipe ----

WINDOW = 512                                    # tokens
BATCH = 4                                       # windows of a forward pass, and a step
SAMPLE = 2                                      # windows for noise and gradients
FULL = STUDIES["loss"].rows
LM_GROUPS = STUDIES["loss"].groups | {"ufp4-weights": (
    "ufp4-weights", "ufp4-weights-rht-wgrad", "e2m1-weights", "e2m1-full-rht-weights")}
PLAIN_OR_ROTATED = "not rotated in fprop", "rotated"

class Losses(nn.Module):
    """Windows of tokens (B, T + 1) -> the loss of a language model on each, (B,)."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, windows):
        windows = windows.to(self.model.device)
        tokens, targets = windows[:, :-1], windows[:, 1:]
        with torch.autocast(tokens.device.type, torch.bfloat16,
                            enabled=self.dtype == "bfloat16"):
            logits = self.model(tokens, use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(),
                                 reduction="none")
        return losses.view(targets.shape).mean(1)

    def follow(self, row, seed=0):
        """Make all linear layers but the head follow the recipe of a row."""
        head = self.model.get_output_embeddings()
        skip = [name for name, m in self.model.named_modules() if m is head]
        flags = [*row_flags(row), "--seed", str(seed)]
        ufp4.convert(self.model, train.make_recipe(train.parse_args(flags)), skip)

    @torch.no_grad()
    def on(self, windows, bar=None):
        """The losses of many windows, as a list."""
        losses = []
        for batch in windows.split(BATCH):
            losses += self(batch).tolist()
            if bar:
                bar.update()
        return losses

def load_lm(args):
    """-> (Losses of the model in float32, its tokenizer, where it comes from)"""
    file = {"gguf_file": args.gguf} if args.gguf else {}
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(args.model, **file)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32,
                                                     **file)
    except ImportError as e:
        raise ImportError("lm needs more packages: pip install transformers accelerate "
                          f"gguf ({last_line(str(e))})")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = args.dtype or ("bfloat16" if train.hardware(device)[1] else "float32")
    folder = Path(args.model).resolve()
    # The folder may be that of a Python package, beside what says its version
    packages = folder.parent.glob(f"{folder.name}-*.dist-info")
    files = sorted(folder.glob(args.gguf or "*.safetensors"))
    origin = {"model": args.gguf or folder.name,
              "package": next((path.stem for path in packages), None),
              "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                         for path in files},
              "parameters": sum(p.numel() for p in model.parameters()), "dtype": dtype}
    return Losses(model.to(device), dtype), tokenizer, origin

def prose():
    """Paragraphs of English in what the installed packages say about themselves."""
    found = {}                                  # as a set, but in order
    for package in sorted(importlib.metadata.distributions(),
                          key=lambda package: str(package.name)):
        for text in package.metadata.json.get("description", "").split("\n\n"):
            letters = re.findall(r"[A-Za-z\s,.']", text)
            if len(text) >= 100 and len(letters) > 0.8 * len(text):
                found[text.strip()] = None
    return "\n\n".join(found)

def windows_of(args, tokenizer):
    """-> (windows to measure on, (N, WINDOW + 1), the others, what the text is)"""
    text = args.text.read_text() if args.text else prose()
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    count = len(tokens) // (WINDOW + 1)
    if count <= args.windows:
        raise ValueError(f"the text has {count} windows of {WINDOW} tokens, and needs "
                         f"more than {args.windows}: take another --text or --windows")
    windows = torch.tensor(tokens[:count * (WINDOW + 1)]).view(count, WINDOW + 1)
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[np.linspace(0, count - 1, args.windows).astype(int)] = True
    about = {"text": args.text.name if args.text else "descriptions of the installed "
             "packages", "characters": len(text), "tokens": len(tokens),
             "windows": args.windows,
             "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return windows[chosen], windows[~chosen], about

def paired(losses):
    """Results that take windows for seeds, from {row: losses of windows}. A loss error
    is the mean difference to BF16, in % of BF16's mean loss. (Rows that raise the loss
    more differ more from window to window, so they have no deviation in common.)"""
    bf16 = losses["bf16"]
    mean = statistics.mean(bf16)
    return Results({"models": {}, "runs": [
        {"model": "lm", "row": row, "seed": window, "bf16": mean,
         "loss": mean + loss - bf16[window]}
        for row in losses for window, loss in enumerate(losses[row])]}, pooled=False)

def gradients(model, *batch):
    """{layer: dW} of the linear layers that follow a recipe, when the mean of
    model(*batch) is the loss."""
    torch.manual_seed(0)                        # of SR
    model.zero_grad()
    model(*batch).mean().backward()
    return {name: layer.weight.grad for name, layer in model.named_modules()
            if isinstance(layer, ufp4.Linear)}

def by_kind(layers, average):
    """{kind of layer: average of its values}, from {layer: value}."""
    kinds = collections.defaultdict(list)
    for name, value in layers.items():
        kinds[kind(name)].append(value)
    return {name: average(values, 0).tolist() for name, values in kinds.items()}

def bench_lm(args):
    """A language model of Hugging Face's under each recipe: its loss, its noise and its
    gradients. Or it is trained on, under each recipe."""
    lm, tokenizer, origin = load_lm(args)
    windows, others, text = windows_of(args, tokenizer)
    print(f"{origin['parameters'] / 1e6:.0f}M parameters, products in "
          f"{origin['dtype']}; text: {text['text']}, {text['characters'] / 1e3:.0f} kB,"
          f" {text['tokens']} tokens, measured on {len(windows)} windows of {WINDOW}")
    about = {"lm": origin, "text": text}
    if args.steps:
        return train_lm(args, lm, windows, others, about)
    rows, batch = ["bf16", *sum(LM_GROUPS.values(), ())], windows[:SAMPLE]
    losses, noises, cosines = {}, {}, {}
    lm.follow("bf16")
    medians, exact = sqnr_of(lm, batch), gradients(lm, batch)
    batches = math.ceil(len(windows) / BATCH)
    with tqdm(total=len(rows) * batches, unit=" batches") as bar:
        for row in rows:
            lm.follow(row)
            losses[row] = np.round(lm.on(windows, bar), 5).tolist()
            if row != "bf16":
                noises[row] = by_kind(ufp4.noise(lm, batch), np.mean)
            if row in FULL:
                cosines[row] = by_kind({
                    name: F.cosine_similarity(dw.flatten(), exact[name].flatten(),
                                              0).item()
                    for name, dw in gradients(lm, batch).items()}, np.median)
    record = {**about, "losses": losses, "noise": noises, "cosines": cosines,
              "medians": medians}
    folder = finish(args, "lm", lm_tables(record), record)
    figure(folder / "lm.png", (14, 7), draw_lm, record)
    figure(folder / "lm-slopes.png", (13, 8), draw_slopes, record["medians"])

def lm_tables(record):
    """The tables of bench_lm, from its record."""
    return corrected(paired(record["losses"]), lambda results: lm_tables_of(
        record, results))

def lm_tables_of(record, results):
    losses, noises, cosines = (record[of] for of in ("losses", "noise", "cosines"))
    rows = [
        ["row", "loss", "perplexity", "loss error, % (windows)", "against",
         "minus that, %", "noise of fprop, %", "slope of fprop"]]
    for base, row in (("bf16", "bf16"), *((base, row) for base, group in
                                          LM_GROUPS.items() for row in group)):
        loss, others = statistics.mean(losses[row]), [""] * 5
        if row != "bf16":
            noise, slope = np.mean([*noises[row].values()], 0)
            minus = on("lm", {row: 1, base: -1})
            others = [results.cell({("lm", row): 1}), *(
                ["", ""] if row == base else [f"`{base}`", results.effect(minus)]),
                f"{100 * noise:.3f}", f"{slope:.4f}"]
        rows.append([f"`{row}`", f"{loss:.4f}", f"{math.exp(loss):.2f}", *others])
    of_layers = [["noise of fprop, % (slope)", *(f"`{row}`" for row in SQUARE)]]
    of_dw = [["cosine of dW with BF16's", *(f"`{row}`" for row in FULL)]]
    for name in noises["ufp4"]:                 # kinds of layers
        of_square = (noises[row][name] for row in SQUARE)
        of_layers.append([f"`{name}`", *(f"{100 * noise:.2f} ({slope:.4f})"
                                         for noise, slope in of_square)])
        of_dw.append([f"`{name}`", *(f"{cosines[row][name]:.4f}" for row in FULL)])
    medians = record["medians"]
    slopes = slopes_table(medians)
    products = [what for what in medians if what[:2] in ("Y ", "dX", "dW")]
    return {"lm": rows,
            "lm-two-by-two": two_by_two_table(
                results, "lm", ("loss error, % (windows)", *PLAIN_OR_ROTATED)),
            "lm-noise": of_layers, "lm-dw": of_dw,
            "lm-operands": sqnr_table(medians, [what for what in medians
                                                if what not in products]),
            "lm-products": sqnr_table(medians, products),
            **({"lm-slopes": slopes} if len(slopes) > 1 else {})}

def draw_lm(fig, record):
    """Left the loss errors of the two by two, right what the RHT does to tensors."""
    left, right = fig.subfigures(1, 2, width_ratios=(1, 2.4), wspace=0.03)
    draw_two_by_two(left, paired(record["losses"]), "lm")
    left.suptitle(f"A language model of {record['lm']['parameters'] / 1e6:.0f}M:\n"
                  "loss error, forward pass in 4 bits")
    left.axes[0].set(xticklabels=PLAIN_OR_ROTATED)
    draw_sqnr(right, record["medians"])

def train_lm(args, lm, windows, others, about):
    """Continue to train the model, from the same weights, under bf16 and the two by
    two. Each run that ends is kept, and the same command goes on with the next."""
    about |= {"steps": args.steps, "lr": args.lr}
    what = [str(Path(args.model).resolve()), about]
    mark = zlib.crc32(json.dumps(what, sort_keys=True).encode())
    folder, rows = OUT / f"lm-{about['lm']['model']}-{mark:08x}", ("bf16", *SQUARE)
    start = {name: value.clone() for name, value in lm.state_dict().items()}
    runs = {}
    with tqdm(total=args.seeds * len(rows) * args.steps, unit=" steps") as bar:
        for seed in range(args.seeds):
            for row in rows:
                path = folder / f"{row}-s{seed}.json"
                if path.exists():
                    bar.total -= args.steps
                else:
                    lm.load_state_dict(start)
                    lm.follow(row, seed)
                    run = {"train": train_run(args, lm, others, seed, bar),
                           "in 4 bits": lm.on(windows)}
                    lm.follow("bf16")
                    save(path, {**run, "in BF16": lm.on(windows)})
                runs[row, seed] = json.loads(path.read_text())
    record = {**about, "runs": [{"row": row, "seed": seed, **run}
                                for (row, seed), run in runs.items()]}
    finish(args, "lm-train", lm_train_tables(record), record)

def lm_train_tables(record):
    """The tables of train_lm, from its record."""
    half = record["steps"] // 2
    whats = {"train": f"training, last {record['steps'] - half} steps",
             "in 4 bits": "validation, in 4 bits", "in BF16": "validation, in BF16"}
    loss = {(what, run["row"], run["seed"]): statistics.mean(run[what][first:])
            for run in record["runs"] for what, first in zip(whats, (half, 0, 0))}
    results = Results({"models": {}, "runs": [
        {"model": what, "row": row, "seed": seed, "loss": of,
         "bf16": loss[what, "bf16", seed]} for (what, row, seed), of in loss.items()]})
    table = [["loss error, % (seeds)", "loss of `bf16`",
              *(f"`{row}`" for row in SQUARE)]]
    for what, name in whats.items():
        bf16 = [of for (kind, row, _), of in loss.items() if (kind, row) == (
            what, "bf16")]
        table.append([name, f"{statistics.mean(bf16):.4f}",
                      *(results.cell({(what, row): 1}) for row in SQUARE)])
    return {"lm-train": table, "lm-train-pairs": corrected(
        results, functools.partial(pairs_table, pairs=whats))}

def train_run(args, lm, windows, seed, bar):
    """Train on the windows, in an order that follows from the seed. The losses."""
    torch.manual_seed(seed)                     # of SR
    optimizer = torch.optim.AdamW(lm.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    rng, losses = np.random.default_rng(seed), []
    epochs = math.ceil(args.steps * BATCH / len(windows))
    order = np.concatenate([rng.permutation(len(windows)) for _ in range(epochs)])
    for step in range(args.steps):
        optimizer.param_groups[0]["lr"] = args.lr * min(1, (step + 1) / 10)
        loss = lm(windows[order[step * BATCH:(step + 1) * BATCH]]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
        bar.update()
    return losses

# ---- cpu: what emulation costs ----

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

def training_step(s, recipe, vocab_size):
    """A function that makes a step of training a GPT, always on the same tokens."""
    torch.manual_seed(0)
    recipe = ufp4.lookup("recipe", recipe, RECIPES)
    model, optimizer = train.build(s, recipe, vocab_size)
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
    """How much longer a step of training takes on this CPU than in BF16."""
    where = f"{machine()['cpu']}, {torch.get_num_threads()} threads"
    rows = [[f"a step on {where}", "`bf16`, ms", "`ufp4` / `bf16`", "`e2m1` / `bf16`"]]
    for model, dtype in (("nano", "float32"), ("nano", "bfloat16"),
                         ("nano-moe", "float32"), ("nano-moe", "bfloat16")):
        s = train.parse_args(["--model", model, "--dtype", dtype, "--device", "cpu"])
        steps = [training_step(s, recipe, 256) for recipe in ("bf16", "ufp4", "e2m1")]
        bf16, *ours = interleaved(steps, 15)
        rows.append([f"`{model}`, {dtype}", spread(bf16, "{:.0f}"),
                     *(spread([a / b for a, b in zip(ms, bf16)]) for ms in ours)])
    finish(args, "cpu", {"cpu": rows})

# ---- dispatch: what the kernels compile to on GPUs that need not be here ----

def calls():
    """{what is measured: (its Quantizer, whether X is transposed)}."""
    q = RECIPES["ufp4"].quantizer
    return {"X, rows": (q("x", "fprop"), False), "X, columns": (q("x", "wgrad"), True),
            "dY, rows": (q("dy", "dgrad"), False),
            "dY, columns": (q("dy", "wgrad"), True)}

def compiled(name, arch):
    """The code of quantize_kernel for one of calls(), or of matmul_kernel for a recipe,
    by its language.

    This calls what launches the kernel, with tensors without memory. Triton is told
    that a GPU is here, and to compile without a launch."""
    from triton import JITFunction
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    kernels = ufp4.kernels
    target = GPUTarget("cuda", int(arch[3:]), 32)
    driver.set_active(types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0,
        get_current_stream=lambda device: 0))
    kernels.architecture = lambda device: arch
    found, run = [], JITFunction.run

    def compile_only(self, *args, warmup, **options):
        found.append(run(self, *args, warmup=True, **options))
    JITFunction.run = compile_only
    x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    if name in calls():
        q, transposed = calls()[name]
        bits = torch.empty(x.shape, dtype=torch.int16, device="meta")
        kernels.quantize(ufp4.kernels.settings_of(q), x.T if transposed else x,
                         bits if q.stochastic else None, x.dtype)
    else:
        q = RECIPES[name].quantizer("x", "fprop")
        a = kernels.quantize_native(ufp4.kernels.settings_of(q), x, None)
        kernels.matmul(x.dtype, a, a)
    return found[-1].asm

def counted_in(asm):
    """The tensor-core instructions in this code, by how often they are there, and how
    many instructions move registers to memory and back (spills). If there are none of
    the former, it quantizes: then also executed(), and the worst of written()."""
    found = collections.Counter(re.findall(r"(?:tcgen05\.|\bw?g?)mma[._][^ ;]*",
                                           asm["ptx"]))
    spills = re.findall(r"\t(?:@!?U?P\w+ )?(?:STL|LDL)", asm["sass"])
    cell = [*(f"{count} {name.split('.f32')[0]}" for name, count in found.items()),
            f"{len(spills)} spills"]
    if not found:
        full, sectors = min(written(asm["ttgir"]))
        cell = [f"{executed(asm['sass']):.1f} instructions an element", *cell,
                f"{sectors} sectors {full:.0%} full"]
    return ", ".join(cell)

def executed(sass):
    """How many instructions a thread executes for each of its 32 numbers. There are no
    loops, so it is all code up to the first exit that has no condition."""
    code = [line.split("\t")[1] for line in sass.splitlines() if "\t" in line]
    return (code.index("EXIT;") + 1) / 32

def written(ttgir):
    """For each store of codes or values: how full the sectors are that a warp writes at
    once, and how many they are.

    A sector is 32 bytes of memory. To write a part of it takes as long as all of it.
    ttgir: Triton's own code, whose layouts say which numbers a lane of the warp has. A
    row of a tile in memory is whole sectors."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<{(.*)}>", ttgir, re.M))
    stores = re.findall(
        r"tt\.store .*: tensor<([\dx]+)x!tt\.ptr<(i32|bf16)>, (#\w+)>", ttgir)
    found = []
    for shape, dtype, layout in stores:
        size, shape = {"i32": 4, "bf16": 2}[dtype], [int(n) for n in shape.split("x")]
        held, lanes, _, order = ([int(n) for n in part.split(", ")] for part in
                                 re.findall(r"\[([\d, ]+)\]", layouts[layout]))
        at_once = min(held[-1], 16 // size) if order[0] == len(shape) - 1 else 1
        firsts = np.ix_(*(np.arange(lanes[d]) * held[d] % shape[d]
                          for d in range(len(shape))))
        # Numbers of the tile, counted row by row
        numbers = np.arange(math.prod(shape)).reshape(shape)[firsts].ravel()
        numbers = np.unique(numbers[:, None] + np.arange(at_once))
        sectors = np.unique(numbers * size // 32)
        found.append((len(numbers) * size / (32 * len(sectors)), len(sectors)))
    return found

def lowering(name, arch):
    """What compiled(name, arch) has in it, as a cell.

    It is compiled in a process of its own, without the interpreter, as a compiler that
    fails an assertion ends its process. Then the cell is the last line that it said."""
    kernels = ufp4.kernels
    path = "quantize"
    if name not in calls():
        recipe = RECIPES[name]
        levels, scale, *_ = ufp4.kernels.settings_of(recipe.quantizer("x", "fprop"))
        kind = kernels.MANTISSA_BITS[levels], scale, recipe.block
        path, archs = kernels.NATIVE[kind]
        if arch not in archs:
            return "cublas"
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1"}
    code = ("import bench, sys; "
            "print(bench.counted_in(bench.compiled(*sys.argv[1:])))")
    done = subprocess.run([sys.executable, "-c", code, name, arch], cwd=HERE, env=env,
                          text=True, capture_output=True)
    return f"{path}: {last_line(done.stderr if done.returncode else done.stdout)}"

def bench_dispatch(args):
    """What the kernels compile to, for GPUs that need not be here."""
    import triton
    archs = "sm_80", "sm_90", "sm_100", "sm_120"
    rows = [[f"Triton {triton.__version__}", *archs]]
    for name in (*calls(), "ufp4-e4m3", "ufp4-mx", "nvfp4", "mxfp4"):
        rows.append([name, *(lowering(name, arch) for arch in archs)])
    finish(args, "dispatch", {"dispatch": rows})

# ---- kernels: speed on a GPU, as ratios to what that GPU can do ----

def bench_kernels(args):
    """How fast the kernels are on this GPU, as ratios to what it can do."""
    if not torch.cuda.is_available():
        raise ValueError("this measures a GPU, and torch finds none here; see dispatch")
    warnings.filterwarnings("error", "quantizing without kernels")
    from triton.testing import do_bench, do_bench_cudagraph
    timed = functools.partial(do_bench, return_mode="all")
    as_graph = functools.partial(do_bench_cudagraph, return_mode="all")
    on_gpu, median = {"device": "cuda", "dtype": torch.bfloat16}, statistics.median
    rows = [["on a GPU", torch.cuda.get_device_name()]]

    def row(name, value, ms):
        rows.append([name, f"{value:.2f}; {spread(ms, '{:.3f}')} ms"])

    def against_bf16(name, bf16, ours):
        row(f"{name}, `ufp4` / bf16", median(ours) / median(bf16), ours)

    def quantize(q, x):
        return ufp4.kernels.quantize(ufp4.kernels.settings_of(q), x,
                                     bits if q.stochastic else None, x.dtype)

    x, y = (torch.randn(8192, 8192, **on_gpu) for _ in range(2))
    bits = ufp4.random_bits(x)
    copied = 2 * x.nbytes / median(timed(lambda: y.copy_(x)))   # bytes a millisecond
    for name, (q, transposed) in calls().items():
        v = x.T if transposed else x
        ms = timed(lambda: quantize(q, v))
        moved = 2 * x.nbytes + (bits.nbytes if q.stochastic else 0)
        row(f"quantize, {name}: share of copy bandwidth",
            moved / median(ms) / copied, ms)
    ms = timed(lambda: ufp4.random_bits(x))
    row("random bits: share of copy bandwidth", bits.nbytes / median(ms) / copied, ms)
    rotated, _ = calls()["X, rows"]
    plain = replace(rotated, signs=None)
    unrotated = median(timed(lambda: quantize(plain, x)))
    ms = timed(lambda: quantize(rotated, x))
    row("RHT + quantize in one kernel / quantize alone", median(ms) / unrotated, ms)
    h = ufp4.rotate(torch.eye(16), rotated.signs).to(x)
    ms = timed(lambda: quantize(plain, (x.view(-1, 16) @ h).view(x.shape)))
    row("RHT, then quantize / quantize alone", median(ms) / unrotated, ms)
    v, dy = (torch.randn(8192, 4096, **on_gpu) for _ in range(2))
    v.requires_grad_()
    layers = [ufp4.Linear(4096, 4096, bias=False, **on_gpu, recipe=recipe)
              for recipe in ("bf16", "ufp4")]

    def both_passes(layer):
        torch.autograd.grad(layer(v), (v, layer.weight), dy)
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
    passes = [functools.partial(both_passes, layer) for layer in layers]
    against_bf16("linear layer, forward + backward", *interleaved(passes, 30))
    # Without Python's time
    against_bf16("linear layer, as a CUDA graph", *map(as_graph, passes))
    for name, flags in (
            ("`small`", "--model small"),
            ("`small`, compiled", "--model small --compile"),
            ("1B parameters, compiled",
             "--model small --layers 16 --dim 2048 --heads 16 --hidden 5632 "
             "--seq-len 2048 --batch-size 4 --compile")):
        s = train.parse_args(f"{flags} --device cuda --dtype bfloat16".split())
        torch.compiler.reset()      # or a second model's sizes would be variables
        steps = [training_step(s, recipe, 50304) for recipe in ("bf16", "ufp4")]
        against_bf16(f"training step, {name}", *interleaved(steps, 30))
    finish(args, "kernels", {"kernels": rows})

# ---- runs: your runs of train.py ----

def logged(log, name):
    """{step: value} of the lines of a log that have this value."""
    return {line["step"]: line[name] for line in log[1:] if line.get(name) is not None}

# Settings in which a run and the bf16 run that it is compared with may differ. They are
# those of the recipe, and others that change at most random bits and the order of sums.
# (Of `data`, a path, the version is compared.)
MAY_DIFFER = {*train.COMMANDS, *train.RECIPE_FIELDS, "recipe", "keep_bf16", "data",
              "device", "compile", "remat", "grad_accum", "eval_interval",
              "log_interval", "save_interval", "keep", "save_at", "max_new_tokens"
              } - {"init"}

def errors_of(log, logs):
    """-> ({step: loss error in %} of a run, where the bf16 run with its settings was
    validated, too; or why there are none). A file of --with may change the optimizer,
    so both must have been started with the same."""
    ours, found, why = log[0], None, "no bf16 run"
    for first, *lines in logs:
        settings = first["settings"]
        differ = {name for name in ours["settings"].keys() - MAY_DIFFER
                  if settings.get(name) != ours["settings"][name]}
        # What was changed when a run was resumed holds for a part of it
        differ |= {name for name in {*ours["changed"], *first["changed"]} - MAY_DIFFER
                   if ours["changed"].get(name) != first["changed"].get(name)}
        resumed = "recipe" in first["changed"] and not settings["init"]
        if (settings["recipe"] == "bf16" and not first["start"] and not resumed
                and first["data_version"] == ours["data_version"]):
            if not differ:
                bf16 = logged([first, *lines], "val_loss")
                errors = {step: 100 * (loss / bf16[step] - 1) for step, loss
                          in logged(log, "val_loss").items() if step in bf16}
                found = max(found or {}, errors, key=len)
            if differ == {"with_"}:
                why = "bf16 run has another --with"
    return ({}, why) if found is None else (found, "")

def bench_runs(args):
    """A table of the runs in a folder, at their last validation, and runs.png in it.
    Each is compared with the bf16 run that has the same settings."""
    logs = {}
    for path in sorted(args.dir.glob("*/log.jsonl")):
        try:
            logs[path.parent.name] = train.read_log(path)
        except ValueError as e:
            print(f"skipped: {e}")
    if not logs:
        raise ValueError(f"{args.dir} has no run of train.py; "
                         "python train.py --recipe bf16 makes one")

    def last(values, form):
        return form.format(values[max(values)]) if values else ""

    rows = [["run", "data", "steps", "validation loss", "loss error, %", "tokens/s"]]
    for name, log in logs.items():
        s = log[0]["settings"]
        errors, why = errors_of(log, logs.values())
        rows.append([name, Path(s["data"]).name,
                     f"{log[-1].get('step', 0)} of {s['steps']}",
                     last(logged(log, "val_loss"), "{:.4f}"),
                     last(errors, "{:+.2f}") or why,
                     last(logged(log, "tokens_per_s"), "{:,.0f}")])
    print_table(rows)
    figure(args.dir / "runs.png", (9, 8), draw_runs, logs)

def draw_runs(fig, logs):
    """Validation losses, and below them the loss error of each run, over the steps. The
    twelve with the lowest losses are named, others gray."""
    above, below = fig.subplots(2, 1, sharex=True)
    ends = {name: [*logged(log, "val_loss").values()][-1:] or [math.inf]
            for name, log in logs.items()}
    named = sorted(ends, key=ends.get)[:12]     # more would hide the curves
    for name, log in logs.items():
        style = {"label": name} if name in named else {"color": "#cccccc", "zorder": 0}
        for ax, values in ((above, logged(log, "val_loss")),
                           (below, errors_of(log, logs.values())[0])):
            values.pop(0, None)         # before the first step all are far above
            ax.plot(values.keys(), values.values(), "o-", ms=3.5, **style)
    above.set(ylabel="validation loss, nats a token")
    below.axhline(0, color="black", lw=0.8, zorder=0)
    below.set(xlabel="steps", ylabel="loss error above BF16, %")
    fig.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=2)

# ---- The commands ----

def bench_train(args):
    """train.py, with the recipes of this file. Studies start their runs by this."""
    set_norms(train.parse_args(args.train).model)
    train.main(args.train)

def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = "study", "use", "sqnr", "lm", "cpu", "dispatch", "kernels"
    parsers = {}
    for name in (*measuring, "runs", "train", "readme"):
        parsers[name] = commands.add_parser(
            name, allow_abbrev=False, add_help=name != "train",
            description=globals()[f"bench_{name}"].__doc__)
        if name in measuring:
            parsers[name].add_argument("--record", action="store_true", help="into "
                                       "data/results, not out/bench")
    use = parsers["use"]
    use.add_argument("run", type=Path, help="its folder, or a checkpoint")
    use.add_argument("--recipes", nargs="+", metavar="RECIPE",
                     help=f"(default: its own, {', '.join(TRAINED)})")
    use.add_argument("--text", type=Path, metavar="FILE",
                     help="(default: the validation text of the run)")
    use.add_argument("--windows", type=int, metavar="N", default=128,
                     help="spaced evenly over the text (default: 128)")
    parsers["sqnr"].add_argument("dir", type=Path, help="of a run of train.py")
    lm = parsers["lm"]
    lm.add_argument("model", help="a folder, or a name from huggingface.co")
    lm.add_argument("--gguf", metavar="FILE", help="the model, in that folder")
    lm.add_argument("--text", type=Path, metavar="FILE", help="(default: English from "
                    "the descriptions of the installed packages)")
    lm.add_argument("--windows", type=int, metavar="N", default=24,
                    help="of %d tokens, spaced evenly over the text" % WINDOW)
    lm.add_argument("--dtype", choices=("float32", "bfloat16"), help="of products "
                    "(default: bfloat16 if the hardware has it)")
    lm.add_argument("--train", dest="steps", type=int, metavar="STEPS", help="continue "
                    "to train the model, under bf16 and each grid, rotated or not")
    lm.add_argument("--seeds", type=int, metavar="N", default=3, help="of --train")
    lm.add_argument("--lr", type=float, metavar="RATE", default=1e-4, help="of --train")
    parsers["runs"].add_argument("dir", type=Path, help="of runs (default: out)",
                                 nargs="?", default=Path("out"))
    study = parsers["study"]
    study.epilog = "More flags are for train.py."
    study.add_argument("study", choices=STUDIES)
    study.add_argument("--models", nargs="+", metavar="MODEL", help="of its models")
    study.add_argument("--rows", nargs="+", metavar="ROW", help="in place of its rows")
    study.add_argument("--seeds", type=int, metavar="N")
    study.add_argument("--jobs", type=int, metavar="N", help="runs at a time",
                       default=1 if torch.cuda.is_available() else os.cpu_count())
    study.add_argument("--with", dest="file", type=Path, metavar="FILE",
                       help="a Python file that adds recipes to ufp4.RECIPES")
    args, args.train = parser.parse_known_args(argv)
    if args.train and args.command not in ("train", "study"):
        parser.error(f"unknown arguments: {' '.join(args.train)}")
    try:
        globals()[f"bench_{args.command}"](args)
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"bench.py: {e}")

if __name__ == "__main__":
    main()
