"""Each claim, one command, one table, one file of numbers, one figure.

    python bench.py bias            geometry of the grids: bins, per-bin bias, slopes, how shrinkage compounds (1 min)
    python bench.py sqnr            error of both grids on a trained model's tensors, with and without RHT (3 min)
    python bench.py cpu             what emulation costs on this CPU: fake_quantize, and a training step, against BF16
    python bench.py loss            BF16-relative loss error of recipes, paired seeds (hours; --quick for a first look)
    python bench.py ablate          the same for one change at a time: the paper's ablations, and more
    python bench.py scaling         the same against compute: five sizes, dense and mixture of experts; and variations
    python bench.py dispatch        the tensor-core instruction of each recipe on each GPU, compiled without one (8 min)
    python bench.py kernels         speed of the Triton kernels on this GPU, against copying and cuBLAS (needs one)
    python bench.py tune            which tiles and programs quantize fastest on this GPU (needs one)
    python bench.py scale           step time and memory over processes, tokens a step, experts (10 min, on a CPU)
    python bench.py readme          write the tables of README.md and data/results/README.md anew

Each but the last writes data/results/NAME.json: settings, seeds, versions, machine and every number (kernels and tune
write NAME-GPU.json); those that measure numerics or losses draw NAME.png. loss, ablate and scaling save each run as it
ends and go on where they stopped.
"""
import argparse
import collections
import concurrent.futures
import contextlib
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
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from tqdm import tqdm

import train
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
    print(f"drew {RESULTS / name}.png")


def interval(values):
    """Mean and half-width of its 95% confidence interval (Student's t), None of one value or if one is not finite."""
    t = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
    n, mean = len(values), sum(values) / len(values)
    if n < 2 or not math.isfinite(mean):
        return mean, None
    return mean, t.get(n, 1.96 + 2.5 / (n - 1)) * statistics.stdev(values) / math.sqrt(n)


