"""Each test states one property and compares it with an oracle of its own: codes
written out by hand, exact fractions, float64, brute force.

Those of ufp4.py alone: pytest -k core test_ufp4.py"""
import copy
import functools
import http.server
import inspect
import itertools
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

# Set before triton is imported, this runs its kernels on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import bench
import studies
import train
import ufp4
from train import prepare
from ufp4 import (E1M2, E2M1, FORMATS, GEMMS, RECIPES, SCALES, Format, Quantizer,
                  Recipe, Tiles, fake_quantize, quantize, random_bits, random_signs,
                  rotate, uniform)

tried = train.import_file(bench.TRIED, "tried")     # adds recipes to RECIPES
kernels = ufp4.kernels
TRITON = kernels.triton and tuple(map(int, kernels.triton.__version__.split(".")[:2]))
works = TRITON and (not kernels.INTERPRET or TRITON >= (3, 9))
needs_kernels = pytest.mark.skipif(
    not works,
    reason="no Triton, or an interpreter (before 3.9) that rounds tl.fma twice")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"     # of the kernels
SEED = 1                                                    # and of their signs
HERE = Path(__file__).resolve().parent
LECTURE = (HERE / "ufp4.py").read_text().split("# =================== Part II")[0]
README = (HERE / "README.md").read_text()
INF, NAN = math.inf, math.nan
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max
BLOCKS = {"fp32": 16, "e4m3": 16, "e8m0": 32}
# The formats, written out by hand: magnitudes by code
MAGNITUDES = {"e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6], "int4": [0, 1, 2, 3, 4, 5, 6, 7],
              "e1m2": [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]}
ODD_GRIDS = [(0, 1), (0, 1, 2.5), (0, 1, 1.25, 9), (0, 2, 4, 6, 8, 10, 12),
             (0, 0.5, 1, 1.5, 2, 3), (0, 1, 3, 4, 9, 27, 81, 82)]
NF4 = (0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723)
QUANTIZED = ("ufp4", "e2m1", "ufp4-int4", "ufp4-e4m3", "ufp4-mx", "e2m1-full-rht",
             "nvfp4", "mxfp4")
every_scale = pytest.mark.parametrize("scale", BLOCKS)

@pytest.fixture(autouse=True)
def seeded_and_eager(monkeypatch, request):
    """A test is the same after any other. Only with @compiling() does it compile, and
    only with `device` do layers run on kernels."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "NOT_COMPILED", set())
    if DEVICE == "cpu":
        use_kernels(monkeypatch, False)
        if "kernels" in request.node.name:      # it calls these itself
            monkeypatch.setenv("TRITON_INTERPRET", "1")
    with torch.compiler.set_stance("force_eager"):
        yield

def use_kernels(monkeypatch, on):
    monkeypatch.setattr(kernels, "runs_triton", lambda device: on)
    # Processes that a test starts inherit this
    monkeypatch.setenv("TRITON_INTERPRET", str(int(on and DEVICE == "cpu")))

compiling = functools.partial(torch.compiler.set_stance, "default")
zeros = torch.zeros

@pytest.fixture
def device(where, monkeypatch):
    """Where tensors should be. Layers run on the reference (where = "torch"), on the
    kernels ("triton"), or on the kernels as on another GPU ("sm_120"), where the
    interpreter multiplies as it does. What kernels can't do is an error."""
    use_kernels(monkeypatch, where != "torch")
    if where.startswith("sm"):
        if not kernels.INTERPRET:
            pytest.skip("a GPU has its own path")
        monkeypatch.setattr(kernels, "architecture", lambda device: where)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "quantizing without kernels")
        yield "cpu" if where == "torch" else DEVICE

def on_kernels(*cases):
    return [pytest.param(*case, marks=needs_kernels) for case in cases]

def gen(seed=0):
    return torch.Generator().manual_seed(seed)

def randn(*shape, seed=0):
    return torch.randn(shape, generator=gen(seed))

def same_bits(a, b):
    """Equal bit for bit, the sign of zero included; NaN equals NaN."""
    nan = a.isnan() & b.isnan()
    return (a.dtype == b.dtype
            and bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all()))

def adversarial(fmt, dtype=torch.float32, low=-133, high=127):
    """(R, 64) of magnitudes from 2^low, subnormal, to 2^high, where the RHT overflows:
    random numbers of each, zeros of both signs, multiples of the smallest, a spike, and
    the format's levels, its ties and their neighbours, at several scales."""
    power = torch.linspace(low, high, 128).round().double().view(32, 4)
    x = randn(32, 64).double().clamp(-1.9, 1.9)
    x = (x * 2.0**power.repeat_interleave(16, 1)).float()
    x[0], x[1], x[2, 5] = 0.0, -0.0, 2.0**high
    x[3] = torch.arange(64) * -7 * 2.0**max(low - 16, -149)
    levels = torch.tensor(fmt.levels)
    v = torch.cat((levels[1:], (levels[1:] + levels[:-1]) / 2))
    v = torch.cat((v, v.nextafter(torch.tensor(INF)), v.nextafter(torch.tensor(0.0))))
    v = torch.cat((v, -v)).clamp(-fmt.max, fmt.max)
    v = F.pad(v, (0, -len(v) % 15)).view(-1, 15)
    blocks = torch.cat((torch.full((len(v), 1), fmt.max), v), 1)
    # A kernel may divide in another way beyond 2^-80 and 2^80
    scales = (SMALLEST, 3 * SMALLEST, 1e-41, 2.0**-126, 2.0**-81, 0.99 * 2.0**-80, 1.0,
              1 / 3, 1.1 * 2.0**80, 4e37)
    ties = torch.cat([blocks * s for s in scales if 2.0**(low - 16) <= s < 2.0**high])
    ties = F.pad(ties.flatten(), (0, -ties.numel() % 2048)).view(-1, 64)
    return torch.cat((x, ties)).to(dtype)

def close(got, expected, length, bits=22):
    """Equal up to roundings, to `bits` bits, of a sum of `length` products."""
    error = (got.cpu().double() - expected).abs().max()
    return bool(error <= expected.abs().max() * length**0.5 * 2.0**-bits)

# ---- Formats, rounding to nearest, scales --------------------------------------------
@pytest.mark.parametrize("name", MAGNITUDES)
def test_core_levels_and_all_16_codes(name):
    levels, codes = torch.tensor(MAGNITUDES[name]).float(), torch.arange(16)
    assert list(FORMATS[name].levels) == MAGNITUDES[name]
    x = torch.cat((levels, -levels))
    q = quantize(x, name)                   # amax is g_max, so the scale is 1
    assert q.scale.tolist() == [1.0] and same_bits(q.dequantize(), x)
    assert torch.equal(q.codes, codes[::2] + 16 * codes[1::2])

@pytest.mark.parametrize("levels", [*MAGNITUDES.values(), *ODD_GRIDS])
def test_core_nearest_rounding_is_brute_force_with_ties_to_even(levels):
    grid, exact = torch.tensor(levels).float(), [Fraction(v) for v in levels]
    ties = (grid[1:] + grid[:-1]) / 2
    near = [ties.nextafter(torch.tensor(to)) for to in (0.0, INF)]
    points, nearest = torch.cat((ties, *near, torch.linspace(0, levels[-1], 2001))), []
    for a in points.tolist():
        distances = [abs(Fraction(a) - level) for level in exact]
        nearest.append(min(range(len(levels)), key=lambda i: (distances[i], i % 2)))
    assert torch.equal(Format("x", tuple(levels)).round(points), grid[nearest])

def slope(q, x):
    """<Q(x), x> / <x, x>."""
    q, x = q.double(), x.double()
    return ((q * x).sum() / x.square().sum()).item()

@pytest.mark.parametrize("name,alpha", [("e2m1", 0.9959), ("e1m2", 1.0006)])
def test_core_the_slopes_of_the_lecture(name, alpha):
    """Of a million Gaussians, rounded in float64, and by the code."""
    x, fmt = randn(62_500, 16), FORMATS[name]
    exact, _ = exact_quantizer(Quantizer(fmt), x, "fp32", None)
    for q in exact, fake_quantize(x, name):
        assert slope(q, x) == pytest.approx(alpha, abs=3e-4)
    assert str(alpha) in LECTURE

@every_scale
@pytest.mark.parametrize("fmt", [E2M1, E1M2, FORMATS["int4"], Format("nf4", NF4)])
def test_core_four_bits_keep_every_value(fmt, scale):
    """quantize().dequantize() is what a Quantizer gives, for any dtype and strides."""
    sizes = {"low": -6, "high": 6} if scale.startswith("e4m3") else {}
    x, block = adversarial(fmt, **sizes)[:64], BLOCKS[scale]
    for stochastic, tiles, dtype in itertools.product((False, True), (False, True), (
            torch.float32, torch.bfloat16, torch.float16)):
        v = x.to(dtype).T.contiguous().T if tiles else x.to(dtype)
        packed = quantize(v, fmt, scale, block, stochastic, gen(1), tiles)
        assert packed.codes.shape == (64, 32) and packed.codes.dtype == torch.uint8
        assert packed.scale.shape == (64, 64 // block)
        rule = Tiles(SCALES[scale], block) if tiles else SCALES[scale]
        q = Quantizer(fmt, rule, block, None, stochastic)
        y = q(v, uniform(random_bits(v, gen(1))))
        assert torch.equal(packed.dequantize().nan_to_num(7e7), y.nan_to_num(7e7))

def test_core_four_bits_of_a_quantizer_of_ones_own_are_its_values_or_an_error():
    class HalfScales(Quantizer):
        def levels_and_scales(self, x, rand=None):
            level, s = super().levels_and_scales(x / 2, rand)
            return level, 2 * s

    class Doubled(Quantizer):
        def __call__(self, x, rand=None):
            return 2 * super().__call__(x, rand)

    x, signs = randn(4, 32), random_signs(0)
    x[1, 3] = NAN
    packed = ufp4.pack(HalfScales(E2M1, signs=signs), x)
    plain = Quantizer(E2M1)(x)
    assert torch.equal(packed.dequantize().nan_to_num(), plain.nan_to_num())
    with pytest.raises(ValueError, match="what Doubled gives can't be packed"):
        ufp4.pack(Doubled(E2M1), x)

@every_scale
@pytest.mark.parametrize("name,stochastic", [("e2m1", False), ("e1m2", True)])
def test_core_corners(name, scale, stochastic):
    f = functools.partial(fake_quantize, fmt=name, scale=scale, block=BLOCKS[scale],
                          stochastic=stochastic)
    for bad in NAN, INF, -INF:
        x, lost = torch.ones(2, 64), zeros(2, 64, dtype=torch.bool)
        x[0, 37], lost[0, 32:32 + BLOCKS[scale]] = bad, True    # its block is lost ...
        lost |= scale.startswith("e4m3")                # or with two levels, all
        assert torch.equal(f(x).isnan(), lost) and torch.equal(f(x).isfinite(), ~lost)
    assert f(torch.full((1, 64), 1e38)).isfinite().all() and not f(zeros(2, 64)).any()
    assert (f(torch.full((1, 64), LARGEST)) > 1e38).all()       # it may be infinity
    assert f(zeros(3, 0, 32)).shape == (3, 0, 32)

ufp4_with = functools.partial(replace, RECIPES["ufp4"])

@pytest.mark.parametrize("message,call", [
    ("whole blocks: got .* .2, 40., block = 16", lambda: quantize(zeros(2, 40))),
    ("to pack takes floats .* got torch.int64", lambda: quantize(zeros(2, 32).long())),
    ("'e5m2'.*e2m1, e1m2, int4", lambda: quantize(zeros(2, 32), "e5m2")),
    ("rht takes .*, not 'wgrad'", lambda: ufp4_with(rht="wgrad")),
    ("rht takes .*, not True", lambda: ufp4_with(rht=True)),
    *((f"block is a number of elements, not {block!r}",
       functools.partial(ufp4_with, block=block)) for block in (0, 2.5, "16", True)),
    ("a power of two, not 12", lambda: ufp4_with(rht_block=12)),
    ("X .4, 32. .* W .16, 48.",
     lambda: ufp4.linear(zeros(4, 32), zeros(16, 48), "ufp4")),
    ("must rotate x and w in fprop by", lambda: ufp4.linear(
        zeros(4, 16), zeros(16, 16), tried.Experiment(
            "", rht=GEMMS, places=(("w", "fprop"),), given={"signs": None}))),
    ("integer offsets .E,., a tensor; got .*, .3, 4.",
     lambda: ufp4.linear(zeros(4, 16), zeros(2, 16, 16), "ufp4", [3, 4])),
    ("no nested tensors", lambda: ufp4.linear(
        torch.nested.nested_tensor([zeros(2, 16)]), zeros(16, 16), "ufp4")),
    ("the number of tokens, 4; got .3, 2.",
     lambda: ufp4.linear(zeros(4, 16), zeros(2, 16, 16), "ufp4", torch.tensor([3, 2]))),
    *(("two to eight levels", functools.partial(Format, "x", levels)) for levels in (
        (0,), (0, 2, 1), (0, 1, 1), (1, 2), (-1, 0, 1), (0, NAN), (0, INF),
        tuple(range(9)), ("0", "1")))])
def test_core_bad_arguments_are_named(message, call):
    with pytest.raises(ValueError, match=message):
        call()

# ---- Stochastic rounding, by its law -------------------------------------------------
def between(levels, a):
    """The two levels that a lies between, or is one of."""
    i = torch.searchsorted(levels, a, right=True).clamp(1, len(levels) - 1)
    return levels[i - 1], levels[i]

@pytest.mark.parametrize("levels", [*MAGNITUDES.values(), *ODD_GRIDS])
def test_core_over_all_random_bits_a_number_is_the_mean_of_its_neighbours(levels):
    """Each of the 65536 random numbers once."""
    fmt, grid = Format("x", tuple(levels)), torch.tensor(levels).double()
    a = torch.cat((torch.linspace(0, levels[-1], 100), grid.float()))[:, None]
    q = fmt.round(a, (torch.arange(65536) + 0.5) * 2.0**-16).double()
    below, above = between(grid, a.double())
    assert ((q == below) | (q == above)).all() and (q[100:] == grid[:, None]).all()
    assert ((q.mean(1, keepdim=True) - a).abs() <= (above - below) * 2.0**-17).all()

@pytest.mark.parametrize("seed", range(3))
def test_core_random_numbers_are_uniform_and_uncorrelated(seed):
    """Mean, variance, chi-square of the 2^16 values, and correlations of neighbours,
    of two draws and of two seeds: within 4 standard errors."""
    x, g = zeros(1024, 1024), gen(seed)
    u, *others = (uniform(random_bits(x, g)).double() - 0.5
                  for g in (g, g, gen(seed + 100)))
    assert torch.equal(uniform(torch.tensor([-2**15, 2**15 - 1])),
                       torch.tensor([0.5, 2**16 - 0.5]) / 2**16)
    assert abs(u.mean()) * (12 * u.numel()) ** 0.5 < 4
    assert abs(u.square().mean() - 1 / 12) * (180 * u.numel()) ** 0.5 < 4
    counts = torch.bincount(((u + 0.5) * 2**16).long().flatten(), minlength=2**16)
    assert abs((counts - 16).square().sum() / 16 - 65535) < 4 * (2 * 65535) ** 0.5
    pairs = [(u, v) for v in (*others, others[0].mT)]
    for d in (1, 2, 3, 4, 16):
        pairs += [(u[d:], u[:-d]), (u[:, d:], u[:, :-d])]
    assert all(abs((a * b).mean()) * 12 * a.numel() ** 0.5 < 4 for a, b in pairs)

# ---- Rotation, and the quantizer as a whole ------------------------------------------
def hadamard(n):
    """Over sqrt(n), float64: a sign is the parity of the bits that i and j share."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    return torch.tensor(signs).double() / n**0.5

@pytest.mark.parametrize("n", [1, 2, 16, 128])
def test_core_rht_multiplies_by_signs_and_an_orthonormal_matrix(n):
    h, signs = hadamard(n), random_signs(11, n)
    x, w = randn(6, 2 * n), randn(5, 2 * n, seed=1)
    expected = (x.double().view(6, 2, n) * torch.tensor(signs).double()) @ h
    assert close(rotate(x, signs), expected.view(6, -1), n)
    product = rotate(x, signs) @ rotate(w, signs).T
    assert close(product, x.double() @ w.double().T, 2 * n)
    assert same_bits(rotate(x.T.contiguous().T, signs), rotate(x, signs))
    assert set(signs) <= {1.0, -1.0} and (n < 16 or signs != random_signs(12, n))
    # The sum of 128 numbers of 2^120 is no overflow
    assert rotate(torch.full((1, n), 2.0**120).bfloat16(), signs).isfinite().all()

def exact_scale(amax, g_max, scale):
    """Block scales in float64."""
    if scale == "e8m0":
        return 2.0 ** (amax.log2().floor() - g_max.log2().floor()).clamp(-127, 127)
    if scale == "fp32":
        return amax / g_max
    t = amax.max() / 448 / g_max
    return (amax / g_max / t).float().to(torch.float8_e4m3fn).double() * t

def exact_quantizer(q, x, scale, rand):
    """q(x, rand) in float64 for x (R, K) in whole blocks, by search in the list of
    levels; and where another may be right, as rounding errors decide."""
    x, levels = x.double(), torch.tensor(q.fmt.levels).double()
    if q.signs is not None:
        n = len(q.signs)
        x = ((x.view(-1, n) * torch.tensor(q.signs)) @ hadamard(n)).view(x.shape)
    blocks = x.view(len(x), -1, q.block)
    amax = blocks.abs().amax(-1, keepdim=True)
    if isinstance(q.scale, Tiles):
        tiles = amax.view(-1, q.block, *amax.shape[1:])
        amax = tiles.amax(1).repeat_interleave(q.block, 0)
    s = exact_scale(amax, levels[-1], scale)
    a = (blocks.abs() / s).clamp(max=levels[-1])
    below, above = between(levels, a)
    fraction = (a - below) / (above - below)
    threshold = rand.view_as(a) if q.stochastic else 0.5
    y = torch.where(fraction > threshold, above, below) * blocks.sign() * s
    return y.view(x.shape), ((fraction - threshold).abs() < 1e-4).view(x.shape)

@every_scale
@pytest.mark.parametrize("seed", range(12))
def test_core_any_quantizer_equals_another_in_float64(seed, scale):
    """Random grids, blocks, Hadamard sizes, rounding, tiles, dtypes, magnitudes."""
    r = random.Random(seed)
    levels = r.choice([*MAGNITUDES.values(), *ODD_GRIDS, NF4, (0, 0.1, 0.3)])
    block, stochastic, tiles = 2 ** r.randrange(1, 6), seed % 2 > 0, seed % 3 == 0
    signs = r.choice((None, random_signs(seed, 2 ** r.randrange(1, 6))))
    x = randn(64, 96, seed=seed) * 10 ** randn(64, 1, seed=seed + 1)
    if signs is None:
        x[:32, ::block] = levels[-1] * 2.0 ** (torch.arange(32) % 4)[:, None]
    x = x.to(r.choice((torch.float32, torch.bfloat16)))
    rand = 1 - torch.rand(x.shape, generator=gen(seed))
    rule = Tiles(SCALES[scale], block) if tiles else SCALES[scale]
    q = Quantizer(Format("x", tuple(levels)), rule, block, signs, stochastic)
    expected, either = exact_quantizer(q, x, scale, rand)
    got, expected = q(x, rand).double()[~either], expected[~either]
    assert either.double().mean() < 0.1
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-7)

@pytest.mark.parametrize("k", [-40, -3, 1, 50])
def test_core_q_of_a_multiple_by_a_power_of_two_is_that_multiple(k):
    """Q(2^k x) = 2^k Q(x) with float32 scales, and other blocks are not seen."""
    x, rand = randn(8, 64), torch.rand(8, 64, generator=gen(1))
    for fmt, stochastic in itertools.product((E2M1, E1M2), (False, True)):
        q = Quantizer(fmt, signs=random_signs(0), stochastic=stochastic)
        assert torch.equal(q(x * 2.0**k, rand), q(x, rand) * 2.0**k)
        changed = x.clone()
        changed[3, 16:32] *= 7
        other = (q(changed, rand) == q(x, rand)).view(8, 4, 16).all(-1)
        assert other.sum() == 31 and not other[3, 1]

# ---- A layer: on the reference, and on the kernels -----------------------------------
def oracle(x, w, dy, recipe):
    """Y, dX, dW in float64 for x (M, K), w (N, K), dy (M, N), by the code of README.md:
    each operand filled up to whole blocks, rotated and quantized, with torch's random
    numbers."""
    def quantizer(operand, gemm):
        def quantized(t):
            t, rand = F.pad(t, (0, -t.shape[1] % math.lcm(recipe.block, 16))), None
            if operand in recipe.sr:
                rand = uniform(random_bits(t))
            if gemm in recipe.rht:
                t = rotate(t, random_signs(recipe.sign_seed, recipe.rht_block))
            rule = recipe.scale
            if recipe.name == "nvfp4" and operand == "w":
                rule = Tiles(rule)
            q = Quantizer(recipe.fmt, rule, recipe.block, stochastic=rand is not None)
            return q(t, rand).double()
        return quantized
    names = {"quantizer": quantizer}
    exec(re.search(r"```python\n(def forward.*?)```", README, re.S)[1], names)
    return names["forward"](x, w), *names["backward"](x, w, dy)

@pytest.mark.parametrize("name,where", [
    *((name, "torch") for name in QUANTIZED),
    *on_kernels(("ufp4", "triton"), ("nvfp4", "triton"), ("mxfp4", "sm_120"))])
def test_core_autograd_function_is_the_three_quantized_gemms(name, where, device):
    """From the same seed, exact up to the order of sums. The kernels check themselves
    here. A GPU draws other bits, so there dY is rounded to nearest, and it sums in
    fewer bits than float32 has."""
    sr, bits = (("dy",), 22) if device == "cpu" else ((), 12)
    recipe = replace(RECIPES[name], sign_seed=3, sr=sr)
    m, n, k = (96, 32, 64) if where == "sm_120" else (45, 28, 60)   # no whole blocks
    x, dy = randn(3, m // 3, k), randn(3, m // 3, n, seed=1) * 1e-3
    layer = ufp4.Linear(k, n, recipe=recipe).to(device)
    x_there = x.to(device).requires_grad_()
    torch.manual_seed(5)
    y = layer(x_there)
    assert y.is_contiguous()
    y.backward(dy.to(device))
    torch.manual_seed(5)
    ey, edx, edw = oracle(x.view(m, k), layer.weight.detach().cpu(), dy.view(m, n),
                          recipe)
    assert close((y - layer.bias).view(m, n), ey, 64, bits)
    assert close(x_there.grad.view(m, k), edx, 32, bits)
    assert close(layer.weight.grad, edw, 45, bits)
    assert close(layer.bias.grad, dy.double().sum((0, 1)), 45)

def results(recipe):
    """Y, dX and dW of a layer under a recipe, from the same seed."""
    x, w = randn(64, 128).requires_grad_(), randn(128, 128, seed=1).requires_grad_()
    torch.manual_seed(0)
    y = ufp4.linear(x, w, recipe)
    dx, dw = torch.autograd.grad(y, (x, w), randn(64, 128, seed=2))
    return {"fprop": y.detach(), "dgrad": dx, "wgrad": dw}

def differ(a, b):
    """The first letters of the GEMMs that are not equal in two results."""
    return "".join(gemm[0] for gemm in GEMMS if not torch.equal(a[gemm], b[gemm]))

@pytest.mark.parametrize("field,value,changed", [
    ("rht", ("fprop",), "f"), ("rht", ("dgrad",), "d"), ("rht", ("wgrad",), "w"),
    ("sr", ("dy",), "dw"), ("sr", ("x",), "fw"), ("sr", ("w",), "fd"),
    ("fmt", "e2m1", "fdw"), ("scale", "e8m0", "fdw"),
    ("block", 32, "fdw"), ("fmt", "int4", "")])
def test_core_each_field_of_a_recipe_reaches_its_gemm_alone(field, value, changed):
    changed_one = results(Recipe("mine", **{field: value}))
    assert differ(results(Recipe("mine")), changed_one) == changed
    assert differ(results(Recipe("mine")), results(ufp4.TiledRecipe("mine"))) == "fd"

@pytest.mark.parametrize("gemm", GEMMS)
def test_core_a_gemm_that_a_recipe_leaves_out_is_the_unquantized_one(gemm):
    """By the recipe's gemms, or by fmt=None in its quantizers, which still rotate."""
    class Without(Recipe):
        def quantizer(self, operand, g):
            q = super().quantizer(operand, g)
            return replace(q, fmt=None) if g == gemm else q

    full, plain = results(Recipe("", rht=GEMMS)), results("bf16")
    left = results(Recipe("", gemms=tuple(g for g in GEMMS if g != gemm), rht=GEMMS))
    rotated = results(Without("", rht=GEMMS))
    assert differ(left, full) == differ(rotated, full) == gemm[0]
    assert torch.equal(left[gemm], plain[gemm]) and gemm[0] in differ(rotated, plain)
    assert close(rotated[gemm], plain[gemm], 64)

@pytest.mark.parametrize("name,where", [
    *((name, "torch") for name in ("bf16", *QUANTIZED)),
    *on_kernels(("ufp4", "triton"))])
def test_core_grouped_is_a_loop_over_experts(name, where, device, monkeypatch):
    """A loop on the reference."""
    recipe, sizes = replace(RECIPES[name], sr=()), [5, 0, 32, 17, 0, 1]     # ragged
    offsets = torch.tensor(sizes).cumsum(0)
    x, w, dy = randn(55, 58), randn(6, 27, 58, seed=1), randn(55, 27, seed=2)
    if recipe.scale is ufp4.scale_e4m3:
        # Experts share a scale here, so each gets the same amax.
        recipe = replace(recipe, rht=())
        x[offsets - 1, 0] = dy[offsets - 1, 0] = w[:, 0, 0] = 9.0
    x, w = (v.to(device).requires_grad_() for v in (x, w))
    y = ufp4.linear(x, w, recipe, offsets.to(device))
    use_kernels(monkeypatch, False)
    parts = [ufp4.linear(xe, we, recipe) for xe, we in zip(x.split(sizes), w)]
    both = ((v, *torch.autograd.grad(v, (x, w), dy.to(device)))
            for v in (y, torch.cat(parts)))
    for got, expected in zip(*both):
        assert got.dtype == torch.float32 and close(got, expected.cpu(), 64)
        assert got.dim() < 3 or not got[[1, 4]].any()

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_core_dtypes_and_autocast(dtype, autocast):
    """Autocast casts to 16 bits, but leaves float64 alone, as with F.linear. float16 is
    multiplied in bfloat16."""
    cast = autocast and dtype != torch.float64
    layer = ufp4.Linear(64, 48, bias=False, dtype=None if cast else dtype)
    x = randn(20, 64).to(layer.weight.dtype).requires_grad_()
    narrow = torch.bfloat16 if dtype == torch.float64 else dtype
    with torch.autocast("cpu", narrow, enabled=autocast):
        y = layer(x)
        assert y.dtype == dtype == F.linear(x, layer.weight).dtype
    multiplied = torch.bfloat16 if dtype == torch.float16 else dtype
    a, b = (fake_quantize(rotate(v.detach(), layer.recipe.signs)).to(multiplied)
            .double() for v in (x.to(dtype), layer.weight))
    lost = 1e-12 if dtype == torch.float64 else 2.0**-7 * (a @ b.T).abs()
    assert ((y - a @ b.T).abs() <= lost + 2.0**-18 * (dtype != torch.float64)).all()
    y.double().sum().backward()
    assert x.grad.dtype == x.dtype and layer.weight.grad.dtype == layer.weight.dtype

@pytest.mark.parametrize("name,where,experts", [
    ("bf16", "torch", 0), ("bf16", "torch", 3), ("ufp4", "torch", 0),
    ("ufp4", "torch", 3)])
def test_core_frozen_operands_and_no_tokens(name, where, experts, device):
    """A frozen operand changes nothing for the other; no tokens are no error."""
    found = []
    for tokens, of_x, of_w in ((0, True, True), (16, True, True), (16, True, False),
                               (16, False, True)):
        x = randn(tokens, 32).to(device).requires_grad_(of_x)
        w = randn(max(experts, 1), 48, 32, seed=1).to(device).requires_grad_(of_w)
        ends = torch.tensor([0, 0, tokens], device=device)
        y = ufp4.linear(x, w if experts else w[0], replace(RECIPES[name], sr=()),
                        ends if experts else None)
        y.backward(randn(tokens, 48, seed=2).to(device))
        assert y.shape == (tokens, 48) and (tokens or not w.grad.any())
        found.append((x.grad, w.grad))
    _, (dx, dw), (same_dx, none), (nothing, same_dw) = found
    assert none is nothing is None
    assert torch.equal(dx, same_dx) and torch.equal(dw, same_dw)

def test_core_a_layer_saves_what_nn_linear_saves():
    """X for wgrad and W for dgrad, and neither if it is not needed."""
    def saved(layer, of_x, of_w):
        kept = []
        layer.weight.requires_grad_(of_w)
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
            layer(x.requires_grad_(of_x))
        return sorted(kept)

    x, ours = randn(32, 48), ufp4.Linear(48, 16, bias=False)
    plain = nn.Linear(48, 16, bias=False)
    plain.weight = ours.weight
    for needs in (True, True), (True, False), (False, True):
        assert saved(ours, *needs) == saved(plain, *needs)

@pytest.mark.parametrize("where", ["torch", *on_kernels(("triton",))])
def test_core_tensors_without_data_have_shapes_and_leave_no_trace(where, device):
    x = randn(32, 32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        recipe = ufp4_with(sign_seed=7, sr=())      # its signs have data all the same
        fake = torch.randn(256, 256, device=device).requires_grad_()
        ufp4.linear(fake, fake, recipe).sum().backward()
        assert fake.grad.shape == (256, 256)
    if where == "torch":
        with torch.device("meta"):
            recipe = replace(recipe)
            ufp4.Linear(128, 256)(torch.randn(9, 128)).sum().backward()
    q = recipe.quantizer("x", "fprop")
    y = ufp4.linear(x.to(device), x.to(device), recipe)
    assert close(y, q(x).double() @ q(x).double().T, 32, 7)

@pytest.mark.parametrize("n,k", [(1, 32), (32, 1), (17, 40), (24, 64)])
@pytest.mark.parametrize("recipe", ["ufp4", ufp4_with(gemms=("fprop",), sr=())])
def test_core_experts_of_any_size_in_bfloat16(n, k, recipe):
    """One input or output, rows that begin anywhere: a loop over experts."""
    x, w = randn(40, k).bfloat16(), randn(3, n, k, seed=1).bfloat16()
    dy = randn(40, n, seed=2).bfloat16()
    recipe = replace(ufp4.find_recipe(recipe), sr=())
    x, w = x.requires_grad_(), w.requires_grad_()
    parts = [ufp4.linear(x[a:b], w[e], recipe)
             for e, (a, b) in enumerate(((0, 16), (16, 16), (16, 40)))]
    y = ufp4.linear(x, w, recipe, torch.tensor([16, 16, 40]))
    for got, expected in zip(*(torch.autograd.grad(v, (x, w), dy)
                               for v in (y, torch.cat(parts)))):
        assert close(got.float(), expected.double(), 40, 7)

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["bf16", ufp4_with(gemms=("fprop",), sr=())])
def test_core_gradients_of_experts_for_any_strides(recipe, dtype):
    """Of X, W and dY, in backward passes that are not quantized."""
    wide, w = randn(40, 70).to(dtype), randn(3, 24, 37, seed=1).to(dtype)[:, :, 5:]
    offsets, dys = torch.tensor([16, 16, 40]), (
        torch.ones(()).expand(40, 24), randn(24).expand(40, 24), randn(24, 40).T,
        randn(40, 33)[:, 5:29])
    for x in (wide[:, 3:35], wide[:, :64:2], wide.T[:40, :32],
              wide[:1, :32].expand(40, 32)):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = ufp4.linear(x, w, recipe, offsets)
        parts = torch.cat((F.linear(x[:16], w[0]), F.linear(x[16:], w[2])))
        for dy in dys:
            for got, expected in zip(*(
                    torch.autograd.grad(v, (x, w), dy.to(dtype), retain_graph=True)
                    for v in (y, parts))):
                assert close(got.float(), expected.double(), 40, 7)

def test_core_a_bias_leaves_the_dtype_of_autocast_as_it_is():
    with torch.autocast("cpu", torch.bfloat16):
        y = ufp4.Linear(32, 16)(randn(8, 32))
        assert y.dtype == nn.Linear(32, 16)(randn(8, 32)).dtype == torch.bfloat16

def test_core_an_output_is_no_view():
    """FSDP could not change a view of our function's output in place."""
    y = ufp4.Linear(32, 16, bias=False)(randn(2, 8, 32).requires_grad_())
    assert not y._is_view() and y.shape == (2, 8, 16)

ALONE = """
import sys, torch, ufp4, warnings
out = {}
for name in ufp4.RECIPES:
    # The first is so large that kernels.py compiles its quantizers
    large = [(128, 192, 160)] if name in ("ufp4", "nvfp4") else []
    for m, n, k in *large, (45, 30, 50):
        torch.manual_seed(1)
        x, w = torch.randn(m, k).requires_grad_(), torch.randn(n, k).requires_grad_()
        y = ufp4.linear(x, w, name)
        out[name, m] = y.detach(), *torch.autograd.grad(y, (x, w), torch.randn(m, n))
torch.save(out, sys.argv[1])
"""

@compiling()
def test_core_alone_in_a_folder_ufp4_computes_the_same_bits(tmp_path):
    """Without our kernels.py, and it says so once; that of another project is not run.
    There, too, a derivative is right or an error."""
    (tmp_path / "alone").mkdir()
    shutil.copy(HERE / "ufp4.py", tmp_path / "alone")
    (tmp_path / "alone/kernels.py").write_text("raise SystemExit('of another project')")
    found, env = [], {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": ""}
    for folder in HERE, tmp_path / "alone":
        path = tmp_path / f"{len(found)}.pt"
        done = subprocess.run([sys.executable, "-c", ALONE, path], cwd=folder, env=env,
                              capture_output=True, text=True, check=True)
        assert done.stderr.count("UserWarning: there is no kernels.py") == len(found)
        found.append(torch.load(path))
    for case, results in found[0].items():
        assert all(map(torch.equal, results, found[1][case])), case
    code = (inspect.getsource(twice) + inspect.getsource(batched) + """
import torch, ufp4
zeros, w, x = torch.zeros, torch.randn(48, 32).requires_grad_(), torch.randn(32, 32)
f = lambda w: ufp4.linear(x, w, "e2m1").sum()
for transform in (twice, batched, torch.func.grad,
                  lambda f: lambda w: torch.jit.trace(f, (w,), check_trace=False),
                  lambda f: lambda w: torch.export.export(
                      ufp4.Linear(32, 32), (x,), strict=False)):
    for derivative in transform(f), torch.compile(transform(f), backend="eager"):
        try:
            derivative(w)
        except Exception:
            continue
        raise SystemExit(f"no error: {transform}")
""")
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path / "alone",
                   env=env, check=True)

# ---- Derivatives: right, or an error -------------------------------------------------
@compiling()
def test_core_a_compiled_product_has_the_same_derivatives():
    """With respect to X and W, of a product and of experts, without a graph break."""
    x, w = randn(32, 24).to(DEVICE), randn(3, 40, 24, seed=1).to(DEVICE)
    dy, offsets = randn(32, 40, seed=2).to(DEVICE), torch.tensor([5, 5, 32]).to(DEVICE)
    for x, w, ends in ((x, w[0], None), (x.bfloat16(), w.bfloat16(), offsets)):
        recipe = replace(RECIPES["e2m1"], sr=())
        f = functools.partial(ufp4.linear, recipe=recipe, offsets=ends)
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        x, w = x.requires_grad_(), w.requires_grad_()
        for got, expected in zip(*(torch.autograd.grad(product(x, w), (x, w), dy)
                                   for product in (compiled, f))):
            assert torch.equal(got, expected)

def twice(f):
    """Of a loss that has a second derivative besides."""
    def differentiate(x):
        (dx,) = torch.autograd.grad(f(x) + x.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)
    return differentiate

def batched(f):
    """Of several gradients at once."""
    return lambda x: torch.autograd.grad(f(x)[None], x, zeros(3, 1),
                                         is_grads_batched=True)

TRANSFORMS = {
    "twice": twice, "batched": batched,
    "traced": lambda f: lambda x: torch.jit.trace(f, (x,)), "grad": torch.func.grad,
    "grad of vmap": lambda f: torch.func.grad(
        lambda x: torch.func.vmap(f)(x[None]).sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,))}

