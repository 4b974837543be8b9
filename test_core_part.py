"""Each test states one property and compares it with an oracle of its own: codes written out by
hand, exact fractions, float64, brute force."""
import functools
import itertools
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ufp4
from ufp4 import (E2M1, FORMATS, RECIPES, SCALES, Quantizer, Recipe, fake_quantize, hadamard,
                  noise_from, quantize, random_key, random_signs, rht)

HERE = Path(__file__).resolve().parent
INF, NAN = math.inf, math.nan
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max
SCALE_BLOCKS = (("fp32", 16), ("e4m3", 16), ("e4m3_up", 16), ("e8m0", 32), ("e8m0_up", 32))
# The formats, written out by hand: magnitudes by code, and the grids that are used
MAGNITUDES = {"e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6], "int4": [0, 1, 2, 3, 4, 5, 6, 7],
              "e1m2": [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]}
GRIDS = MAGNITUDES | {f"e2m1-max{m}": [v for v in MAGNITUDES["e2m1"] if v <= m] for m in (2, 3, 4)}
QUANTIZED = [name for name, r in RECIPES.items() if r.fmt and type(r) is Recipe]
every_format = pytest.mark.parametrize("name", GRIDS)
every_scale = pytest.mark.parametrize("scale,block", SCALE_BLOCKS)


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
    """(48, 64) float32: ties, -0.0, a huge value; the first 9 rows have float32's extremes."""
    g = gen(7)
    rows = [torch.randn(64, generator=g) * size for size in (1e-40, 1e-44, 1e-30, 1e37)]
    rows += [torch.full((64,), v) for v in (0.0, -0.0, SMALLEST, LARGEST, -LARGEST)]
    spike = torch.randn(64, generator=g) * 1e-3
    spike[5] = 1e4
    return torch.stack(rows + [spike, torch.arange(64) / 8 - 4, *torch.randn(37, 64, generator=g)])


def slope(q, x):
    """<Q(x), x> / <x, x>, and its standard error if the rows are independent."""
    qx, xx = ((v.double() * x.double()).flatten(1).sum(1) for v in (q, x))
    alpha = qx.sum() / xx.sum()
    return alpha.item(), ((qx - alpha * xx).square().sum().sqrt() / xx.sum()).item()


def close(got, expected, length):
    """Equal up to roundings, to float32, of a sum of `length` products."""
    size = expected.detach().abs().max() * length**0.5
    return torch.allclose(got.double(), expected.double(), rtol=0, atol=float(size * 2**-22))


# --------------------------------------------------------------------------------------------------
# Formats, rounding to nearest, scales


@pytest.mark.parametrize("name", MAGNITUDES)
def test_levels_and_all_16_codes(name):
    codes = [c for c in range(16) if not (name == "int4" and c == 8)]           # no -8
    if name == "int4":
        values = [float(c - 16 if c > 7 else c) for c in codes]
    else:
        values = [math.copysign(MAGNITUDES[name][c & 7], -1 if c & 8 else 1) for c in codes]
    assert list(FORMATS[name].levels) == MAGNITUDES[name]
    codes, x = (codes + [0])[:16], torch.tensor((values + [0.0])[:16])
    q = quantize(x, name)                                   # amax is g_max, so the scale is 1
    assert q.scale.tolist() == [1.0] and same_bits(q.dequantize(), x)
    assert q.codes.tolist() == [low + 16 * high for low, high in zip(codes[::2], codes[1::2])]


def at_scale_one(points, name):
    """Quantize magnitudes up to g_max, with g_max itself in each block, so that its scale is 1."""
    blocks = F.pad(points, (0, -len(points) % 15)).view(-1, 15)
    top = torch.full((len(blocks), 1), float(GRIDS[name][-1]))
    return fake_quantize(torch.cat((blocks, top), 1), name)[:, :15].flatten()[:len(points)]


@every_format
def test_nearest_rounding_is_brute_force_with_ties_to_even(name):
    levels = [Fraction(v) for v in GRIDS[name]]
    ties = np.array([(a + b) / 2 for a, b in zip(levels, levels[1:])], dtype=np.float32)
    points = np.concatenate([ties, *(np.nextafter(ties, np.float32(v)) for v in (0, 9)),
                             np.linspace(0, GRIDS[name][-1], 2001, dtype=np.float32)])
    nearest = [min(range(len(levels)), key=lambda i: (abs(Fraction(a) - levels[i]), i % 2))
               for a in points.tolist()]
    expected, points = torch.tensor(GRIDS[name]).float()[nearest], torch.from_numpy(points)
    assert torch.equal(at_scale_one(points, name), expected)
    assert torch.equal(at_scale_one(-points, name), -expected)


