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
    python bench.py study bins      what do the lopsided bins of E2M1 cost?
    python bench.py study hardware  the finding within the scales of Blackwell
    python bench.py study fprop-only    fprop in 4 bits, the backward pass in BF16
    python bench.py study early-seeds   more seeds of the lead from warm-up on
    python bench.py use RUN     the weights of a run of yours under other recipes
    python bench.py sqnr DIR    which grid suits the tensors of a run, and the RHT
    python bench.py lm MODEL    a language model of Hugging Face's under each recipe
                                (20 min for 135M parameters)
    python bench.py cpu         what emulation takes on this CPU (4 min)
    python bench.py dispatch    what the kernels compile to on GPUs not here (2 min)
    python bench.py kernels     their speed on this GPU, against copying and cuBLAS
    python bench.py runs        your own runs of train.py, as a table and as curves

`study` takes `--with mine.py`, a file that adds recipes of yours. So `study quick
--with mine.py --rows ufp4 mine` measures your recipe beside ufp4. Rows start at two
thirds of the steps: one that changes over time may need `--start N`. All studies but
quick take hours. They keep each run, and go on after Ctrl-C. A run is named after its
flags and its code, so that none of other code is used. More flags are for train.py:
`study loss --seeds 2 --steps 300` is a quick look.

What is measured goes to out/bench, in the folder where you stand. With --record it goes
to data/results beside this file. What the pages there are made of stands there, too:
data/results/studies.py says what studies train, recipes.py has the recipes that were
tried, and `python data/results/report.py` makes tables and figures from the records.
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
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "data" / "results"
sys.path[:0] = str(HERE), str(RECORDS)      # what is imported stands there
import train                        # before torch: it sets how CPU threads wait

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import ufp4
import report
from figures import (GRIDS, draw_lm, draw_rows, draw_slopes, draw_sqnr,
                     draw_two_by_two, figure)
from report import Results, labelled, measured, sqnr_table
from studies import (LM_GROUPS, MODELS, ROWS, SHORT_TEXTS, SQUARE, STUDIES, TRAINED,
                     WITH, row_flags)
from train import prepare
from ufp4 import RECIPES

# Runs and what is measured go to where one stands, as those of train.py do
OUT = Path("out") / "bench"
OURS = dict(RECIPES)                # those of ufp4.py
TRIED = RECORDS / "recipes.py"      # a file of --with, which has those that were tried

def tried():
    """Add the recipes that were tried to RECIPES. Returns them with those of ufp4.py.
    """
    train.import_with(str(TRIED))
    return dict(RECIPES)

# ---- Records ----