@compiling()
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_core_other_derivatives_are_errors(name, mode):
    x, w = randn(32, 32), randn(48, 32, seed=1).requires_grad_()
    derivative = TRANSFORMS[name](lambda w: ufp4.linear(x, w, "e2m1").sum())
    if mode == "compiled" and name in ("batched", "traced"):
        pytest.skip("torch.compile has neither")
    if mode == "compiled":
        torch._dynamo.reset()
        derivative = torch.compile(derivative, backend="aot_eager")
    with pytest.raises(RuntimeError, match="first derivative|double backward"):
        derivative(w)

@compiling()
def test_core_random_bits_that_compiled_code_would_draw_anew_are_an_error():
    """Under a budget of memory torch computes X of a second layer again, for wgrad."""
    x, layer = randn(32, 32), ufp4.Linear(32, 32, recipe=ufp4_with(sr=("x",)))
    with torch._functorch.config.patch(activation_memory_budget=0):
        with pytest.raises(RuntimeError, match="activation_memory_budget"):
            torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        layer.recipe = RECIPES["ufp4"]
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()

@compiling()
def test_core_compiled_code_draws_the_same_random_bits():
    """Also for two products whose gradients are equal: each draws its own."""
    w, found = randn(64, 48), []
    def f(a, b):
        return ufp4.linear(a, w, "ufp4") + ufp4.linear(b, w, "ufp4")

    for g in f, torch.compile(f, fullgraph=True, backend="aot_eager"):
        a, b = randn(32, 48).requires_grad_(), randn(32, 48, seed=1).requires_grad_()
        torch.manual_seed(3)
        found.append(torch.autograd.grad(g(a, b), (a, b), randn(32, 64)))
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert not torch.equal(*found[0])

class Doubled(Quantizer):
    """Does something even without a format, and keeps what it has seen."""
    def __call__(self, x, rand=None):
        self.largest = x.abs().amax()
        return 2.0 * super().__call__(x, rand)

class DoubledRecipe(Recipe):
    def quantizer(self, operand, gemm):
        return Doubled(None)

class Truncated(Format):
    def round(self, a, rand=None):
        return a.floor().clamp(max=self.max)

@compiling()
@pytest.mark.parametrize("recipe", [
    ufp4_with(gemms=("dgrad",), sr=()), ufp4_with(scale=lambda a, g: 2 * a / g, sr=()),
    ufp4_with(fmt=Truncated("t", (0, 1, 2, 3)), sr=()),
    DoubledRecipe("doubled")])
def test_core_ones_own_rule_format_or_quantizer_is_what_compiled_code_runs(recipe):
    """In one graph. And a quantizer may keep what it likes."""
    x, w = randn(32, 48), randn(64, 48, seed=1)
    y = ufp4.linear(x, w, recipe)
    f = torch.compile(functools.partial(ufp4.linear, recipe=recipe), fullgraph=True,
                      backend="aot_eager")
    assert torch.equal(f(x, w), y) and not torch.equal(y, ufp4.linear(x, w, "ufp4"))
    q = Doubled(E1M2, signs=random_signs(0))
    kernels.quantize_operand(q, 16, torch.float32, v := randn(128, 256))
    assert q.largest == v.abs().amax() and q.signs == random_signs(0)

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_core_the_default_dtype_changes_nothing(dtype):
    x, recipe = randn(32, 48), ufp4_with(sr=("x",))
    torch.manual_seed(1)
    y = ufp4.linear(x, x, recipe)
    try:
        torch.set_default_dtype(dtype)
        torch.manual_seed(1)
        assert torch.equal(ufp4.linear(x, x, recipe), y)
    finally:
        torch.set_default_dtype(torch.float32)

def test_core_float16_is_not_rounded_before_it_is_quantized():
    """Nor are products of what it can't hold: 16 numbers of 6e4, rotated."""
    x, dy = torch.eye(64).half().requires_grad_(), randn(64, 64).half()
    y = ufp4.linear(x, torch.eye(64).half(), Recipe("nearest"))
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, fake_quantize(dy).bfloat16().half())
    big = torch.full((4, 16), 6e4)
    with torch.autocast("cpu", torch.float16):
        y = ufp4.linear(big, torch.full((4, 16), 1e-3), "ufp4")
    assert y.dtype == torch.float16 and close(y, torch.full((4, 4), 960.0), 16, 6)

@compiling()
@pytest.mark.parametrize("recipe", ["bf16", "ufp4"])
def test_core_compiled_experts_refuse_tokens_of_no_expert(recipe):
    x, w = randn(40, 32).bfloat16(), randn(3, 16, 32).bfloat16()
    f = torch.compile(functools.partial(ufp4.linear, recipe=recipe), fullgraph=True,
                      backend="aot_eager")
    assert f(x, w, offsets=torch.tensor([5, 5, 40])).shape == (40, 16)
    with pytest.raises(RuntimeError, match="last offset"):
        f(x, w, offsets=torch.tensor([5, 5, 20]))

def test_core_export_is_an_error():
    """Its graph would have the derivative of rounding, which is 0."""
    with pytest.raises(RuntimeError, match="no torch.export"):
        torch.export.export(ufp4.Linear(16, 16), (zeros(16, 16),), strict=False)

# ---- torch.compile: of the quantizer, and by a user ----------------------------------
class NoiseByRow(Quantizer):
    def __call__(self, x, rand=None):
        noise = torch.randn(x.shape) * x.abs().amax(-1, keepdim=True)
        return super().__call__(x, rand) + noise

def scale_by_row(amax, g_max):
    return (amax / g_max).bfloat16().float() * amax.amax(-2, keepdim=True)

class Only(Recipe):
    """Rounds X in fprop alone."""
    def quantizer(self, operand, gemm):
        if gemm != "fprop":
            return Quantizer(None)
        return self.given if operand == "x" else Quantizer(None, signs=self.given.signs)

@compiling()
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
@pytest.mark.filterwarnings("error:torch.compile failed")
@pytest.mark.parametrize("quantizer", [
    Quantizer(E2M1, Tiles(ufp4.scale_e4m3), stochastic=True),
    Quantizer(E1M2, signs=random_signs(1, 2)), Quantizer(E1M2, stochastic=True),
    Quantizer(E1M2, signs=random_signs(1, 32)),     # rotations longer than a block
    Quantizer(Format("mine", (0.0, 1.0, 2.5))), NoiseByRow(E1M2, stochastic=True),
    pytest.param(Quantizer(E1M2, scale_by_row), marks=pytest.mark.skipif(
        torch.__version__ < "2.13", reason="leaves out the cast to bfloat16"))])
def test_compiled_is_eager_bit_for_bit_for_all_signs(quantizer):
    """Of a large X, ties, subnormals and what is not finite included."""
    x = randn(256, 192) * 10 ** randn(256, 1, seed=1)
    x[64:96] *= 1e-40
    x[96:192:2] = torch.arange(-96, 96) / 8     # ties where the scale is 1
    x[96:192, ::16] = quantizer.fmt.max
    x[96:192] = x[96:192].clamp(-quantizer.fmt.max, quantizer.fmt.max)
    x[3, 40], x[50, 60] = (0.0, -0.0) if quantizer.stochastic else (NAN, INF)
    counters, graphs = torch._dynamo.utils.counters["stats"], []
    recipe = Only("only")
    # Columns and rows, twice each
    for seed, v in enumerate((x.T.contiguous().T, x, x.T[:, :224], x[:224])):
        if quantizer.signs is not None:
            quantizer.signs = random_signs(seed + 2, len(quantizer.signs))
        recipe.given, identity = quantizer, torch.eye(v.shape[1])
        torch.manual_seed(seed)
        got = ufp4.linear(v, identity, recipe)
        torch.manual_seed(seed)
        rand = None
        if quantizer.stochastic:
            rand = uniform(random_bits(v))
        rotated = Quantizer(None, signs=quantizer.signs)(identity)
        expected = F.linear(quantizer(v, rand), rotated)
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
        graphs.append(counters["unique_graphs"])
    assert 0 < graphs[1] == graphs[3]           # other signs and sizes compile nothing

def test_compiled_code_that_fails_is_plain_torch_for_this_kind_alone(monkeypatch):
    def compiled(f):
        def run(quantizer, *args):
            tried.append(quantizer.fmt.name)
            if quantizer.fmt is E2M1:
                raise RuntimeError("no compiler")
            return f(quantizer, *args)
        return run

    tried, x, signs = [], randn(128, 128), random_signs(0)
    monkeypatch.setattr(kernels, "compiled", compiled)
    with pytest.warns(UserWarning, match="several times as long.*no compiler"):
        for q in 2 * (Quantizer(E2M1, signs=signs), Quantizer(E1M2, signs=signs)):
            got = kernels.quantize_operand(q, 16, torch.float32, x)
            assert torch.equal(got, q(x)) and q.signs is signs
    assert tried == ["e2m1", "e1m2", "e1m2"]

