"""Each test states one property and compares it with an oracle of its own: codes written out by
hand, exact fractions, float64, brute force."""
import contextlib
import dataclasses
import functools
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ufp4
from ufp4 import (E2M1, FORMATS, GEMMS, RECIPES, SCALES, Quantizer, Recipe, fake_quantize, hadamard,
                  noise_from, quantize, random_key, random_signs, rht)

HERE = Path(__file__).resolve().parent
INF, NAN, STEP = math.inf, math.nan, 2.0**-149          # STEP is the smallest float32
SCALE_BLOCKS = (("fp32", 16), ("e4m3", 16), ("e4m3_up", 16), ("e8m0", 32), ("e8m0_up", 32))
# The formats, written out by hand: the magnitudes by code, and the grid that is used of them.
MAGNITUDES = {"e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6], "e1m2": [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75],
              "int4": [0, 1, 2, 3, 4, 5, 6, 7]}
GRIDS = MAGNITUDES | {"e2m1-max2": [0, 0.5, 1, 1.5, 2], "e2m1-max3": [0, 0.5, 1, 1.5, 2, 3],
                      "e2m1-max4": [0, 0.5, 1, 1.5, 2, 3, 4]}
every_format = pytest.mark.parametrize("name", GRIDS)
every_scale = pytest.mark.parametrize("scale,block", SCALE_BLOCKS)
replace = dataclasses.replace


@pytest.fixture(autouse=True)
def seeded_and_eager():
    """What a test draws from torch's default generator does not depend on the tests before it.
    What takes seconds to compile runs eagerly, but in tests of torch.compile, with @compiling()."""
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        yield


compiling = functools.partial(torch.compiler.set_stance, "default")


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def same_bits(a, b):
    """Equal bit for bit, the sign of zero included; NaN equals NaN."""
    nan = a.isnan() & b.isnan()
    return a.dtype == b.dtype and bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all())


def adversarial():
    """(48, 64) float32: zeros, subnormals, extremes, one huge value among small ones, ties, -0.0."""
    g = gen(7)
    biggest = torch.full((64,), torch.finfo(torch.float32).max)
    rows = [torch.zeros(64), -torch.zeros(64), torch.full((64,), STEP), biggest, -biggest,
            *(torch.randn(64, generator=g) * size for size in (1e-40, 1e-44, 1e-30, 1e37))]
    spike = torch.randn(64, generator=g) * 1e-3
    spike[5] = 1e4
    ties = torch.arange(64) * 0.125 - 4
    return torch.stack(rows + [spike, ties] + list(torch.randn(37, 64, generator=g)))


def ordinary():
    """The rows of adversarial() whose scales, one for all of them too, are not at float32's ends."""
    return adversarial()[9:41]


def slope(q, x):
    """<Q(x), x> / <x, x> and its standard error, the rows being independent."""
    qx, xx = ((v.double() * x.double()).flatten(1).sum(1) for v in (q, x))
    alpha = qx.sum() / xx.sum()
    return alpha.item(), ((qx - alpha * xx).square().sum().sqrt() / xx.sum()).item()


def close(got, expected, length):
    """Equal up to float32's accumulation of `length` products: roundings of results' size."""
    size = expected.detach().abs().max() * length**0.5
    return torch.allclose(got.double(), expected.double(), rtol=0, atol=float(size * 2**-22))


# --------------------------------------------------------------------------------------------------
# Formats and rounding to nearest


def nibbles(codes):
    return torch.stack((codes & 15, codes >> 4), -1).flatten().tolist()     # 2i in the low bits


@pytest.mark.parametrize("name", MAGNITUDES)
def test_levels_and_all_16_codes(name):
    codes = [c for c in range(16) if not (name == "int4" and c == 8)]           # -8 is not used
    if name == "int4":
        values = [float(c - 16 if c > 7 else c) for c in codes]                 # two's complement
    else:
        values = [math.copysign(MAGNITUDES[name][c & 7], -1 if c & 8 else 1) for c in codes]
    assert list(FORMATS[name].levels) == MAGNITUDES[name]
    x = torch.tensor(values + [0.0] * (16 - len(values)))
    q = quantize(x, name)                                                       # amax is g_max ...
    assert q.scale.tolist() == [1.0]
    assert nibbles(q.codes) == codes + [0] * (16 - len(codes))
    assert same_bits(q.dequantize(), x)


@every_format
def test_a_format_uses_its_grid_and_no_code_above(name):
    codes = nibbles(quantize(torch.randn(200, 64, generator=gen()), name).codes)
    assert {abs(FORMATS[name].values[c]) for c in codes} == set(GRIDS[name])


@every_scale
@pytest.mark.parametrize("stochastic", [False, True])
def test_e1m2_and_int4_decode_alike(scale, block, stochastic):
    a, b = (quantize(ordinary(), f, scale, block, stochastic, gen(1)) for f in ("e1m2", "int4"))
    assert torch.equal(a.dequantize(), b.dequantize()) and 8 not in nibbles(b.codes)


def at_scale_one(points, name):
    """Quantize magnitudes up to g_max, with g_max itself in each block, so that its scale is 1."""
    blocks = F.pad(points, (0, -len(points) % 15)).view(-1, 15)
    top = torch.full((len(blocks), 1), float(GRIDS[name][-1]))
    return fake_quantize(torch.cat((blocks, top), 1), name)[:, :15].flatten()[:len(points)]


