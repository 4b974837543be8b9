"""Each test states one property and compares it with an oracle of its own: codes
written out by hand, exact fractions, float64, brute force.

Those of ufp4.py alone: pytest -k core test_ufp4.py"""
import argparse
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import http.server
import io
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
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
from torch.utils._python_dispatch import TorchDispatchMode

# Set before triton is imported, this runs its kernels on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import bench
import train
import ufp4
from data import prepare
from ufp4 import (E1M2, E2M1, FORMATS, GEMMS, RECIPES, SCALES, Quantizer, Recipe,
                  fake_quantize, quantize, random_key, random_signs, random_uniform,
                  rotate)

HERE = Path(__file__).resolve().parent
LECTURE = (HERE / "ufp4.py").read_text().split("# =================== Part II")[0]
INF, NAN = math.inf, math.nan
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max
SCALE_BLOCKS = (("fp32", 16), ("e4m3", 16), ("e4m3_up", 16),
                ("e8m0", 32), ("e8m0_up", 32))
# The formats, written out by hand: magnitudes by code, and the grids that are used
MAGNITUDES = {"e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6], "int4": [0, 1, 2, 3, 4, 5, 6, 7],
              "e1m2": [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]}
GRIDS = MAGNITUDES | {f"e2m1-max{m}": [v for v in MAGNITUDES["e2m1"] if v <= m]
                      for m in (2, 3, 4)}
QUANTIZED = ("ufp4", "e2m1", "ufp4-int4", "ufp4-e4m3", "ufp4-mx", "e2m1-full-rht",
             "nvfp4", "mxfp4")
every_format = pytest.mark.parametrize("name", GRIDS)
every_scale = pytest.mark.parametrize("scale,block", SCALE_BLOCKS)

@pytest.fixture(autouse=True)
def seeded_and_eager():
    """What a test draws from torch's default generator does not depend on the tests
    before it.

    What takes seconds to compile runs eagerly, but in tests of torch.compile, with
    @compiling()."""
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        yield

compiling = functools.partial(torch.compiler.set_stance, "default")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"),
                                    reason="no C++ compiler here")

def gen(seed=0):
    return torch.Generator().manual_seed(seed)

def same_bits(a, b):
    """Equal bit for bit, the sign of zero included; NaN equals NaN."""
    nan = a.isnan() & b.isnan()
    return (a.dtype == b.dtype
            and bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all()))

def adversarial():
    """(48, 64) float32: ties, -0.0, a huge value;
    the first 9 rows have float32's extremes."""
    g = gen(7)
    rows = [torch.randn(64, generator=g) * size for size in (1e-40, 1e-44, 1e-30, 1e37)]
    rows += [torch.full((64,), v) for v in (0.0, -0.0, SMALLEST, LARGEST, -LARGEST)]
    spike = torch.randn(64, generator=g) * 1e-3
    spike[5] = 1e4
    eighths = torch.arange(64) / 8 - 4
    return torch.stack(rows + [spike, eighths, *torch.randn(37, 64, generator=g)])

def slope(q, x):
    """<Q(x), x> / <x, x>, and its standard error if the rows are independent."""
    qx, xx = ((v.double() * x.double()).flatten(1).sum(1) for v in (q, x))
    alpha = qx.sum() / xx.sum()
    return alpha.item(), ((qx - alpha * xx).square().sum().sqrt() / xx.sum()).item()

def close(got, expected, length):
    """Equal up to roundings, to float32, of a sum of `length` products."""
    size = expected.detach().abs().max() * length**0.5
    bound = float(size * 2**-22)
    return torch.allclose(got.double(), expected.double(), rtol=0, atol=bound)

# ---- Formats, rounding to nearest, scales --------------------------------------------
@pytest.mark.parametrize("name", MAGNITUDES)
def test_core_levels_and_all_16_codes(name):
    codes = [c for c in range(16) if not (name == "int4" and c == 8)]           # no -8
    if name == "int4":
        values = [float(c - 16 if c > 7 else c) for c in codes]
    else:
        values = [math.copysign(MAGNITUDES[name][c & 7], -1 if c & 8 else 1)
                  for c in codes]
    assert list(FORMATS[name].levels) == MAGNITUDES[name]
    codes, x = (codes + [0])[:16], torch.tensor((values + [0.0])[:16])
    assert not quantize(torch.zeros(16), name).codes.any()
    q = quantize(x, name)                   # amax is g_max, so the scale is 1
    assert q.scale.tolist() == [1.0] and same_bits(q.dequantize(), x)
    packed = [low + 16 * high for low, high in zip(codes[::2], codes[1::2])]
    assert q.codes.tolist() == packed

@every_format
def test_core_nearest_rounding_is_brute_force_with_ties_to_even(name):
    levels = [Fraction(v) for v in GRIDS[name]]
    ties = np.array([(a + b) / 2 for a, b in zip(levels, levels[1:])], dtype=np.float32)
    points = np.concatenate([ties, *(np.nextafter(ties, np.float32(v)) for v in (0, 9)),
                             np.linspace(0, GRIDS[name][-1], 2001, dtype=np.float32)])
    nearest = []
    for a in points.tolist():
        distances = [abs(Fraction(a) - level) for level in levels]
        nearest.append(min(range(len(levels)), key=lambda i: (distances[i], i % 2)))
    grid = torch.tensor(GRIDS[name]).float()
    expected, points = grid[nearest], torch.from_numpy(points)
    # This makes the scale of each block 1.
    top = torch.full_like(points, GRIDS[name][-1])
    x = torch.stack((points, -points, *[top] * 14), 1)
    assert torch.equal(fake_quantize(x, name)[:, :2],
                       torch.stack((expected, -expected), 1))

ODD_GRIDS = ((0, 1), (0, 1, 2.5), (0, 0.1, 0.3), (0, 1, 1.25, 9), (0, 0.01, 5, 5.5, 8),
             (0, 2, 4, 6, 8, 10, 12), (0, 1, 3, 4, 9, 27, 81, 82),
             # NF4's positive levels
             (0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723))

@pytest.mark.parametrize("levels", ODD_GRIDS)
def test_core_any_ascending_grid_rounds_as_numpy_does(levels):
    """Nearest and stochastic, values and codes, against float64."""
    fmt = ufp4.Format("x", levels)
    grid = np.array(levels, dtype=np.float32).astype(float)
    x = torch.randn(512, 64, generator=gen())
    x[0, :8] = torch.tensor(levels + (0.0,) * (8 - len(levels)))    # exact, s = 1
    x[0, 8:16] = levels[-1]
    a = x.abs().view(512, 4, 16)
    s = a.amax(-1, keepdim=True) / torch.tensor(levels[-1], dtype=torch.float32)
    a = (a / s).numpy().astype(float)
    low = (np.searchsorted(grid, a, side="right") - 1).clip(0, len(grid) - 2)
    p = (a - grid[low]) / (grid[low + 1] - grid[low])
    rand = random_uniform(random_key("cpu", gen(5)), x.shape)
    for stochastic, u in (False, 0.5), (True, rand.view(512, 4, 16).numpy()):
        code = low + (p >= u)
        either = np.abs(p - u) < 1e-5                       # rounding errors decide
        q = Quantizer(fmt, stochastic=stochastic)(x, rand).view(512, 4, 16).numpy()
        expected = np.sign(x.view(512, 4, 16).numpy()) * grid[code] * s.numpy()
        assert either.mean() < 1e-3
        assert np.allclose(q[~either], expected[~either], rtol=1e-6, atol=0)
        packed = quantize(x, fmt, stochastic=stochastic, generator=gen(5))
        codes = torch.stack((packed.codes & 7, packed.codes >> 4 & 7), -1)
        assert np.array_equal(codes.view(512, 4, 16).numpy()[~either], code[~either])
        assert np.array_equal(packed.dequantize().view(512, 4, 16).numpy(), q)

@pytest.mark.parametrize("levels", [(0,), (), (0, 2, 1), (0, 1, 1), (1, 2), (-1, 0, 1),
                                    (0, NAN), tuple(range(9)), [0, 1, 2]])
def test_core_what_is_no_grid_is_refused(levels):
    with pytest.raises(ValueError, match="'x' needs a tuple of two to eight levels"):
        ufp4.Format("x", levels)

@every_format
def test_core_the_gaussian_slope_in_closed_form_is_what_is_measured(name):
    x = torch.randn(150_000, 16, generator=gen())
    y = fake_quantize(x, name)
    (alpha, se), closed = slope(y, x), bench.gaussian_slope(GRIDS[name])
    assert abs(alpha - closed) < 4 * se < 1e-3
    assert name not in ("e2m1", "e1m2") or f"{closed:.4f}" in LECTURE

@pytest.mark.parametrize("name", ["e2m1", "e1m2"])
@pytest.mark.parametrize("scale", ["e4m3", "e4m3_up"])
def test_core_e4m3_scales_are_in_the_table_of_e4m3_numbers(name, scale):
    # All of them but the 128th, which is NaN.
    table = np.array([(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7)
                      for e in range(16) for m in range(8)][:127])
    assert table[-1] == 448
    g_max, one = np.float32(GRIDS[name][-1]), np.float32(1)
    t = one / (448 * g_max)
    largest_level = g_max * table.astype(np.float32) * t        # by a block's scale
    near = [np.nextafter(largest_level, np.float32(to)) for to in (0, 2)]
    amax = np.concatenate((10 ** np.linspace(-9, 0, 3000), largest_level, *near))
    amax = amax.astype(np.float32).clip(0, 1)                   # the largest is 1
    s, got_t = SCALES[scale](torch.from_numpy(amax), GRIDS[name][-1])
    assert got_t == t
    reaches = np.searchsorted(largest_level, amax).clip(0, 126)     # the first one
    r = (amax / g_max / t).astype(np.float64)
    above = np.searchsorted(table, r).clip(1, 126)          # the smallest that is >= r
    up, down = table[above] - r, r - table[above - 1]
    nearest = np.where((down < up) | (down == up) & (above % 2 == 1), above - 1, above)
    expected = table[reaches if scale == "e4m3_up" else nearest]
    assert np.array_equal(s.double().numpy(), expected)

@every_scale
@every_format
def test_core_a_result_is_quantized_to_itself(name, scale, block):
    """But uniform formats with e4m3_up, as its docstring says."""
    x = torch.randn(128, 128, generator=gen())
    changed = 0.0
    for v in x, x.bfloat16():
        y = fake_quantize(v, name, scale, block)
        changed += (fake_quantize(y, name, scale, block) != y).float().mean().item() / 2
    if scale == "e4m3_up" and name in ("e1m2", "int4"):
        doc = " ".join(ufp4.scale_e4m3_up.__doc__.split())
        assert f"changes {changed:.0%} of" in doc
    else:
        assert changed == 0

@pytest.mark.parametrize("name,top", [("e2m1", 2), ("e1m2", 0), ("int4", 2)])
def test_core_e8m0_scales_are_the_powers_of_two_that_frexp_gives(name, top):
    amax = torch.rand(2000, generator=gen()).mul(60).sub(30).exp2()
    corners = torch.tensor([1.75, 6, 7, 14, 1e-45, 1e-39, 1.5e-38, 3e-38, 5e-38, 1e-37,
                            3e38])
    amax = torch.cat((amax, corners))
    neighbours = [torch.nextafter(amax, torch.tensor(to)) for to in (1e-45, INF)]
    amax = torch.cat((amax, *neighbours))
    quotients = (amax.numpy() / np.float32(GRIDS[name][-1])).clip(SMALLEST).tolist()
    floor = [math.frexp(a)[1] - 1 - top for a in amax.tolist()]         # OCP's rule
    ceil = [math.frexp(q)[1] - (math.frexp(q)[0] == 0.5) for q in quotients]
    for scale, exponents in ("e8m0", floor), ("e8m0_up", ceil):
        s = [2.0 ** min(max(e, -127), 127) for e in exponents]
        assert SCALES[scale](amax, GRIDS[name][-1])[0].tolist() == s

@every_format
def test_core_fp32_scales_are_amax_over_g_max_and_amax_survives(name):
    x, g_max = torch.randn(500, 4, 16, generator=gen()), GRIDS[name][-1]
    amax = x.abs().amax(-1)
    expected = amax.numpy() / np.float32(g_max)
    assert np.array_equal(SCALES["fp32"](amax, g_max)[0], expected)
    assert ((fake_quantize(x, name).abs().amax(-1) - amax).abs() <= 2**-23 * amax).all()

@every_format
def test_core_tiles_share_a_scale_and_quantize_transposes_alike(name):
    w = torch.randn(48, 64, generator=gen())
    q, amax = quantize(w, name, tiles=True), w.view(3, 16, 4, 16).abs().amax((1, 3))
    assert np.array_equal(q.scale[::16], amax / np.float32(GRIDS[name][-1]))
    assert torch.equal(q.scale.unflatten(0, (3, 16)),
                       q.scale[::16, None].expand(3, 16, 4))
    assert torch.equal(q.dequantize(), quantize(w.T, name, tiles=True).dequantize().T)