@compiling()
def test_compiled_code_misreads_no_view_and_no_row():
    """Torch's own compiled copy forgets that a view is negated. And where blocks don't
    fill up a row, they don't go on in the next one."""
    x = torch.view_as_complex(randn(256, 160, 2)).conj().imag
    assert x.is_neg()
    q = Quantizer(E1M2, signs=random_signs(0))
    for view in x, x.T:
        got = kernels.quantize_operand(q, 16, torch.float32, view)
        assert torch.equal(got, q(view.resolve_neg()))
    wide = replace(q, signs=random_signs(0, 64))
    with pytest.raises(RuntimeError, match="unflatten"):
        kernels.quantize_operand(wide, 16, torch.float32, x[:, :80])

# ---- Models --------------------------------------------------------------------------
class Tied(nn.Module):
    """Two names for one weight and for one layer, and a bias for some."""
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embed.weight
        self.a, self.b = (nn.Linear(16, 32),
                          nn.Linear(32, 16, bias=False, dtype=torch.bfloat16))
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.again = self.inner[0]
        self.drop = nn.Dropout().eval()

    def forward(self, x):
        x = self.b(F.gelu(self.a(input=x)))
        return self.lm_head(self.drop(self.again(self.inner(x))))

@pytest.mark.filterwarnings("error:convert ")
def test_core_convert_keeps_everything_but_the_arithmetic():
    m, x = Tied(), randn(4, 16)
    before = {k: (v.data_ptr(), v.dtype) for k, v in m.state_dict().items()}
    assert ufp4.convert(m, "e2m1") is m
    assert {k: (v.data_ptr(), v.dtype) for k, v in m.state_dict().items()} == before
    for layer in m.a, m.b, m.again:
        assert type(layer) is ufp4.Linear and layer.recipe.name == "e2m1"
    assert m.again is m.inner[0] and type(m.lm_head) is nn.Linear
    assert torch.equal(m.a(x), ufp4.linear(x, m.a.weight, "e2m1") + m.a.bias)
    ufp4.convert(m, "ufp4", skip=("inner", "lm_head"))  # again, to another recipe
    assert m.a.recipe.name == "ufp4" and m.inner[0].recipe.name == "e2m1"
    shared = ufp4.convert(Tied(), skip=["again"])       # its other name is inner.0
    assert type(shared.inner[0]) is nn.Linear
    assert type(ufp4.convert(nn.Linear(16, 16))) is ufp4.Linear
    bf16 = ufp4.Linear(20, 40, recipe="bf16")           # is nn.Linear
    assert torch.equal(bf16(x := randn(3, 20)), F.linear(x, bf16.weight, bf16.bias))

def test_core_a_converted_model_is_trained_and_saved_as_any_other():
    """By the optimizer that was there before; a plain model takes its weights."""
    plain, x = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), randn(64, 16)
    model, losses = copy.deepcopy(plain), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ufp4.convert(model)
    for _ in range(20):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    plain.load_state_dict(model.state_dict())
    assert torch.equal(ufp4.convert(plain)(x), model(x))

def test_core_convert_names_what_it_leaves_unquantized():
    model = nn.Sequential(nn.Linear(16, 16), nn.Bilinear(4, 4, 4), nn.LazyLinear(16),
                          nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))
    with pytest.warns(UserWarning, match="unquantized: Bilinear, LazyLinear, "
                      "ParametrizationList$"):
        ufp4.convert(model, skip=())

def test_core_convert_leaves_the_head_or_says_that_it_did_not():
    """By its name, or by what a model of Hugging Face calls its output embeddings."""
    class Model(nn.Sequential):
        def get_output_embeddings(self):
            return self[1]

    layers = nn.Linear(16, 16), nn.Linear(16, 4)
    model = ufp4.convert(Model(*copy.deepcopy(layers)))
    assert type(model[0]) is ufp4.Linear and type(model[1]) is nn.Linear
    with pytest.warns(UserWarning, match="no head, so the last layer, 1, "):
        ufp4.convert(nn.Sequential(*copy.deepcopy(layers)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ufp4.convert(nn.Sequential(*layers), skip=())

class Conv1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(zeros(16, 16))

@pytest.mark.filterwarnings("ignore:convert ")
def test_core_convert_reaches_a_transformer_layer_in_eval_mode():
    plain = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    model, x = ufp4.convert(copy.deepcopy(plain), skip=()), torch.randn(2, 16, 32)
    encoder = ufp4.convert(nn.TransformerEncoder(plain, 2)).eval()
    mask = (torch.arange(16) > 11).expand(2, 16)
    y = encoder(x, src_key_padding_mask=mask)
    with torch.no_grad():   # a fast path would skip our layers, or nest their tensors
        assert (model(x) - plain(x)).abs().max() > 1e-3
        assert torch.equal(encoder(x, src_key_padding_mask=mask), y)

@pytest.mark.parametrize("message,how", [
    ("'fp4'.*ufp4", {"recipe": "fp4"}), ("'head'.*a, b, inner.0", {"skip": ("head",)}),
    ("leaves no linear layer .*unquantized: Conv1D",
     {"skip": ("a", "b", "inner", "lm_head")})])
def test_core_convert_refuses_before_changing_anything(message, how):
    m = Tied()
    m.conv = Conv1D()
    with pytest.raises(ValueError, match=message):
        ufp4.convert(m, **how)
    assert type(m.a) is type(m.b) is nn.Linear

def test_core_convert_refuses_a_layer_with_a_forward_of_its_own():
    """Such as a hook of accelerate, which would go on calling nn.Linear's."""
    m = Tied()
    m.b.forward = functools.partial(nn.Linear.forward, m.b)
    with pytest.raises(ValueError, match="layer b has a forward of its own"):
        ufp4.convert(m)
    assert type(m.a) is nn.Linear

def test_core_noise_is_the_split_of_each_output_and_leaves_no_trace():
    """Against float64."""
    model, x, seen = ufp4.convert(Tied(), "e2m1"), randn(64, 16), {}
    model.inner.recipe = model.a.recipe             # no layer: it has no weight
    experts = train.ExpertLinear(2, 16, 45, model.a.recipe)
    nn.init.normal_(experts.weight)

    def keep(m, inputs, named, y):
        v, w = (*inputs, *named.values())[0].double(), m.weight.double()
        bias = getattr(m, "bias", None)
        w = w.expand(2, *w.shape[-2:])                  # of the experts, or the same
        exact = torch.cat((v[:20] @ w[0].T, v[20:] @ w[1].T))
        y = y.double() if bias is None else y.double() - bias.double()
        seen.setdefault(m, []).append((exact, y))

    layers = {"a": model.a, "b": model.b, "inner.0": model.again, "": experts}
    hooks = [m.register_forward_hook(keep, with_kwargs=True) for m in layers.values()]
    found = ufp4.noise(model, x=x) | ufp4.noise(experts, x, torch.tensor([20, 64]))
    for hook in hooks:
        hook.remove()
    assert list(found) == list(layers)
    for name, (noise, slope) in found.items():
        exact, y = (torch.cat(of).flatten() for of in zip(*seen[layers[name]]))
        a = exact @ y / (exact @ exact)
        rest = y - a * exact
        assert slope == pytest.approx(a.item(), rel=1e-5) and noise > 0.001
        assert noise == pytest.approx((rest @ rest / (exact @ exact)).item(), rel=1e-3)
    assert model.training and not model.drop.training and model.a.training
    assert not ufp4.noise(ufp4.Linear(16, 16), x * 0)   # no output, no noise
    norm = nn.Sequential(ufp4.Linear(16, 16), nn.BatchNorm1d(16))
    ufp4.noise(norm, x)
    assert norm[1].num_batches_tracked == 0 and norm[1].training
    assert not any(m._forward_hooks for m in model.modules())

@pytest.mark.parametrize("result", [None, zeros(3)])
def test_core_a_quantizer_that_returns_something_else_is_named(result):
    class Wrong(Quantizer):
        def __call__(self, x, rand=None):
            return result

    recipe = Only("only")
    recipe.given = Wrong(E1M2)
    with pytest.raises(TypeError, match=r"Wrong must return a tensor of shape \(4, 16"):
        ufp4.linear(randn(4, 16), randn(4, 16), recipe)

# ---- The lesson ----------------------------------------------------------------------
def test_core_the_lesson_is_right(capsys):
    ufp4.lesson()
    text = capsys.readouterr().out
    quoted = re.findall(r"signal over error (\S+) dB", text)
    assert len(quoted) == 4 and all(f"{float(d):.1f} dB" in LECTURE for d in quoted)
    exact = np.array([0.9959, 1.0006])          # tested above
    slopes = re.findall(r"(numbers|\d+ quantized products): +e2m1 (\S+), e1m2 (\S+)",
                        text)
    for what, *measured in slopes:              # an alpha for each operand
        power = 1 if what == "numbers" else 2 * int(what.split()[0])
        tolerance = 6e-4 if what == "numbers" else 0.02
        assert np.allclose(np.array(measured, float), exact**power, atol=tolerance)
    assert len(slopes) == 4 and "changes by more than 1e-05" in text
    assert "always 0.00, stochastically 0.04 " in text

# ---- kernels.py, bit for bit against the reference -----------------------------------
def same(q, x, dtype=torch.float32):
    """Asserts that the kernel gives what the reference gives, for the same bits."""
    bits = random_bits(x) if q.stochastic else None
    given = bits if bits is None else bits.short().to(DEVICE)
    got = kernels.quantize(kernels.settings_of(q), x.to(DEVICE), given, dtype)
    assert got.dtype == dtype and got.is_contiguous()
    assert same_bits(got.cpu().float(), ufp4.reference(q, x, bits, dtype).float())

@needs_kernels
@pytest.mark.parametrize("fmt,scale,dtype", [
    *itertools.product(("e2m1", "e1m2"), SCALES, (torch.float32,)),
    ("int4", "fp32", torch.float32), ("e1m2", "fp32", torch.float16),
    ("e2m1", "fp32", torch.bfloat16), ("e1m2", "e4m3", torch.bfloat16),
    ("e2m1", "e8m0", torch.bfloat16)])
def test_kernels_equal_the_reference(fmt, scale, dtype):
    """In rows and columns, rotated or not, rounded either way, numbers of all sizes."""
    low, high = {torch.float16: (-24, 15)}.get(dtype, (-133, 127))
    if scale.startswith("e4m3"):                # scales are relative to the largest
        low, high = -8, 8
    x = adversarial(FORMATS[fmt], dtype, low, high)[:160]
    q = Quantizer(FORMATS[fmt], SCALES[scale], BLOCKS[scale])
    rotated = replace(q, signs=random_signs(SEED), stochastic=True)
    same(q, x)
    same(q, x.T, torch.bfloat16)
    same(rotated, x, torch.bfloat16)
    same(rotated, x.T)
    same(replace(rotated, stochastic=False), x[:64].view(2, 32, 64).mT)     # experts
    same(q, x * 0)
    same(replace(q, scale=Tiles(q.scale, q.block)), x.repeat(1, 2)[::2, ::2])
    same(replace(rotated, scale=Tiles(q.scale, q.block)), x[:64, :32].T)
    for bad in -INF, NAN:
        x[6, 17] = bad
        same(q, x[:32, :32])

@needs_kernels
@pytest.mark.skipif(DEVICE != "cpu", reason="takes 5 GB, which a CPU only promises")
def test_kernels_take_strides_beyond_32_bits():
    """The last token of each of 16 long texts, and experts with huge weights: elements
    lie more than 2^31 apart."""
    x = torch.empty(16, 2**20 + 2**17, 128, dtype=torch.bfloat16)
    x[:, -1] = randn(16, 128)
    same(Quantizer(E1M2), x[:, -1])
    same(Quantizer(E1M2), x[:, -1].view(16, 8, 16))

@needs_kernels
@pytest.mark.parametrize("fmt, scale", (
    ("e2m1", "e4m3"), ("e1m2", "e8m0"), ("e2m1", "e8m0")))
def test_kernels_native_operands_are_codes_and_swizzled_scales(fmt, scale):
    """Those of ufp4.pack, along rows and columns. Codes have no meaning where the scale
    is 0. The gaps of the swizzle are zeros."""
    x = randn(160, 32) * torch.exp2(randn(160, 1, seed=1) * 6)
    x[9] = -0.0
    x[6] *= 2.0**-125 / x[6].abs().max()        # E8M0's smallest scale, 2^-127
    q = Quantizer(FORMATS[fmt], SCALES[scale], BLOCKS[scale], stochastic=True)
    for v in x, x.T:
        bits = random_bits(v)
        got = kernels.quantize_native(kernels.settings_of(q), v.to(DEVICE),
                                      bits.short().to(DEVICE))
        want = ufp4.pack(q, v, uniform(bits))
        r, g = torch.meshgrid(*map(torch.arange, want.scale.shape), indexing="ij")
        scales = got.scale.cpu().flatten(2)
        at = r // 128, g // 4, r % 32 * 16 + r // 32 % 4 * 4 + g % 4
        assert scales.shape == (-(-len(r) // 128), -(-r.shape[1] // 4), 512)
        assert torch.equal(scales[at], want.scale.view(torch.uint8))
        meant = (want.scale.float() > 0).repeat_interleave(q.block // 2, -1)
        assert torch.equal(got.codes.cpu()[meant], want.codes[meant])
        assert scale == "e8m0" or torch.equal(got.t.cpu(), want.tensor_scale)
        assert same_bits(kernels.decoded(got), want.dequantize())
        scales[at] = 0
        assert not scales.any()

# fp4x4 has E8M0 scales here: the interpreter knows no others in dot_scaled.
@needs_kernels
@pytest.mark.parametrize("path, fmt", (
    ("fp4", "e2m1"), ("fp8", "e1m2"), ("fp4x4", "e1m2")))
def test_kernels_matmul_multiplies_the_values_of_its_operands(path, fmt, monkeypatch):
    """Ragged tiles in M, N and K."""
    if not kernels.INTERPRET:
        pytest.skip("runs where the hardware has such a path, or in the interpreter")
    q = Quantizer(FORMATS[fmt], ufp4.scale_e8m0, 32, random_signs(SEED))
    monkeypatch.setitem(kernels.NATIVE, (kernels.MANTISSA_BITS[q.fmt.levels], "e8m0",
                                         32), (path, ()))
    x, w = randn(129, 160), randn(130, 160, seed=1)
    a, b = (kernels.quantize_native(kernels.settings_of(q), v, None) for v in (x, w))
    for dtype, bits in ((torch.float32, 18), (torch.bfloat16, 11)):
        got = kernels.matmul(dtype, a, b)
        exact = q(x).double() @ q(w).double().T
        assert got.dtype == dtype and close(got, exact, 160, bits)

@needs_kernels
def test_kernels_native_products_are_chosen_by_recipe_and_gpu(monkeypatch):
    archs = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120")
    monkeypatch.setattr(kernels, "failed_native_check", lambda *_: None)
    def native(recipe, dtype=torch.bfloat16):
        values = kernels.settings_of_all(recipe)
        for arch in archs:
            monkeypatch.setattr(kernels, "architecture", lambda device: arch)
            yield kernels.multiplies(values, dtype, DEVICE)

    for name, wanted in (("ufp4", ""), ("nvfp4", archs[2:]), ("mxfp4", archs[2:]),
                         ("ufp4-mx", archs[2:]), ("ufp4-e4m3", archs[4:])):
        assert list(native(RECIPES[name])) == [arch in wanted for arch in archs]
    for changed in {"gemms": ("fprop",)}, {"rht_block": 32}, {"block": 16}:
        other = replace(RECIPES["mxfp4"], **changed)
        assert not any(native(other))
    assert not any(native(RECIPES["mxfp4"], torch.float64))

@needs_kernels
def test_kernels_blackwells_path_checks_both_dtypes_and_takes_no_batch_of_gradients(
        monkeypatch):
    asked, x = [], randn(32, 32).requires_grad_()
    monkeypatch.setattr(kernels, "runs_triton", lambda device: True)
    monkeypatch.setattr(kernels, "architecture", lambda device: "sm_100")
    monkeypatch.setattr(kernels, "multiplies",
                        lambda settings, dtype, device: not asked.append(dtype))
    assert kernels.is_native(RECIPES["nvfp4"], x.bfloat16(), x, None)
    assert asked == [torch.bfloat16, torch.float32]

    class Quantized(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return kernels.native(RECIPES["nvfp4"], "dy", "dgrad")(dy)

    with pytest.raises(RuntimeError, match="only a first derivative"):
        torch.autograd.grad(Quantized.apply(x), x, zeros(3, 32, 32),
                            is_grads_batched=True)

# The count is of one program's code: on sm_10x an instruction is 128 x 256 x 256 bits
# of K, and the loop's first step is peeled off it
@needs_kernels
@pytest.mark.parametrize("call,wanted", [
    (("nvfp4", "sm_100"),
     r"fp4: 8 tcgen05.mma.cta_group::1.kind::mxf4nvf4\S+, (\d|1[0-2]) spills"),
    (("dY, columns", "sm_90"), r"quantize: (29|30)\.\d instructions an element, "
     "0 spills, 16 sectors 100% full")])
def test_kernels_compile_for_gpus_that_are_not_here(call, wanted):
    got = bench.lowering(*call)
    assert re.fullmatch(wanted, got), got

@needs_kernels
def test_kernels_what_they_cannot_do_is_said_once_and_done_without(monkeypatch):
    use_kernels(monkeypatch, True)
    x, w = randn(16, 32).to(DEVICE), randn(16, 32, seed=1).to(DEVICE)
    monkeypatch.setattr(kernels, "launch", lambda *_: 1 / 0)
    for recipe, why in ((ufp4_with(block=8), "blocks of 16"),
                        (ufp4_with(rht_block=32), "Hadamard matrices of 16"),
                        (ufp4_with(scale=lambda a, g: a / g), "of your own"),
                        (ufp4_with(fmt=Format("odd", (0, 1, 5))), "E1M2"),
                        (ufp4_with(sign_seed=5), "ZeroDivisionError")):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default")
            results = [ufp4.linear(x, w, recipe) for _ in range(3)]
        assert len(said) == 1 and why in str(said[0].message)
        with monkeypatch.context() as patch:
            use_kernels(patch, False)
            assert torch.equal(results[0], ufp4.linear(x, w, recipe))

@needs_kernels
@pytest.mark.skipif(works and not kernels.INTERPRET, reason="needs kernels in Python")
@pytest.mark.parametrize("name, broken, where", (
    ("random_from_128", lambda f: lambda word, i: f(word, i + 1),
     "differ .* in rows on"),
    ("bind", lambda f: lambda v: f(v[::-1]), "differ .* in rows on"),
    ("row_by_row", lambda f: lambda x, *sizes: kernels.tl.reshape(x, [x.numel]),
     "differ .* in columns on")))
def test_kernels_their_check_catches_what_is_broken(name, broken, where, monkeypatch):
    monkeypatch.setattr(kernels, name, broken(getattr(kernels, name)))
    seed = 1000 + ord(name[1])          # signs that nothing has been checked with
    values = kernels.settings_of(Quantizer(E1M2, signs=random_signs(seed),
                                         stochastic=True))
    with torch.device("meta"):          # the check runs under any default device
        reason = kernels.why_not(values, torch.float32, torch.bfloat16,
                                 torch.device("cpu"))
    assert re.search(where, reason), reason

@needs_kernels
def test_kernels_a_check_that_could_not_be_made_is_made_again(monkeypatch):
    """Out of memory, or inside the capture of a CUDA graph, it says nothing about
    kernels. So nothing is remembered."""
    device = torch.device(DEVICE)
    values = kernels.settings_of(Quantizer(E2M1, signs=random_signs(99)))
    def full(*_):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "launch", full)
        with pytest.raises(torch.OutOfMemoryError):
            kernels.why_not(values, torch.float32, torch.float32, device)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="before a CUDA graph is captured"):
            kernels.why_not(values, torch.float32, torch.float32, device)
    assert kernels.why_not(values, torch.float32, torch.float32, device) is None

def test_kernels_their_check_sees_scales_of_all_sizes():
    x, _ = kernels.examples(torch.float32)
    for v in x[0], x[0].mT:
        scale = quantize(v, "e1m2", "e4m3").scale.float()
        assert scale.max() == 448 and 0 < scale[scale > 0].min() < 2.0**-6
        assert (scale == 0).any()

@needs_kernels
@pytest.mark.skipif(works and not kernels.INTERPRET, reason="needs kernels in Python")
@pytest.mark.parametrize("shape", [(5_000_000, 16), (16, 5_000_000)])
def test_kernels_a_grid_holds_millions_of_tokens(shape, monkeypatch):
    """Its first dimension may be long, the others have at most 65,535 programs. Tokens
    are rows of X for fprop, and columns of its transpose for wgrad."""
    grids = []
    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(kernels, "quantize_kernel", Kernel())
    x = torch.empty(5_000_000, 16, dtype=torch.bfloat16, device="meta")
    x = x if shape == x.shape else x.T
    kernels.quantize(kernels.settings_of(Quantizer(E1M2)), x, None, x.dtype)
    assert grids[0][0] > 65_535 and all(size <= 65_535 for size in grids[0][1:])

def test_kernels_an_amd_gpu_is_no_blackwell(monkeypatch):
    """gfx1200 reports the capability (12, 0)."""
    monkeypatch.setattr(kernels, "INTERPRET", False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    device = torch.device("cuda", 7)            # none that was asked for before
    assert kernels.architecture(device) not in kernels.BLACKWELL

@needs_kernels
def test_kernels_do_not_know_a_rule_that_was_changed_in_place(monkeypatch):
    """The reference is what counts: a changed one is noticed when first used."""
    monkeypatch.setattr(Format, "round", lambda self, a, rand=None: a.clamp(max=1.0))
    values = kernels.settings_of(Quantizer(E2M1, signs=random_signs(77)))
    reason = kernels.why_not(values, torch.float32, torch.float32,
                             torch.device(DEVICE))
    assert "differ from ufp4.py" in reason

def test_core_a_folder_with_our_files_is_a_package(tmp_path):
    """Such as a clone called ufp4 beside a user's script. Both may be imported."""
    (tmp_path / "ufp4").mkdir()
    for name in "ufp4.py", "kernels.py":
        shutil.copy(HERE / name, tmp_path / "ufp4")
    code = ("from ufp4 import ufp4; import torch, sys\n"
            "ufp4.linear(torch.randn(4, 16), torch.randn(8, 16), 'ufp4')\n"
            f"sys.path.insert(0, {str(HERE)!r}); del sys.modules['ufp4']\n"
            "import ufp4 as other, importlib\n"
            "assert other.__file__ != ufp4.__file__ and importlib.reload(other)\n")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path,
                   env=os.environ | {"PYTHONPATH": ""})

def test_kernels_hand_on_who_looks_for_another_package_of_that_name(tmp_path):
    """Hugging Face has a package called kernels. Whoever imports that gets it, also
    where kernels.py comes first; and ufp4.py finds ours. Without it or Triton, an
    import of ours fails nobody."""
    (tmp_path / "site" / "kernels").mkdir(parents=True)
    (tmp_path / "site/kernels/__init__.py").write_text(
        "from kernels._inner import Device\nfrom kernels import _inner as again\n")
    (tmp_path / "site/kernels/_inner.py").write_text("class Device: pass\n")
    code = (f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(tmp_path / 'site')!r}]\n"
            "import ufp4, kernels, kernels._inner\n"
            "assert kernels.Device is kernels._inner.Device\n"
            "assert ufp4.kernels.quantize\n"
            "del sys.modules['kernels'], sys.modules['kernels._inner'], sys.path[1]\n"
            "sys.modules['triton'] = None\n"       # it can't be imported
            "import kernels\n"
            "reason = ufp4.load_kernels().why_not(None, None, None, None)\n"
            "assert reason == 'there is no Triton of version 3.6 or newer'\n")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)

# ---- train.py ------------------------------------------------------------------------
TINY = ("--layers 2 --dim 32 --heads 2 --hidden 32 --seq-len 32 --batch-size 4 "
        "--steps 8 --warmup 2 --eval-interval 4 --eval-windows 3 --save-interval 2 "
        "--log-interval 1 --device cpu --dtype float32").split()
MOE = ["--experts", "3", "--top-k", "2"]

@pytest.fixture
def text(tmp_path):
    path = tmp_path / "little.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i * i}\n\n"
                            for i in range(400)))
    return path