@every_format
def test_nearest_rounding_is_brute_force_with_ties_to_even(name):
    levels = GRIDS[name]
    ties = np.array([(a + b) / 2 for a, b in zip(levels, levels[1:])], dtype=np.float32)
    points = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9)),
                             np.linspace(0, levels[-1], 2001, dtype=np.float32)])

    def nearest(a):
        distance = [abs(Fraction(a) - Fraction(v)) for v in levels]
        best = [i for i, d in enumerate(distance) if d == min(distance)]
        return levels[best[0] if len(best) == 1 or best[0] % 2 == 0 else best[1]]

    expected = torch.tensor([float(nearest(a)) for a in points.tolist()])
    for sign in (1, -1):
        got = at_scale_one(sign * torch.from_numpy(points), name)
        assert torch.equal(got, sign * expected)


@every_format
def test_the_bias_of_each_bin_is_its_difference_of_half_widths(name):
    levels, bias = GRIDS[name], []
    for low, level, high in zip(levels, levels[1:], levels[2:]):
        left, right = (level - low) / 2, (high - level) / 2
        part = (torch.arange(10**4, dtype=torch.float64) + 0.5) / 10**4         # of the bin
        points = (level - left + (left + right) * part).float()
        bias.append((at_scale_one(points, name).double() - points).mean().item())
        assert bias[-1] == pytest.approx((left - right) / 2, abs=1e-4)          # a tie moves it by 1e-4
    expected = [0, 0, 0, -0.125, 0, -0.25] if name.startswith("e2m1") else [0] * 6
    assert bias == pytest.approx(expected[:len(bias)], abs=1e-4)


def gaussian_slope(levels):
    """E <Q(x), x> / E <x, x> for 16 standard normals: an integral over their maximum m. The other
    15 are normals cut off at m, and between the ties a and b the integral of y phi(y) is
    phi(a) - phi(b)."""
    m = torch.linspace(1e-3, 9, 9001, dtype=torch.float64)[:, None]
    inside = torch.erf(m / 2**0.5)                                              # P(|y| < m)
    v = torch.tensor(levels, dtype=torch.float64)
    edges = torch.cat((v[:1], (v[1:] + v[:-1]) / 2, v[-1:])) * m / v[-1]
    phi = torch.exp(-edges.square() / 2) / (2 * math.pi) ** 0.5
    others = 15 * (2 * v * m / v[-1] * (phi[:, :-1] - phi[:, 1:])).sum(1) / inside[:, 0]
    density = (32 * phi[:, -1] * inside[:, 0] ** 15)
    return (density * (m[:, 0] ** 2 + others)).sum().item() * 9 / 9000 / 16


@every_format
def test_the_gaussian_slope_is_the_float64_integral(name):
    x = torch.randn(150_000, 16, generator=gen())
    alpha, se = slope(fake_quantize(x, name), x)
    assert abs(alpha - gaussian_slope(GRIDS[name])) < 4 * se < 1e-3
    assert name != "e2m1" or alpha < 0.997
    assert name not in ("e1m2", "int4") or alpha > 1


# --------------------------------------------------------------------------------------------------
# Scales


@pytest.mark.parametrize("name", ["e2m1", "e1m2"])
@pytest.mark.parametrize("up", [False, True])
def test_e4m3_scales_are_in_the_table_of_e4m3_numbers(name, up):
    table = np.array([(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)])
    table = table[:127]                                                 # 127 is NaN
    assert table[-1] == 448
    amax = torch.cat((10 ** torch.linspace(-9, 0, 4000), torch.tensor(table / 448).float()))
    s, t = SCALES["e4m3_up" if up else "e4m3"](amax, GRIDS[name][-1])
    g_max = np.float32(GRIDS[name][-1])
    assert t == np.float32(1) / (448 * g_max)
    r = (amax.numpy() / g_max / np.float32(t)).astype(np.float64)
    above = np.minimum(np.searchsorted(table, r), 126)                  # the smallest that is >= r
    below = np.maximum(above - 1, 0)
    down = np.where(below % 2 == 0, r - table[below] <= table[above] - r,       # ties go to even
                    r - table[below] < table[above] - r)
    assert np.array_equal(s.double().numpy(), table[above if up else np.where(down, below, above)])


@pytest.mark.parametrize("name,top", [("e2m1", 2), ("e1m2", 0), ("int4", 2)])
def test_e8m0_scales_are_the_powers_of_two_that_frexp_gives(name, top):
    """OCP's floor(log2 amax) - top; rounded up, the smallest power that is at least amax / g_max."""
    amax = torch.rand(2000, generator=gen(3)).mul(60).sub(30).exp2()
    amax = torch.cat((amax, torch.tensor([1.75, 6, 7, 14, 1e-45, 1e-39, 3e-38, 3e38])))
    near = (torch.nextafter(amax, torch.tensor(to)) for to in (0.0, INF))
    amax, g_max = torch.cat((amax, *near)), GRIDS[name][-1]
    quotient = (amax.numpy() / np.float32(g_max)).tolist()
    lowest = 2.0**-127
    floor = [max(2.0 ** (math.frexp(a)[1] - 1 - top), lowest) if a else lowest for a in amax.tolist()]
    ceil = [max(2.0 ** (math.frexp(q)[1] - (math.frexp(q)[0] == 0.5)), lowest) if q else lowest
            for q in quotient]
    assert SCALES["e8m0"](amax, g_max)[0].tolist() == floor
    assert SCALES["e8m0_up"](amax, g_max)[0].tolist() == ceil