@every_scale
@every_format
def test_core_four_bits_keep_every_value(name, scale, block):
    """quantize().dequantize() is what a Quantizer gives,
    for any dtype, strides and rounding."""
    # Either way x is (32, 64).
    x = adversarial()[:32] if scale[:4] != "e4m3" else adversarial()[9:41]
    for stochastic, tiles in itertools.product((False, True), repeat=2):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for v in x.to(dtype), x.to(dtype).T.contiguous().T:
                packed = quantize(v, name, scale, block, stochastic, gen(1), tiles)
                assert (packed.codes.shape == (32, 32)
                        and packed.codes.dtype == torch.uint8)
                assert packed.scale.shape == (32, 64 // block)
                q = Quantizer(FORMATS[name], SCALES[scale], block, None,
                              stochastic, tiles)
                y = q(v, random_uniform(random_key("cpu", gen(1)), v.shape))
                assert torch.equal(packed.dequantize().nan_to_num(7e7),
                                   y.nan_to_num(7e7))

@every_scale
@every_format
@pytest.mark.parametrize("stochastic", [False, True])
def test_core_corners(name, scale, block, stochastic):
    f = functools.partial(fake_quantize, fmt=name, scale=scale, block=block,
                          stochastic=stochastic)
    for bad in (NAN, INF, -INF):
        x, lost = torch.ones(2, 64), torch.zeros(2, 64, dtype=torch.bool)
        x[0, 37], lost[0, 32:32 + block] = bad, True    # its block is lost ...
        lost |= scale.startswith("e4m3")                # or with two levels, all
        assert torch.equal(f(x).isnan(), lost) and torch.equal(f(x).isfinite(), ~lost)
    assert f(torch.full((1, 64), 1e38)).isfinite().all()
    # It may round up, to infinity.
    assert (f(torch.full((1, 64), LARGEST)) > 1e38).all()
    assert f(torch.zeros(3, 0, 32)).shape == (3, 0, 32)
    for flush in (True, False):                         # a CPU's option, for speed
        torch.set_flush_denormal(flush)
        y = f(torch.zeros(2, 64))
        torch.set_flush_denormal(False)
        assert (y == 0).all()

def test_core_results_are_float32_whatever_the_default_dtype():
    x = torch.randn(64, 64)
    expected = [(fake_quantize(x, "int4", s), ufp4.linear(x, x, "nvfp4"))
                for s in SCALES]
    try:
        torch.set_default_dtype(torch.float64)
        got = [(fake_quantize(x, "int4", s), ufp4.linear(x, x, "nvfp4"))
               for s in SCALES]
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(itertools.chain(*got), itertools.chain(*expected)):
        assert same_bits(a, b)

zeros = torch.zeros
ufp4_with = functools.partial(replace, RECIPES["ufp4"])

def experts(*offsets, tokens=32, dtype=torch.int64):
    return ufp4.linear(zeros(tokens, 16), zeros(3, 16, 16), "ufp4",
                       torch.tensor(offsets, dtype=dtype))

@pytest.mark.parametrize("message,call", [
    ("whole blocks: got .* .2, 40., block = 16", lambda: quantize(zeros(2, 40))),
    ("whole blocks: got .* .2, 15., block = 5",
     lambda: quantize(zeros(2, 15), block=5)),
    ("whole blocks: got .* block = 0", lambda: quantize(zeros(2, 32), block=0)),
    ("takes floats .* got torch.float32 .., block = 16", lambda: quantize(zeros(()))),
    ("whole blocks: got .* .4, 0., block = 16", lambda: quantize(zeros(4, 0))),
    ("with tiles the rows.* .8, 32.", lambda: quantize(zeros(8, 32), tiles=True)),
    ("with tiles the rows.* .32,.", lambda: quantize(zeros(32), tiles=True)),
    ("takes floats .* got torch.int64", lambda: quantize(zeros(2, 32).long())),
    ("'e5m2'.*e2m1, e1m2, int4", lambda: quantize(zeros(2, 32), "e5m2")),
    ("'fp8'.*fp32, e4m3, e4m3_up", lambda: Recipe("mine", "int4", "fp8")),
    ("'nope'.*bf16, ufp4", lambda: ufp4.Linear(16, 16, recipe="nope")),
    ("rht takes .* some of fprop, dgrad, wgrad, not 'wgrad'",
     lambda: ufp4_with(rht="wgrad")),
    ("a power of two, not 12", lambda: ufp4_with(rht_block=12)),
    ("multiples of 240", lambda: ufp4.Linear(32, 32, recipe=ufp4_with(block=15))),
    ("multiples of 30",
     lambda: ufp4.Linear(45, 45, recipe=ufp4_with(block=15, rht=()))),
    ("X .4, 32. .* W .16, 48.",
     lambda: ufp4.linear(zeros(4, 32), zeros(16, 48), "ufp4")),
    ("X .4, 32. .* W .2, 16, 32.",
     lambda: ufp4.linear(zeros(4, 32), zeros(2, 16, 32), "ufp4")),
    ("float16 needs kernels.py",
     lambda: ufp4.linear(zeros(16, 16).half(), zeros(16, 16), "ufp4")),
    ("the last must be the number of tokens, 32; got .5, 5, 30.",
     lambda: experts(5, 5, 30)),
    ("the last must be the number of tokens, 32; got .5, 5, 33.",
     lambda: experts(5, 5, 33)),
    ("must ascend, .* got .9, 5, 32.", lambda: experts(9, 5, 32)),
    ("must ascend, .* got .-1, 5, 32.", lambda: experts(-1, 5, 32)),
    ("integer offsets .E,.; .* .2,. of", lambda: experts(5, 32)),
    ("integer offsets .* torch.float32",
     lambda: experts(5, 9, 32, dtype=torch.float32)),
])
def test_core_bad_arguments_are_named(message, call):
    with pytest.raises(ValueError, match=message):
        call()

# ---- Stochastic rounding, by its law -------------------------------------------------
@every_scale
@pytest.mark.parametrize("name", MAGNITUDES)
def test_core_the_stochastic_slope_is_one_unless_the_scale_clips(name, scale, block):
    x = torch.randn(32768, 64, generator=gen(1))
    q = Quantizer(FORMATS[name], SCALES[scale], block, stochastic=True)
    alpha, se = slope(q(x), x)
    clips = scale in ("e4m3", "e8m0")
    assert se < 4e-4 and (alpha < 1 - 5 * se if clips else abs(alpha - 1) < 4 * se)

@every_format
def test_core_over_all_random_bits_a_number_is_the_mean_of_its_neighbours(name):
    """Each of the 65536 random numbers once."""
    grid = torch.tensor(GRIDS[name]).double()
    a = torch.cat((torch.linspace(0, GRIDS[name][-1], 100), grid.float()))[:, None]
    q = FORMATS[name].round(a, (torch.arange(65536) + 0.5) * 2.0**-16).double()
    above = torch.searchsorted(grid, a.double(), right=True).clamp(max=len(grid) - 1)
    below, above = grid[above - 1], grid[above]
    assert ((q == below) | (q == above)).all() and (q[100:] == grid[:, None]).all()
    assert ((q.mean(1, keepdim=True) - a).abs() <= (above - below) * 2.0**-17).all()

@pytest.mark.parametrize("seed", range(3))
def test_core_random_numbers_are_uniform_and_uncorrelated(seed):
    """Mean, variance, a chi-square of the 2^16 values, and the correlations of
    neighbours, of orientations, steps, seeds, and keys that share a number:
    within 4 standard errors of independent uniform numbers."""
    g = gen(seed)
    generators = (g, g, g, gen(seed + 100))
    key, other, later, foreign = (random_key("cpu", i) for i in generators)
    half = torch.stack((key[0], later[1])), torch.stack((later[0], key[1]))
    u, *others = (random_uniform(k, (1024, 1024)).double() - 0.5
                  for k in (key, other, later, foreign, *half))
    others.append(others[0].mT)
    assert abs(u.mean()) * (12 * u.numel()) ** 0.5 < 4
    assert abs(u.square().mean() - 1 / 12) * (180 * u.numel()) ** 0.5 < 4
    counts = torch.bincount(((u + 0.5) * 2**16).long().flatten(), minlength=2**16)
    assert abs((counts - 16).square().sum() / 16 - 65535) < 4 * (2 * 65535) ** 0.5
    pairs = [(u, v) for v in others]
    for d in (1, 2, 3, 16):
        pairs += [(u[d:], u[:-d]), (u[:, d:], u[:, :-d])]
    assert all(abs((a * b).mean()) * 12 * a.numel() ** 0.5 < 4 for a, b in pairs)

def test_core_randomness_comes_from_the_generator_alone():
    x = torch.randn(32, 64, generator=gen())
    before = torch.get_rng_state()
    a, b, c = (fake_quantize(x, stochastic=True, generator=gen(seed))
               for seed in (3, 3, 4))
    quantize(x)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(3)
    assert torch.equal(a, fake_quantize(x, stochastic=True))    # None: the default one

def hadamard(n):
    """The Sylvester-Hadamard matrix over sqrt(n), float64:
    element (i, j) has the sign of the parity of the bits that i and j share."""
    i = np.arange(n)
    signs = [[(-1.0) ** int(a & b).bit_count() for b in i] for a in i]
    return torch.tensor(signs).double() / n**0.5

@pytest.mark.parametrize("n", [1, 2, 16, 128])
def test_core_rht_multiplies_by_signs_and_an_orthonormal_matrix(n):
    h, signs = hadamard(n), random_signs(11, n)
    x, w = (torch.randn(6, 2 * n, generator=gen()),
            torch.randn(5, 2 * n, generator=gen(1)))
    expected = (x.double().view(6, 2, n) * signs.double()) @ h
    assert torch.allclose(rotate(x, signs).double(), expected.view(6, -1),
                          atol=2e-6, rtol=0)
    product = rotate(x, signs) @ rotate(w, signs).T
    assert close(product, x.double() @ w.double().T, 2 * n)
    assert same_bits(rotate(x.T.contiguous().T, signs), rotate(x, signs))
    assert set(signs.tolist()) <= {1.0, -1.0}
    assert n < 16 or not torch.equal(signs, random_signs(12, n))

# ---- The three GEMMs -----------------------------------------------------------------
def numpy_quantizer(x, levels, block, signs, rand, tiles, scale):
    """Q(x) in float64 for x (R, K) in whole blocks, by search in the list of levels."""
    x = x.astype(np.float64)
    if signs is not None:
        n = len(signs)
        x = ((x.reshape(len(x), -1, n) * signs) @ hadamard(n).numpy()).reshape(x.shape)
    blocks = x.reshape(len(x), -1, block)
    amax = np.abs(blocks).max(-1, keepdims=True)
    if tiles:
        shared = amax.reshape(-1, block, *amax.shape[1:]).max(1)
        amax = np.repeat(shared, block, 0)
    s = amax / levels[-1]
    if scale == "e8m0_up":
        s = 2.0 ** np.ceil(np.log2(np.maximum(s, 1e-30)))
    a = np.minimum(np.abs(blocks) / np.where(s == 0, 1, s), levels[-1])
    low = (np.searchsorted(levels, a, side="right") - 1).clip(max=len(levels) - 2)
    below, above = np.take(levels, low), np.take(levels, low + 1)
    fraction = (a - below) / (above - below)
    threshold = 0.5 if rand is None else rand.reshape(a.shape)
    near = np.abs(fraction - threshold)
    up = fraction > 0.5 if rand is None else fraction >= threshold
    q = np.where(up, above, below) * np.sign(blocks) * s
    return q.reshape(x.shape), (near < 1e-4).reshape(x.shape)

@pytest.mark.parametrize("seed", range(30))
def test_core_any_quantizer_equals_forty_lines_of_numpy_in_float64(seed):
    """Random formats, scales, blocks, Hadamard sizes, rounding, tiles, dtypes.

    Numbers that lie within rounding errors of the middle between two levels may go
    either way."""
    r = random.Random(seed)
    name, scale = r.choice(list(GRIDS)), r.choice(("fp32", "e8m0_up"))
    block, n = 2 ** r.randrange(1, 6), 2 ** r.randrange(1, 6)
    signs = r.choice((None, random_signs(seed, n)))
    stochastic, tiles = r.random() < 0.5, r.random() < 0.3
    sizes = torch.randn(64, 1, generator=gen(seed)).exp()
    x = torch.randn(64, 96, generator=gen(seed)) * sizes
    x = x.to(r.choice((torch.float32, torch.bfloat16)))
    rand = 1 - torch.rand(x.shape, generator=gen(seed))
    q = Quantizer(FORMATS[name], SCALES[scale], block, signs, stochastic, tiles)
    expected, either = numpy_quantizer(
        x.float().numpy(), np.array(GRIDS[name], dtype=float), block,
        None if signs is None else signs.numpy(),
        rand.numpy() if stochastic else None, tiles, scale)
    got = q(x, rand).double().numpy()
    assert either.mean() < 0.02
    assert np.allclose(got[~either], expected[~either], rtol=1e-5, atol=1e-7)

def oracle(x, w, dy, recipe, keys):
    """Y, dX, dW in float64 for x (M, K), w (N, K), dy (M, N):
    each operand turned until its blocks lie along rows, rotated and quantized."""
    def q(t, operand, gemm, rand=None):
        if gemm in recipe.rht:
            t = rotate(t, random_signs(recipe.sign_seed, recipe.rht_block))
        return Quantizer(recipe.fmt, recipe.scale, recipe.block, None, rand is not None,
                         recipe.tiles and operand == "w")(t, rand).double()
    m = len(x)
    x, dy = (F.pad(t, (0, 0, 0, -m % ufp4.unit_of(recipe))) for t in (x, dy))
    along, across = (random_uniform(keys[0], dy.shape),
                     random_uniform(keys[1], dy.T.shape))
    y = q(x, "x", "fprop") @ q(w, "w", "fprop").T
    dx = q(dy, "dy", "dgrad", along) @ q(w.T, "w", "dgrad").T
    return y[:m], dx[:m], q(dy.T, "dy", "wgrad", across) @ q(x.T, "x", "wgrad").T

@pytest.mark.parametrize("name", QUANTIZED)
def test_core_autograd_function_is_the_three_quantized_gemms(name, monkeypatch):
    recipe = replace(RECIPES[name], sign_seed=3)
    keys = [random_key("cpu", gen(seed)) for seed in (5, 6)]
    drawn = iter(keys)
    # A key is drawn twice, for dY.
    monkeypatch.setattr(ufp4, "random_key", lambda device: next(drawn))
    # The 75 tokens are not whole blocks.
    x = torch.randn(3, 25, 64, generator=gen(), requires_grad=True)
    dy = torch.randn(3, 25, 96, generator=gen(1)) * 1e-3
    layer = ufp4.Linear(64, 96, recipe=recipe)
    y = layer(x)
    y.backward(dy)
    flat = (t.detach().view(-1, t.shape[-1]) for t in (x, layer.weight, dy))
    ey, edx, edw = oracle(*flat, recipe, keys)
    assert (close((y - layer.bias).view(75, 96), ey, 64)
            and close(x.grad.view(75, 64), edx, 96))
    assert (close(layer.weight.grad, edw, 75)
            and close(layer.bias.grad, dy.double().sum((0, 1)), 75))

@pytest.mark.parametrize("field,value,changed", [
    ("rht", ("fprop",), "y"), ("rht", ("dgrad",), "x"), ("rht", ("wgrad",), "w"),
    ("sr", ("dy",), "xw"), ("sr", ("x",), "yw"), ("sr", ("w",), "yx"),
    ("tiles", True, "yx"), ("fmt", "e2m1", "yxw"), ("scale", "e8m0", "yxw"),
    ("block", 32, "yxw"), ("fmt", "int4", "")])
def test_core_each_field_of_a_recipe_reaches_its_gemm_and_no_other(
        field, value, changed):
    def results(**fields):
        x = torch.randn(64, 64, generator=gen(), requires_grad=True)
        w = torch.randn(32, 64, generator=gen(1), requires_grad=True)
        y = ufp4.linear(x, w, Recipe("mine", **fields))
        return y, *torch.autograd.grad(y, (x, w), torch.randn(64, 32, generator=gen(2)))
    pairs = zip("yxw", results(), results(**{field: value}))
    assert "".join(n for n, a, b in pairs if not torch.equal(a, b)) == changed

@pytest.mark.parametrize("gemm,others", [("fprop", "xw"), ("dgrad", "yw"),
                                         ("wgrad", "yx")])
def test_core_a_gemm_that_a_recipe_leaves_out_is_the_unquantized_one(gemm, others):
    """Said by the recipe's gemms, or by fmt=None in both quantizers of the GEMM, which
    then still rotate: the product is the same."""
    class Without(Recipe):
        def quantizer(self, operand, g):
            q = super().quantizer(operand, g)
            return replace(q, fmt=None) if g == gemm else q

    def results(recipe):
        x = torch.randn(64, 64, generator=gen(), requires_grad=True)
        w = torch.randn(32, 64, generator=gen(1), requires_grad=True)
        torch.manual_seed(2)
        y = ufp4.linear(x, w, recipe)
        dx, dw = torch.autograd.grad(y, (x, w), torch.randn(64, 32, generator=gen(2)))
        return {"y": y, "x": dx, "w": dw}
    fields = {"rht": GEMMS, "sr": ()}
    full, plain = results(Recipe("", **fields)), results(RECIPES["bf16"])
    left = results(Recipe("", gemms=tuple(g for g in GEMMS if g != gemm), **fields))
    (own,) = set("yxw") - set(others)
    assert torch.equal(left[own], plain[own])
    assert all(torch.equal(left[o], full[o]) for o in others)
    rotated = results(Without("", **fields))
    assert close(rotated[own], plain[own], 64)
    assert all(torch.equal(rotated[o], full[o]) for o in others)

@pytest.mark.parametrize("k", [-40, -3, 1, 50])
def test_core_q_of_a_multiple_by_a_power_of_two_is_that_multiple(k):
    """Q(2^k x) = 2^k Q(x) with float32 scales, and other blocks are not seen."""
    x, rand = torch.randn(8, 64, generator=gen()), torch.rand(8, 64, generator=gen(1))
    for fmt, stochastic in itertools.product((E2M1, E1M2), (False, True)):
        q = Quantizer(fmt, signs=random_signs(0), stochastic=stochastic)
        assert torch.equal(q(x * 2.0**k, rand), q(x, rand) * 2.0**k)
        changed = x.clone()
        changed[3, 16:32] *= 7
        other = (q(changed, rand) == q(x, rand)).view(8, 4, 16).all(-1)
        assert other.sum() == 31 and not other[3, 1]

def test_core_the_rotation_decides_which_grid_is_better():
    """Of blocks with an outlier E2M1 has less error, rotated E1M2."""
    x = torch.randn(1000, 16, generator=gen())
    x[:, 3] *= 20
    def error(x, fmt):
        return (fake_quantize(x, fmt) - x).square().mean()
    r = rotate(x, random_signs(0))
    assert error(x, "e2m1") < 0.6 * error(x, "e1m2")
    assert error(r, "e2m1") > 1.5 * error(r, "e1m2")

def test_core_the_largest_bfloat16_numbers_are_nan_or_right():
    x = torch.full((1, 16), 2.0**123, dtype=torch.bfloat16)
    assert torch.isfinite(rotate(x, random_signs(0))).all()
    x = torch.full((1, 16), 2.0**126, dtype=torch.bfloat16)
    q = Quantizer(E1M2, signs=random_signs(0))(x)
    assert q.isnan().all()

class FixedPoint(Quantizer):
    """An experiment that no format describes: multiples of 1/64."""
    def __call__(self, x, rand=None):
        return torch.round(x.float() * 64) / 64

class FixedPointRecipe(Recipe):
    def quantizer(self, operand, gemm):
        return FixedPoint(E1M2)

def test_core_an_experiment_without_codes_reaches_all_three_gemms():
    x, dy = (torch.randn(20, 32, generator=gen(), requires_grad=True),
             torch.randn(20, 16))
    layer = ufp4.Linear(32, 16, bias=False, recipe=FixedPointRecipe("mine"))
    y = layer(x)
    y.backward(dy)
    a, b, c = (torch.round(t.detach().double() * 64) / 64
               for t in (x, layer.weight, dy))
    assert close(y, a @ b.T, 32) and close(x.grad, c @ b, 16)
    assert close(layer.weight.grad, c.T @ a, 20)

def test_core_gradients_are_unbiased_under_stochastic_rounding():
    """Over draws of dY's random bits, dX and dW tend to the products with dY
    unquantized."""
    x = torch.randn(32, 64, generator=gen(), requires_grad=True)
    w = torch.randn(48, 64, generator=gen(1), requires_grad=True)
    dy, signs, q = (torch.randn(32, 48, generator=gen(2)), random_signs(0),
                    Quantizer(E1M2))
    y = ufp4.linear(x, w, "ufp4")
    draws = [torch.autograd.grad(y, (x, w), dy, retain_graph=True) for _ in range(400)]
    dx = rotate(dy, signs) @ q(rotate(w.detach().T, signs)).T
    dw = rotate(dy.T, signs) @ q(rotate(x.detach().T, signs)).T
    for expected, got in zip((dx, dw), map(torch.stack, zip(*draws))):
        z = (got.mean(0) - expected) / (got.std(0) / 20)
        assert abs(z.mean()) < 0.15 and 0.9 < z.std() < 1.1     # a row shares its bits

@pytest.mark.parametrize("name", ["bf16", *QUANTIZED])
def test_core_grouped_is_a_loop_over_experts(name, monkeypatch):
    monkeypatch.setattr(ufp4, "random_uniform",
                        lambda key, shape: torch.full(shape, 0.3))
    recipe, sizes = RECIPES[name], [5, 0, 32, 17, 0, 1]     # ragged, and some empty
    offsets = torch.tensor(sizes).cumsum(0)
    x, w = (torch.randn(55, 64, generator=gen()),
            torch.randn(6, 32, 64, generator=gen(1)))
    dy = torch.randn(55, 32, generator=gen(2))
    # Experts share a scale here, so each gets the same amax.
    if recipe.scale in (ufp4.scale_e4m3, ufp4.scale_e4m3_up):
        recipe = replace(recipe, rht=())
        x[offsets - 1, 0] = dy[offsets - 1, 0] = w[:, 0, 0] = 9.0
    x.requires_grad_(), w.requires_grad_()
    y = ufp4.linear(x, w, recipe, offsets)
    parts = torch.cat([ufp4.linear(xe, we, recipe)
                       for xe, we in zip(x.split(sizes), w)])
    (dx, dw), (edx, edw) = (torch.autograd.grad(v, (x, w), dy) for v in (y, parts))
    assert close(y, parts, 64) and close(dx, edx, 32) and close(dw, edw, 32)
    assert ((dw[[1, 4]] == 0).all()
            and torch.equal(ufp4.linear(x, w, recipe, offsets.int()), y))

@pytest.mark.parametrize("dtype,autocast", [
    (torch.bfloat16, True), (torch.bfloat16, False),
    (torch.float64, True), (torch.float64, False)])
def test_core_dtypes_and_autocast(dtype, autocast):
    """Autocast casts to bfloat16, but leaves float64 alone,
    as that of F.linear does."""
    cast = autocast and dtype == torch.bfloat16
    layer = ufp4.Linear(64, 48, bias=False, dtype=None if cast else dtype)
    x = torch.randn(20, 64, generator=gen(), dtype=layer.weight.dtype,
                    requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
        assert y.dtype == dtype == F.linear(x, layer.weight).dtype
    a, b = (fake_quantize(rotate(v.detach(), layer.recipe.signs)).to(dtype).double()
            for v in (x.to(dtype), layer.weight))
    eps = torch.finfo(dtype).eps            # of the result, and of a sum in float32
    bound = eps / 2 * (a @ b.T).abs() + min(eps * 64, 2**-18) * (a.abs() @ b.abs().T)
    assert ((y - a @ b.T).abs() <= bound).all()
    y.double().sum().backward()
    assert x.grad.dtype == x.dtype and layer.weight.grad.dtype == layer.weight.dtype

def test_core_a_frozen_operand_changes_nothing_for_the_other():
    x, w, found = torch.randn(20, 32), torch.randn(48, 32), []
    dy, recipe = torch.randn(20, 48), ufp4_with(sr=())
    for need_x, need_w in (True, True), (True, False), (False, True):
        x, w = x.detach().requires_grad_(need_x), w.detach().requires_grad_(need_w)
        ufp4.linear(x, w, recipe).backward(dy)
        found.append((x.grad, w.grad))
    (dx, dw), (same_dx, none), (nothing, same_dw) = found
    assert (none is nothing is None and torch.equal(dx, same_dx)
            and torch.equal(dw, same_dw))

@pytest.mark.parametrize("name", ["bf16", "ufp4"])
def test_core_no_tokens_are_no_error(name):
    for w, offsets in (zeros(32, 16), None), (zeros(3, 32, 16), zeros(3).int()):
        x, w = zeros(0, 16, requires_grad=True), w.requires_grad_()
        y = ufp4.linear(x, w, name, offsets)
        y.sum().backward()
        assert y.shape == (0, 32) and x.grad.shape == (0, 16) and not w.grad.any()

def test_core_bf16_is_plain_and_there_is_no_second_derivative():
    layer, x = (ufp4.Linear(20, 40, recipe="bf16"),
                torch.randn(16, 20, requires_grad=True))
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    loss = ufp4.linear(x[:, :16], layer.weight[:32, :16], "ufp4").square().sum()
    with pytest.raises(RuntimeError, match="only a first derivative"):
        torch.autograd.grad(loss + x.square().sum(), x, create_graph=True)

def first(f, x, w):
    """df/dx and df/dw by autograd."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    return torch.autograd.grad(f(x, w), (x, w))

def squares_of_gradients(f):
    return lambda x, w: sum(g.square().sum() for g in func.grad(f, (0, 1))(x, w))

def twice(f, unused=False):
    def differentiate(x, w):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        dx, dw = torch.autograd.grad(f(x, w) + x.square().sum(), (x, w),
                                     create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x, allow_unused=unused)
    return differentiate

func = torch.func
DERIVATIVES = {
    "autograd": lambda f: lambda x, w: first(f, x, w),      # the only one that is right
    "grad": lambda f: func.grad(f, (0, 1)),
    "vjp": lambda f: lambda x, w: func.vjp(f, x, w)[1](torch.ones((), dtype=x.dtype)),
    "jacrev": lambda f: func.jacrev(f, (0, 1)),
    "vmap of grad": lambda f: lambda x, w: [
        g[1] for g in func.vmap(func.grad(f, (0, 1)))(*(torch.stack((t, t))
                                                        for t in (x, w)))],
    "grad of vmap": lambda f: func.grad(
        lambda x, w: func.vmap(f, (0, None))(x[None], w).sum(), (0, 1)),
    "grad of grad": lambda f: func.grad(squares_of_gradients(f), (0, 1)),
    "jacrev of grad": lambda f: func.jacrev(func.grad(f, (0, 1)), (0, 1)),
    "hvp": lambda f: lambda x, w: func.jvp(func.grad(f, (0, 1)), (x, w), (x, w)),
    "hessian": lambda f: func.hessian(f, (0, 1)),
    "jvp": lambda f: lambda x, w: func.jvp(f, (x, w), (x, w)),
    "jacfwd": lambda f: func.jacfwd(f, (0, 1)),
    "twice": twice, "twice, unused": functools.partial(twice, unused=True)}

def losses():
    """Losses of x, w through a product, a module, and experts; and x and w for each."""
    recipe, layer = ufp4_with(sr=()), ufp4.Linear(32, 48, bias=False)
    layer.recipe, offsets = recipe, torch.tensor([5, 5, 32])
    x, w = torch.randn(32, 32), torch.randn(48, 32)
    experts = x.bfloat16(), torch.randn(3, 48, 32, dtype=torch.bfloat16)
    yield lambda x, w: ufp4.linear(x, w, recipe).square().sum(), x, w
    module = functools.partial(func.functional_call, layer)
    yield lambda x, w: module({"weight": w}, x).square().sum(), x, w
    yield lambda x, w: ufp4.linear(x, w, recipe, offsets).square().sum(), *experts

@compiling()
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_core_a_derivative_is_right_or_an_error(name, mode):
    """Never a third thing. That of autograd is right, also through functional_call."""
    for f, x, w in losses():
        derivative = DERIVATIVES[name](f)
        if mode == "compiled":
            torch._dynamo.reset()
            derivative = torch.compile(derivative, backend="aot_eager")
        if name == "autograd":
            assert all(map(torch.equal, derivative(x, w), first(f, x, w)))
        else:
            with pytest.raises(RuntimeError):
                derivative(x, w)

def test_core_a_traced_layer_that_is_trained_is_an_error():
    """Its graph would have the derivative of rounding, which is 0."""
    layer, x = ufp4.Linear(32, 16, bias=False), torch.randn(16, 32)
    exported = torch.export.export(layer, (x,), strict=False).module()
    traced = torch.fx.experimental.proxy_tensor.make_fx(layer)(x)
    for f in exported, traced:
        assert torch.equal(f(x), layer(x))
        with pytest.raises(RuntimeError, match="does not require grad"):
            f(x).sum().backward()

# ---- torch.compile: of the quantizer, and by a user ----------------------------------
class ByRow(Quantizer):
    def __call__(self, x, rand=None):
        return super().__call__(x, rand) * x.abs().amax(-1, keepdim=True)

def scale_by_row(amax, g_max):
    return amax / g_max, amax.amax(-2, keepdim=True)

@compiling()
@needs_compiler
@pytest.mark.filterwarnings("error:torch.compile failed")
@pytest.mark.parametrize("quantizer", [
    Quantizer(E2M1, ufp4.scale_e4m3, tiles=True, stochastic=True),
    Quantizer(E1M2, signs=random_signs(1, 2)),
    ByRow(E1M2), Quantizer(E1M2, scale_by_row)])
def test_compiled_is_eager_bit_for_bit_for_all_signs(quantizer):
    x = (torch.randn(256, 192, generator=gen())
         * 10 ** torch.randn(256, 1, generator=gen(1)))
    x[64:96] *= 1e-40
    x[3, 40], x[50, 60] = (0.0, -0.0) if quantizer.stochastic else (NAN, INF)
    counters, before = torch._dynamo.utils.counters["stats"], None
    for seed, v in ((1, x.T.contiguous().T), (2, x), (3, x.T[:, :224])):
        if quantizer.signs is not None:
            quantizer.signs = torch.tensor(
                [[1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]][seed - 1])
        torch.manual_seed(seed)
        fast = ufp4.run(quantizer, torch.float32, v)
        torch.manual_seed(seed)
        slow = ufp4.run_with_key(quantizer, v, random_key("cpu"), torch.float32)
        assert same_bits(fast, slow)
        # Another seed compiles nothing.
        assert before in (None, counters["unique_graphs"])
        before = counters["unique_graphs"]
    assert before and not ufp4.FAILED
    narrow = ufp4.run(quantizer, torch.bfloat16, x)        # a wide W, under autocast
    torch.manual_seed(0)
    key = random_key("cpu") if quantizer.stochastic else None
    if key is None:
        assert torch.equal(narrow.nan_to_num(7.0),
                           quantizer(x).bfloat16().nan_to_num(7.0))

@compiling()
@pytest.mark.parametrize("dynamic", [None, True])
def test_core_layers_of_several_recipes_compile_without_graph_breaks(dynamic):
    for name in "ufp4", "nvfp4":
        model = ufp4.Linear(32, 16, recipe=replace(RECIPES[name], rht_block=2))
        compiled = torch.compile(model, fullgraph=True, backend="eager",
                                 dynamic=dynamic)
        x, grads = torch.randn(20 if name == "ufp4" else 32, 32, requires_grad=True), []
        for f in model, compiled:
            torch.manual_seed(1)
            y = f(x).square().sum()
            grads.append(torch.autograd.grad(y, (x, *model.parameters())))
        assert all(map(torch.equal, *grads))

@compiling()
def test_core_a_layer_is_exported_for_any_number_of_tokens():
    layer = ufp4.Linear(32, 16)
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    exported = torch.export.export(layer, (zeros(32, 32),),
                                   dynamic_shapes=({0: tokens},))
    for n in 1, 48, 100:
        x = torch.randn(n, 32)
        assert torch.equal(exported.module()(x), layer(x))

@compiling()
@pytest.mark.filterwarnings("error:torch.compile failed")
def test_core_tensors_without_data_are_not_compiled():
    with torch.device("meta"):
        assert ufp4.Linear(128, 256)(torch.randn(256, 128)).sum().backward() is None
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        assert ufp4.Linear(128, 256)(torch.randn(256, 128)).sum().backward() is None

def test_core_without_a_compiler_it_says_so_and_gives_the_same_bits(monkeypatch):
    def fail(*args):
        raise RuntimeError("no compiler is found")
    x = torch.randn(256, 256, generator=gen())
    expected = [ufp4.linear(x, x, name) for name in ("e2m1", "ufp4")]
    monkeypatch.setattr(ufp4, "FAILED", set())
    monkeypatch.setattr(ufp4, "compiled", lambda f: fail)
    message = "C.. compiler is missing, .*no compiler is found"
    with pytest.warns(UserWarning, match=message) as warned:
        results = [ufp4.linear(x, x, name)
                   for name in ("e2m1", "ufp4") for _ in range(2)]
    assert len(warned) == 2 and all(map(torch.equal, results[::2], expected))

# ---- convert -------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embed.weight
        self.a, self.b = (nn.Linear(16, 32),
                          nn.Linear(32, 16, bias=False, dtype=torch.bfloat16))
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.again = self.inner[0]                      # one module in two places

def test_core_convert_keeps_everything_but_the_arithmetic():
    m, x = Tied(), torch.randn(4, 16, generator=gen())
    before = {k: (v.data_ptr(), v.dtype) for k, v in m.state_dict().items()}
    assert ufp4.convert(m, "e2m1") is m
    assert {k: (v.data_ptr(), v.dtype) for k, v in m.state_dict().items()} == before
    for layer in m.a, m.b, m.again:
        assert type(layer) is ufp4.Linear and layer.recipe.name == "e2m1"
    assert m.again is m.inner[0] and type(m.lm_head) is nn.Linear
    assert torch.equal(m.a(x), ufp4.linear(x, m.a.weight, "e2m1") + m.a.bias)
    ufp4.convert(m, "ufp4", skip=("inner", "lm_head"))  # again, to another recipe
    assert (m.a.recipe.name == "ufp4" and m.inner[0].recipe.name == "e2m1"
            and "=ufp4" in repr(m))
    for skip in (("lm_head",), (), []):                 # one layer, no lm_head
        assert type(ufp4.convert(nn.Linear(16, 16), skip=skip)) is ufp4.Linear
    m.lm_head = m.a = nn.Linear(16, 32)                 # skipped, under either name
    assert type(ufp4.convert(m).a) is nn.Linear

class Conv1D(nn.Module):
    """As in GPT-2: a weight of its own."""
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32))

def test_core_convert_names_what_it_leaves_unquantized():
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), Conv1D(), Conv1D(),
                          nn.LazyLinear(16), nn.LayerNorm(16),
                          nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))
    with pytest.warns(UserWarning, match="quantized 16% of the weights.*: 2 x Conv1D, "
                      "1 x LazyLinear, 1 x ParametrizationList$"):
        ufp4.convert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ufp4.convert(nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32)))
        ufp4.convert(Tied())

@pytest.mark.filterwarnings("ignore:convert has quantized")
def test_core_convert_reaches_a_transformer_layer_in_eval_mode():
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    model, x = ufp4.convert(copy.deepcopy(plain), skip=()), torch.randn(2, 16, 32)
    with torch.no_grad():               # a fast path would skip the converted layers
        assert (model(x) - plain(x)).abs().max() > 1e-3

def test_core_noise_is_the_split_of_each_output_and_leaves_no_trace():
    """Against float64, with biases, a layer that is used twice, one that is skipped."""
    torch.manual_seed(0)
    inner = nn.Linear(32, 32)
    model = ufp4.convert(nn.Sequential(nn.Linear(16, 32), nn.GELU(), inner, inner,
                                       nn.Dropout(), nn.Linear(32, 16, bias=False)),
                         "e2m1", skip=("5",))
    model[4].eval()
    x, seen = torch.randn(64, 16), {}
    def keep(m, x, y):
        seen.setdefault(m, []).append((x[0].double() @ m.weight.double().T,
                                       y.double() - m.bias.double()))
    hooks = [m.register_forward_hook(keep) for m in (model[0], inner)]
    found = ufp4.noise(model, x)
    for hook in hooks:
        hook.remove()
    assert list(found) == ["0", "2"]
    for (noise, slope), calls in zip(found.values(), (seen[model[0]], seen[inner])):
        exact, y = (torch.cat([c[i] for c in calls]).flatten() for i in (0, 1))
        a = exact @ y / (exact @ exact)
        rest = y - a * exact
        assert slope == pytest.approx(a.item(), rel=1e-5)
        assert noise == pytest.approx((rest @ rest / (exact @ exact)).item(), rel=1e-3)
    with pytest.raises(ValueError):
        ufp4.noise(model, torch.randn(64, 17))
    assert model.training and not model[4].training and model[0].training
    assert not any(m._forward_hooks for m in model.modules())
    assert ufp4.noise(nn.Linear(16, 16), x) == {}

def test_core_recipes_made_without_data_work_later():
    """The signs are a tensor. It has data under torch.device("meta"), too."""
    with torch.device("meta"):
        a = replace(RECIPES["ufp4"])
    with FakeTensorMode():
        b = replace(RECIPES["ufp4"])
    x = torch.randn(16, 32)
    expected = ufp4.linear(x, x, ufp4_with(sr=()))
    for recipe in a, b:
        assert torch.equal(ufp4.linear(x, x, replace(recipe, sr=())), expected)
        assert torch.equal(recipe.signs, RECIPES["ufp4"].signs)

class Halves(Quantizer):
    """A subclass whose constructor takes other arguments."""
    def __init__(self, factor):
        super().__init__(E1M2)
        self.factor = factor

    def __call__(self, x, rand=None):
        return self.factor * super().__call__(x, rand)

def test_core_a_quantizer_may_have_a_constructor_of_its_own():
    x = torch.randn(256, 128, generator=gen())
    assert torch.equal(ufp4.run(Halves(0.5), torch.float32, x), Halves(0.5)(x))

@compiling()
def test_core_whole_blocks_are_asked_for_whatever_the_size():
    for rows in 2, 2048:
        with pytest.raises(RuntimeError):
            ufp4.run(Quantizer(E1M2, block=32), torch.float32, torch.randn(rows, 48))

@pytest.mark.parametrize("message,how", [
    ("'fp4'.*ufp4", {"recipe": "fp4"}), ("'head'.*a, b, inner.0", {"skip": ("head",)}),
    ("leaves no linear layer", {"skip": ("a", "b", "inner", "lm_head")}),
    ("multiples of 32.*skip=.'lm_head', 'a', 'b', 'again'", {"recipe": "ufp4-mx"})])
def test_core_convert_refuses_before_changing_anything(message, how):
    m = Tied()
    with pytest.raises(ValueError, match=message):
        ufp4.convert(m, **how)
    assert type(m.a) is type(m.b) is nn.Linear

# ---- The lesson ----------------------------------------------------------------------
def test_core_the_lesson_fits_a_screen_and_is_right(capsys):
    ufp4.lesson()
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 102
    x, levels, decoded = ([line.split()[1:] for line in lines if line.startswith(name)]
                          for name in ("x ", "level", "Q(x)"))
    # The rows before the RHT, where x has two digits.
    for i, name in enumerate(("e2m1", "e1m2")):
        grid, row = MAGNITUDES[name], [float(v) for v in x[0]]
        s = max(map(abs, row)) / grid[-1]
        nearest = []
        for v in row:
            distances = [abs(abs(v) / s - level) for level in grid]
            nearest.append(min(range(8), key=lambda c: (distances[c], c % 2)))
        assert levels[i] == [f"{math.copysign(grid[c], v):.2f}"
                             for c, v in zip(nearest, row)]
        assert decoded[i] == [f"{math.copysign(s * grid[c], v):.2f}"
                              for c, v in zip(nearest, row)]
    numbers = re.search(r"Gaussian numbers: +e2m1 (\S+), e1m2 (\S+)", text).groups()
    for measured, name in zip(numbers, ("e2m1", "e1m2")):
        assert abs(float(measured) - bench.gaussian_slope(GRIDS[name])) < 6e-4
    decibels = re.findall(r"signal over error (\S+) dB", text)
    quoted = [f"{float(d):.1f} dB" for d in decibels]
    assert len(quoted) == 4 and all(d in LECTURE for d in quoted)
    after = {int(k): (float(a), float(b)) for k, a, b in re.findall(
        r"after +(\d+) quantized products: +e2m1 (\S+), e1m2 (\S+)", text)}
    for k, slopes in after.items():             # an alpha for each operand
        for measured, name in zip(slopes, ("e2m1", "e1m2")):
            assert abs(measured - bench.gaussian_slope(GRIDS[name]) ** (2 * k)) < 0.02
    assert set(after) == {1, 8, 32} and after[32][0] < 0.8
    assert "change by at most 1e-05" in text
    assert "always 0.000, stochastically 0.040" in text

# ---- kernels.py, bit for bit against the reference -----------------------------------
try:
    import kernels
    works = not kernels.INTERPRET or kernels.VERSION >= (3, 9)
except ImportError:
    works = False
needs_kernels = pytest.mark.skipif(
    not works,
    reason="no Triton, or an interpreter (before 3.9) that rounds tl.fma twice")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIGNS = random_signs(0)
BLOCKS = {name: 32 if "e8m0" in name else 16 for name in SCALES}
ONE_OF_EACH = ("fp32", "e4m3_up", "e8m0")

def randn(*shape, seed=0):
    return torch.randn(shape, generator=gen(seed))

def quantized(x, rows=None, cols=None, forms=("packed", "packed")):
    """What quantize_kernel makes of rows and of columns, Packed,
    in the forms asked for.

    The random bits are those of the keys that gen(0) and gen(1) draw first."""
    keys = torch.stack([random_key("cpu", gen(i)) for i in range(2)]).to(DEVICE)
    signs = [q.signs for q in (rows, cols) if q and q.signs is not None]
    seed = next(i for i in range(9)             # that they were made from
                if all(torch.equal(s, random_signs(i, len(s))) for s in signs))
    names = [q and kernels.operand_name(q, form)
             for q, form in zip((rows, cols), forms)]
    made = torch.ops.ufp4.quantize(x.to(DEVICE), seed, keys, *names)
    return [name and kernels.Packed(*parts, name)
            for name, parts in zip(names, (made[:3], made[3:]))]

def reference(x, q, i=0):
    """ufp4.quantize of x as q says, with the random bits that quantized() has for it.

    The kernels' codes are a sign and a magnitude, for INT4 too. So it has no name."""
    x = x.float() if q.signs is None else rotate(x, q.signs)
    fmt = replace(q.fmt, name="")
    return quantize(x, fmt, q.scale, q.block, q.stochastic, gen(i), tiles=q.tiles)

def same(x, rows=None, cols=None):
    """Asserts that the kernel's codes and scales are those of the reference.

    Codes have no meaning where the scale is 0 or NaN."""
    for i, (q, p) in enumerate(zip((rows, cols), quantized(x, rows, cols))):
        if q is None:
            continue
        want = reference(x.T if i else x, q, i)
        got = p.scale.cpu().view(want.scale.dtype).float()
        assert same_bits(got, want.scale.float())
        if kernels.STORED[q.scale] == "e4m3":
            assert same_bits(p.tensor_scale.cpu(), want.tensor_scale)
            got = got * p.tensor_scale.cpu()
        meant = (got > 0).repeat_interleave(q.block // 2, -1)
        assert torch.equal(p.codes.cpu()[meant], want.codes[meant])
        values = want._replace(codes=p.codes.cpu()).dequantize()
        finite = ~got.isnan().repeat_interleave(q.block, -1)
        assert torch.equal(values[finite], want.dequantize()[finite])

def every_sort(dtype):
    """(32, 64): each magnitude from subnormals to where the RHT overflows, and zeros of
    both signs. In float32 also multiples of the smallest number."""
    power = torch.linspace(*((-24, 15) if dtype == torch.float16 else (-133, 127)), 128)
    power = power.round().double().view(32, 4).repeat_interleave(16, 1)
    x = (randn(32, 64).double().clamp(-1.9, 1.9) * 2.0**power).to(dtype)
    x[0], x[1] = 0.0, -0.0
    if dtype == torch.float32:
        x[2:4] = torch.arange(64) * torch.tensor([[1.0], [-7.0]]) * 2.0**-149
        x[4, :16], x[4, 16:32] = 2.0**-149, 2.0**-126
    return x

def ties(fmt):
    """Blocks of 16 of the format's levels, and ties with their neighbours in float32,
    of both signs, at scales from the smallest subnormal to the largest.

    (The kernel divides in another way beyond 2^-80 and 2^80.)"""
    levels = torch.tensor(fmt.levels)
    v = torch.cat((levels[1:], (levels[1:] + levels[:-1]) / 2))
    v = torch.cat((v, v.nextafter(torch.tensor(math.inf)),
                   v.nextafter(torch.tensor(0.0))))
    v = torch.cat((v, -v)).clamp(-fmt.max, fmt.max)
    v = F.pad(v, (0, -len(v) % 15)).view(-1, 15)
    blocks = torch.cat((torch.full((len(v), 1), fmt.max), v), 1)
    scales = (2.0**-149, 3 * 2.0**-149, 1e-41, 2.0**-126, 2.0**-81, 0.99 * 2.0**-80,
              1.0, 1 / 3, 1.1 * 2.0**80, 4e37)
    x = torch.cat([blocks * s for s in scales]).flatten()
    return F.pad(x, (0, -len(x) % 1024)).view(-1, 64)

@needs_kernels
@pytest.mark.parametrize("fmt", ("e2m1", "e1m2", "int4", "e2m1-max3"))
@pytest.mark.parametrize("scale", SCALES)
def test_kernels_equal_the_reference(fmt, scale):
    """Rows to nearest as they are, columns stochastic and rotated;
    random numbers, ties."""
    x = randn(16, 64) * torch.exp2(randn(16, 1, seed=1) * 4)
    if scale in ("fp32", "e8m0_up"):
        x = torch.cat((x, ties(FORMATS[fmt])))
    x = F.pad(x, (0, 0, 0, -len(x) % 32))
    q = Quantizer(FORMATS[fmt], SCALES[scale], BLOCKS[scale])
    same(x, q, dataclasses.replace(q, signs=SIGNS, stochastic=True))

@needs_kernels
@pytest.mark.parametrize("fmt, dtype, stochastic, scale", (
    ("e1m2", torch.float16, False, "fp32"),
    *(("e2m1", torch.bfloat16, False, scale) for scale in ONE_OF_EACH),
    *(("e1m2", torch.float32, False, scale) for scale in ONE_OF_EACH),
    *(("e2m1", torch.float32, True, scale) for scale in ONE_OF_EACH)))
def test_kernels_know_every_magnitude_and_what_is_not_finite(
        fmt, dtype, stochastic, scale):
    x = every_sort(dtype)
    q = Quantizer(FORMATS[fmt], SCALES[scale], BLOCKS[scale], stochastic=stochastic)
    same(x, q, dataclasses.replace(q, signs=random_signs(1)))
    x[6, 17], x[7, 18] = -math.inf, math.nan
    for rows in (x[6:], x[7:]) if scale == "e4m3_up" else (x,):
        same(F.pad(rows, (0, 0, 0, len(x) - len(rows)))[:, :32], q, None)

@needs_kernels
def test_kernels_overflow_where_the_reference_does():
    """Rotated, bfloat16 numbers of 2^121 stay finite; of 2^127 a block may not."""
    power = torch.arange(121, 129).clamp(max=127).repeat_interleave(4)[:, None]
    x = (randn(32, 64).clamp(-1.9, 1.9) * torch.exp2(power)).bfloat16()
    q = Quantizer(E1M2, signs=SIGNS)
    finite = rotate(x, SIGNS).isfinite()
    assert finite[:4].all() and not finite[-4:].all()
    same(x, q, dataclasses.replace(q, stochastic=True))

@needs_kernels
@pytest.mark.parametrize("seed", range(6))
def test_kernels_equal_the_reference_on_any_shape(seed, monkeypatch):
    """Every remainder of the tiles, dtypes, strides,
    scales shared in tiles (as W's)."""
    r = random.Random(seed)
    monkeypatch.setattr(kernels, "SHAPES", dict.fromkeys(kernels.SHAPES, (32, 32)))
    scale = r.choice(tuple(SCALES))
    q = Quantizer(FORMATS[r.choice(tuple(FORMATS))], SCALES[scale], BLOCKS[scale],
                  stochastic=seed % 2 == 0, tiles=seed % 2 == 1)
    rotated = dataclasses.replace(q, signs=random_signs(seed))
    R, C = (q.block * r.choice((1, 2, 3)) for _ in range(2))
    x = randn(2 * R, 2 * C, seed=seed).exp() * r.choice((1, 1e-3))
    x = x.to(r.choice((torch.float32, torch.bfloat16, torch.float16)))
    x = r.choice((lambda: x[:R, :C], lambda: x[::2, ::2],
                  lambda: x.view(2 * C, 2 * R)[:C, :R].T,
                  lambda: x[:1, :C].expand(R, C)))()
    rows, cols = r.choice(((rotated, None), (None, q), (q, rotated), (rotated, q)))
    same(x, rows, cols)

@needs_kernels
@pytest.mark.skipif(DEVICE != "cpu", reason="takes 5 GB, which a CPU only promises")
def test_kernels_take_strides_beyond_32_bits():
    """The last token of each of 16 long texts: elements lie more than 2^31 apart."""
    x = torch.empty(16, 2**20 + 2**17, 128, dtype=torch.bfloat16)[:, -1]
    x.copy_(randn(16, 128))
    same(x, Quantizer(E1M2), Quantizer(E1M2))

@needs_kernels
@pytest.mark.parametrize("fmt, scale", (
    ("e1m2", "fp32"), ("e2m1", "e4m3"), ("int4", "e8m0")))
def test_kernels_decode(fmt, scale):
    """Codes times scales, rounded to bfloat16 once, ties to even:
    from packed operands, and decoded at once.

    The swizzle is layout 2's, with zeros in its gaps."""
    x = randn(160, 32) * torch.exp2(randn(160, 1, seed=1) * 6)
    x[3, 5], x[9] = math.inf if scale != "e4m3" else 0.0, -0.0
    # Times a power of two, E1M2 comes halfway.
    for row, ulps in ((4, 1), (5, 3)):
        x[row, :16] = torch.tensor([1.75, 0.25, -0.5, 1.0] * 4) * (1 + ulps * 2.0**-8)
    x[6] *= 2.0**-125 / x[6].abs().max()        # E8M0's smallest scale, 2^-127
    q = Quantizer(FORMATS[fmt], SCALES[scale], BLOCKS[scale])
    packed, swizzled, decoded = (quantized(x, q, q, (form, form))
                                 for form in ("packed", "swizzled", "decoded"))
    for i, p in enumerate(packed):
        scales = p.scale.cpu().view(ufp4.STORED.get(q.scale, torch.float32))
        stored = ufp4.PackedTensor(p.codes.cpu(), scales, 1.0, replace(q.fmt, name=""))
        exact = stored.dequantize().bfloat16()
        for form in (packed, decoded):
            got = form[i].decoded().cpu()
            assert torch.equal(got.isnan(), exact.isnan()), form
            assert torch.equal(got.nan_to_num(), exact.nan_to_num())
        assert torch.equal(swizzled[i].codes, p.codes)
        r, g = torch.meshgrid(*map(torch.arange, p.scale.shape), indexing="ij")
        scales, at = (swizzled[i].scale,
                      (r // 128, g // 4, r % 32, r // 32 % 4 * 4 + g % 4))
        assert scales.shape == (-(-len(r) // 128), -(-r.shape[1] // 4), 32, 16)
        assert torch.equal(scales[at].nan_to_num(), p.scale.nan_to_num())
        scales[at] = 0
        assert not scales.any()

@needs_kernels
@pytest.mark.parametrize("name", ("ufp4-int4", "nvfp4"))
@pytest.mark.parametrize("operand, gemms", (
    ("x", ("fprop", "wgrad")), ("dy", ("dgrad", "wgrad")),
    ("w", ("fprop", None)), ("w", (None, "dgrad"))))
def test_kernels_a_layers_operands_are_the_references(name, operand, gemms):
    """From the same seed, kept or not, of experts too: the values of ufp4's quantizers,
    but codes times FP32 scales are rounded to bfloat16."""
    recipe = replace(RECIPES[name], sr=("x", "dy"))
    x = randn(*((2, 32, 64) if operand == "w" else (64, 32)), seed=2)
    torch.manual_seed(3)
    made = kernels.quantize(x.to(DEVICE), recipe, operand, *gemms)
    torch.manual_seed(3)
    for got, gemm, v in zip(made, gemms, (x, x.mT)):
        if gemm is None:
            assert got is None
            continue
        q = recipe.quantizer(operand, gemm)
        key = random_key("cpu") if q.stochastic else None
        expected = ufp4.run_with_key(q, v, key, torch.float32)
        if DEVICE == "cpu" or operand == "w":       # a GPU draws other keys than a CPU
            t = 1.0 if got.tensor_scale is None else got.tensor_scale.cpu()
            expected = expected.bfloat16().float() if "ufp4" in name else expected
            assert torch.equal(got.decoded().cpu().float() * t, expected)
        assert (got.codes.dtype == torch.uint8) >= (operand == "x" and gemm == "wgrad")

@needs_kernels
def test_kernels_a_new_seed_has_new_signs_and_compiles_nothing():
    """The signs are data:
    neither the name of an operand nor a kernel depends on them."""
    x = randn(32, 32).to(DEVICE)
    made = []
    for seed in (0, 1):
        recipe = replace(RECIPES["ufp4"], sign_seed=seed)
        made.append(kernels.quantize(x, recipe, "x", "fprop")[0])
    assert (made[0].name == made[1].name
            and not torch.equal(made[0].codes, made[1].codes))
    for seed, got in enumerate(made):
        expected = Quantizer(E1M2, signs=random_signs(seed))(x.cpu()).bfloat16()
        assert torch.equal(got.decoded().cpu(), expected)

# ---- The kernels' products, and a layer on them --------------------------------------
def within(got, a, b, rounded=False, results=0):
    """|got - a b^T| is at most what the arithmetic can lose,
    for float64 a (M, K), b (N, K):

    2^-8 of each, if they were `rounded` to bfloat16;
    2^-23 of the terms with each of K additions in float32;
    2^-8 of the sum whenever it is rounded to bfloat16, `results` times."""
    terms = a.abs() @ b.abs().T
    lost = terms * (((1 + 2.0**-8) ** 2 - 1 if rounded else 0) + a.shape[1] * 2.0**-23)
    lost += ((1 + 2.0**-8) ** results - 1) * (terms + lost)
    return bool(((got.double() - a @ b.T).abs() <= lost).all())

# The interpreter reads E4M3 scales as E8M0 in dot_scaled,
# so fp4x4 is tested with E8M0 ones.
@needs_kernels
@pytest.mark.parametrize("path, fmt, scale", (
    ("fp4", "e2m1", "e8m0"), ("fp8", "e1m2", "e8m0_up"), ("fp4x4", "e1m2", "e8m0_up"),
    ("cublas", "e1m2", "e4m3_up"), ("cublas", "e1m2", "fp32")))
def test_kernels_matmul_multiplies_the_decoded_operands(path, fmt, scale, monkeypatch):
    """Ragged tiles in M, N and K.
    Codes and scales multiply exactly: only sums differ."""
    if path != "cublas" and not kernels.INTERPRET:
        pytest.skip("runs where the hardware has such a path, or in the interpreter")
    q = Quantizer(FORMATS[fmt], SCALES[scale], BLOCKS[scale], SIGNS)
    if path != "cublas":
        monkeypatch.setitem(kernels.NATIVE, (kernels.BITS[fmt][0], "e8m0", 32),
                            (path, ()))
    x, w = randn(129, 160), randn(130, 160, seed=1)
    forms = ("packed" if path == "cublas" else "swizzled", "")
    a, b = (quantized(v, q, None, forms)[0] for v in (x, w))
    for dtype, results in ((torch.float32, 0), (torch.bfloat16, 1)):
        with torch.autocast(DEVICE, torch.bfloat16):                    # rounds no sum
            got = kernels.matmul(a, b, dtype).cpu()
        assert got.dtype == dtype
        assert within(got, q(x).double(), q(w).double(), scale == "fp32", results)

def test_kernels_routes():
    """The path of each recipe,
    and the combinations that a Triton version gets wrong."""
    def path(name, arch):
        return kernels.route(RECIPES[name], arch)

    archs = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "gfx950")
    for arch in archs:
        assert path("bf16", arch) == "torch"
        assert path("ufp4", arch) == path("e2m1", arch) == "cublas"
    assert [path("nvfp4", a) for a in archs] == (
        ["cublas"] * 2 + ["fp4"] * 3 + ["cublas"])
    assert [path("mxfp4", a) for a in archs] == ["cublas"] * 2 + ["fp4"] * 4
    assert [path("ufp4-mx", a) for a in archs] == ["cublas"] * 2 + ["fp8"] * 4
    assert [path("ufp4-e4m3", a) for a in archs] == ["cublas"] * 4 + ["fp4x4", "cublas"]
    assert path("nvfp4", "sm_121") == ("cublas" if kernels.VERSION < (3, 8) else "fp4")
    other = replace(FORMATS["e2m1"], levels=(0.0, 1.0, 5.0))
    for changed, expected in (
            ({"scale": "e4m3", "fmt": "int4"}, "cublas"), ({"block": 8}, "torch"),
            ({"rht_block": 32}, "torch"), ({"rht_block": 32, "rht": ()}, "cublas"),
            ({"scale": max}, "torch"), ({"fmt": other}, "torch")):
        assert kernels.route(replace(RECIPES["ufp4"], **changed), "sm_120") == expected

@pytest.fixture(scope="module", autouse=True)
def lowered(request):
    """What is compiled for other GPUs:
    in processes beside the tests, from the first on."""
    tests = [item for item in request.session.items if "compile_to[" in item.name]
    calls = [test.callspec.params["call"] for test in tests]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield {call: pool.submit(bench.lowering, *call) for call in calls}

# The count is of one program's code.
# On sm_10x an instruction is 128 x 256 x 256 bits of K, and the loop's first step is
# peeled off it; mma.sync has 16 x 8 x 256 bits a warp.
@needs_kernels
@pytest.mark.parametrize("call, instruction, count", (
    (("matmul_kernel", "nvfp4", "sm_100"),
     "tcgen05.mma.cta_group::1.kind::mxf4nvf4", 8),
    (("matmul_kernel", "ufp4-mx", "sm_103"),
     "tcgen05.mma.cta_group::1.kind::mxf8f6f4", 8),
    (("matmul_kernel", "ufp4-e4m3", "sm_120"),
     "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X",
     4 * 128 // 16 * 128 // 8 // 8),
    (("matmul_kernel", "mxfp4", "gfx950"),
     "v_mfma_scale_f32_32x32x64_f8f6f4", 4 * 4 * 2 // 4)))
def test_kernels_what_products_compile_to(call, instruction, count, lowered):
    got = lowered[call].result()
    assert (got.get("instruction", got).startswith(instruction)
            and got["count"] == count), got
    assert (got["spills"] or 0) <= 12, got

@needs_kernels
@pytest.mark.parametrize("call", [
    ("quantize_kernel", name, "sm_90")
    for name in ("both orientations, nearest", "dY of a layer")])
def test_kernels_what_quantizers_compile_to(call, lowered):
    """All of its code, for each number of a tile; it keeps all it needs in registers;
    a warp's store fills the sectors of memory that it touches."""
    got = lowered[call].result()
    assert got["spills"] == 0 and got["registers"] <= 96, got
    assert got["per_element"] < 63 and got["full"] > 0.5, got

def test_kernels_what_a_warp_writes_at_once():
    """By hand: 32 rows of four blocks, two words each. Lanes that run down the rows
    touch 32 sectors, a quarter full; lanes that run along them fill eight."""
    form = ("#a = #ttg.blocked<{{sizePerThread = [1, 1, 2], threadsPerWarp = {}, "
            "warpsPerCTA = [1, 1, 1], order = {}}}>\n"
            "  tt.store %1, %2, %3 : tensor<32x4x2x!tt.ptr<i32>, #a> loc(#l)")
    down, along = form.format([32, 1, 1], [2, 0, 1]), form.format([8, 4, 1], [2, 1, 0])
    assert bench.written(down, "i32", [32]) == [(0.25, 32)]
    assert bench.written(along, "i32", [32]) == [(1.0, 8)]

def as_if_on(arch, monkeypatch):
    """In the interpreter, which has no GPU but multiplies as Blackwell:
    routes of `arch`."""
    monkeypatch.setattr(kernels, "architecture", lambda device: arch)
    monkeypatch.setattr(kernels, "failed_check", new_check(arch))

@functools.cache
def new_check(arch):
    """kernels.failed_check, which remembers what it finds on this architecture."""
    return kernels.constant(kernels.failed_check.__wrapped__)

@needs_kernels
@pytest.mark.parametrize("name, grouped, arch, paths", (
    ("ufp4", False, "sm_120", []), ("ufp4", True, "sm_90", []),
    ("nvfp4", False, "sm_90", []), ("nvfp4", True, "sm_120", []),
    ("mxfp4", True, "sm_120", []), ("mxfp4", False, "sm_120", ["fp4"]),
    ("ufp4-mx", False, "sm_120", ["fp8"])))
def test_kernels_a_layer_equals_the_reference(name, grouped, arch, paths, monkeypatch):
    """Both passes, from the same seed, on Blackwell's paths too,
    with tokens that fill no block.

    Exact up to the order of sums; with experts or FP32 scales up to bfloat16.
    A GPU has its own path. There the kernels draw other keys than ufp4.py, so dY is
    rounded to nearest. Its tensor cores need not sum in all of float32's bits."""
    recipe, exact = RECIPES[name], 2.0**-20
    if kernels.INTERPRET:
        as_if_on(arch, monkeypatch)
    else:
        recipe, exact = replace(recipe, sr=()), 2.0**-12
        path = kernels.route(recipe, kernels.architecture(torch.device(DEVICE)))
        paths = [] if grouped or path == "cublas" else [path]
    offsets = torch.tensor([5, 40], device=DEVICE) if grouped else None
    taken, results, made = [], [], kernels.product_shape
    x = randn(40, 64).to(DEVICE).requires_grad_()
    w = randn(*([2] if grouped else []), 32, 64, seed=1).to(DEVICE).requires_grad_()
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    if kernels.INTERPRET and arch == "sm_120" and name == "nvfp4":
        # whose dot_scaled reads E4M3 scales as E8M0, which experts do not need
        monkeypatch.setattr(kernels, "failed_check", lambda *args: None)
    # Here the kernels check themselves.
    assert kernels.why_not(recipe, x.device, x.dtype) is None
    monkeypatch.setattr(kernels, "product_shape",
                        lambda *a: taken.append(a[0]) or made(*a))
    for backend in ("triton", "torch"):
        monkeypatch.setenv("UFP4_BACKEND", backend)
        torch.manual_seed(4)
        y = ufp4.linear(x, w, recipe, offsets)
        dy = randn(40, 32, seed=2).to(DEVICE)
        results.append((y, *torch.autograd.grad(y, (x, w), dy)))
    # 48 tokens, in blocks of 16, are no whole 16 bytes of codes:
    # GEMM 3 of nvfp4 decodes.
    assert taken == paths * (2 if name == "nvfp4" else 3)
    for got, expected in zip(*results):
        assert got.dtype == torch.float32 and got.shape == expected.shape
        error = (got - expected).abs().max() / expected.abs().max()
        assert error < (2.0**-7 if grouped or name == "ufp4" else exact)

@needs_kernels
@pytest.mark.parametrize("name, most", (
    ("ufp4", 0.38), ("nvfp4", 0.29), ("mxfp4", 0.27)))
def test_kernels_keep_the_input_in_4_bits(name, most, monkeypatch):
    """Bytes that autograd keeps of X, over bfloat16's; nothing with a frozen weight.
    (X^T is as large as swizzled scales are filled up: 128 rows, four blocks.)"""
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    x = randn(128, 128).to(DEVICE).requires_grad_()
    for training in (True, False):
        w, kept = randn(32, 128, seed=1).to(DEVICE).requires_grad_(training), []
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.append(t) or t, lambda t: t):
            ufp4.linear(x, w, name)
        of_w = w.untyped_storage().data_ptr()
        own = [t for t in kept if t.untyped_storage().data_ptr() != of_w]
        ratio = sum(t.nbytes for t in own) / (2 * x.numel())
        assert 0.25 < ratio <= most if training else ratio == 0

@needs_kernels
@pytest.mark.parametrize("name", ("ufp4", "nvfp4"))
def test_kernels_take_a_batch_without_tokens_and_frozen_tensors(name, monkeypatch):
    """No tokens: outputs of no rows, and a gradient of zeros.
    Frozen X or W: no gradient."""
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    for tokens, of_x, of_w in ((0, True, True), (16, True, False), (16, False, True)):
        x = randn(tokens, 32).to(DEVICE).requires_grad_(of_x)
        w = randn(32, 32, seed=1).to(DEVICE).requires_grad_(of_w)
        y = ufp4.linear(x, w, name)
        y.sum().backward()
        assert y.shape == (tokens, 32)
        assert (x.grad is None) == (not of_x) and (w.grad is None) == (not of_w)
        assert tokens or not w.grad.any()

@needs_kernels
def test_kernels_rotate_the_largest_float16_without_overflow(monkeypatch):
    """A block that matches the signs grows fourfold under the RHT, beyond float16."""
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    x = (65504.0 * SIGNS).expand(16, 16).to(DEVICE, torch.float16)
    w = (randn(16, 16) * 2.0**-8).to(DEVICE)
    y = ufp4.linear(x, w, "ufp4").cpu()
    monkeypatch.setenv("UFP4_BACKEND", "torch")
    expected = ufp4.linear(x.float(), w, "ufp4").cpu()
    assert expected.abs().max() < 65504 and y.isfinite().all()
    assert (y - expected).abs().max() < 2.0**-7 * expected.abs().max()

@needs_kernels
def test_kernels_take_fake_tensors_and_remember_nothing_of_them(monkeypatch):
    """Under FakeTensorMode a layer has shapes, and afterwards all is as it was."""
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    recipe = replace(RECIPES["ufp4"], sign_seed=7)
    with FakeTensorMode():
        x, w = (torch.randn(32, 32, device=DEVICE).requires_grad_() for _ in range(2))
        ufp4.linear(x, w, recipe).sum().backward()
        assert x.grad.shape == w.grad.shape == (32, 32)
    x = randn(32, 32).to(DEVICE)
    y = ufp4.linear(x, x, recipe)
    with FakeTensorMode() as mode:
        fake = ufp4.linear(mode.from_tensor(x), mode.from_tensor(x), recipe)
        assert fake.shape == y.shape
    assert torch.equal(ufp4.linear(x, x, recipe), y) and y.isfinite().all()

@needs_kernels
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_kernels_a_layer_on_the_kernels_compiles_without_graph_breaks(
        backend, monkeypatch):
    """Both passes of a grouped layer in one graph, the same numbers; the seed fixes the
    random bits. (What inductor draws is its own, so dY is to nearest there.)"""
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    recipe = replace(RECIPES["nvfp4"], sr=("dy",) if backend == "aot_eager" else ())
    x, w = (randn(*shape).to(DEVICE).requires_grad_()
            for shape in ((24, 16), (2, 16, 16)))
    offsets = torch.tensor([5, 24], device=DEVICE)

    def layer(x, w):
        return ufp4.linear(x, w, recipe, offsets)

    def results(f):
        torch.manual_seed(0)
        y = f(x, w)
        return y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))

    with compiling():
        graph = torch.compile(layer, fullgraph=True, backend=backend)
        for other in (layer, graph):
            assert all(torch.equal(a, b)
                       for a, b in zip(results(graph), results(other)))

# ---- The choice of backend -----------------------------------------------------------
class Mine(ufp4.Recipe):
    pass

@needs_kernels
def test_kernels_backends_are_chosen_and_said(monkeypatch):
    """Unknown: an error. triton: the kernels, or an error.
    Else what the kernels can't do runs on the reference,
    and a GPU's user is told once."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda:99")     # which no machine has
    odd = (replace(RECIPES["ufp4"], block=8), Mine("mine"))
    monkeypatch.setenv("UFP4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="=cuda: it must be torch, triton or not set"):
        ufp4.choose_backend(RECIPES["ufp4"], cpu, torch.float32)
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    chosen = ufp4.choose_backend(RECIPES["ufp4"], torch.device(DEVICE), torch.float32)
    assert chosen is kernels
    for recipe, why in zip(odd, ("have blocks of 16 and 32", "no subclass of Recipe")):
        with pytest.raises(ValueError, match=why):
            ufp4.choose_backend(recipe, cpu, torch.float32)
    if kernels.INTERPRET or DEVICE == "cuda":
        with pytest.raises(ValueError, match="float32, not torch.float64"):
            ufp4.choose_backend(RECIPES["ufp4"], cpu, torch.float64)
        with pytest.raises(ValueError, match="need a GPU"):
            ufp4.choose_backend(RECIPES["ufp4"], torch.device("meta"), torch.float32)
    monkeypatch.delenv("UFP4_BACKEND")
    for recipe, why in ((odd[0], "of 16"), (odd[1], "subclass"),
                        (RECIPES["e2m1"], "cannot run")):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default")
            for _ in range(3):
                chosen = ufp4.choose_backend(recipe, gpu, torch.float32)
                assert chosen is None
        assert len(said) == 1 and "runs without kernels" in str(said[0].message)
        assert why in str(said[0].message)

@needs_kernels
@pytest.mark.parametrize("name", ("e2m1", "ufp4-int4", "ufp4-e4m3", "e2m1-max3"))
def test_kernels_pass_their_own_check(name):
    """Recipes that test_kernels_a_layer_equals_the_reference does not ask about."""
    assert kernels.why_not(RECIPES[name], torch.device(DEVICE), torch.bfloat16) is None

def one_up(f):
    return lambda *args: tuple(v + (v == v) for v in f(*args))

@needs_kernels
@pytest.mark.skipif(works and not kernels.INTERPRET, reason="needs kernels in Python")
@pytest.mark.parametrize("name, broken, where", (
    ("round_to_grid", lambda f: lambda y, rand, Q: f(y * 0.97, rand, Q),
     "fprop, row 0, column "),
    ("random_128", lambda f: lambda key, first, i: f(key, first + 8, i),
     "dgrad, row "),
    ("block_scale", one_up, "fprop, row"),
    ("bind", lambda f: lambda v, n: f(v[::-1], n), "wgrad, row"),
    ("decode_kernel", lambda f: {(3,): lambda *a: None},
     "cannot run a kernel here: KeyError"),
    ("matmul", lambda f: lambda *a: f(*a) * 1.02, "fprop, row ")))
def test_kernels_their_check_catches_what_is_broken(name, broken, where, monkeypatch):
    """A warning says what differs and where, and the reference takes over."""
    monkeypatch.setattr(kernels, name, broken(getattr(kernels, name)))
    monkeypatch.setattr(kernels, "failed_check", new_check.__wrapped__("broken"))
    reason = kernels.why_not(RECIPES["ufp4"], torch.device("cpu"), torch.bfloat16)
    assert where in reason, reason

def test_kernels_without_triton_it_says_so_once():
    code = """if True:
        import os, sys
        sys.modules["triton"] = None
        import torch, ufp4
        for backend in ("", "", "triton"):
            os.environ["UFP4_BACKEND"] = backend
            recipe, gpu = ufp4.RECIPES["ufp4"], torch.device("cuda")
            chosen = ufp4.choose_backend(recipe, gpu, torch.float32)
            print(chosen is None)
        """
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE,
                          capture_output=True, text=True)
    said, error = done.stderr.split("Traceback")
    assert done.stdout == "True\nTrue\n" and said.count("'ufp4' runs without") == 1
    assert "ValueError" in error and all("triton" in text for text in (said, error))

def test_kernels_a_plan_of_memory_needs_no_triton():
    code = """if True:
        import sys
        sys.modules["triton"] = None
        import bench
        bench.main(["plan", "--model", "small"])
        """
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE,
                          capture_output=True, text=True)
    assert ("GiB a GPU" in done.stdout
            and "cannot be imported" in done.stdout), done.stderr

# ---- train.py ------------------------------------------------------------------------
TINY = ("--layers 2 --dim 32 --heads 2 --hidden 32 --seq-len 32 --batch-size 4 "
        "--steps 8 --warmup 2 --eval-interval 4 --eval-windows 3 --save-interval 2 "
        "--log-interval 1 --sample 0 --device cpu --dtype float32").split()
MOE = ["--experts", "3", "--top-k", "2"]

@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "little.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i * i}\n\n"
                            for i in range(400)))
    return path

@pytest.fixture
def settings(text, tmp_path, monkeypatch):
    """Settings of a tiny run: settings("--recipe", ...)."""
    monkeypatch.setattr(train, "prepare",
                        lambda name: prepare.prepare(name, tmp_path / "data"))
    common = [*TINY, "--data", str(text), "--out", str(tmp_path / "out/run")]
    return lambda *flags: train.parse_args([*common, *flags])

def weights(out):
    """The model of a run's last checkpoint, {name: whole tensor},
    whatever ranks wrote it."""
    dcp_to_torch_save(train.checkpoints(Path(out))[-1], Path(out) / "whole.pt")
    return torch.load(Path(out) / "whole.pt", weights_only=False)["model"]

def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def records(out):
    """The log's lines after the first, less their times."""
    return [{k: v for k, v in line.items() if k != "tokens_per_s" and v is not None}
            for line in train.read_log(Path(out) / "log.jsonl")[1:]]

def said(capsys, code, run, s):
    """What train.py says when it stops with that exit code."""
    with pytest.raises(SystemExit) as stopped:
        run(s)
    assert stopped.value.code == code
    return capsys.readouterr().err

@pytest.mark.parametrize("flags", [
    ["--recipe", "ufp4"], ["--recipe", "bf16", *MOE],
    ["--recipe", "nvfp4", "--sr", "x,dy", "--keep-bf16", "1", *MOE]])
def test_train_a_run_learns_logs_and_repeats(settings, flags, capsys):
    s = settings(*flags, "--steps", "14", "--lr", "2e-2", "--sample", "8",
                 "--eval-interval", "7")
    loss = train.train(s)
    lines, kept = records(s.out), weights(s.out)
    assert [line["step"] for line in lines] == list(range(1, 15))
    # At first the prediction is uniform.
    assert lines[0]["train_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert loss == lines[-1]["val_loss"] < 4 and "val_loss" not in lines[-2]
    assert len(train.checkpoints(Path(s.out))) == 2
    header = train.read_log(Path(s.out) / "log.jsonl")[0]
    assert header["settings"]["recipe"] == s.recipe and header["processes"] == 1
    assert (header["torch"] == torch.__version__ and header["hardware"]
            and "commit" in header)
    if s.experts:
        assert all(1 <= line["max_load"] <= 3 for line in lines)
    with pytest.raises(ValueError, match="holds a run: --resume .*run goes on"):
        train.train(s)
    shutil.rmtree(s.out)
    # The same again.
    assert train.train(s) == loss and same_weights(weights(s.out), kept)
    printed = capsys.readouterr().out
    assert "--- sample" in printed and "float32 on 1 x" in printed.splitlines()[0]

def test_train_overrides_reach_the_recipe_and_the_blocks(settings):
    flags = "--recipe e2m1 --rht fprop,wgrad --sr none --scale e4m3 --tiles".split()
    s = settings(*flags, "--keep-bf16", "1", "--seed", "5")
    recipe = dataclasses.replace(RECIPES["e2m1"], rht=("fprop", "wgrad"), sr=(),
                                 scale="e4m3", tiles=True, sign_seed=5)
    assert train.make_recipe(s) == recipe
    for names in ["fprop", "wgrad"], ["fprop, wgrad"], ["fprop,", "wgrad"]:
        assert settings("--rht", *names).rht == ["fprop", "wgrad"]
    for more in [], MOE:
        model = train.GPT(settings(*flags, "--keep-bf16", "1", *more), recipe, 256)
        assert type(model.lm_head) is nn.Linear
        for block, name in zip(model.blocks, ("e2m1", "bf16")):
            names = {m.recipe.name for m in block.modules() if hasattr(m, "recipe")}
            assert names == {name}
    fresh = train.parse_args(["--model", "nano", "--device", "cpu", *flags,
                              "--seed", "3"])
    assert fresh.out == "out/nano-e2m1-scale.e4m3-rht.fprop+wgrad-sr.none-tiles.True-s3"

def test_train_learning_rate_warms_up_and_decays(settings):
    s = settings("--steps", "100", "--warmup", "10", "--lr", "1", "--min-lr", "0.2")
    lrs = [train.learning_rate(i, s) for i in range(100)]
    assert lrs[0] == 0.1 and lrs[9] == lrs[10] == 1.0 and lrs[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in zip(lrs[10:], lrs[11:]))
    short = train.parse_args(["--model", "nano", "--device", "cpu", "--steps", "20"])
    assert short.warmup == 4

def test_train_what_the_optimizer_gets(settings, monkeypatch):
    """The step's learning rate, decay for matrices alone, a clipped gradient."""
    steps, real = [], torch.optim.AdamW.step

    def step(self, closure=None):
        parameters = [(p, group)
                      for group in self.param_groups for p in group["params"]]
        for p, group in parameters:
            assert group["weight_decay"] == (0.3 if p.dim() > 1 else 0)
        norm = math.sqrt(sum(p.grad.square().sum().item() for p, _ in parameters))
        if self.param_groups[0]["lr"]:                  # DCP, too, steps, at 0
            steps.append(({g["lr"] for _, g in parameters}, norm))
        return real(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    s = settings("--recipe", "bf16", "--weight-decay", "0.3", "--clip", "0.01")
    train.train(s)
    lrs, norms = zip(*steps)
    assert list(lrs) == [{train.learning_rate(i, s)} for i in range(8)]
    assert norms == pytest.approx(8 * [0.01], rel=1e-3)
    assert min(line["grad_norm"] for line in records(s.out)) > 0.1

def test_train_validation_is_the_mean_of_evenly_spaced_windows(settings):
    s = settings("--recipe", "bf16", *MOE, "--grad-accum", "2")
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    model, ids = (train.GPT(s, RECIPES["bf16"], 256),
                  torch.from_numpy(tokens.astype(np.int64)))
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p *= 3                                      # so that windows differ
        nll = [model(ids[None, i:i + 32], ids[None, i + 1:i + 33]).item()
               for i in (0, 483, 967)]
    for block in model.blocks:
        block.mlp.load.zero_()
    assert train.evaluate(model, tokens, s) == pytest.approx(sum(nll) / 3, rel=1e-5)
    assert model.training and not any(block.mlp.load.any() for block in model.blocks)

def test_train_attention_is_causal_and_rope_is_relative(settings):
    model = train.GPT(settings(), RECIPES["bf16"], 256)
    a = torch.randint(0, 256, (1, 32))
    b = a.clone()
    b[0, 20:] = 0
    x, y = model(a)[0], model(b)[0]
    assert torch.equal(x[:20], y[:20]) and not torch.equal(x[20:], y[20:])
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 1, 40, 16)
    scores = (train.rope(q) @ train.rope(k).mT)[0, 0]
    for d in 0, 3, 11:                                  # depend on the distance alone
        diagonal = scores.diagonal(-d)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
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
    s = settings("--batch-size", "12")
    shards = [np.arange(n, dtype=np.uint16) + 1000 * i
              for i, n in enumerate((400, 97, 330))]
    x, y = train.get_batch(shards, s, 3)
    assert torch.equal(y, x + 1) and x.shape == (12, 32)    # targets: the next tokens
    assert torch.equal(x, train.get_batch(shards, s, 3)[0])
    assert not torch.equal(x, train.get_batch(shards, s, 4)[0])
    other = settings("--batch-size", "12", "--seed", "1")
    assert not torch.equal(x, train.get_batch(shards, other, 3)[0])
    starts = torch.cat([train.get_batch(shards, s, step)[0][:, 0]
                        for step in range(1500)])
    windows = [1000 * i + j
               for i, n in enumerate((400, 97, 330)) for j in range(n - 32)]
    assert sorted(set(starts.tolist())) == windows          # each window of each file
    monkeypatch.setattr(train, "WORLD", 3)
    s.grad_accum, rows = 2, []
    for part, rank in np.ndindex(2, 3):
        monkeypatch.setattr(train, "RANK", rank)
        rows.append(train.get_batch(shards, s, 3, part)[0])
    assert torch.equal(torch.cat(rows), x)

@pytest.mark.parametrize("model,total,active", [
    ("nano", 0.87e6, 0.87e6), ("nano-moe", 2.84e6, 0.93e6),
    ("small", 25.97e6, 25.97e6), ("small-moe", 151.5e6, 26.1e6),
    ("dense-1.5b", 1.5e9, 1.5e9), ("moe-7.9b", 7.9e9, 1.3e9),
    ("moe-124b", 124e9, 5.1e9)])
def test_train_presets_have_their_size_within_a_percent(model, total, active):
    """The last three are the paper's. Against a sum by hand, too."""
    s = train.parse_args(["--model", model, "--device", "cpu"])
    c, h, e, v = s.dim, s.hidden, s.experts, 50257 if s.data == "fineweb" else 256
    layer = [4 * c * c + 2 * c + 3 * c * h * (k + 1 if e else 1) + c * e
             for k in (e, s.top_k)]
    n, a = (s.layers * x + c + 2 * v * c for x in layer)
    assert n == pytest.approx(total, rel=0.01) and a == pytest.approx(active, rel=0.01)
    with torch.device("meta"):
        assert train.counts(train.GPT(s, RECIPES["ufp4"], v), s)[:2] == (n, a)

def test_train_rematerialization_draws_the_same_bits(settings, tmp_path, monkeypatch):
    """Random bits in the forward pass (--sr x,w,dy) and in the backward:
    the same run, bit for bit,
    though each block's forward pass runs twice in training."""
    flags = ["--recipe", "ufp4", "--sr", "x,w,dy", *MOE, "--grad-accum", "2",
             "--steps", "3"]
    found, real = [], train.Block.forward
    monkeypatch.setattr(train.Block, "forward", lambda self, x: (
        passes.append(self.training), real(self, x))[1])
    for more in [], ["--remat"]:
        passes = []
        s = settings(*flags, *more, "--out", str(tmp_path / f"out/{len(found)}"))
        train.train(s)
        found.append((weights(s.out), records(s.out), sum(passes)))
    (kept, lines, once), (again, same_lines, twice) = found
    assert same_weights(kept, again) and lines == same_lines
    assert once == 3 * 2 * 2 and twice == 2 * once

def test_train_compiles_a_block_of_each_kind_once_also_to_rematerialize(
        settings, monkeypatch):
    """With the gradients of eager mode,
    and a noise report that sees into the blocks."""
    graphs, real, found = [], torch.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward                            # runs the operators as they are

    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend=backend))
    tokens = torch.randint(256, (4, 32))
    for more in [], ["--compile", "--remat"]:
        s = settings("--layers", "3", "--keep-bf16", "1", "--rht", "none", *more)
        model, _ = train.build(s, train.make_recipe(s), 256)
        torch.manual_seed(0)
        model.init_weights()
        torch._dynamo.reset()
        with compiling() if more else contextlib.nullcontext():
            model(tokens, tokens).backward()
            found.append([p.grad for p in model.parameters()])
            torch.manual_seed(0)
            found.append(ufp4.noise(model, tokens))
            model(tokens, tokens).backward()        # still compiled, and no new graph
    assert len(graphs) == 2
    assert found[1] == found[3] and all(name.startswith("blocks.") for name in found[1])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6)
               for a, b in zip(found[0], found[2]))

def test_train_a_folder_is_all_that_a_run_needs_to_go_on(settings, tmp_path):
    """Its last checkpoint lost, a run goes on from the one before, with the settings of
    its log. One that is over is validated again."""
    s = settings("--recipe", "e2m1", *MOE, "--rht", "none", "--lr", "0.02")
    loss = train.train(s)
    whole, lines = weights(s.out), records(s.out)
    older, newer = train.checkpoints(s.out)
    shutil.rmtree(newer)
    moved = Path(s.out).rename(tmp_path / "moved")
    for _ in range(2):
        again = train.parse_args(["--resume", str(moved), "--sample", "3"])
        assert (again.out, again.rht, again.sample) == (str(moved), [], 3)
        assert train.train(again) == loss
    assert [p.name for p in train.checkpoints(moved)] == [older.name, newer.name]
    assert same_weights(weights(moved), whole) and records(moved) == lines
    starts = [json.loads(line)["settings"] for line in open(moved / "log.jsonl")
              if "settings" in line]
    assert [first["sample"] for first in starts] == [0, 3, 3]
    assert not train.read_log(moved / "log.jsonl")[0]["branched"]

def test_train_a_branch_is_another_run_in_another_folder(settings, tmp_path, capsys):
    train.train(settings("--recipe", "bf16", "--keep-bf16", "1"))
    start, last = map(str, train.checkpoints(tmp_path / "out/run"))     # steps 6 and 8
    end = weights(tmp_path / "out/run")

    def branch(name, *flags):
        s = train.parse_args(["--resume", start, "--out", str(tmp_path / "out" / name),
                              *flags])
        train.train(s)
        assert records(s.out)[0]["step"] == 7 and s.keep_bf16 == 1
        assert records(s.out)[-1]["step"] == s.steps
        return weights(s.out)

    assert same_weights(branch("same"), end)
    assert not same_weights(branch("e2m1", "--recipe", "e2m1", "--rht", "none"), end)
    assert not same_weights(branch("longer", "--steps", "10"), end)
    # Another recipe comes without what flags had changed in the old one
    start = str(train.checkpoints(tmp_path / "out/e2m1")[0])
    branch = ["--resume", start, "--out", str(tmp_path / "x")]
    assert train.parse_args(branch).rht == []
    assert train.parse_args([*branch, "--recipe", "ufp4"]
                            ).rht is None
    # A branch stays one when it goes on, and is compared with the run from scratch
    capsys.readouterr()
    out = tmp_path / "out/same"
    train.main(["--resume", str(out)])
    assert "loss error +0.00%" in capsys.readouterr().out
    assert train.read_log(out / "log.jsonl")[0]["branched"]

def test_train_what_changes_a_run_is_refused(settings, text, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text(text.read_text())
    bf16, run = ["--recipe", "bf16", "--data", str(mine)], tmp_path / "out/run"

    def refused(*argv):
        with pytest.raises(ValueError) as error:
            train.train(train.parse_args(argv))
        return str(error.value)

    assert "no such checkpoint; whole ones" in refused("--resume", str(run))
    train.train(settings(*bf16))
    start, last = map(str, train.checkpoints(run))
    here, new = ["--resume", str(run)], ["--out", str(tmp_path / "new")]
    for flags in ["--dim", "64"], ["--recipe", "ufp4"], ["--steps", "9"]:
        said = refused(*here, *flags)
        assert said.startswith(f"{flags[0]} would change") and "add --out" in said
    assert "holds a run" in refused("--resume", start)          # not the last
    assert "no such checkpoint" in refused("--resume", start[:-1] + "7")
    assert "has made 6 steps: a branch needs more than --steps 6" in refused(
        "--resume", start, *new, "--steps", "6")
    for flags, named in ((["--dim", "64"], "embed.weight is (256, 32) there"),
                         (["--layers", "1"], "blocks.1.norm1.weight is (32,) there and "
                                             "None here"),
                         (MOE, "mlp.fc1.weight is (64, 32) there and (3, 64")):
        said = refused("--resume", start, *new, *flags)
        assert "has another model" in said and named in said
    mine.write_text(text.read_text().upper())
    assert f"--data {mine} is mine-" in refused(*here)          # another text
    assert f"--data {mine} is mine-" in refused("--resume", start, *new)
    other = tmp_path / "other.txt"
    other.write_text(mine.read_text())
    train.train(train.parse_args(["--resume", start, *new, "--data", str(other)]))

def test_train_a_damaged_file_is_named(settings, tmp_path):
    """And the newest checkpoint deleted, the run goes on from the one before."""
    s = settings("--recipe", "bf16")
    train.train(s)
    older, newer = train.checkpoints(s.out)
    resume = ["--resume", s.out]

    def refused(path, content, message):
        whole = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            train.train(train.parse_args(resume))
        path.write_bytes(whole)

    data, metadata = newer / "__0_0.distcp", newer / ".metadata"
    bits = bytearray(data.read_bytes())
    at = bits.index(b"archive/data/0")
    bits[at + 200] ^= 1
    damaged = re.escape(f"{newer} is damaged")
    refused(data, data.read_bytes()[:-1000], damaged)
    refused(data, bits, damaged + ".*a checksum is wrong.*delete it, and --resume")
    refused(metadata, b"", damaged)
    refused(metadata, metadata.read_bytes()[:500], damaged)
    log = Path(s.out) / "log.jsonl"
    for content in b"", b"\xff", b'{"step": 1}\n', b"[1]\n", b'{"other": 1}\n':
        refused(log, content, "log.jsonl is damaged, or no log")
    val = next((tmp_path / "data").rglob("val.bin"))
    refused(val, b"", "val.bin is damaged")
    val.unlink()                                    # it is made again
    metadata.unlink()                               # as if killed in the midst of it
    assert train.parse_args(resume).resume == str(older)
    train.train(train.parse_args(resume))
    assert train.checkpoints(s.out) == [older, newer]

def test_train_a_run_that_died_before_its_first_line_can_start_again(
        settings, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(train, "learning_rate", lambda step, s: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train.train(settings("--recipe", "bf16"))
    half = Path(settings().out) / "ckpt-0000002/__1_0.distcp"   # of a save that died
    half.parent.mkdir()
    half.write_bytes(b"half")
    train.train(settings("--recipe", "bf16"))
    assert not half.exists()

def test_train_a_full_disk_keeps_the_last_checkpoint(settings, monkeypatch, capsys):
    """Writes beyond a limit fail, as on a full disk."""
    resource = pytest.importorskip("resource")
    s, real = settings("--recipe", "bf16"), train.dcp.save
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(state, **kwargs):
        if state["step"] == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            return real(state, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    argv = ["--resume", s.out]
    with monkeypatch.context() as m:
        m.setattr(train.dcp, "save", save)
        m.setattr(train, "parse_args", lambda argv: s)
        error = said(capsys, 1, train.main, [])
    assert "could not save" in error and f"by --resume {s.out}" in error
    assert "Traceback" not in error
    assert [p.name for p in train.checkpoints(s.out)] == ["ckpt-0000002"]
    assert (Path(s.out) / "ckpt-0000004").exists()      # half of it takes room
    with monkeypatch.context() as m:
        m.setattr(train, "load_data", lambda config: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train.train(train.parse_args(argv))         # which any start frees
    assert not (Path(s.out) / "ckpt-0000004").exists()
    train.train(train.parse_args(argv))
    assert records(s.out)[-1]["step"] == 8

def test_train_two_runs_in_one_folder_are_refused(settings):
    s = settings("--recipe", "bf16")
    Path(s.out).mkdir(parents=True)
    other = subprocess.Popen([sys.executable, "-c", f"""if True:
        import fcntl
        lock = open({s.out + "/lock"!r}, "w")
        fcntl.lockf(lock, fcntl.LOCK_EX)
        print("locked", flush=True)
        input()"""], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"locked\n"
    with pytest.raises(ValueError, match="another process trains in"):
        train.train(s)
    other.kill()                                        # its lock ends with it
    other.wait()
    train.train(s)

def test_train_loss_error_is_relative_to_the_bf16_run_beside(
        settings, tmp_path, capsys):
    def run(name, *flags):
        return train.train(settings("--out", str(tmp_path / "out" / name), *flags))

    bf16 = run("b", "--recipe", "bf16", "--save-interval", "5")
    assert "are compared with this run" in capsys.readouterr().out
    run("../start", "--recipe", "e2m1")
    start = str(train.checkpoints(tmp_path / "start")[0])
    capsys.readouterr()
    loss = run("a", "--resume", start, "--recipe", "bf16")      # in part in 4 bits
    assert f"loss error {loss / bf16 - 1:+.2%}" in capsys.readouterr().out
    (tmp_path / "out/0").mkdir()
    (tmp_path / "out/0/log.jsonl").write_text("no log\n")
    loss = run("e", "--recipe", "e2m1")
    assert f"loss error {loss / bf16 - 1:+.2%}, to" in capsys.readouterr().out
    log = tmp_path / "out/b/log.jsonl"
    log.write_text("".join(log.open().readlines()[:5]))         # stopped at step 3
    said = train.loss_error(settings("--out", str(tmp_path / "out/e")), loss)
    assert "finish a run of --recipe bf16" in said

def test_train_a_signal_stops_one_run_and_not_the_next(settings, monkeypatch, capsys):
    real, before = train.learning_rate, signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as m:
        m.setattr(train, "learning_rate", lambda step, s: (
            step == 2 and signal.raise_signal(signal.SIGTERM), real(step, s))[1])
        s = settings("--recipe", "bf16")
        error = said(capsys, 1, train.train, s)
    assert f"stopped after step 3 and saved; --resume {s.out} goes on" in error
    assert signal.getsignal(signal.SIGTERM) == before
    train.train(settings("--recipe", "bf16", "--resume"))
    assert records(s.out)[-1]["step"] == 8

def test_train_runs_in_a_notebook(settings, monkeypatch, text, tmp_path):
    """Whatever stdout is, in a thread, and with the flags of the notebook's kernel."""
    argv = [*TINY, "--recipe", "bf16", "--data", str(text), "--steps", "3"]
    printed = io.StringIO()
    for i, stdout in enumerate((printed, None, open(os.devnull, "w"))):
        out = tmp_path / f"out/{i}"
        flags = [*argv, "--sample", "4", "--out", str(out)]
        monkeypatch.setattr(sys, "stdout", stdout)
        thread = threading.Thread(target=train.main, args=(flags,))
        thread.start()
        thread.join()
        assert records(out)[-1]["step"] == 3
    monkeypatch.undo()
    assert "validation loss" in printed.getvalue()
    monkeypatch.setattr(sys, "argv", ["x/ipykernel_launcher.py", "-f", "kernel.json"])
    assert train.parse_args().recipe == "ufp4"
    with pytest.raises(ValueError, match="unrecognized arguments: -f"):
        train.parse_args(["-f", "kernel.json"])

def test_train_a_copy_of_a_compiled_model_has_its_own_weights(settings):
    """Also with activation checkpointing."""
    s = settings("--compile", "--remat", "--recipe", "bf16")
    model, _ = train.build(s, train.make_recipe(s), 256)
    model.init_weights()
    tokens = torch.randint(256, (2, 32))
    copied, before = copy.deepcopy(model), model(tokens)
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.zero_()
    assert torch.allclose(copied(tokens), before, atol=1e-5)
    assert not torch.allclose(model(tokens), before, atol=1e-2)

def test_train_a_file_of_ones_own_adds_a_recipe(text, tmp_path):
    """python train.py --with mine.py, and python mine.py, in processes of their own."""
    (tmp_path / "mine.py").write_text("""if True:
        import train, ufp4
        ufp4.RECIPES["mine"] = ufp4.Recipe("mine", rht=("wgrad",), sr=("dy",))
        train.PRESETS["mine"] = train.PRESETS["nano"]
        if __name__ == "__main__":
            train.main()
        """)
    flags = [*TINY, "--steps", "2", "--data", str(text), "--recipe", "mine",
             "--model", "mine", "--out"]
    env = os.environ | {"PYTHONPATH": str(HERE)}

    def run(*argv):
        done = subprocess.run([sys.executable, *argv], cwd=tmp_path, text=True, env=env,
                              capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(HERE / "train.py", "--with", "mine.py", *flags, "a")
    run("mine.py", *flags, "b")
    assert records(tmp_path / "a") == records(tmp_path / "b")
    for resume in [HERE / "train.py"], ["mine.py"]:     # the log knows of mine.py
        assert "recipe mine" in run(*resume, "--resume", "a")

def test_train_help_shows_every_default(capsys):
    with pytest.raises(SystemExit):
        train.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for f in dataclasses.fields(train.Config):
        assert train.flag(f.name) in text
        if f.type is not bool and f.default is not None:
            assert re.search(rf"{train.flag(f.name)} ((?! --).)*"
                             rf"\(default: {f.default}\)", text)

def test_train_what_is_not_finite_stops_the_run_before_it_is_saved(
        settings, monkeypatch, capsys):
    """A loss or gradient, though later ones are finite,
    and however seldom the log looks."""
    real, passes = train.GPT.forward, []

    def forward(self, tokens, targets=None):
        passes.append(self.training)
        loss = real(self, tokens, targets)
        if sum(passes) == 5 and self.training:          # in the fifth step
            loss = spoil(loss)
        return loss * math.nan if spoil is None and not self.training else loss

    def main(s):
        with monkeypatch.context() as m:
            m.setattr(train, "parse_args", lambda argv: s)
            train.main([])

    def explode(loss):
        loss.register_hook(lambda grad: grad * math.inf)
        return loss

    monkeypatch.setattr(train.GPT, "forward", forward)
    for spoil, message in ((lambda loss: loss * math.nan, "step 5: loss nan"),
                           (explode, "step 5: loss 5.*, gradient norm (nan|inf)")):
        for interval in "1", "100":
            passes.clear()
            s = settings("--recipe", "bf16", "--eval-interval", "100",
                         "--log-interval", interval, "--save-interval", "4",
                         "--lr", "0")
            shutil.rmtree(s.out, ignore_errors=True)
            error = said(capsys, 3, main, s)
            assert re.search(message + ".*; --resume would repeat.*setting", error)
            assert [p.name for p in train.checkpoints(Path(s.out))] == ["ckpt-0000004"]
            logged = [1, 2, 3, 4] if interval == "1" else [4]   # a saved step is logged
            assert [line["step"] for line in records(s.out)] == logged
    spoil = None                                        # evaluation alone
    passes.clear()
    shutil.rmtree(s.out)
    error = said(capsys, 3, main, settings("--recipe", "bf16"))
    assert "step 4: validation loss nan; " in error
    assert [p.name for p in train.checkpoints(Path(s.out))] == ["ckpt-0000002"]

def test_train_a_step_that_logs_nothing_waits_for_no_device(settings, monkeypatch):
    """Counts what reads a tensor's values, in which step. CPU tensors have the same
    methods. (Offsets are checked on the CPU alone.)"""
    waits, steps, real = [], [], train.learning_rate
    monkeypatch.setattr(ufp4, "check_operands", lambda *_: None)

    def counted(name):
        method = getattr(torch.Tensor, name)
        return lambda self, *args, **kwargs: (waits.append((name, steps[-1:])),
                                              method(self, *args, **kwargs))[1]

    for name in ("item", "tolist", "numpy", "cpu", "nonzero",
                 "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    monkeypatch.setattr(train, "learning_rate", lambda step, s: (
        steps.append(step), real(step, s))[1])
    for flags in ["--recipe", "ufp4"], ["--recipe", "bf16", *MOE]:
        rare = [x for name in ("log", "save", "eval")
                for x in (f"--{name}-interval", "5")]
        s = settings(*flags, *rare, "--steps", "9")
        train.train(s)
        shutil.rmtree(s.out)
        assert {step for _, (*_, step) in filter(lambda w: w[1], waits)} == {4, 8}
        waits.clear(), steps.clear()

def test_train_noise_report_is_the_split_of_each_output(settings):
    """Against float64, layer by layer, experts one by one; and it leaves no trace."""
    for flags in [], MOE:
        s = settings("--recipe", "ufp4", "--keep-bf16", "1", *flags)
        model, _ = train.build(s, train.make_recipe(s), 256)
        model.init_weights()
        layers = {name: m for name, m in model.blocks[0].named_modules()
                  if isinstance(getattr(m, "weight", None), nn.Parameter)
                  and type(m) not in (nn.RMSNorm, nn.Linear)}
        seen, tokens = {}, torch.randint(256, (4, 32))
        hooks = []
        for name, m in layers.items():
            keep = lambda m, x, y, name=name: seen.update({name: (x, y)})
            hooks.append(m.register_forward_hook(keep))
        report = ufp4.noise(model, tokens)
        expected = {}
        for name, ((x, *offsets), y) in seen.items():
            w, x, y = (layers[name].weight.double(), x.double().flatten(0, -2),
                       y.double())
            if offsets:
                ends = [0, *offsets[0].tolist()]
                groups = enumerate(zip(ends, ends[1:]))
                exact = torch.cat([x[a:b] @ w[e].T for e, (a, b) in groups])
            else:
                exact = x @ w.T
            exact, y = exact.flatten(), y.flatten()
            slope = (exact @ y / (exact @ exact)).item()
            rest = y - slope * exact
            expected[f"blocks.0.{name}"] = (rest @ rest / (exact @ exact)).item(), slope
        assert report.keys() == expected.keys() and len(report) == (6 if flags else 4)
        for name, (noise, slope) in expected.items():
            assert noise > 0.001 and report[name][0] == pytest.approx(noise, rel=1e-3)
            assert report[name][1] == pytest.approx(slope, rel=1e-5)
        val = np.random.default_rng(0).integers(0, 256, 200).astype(np.uint16)
        line = train.validate(model, val, s)            # what the log has of it
        first = np.stack([val[i:i + 32] for i in (0, 83, 167)]).astype(np.int64)
        first = torch.from_numpy(first)
        noises, slopes = zip(*ufp4.noise(model, first).values())
        assert line["noise"] == pytest.approx(np.mean(noises))
        assert line["slope"] == pytest.approx(np.mean(slopes))
        assert line["worst_noise"] == max(noises)
        for hook in hooks:
            hook.remove()
        assert model.training and not any(m._forward_hooks for m in model.modules())
        assert not any(m.load.any()
                       for m in model.modules() if isinstance(m, train.MoE))
        bf16 = train.GPT(s, RECIPES["bf16"], 256)
        assert ufp4.noise(bf16, tokens) == {}
        assert list(train.validate(bf16, val, s)) == ["val_loss"]

def test_train_looking_at_a_run_changes_nothing_in_it(settings, tmp_path):
    """How often it validates, logs and saves, with random bits everywhere."""
    often = [x for name in ("log", "save", "eval") for x in (f"--{name}-interval", "1")]
    found = []
    for i, flags in enumerate(([], often)):
        s = settings("--sr", "x,w,dy", *MOE, *flags,
                     "--out", str(tmp_path / f"out/{i}"))
        train.train(s)
        found.append((weights(s.out), [line["train_loss"] for line in records(s.out)]))
    assert same_weights(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert all("noise" in line for line in records(s.out))

def test_train_no_checkpoint_is_without_its_line_in_the_log(
        settings, tmp_path, monkeypatch):
    """A step is validated and logged before it is saved.

    So when validation dies, resuming trains and validates the steps after the last
    checkpoint again."""
    whole = settings(*MOE, "--out", str(tmp_path / "out/whole"))
    train.train(whole)
    out, real, calls = str(tmp_path / "out/died"), train.evaluate, []

    def evaluate(*args):
        calls.append(args)
        if len(calls) in (1, 3):
            raise ZeroDivisionError
        return real(*args)

    monkeypatch.setattr(train, "evaluate", evaluate)
    for flags, name in ([], "ckpt-0000002"), (["--resume"], "ckpt-0000006"):
        with pytest.raises(ZeroDivisionError):
            train.train(settings(*MOE, "--out", out, *flags))
        assert train.checkpoints(out)[-1].name == name
    train.train(settings(*MOE, "--out", out, "--resume"))
    assert same_weights(weights(out), weights(whole.out))
    assert records(out) == records(whole.out)

def test_train_prompt_only_continues_a_text_even_when_the_data_is_gone(
        settings, text, tmp_path, monkeypatch, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text(text.read_text())
    flags = ["--recipe", "ufp4", *MOE, "--data", str(mine), "--steps", "4",
             "--sample", "9"]
    s = settings(*flags)
    train.train(s)
    files = {path: path.read_bytes()
             for path in Path(s.out).rglob("*") if path.is_file()}
    mine.unlink()
    shutil.rmtree(tmp_path / "data")
    for name in "prepare", "evaluate", "get_batch", "save", "log":
        monkeypatch.setattr(train, name, None)          # none of them is called
    printed = []
    for path in s.out, str(train.checkpoints(s.out)[-1]):
        # Under LANG=C "é" is two surrogates
        for text in "déf ", "déf ".encode().decode("ascii", "surrogateescape"):
            capsys.readouterr()
            train.main(["--resume", path, "--prompt", text])
            printed.append(capsys.readouterr().out)
    assert set(printed) == {printed[0]} and printed[0].startswith("déf ")
    assert len(printed[0].strip()) > len("déf ")
    error = said(capsys, 1, train.main, ["--resume", s.out, "--prompt", ""])
    assert "--prompt needs a text" in error
    assert files == {path: path.read_bytes()
                     for path in Path(s.out).rglob("*") if path.is_file()}

def test_train_makes_no_float64_on_the_device(settings):
    """For an MPS device can't hold it:
    in training, evaluation, the noise report, sampling."""
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            found.update(t.dtype for t in torch.utils._pytree.tree_leaves(out)
                         if isinstance(t, torch.Tensor))
            return out

    for flags in ["--recipe", "ufp4"], ["--recipe", "bf16", *MOE]:
        found, s = set(), settings(*flags, "--steps", "4", "--sample", "2")
        with Watch():
            train.train(s)
        shutil.rmtree(s.out)
        assert torch.float32 in found and torch.float64 not in found

@pytest.mark.parametrize("flags,message", [
    ("--recipe fp4", "unknown recipe 'fp4': choose from bf16, ufp4"),
    ("--model big", "unknown model 'big': choose from nano"),
    ("--dtype float16", "--dtype float16 must be float32 or bfloat16"),
    ("--steps 0", "--steps 0 must be at least 1"),
    ("--lr -1", "--lr -1.0 must be at least 0"),
    ("--lr nan", "--lr nan must be at least 0"),
    ("--steps 1e3", "invalid int value: '1e3'"),
    ("--resume", "there is no such checkpoint"),
    ("--device warp", "--device warp can't be used"),
    ("--rht forward", "some of fprop, dgrad, wgrad, not ('forward',)"),
    ("--dim 40", "in_features = 40"),
    ("--heads 3", "--dim 32 must be a multiple of 2 x --heads 3"),
    ("--experts 4 --top-k 5", "--top-k 5 must be from 1 to --experts 4"),
    ("--grad-accum 3", "must be a multiple of 1 processes x --grad-accum 3"),
    ("--warmup 9", "--warmup 9 must be at most --steps 8"),
    ("--keep-bf16 2", "--keep-bf16 2 leaves none of 2 blocks to quantize"),
    ("--prompt x", "--prompt needs a model: add --resume"),
    ("--resume --prompt", "--prompt: expected one argument"),
    ("--recipe bf16 --fmt e2m1", "bf16 does not quantize, so that it has no fmt"),
    ("--with nothing.py", "No module named 'nothing'"),
    ("--data nothing.txt", "no data set or file is called 'nothing.txt'"),
    ("--seq-len 20000", "too few for a sequence"),
    ("--out /dev/null/run", "/dev/null/run")])
def test_train_bad_input_is_one_clear_sentence(text, capsys, tmp_path, flags, message):
    argv = [*TINY, *f"--data {text} --out {tmp_path}/run {flags}".split()]
    error = said(capsys, 1, train.main, argv)
    assert (message in error and error.startswith("train.py: ")
            and error.count("\n") == 1)

def test_train_what_ends_a_command_early_is_one_line(text, tmp_path):
    """Ctrl-C while modules are imported; a cache that can't be written."""
    (tmp_path / "tqdm.py").write_text("import signal; signal.raise_signal(2)")
    flags = [*TINY, "--data", str(text), "--out", str(tmp_path / "out")]
    for env, message in (
            ({"PYTHONPATH": str(tmp_path)}, "interrupted"),
            ({"TORCHINDUCTOR_CACHE_DIR": "/dev/null/cache"},
             "TORCHINDUCTOR_CACHE_DIR can't be used: [Errno 20] Not a directory")):
        done = subprocess.run([sys.executable, HERE / "train.py", *flags], text=True,
                              env=os.environ | env, capture_output=True)
        assert done.returncode == 1 and done.stderr.startswith("train.py: " + message)
        assert done.stderr.count("\n") == 1

# ---- train.py in processes of its own ------------------------------------------------
# kill -9 when this run does something for the count-th time: in the midst of a step, of
# a line of the log, of a save before and after its data, of deleting an old checkpoint
KILLED = """
import os
def kill(module, name, count, before=lambda *args, **kwargs: None):
    real, calls = getattr(module, name), []
    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == count and train.RANK == train.WORLD - 1:
            before(*args, **kwargs)
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)
    setattr(module, name, killed)
def half(state, checkpoint_id):
    checkpoint_id.mkdir(exist_ok=True)
    (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
def half_line(config, line):
    open(config.out + "/log.jsonl", "a").write(train.json.dumps(line)[:17])
"""
IN_SAVE = KILLED + "kill(train.dcp, 'save', 2, half)"
MOMENTS = (
    "kill(train.dcp, 'save', 1, half)", "kill(train, 'log', 4, half_line)",
    "kill(train.torch.optim.AdamW, 'step', 4)", "kill(train, 'get_batch', 2)",
    "import torch.distributed.checkpoint.filesystem as fs; "
    "kill(fs.FileSystemWriter, 'finish', 1)", "kill(train.shutil, 'rmtree', 2)")

SEEDS = """
real = train.nn.utils.clip_grad_norm_
def clip(*args):
    print(train.torch.initial_seed(), file=open(f"seeds-{train.RANK}", "a"))
    return real(*args)
train.nn.utils.clip_grad_norm_ = clip
"""

SIGNAL = """
real_rate, train.learning_rate = train.learning_rate, lambda step, s: (
    train.signal.raise_signal(train.signal.SIGTERM)
    if step == 4 and train.RANK == 1 else None,
    real_rate(step, s))[1]
"""

def start_train(flags, text, tmp_path, preamble="", ranks=1):
    """train.py on `ranks` CPU processes, with something changed."""
    common = [] if "--resume" in flags else [*TINY, "--data", str(text)]
    (tmp_path / "run.py").write_text(
        f"import functools, sys\nsys.path.insert(0, {str(HERE)!r})\n"
        f"import train\n{preamble}\n"
        "train.torch.compiler.set_stance('force_eager')\n"
        "train.prepare = functools.partial("
        f"train.prepare, root={str(tmp_path / 'data')!r})\n"
        f"train.main({[*common, *flags]!r})\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [sys.executable, *(torchrun if ranks > 1 else []), tmp_path / "run.py"],
        cwd=tmp_path, text=True, stderr=subprocess.PIPE)

def test_train_killed_and_resumed_ends_with_the_same_weights(
        settings, text, tmp_path, monkeypatch):
    """kill -9 at six moments of one run, each time resumed by the folder alone; with
    noise, bit for bit."""
    out, whole = (tmp_path / "out/killed",
                  settings(*MOE, "--steps", "14", "--out", str(tmp_path / "out/whole")))
    train.train(whole)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "verbose")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    flags = [*MOE, "--steps", "14", "--out", str(out)]
    for moment in MOMENTS:
        process = start_train(flags, text, tmp_path, KILLED + moment)
        error = process.communicate(timeout=300)[1]
        assert process.returncode == -signal.SIGKILL, error
        if train.checkpoints(out):      # the first dies before there is one: once more
            flags = ["--resume", str(out)]
    # What the user sets stays.
    assert re.search("OMP_WAIT_POLICY *= *'ACTIVE'", error)
    train.train(train.parse_args(["--resume", str(out)]))
    assert (same_weights(weights(out), weights(whole.out))
            and records(out) == records(whole.out))
    starts = [json.loads(line)["start"] for line in open(out / "log.jsonl")
              if line.startswith('{"settings"')]
    assert starts[:2] == [0, 0] and 1 < len(set(starts)) and starts == sorted(starts)

def test_train_ctrl_c_saves_and_says_how_to_go_on(text, tmp_path, monkeypatch):
    """And OpenMP's threads sleep after a while, as GNU's says itself."""
    out, log = tmp_path / "out", tmp_path / "out/log.jsonl"
    flags = ["--recipe", "bf16", "--steps", "100000", "--save-interval", "100000"]
    monkeypatch.setenv("OMP_DISPLAY_ENV", "verbose")
    for name in "OMP_WAIT_POLICY", "GOMP_SPINCOUNT":
        monkeypatch.delenv(name, raising=False)
    process = start_train([*flags, "--out", str(out)], text, tmp_path)
    while process.poll() is None and (not log.exists() or len(train.read_log(log)) < 4):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 1 and f"and saved; --resume {out} goes on" in error
    assert "GOMP_" not in error or "GOMP_SPINCOUNT = '10000'" in error
    assert int(train.checkpoints(out)[-1].name[5:]) == records(out)[-1]["step"]

def test_train_two_processes_are_one_with_two_parts_also_after_losing_one(
        settings, text, tmp_path):
    """Bit for bit, 3 experts on 2 ranks included: the halves of a batch are multiplied
    and summed alike, whoever computes them. (The gradient's norm is summed in another
    order: no clipping.)

    When a rank is killed, the other ends too.
    A signal to one of them stops both after the same step.
    One process goes on where two stopped."""
    flags = [*MOE, "--recipe", "ufp4", "--sr", "none", "--clip", "0",
             "--log-interval", "3", "--eval-windows", "4"]
    one = settings(*flags, "--grad-accum", "2", "--out", str(tmp_path / "one"))
    out = tmp_path / "two"
    train.train(one)
    for more, preamble, message, saved in (
            ([*flags, "--remat", "--out"], IN_SAVE, "Signal 9", [2]),
            (["--resume"], SEEDS + SIGNAL,
             "train.py: stopped after step 5 and saved", [4, 5])):
        process = start_train([*more, str(out)], text, tmp_path, preamble, ranks=2)
        error = process.communicate(timeout=300)[1]
        assert process.returncode and message in error, error
        assert [int(p.name[5:]) for p in train.checkpoints(out)] == saved
    train.train(train.parse_args(["--resume", str(out), "--grad-accum", "2"]))
    assert same_weights(weights(out), weights(one.out))
    two = [line for line in records(out) if line["step"] != 5]  # logged as it was saved
    for a, b in zip(two, records(one.out), strict=True):
        assert a.pop("worst_layer", None) == b.pop("worst_layer", None)
        assert a == pytest.approx(b, rel=1e-6)
    seeds = [(tmp_path / f"seeds-{rank}").read_text().split() for rank in (0, 1)]
    assert len({*seeds[0], *seeds[1]}) == len(seeds[0] + seeds[1]) == 6

def test_train_three_processes_of_which_one_has_no_expert(settings, text, tmp_path):
    """4 experts are 2, 2 and 0. A third is no binary fraction, so sums are rounded."""
    flags = ("--experts 4 --top-k 2 --recipe bf16 --batch-size 6 --steps 4 "
             "--clip 0 --sample 8").split()
    one = settings(*flags, "--grad-accum", "3", "--out", str(tmp_path / "one"))
    loss, out = train.train(one), tmp_path / "three"
    process = start_train([*flags, "--out", str(out)], text, tmp_path, ranks=3)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error
    assert records(out)[-1]["val_loss"] == pytest.approx(loss, rel=1e-4)
    for a, b in zip(records(out), records(one.out), strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)

def test_train_under_torchrun_the_sentence_comes_last(text, tmp_path):
    process = start_train(["--eval-windows", "3"], text, tmp_path, ranks=2)
    error = process.communicate(timeout=300)[1]
    sentence = "train.py: --eval-windows 3 must be a multiple of 2 processes"
    assert process.returncode == 1 and sentence in error.splitlines()[-2]

def grouped_mm(a, b, offs):
    """F.grouped_mm, which has no float64, as a loop over the groups."""
    groups = list(zip([0, *offs.tolist()], offs.tolist()))
    if b.dim() == 3:                        # a group of rows of a for each b
        return torch.cat([a[i:j] @ m for (i, j), m in zip(groups, b)])
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in groups])

@pytest.mark.parametrize("recipe", ["bf16", "ufp4"])
@pytest.mark.parametrize("more", [[], MOE])
def test_train_a_step_in_float32_is_that_in_float64(
        settings, recipe, more, monkeypatch):
    """Loss and all gradients.

    With quantization, a number that lies between two levels may be rounded the other
    way, which is rare."""
    s = settings("--recipe", recipe, *more)
    model = train.GPT(s, replace(RECIPES[recipe], sr=()), 256)
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p *= 3 if p.dim() > 1 else 1    # so that attention is not uniform
    tokens, results = torch.randint(0, 256, (2, 33)), []
    for dtype in torch.float32, torch.float64:
        model.to(dtype)
        if dtype == torch.float64:
            monkeypatch.setattr(F, "grouped_mm", grouped_mm)
        for block in model.blocks[:2 if more else 0]:
            block.mlp.router.float()                    # which is float32 in any model
        loss = model(tokens[:, :-1], tokens[:, 1:])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        flat = torch.cat([g.flatten().double() for g in grads])
        results.append((loss.detach(), flat))
    (loss, grad), (exact_loss, exact_grad) = results
    rare = 1e-4 if recipe == "bf16" else 2e-2
    assert loss.item() == pytest.approx(exact_loss.item(), rel=rare / 10)
    assert (grad - exact_grad).norm() < rare * exact_grad.norm()

# ---- data/prepare.py -----------------------------------------------------------------
def test_data_own_text_is_bytes_and_follows_its_content(tmp_path):
    path = tmp_path / "my.txt"
    for content in "naïve <|endoftext|> ☃\n".encode() * 50, bytes(range(256)) * 4:
        path.write_bytes(content)
        d = prepare.prepare(str(path), root=tmp_path)
        parts = [prepare.read_tokens(p[0]) for p in (d.train, d.val)]
        tokens = np.concatenate(parts).tolist()
        assert bytes(tokens) == content
        assert prepare.decode(tokens, d.vocab_size) == content.decode(errors="replace")
    path.write_bytes(b" \n")
    with pytest.raises(ValueError, match="holds no text"):
        prepare.prepare(str(path), root=tmp_path)

def test_data_the_default_is_the_standard_library_in_two_disjoint_parts(tmp_path):
    """The same in each call: whole files of the library, each in one of the parts."""
    d = prepare.prepare(root=tmp_path / "a")
    train_text, val = (prepare.read_tokens(p[0]).astype(np.uint8).tobytes()
                       for p in (d.train, d.val))
    again = prepare.prepare("python", tmp_path / "b")
    for a, b in (d.train, again.train), (d.val, again.val):
        assert a[0].read_bytes() == b[0].read_bytes()
    assert len(train_text) > 15 * len(val) > 10**6 and d.vocab_size == 256
    for module in argparse, dataclasses, json, functools, http.server, pathlib, re:
        source = Path(module.__file__).read_bytes()
        assert (source in train_text) + (source in val) == 1

def test_data_a_token_file_that_is_damaged_is_named_and_a_missing_one_made_again(
        tmp_path):
    path = tmp_path / "a.bin"
    prepare.write_tokens(path, [1, 2, 50257, 3])
    assert prepare.read_tokens(path).tolist() == [1, 2, 50257, 3]
    whole = path.read_bytes()
    for damaged in whole[:-2], b"\0" + whole[1:], whole[:1000], b"":
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="a.bin is damaged.*delete it"):
            prepare.read_tokens(path)
    text = tmp_path / "my.txt"
    text.write_text("abc" * 100)
    d = prepare.prepare(str(text), tmp_path)
    for path in d.train[0], d.val[0]:
        whole = path.read_bytes()
        path.unlink()
        prepare.prepare(str(text), tmp_path)
        assert path.read_bytes() == whole

def test_data_a_prompt_becomes_the_tokens_of_its_vocabulary(monkeypatch):
    assert prepare.encode("naïve ☃", 256) == list("naïve ☃".encode())
    surrogates = "naïve ☃".encode().decode("ascii", "surrogateescape")
    assert prepare.encode(surrogates, 256) == list("naïve ☃".encode())

    class GPT2:                                         # would be downloaded
        def encode_ordinary(self, text):
            return [len(word) for word in text.split()]

    monkeypatch.setattr(prepare.tiktoken, "get_encoding", {"gpt2": GPT2()}.__getitem__)
    assert prepare.encode("a bc def", 50257) == [1, 2, 3]
    assert prepare.encode("a " + surrogates, 50257) == [1, 5, 1]
    monkeypatch.setattr(prepare.tiktoken, "get_encoding",
                        lambda name: open(os.devnull + "/x"))
    with pytest.raises(OSError, match="GPT-2's vocabulary.* could not be downloaded"):
        prepare.encode("a", 50257)

class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files`; breaks off after `limit` bytes."""

    def do_GET(self):
        self.asked.append(self.path)
        if self.path not in self.files:
            return self.send_error(404)
        body = self.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:self.limit])

    def log_message(self, *_):
        pass

@pytest.fixture
def server():
    handler = type("Handler", (Server,), {"files": {}, "asked": [], "limit": None})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        handler.url = f"http://127.0.0.1:{httpd.server_port}"
        yield handler
        httpd.shutdown()

def test_data_fineweb_downloads_shards_once(server, tmp_path):
    prepare.write_tokens(tmp_path / "shard.bin", np.arange(200_000) % 50257)
    body = (tmp_path / "shard.bin").read_bytes()
    for name in "val_000000", "train_000001", "train_000002":
        server.files[f"/fineweb_{name}.bin"] = body
    server.limit = 150_000
    with pytest.raises(OSError, match="broke off at 150000 of .*Try again"):
        prepare.prepare("fineweb", tmp_path, 2, server.url)
    # It is never half there under its name, and leaves nothing.
    assert not list((tmp_path / "fineweb").iterdir())
    server.limit = None
    for _ in range(2):                          # the second time nothing is fetched
        d = prepare.prepare("fineweb", tmp_path, 2, server.url)
        assert len(server.asked) == 4
    assert ([p.read_bytes() for p in d.val + d.train] == [body] * 3
            and d.vocab_size == 50257)

def test_data_a_wrong_or_missing_file_says_what_to_do(server, tmp_path):
    prepare.write_tokens(tmp_path / "other.bin", [1, 50257])
    server.files = {"/bad.bin": b"<html>please log in</html>" * 100,
                    "/other.bin": (tmp_path / "other.bin").read_bytes()}
    for name, message in (("bad.bin", "damaged, or no token file.*put the file at"),
                          ("other.bin", "its tokens are not GPT-2's"),
                          ("gone.bin", "404.*--data")):
        with pytest.raises(OSError, match=message):
            prepare.download(f"{server.url}/{name}", tmp_path / "new" / name)
    assert not list((tmp_path / "new").iterdir())

# ---- bench.py ------------------------------------------------------------------------
@pytest.mark.parametrize("name,formats", [("four-over-six", ("e2m1", "e2m1-max4")),
                                          ("mixfp4", ("e2m1", "e1m2"))])
def test_bench_a_block_takes_the_format_that_errs_less(name, formats):
    x = torch.randn(500, 64, generator=gen())
    q = RECIPES[name].quantizer("x", "fprop")
    error = lambda y: (y - x).view(-1, 16).double().square().sum(-1)
    errors = [error(fake_quantize(x, f)) for f in formats]
    assert torch.equal(error(q(x)), torch.minimum(*errors))
    assert 0.1 < (errors[1] < errors[0]).float().mean() < 0.9
    # The squares of these numbers are more than float32 holds.
    assert torch.equal(q(x * 2.0**80), q(x) * 2.0**80)
    # The format is chosen without noise, so SR has no bias.
    x = torch.randn(20_000, 64, generator=gen(1))       # SR draws from seed 0
    alpha, se = bench.slope(RECIPES[name].quantizer("dy", "dgrad")(x), x)
    assert abs(alpha - 1) < 4 * se < 2e-3

@pytest.mark.parametrize("name,slope,like", [("e2m1-debiased", 1.0, "e2m1-full-rht"),
                                             ("ufp4-shrunk", 0.996, "ufp4")])
def test_bench_the_slope_of_what_is_rounded_to_nearest_is_set(name, slope, like):
    x, rand = torch.randn(64, 64, generator=gen()), torch.rand(64, 64, generator=gen())
    for operand, gemm in (("x", "fprop"), ("w", "dgrad")):
        q, plain = (RECIPES[r].quantizer(operand, gemm) for r in (name, like))
        for size in (1.0, 1e-25, 1e25):         # whose squares float32 does not hold
            alpha, _ = bench.slope(q(x * size), rotate(x, q.signs) * size)
            assert alpha == pytest.approx(slope, abs=1e-6)
        ratio = q(x) / plain(x)
        assert ratio[ratio == ratio].std() < 1e-6       # one factor for all
        assert not q(x * 0).any()
    sr, plain = (RECIPES[r].quantizer("dy", "dgrad") for r in (name, like))
    assert torch.equal(sr(x, rand), plain(x, rand))

def products(recipe):
    """Y, dX and dW of a linear layer under a recipe."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 64, requires_grad=True) for n in (48, 32))
    y = ufp4.linear(x, w, recipe)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).sin())
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": w.grad}

@pytest.mark.parametrize("gemm", GEMMS)
def test_bench_another_format_reaches_its_gemm_alone(gemm):
    ours, plain = products(f"ufp4-{gemm}-in-e2m1"), products("ufp4")
    assert [g for g in GEMMS if not torch.equal(ours[g], plain[g])] == [gemm]
    # And it is that format there.
    assert torch.equal(ours[gemm], products("e2m1-full-rht")[gemm])

def test_bench_every_row_is_another_and_fits_its_models():
    plain = products("ufp4")
    for study in bench.STUDIES.values():
        for model, rows in study.items():
            for row in rows:
                s = train.parse_args([*bench.MODELS[model], *bench.row_flags(row),
                                      "--device", "cpu"])
                recipe = train.make_recipe(s)
                # This raises if a layer has no whole blocks
                with torch.device("meta"):
                    gpt = train.GPT(s, recipe, prepare.vocabulary(s.data))
                if row not in ("ufp4", "ufp4-int4", "ufp4-scratch"):
                    ours = products(recipe)
                    assert any(not torch.equal(plain[g], ours[g]) for g in GEMMS), row
            if model in bench.STUDIES["scaling"]:       # as named, 20 bytes each
                active = train.counts(gpt, s)[1]
                assert f"{active / 1e6:.1g}m" == model.split("-")[1]
                assert abs(s.steps * s.batch_size * s.seq_len / active - 20) < 0.02
    kinds = {row: bench.kind_of_row(row) for row in ("bf16", "ufp4-int4", "nvfp4",
                                                     "mixfp4", "ufp4-wgrad-in-e2m1")}
    assert list(kinds.values()) == ["BF16", "E1M2", "E2M1"] + 2 * ["E1M2 and E2M1"]
    odd = Recipe("odd", ufp4.Format("odd", (0.0, 1.0, 2.0)))
    assert bench.kind_of(odd) == "other"

def results(errors, model="m"):
    """Runs with these {row: loss errors by seed}; None diverged."""
    return [{"model": model, "row": row, "seed": seed, "bf16": 2.0,
             "loss": None if error is None else 2.0 * (1 + error)}
            for row, of in errors.items() for seed, error in enumerate(of)]

def of(*runs):
    return bench.Results({"models": {}, "runs": sum(runs, [])})

def test_bench_loss_errors_are_paired_by_seed_and_signed():
    r = of(results({"a": (0.01, 0.05, 0.03), "b": (0.02, 0.08), "c": (None, 0.2)}))
    assert r.errors["m", "c"] == pytest.approx({0: INF, 1: 0.2})
    assert r.cell({("m", "b"): 1}) == "5.00 ± 38.13 (2)"
    assert r.cell({("m", "c"): 1}) == "inf (2)"
    assert r.cell({("m", "none such"): 1}) == ""
    mean, half = r.contrast(bench.on("m", {"b": 1, "a": -1}))     # over seeds 0 and 1
    assert (mean, half) == pytest.approx((0.02, 12.71 * 0.01))
    assert r.contrast(bench.on("m", {"a": 1, "none such": -1})) is None
    # t(3, 0.975) = 3.182, s = sqrt(5/3)
    mean, half = bench.interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5 and half == pytest.approx(3.182 * math.sqrt(5 / 3 / 4))

def test_bench_the_growth_for_each_doubling_is_the_slope_of_a_line():
    """Over two seeds and three sizes. numpy's own fit is the oracle."""
    sizes, errors = {"m2": 2, "m4": 4, "m16": 16}, torch.randn(3, 3, generator=gen())
    r = of(*(results({"a": e.tolist(), "b": [0.0, 0.5]}, m)
             for m, e in zip(sizes, errors)))
    slopes = [np.polyfit([1, 2, 4], errors[:, seed] - 0.5 * seed, 1)[0]
              for seed in range(2)]                 # the third seed has no b
    mean, half = r.contrast(bench.doubling(sizes, {"a": 1, "b": -1}))
    assert mean == pytest.approx(np.mean(slopes))
    assert half == pytest.approx(12.71 * np.std(slopes, ddof=1) / math.sqrt(2))

def test_bench_one_seed_has_the_interval_that_the_records_foretell():
    """Of 400 seeds, each with its own error that all rows share, 95% of the intervals
    of a difference hold the true one, and of a difference of differences, too."""
    rows = {"ufp4": 0.01, "a": 0.02, "b": 0.02, "c": 0.04}
    noise = 0.001 * torch.randn(5, 400, generator=gen())
    drawn = {row: (error + noise[i] + noise[4]).tolist()
             for i, (row, error) in enumerate(rows.items())}
    scatter = of(results(drawn)).find_scatter("m")
    assert scatter == pytest.approx(0.001, rel=0.1)
    for weights, true in (({"a": 1, "ufp4": -1}, 0.01),
                          ({"c": 1, "b": -1, "a": -1, "ufp4": 1}, 0.01)):
        held = 0
        for seed in range(400):
            one = of(results({row: e[seed:seed + 1] for row, e in drawn.items()}))
            assert one.contrast(bench.on("m", weights))[1] is None
            one.scatter = scatter
            mean, half = one.contrast(bench.on("m", weights))
            held += abs(mean - true) < half
        assert abs(held - 380) < 3.5 * math.sqrt(400 * 0.95 * 0.05)

def test_bench_the_reduction_and_the_coverage_of_its_interval():
    """Of 400 draws of 10 seeds, in which two models' reductions have a part in common,
    95% hold the true one, give or take 3.5 standard deviations of that count."""
    def runs(e2m1, ours, model="m"):
        return results({"e2m1": e2m1, "ufp4": ours}, model)

    by_a_fifth = runs([0.01, 0.03], [0.008, 0.024])
    assert of(by_a_fifth).reduction(["m"]) == pytest.approx((0.2, 0))
    assert of(runs([0.01, 0.03], [0.01, None])).reduction(["m"]) is None
    # Only seed 0 is there for both models.
    uneven = runs([0.01, 0.03], [0.008, 0.03]) + runs([0.01], [0.006], "n")
    assert of(uneven).reduction(["m", "n"]) == (pytest.approx(0.3), None)
    g, held = gen(), 0
    for _ in range(400):
        common, drawn = 0.001 * torch.randn(10, generator=g), []
        for model in ("m", "n"):
            e2m1 = 0.01 + 0.001 * torch.randn(10, generator=g)
            better = 0.8 * e2m1 + common + 0.001 * torch.randn(10, generator=g)
            drawn += runs(e2m1.tolist(), better.tolist(), model)
        part, half = of(drawn).reduction(["m", "n"])
        held += abs(part - 0.2) < half
    assert abs(held - 380) < 3.5 * math.sqrt(400 * 0.95 * 0.05)

def test_bench_plan_has_the_papers_sizes_and_refuses_what_cannot_be(capsys):
    bench.main("plan --model moe-124b --recipe ufp4-e4m3 --gpus 256 --remat".split())
    said = capsys.readouterr().out
    total, active = map(float, re.findall(r"([.\d]+)B (?:parameters|active)", said))
    assert (round(total, 1), round(active, 2)) == (123.6, 5.11)
    bench.main(["plan"])
    assert "1 GPU:" in capsys.readouterr().out
    # What train.py refuses, and what it would refuse under torchrun
    for flags, why in (("--dim 40 --data shakespeare", "in_features = 40"),
                       ("--dim x", "dim.*'x'"), ("--gpus 3", "multiple of 3")):
        with pytest.raises(SystemExit, match=f"bench.py: .*{why}"):
            bench.main(["plan", *flags.split()])

@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """out/bench, the records and the pages, in tmp_path."""
    for name, path in (("OUT", tmp_path / "bench"), ("RECORDS", tmp_path / "records")):
        monkeypatch.setattr(bench, name, path)
    shutil.copytree(HERE / "data/results", bench.RECORDS)
    shutil.copy(HERE / "README.md", tmp_path)
    pages = tmp_path / "README.md", bench.RECORDS / "README.md"
    monkeypatch.setattr(bench, "PAGES", pages)
    return tmp_path

def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

EXPERIMENT = '''
import torch, train, ufp4

class Noisy(ufp4.Quantizer):
    def __call__(self, x, rand=None):
        q = super().__call__(x, rand)
        return q + 0.04 * q.square().mean().sqrt() * torch.randn_like(q)

class NoisyFprop(ufp4.Recipe):
    def quantizer(self, operand, gemm):
        q = super().quantizer(operand, gemm)
        return Noisy(**vars(q)) if gemm == "fprop" else q

ufp4.RECIPES["noisy"] = NoisyFprop("noisy", rht=ufp4.GEMMS, sr=("dy",))
'''

def test_bench_a_study_of_ones_own_recipe_end_to_end(
        elsewhere, text, capsys, monkeypatch):
    monkeypatch.setitem(RECIPES, "noisy", None)             # to be removed again
    del RECIPES["noisy"]
    mine, before = elsewhere / "mine.py", tree(bench.RECORDS)
    mine.write_text(EXPERIMENT)
    command = ["study", "quick", "--with", str(mine), "--rows", "ufp4", "noisy",
               "--data", str(text), *("--layers 1 --dim 32 --heads 2 --hidden 32 "
               "--seq-len 32 --batch-size 2 --steps 30 --lr 0.02").split()]
    bench.main(command)
    said = capsys.readouterr().out
    folders = {path.parent.name.split("-")[1]: path.parent
               for path in bench.OUT.rglob("result.json")}
    found = {row: json.loads((path / "result.json").read_text())
             for row, path in folders.items()}
    assert set(found) == {"bf16", "ufp4", "noisy"} and tree(bench.RECORDS) == before
    assert "quick-nano.png" in said and any(bench.OUT.rglob("quick-nano.png"))
    for row in ("ufp4", "noisy"):
        error = found[row]["loss"] / found["bf16"]["loss"] - 1
        line, = (line for line in said.splitlines() if line.startswith(f"`{row}`"))
        assert line.split()[1:3] == [f"{100 * error:.2f}", "(1)"] and abs(error) > 1e-4
        first, *lines = train.read_log(folders[row] / "log.jsonl")
        assert [line["step"] for line in lines] == [30]     # of which ten are its own
        assert "ckpt-0000020" in first["settings"]["resume"]
    assert found["noisy"]["noise"] > found["ufp4"]["noise"]
    # Where the rows branch is kept, the rest is not
    assert [path.name for path in bench.OUT.rglob("ckpt-*")] == ["ckpt-0000020"]

    # The loss on the whole text once more: a branch that goes on in BF16
    val = prepare.read_tokens(prepare.prepare(str(text)).val[0]).astype(np.int64)
    count, losses = (len(val) - 1) // 32 // 4, []           # a quarter of the text
    s = train.parse_args([*command[7:], "--recipe", "bf16", "--sample", "0",
                          "--resume", str(next(bench.OUT.rglob("ckpt-*"))),
                          "--out", str(elsewhere / "again"),
                          "--eval-windows", str(count)])
    train.train(s)
    model, _ = train.build(s, RECIPES["bf16"], 256)
    train.load(train.checkpoints(elsewhere / "again")[-1],
               {"model": model.state_dict()})
    for start in np.linspace(0, len(val) - 33, count).astype(int):
        window = torch.from_numpy(val[start:start + 33])
        logits = model(window[None, :-1])[0].double()
        losses.append(F.cross_entropy(logits, window[1:]).item())
    assert np.diff(np.linspace(0, len(val) - 33, count)).min() >= 32    # no overlap
    assert found["bf16"]["loss"] == pytest.approx(np.mean(losses), abs=2e-4)

    # Nothing is left to do; a changed file is another recipe
    bench.main(command)
    assert "3 of 3 runs are there already" in capsys.readouterr().out
    mine.write_text(EXPERIMENT.replace("0.04", "0.4"))
    bench.main(command)
    assert "2 of 3 runs" in capsys.readouterr().out
    noises = [json.loads(path.read_text()).get("noise")
              for path in bench.OUT.rglob("nano-noisy-*/result.json")]
    assert len(noises) == 2 and max(noises) > 10 * min(noises)

def test_bench_a_job_that_fails_is_said_and_the_other_seeds_go_on(
        elsewhere, monkeypatch, capsys):
    def command(job, file):
        script = "import sys; sys.stderr.write('train.py: no space left'); sys.exit(1)"
        if job.seed == 1:
            script = "import sys; sys.stderr.write('loss nan'); sys.exit(3)"
            if job.row == "bf16":
                script = (f"from pathlib import Path; p = Path({str(job.branch)!r}); "
                          "p.mkdir(parents=True); (p.parent / 'log.jsonl').write_text("
                          "'{\"text\": 0}\\n{\"step\": 9, \"val_loss\": 2.5}\\n')")
        return [sys.executable, "-c", script]

    monkeypatch.setattr(bench.Job, "command", command)
    study = ["study", "quick", "--seeds", "2", "--rows", "ufp4", "--steps", "9"]
    with pytest.raises(SystemExit) as stopped:
        bench.main(study)
    # The row of seed 0 has not run, so its failure is that of its bf16 run, said once
    assert stopped.value.code.count("bf16, seed 0: no space left") == 1
    left = {path.parent.name: json.loads(path.read_text())
            for path in bench.OUT.rglob("result.json")}
    assert set(left) == {"nano-bf16-s1", "nano-ufp4-s1"}
    assert left["nano-ufp4-s1"] == {"loss": None, "error": "loss nan"}
    assert left["nano-bf16-s1"]["loss"] == 2.5

@pytest.mark.parametrize("flags,why", [
    ("loss --models nano", "study loss has no model 'nano', only dense-0.3m"),
    ("quick --rows ufp4 none-such", "unknown row 'none-such'"),
    ("quick --with none-such.py", "none-such.py"), ("quick --heads 3", "heads"),
    ("quick --record --steps 9", "--record takes no")])
def test_bench_a_study_that_cannot_be_is_refused_and_writes_nothing(
        elsewhere, flags, why):
    before = tree(elsewhere)
    with pytest.raises(SystemExit, match=f"bench.py: .*{re.escape(why)}"):
        bench.main(["study", *flags.split()])
    assert tree(elsewhere) == before

def test_bench_new_runs_join_the_records_if_their_bf16_run_is_the_same(elsewhere):
    old = bench.read("runs")
    here = {**old["machines"][0], "commit": "another"}
    run = next(r for r in old["runs"] if r["model"] == "nano" and r["row"] == "ufp4")
    new = {"models": {}, "machines": [here], "runs": [
        {**run, "row": "new", "loss": run["bf16"] * 1.5}]}
    bench.add_to_records(new)
    found = bench.read("runs")
    assert len(found["runs"]) == len(old["runs"]) + 1
    assert found["machines"] == [*old["machines"], here]
    assert bench.Results(found).errors["nano", "new"] == {run["seed"]: 0.5}
    before = tree(elsewhere)
    with pytest.raises(ValueError, match="nano, seed 0.*Nothing was recorded"):
        bench.add_to_records({**new, "runs": [{**run, "bf16": run["bf16"] + 1e-9}]})
    assert tree(elsewhere) == before

def test_bench_the_pages_and_figures_follow_from_the_records(elsewhere):
    front, evidence = bench.PAGES
    # The front page's old table has no record any more
    front.write_text(front.read_text().replace("study-front -->", "two-by-two -->"))
    for path in bench.RECORDS.glob("*.png"):
        path.unlink()
    text = evidence.read_text()
    prose = re.sub(r"(<!-- (\S+) -->\n).*?(<!-- /\2 -->)", r"\1\3", text, flags=re.S)
    evidence.write_text(prose)
    bench.main(["readme"])
    assert evidence.read_text() == text         # where this fails: bench.py readme
    tables = re.findall(r"<!-- (\S+) -->\n", text)
    assert len(tables) == len(set(tables)) > 8
    shown = set(re.findall(r"!\[.*?\]\((.*?)\)", text))
    assert shown <= {path.name for path in bench.RECORDS.glob("*.png")}
    # What the text says with an interval is in a table
    records = bench.read("runs")
    r = bench.Results(records)
    more = bench.text(r.contrast(bench.on("dense-0.3m-2", bench.GAP)), 3)
    tables = [*bench.tables_of(r, [*bench.ON_PAGES, "scratch"]).values(), [[more]]]
    cells = " ".join(sum(sum(tables, []), []))
    said = re.findall(r"[\d.]+ ± [\d.]*\d", prose.split("## Log")[0])
    assert len(said) > 12 and not [number for number in said if number not in cells]
    assert len(records["runs"]) == len({(r["model"], r["row"], r["seed"])
                                        for r in records["runs"]}) == 443
    # All rows of a model and seed are compared with the same BF16 run
    baselines = {(r["model"], r["seed"], r["bf16"]) for r in records["runs"]}
    assert len(baselines) == len({(model, seed) for model, seed, _ in baselines})
    front.write_text("<!-- gone -->\n<!-- /gone -->\n")
    with pytest.raises(SystemExit, match="no record in .* has a table gone"):
        bench.main(["readme"])

def test_bench_the_front_page_has_the_block_of_the_lesson_and_the_four_losses():
    from matplotlib.figure import Figure
    lesson = subprocess.run([sys.executable, HERE / "ufp4.py"], capture_output=True,
                            text=True).stdout
    results = bench.Results(bench.read("runs"))
    bench.draw_hero(fig := Figure(), results)
    texts = [t.get_text() for ax in fig.get_axes() for t in ax.texts]
    decibels = re.findall(r"signal over error (\S+ dB)", lesson)
    assert len(decibels) == 4 and [t for t in texts if "dB" in t] == decibels
    losses = [re.match(r"[.\d]+", t)[0] for t in texts if t[0].isdigit()][4:]
    table = bench.two_by_two_table(results, "dense-0.3m")
    assert losses == [cell.split()[0] for row in table[1:3] for cell in row[1:3]]
    # The effects once more, from means alone
    a, b, c, d = map(float, losses)
    found = [float(cell.split(" ±")[0].split(": ")[-1]) for cell in
             (table[1][3], table[2][3], *table[3][1:])]
    effects = [b - a, d - c, c - a, d - b, d - c - b + a]
    assert found == pytest.approx(effects, abs=0.021)

def test_bench_the_share_of_codes_used_and_the_noise_of_products():
    # Three magnitudes of E1M2 in equal numbers use 3 of 8 codes, one uses 1
    x = torch.tensor([[1.75, -1.0, 0.0, 1.0, -1.75, 0.0] * 8]).view(3, 16)
    assert bench.used(x, "e1m2") == pytest.approx(3 / 8, rel=1e-6)
    assert bench.used(torch.ones(4, 16), "e2m1") == pytest.approx(1 / 8)
    x, w, dy = (torch.randn(n, k, generator=gen(i)) for i, (n, k) in
                enumerate(((64, 32), (48, 32), (64, 48))))
    x[:, 3] *= 20
    found = bench.measure(x, w, dy)
    assert {what: len(of) for what, of in found.items()} == dict.fromkeys(
        ("X, fprop", "W, fprop", "Y", "dY, dgrad", "W, dgrad", "dX", "dY, wgrad",
         "X, wgrad", "dW"), 4)
    q = Quantizer(E1M2, signs=random_signs(0))
    for what, product, exact in (("Y", q(x) @ q(w).T, x @ w.T),
                                 ("dX", q(dy) @ q(w.T).T, dy @ w),
                                 ("dW", q(dy.T) @ q(x.T).T, dy.T @ x)):
        noise = ((product - exact) / exact.square().mean().sqrt()).square().mean()
        (decibels,) = found[what][3]            # E1M2 after the RHT
        assert decibels == pytest.approx(-10 * math.log10(noise), abs=1e-3)
    # An outlier in each block of X: the RHT turns the order of the grids around
    e2m1, e1m2, e2m1_rht, e1m2_rht = (db for db, _ in found["X, fprop"])
    assert e2m1 > e1m2 and e2m1_rht < e1m2_rht

def test_bench_runs_are_compared_with_the_bf16_run_of_the_same_settings(
        settings, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    bf16 = train.train(settings("--recipe", "bf16", "--out", str(out / "bf16")))
    flags = "--recipe e2m1 --rht fprop,wgrad --keep-bf16 1 --out".split()
    loss = train.train(settings(*flags, str(out / "e2m1")))
    said_by_train = capsys.readouterr().out
    header, *lines = train.read_log(out / "e2m1/log.jsonl")

    def like_e2m1(name, lines=lines, torn="", **changed):
        """The log of another run, its last line half written if torn."""
        first = {**header, "settings": header["settings"] | changed}
        (out / name).mkdir()
        (out / name / "log.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in (first, *lines)) + torn)

    like_e2m1("another-seed", seed=1)
    like_e2m1("longer", steps=99)
    like_e2m1("begun", lines=[])
    like_e2m1("stopped", torn='{"step": 7, "train_lo', lines=[
        line | {"noise": 0.004 if line["val_loss"] else None} for line in lines[:6]])
    (out / "broken").mkdir()
    (out / "broken/log.jsonl").write_text("not a log\n")

    runs = bench.find_runs(out)
    assert "broken/log.jsonl is not the log" in capsys.readouterr().out
    head, *rows = bench.runs_table(runs)
    found = {Path(row[-1]).name: dict(zip(head, row)) for row in rows}
    assert set(found) == {"bf16", "e2m1", "another-seed", "longer", "begun", "stopped"}
    assert found["bf16"]["loss error"] == "is the baseline"
    error = found["e2m1"]["loss error"]
    assert error == f"{loss / bf16 - 1:+.2%}" and f"loss error {error}" in said_by_train
    # The longer run has another label, the other seed has not
    label = "e2m1-rht.fprop+wgrad-keep_bf16.1, steps "
    assert found["e2m1"]["run"] == found["another-seed"]["run"] == f"{label}8"
    assert found["longer"]["run"] == f"{label}99"
    assert {row["data"] for row in found.values()} == {header["settings"]["data"]}
    assert found["another-seed"]["loss error"] == "no bf16 run"
    assert found["longer"]["loss error"] == "no bf16 run"
    assert found["begun"]["steps"] == "0 of 8" and found["begun"]["tokens/s"] == ""
    stopped = found["stopped"]                  # compared at its last validation
    assert stopped["steps"] == "6 of 8" and stopped["noise, %"] == "0.400 at 4"
    at_4 = [train.read_log(out / name / "log.jsonl")[4]["val_loss"]
            for name in ("e2m1", "bf16")]
    assert stopped["validation loss"] == f"{at_4[0]:.4f} at 4"
    assert stopped["loss error"] == f"{at_4[0] / at_4[1] - 1:+.2%} at 4"

    bench.main(["runs", str(out)])
    said = capsys.readouterr().out
    assert os.path.relpath(out / "runs.png") in said and (out / "runs.png").exists()
    with pytest.raises(SystemExit, match="has no run of train.py"):
        bench.main(["runs", str(tmp_path / "nowhere")])
    # The tensors of a run: four kinds of layers, six operands and three results
    monkeypatch.setattr(bench, "HERE", tmp_path)
    monkeypatch.setattr(bench, "OUT", tmp_path / "bench")
    bench.main(["sqnr", str(out / "bf16")])
    assert "dW of fc2" in capsys.readouterr().out
    found = json.loads((bench.OUT / "sqnr.json").read_text())["medians"]
    assert len(found) == 36 and (bench.OUT / "sqnr.png").exists()
    with pytest.raises(SystemExit, match="has no checkpoint"):
        bench.main(["sqnr", str(tmp_path)])