def built(config, recipe, vocab_size=256):
    model = train.build_model(config, recipe, vocab_size)
    model.init_weights(config.seed)
    return model

@pytest.fixture
def settings(text, tmp_path, monkeypatch):
    """Settings of a tiny run: settings("--recipe", ...)."""
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "data")
    common = [*TINY, "--data", str(text), "--out", str(tmp_path / "out/run")]
    return lambda *flags: train.parse_args([*common, *flags])

def gpt(s, recipe="bf16"):
    """A model with larger weights than at the start of training."""
    model = built(s, replace(RECIPES[recipe], sr=()))
    model.load_state_dict({name: 3 * t for name, t in model.state_dict().items()})
    return model

def weights(out):
    """{name: whole tensor} of a run's last checkpoint, whatever ranks wrote it."""
    dcp_to_torch_save(train.checkpoints(Path(out))[-1], Path(out) / "whole.pt")
    return torch.load(Path(out) / "whole.pt", weights_only=False)["model"]

def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def saved(out):
    return [int(path.name[5:]) for path in train.checkpoints(out)]

def records(out):
    """The log's lines after the first, less their times."""
    return [{k: v for k, v in line.items() if k not in ("tokens_per_s", "seconds")}
            for line in train.read_log(Path(out) / "log.jsonl")[1:]]

def said(capsys, code, run, *args):
    """What train.py says when it stops with that exit code. (Of a SystemExit with a
    text, Python prints the text, and exits with 1.)"""
    with pytest.raises(SystemExit) as stopped:
        run(*args)
    if code == 1:
        return stopped.value.code
    assert stopped.value.code == code
    return capsys.readouterr().err

def refused(*argv):
    """Why train.py does not begin."""
    with pytest.raises(ValueError) as error:
        train.train(train.parse_args(argv))
    return str(error.value)

def python(*args, cwd=HERE, path=HERE, code=0):
    """What another process says, which must exit with this code."""
    done = subprocess.run([sys.executable, *args], cwd=cwd, text=True,
                          env=os.environ | {"PYTHONPATH": str(path)},
                          capture_output=True)
    assert done.returncode == code, done.stderr
    return done

@pytest.mark.parametrize("flags", [
    ["--recipe", "ufp4"], ["--recipe", "bf16", *MOE],
    ["--recipe", "nvfp4", "--sr", "x,dy", "--keep-bf16", "1", *MOE]])
def test_train_a_run_learns_logs_and_repeats(settings, flags):
    s = settings(*flags, *"--steps 14 --lr 2e-2 --eval-interval 7".split())
    Path(s.out).mkdir(parents=True)
    (Path(s.out) / "ckpt-0000001.tar").touch()          # a user's file is left alone
    loss = train.train(s)
    lines, kept = records(s.out), weights(s.out)
    assert [line["step"] for line in lines] == list(range(15))
    for line in lines[0]["val_loss"], lines[1]["train_loss"]:               # uniform
        assert line == pytest.approx(math.log(256), abs=0.1)
    assert loss == lines[-1]["val_loss"] < 4 and "val_loss" not in lines[-2]
    assert [line["tokens"] for line in lines[1:]] == [128 * n for n in range(1, 15)]
    assert saved(s.out) == [12, 14]
    assert not s.experts or all(1 <= line["max_load"] <= 3 for line in lines[1:])
    header, _, *timed = train.read_log(Path(s.out) / "log.jsonl")
    assert header["settings"] == vars(s)
    # The first step compiles, so it does not count in tokens/s
    assert "tokens_per_s" not in timed[0] and all(l["tokens_per_s"] for l in timed[1:])
    assert all(a["seconds"] <= b["seconds"] for a, b in zip(timed, timed[1:]))
    with pytest.raises(ValueError, match="holds a run: --resume .*--overwrite"):
        train.train(s)
    (Path(s.out) / "notes.txt").touch()
    again = replace(s, overwrite=True)
    assert train.train(again) == loss and same_weights(weights(s.out), kept)
    assert (Path(s.out) / "notes.txt").exists() and records(s.out) == lines

def test_train_overrides_reach_the_recipe_and_the_blocks(settings):
    flags = "--recipe e2m1 --rht fprop,wgrad --sr none --scale e4m3 --block 8".split()
    for more in [], MOE:
        s = settings(*flags, "--keep-bf16", "1", "--seed", "5", *more)
        recipe = replace(RECIPES["e2m1"], rht=("fprop", "wgrad"), sr=(), scale="e4m3",
                         block=8, sign_seed=5)
        assert train.make_recipe(s) == recipe
        model = train.GPT(s, recipe, 256)
        assert type(model.lm_head) is nn.Linear
        for block, name in zip(model.blocks, ("e2m1", "bf16")):
            names = {m.recipe.name for m in block.modules() if hasattr(m, "recipe")}
            assert names == {name}

    every = train.make_recipe(settings(*"--rht all --gemms all --sr all".split()))
    assert (every.rht, every.gemms, every.sr) == (GEMMS, GEMMS, ("x", "w", "dy"))

def test_train_the_schedules_warm_up_and_decay(settings):
    flags = "--steps 100 --warmup 10 --final-lr-frac 0.2 --schedule".split()
    factors = {}
    for name in "cosine", "wsd":
        s = settings(*flags, name)
        f = factors[name] = [train.lr_factor(i, s) for i in range(100)]
        assert f[0] == 0.1 and f[9] == f[10] == 1.0 and f[-1] == pytest.approx(0.2)
    cosine, wsd = factors.values()
    assert all(a > b for a, b in zip(cosine[10:], cosine[11:]))
    assert cosine[10 + 89 // 2] == pytest.approx(0.6, abs=0.01)     # halfway
    assert wsd[10:80] == 70 * [1.0]                         # then a straight line
    assert np.allclose(np.diff(wsd[79:]), -0.8 / 20)
    s = settings(*flags, "wsd", "--decay-frac", "0.5")
    assert train.lr_factor(49, s) == 1 > train.lr_factor(50, s)
    assert train.parse_args(["--model", "nano", "--steps", "20"]).warmup == 4
    # No jump where warm-up and decay meet
    s = settings(*"--steps 20 --warmup 15 --schedule wsd --decay-frac 0.6".split())
    f = [train.lr_factor(step, s) for step in range(20)]
    assert max(abs(a - b) for a, b in zip(f, f[1:])) < 0.11 and max(f) < 1

def test_train_what_the_optimizer_gets(settings, monkeypatch):
    """The step's learning rate, decay for matrices alone, a clipped gradient."""
    steps, real = [], torch.optim.AdamW.step

    def step(self, closure=None):
        matrices, gains = self.param_groups
        assert {p.dim() for p in gains["params"]} == {1}
        assert (matrices["weight_decay"], gains["weight_decay"]) == (0.3, 0)
        if matrices["lr"]:                              # DCP, too, steps, at 0
            grads = [p.grad.norm() for p in matrices["params"] + gains["params"]]
            norm = torch.stack(grads).norm().item()
            steps.append((matrices["lr"], gains["lr"], norm))
        return real(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    s = settings("--recipe", "bf16", "--weight-decay", "0.3", "--clip", "0.01")
    train.train(s)
    lrs = [s.lr * train.lr_factor(i, s) for i in range(8)]
    assert np.allclose(steps, [(lr, lr, 0.01) for lr in lrs], rtol=1e-3)
    steps.clear()                           # a fork gives a group a rate of its own
    with monkeypatch.context() as m:
        adamw = train.build_optimizer
        def build(*args):
            optimizer = adamw(*args)
            optimizer.param_groups[1]["peak"] *= 10
            return optimizer
        m.setattr(train, "build_optimizer", build)
        train.train(replace(s, overwrite=True))
    assert np.allclose(steps, [(lr, 10 * lr, 0.01) for lr in lrs], rtol=1e-3)

def test_train_validation_is_the_mean_of_evenly_spaced_windows(settings):
    """And of the noise of the layers in the first batch of them."""
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    ids = torch.from_numpy(tokens.astype(np.int64))
    for flags in ["--recipe", "bf16", *MOE, "--grad-accum", "2"], ["--keep-bf16", "1"]:
        s = settings(*flags)
        model = gpt(s, s.recipe)
        line = train.validate(model, tokens, s)
        assert model.training
        first = torch.stack([ids[i:i + 32] for i in (0, 483, 967)])
        nll = [F.cross_entropy(model(row[None])[0], ids[i + 1:i + 33]).item()
               for row, i in zip(first, (0, 483, 967))]
        assert line["val_loss"] == pytest.approx(sum(nll) / 3, rel=1e-4)
        found = ufp4.noise(model, first)
        assert len(found) == (0 if s.experts else 4) and model.training
        for i, name in enumerate(("noise", "slope") if found else ()):
            mean = np.mean([pair[i] for pair in found.values()])
            assert line[name] == pytest.approx(mean)

def test_train_attention_is_causal_and_rope_is_relative(settings):
    model = gpt(settings())
    a = torch.randint(0, 256, (1, 32))
    b = a.clone()
    b[0, 20:] = 0
    x, y = model(a)[0], model(b)[0]
    assert torch.equal(x[:20], y[:20]) and not torch.equal(x[20:], y[20:])
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 1, 40, 16)
    scores = (train.rope(q) @ train.rope(k).mT)[0, 0]
    for d in 0, 3, 11:                                  # depend on the distance alone
        assert scores.diagonal(-d).std() < 1e-4
    assert not torch.allclose(scores[5, 0], scores[0, 0], atol=1e-2)

def test_train_moe_is_the_weighted_sum_of_chosen_experts(settings):
    """Against a loop over tokens; and balancing moves each bias against its load."""
    moe = train.MoE(settings("--experts", "6", "--top-k", "2"), RECIPES["bf16"])
    for p in moe.parameters():
        nn.init.normal_(p, std=0.3)
    moe.bias += torch.randn(6) * 0.1
    x, loads = torch.randn(2, 7, 32), torch.zeros(6)
    expected = moe.shared(x)
    for b, t in np.ndindex(2, 7):
        scores = torch.sigmoid(moe.router.weight @ x[b, t])
        chosen = sorted(range(6), key=lambda e: -(scores + moe.bias)[e].item())[:2]
        for e in chosen:
            gate, up = (moe.fc1.weight[e] @ x[b, t]).chunk(2)
            gain = scores[e] / scores[chosen].sum()
            expected[b, t] += gain * (moe.fc2.weight[e] @ (F.silu(gate) * up))
            loads[e] += 1
    assert torch.allclose(moe(x), expected, atol=1e-5) and torch.equal(moe.load, loads)
    bias, mean = moe.bias.clone(), loads.mean()
    assert moe.balance(1e-3).item() == pytest.approx((loads.max() / mean).item())
    assert torch.allclose(moe.bias - bias, 1e-3 * torch.sign(mean - loads), atol=1e-7)
    assert not moe.load.any()

def test_train_batches_are_random_windows_that_ranks_and_parts_share_out(
        settings, monkeypatch):
    s, sizes = settings("--batch-size", "12"), (400, 97, 330)
    shards = [np.arange(n, dtype=np.uint16) + 1000 * i for i, n in enumerate(sizes)]
    x, y = train.get_batch(shards, s, 3)
    assert torch.equal(y, x + 1) and x.shape == (12, 32)    # targets: the next tokens
    assert torch.equal(x, train.get_batch(shards, s, 3)[0])
    other = settings("--batch-size", "12", "--seed", "1")
    for batch in train.get_batch(shards, s, 4), train.get_batch(shards, other, 3):
        assert not torch.equal(x, batch[0])
    starts = torch.cat([train.get_batch(shards, s, step)[0][:, 0]
                        for step in range(1500)])
    windows = [1000 * i + j for i, n in enumerate(sizes) for j in range(n - 32)]
    assert sorted(set(starts.tolist())) == windows          # each window of each file
    monkeypatch.setattr(train, "WORLD", 3)
    s.grad_accum, rows = 2, []
    for micro_step, rank in np.ndindex(2, 3):
        monkeypatch.setattr(train, "RANK", rank)
        rows.append(train.get_batch(shards, s, 3, micro_step)[0])
    assert torch.equal(torch.cat(rows), x)

def test_train_compiled_blocks_have_the_gradients_of_others(settings, monkeypatch):
    real, grads = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend="aot_eager"))
    tokens = torch.randint(256, (4, 32))
    for more, stance in ([], "force_eager"), (["--compile"], "default"):
        s = settings(*"--recipe e2m1 --sr none --keep-bf16 1".split(), *more)
        model = built(s, train.make_recipe(s))
        with torch.compiler.set_stance(stance):
            model(tokens, tokens).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert len(ufp4.noise(model, tokens)) == 4      # sees into compiled blocks
    assert (grads[0] - grads[1]).norm() < 1e-2 * grads[0].norm()

def test_train_checkpointing_has_the_same_gradients_and_saves_less(settings):
    """Bit for bit, with random bits everywhere: the second forward pass draws them
    again."""
    tokens, grads, sizes = torch.randint(256, (4, 32)), [], []
    for more in [], ["--remat"]:
        s = settings(*"--recipe ufp4 --sr x,w,dy".split(), *MOE, *more)
        model = built(s, train.make_recipe(s))
        torch.manual_seed(3)
        held = []
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t: (held.append(t.numel()), t)[1], lambda t: t):
            loss = model(tokens, tokens)
        sizes.append(sum(held))
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads)) and sizes[1] < sizes[0] / 2

# -- The edit-run loop: repeat, resume, branch, grow --
def test_train_a_second_start_has_a_folder_of_its_own(text, tmp_path, monkeypatch):
    """Also in a sweep, also of processes that start at the same time."""
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--recipe", "bf16", "--data", str(text)]
    for more in [], [], ["--lr", "0.1"], ["--steps", "6"], ["--keep-bf16", "1"]:
        train.main([*flags, *more])
    names = ["nano-bf16-s0", *(f"nano-bf16-s0-{n}" for n in (2, 3, 4)),
             "nano-bf16-keep_bf16.1-s0"]
    names = [name.replace("nano", train.Config().model) for name in names]
    assert {path.name for path in Path("out").iterdir()} == set(names)
    first, again, lr, steps, _ = ("out/" + name for name in names)
    assert records(first) == records(again)
    assert same_weights(weights(first), weights(again))
    one, other = ([line["train_loss"] for line in records(run)[1:]]
                  for run in (first, lr))
    assert one[0] == other[0] and one[1:] != other[1:]
    assert records(steps)[-1]["step"] == 6 and saved(first) == [6, 8]

def test_train_resumed_without_changes_or_with_those_that_are_typed(
        settings, text, tmp_path, monkeypatch, capsys):
    run = tmp_path / "out/run"
    train.train(settings("--recipe", "bf16", "--keep-bf16", "1"))
    start, end = str(train.checkpoints(run)[0]), weights(run)       # of step 6
    before = tree(run)

    def branch(name, *more):
        argv = ["--resume", start, "--out", str(tmp_path / "out" / name), *more]
        train.train(s := train.parse_args(argv))
        assert [line["step"] for line in records(s.out)] == list(range(7, s.steps + 1))
        assert s.keep_bf16 == 1
        return weights(s.out)

    assert same_weights(branch("same"), end)
    for name, *more in (("e2m1", "--recipe", "e2m1", "--rht", "none"),
                        ("longer", "--steps", "10"), ("lr", "--lr", "0.5"),
                        ("batch", "--batch-size", "8"), ("wsd", "--schedule", "wsd")):
        assert not same_weights(branch(name, *more), end), name
    assert tree(run) == before                          # a branch leaves it alone
    assert records(tmp_path / "out/batch")[-1]["tokens"] == (6 * 4 + 2 * 8) * 32
    train.main(["--resume", str(tmp_path / "out/same")])            # stays a branch
    assert train.read_log(tmp_path / "out/same/log.jsonl")[0]["start"] == 6
    # A short number, without --out: later steps are not lost
    train.main(["--resume", str(run / "ckpt-6")])
    assert same_weights(weights(tmp_path / "out/run-2"), end) and tree(run) == before
    # In its own folder, longer, at another rate. The next start keeps to that
    capsys.readouterr()
    train.main(["--resume", str(run), "--steps", "12", "--lr", "0.01"])
    assert "changed: lr is 0.01, and was 0.003" in capsys.readouterr().out
    headers = [json.loads(line) for line in open(run / "log.jsonl")
               if line.startswith('{"settings"')]
    assert headers[1]["changed"] == {"steps": [8, 12], "lr": [0.003, 0.01]}
    assert [line["step"] for line in records(run)] == list(range(13))
    s = train.parse_args(["--resume", str(run)])
    assert (s.steps, s.lr, s.resume) == (12, 0.01, str(run))
    # Back to a checkpoint in the same folder: only if told to delete those after it
    train.main(["--resume", str(run / "ckpt-10"), "--out", str(run), "--overwrite",
                "--steps", "11"])
    assert saved(run) == [10, 11] and records(run)[-1]["step"] == 11
    # Another recipe comes without what flags had changed in the old one
    start = str(tmp_path / "out/e2m1")
    assert train.parse_args(["--resume", start]).rht == "none"
    assert train.parse_args(["--resume", start, "--recipe", "ufp4"]).rht is None

def test_train_data_is_found_again(settings, text, tmp_path, monkeypatch):
    """By a relative path from another folder, and if the file was renamed or edited or
    prepared by another Python: the tokens are there."""
    monkeypatch.chdir(text.parent)
    s = settings("--recipe", "bf16", "--data", text.name)
    train.train(s)
    monkeypatch.chdir(HERE)
    steps = itertools.count(9)
    def longer(*more):
        argv = ["--resume", s.out, "--steps", str(next(steps)), *more]
        train.train(train.parse_args(argv))
        return train.read_log(Path(s.out) / "log.jsonl")[0]
    assert longer()["changed"].keys() == {"steps"}
    text.write_text(text.read_text().upper())
    assert longer()["changed"].keys() == {"steps"}
    other = text.rename(tmp_path / "other.txt")
    assert longer()["changed"].keys() == {"steps"}
    header = longer("--data", str(other))               # typed: the edited text
    assert header["changed"].keys() == {"steps", "data", "data_version"}
    shutil.rmtree(tmp_path / "data")
    other.unlink()
    error = refused("--resume", s.out, "--steps", "20")
    assert f"no data set or file is called '{other}'" in error
    # "python" is a folder for each version of Python
    s = settings("--recipe", "bf16", "--data", "python", "--out", str(tmp_path / "py"))
    prepare.write_tokens(tmp_path / "data/python-3.11.9/train.bin", [7] * 99, 256)
    prepare.write_tokens(tmp_path / "data/python-3.11.9/val.bin", [8] * 99, 256)
    with monkeypatch.context() as m:
        m.setattr(prepare.platform, "python_version", lambda: "3.11.9")
        train.train(s)
    monkeypatch.setattr(prepare.platform, "python_version", lambda: "3.11.7")
    assert longer()["changed"].keys() == {"steps"}
    assert not (tmp_path / "data/python-3.11.7").exists()

def test_train_init_takes_the_weights_alone(settings, text, tmp_path, monkeypatch):
    train.train(old := settings("--recipe", "bf16", *MOE, "--steps", "4"))
    exported, other = tmp_path / "model.pt", tmp_path / "other.txt"
    train.main(["--resume", old.out, "--export", str(exported)])
    other.write_text("another text " * 500)
    argv = ["--seq-len", "16", "--batch-size", "4", "--steps", "3", "--log-interval",
            "1", "--dtype", "float32", "--device", "cpu", "--data", str(other)]
    for i, path in enumerate((old.out, str(exported))):
        out = tmp_path / f"out/init-{i}"
        s = train.parse_args(["--init", path, "--out", str(out), *argv])
        assert (s.dim, s.experts, s.top_k, s.heads, s.lr) == (32, 3, 2, 2, 0.003)
        assert (s.recipe, s.steps, s.warmup) == ("ufp4", 3, 0)
        with torch.compiler.set_stance("force_eager"):
            train.train(s)
        header, first, *lines = train.read_log(out / "log.jsonl")
        assert header["start"] == 0 and [line["step"] for line in lines] == [1, 2, 3]
        model = train.load(old.out)
        tokens = torch.from_numpy(prepare.read_tokens(
            next(tmp_path.glob("data/other-*/val.bin"))).astype(np.int64))
        starts = np.linspace(0, len(tokens) - 17, 128).astype(int)
        rows = torch.stack([tokens[i:i + 17] for i in starts])
        config = replace(model.config, recipe="ufp4")
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            quantized = built(config, train.make_recipe(config))
            quantized.load_state_dict(model.state_dict())
            loss = quantized.eval()(rows[:, :-1], rows[:, 1:]).item()
        assert first["step"] == 0 and first["val_loss"] == pytest.approx(loss, rel=1e-3)
    assert records(tmp_path / "out/init-0") == records(tmp_path / "out/init-1")

