"""What was tried, as data: models, rows, and which rows on which models.

A row is what is measured beside BF16: a recipe, or a recipe with flags of train.py."""
from dataclasses import dataclass

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
          "no-norms-0.3m": sized("nano", 2, 96, 3, 256, 2645),
          "all-128": sized("nano", 2, 128, 4, 384, 800)}    # multiples of 128
# The same as dense-0.3m, from seeds that it has had, but run anew, with the random bits
# that ufp4.py draws now. Under one name two runs of a seed would be taken for one
MODELS["dense-0.3m-anew"] = MODELS["dense-0.3m"]
DEPTHS = (2, 4, 8, 16, 32)          # blocks. All read the same text
MODELS |= {f"depth-{n}": sized("nano", n, 64, 2, 176, 800) for n in DEPTHS}
WITH = {"no-norms-0.3m": "no_norms.py"}         # files of --with for all their runs
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
# What is free on Blackwell
ROWS |= {f"{recipe}-last-block-bf16": f"--recipe {recipe} --keep-bf16 1"
         for recipe in ("four-over-six-e4m3", "ufp4-e4m3")}
# fprop in 4 bits, and the backward pass in BF16
ROWS |= {f"{recipe}-fprop-only-early": f"--recipe {recipe} --gemms fprop"
         for recipe in ("e2m1", "ufp4")}

def row_flags(row):
    """A row is called by a recipe, by a name in ROWS, or as in "ufp4 --keep-bf16 1"."""
    return ROWS.get(row, f"--recipe {row}").split()

# {format: its row with the RHT on wgrad alone, and with the RHT on all three GEMMs}
TWO_BY_TWO = {"e2m1": ("e2m1", "e2m1-full-rht"), "e1m2": ("ufp4-rht-wgrad", "ufp4")}
SQUARE = sum(TWO_BY_TWO.values(), ())           # the four rows of the two by two
WITHIN_E4M3 = {"e2m1": ("e2m1-e4m3", "e2m1-full-rht-e4m3"),
               "e1m2": ("ufp4-e4m3-rht-wgrad", "ufp4-e4m3")}
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
# Uniform grids of 8, 7 and 6 levels, rotated. All their bins between two levels are
# symmetric, so they say what the noise of rounding costs if nothing else does
UNIFORM = ("ufp4", "u7", "u6")
LINES = {DOSES: "doses", UNIFORM: "uniform grids"}      # lines through rows
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
    line: tuple = ()                # rows through which beyond_line() draws its line
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
        "mxfp4": ("mxfp4", "ufp4-mx")}, line=DOSES),
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
        "e2m1-full-rht": ("e2m1-full-rht", "e2m1-full-rht-debiased")}, line=DOSES),
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
        seeds=range(5, 10)),
    # Written down before the runs. X is the loss error of e2m1-full-rht minus what the
    # line through ufp4, u7 and u6 has at its noise, without slopes. These three round
    # to nearest on uniform grids, so the line says what rounding noise costs.
    # X <= 0.08%: the lopsided bins cost what their noise costs, and no more.
    # X >= 0.16%: they cost more, and the paper's mechanism is seen. Between: open
    "bins": Study(("dense-0.3m-anew",), {
        "ufp4": ("ufp4", "u7", "u6", "ufp4-shift+0.1", "ufp4-shift-0.1"),
        "e2m1-full-rht": ("e2m1-full-rht", "e2m1-full-rht-own",
                          "e2m1-full-rht-own-fill")}, seeds=range(10),
        line=UNIFORM),
    # Predicted: the lead under E4M3 scales 0.55 +- 0.23; four-over-six with E4M3 scales
    # and the last block in BF16 0.75 to 0.9%
    "hardware": Study(("dense-0.3m-anew",), {
        "ufp4-e4m3": ("ufp4-e4m3", "e2m1-e4m3", "e2m1-full-rht-e4m3",
                      "ufp4-e4m3-rht-wgrad", "four-over-six-e4m3",
                      "ufp4-e4m3-last-block-bf16",
                      "four-over-six-e4m3-last-block-bf16"),
        "ufp4-hif4": ("ufp4-hif4", "e2m1-hif4")}, seeds=range(10)),
    # What fprop alone costs, what the backward pass alone, and whether both add up to
    # the whole: all from the same seeds
    "fprop-only": Study(("dense-0.3m",), {
        f"{recipe}-early": (f"{recipe}-early", f"{recipe}-fprop-only-early",
                            f"{recipe}-fprop-bf16-early")
        for recipe in ("e2m1", "ufp4")}, seeds=range(10, 15)),
    "early-seeds": Study(("dense-0.3m",), {
        "ufp4-early": ("ufp4-early", "e2m1-early")}, seeds=range(10, 30))}

# What a language model is measured under
LM_GROUPS = STUDIES["loss"].groups | {"ufp4-weights": (
    "ufp4-weights", "ufp4-weights-rht-wgrad", "e2m1-weights", "e2m1-full-rht-weights")}
PLAIN_OR_ROTATED = "not rotated in fprop", "rotated"
