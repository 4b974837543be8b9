"""bench.py: the experiments do what they claim, and the tables say what was measured."""
import argparse
import json
import math
import re
import shutil

import pytest
import torch

import bench
import train
import ufp4
from ufp4 import FORMATS, GEMMS, OPERANDS, RECIPES, fake_quantize


@pytest.fixture(autouse=True)
def seeded_and_eager():
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        yield


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


# --- The experiments


@pytest.mark.parametrize("name,first,second", [("four-over-six", "e2m1", "e2m1-max4"),
                                               ("mixfp4", "e2m1", "e1m2")])
def test_a_block_takes_the_format_that_errs_less(name, first, second):
    x = torch.randn(500, 64, generator=gen())
    q = RECIPES[name].quantizer("x", "fprop")
    errors = [(fake_quantize(x, f) - x).view(-1, 16).double().square().sum(-1)
              for f in (first, second)]
    got = (q(x) - x).view(-1, 16).double().square().sum(-1)
    assert torch.equal(got, torch.minimum(*errors))
    assert 0.1 < (errors[1] < errors[0]).float().mean() < 0.9
    assert torch.equal(q(x.T.contiguous(), None, -2), q(x).T)
    for size in (2.0**-80, 2.0**80):                    # squares out of float32's range
        assert torch.equal(q(x * size), q(x) * size)
    sr = RECIPES[name].quantizer("dy", "dgrad")
    x = torch.randn(20_000, 64, generator=gen())
    alpha, se = bench.slope(sr(x), x)                   # chosen without noise, so no bias
    assert abs(alpha - 1) < 4 * se < 2e-3


@pytest.mark.parametrize("name,slope,like", [("e2m1-debiased", 1.0, "e2m1-full-rht"),
                                             ("ufp4-shrunk", 0.996, "ufp4")])
def test_the_slope_of_what_is_rounded_to_nearest_is_set(name, slope, like):
    x = torch.randn(64, 64, generator=gen())
    for operand, gemm, dim in (("x", "fprop", -1), ("w", "dgrad", -2)):
        q, plain = (RECIPES[r].quantizer(operand, gemm) for r in (name, like))
        rotated = ufp4.rht(x, q.signs, dim)
        for size in (1.0, 1e-25, 1e25):                 # whose squares float32 does not hold
            assert bench.slope(q(x * size, None, dim), rotated * size)[0] == \
                pytest.approx(slope, abs=1e-6)
        ratio = q(x, None, dim) / plain(x, None, dim)
        assert ratio[ratio == ratio].std() < 1e-6       # one factor for all
        assert not q(x * 0, None, dim).any()
    noise = torch.rand(64, 64, generator=gen())
    sr, plain = (RECIPES[r].quantizer("dy", "dgrad") for r in (name, like))
    assert torch.equal(sr(x, noise), plain(x, noise))