def test_train_a_trained_model_is_loaded_and_exported(settings, tmp_path, monkeypatch):
    """Its loss is what the run has logged."""
    s = settings("--recipe", "bf16", "--steps", "4", *MOE)
    loss = train.train(s)
    file = tmp_path / "model.pt"
    train.export(s.out, file)
    (val,) = (tmp_path / "data").rglob("val.bin")
    for path in s.out, train.checkpoints(s.out)[-1], f"{s.out}/ckpt-4", file, str(file):
        model = train.load(path)
        assert not model.training and next(model.parameters()).device.type == "cpu"
        found = train.validate(model, prepare.read_tokens(val), model.config)
        assert found["val_loss"] == loss and model.config.experts == 3
    whole = torch.load(file, weights_only=True)
    assert whole["step"] == 4 and whole["settings"]["dim"] == 32
    monkeypatch.setattr(train, "WORLD", 2)
    with pytest.raises(train.UserError, match="--export is for one process"):
        train.export(s.out, "x.pt")

def test_train_a_checkpoint_of_another_optimizer_is_not_called_damaged(
        settings, tmp_path, monkeypatch):
    def sgd(model, config):
        return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)

    train.train(s := settings("--recipe", "bf16"))
    monkeypatch.setattr(train, "build_optimizer", sgd)
    again = train.parse_args(["--resume", s.out, "--steps", "9", "--out",
                              str(tmp_path / "sgd")])
    with pytest.raises(ValueError, match="Missing key.*momentum.*another optimizer"):
        train.train(again)

@pytest.mark.parametrize("flags,kept", [
    ("--keep 1", [8]), ("--keep 3", [4, 6, 8]), ("--keep 0", [2, 4, 6, 8]),
    ("--keep 1 --save-at 3,5", [3, 5, 8])])
def test_train_keeps_the_last_checkpoints_and_those_of_named_steps(
        settings, flags, kept):
    train.train(s := settings("--recipe", "bf16", *flags.split()))
    assert [path.name for path in train.checkpoints(s.out)] == [
        f"ckpt-{step:07d}" for step in kept]

@pytest.mark.parametrize("name,processes,wanted", [
    ("medium", 8, 124e6), ("dense-1.5b", 128, 1.5e9), ("moe-7.9b", 128, 7.9e9),
    ("moe-124b", 128, 124e9)])
def test_train_models_and_what_they_need(name, processes, wanted):
    """By --dry-run, without memory: in a process that may not have more than 2 GB."""
    code = (f"import resource, train\n"
            f"train.main('--model {name} --dry-run {processes}'.split())\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    said = python("-c", code).stdout
    assert int(said.split()[-1]) < 2e6                      # KB
    total = re.search(r"([\d,.]+)M parameters", said)[1].replace(",", "")
    assert float(total) * 1e6 == pytest.approx(wanted, rel=0.01)
    s = train.parse_args(["--model", name])
    assert f"{s.steps * s.batch_size * s.seq_len:,} in all" in said
    lines = re.findall(r"^    (.*?)  +([\d.]+)$", said, re.M)
    sizes = [float(size) for _, size in lines]
    assert len(sizes) == 9 and sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.01)
    assert lines[0][0] == "weights"
    assert sizes[0] == pytest.approx(4 * wanted / processes / 1e9, rel=0.3)

def test_train_remat_needs_fewer_copies_of_weights(capsys):
    for more in "", "--remat":
        train.main(f"--model moe-7.9b --recipe bf16 --dry-run 64 {more}".split())
    copies = re.findall(r"BF16 copies of weights +([\d.]+)", capsys.readouterr().out)
    all_of_them, less = map(float, copies)
    assert 15 < all_of_them < 17 and less < 2       # GB: two bytes a parameter

@pytest.mark.parametrize("flags", ["", "--dtype bfloat16", "--remat",
                                   "--experts 8 --top-k 3 --hidden 64",
                                   "--experts 8 --top-k 3 --hidden 64 --recipe ufp4"])
def test_train_the_rule_for_activations_is_what_autograd_saves(settings, flags):
    """Within an eighth: beside them there are gains, angles, casts of weights."""
    sizes = "--recipe bf16 --dim 64 --hidden 160 --layers 3 --seq-len 256"
    s = settings(*sizes.split(), *flags.split())
    model = built(s, train.make_recipe(s))
    mine, held = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in mine:
            held[t.untyped_storage().data_ptr()] = t, t.untyped_storage().nbytes()
        return t
    tokens = torch.randint(256, (s.batch_size, s.seq_len))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(tokens, tokens)
    found = sum(size for _, size in held.values()) / tokens.numel()
    rule = train.activation_bytes(s, 256) - 4 * 256         # the gradient of logits
    if s.remat:         # the block at work is gone when the forward pass has ended
        rule -= train.activation_bytes(replace(s, remat=False, layers=1), 256)
        rule += 12 * 64 + 8 * 256
    assert found == pytest.approx(rule, rel=0.125)

# -- What goes wrong --
def test_train_a_damaged_file_is_named(settings, tmp_path, capsys):
    """And the newest checkpoint lost, the run goes on from the one before. While it is
    another process's, it is refused."""
    s = settings("--recipe", "bf16")
    train.train(s)
    newer, resume = train.checkpoints(s.out)[-1], ["--resume", s.out]
    code = ("import fcntl; lock = open('lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX); "
            "input('locked\\n')")
    other = subprocess.Popen([sys.executable, "-c", code], cwd=s.out,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"locked\n"
    assert "another process trains in" in refused(*resume)
    assert "another process trains in" in refused(
        *TINY, "--data", s.data, "--out", s.out, "--overwrite")
    other.communicate(b"\n")                        # its lock ends with it
    data, metadata, run = (newer / name for name in ("__0_0.distcp", ".metadata",
                                                     "run.json"))
    log, val = Path(s.out) / "log.jsonl", next((tmp_path / "data").rglob("val.bin"))
    for path, content, why in (
            (data, data.read_bytes()[:1000], f"can't load {newer}: .*damaged"),
            (metadata, b"", f"can't load {newer}: .*damaged"),
            (run, b"{", f"can't read the settings in {newer}"),
            (run, run.read_bytes().replace(b'"lr": 0.003', b'"lr": "high"'),
             "--lr is 'high', which is no float"),
            (val, b"", f"{val} is damaged")):
        whole = path.read_bytes()
        path.write_bytes(content)
        assert re.search(why, said(capsys, 1, train.main, resume))
        path.write_bytes(whole)
    for content in b"", b"\xff", b'{"step": 1}\n', b"12\n", b"[]\n":
        path = tmp_path / "log.jsonl"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            train.read_log(path)
    # The settings are in the checkpoint: the log may be lost, or have lines like these
    val.unlink()                                    # it is made again
    metadata.unlink()                               # as if killed in the midst of it
    log.write_bytes(b'12\n"text"\n' + log.read_bytes())
    train.train(train.parse_args(resume))
    assert saved(s.out) == [6, 8] and records(s.out)[-1]["step"] == 8
    log.unlink()
    train.train(train.parse_args([*resume, "--steps", "9"]))
    assert [line["step"] for line in records(s.out)] == [8, 9]

def test_train_a_full_disk_leaves_no_half_checkpoint(text, tmp_path):
    """Here files may not be larger than 20 kB, which a checkpoint is."""
    flags = [*TINY, "--recipe", "bf16", "--data", str(text), "--out", "run"]
    limit = """
import resource
train.prepare.prepare(flags[flags.index("--data") + 1])
def limit(*_):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
when(train, "save", COUNT, limit)
train.main(flags)"""
    code, error = run_train(flags, limit.replace("COUNT", "1"), tmp_path)
    assert code == 1 and "can't save run/ckpt-0000002: " in error, error
    assert "MB are free there); nothing is saved" in error
    assert not list((tmp_path / "run").glob("ckpt-*"))
    code, error = run_train([*flags, "--overwrite"],
                            limit.replace("COUNT", "3"), tmp_path)
    assert code == 1 and "step 4 is saved; to go on: python train.py --resume" in error
    left = sorted(path.name for path in (tmp_path / "run").glob("ckpt-*"))
    assert left == ["ckpt-0000002", "ckpt-0000004"]

# -- Signals --
@pytest.fixture
def in_a_terminal():
    """Signals as there, also if nohup or a script's & have the tests ignore some."""
    defaults = {signal.SIGINT: signal.default_int_handler,
                signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, of) for number, of in defaults.items()}
    yield
    for number, of in before.items():
        signal.signal(number, of)

@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_train_a_signal_stops_one_run_and_not_the_next(settings, monkeypatch, name,
                                                       in_a_terminal):
    """Sent to the process in step 2 (counted from 0)."""
    number, answers = getattr(signal, name), []
    real, before = train.lr_factor, signal.getsignal(number)
    s = settings("--recipe", "bf16")

    def lr_factor(step, s):
        if step == 2:
            os.kill(os.getpid(), number)
        return real(step, s)

    with monkeypatch.context() as m:
        m.setattr(train, "lr_factor", lr_factor)
        m.setattr(train, "say", answers.append)
        with pytest.raises(KeyboardInterrupt) as stopped:
            train.train(s)
    assert sum(f"{name}: stopping after this step" in text for text in answers) == 1
    error = str(stopped.value)
    assert f"step 3 is saved; to go on: python train.py --resume {s.out}" in error
    assert signal.getsignal(number) == before and saved(s.out) == [2, 3]
    train.train(train.parse_args(["--resume", s.out]))
    assert records(s.out)[-1]["step"] == 8

def test_train_started_without_ctrl_c_it_ends_by_itself(text):
    """As a shell script starts a program with &: SIGINT is ignored from the start."""
    run = subprocess.Popen(
        [sys.executable, "train.py", "--dry-run", "--data", str(text)], cwd=HERE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    while run.poll() is None:
        run.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert run.returncode == 0

def test_train_a_folder_of_tokens_that_cant_be_made_is_an_error(
        settings, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "file")
    assert "can't make the tokens of python: " in refused("--data", "python")

def test_train_a_signal_while_it_validates_stops_it_after_the_next_step(
        settings, monkeypatch):
    s, real = settings("--recipe", "bf16"), train.validate
    s.out, whole = s.out + "-stopped", settings("--recipe", "bf16")
    train.train(whole)
    def validate(*args):
        if len(records(s.out)) == 5:                    # that of step 4
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with monkeypatch.context() as m:
        m.setattr(train, "validate", validate)
        with pytest.raises(KeyboardInterrupt, match="step 5 is saved"):
            train.train(s)
    train.train(train.parse_args(["--resume", s.out]))
    assert records(s.out) == records(whole.out)

def test_train_a_terminal_that_closes_stops_the_run_and_saves_it(text, tmp_path,
                                                                 in_a_terminal):
    """Its SIGHUP comes when nothing can be printed any more."""
    flags = [*TINY, *"--steps 100000 --save-interval 100000 --recipe bf16".split()]
    pid, terminal = os.forkpty()
    if not pid:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, str(HERE / "train.py"), *flags,
                                  "--data", str(text), "--out", "run"])
    log = tmp_path / "run/log.jsonl"
    while not log.exists() or "tokens_per_s" not in log.read_text():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.1)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert records(tmp_path / "run")[-1]["step"] == saved(tmp_path / "run")[0] > 0

def test_train_a_second_ctrl_c_ends_the_process_at_once(text, tmp_path, in_a_terminal):
    """Though its main thread waits. nohup's SIGHUP stays ignored."""
    flags = [*TINY, "--recipe", "bf16", "--data", str(text), "--out", "run"]
    wait = """
import time
def wait(*_):
    print("waits", flush=True)
    time.sleep(100)
train.signal.signal(train.signal.SIGHUP, train.signal.SIG_IGN)
when(train, "get_batch", 4, wait)
train.main(flags)"""
    (tmp_path / "run.py").write_text(f"{CHANGED}\nflags = {flags}\n{wait}")
    run = subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path, text=True,
                           env=os.environ | {"PYTHONPATH": str(HERE)},
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    def until(text):
        for line in run.stdout:
            if text in line:
                return line
        raise AssertionError(f"{text} was not said")
    until("waits")
    run.send_signal(signal.SIGHUP)
    run.send_signal(signal.SIGINT)
    assert "again to stop now" in until("SIG")          # and no word about SIGHUP
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == -signal.SIGINT
    assert saved(tmp_path / "run") == [2]

def test_train_a_reader_that_has_ended_keeps_no_run_from_saving(text, tmp_path):
    """Such as `python train.py 2>&1 | head -1`."""
    flags = [*TINY, "--recipe", "bf16", "--data", str(text), "--out", "run"]
    command = shlex.join([sys.executable, str(HERE / "train.py"), *flags])
    subprocess.run(f"{command} 2>&1 | head -1", shell=True, cwd=tmp_path, check=True,
                   capture_output=True)
    assert saved(tmp_path / "run") == [6, 8]

def test_train_a_file_of_ones_own_adds_a_recipe(settings, tmp_path, monkeypatch):
    """A process that goes on has it, too. Its name may be that of a module."""
    monkeypatch.setattr(ufp4, "RECIPES", dict(RECIPES))
    (tmp_path / "random.py").write_text(
        "import ufp4\n"
        "class Mine(ufp4.Recipe):\n"
        "    def __init__(self, mark):\n"
        "        super().__init__('mine', rht=ufp4.GEMMS)\n"
        "        self.mark = mark\n"
        "ufp4.RECIPES['mine'] = Mine(7)\n")
    s = settings("--with", str(tmp_path / "random.py"), "--recipe", "mine", "--rht",
                 "wgrad", "--seed", "3")
    made = train.make_recipe(s)
    assert (made.mark, made.rht, made.signs) == (7, ("wgrad",), random_signs(3))
    assert RECIPES["ufp4"].rht == ufp4.RECIPES["mine"].rht == GEMMS
    train.train(s)
    assert "recipe mine" in python("train.py", "--resume", s.out).stdout
    ufp4.RECIPES.pop("mine")                # a notebook gets it with the model
    assert train.load(s.out).blocks[0].attn.qkv.recipe.mark == 7

@pytest.mark.parametrize("where,interval", [("loss", "1"), ("gradient", "100")])
def test_train_what_is_not_finite_stops_the_run_before_it_is_saved(
        settings, monkeypatch, capsys, where, interval):
    """Though later numbers are finite, and however seldom the log looks."""
    real, passes = train.GPT.forward, []

    def forward(self, tokens, targets=None):
        passes.append(self.training)
        loss = real(self, tokens, targets)
        if sum(passes) == 5 and self.training and where == "gradient":
            loss.register_hook(lambda grad: grad * INF)
        return loss * NAN if sum(passes) == 5 and where == "loss" else loss

    s = settings("--recipe", "bf16", "--log-interval", interval, "--lr", "0",
                 "--save-interval", "4", "--eval-interval", "6")
    monkeypatch.setattr(train.GPT, "forward", forward)
    monkeypatch.setattr(train, "parse_args", lambda argv: s)
    error = said(capsys, 3, train.main, [])
    step = 5 if where == "loss" else 6          # 6: where the loss is read next
    assert f"step {step}: train_loss nan" in error
    assert "--resume would repeat" in error
    *_, before, last = records(s.out)
    assert saved(s.out) == [4] and before["step"] == 4
    assert last["step"] == step and "train_loss nan" in last["diverged"]

def test_train_prompt_only_continues_a_text_even_when_the_data_is_gone(
        settings, text, tmp_path, capsys):
    s = settings("--steps", "4", "--max-new-tokens", "9", *MOE)
    train.train(s)
    files, printed = tree(Path(s.out)), set()
    text.unlink()
    shutil.rmtree(tmp_path / "data")
    for path in s.out, str(train.checkpoints(s.out)[-1]):
        capsys.readouterr()
        train.main(["--resume", path, "--prompt", "def "])
        printed.add(capsys.readouterr().out)
    (printed,) = printed
    assert printed.startswith("def ") and len(printed.strip()) > 4
    assert files == tree(Path(s.out))

@pytest.mark.parametrize("more", [["--compile"], ["--remat"]])
def test_train_a_copy_of_a_model_runs_its_own_weights(settings, more, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(train, "compiled", lambda f: real(f, backend="eager"))
    s = settings("--recipe", "bf16", *more)
    model = built(s, train.make_recipe(s))
    tokens, twin = torch.randint(256, (1, 32)), copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
        assert not twin(tokens).any() and model(tokens).any()

def test_train_flags_of_a_run_that_goes_on(settings):
    """--save-at keeps what an earlier one kept. Under another recipe --rht is none."""
    s = settings("--recipe", "ufp4", "--rht", "wgrad", "--keep", "1", "--save-at", "3")
    train.train(s)
    for more, wanted in (({}, ("ufp4", ("wgrad",))),
                         ({"recipe": "e2m1-full-rht"}, ("e2m1-full-rht", GEMMS))):
        used = train.load(s.out, **more).modules()
        assert {(m.recipe.name, m.recipe.rht) for m in used
                if isinstance(m, ufp4.Linear)} == {wanted}
    train.main(["--resume", s.out, "--steps", "12", "--save-at", "10"])
    assert saved(s.out) == [3, 10, 12]
    again = train.parse_args(["--resume", s.out, "--save-at", "10"])
    assert again.save_at == "3,10"                  # the same command changes nothing

def test_train_a_run_goes_on_elsewhere_than_on_its_gpu(settings, capsys, monkeypatch):
    """Torch's own choice is not tried: several processes would do so on one GPU."""
    train.train(s := settings("--steps", "4"))
    with monkeypatch.context() as m:
        m.setattr(train.Config, "device", "cpu")
        m.setattr(train, "has_device", None)
        train.parse_args(["--resume", s.out])
    run = train.checkpoints(s.out)[-1] / "run.json"
    run.write_text(run.read_text().replace('"device": "cpu"', '"device": "warp"'))
    train.main(["--resume", s.out, "--prompt", "x"])
    assert "the run was on warp, which is not here" in capsys.readouterr().out
    # The type of products follows the device
    monkeypatch.setattr(train, "hardware", lambda device: ("a CPU", True))
    assert s.dtype == "float32"
    assert train.parse_args(["--resume", s.out]).dtype == "bfloat16"

def test_train_a_fork_may_replace_a_part_by_a_function_or_a_subclass(
        settings, monkeypatch):
    class Zero(train.Block):
        def compute(self, x):
            return 0 * x

    s = settings("--steps", "2", "--recipe", "bf16", *MOE)
    assert not Zero(s, RECIPES["bf16"])(randn(1, 4, 32)).any()
    moe = train.MoE
    monkeypatch.setattr(train, "MoE", lambda *args: moe(*args))
    train.train(s)
    assert "max_load" in records(s.out)[-2] | records(s.out)[-1]

def test_train_any_number_of_processes_has_windows_to_validate(monkeypatch):
    for processes, windows in (1, 128), (3, 129), (8, 128), (200, 200):
        monkeypatch.setattr(train, "WORLD", processes)
        s = train.Config(grad_accum=1, batch_size=1200)
        assert s.eval_windows == windows

def test_train_a_folder_is_locked_in_one_process_too(settings):
    train.train(s := settings("--recipe", "bf16"))
    locks = []
    train.lock_folder(Path(s.out), locks)
    for _ in range(2):
        assert "another process trains in" in refused("--resume", s.out, "--steps", "9")
    # Its older checkpoints may be branched from meanwhile
    train.main(["--resume", str(train.checkpoints(s.out)[0])])
    assert saved(s.out + "-2") == [8]
    locks.pop().close()
    train.main(["--resume", s.out, "--steps", "9"])

def test_train_main_returns_the_loss_and_quotes_what_a_shell_needs(
        settings, text, tmp_path, capsys):
    out = str(tmp_path / "a run")
    loss = train.main([*TINY, "--recipe", "bf16", "--data", str(text), "--out", out])
    assert loss == records(out)[-1]["val_loss"]
    assert f"--resume '{out}' --prompt" in capsys.readouterr().out
    train.main(["--resume", out, "--out", out + " of no steps", "--recipe", "e2m1"])
    assert "--prompt" not in capsys.readouterr().out        # it saves nothing
    error = said(capsys, 1, train.main,
                 ["--resume", out, "--export", str(tmp_path / "no/x.pt")])
    assert "can't write" in error and not (tmp_path / "no").exists()

def test_train_an_edited_or_lost_file_of_ones_own_is_noticed(
        settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ufp4, "RECIPES", dict(RECIPES))
    mine = tmp_path / "mine.py"
    mine.write_text("import ufp4\nufp4.RECIPES['mine'] = ufp4.Recipe('mine')\n")
    train.train(s := settings("--with", str(mine), "--recipe", "mine"))
    mine.write_text(mine.read_text() + "# edited\n")
    with pytest.warns(UserWarning, match="mine.py is not as it was"):
        train.load(s.out)
    train.main(["--resume", s.out, "--steps", "9"])
    assert f"changed: {mine} is not as it was" in capsys.readouterr().out
    mine.unlink()
    assert "there is no file" in refused("--resume", s.out, "--steps", "10")
    with pytest.warns(UserWarning, match="mine.py is gone, so .* without it"):
        assert train.load(s.out, recipe="bf16").config.recipe == "bf16"

def test_train_readmes_file_replaces_what_it_says(settings, text, tmp_path):
    """Muon for matrices, attention in BF16, and an end in BF16: it trains, goes on from
    its checkpoint, and a notebook generates with it."""
    examples = README.split("## Beyond recipes")[1].split("```python")[1:]
    code, notebook = (part.split("```")[0] for part in examples)
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "run.py").write_text("""
import sys, train, torch, ufp4
train.prepare.ROOT = train.Path("data").resolve()
train.main(sys.argv[1:])
model = train.load("out/nano-ufp4-s0")
print([type(group).__name__ for group in train.build_optimizer(
    model, model.config)])
for name, m in model.named_modules():
    if hasattr(m, "recipe"):
        print(name, m.recipe.name)
""" + notebook)
    flags = [*TINY, "--data", str(text), "--out", "out/nano-ufp4-s0", "--with",
             str(tmp_path / "mine.py"), "--max-new-tokens", "5"]
    for more in flags, ["--resume", "out/nano-ufp4-s0", "--steps", "12"]:
        said = python("run.py", *more, cwd=tmp_path).stdout
    for what in ("['Muon', 'AdamW']", "def ", "blocks.0.attn.qkv bf16",
                 "blocks.0.mlp.fc1 ufp4"):
        assert what in said
    logged = {line["step"]: line for line in records(tmp_path / "out/nano-ufp4-s0")}
    noisy = [step for step in (0, 4, 8, 12) if "noise" in logged[step]]
    assert noisy == [0, 4, 8]           # 12 is in BF16, as 8 was, while it was the end

def test_train_errors_of_ones_own_code_have_a_traceback(settings, monkeypatch):
    s = settings("--recipe", "bf16")
    monkeypatch.setattr(train, "parse_args", lambda argv: s)
    monkeypatch.setattr(train, "build_model", lambda *_: [].remove(7))
    with pytest.raises(ValueError, match="not in list"):
        train.main([])

