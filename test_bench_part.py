"""bench.py: the experiments do what they claim, and the tables say what was measured."""
import argparse
import json
import math
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


def gen():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("name,formats", [("four-over-six", ("e2m1", "e2m1-max4")),
                                          ("mixfp4", ("e2m1", "e1m2"))])
def test_a_block_takes_the_format_that_errs_less(name, formats):
    x = torch.randn(500, 64, generator=gen())
    q = RECIPES[name].quantizer("x", "fprop")
    error = lambda y: (y - x).view(-1, 16).double().square().sum(-1)
    errors = [error(fake_quantize(x, f)) for f in formats]
    assert torch.equal(error(q(x)), torch.minimum(*errors))
    assert 0.1 < (errors[1] < errors[0]).float().mean() < 0.9
    assert torch.equal(q(x.T.contiguous(), None, -2), q(x).T)
    assert torch.equal(q(x * 2.0**80), q(x) * 2.0**80)  # whose squares float32 does not hold
    x = torch.randn(20_000, 64, generator=gen())        # chosen without noise, so SR has no bias
    alpha, se = bench.slope(RECIPES[name].quantizer("dy", "dgrad")(x), x)
    assert abs(alpha - 1) < 4 * se < 2e-3


@pytest.mark.parametrize("name,slope,like", [("e2m1-debiased", 1.0, "e2m1-full-rht"),
                                             ("ufp4-shrunk", 0.996, "ufp4")])
def test_the_slope_of_what_is_rounded_to_nearest_is_set(name, slope, like):
    x, noise = torch.randn(64, 64, generator=gen()), torch.rand(64, 64, generator=gen())
    for operand, gemm, dim in (("x", "fprop", -1), ("w", "dgrad", -2)):
        q, plain = (RECIPES[r].quantizer(operand, gemm) for r in (name, like))
        for size in (1.0, 1e-25, 1e25):                 # whose squares float32 does not hold
            alpha, _ = bench.slope(q(x * size, None, dim), ufp4.rht(x, q.signs, dim) * size)
            assert alpha == pytest.approx(slope, abs=1e-6)
        ratio = q(x, None, dim) / plain(x, None, dim)
        assert ratio[ratio == ratio].std() < 1e-6       # one factor for all
        assert not q(x * 0, None, dim).any()
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


def test_every_recipe_is_another_and_fits_its_models():
    recipes = [r for groups in bench.GROUPS.values() for rs in groups.values() for r in rs]
    plain = products("ufp4")
    for recipe in set(recipes) - {"ufp4", "ufp4-int4"}:
        assert any(not torch.equal(plain[g], v) for g, v in products(recipe).items()), recipe
    for model, recipe in [("nano", r) for r in recipes] + [(m, "e2m1") for m in bench.MODELS]:
        s = train.parse_args([*bench.MODELS[model], "--recipe", recipe, "--device", "cpu"])
        with torch.device("meta"):
            train.GPT(s, train.make_recipe(s), 256)     # raises if a layer has no whole blocks


def test_the_measured_bias_of_each_bin_is_the_closed_form():
    for name, expected in (("e2m1", [0, 0, 0, -0.125, 0, -0.25]), ("e1m2", [0] * 6)):
        bins = bench.bin_bias(name)
        assert [b["closed"] for b in bins] == expected
        assert [b["measured"] for b in bins] == pytest.approx(expected, abs=1e-5)
def test_output_noise_is_that_of_each_quantized_product():
    layer, linear = ufp4.Linear(64, 32, bias=False, recipe="e2m1"), ufp4.linear
    x, w = torch.randn(48, 64, generator=gen()), layer.weight
    y, found = bench.output_noise(lambda: layer(x))
    assert torch.equal(y, layer(x)) and ufp4.linear is linear
    q = lambda a: fake_quantize(a, "e2m1").double()     # fprop of e2m1 has no RHT
    y, exact = q(x) @ q(w).T, x.double() @ w.double().T
    slope = ((y * exact).sum() / exact.square().sum()).item()       # R is orthogonal, so
    noise = (y.square().sum() / exact.square().sum()).item() - slope**2     # Pythagoras has it
    assert found == [(pytest.approx(slope, rel=1e-5), pytest.approx(noise, rel=1e-3))]


def run(model, recipe, seed, loss, bf16):
    return {"model": model, "recipe": recipe, "seed": seed, "val_loss": loss, "bf16_val_loss": bf16,
            "estimator": "scratch" if recipe == "bf16" else "branched"}


def test_loss_errors_are_paired_by_seed_and_signed():
    runs = [run("nano", name, s, 1.0 + e, 1.0) for name, errors in {
        "a": (0.01, 0.05, 0.03), "b": (0.02, 0.08), "ufp4": (0.1, -0.1)}.items()
        for s, e in enumerate(errors)]
    runs += [run("nano", "e2m1", 0, None, 2.0), run("nano", "e2m1", 1, 1.2, 1.0)]
    assert bench.errors_of(runs, "nano", "e2m1") == pytest.approx({0: math.inf, 1: 0.2})
    assert bench.cell(runs, "nano", "ufp4") == "0.00 ± 127.10 (2)"
    assert bench.cell(runs, "nano", "e2m1") == "inf (2)"        # one of them diverged
    assert bench.cell(runs, "nano", "nvfp4") == bench.less(runs, "nano", "ufp4", "ufp4") == ""
    assert bench.less(runs, "nano", "b", "a") == "2.00 ± 12.71"         # over the seeds of both
    assert bench.contrast(runs, "nano", {"a": 0.5, "b": 0.5})[0] == pytest.approx(0.04)
    assert bench.contrast(runs, "nano", {"a": 1, "none such": -1}) is None
    mean, half = bench.interval([1.0, 2.0, 3.0, 4.0])   # t(3, 0.975) = 3.182, s = sqrt(5/3)
    assert mean == 2.5 and half == pytest.approx(3.182 * math.sqrt(5 / 3 / 4))