def median_time(f, repeats):
    """Median, smallest and largest seconds of f() after two warm-ups."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]), min(times[2:]), max(times[2:])


# ---------------------------------------------------------------------------------------------------------------
# bias: the geometry of shrinkage

GRIDS = ("e2m1", "e1m2")
SCALE_RULES = {"fp32": "FP32", "e4m3-nearest": "E4M3, nearest", "e4m3-up": "E4M3, up",
               "e8m0-floor": "E8M0, OCP's floor", "e8m0-up": "E8M0, up"}


def bin_bias(fmt):
    """Measured mean of rho(t) - t over t spread evenly over each interior bin, beside (l - r) / 2."""
    f, rows = ufp4.get_format(fmt), []
    for a, q, b in zip(f.levels, f.levels[1:], f.levels[2:]):
        left, right = (q - a) / 2, (b - q) / 2
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
    return torch.nn.functional.silu(normal) * torch.randn(shape, generator=generator)           # swiglu


def sqnr(q, x):
    """Signal to quantization noise in dB, -10 log10(|q - x|^2 / |x|^2), as in the paper."""
    return -10 * math.log10(((q - x).double().square().sum() / x.double().square().sum()).item())


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
    print("\nby kind of scale, blocks of 16, Gaussian rows of sizes spread over a factor of 2: slope alpha (standard "
          "error) to nearest, stochastic; SQNR in dB to nearest")
    x = samples("gaussian", shape, g) * torch.rand((shape[0], 1), generator=g).exp2()
    for scale in SCALE_RULES:
        for f in GRIDS:
            row = {"scale": scale, "fmt": f, "sqnr": sqnr(ufp4.fake_quantize(x, f, scale), x)}
            for rounding in ("nearest", "stochastic"):
                row[rounding] = slope(ufp4.fake_quantize(x, f, scale, 16, rounding == "stochastic", g), x)
            results["scales"].append(row)
            print("{:12s} {}  {:.5f} ({:.5f})  {:.5f} ({:.5f})  {:.2f}".format(
                scale, f, *row["nearest"], *row["stochastic"], row["sqnr"]))
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
# sqnr: does the RHT change the preferred grid? (the paper's Q1)

ENTERS = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}   # along rows, along columns
PAPER_SQNR = {"e2m1": 21.90, "e1m2": 19.94, "e2m1 rht": 20.00, "e1m2 rht": 23.19}       # linear_fc2's input


def effective_buckets(x, fmt):
    """B_eff = exp(entropy of the codes' magnitudes) / 8, the paper's: 1 if all eight are used alike."""
    q = ufp4.quantize(x, fmt)
    nibbles = torch.stack((q.codes & 15, q.codes >> 4)).int()
    p = torch.bincount(torch.tensor(q.fmt.values).abs()[nibbles].flatten().mul(4).int()).double() / nibbles.numel()
    return math.exp(-sum(v * math.log(v) for v in p.tolist() if v)) / 8


def measure(x, signs):
    """SQNR in dB and B_eff of x (R, K) along K: both grids, without and with the RHT."""
    data = {f + name: (d, f) for name, d in (("", x), (" rht", ufp4.rht(x, signs))) for f in GRIDS}
    return {"sqnr": {name: sqnr(ufp4.fake_quantize(d, f), d) for name, (d, f) in data.items()},
            "b_eff": {name: effective_buckets(d, f) for name, (d, f) in data.items()}}


def capture(model, tokens, targets):
    """{(layer, operand): its tensor (rows, columns)} for X, W and dY of every quantizable linear layer."""
    kept = {}
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, ufp4.Linear)]
    for name, m in layers:
        m.register_forward_pre_hook(lambda m, x, name=name: kept.update({(name, "x"): x[0].detach().flatten(0, -2)}))
        m.register_full_backward_hook(lambda m, _, dy, name=name: kept.update({(name, "dy"): dy[0].flatten(0, -2)}))
    model(tokens, targets).backward()
    return kept | {(name, "w"): m.weight.detach() for name, m in layers}


def load_model(flags, checkpoint):
    """(settings, data set, GPT with the checkpoint's weights) of train.py with these flags."""
    s = train.parse_args(flags)
    dataset = train.prepare(s.data)
    model = train.GPT(s, train.make_recipe(s), dataset.vocab_size)
    dcp.load({"model": model.state_dict()}, checkpoint_id=checkpoint)           # into the model's own tensors
    return s, dataset, model.to(s.device)


def bench_sqnr(args):
    flags = ["--model", "nano", "--device", "cpu", "--steps", str(args.steps), "--seed", str(args.seed)]
    out = HERE / "out" / "bench" / f"sqnr-{args.steps}-s{args.seed}"
    if not (out / f"ckpt-{args.steps:07d}").exists():
        train.train(train.parse_args([*flags, "--recipe", "bf16", "--sample", "0", "--out", str(out)]))
    s, dataset, model = load_model([*flags, "--recipe", "bf16"], train.checkpoints(out)[-1])
    signs = ufp4.random_signs(args.seed)
    tensors = capture(model, *train.get_batch([train.read_tokens(p) for p in dataset.train], s, s.steps))
    results = {"seed": args.seed, "settings": vars(s), "tensors": [], "paper fc2 x": PAPER_SQNR,
               "swiglu-like": measure(samples("swiglu", (4096, 512), torch.Generator().manual_seed(args.seed)), signs)}
    print("SQNR in dB: E2M1 E1M2 | with RHT: E2M1 E1M2 | B_eff of E1M2 without and with RHT")
    line = "{:24s} {e2m1:6.2f} {e1m2:6.2f} | {e2m1 rht:6.2f} {e1m2 rht:6.2f}".format
    print(line("paper, fc2 x", **PAPER_SQNR) + " |   0.56   0.97")
    rows = [("SwiGLU-like samples", results["swiglu-like"])]
    for (layer, operand), x in tensors.items():
        for gemm, data in zip(ENTERS[operand], (x, x.T.contiguous())):
            r = {"layer": layer, "operand": operand, "gemm": gemm, **measure(data, signs)}
            r["flips"] = (r["sqnr"]["e2m1"] > r["sqnr"]["e1m2"]) != (r["sqnr"]["e2m1 rht"] > r["sqnr"]["e1m2 rht"])
            results["tensors"].append(r)
            rows.append((f"{layer} {operand} {gemm}", r))
    for name, r in rows:
        print(line(name.removeprefix("blocks."), **r["sqnr"]) +
              " | {e1m2:6.2f} {e1m2 rht:6.2f}".format(**r["b_eff"]) + ("  flips" if r.get("flips") else ""))
    save("sqnr", results)
    figure("sqnr", 3, lambda axes: draw_sqnr(axes, results["tensors"]))


def draw_sqnr(axes, tensors):
    for ax, operand, title in zip(axes, ufp4.OPERANDS, ("X", "W", "dY")):
        for r in tensors:
            if r["operand"] == operand:
                color = "C3" if "fc2" in r["layer"] else "C0"
                gain, gain_rht = (r["sqnr"]["e1m2" + rht] - r["sqnr"]["e2m1" + rht] for rht in ("", " rht"))
                ax.plot((0, 1), (gain, gain_rht), ".-", color=color, lw=0.8)
        ax.axhline(0, color="k", lw=0.6)
        ax.set(xticks=(0, 1), xticklabels=("without RHT", "with RHT"), title=f"{title} (red: fc2)",
               ylabel="SQNR of E1M2 less E2M1's, dB")


# ---------------------------------------------------------------------------------------------------------------
# cpu: what emulation costs


def bench_cpu(args):
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
# loss, ablate, scaling: train many small models and compare


def folder(args, job):
    """Where a run goes: another place for other flags, such as the steps of --quick, which would else resume it."""
    flags = f"-{zlib.crc32(json.dumps(args.train).encode()):08x}" if args.train else ""
    return args.runs / "{model}-{estimator}-{label}-s{seed}{}".format(flags, **job)


def bf16_of(job):
    """The run that a job branches from, or is compared with."""
    return {**job, "estimator": "scratch", "label": "bf16"}


def weights(args, job):
    """The checkpoints of a run that others start from: its last, before that a BF16 run's where they branch."""
    steps = train.parse_args([*MODELS[job["model"]], *args.train]).steps
    left = (2 * steps // 3, steps) if job["label"] == "bf16" else (steps,)
    return [folder(args, job) / f"ckpt-{n:07d}" for n in left]


def read_log(out):
    """Of a run of train.py: [its settings, versions and threads, then what each line of its log says]."""
    return [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]


def train_run(job, args):
    """One run of train.py in a process of its own -> its results."""
    out, branch = folder(args, job), weights(args, bf16_of(job))[0]
    command = [sys.executable, str(HERE / "train.py"), "--seed", str(job["seed"]), "--out", str(out), "--recipe",
               job["recipe"], *job["flags"], *MODELS[job["model"]], *args.train, "--sample", "0",
               "--eval-interval", "1000000", "--save-interval", str(int(branch.name[5:]))]
    # train.py keeps two checkpoints: a BF16 run that stopped between the two that it must leave has to start anew.
    kept, left = train.checkpoints(out), weights(args, job)
    if kept and (job["label"] != "bf16" or kept[-1] <= branch or set(left) <= set(kept)):
        command += ["--resume"]
    elif job["estimator"] == "branched":
        command += ["--branch", str(branch)]
    env = {**os.environ, "OMP_NUM_THREADS": str(max(1, os.cpu_count() // args.jobs))}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode == 3 and job["label"] != "bf16":                         # diverged: a result too
        return {"val_loss": None, "error": done.stderr.strip().splitlines()[-1]}
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    lines = read_log(out)
    return {"val_loss": lines[-1]["val_loss"], "steps": lines[-1]["step"], "tokens_per_s": lines[-1]["tokens_per_s"],
            "settings": {k: v for k, v in lines[0]["settings"].items() if k not in ("out", "branch")},
            "curve": [[r["step"], round(r["train_loss"], 4)] for r in lines[1:]]}


def split(exact, quantized):
    """(slope, noise): quantized = slope exact + R, R orthogonal to exact; noise = |R|^2 / |exact|^2. The paper splits
    an operand so."""
    exact, quantized = exact.float(), quantized.float()
    slope = (exact * quantized).sum() / exact.square().sum()
    return slope.item(), ((quantized - slope * exact).square().sum() / exact.square().sum()).item()


@contextlib.contextmanager
def output_noise():
    """What quantization does to fprop: of each call of a quantized linear layer, in a list, (slope, noise)."""
    found, linear = [], ufp4.linear

    def compared(x, w, recipe, offs=None):
        y = linear(x, w, recipe, offs)
        found.append(split(linear(x, w, "bf16", offs), y))
        return y
    ufp4.linear = compared
    try:
        yield found
    finally:
        ufp4.linear = linear


@torch.no_grad()
def through_depth(exact, quantized, tokens):
    """Two GPTs with the same weights, tokens (B, T) -> [(slope, noise) of the residual stream after each block, and of
    the logits, from which each token's mean is taken, which the loss doesn't see]. Errors add up over the blocks here;
    output_noise sees each layer by itself."""
    a, b, found = exact.embed(tokens), quantized.embed(tokens), []
    for block, other in zip(exact.blocks, quantized.blocks):
        a, b = block(a), other(b)
        found.append(split(a, b))
    centred = lambda logits: logits - logits.mean(-1, keepdim=True)
    return [*found, split(centred(exact.lm_head(exact.norm(a))), centred(quantized.lm_head(quantized.norm(b))))]


def forward_run(job, args):
    """A finished run's weights, evaluated with another forward pass -> its results. own weights, bf16 forward: how much
    of the gap is in the weights; bf16 weights, own forward: how much is noise of the forward pass, with the mean slope
    and noise of the layers' outputs and, of 8 sequences, of what passes through the model."""
    own = job["estimator"] == "own forward"
    path = weights(args, bf16_of(job) if own else {**job, "estimator": "branched"})[-1]
    if not path.exists():
        return {"val_loss": None, "error": "the branched run diverged"}
    flags = [*MODELS[job["model"]], *args.train, "--seed", str(job["seed"])]
    exact, forward = ["--recipe", "bf16"], ["--recipe", job["recipe"], *job["flags"]]
    s, dataset, model = load_model([*flags, *(forward if own else exact)], path)
    tokens = train.read_tokens(dataset.val[0])
    with output_noise() as found:
        results = {"val_loss": train.evaluate(model, tokens, s)}
    if own:
        results["slope"], results["noise"] = map(statistics.mean, zip(*found))
        reference = load_model([*flags, *exact], path)[2]
        with train.autocast(s):
            results["depth"] = through_depth(reference.eval(), model.eval(),
                                             train.get_batch([tokens], s, s.steps)[0][:8])
    return results


def train_all(args, rows, name):
    """Models x seeds x estimators x rows, skipping what data/results/NAME.json has; returns the records. The first row
    is bf16, from whose runs the others branch. A run that another one starts from, or is compared with, is repeated if
    its weights are not at hand, as in a fresh clone: on another machine it ends a little elsewhere."""
    path = RESULTS / f"{name}.json"
    records = json.loads(path.read_text())["runs"] if path.exists() else []
    if any(r["flags"] != args.train for r in records if r["model"] in args.models):
        sys.exit(f"bench.py: {path} has runs with other flags for train.py; move it away to start anew")
    key = lambda r: (r["model"], r["label"], r["seed"], r["estimator"])
    have = {key(r) for r in records}

    def pending(estimators, rows, starts=()):
        """Jobs without a record, and those among `starts`, keys like records', without the weights they leave."""
        jobs = [{"model": model, "label": label, "recipe": recipe, "flags": flags, "seed": seed, "estimator": estimator}
                for seed in range(args.seeds) for model in args.models for estimator in estimators
                for label, recipe, flags in rows]
        return [j for j in jobs if key(j) not in have or
                key(j) in starts and not all(path.exists() for path in weights(args, j))]

    evaluated = pending([e for e in args.estimators if "forward" in e], rows[1:])
    branched = {key({**j, "estimator": "branched"}) for j in evaluated if j["estimator"] == "bf16 forward"}
    trained = pending([e for e in ESTIMATORS[:2] if e in args.estimators or e == "branched" and branched], rows[1:],
                      branched)
    first = pending(["scratch"], rows[:1], {key(bf16_of(j)) for j in trained + evaluated})
    for jobs, run, workers in ((first, train_run, args.jobs), (trained, train_run, args.jobs),
                               (evaluated, forward_run, 1)):
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            try:
                started = {pool.submit(run, j, args): j for j in jobs}
                for done in concurrent.futures.as_completed(started):
                    job = started[done]
                    records = [r for r in records if key(r) != key(job)]
                    records.append({**job, "flags": args.train, "machine": machine(), **done.result(),
                                    "bf16_val_loss": read_log(folder(args, bf16_of(job)))[-1]["val_loss"]})
                    save(name, {"runs": sorted(records, key=key)})
                    print("{model} {label:16s} {estimator} seed {seed}: {val_loss}".format(**records[-1]), flush=True)
            except BaseException as e:                                          # Ctrl-C, or a run that failed
                pool.shutdown(cancel_futures=True)
                sys.exit(f"bench.py: stopped; the same command goes on from here. {e}")
    return records


def relative_errors(records, model, estimator, label):
    """{seed: BF16-relative loss error} (the paper's, Q2), infinite if the run diverged."""
    return {r["seed"]: math.inf if r["val_loss"] is None else r["val_loss"] / r["bf16_val_loss"] - 1 for r in records
            if (r["model"], r["label"], r["estimator"]) == (model, label, estimator)}


def fprop(records, model, label):
    """(slope, noise) of fprop on the BF16 runs' weights, means over seeds; None if not measured."""
    found = [(r["slope"], r["noise"]) for r in records if (r["model"], r["label"]) == (model, label) and "noise" in r]
    return tuple(map(statistics.mean, zip(*found))) or None


def through_seeds(records, model, label):
    """through_depth on the BF16 runs' weights: [(slope, noise)], each a mean over seeds and its interval."""
    found = [r["depth"] for r in records if (r["model"], r["label"]) == (model, label) and "depth" in r]
    return [tuple(map(interval, zip(*place))) for place in zip(*found)]


def fprop_and_error(records, model):
    """{label: (slope of fprop, noise of fprop, mean loss error of the branched runs and half its 95% interval)}, of the
    rows that have all and didn't diverge."""
    points = {}
    for label in dict.fromkeys(r["label"] for r in records):
        measured, errors = fprop(records, model, label), relative_errors(records, model, "branched", label)
        if measured and errors and math.isfinite(sum(errors.values())):
            points[label] = *measured, *interval(list(errors.values()))
    return points


def show(ci, scale=100, digits=2):
    if ci is None:
        return ""
    mean, half = ci
    return f"{scale * mean:.{digits}f}" + ("" if half is None else f" ± {scale * half:.{digits}f}")


def contrast(records, model, estimator, weights):
    """Mean and interval, over seeds that have all, of a sum of loss errors {label: weight}; None without such seeds."""
    errors = {label: relative_errors(records, model, estimator, label) for label in weights}
    seeds = sorted(set.intersection(*map(set, errors.values())))
    return interval([sum(w * errors[label][s] for label, w in weights.items()) for s in seeds]) if seeds else None


def compare(records, model, estimator, label, against):
    """(loss error in %, its 95% interval and number of seeds; paired difference to `against`), as text or blank."""
    errors = relative_errors(records, model, estimator, label)
    return (f"{show(interval(list(errors.values())))} ({len(errors)})" if errors else "",
            show(contrast(records, model, estimator, {label: 1, against: -1})) if label != against else "")


def reduction(records, *models):
    """By what part of itself e2m1's loss error, branched, falls with ufp4, over all pairs of the models: 1 - the ratio
    of means, and half its 95% interval, the ratio taken as linear near there (the delta method). The interval is over
    seeds, since all models train on a seed's batches. None without pairs, or if a run diverged."""
    pairs = []
    for model in models:
        worse, better = (relative_errors(records, model, "branched", label) for label in ("e2m1", "ufp4"))
        pairs += [(s, worse[s], better[s]) for s in worse.keys() & better.keys()]
    total, rest = sum(w for _, w, _ in pairs), sum(b for *_, b in pairs)
    if not pairs or not math.isfinite(total + rest):
        return None
    off = collections.Counter()                                                 # of each seed; together they are 0
    for s, w, b in pairs:
        off[s] += (rest / total * w - b) / total
    return 1 - rest / total, interval([v * len(off) for v in off.values()])[1]


# What a model of train.py's is here: flags. SIZES have nano's steps, batches and learning rate.
MODELS = {name: ["--model", name] for name in ("nano", "nano-moe", "small", "small-moe")}
SIZES = {kind: {f"{kind}-{dim}": ["--model", preset, "--layers", str(layers), "--dim", str(dim), "--heads", str(heads),
                                  "--hidden", str(hidden)] for layers, dim, heads, hidden in sizes}
         for kind, preset, sizes in (
    ("dense", "nano", ((2, 32, 2, 96), (3, 64, 2, 176), (3, 96, 3, 256), (4, 128, 4, 352), (5, 160, 5, 448))),
    ("moe", "nano-moe", ((1, 32, 2, 32), (2, 48, 3, 32), (3, 64, 2, 48), (3, 96, 3, 64), (4, 128, 4, 96))))}
# One size with a third of the learning rate, or four times the text; and nano's parameters in 16 blocks, not 4.
VARIED = {"dense-64-slow": [*SIZES["dense"]["dense-64"], "--lr", "1e-3"],
          "dense-64-long": [*SIZES["dense"]["dense-64"], "--steps", "3200"],
          "nano-deep": [*SIZES["dense"]["dense-64"], "--layers", "16"]}
MODELS.update(SIZES["dense"], **SIZES["moe"], **VARIED)

ESTIMATORS = ["scratch", "branched", "bf16 forward", "own forward"]
BF16 = ("bf16", "bf16", [])
LOSS_ROWS = [(r, r, []) for r in ("bf16", "ufp4", "ufp4-int4", "e2m1", "e2m1-full-rht", "nvfp4", "mxfp4",
                                  "four-over-six", "mixfp4")]
# {what differs from ufp4: [(label, recipe, flags)]}
ABLATIONS = {
    "RHT on": [(f"rht {g}", "ufp4", ["--rht", g]) for g in ("none", "wgrad", "dgrad,wgrad", "fprop,wgrad")],
    "SR on": [(f"sr {o}", "ufp4", ["--sr", o]) for o in ("none", "x,dy", "all")],
    "grid, slope": [("e2m1-full-rht", "e2m1-full-rht", []), ("e2m1-debiased", "e2m1-debiased", []),
                    ("ufp4-shrunk", "ufp4-shrunk", [])],
    "one GEMM in E2M1": [(f"{g} in e2m1", "ufp4", ["--swap", f"{g}:e2m1"]) for g in ufp4.GEMMS],
    "one operand in E2M1": [(f"{o} in e2m1", "ufp4", ["--swap", f"{o}:e2m1"]) for o in ufp4.OPERANDS],
    "range of E2M1": [(r, r, []) for r in ("e2m1-max2", "e2m1-max3", "e2m1-max4")],
    "scales, grid": [(f"{r} {scale}", r, ["--scale", scale]) for scale in ("e4m3-nearest", "e4m3-up", "e8m0")
                     for r in ("ufp4", "e2m1")],
    "block": [(f"block {n}", "ufp4", ["--block", n]) for n in ("8", "32")],
    "Hadamard size": [(f"rht block {n}", "ufp4", ["--rht-block", n]) for n in ("8", "32")],
}
# The paper's loss errors in % (Q2) of Dense 1.5B and MoE 7.9B, and losses of Dense 1.5B's ablations (Q4).
PAPER_ERROR = {"Dense 1.5B": {"ufp4": 0.9673, "e2m1": 1.2570}, "MoE 7.9B": {"ufp4": 1.8469, "e2m1": 2.3596}}
PAPER_LOSS = {"ufp4": 1.88079, "rht none": 1.89202, "rht wgrad": 1.88721, "rht dgrad,wgrad": 1.88912,
              "rht fprop,wgrad": 1.88558, "sr none": 1.88535}
BASE_ROWS = [BF16, ("ufp4", "ufp4", []), ("e2m1", "e2m1", [])]


def bench_training(args, name, rows, against):
    """Train what the rows say, print the table -> (records, the name under which they are saved)."""
    if args.rows:
        unknown = set(args.rows) - {label for label, _, _ in rows}
        if unknown:
            sys.exit(f"bench.py: no row is called {', '.join(sorted(unknown))}; choose from {[r[0] for r in rows]}")
        rows = [r for r in rows if r[0] in args.rows or r[0] == "bf16"]
    if args.quick:
        args.seeds, args.estimators, args.train = 2, ["branched", "own forward"], args.train + ["--steps", "300"]
        name += "-quick"
    records = train_all(args, rows, name)
    for model in args.models:
        for estimator in args.estimators:
            print(f"\n{model}, {estimator}: BF16-relative loss error in % (seeds), paired difference to {against}")
            for label, _, _ in rows[1:]:
                found = through_seeds(records, model, label) if estimator == "own forward" else []
                line = "{:18s} {:18s} {:14s}".format(label, *compare(records, model, estimator, label, against))
                if found:
                    slope, noise = found[-1]
                    line += " fprop: slope {}, noise {} %;".format(*fprop_cells(records, model, label))
                    line += f" logits: slope {show(slope, 1, 4)}, noise {show(noise)} %"
                print(line)
    for model in PAPER_ERROR:
        published = [f"{label} {paper(label, against, model)}" for label, _, _ in rows if paper(label, against, model)]
        print(f"\nthe paper, {model}, %:", ", ".join(published) or "none")
    return records, name


def paper(label, against, model="Dense 1.5B"):
    """The figure in % of a model of the paper's: the loss error of a recipe, or an ablation's loss over ufp4's."""
    if against == "e2m1":
        return f"{PAPER_ERROR[model][label]:.2f}" if label in PAPER_ERROR[model] else ""
    known = label in PAPER_LOSS and model == "Dense 1.5B"
    return f"{100 * (PAPER_LOSS[label] / PAPER_LOSS['ufp4'] - 1):+.2f}" if known else ""


def of_model(name, args):
    """The name of the first model's figure."""
    return name if args.models[0] == "nano" else f"{name}-{args.models[0]}"


def bench_loss(args):
    records, name = bench_training(args, "loss", LOSS_ROWS, "e2m1")
    figure(of_model(name, args), 3, lambda axes: draw_loss(axes, records, args.models[0]))


def draw_loss(axes, records, model):
    labels = [label for label, _, _ in LOSS_ROWS[1:] if relative_errors(records, model, "branched", label)]
    for at, label in enumerate(labels):
        mean, half = interval([100 * e for e in relative_errors(records, model, "branched", label).values()])
        axes[0].errorbar(mean, -at, xerr=half or 0, fmt="o", color=f"C{at}", capsize=3)
    axes[0].set(yticks=[-at for at in range(len(labels))], yticklabels=labels, xlabel="loss error to BF16, %",
                title="Last third trained in 4 bits")
    curves = {(r["label"], r["estimator"], r["seed"]): dict(map(tuple, r["curve"])) for r in records
              if r["model"] == model and "curve" in r}
    for at, label in enumerate(labels):
        gaps = collections.defaultdict(list)
        for (which, estimator, seed), curve in curves.items():
            if (which, estimator) == (label, "branched"):
                for step, loss in curve.items():
                    gaps[step].append(100 * (loss / curves["bf16", "scratch", seed][step] - 1))
        steps = sorted(gaps)
        means = [statistics.mean(sum((gaps[s] for s in steps[max(0, i - 4):i + 1]), [])) for i in range(len(steps))]
        axes[1].plot(steps, means, color=f"C{at}", label=label, lw=1)
    axes[1].set(xlabel="step", ylabel="over the BF16 loss, %", title="Training loss, mean of 50 steps")
    axes[1].legend(fontsize=7)
    draw_noise(axes[2], records, model, {row[0]: [row] for row in LOSS_ROWS[1:]})


def draw_noise(ax, records, model, groups):
    """Loss error against the noise of fprop, a colour a group {name: rows}; dashed: the median of their ratios."""
    points = {label: [100 * v for v in (noise, error, half or 0)]
              for label, (_, noise, error, half) in fprop_and_error(records, model).items()}
    ax.set(xlabel="noise of fprop, % of its outputs' power", ylabel="loss error to BF16, %",
           title="Loss error against noise")
    if not points:
        return
    for at, (name, rows) in enumerate(groups.items()):
        if shown := [points[label] for label, _, _ in rows if label in points]:
            x, y, half = zip(*shown)
            ax.errorbar(x, y, yerr=half, fmt="o", ms=4, lw=0.8, color=f"C{at}", label=name)
    ratio, end = statistics.median(y / x for x, y, _ in points.values()), max(x for x, *_ in points.values())
    ax.plot((0, end), (0, ratio * end), "k--", lw=0.6)
    ax.legend(fontsize=7)


def bench_ablate(args):
    groups = list(ABLATIONS.values())[:3 if args.quick and not args.rows else None]         # quick: RHT, SR, slope
    records, name = bench_training(args, "ablate", BASE_ROWS + [row for rows in groups for row in rows], "ufp4")
    figure(of_model(name, args), 2, lambda axes: draw_ablate(axes, records, args.models[0]), 7)


def draw_ablate(axes, records, model):
    at, names = 0, []
    for color, rows in enumerate(ABLATIONS.values()):
        for label, _, _ in rows:
            if difference := contrast(records, model, "branched", {label: 100, "ufp4": -100}):
                mean, half = difference
                axes[0].errorbar(mean, at, xerr=half or 0, fmt="o", color=f"C{color}", capsize=3)
                names.append(label)
                at -= 1
    axes[0].axvline(0, color="k", lw=0.6)
    axes[0].set(yticks=[-n for n in range(len(names))], yticklabels=names,
                xlabel="loss error less ufp4's, % of BF16's loss", title="One change at a time")
    draw_noise(axes[1], records, model, {**ABLATIONS, "ufp4, e2m1": BASE_ROWS[1:]})


def bench_scaling(args):
    records, name = bench_training(args, "scaling", BASE_ROWS, "e2m1")
    print("\n" + fits_table(records))
    figure(name, 2, lambda axes: draw_scaling(axes, records))


def compute(settings):
    """(parameters, FLOPs) of a run: 6 for each parameter that a token uses, and token (forward 2, backward 4)."""
    s = argparse.Namespace(**{"remat": False, **settings})
    with torch.device("meta"):
        model = train.GPT(s, ufp4.RECIPES["bf16"], train.vocabulary(s.data.partition("-")[0]))
    total, active, *_ = train.counts(model, s)
    return total, 6 * active * s.steps * s.batch_size * s.seq_len


def by_compute(records, kind):
    """{label: {seed: [(FLOPs, loss, loss error)]}}, sizes ascending; of a size, the seeds that all its labels have and
    that didn't diverge."""
    flops = {r["model"]: compute(r["settings"])[1] for r in records if r["label"] == "bf16"}
    points = collections.defaultdict(lambda: collections.defaultdict(list))
    for model in sorted((m for m in SIZES[kind] if m in flops), key=flops.get):
        errors = {label: error for label, _, _ in BASE_ROWS if (
            error := relative_errors(records, model, "scratch" if label == "bf16" else "branched", label))}
        bf16 = {r["seed"]: r["val_loss"] for r in records if (r["model"], r["label"]) == (model, "bf16")}
        for seed in sorted(set.intersection(*map(set, errors.values()))):
            for label, error in errors.items():
                if all(math.isfinite(e[seed]) for e in errors.values()):
                    points[label][seed].append((flops[model], bf16[seed] * (1 + error[seed]), error[seed]))
    return points


def fit_scaling(records):
    """For each kind of model: the exponent b of L = a C^-b, and the change of the loss error with log10 C, each fitted
    by least squares to the sizes of one seed; and ufp4's loss error less e2m1's, the mean of all sizes of one seed.
    Means and 95% intervals over seeds that have every size."""
    fits = {}
    for kind in SIZES:
        points = by_compute(records, kind)
        sizes = max((len(p) for seeds in points.values() for p in seeds.values()), default=0)
        if sizes < 3:
            continue
        fits[kind], errors = {"sizes": sizes, "exponent": {}, "gap": {}}, {}
        for label, seeds in points.items():
            whole = [p for p in seeds.values() if len(p) == sizes]
            if not whole:
                continue
            errors[label] = {seed: statistics.mean(e for *_, e in p) for seed, p in seeds.items() if len(p) == sizes}
            line = lambda p, y: statistics.linear_regression([math.log10(c) for c, *_ in p], [y(q) for q in p]).slope
            fits[kind]["exponent"][label] = interval([-line(p, lambda q: math.log10(q[1])) for p in whole])
            if label != "bf16":
                fits[kind]["gap"][label] = interval([line(p, lambda q: q[2]) for p in whole])
        both = errors.get("ufp4", {}).keys() & errors.get("e2m1", {}).keys()
        fits[kind]["difference"] = interval([errors["ufp4"][s] - errors["e2m1"][s] for s in both]) if both else None
    return fits


def draw_scaling(axes, records):
    for kind, style in zip(SIZES, ("-", "--")):
        for (label, seeds), color in zip(by_compute(records, kind).items(), ("k", "C0", "C3")):
            points = collections.defaultdict(list)
            for seed in seeds.values():
                for c, *values in seed:
                    points[c].append(values)
            flops = sorted(points)
            axes[0].loglog(flops, [statistics.mean(v[0] for v in points[c]) for c in flops], "o" + style, ms=3,
                           color=color, label=f"{label}, {kind}")
            if label != "bf16":
                cis = [interval([100 * v[1] for v in points[c]]) for c in flops]
                axes[1].errorbar(flops, [m for m, _ in cis], yerr=[h or 0 for _, h in cis], fmt="o" + style, ms=3,
                                 color=color, capsize=3)
    axes[0].set(xlabel="training FLOPs, 6 N D", ylabel="validation loss, nats a byte", title="Loss against compute")
    axes[0].legend(fontsize=7)
    axes[1].set(xscale="log", xlabel="training FLOPs, 6 N D", ylabel="loss error to BF16, %", title="Gap to BF16")


# ---------------------------------------------------------------------------------------------------------------
# dispatch: what each recipe's products run on, compiled here for GPUs that need not be here

MMA = re.compile(r"tcgen05\.mma[^ ;]*|mma\.sync[^ ;]*|wgmma\.mma_async[^ ;]*|v_mfma\S*")


def compile_matmul(path, arch, fmt, scale, block):
    """Compile kernels.matmul_kernel for an architecture -> {instruction, count, shared, instructions, spills}: the
    tensor-core instruction, how often one program's code has it, bytes of shared memory, all its instructions and those
    that spill registers (None where Triton's own disassembler, 3.6's for sm_103, can't read the binary; of AMD's code
    all are not counted)."""
    import triton
    import triton.language as tl
    import kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    f = ufp4.get_format(fmt)
    BM, BN, BK, warps, stages = kernels.tiles(path, arch, block)
    cuda = arch.startswith("sm_")
    number = {"fp32": "fp32", "e4m3": "u8" if path == "decode" else "fp8e4nv", "e8m0": "u8"}[scale]
    constants = dict(PATH=path, S=kernels.Spec(*kernels.spec(f, scale, block)), DTYPE=tl.bfloat16, BM=BM, BN=BN, BK=BK)
    signature = dict(c_ptr="*bf16", a_t_ptr="*fp32", b_t_ptr="*fp32", M="i32", N="i32", K="i32")
    for name, rows in (("a", BM), ("b", BN)):
        signature[f"{name}_desc"] = f"tensordesc<u8[{rows}, {BK // 2}]>" if path == "fp4" else \
            f"tensordesc<i32[{rows}, {BK // 8}]>"
        signature[f"{name}_scale_desc"] = f"tensordesc<{number}[{rows // 128}, {BK // block // 4}, 2, 256]>"
    signature.update(dict.fromkeys(constants, "constexpr"))
    names = kernels.matmul_kernel.arg_names
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in ("c_ptr", "M", "N", "K")}
    source = ASTSource(kernels.matmul_kernel, {n: signature[n] for n in names}, constants, aligned)
    target = GPUTarget("cuda", int(arch[3:]), 32) if cuda else GPUTarget("hip", arch, 64)
    binary = triton.compile(source, target=target, options=dict(num_warps=warps, num_stages=stages))
    text, code = binary.asm["ptx" if cuda else "amdgcn"], disassemble(binary) if cuda else None
    if cuda:
        spills = None if code is None else sum(op.startswith(("STL", "LDL")) for _, op, _ in code)
    else:
        spills = int(re.search(r"vgpr_spill_count:\s*(\d+)", text)[1])
    found = collections.Counter(MMA.findall(text))
    return dict(instruction=" + ".join(found), count=sum(found.values()), shared=binary.metadata.shared,
                instructions=code and len(code), spills=spills)


def disassemble(binary):
    """A compiled kernel's instructions: (address, opcode, address that it branches to or None). None if Triton's
    disassembler can't read it, or isn't there."""
    import triton
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        try:
            sass = subprocess.run((tool, "-sass", file.name), capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
    lines = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)(.*?);", sass.stdout, re.M)
    to = [re.search(r"0x([0-9a-f]+)\s*$", rest) if op.startswith("BRA") else None for _, op, rest in lines]
    return [(int(at, 16), op, int(t[1], 16) if t else None) for (at, op, _), t in zip(lines, to)]


QUANTIZED = {                               # calls that `kernels` times, and a layer's: rows, cols, noise, decoded
    "one orientation, nearest": (True, False, False, (False, False)),
    "both orientations, nearest": (True, True, False, (False, False)),
    "both orientations, stochastic": (True, True, True, (False, False)),
    "X of a layer": (True, True, False, (True, False)),
    "W of a layer, fprop": (True, False, False, (True, False)),
    "W of a layer, dgrad": (False, True, False, (False, True)),
    "dY of a layer": (True, True, True, (True, True)),
}


def compile_quantize(name, arch):
    """Compile kernels.quantize_kernel, as it runs for ufp4 on bfloat16, for an architecture -> {instructions of its
    loop for each element, registers, spills}."""
    import kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    rows, cols, noise, decoded = QUANTIZED[name]
    r, (TR, TC, stages, _, registers) = ufp4.RECIPES["ufp4"], kernels.SHAPES[rows, cols]
    mask = kernels.sign_mask(r.signs)
    S = kernels.Plan(*kernels.spec(r.format, r.scale, r.block), rows, cols, mask, mask, 16, 16, 0.25, noise, False,
                     False, *decoded, TR, TC, stages)
    constants = dict(amax_ptr=None, stride_c=1, S=S, **({} if noise else {"seed_ptr": None}))
    names = kernels.quantize_kernel.arg_names
    types = dict(x_ptr="*bf16", t_ptr="*fp32", row_out_ptr="*i32", row_scales_ptr="*fp32", col_out_ptr="*i32",
                 col_scales_ptr="*fp32", seed_ptr="*i64", **dict.fromkeys(("offset", "R", "C", "stride_r"), "i32"))
    types.update(dict.fromkeys(constants, "constexpr"))
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n] != "constexpr"}
    source = ASTSource(kernels.quantize_kernel, {n: types[n] for n in names}, constants, aligned)
    binary = kernels.triton.compile(source, target=GPUTarget("cuda", int(arch[3:]), 32),
                                    options=dict(num_warps=4, maxnreg=registers))
    code = disassemble(binary)
    if code is None:
        return dict(error="Triton's disassembler can't read it")
    back = [(at - to, to, at) for at, _, to in code if to is not None and to < at]          # the loop is the longest
    _, first, last = max(back)
    return dict(per_element=sum(first <= at <= last for at, *_ in code) / (TR * TC / 128), registers=registers,
                instructions=len(code), spills=sum(op.startswith(("STL", "LDL")) for _, op, _ in code),
                prefetched="cp.async" in binary.asm["ptx"])


def lowering(*args):
    """compile_matmul or compile_quantize in a process of its own, since a compiler that fails an assertion takes its
    process along, and without the interpreter. {"error": its last line} if it fails."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__, "lower", json.dumps(args)], capture_output=True, text=True,
                          env=dict(env, TRITON_ALWAYS_COMPILE="1"))
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 else dict(error=lines[-1] if lines else str(done.returncode))


def bench_lower(args):
    given = json.loads(args.what)
    print(json.dumps((compile_quantize if given[0] in QUANTIZED else compile_matmul)(*given)))


def bench_dispatch(args):
    """The table recipe x architecture. Where the path is cuBLAS, whose code is not ours, the row shows the product
    that decodes in the kernel."""
    import kernels
    rows, calls = [], []
    for recipe in ufp4.RECIPES.values():
        for arch in kernels.ARCHITECTURES:
            path, why = kernels.route(recipe, arch)
            rows.append({"recipe": recipe.name, "arch": arch, "path": path, "why": why})
            calls.append(None if path in ("bf16", "reference") else
                         ("decode" if path == "cublas" else path, arch, recipe.fmt, recipe.scale, recipe.block))
    quantizers = [{"row": n, "arch": a} for n in QUANTIZED for a in ("sm_90", "sm_100")]
    calls += [tuple(r.values()) for r in quantizers]
    distinct = list(dict.fromkeys(filter(None, calls)))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = tqdm(pool.map(lambda call: lowering(*call), distinct), "compile", len(distinct))
        found = {None: {}} | {call: result for result, call in zip(compiled, distinct)}
    for row, call in zip(rows + quantizers, calls):
        row.update(found[call])

    print(f"{'recipe':14} {'arch':7} {'path':7} {'MMAs':>5} {'shared':>7} {'spills':>6}  instruction  (why)")
    for r in rows:
        line = "{recipe:14} {arch:7} {path:7}".format(**r)
        if "count" in r:
            spills = "?" if r["spills"] is None else r["spills"]
            line += f" {r['count']:5} {r['shared']:7} {spills:>6}  {r['instruction']}"
        print(f"{line} {r.get('error', '')} ({r['why']})")
    print("\nquantize, ufp4, bfloat16: instructions for each element, spills")
    for r in quantizers:
        print(f"{r['row']:30} {r['arch']:7}", r.get("error") or "{per_element:5.1f} {spills:3}".format(**r))
    save("dispatch", {"triton": kernels.triton.__version__, "rows": rows, "quantize": quantizers})


# ---------------------------------------------------------------------------------------------------------------
# kernels: speed on a GPU, in one process, as ratios to what that GPU can do

SPEEDS = {                                  # what is measured, in this order: its target (and aim)
    "quantize, one orientation, RHT, nearest: share of copy bandwidth": "at least 0.75 (0.85)",
    "quantize, both orientations, RHT, nearest: share of copy bandwidth": "at least 0.55 (0.75)",
    "quantize, both orientations, RHT, stochastic: share of copy bandwidth": "at least 0.40 (0.55)",
    "RHT + quantize in one kernel / quantize alone": "at most 1.06 (1.02), the paper's",
    "RHT, then quantize / quantize alone": "the paper's 1.62",
    "linear layer, forward + backward, `ufp4` / bf16": "at most 1.30 (1.15)",
    "the same, calls queued ahead: the GPU's time alone": "",
    "packed GEMM, decoded once for cuBLAS: share of cuBLAS bf16": "the better of the two 0.55",
    "packed GEMM, decoded in the kernel: share of cuBLAS bf16": "the better of the two 0.55",
    "training step, `small`, compiled, `ufp4` / bf16": "at most 1.6 (1.3)",
    "training step, 1B parameters, compiled, `ufp4` / bf16": "at most 1.3 (1.15)",
}
TIMED = {"n": 8192, "linear": (8192, 4096, 4096), "vocabulary": 50304, "models": (
    ["--model", "small"],
    ["--model", "small", "--layers", "16", "--dim", "2048", "--heads", "16", "--hidden", "5632", "--seq-len", "2048",
     "--batch-size", "4"])}


def gpu_time(f, ahead=True, repeats=30):
    """Median, smallest and largest milliseconds of f() on the GPU, after three warm-ups. With `ahead` the GPU sleeps a
    quarter of a second while the calls queue up: its time alone counts. Without, Python's counts too, if it is
    slower."""
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(5 * 10**8)                                            # cycles, at about 1.8 GHz
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        f()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    return statistics.median(times), min(times), max(times)


def training_step(flags, recipe, vocabulary, device, compiled):
    """One optimizer step of train.GPT on random tokens, in bfloat16 autocast."""
    torch.compiler.reset()                              # or, after another model, this one's sizes would be variables
    torch.manual_seed(0)
    s = train.parse_args([*flags, "--device", device])
    model = train.GPT(s, ufp4.RECIPES[recipe], vocabulary).to(device)
    tokens = torch.randint(vocabulary, (s.batch_size, s.seq_len), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model = compiled(model)

    def step():
        with torch.autocast(device, torch.bfloat16):
            model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def kernel_speeds(sizes, time, device, compiled):
    """Yields (name, milliseconds, value, unit): the two ceilings, then the rows of SPEEDS."""
    import kernels
    n, recipe = sizes["n"], ufp4.RECIPES["ufp4"]
    x, w = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    y = torch.empty_like(x)
    copy = time(lambda: y.copy_(x))
    bandwidth = 2 * x.nbytes / copy[0]
    yield "copy", copy, bandwidth / 1e6, "GB/s"
    cublas = time(lambda: torch.mm(x, w.T, out=y))
    yield "cuBLAS bf16", cublas, 2 * n**3 / cublas[0] / 1e9, "TFLOP/s"

    def quantize(x=x, cols=False, signs=recipe.signs, seed=None, swizzle=False):
        return kernels.quantize(x, recipe.format, recipe.scale, recipe.block, True, cols, signs,
                                signs if cols else None, seed, swizzle=swizzle)

    seed = torch.zeros(1, dtype=torch.int64, device=device)
    names = iter(SPEEDS)
    for options in ({}, {"cols": True}, {"cols": True, "seed": seed}):
        moved = x.nbytes + sum(p.codes.nbytes + p.scale.nbytes for p in quantize(**options) if p is not None)
        ms = time(lambda: quantize(**options))
        yield next(names), ms, moved / ms[0] / bandwidth, ""
    alone, ms = time(lambda: quantize(signs=None)), time(quantize)
    yield next(names), ms, ms[0] / alone[0], ""
    h = (torch.tensor(recipe.signs)[:, None] * ufp4.hadamard(16)).to(device, torch.bfloat16)
    ms = time(lambda: quantize((x.view(-1, 16) @ h).view(x.shape), signs=None))
    yield next(names), ms, ms[0] / alone[0], ""

    m, k, f = sizes["linear"]
    v, dy = (torch.randn(m, c, device=device, dtype=torch.bfloat16) for c in (k, f))
    v.requires_grad_()
    layers = [ufp4.Linear(k, f, bias=False, device=device, dtype=torch.bfloat16, recipe=r) for r in ("bf16", "ufp4")]
    for ahead in (False, True):
        base, ms = (time(lambda: torch.autograd.grad(layer(v), (v, layer.weight), dy), ahead=ahead) for layer in layers)
        yield next(names), ms, ms[0] / base[0], ""

    for path in ("cublas", "decode"):
        a, b = (quantize(t, swizzle=path != "cublas")[0] for t in (x, w))
        ms = time(lambda: kernels.matmul(a, b, path))
        yield next(names), ms, cublas[0] / ms[0], ""
    for flags in sizes["models"]:
        base, ms = (time(training_step(flags, r, sizes["vocabulary"], device, compiled), ahead=False)
                    for r in ("bf16", "ufp4"))
        yield next(names), ms, ms[0] / base[0], ""


ONE_TILE = 10**6                            # programs for each processor: more than there are tiles, so one each
ONE = ((32, 128, 2, 8, 64), (32, 128, 2, 6, 80), (32, 128, 3, 6, 80), (32, 128, 1, 8, 64), (32, 128, 1, ONE_TILE, 64),
       (64, 64, 2, 8, 64), (64, 64, 1, ONE_TILE, 64), (64, 128, 2, 5, 96))
TRIED = {(True, False): ONE, (False, True): ONE,
         (True, True): ((64, 64, 2, 4, 128), (64, 64, 2, 3, 168), (64, 64, 3, 3, 168), (64, 64, 2, 5, 96),
                        (64, 64, 1, 4, 128), (64, 64, 1, ONE_TILE, 128), (32, 64, 2, 8, 64), (64, 128, 2, 2, 255))}


def shape_speeds(n, time, device):
    """Yields (a row of QUANTIZED, a value for kernels.SHAPES, milliseconds) on a tensor of n x n."""
    import kernels
    recipe, x = ufp4.RECIPES["ufp4"], torch.randn(n, n, device=device, dtype=torch.bfloat16)
    seed, used = torch.zeros(1, dtype=torch.int64, device=device), dict(kernels.SHAPES)
    try:
        for name, (rows, cols, noise, decoded) in QUANTIZED.items():
            for shape in TRIED[rows, cols]:
                kernels.SHAPES[rows, cols] = shape
                yield name, shape, time(lambda: kernels.quantize(
                    x, recipe.format, recipe.scale, recipe.block, rows, cols, recipe.signs if rows else None,
                    recipe.signs if cols else None, seed if noise else None, decoded=decoded))
    finally:
        kernels.SHAPES.update(used)


def need_gpu():
    if not torch.cuda.is_available():
        sys.exit("bench.py: this measures a GPU, and torch finds none here; the kernels' results are tested without "
                 "one by pytest -k kernels, and their code by python bench.py dispatch")
    os.environ["UFP4_BACKEND"] = "triton"                                       # an error rather than the reference


def bench_tune(args):
    """Times each kind of call in each shape; then prints, of those that share an entry of kernels.SHAPES, the sums."""
    need_gpu()
    import kernels
    rows, sums = [], collections.Counter()
    for name, shape, ms in shape_speeds(TIMED["n"], gpu_time, "cuda"):
        rows.append({"row": name, "shape": shape, "ms": ms})
        sums[QUANTIZED[name][:2], shape] += ms[0]
        print("{0:.3f} ms ({1:.3f} to {2:.3f})  {row}: {shape}".format(*ms, **rows[-1]), flush=True)
        save("tune-" + re.sub(r"\W+", "-", torch.cuda.get_device_name()),
             {"triton": kernels.triton.__version__, "n": TIMED["n"], "rows": rows})
    for (orientations, shape), ms in reversed(sums.most_common()):
        print(f"{ms:.3f} ms in all with SHAPES[{orientations}] = {shape}")


def bench_kernels(args):
    need_gpu()
    import kernels
    torch._dynamo.config.recompile_limit = 64
    rows = []
    for name, ms, value, unit in kernel_speeds(TIMED, gpu_time, "cuda", torch.compile):
        rows.append({"row": name, "ms": ms, "value": value, "unit": unit})
        print(f"{value:8.3f} {unit:8}{ms[0]:9.3f} ms ({ms[1]:.3f} to {ms[2]:.3f})  {name}: {SPEEDS.get(name, '')}",
              flush=True)
        save("kernels-" + re.sub(r"\W+", "-", torch.cuda.get_device_name()),
             {"triton": kernels.triton.__version__, "sizes": TIMED, "rows": rows})


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
        settings, *records = read_log(out)
    tokens = settings["settings"]["batch_size"] * 128
    return [1e3 * tokens / r["tokens_per_s"] for r in records[-kept:]], usage.ru_maxrss / 1024


def bench_scale(args):
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
    rows = {(r["scale"], r["fmt"]): r for r in load_results("bias")["scales"]}
    slope = lambda r, rounding: "{:.4f} ± {:.4f}".format(r[rounding][0], 2 * r[rounding][1])
    return markdown(["block scales"] + [f"{f.upper()} {what}" for f in GRIDS for what in ("nearest", "SR", "SQNR, dB")],
                    [[name] + [cell for r in (rows[scale, f] for f in GRIDS)
                               for cell in (slope(r, "nearest"), slope(r, "stochastic"), f"{r['sqnr']:.2f}")]
                     for scale, name in SCALE_RULES.items()])


def cpu_table():
    results = load_results("cpu")
    rows = [[f"one step of `nano`, {r['recipe']} / bf16, quantizer {r['quantizer']}",
             "{:.2f} ({:.2f} to {:.2f})".format(*r["ratio"])] for r in results["step"]]
    rows += [[f"`fake_quantize`, 4096 x 4096, {name}", "{:.0f} ms ({:.0f} to {:.0f})".format(*ms)]
             for name, ms in results["fake_quantize_ms"].items()]
    return markdown([f"on {results['machine']['cores']} cores", "median (smallest to largest)"], rows)


def fprop_cells(records, model, label):
    slope, noise = fprop(records, model, label) or (None, None)
    return ("", "") if noise is None else (f"{slope:.4f}", f"{100 * noise:.3f}")


def noise_table():
    rows = []
    for name, model in (("loss", "nano"), ("loss", "nano-moe"), ("ablate", "nano"), ("ablate", "nano-deep")):
        points = fprop_and_error(load_results(name)["runs"], model)
        if len(points) < 2:
            continue
        slope, noise, error, _ = zip(*points.values())
        ratios = [e / n for e, n in zip(error, noise)]
        rows.append([f"`{name}`, `{model}`: {len(points)}", f"{statistics.correlation(noise, error):.2f}",
                     f"{statistics.correlation([1 - s for s in slope], error):.2f}",
                     f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"])
    return markdown(["rows of", "correlation of loss error and noise", "of loss error and shrinkage",
                     "loss error / noise, median (smallest to largest)"], rows)


def loss_table(model, published):
    """Without the columns that were not run for this model."""
    records, rows = load_results("loss")["runs"], []
    for label, _, _ in LOSS_ROWS[1:]:
        scratch, branched, *parts = (compare(records, model, e, label, "e2m1") for e in ESTIMATORS)
        rows.append([f"`{label}`", *scratch, *branched, compare(records, model, "branched", label, "ufp4")[1],
                     *(p[0] for p in parts), paper(label, "e2m1", published)])
    header = ["loss error, % (seeds)", "from scratch", "less `e2m1`", "branched", "less `e2m1`", "less `ufp4`",
              "of it, in the weights", "forward noise alone", f"the paper, {published}"]
    table = [header] + [row for row in rows if any(row[1:-1])]
    measured = [i for i in range(len(header)) if any(row[i] for row in table[1:])]
    header, *rows = ([row[i] for i in measured] for row in table)
    return markdown(header, rows)


def ablate_table():
    records, rows = load_results("ablate")["runs"], []
    for what, group in {"": BASE_ROWS[1:], **ABLATIONS}.items():
        rows += [[what, f"`{label}`", *cells, compare(records, "nano", "own forward", label, label)[0],
                  *fprop_cells(records, "nano", label), paper(label, "ufp4")]
                 for label, _, _ in group
                 if any(cells := compare(records, "nano", "branched", label, "ufp4"))]
    return markdown(["differs from `ufp4` in", "run", "loss error, % (seeds)", "less `ufp4`", "forward noise alone",
                     "slope of fprop", "noise of fprop, %", "the paper's"], rows)


def cause_table(model):
    """Grids x slopes, RHT on all three GEMMs."""
    records = load_results("ablate")["runs"]
    effect = lambda **weights: show(contrast(records, model, "branched", {names[k]: w for k, w in weights.items()}))
    names = {"a": "e2m1-full-rht", "b": "e2m1-debiased", "c": "ufp4-shrunk", "d": "ufp4"}
    a, b, c, d = (compare(records, model, "branched", label, label)[0] for label in names.values())
    return markdown(["loss error, % (seeds)", "shrinks", "does not", "effect of shrinking"],
                    [["E2M1, RHT on all three GEMMs", a, b, effect(a=1, b=-1)],
                     ["E1M2, RHT on all three GEMMs", c, d, effect(c=1, d=-1)],
                     ["effect of the grid", effect(a=1, c=-1), effect(b=1, d=-1), ""],
                     ["mean effects", "of the grid:", effect(a=0.5, b=0.5, c=-0.5, d=-0.5),
                      effect(a=0.5, b=-0.5, c=0.5, d=-0.5)]])


def depth_table(model):
    """Slopes of one product, of a chain of as many as a signal passes in the model (qkv, proj, fc1, fc2 a block), and
    of what does pass through the model."""
    records = load_results("ablate")["runs"]
    rows, products = [], 4 * train.parse_args(MODELS[model]).layers
    for label in ("e2m1", "e2m1-full-rht", "e2m1-debiased", "ufp4-shrunk", "ufp4"):
        if depth := through_seeds(records, model, label):
            slope, (first, *_, last, logits) = fprop(records, model, label)[0], depth
            rows.append([f"`{label}`", f"{slope:.3f}", f"{slope**products:.3f}",
                         *(show(place[0], 1, 3) for place in (first, last, logits)),
                         *(f"{100 * place[1][0]:.2f}" for place in (last, logits))])
    return markdown([f"`{model}`", "slope of fprop", f"of {products} in a chain", "of the stream, first block",
                     "last block", "of the logits", "noise of the stream, last block, %", "of the logits, %"], rows)


def scaling_table():
    results, rows = load_results("scaling"), []
    records = results["runs"]
    for sizes in (*SIZES.values(), VARIED):
        for model in sizes:
            settings = [r["settings"] for r in records if (r["model"], r["label"]) == (model, "bf16")]
            if settings:
                cells = [compare(records, model, "branched", label, "e2m1") for label in ("e2m1", "ufp4")]
                parameters, flops = compute(settings[0])
                rows.append([model, f"{parameters:,}", f"{flops:.1e}", cells[0][0], *cells[1],
                             show(reduction(records, model), 100, 0),
                             *(fprop_cells(records, model, label)[1] for label in ("e2m1", "ufp4"))])
    return markdown(["size", "parameters", "FLOPs", "`e2m1`, % (seeds)", "`ufp4`, % (seeds)", "`ufp4` less `e2m1`",
                     "smaller by, %", "noise of `e2m1`, %", "noise of `ufp4`, %"], rows)


def fits_table(records):
    fits = fit_scaling(records)
    cell = lambda part, label, *how: [show(f[part].get(label), *how) for f in fits.values()]
    rows = [[f"exponent b of L(C) = a C^-b, {r}", *cell("exponent", r, 1, 3)] for r in ("bf16", "ufp4", "e2m1")]
    rows += [[f"loss error of {r}, change for tenfold compute, %", *cell("gap", r)] for r in ("ufp4", "e2m1")]
    rows += [["loss error of ufp4 less e2m1's, mean of sizes, %", *(show(f["difference"]) for f in fits.values())],
             ["smaller by, % of e2m1's, all runs", *(show(reduction(records, *SIZES[k]), 100, 0) for k in fits)]]
    return markdown(["", *fits], rows)


def sqnr_table():
    results = load_results("sqnr")
    columns = [f + rht for rht in ("", " rht") for f in GRIDS]
    rows = [["the paper's fc2 input", *(f"{results['paper fc2 x'][c]:.2f}" for c in columns), ""],
            ["SwiGLU-like samples", *(f"{results['swiglu-like']['sqnr'][c]:.2f}" for c in columns), ""]]
    shown = [(o, name, g, layer) for o, name, g in (("x", "X", "fprop"), ("dy", "dY", "dgrad"), ("dy", "dY", "wgrad"))
             for layer in ("qkv", "proj", "fc1", "fc2")] + [("w", "W", g, "") for g in ENTERS["w"]]
    for operand, name, gemm, layer in shown:
        of = [r for r in results["tensors"] if (r["operand"], r["gemm"]) == (operand, gemm) and layer in r["layer"]]
        rows.append([f"{name} of {layer or 'all'}, {gemm}",
                     *(f"{statistics.median(r['sqnr'][c] for r in of):.2f}" for c in columns),
                     f"{sum(r['flips'] for r in of)} of {len(of)}"])
    return markdown(["SQNR, dB", "E2M1", "E1M2", "E2M1, RHT", "E1M2, RHT", "better grid changes"], rows)


def dispatch_table():
    results, cells = load_results("dispatch"), {}
    shown = ("ufp4", "ufp4-e4m3", "ufp4-mx", "e2m1", "nvfp4", "mxfp4")
    for r in (r for r in results["rows"] if r["recipe"] in shown):
        text = r.get("error") or f"{r['path']}: {r['instruction']}, {r['count']}"
        # without the parts that say nothing here: layout, synchronization, the types of what is multiplied and summed
        short = re.sub(r"\.(row\.col|cta_group::1|sync\.aligned)|\.f32\.\w+\.\w+(\.f32)?(\.ue\w+)?", "", text)
        cells.setdefault(r["recipe"], {})[r["arch"]] = short
    rows = [[arch] + [cells[recipe][arch] for recipe in shown] for arch in cells["ufp4"]]
    return markdown([f"path: instruction, count (Triton {results['triton']})", *(f"`{r}`" for r in shown)], rows)


def quantize_table():
    results, cells = load_results("dispatch"), {}
    for r in results["quantize"]:
        cells.setdefault(r["row"], []).append(r.get("error") or "{per_element:.1f}, {spills}".format(**r))
    return markdown([f"an element, spills (Triton {results['triton']})",
                     *dict.fromkeys(r["arch"] for r in results["quantize"])],
                    [[row, *numbers] for row, numbers in cells.items()])


def kernel_table():
    """One column a GPU that was measured."""
    measured = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("kernels-*.json"))]
    found = [{r["row"]: "{:.2f} ({:.3f} ms, {:.3f} to {:.3f})".format(r["value"], *r["ms"]) for r in m["rows"]}
             for m in measured] or [{}]
    rows = [[name, target] + [cells.get(name, "not measured: `python bench.py kernels`") for cells in found]
            for name, target in SPEEDS.items()]
    return markdown(["on a GPU", "target (aim)", *([m["machine"]["device"] for m in measured] or ["none yet"])], rows)


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


TABLES = {"slopes": slope_table, "scales": scale_table, "sqnr": sqnr_table, "cpu": cpu_table,
          "loss": lambda: loss_table("nano", "Dense 1.5B"), "loss-moe": lambda: loss_table("nano-moe", "MoE 7.9B"),
          "cause": lambda: cause_table("nano"), "cause-again": lambda: cause_table("dense-128"),
          "cause-deep": lambda: cause_table("nano-deep"), "depth": lambda: depth_table("nano-deep"),
          "noise": noise_table, "ablate": ablate_table,
          "scaling": scaling_table, "fits": lambda: fits_table(load_results("scaling")["runs"]),
          "dispatch": dispatch_table, "quantize": quantize_table, "kernels": kernel_table,
          "scale": growth_table, "routing": routing_table}


PAGES = (HERE / "README.md", RESULTS / "README.md")


def fill_tables(text):
    """A page's text with each block between <!-- NAME --> and <!-- /NAME --> made anew."""
    return re.sub(r"<!-- (\S+) -->\n.*?<!-- /\1 -->",
                  lambda m: f"<!-- {m[1]} -->\n{TABLES[m[1]]()}\n<!-- /{m[1]} -->", text, flags=re.S)


def bench_readme(args):
    for page in PAGES:
        page.write_text(fill_tables(page.read_text()))


# ---------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Each claim, one command.")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("bias", help="geometry of the grids, slopes, compounding")
    p.add_argument("--seed", type=int, default=0)
    p = commands.add_parser("sqnr", help="which grid suits which tensor, with and without RHT")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--steps", type=int, default=300, help="to train the model whose tensors are measured")
    commands.add_parser("cpu", help="speed of the emulation on this CPU")
    commands.add_parser("dispatch", help="the instruction each recipe runs on, per architecture")
    commands.add_parser("kernels", help="speed of the Triton kernels on this GPU")
    commands.add_parser("tune", help="how the quantizer runs fastest on this GPU: values for kernels.SHAPES")
    p = commands.add_parser("lower", help="one row of dispatch, in a process of its own")
    p.add_argument("what")
    commands.add_parser("scale", help="how cost grows with processes, tokens and experts")
    commands.add_parser("readme", help="write the tables of both README.md anew")
    for name, models in (("loss", ["nano"]), ("ablate", ["nano"]),
                         ("scaling", [*SIZES["dense"], *SIZES["moe"], *VARIED])):
        p = commands.add_parser(name, help="train and compare; arguments after -- go to train.py")
        p.add_argument("--models", nargs="+", default=models, choices=MODELS, help="sizes of train.py's GPT")
        p.add_argument("--seeds", type=int, default=5, choices=range(1, 100), metavar="N")
        p.add_argument("--rows", nargs="+", help="some of the table's rows (default: all)")
        p.add_argument("--estimators", nargs="+", choices=ESTIMATORS,
                       default=ESTIMATORS if name == "loss" else ["branched", "own forward"],
                       help="scratch: whole runs from the same weights and batches; branched: the last third, from one "
                            "BF16 run; bf16 forward: a branched run's weights, evaluated without quantization; own "
                            "forward: the BF16 run's weights, evaluated with the recipe's forward pass; its noise")
        p.add_argument("--jobs", type=int, choices=range(1, 1000), metavar="N", help="runs at a time",
                       default=1 if torch.cuda.is_available() else os.cpu_count())
        p.add_argument("--quick", action="store_true", help="300 steps, 2 seeds, no 4-bit run from scratch")
        p.add_argument("--runs", type=Path, default=HERE / "out" / "bench", help="where the runs go")
        p.add_argument("train", nargs="*", help="more flags for train.py, after --")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")          # loading a checkpoint in one process
    arguments = parser.parse_args()
    globals()[f"bench_{arguments.command}"](arguments)