def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

@pytest.mark.parametrize("flags,message", [
    ("--recipe fp4", "unknown recipe 'fp4': choose from bf16, ufp4"),
    ("--steps 0", "--steps must be above 0, not 0"),
    ("--clip -1", "--clip must be at least 0"),
    ("--recipe bf16 --fmt e2m1", "--fmt has no effect: bf16 quantizes nothing"),
    ("--keep-bf16 2", "--keep-bf16 2 leaves no block to quantize"),
    ("--lr nan", "--lr must be at least 0, not nan"),
    ("--block 0", "--block must be above 0, not 0"),
    ("--schedule step", "--schedule must be cosine or wsd, not step"),
    ("--decay-frac 0", "--decay-frac must be above 0 and at most 1, not 0.0"),
    ("--prompt x", "--prompt needs --resume with a run or a checkpoint"),
    ("--export x.pt", "--export needs --resume"),
    ("--resume none-such", "there is no checkpoint in none-such"),
    ("--init none-such", "there is no checkpoint in none-such"),
    ("--sr none,dy", "--sr must be all, none or some of x,w,dy, not none,dy"),
    ("--save-at 3;5", "--save-at takes steps, such as 500,900, not '3;5'"),
    ("--out=", "--out needs a name"),
    ("--dry-run --data typo.txt", "no data set or file is called 'typo.txt'"),
    ("--dry-run 3 --batch-size 10 --grad-accum 0", "10 must be a multiple of 3 proc"),
    ("--with none-such.py", "none-such.py"),
    ("--with README.md", "README.md is not a Python file"),
    ("--batch-size 6 --grad-accum 4", "--batch-size 6 must be a multiple of 1"),
    ("--device warp", "--device warp: "),
    ("--experts 2 --top-k 1 --compile --dtype float32", "needs --dtype bfloat16"),
    ("--rht forward", "--rht must be all, none or some of fprop,dgrad,wgrad, not for"),
    ("--data nothing.txt", "no data set or file is called 'nothing.txt'"),
    ("--seq-len 20000", "too few for a sequence")])
def test_train_bad_input_is_one_clear_sentence(text, capsys, tmp_path, flags, message):
    argv = [*TINY, *f"--data {text} --out {tmp_path}/run {flags}".split()]
    error = said(capsys, 1, train.main, argv)
    assert error.startswith("train.py: ") and message in error
    assert "\n" not in error and not (tmp_path / "run").exists()

def test_train_what_does_not_fit_a_run_is_refused_and_changes_nothing(
        settings, tmp_path, capsys):
    train.train(s := settings("--recipe", "bf16"))
    (tmp_path / "no.pt").write_text("no model")
    torch.save({"model": {}}, tmp_path / "other.pt")
    (tmp_path / "zero.txt").touch()
    (tmp_path / "empty").mkdir()
    before = tree(tmp_path)
    for flags, why in (
            ("--resume RUN --steps 7", "RUN/ckpt-0000008 is at step 8, "
             "beyond --steps 7"),
            ("--resume RUN --dim 64", "--dim 64: RUN/ckpt-0000008 has"),
            ("--resume RUN --layers 1", "--layers 1: RUN/ckpt-0000008 has"),
            ("--resume RUN --heads 4", "--heads 4: RUN/ckpt-0000008 has"),
            ("--resume RUN --experts 3 --top-k 2", "--experts 3: RUN/ckpt-0000008 has"),
            ("--resume RUN --data fineweb", "has a vocabulary of 50257, and"),
            ("--resume RUN/ckpt-6 --out RUN", "RUN holds a run: --resume RUN goes on"),
            ("--resume RUN/ckpt-7", "there is no checkpoint in RUN/ckpt-0000007; "
             "RUN has ckpt-0000006, ckpt-0000008"),
            ("--init RUN --dim 64", "--dim 64: RUN/ckpt-0000008 has"),
            ("--init RUN --data fineweb", "has a vocabulary of 50257, and"),
            ("--init RUN --resume RUN", "give one of them"),
            ("--init TMP/no.pt", "can't read the settings in TMP/no.pt"),
            ("--init TMP/other.pt", "--export did not write it"),
            ("--overwrite --data TMP/zero.txt", "--overwrite needs --out"),
            ("--out TMP/new --data TMP/empty", "has no token files"),
            ("--out TMP/new --data TMP/zero.txt", "is empty")):
        flags, why = (of.replace("RUN", s.out).replace("TMP", str(tmp_path))
                      for of in (flags, why))
        assert why in said(capsys, 1, train.main, flags.split())
    assert tree(tmp_path) == before and not (tmp_path / "new").exists()

def test_train_imports_what_stands_beside_it(tmp_path):
    """Not packages of the same names that come first on the path."""
    for name in "data", "ufp4", "kernels":
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('foreign')")
    for code in ("import runpy; runpy.run_path('{}/train.py')",
                 "import runpy; runpy.run_path('{}/bench.py')",
                 "import sys; sys.path.append('{}'); import train, ufp4; ufp4.linear"):
        python("-c", code.format(HERE), cwd=tmp_path, path=tmp_path)

def test_train_what_a_reader_tripped_over(tmp_path, monkeypatch):
    """A folder called python; an error in a user's own file; a run that goes on with
    other processes."""
    (tmp_path / "python").mkdir()
    monkeypatch.chdir(tmp_path)
    assert train.parse_args(["--data", "python"]).data == "python"
    assert prepare.vocabulary("python") == 256
    mine = tmp_path / "mine.py"
    mine.write_text("int('x')")
    with pytest.raises(ValueError, match="invalid literal"):
        train.main(["--with", str(mine)])
    s = train.parse_args(["--model", "moe-7.9b"])
    assert s.grad_accum == 0 and s.micro_steps == s.batch_size

# ---- train.py in processes of its own ------------------------------------------------
CHANGED = """
import functools, os, sys, train
import torch.distributed.checkpoint.filesystem as fs
train.torch.compiler.set_stance("force_eager")
train.prepare.ROOT = train.Path("data").resolve()
def when(module, name, count, before):
    real, calls = getattr(module, name), []
    def changed(*args, **kwargs):
        calls.append(1)
        if count in (len(calls), None):
            before(*args, **kwargs)
        return real(*args, **kwargs)
    setattr(module, name, changed)
def kill(*_, **__):
    os.kill(os.getpid(), 9)
def kill_one(*_, **__):
    if train.RANK == 1:
        kill()
def kill_in_line(config, line):
    open(config.out + "/log.jsonl", "a").write(train.json.dumps(line)[:17])
    kill()
def note_seed(*_):
    print(train.torch.initial_seed(), file=open(f"seeds-{train.RANK}", "a"))
def stop_one(step, config):
    if step == 4 and train.RANK == 1:
        for _ in range(2):      # once by a cluster, and once by torchrun
            os.kill(os.getpid(), train.signal.SIGTERM)
"""
# In the midst of a save before its data, of a line of the log, of a step, of
# validating, of a save after its data, of deleting an old checkpoint
KILLS = """
for moment in ((fs.FileSystemWriter, "write_data", 1, kill),
               (train, "log", 4, kill_in_line),
               (train.torch.optim.AdamW, "step", 3, kill), (train, "validate", 2, kill),
               (fs.FileSystemWriter, "finish", 1, kill),
               (train.shutil, "rmtree", 2, kill)):
    if not os.fork():
        when(*moment)
        sys.exit(train.main(flags))
    assert os.wait()[1] == 9, moment
    if train.checkpoints("killed"):     # the first dies before there is one: once more
        flags = ["--resume", "killed"]
"""

def run_train(flags, code, tmp_path, *torchrun):
    """Code that calls train.py, changed, in one process or, with torchrun, in several
    -> (exit code, what it says)."""
    (tmp_path / "run.py").write_text(f"{CHANGED}\nflags = {flags}\n{code}")
    env = os.environ | {"PYTHONPATH": str(HERE), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *torchrun, "run.py"], cwd=tmp_path, env=env,
                          text=True, capture_output=True, timeout=300)
    return done.returncode, done.stderr

def test_train_killed_and_resumed_ends_with_the_same_weights(settings, text, tmp_path):
    """kill -9 at six moments of one run, each time resumed by the folder alone. With
    random bits everywhere, bit for bit, however seldom the run looks at itself."""
    flags = [*TINY, *MOE, "--data", str(text),
             *"--steps 14 --rht fprop --sr x,w,dy".split()]
    whole, out = settings(*flags, "--out", str(tmp_path / "whole")), tmp_path / "killed"
    loss = train.train(whole)
    code, error = run_train([*flags, "--out", "killed", "--overwrite"], KILLS, tmp_path)
    assert code == 0, error
    out = out.rename(tmp_path / "moved")
    for _ in range(2):                      # the second time it only validates
        assert train.train(train.parse_args(["--resume", str(out)])) == loss
    assert same_weights(weights(out), weights(whole.out)) and saved(out) == [12, 14]
    assert records(out) == records(whole.out)
    starts = [json.loads(line)["start"] for line in open(out / "log.jsonl")
              if line.startswith('{"settings"')]
    assert starts[0] == 0 and starts == sorted(starts) and len(set(starts)) > 3
    assert all(len(line) > 17 for line in open(out / "log.jsonl"))  # half a line is cut
    seldom = "--log-interval 7 --save-interval 14 --eval-interval 14 --out".split()
    train.train(settings(*flags, *seldom, str(tmp_path / "seldom")))
    assert same_weights(weights(tmp_path / "seldom"), weights(whole.out))