@every_format
def test_fp32_scales_are_amax_over_g_max_and_amax_survives(name):
    x, g_max = torch.randn(500, 4, 16, generator=gen()), GRIDS[name][-1]
    amax = x.abs().amax(-1)
    s = SCALES["fp32"](amax, g_max)[0]
    assert np.array_equal(s.numpy(), amax.numpy() / np.float32(g_max))
    y = fake_quantize(x, name)
    assert ((y.abs().amax(-1) - amax).abs() <= 2**-23 * amax).all()
    widest = max(b - a for a, b in zip(GRIDS[name], GRIDS[name][1:]))
    assert ((y - x).abs() <= s[..., None] * widest / 2 * (1 + 2**-20)).all()
    tiny = torch.arange(1, 2000) * STEP
    scales = SCALES["fp32"](tiny, g_max)[0].tolist()                    # subnormals clip nothing, too
    assert all(Fraction(s) * Fraction(g_max) >= Fraction(a) for s, a in zip(scales, tiny.tolist()))


@every_format
def test_tiles_share_a_scale_and_quantize_transposes_alike(name):
    w = torch.randn(48, 64, generator=gen())
    amax = w.view(3, 16, 4, 16).abs().amax((1, 3))
    q = quantize(w, name, two_d=True)
    expected = (amax / torch.tensor(float(GRIDS[name][-1]))).repeat_interleave(16, 0)
    assert torch.equal(q.scale, expected)
    assert torch.equal(q.dequantize(), quantize(w.T, name, two_d=True).dequantize().T)
    assert not torch.equal(fake_quantize(w, name), fake_quantize(w.T, name).T)


# --------------------------------------------------------------------------------------------------
# The quantizer