def products(recipe):
    """Y, dX and dW of a linear layer under a recipe."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 64, requires_grad=True) for n in (48, 32))
    y = ufp4.linear(x, w, recipe)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).sin())
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": w.grad}


@pytest.mark.parametrize("where", GEMMS + OPERANDS)
def test_another_format_reaches_its_gemm_or_operand_alone(where):
    changed = {"x": {"fprop", "wgrad"}, "w": {"fprop", "dgrad"}, "dy": {"dgrad", "wgrad"}}
    ours, plain = products(f"ufp4-{where}-in-e2m1"), products("ufp4")
    assert {g for g in GEMMS if not torch.equal(ours[g], plain[g])} == changed.get(where, {where})
    if where in GEMMS:                                  # and is that format there
        assert torch.equal(ours[where], products("e2m1-full-rht")[where])


def test_every_run_fits_its_model_and_no_recipe_is_ufp4_again():
    rows = {m: ("ufp4", "e2m1") for sizes in (*bench.SIZES.values(), bench.VARIED) for m in sizes}
    rows["nano"] = [r for groups in bench.GROUPS.values() for rs in groups.values() for r in rs]
    for model, recipe in ((m, r) for m in rows for r in rows[m]):
        s = train.parse_args([*bench.MODELS[model], "--recipe", recipe, "--device", "cpu"])
        with torch.device("meta"):
            train.GPT(s, train.make_recipe(s), 256)     # raises if a layer has no whole blocks
    plain = products("ufp4")
    for recipe in set(rows["nano"]) - {"ufp4", "ufp4-int4"}:
        assert any(not torch.equal(plain[g], v) for g, v in products(recipe).items()), recipe


# --- What is measured


@pytest.mark.parametrize("name", bench.GRIDS)
def test_bias_and_slope_are_the_closed_forms(name):
    bins = bench.bin_bias(name)
    expected = [0, 0, 0, -0.125, 0, -0.25] if name == "e2m1" else [0] * 6
    assert [b["closed"] for b in bins] == expected
    assert [b["measured"] for b in bins] == pytest.approx(expected, abs=1e-5)
    # E <Q(x), x> / E <x, x> of 16 Gaussians by integration over the block's maximum m: it is exact,
    # and the other 15 are half-normal below it; the integral of x f(x) over a bin is f(a) - f(b)
    levels = [v / FORMATS[name].max for v in FORMATS[name].levels]
    m = torch.linspace(1e-3, 9, 20_001, dtype=torch.float64)
    density, below = (lambda x: math.sqrt(2 / math.pi) * torch.exp(-x * x / 2)), torch.erf(m / 2**0.5)
    edges = [(a + b) / 2 for a, b in zip(levels, levels[1:])] + [1.0]
    others = sum(v * m * (density(m * a) - density(m * b))
                 for v, a, b in zip(levels[1:], edges, edges[1:]))
    closed = torch.trapezoid(density(m) * below**15 * (m * m + 15 * others / below), m).item()
    x = torch.randn(200_000, 16, generator=gen())
    alpha, se = bench.slope(fake_quantize(x, name), x)
    assert abs(alpha - closed) < 4 * se < 4e-4 and (closed < 0.997 if name == "e2m1" else closed > 1)


TINY = ["--layers", "2", "--dim", "32", "--heads", "2", "--hidden", "32", "--seq-len", "16",
        "--batch-size", "2", "--eval-windows", "2", "--device", "cpu", "--dtype", "float32"]


def test_capture_finds_the_three_operands_of_every_layer():
    model = train.GPT(train.parse_args(TINY), RECIPES["bf16"], 256)
    tokens = torch.randint(0, 256, (2, 16), generator=gen())
    kept = bench.capture(model, tokens, tokens)
    for name, m in model.named_modules():
        if isinstance(m, ufp4.Linear):                  # dW = dY^T X ties all to autograd's result
            x, w, dy = (kept[name, operand] for operand in OPERANDS)
            assert torch.allclose(dy.T @ x, m.weight.grad, atol=1e-6) and torch.equal(w, m.weight)


def test_output_noise_is_that_of_each_quantized_product():
    s = train.parse_args([*TINY, "--recipe", "e2m1", "--experts", "3", "--top-k", "2"])
    model, linear = train.GPT(s, train.make_recipe(s), 256), ufp4.linear
    model.init_weights()
    layer, x = model.blocks[0].attn.qkv, torch.randn(3, 32)
    _, found = bench.output_noise(lambda: layer(x))
    q = lambda a: fake_quantize(a, "e2m1").double()     # fprop of e2m1 has no RHT
    y, exact = q(x) @ q(layer.weight).T, x.double() @ layer.weight.double().T
    slope = ((y * exact).sum() / exact.square().sum()).item()       # R is orthogonal, so
    noise = (y.square().sum() / exact.square().sum()).item() - slope**2     # Pythagoras has it
    assert found == [(pytest.approx(slope, rel=1e-5), pytest.approx(noise, rel=1e-3))]
    tokens = torch.zeros(1, 8, dtype=torch.long)
    y, found = bench.output_noise(lambda: model(tokens))
    assert torch.equal(y, model(tokens)) and ufp4.linear is linear
    assert len(found) == 6 * s.layers                   # qkv, proj; shared and experts' fc1, fc2


# --- Statistics


def run(model, recipe, seed, loss, bf16):
    return {"model": model, "recipe": recipe, "seed": seed, "val_loss": loss, "bf16_val_loss": bf16,
            "estimator": "scratch" if recipe == "bf16" else "branched"}


def test_loss_errors_are_paired_by_seed_and_signed():
    runs = [run("nano", "ufp4", 0, 2.2, 2.0), run("nano", "ufp4", 1, 0.9, 1.0),
            run("nano", "e2m1", 0, None, 2.0), run("nano", "e2m1", 1, 1.2, 1.0)]
    assert bench.errors_of(runs, "nano", "ufp4") == pytest.approx({0: 0.1, 1: -0.1})
    assert bench.errors_of(runs, "nano", "e2m1") == pytest.approx({0: math.inf, 1: 0.2})
    assert bench.cell(runs, "nano", "ufp4") == "0.00 ± 127.10 (2)"
    assert bench.cell(runs, "nano", "e2m1") == "inf (2)"        # one of them diverged
    assert bench.less(runs, "nano", "e2m1", "ufp4") == "inf"
    assert bench.less(runs, "nano", "ufp4", "ufp4") == bench.cell(runs, "nano", "nvfp4") == ""
    runs += [run("nano", name, s, 1.0 + e, 1.0) for name, errors in {
        "a": (0.01, 0.05, 0.03), "b": (0.02, 0.08)}.items() for s, e in enumerate(errors)]
    assert bench.less(runs, "nano", "b", "a") == "2.00 ± 12.71"         # over the seeds of both
    assert bench.contrast(runs, "nano", {"a": 0.5, "b": 0.5})[0] == pytest.approx(0.04)
    assert bench.contrast(runs, "nano", {"a": 1, "none such": -1}) is None
    mean, half = bench.interval([1.0, 2.0, 3.0, 4.0])   # t(3, 0.975) = 3.182, s = sqrt(5/3)
    assert mean == 2.5 and half == pytest.approx(3.182 * math.sqrt(5 / 3 / 4))


def test_the_reduction_and_the_coverage_of_its_interval():
    """Of 400 draws of 10 seeds, in which two models' reductions have a part in common, 95% hold the
    true one, give or take 3.5 standard deviations of that count."""
    def runs(e2m1, ufp4, model="nano"):
        return [run(model, recipe, s, 2.0 * (1 + e), 2.0) for recipe, errors in
                (("e2m1", e2m1), ("ufp4", ufp4)) for s, e in enumerate(errors)]

    assert bench.reduction(runs([0.01, 0.03], [0.008, 0.024]), ["nano"]) == pytest.approx((0.2, 0))
    assert bench.reduction(runs([0.02], [0.01]), ["nano"]) == (pytest.approx(0.5), None)
    assert bench.reduction(runs([0.01, 0.03], [0.01, math.inf]), ["nano"]) is None
    assert bench.reduction(runs([0.01], []), ["nano"]) is None
    g, held = gen(), 0
    for _ in range(400):
        common, drawn = 0.001 * torch.randn(10, generator=g), []
        for model in ("nano", "nano-moe"):
            e2m1 = 0.01 + 0.001 * torch.randn(10, generator=g)
            better = 0.8 * e2m1 + common + 0.001 * torch.randn(10, generator=g)
            drawn += runs(e2m1.tolist(), better.tolist(), model)
        part, half = bench.reduction(drawn, ["nano", "nano-moe"])
        held += abs(part - 0.2) < half
    assert abs(held - 380) < 3.5 * math.sqrt(400 * 0.95 * 0.05)


def test_fits_recover_a_power_law_and_a_change_of_the_loss_error():
    """Losses from L = 3 C^-0.05, errors that fall by 0.001, 0.002, 0.003 for tenfold compute."""
    runs, costs = [], {m: bench.compute(bench.MODELS[m]) for m in bench.SIZES["dense"]}
    for model, (_, c) in costs.items():
        for seed in range(3):
            loss, gap = 3 * c**-0.05 * (1 + 0.01 * seed), 0.03 - 0.001 * (1 + seed) * math.log10(c)
            runs += [run(model, "bf16", seed, loss, loss),
                     run(model, "ufp4", seed, loss * (1 + gap), loss),
                     run(model, "e2m1", seed, loss * (1.002 + gap), loss)]
    runs += [run("dense-32", r, 3, 9.0, 8.0) for r in ("bf16", "ufp4", "e2m1")]     # one size only
    fits = dict((row[0], row[1]) for row in bench.fits_table(runs, costs))
    assert fits[""] == "dense" and fits["exponent b of L = a C^-b, bf16"] == "0.050 ± 0.000"
    half = f"{100 * 4.303 * 0.001 / math.sqrt(3):.2f}"  # t(2, 0.975) = 4.303
    assert fits["loss error of e2m1, change for tenfold compute, %"] == f"-0.20 ± {half}"
    assert fits["loss error of ufp4 less e2m1's, mean of sizes, %"] == "-0.20 ± 0.00"
    runs[2]["val_loss"] = None                          # seed 0 diverged at one size: no line
    fits = dict((row[0], row[1]) for row in bench.fits_table(runs, costs))
    assert fits["loss error of ufp4, change for tenfold compute, %"].startswith("-0.25 ± ")
    # by hand: 3 of 16 experts a token
    active = 4 * 32**2 + 4 * 3 * 32 * 32 + 16 * 32 + 2 * 32 + 32 + 2 * 256 * 32
    assert bench.compute(bench.MODELS["moe-32"]) == (active + 13 * 3 * 32 * 32,
                                                     6 * active * 800 * 8 * 256)


# --- Runs: what is repeated, resumed, recorded


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    return argparse.Namespace(command="loss", models=["nano"], seeds=1, estimators=["branched"],
                              jobs=1, runs=tmp_path / "runs", rows=None, quick=False, train=[])


def job(recipe):
    return {"model": "nano", "recipe": recipe, "seed": 0,
            "estimator": "scratch" if recipe == "bf16" else "branched"}


def test_a_bf16_run_is_repeated_where_its_weights_are_needed(args, monkeypatch):
    """And a run is compared with the BF16 run that it branched from, also after a repeat."""
    ran = []

    def fake(args, job):
        ran.append(job["recipe"])
        for path in bench.weights(args, job):
            path.mkdir(parents=True, exist_ok=True)
        lines = [{"settings": {}}, {"val_loss": float(len(ran))}]
        (bench.folder(args, job) / "log.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in lines))
        return {"val_loss": float(len(ran))}

    monkeypatch.setattr(bench, "train_run", fake)
    monkeypatch.setattr(bench, "forward_passes", lambda args, job: {})
    bench.train_all(args, ["ufp4"])
    bench.train_all(args, ["ufp4"])
    assert ran == ["bf16", "ufp4"]
    shutil.rmtree(args.runs)                            # as in a fresh clone: records, no weights
    bench.train_all(args, ["ufp4"])
    assert ran == ["bf16", "ufp4"]
    name, results = bench.train_all(args, ["ufp4", "e2m1"])
    assert ran == ["bf16", "ufp4", "bf16", "e2m1"] and name == "loss"
    assert {r["recipe"]: (r["val_loss"], r["bf16_val_loss"]) for r in results["runs"]} == {
        "bf16": (3, 3), "ufp4": (2, 1), "e2m1": (4, 3)}
    assert json.loads((bench.RESULTS / "loss.json").read_text()) == results
    args.quick = True                                   # has a file and folders of its own
    assert bench.train_all(args, ["ufp4"])[0] == "loss-quick" and len(ran) == 8     # 2 seeds


def test_what_a_run_starts_from(args, monkeypatch):
    commands = []

    def fake(command, **kwargs):
        commands.append(command)
        return argparse.Namespace(returncode=3, stderr="it diverged")

    def command(recipe, *steps):
        for n in steps:
            (bench.folder(args, job(recipe)) / f"ckpt-{n:07d}").mkdir(parents=True)
        try:
            assert bench.train_run(args, job(recipe)) == {"val_loss": None, "error": "it diverged"}
        except RuntimeError as e:                       # nothing to compare with
            assert recipe == "bf16" and "it diverged" in str(e)
        return " ".join(commands[-1])

    monkeypatch.setattr(bench.subprocess, "run", fake)
    branch = bench.folder(args, job("bf16")) / "ckpt-0000533"
    assert "--resume" not in command("bf16") and command("ufp4").endswith(f"--branch {branch}")
    assert command("ufp4", 539).endswith("--resume")
    assert "--resume" not in command("bf16", 533, 539)  # it would drop the first at the last step
    assert command("bf16", 800).endswith("--resume")    # it has all that it must leave


def test_an_estimator_end_to_end(args, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 23) for i in range(5000)))
    args.estimators = ["branched", "scratch"]
    args.train = [*TINY, "--steps", "6", "--log-interval", "1", "--data", str(text)]
    name, results = bench.train_all(args, ["e2m1-debiased"])
    losses = {r["recipe"] + r["estimator"]: r["val_loss"] for r in results["runs"]}
    assert len(set(losses.values())) == len(losses) == 3
    assert {r["bf16_val_loss"] for r in results["runs"]} == {losses["bf16scratch"]}
    log = train.read_log(bench.folder(args, job("e2m1-debiased")) / "log.jsonl")
    assert log[1]["step"] == 5                          # the last third of 6 steps
    r = next(r for r in results["runs"] if "noise" in r)
    assert r["slope"] == pytest.approx(1, abs=0.01) and 0 < r["noise"] < 0.05
    assert len({r["weights_loss"], r["own_loss"], *losses.values()}) == 5
    tables = bench.loss_tables(name, results["runs"], {"": ("e2m1-debiased",)})
    assert all(tables["loss"][1]) and tables["loss"][0][1:] == [
        "from scratch", "branched", "of it, in the weights", "forward noise alone",
        "slope of fprop", "noise of fprop, %"]


# --- The pages


def test_pages_have_the_tables_of_the_files_and_these_follow_from_the_runs():
    texts = [page.read_text() for page in bench.PAGES]
    assert [bench.fill_tables(text) for text in texts] == texts         # or: python bench.py readme
    for name in ("loss", "ablate", "scaling"):
        results = json.loads((bench.RESULTS / f"{name}.json").read_text())
        if name == "scaling":
            tables = bench.scaling_tables(name, results["runs"], bench.costs_of(results))
        else:
            tables = bench.loss_tables(name, results["runs"], bench.GROUPS[name])
        assert tables == results["tables"]


def test_links_between_the_pages_lead_somewhere():
    def anchors(page):                                  # as GitHub makes them from headings
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
                for title in re.findall(r"^#+ (.*)", page.read_text(), re.M)}

    for page in bench.PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)]*)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            to = (page.parent / path).resolve() if path else page
            assert to.exists() and (not anchor or anchor in anchors(to)), target
