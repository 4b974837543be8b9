"""Each claim, one command, one table, one file of numbers, one figure.

    python bench.py bias            geometry of the grids: bins, per-bin bias, slopes, how shrinkage compounds (1 min)
    python bench.py cpu             what emulation costs on this CPU: fake_quantize, and a training step, against BF16
    python bench.py loss            BF16-relative loss error of recipes, paired seeds (hours; --quick for a first look)
    python bench.py ablate          the same for the paper's ablations
    python bench.py dispatch        the tensor-core instruction of each recipe on each GPU, compiled without one
    python bench.py scale           step time and memory over processes, tokens a step, experts (10 min, on a CPU)
    python bench.py readme          write the tables of README.md anew from data/results

Each but the last writes data/results/NAME.json: settings, seeds, versions, machine and every number. bias also draws
NAME.png.
loss and ablate save each run as it ends and go on where they stopped.
"""
import argparse
import collections
import concurrent.futures
import functools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import ufp4

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "data" / "results"

# ---------------------------------------------------------------------------------------------------------------
# Common: results on disk, figures, statistics


def machine():
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"torch": torch.__version__, "python": platform.python_version(), "device": device, "cores": os.cpu_count()}


def save(name, results):
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    part = path.with_name(path.name + ".tmp")
    part.write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
    os.replace(part, path)