@every_format
def test_the_bias_of_a_bin_is_its_difference_of_half_widths(name):
    lopsided = {2: -0.125, 4: -0.25} if name.startswith("e2m1") else {}
    for low, level, high in zip(GRIDS[name], GRIDS[name][1:], GRIDS[name][2:]):
        left, right = (level - low) / 2, (high - level) / 2
        points = level - left + (left + right) * (torch.arange(10**4) + 0.5) / 10**4
        bias = (at_scale_one(points, name).double() - points).mean().item()
        assert bias == pytest.approx((left - right) / 2, abs=1e-4)
        assert (left - right) / 2 == lopsided.get(level, 0)


def gaussian_slope(levels):
    """E <Q(x), x> / E <x, x> of 16 standard normals, an integral over their maximum m. The other 15
    are cut off at m; between two ties a and b the integral of y phi(y) is phi(a) - phi(b)."""
    m = torch.linspace(1e-3, 9, 9001).double()[:, None]
    v = torch.tensor(levels).double() * m / levels[-1]
    ties = torch.cat((v[:, :1], (v[:, 1:] + v[:, :-1]) / 2, m), 1)
    phi, inside = torch.exp(-ties.square() / 2) / (2 * math.pi) ** 0.5, torch.erf(m / 2**0.5)
    others = 15 * (2 * v * (phi[:, :-1] - phi[:, 1:])).sum(1, keepdim=True) / inside
    density = 16 * 2 * phi[:, -1:] * inside**15
    return torch.trapezoid(density * (m**2 + others), m, dim=0).item() / 16


@every_format
def test_the_gaussian_slope_is_the_float64_integral(name):
    x = torch.randn(150_000, 16, generator=gen())
    alpha, se = slope(fake_quantize(x, name), x)
    assert abs(alpha - gaussian_slope(GRIDS[name])) < 4 * se < 1e-3
    assert name != "e2m1" or alpha < 0.997
    assert name not in ("e1m2", "int4") or alpha > 1


@pytest.mark.parametrize("name", ["e2m1", "e1m2"])
@pytest.mark.parametrize("scale", ["e4m3", "e4m3_up"])
def test_e4m3_scales_are_in_the_table_of_e4m3_numbers(name, scale):
    table = np.array([(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7)
                      for e in range(16) for m in range(8)][:127])      # the 128th is NaN
    assert table[-1] == 448
    amax = torch.cat((10 ** torch.linspace(-9, 0, 3000), torch.from_numpy(table / 448).float()))
    s, t = SCALES[scale](amax, GRIDS[name][-1])
    g_max = np.float32(GRIDS[name][-1])
    assert t == np.float32(1) / (448 * g_max)
    r = (amax.numpy() / g_max / t.numpy()).astype(np.float64)
    above = np.searchsorted(table, r).clip(1, 126)                      # the smallest that is >= r
    up, down = table[above] - r, r - table[above - 1]
    nearest = np.where((down < up) | (down == up) & (above % 2 == 1), above - 1, above)
    above[r == 0] = 0
    assert np.array_equal(s.double().numpy(), table[above if scale == "e4m3_up" else nearest])


@pytest.mark.parametrize("name,top", [("e2m1", 2), ("e1m2", 0), ("int4", 2)])
def test_e8m0_scales_are_the_powers_of_two_that_frexp_gives(name, top):
    amax = torch.rand(2000, generator=gen()).mul(60).sub(30).exp2()
    amax = torch.cat((amax, torch.tensor([1.75, 6, 7, 14, 1e-45, 1e-39, 3e-38, 3e38])))
    amax = torch.cat((amax, *(torch.nextafter(amax, torch.tensor(to)) for to in (1e-45, INF))))
    quotients = (amax.numpy() / np.float32(GRIDS[name][-1])).clip(SMALLEST).tolist()
    floor = [math.frexp(a)[1] - 1 - top for a in amax.tolist()]         # OCP's rule
    ceil = [math.frexp(q)[1] - (math.frexp(q)[0] == 0.5) for q in quotients]
    for scale, exponents in ("e8m0", floor), ("e8m0_up", ceil):
        s = [2.0 ** min(max(e, -127), 127) for e in exponents]
        assert SCALES[scale](amax, GRIDS[name][-1])[0].tolist() == s