def test_the_reduction_and_the_coverage_of_its_interval():
    """Of 400 draws of 10 seeds, in which two models' reductions have a part in common, 95% hold the
    true one, give or take 3.5 standard deviations of that count."""
    def runs(e2m1, ufp4, model="nano"):
        return [run(model, recipe, s, 1 + e, 1.0) for recipe, errors in
                (("e2m1", e2m1), ("ufp4", ufp4)) for s, e in enumerate(errors)]

    assert bench.reduction(runs([0.01, 0.03], [0.008, 0.024]), ["nano"]) == pytest.approx((0.2, 0))
    assert bench.reduction(runs([0.01, 0.03], [0.01, math.inf]), ["nano"]) is None
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


def test_the_change_with_compute_is_recovered():
    """From errors that fall by 0.001, 0.002, 0.003 for tenfold compute, by seed."""
    runs, costs = [], {m: (0, 10.0**(11 + i)) for i, m in enumerate(bench.SIZES["dense"])}
    for model, (_, c) in costs.items():
        for seed in range(3):
            error = 0.05 - 0.001 * (1 + seed) * math.log10(c)
            runs += [run(model, "ufp4", seed, 1 + error, 1.0), run(model, "e2m1", seed, 1.1, 1.0)]
    runs.append(run("dense-32", "ufp4", 3, 9.0, 1.0))   # one size only: no line
    last = bench.scaling_table(runs, costs)[-1]
    half = 100 * 4.303 * 0.001 / math.sqrt(3)           # t(2, 0.975) = 4.303
    assert last[3:5] == ["0.00 ± 0.00", f"-0.20 ± {half:.2f}"]


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
        log = bench.folder(args, job) / "log.jsonl"
        log.write_text('{"settings": {}}\n' + json.dumps({"val_loss": float(len(ran))}) + "\n")
        return {"val_loss": float(len(ran))}

    monkeypatch.setattr(bench, "train_run", fake)
    monkeypatch.setattr(bench, "forward_passes", lambda args, job: {})
    bench.train_all(args, ["ufp4"])
    shutil.rmtree(args.runs)                            # as in a fresh clone: records, no weights
    bench.train_all(args, ["ufp4"])
    assert ran == ["bf16", "ufp4"]
    name, results = bench.train_all(args, ["ufp4", "e2m1"])
    assert ran == ["bf16", "ufp4", "bf16", "e2m1"] and name == "loss"
    assert {r["recipe"]: (r["val_loss"], r["bf16_val_loss"]) for r in results["runs"]} == {
        "bf16": (3, 3), "ufp4": (2, 1), "e2m1": (4, 3)}
    args.quick = True                                   # has a file and folders of its own
    assert bench.train_all(args, ["ufp4"])[0] == "loss-quick" and len(ran) == 8     # 2 seeds


def test_what_a_run_starts_from(args, monkeypatch):
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: argparse.Namespace(
        returncode=1, stderr=" ".join(command)))

    def command(recipe, *steps):
        for n in steps:
            (bench.folder(args, job(recipe)) / f"ckpt-{n:07d}").mkdir(parents=True)
        with pytest.raises(RuntimeError) as failed:
            bench.train_run(args, job(recipe))
        return str(failed.value)

    branch = bench.folder(args, job("bf16")) / "ckpt-0000533"
    assert "--resume" not in command("bf16") and command("ufp4").endswith(f"--branch {branch}")
    assert command("ufp4", 539).endswith("--resume")
    assert "--resume" not in command("bf16", 533, 539)  # it would drop the first at the last step
    assert command("bf16", 800).endswith("--resume")    # it has all that it must leave


def test_an_estimator_end_to_end(args, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 23) for i in range(5000)))
    tiny = "--layers 1 --dim 32 --heads 2 --hidden 32 --seq-len 16 --batch-size 2 --eval-windows 2"
    args.train = [*tiny.split(), "--steps", "6", "--log-interval", "1", "--data", str(text)]
    name, results = bench.train_all(args, ["e2m1-debiased"])
    bf16, r = results["runs"]
    log = train.read_log(bench.folder(args, job("e2m1-debiased")) / "log.jsonl")
    assert log[1]["step"] == 5                          # the last third of 6 steps
    assert r["bf16_val_loss"] == bf16["val_loss"] and bf16["recipe"] == "bf16"
    assert r["slope"] == pytest.approx(1, abs=0.01) and 0 < r["noise"] < 0.05
    assert len({bf16["val_loss"], r["val_loss"], r["weights_loss"], r["own_loss"]}) == 4
    head, row = bench.loss_tables(name, results["runs"], {"": ("e2m1-debiased",)})["loss"]
    assert all(row) and head[2:] == ["of it, in the weights", "forward noise alone",
                                     "slope of fprop", "noise of fprop, %"]


def test_pages_have_the_tables_of_the_files_and_these_follow_from_the_runs():
    texts = [page.read_text() for page in bench.PAGES]
    assert [bench.fill_tables(text) for text in texts] == texts         # or: python bench.py readme
    for name in ("loss", "ablate", "scaling"):
        results = json.loads((bench.RESULTS / f"{name}.json").read_text())
        if name == "scaling":
            tables = {name: bench.scaling_table(results["runs"], bench.costs_of(results))}
        else:
            tables = bench.loss_tables(name, results["runs"], bench.GROUPS[name])
        assert tables == results["tables"]