def figure(name, columns, draw, height=3.4):
    """Draw on `columns` axes side by side and write NAME.png."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, columns, figsize=(4.6 * columns, height), layout="constrained")
    draw(axes)
    fig.savefig(RESULTS / f"{name}.png", dpi=120)
    print(f"wrote {RESULTS / name}.json and .png")


def interval(values):
    """Mean and half-width of its 95% confidence interval (Student's t), None for a single value."""
    t = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
    n = len(values)
    half = None if n < 2 else t.get(n, 2.0) * statistics.stdev(values) / math.sqrt(n)
    return statistics.mean(values), half


def median_time(f, repeats):
    """Median, smallest and largest seconds of f() after two warm-ups."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]), min(times[2:]), max(times[2:])


# ---------------------------------------------------------------------------------------------------------------
# bias: the geometry of shrinkage (the paper's sections 1 and 2)

GRIDS = ("e2m1", "e1m2")


def bins(levels):
    """[(q, left half-width, right half-width)] of the interior levels."""
    return [(q, (q - a) / 2, (b - q) / 2) for a, q, b in zip(levels, levels[1:], levels[2:])]


def bin_bias(fmt):
    """Measured mean of rho(t) - t over t spread evenly over each interior bin, beside (l - r) / 2."""
    f, rows = ufp4.get_format(fmt), []
    for q, left, right in bins(f.levels):
        t = q - left + (left + right) * (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
        rounded = ufp4.round_to_grid(t.float(), f).double()
        rows.append({"level": q, "left": left, "right": right, "closed": (left - right) / 2,
                     "measured": (rounded - t).mean().item()})
    return rows


def gaussian_slope(levels, block=16):
    """alpha = E<Q(x), x> / E<x, x> for blocks of independent Gaussians, FP32 scales, nearest rounding; in float64.

    Given the block's maximum m (density 16 f(m) F(m)^15, f and F the half-normal density and distribution), one value
    is exact and contributes m^2, and the 15 others are half-normal on [0, m]. Their integral of rho(t) x f(x) is a
    sum over bins, since the integral of x f(x) from a to b is f(a) - f(b). The integral over m is a trapezoid sum.
    """
    m = torch.linspace(1e-3, 9, 20_001, dtype=torch.float64)
    pdf = math.sqrt(2 / math.pi) * torch.exp(-m * m / 2)
    cdf = torch.erf(m / math.sqrt(2))
    edges = [(a + b) / 2 for a, b in zip(levels, levels[1:])] + [levels[-1]]
    inner, f_low = torch.zeros_like(m), None
    for level, edge in zip(levels, edges):
        f_high = math.sqrt(2 / math.pi) * torch.exp(-(m * edge / levels[-1]) ** 2 / 2)
        if f_low is not None:
            inner += level * m / levels[-1] * (f_low - f_high)
        f_low = f_high
    return torch.trapezoid(block * pdf * cdf ** (block - 1) * (m * m + (block - 1) * inner / cdf), m).item() / block


def samples(kind, shape, generator):
    """Test data: shape (R, K) float32."""
    normal = torch.randn(shape, generator=generator)
    if kind == "gaussian":
        return normal
    if kind == "laplace":
        return torch.distributions.Laplace(0.0, 1.0).icdf(torch.rand(shape, generator=generator).clamp(1e-7, 1 - 1e-7))
    if kind == "student-t":                             # 3 degrees of freedom: normal / root mean square of 3 normals
        return normal / torch.randn((3, *shape), generator=generator).square().mean(0).sqrt()
    return torch.nn.functional.silu(normal * 2) * torch.randn(shape, generator=generator) * 2       # swiglu


def slope(q, x):
    """alpha = <Q(x), x> / <x, x> and its standard error, from the spread over rows."""
    xd, qd = x.double(), q.double()
    a = ((qd * xd).sum() / xd.square().sum()).item()
    residual = ((qd - a * xd) * xd).sum(-1)
    return a, (residual.square().sum().sqrt() / xd.square().sum()).item()


def bench_bias(args):
    g = torch.Generator().manual_seed(args.seed)
    results = {"seed": args.seed, "bins": {f: bin_bias(f) for f in GRIDS}, "slopes": [], "scales": []}
    print("bin of level:   " + "   ".join(f"{r['level']:g}" for r in results["bins"]["e2m1"]) + "   (e2m1)")
    for f in GRIDS:
        print(f"{f} bias, measured: " + " ".join(f"{r['measured']:+.4f}" for r in results["bins"][f]))
        print(f"{f} bias, (l-r)/2 : " + " ".join(f"{r['closed']:+.4f}" for r in results["bins"][f]))
    shape, signs = (8192, 512), ufp4.random_signs(args.seed)
    print(f"\nslope alpha, nearest, FP32 scales, {shape[0] * shape[1]:,} values (standard error)")
    for kind in ("gaussian", "laplace", "student-t", "swiglu"):
        x = samples(kind, shape, g)
        for rotated in (False, True):
            data = ufp4.rht(x, signs) if rotated else x
            for f in GRIDS:
                a, se = slope(ufp4.fake_quantize(data, f), data)
                closed = gaussian_slope(ufp4.get_format(f).levels) if kind == "gaussian" else None
                results["slopes"].append({"data": kind, "rht": rotated, "fmt": f, "alpha": a, "se": se,
                                          "closed": closed})
                print(f"{kind:10s} {'RHT' if rotated else '   '} {f}  {a:.5f} ({se:.5f})" +
                      (f"  closed form {closed:.5f}" if closed else ""))
    print("\nslope alpha by scale kind, Gaussian (standard error)")
    x = samples("gaussian", shape, g)
    for scale, block in (("fp32", 16), ("e4m3", 16), ("e8m0", 32)):
        for f in GRIDS:
            for stochastic in (False, True):
                a, se = slope(ufp4.fake_quantize(x, f, scale, block, stochastic, g), x)
                results["scales"].append({"scale": scale, "block": block, "fmt": f, "stochastic": stochastic,
                                          "alpha": a, "se": se})
                print(f"{scale} {f} {'SR     ' if stochastic else 'nearest'}  {a:.5f} ({se:.5f})")
    results["chain"] = [chain(f, args.seed) for f in GRIDS]
    for c in results["chain"]:
        print(f"\n{c['fmt']}, RHT: chain of K GEMMs: K, measured attenuation, prod(eta), exp(-sum delta)")
        for k in (1, 2, 4, 8, 16, 32, 64, 128):
            print(f"{k:4d}  {c['measured'][k - 1]:.4f}  {c['prod_eta'][k - 1]:.4f}  {c['exp_delta'][k - 1]:.4f}")
    save("bias", results)
    figure("bias", 3, lambda axes: draw_bias(axes, results))


def chain(fmt, seed, depth=128, n=512):
    """X <- Q(X) Q(W)^T again and again, W random orthogonal (so that the exact chain keeps its norm), RHT on both.

    measured: <X_hat, X> / <X, X> after k GEMMs. prod_eta: product of alpha_X alpha_W, each measured on its operand.
    """
    g = torch.Generator().manual_seed(seed)
    exact = approx = torch.randn(n, n, generator=g)
    signs = ufp4.random_signs(seed)
    out, eta = {"fmt": fmt, "measured": [], "prod_eta": [], "exp_delta": []}, []
    for _ in range(depth):
        w = torch.linalg.qr(torch.randn(n, n, generator=g))[0]
        x, r = ufp4.rht(approx, signs), ufp4.rht(w, signs)
        qx, qw = ufp4.fake_quantize(x, fmt), ufp4.fake_quantize(r, fmt)
        eta.append(slope(qx, x)[0] * slope(qw, r)[0])
        exact, approx = exact @ w.T, qx @ qw.T
        out["measured"].append(slope(approx, exact)[0])
        out["prod_eta"].append(math.prod(eta))
        out["exp_delta"].append(math.exp(-sum(1 - e for e in eta)))
    return out


def draw_bias(axes, results):
    ax = axes[0]
    for y, f in ((1, "e2m1"), (0, "e1m2")):
        levels = [q / ufp4.get_format(f).max for q in ufp4.get_format(f).levels]
        edges = [0] + [(a + b) / 2 for a, b in zip(levels, levels[1:])] + [1]
        for i, (a, b) in enumerate(zip(edges, edges[1:])):
            ax.fill_betweenx((y - 0.25, y + 0.25), a, b, color="C0" if i % 2 else "C1", alpha=0.35, lw=0)
        ax.vlines(levels, y - 0.33, y + 0.33, color="k", lw=1.5)
    ax.set(yticks=(0, 1), yticklabels=("E1M2", "E2M1"), xlabel="value / block maximum",
           title="Levels (lines) and rounding bins")
    ax = axes[1]
    for f, color in zip(GRIDS, ("C3", "C0")):
        rows, top = results["bins"][f], ufp4.get_format(f).max
        ax.plot([r["level"] / top for r in rows], [r["closed"] / top for r in rows], "o", mfc="none", ms=9, color=color,
                label=f"{f.upper()}, (l - r) / 2")
        ax.plot([r["level"] / top for r in rows], [r["measured"] / top for r in rows], ".", color=color,
                label="measured")
    ax.set(xlabel="value / block maximum", ylabel="mean rounding error / block maximum", title="Bias of each bin")
    ax.legend(fontsize=8)
    ax = axes[2]
    for c, color in zip(results["chain"], ("C3", "C0")):
        depth = range(1, len(c["measured"]) + 1)
        ax.plot(depth, c["measured"], color=color, label=f"{c['fmt'].upper()} measured")
        ax.plot(depth, c["prod_eta"], "--", color=color, label="product of alphas")
    ax.set(xlabel="quantized GEMMs in a row", ylabel="attenuation of the signal", title="Shrinkage compounds")
    ax.legend(fontsize=8)


# ---------------------------------------------------------------------------------------------------------------
# cpu: what emulation costs


def bench_cpu(args):
    import train
    x = torch.randn(4096, 4096)
    results = {"threads": torch.get_num_threads(), "fake_quantize_ms": {}, "step": []}
    print("fake_quantize, 4096 x 4096 float32, ms: median (smallest to largest)")
    for name, f in {"copy": x.clone, **{fmt: lambda fmt=fmt: ufp4.fake_quantize(x, fmt) for fmt in ufp4.FORMATS},
                    "e1m2 SR": lambda: ufp4.fake_quantize(x, "e1m2", stochastic=True)}.items():
        results["fake_quantize_ms"][name] = [1e3 * t for t in median_time(f, 10)]
        print("{:8s} {:7.1f} ({:.1f} to {:.1f})".format(name, *results["fake_quantize_ms"][name]))

    recipes = ("bf16", "ufp4", "e2m1")
    print("\nstep (forward + backward) of --model nano, interleaved; ratio to bf16: median (smallest to largest)")
    s = train.parse_args(["--model", "nano", "--device", "cpu"])
    tokens = torch.randint(0, 256, (s.batch_size, s.seq_len))
    for compiling in (True, False):
        steps = {}
        for r in recipes:
            torch.manual_seed(0)
            model = train.GPT(s, ufp4.RECIPES[r], 256)
            steps[r] = lambda model=model: model(tokens, tokens).backward()
        with torch.compiler.set_stance("default" if compiling else "force_eager"):
            for f in steps.values():
                f()
                f()
            times = {r: [] for r in recipes}
            for _ in range(15):
                for r, f in steps.items():
                    start = time.perf_counter()
                    f()
                    times[r].append(time.perf_counter() - start)
        for r in recipes[1:]:
            ratios = sorted(a / b for a, b in zip(times[r], times["bf16"]))
            row = {"recipe": r, "quantizer": "compiled" if compiling else "eager",
                   "bf16_ms": 1e3 * statistics.median(times["bf16"]),
                   "ratio": [statistics.median(ratios), ratios[0], ratios[-1]]}
            results["step"].append(row)
            print("{:5s} quantizer {:8s} {:.2f} ({:.2f} to {:.2f})".format(r, row["quantizer"], *row["ratio"]))
    save("cpu", results)


# ---------------------------------------------------------------------------------------------------------------
# loss, ablate: train many small models and compare


def final_record(out):
    """The settings and last line of a finished run's log."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return lines[0]["settings"], lines[-1]


def train_run(job, args):
    """One run of train.py in a process of its own -> its record."""
    out = args.runs / f"{job['estimator']}-{job['label']}-s{job['seed']}"
    command = [sys.executable, str(HERE / "train.py"), "--model", job["model"], "--seed", str(job["seed"]),
               "--out", str(out), "--recipe", job["recipe"], *job["flags"], *args.train, "--sample", "0",
               "--eval-interval", "1000000", "--save-interval", str(args.branch_step)]
    if job["estimator"] == "branched":
        command += ["--branch", str(args.runs / f"scratch-bf16-s{job['seed']}" / f"ckpt-{args.branch_step:07d}")]
    if list(out.glob("ckpt-*")):
        command += ["--resume"]
    env = {**os.environ, "OMP_NUM_THREADS": str(max(1, os.cpu_count() // args.jobs))}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    record = {k: job[k] for k in ("model", "label", "recipe", "seed", "estimator")} | {"flags": args.train}
    if done.returncode == 3:                                                    # diverged: a result too
        return {**record, "val_loss": None, "error": done.stderr.strip().splitlines()[-1]}
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    settings, last = final_record(out)
    return {**record, "val_loss": last["val_loss"], "steps": last["step"], "tokens_per_s": last["tokens_per_s"],
            "settings": settings}


def train_all(args, rows, name):
    """Train rows x seeds x estimators, skipping what data/results/NAME.json has; returns the records."""
    path = RESULTS / f"{name}.json"
    records = json.loads(path.read_text())["runs"] if path.exists() else []
    if any(r["flags"] != args.train for r in records if r["model"] == args.model):
        sys.exit(f"bench.py: {path} has {args.model} runs with other flags for train.py; move it away to start anew")
    key = lambda r: (r["model"], r["label"], r["seed"], r["estimator"])
    have = {key(r) for r in records}
    grid = [(seed, estimator, row) for seed in range(args.seeds) for estimator in args.estimators for row in rows[1:]]
    first = [(seed, "scratch", rows[0]) for seed in range(args.seeds)]          # bf16, from which the others branch
    for part in (first, grid):
        jobs = [{"model": args.model, "label": label, "recipe": recipe, "flags": flags, "seed": seed,
                 "estimator": estimator} for seed, estimator, (label, recipe, flags) in part]
        jobs = [j for j in jobs if key(j) not in have]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            try:
                for done in concurrent.futures.as_completed([pool.submit(train_run, job, args) for job in jobs]):
                    records.append(done.result())
                    save(name, {"runs": sorted(records, key=lambda r: (r["model"], r["estimator"], r["label"],
                                                                       r["seed"]))})
                    print("{label:16s} {estimator:8s} seed {seed}: {val_loss}".format(**records[-1]), flush=True)
            except BaseException as e:                                          # Ctrl-C, or a run that failed
                pool.shutdown(cancel_futures=True)
                sys.exit(f"bench.py: stopped; the same command goes on from here. {e}")
    return records


def relative_errors(records, model, estimator, label):
    """{seed: BF16-relative loss error} (paper, section 4, Q2). A run that diverged counts as infinite."""
    def losses(*which):
        return {r["seed"]: r["val_loss"] for r in records if (r["model"], r["label"], r["estimator"]) == which}
    bf16 = losses(model, "bf16", "scratch")
    return {seed: math.inf if loss is None else abs(loss - bf16[seed]) / bf16[seed]
            for seed, loss in losses(model, label, estimator).items() if seed in bf16}


def show(ci, scale=100):
    mean, half = ci
    return f"{scale * mean:.2f}" + ("" if half is None else f" ± {scale * half:.2f}")


def compare(records, model, estimators, labels, against):
    """Print mean loss error in % with its 95% interval, and the paired difference to the row `against`."""
    for estimator in estimators:
        base = relative_errors(records, model, estimator, against)
        print(f"\n{model}, {estimator}: BF16-relative loss error in %, and its paired difference to {against}")
        for label in labels:
            errors = relative_errors(records, model, estimator, label)
            both = sorted(errors.keys() & base.keys())
            if errors:
                print(f"{label:16s} {show(interval(list(errors.values()))):14s} {len(errors)} seeds   " +
                      (show(interval([errors[s] - base[s] for s in both])) if label != against and both else ""))


LOSS_ROWS = [(r, r, []) for r in ("bf16", "ufp4", "ufp4-int4", "e2m1", "e2m1-full-rht", "nvfp4", "mxfp4")]
ABLATE_ROWS = [("bf16", "bf16", [])] + [(f"rht {scope}", "ufp4", ["--rht", scope])
                                        for scope in ("none", "wgrad", "dgrad,wgrad", "fprop,wgrad", "all")] + \
              [(f"sr {which}", "ufp4", ["--sr", which]) for which in ("none", "x,dy", "all")] + \
              [(r, r, []) for r in ("e2m1-max2", "e2m1-max3", "e2m1-max4", "ufp4-e4m3", "ufp4-mx")]


def final_steps(args):
    import train
    return train.parse_args(["--model", args.model, *args.train]).steps


def bench_training(args, name, rows, against):
    if args.rows:
        unknown = set(args.rows) - {label for label, _, _ in rows}
        if unknown:
            sys.exit(f"bench.py: no row is called {', '.join(sorted(unknown))}; choose from {[r[0] for r in rows]}")
        rows = [r for r in rows if r[0] in args.rows or r[0] == "bf16"]
    if args.quick:
        args.seeds, args.estimators, args.train = 2, ["branched"], args.train + ["--steps", "300"]
        name += "-quick"
    args.branch_step = 2 * final_steps(args) // 3
    records = train_all(args, rows, name)
    compare(records, args.model, args.estimators, [label for label, _, _ in rows[1:]], against)


def bench_loss(args):
    bench_training(args, "loss", LOSS_ROWS, "e2m1")


def bench_ablate(args):
    bench_training(args, "ablate", ABLATE_ROWS, "rht all")


# ---------------------------------------------------------------------------------------------------------------
# dispatch: what each recipe's products run on, compiled here for GPUs that need not be here

MMA = re.compile(r"tcgen05\.mma[^ ;]*|mma\.sync[^ ;]*|wgmma\.mma_async[^ ;]*|v_mfma\S*")


def compile_matmul(path, arch, fmt, scale, block):
    """Compile kernels.matmul_kernel for an architecture -> {instruction, count, shared, spills}: the tensor-core
    instruction, how often one program's code has it, bytes of shared memory, instructions that spill registers (None
    where Triton's own disassembler, 3.6's for sm_103, can't read the binary)."""
    import triton
    import triton.language as tl
    import kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    f = ufp4.get_format(fmt)
    BM, BN, BK, warps, stages = kernels.tiles(path, arch, block)
    cuda = arch.startswith("sm_")
    number = {"fp32": "fp32", "e4m3": "u8" if path == "decode" else "fp8e4nv", "e8m0": "u8"}[scale]
    constants = dict(DTYPE=tl.bfloat16, BM=BM, BN=BN, BK=BK,
                     **kernels.matmul_constants(path, scale, block, f.mbits, f.min_normal, f.twos_complement))
    signature = dict(c_ptr="*bf16", a_t_ptr="*fp32", b_t_ptr="*fp32", M="i32", N="i32", K="i32", stride_c="i32")
    for name, rows in (("a", BM), ("b", BN)):
        signature[f"{name}_desc"] = f"tensordesc<u8[{rows}, {BK // 2}]>"
        signature[f"{name}_scale_desc"] = f"tensordesc<{number}[{rows // 128}, {BK // block // 4}, 2, 256]>"
    signature.update(dict.fromkeys(constants, "constexpr"))
    names = kernels.matmul_kernel.arg_names
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in ("c_ptr", "M", "N", "K", "stride_c")}
    source = ASTSource(kernels.matmul_kernel, {n: signature[n] for n in names}, constants, aligned)
    target = GPUTarget("cuda", int(arch[3:]), 32) if cuda else GPUTarget("hip", arch, 64)
    binary = triton.compile(source, target=target, options=dict(num_warps=warps, num_stages=stages))
    text = binary.asm["ptx" if cuda else "amdgcn"]
    if cuda:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
            sass = subprocess.run((tool, "-sass", file.name), capture_output=True, text=True)
        spills = len(re.findall(r"\b(?:STL|LDL)\b", sass.stdout)) if sass.returncode == 0 else None
    else:
        spills = int(re.search(r"vgpr_spill_count:\s*(\d+)", text)[1])
    found = collections.Counter(MMA.findall(text))
    return dict(instruction=" + ".join(found), count=sum(found.values()), shared=binary.metadata.shared, spills=spills)


@functools.cache
def lowering(*args):
    """compile_matmul in a process of its own, since a compiler that fails an assertion takes its process along, and
    without the interpreter. {"error": its last line} if it fails."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__, "lower", json.dumps(args)], capture_output=True, text=True,
                          env=dict(env, TRITON_ALWAYS_COMPILE="1"))
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 else dict(error=lines[-1] if lines else str(done.returncode))


def bench_lower(args):
    print(json.dumps(compile_matmul(*json.loads(args.what))))


def bench_dispatch(args):
    """The table recipe x architecture. Where the path is cuBLAS, whose code is not ours, the row shows the product
    that decodes in the kernel."""
    import kernels
    print(f"{'recipe':14} {'arch':7} {'path':7} {'MMAs':>5} {'shared':>7} {'spills':>6}  instruction  (why)")
    rows = []
    for recipe in ufp4.RECIPES.values():
        for arch in kernels.ARCHITECTURES:
            path, why = kernels.route(recipe, arch)
            row = {"recipe": recipe.name, "arch": arch, "path": path, "why": why}
            line = f"{recipe.name:14} {arch:7} {path:7}"
            if path != "bf16":
                r = lowering("decode" if path == "cublas" else path, arch, recipe.fmt, recipe.scale, recipe.block)
                row.update(r)
                spills = "?" if r.get("spills") is None else r["spills"]
                line += r.get("error") or f" {r['count']:5} {r['shared']:7} {spills:>6}  {r['instruction']}"
            rows.append(row)
            print(f"{line}  ({why})", flush=True)
    save("dispatch", {"triton": kernels.triton.__version__, "rows": rows})


# ---------------------------------------------------------------------------------------------------------------
# scale: how cost grows with processes, tokens a step, experts

SCALE_ROWS = {f"{b * 128} tokens a step{also}": (n, ["--batch-size", str(b), *flags]) for also, n, b, flags in (
    ("", 1, 4, []), ("", 1, 16, []), ("", 1, 64, []), (", 2 processes", 2, 16, []),
    *((f", {e} experts", 1, 16, ["--experts", str(e), "--top-k", "4", "--hidden", "32"]) for e in (8, 32, 128)))}


def scale_run(recipe, processes, flags, steps=10, kept=6):
    """Train nano for some steps on CPU processes of one thread each -> ms of each of the last steps, and the largest
    process's peak memory in MiB."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
                   str(HERE / "train.py"), "--model", "nano", "--device", "cpu", "--seq-len", "128", "--recipe", recipe,
                   *flags, "--steps", str(steps), "--log-interval", "1", "--eval-interval", "1000",
                   "--eval-windows", "1", "--save-interval", "1000", "--sample", "0", "--out", out]
        process = subprocess.Popen(command, env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)                             # of all its descendants
        if status:
            sys.exit(f"bench.py: {' '.join(command)} failed")
        settings, *records = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    tokens = settings["settings"]["batch_size"] * 128
    return [1e3 * tokens / r["tokens_per_s"] for r in records[-kept:]], usage.ru_maxrss / 1024


def bench_scale(args):
    import train
    results, cells = {"threads": 1, "runs": [], "routing": []}, [(n, r) for n in SCALE_ROWS for r in ("bf16", "ufp4")]
    runs = {cell: [] for cell in cells}
    for cell in 3 * cells:                              # in turns, since what else the machine does changes with time
        runs[cell].append(scale_run(cell[1], *SCALE_ROWS[cell[0]]))
    print("nano, contexts of 128; ms a step, median (smallest to largest); peak MiB of a process")
    for (name, recipe), measured in runs.items():
        times = [t for ms, _ in measured for t in ms]
        results["runs"].append({"row": name, "recipe": recipe, "mib": max(mib for _, mib in measured),
                                "ms": [statistics.median(times), min(times), max(times)]})
        print("{row:36s} {recipe:5s} {0:7.0f} ({1:.0f} to {2:.0f})  {mib:.0f} MiB".format(
            *results["runs"][-1]["ms"], **results["runs"][-1]))
    print("\nrouting alone, forward: scores, choice, sort")
    torch.set_num_threads(1)
    for tokens in (512, 2048, 8192):
        for experts in (8, 32, 128):
            s = train.parse_args(["--model", "nano-moe", "--device", "cpu", "--experts", str(experts), "--top-k", "4"])
            moe, x = train.MoE(s, ufp4.RECIPES["bf16"]), torch.randn(tokens, s.dim)
            torch.nn.init.normal_(moe.router.weight)
            with torch.no_grad():
                ms = [1e3 * t for t in median_time(lambda: moe.route(x), 50)]
            results["routing"].append({"tokens": tokens, "experts": experts, "ms": ms})
            print("{:6d} tokens {:4d} experts {:7.2f} ms ({:.2f} to {:.2f})".format(tokens, experts, *ms))
    save("scale", results)


# ---------------------------------------------------------------------------------------------------------------
# readme: the tables, from the files


def load_results(name):
    path = RESULTS / f"{name}.json"
    if not path.exists():
        sys.exit(f"bench.py: there is no {path}; run python bench.py {name} first")
    return json.loads(path.read_text())


def markdown(header, rows):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def slope_table():
    results = load_results("bias")
    names = {"gaussian": "Gaussian", "laplace": "Laplace", "student-t": "Student t, 3 d.f.", "swiglu": "SwiGLU-like"}
    rows = [[name + (", RHT" if rotated else "")] +
            [f"{r['alpha']:.4f} ± {2 * r['se']:.4f}" for f in GRIDS for r in results["slopes"]
             if (r["data"], r["rht"], r["fmt"]) == (kind, rotated, f)]
            for kind, name in names.items() for rotated in (False, True)]
    return markdown(["slope alpha, nearest, FP32 scales", "E2M1", "E1M2"], rows)


def scale_table():
    results = load_results("bias")
    rows = [[f"{scale.upper()}, {'stochastic' if sr else 'nearest'}"] +
            [f"{r['alpha']:.4f} ± {2 * r['se']:.4f}" for f in GRIDS for r in results["scales"]
             if (r["scale"], r["stochastic"], r["fmt"]) == (scale, sr, f)]
            for scale in ufp4.SCALES for sr in (False, True)]
    return markdown(["slope alpha on Gaussian data", "E2M1 (scale by its standard)", "E1M2 (scale rounded up)"], rows)


def cpu_table():
    results = load_results("cpu")
    rows = [[f"one step of `nano`, {r['recipe']} / bf16, quantizer {r['quantizer']}",
             "{:.2f} ({:.2f} to {:.2f})".format(*r["ratio"])] for r in results["step"]]
    rows += [[f"`fake_quantize`, 4096 x 4096, {name}", "{:.0f} ms ({:.0f} to {:.0f})".format(*ms)]
             for name, ms in results["fake_quantize_ms"].items()]
    return markdown([f"on {results['machine']['cores']} cores", "median (smallest to largest)"], rows)


def loss_table():
    records, rows = load_results("loss")["runs"], []
    for label in [row[0] for row in LOSS_ROWS[1:]]:
        cells = []
        for estimator in ("scratch", "branched"):
            errors = relative_errors(records, "nano", estimator, label)
            base = relative_errors(records, "nano", estimator, "e2m1")
            both = sorted(errors.keys() & base.keys())
            cells += [f"{show(interval(list(errors.values())))} ({len(errors)})" if errors else "not run",
                      show(interval([errors[s] - base[s] for s in both])) if both and label != "e2m1" else ""]
        if cells[0] != "not run" or cells[2] != "not run":
            rows.append([f"`{label}`"] + cells)
    return markdown(["loss error, % (seeds)", "from scratch", "less `e2m1`", "branched", "less `e2m1`"], rows)


def dispatch_table():
    results, cells = load_results("dispatch"), {}
    for r in results["rows"]:
        text = r["path"] if r["path"] == "bf16" else r.get("error") or f"{r['path']}: {r['instruction']}, {r['count']}"
        # without the parts that say nothing here: layout, synchronization, the types of what is multiplied and summed
        short = re.sub(r"\.(row\.col|cta_group::1|sync\.aligned)|\.f32\.\w+\.\w+(\.f32)?(\.ue\w+)?", "", text)
        cells.setdefault(r["recipe"], {})[r["arch"]] = short
    shown = ("ufp4", "ufp4-e4m3", "ufp4-mx", "e2m1", "nvfp4", "mxfp4")
    rows = [[arch] + [cells[recipe][arch] for recipe in shown] for arch in cells["ufp4"]]
    return markdown([f"path: instruction, count (Triton {results['triton']})", *(f"`{r}`" for r in shown)], rows)


def growth_table():
    results = load_results("scale")
    runs = {(r["row"], r["recipe"]): r for r in results["runs"]}
    rows = []
    for name in SCALE_ROWS:
        bf16, ours = runs[name, "bf16"], runs[name, "ufp4"]
        rows.append([name, *("{:.0f} ({:.0f} to {:.0f})".format(*r["ms"]) for r in (bf16, ours)),
                     f"{ours['ms'][0] / bf16['ms'][0]:.2f}", f"{bf16['mib']:.0f}", f"{ours['mib']:.0f}"])
    return markdown(["`nano`, one thread a process", "bf16, ms a step", "ufp4, ms a step", "ratio", "bf16, peak MiB",
                     "ufp4, peak MiB"], rows)


def routing_table():
    routing = {(r["tokens"], r["experts"]): r["ms"] for r in load_results("scale")["routing"]}
    tokens, experts = (sorted({key[i] for key in routing}) for i in (0, 1))
    return markdown(["routing, ms", *(f"{e} experts" for e in experts)],
                    [[f"{t} tokens", *("{:.2f} ({:.2f} to {:.2f})".format(*routing[t, e]) for e in experts)]
                     for t in tokens])


TABLES = {"slopes": slope_table, "scales": scale_table, "cpu": cpu_table, "loss": loss_table,
          "dispatch": dispatch_table, "scale": growth_table, "routing": routing_table}


def fill_tables(text):
    """README's text with each block between <!-- NAME --> and <!-- /NAME --> made anew."""
    for name, table in TABLES.items():
        head, rest = text.split(f"<!-- {name} -->")
        text = f"{head}<!-- {name} -->\n{table()}\n<!-- /{name} -->" + rest.split(f"<!-- /{name} -->")[1]
    return text


def bench_readme(args):
    path = HERE / "README.md"
    path.write_text(fill_tables(path.read_text()))


# ---------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Each claim, one command.")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("bias", help="geometry of the grids, slopes, compounding")
    p.add_argument("--seed", type=int, default=0)
    commands.add_parser("cpu", help="speed of the emulation on this CPU")
    commands.add_parser("dispatch", help="the instruction each recipe runs on, per architecture")
    p = commands.add_parser("lower", help="one row of dispatch, in a process of its own")
    p.add_argument("what")
    commands.add_parser("scale", help="how cost grows with processes, tokens and experts")
    commands.add_parser("readme", help="write README.md's tables anew")
    for name in ("loss", "ablate"):
        p = commands.add_parser(name, help="train and compare; arguments after -- go to train.py")
        p.add_argument("--model", default="nano", help="preset of train.py")
        p.add_argument("--seeds", type=int, default=5, choices=range(1, 100), metavar="N")
        p.add_argument("--rows", nargs="+", help="some of the table's rows (default: all)")
        p.add_argument("--estimators", nargs="+", choices=("scratch", "branched"), default=["scratch", "branched"],
                       help="scratch: whole runs from the same weights and batches; "
                            "branched: the last third, from one BF16 run")
        p.add_argument("--jobs", type=int, default=1 if torch.cuda.is_available() else os.cpu_count(),
                       help="runs at a time")
        p.add_argument("--quick", action="store_true", help="300 steps, 2 seeds, branched only")
        p.add_argument("--runs", type=Path, default=HERE / "out" / "bench", help="where the runs go")
        p.add_argument("train", nargs="*", help="more flags for train.py, after --")
    arguments = parser.parse_args()
    globals()[f"bench_{arguments.command}"](arguments)