@every_format
def test_fp32_scales_are_amax_over_g_max_and_amax_survives(name):
    x, g_max = torch.randn(500, 4, 16, generator=gen()), GRIDS[name][-1]
    amax = x.abs().amax(-1)
    assert np.array_equal(SCALES["fp32"](amax, g_max)[0], amax.numpy() / np.float32(g_max))
    assert ((fake_quantize(x, name).abs().amax(-1) - amax).abs() <= 2**-23 * amax).all()
    tiny = torch.arange(1, 2000) * SMALLEST                             # subnormals do not clip
    scales = SCALES["fp32"](tiny, g_max)[0].tolist()
    assert all(Fraction(s) * Fraction(g_max) >= Fraction(a) for s, a in zip(scales, tiny.tolist()))


@every_format
def test_tiles_share_a_scale_and_quantize_transposes_alike(name):
    w = torch.randn(48, 64, generator=gen())
    q, amax = quantize(w, name, two_d=True), w.view(3, 16, 4, 16).abs().amax((1, 3))
    assert np.array_equal(q.scale[::16], amax / np.float32(GRIDS[name][-1]))
    assert torch.equal(q.scale.unflatten(0, (3, 16)), q.scale[::16, None].expand(3, 16, 4))
    assert torch.equal(q.dequantize(), quantize(w.T, name, two_d=True).dequantize().T)