@every_scale
@every_format
def test_packing_and_transposing_keep_every_bit(name, scale, block):
    """quantize().dequantize() is fake_quantize; dim = -2 is dim = -1 of the transposed; both with
    tiles, rotation and noise."""
    x = adversarial()[:, :32].repeat(2, 2)                              # (96, 64)
    if scale.startswith("e4m3"):
        x = ordinary()                                                  # (32, 64): one scale for all
    for stochastic in (False, True):
        for tiles in (False, True):
            args = (name, scale, block, stochastic)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                packed = quantize(x.to(dtype), *args, gen(1), tiles)
                y = fake_quantize(x.to(dtype), *args, gen(1), tiles)
                assert packed.codes.shape == (len(x), 32) and packed.codes.dtype == torch.uint8
                assert packed.scale.shape == (len(x), 64 // block)
                assert y.dtype == torch.float32 and same_bits(packed.dequantize(), y)
            q = Quantizer(FORMATS[name], SCALES[scale], block, random_signs(1), stochastic, tiles)
            noise = torch.rand(x.shape, generator=gen()) if stochastic else None
            across = None if noise is None else noise.mT
            y = q(x, noise)
            assert same_bits(q(x.mT, across, -2).mT, y) and same_bits(q.pack(x, noise).dequantize(), y)
            assert same_bits(q.pack(x.mT, across, -2).dequantize().mT, y)


@every_scale
@every_format
def test_corners(name, scale, block):
    def f(x, stochastic=False):
        return fake_quantize(x, name, scale, block, stochastic, gen())
    for stochastic in (False, True):
        assert (f(torch.zeros(2, 64), stochastic) == 0).all()
        for bad in (NAN, INF, -INF):
            x = torch.ones(2, 64)
            x[0, 37] = bad
            lost = torch.zeros(2, 64, dtype=torch.bool)
            lost[0, 32:32 + block] = True                               # its block ...
            lost |= scale.startswith("e4m3")                            # ... or with two levels, all
            assert torch.equal(f(x, stochastic).isnan(), lost)
            assert torch.equal(f(x, stochastic).isfinite(), ~lost)
        assert f(torch.full((1, 64), 1e38), stochastic).isfinite().all()
        biggest = f(torch.full((1, 64), torch.finfo(torch.float32).max), stochastic)
        assert (biggest > 1e38).all()                                   # may round up, to infinity
    assert scale != "fp32" or (f(torch.full((2, 64), STEP)) == STEP).all()
    assert quantize(torch.zeros(0, 32), name, scale, block).dequantize().shape == (0, 32)
    assert fake_quantize(torch.zeros(3, 0, 32), name, scale, block).shape == (3, 0, 32)
    torch.set_flush_denormal(True)                                      # a CPU's option, for speed
    try:
        assert (f(torch.zeros(2, 64)) == 0).all()
    finally:
        torch.set_flush_denormal(False)


ufp4_with = functools.partial(replace, RECIPES["ufp4"])
zeros = torch.zeros


@pytest.mark.parametrize("message,call", [
    ("K = 40, block = 16", lambda: quantize(zeros(2, 40))),
    ("K = 40, block = 32", lambda: fake_quantize(zeros(2, 40), block=32)),
    ("K = 0", lambda: quantize(torch.tensor(1.0))),
    ("only floats .* int64", lambda: quantize(zeros(2, 32, dtype=torch.int64))),
    ("only floats .* complex64", lambda: quantize(zeros(2, 32, dtype=torch.complex64))),
    ("'fp8'.*fp32, e4m3, e4m3_up", lambda: quantize(zeros(2, 32), scale="fp8")),
    ("'e5m2'.*e2m1, e1m2, int4", lambda: quantize(zeros(2, 32), "e5m2")),
    ("even and positive, .* got 0", lambda: quantize(zeros(2, 32), block=0)),
    ("multiples of 16", lambda: quantize(zeros(8, 32), two_d=True)),
    ("'nope'.*bf16, ufp4", lambda: ufp4.get_recipe("nope")),
    ("'e5m2'.*e2m1, e1m2, int4", lambda: Recipe("mine", "e5m2")),
    ("'fp8'.*fp32, e4m3, e4m3_up", lambda: Recipe("mine", "int4", "fp8")),
    ("some of fprop, dgrad, wgrad", lambda: ufp4_with(rht=("forward",))),
    ("rht takes a tuple .* got 'wgrad'", lambda: ufp4_with(rht="wgrad")),
    ("some of x, w, dy", lambda: ufp4_with(sr=("grad",))),
    ("rht_block must be a power of two", lambda: ufp4_with(rht_block=12)),
    ("divide the other", lambda: ufp4_with(block=24)),
    ("even and positive, got 15", lambda: ufp4_with(block=15)),
    ("have no effect", lambda: ufp4_with(fmt=None)),
    ("16 signs, dimension 24", lambda: rht(zeros(2, 24), random_signs(0))),
    ("power of two of rows, not 12", lambda: hadamard(12)),
    ("got .*4, 32.*16, 48", lambda: ufp4.linear(zeros(4, 32), zeros(16, 48), "ufp4")),
    ("no ends", lambda: ufp4.linear(zeros(4, 32), zeros(2, 16, 32), "ufp4")),
    ("ends .*2,", lambda: ufp4.linear(zeros(4, 32), zeros(3, 16, 32), "ufp4", torch.tensor([2, 4]))),
    ("floats .* int64", lambda: ufp4.linear(zeros(4, 32).long(), zeros(16, 32), "ufp4")),
    ("floats .* int8", lambda: ufp4.linear(zeros(4, 32), zeros(16, 32, dtype=torch.int8), "ufp4")),
    ("in_features = 20, out_features = 16", lambda: ufp4.Linear(20, 16)),
])
def test_bad_arguments_are_named(message, call):
    with pytest.raises(ValueError, match=message):
        call()


# --------------------------------------------------------------------------------------------------
# Stochastic rounding, by its law


@every_format
def test_stochastic_rounding_takes_a_neighbour_and_averages_out(name):
    x = torch.randn(16, 64, generator=gen())
    s = quantize(x, name).scale.repeat_interleave(16, -1)
    t, grid = (x / s).abs(), torch.tensor(GRIDS[name]).float()
    below = grid[(torch.searchsorted(grid, t, right=True) - 1).clamp(max=len(grid) - 1)]
    above = grid[torch.searchsorted(grid, t).clamp(max=len(grid) - 1)]
    draws = fake_quantize(x.expand(1024, 16, 64), name, stochastic=True, generator=gen(1))
    q = (draws / s).abs()
    assert (torch.isclose(q, below, atol=1e-5) | torch.isclose(q, above, atol=1e-5)).all()
    errors = {n: (draws.view(-1, n, 16, 64).double().mean(1) - x).square().mean().sqrt().item()
              for n in (1, 16, 256)}
    for n in (16, 256):
        assert errors[n] / errors[1] == pytest.approx(n**-0.5, rel=0.05)


@every_scale
@pytest.mark.parametrize("name", MAGNITUDES)
def test_the_stochastic_slope_is_one_unless_the_scale_clips(name, scale, block):
    x = torch.randn(32768, 64, generator=gen())
    q = Quantizer(FORMATS[name], SCALES[scale], block, stochastic=True)
    for y in q(x), q(x.mT.contiguous(), dim=-2).mT:
        alpha, se = slope(y, x)
        assert se < 4e-4 and (alpha < 0.998 if scale in ("e4m3", "e8m0") else abs(alpha - 1) < 4 * se)


@every_format
def test_over_all_noise_the_mean_is_the_number(name):
    """Of each of the 65536 values of the noise once, to a rounding to 2^-16 of the step."""
    noise = torch.arange(65536) * 2.0**-16
    grid = torch.tensor(GRIDS[name]).double()
    a = torch.cat((torch.linspace(0, GRIDS[name][-1], 100), grid.float()))[:, None]
    mean = ufp4.round_to_grid(a, FORMATS[name], noise).double().mean(1, keepdim=True)
    step = grid.diff()[torch.searchsorted(grid, a.double(), right=True).clamp(1, len(grid) - 1) - 1]
    assert ((mean - a).abs() <= step * 2.0**-17).all() and torch.equal(mean[100:].float(), a[100:])


def test_noise_is_a_hash_of_place_and_key():
    """Wellons' lowbias32 with a second integer in the middle, in Python's whole numbers."""
    key, noise = random_key("cpu", gen())[0], None
    for rows, length in (1, 4), (3, 10), (4096, 64):
        noise = noise_from(key, (rows, length))
        assert same_bits(noise_from(key, (length, rows), -2), noise.mT)
        for row in {0, rows // 2, rows - 1}:
            for i in range(0, length, 2):
                h = (row * length // 2 + i // 2 ^ key[0].item()) % 2**32
                h = ((h ^ h >> 16) * 0x7FEB352D + key[1].item()) % 2**32
                h = (h ^ h >> 15) * 0x846CA68B % 2**32
                h ^= h >> 16
                assert (noise[row, i:i + 2] * 2**16).tolist() == [h % 2**16, h >> 16]
    assert same_bits(noise_from(key, (64, 64, 64)), noise.view(64, 64, 64))


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_uniform_and_uncorrelated(seed):
    """Mean, variance and a chi-square of all its 2^16 values, and correlations of neighbours, of
    orientations, steps and seeds: within 4 standard errors of independent uniform numbers."""
    g = gen(seed)
    (key, other), (later, _), (foreign, _) = random_key("cpu", g), random_key("cpu", g), \
        random_key("cpu", gen(seed + 100))
    noise = noise_from(key, (1024, 1024)).double()
    n, u = noise.numel(), noise - (0.5 - 2.0**-17)
    assert abs(u.mean()) < 4 * (1 / 12 / n) ** 0.5
    assert abs(u.square().mean() - 1 / 12) < 4 * ((1 / 80 - 1 / 144) / n) ** 0.5
    counts = torch.bincount((noise * 2**16).long().flatten(), minlength=2**16)
    chi_square = (counts - 16).square().sum() / 16
    assert abs(chi_square - 65535) < 4 * (2 * 65535) ** 0.5
    pairs = [(u, noise_from(k, noise.shape) - 0.5) for k in (other, later, foreign)]
    pairs += [(u[:, lag:], u[:, :-lag]) for lag in (1, 2, 3, 16)]
    pairs += [(u[lag:], u[:-lag]) for lag in (1, 2, 16)] + [(u, noise_from(other, noise.shape, -2) - 0.5)]
    for a, b in pairs:
        assert abs((a * b).mean()) * 12 * a.numel() ** 0.5 < 4


@pytest.mark.parametrize("bit", [0, 7, 15, 16, 24, 30])
def test_each_bit_of_the_key_reaches_half_of_the_noise(bit):
    for key in (random_key("cpu", gen(bit)), ):
        for which in (0, 1):
            flipped = key[0].clone()
            flipped[which] ^= 1 << bit
            a, b = ((noise_from(k, (256, 64)) * 2**16).int() for k in (key[0], flipped))
            flips = sum(((a ^ b) >> i & 1).float().mean() for i in range(16)) / 16
            assert 0.4 < flips < 0.6


def test_randomness_comes_from_the_generator_alone():
    x = torch.randn(32, 64, generator=gen())
    before = torch.get_rng_state()
    a, b, c = (fake_quantize(x, stochastic=True, generator=gen(seed)) for seed in (3, 3, 4))
    quantize(x)
    assert torch.equal(a, b) and not torch.equal(a, c) and torch.equal(before, torch.get_rng_state())
    torch.manual_seed(3)
    assert torch.equal(a, fake_quantize(x, stochastic=True))            # None: the default one


# --------------------------------------------------------------------------------------------------
# The random Hadamard transform


@pytest.mark.parametrize("n", [1, 2, 16, 128])
def test_rht_multiplies_by_signs_and_an_orthonormal_matrix(n):
    h, signs = hadamard(n).double(), random_signs(11, n)
    assert torch.allclose(h @ h.T, torch.eye(n).double(), atol=1e-6, rtol=0)
    assert torch.equal(h, h.T) and (n == 1 or h[1, 1] < 0 < h[0, 0])
    x, w = torch.randn(6, 2 * n, generator=gen()), torch.randn(5, 2 * n, generator=gen(1))
    expected = (x.double().view(6, 2, n) * torch.tensor(signs).double()) @ h
    assert torch.allclose(rht(x, signs).double(), expected.view(6, -1), atol=2e-6, rtol=0)
    assert close(rht(x, signs).double() @ rht(w, signs).double().T, x.double() @ w.double().T, 2 * n)
    for dim in -2, 0:
        assert same_bits(rht(x.T.contiguous(), signs, dim), rht(x, signs).T.contiguous())


def test_signs_are_a_function_of_the_seed():
    assert random_signs(0) == random_signs(0) and set(random_signs(3, 256)) == {1.0, -1.0}
    assert abs(sum(random_signs(3, 4096))) < 4 * 64
    assert all(set(column) == {1.0, -1.0} for column in zip(*map(random_signs, range(32))))


# --------------------------------------------------------------------------------------------------
# The three GEMMs


def oracle(x, w, dy, recipe, key):
    """Y, dX, dW in float64 for x (M, K), w (N, K), dy (M, N): each operand rotated and quantized
    with the blocks along its rows."""
    def q(t, operand, gemm, noise=None):
        t = rht(t, random_signs(recipe.sign_seed, recipe.rht_block)) if gemm in recipe.rht else t
        tiles = recipe.tiles and operand == "w"
        quantizer = Quantizer(recipe.fmt, recipe.scale, recipe.block, None, noise is not None, tiles)
        return quantizer(t.contiguous(), noise).double()
    m = len(x)
    x, dy = (F.pad(t, (0, 0, 0, -m % recipe.unit)) for t in (x, dy))
    along, across = noise_from(key[0], dy.shape), noise_from(key[1], dy.T.shape)
    y = q(x, "x", "fprop") @ q(w, "w", "fprop").T
    dx = q(dy, "dy", "dgrad", along) @ q(w.T, "w", "dgrad").T
    return y[:m], dx[:m], q(dy.T, "dy", "wgrad", across) @ q(x.T, "x", "wgrad").T


QUANTIZED = [name for name, r in RECIPES.items() if r.fmt and type(r) is Recipe]


@pytest.mark.parametrize("name", QUANTIZED)
def test_autograd_function_is_the_three_quantized_gemms(name, monkeypatch):
    recipe, keys = replace(RECIPES[name], sign_seed=3), [random_key("cpu", gen(5))]
    monkeypatch.setattr(ufp4, "random_key", lambda device: keys.pop())      # once, for dY
    x = torch.randn(3, 25, 64, generator=gen(), requires_grad=True)         # not whole blocks
    dy = torch.randn(3, 25, 96, generator=gen(1)) * 1e-3
    layer = ufp4.Linear(64, 96, recipe=recipe)
    y = layer(x)
    y.backward(dy)
    x_, dy_, w = x.detach().flatten(0, 1), dy.flatten(0, 1), layer.weight.detach()
    ey, edx, edw = oracle(x_, w, dy_, recipe, random_key("cpu", gen(5)))
    assert y.shape == (3, 25, 96) and close((y - layer.bias).flatten(0, 1), ey, 64)
    assert close(x.grad.flatten(0, 1), edx, 96) and close(layer.weight.grad, edw, 75)
    assert close(layer.bias.grad, dy_.double().sum(0), 75)


@dataclasses.dataclass(frozen=True)
class E2M1Somewhere(Recipe):
    """An experiment: what has this name, a GEMM or an operand, is in E2M1."""
    where: str = ""

    def quantizer(self, operand, gemm):
        q = super().quantizer(operand, gemm)
        return replace(q, fmt=E2M1) if self.where in (operand, gemm) else q


@pytest.mark.parametrize("fields,changed", [
    ({"rht": ("fprop",)}, "y"), ({"rht": ("dgrad",)}, "x"), ({"rht": ("wgrad",)}, "w"),
    ({"sr": ("dy",)}, "xw"), ({"sr": ("x",)}, "yw"), ({"sr": ("w",)}, "yx"), ({"tiles": True}, "yx"),
    ({"fmt": "e2m1"}, "yxw"), ({"scale": "e8m0"}, "yxw"), ({"block": 32}, "yxw"), ({"fmt": "int4"}, ""),
    ({"where": "dgrad"}, "x"), ({"where": "x"}, "yw"), ({"where": "w"}, "yx"), ({"where": "dy"}, "xw")])
def test_each_field_of_a_recipe_reaches_its_gemm_and_no_other(fields, changed):
    def results(**fields):
        x = torch.randn(64, 64, generator=gen(), requires_grad=True)
        w = torch.randn(32, 64, generator=gen(1), requires_grad=True)
        y = ufp4.linear(x, w, E2M1Somewhere("mine", **fields))
        y.backward(torch.randn(64, 32, generator=gen(2)))
        return y.detach(), x.grad, w.grad
    pairs = zip("yxw", results(), results(**fields))
    assert "".join(n for n, a, b in pairs if not torch.equal(a, b)) == changed


class Steps(Quantizer):
    def __call__(self, x, noise=None, dim=-1):
        return torch.round(x.float() * 64) / 64


class FixedPoint(Recipe):
    """An experiment that no format describes: multiples of 1/64, without any scale."""
    def quantizer(self, operand, gemm):
        return Steps()


def test_an_experiment_of_ten_lines_reaches_all_three_gemms_and_trains():
    x = torch.randn(20, 32, generator=gen(), requires_grad=True)
    layer, dy = ufp4.Linear(32, 16, bias=False, recipe=FixedPoint("mine")), torch.randn(20, 16)
    layer(x).backward(dy)
    a, b, c = (torch.round(t.detach().double() * 64) / 64 for t in (x, layer.weight, dy))
    assert close(layer(x), a @ b.T, 32) and close(x.grad, c @ b, 16)
    assert close(layer.weight.grad, c.T @ a, 20)
    optimizer, losses = torch.optim.SGD(layer.parameters(), 0.5), []
    for _ in range(30):
        losses.append(F.mse_loss(layer(x), x[:, :16] * 0.5))
        optimizer.zero_grad()
        (losses[-1] * 100).backward()                                   # above a step of 1/64
        layer.weight.grad /= 100
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]


def test_the_recipes_are_the_papers():
    """Table 1, and the neighbours."""
    rows = {"ufp4": ("e1m2", "fp32", 16, GEMMS), "ufp4-int4": ("int4", "fp32", 16, GEMMS),
            "ufp4-e4m3": ("e1m2", "e4m3_up", 16, GEMMS), "ufp4-mx": ("e1m2", "e8m0_up", 32, GEMMS),
            "e2m1": ("e2m1", "fp32", 16, ("wgrad",)), "e2m1-full-rht": ("e2m1", "fp32", 16, GEMMS),
            "nvfp4": ("e2m1", "e4m3", 16, ("wgrad",)), "mxfp4": ("e2m1", "e8m0", 32, ("wgrad",)),
            **{f"e2m1-max{n}": (f"e2m1-max{n}", "fp32", 16, GEMMS) for n in (2, 3, 4)}}
    for name, (fmt, scale, block, gemms) in rows.items():
        assert RECIPES[name] == Recipe(name, fmt, scale, block, gemms, ("dy",), name == "nvfp4")


def test_gradients_are_unbiased_under_stochastic_rounding():
    """Over draws of dY's noise, dX and dW tend to the products with dY unquantized."""
    x = torch.randn(32, 64, generator=gen(), requires_grad=True)
    w = torch.randn(48, 64, generator=gen(1), requires_grad=True)
    dy, signs, q = torch.randn(32, 48, generator=gen(2)), random_signs(0), Quantizer()
    y = ufp4.linear(x, w, "ufp4")
    draws = [torch.autograd.grad(y, (x, w), dy, retain_graph=True) for _ in range(400)]
    dx = rht(dy, signs) @ q(rht(w.detach().T, signs)).T
    dw = rht(dy.T, signs) @ q(rht(x.detach().T, signs)).T
    for expected, got in zip((dx, dw), zip(*draws)):
        got = torch.stack(got).double()
        z = (got.mean(0) - expected) / (got.std(0) / 20)
        assert abs(z.mean()) < 0.15 and 0.9 < z.std() < 1.1             # rows of dX share their noise


@pytest.mark.parametrize("name", ["bf16", *QUANTIZED])
def test_grouped_is_a_loop_over_experts(name, monkeypatch):
    monkeypatch.setattr(ufp4, "noise_from", lambda key, shape, dim: torch.full(shape, 0.3))
    recipe, sizes = RECIPES[name], [5, 0, 32, 17, 0, 1]                 # some without any token
    ends = torch.tensor(sizes).cumsum(0)
    x, w = torch.randn(55, 64, generator=gen()), torch.randn(6, 32, 64, generator=gen(1))
    dy = torch.randn(55, 32, generator=gen(2))
    if recipe.scale in (ufp4.e4m3, ufp4.e4m3_up):       # all experts share a scale: give them one amax
        recipe = replace(recipe, rht=())
        x[ends - 1, 0] = dy[ends - 1, 0] = w[:, 0, 0] = 9.0
    x.requires_grad_(), w.requires_grad_()
    y = ufp4.linear(x, w, recipe, ends)
    parts = torch.cat([ufp4.linear(xe, we, recipe) for xe, we in zip(x.split(sizes), w)])
    (dx, dw), (edx, edw) = (torch.autograd.grad(v, (x, w), dy) for v in (y, parts))
    assert close(y, parts, 64) and close(dx, edx, 32) and close(dw, edw, 32)
    assert (dw[[1, 4]] == 0).all() and torch.equal(ufp4.linear(x, w, recipe, ends.int()), y)


@pytest.mark.parametrize("sizes", [[1] * 5, [16] * 3, [5, 0, 32, 17, 0, 1], [0, 0], [17, 1, 1, 1]])
def test_experts_tokens_move_to_whole_blocks(sizes):
    ends = torch.tensor(sizes).cumsum(0)
    x = torch.randn(sum(sizes), 3, generator=gen())
    spread, new_ends, rows = ufp4.spread_groups(x, ends, 16)
    blocks = [F.pad(part, (0, 0, 0, -len(part) % 16)) for part in x.split(sizes)]
    assert new_ends.tolist() == np.cumsum([len(b) for b in blocks]).tolist()
    assert len(spread) % 16 == 0 < len(spread) and torch.equal(spread[rows], x)
    assert torch.equal(spread[:new_ends[-1]], torch.cat(blocks)) and not spread[new_ends[-1]:].any()


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_autocast(dtype, autocast):
    if autocast and dtype == torch.float64:
        pytest.skip("nothing is autocast to float64")
    layer = ufp4.Linear(64, 48, bias=False, dtype=None if autocast else dtype)
    x = torch.randn(20, 64, generator=gen(), dtype=layer.weight.dtype, requires_grad=True)
    with torch.autocast("cpu", dtype) if autocast else contextlib.nullcontext():
        y = layer(x)
    assert y.dtype == dtype
    a, b = (fake_quantize(rht(v.detach(), layer.recipe.signs)).to(dtype).double()
            for v in (x.to(dtype), layer.weight))
    roundoff = torch.finfo(dtype).eps / 2 * (a @ b.T).abs()
    assert ((y - a @ b.T).abs() <= roundoff + max(2**-18 * (a.abs() @ b.abs().T), roundoff)).all()
    y.double().sum().backward()
    assert x.grad.dtype == x.dtype and layer.weight.grad.dtype == layer.weight.dtype


def test_only_what_a_gradient_needs_is_quantized(monkeypatch):
    calls, plain = [], ufp4.operands
    def spy(x, rows=None, cols=None, keep=False):
        calls.append((rows is not None) + 2 * (cols is not None))
        return plain(x, rows, cols, keep)
    monkeypatch.setattr(ufp4, "operands", spy)
    for need_x, need_w, expected in ((0, 0, [1, 1]), (1, 0, [1, 1, 1, 2]), (0, 1, [3, 1, 2]),
                                     (1, 1, [3, 1, 3, 2])):             # x, w; dy, w; 1 rows, 2 columns
        x = torch.randn(16, 32, requires_grad=bool(need_x))
        w = torch.randn(16, 32, requires_grad=bool(need_w))
        calls.clear()
        y = ufp4.linear(x, w, "ufp4")
        if need_x or need_w:
            y.sum().backward()
        assert calls == expected and (x.grad is None, w.grad is None) == (not need_x, not need_w)
    with torch.no_grad():
        calls.clear()
        ufp4.linear(x, w, "ufp4")
    assert calls == [1, 1]


@pytest.mark.parametrize("name,scale_bytes", [("ufp4", 4), ("ufp4-e4m3", 1), ("ufp4-mx", 1)])
def test_what_is_kept_between_the_passes_has_4_bits(name, scale_bytes):
    kept, w = [], torch.randn(48, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ufp4.linear(torch.randn(96, 64), w, name)
    size = sum(t.nbytes for t in kept if t.data_ptr() != w.data_ptr())
    assert size == 96 * 64 // 2 + 96 * 64 // RECIPES[name].block * scale_bytes + 4
    y.sum().backward()


def test_recomputation_replays_the_noise():
    recipe = ufp4_with(sr=("x", "w", "dy"))
    x, w = torch.randn(32, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    def gradients(run):
        torch.manual_seed(1)
        return torch.autograd.grad(run(x, w, recipe).square().sum(), (x, w))
    plain = gradients(ufp4.linear)
    again = gradients(functools.partial(checkpoint, ufp4.linear, use_reentrant=False))
    assert all(map(torch.equal, plain, again))


def test_bf16_recipe_is_nn_linear():
    plain, layer = nn.Linear(24, 40), ufp4.Linear(24, 40, recipe="bf16")        # of any size
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(5, 7, 24, generator=gen())
    for each in plain, layer:
        each(x).square().sum().backward()
    assert torch.equal(plain(x), layer(x)) and torch.equal(plain.weight.grad, layer.weight.grad)


def test_stand_ins_without_data_no_tokens_and_a_second_derivative():
    meta = torch.empty(64, 256, device="meta")
    assert ufp4.Linear(256, 256, device="meta")(meta).shape == (64, 256)
    with torch._subclasses.FakeTensorMode():
        assert ufp4.Linear(256, 256)(torch.empty(64, 256)).shape == (64, 256)
    assert ufp4.Linear(16, 32)(torch.zeros(0, 16)).shape == (0, 32)
    x = torch.randn(16, 16, requires_grad=True)
    loss = ufp4.Linear(16, 16)(x).square().sum() + x.square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# --------------------------------------------------------------------------------------------------
# torch.compile


def quantizer(name, scale, block=16, **how):
    return Quantizer(FORMATS[name], SCALES[scale], block, **how)


@compiling()
@pytest.mark.parametrize("keep,rows,cols", [
    (True, quantizer("e2m1", "e8m0", 32, stochastic=True),
     quantizer("e1m2", "fp32", signs=random_signs(1, 4), stochastic=True)),
    (False, quantizer("e2m1", "e4m3", tiles=True), quantizer("int4", "e4m3_up"))])
def test_compiled_is_eager_bit_for_bit(keep, rows, cols):
    if not ufp4.can_compile.__wrapped__("cpu"):
        pytest.skip("no C++ compiler here")
    x = torch.randn(256, 192, generator=gen()) * 10 ** torch.randn(256, 1, generator=gen(1))
    x[3, 40], x[50, 60] = (NAN, INF) if keep else (0.0, -0.0)
    x[64:96] *= 1e-40
    key = random_key("cpu", gen())
    (a, b), (c, d) = (f(x, rows, cols, keep, key)
                      for f in (ufp4.quantize_both, ufp4.fused(ufp4.quantize_both)))
    assert same_bits(a, c)
    if keep:
        assert b.codes.numel() >= 2**14                                 # fewer are not compiled
        b, d = b.dequantize(), ufp4.fused(ufp4.Quantized.dequantize)(d)
    assert same_bits(b, d)


@compiling()
def test_a_layer_compiles_without_graph_breaks_and_for_any_number_of_tokens():
    layer = ufp4.Linear(64, 48, recipe=RECIPES["e2m1"] and ufp4_with(rht=("wgrad",), rht_block=2))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (20, 25):
        x = torch.randn(tokens, 64, generator=gen(), requires_grad=True)
        grads = []
        for f in (layer, compiled):
            torch.manual_seed(1)
            grads.append(torch.autograd.grad(f(x).square().sum(), (x, layer.weight)))
        assert all(close(a, b, 64) for a, b in zip(*grads))


def python(code, **env):
    return subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True,
                          env={**os.environ, **env})


def test_import_is_light():
    modules = set(python("import ufp4, sys; print(*sys.modules)").stdout.split())
    heavy = {"triton", "matplotlib", "torch._dynamo", "torch._inductor"}
    assert "ufp4" in modules and not heavy & modules


def test_without_a_compiler_it_says_so_once_and_gives_the_same_bits(tmp_path):
    code = """if True:
        import torch, ufp4
        x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        for name in ("e2m1", "ufp4"):
            print(ufp4.linear(x, x, name).double().sum().item())"""
    done = python(code, CXX="no-such-compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    x = torch.randn(256, 256, generator=gen())
    assert done.returncode == 0 and done.stderr.count("install a C++ compiler") == 1
    expected = [ufp4.linear(x, x, name).double().sum().item() for name in ("e2m1", "ufp4")]
    assert [float(line) for line in done.stdout.split()] == expected


# --------------------------------------------------------------------------------------------------
# convert


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.again = self.inner[0]                                      # one module in two places
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embed.weight


def test_convert_keeps_everything_but_the_arithmetic():
    m, x = Tied(), torch.randn(4, 16, generator=gen())
    before = {k: (v.data_ptr(), v.dtype) for k, v in m.state_dict().items()}
    assert ufp4.convert(m, "e2m1") is m
    assert {k: (v.data_ptr(), v.dtype) for k, v in m.state_dict().items()} == before
    assert all(type(x) is ufp4.Linear and x.recipe == RECIPES["e2m1"] for x in (m.a, m.b, m.again))
    assert m.again is m.inner[0] and type(m.lm_head) is nn.Linear
    assert torch.equal(m.a(x), ufp4.linear(x, m.a.weight, "e2m1") + m.a.bias)
    ufp4.convert(m, "ufp4", skip=("inner", "lm_head"))                  # again, to another recipe
    assert m.a.recipe.name == "ufp4" and m.inner[0].recipe.name == "e2m1" and "=ufp4" in repr(m)
    for skip in (ufp4.SKIP, (), None):                                  # one layer, no lm_head
        assert type(ufp4.convert(nn.Linear(16, 16), skip=skip)) is ufp4.Linear
    m.lm_head = m.a = nn.Linear(16, 32)                                 # a tie is skipped by either name
    assert type(ufp4.convert(m).a) is nn.Linear


@pytest.mark.parametrize("message,how", [
    ("'fp4'.*ufp4", {"recipe": "fp4"}), ("'head'.*a, b, inner.0", {"skip": ("head",)}),
    ("nothing to convert", {"skip": ("a", "b", "inner", "lm_head")}),
    ("'a'.*in_features = 16", {"recipe": "ufp4-mx"}), ("'again' has had its forward", {"skip": "inner"})])
def test_convert_refuses_before_changing_anything(message, how):
    m = Tied()
    if "forward" in message:
        m.again = nn.Linear(16, 16)
        m.again.forward = lambda x: x
    with pytest.raises(ValueError, match=message):
        ufp4.convert(m, **how)
    assert type(m.a) is type(m.b) is nn.Linear


def test_convert_warns_of_the_fast_path_around_its_layers():
    with pytest.warns(UserWarning, match="set_fastpath_enabled"):
        ufp4.convert(nn.TransformerEncoderLayer(32, 2, 64).eval())