def test_train_two_processes_are_one_with_two_parts_also_after_losing_one(
        settings, text, tmp_path):
    """Bit for bit, 3 experts on 2 ranks included: the halves of a batch are multiplied
    and summed alike, whoever computes them. (The gradient's norm is summed in another
    order: no clipping.) When a rank is killed, the other ends too. A signal to one of
    them stops both after the same step. Rank 0 chooses the checkpoint, as others may
    see a shared disk late. One process goes on where two stopped."""
    flags = [*TINY, *MOE, "--data", str(text),
             *"--sr none --clip 0 --log-interval 3 --eval-windows 4".split()]
    one = settings(*flags, "--grad-accum", "2", "--out", str(tmp_path / "one"))
    train.train(one)
    out = tmp_path / "two"
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    code, error = run_train([*flags, "--out", str(out)], """
when(fs.FileSystemWriter, "write_data", 2, kill_one)
train.main(flags)""", tmp_path, *torchrun)
    assert code and "Signal 9" in error and saved(out) == [2], error
    code, error = run_train(["--resume", str(out)], """
when(train.nn.utils, "clip_grad_norm_", None, note_seed)
when(train, "lr_factor", None, stop_one)
if train.RANK == 1:                     # it does not see yet what rank 0 has written
    train.checkpoints = lambda folder: []
train.main(flags)""", tmp_path, *torchrun)
    assert code and "train.py: stopped; step 5 is saved; to go on: " in error, error
    assert saved(out) == [4, 5]
    train.train(train.parse_args(["--resume", str(out), "--grad-accum", "2"]))
    assert same_weights(weights(out), weights(one.out))
    two = [line for line in records(out) if line["step"] != 5]  # logged as it was saved
    for a, b in zip(two, records(one.out), strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    seeds = [(tmp_path / f"seeds-{rank}").read_text().split() for rank in (0, 1)]
    assert len({*seeds[0], *seeds[1]}) == len(seeds[0] + seeds[1]) == 6

def test_train_two_processes_start_with_the_values_of_one_and_half_the_memory(
        settings, tmp_path):
    """Of 3 experts and 511 rows one process has more than the other. While a model of
    43M parameters is built, 170 MB, a process grows by less than 3/4 of that."""
    flags = settings(*MOE, "--seed", "4", "--eval-windows", "4")
    (tmp_path / "config.json").write_text(json.dumps(vars(flags)))
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    code, error = run_train([], """
import json, resource
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def build(vocab_size, **changes):
    config = train.Config(**(json.load(open("config.json")) | changes))
    model = train.build_model(config, train.make_recipe(config), vocab_size)
    model.init_weights(config.seed)
    return model
train.dist.init_process_group()
build(511)                                          # gloo has its buffers now
before = peak()
large = build(511, dim=768, hidden=512, heads=8, layers=4, experts=6, top_k=1)
grown, size = peak() - before, 4 * sum(p.numel() for p in large.parameters())
assert size > 150e6 and grown < 0.75 * size, (size, grown)
whole = {name: p.full_tensor() for name, p in build(511).named_parameters()}
if train.RANK == 0:
    train.torch.save(whole, "whole.pt")
del large                               # it holds the process group
train.dist.destroy_process_group()      # or a thread of gloo may outlive its process
""", tmp_path, *torchrun)
    assert code == 0, error
    model = built(flags, train.make_recipe(flags), 511)
    whole = torch.load(tmp_path / "whole.pt")
    assert same_weights(whole, dict(model.named_parameters()))
    w = model.blocks[0].attn.qkv.weight, model.blocks[1].mlp.fc2.weight
    assert [round(p.std().item(), 3) for p in w] == [0.02, 0.01]
    assert not torch.equal(*(block.mlp.fc1.weight for block in model.blocks))

# ---- data/prepare.py -----------------------------------------------------------------
def test_data_own_text_is_bytes_and_follows_its_content(tmp_path):
    path = tmp_path / "my.txt"
    for content in "naïve <|endoftext|> ☃\n".encode() * 50, bytes(range(1, 256)) * 4:
        path.write_bytes(content)
        (first,), val = prepare.prepare(str(path), root=tmp_path)
        tokens = [prepare.read_tokens(p).tolist() for p in (first, val)]
        assert bytes(sum(tokens, [])) == content and 0.8 < len(tokens[0]) / len(content)
        assert prepare.decode(list(content), path) == content.decode(errors="replace")
    assert prepare.encode("naïve ☃", path) == list("naïve ☃".encode())

def test_data_the_default_is_the_standard_library_in_two_disjoint_parts(tmp_path):
    """The same in each call: whole files of the library, each in one of the parts."""
    (a,), b = prepare.prepare(root=tmp_path / "a")
    train_text, val = (prepare.read_tokens(path).astype(np.uint8).tobytes()
                       for path in (a, b))
    prepare.prepare("python", tmp_path / "b")
    first, again = (sorted(tree(tmp_path / name).values()) for name in "ab")
    assert first == again
    assert len(train_text) > 15 * len(val) > 10**6
    files = sorted(Path(os.__file__).parent.glob("[a-h]*.py"))
    parts = [(path.read_bytes() in train_text) + 2 * (path.read_bytes() in val)
             for path in files if path.stat().st_size > 1000]
    assert set(parts) == {1, 2}

def test_data_a_token_file_is_whole_or_named_and_a_missing_one_made_again(tmp_path):
    path, text = tmp_path / "a.bin", tmp_path / "my.txt"
    prepare.write_tokens(path, [1, 2, 50257, 3])
    assert prepare.read_tokens(path).tolist() == [1, 2, 50257, 3]
    whole = path.read_bytes()
    for damaged in whole[:-2], b"\0" + whole[1:], whole[:1000], b"":
        path.write_bytes(damaged)
        # (Only what prepare() has made may be deleted)
        with pytest.raises(ValueError, match="is damaged$|has no header"):
            prepare.read_tokens(path)
    shutil.copy(HERE / "data/prepare.py", tmp_path)     # a command with its own folder
    text.write_text("abc" * 100)
    (train_path,), val_path = prepare.prepare(str(text), tmp_path)
    for path in train_path, val_path:
        whole = path.read_bytes()
        path.unlink()
        subprocess.run([sys.executable, tmp_path / "prepare.py", text], check=True)
        assert path.read_bytes() == whole

def test_data_of_any_size_and_never_half_there(tmp_path, monkeypatch):
    """More tokens than an int32 counts, in a file with a hole. What can't be written
    leaves nothing."""
    path, count = tmp_path / "big.bin", 2**31 + 5
    path.write_bytes(prepare.make_header(count).tobytes())
    os.truncate(path, 1024 + 2 * count)
    with open(path, "r+b") as file:
        file.seek(-2, 2)
        file.write(b"\7\0")
    tokens = prepare.read_tokens(path)
    assert len(tokens) == count and tokens[-1] == 7
    shards = prepare.make_header(200)           # as in the public shards
    assert shards[:3].tolist() == [20240520, 1, 200] and not shards[3:].any()
    monkeypatch.setattr(prepare, "CHUNK", 100)
    (tmp_path / "my.txt").write_text("text " * 100)
    code = ("import resource, pathlib; from train import prepare; resource.setrlimit("
            "resource.RLIMIT_FSIZE, (3000, 3000)); prepare.write_tokens("
            "pathlib.Path('new/a.bin'), range(1500))")
    error = python("-c", code, cwd=tmp_path, code=1).stderr
    assert "OSError: [Errno 27] File too large" in error
    assert not list((tmp_path / "new").iterdir())
    (first,), _ = prepare.prepare(str(tmp_path / "my.txt"), tmp_path)
    assert bytes(prepare.read_tokens(first).tolist()) == b"text " * 90

def nanogpt(folder, tokens, val, dtype=np.uint16):
    """A folder of files as nanoGPT writes them: no header, and no meta.pkl yet."""
    folder.mkdir()
    for name, of in ("train", tokens), ("val", val):
        np.array(of, dtype=dtype).tofile(folder / f"{name}.bin")
    return folder

def meta(folder, **of):
    (folder / "meta.pkl").write_bytes(pickle.dumps(of))

def test_data_characters_are_no_bytes_though_there_are_256_of_them(
        tmp_path, monkeypatch):
    """And a folder of the name of a data set of ours says nothing about it."""
    stoi = {chr(0x400 + i): i for i in range(256)}
    own = nanogpt(tmp_path / "python", [1, 2], [3])
    meta(own, vocab_size=256, stoi=stoi, itos={i: c for c, i in stoi.items()})
    assert prepare.encode("\u0403", own) == [3] and prepare.decode([3], own) == "\u0403"
    monkeypatch.chdir(tmp_path)
    assert prepare.encode("a", "python") == [97]

def test_data_of_a_linked_file_are_those_of_its_folder(settings, tmp_path, text):
    """val.bin is a link into a folder with other text."""
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, n in (own, 3), (other, 5):
        prepare.write_tokens(str(folder / "train.bin"), 3000 * [n], 256)
    prepare.write_tokens(other / "val.bin", 3000 * [3], 256)
    (own / "val.bin").symlink_to(other / "val.bin")
    s = settings("--recipe", "bf16", "--data", str(own))
    train.train(s)
    shards, _, folder = train.load_data(train.parse_args(["--resume", s.out]), 256)
    assert folder == own and shards[0][0] == 3

def test_data_one_file_is_not_for_training_and_validation(tmp_path):
    prepare.write_tokens(tmp_path / "train_val.bin", 90 * [1])
    assert not prepare.has_tokens(tmp_path)
    with pytest.raises(ValueError, match="no token files"):
        prepare.token_files(tmp_path)

def test_data_tokens_of_ones_own_have_their_vocabulary(tmp_path, text, capsys):
    """nanoGPT's: no header, uint16, and meta.pkl. As a text it is refused."""
    chars = sorted(set(text.read_text()))
    stoi = {c: i for i, c in enumerate(chars)}
    tokens = [stoi[c] for c in text.read_text()]
    own = nanogpt(tmp_path / "own", tokens[:9000], tokens[9000:])
    with pytest.raises(ValueError, match="is not a text file.* give its folder"):
        prepare.prepare(str(own / "train.bin"), tmp_path)
    for path in token_paths(own):
        with pytest.raises(ValueError, match="no header .*meta.pkl"):
            prepare.read_tokens(path)
    meta(own, vocab_size=len(chars), stoi=stoi, itos=dict(enumerate(chars)))
    assert [len(prepare.read_tokens(p)) for p in token_paths(own)] == [
        9000, len(tokens) - 9000]
    assert prepare.vocabulary(own) == len(chars)
    assert prepare.decode(prepare.encode("return x", own), own) == "return x"
    with pytest.raises(ValueError, match="lacks .'☃'"):
        prepare.encode("☃", own)
    argv = [*TINY, "--recipe", "bf16", "--data", str(own)]
    argv += ["--out", str(tmp_path / "run")]
    train.main(argv)
    assert train.load(tmp_path / "run").embed.num_embeddings == len(chars)
    capsys.readouterr()
    train.main(["--resume", str(tmp_path / "run"), "--prompt", "def"])
    assert set(capsys.readouterr().out.strip("\n")) <= set(chars)
    argv[-1] += "-2"
    for size, why in ((9, "and its vocabulary only 9"),
                      (os.system, "meta.pkl holds posix.system")):
        meta(own, vocab_size=size)
        assert why in said(capsys, 1, train.main, argv)
    # What this file has made says itself that its tokens are bytes
    (first,), _ = prepare.prepare(str(text), tmp_path)
    assert prepare.vocabulary(first.parent) == 256

def test_data_names_are_words_and_lengths_are_weights(tmp_path, settings):
    """"medieval_train" has no word "val". A shard twice as long is taken twice as
    often."""
    sizes = {"medieval_train_0": 1000, "interval-train": 2000, "val": 99}
    for name, size in sizes.items():
        prepare.write_tokens(tmp_path / f"own/{name}.bin", [7] * size, 256)
    paths, val = prepare.token_files(tmp_path / "own")
    assert val.name == "val.bin"
    val.rename(val.with_name("my-validation.bin"))
    assert prepare.token_files(tmp_path / "own")[1].name == "my-validation.bin"
    assert [p.name for p in paths] == ["interval-train.bin", "medieval_train_0.bin"]
    shards = [prepare.read_tokens(p) + i for i, p in enumerate(paths)]
    s, first = settings("--batch-size", "1"), 0
    for step in range(600):
        first += (train.get_batch(shards, s, step)[0] == 7).all().item()
    assert 360 < first < 440                            # 400 +- 3 deviations

def test_data_of_large_vocabularies_takes_four_bytes(tmp_path, settings, capsys):
    """And what two bytes can't hold is refused, as is text for unknown tokens."""
    own = tmp_path / "own"
    tokens = np.random.default_rng(0).integers(0, 100_000, 3000)
    for name in "train", "val":
        prepare.write_tokens(own / f"{name}.bin", tokens, 100_000)
    assert prepare.read_tokens(own / "val.bin").tolist() == tokens.tolist()
    assert type(prepare.vocabulary(own)) is int         # which JSON takes
    argv = [*TINY, "--recipe", "bf16", "--steps", "2", "--data", str(own), "--out",
            str(tmp_path / "run")]
    train.main(argv)
    assert train.load(tmp_path / "run").embed.num_embeddings == 100_000
    error = said(capsys, 1, train.main, ["--resume", argv[-1], "--prompt", "x"])
    assert "a vocabulary of 100000, and no stoi and itos" in error
    for bad in [-1], [2**32]:
        with pytest.raises(prepare.UserError, match="a token must be from 0"):
            prepare.write_tokens(tmp_path / "bad.bin", bad)
    prepare.write_tokens(tmp_path / "wide.bin", [70_000])
    assert prepare.read_tokens(tmp_path / "wide.bin").tolist() == [70_000]
    # nanoGPT's files are uint16: with such a meta.pkl they are other tokens
    meta(nanogpt(tmp_path / "nano", tokens, tokens, np.uint32), vocab_size=100_000)
    with pytest.raises(prepare.UserError, match="two bytes a token can't hold"):
        prepare.read_tokens(tmp_path / "nano/train.bin")

def test_data_nanogpts_openwebtext_is_read_as_it_is(tmp_path):
    folder = nanogpt(tmp_path / "openwebtext", [50256, 318, 7], [50256, 318, 7])
    for path in token_paths(folder):
        assert prepare.read_tokens(path).tolist() == [50256, 318, 7]
    assert prepare.vocabulary(folder) == 50257

def token_paths(folder):
    paths, val = prepare.prepare(str(folder))
    return [*paths, val]

def test_data_downloads_are_whole_and_made_once(tmp_path):
    class Server(http.server.SimpleHTTPRequestHandler):
        asked, limit = [], 150_000                      # breaks off after so many bytes

        def copyfile(self, source, output):
            self.asked.append(self.path)
            output.write(source.read(self.limit))

    there, names = tmp_path / "there", ["val_000000", "train_000001"]
    for name in names:
        prepare.write_tokens(there / f"fineweb_{name}.bin", np.arange(200_000) % 50257)
    handler = functools.partial(Server, directory=there)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{httpd.server_port}"
        with pytest.raises(prepare.UserError, match="got only 150000 .*--data python"):
            prepare.prepare("fineweb", tmp_path, 1, url)
        assert not list((tmp_path / "fineweb").iterdir())   # never half there
        Server.limit = None
        for _ in range(2):                      # the second time nothing is fetched
            paths, val = prepare.prepare("fineweb", tmp_path, 1, url)
            assert len(Server.asked) == 1 + 2
        httpd.shutdown()
    for path in val, *paths:
        assert path.read_bytes() == (there / path.name).read_bytes()

# ---- bench.py ------------------------------------------------------------------------
@pytest.mark.parametrize("name,wanted,like", [
    ("e2m1-full-rht-debiased", 1.0, "e2m1-full-rht"), ("ufp4-shrunk", 0.996, "ufp4")])
def test_bench_the_slope_of_what_is_rounded_to_nearest_is_set(name, wanted, like):
    x, rand = randn(64, 64), torch.rand(64, 64, generator=gen())
    for operand, gemm in (("x", "fprop"), ("w", "dgrad")):
        q, plain = (RECIPES[r].quantizer(operand, gemm) for r in (name, like))
        for size in (1.0, 1e-25, 1e25):         # whose squares float32 does not hold
            got = slope(q(x * size), rotate(x, q.signs) * size)
            assert got == pytest.approx(wanted, abs=1e-6)
        ratio = q(x) / plain(x)
        assert ratio[ratio == ratio].std() < 1e-6       # one factor for all
        assert not q(x * 0).any()
    sr, plain = (RECIPES[r].quantizer("dy", "dgrad") for r in (name, like))
    assert torch.equal(sr(x, rand), plain(x, rand))

def test_bench_the_scales_of_hifloat4():
    """Number by number, as arXiv 2602.11287 defines them. 80 numbers are a whole unit
    of 64 and a part of one."""
    def scales(unit):
        s = max(map(abs, unit)) / 7             # 1.75, times 2 for 8 and 2 for 4
        mantissa, exponent = math.frexp(s)
        s = min(max(round(mantissa * 8) / 8 * 2.0**exponent, 2.0**-48), 49152.0)
        for eight in (unit[i:i + 8] for i in range(0, len(unit), 8)):
            s_8 = s * (2 if max(map(abs, eight)) >= 4 * s else 1)
            for four in eight[:4], eight[4:]:
                yield s_8 * (2 if max(map(abs, four)) >= 2 * s_8 else 1)

    x = randn(40, 80) * (2 * randn(40, 80, seed=1)).exp()
    amax = x.unflatten(-1, (-1, 4)).abs().amax(-1, keepdim=True)
    expected = [[*scales(row[:64]), *scales(row[64:])] for row in x.tolist()]
    found = tried.scale_hif4(amax, E1M2.max)
    assert found.squeeze(-1).tolist() == expected
    assert len({*(found / found.amin(1, keepdim=True)).flatten().tolist()}) > 3
    zeros, infinite = torch.zeros(1, 16, 1), torch.full((1, 16, 1), math.inf)
    q = RECIPES["ufp4-hif4"].quantizer("x", "fprop")
    assert not q(torch.zeros(2, 64)).any()
    assert tried.scale_hif4(zeros, 1.75).eq(2.0**-48).all()
    assert tried.scale_hif4(infinite, 1.75).isnan().all()

def test_bench_the_nearest_power_and_the_better_of_two_formats():
    amax = torch.tensor([1.75, 1.75 * 1.41, 1.75 * 1.42, 0.0, math.inf, 1e-3])
    s = tried.scale_power(amax, 1.75)
    assert s[:3].tolist() == [1, 1, 2] and 0 < s[3] < 1e-37 and s[4].isnan()
    assert s[5] == 2.0 ** round(math.log2(1e-3 / 1.75))
    # Two blocks: of 4 and 6 the first needs 6, the second, 4, 3 and small, needs 4
    x = torch.tensor([[6.0, 5.9, *14 * [0.3]], [4.0, 3.0, *14 * [1.5]]])
    for operand, rand in (("x", None), ("dy", torch.rand(2, 16, generator=gen()))):
        q = RECIPES["four-over-six"].quantizer(operand, "fprop")
        both = [Quantizer(fmt, stochastic=q.stochastic)(x, rand)
                for fmt in (q.fmt, q.other)]
        assert q.other.max == 4 and q.fmt.max == 6
        errors = [(Quantizer(fmt)(x) - x).square().sum(-1) for fmt in (q.fmt, q.other)]
        best = torch.where((errors[1] < errors[0])[:, None], both[1], both[0])
        assert torch.equal(q(x, rand), best)
        assert not torch.equal(best, both[0]) and not torch.equal(best, both[1])

def test_bench_own_means_leave_no_bin_a_bias():
    """For each code the errors, times the scales, add up to 0. Noise fills up the error
    to that of the plain grid. dY, which is rounded stochastically, stays as it is."""
    x, rand = randn(256, 256), torch.rand(256, 256, generator=gen())
    plain, own, fill = (RECIPES[f"e2m1-full-rht{what}"].quantizer("x", "fprop")
                        for what in ("", "-own", "-own-fill"))
    def blocks(x):
        return x.double().unflatten(-1, (-1, 16))
    rotated = blocks(rotate(x, plain.signs))
    s = rotated.abs().amax(-1, keepdim=True) / 6
    codes = (blocks(plain(x)) / s).abs().round(decimals=1)
    def errors(q):
        return (blocks(q(x)) - rotated) * rotated.sign()
    for level in E2M1.levels[1:]:
        at = codes == level
        assert (errors(own) * s)[at].sum().abs() < 1e-5 * (s * s)[at.any(-1)].sum()
        values = (blocks(own(x)) / s).abs()[at]
        assert values.max() - values.min() < 1e-5           # one value for each code
    torch.manual_seed(5)                # other random numbers than those of x
    powers = [errors(q).square().sum().item() for q in (plain, own, fill)]
    assert powers[1] < 0.95 * powers[0]
    assert powers[2] == pytest.approx(powers[0], rel=0.01)
    for q in own, fill:
        assert not q(0 * x).any()
    sr = (RECIPES[row].quantizer("dy", "dgrad") for row in ("e2m1-full-rht",
                                                            "e2m1-full-rht-own"))
    assert torch.equal(*(q(x, rand) for q in sr))

def test_bench_shifted_thresholds():
    """By hand, in steps of E1M2: 0.55 is still 0 if thresholds are a tenth higher."""
    a = torch.tensor([0.35, 0.45, 0.55, 0.65, 6.35, 6.45, 6.55, 6.65]) / 4
    for shift, expected in ((0.1, [0, 0, 0, 1, 6, 6, 6, 7]),
                            (-0.1, [0, 1, 1, 1, 6, 7, 7, 7])):
        fmt = tried.shifted(E1M2, shift)
        assert (4 * fmt.round(a)).tolist() == expected
        rand = torch.rand(8, generator=gen())
        assert torch.equal(fmt.round(a, rand), E1M2.round(a, rand))     # SR has none
        x = randn(64, 64)
        q = RECIPES[f"ufp4-shift{shift:+}"].quantizer("x", "fprop")
        assert slope(q(x), rotate(x, q.signs)) == pytest.approx(1, abs=1e-6)
        # They are rescaled, and else differ from ufp4 where a number is near one
        plain = RECIPES["ufp4"].quantizer("x", "fprop")(x)
        share = ((q(x) / plain - 1).abs() > 0.1).float().mean()
        assert 0.02 < share < 0.2

def test_bench_level_6_or_4_under_one_scale_of_the_tensor():
    """Block by block, with E4M3 by torch: the largest number becomes 6, or it becomes
    4, whichever has the smaller error."""
    x = randn(32, 64) * (2 * randn(32, 1, seed=1)).exp()
    t = x.abs().max() / (256 * 6)
    found = RECIPES["four-over-six-e4m3"].quantizer("x", "fprop")(x)
    chosen = []
    for block, got in zip(x.view(-1, 16), found.view(-1, 16)):
        tried_ = []
        for top in (6, 4):
            s = (block.abs().max() / top / t).to(torch.float8_e4m3fn).float() * t
            near = E2M1.round((block.abs() / s).clamp(max=top))
            tried_.append(torch.copysign(near.clamp(max=top) * s, block))
        errors = [(q - block).square().sum() for q in tried_]
        chosen.append(int(errors[1] < errors[0]))
        assert torch.allclose(got, tried_[chosen[-1]], rtol=1e-5)
    assert 0.2 < np.mean(chosen) < 0.8

def test_bench_weights_are_used_under_other_recipes(
        settings, elsewhere, capsys, monkeypatch):
    """The loss under its own recipe is that of the run itself. An average over steps is
    the mean of their weights."""
    train.train(s := settings("--recipe", "ufp4", "--save-at", "5,6"))
    own = train.read_log(Path(s.out) / "log.jsonl")[-1]["val_loss"]
    last = Path(s.out) / f"ckpt-{s.steps:07d}"
    found = bench.losses_under(last, ["ufp4", "bf16", "ufp4-rht-wgrad"], s.eval_windows)
    assert found["ufp4"] == own and len({*found.values()}) == 3
    assert max(found.values()) - min(found.values()) < 0.1
    steps = [5, 6, s.steps]
    model, each = train.load(last), [train.load(last.with_name(f"ckpt-{step:07d}"))
                                     for step in steps]
    bench.average_weights(model, last.parent, steps)
    for name, value in model.state_dict().items():
        mean = torch.stack([of.state_dict()[name].double() for of in each]).mean(0)
        assert torch.allclose(value, mean.float(), rtol=0, atol=1e-7)
    averaged = bench.losses_under(last, ["bf16"], s.eval_windows, "averaged", steps)
    assert averaged["bf16"] != found["bf16"]
    other = bench.losses_under(last, ["bf16"], s.eval_windows, "other code")
    assert other["bf16"] != found["bf16"]
    # A model without norms is used without them, too
    norm = nn.RMSNorm                                   # its file replaces this
    monkeypatch.setattr(nn, "RMSNorm", norm)
    without = settings("--recipe", "ufp4", "--out", f"{s.out}-2",
                       "--with", str(bench.RECORDS / "no_norms.py"))
    train.train(without)
    own_2 = train.read_log(Path(f"{s.out}-2") / "log.jsonl")[-1]["val_loss"]
    again = bench.losses_under(f"{s.out}-2/{last.name}", ["ufp4"], s.eval_windows)
    assert again["ufp4"] == own_2 != own
    nn.RMSNorm = norm
    capsys.readouterr()
    bench.main(["use", s.out, "--recipes", "ufp4", "e2m1 --gemms fprop", "--windows",
                str(s.eval_windows)])
    said = printed(capsys.readouterr().out, "used under")
    assert said.keys() == {"`bf16`", "`ufp4`", "`e2m1 --gemms fprop`"}
    bf16 = float(said["`bf16`"]["validation loss"])
    for row, of in said.items():
        error = 100 * (float(of["validation loss"]) / bf16 - 1)
        assert float(of["above BF16, %"]) == pytest.approx(error, abs=0.02)
        cosine = float(of["cosine of dW with BF16's"])
        assert cosine == 1 if row == "`bf16`" else 0.5 < cosine < 0.9999
    assert said["`ufp4`"]["validation loss"] == f"{own:.4f}"
    # The first row is the run's own recipe, with its flags
    train.train(settings("--recipe", "ufp4", "--rht", "wgrad", "--out", f"{s.out}-3"))
    bench.main(["use", f"{s.out}-3", "--windows", "1"])
    said = capsys.readouterr().out
    assert "trained under ufp4 --rht wgrad" in said and "`ufp4 --rht wgrad`" in said

def test_bench_every_row_is_another_and_fits_its_models():
    plain = results("ufp4")
    for name, study in bench.STUDIES.items():
        for model in study.models:
            for row in study.rows:
                s = train.parse_args([*bench.MODELS[model], *bench.row_flags(row),
                                      "--device", "cpu"])
                if not ("-early" in row or "-late-" in row or "-block-bf16" in row):
                    # (those differ by block or step)
                    same = not differ(plain, results(train.make_recipe(s)))
                    assert same == (row == "ufp4"), row
            if model in studies.SCALING:                  # as named, 20 bytes each
                with torch.device("meta"):
                    net = train.GPT(s, RECIPES["bf16"], 256)
                idle = s.layers * (s.experts - s.top_k) * 3 * s.dim * s.hidden
                active = sum(p.numel() for p in net.parameters()) - idle
                assert f"{active / 1e6:.1g}m" == model.split("-")[1]
                assert abs(s.steps * s.batch_size * s.seq_len / active - 20) < 0.02
    for gemm in GEMMS:                          # another format in one GEMM, no other
        ours = results(f"ufp4-{gemm}-in-e2m1")
        assert differ(plain, ours) == gemm[0]
        assert torch.equal(ours[gemm], results("e2m1-full-rht")[gemm])

def test_bench_doses_have_the_noise_that_they_say():
    x, plain = randn(500, 64) * 10 ** randn(500, 1, seed=1), ufp4_with()
    for dose in (1.25, 3):
        recipe = RECIPES[f"ufp4-noise-{dose}"]
        for gemm, times in (("fprop", dose), ("wgrad", 1)):
            q, rotated = recipe.quantizer("x", gemm)(x), rotate(x, recipe.signs)
            error = plain.quantizer("x", gemm)(x) - rotated
            power = (q - rotated).square().mean(-1) / error.square().mean(-1)
            assert power.mean() == pytest.approx(times, rel=0.02)

def study_args(**given):
    """What `study` has from its command line."""
    return types.SimpleNamespace(**{"study": "quick", "file": None, "mine": (),
                                    "start": None, "train": []} | given)

def test_bench_a_late_row_goes_on_with_the_recipe_that_it_helps(elsewhere):
    args, jobs = study_args(study="repair"), {}
    first, late, later, early = (
        bench.job_of(args, jobs, "dense-0.3m", row, 3) for row in
        ("nvfp4", "nvfp4-late-bf16", "nvfp4-late-bf16-30", "e2m1-early"))
    assert late.base is later.base is first and late.first == 2205 == 2645 - late.steps
    assert later.first == 2615 and first.kept == {2205, 2615, 2645}
    assert first.first == 1763 and late.wave == first.wave + 1
    assert early.base is first.base and early.first == 80
    assert first.base.kept == {80, 1763, 2645} and len(jobs) == 5
    s = train.parse_args(late.flags)
    assert s.recipe == "bf16" and s.seed == 3

def test_bench_the_jobs_of_a_study(elsewhere):
    """Its seeds; the texts and recipes for trained weights; what averages need."""
    for name, rows, used in (
            ("heal", bench.STUDIES["heal"].averaged, {}),
            ("use", (), dict.fromkeys(bench.SHORT_TEXTS, bench.STUDIES["use"].uses))):
        jobs = bench.jobs_of(study_args(study=name, models=None, seeds=2),
                             study := bench.STUDIES[name])
        assert {job.key for job in jobs} == {
            ("dense-0.3m", row, seed) for row in ("bf16", *study.rows)
            for seed in (5, 6)}
        for job in jobs:
            wanted = {"validation": ["bf16"]} | used
            if job.row in rows:
                wanted["averaged"] = job.row, "bf16"
                starts = {1763, 2205, 2545, 2615, 2635}             # of other rows
                assert job.kept - starts == {2645, 2612, 2579, 2546, 2513, 2480, 2447,
                                             2414}
            assert job.uses == wanted

@pytest.mark.parametrize("diverges,ran", [
    ("", ["bf16", "nvfp4", "nvfp4-late-bf16"]), ("nvfp4", ["bf16", "nvfp4"])])
def test_bench_a_row_runs_after_the_one_that_it_starts_from(
        elsewhere, monkeypatch, diverges, ran):
    found, jobs = [], {}
    monkeypatch.setattr(bench.Job, "run", lambda job, threads: found.append(job.row))
    monkeypatch.setattr(bench.Job, "result", lambda job: {
        "loss": None if job.row == diverges else 2.0})
    bench.job_of(study_args(), jobs, "nano", "nvfp4-late-bf16", 0)
    assert not bench.run_all(types.SimpleNamespace(jobs=2), [*jobs.values()][::-1])
    assert found == ran

def test_bench_the_gaps_of_a_run_are_those_of_eighths_of_its_own_steps(elsewhere):
    """Of the lines that both log. A checkpoint has one of its own, which may lie there
    too; and that of the first step is not the run's own."""
    job = bench.job_of(study_args(start=640), {}, "nano", "ufp4", 0)
    losses = {step: 2.0 for step in range(600, 801, 10)}
    higher = {step: 2 + (step - 641) // 20 / 50 for step in range(650, 801, 10)}
    for of, logs in ((job.base, losses), (job, higher | {640: 99.0})):
        lines = [{"step": step, "train_loss": loss} for step, loss in logs.items()]
        lines = {"settings": {}, "start": 0}, *lines, {"step": 777, "train_loss": 9.0}
        of.folder.mkdir(parents=True)
        (of.folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for loss, wanted in ((None, None), (2.0, [n / 100 for n in range(8)])):
        bench.save(job.folder / "result.json", {"loss": loss})
        assert job.gaps() == (wanted and pytest.approx(wanted))
    assert job.base.gaps() is None

def test_bench_rows_start_where_they_are_told(elsewhere):
    args, jobs = study_args(start=7), {}
    row, early = (bench.job_of(args, jobs, "nano", row, 0)
                  for row in ("ufp4", "e2m1-early"))
    assert row.first == 7 and row.base.kept == {7, early.first, 800}
    assert row.folder != bench.job_of(study_args(), {}, "nano", "ufp4", 0).folder

def test_bench_a_run_is_named_after_all_that_it_depends_on(elsewhere, monkeypatch):
    """Its flags, our code, the file of --with and the modules beside that; not a file
    that is called as the value of a flag, nor a module from elsewhere."""
    code = [elsewhere / name for name in ("train.py", "ufp4.py", "bench.py")]
    mine, *beside = (elsewhere / "mine" / name for name in
                     ("mine.py", "beside_mine.py", "below_mine/part.py"))
    beside[1].parent.mkdir(parents=True)
    for path in (*code, *beside):
        path.write_text("x = 1")
    mine.write_text("import beside_mine, below_mine.part, ufp4\n"
                    "ufp4.RECIPES['mine'] = ufp4.Recipe('mine')")
    monkeypatch.setattr(ufp4, "RECIPES", dict(RECIPES))
    monkeypatch.setattr(bench, "CODE", code)
    monkeypatch.chdir(elsewhere)
    def folders(**given):
        args = study_args(file=mine, mine={"mine"}, **given)
        return [bench.Job(args, {}, "nano", row, 3).folder for row in
                ("ufp4", "mine", "four-over-six", f"mine --with {mine}")]
    train.import_with(str(mine))
    before = folders()
    (elsewhere / "3").write_text("the seed is 3")
    (elsewhere / "text.py").write_text("x = 1")
    assert folders() == before
    for path, changed in (*((path, (True, True, True, True)) for path in code),
                          *((path, (False, True, False, True))
                            for path in (mine, *beside))):
        path.write_text(path.read_text() + "\n")
        after = folders()
        assert tuple(a != b for a, b in zip(after, before)) == changed, path
        before = after
    assert folders(train=["--lr", "0.1"]) != before
    monkeypatch.setattr(prepare, "ROOT", elsewhere / "data")
    data, named = elsewhere / "data.txt", []
    for text in "a text ", "b text ":               # of one length
        data.write_text(1000 * text)
        named += folders(train=["--data", str(data)])
    assert len({*named}) == 8

def test_bench_a_row_has_the_file_that_its_recipe_is_from(elsewhere, text):
    other = elsewhere / "other.py"
    other.write_text("import ufp4\nufp4.RECIPES['other'] = ufp4.RECIPES['ufp4']\n")
    args = study_args(file=elsewhere / "mine.py", mine={"mine"}, train=["--steps", "9"])
    for model, row, name in (
            ("nano", "ufp4", ""), ("nano", "four-over-six", "recipes.py"),
            ("nano", "e2m1-early", ""), ("no-norms-0.3m", "ufp4", "no_norms.py"),
            ("nano", f"ufp4 --with {other}", "other.py")):
        flags = bench.Job(args, {}, model, row, 0).flags
        assert flags.count("--with") == 1
        assert Path(flags[flags.index("--with") + 1] or ".").name == name

def test_bench_a_run_by_other_code_is_said_and_not_used(elsewhere, capsys, monkeypatch):
    job = bench.Job(study_args(), {}, "nano", "bf16", 0)
    path = bench.OUT / f"runs/{job.name}-00000000/result.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"loss": 1.0}')
    monkeypatch.setattr(bench.Job, "run", lambda job, threads: None)
    bench.run_all(types.SimpleNamespace(jobs=1), [job])
    assert "1 more are there by other flags or other code" in capsys.readouterr().out
    bench.save(job.folder / "result.json", {"loss": 1.0})       # without a checkpoint
    assert job.result() is None and job.others() == [path.parent]

def test_bench_how_many_steps_are_done_is_at_the_end_of_the_log(elsewhere):
    job = bench.Job(study_args(), {}, "nano", "bf16", 0)
    assert job.done() == 0
    job.folder.mkdir(parents=True)
    lines = [json.dumps({"settings": {}, "start": 0})]
    for step in range(100, 900, 100):
        lines.append(json.dumps({"step": step, "text": "x" * 1000}))
        (job.folder / "log.jsonl").write_text("\n".join(lines) + '\n{"st')
        assert job.done() == step

def test_bench_what_is_saved_is_what_is_read(tmp_path):
    found = {"runs": [{"a": [{"b": 1}, {"b": 2}]}, {"a": "}, {"}],
             "text": "[{", "n": []}
    bench.save(tmp_path / "x.json", found)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == found and len(text.splitlines()) == 5

@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """out/bench and the records, in tmp_path."""
    monkeypatch.setattr(bench, "OUT", tmp_path / "bench")
    monkeypatch.setattr(bench, "RECORDS", tmp_path / "records")
    shutil.copytree(HERE / "data/results", bench.RECORDS)
    return tmp_path

def test_bench_the_commands_that_need_no_gpu(elsewhere, monkeypatch, capsys):
    tiny = dict(train.NANO, layers=1, dim=32, heads=2, hidden=32, seq_len=16)
    monkeypatch.setattr(train, "PRESETS", train.PRESETS | {
        "nano": tiny, "nano-moe": dict(tiny, experts=2, top_k=1)})
    monkeypatch.setattr(bench, "RECIPES", recipes := dict(bench.OURS))
    monkeypatch.setattr(ufp4, "RECIPES", recipes)
    changes = elsewhere / "changes.py"
    changes.write_text("import ufp4\nufp4.RECIPES['ufp4'] = ufp4.Recipe('ufp4')\n")
    named = elsewhere / "named.py"
    named.write_text("import ufp4\nufp4.RECIPES['mine-early'] = ufp4.Recipe('m')\n")
    before = tree(elsewhere)
    for command, why in (("study loss --models nano", "unknown model 'nano'"),
                         ("study quick --rows none-such", "unknown row 'none-such'"),
                         ("study quick --rows ufq4", "choose from ufp4"),
                         ("study quick --with none-such.py", "none-such.py"),
                         ("study quick --record --steps 9", "--record takes no"),
                         ("study quick --record", "a quarter of the text"),
                         ("study quick --steps 1", "starts at step 0 of 1"),
                         ("study heal --steps 300", "it needs more --steps"),
                         ("study quick --rows four-over-six --steps 1", "0 of 1"),
                         (f"study quick --with {named}", "called mine-early: choose"),
                         ("study quick --seed 3", "a study sets --seed itself"),
                         (f"study quick --with {changes}", "changes the recipe ufp4"),
                         ("runs nowhere", "has no run of train.py")):
        with pytest.raises(SystemExit, match=f"bench.py: .*{why}"):
            bench.main(command.split())
        recipes.pop("mine-early", None)
    with pytest.raises(SystemExit, match="a study sets --data itself, for all rows"):
        bench.main(["study", "quick", "--rows", "ufp4 --data shakespeare"])
    assert tree(elsewhere) == before
    bench.main(["cpu"])
    assert "`nano-moe`, bfloat16" in capsys.readouterr().out
    assert (bench.OUT / "cpu.json").exists()

def test_bench_a_study_of_the_front_pages_experiment_end_to_end(
        elsewhere, text, capsys, monkeypatch):
    monkeypatch.setattr(bench, "RECIPES", recipes := dict(RECIPES))
    monkeypatch.setattr(ufp4, "RECIPES", recipes)
    monkeypatch.chdir(elsewhere)                    # where the user's file is
    mine, before = elsewhere / "mine.py", tree(bench.RECORDS)
    code = re.search(r"```python\n(import torch, ufp4.*?)```", README, re.S)[1]
    mine.write_text(code)
    command = ["study", "quick", "--with", str(mine), "--rows", "ufp4", "noisy",
               "--data", str(text), *("--layers 1 --dim 32 --heads 2 --hidden 32 "
               "--seq-len 32 --batch-size 2 --steps 30 --lr 0.05 --jobs 2").split()]
    bench.main(command)
    said, found, val = capsys.readouterr().out, {}, len(text.read_bytes()) // 10
    for path in bench.OUT.rglob("result.json"):
        row = path.parent.name.split("-")[1]
        found[row] = json.loads(path.read_text())
        first, *lines = train.read_log(path.parent / "log.jsonl")
        assert found[row]["loss"] == lines[-1]["val_loss"]
        assert first["settings"]["eval_windows"] == val // 32 // 4      # a quarter
        if row != "bf16":                               # ten of the steps are its own
            assert first["start"] == 20 and lines[-1]["step"] == 30
    assert tree(bench.RECORDS) == before
    for row in ("ufp4", "noisy"):
        error = found[row]["loss"] / found["bf16"]["loss"] - 1
        line, = (line for line in said.splitlines() if line.startswith(f"`{row}`"))
        assert line.split()[1:3] == [f"{100 * error:.2f}", "(1)"] and abs(error) > 1e-4
    assert found["noisy"]["noise"] > found["ufp4"]["noise"]
    # The weights of each were used in BF16, too. For bf16 this is what it was before
    for path in bench.OUT.rglob("used.json"):
        row, used = path.parent.name.split("-")[1], json.loads(path.read_text())
        same = used["validation"]["bf16"] == found[row]["loss"]
        assert same == (row == "bf16") and abs(used["validation"]["bf16"] - 3) < 2
    # A bf16 run that lost the checkpoint that its rows start from makes it again
    folder, = bench.OUT.rglob("nano-bf16-*")
    first, last = (folder / f"ckpt-00000{step}" for step in (20, 30))
    shutil.rmtree(first)
    bench.main(command)
    assert train.checkpoints(folder) == [first, last]
    assert json.loads((folder / "result.json").read_text()) == found["bf16"]
    # If it makes one for another study, it keeps those that are there
    args = study_args(file=mine, train=command[7:-2])
    job = bench.Job(args, {}, "nano", "bf16", 0)
    job.kept.add(10)
    job.run(threads=1)
    assert [path.name for path in train.checkpoints(folder)] == [
        "ckpt-0000010", first.name, last.name]
    shutil.rmtree(folder / "ckpt-0000010")
    # One that has ended, though nobody wrote down what it found
    (folder / "result.json").unlink()
    bench.main(command)
    assert json.loads((folder / "result.json").read_text()) == found["bf16"]
    # One that would be another run than that from which others started
    shutil.rmtree(first)
    save = found["bf16"] | {"loss": found["bf16"]["loss"] + 1e-9}
    (folder / "result.json").write_text(json.dumps(save))
    with pytest.raises(SystemExit, match="trained once more, has another loss"):
        bench.main(command)
    assert not train.checkpoints(folder)            # so it is said again
    (folder / "result.json").unlink()
    bench.main(command)
    # A changed file is another recipe; else nothing is left to do
    mine.write_text(code.replace("0.04", "0.4"))
    bench.main(command)
    assert "3 runs, of which 2 are there already" in capsys.readouterr().out
    noises = [json.loads(path.read_text())["noise"]
              for path in bench.OUT.rglob("nano-noisy-*/result.json")]
    assert len(noises) == 2 and max(noises) > 10 * min(noises)
    # A study without the file does not need it, though its bf16 run had it
    mine.unlink()
    bench.main([*command[:2], "--rows", "e2m1", *command[7:]])
    assert "2 runs, of which 1 are there" in capsys.readouterr().out
    # Without --rows the recipes of a file are measured, too, and tried before all else
    mine.write_text(code + """
class Broken(Noisy):
    def __call__(self, x, rand=None):
        return super().__call__(x, rand)[:1]
class BrokenRecipe(ufp4.Recipe):
    def quantizer(self, operand, gemm):
        return Broken(**vars(super().quantizer(operand, gemm)))
ufp4.RECIPES["broken"] = BrokenRecipe("broken")
""")
    before = tree(bench.OUT)
    with pytest.raises(TypeError, match="Broken must return"):
        bench.main([*command[:4], *command[7:]])
    assert tree(bench.OUT) == before

def test_bench_a_job_that_fails_is_said_and_other_seeds_go_on(
        elsewhere, monkeypatch, capsys):
    def command(job):
        end = "sys.exit(3)" if job.seed else "sys.exit('train.py: no space left')"
        job.folder.mkdir(parents=True, exist_ok=True)
        log = '{"settings": {}, "start": 0}\n{"step": 9, "val_loss": 2.5}\n'
        (job.folder / "log.jsonl").write_text(log)
        if job.row == "bf16" and job.seed < 2:
            for step in job.kept:
                job.saved(step).mkdir(parents=True)
                (job.saved(step) / ".metadata").touch()
            end = ""
        return [sys.executable, "-c", f"import sys; {end}"]

    monkeypatch.setattr(bench.Job, "command", command)
    monkeypatch.setattr(bench.Job, "unused", lambda job: {})
    for flags, why in (("--seeds 3 --clip 1", "bf16, seed 2: "),    # must not diverge
                       ("--seeds 2 --clip .1", "ufp4, seed 0: no space left")):
        with pytest.raises(SystemExit, match=f"{why}(.|\n)*tries these again"):
            bench.main(f"study quick --rows ufp4 --steps 9 {flags}".split())
        assert "`ufp4`  diverged (1)" in capsys.readouterr().out    # what is there
    left = [(path.parent.name.rpartition("-")[0], json.loads(path.read_text())["loss"])
            for path in sorted(bench.OUT.rglob("result.json"))]
    assert len(left) == 6                       # of two studies: --clip differs
    assert ("nano-ufp4-s1", None) in left and ("nano-bf16-s1", 2.5) in left

def test_bench_new_runs_join_the_records():
    old, args = bench.read("runs"), types.SimpleNamespace(train=[])
    def jobs(new=3.0, **used):
        return [types.SimpleNamespace(
            key=("nano", row, 9), result=lambda loss=loss: {"loss": loss, "used": used},
            gaps=list, made_by=lambda: {"commit": "c"})
            for row, loss in (("bf16", 2.0), ("new", new))]
    def of(records, measure):
        (found,) = [value for *at, value in bench.measured(records["runs"])
                    if at == ["nano", "new", 9, measure]]
        return found
    records = bench.records_of(args, jobs(validation={"bf16": 2.5}), old)
    assert of(records, "error") == 0.5
    assert len(records["runs"]) == len(old["runs"]) + 2
    assert records["models"].keys() == old["models"].keys()
    # Another study adds what it has found, and says nothing else of the same run
    again = bench.records_of(args, jobs(text={"bf16": 2.0, "new": 3.0}), records)
    assert of(again, "new on text") == of(again, "own on text") == 0.5
    assert of(again, "bf16 on validation") == 0
    more = bench.records_of(args, jobs(text={"e2m1": 4.0}), again)
    assert (of(more, "new on text"), of(more, "e2m1 on text")) == (0.5, 1)
    assert again["machines"] == records["machines"] == [*old["machines"],
                                                        {"commit": "c"}]
    with pytest.raises(ValueError, match="nano, new, seed 9 with another loss"):
        bench.records_of(args, jobs(new=3.1), records)

def test_bench_the_share_of_codes_used_and_the_noise_of_products():
    # Three magnitudes of E1M2 in equal numbers use 3 of 8 codes, one uses 1
    x = torch.tensor([[1.75, -1.0, 0.0, 1.0, -1.75, 0.0] * 8]).view(3, 16)
    assert bench.used(x, "e1m2") == pytest.approx(3 / 8, rel=1e-6)
    x, w, dy = randn(64, 32), randn(48, 32, seed=1), randn(64, 48, seed=2)
    x[:, 3] *= 20
    found, q = bench.measure(x, w, dy), Quantizer(E1M2, signs=random_signs(0))
    for what, product, exact in (("Y", q(x) @ q(w).T, x @ w.T),
                                 ("dX", q(dy) @ q(w.T).T, dy @ w),
                                 ("dW", q(dy.T) @ q(x.T).T, dy.T @ x)):
        noise = ((product - exact) / exact.square().mean().sqrt()).square().mean()
        (decibels,) = found[what][3]            # E1M2 after the RHT
        assert decibels == pytest.approx(-10 * math.log10(noise), abs=1e-3)
    # Sizes that are no whole blocks are filled up with zeros, which adds no error
    odd = bench.measure(x[:, :20], w[:, :20], dy)
    assert [db for db, *_ in odd["dY, dgrad"]] == [db for db, *_ in found["dY, dgrad"]]
    exact = x[:, :20] @ w[:, :20].T
    error = q(F.pad(x[:, :20], (0, 12))) @ q(F.pad(w[:, :20], (0, 12))).T - exact
    assert odd["Y"][3][0] == pytest.approx(bench.sqnr(exact + error, exact))
    # An outlier in each block of X: the RHT turns the order of the grids around
    e2m1, e1m2, e2m1_rht, e1m2_rht = (db for db, *_ in found["X, fprop"])
    assert e2m1 > e1m2 and e2m1_rht < e1m2_rht
    assert found["X, fprop"][3][2] == pytest.approx(slope(q(x), rotate(x, q.signs)))

def printed(said, first):
    """The lines of a printed table whose head starts so: {name: {head: cell}}."""
    lines = said[said.index(first):].split("\n\n")[0].splitlines()
    starts = [m.start() for m in re.finditer(r"(?<!\S)(?<!\S )\S", lines[0])]
    rows = [[line[start:end].strip() for start, end in zip(starts, [*starts[1:], None])]
            for line in lines]
    return {row[0]: dict(zip(rows[0], row)) for row in rows[1:]}

def test_bench_runs_are_compared_with_the_bf16_run_of_the_same_settings(
        settings, elsewhere, capsys):
    out = elsewhere / "out"
    train.train(settings("--recipe", "bf16", "--out", str(out / "bf16")))
    header, *lines = train.read_log(out / "bf16/log.jsonl")
    worse = [dict(line) for line in lines]
    for line in worse:
        if "val_loss" in line:
            line["val_loss"] *= 1.25
    for name, changed, logged, torn in (
            ("e2m1", {}, worse, ""), ("another-seed", {"seed": 1}, worse, ""),
            ("longer", {"steps": 99}, worse, ""), ("begun", {}, [], ""),
            ("another-with", {"with_": "mine.py"}, worse, ""),
            ("begun-bf16", {"recipe": "bf16"}, lines[:2], ""),
            ("from-weights", {"recipe": "bf16", "init": "bf16"}, worse, ""),
            ("diverged", {}, [*worse[:5], {"step": 6, "diverged": "loss nan"}], ""),
            ("stopped", {}, worse[:7], '{"step": 7, "train_lo')):
        s = header["settings"] | {"recipe": "e2m1"} | changed
        texts = [json.dumps(line) for line in ({**header, "settings": s}, *logged)]
        (out / name).mkdir()
        (out / name / "log.jsonl").write_text("\n".join([*texts, torn]))
    # A run that only ended in BF16 is not one with which others are compared
    resumed = {**header, "start": 4, "changed": {"recipe": ["e2m1", "bf16"]}}
    path = out / "anew/log.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(map(json.dumps, (header, *worse, resumed, *worse[5:]))))
    # Nor is one that goes on where another had begun
    (out / "a-branch").mkdir()
    (out / "a-branch/log.jsonl").write_text("\n".join(map(json.dumps, (
        header | {"start": 4}, *worse))))
    (out / "broken").mkdir()
    (out / "broken/log.jsonl").write_text("not a log\n")
    capsys.readouterr()
    bench.main(["runs", str(out)])
    said = capsys.readouterr().out
    assert re.search("skipped: .*broken/log.jsonl", said)
    found = printed(said, "run ")
    for name, steps, error in (
            ("bf16", "8 of 8", "+0.00"), ("e2m1", "8 of 8", "+25.00"),
            ("from-weights", "8 of 8", "+0.00"), ("anew", "8 of 8", "+25.00"),
            # At their last validations
            ("diverged", "6 of 8, diverged", "+25.00"),
            ("stopped", "6 of 8", "+25.00")):
        assert found[name]["steps"] == steps
        assert found[name]["loss error, %"] == error
        times = 1.25 if error == "+25.00" or name == "from-weights" else 1
        validated = [line["val_loss"] for line in lines if "val_loss" in line][-1]
        assert name in ("stopped", "diverged") or (
            found[name]["validation loss"] == f"{validated * times:.4f}")
    for name in "stopped", "diverged":              # it says at which step that was
        assert found[name]["validation loss"].endswith(" (step 4)")
    assert found["begun"] | {"steps": ""} == dict.fromkeys(found["begun"], "") | {
        "run": "begun", "--recipe": "e2m1", "--seed": "0"}
    # What differs between the runs is said, and nothing else
    assert [*found["begun"]][1:4] == ["--recipe", "--with", "--seed"]
    assert found["another-seed"]["--seed"] == "1"
    assert found["another-with"]["--with"] == "mine.py"
    for name, why in (("another-seed", "no bf16 run"), ("longer", "no bf16 run"),
                      ("another-with", "bf16 run has another --with")):
        assert found[name]["loss error, %"] == why      # and no loss error
    # The figure: losses above, what they are above BF16 below, both after step 0
    from matplotlib.figure import Figure
    logs = {name: train.read_log(out / name / "log.jsonl") for name in ("bf16", "e2m1")}
    bench.draw_runs(fig := Figure(), logs)
    above, below = ({line.get_label(): dict(line.get_xydata()) for line in ax.lines}
                    for ax in fig.axes)
    for name, times in ("bf16", 1), ("e2m1", 1.25):
        assert above[name] == {line["step"]: line["val_loss"] * times for line in lines
                               if "val_loss" in line and line["step"]}
        assert below[name] == dict.fromkeys((4, 8), pytest.approx(100 * (times - 1)))
    bench.main(["sqnr", str(out / "bf16")])
    # The tensors of a run: four kinds of layers, six operands and three results
    medians = json.loads((bench.OUT / "sqnr.json").read_text())["medians"]
    assert len(medians) == 36 and "dW of fc2" in capsys.readouterr().out
    assert (bench.OUT / "sqnr.png").exists() and (out / "runs.png").exists()

class TinyLM(nn.Module):
    """What bench.py needs of a model of Hugging Face's."""
    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.layers = nn.ModuleList(nn.ModuleDict({
            "up_proj": nn.Linear(32, 48, bias=False), "v_proj": nn.Linear(
                48, 32, bias=False)}) for _ in range(2))
        for weight in self.parameters():
            weight.data.normal_(0, 0.15)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, tokens, labels=None, use_cache=True):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["v_proj"](layer["up_proj"](x).relu())
        logits = self.lm_head(x)
        loss = labels is not None and F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(logits=logits, loss=loss)

@pytest.fixture(params=("a stub", "transformers"))
def tiny_llama(request, tmp_path, monkeypatch):
    """A folder with a random model and a tokenizer of words, and a text."""
    words = [f"w{i}" for i in range(63)]
    folder, text = tmp_path / "tiny", tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(words, k=400)))
    if request.param == "a stub":
        folder.mkdir()
        def tokenize(text, **_):
            return {"input_ids": [int(word[1:]) + 1 for word in text.split()]}
        monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(
            AutoModelForCausalLM=types.SimpleNamespace(
                from_pretrained=lambda folder, **_: TinyLM()),
            AutoTokenizer=types.SimpleNamespace(
                from_pretrained=lambda folder, **_: tokenize)))
        return folder, text
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(
        folder)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, initializer_range=0.3)).save_pretrained(folder)
    return folder, text