@every_scale
@every_format
def test_packing_and_transposing_keep_every_bit(name, scale, block):
    """quantize().dequantize() is fake_quantize, and dim = -2 is dim = -1 of the transposed."""
    x = adversarial()[:32] if scale[:4] != "e4m3" else adversarial()[9:41]      # (32, 64)
    for stochastic, tiles in itertools.product((False, True), repeat=2):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            packed, y = (f(x.to(dtype), name, scale, block, stochastic, gen(1), tiles)
                         for f in (quantize, fake_quantize))
            assert packed.codes.shape == (32, 32) and packed.codes.dtype == torch.uint8
            assert packed.scale.shape == (32, 64 // block) and same_bits(packed.dequantize(), y)
        q = Quantizer(FORMATS[name], SCALES[scale], block, random_signs(1), stochastic, tiles)
        noise = torch.rand(x.shape, generator=gen())
        y = q(x, noise)
        assert same_bits(q.pack(x, noise).dequantize(), y)
        assert same_bits(q(x.mT, noise.mT, -2).mT, y)
        assert same_bits(q.pack(x.mT, noise.mT, -2).dequantize().mT, y)


@every_scale
@every_format
@pytest.mark.parametrize("stochastic", [False, True])
def test_corners(name, scale, block, stochastic):
    f = functools.partial(fake_quantize, fmt=name, scale=scale, block=block, stochastic=stochastic)
    for bad in (NAN, INF, -INF):
        x, lost = torch.ones(2, 64), torch.zeros(2, 64, dtype=torch.bool)
        x[0, 37], lost[0, 32:32 + block] = bad, True                    # its block is lost ...
        lost |= scale.startswith("e4m3")                                # or with two levels, all
        assert torch.equal(f(x).isnan(), lost) and torch.equal(f(x).isfinite(), ~lost)
    assert f(torch.full((1, 64), 1e38)).isfinite().all()
    assert (f(torch.full((1, 64), LARGEST)) > 1e38).all()           # may round up, to infinity
    assert scale != "fp32" or (f(torch.full((2, 64), SMALLEST)) == SMALLEST).all()
    assert f(torch.zeros(3, 0, 32)).shape == (3, 0, 32)
    for flush in (True, False):                                         # a CPU's option, for speed
        torch.set_flush_denormal(flush)
        y = f(torch.zeros(2, 64))
        torch.set_flush_denormal(False)
        assert (y == 0).all()


zeros = torch.zeros
ufp4_with = functools.partial(replace, RECIPES["ufp4"])


@pytest.mark.parametrize("message,call", [
    ("K = 40, block = 16", lambda: quantize(zeros(2, 40))),
    ("K = 0", lambda: fake_quantize(torch.tensor(1.0))),
    ("only floats .* got torch.int64", lambda: quantize(zeros(2, 32).long())),
    ("'fp8'.*fp32, e4m3, e4m3_up", lambda: quantize(zeros(2, 32), scale="fp8")),
    ("'e5m2'.*e2m1, e1m2, int4", lambda: quantize(zeros(2, 32), "e5m2")),
    ("even and positive, .* got 0", lambda: quantize(zeros(2, 32), block=0)),
    ("multiples of 16", lambda: quantize(zeros(8, 32), two_d=True)),
    ("'nope'.*bf16, ufp4", lambda: ufp4.get_recipe("nope")),
    ("'e5m2'.*e2m1, e1m2, int4", lambda: Recipe("mine", "e5m2")),
    ("'fp8'.*fp32, e4m3, e4m3_up", lambda: Recipe("mine", "int4", "fp8")),
    ("some of fprop, dgrad, wgrad; got 'wgrad'", lambda: ufp4_with(rht="wgrad")),
    ("some of x, w, dy; got .'grad',", lambda: ufp4_with(sr=("grad",))),
    ("rht_block must be a power of two", lambda: ufp4_with(rht_block=12)),
    ("divide the other", lambda: ufp4_with(block=24)),
    ("even and positive, got 15", lambda: ufp4_with(block=15)),
    ("have no effect", lambda: ufp4_with(fmt=None)),
    ("16 signs, dimension 24", lambda: rht(zeros(2, 24), random_signs(0))),
    ("power of two of rows, not 12", lambda: hadamard(12)),
    ("got .*4, 32.*16, 48", lambda: ufp4.linear(zeros(4, 32), zeros(16, 48), "ufp4")),
    ("no ends", lambda: ufp4.linear(zeros(4, 32), zeros(2, 16, 32), "ufp4")),
    ("and .2,.", lambda: ufp4.linear(zeros(4, 32), zeros(3, 16, 32), "ufp4", torch.tensor([2, 4]))),
    ("got torch.int64", lambda: ufp4.linear(zeros(4, 32).long(), zeros(16, 32), "ufp4")),
    ("in_features = 20, out_features = 16", lambda: ufp4.Linear(20, 16)),
    ("multiples of 64, .* = 96", lambda: ufp4.Linear(96, 64, recipe=ufp4_with(rht_block=64))),
])
def test_bad_arguments_are_named(message, call):
    with pytest.raises(ValueError, match=message):
        call()


# --------------------------------------------------------------------------------------------------
# Stochastic rounding, by its law


@every_scale
@pytest.mark.parametrize("name", MAGNITUDES)
def test_the_stochastic_slope_is_one_unless_the_scale_clips(name, scale, block):
    x = torch.randn(32768, 64, generator=gen())
    q = Quantizer(FORMATS[name], SCALES[scale], block, stochastic=True)
    for y in q(x), q(x.mT.contiguous(), dim=-2).mT:
        alpha, se = slope(y, x)
        clips = scale in ("e4m3", "e8m0")
        assert se < 4e-4 and (alpha < 1 - 5 * se if clips else abs(alpha - 1) < 4 * se)


@every_format
def test_over_all_noise_it_takes_the_neighbours_with_the_number_as_their_mean(name):
    """Each of the 65536 values of the noise once; the number is rounded to 2^-16 of the step."""
    grid = torch.tensor(GRIDS[name]).double()
    a = torch.cat((torch.linspace(0, GRIDS[name][-1], 100), grid.float()))[:, None]
    q = ufp4.round_to_grid(a, FORMATS[name], torch.arange(65536) * 2.0**-16).double()
    above = torch.searchsorted(grid, a.double(), right=True).clamp(max=len(grid) - 1)
    below, above = grid[above - 1], grid[above]
    assert ((q == below) | (q == above)).all() and (q[100:] == grid[:, None]).all()
    assert ((q.mean(1, keepdim=True) - a).abs() <= (above - below) * 2.0**-17).all()


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_uniform_and_uncorrelated(seed):
    """Mean, variance, a chi-square of the 2^16 values, and the correlations of neighbours, of
    orientations, steps and seeds: within 4 standard errors of independent uniform numbers."""
    g = gen(seed)
    (key, other), (later, _), (foreign, _) = (random_key("cpu", i) for i in (g, g, gen(seed + 100)))
    u, *others = (noise_from(k, (1024, 1024)).double() - 0.5 for k in (key, other, later, foreign))
    others.append(noise_from(other, u.shape, -2) - 0.5)
    assert torch.equal(others[-1], others[0].mT.float())
    assert abs(u.mean() + 2.0**-17) * (12 * u.numel()) ** 0.5 < 4
    assert abs(u.square().mean() - 1 / 12) * (180 * u.numel()) ** 0.5 < 4
    counts = torch.bincount(((u + 0.5) * 2**16).long().flatten(), minlength=2**16)
    assert abs((counts - 16).square().sum() / 16 - 65535) < 4 * (2 * 65535) ** 0.5
    pairs = [(u, v) for v in others]
    pairs += [p for d in (1, 2, 3, 16) for p in ((u[d:], u[:-d]), (u[:, d:], u[:, :-d]))]
    assert all(abs((a * b).mean()) * 12 * a.numel() ** 0.5 < 4 for a, b in pairs)


@pytest.mark.parametrize("bit", [0, 7, 15, 16, 24, 30])
@pytest.mark.parametrize("which", [0, 1])
def test_each_bit_of_the_key_reaches_half_of_the_noise(which, bit):
    key = random_key("cpu", gen(bit))[0]
    flipped = key.clone()
    flipped[which] ^= 1 << bit
    a, b = ((noise_from(k, (256, 64)) * 2**16).int() for k in (key, flipped))
    assert 0.4 < torch.stack([(a ^ b) >> i & 1 for i in range(16)]).double().mean() < 0.6


def test_randomness_comes_from_the_generator_alone():
    x = torch.randn(32, 64, generator=gen())
    before = torch.get_rng_state()
    a, b, c = (fake_quantize(x, stochastic=True, generator=gen(seed)) for seed in (3, 3, 4))
    quantize(x)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(3)
    assert torch.equal(a, fake_quantize(x, stochastic=True))            # None: the default one


@pytest.mark.parametrize("n", [1, 2, 16, 128])
def test_rht_multiplies_by_signs_and_an_orthonormal_matrix(n):
    h, signs = hadamard(n).double(), random_signs(11, n)
    assert torch.allclose(h @ h.T, torch.eye(n).double(), atol=1e-6, rtol=0)
    assert torch.equal(h, h.T) and (n == 1 or h[1, 1] < 0 < h[0, 0])
    x, w = torch.randn(6, 2 * n, generator=gen()), torch.randn(5, 2 * n, generator=gen(1))
    expected = (x.double().view(6, 2, n) * torch.tensor(signs).double()) @ h
    assert torch.allclose(rht(x, signs).double(), expected.view(6, -1), atol=2e-6, rtol=0)
    assert close(rht(x, signs) @ rht(w, signs).T, x.double() @ w.double().T, 2 * n)
    for dim in -2, 0:
        assert torch.equal(rht(x.T, signs, dim), rht(x, signs).T)
    assert n < 16 or set(signs) == {1.0, -1.0} and signs != random_signs(12, n)


# --------------------------------------------------------------------------------------------------
# The three GEMMs


def oracle(x, w, dy, recipe, key):
    """Y, dX, dW in float64 for x (M, K), w (N, K), dy (M, N): each operand turned until its blocks
    lie along rows, rotated and quantized."""
    def q(t, operand, gemm, noise=None):
        if gemm in recipe.rht:
            t = rht(t, random_signs(recipe.sign_seed, recipe.rht_block))
        return Quantizer(recipe.fmt, recipe.scale, recipe.block, None, noise is not None,
                         recipe.tiles and operand == "w")(t, noise).double()
    m = len(x)
    x, dy = (F.pad(t, (0, 0, 0, -m % recipe.unit)) for t in (x, dy))
    along, across = noise_from(key[0], dy.shape), noise_from(key[1], dy.T.shape)
    y = q(x, "x", "fprop") @ q(w, "w", "fprop").T
    dx = q(dy, "dy", "dgrad", along) @ q(w.T, "w", "dgrad").T
    return y[:m], dx[:m], q(dy.T, "dy", "wgrad", across) @ q(x.T, "x", "wgrad").T


@pytest.mark.parametrize("name", QUANTIZED)
def test_autograd_function_is_the_three_quantized_gemms(name, monkeypatch):
    recipe, keys = replace(RECIPES[name], sign_seed=3), [random_key("cpu", gen(5))]
    monkeypatch.setattr(ufp4, "random_key", lambda device: keys.pop())      # once, for dY
    x = torch.randn(3, 25, 64, generator=gen(), requires_grad=True)         # not whole blocks
    dy = torch.randn(3, 25, 96, generator=gen(1)) * 1e-3
    layer = ufp4.Linear(64, 96, recipe=recipe)
    y = layer(x)
    y.backward(dy)
    flat = (t.detach().view(-1, t.shape[-1]) for t in (x, layer.weight, dy))
    ey, edx, edw = oracle(*flat, recipe, random_key("cpu", gen(5)))
    assert close((y - layer.bias).view(75, 96), ey, 64) and close(x.grad.view(75, 64), edx, 96)
    assert close(layer.weight.grad, edw, 75) and close(layer.bias.grad, dy.double().sum((0, 1)), 75)


@dataclass(frozen=True)
class E2M1Somewhere(Recipe):
    """An experiment: a GEMM or an operand in E2M1."""
    where: str = ""

    def quantizer(self, operand, gemm):
        q = super().quantizer(operand, gemm)
        return replace(q, fmt=E2M1) if self.where in (operand, gemm) else q


@pytest.mark.parametrize("field,value,changed", [
    ("rht", ("fprop",), "y"), ("rht", ("dgrad",), "x"), ("rht", ("wgrad",), "w"),
    ("sr", ("dy",), "xw"), ("sr", ("x",), "yw"), ("sr", ("w",), "yx"), ("tiles", True, "yx"),
    ("fmt", "e2m1", "yxw"), ("scale", "e8m0", "yxw"), ("block", 32, "yxw"), ("fmt", "int4", ""),
    ("where", "dgrad", "x"), ("where", "x", "yw"), ("where", "w", "yx"), ("where", "dy", "xw")])
def test_each_field_of_a_recipe_reaches_its_gemm_and_no_other(field, value, changed):
    def results(**fields):
        x = torch.randn(64, 64, generator=gen(), requires_grad=True)
        w = torch.randn(32, 64, generator=gen(1), requires_grad=True)
        y = ufp4.linear(x, w, E2M1Somewhere("mine", **fields))
        return y, *torch.autograd.grad(y, (x, w), torch.randn(64, 32, generator=gen(2)))
    pairs = zip("yxw", results(), results(**{field: value}))
    assert "".join(n for n, a, b in pairs if not torch.equal(a, b)) == changed


class FixedPoint(Quantizer):
    """An experiment that no format describes: multiples of 1/64."""
    def __call__(self, x, noise=None, dim=-1):
        return torch.round(x.float() * 64) / 64


class FixedPointRecipe(Recipe):
    def quantizer(self, operand, gemm):
        return FixedPoint()


def test_an_experiment_of_ten_lines_reaches_all_three_gemms_and_trains():
    x = torch.randn(20, 32, generator=gen(), requires_grad=True)
    layer = ufp4.Linear(32, 16, bias=False, recipe=FixedPointRecipe("mine"))
    optimizer, losses = torch.optim.SGD(layer.parameters(), 0.005), []
    for _ in range(30):
        y = layer(x)
        loss = 100 * F.mse_loss(y, x[:, :16].detach())
        (dy,) = torch.autograd.grad(loss, y, retain_graph=True)
        optimizer.zero_grad()
        x.grad = None
        loss.backward()
        a, b, c = (torch.round(t.detach().double() * 64) / 64 for t in (x, layer.weight, dy))
        assert close(y, a @ b.T, 32) and close(x.grad, c @ b, 16)
        assert close(layer.weight.grad, c.T @ a, 20)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_gradients_are_unbiased_under_stochastic_rounding():
    """Over draws of dY's noise, dX and dW tend to the products with dY unquantized."""
    x = torch.randn(32, 64, generator=gen(), requires_grad=True)
    w = torch.randn(48, 64, generator=gen(1), requires_grad=True)
    dy, signs, q = torch.randn(32, 48, generator=gen(2)), random_signs(0), Quantizer()
    y = ufp4.linear(x, w, "ufp4")
    draws = [torch.autograd.grad(y, (x, w), dy, retain_graph=True) for _ in range(400)]
    dx = rht(dy, signs) @ q(rht(w.detach().T, signs)).T
    dw = rht(dy.T, signs) @ q(rht(x.detach().T, signs)).T
    for expected, got in zip((dx, dw), map(torch.stack, zip(*draws))):
        z = (got.mean(0) - expected) / (got.std(0) / 20)
        assert abs(z.mean()) < 0.15 and 0.9 < z.std() < 1.1             # a row shares its noise


@pytest.mark.parametrize("name", ["bf16", *QUANTIZED])
def test_grouped_is_a_loop_over_experts(name, monkeypatch):
    monkeypatch.setattr(ufp4, "noise_from", lambda key, shape, dim: torch.full(shape, 0.3))
    recipe, sizes = RECIPES[name], [5, 0, 32, 17, 0, 1]                 # ragged, and some empty
    ends = torch.tensor(sizes).cumsum(0)
    x, w = torch.randn(55, 64, generator=gen()), torch.randn(6, 32, 64, generator=gen(1))
    dy = torch.randn(55, 32, generator=gen(2))
    if recipe.scale in (ufp4.e4m3, ufp4.e4m3_up):       # experts share a scale: one amax for all
        recipe = replace(recipe, rht=())
        x[ends - 1, 0] = dy[ends - 1, 0] = w[:, 0, 0] = 9.0
    x.requires_grad_(), w.requires_grad_()
    y = ufp4.linear(x, w, recipe, ends)
    parts = torch.cat([ufp4.linear(xe, we, recipe) for xe, we in zip(x.split(sizes), w)])
    (dx, dw), (edx, edw) = (torch.autograd.grad(v, (x, w), dy) for v in (y, parts))
    assert close(y, parts, 64) and close(dx, edx, 32) and close(dw, edw, 32)
    assert (dw[[1, 4]] == 0).all() and torch.equal(ufp4.linear(x, w, recipe, ends.int()), y)


@pytest.mark.parametrize("dtype,autocast", [
    (torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False), (torch.float64, False)])
def test_dtypes_and_autocast(dtype, autocast):
    layer = ufp4.Linear(64, 48, bias=False, dtype=None if autocast else dtype)
    x = torch.randn(20, 64, generator=gen(), dtype=layer.weight.dtype, requires_grad=True)
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = layer(x)
    a, b = (fake_quantize(rht(v.detach(), layer.recipe.signs)).to(dtype).double()
            for v in (x.to(dtype), layer.weight))
    eps = torch.finfo(dtype).eps                        # of the result, and of a sum in float32
    bound = eps / 2 * (a @ b.T).abs() + min(eps * 64, 2**-18) * (a.abs() @ b.abs().T)
    assert y.dtype == dtype and ((y - a @ b.T).abs() <= bound).all()
    y.double().sum().backward()
    assert x.grad.dtype == x.dtype and layer.weight.grad.dtype == layer.weight.dtype


@pytest.mark.parametrize("need_x,need_w,expected", [
    (False, False, "x- w-"), (True, False, "x- w- y- -w"), (False, True, "xx w- -y"),
    (True, True, "xx w- yy -w")])
def test_only_what_a_gradient_needs_is_quantized(need_x, need_w, expected, monkeypatch):
    calls, operands = [], ufp4.operands

    def spy(t, rows=None, cols=None, keep=False):
        name = {(16, 32): "x", (48, 32): "w", (16, 48): "y"}[tuple(t.shape)]
        calls.append((name if rows else "-") + (name if cols else "-"))
        return operands(t, rows, cols, keep)
    monkeypatch.setattr(ufp4, "operands", spy)
    x, w = torch.randn(16, 32, requires_grad=need_x), torch.randn(48, 32, requires_grad=need_w)
    y = ufp4.linear(x, w, "ufp4")
    if need_x or need_w:
        y.sum().backward()
    assert " ".join(calls) == expected
    assert (x.grad is not None, w.grad is not None) == (need_x, need_w)


@pytest.mark.parametrize("name,scale_bytes", [("ufp4", 4), ("ufp4-e4m3", 1), ("ufp4-mx", 1)])
def test_what_is_kept_between_the_passes_has_4_bits(name, scale_bytes):
    kept, w = [], torch.randn(32, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ufp4.linear(torch.randn(96, 64), w, name)
    size = sum(t.nbytes for t in kept if t.data_ptr() != w.data_ptr())
    assert size == 96 * 64 // 2 + 96 * 64 // RECIPES[name].block * scale_bytes + 4


def test_recomputation_replays_the_noise():
    x, w = torch.randn(32, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    grads = []
    for run in ufp4.linear, functools.partial(checkpoint, ufp4.linear, use_reentrant=False):
        torch.manual_seed(1)
        y = run(x, w, ufp4_with(sr=("x", "w", "dy")))
        grads.append(torch.autograd.grad(y.square().sum(), (x, w)))
    assert all(map(torch.equal, *grads))


def test_bf16_no_tokens_and_no_second_derivative():
    layer, x = ufp4.Linear(20, 40, recipe="bf16"), torch.randn(16, 20, requires_grad=True)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert ufp4.Linear(16, 32)(zeros(0, 16)).shape == (0, 32)
    loss = ufp4.linear(x[:, :16], layer.weight[:32, :16], "ufp4").square().sum()
    (grad,) = torch.autograd.grad(loss + x.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@compiling()
@pytest.mark.filterwarnings("error:torch.compile failed")
@pytest.mark.parametrize("rows,cols", [
    (Quantizer(E2M1, ufp4.e4m3, tiles=True, stochastic=True), None),
    (None, Quantizer(signs=random_signs(1, 2), stochastic=True))])
def test_compiled_is_eager_bit_for_bit(rows, cols):
    if not ufp4.can_compile("cpu"):
        pytest.skip("no C++ compiler here")
    x = torch.randn(256, 192, generator=gen()) * 10 ** torch.randn(256, 1, generator=gen(1))
    x[64:96] *= 1e-40
    x[3, 40], x[50, 60] = (NAN, INF) if cols else (0.0, -0.0)
    args = (x, rows, cols, cols is not None, random_key("cpu", gen()))
    plain, fast = ufp4.quantize_both(*args), ufp4.fused(ufp4.quantize_both)(*args)
    if cols:                                                            # kept, in 4 bits
        values, packed = cols(x, noise_from(args[-1][1], x.shape, -2), -2), fast[1]
        assert packed.codes.numel() >= 2**14                            # fewer are not compiled
        assert same_bits(ufp4.fused(ufp4.Quantized.dequantize)(packed), values)
    else:
        assert same_bits(fast[0], plain[0])


@compiling()
def test_a_layer_compiles_without_graph_breaks():
    layer = ufp4.Linear(64, 48, recipe=ufp4_with(rht=("wgrad",), rht_block=2))
    x, grads = torch.randn(20, 64, requires_grad=True), []
    for f in layer, torch.compile(layer, fullgraph=True, backend="eager"):
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(f(x).square().sum(), (x, layer.weight)))
    assert all(map(torch.equal, *grads))


@compiling()
@pytest.mark.filterwarnings("always")
def test_without_a_compiler_it_says_so_once_and_gives_the_same_bits(monkeypatch):
    from torch._inductor import config, utils
    x = torch.randn(256, 256, generator=gen())
    monkeypatch.setattr(ufp4, "can_compile", functools.cache(ufp4.can_compile.__wrapped__))
    with utils.fresh_cache(), config.patch({"cpp.cxx": ("no-such-compiler",)}):
        torch._dynamo.reset()
        with pytest.warns(UserWarning) as warned:
            results = [ufp4.linear(x, x, name) for name in ("e2m1", "ufp4")]
    torch._dynamo.reset()
    assert sum("install a C++ compiler" in str(w.message) for w in warned) == 1
    with torch.compiler.set_stance("force_eager"):
        assert all(torch.equal(y, ufp4.linear(x, x, n)) for y, n in zip(results, ("e2m1", "ufp4")))


def test_import_is_light():
    done = subprocess.run([sys.executable, "-c", "import ufp4, sys; print(*sys.modules)"], cwd=HERE,
                          capture_output=True, text=True)
    modules = set(done.stdout.split())
    assert "ufp4" in modules
    assert not {"triton", "matplotlib", "torch._dynamo", "torch._inductor"} & modules


# --------------------------------------------------------------------------------------------------
# convert


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embed.weight
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.again = self.inner[0]                                      # one module in two places


def test_convert_keeps_everything_but_the_arithmetic():
    m, x = Tied(), torch.randn(4, 16, generator=gen())
    before = {k: (v.data_ptr(), v.dtype) for k, v in m.state_dict().items()}
    assert ufp4.convert(m, "e2m1") is m
    assert {k: (v.data_ptr(), v.dtype) for k, v in m.state_dict().items()} == before
    for layer in m.a, m.b, m.again:
        assert type(layer) is ufp4.Linear and layer.recipe.name == "e2m1"
    assert m.again is m.inner[0] and type(m.lm_head) is nn.Linear
    assert torch.equal(m.a(x), ufp4.linear(x, m.a.weight, "e2m1") + m.a.bias)
    ufp4.convert(m, "ufp4", skip=("inner", "lm_head"))                  # again, to another recipe
    assert m.a.recipe.name == "ufp4" and m.inner[0].recipe.name == "e2m1" and "=ufp4" in repr(m)
    for skip in (ufp4.SKIP, (), None):                                  # one layer, no lm_head
        assert type(ufp4.convert(nn.Linear(16, 16), skip=skip)) is ufp4.Linear
    m.lm_head = m.a = nn.Linear(16, 32)                                 # skipped, under either name
    assert type(ufp4.convert(m).a) is nn.Linear


@pytest.mark.parametrize("message,how", [
    ("'fp4'.*ufp4", {"recipe": "fp4"}), ("'head'.*a, b, inner.0", {"skip": ("head",)}),
    ("nothing to convert", {"skip": ("a", "b", "inner", "lm_head")}),
    ("'a'.*in_features = 16", {"recipe": "ufp4-mx"}), ("'hooked' has had its forward", {})])
def test_convert_refuses_before_changing_anything(message, how):
    m = Tied()
    if not how:
        m.hooked = nn.Linear(16, 16)
        m.hooked.forward = lambda x: x
    with pytest.raises(ValueError, match=message):
        ufp4.convert(m, **how)
    assert type(m.a) is type(m.b) is nn.Linear


def test_convert_warns_of_the_fast_path_around_its_layers():
    with pytest.warns(UserWarning, match="set_fastpath_enabled"):
        ufp4.convert(nn.TransformerEncoderLayer(32, 2, 64).eval())