def machine():
    """What measures, and the commit of the code that it runs."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu, has_bf16 = train.hardware("cpu")
    return {"cpu": cpu, "has_bf16": has_bf16, "cores": os.cpu_count(), "gpu": gpu,
            "torch": torch.__version__, "python": platform.python_version(),
            "commit": train.git_commit()}

def save(path, results):
    """Write a dict as JSON, a line for each value, and one for each dict in a list."""
    def lines(value):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n" + ",\n".join(map(json.dumps, value)) + "]"
        return json.dumps(value)

    text = ",\n".join(f"{json.dumps(key)}: {lines(of)}" for key, of in results.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".tmp")
    part.write_text("{" + text + "}\n")
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
    print(f"saved in {folder}")
    return folder

def last_line(said):
    """The last line that a process has said. A progress bar ends its line with \\r."""
    return (said.strip().splitlines() or ["it died without a word"])[-1]

# ---- Jobs: a job is a process of train.py that leaves a result ----

def start_of(row, s, start=None):
    """-> (the row from whose checkpoint a row starts, the step of that), with settings
    s. A row trains the last third of the steps, or those from `start` on, from the bf16
    run with its seed. This cancels most of what differs from seed to seed by chance. An
    early row starts right after warm-up. A late row starts from the recipe that it
    changes."""
    if row == "bf16":
        return None, 0
    base, late, change = row.partition("-late-")
    if late:
        steps = change.rpartition("-")[2]
        return base, (s.steps - int(steps) if steps.isdigit()
                      else 5 * math.ceil(s.steps / 6))      # for the last sixth
    if row.endswith("-early"):
        return "bf16", s.warmup
    return "bf16", 2 * s.steps // 3 if start is None else start

def averaged_steps(s):
    """The steps whose weights are averaged: eight, evenly over the last tenth."""
    return [s.steps - n * (s.steps // 80) for n in range(8)]

# What a run depends on besides its flags
CODE = [HERE / name for name in ("train.py", "ufp4.py", "kernels.py", "bench.py",
                                 "data/prepare.py")]

def files_with(path):
    """The file of --with, and what it has imported from its folder."""
    folder, loaded = Path(path).resolve().parent, {Path(path).resolve()}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_file():       # torch.classes names one that is not
            loaded.add(Path(file).resolve())
    own = {RECORDS / name for name in ("studies.py", "report.py", "figures.py")}
    return sorted(file for file in loaded - own - {*CODE}
                  if folder in file.parents and "site-packages" not in file.parts)

class Job:
    """A row on a model with a seed. Its folder has what it has found: result.json, of
    training, and used.json, of its weights under other recipes."""

    def __init__(self, args, jobs, model, row, seed):
        self.key = self.model, self.row, self.seed = model, row, seed
        flags = [*MODELS[model], *row_flags(row), "--seed", str(seed), *args.train]
        self.settings = s = train.parse_args(flags)
        base, self.first = start_of(row, s, args.start)
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
        val = prepare.read_tokens(prepare.prepare(s.data)[1])
        self.windows = (len(val) - 1) // s.seq_len
        if args.study == "quick":
            self.windows = max(1, self.windows // 4)
        flags += f"--eval-interval 0 --eval-windows {self.windows}".split()
        files = list(CODE)
        if not s.with_:                 # else the row has a file of its own
            s.with_ = (str(RECORDS / WITH[model]) if model in WITH else
                       str(args.file.resolve()) if s.recipe in args.mine else
                       str(TRIED) if s.recipe not in OURS else "")
            # "": a resumed run would take that of the run that it starts from
            flags += "--with", s.with_
        if s.with_:
            files += files_with(s.with_)
        if Path(s.data).is_file():
            files.append(Path(s.data))
        # What a run computes is in the name of its folder: its flags, and its files
        of = [" ".join([*flags, str(self.first)]).encode(),
              *(path.read_bytes() for path in files)]
        name = re.sub(r"[^\w.]+", "-", f"{model}-{row}")
        self.name = f"{name}-s{seed}"
        self.folder = OUT / "runs" / f"{self.name}-{zlib.crc32(b''.join(of)):08x}"
        self.flags = [*flags, "--out", str(self.folder)]

    def others(self):
        """Folders with results of this row by other flags, or by other code."""
        found = OUT.glob(f"runs/{self.name}-????????/result.json")
        return [path.parent for path in found if path.parent != self.folder]

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
        return [sys.executable, str(HERE / "train.py"), *flags]

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
        """How many of its steps are done, by the end of its log. This is asked each
        second, so nothing else of the log is read."""
        try:
            with open(self.folder / "log.jsonl", "rb") as file:
                file.seek(-min(4096, file.seek(0, os.SEEK_END)), os.SEEK_END)
                steps = re.findall(rb'"step": (\d+)', file.read())
        except OSError:                                 # it has not begun
            return 0
        return max(0, int(steps[-1]) - self.first) if steps else 0

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
    tried()
    path = Path(path)
    s = train.parse_args(["--resume", str(path)])
    vocab_size, found = train.read_run(path)["vocab_size"], {}
    _, tokens, _ = train.load_data(s, vocab_size)
    if text == "other code":
        tokens = np.array(prepare.encode(other_code(), s.data))
    for row in rows:
        model = load_under(path, row, s.device)
        model.config.eval_windows = windows
        if steps:
            average_weights(model, path.parent, steps)
        found[row] = train.validate(model, tokens, model.config)["val_loss"]
    return found

def load_under(path, row, device="cpu"):
    """The model of a checkpoint, whose layers follow the recipe of a row."""
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
    others = sum(bool(job.others()) and not job.result() for job in jobs)
    if others:
        print(f"{others} more are there by other flags or other code, and not used")
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
        if job.settings.with_ not in ("", str(TRIED)):
            s = job.settings
            training_step(s, train.make_recipe(s), prepare.vocabulary(s.data))()

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
            model = train.GPT(s, RECIPES["bf16"], prepare.vocabulary(s.data))
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
            if "--with" not in row.split():
                check_name("row", row if row in ROWS else row.split()[0],
                           RECIPES | ROWS)
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
    if args.record and (args.train or args.file or args.start is not None):
        raise ValueError("--record takes no --with, --start or flags of train.py")
    if args.record and args.study == "quick":
        raise ValueError("--record: quick validates on a quarter of the text; study "
                         "nano has its rows")
    for flags, names in ((args.train, SET_BY_STUDY), (" ".join(args.rows or []).split(),
                                                      SET_BY_STUDY | SAME_IN_ALL)):
        taken = [text for text in flags if text.split("=")[0] in names]
        if taken:
            raise ValueError(f"a study sets {', '.join(taken)} itself, for all rows")
    known = tried()
    if args.file:
        train.import_with(str(args.file.resolve()))
    args.mine = {name for name, recipe in RECIPES.items() if recipe is not
                 known.get(name)}
    changed = [name for name in OURS if name in args.mine]
    if changed:
        raise ValueError(f"{args.file} changes the recipe {', '.join(changed)}, with "
                         "which others are compared: add one by another name")
    study = STUDIES[args.study]
    mine = [name for name in RECIPES if name not in known]
    taken = [name for name in mine
             if name in ROWS or "-late-" in name or name.endswith("-early")]
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
        return print("python data/results/report.py makes the tables and figures")
    results = Results(measured(records["runs"]), records["models"])
    tables = labelled(report.tables_of(results, {args.study: study}))
    for table in tables.values():
        print_table(table)
    if args.seeds == 1 or len(study.seeds) == 1 and not args.seeds:
        print("One seed settles nothing. --seeds 5 tells more.")
    if len(study.models) == 1 and results.values:
        (model,) = study.models
        two_by_two = args.study == "quick" and all(
            math.isfinite((results.interval(model, row) or [math.nan])[0])
            for row in SQUARE)
        figure(OUT / f"{args.study}.png", (5, 4.9),
               *([draw_two_by_two, results, model] if two_by_two else
                 [draw_rows, results, model, study.rows]))
    if failed:
        sys.exit(f"{failed}\nbench.py: the same command tries these again")

# ---- use: trained weights under other recipes ----

def bench_use(args):
    """The weights of a run of train.py under recipes that it need not have been trained
    under: validation loss, noise and slope in fprop, and the cosine of the gradients
    (dW of all layers but experts, as one vector) with those in BF16."""
    tried()
    path = train.find_checkpoint(args.run)
    s = train.parse_args(["--resume", str(path)])
    shards, val, _ = train.load_data(s, train.read_run(path)["vocab_size"])
    if args.text:
        val = np.array(prepare.encode(args.text.read_text(), s.data))
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

def padded(x):
    """x, its last dimension filled up with zeros to whole blocks, as layers do it."""
    return F.pad(x, (0, -x.shape[-1] % 16)).contiguous()

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
        plain = [padded(a), padded(b)]
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

# ---- lm: a language model of Hugging Face's under each recipe ----

WINDOW = 512                                    # tokens
BATCH = 4                                       # windows of a forward pass, and a step
SAMPLE = 2                                      # windows for noise and gradients

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
    tried()
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
            if row in STUDIES["loss"].rows:
                cosines[row] = by_kind({
                    name: F.cosine_similarity(dw.flatten(), exact[name].flatten(),
                                              0).item()
                    for name, dw in gradients(lm, batch).items()}, np.median)
    record = {**about, "losses": losses, "noise": noises, "cosines": cosines,
              "medians": medians}
    folder = finish(args, "lm", report.lm_tables(record), record)
    figure(folder / "lm.png", (14, 7), draw_lm, record)
    figure(folder / "lm-slopes.png", (13, 8), draw_slopes, record["medians"])

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
    finish(args, "lm-train", report.lm_train_tables(record), record)

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
    model = train.build_model(s, recipe, vocab_size)
    model.init_weights(s.seed)
    optimizer = train.build_optimizer(model, s)
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
    # Triton 3.10 is to fuse no products and sums by default, which takes more
    # instructions. So say what is counted
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1",
           "TRITON_DEFAULT_FP_FUSION": "1"}
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
    """A table of the runs in a folder, at their last validation, with the settings in
    which they differ, and runs.png in it. Each is compared with the bf16 run that has
    the same settings."""
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

    def at(values, steps):          # for a run that stopped after its last validation
        return f" (step {max(values)})" if values and max(values) < steps else ""

    differ = differing([log[0]["settings"] for log in logs.values()])
    rows = [["run", *map(train.flag, differ), "steps", "training loss",
             "validation loss", "loss error, %", "tokens/s"]]
    for name, log in logs.items():
        s = log[0]["settings"]
        errors, why = errors_of(log, logs.values())
        losses = logged(log, "val_loss")
        rows.append([name, *(shown(s.get(setting)) for setting in differ),
                     f"{log[-1].get('step', 0)} of {s['steps']}"
                     + (", diverged" if "diverged" in log[-1] else ""),
                     last(logged(log, "train_loss"), "{:.4f}"),
                     last(losses, "{:.4f}") + at(losses, log[-1].get("step", 0)),
                     last(errors, "{:+.2f}") or why,
                     last(logged(log, "tokens_per_s"), "{:,.0f}")])
    print_table(rows)
    figure(args.dir / "runs.png", (9, 8), draw_runs, logs)

def differing(settings):
    """The names of the settings that are not the same in all runs. Commands, such as
    --out, are none."""
    names = dict.fromkeys(name for of in settings for name in of)
    return [name for name in names if name not in {*train.COMMANDS, "steps"}
            and len({str(of.get(name)) for of in settings}) > 1]

def shown(value):
    """A setting as a cell. Of a path the last part is enough."""
    return "" if value is None else re.sub(r".*/(?=.)", "", str(value))

def draw_runs(fig, logs):
    """Validation losses, and below them the loss error of each run, over the steps. The
    twelve with the lowest losses are named, others gray."""
    above, below = fig.subplots(2, 1, sharex=True)
    ends = {name: [*logged(log, "val_loss").values()][-1:] or [math.inf]
            for name, log in logs.items()}
    named = sorted(ends, key=ends.get)[:12]     # more would hide the curves
    for name, log in logs.items():
        style = {"color": "#cccccc", "zorder": 0}
        if name in named:               # there are ten colors
            number = named.index(name)
            style = {"label": name, "color": f"C{number % 10}",
                     "ls": "-" if number < 10 else "--"}
        for ax, values in ((above, logged(log, "val_loss")),
                           (below, errors_of(log, logs.values())[0])):
            values.pop(0, None)         # before the first step all are far above
            ax.plot(values.keys(), values.values(), marker="o", ms=3.5, **style)
    above.set(ylabel="validation loss, nats a token")
    below.axhline(0, color="black", lw=0.8, zorder=0)
    below.set(xlabel="steps", ylabel="loss error above BF16, %")
    fig.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=2)

# ---- The commands ----

def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = "study", "use", "sqnr", "lm", "cpu", "dispatch", "kernels"
    parsers = {}
    for name in (*measuring, "runs"):
        parsers[name] = commands.add_parser(
            name, allow_abbrev=False,
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
    study.epilog = ("All other flags are those of train.py, for all rows: --steps, "
                    "--data, --lr, --batch-size, --layers, ... Not those that a study "
                    f"sets itself: {', '.join(sorted(SET_BY_STUDY))}.")
    study.add_argument("study", choices=STUDIES)
    study.add_argument("--models", nargs="+", metavar="MODEL", help="of its models")
    study.add_argument("--rows", nargs="+", metavar="ROW", help="in place of its rows")
    study.add_argument("--seeds", type=int, metavar="N")
    study.add_argument("--jobs", type=int, metavar="N", help="runs at a time",
                       default=1 if torch.cuda.is_available() else os.cpu_count())
    study.add_argument("--with", dest="file", type=Path, metavar="FILE",
                       help="a Python file that adds recipes to ufp4.RECIPES")
    study.add_argument("--start", type=int, metavar="N", help="the step of the bf16 "
                       "run from which rows start (default: two thirds of its steps)")
    args, args.train = parser.parse_known_args(argv)
    if args.train and args.command != "study":
        parser.error(f"unknown arguments: {' '.join(args.train)}")
    try:
        globals()[f"bench_{args.command}"](args)
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"bench.py: {e}")

if __name__ == "__main__":
    main()