def test_bench_a_language_model_under_each_recipe(
        elsewhere, tiny_llama, monkeypatch, capsys):
    import transformers
    monkeypatch.setattr(bench, "WINDOW", 16)
    folder, text = tiny_llama
    command = f"lm {folder} --text {text} --windows 5 --dtype float32"
    bench.main(command.split())
    assert "`v_proj`" in capsys.readouterr().out and (bench.OUT / "lm.png").exists()
    found = json.loads((bench.OUT / "lm.json").read_text())
    # BF16's losses are those that the model itself gives for these windows
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([int(word[1:]) + 1 for word in text.read_text().split()])
    ids = ids[:23 * 17].view(23, 17)[[0, 5, 11, 16, 22]]
    losses = [model(row[None], labels=row[None]).loss.item() for row in ids]
    assert found["losses"]["bf16"] == pytest.approx(losses, abs=1e-4)
    assert set(found["losses"]) == {"bf16", *sum(bench.LM_GROUPS.values(), ())}
    # Weights alone have about half the noise of weights and activations
    for both, weights in zip(bench.SQUARE, ("e2m1-weights", "e2m1-full-rht-weights",
                                            "ufp4-weights-rht-wgrad", "ufp4-weights")):
        for kind, (noise, _) in found["noise"][both].items():
            assert 0.3 < found["noise"][weights][kind][0] / noise < 0.7
    # All kinds of layers but the head, which no recipe touches
    kinds = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    kinds = {name.split(".")[-1] for name in kinds} - {"lm_head"}
    assert all(set(of) == kinds for of in (*found["noise"].values(),
                                           *found["cosines"].values()))
    assert len(found["medians"]) == 9 * len(kinds)
    assert all(0.5 < cos < 1 for cos in found["cosines"]["ufp4"].values())
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match="pip install transformers accelerate gguf"):
        bench.main(command.split())

def test_bench_a_language_model_trains_on_and_a_stopped_command_goes_on(
        elsewhere, tiny_llama, monkeypatch, capsys):
    monkeypatch.setattr(bench, "WINDOW", 16)
    folder, text = tiny_llama
    command = (f"lm {folder} --text {text} --windows 5 --dtype float32 --train 4 "
               "--seeds 2").split()
    bench.main(command)
    assert "interaction" in capsys.readouterr().out
    found = json.loads((bench.OUT / "lm-train.json").read_text())["runs"]
    assert len(found) == 2 * 5
    for run in found:
        assert len(run["train"]) == 4 and len(run["in 4 bits"]) == 5
        assert (run["in 4 bits"] == run["in BF16"]) == (run["row"] == "bf16")
    # Each recipe starts from the same weights, with the same windows
    first = {(run["row"], run["seed"]): run["train"][0] for run in found}
    assert first["ufp4", 0] != first["ufp4", 1]
    assert abs(first["ufp4", 0] - first["bf16", 0]) < 0.3
    lost = next(bench.OUT.rglob("ufp4-s1.json"))
    lost.unlink()
    kept = {path: path.stat().st_mtime_ns for path in lost.parent.iterdir()}
    bench.main(command)                         # makes what is not there, and the same
    again = json.loads((bench.OUT / "lm-train.json").read_text())["runs"]
    assert again == found and lost.exists()
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())
