"""Each test states one property and compares with an oracle of its own: enumerated codes, float64, brute force."""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import http.server
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"                # before triton is imported: its kernels run on the CPU

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.flop_counter import FlopCounterMode

import bench
import train
import ufp4
from bench import read_log
from data import prepare
from ufp4 import FORMATS, RECIPES, fake_quantize, get_format, hadamard, quantize, random_signs, rht

HERE = Path(__file__).resolve().parent
INF, NAN = math.inf, math.nan
SCALE_BLOCKS = (("fp32", 16), ("e4m3", 16), ("e8m0", 32))
# The formats, written out by hand.
MAGNITUDES = {"e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6], "e1m2": [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75],
              "int4": [0, 1, 2, 3, 4, 5, 6, 7]}


@pytest.fixture(autouse=True)
def seeded_and_eager():
    """What a test draws from torch's default generator does not depend on the tests before it. Quantizers, of which
    each kind takes seconds to compile, run eagerly but in the tests of torch.compile: those have @compiling()."""
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        yield


compiling = functools.partial(torch.compiler.set_stance, "default")


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def same_bits(a, b):
    """Equal bit for bit, the sign of zero included; NaN equals NaN."""
    nan = a.isnan() & b.isnan()
    return bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all())


def adversarial():
    """(48, 64) float32: blocks of zeros, subnormals, extremes, one huge value among small ones, ties, -0.0."""
    g = gen(7)
    biggest = torch.full((64,), torch.finfo(torch.float32).max)
    rows = [torch.zeros(64), -torch.zeros(64), torch.full((64,), 2.0**-149),
            *(torch.randn(64, generator=g) * size for size in (1e-40, 1e-44, 1e-30, 1e37)), biggest, -biggest]
    spike = torch.randn(64, generator=g) * 1e-3
    spike[5] = 1e4
    ties = torch.arange(64) * 0.125 - 4
    return torch.stack(rows + [spike, ties] + list(torch.randn(37, 64, generator=g)))


# ---------------------------------------------------------------------------------------------------------------
# Formats


@pytest.mark.parametrize("name", FORMATS)
def test_levels_and_all_16_codes(name):
    f = FORMATS[name]
    assert list(f.levels) == MAGNITUDES[name]
    for nibble in range(16):
        if name == "int4":
            value = nibble - 16 if nibble > 7 else nibble                       # two's complement
        else:
            value = math.copysign(MAGNITUDES[name][nibble & 7], -1 if nibble & 8 else 1)
        assert math.copysign(1, f.values[nibble]) == math.copysign(1, value) and f.values[nibble] == value
    codes = [c for c in range(16) if not (name == "int4" and c == 8)]
    x = torch.tensor([f.values[c] for c in codes] + [0.0] * (16 - len(codes)))
    q = quantize(x, name)                                                       # amax is g_max, so the scale is 1
    assert q.scale.tolist() == [1.0]
    nibbles = [int(b) >> s & 15 for b in q.codes for s in (0, 4)]               # element 2i in the low nibble
    assert nibbles == codes + [0] * (16 - len(codes))
    assert same_bits(q.dequantize(), x)


def test_e1m2_and_int4_decode_to_identical_values():
    x = torch.cat((adversarial()[5:7], adversarial()[9:]))                      # scales not at FP32's ends
    for scale, block in SCALE_BLOCKS:
        for stochastic in (False, True):
            a, b = (quantize(x, f, scale, block, stochastic, gen(1)) for f in ("e1m2", "int4"))
            assert torch.equal(a.dequantize(), b.dequantize())
    assert not (((b.codes & 15) == 8) | (b.codes >> 4 == 8)).any()              # -8 is never produced


def test_restricted_range_uses_no_code_above_its_maximum(monkeypatch):
    x = torch.randn(200, 64, generator=gen())
    for top in (2, 3, 4):
        q = quantize(x, f"e2m1-max{top}")
        used = {abs(FORMATS["e2m1"].values[int(b) >> s & 15]) for b in q.codes.flatten() for s in (0, 4)}
        assert used == {v for v in MAGNITUDES["e2m1"] if v <= top}
    for bad in ("e2m1-max5", "e3m0", "e2m1-max", "e2m1-max0"):
        with pytest.raises(ValueError, match="e2m1, e1m2, int4"):
            get_format(bad)
    monkeypatch.setitem(FORMATS, "e3m0", ufp4.Format("e3m0", mbits=0, min_normal=0.25, max=16.0, uniform=False))
    assert get_format("e3m0").levels == (0, 0.25, 0.5, 1, 2, 4, 8, 16)          # a fork's own


# ---------------------------------------------------------------------------------------------------------------
# Rounding


def nearest_by_brute_force(t, levels):
    """Nearest level to t >= 0, ties to the even code, in exact rational arithmetic."""
    d = [abs(Fraction(t) - Fraction(v)) for v in levels]
    best = [i for i in range(8) if d[i] == min(d)]
    return levels[next(i for i in best if i % 2 == 0) if len(best) > 1 else best[0]]


@pytest.mark.parametrize("name", FORMATS)
def test_nearest_rounding_is_brute_force_nearest(name):
    levels = MAGNITUDES[name]
    ties = np.array([(a + b) / 2 for a, b in zip(levels, levels[1:])], dtype=np.float32)
    points = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(99)),
                             np.array(levels, dtype=np.float32), np.linspace(0, levels[-1], 4001, dtype=np.float32)])
    t = torch.from_numpy(points)
    expected = torch.tensor([nearest_by_brute_force(float(p), levels) for p in points])
    assert torch.equal(ufp4.round_to_grid(t, FORMATS[name]), expected)
    blocks = torch.cat((t, torch.zeros(-len(t) % 15))).view(-1, 15)             # the same through quantize, at scale 1
    top = torch.full((len(blocks), 1), float(levels[-1]))
    for sign in (1, -1):
        got = quantize(torch.cat((top, sign * blocks), 1), name).dequantize()[:, 1:].flatten()[:len(t)]
        assert torch.equal(got, sign * expected)


@pytest.mark.parametrize("name", FORMATS)
def test_bias_of_each_bin_is_half_width_difference(name):
    for row in bench.bin_bias(name):                                            # a sweep of 1e5 midpoints of each bin
        assert row["measured"] == pytest.approx(row["closed"], abs=1e-5)        # ties: at most one point of the sweep
    expected = [0, 0, 0, -0.125, 0, -0.25] if name == "e2m1" else [0] * 6
    assert [r["closed"] for r in bench.bin_bias(name)] == expected


@pytest.mark.parametrize("name", FORMATS)
def test_gaussian_slope_is_the_float64_integral(name):
    closed = bench.gaussian_slope(MAGNITUDES[name])
    assert closed < 0.997 if name == "e2m1" else closed > 1
    x = torch.randn(200_000, 16, generator=gen())
    alpha, se = bench.slope(fake_quantize(x, name), x)
    assert abs(alpha - closed) < 4 * se < 4e-4


# ---------------------------------------------------------------------------------------------------------------
# Scales


def e4m3_values():
    """All finite non-negative E4M3 numbers, ascending: index = code."""
    return [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:127]


@pytest.mark.parametrize("name,scale,up", [("e2m1", "e4m3", False), ("e1m2", "e4m3", True), ("e2m1", "e4m3-up", True),
                                           ("e1m2", "e4m3-nearest", False)])
def test_e4m3_scales_by_enumeration(name, scale, up):
    """NVFP4's rule, nearest, for E2M1; up for a uniform grid; or as asked: against the table of E4M3 numbers."""
    table = np.array(e4m3_values())
    assert table[-1] == 448
    amax = torch.cat((10 ** torch.linspace(-9, 0, 4000), torch.tensor(table[1:] / 448).float(), torch.tensor([0.0])))
    x = torch.zeros(len(amax), 16)
    x[:, 3] = -amax
    q = quantize(x, name, scale)
    g = MAGNITUDES[name][-1]
    assert q.tensor_scale == torch.tensor(1.0) / (448 * g)
    r = (amax / g / q.tensor_scale).double().numpy()
    if up:
        expected = table[np.minimum(np.searchsorted(table, r), 126)]            # the smallest one >= r
    else:
        d = np.abs(table[:, None] - r)
        near = d.argmin(0)                                                      # the lower of two at a tie ...
        tie = (near < 126) & (d[near, np.arange(len(r))] == d[np.minimum(near + 1, 126), np.arange(len(r))])
        expected = table[near + (tie & (near % 2 == 1))]                        # ... unless its code is odd
    assert np.array_equal(q.scale.double().numpy().ravel(), expected)
    assert torch.equal(fake_quantize(x, name, scale), q.dequantize())
    torch.set_flush_denormal(True)                      # a CPU's option for speed: zeros are zeros under it, too
    try:
        assert not fake_quantize(torch.zeros(2, 32), name, scale).any()
    finally:
        torch.set_flush_denormal(False)


def test_e8m0_scales_by_frexp():
    """OCP's rule, floor(log2 amax) - 2, for E2M1; the smallest power of two that clips nothing for a uniform grid."""
    g = gen(3)
    edges = torch.tensor([7.0, 1.75, 6.0, 1e-45, 1e-39, 3e-38])
    amax = torch.cat((torch.rand(2000, generator=g).mul(60).sub(30).exp2(), edges))
    amax = torch.cat((amax, torch.nextafter(amax, torch.tensor(INF)), torch.nextafter(amax, torch.tensor(0.0))))
    x = torch.zeros(len(amax), 32)
    x[:, 17] = amax
    for name, scale, top in (("e2m1", "e8m0", 2), ("e1m2", "e8m0-floor", 0), ("int4", "e8m0-floor", 2)):
        s = quantize(x, name, scale, 32).scale.double().flatten().tolist()
        assert s == [2.0 ** max(math.frexp(a)[1] - 1 - top, -127) if a else 2.0**-127 for a in amax.tolist()]
    for name, scale in (("e1m2", "e8m0"), ("int4", "e8m0"), ("e2m1", "e8m0-up")):
        q = quantize(x, name, scale, 32)
        for a, s in zip(amax.tolist(), q.scale.double().flatten().tolist()):
            top = MAGNITUDES[name][-1]
            assert a <= top * s * (1 + 2**-23) and (s == 2.0**-127 or a > top * s / 2)     # amax / g_max is a float32
    x[:5, 17] = torch.tensor([1.0, 1 + 2**-23, 1.5, torch.finfo(torch.float32).max, 2.0**-127])
    s = quantize(x[:5], "e2m1-max1", "e8m0-up", 32).scale.double().flatten().tolist()
    assert s == [1.0, 2.0, 2.0, 2.0**127, 2.0**-127]


def test_fp32_scale_is_amax_over_gmax_and_amax_survives():
    x = torch.randn(500, 64, generator=gen())
    for name in FORMATS:
        q = quantize(x, name)
        blocks = x.view(500, 4, 16)
        amax = blocks.abs().amax(-1)
        assert torch.equal(q.scale, amax / MAGNITUDES[name][-1])
        at_max = q.dequantize().view(500, 4, 16).abs().amax(-1)
        assert ((at_max - amax).abs() <= 2**-23 * amax).all()
        # No error above half the widest step (E2M1: 2 at the top; it clips nothing).
        step = max(b - a for a, b in zip(MAGNITUDES[name], MAGNITUDES[name][1:]))
        assert ((q.dequantize().view_as(blocks) - blocks).abs() <= q.scale[..., None] * step / 2 * (1 + 2**-20)).all()


@pytest.mark.parametrize("first,second", [("e2m1", "e2m1-max4"), ("e2m1", "e1m2")])
def test_a_block_takes_the_format_that_errs_less(first, second):
    x = torch.cat((adversarial()[9:], torch.randn(500, 64, generator=gen())))
    errors = [(fake_quantize(x, f) - x).view(-1, 16).double().square().sum(-1) for f in (first, second)]
    both = f"{first}+{second}"
    q = quantize(x, both)
    assert torch.equal(q.scale.flatten() < 0, errors[1] < errors[0])            # the choice is the scale's sign
    got = (q.dequantize() - x).view(-1, 16).double().square().sum(-1)
    assert torch.equal(got, torch.minimum(*errors)) and 0.1 < (q.scale < 0).float().mean() < 0.9
    sr = quantize(x, both, stochastic=True, generator=gen())
    assert torch.equal(sr.scale, q.scale)                                       # chosen without noise, so no bias:
    x = torch.randn(20_000, 64, generator=gen())
    for size in (2.0**-80, 2.0**80):                    # squares out of float32's range
        assert same_bits(fake_quantize(x * size, both), fake_quantize(x, both) * size)
    close = torch.randn(2**18, 16, generator=gen()).bfloat16()
    with compiling():
        assert same_bits(fake_quantize(close, both), quantize(close, both).dequantize())
    alpha, se = bench.slope(fake_quantize(x, both, stochastic=True, generator=gen()), x)
    assert abs(alpha - 1) < 4 * se < 2e-3
    with pytest.raises(ValueError, match="needs fp32 scales.*got e4m3"):
        quantize(x, both, "e4m3")


def test_two_d_blocks_share_a_scale_and_quantize_transposes_alike():
    w = torch.randn(48, 64, generator=gen())
    for name in FORMATS:
        q = quantize(w, name, two_d=True)
        amax = w.view(3, 16, 4, 16).abs().amax((1, 3))
        assert torch.equal(q.scale.view(3, 16, 4), (amax / MAGNITUDES[name][-1])[:, None].expand(3, 16, 4))
        assert torch.equal(q.dequantize(), quantize(w.T, name, two_d=True).dequantize().T)
        assert not torch.equal(quantize(w, name).dequantize(), quantize(w.T, name).dequantize().T)


# ---------------------------------------------------------------------------------------------------------------
# quantize and fake_quantize: the same values, and the corners


@pytest.mark.parametrize("name", [*FORMATS, "e2m1-max3", "e2m1+e1m2"])
def test_fake_quantize_equals_dequantize_bit_for_bit(name):
    for scale, block in SCALE_BLOCKS[:1] if "+" in name else SCALE_BLOCKS:
        for stochastic in (False, True):
            for two_d in (False,) if "+" in name else (False, True):
                x = adversarial()
                if scale == "e4m3":                     # else the largest row sets the scale of all, and they are zeros
                    x[6:9] = torch.tensor([1.0, NAN if two_d else 300.0, -0.0])[:, None]
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    args = (x.to(dtype), name, scale, block, stochastic)
                    a = quantize(*args, gen(1), two_d and block == 16)
                    b = fake_quantize(*args, gen(1), two_d and block == 16)
                    assert a.codes.dtype == torch.uint8 and a.codes.shape == (48, 32)
                    assert a.scale.shape == (48, 64 // block)
                    assert b.dtype == torch.float32 and same_bits(a.dequantize(), b)


@compiling()
@pytest.mark.parametrize("scale,block", SCALE_BLOCKS)
@pytest.mark.parametrize("dim,name,stochastic", [(-1, "e2m1", True), (-2, "e1m2", True), (-2, "int4", False)])
def test_compiled_equals_eager_bit_for_bit(dim, name, stochastic, scale, block):
    """What torch.compile makes of rotate_round, rotate_pack and decode gives the bits of the plain ones."""
    if not ufp4.can_compile.__wrapped__("cpu"):
        pytest.skip("no C++ compiler here")
    x = torch.randn(192, 192, generator=gen()) * 10 ** torch.randn(192, 1, generator=gen(1))
    x[3, 40], x[50, 60] = (NAN, INF) if scale != "e4m3" else (0.0, -0.0)
    x[64:96] *= 1e-40
    bits = ufp4.random_bytes(x.shape, "cpu", gen()) if stochastic else None
    signs = random_signs(1) if scale == "fp32" and stochastic else None         # what scales have no part in, once
    args = (x, bits, signs, dim, get_format(name), scale, block, False, torch.float32)
    plain = ufp4.rotate_round(*args)
    assert same_bits(ufp4.fused(ufp4.rotate_round, *args), plain)
    if scale == "fp32" and not stochastic:              # packed and unpacked again, as a layer keeps its input
        got, (codes, s, t) = ufp4.fused(ufp4.rotate_pack, *args[:-1]), ufp4.rotate_pack(*args[:-1])
        assert codes.numel() >= 2**14                   # fewer are not compiled
        meant = ~s.isnan().repeat_interleave(block // 2, 0)
        assert ((got[0] == codes) | ~meant).all() and same_bits(got[1], s)
        assert same_bits(ufp4.fused(ufp4.decode, codes, s, t, get_format(name), -2, torch.float32), plain)


@pytest.mark.parametrize("name", FORMATS)
def test_corners(name):
    for scale, block in SCALE_BLOCKS:
        for stochastic in (False, True):
            def f(x):
                return fake_quantize(x, name, scale, block, stochastic, gen())
            assert (f(torch.zeros(2, 64)) == 0).all()
            for bad in (NAN, INF, -INF):
                x = torch.ones(2, 64)
                x[0, 37] = bad
                y = f(x)
                whole = x if scale == "e4m3" else x[:1, 32:64] if block == 32 else x[:1, 32:48]
                assert not y[:1, 32:48].isfinite().any()                        # its block is lost ...
                assert y.isfinite().sum() == 128 - whole.numel()                # ... and with two levels, the tensor
                assert not quantize(x, name, scale, block, stochastic, gen()).dequantize()[:1, 32:48].isfinite().any()
            assert f(torch.full((1, 64), 1e38)).isfinite().all()
            biggest = f(torch.full((1, 64), torch.finfo(torch.float32).max))    # may round up to infinity, as IEEE does
            assert (biggest > 1e38).all() and (scale != "fp32" or biggest.isfinite().all())
    x = torch.randn(200, 64, generator=gen()) * 1e-41                           # about 7000 subnormal steps
    normal = fake_quantize(x.double().mul(2.0**100).float(), name).double() * 2.0**-100
    step = 2.0**-149
    # The scale is a whole number of steps, at least 1000 here, 1.5 of them too large at most; the result is rounded.
    assert ((fake_quantize(x, name).double() - normal).abs() <= 2e-3 * x.abs().amax() + step).float().mean() > 0.98
    assert (fake_quantize(torch.full((1, 16), step), name) == step).all()
    for scale, block in SCALE_BLOCKS:                   # and no values at all
        assert quantize(torch.zeros(0, 32), name, scale, block).dequantize().shape == (0, 32)
        assert fake_quantize(torch.zeros(3, 0, 32), name, scale, block).shape == (3, 0, 32)


altered = functools.partial(dataclasses.replace, RECIPES["ufp4"])


@pytest.mark.parametrize("message,call", [
    ("K = 40, block = 16", lambda: quantize(torch.zeros(2, 40))),
    ("K = 40, block = 32", lambda: fake_quantize(torch.zeros(2, 40), block=32)),
    *((f"only floats are quantized, got {dtype}", functools.partial(quantize, torch.zeros(2, 32, dtype=dtype)))
      for dtype in (torch.int64, torch.complex64)),
    ("'fp8'.*fp32, e4m3, e8m0", lambda: quantize(torch.zeros(2, 32), scale="fp8")),
    ("'e5m2'.*e2m1, e1m2, int4", lambda: quantize(torch.zeros(2, 32), "e5m2")),
    ("even and positive, got 0", lambda: quantize(torch.zeros(2, 32), block=0)),
    ("K = 0", lambda: quantize(torch.tensor(1.0))),
    ("multiples of 16", lambda: quantize(torch.zeros(8, 32), two_d=True)),
    ("one scale a tile", lambda: quantize(torch.zeros(16, 16), "e2m1+e1m2", two_d=True)),
    ("by its name", lambda: quantize(torch.zeros(2, 32), FORMATS["e1m2"])),
    *(("two formats that have a sign bit", functools.partial(get_format, name))
      for name in ("e2m1+int4", "int4+e2m1", "e2m1+e2m1-max4+e1m2")),
    ("'nope'.*ufp4", lambda: ufp4.get_recipe("nope")),
    ("fprop, dgrad, wgrad", lambda: altered(rht=("forward",))), ("x, w, dy", lambda: altered(sr=("grad",))),
    ("rht takes a tuple .* got 'wgrad'", lambda: altered(rht="wgrad")),
    *(("rht_block must be a power of two", functools.partial(altered, rht_block=n)) for n in (12, 0, 16.0)),
    ("divide the other", lambda: altered(block=24)),
    ("swap takes a tuple with some of NAME:FORMAT; got 'w:e2m1'", lambda: altered(swap="w:e2m1")),
    ("rht, swap would have no effect", lambda: altered(fmt=None, sr=(), swap=("dgrad:e2m1",))),
    *(("swap takes NAME:FORMAT, NAME one of fprop", functools.partial(altered, swap=swap))
      for swap in (("loss:e2m1",), ("w:e2m1", "w:int4"), ("e2m1",), (1,))),
    *(("alpha is a slope, a float above 0", functools.partial(altered, alpha=alpha))
      for alpha in (0.0, -1.0, NAN, INF, "1")),
    ("offs .E,.; got .* and .2,",
     lambda: ufp4.linear(torch.zeros(4, 32), torch.zeros(3, 16, 32), "ufp4", torch.tensor([2, 4]))),
    *(("linear needs floats", functools.partial(ufp4.linear, x, w, "ufp4")) for x, w in (
        (torch.zeros(4, 32), torch.zeros(16, 48)), (torch.zeros(4, 32), torch.zeros(2, 16, 32)),
        (torch.zeros(4, 32, dtype=torch.int64), torch.zeros(16, 32)),
        (torch.zeros(4, 32), torch.zeros(16, 32, dtype=torch.int8))))])
def test_bad_arguments_are_named(message, call):
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------------------------------------------------------
# Stochastic rounding, by its law


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_takes_a_neighbour_and_averages_out(name):
    x = torch.randn(64, 64, generator=gen())
    s = quantize(x, name).scale.repeat_interleave(16, -1)
    t, levels = (x / s).abs(), torch.tensor(MAGNITUDES[name], dtype=torch.float32)
    below = levels[(torch.searchsorted(levels, t.contiguous(), right=True) - 1).clamp(max=7)]
    above = levels[torch.searchsorted(levels, t.contiguous()).clamp(max=7)]
    g, total, errors = gen(1), torch.zeros_like(x), {}
    for n in range(1, 1025):
        y = fake_quantize(x, name, stochastic=True, generator=g)
        q = (y / s).abs()
        assert (torch.isclose(q, below, atol=1e-5) | torch.isclose(q, above, atol=1e-5)).all()
        total += y
        errors[n] = (total / n - x).square().mean().sqrt().item()
    for n in (16, 64, 256):                             # four times the draws halve the error; 4096 values: 2% accuracy
        assert errors[4 * n] / errors[n] == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("name,scale,block,unbiased", [
    ("e1m2", "fp32", 16, True), ("e2m1", "fp32", 16, True), ("e1m2", "e4m3", 16, True), ("int4", "e4m3", 16, True),
    ("e1m2", "e8m0", 32, True), ("e2m1", "e4m3", 16, False), ("e2m1", "e8m0", 32, False)])
def test_stochastic_slope_is_one_unless_the_scale_clips(name, scale, block, unbiased):
    x = torch.randn(65536, 64, generator=gen())
    alpha, se = bench.slope(fake_quantize(x, name, scale, block, True, gen(1)), x)
    assert se < 2e-4
    assert (abs(alpha - 1) < 4 * se) == unbiased and (unbiased or alpha < 0.998)


@pytest.mark.parametrize("name", FORMATS)
def test_over_all_noise_the_mean_is_the_number(name):
    """Each of the 65536 values of the noise once: the mean is the number, rounded to 2^-16 of the step it is in."""
    f, bits = FORMATS[name], torch.stack(torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij"))
    noise = ufp4.sr_noise(bits.to(torch.uint8)).flatten()
    assert noise.unique().numel() == 65536 and noise.min() == 0 and noise.max() == 1 - 2.0**-16
    a = torch.cat((torch.linspace(0, f.max, 100), torch.tensor(f.levels))).unsqueeze(1)
    mean = ufp4.round_to_grid(a, f, noise).double().mean(1, keepdim=True)
    levels = torch.tensor(f.levels, dtype=torch.float64)
    step = torch.diff(levels)[torch.searchsorted(levels, a.double(), right=True).clamp(1, 7) - 1]
    assert ((mean - a).abs() <= step * 2.0**-17).all() and torch.equal(mean[100:].float(), a[100:])


def test_randomness_comes_from_the_generator_alone():
    x = torch.randn(32, 64, generator=gen())
    a, b = (fake_quantize(x, stochastic=True, generator=gen(3)) for _ in range(2))
    assert torch.equal(a, b) and not torch.equal(a, fake_quantize(x, stochastic=True, generator=gen(4)))
    before = torch.get_rng_state()
    fake_quantize(x, stochastic=True, generator=gen(3))
    quantize(x)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(3)
    assert torch.equal(a, fake_quantize(x, stochastic=True))                    # None: the default generator


# ---------------------------------------------------------------------------------------------------------------
# The random Hadamard transform


@pytest.mark.parametrize("n", [1, 2, 16, 64, 128])
def test_hadamard_is_orthonormal_and_rht_multiplies_by_it(n):
    h, signs = hadamard(n).double(), random_signs(11, n)
    assert torch.allclose(h @ h.T, torch.eye(n, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.equal(h, h.T) and (n == 1 or h[1, 1] < 0 < h[0, 0])
    x = torch.randn(6, 2 * n, generator=gen())
    expected = (x.double().view(6, 2, n) * torch.tensor(signs).double()) @ h
    # log2(n) additions of float32, each with relative error 2^-24, on values of at most the row's norm
    assert torch.allclose(rht(x, signs, n).double(), expected.view(6, -1), atol=2e-6, rtol=0)
    assert same_bits(rht(x, torch.tensor(signs), n), rht(x, signs, n))
    assert same_bits(rht(x.T.contiguous(), signs, n, dim=-2), rht(x, signs, n).T.contiguous())
    assert same_bits(rht(x.T.contiguous(), signs, n, dim=0), rht(x, signs, n).T.contiguous())


def test_signs_are_a_function_of_the_seed():
    assert random_signs(0) == random_signs(0) and random_signs(0) != random_signs(1)
    assert set(random_signs(3, 256)) == {1.0, -1.0} and abs(sum(random_signs(3, 4096))) < 4 * 64
    assert all(set(column) == {1.0, -1.0} for column in zip(*(random_signs(seed) for seed in range(32))))
    with pytest.raises(ValueError, match="16 signs, got 8"):
        rht(torch.zeros(2, 16), random_signs(0, 8))
    with pytest.raises(ValueError, match="n = 16, dimension 24"):
        rht(torch.zeros(2, 24), random_signs(0))
    with pytest.raises(ValueError, match="not 12"):
        hadamard(12)


# ---------------------------------------------------------------------------------------------------------------
# The three GEMMs


def oracle_operand(x, recipe, gemm, operand):
    """Float64 of one operand (R, K), blocked along K, by the public functions alone."""
    if gemm in recipe.rht:
        x = rht(x, random_signs(recipe.sign_seed, recipe.rht_block), recipe.rht_block)
    q = quantize(x, recipe.fmt, recipe.scale, recipe.block, operand in recipe.sr, None,
                 recipe.two_d and operand == "w").dequantize().double()
    rescaled = recipe.alpha is not None and operand not in recipe.sr
    return q * (recipe.alpha * x.double().square().sum() / (q * x.double()).sum()) if rescaled else q


def oracle_linear(x, w, dy, recipe):
    """Y, dX, dW in float64 for x (M, K), w (N, K), dy (M, N)."""
    def q(t, gemm, operand):
        return oracle_operand(t.contiguous(), recipe, gemm, operand)
    y = q(x, "fprop", "x") @ q(w, "fprop", "w").T
    dx = q(dy, "dgrad", "dy") @ q(w.T, "dgrad", "w").T
    pad = -len(x) % recipe.unit
    xp, dyp = F.pad(x, (0, 0, 0, pad)), F.pad(dy, (0, 0, 0, pad))
    return y, dx, q(dyp.T, "wgrad", "dy") @ q(xp.T, "wgrad", "x").T


def close(got, expected, length):
    """Equal up to float32 accumulation of `length` products: sqrt(length) roundings of values of the result's size."""
    scale = expected.detach().abs().max() * length**0.5
    return torch.allclose(got.double(), expected.double(), rtol=0, atol=float(scale * 2**-24 * 4))


QUANTIZED = [name for name, r in RECIPES.items() if r.fmt]
PLAIN = [n for n in QUANTIZED if RECIPES[n].alpha is None and "+" not in RECIPES[n].fmt]       # what the kernels have


@pytest.mark.parametrize("name", QUANTIZED)
def test_autograd_function_is_the_three_quantized_gemms(name, monkeypatch):
    # All noise the same number, 0.3, so that the oracle's transposed copies see the same noise.
    noise = torch.tensor([77, 0], dtype=torch.uint8)
    monkeypatch.setattr(ufp4, "random_bytes", lambda shape, *_: noise.view(2, *[1] * len(shape)).expand(2, *shape))
    recipe = dataclasses.replace(RECIPES[name], sign_seed=3)
    x = torch.randn(3, 25, 64, generator=gen(), requires_grad=True)                 # 75 tokens: not whole blocks
    dy = torch.randn(3, 25, 96, generator=gen(1)) * 1e-3
    draws, fixed = [], ufp4.random_bytes
    monkeypatch.setattr(ufp4, "random_bytes", lambda *args: draws.append(args) or fixed(*args))
    layer = ufp4.Linear(64, 96, recipe=recipe)
    y = layer(x)
    y.backward(dy)
    assert len(draws) == 2 * len(recipe.sr)             # dY's two operands have noise of their own
    monkeypatch.setattr(ufp4, "random_bytes", fixed)
    ey, edx, edw = oracle_linear(x.detach().flatten(0, 1), layer.weight.detach(), dy.flatten(0, 1), recipe)
    assert close((y - layer.bias).flatten(0, 1), ey, 64) and y.shape == (3, 25, 96)
    assert close(x.grad.flatten(0, 1), edx, 96)
    assert close(layer.weight.grad, edw, 75)
    assert close(layer.bias.grad, dy.double().sum((0, 1)), 75)
    if "dy" in recipe.sr:                               # and the test would notice rounding to nearest
        _, ndx, ndw = oracle_linear(x.detach().flatten(0, 1), layer.weight.detach(), dy.flatten(0, 1),
                                    dataclasses.replace(recipe, sr=()))
        assert not close(x.grad.flatten(0, 1), ndx, 96) and not close(layer.weight.grad, ndw, 75)


def test_each_field_of_a_recipe_reaches_its_gemm_and_no_other():
    """Turning RHT or SR on for one GEMM or operand changes exactly the results which that reaches."""
    base = dataclasses.replace(RECIPES["ufp4"], rht=(), sr=())
    assert hash(dataclasses.replace(base, swap=["w:e2m1"])) != hash(base)

    def results(**fields):
        torch.manual_seed(0)
        x, w = torch.randn(48, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
        y = ufp4.linear(x, w, dataclasses.replace(base, **fields))
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).sin())
        return y.detach(), x.grad, w.grad

    plain = results()
    for fields, changed in (({"rht": ("fprop",)}, "y"), ({"rht": ("dgrad",)}, "x"), ({"rht": ("wgrad",)}, "w"),
                            ({"sr": ("dy",)}, "xw"), ({"sr": ("x",)}, "yw"), ({"sr": ("w",)}, "yx"),
                            ({"two_d": True}, "yx"), ({"fmt": "e2m1"}, "yxw"), ({"scale": "e8m0"}, "yxw"),
                            ({"fmt": "int4"}, ""), ({"swap": ("dgrad:e2m1",)}, "x"), ({"swap": ("w:e2m1",)}, "yx"),
                            ({"swap": ("x:e2m1", "wgrad:e1m2")}, "yw"), ({"alpha": 0.9}, "yxw")):
        got = "".join(n for n, a, b in zip("yxw", plain, results(**fields)) if not torch.equal(a, b))
        assert got == changed, fields


def test_alpha_sets_the_slope_of_what_is_rounded_to_nearest():
    def operand(x, name, recipe):
        return ufp4.quantize_operand(x, name, recipe, None, torch.float32, rows="fprop")[0]
    x = torch.randn(64, 64, generator=gen())
    for alpha in (1.0, 0.9):
        recipe = dataclasses.replace(RECIPES["e2m1"], alpha=alpha)
        q = operand(x, "x", recipe)
        assert bench.slope(q, x)[0] == pytest.approx(alpha, abs=1e-6)
        for size in (1e-25, 1e25):                      # whose squares float32 does not hold
            q_, x_ = operand(x * size, "x", recipe).double(), (x * size).double()
            assert bench.slope(q_, x_)[0] == pytest.approx(alpha, abs=1e-6)
        plain = fake_quantize(x, "e2m1")
        assert torch.allclose(q / plain.where(plain != 0, 1), (q[0, 0] / plain[0, 0]) * (plain != 0), atol=1e-6)
        assert not operand(x * 0, "x", recipe).any()
        torch.manual_seed(0)
        dy = operand(x, "dy", recipe)
        torch.manual_seed(0)
        assert torch.equal(dy, operand(x, "dy", RECIPES["e2m1"]))


def test_the_recipes_are_the_papers():
    """Table 1, and the neighbours, row by row."""
    every = ("fprop", "dgrad", "wgrad")
    expected = {"ufp4": ("e1m2", "fp32", 16, every, False), "ufp4-int4": ("int4", "fp32", 16, every, False),
                "ufp4-e4m3": ("e1m2", "e4m3", 16, every, False), "ufp4-mx": ("e1m2", "e8m0", 32, every, False),
                "e2m1": ("e2m1", "fp32", 16, ("wgrad",), False), "e2m1-full-rht": ("e2m1", "fp32", 16, every, False),
                "nvfp4": ("e2m1", "e4m3", 16, ("wgrad",), True), "mxfp4": ("e2m1", "e8m0", 32, ("wgrad",), False),
                "four-over-six": ("e2m1+e2m1-max4", "fp32", 16, ("wgrad",), False),
                "mixfp4": ("e2m1+e1m2", "fp32", 16, ("wgrad",), False),
                "e2m1-debiased": ("e2m1", "fp32", 16, every, False), "ufp4-shrunk": ("e1m2", "fp32", 16, every, False),
                **{f"e2m1-max{n}": (f"e2m1-max{n}", "fp32", 16, every, False) for n in (2, 3, 4)}}
    for name, fields in expected.items():               # a fork may have more
        r = RECIPES[name]
        assert (r.fmt, r.scale, r.block, r.rht, r.two_d) == fields
        assert r.sr == ("dy",) and r.rht_block == 16 and not r.swap
        assert r.alpha == {"e2m1-debiased": 1.0, "ufp4-shrunk": 0.996}.get(name)


def test_gradients_are_unbiased_under_stochastic_rounding():
    """The mean of dX over draws of dY tends to the product with the unquantized dY."""
    x, w = torch.randn(32, 64, generator=gen(), requires_grad=True), torch.randn(48, 64, generator=gen(1))
    dy = torch.randn(32, 48, generator=gen(2))
    recipe = RECIPES["ufp4"]
    draws = torch.stack([torch.autograd.grad(ufp4.linear(x, w, recipe), x, dy)[0] for _ in range(400)]).double()
    signs = random_signs(0)
    expected = rht(dy, signs).double() @ oracle_operand(w.T.contiguous(), recipe, "dgrad", "w").T
    z = (draws.mean(0) - expected) / (draws.std(0) / 20)
    # 2048 nearly standard normals that share rows of noise: mean 0 within a few hundredths, deviation 1
    assert abs(z.mean()) < 0.15 and 0.9 < z.std() < 1.1


def test_bf16_recipe_is_nn_linear():
    a, b = nn.Linear(24, 40), ufp4.Linear(24, 40, recipe="bf16")                # any size: nothing is quantized
    b.load_state_dict(a.state_dict())
    x = torch.randn(5, 7, 24, generator=gen())
    for layer in (a, b):
        layer(x).square().sum().backward()
    assert torch.equal(a(x), b(x)) and torch.equal(a.weight.grad, b.weight.grad)
    assert torch.equal(a.bfloat16()(x.bfloat16()), b.bfloat16()(x.bfloat16()))
    b.float()
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(b.double(), x)


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.alpha is None])     # alpha is of a whole tensor
def test_grouped_equals_a_loop_over_experts(name, monkeypatch):
    monkeypatch.setattr(ufp4, "random_bytes", lambda shape, *_: torch.full((2, *shape), 77, dtype=torch.uint8))
    recipe = RECIPES[name]
    sizes = [5, 0, 32, 17, 0, 1]                                                # ragged, and experts with no tokens
    x, w = torch.randn(55, 64, generator=gen()), torch.randn(6, 32, 64, generator=gen(1))
    dy = torch.randn(55, 32, generator=gen(2))
    if recipe.scale == "e4m3":                          # one scale a tensor: give all experts the same amax, unrotated
        recipe = dataclasses.replace(recipe, rht=())
        ends = torch.tensor(sizes).cumsum(0)
        for t, at in ((x, ends - 1), (dy, ends - 1)):
            t[at, 0] = 9.0
        w[:, 0, 0] = 9.0
    x.requires_grad_(), w.requires_grad_()
    y = ufp4.linear(x, w, recipe, torch.tensor(sizes).cumsum(0).to(torch.int32))
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    parts = [ufp4.linear(xe, we, recipe) for xe, we in zip(x.split(sizes), w)]
    edx, edw = torch.autograd.grad(torch.cat(parts), (x, w), dy)
    assert close(y, torch.cat(parts), 64) and close(dx, edx, 32) and close(dw, edw, 32)
    assert (dw[1] == 0).all() and (dw[4] == 0).all() and dw[5].abs().sum() > 0


def test_tokens_move_to_whole_blocks():
    """Against a list of every block's rows; offs of either integer type."""
    for sizes in ([1] * 5, [16] * 3, [5, 0, 32, 17, 0, 1], [0, 0], [17, 1, 1, 1]):
        places, ends, end = [], [], 0
        for n in sizes:
            places += range(end, end + n)
            end += -(-n // 16) * 16
            ends.append(end)
        offs = torch.tensor(sizes).cumsum(0)
        rows, moved, total = ufp4.place_tokens(sum(sizes), offs, 16, "cpu")
        assert rows.tolist() == places and moved.tolist() == ends and total % 16 == 0 < total and total >= end
        x, w = torch.randn(sum(sizes), 32), torch.randn(len(sizes), 16, 32)
        for recipe in ("bf16", "ufp4"):
            assert torch.equal(ufp4.linear(x, w, recipe, offs), ufp4.linear(x, w, recipe, offs.int()))


def test_autocast_and_dtypes(monkeypatch):
    layer = ufp4.Linear(64, 48)
    x = torch.randn(20, 64, generator=gen(), requires_grad=True)
    a, b = (fake_quantize(rht(v, layer.recipe.signs)).bfloat16().double()
            for v in (x.detach().bfloat16(), layer.weight.detach()))
    product, bias = a @ b.T, layer.bias.detach().double()
    quantized, plain = [], ufp4.quantize_operand
    monkeypatch.setattr(ufp4, "quantize_operand",
                        lambda x, name, recipe, path, dtype, **k: quantized.append((name, dtype)) or
                        plain(x, name, recipe, path, dtype, **k))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        ref = nn.Linear(64, 48)(x)
    assert y.dtype == ref.dtype == torch.bfloat16
    rounded = product.abs() + bias.abs() + (product + bias).abs()               # each to 8 bits
    assert ((y - product - bias).abs() <= 2**-8 * rounded * (1 + 2**-6) + 2**-18 * (a.abs() @ b.abs().T)).all()
    y.float().sum().backward()
    assert quantized == [(name, torch.bfloat16) for name in ("x", "w", "dy", "w")]     # the backward pass, too
    assert x.grad.dtype == torch.float32 and layer.weight.grad.dtype == torch.float32
    half = ufp4.Linear(64, 48, dtype=torch.bfloat16)
    out = half(x.bfloat16())
    out.sum().backward()
    assert out.dtype == half.weight.grad.dtype == torch.bfloat16
    frozen = ufp4.Linear(64, 48).requires_grad_(False)
    frozen(x).sum().backward()
    assert frozen.weight.grad is None
    assert layer(torch.zeros(0, 64)).shape == (0, 48)


# ---------------------------------------------------------------------------------------------------------------
# convert


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.again = self.inner[0]                                              # one module in two places
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embed.weight


def test_convert_keeps_everything_but_the_arithmetic():
    m = Tied()
    before = {k: (v.data_ptr(), v.dtype) for k, v in m.state_dict().items()}
    assert ufp4.convert(m, "e2m1") is m
    assert {k: (v.data_ptr(), v.dtype) for k, v in m.state_dict().items()} == before
    assert all(type(x) is ufp4.Linear and x.recipe == RECIPES["e2m1"] for x in (m.a, m.b, m.again))
    assert m.again is m.inner[0] and type(m.lm_head) is nn.Linear and m.lm_head.weight is m.embed.weight
    x = torch.randn(4, 16, generator=gen())
    fresh = ufp4.Linear(16, 32, recipe="e2m1")
    fresh.load_state_dict(m.a.state_dict())
    assert torch.equal(m.a(x), fresh(x)) and not torch.equal(m.a(x), F.linear(x, m.a.weight, m.a.bias))
    ufp4.convert(m, "ufp4", skip=("inner", "lm_head"))                          # again, to another recipe
    assert m.a.recipe.name == "ufp4" and m.inner[0].recipe.name == "e2m1"
    for skip in (ufp4.SKIP, (), None):                  # a model that is one layer, no lm_head
        assert type(ufp4.convert(nn.Linear(16, 16), skip=skip)) is ufp4.Linear
    assert "recipe=ufp4" in repr(m)


def test_convert_refuses_before_changing_anything():
    m = Tied()
    for kwargs, message in (({"recipe": "fp4"}, "'fp4'.*ufp4"), ({"skip": ("head",)}, "'head'.*a, b, inner.0"),
                            ({"skip": ("a", "b", "inner", "lm_head")}, "nothing to convert"),
                            ({"recipe": "ufp4-mx"}, "'a'.*in_features = 16")):
        with pytest.raises(ValueError, match=message):
            ufp4.convert(m, **kwargs)
        assert type(m.a) is type(m.b) is nn.Linear
    with pytest.raises(ValueError, match="in_features = 20, out_features = 16"):
        ufp4.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(20, 16)))
    with pytest.raises(ValueError, match="in_features = 20"):
        ufp4.Linear(20, 16)
    hooked = nn.Sequential(nn.Linear(16, 16))
    hooked[0].forward = lambda x: x
    with pytest.raises(ValueError, match="'0' has had its forward replaced"):
        ufp4.convert(hooked)


def test_convert_knows_a_module_by_each_of_its_names():
    m = nn.Module()
    m.proj = m.lm_head = nn.Linear(16, 16)
    m.fc = nn.Linear(16, 16)
    ufp4.convert(m)
    assert type(m.lm_head) is nn.Linear and type(m.fc) is ufp4.Linear


def test_convert_warns_of_the_fast_path_around_its_layers():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 8, 32, generator=gen())
    with torch.no_grad():
        before = layer(x)
        with pytest.warns(UserWarning, match="set_fastpath_enabled"):
            ufp4.convert(layer)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert not torch.allclose(layer(x), before, atol=1e-3)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_stand_ins_without_data_and_a_second_derivative():
    assert ufp4.Linear(256, 256, device="meta")(torch.empty(64, 256, device="meta")).shape == (64, 256)
    with torch._subclasses.FakeTensorMode():
        assert ufp4.Linear(256, 256)(torch.empty(64, 256)).shape == (64, 256)
    x = torch.randn(16, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(ufp4.Linear(16, 16)(x.tanh()).square().sum() + x.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@compiling()
def test_a_layer_compiles_without_graph_breaks():
    """With Hadamard matrices of 4: those of 16 take long to trace."""
    x = torch.randn(20, 64, generator=gen(), requires_grad=True)
    for name in ("ufp4", "nvfp4"):                      # the second in the same code, with other numbers
        recipe = dataclasses.replace(RECIPES[name], sr=(), rht_block=4)         # its noise is another stream there
        layer = ufp4.Linear(64, 48, bias=name == "ufp4", recipe=recipe)
        y, z = layer(x), torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert close(z, y, 64) and close(*(torch.autograd.grad(v.square().sum(), x)[0] for v in (z, y)), 64)
    # There is noise on dY, but it is ones, which are on the grid: dX is without any.
    layer = ufp4.Linear(64, 32, recipe=dataclasses.replace(RECIPES["e2m1"], rht_block=4))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (20, 24, 25):                         # the second size makes their number a variable of the graph
        x = torch.randn(tokens, 64, generator=gen(), requires_grad=True)
        assert close(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, layer)), 32)


def python(code, **env):
    return subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True,
                          env={**os.environ, **env})


def test_import_is_light():
    done = python("import ufp4, sys; print(*sys.modules)")
    assert not {"triton", "matplotlib", "torch._dynamo", "torch._inductor"} & set(done.stdout.split())
    assert "ufp4" in done.stdout.split()


def test_without_a_compiler_it_says_so_once_and_gives_the_same_bits(tmp_path):
    done = python("import ufp4, torch; x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0));"
                  "a = ufp4.fake_quantize(x); b = ufp4.fake_quantize(x, 'e2m1'); print(a.double().sum().item())",
                  CXX="no-such-compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and done.stderr.count("install a C++ compiler") == 1
    assert float(done.stdout) == ufp4.fake_quantize(torch.randn(256, 256, generator=gen())).double().sum().item()


# ---------------------------------------------------------------------------------------------------------------
# train.py

TINY = ["--layers", "2", "--dim", "32", "--heads", "2", "--hidden", "32", "--seq-len", "32", "--batch-size", "2",
        "--steps", "12", "--warmup", "2", "--eval-interval", "4", "--eval-windows", "3", "--save-interval", "2",
        "--log-interval", "1", "--sample", "8", "--device", "cpu"]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "little.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(400)))
    return path


@pytest.fixture
def settings(text, tmp_path, monkeypatch):
    """Settings of a tiny run: settings("--recipe", ...)."""
    monkeypatch.setattr(train, "prepare", lambda name: prepare.prepare(name, root=tmp_path / "data"))
    return lambda *flags: train.parse_args([*TINY, "--data", str(text), "--out", str(tmp_path / "out/run"), *flags])


def weights(out, which=-1):
    """The model of one of a run's checkpoints, {name: whole tensor}, whatever number of ranks wrote it."""
    path = train.checkpoints(Path(out))[which]
    dcp_to_torch_save(path, Path(out) / "whole.pt")
    return torch.load(Path(out) / "whole.pt", weights_only=True)["model"]


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("flags", [["--recipe", "ufp4"], ["--recipe", "bf16"],
                                   ["--recipe", "nvfp4", "--keep-bf16", "1"],
                                   ["--recipe", "ufp4", "--experts", "4", "--top-k", "2"]])
def test_a_run_learns_logs_and_repeats(settings, flags, capsys):
    s = settings(*flags, "--steps", "30", "--lr", "1e-2", "--min-lr", "0.5", "--eval-interval", "10",
                 "--save-interval", "10")
    first = train.train(s)
    lines = read_log(s.out)
    assert lines[0]["settings"]["recipe"] == s.recipe and [r["step"] for r in lines[1:]] == list(range(1, 31))
    assert {"step", "train_loss", "val_loss", "lr", "tokens_per_s"} <= lines[1].keys()
    assert lines[1]["train_loss"] == pytest.approx(math.log(256), abs=0.1)      # starts at the uniform distribution
    assert first == lines[-1]["val_loss"] < 3.0 and lines[-2]["val_loss"] is None
    assert len(train.checkpoints(Path(s.out))) == 2
    before = weights(s.out)
    assert train.train(s) == first and same_weights(weights(s.out), before)     # the same seed, the same run
    assert "--- sample" in capsys.readouterr().out and (Path(s.out) / "previous-1/log.jsonl").exists()
    if s.experts:
        assert all(1 <= r["max_load"] <= 4 for r in lines[1:])


def test_overrides_reach_the_recipe_and_the_blocks(settings, monkeypatch):
    s = settings("--recipe", "e2m1", "--rht", "fprop,wgrad", "--sr", "none", "--scale", "e4m3", "--keep-bf16", "1",
                 "--seed", "5")
    recipe = train.make_recipe(s)
    assert recipe == dataclasses.replace(RECIPES["e2m1"], rht=("fprop", "wgrad"), sr=(), scale="e4m3", sign_seed=5)
    model = train.GPT(s, recipe, 256)
    names = [[m.recipe.name for m in b.modules() if isinstance(m, ufp4.Linear)] for b in model.blocks]
    assert names == [["e2m1"] * 4, ["bf16"] * 4] and type(model.lm_head) is nn.Linear
    s.experts, s.top_k = 4, 2
    assert [b.mlp.recipe.name for b in train.GPT(s, recipe, 256).blocks] == ["e2m1", "bf16"]
    with pytest.raises(ValueError, match="no effect on recipe bf16"):
        train.make_recipe(settings("--recipe", "bf16", "--sr", "none"))
    monkeypatch.setitem(RECIPES, "mine", ufp4.Recipe("mine", sign_seed=2))
    assert train.make_recipe(settings("--recipe", "mine", "--seed", "5")).sign_seed == 7


def test_learning_rate_warms_up_and_decays(settings):
    s = settings("--steps", "100", "--warmup", "10", "--lr", "1", "--min-lr", "0.2")
    lrs = [train.learning_rate(i, s) for i in range(100)]
    assert lrs[0] == 0.1 and lrs[9] == lrs[10] == 1.0 and lrs[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in zip(lrs[10:], lrs[11:]))
    assert train.parse_args(["--model", "nano", "--device", "cpu", "--steps", "20"]).warmup == 4    # a fifth at most


def test_what_the_optimizer_gets(settings, monkeypatch, tmp_path):
    """Each step its learning rate, betas, decay for matrices alone, a clipped gradient and a noise seed of its own."""
    steps, real = [], torch.optim.AdamW.step

    def step(self, *args):
        norm = math.sqrt(sum(p.grad.square().sum().item() for g in self.param_groups for p in g["params"]))
        steps.append(([g["lr"] for g in self.param_groups], norm, torch.initial_seed()))
        for g in self.param_groups:
            assert g["betas"] == (0.8, 0.9)
            assert all(g["weight_decay"] == (0.3 if p.dim() > 1 else 0.0) for p in g["params"])
        return real(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    logged = []
    for seed, clip in ("0", "0"), ("1", "0.01"):        # 0: no clipping
        s = settings("--recipe", "bf16", "--experts", "4", "--top-k", "2", "--balance-rate", "0.5", "--clip", clip,
                     "--beta1", "0.8", "--beta2", "0.9", "--weight-decay", "0.3", "--seed", seed)
        train.train(s)
        logged += [r["grad_norm"] for r in read_log(s.out)[1:]]
    lrs = [train.learning_rate(i, s) for i in range(12)]
    assert [pair for pair, *_ in steps] == [[lr] * 2 for lr in lrs] * 2
    assert [r["lr"] for r in read_log(s.out)[1:]] == lrs
    assert [norm for _, norm, _ in steps] == pytest.approx(logged[:12] + 12 * [0.01], rel=1e-5) and min(logged) > 0.1
    assert len({seed for *_, seed in steps}) == 24
    model = weights(s.out)
    loads, biases = ([v for k, v in model.items() if k.endswith(end)] for end in ("mlp.load", "mlp.bias"))
    assert len(loads) == len(biases) == 2 and not any(v.any() for v in loads)       # counted, and used
    assert all(b.abs().max() >= 0.5 for b in biases)


def test_validation_is_the_mean_of_evenly_spaced_windows(settings, monkeypatch):
    """Of the text's last tenth, in the training's dtype, weighted by tokens; it leaves no trace in the model."""
    s = settings("--recipe", "bf16", "--experts", "4", "--top-k", "2")
    text, read, real = Path(s.data).read_bytes(), [], train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda model, tokens, s: read.append(tokens) or real(model, tokens, s))
    train.train(s)
    assert {bytes(tokens.astype(np.uint8)) for tokens in read} == {text[len(text) * 9 // 10:]}
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    model, ids = train.GPT(s, RECIPES["bf16"], 256), torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        for p in model.parameters():
            p *= 3                                      # so that windows differ
        expected = [model(ids[None, i:i + 32], ids[None, i + 1:i + 33]).item() for i in (0, 967 // 2, 967)]
    for block in model.blocks:
        block.mlp.load.zero_()
    assert real(model, tokens, s) == pytest.approx(sum(expected) / 3, rel=1e-5)      # 3 windows, 2 a batch
    assert model.training and not any(block.mlp.load.any() for block in model.blocks)
    seen, s.dtype = set(), "bfloat16"
    model.lm_head.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    monkeypatch.setattr(train.MoE, "forward", lambda self, x: x)
    real(model, tokens, s)
    assert seen == {torch.bfloat16}


def test_attention_is_causal_and_rope_is_relative(settings):
    model = train.GPT(settings(), RECIPES["bf16"], 256).eval()
    a = torch.randint(0, 256, (1, 32))
    b = a.clone()
    b[0, 20:] = 0
    assert torch.equal(model(a)[0, :20], model(b)[0, :20]) and not torch.equal(model(a)[0, 20:], model(b)[0, 20:])
    q, k = torch.randn(1, 1, 1, 16).expand(1, 1, 40, 16), torch.randn(1, 1, 1, 16).expand(1, 1, 40, 16)
    scores = (train.rope(q) @ train.rope(k).mT)[0, 0]
    for d in (0, 3, 11):                                # the score depends on the distance alone
        diagonal = scores.diagonal(-d)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert not torch.allclose(scores[5, 0], scores[0, 0], atol=1e-2)
    block = model.blocks[0]
    for last in (block.attn.proj, block.mlp.fc2):
        nn.init.zeros_(last.weight)
    x = torch.randn(1, 8, 32)
    assert torch.equal(block(x), x)                     # the residual stream passes by both


def test_initial_weights_and_samples(settings, monkeypatch):
    """GPT-2's deviations; tokens drawn at a temperature, from a context that slides."""
    model = train.GPT(settings("--dim", "64", "--hidden", "64", "--experts", "4", "--top-k", "2"), RECIPES["bf16"], 256)
    model.init_weights()
    for name, p in model.named_parameters():
        last = name.endswith(("proj.weight", "fc2", "fc2.weight"))              # 2 layers, 2 of these in each
        assert p.dim() == 1 and (p == 1).all() or p.std().item() == pytest.approx(0.02 / (2 if last else 1), rel=0.15)
    read, logits = [], torch.tensor([0.2, 0.8]).log()
    monkeypatch.setattr(train.GPT, "forward",
                        lambda self, tokens: read.append(tokens) or logits.expand(1, len(tokens[0]), 2))
    tokens = model.generate(torch.zeros(1, 5, dtype=torch.int64), 2000, 8, gen(), temperature=0.5)
    assert all(torch.equal(r, tokens[:, max(0, i - 3):5 + i]) for i, r in enumerate(read)) and tokens.shape == (1, 2005)
    assert tokens[0, 5:].double().mean() == pytest.approx(0.64 / 0.68, abs=4 * (0.64 * 0.04) ** 0.5 / 0.68 / 2000**0.5)


def random_moe(settings, experts, std):
    moe = train.MoE(settings("--experts", str(experts), "--top-k", "2"), RECIPES["bf16"])
    for p in moe.parameters():
        nn.init.normal_(p, std=std)
    return moe


def test_moe_is_the_weighted_sum_of_chosen_experts(settings):
    """Against a loop over tokens; and the balancing moves each bias against its load."""
    moe = random_moe(settings, 6, std=0.3)
    moe.bias += torch.randn(6) * 0.1
    x = torch.randn(2, 7, 32)
    expected = moe.shared(x)
    loads = torch.zeros(6)
    for b in range(2):
        for t in range(7):
            scores = torch.sigmoid(moe.router.weight @ x[b, t])
            chosen = sorted(range(6), key=lambda e: -(scores + moe.bias)[e].item())[:2]
            for e in chosen:
                gate, up = (moe.fc1[e] @ x[b, t]).chunk(2)
                expected[b, t] += scores[e] / scores[chosen].sum() * (moe.fc2[e] @ (F.silu(gate) * up))
                loads[e] += 1
    assert torch.allclose(moe(x), expected, atol=1e-5) and torch.equal(moe.load, loads)
    bias = moe.bias.clone()
    assert moe.balance(1e-3).item() == pytest.approx(loads.max().item() / loads.mean().item())
    assert torch.allclose(moe.bias - bias, 1e-3 * torch.sign(loads.mean() - loads), atol=1e-7) and (moe.load == 0).all()


def test_balancing_evens_out_a_lopsided_router(settings):
    moe = random_moe(settings, 8, std=0.1)
    x = torch.randn(4, 64, 32) + 1                      # a common direction: some experts win everywhere
    ratios = []
    for _ in range(300):
        moe(x)
        ratios.append(moe.balance(rate=1e-2).item())
    assert ratios[0] > 2.0 and max(ratios[-10:]) < 1.3


def test_batches_and_windows(settings):
    s = settings("--batch-size", "4")
    tokens = np.arange(1000, dtype=np.uint16)
    x, y = train.get_batch([tokens], s, 3)
    assert torch.equal(y, x + 1) and x.shape == (4, 32)                         # targets are the next tokens
    assert torch.equal(x, train.get_batch([tokens], s, 3)[0]) and not torch.equal(x, train.get_batch([tokens], s, 4)[0])
    for s.data in (s.data, "fineweb"):
        one, other = (train.get_batch([tokens], settings("--batch-size", "4", "--data", s.data, "--seed", seed), 3)[0]
                      for seed in "01")
        assert not torch.equal(one, other)


def run_train(flags, text, tmp_path, preamble=""):
    """train.py in a process of its own, its data folder under tmp_path."""
    code = (f"import train\nfrom data import prepare\n{preamble}\n"
            f"train.prepare = lambda name: prepare.prepare(name, root={str(tmp_path / 'data')!r})\n"
            f"train.train(train.parse_args({[*TINY, '--data', str(text), *flags]!r}))")
    return subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)


KILL_IN_SAVE = """
import os
def save(state, checkpoint_id, n=[0], real=train.dcp.save, **kwargs):
    n[0] += 1
    if n[0] == {saves} and train.RANK == train.WORLD - 1:
        (checkpoint_id / "__0_0.distcp").parent.mkdir(exist_ok=True)
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        os.kill(os.getpid(), 9)
    real(state, checkpoint_id=checkpoint_id, **kwargs)
train.dcp.save = save
"""
KILL_IN_STEP = """
import os
real = train.learning_rate
train.learning_rate = lambda step, s: real(step, s) if step < 3 or train.RANK < train.WORLD - 1 \
    else os.kill(os.getpid(), 9)
"""
LATE = """
import time
def late(s, real=train.train):
    try:
        real(s)
    finally:
        time.sleep(2)       # torchrun's SIGTERM is here before what main() says
train.train = late
"""


def test_killed_and_resumed_ends_with_the_same_weights(settings, text, tmp_path):
    """kill -9 between two saves, in the middle of a save, and in the first save: each resumed to the end."""
    out, moe = str(tmp_path / "out/killed"), ["--recipe", "ufp4", "--experts", "4", "--top-k", "2"]
    whole, flags = settings(*moe, "--out", str(tmp_path / "out/whole")), [*moe, "--out", out]
    train.train(whole)
    for preamble, resume, left in ((KILL_IN_SAVE.format(saves=1), [], 0), (KILL_IN_SAVE.format(saves=2), [], 1),
                                   (KILL_IN_STEP, ["--resume"], 1), ("", ["--resume"], 2)):
        process = run_train(flags + resume, text, tmp_path, preamble)
        printed = process.communicate(timeout=120)[0]
        assert process.returncode == (-signal.SIGKILL if preamble else 0), printed
        assert len(train.checkpoints(Path(out))) == left
    assert same_weights(weights(out), weights(whole.out))
    timeless = [[{**r, "tokens_per_s": 0} for r in read_log(o)[1:]] for o in (out, whole.out)]
    assert timeless[0] == timeless[1]


def test_ctrl_c_saves_and_says_how_to_go_on(settings, text, tmp_path):
    out = tmp_path / "out/stopped"
    process = run_train(["--out", str(out), "--steps", "100000", "--save-interval", "100000"], text, tmp_path)
    while not (out / "log.jsonl").exists() or len((out / "log.jsonl").read_text().splitlines()) < 4:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "--resume" in printed
    assert train.checkpoints(out) and json.loads((out / "log.jsonl").read_text().splitlines()[-1])


def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_there(settings):
    s = settings()
    train.train(s)
    older, newer = train.checkpoints(Path(s.out))
    for name in ("__0_0.distcp", ".metadata", "settings.json"):
        whole = (newer / name).read_bytes()
        for damage in (whole[:len(whole) // 2], whole[:-1], b"", b"not a checkpoint", None):
            (newer / name).unlink()
            if damage is not None:
                (newer / name).write_bytes(damage)
            with pytest.raises(ValueError, match=f"{newer.name} is damaged.*goes on from .*{older.name}"):
                train.train(settings("--resume"))
            (newer / name).write_bytes(whole)
    shutil.rmtree(newer)
    shutil.copytree(older, older.with_name("ckpt-best"))                        # a user's own: neither used nor removed
    train.train(settings("--resume"))
    assert [p.name for p in train.checkpoints(Path(s.out))] == [older.name, newer.name]
    assert older.with_name("ckpt-best").exists()


def test_resume_refuses_what_it_cant_continue(settings, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no checkpoint in"):
        train.train(settings("--resume"))
    train.train(settings())
    for flags, message in ((["--dim", "64"], "dim is 64 now and was 32"), (["--recipe", "e2m1"], "recipe is 'e2m1'"),
                           (["--seed", "9"], "seed is 9"), (["--lr", "0.5"], "lr is 0.5"),
                           (["--steps", "9"], "--steps is 9 and its last step 12")):
        with pytest.raises(ValueError, match=message):
            train.train(settings("--resume", *flags))
    s = settings("--resume")
    monkeypatch.setitem(RECIPES, s.recipe, dataclasses.replace(RECIPES[s.recipe], rht=()))      # a row, edited
    with pytest.raises(ValueError, match="other settings: recipe_row is .* now and was "):
        train.train(s)


def test_branch_starts_another_recipe_from_a_bf16_checkpoint(settings, tmp_path):
    s = settings("--recipe", "bf16", "--out", str(tmp_path / "out/bf16"))
    train.train(s)
    start = train.checkpoints(Path(s.out))[0]           # two steps before the end
    b = settings("--recipe", "e2m1", "--out", str(tmp_path / "out/branch"), "--branch", str(start))
    train.train(b)
    assert [r["step"] for r in read_log(b.out)[1:]] == [11, 12] and not same_weights(weights(b.out), weights(s.out))
    same = settings("--recipe", "bf16", "--out", str(tmp_path / "out/same"), "--branch", str(start))
    train.train(same)
    assert same_weights(weights(same.out), weights(s.out))
    with pytest.raises(ValueError, match="there is no checkpoint .*nothing"):
        train.train(settings("--branch", str(tmp_path / "nothing")))
    flags = ["--recipe", "e2m1", "--sr", "all", "--out", str(tmp_path / "out/noisy"), "--branch", str(start)]
    loss = train.train(settings(*flags))
    assert train.train(settings(*flags, "--resume")) == loss                    # the noise of fprop, too, is the same


def test_loss_error_is_relative_to_the_bf16_run_beside(settings, tmp_path, capsys):
    bf16 = train.train(settings("--recipe", "bf16", "--out", str(tmp_path / "out/b")))
    train.train(settings("--recipe", "bf16", "--out", str(tmp_path / "out/other-seed"), "--seed", "1"))
    (tmp_path / "out/another").mkdir()
    (tmp_path / "out/another/log.jsonl").write_text("[1, 2]\n")                 # another program's
    (tmp_path / "out/folder/log.jsonl").mkdir(parents=True)
    train.train(settings("--recipe", "e2m1", "--out", str(tmp_path / "z/start")))
    healed = ["--recipe", "bf16", "--branch", str(train.checkpoints(tmp_path / "z/start")[0])]
    train.train(settings(*healed, "--out", str(tmp_path / "out/a")))            # not all of it in BF16
    capsys.readouterr()
    loss = train.train(settings("--recipe", "e2m1", "--out", str(tmp_path / "out/e")))
    assert f"loss error {(loss - bf16) / bf16:+.2%}" in capsys.readouterr().out
    train.train(settings("--recipe", "e2m1", "--out", str(tmp_path / "out/e2"), "--seed", "2"))
    assert "no finished bf16 run" in capsys.readouterr().out
    mine = read_log(tmp_path / "out/e")[0]["settings"]
    assert train.bf16_loss(tmp_path / "out/e", {**mine, "lr": 1.0}) is None
    train.set_aside(tmp_path / "out/b")                 # as another bf16 run in its place would
    assert train.bf16_loss(tmp_path / "out/e", mine) == bf16
    log = tmp_path / "out/b/previous-1/log.jsonl"
    log.write_text("".join(log.open().readlines()[:9]))                         # to a validation, but not to the end
    assert train.bf16_loss(tmp_path / "out/e", mine) is None


def test_a_changed_text_is_another_run(settings, text, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text(text.read_text())
    train.train(settings("--data", str(mine)))
    mine.write_text(text.read_text().upper())
    with pytest.raises(ValueError, match="data is 'mine-.*' now and was 'mine-"):
        train.train(settings("--data", str(mine), "--resume"))


def test_ablations_have_a_place_of_their_own(settings):
    def out(*flags):
        return train.parse_args(["--device", "cpu", "--model", "nano", *flags]).out
    assert out() == "out/nano-ufp4-s0" and out("--recipe", "e2m1", "--seed", "3") == "out/nano-e2m1-s3"
    assert out("--rht", "fprop,wgrad", "--sr", "none") == "out/nano-ufp4-rht.fprop+wgrad-sr.none-s0"
    assert out("--keep-bf16", "2", "--fmt", "e2m1") == "out/nano-ufp4-fmt.e2m1-keep_bf16.2-s0"


def test_weights_that_are_not_finite_are_not_saved(settings):
    s = settings("--lr", "1e38", "--save-interval", "1", "--warmup", "0", "--eval-interval", "100")
    with pytest.raises(train.Diverged):
        train.train(s)
    saved = range(len(train.checkpoints(Path(s.out))))
    assert all(v.isfinite().all() for i in saved for v in weights(s.out, i).values())


def test_a_loss_that_is_not_finite_stops_the_run(settings, monkeypatch):
    s, real = settings(), train.GPT.forward

    def forward(self, tokens, targets=None, calls=[0]):
        calls[0] += self.training
        return real(self, tokens, targets) * (NAN if calls[0] == 8 and targets is not None else 1)

    monkeypatch.setattr(train.GPT, "forward", forward)
    with pytest.raises(train.Diverged, match="step 8: the loss is nan.*ckpt-0000006"):
        train.train(s)
    assert [r["step"] for r in read_log(s.out)[1:]] == list(range(1, 8))
    assert all(v.isfinite().all() for v in weights(s.out).values())


def test_bad_input_is_one_clear_sentence(settings, tmp_path, monkeypatch, capsys):
    empty, short, blocked = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "file"
    empty.write_text("")
    short.write_text("too short")
    blocked.write_text("")
    for flags, message in ((["--data", str(empty)], "empty.txt holds no text"),
                           (["--data", str(short)], "fewer than one context"),
                           (["--data", "nothing.txt"], "no data set or file is called 'nothing.txt'"),
                           (["--out", str(blocked / "run")], "can't write to --out .*file/run: Not a directory"),
                           (["--out", str(blocked)], "can't write to --out .*: File exists"),
                           (["--dim", "40", "--heads", "2"], "in_features = 40"),
                           (["--fmt", "e9m9"], "unknown format 'e9m9'")):
        with pytest.raises((ValueError, OSError), match=message):
            train.train(settings(*flags))
    monkeypatch.setattr(ufp4, "can_compile", lambda device: False)
    for flags, message in ((["--recipe", "fp4"], "invalid choice: 'fp4'"),
                           (["--model", "huge"], "invalid choice: 'huge'"),
                           (["--rht", "forward"], "fprop,dgrad,wgrad"), (["--steps", "0"], "at least 1"),
                           (["--heads", "3"], "--dim 32 must split"),
                           (["--experts", "4", "--top-k", "5"], "--top-k must be from 1 to --experts 4, got 5"),
                           (["--top-k", "2"], "--top-k must be 0 without --experts, got 2"),
                           (["--warmup", "99"], "--warmup 99 is more"),
                           (["--lr", "nan"], "finite number"), (["--clip", "-1"], "finite number, at least 0"),
                           (["--device", "warp"], "--device warp can't be used"),
                           (["--device", "hpu"], "--device hpu can't be used"),
                           (["--keep-bf16", "9"], "more than --layers"), (["--gpus", "2"], "--gpus is for --dry-run"),
                           (["--grad-accum", "3"], "must be a multiple of 1 processes x --grad-accum 3"),
                           (["--compile", "--experts", "4", "--top-k", "2"], "needs --dtype bfloat16"),
                           (["--compile"], "torch.compile does not work here")):
        with pytest.raises(SystemExit) as stopped:
            settings(*flags)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    done = subprocess.run([sys.executable, "train.py", "--data", "nothing.txt", "--out", str(tmp_path / "o")],
                          cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("train.py: no data set") and "Traceback" not in done.stderr
    with pytest.raises(ValueError, match="long.bin can't hold 2147483648 tokens"):
        prepare.write_tokens(tmp_path / "long.bin", range(2**31))


def test_a_sample_is_printed_whatever_characters_the_terminal_has(settings, monkeypatch):
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        train.train(settings("--sample", "99"))         # of bytes after 12 steps: half of them are not ASCII
        terminal.flush()
        assert b"?" in terminal.buffer.getvalue().partition(b"--- sample")[2]


# ---------------------------------------------------------------------------------------------------------------
# train.py on several processes, and what goes with it

ALL = ["--batch-size", "4", "--steps", "20", "--clip", "0"]                     # no clipping: see below


def run_ranks(n, flags, text, tmp_path, preamble=""):
    """train.py on n CPU processes -> (exit code, stdout, stderr, seconds)."""
    script = tmp_path / "ranks.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\n"
                      f"import train\nfrom data import prepare\n{preamble}\n"
                      f"train.prepare = lambda name: prepare.prepare(name, root={str(tmp_path / 'data')!r})\n"
                      f"train.main({[*TINY, '--data', str(text), *flags]!r})\n")
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n),
                           str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


@pytest.mark.parametrize("flags", [["--recipe", "ufp4", "--sr", "none", "--experts", "3", "--top-k", "2"],
                                   ["--recipe", "ufp4-e4m3", "--sr", "none", "--remat"]])
def test_two_processes_are_one_process_with_two_parts(settings, text, tmp_path, flags):
    """Bit for bit over 20 steps, 3 experts on 2 ranks included: the halves of a batch are multiplied and summed alike,
    whoever computes them. (Only the gradient's norm is summed in another order, so clipping is off.)"""
    code, printed, errors, _ = run_ranks(2, [*ALL, *flags, "--out", str(tmp_path / "out/two")], text, tmp_path)
    assert code == 0, errors
    assert printed.count("validation loss") == 6        # 5 validations and the report, once each
    one = settings(*ALL, *flags, "--grad-accum", "2", "--out", str(tmp_path / "out/one"))
    train.train(one)
    assert same_weights(weights(tmp_path / "out/two"), weights(one.out))
    for a, b in zip(read_log(tmp_path / "out/two")[1:], read_log(one.out)[1:], strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-6) and a.get("max_load") == b.get("max_load")
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)


def test_parts_of_a_batch_are_the_batch(settings, tmp_path):
    """Two parts against one: float32 sums in another order, 20 steps, clipped alike."""
    runs = []
    for parts in ("1", "2"):
        s = settings("--recipe", "bf16", "--batch-size", "4", "--steps", "20", "--grad-accum", parts,
                     "--out", str(tmp_path / "out" / parts))
        train.train(s)
        runs.append(read_log(s.out)[1:])
    for a, b in zip(*runs, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    assert runs[0][0]["grad_norm"] == pytest.approx(runs[1][0]["grad_norm"], rel=1e-6) and runs[0][0]["grad_norm"] > 1


def test_ranks_share_the_batch_out_and_draw_their_own_noise(settings, monkeypatch):
    s = settings("--batch-size", "12")
    tokens = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint16)
    whole = train.get_batch([tokens], s, 3)[0]
    monkeypatch.setattr(train, "WORLD", 3)
    s.grad_accum, rows, seeds = 2, [], set()
    for part in range(2):
        for rank in range(3):
            monkeypatch.setattr(train, "RANK", rank)
            rows.append(train.get_batch([tokens], s, 3, part)[0])
            seeds |= {train.noise_seed(s, step) for step in range(100)}
    assert torch.equal(torch.cat(rows), whole) and len(seeds) == 300


def test_killed_ranks_stop_the_others_and_resume_on_any_number(settings, text, tmp_path):
    """kill -9 of one rank, in a step and in a save: the others say so within a minute, nothing is left but whole
    checkpoints, and the run goes on: with stochastic rounding bit for bit on 2 processes, and also on 1 and on 3."""
    flags = ["--recipe", "ufp4", "--batch-size", "6", "--experts", "3", "--top-k", "2"]
    assert run_ranks(2, [*flags, "--out", str(tmp_path / "out/whole")], text, tmp_path)[0] == 0
    out = tmp_path / "out/killed"
    for preamble, resume, left in ((KILL_IN_SAVE.format(saves=2), [], [2]), (KILL_IN_STEP + LATE, ["--resume"], [2])):
        code, _, errors, seconds = run_ranks(2, [*flags, *resume, "--out", str(out)], text, tmp_path, preamble)
        assert code and seconds < 60 and "train.py: rank 0 stops, for another has stopped" in errors, errors
        assert train.checkpoints(out) == [out / f"ckpt-{i:07d}" for i in left]
    for name in ("one", "three"):
        shutil.copytree(out, tmp_path / "out" / name)
    assert run_ranks(2, [*flags, "--resume", "--out", str(out)], text, tmp_path)[0] == 0
    assert same_weights(weights(out), weights(tmp_path / "out/whole"))
    train.train(settings(*flags, "--resume", "--out", str(tmp_path / "out/one")))
    assert run_ranks(3, [*flags, "--resume", "--out", str(tmp_path / "out/three")], text, tmp_path)[0] == 0
    for name in ("one", "three"):                       # other noise from step 3 on, and else the same run
        assert read_log(tmp_path / "out" / name)[1:3] == read_log(out)[1:3]
        loss = read_log(tmp_path / "out" / name)[3]["train_loss"]
        assert loss == pytest.approx(read_log(out)[3]["train_loss"], rel=1e-2)


def test_bad_input_on_ranks_is_one_sentence_of_rank_0(settings, text, tmp_path):
    train.train(settings())
    for flags, message in ((["--batch-size", "3"], "--batch-size 3 must be a multiple of 2 processes"),
                           (["--data", "nothing.txt"], "no data set or file is called 'nothing.txt'"),
                           (["--resume", "--dim", "64"], "a run with other settings: dim is 64 now and was 32")):
        code, _, errors, _ = run_ranks(2, ["--out", str(tmp_path / "out/run"), *flags], text, tmp_path)
        said = errors.count("train.py: ") + errors.count("error: --")
        assert code and errors.count(message) == said == 1 and "train.py\", line" not in errors, errors
    with http.server.HTTPServer(("127.0.0.1", 0), None) as taken:               # somebody else has the port
        env = dict(os.environ, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.server_port))
        done = subprocess.run([sys.executable, "train.py", *TINY], cwd=HERE, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "rank 0 of 2 can't join the others at 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_rematerialization_draws_the_same_noise(settings, tmp_path):
    """Noise in the forward pass (--sr all) and in the backward: the same losses and weights, bit for bit; also where
    quantized_once keeps weights for the second part."""
    flags = ["--recipe", "ufp4", "--sr", "all", "--experts", "4", "--top-k", "2", "--grad-accum", "2", "--steps", "4"]
    plain, remat = (settings(*flags, *more, "--out", str(tmp_path / "out" / name))
                    for name, more in (("plain", []), ("remat", ["--remat"])))
    train.train(plain), train.train(remat)
    assert same_weights(weights(plain.out), weights(remat.out))
    assert [[r["train_loss"], r["max_load"]] for r in read_log(plain.out)[1:]] == \
        [[r["train_loss"], r["max_load"]] for r in read_log(remat.out)[1:]]


@pytest.mark.parametrize("model,total,active", [
    ("nano", 0.87e6, 0.87e6), ("nano-moe", 2.84e6, 0.93e6), ("small", 25.97e6, 25.97e6), ("small-moe", 151.5e6, 26.1e6),
    ("dense-1.5b", 1.5e9, 1.5e9), ("moe-7.9b", 7.9e9, 1.3e9), ("moe-124b", 124e9, 5.1e9)])
def test_presets_have_their_size_within_a_percent(model, total, active, capsys):
    """The paper's too. Against a sum by hand; and --dry-run's memory for it."""
    s = train.parse_args(["--model", model, "--device", "cpu", "--dry-run", "--gpus", "8", "--recipe", "mxfp4"])
    c, h, e, v = s.dim, s.hidden, s.experts, 50257 if s.data == "fineweb" else 256
    layer = [4 * c * c + 2 * c + 3 * c * h * (k + 1 if e else 1) + c * e for k in (e, s.top_k)]
    n, a = (s.layers * x + c + 2 * v * c for x in layer)
    assert n == pytest.approx(total, rel=0.01) and a == pytest.approx(active, rel=0.01)
    with torch.device("meta"):
        assert train.counts(train.GPT(s, RECIPES["ufp4"], v), s)[:2] == (n, a)
    train.dry_run(s)
    printed = capsys.readouterr().out
    assert f"{n / 1e9:.3f}B parameters, {a / 1e9:.3f}B active" in printed
    assert f"AdamW, float32{8 * n / 8 / 2**30:20.2f} GiB" in printed and "B200: at most" in printed
    assert "path cublas (sm_90)" in printed and "path fp4 (sm_100)" in printed


@pytest.mark.parametrize("flags", [[], ["--experts", "8", "--top-k", "3"]])
def test_flops_and_kept_bytes_are_what_torch_counts(settings, flags):
    """FLOPs of all matrix products of a step, exactly (torch's counter leaves experts' out, and so do we), and the
    bytes that autograd saves for it within 3% (we leave indices and cosines out)."""
    s = settings("--recipe", "bf16", "--dim", "128", "--hidden", "256", "--seq-len", "128", "--dtype", "bfloat16",
                 *flags)
    model = train.GPT(s, RECIPES["bf16"], 256)
    total, active, quantized, rest = train.counts(model, s)
    parameters, saved = {p.numel() for p in model.parameters()}, {}

    def keep(x):
        if not (x.numel() in parameters and x.dtype == torch.bfloat16):         # else a weight, cast
            saved[x.untyped_storage().data_ptr()] = x                           # kept alive, so that addresses differ
        return x

    tokens = torch.randint(0, 256, (5, 128))             # 640: no activation has the size of a weight
    with FlopCounterMode(display=False) as counter, train.autocast(s), \
            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(tokens, tokens).backward()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = sum(x.untyped_storage().nbytes() for address, x in saved.items() if address not in own)
    block, ends = train.activation_bytes(s, RECIPES["bf16"])
    assert kept == pytest.approx(640 * (2 * block + ends - 6 * 256), rel=0.03)  # less the gradients of the logits
    products = sum(counter.get_flop_counts()["Global"].get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    experts = 2 * 6 * s.top_k * 3 * 128 * 256
    assert quantized == 0 and 640 * (rest - experts - 2 * 6 * 128 * 128) == products


def test_fineweb_windows_come_once_an_epoch_and_ranks_never_share_one(settings):
    s = settings("--batch-size", "4")
    s.data = "fineweb"
    shards = [np.arange(n, dtype=np.uint16) + 1000 * i for i, n in enumerate((400, 97, 330))]  # 12, 3 and 10 windows
    seen = [int(tokens[i]) for step in range(25) for tokens, i in train.batch_rows(shards, s, step)]
    whole = [1000 * shard + 32 * i for shard, n in enumerate((12, 3, 10)) for i in range(n)]
    for epoch in range(4):                              # 25 windows an epoch, 4 a step: epochs end within a batch
        assert sorted(seen[25 * epoch:25 * epoch + 25]) == whole
    assert seen[:25] != seen[25:50]
    assert seen[40:44] == [int(tokens[i]) for tokens, i in train.batch_rows(shards, s, 10)]        # any step by itself
    x, y = train.get_batch(shards, s, 10)
    assert torch.equal(y, x + 1)


def test_a_shard_that_is_cut_or_of_another_vocabulary_is_named(settings, tmp_path, monkeypatch):
    folder = tmp_path / "data/fineweb"
    rng = np.random.default_rng(0)
    for name in ("val_000000", "train_000001", "train_000002"):
        prepare.write_tokens(folder / f"fineweb_{name}.bin", rng.integers(0, 50257, 2000))
    flags = ["--data", "fineweb", "--steps", "2", "--warmup", "0", "--sample", "0"]
    train.train(settings(*flags))
    bad = folder / "fineweb_train_000002.bin"
    prepare.write_tokens(bad, [1, 2, 50257, 3] * 100)
    with pytest.raises(ValueError, match="fineweb_train_000002.bin has a token 50257, beyond the vocabulary of 50257"):
        train.train(settings(*flags))
    bad.write_bytes(bad.read_bytes()[:-2])
    with pytest.raises(ValueError, match="fineweb_train_000002.bin is damaged"):
        train.train(settings(*flags))


# ---------------------------------------------------------------------------------------------------------------
# data/prepare.py


def test_python_data_is_the_standard_library_split_by_file(tmp_path):
    d = prepare.prepare("python", root=tmp_path)
    enc = prepare.encoding(d.encoding)
    assert d.vocab_size == enc.n_vocab == 256
    train_text, val_text = (enc.decode(prepare.read_tokens(p[0]).tolist()) for p in (d.train, d.val))
    source = Path(dataclasses.__file__).read_text()     # a file goes to one side whole
    assert (source in train_text) != (source in val_text)
    assert val_text[:10000] not in train_text and val_text[-10000:] not in train_text
    assert 5e6 < len(train_text) and 0.02 < len(val_text) / len(train_text) < 0.1
    stamp = d.val[0].stat().st_mtime_ns
    assert prepare.prepare("python", root=tmp_path).val[0].stat().st_mtime_ns == stamp      # made once


def test_own_text_is_bytes_and_follows_its_content(tmp_path):
    path = tmp_path / "my.txt"
    text = "naïve <|endoftext|> ☃\n" * 50
    path.write_text(text, encoding="utf-8")
    a = prepare.prepare(str(path), root=tmp_path)
    tokens = np.concatenate([prepare.read_tokens(a.train[0]), prepare.read_tokens(a.val[0])])
    assert bytes(tokens.astype(np.uint8)) == path.read_bytes()
    assert len(prepare.read_tokens(a.train[0])) == len(tokens) * 9 // 10
    assert prepare.encoding("bytes").encode(text, disallowed_special=()) == tokens.tolist()
    path.write_bytes(bytes(range(256)) * 4)             # not UTF-8: its bytes all the same
    b = prepare.prepare(str(path), root=tmp_path)
    assert b.train != a.train and prepare.read_tokens(b.train[0])[:256].tolist() == list(range(256))
    for nothing in (b"", b" \n", b"a"):
        path.write_bytes(nothing)
        with pytest.raises(ValueError, match="holds no text"):
            prepare.prepare(str(path), root=tmp_path)
    whole = a.train[0].read_bytes()
    for damaged, message in ((whole[:-2], "is damaged"), (b"\0" * 4 + whole[4:], "not a token file"), (b"", "not a")):
        a.train[0].write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            prepare.read_tokens(a.train[0])


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files`, with byte ranges unless `ranges` is off; breaks off after `limit` bytes, or in a chunk."""
    files, ranges, limit, chunked, log = {}, True, None, False, []

    def do_GET(self):
        body, start = self.files.get(self.path), 0
        self.log.append(self.headers.get("Range"))
        if body is None:
            return self.send_error(404)
        if self.ranges and (r := self.headers.get("Range")):
            start = int(r.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                return self.send_error(416)
        self.send_response(206 if start else 200)
        length = "Content-Length", str(len(body) - start)
        self.send_header(*("Transfer-Encoding", "chunked") if self.chunked else length)
        self.end_headers()
        self.wfile.write(b"9\r\nshort" if self.chunked else body[start:][:self.limit])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Server,), {"files": {}, "log": []})
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    handler.url = f"http://127.0.0.1:{httpd.server_port}"
    yield handler
    httpd.shutdown()
    httpd.server_close()


def shard(tmp_path, n):
    prepare.write_tokens(tmp_path / "shard.bin", np.arange(n) % 50257)
    return (tmp_path / "shard.bin").read_bytes()


def test_fineweb_downloads_resumes_and_checks(server, tmp_path):
    body = shard(tmp_path, 200_000)
    server.files.update({"/fineweb_val_000000.bin": body, "/fineweb_train_000001.bin": body})
    server.limit = 150_000
    with pytest.raises(OSError, match="broke off|could not download"):
        prepare.prepare("fineweb", root=tmp_path, url=server.url)
    assert not (tmp_path / "fineweb/fineweb_val_000000.bin").exists()           # never half there under its name
    part = tmp_path / "fineweb/fineweb_val_000000.bin.part"
    kept = part.stat().st_size
    assert 0 < kept <= 150_000
    server.limit = None
    d = prepare.prepare("fineweb", root=tmp_path, url=server.url)
    assert f"bytes={kept}-" in server.log and not part.exists()
    assert d.vocab_size == 50257 and d.val[0].read_bytes() == d.train[0].read_bytes() == body
    asked = len(server.log)
    prepare.prepare("fineweb", root=tmp_path, url=server.url)
    assert len(server.log) == asked                     # nothing is fetched twice


def test_a_server_without_ranges_and_a_part_too_long(server, tmp_path):
    body = shard(tmp_path, 1000)
    server.files["/a.bin"] = body
    for ranges, left_over in ((False, body[:500]), (True, body + b"more"), (True, body)):
        server.ranges = ranges
        (tmp_path / "a.bin.part").write_bytes(left_over)
        prepare.download(f"{server.url}/a.bin", tmp_path / "a.bin", prepare.read_tokens)
        assert (tmp_path / "a.bin").read_bytes() == body
        (tmp_path / "a.bin").unlink()


def test_a_wrong_or_missing_file_says_what_to_do(server, tmp_path):
    server.files["/bad.bin"] = b"<html>please log in</html>" * 100
    with pytest.raises(OSError, match="not what it should be"):
        prepare.download(f"{server.url}/bad.bin", tmp_path / "bad.bin", prepare.read_tokens)
    assert not list(tmp_path.glob("bad.bin*"))
    with pytest.raises(OSError, match="404.*--data python"):
        prepare.download(f"{server.url}/gone.bin", tmp_path / "gone.bin")
    server.files["/torn.bin"], server.chunked = b"", True
    with pytest.raises(OSError, match="could not download"):
        prepare.download(f"{server.url}/torn.bin", tmp_path / "torn.bin")
    with pytest.raises(OSError, match="--data python"):                         # nobody listens: no network
        prepare.download("http://127.0.0.1:9/x.bin", tmp_path / "x.bin")


# ---------------------------------------------------------------------------------------------------------------
# README.md


def test_b_eff_is_one_for_codes_used_alike_and_an_eighth_for_one():
    for name in ("e2m1", "e1m2"):
        levels = torch.tensor(MAGNITUDES[name]).repeat_interleave(2).float()    # each of the 8 magnitudes twice: 16
        signs = torch.tensor([1.0, -1.0]).repeat(8)
        assert bench.effective_buckets((levels * signs).expand(4, 16), name) == pytest.approx(1)
        assert bench.effective_buckets(torch.ones(4, 16), name) == pytest.approx(1 / 8)


def test_capture_finds_the_three_operands_of_every_layer(settings):
    model = train.GPT(settings(), RECIPES["bf16"], 256)
    tokens = torch.randint(0, 256, (2, 32), generator=gen())
    kept = bench.capture(model, tokens, tokens)
    for name, m in model.named_modules():
        if isinstance(m, ufp4.Linear):                  # dW = dY^T X ties all three to autograd's own result
            x, w, dy = (kept[name, operand] for operand in ("x", "w", "dy"))
            assert torch.allclose(dy.T @ x, m.weight.grad, atol=1e-6) and torch.equal(w, m.weight)


def test_output_noise_is_that_of_each_quantized_product(settings):
    s = settings("--recipe", "e2m1", "--experts", "3", "--top-k", "2")
    model, linear = train.GPT(s, train.make_recipe(s), 256), ufp4.linear
    layer, x = model.blocks[0].attn.qkv, torch.randn(3, 32)
    with bench.output_noise() as noise:
        layer(x)
    q = lambda a: ufp4.fake_quantize(a, "e2m1").double()
    y, exact = q(x) @ q(layer.weight).T, x.double() @ layer.weight.double().T       # fprop of e2m1 has no RHT
    slope = ((y * exact).sum() / exact.square().sum()).item()                   # Y = slope A + R, R orthogonal to A:
    assert noise == [(pytest.approx(slope, rel=1e-5),                           # |Y|^2 = slope^2 |A|^2 + |R|^2
                      pytest.approx((y.square().sum() / exact.square().sum()).item() - slope**2, rel=1e-3))]
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with bench.output_noise() as noise:
        y = model(tokens)
    assert torch.equal(y, model(tokens)) and ufp4.linear is linear
    assert len(noise) == 6 * s.layers and all(0 < n < 0.1 for _, n in noise)        # qkv, proj; shared and experts' fc


def test_through_depth_adds_up_what_each_block_did(settings):
    """On blocks with a closed form."""
    gpt = train.GPT(settings(), RECIPES["bf16"], 256)
    tokens, added = torch.randint(0, 256, (2, 8), generator=gen()), torch.randn(2, 8, 32, generator=gen())
    x = gpt.embed(tokens).detach().double()

    def model(*blocks, bias=0.0):
        return argparse.Namespace(embed=gpt.embed, blocks=blocks, norm=gpt.norm,
                                  lm_head=lambda x: gpt.lm_head(x) + bias)
    found = bench.through_depth(model(*3 * [lambda x: 2 * x]), model(*3 * [lambda x: 1.5 * x], bias=7), tokens)
    assert found[:3] == [(pytest.approx(0.75**n), pytest.approx(0, abs=1e-12)) for n in (1, 2, 3)]
    # the last norm undoes the factor, but for its epsilon; a constant in the logits is nothing
    assert found[3] == (pytest.approx(1, abs=1e-3), pytest.approx(0, abs=1e-6))
    slope = 1 + ((x * added).sum() / x.square().sum()).item()
    noise = ((x + added - slope * x).square().sum() / x.square().sum()).item()
    assert bench.through_depth(model(lambda x: x), model(lambda x: x + added), tokens)[0] == (
        pytest.approx(slope, rel=1e-5), pytest.approx(noise, rel=1e-4))


def run_record(model, label, seed, loss, bf16, settings=None):
    return {"model": model, "label": label, "seed": seed, "val_loss": loss, "bf16_val_loss": bf16,
            "settings": settings, "estimator": "scratch" if label == "bf16" else "branched"}


def test_scaling_fits_recover_a_power_law_and_a_slope():
    """Losses made from L = 3 C^-0.05, with a loss error that falls by 0.001 for each tenfold compute."""
    records = []
    for model in bench.SIZES["dense"]:
        s = vars(train.parse_args([*bench.MODELS[model], "--device", "cpu"]))
        c = bench.compute(s)[1]
        for seed in range(3):
            loss = 3 * c**-0.05 * (1 + 0.01 * seed)
            gap = 1.03 - 0.001 * (1 + seed) * math.log10(c)
            records += [run_record(model, "bf16", seed, loss, loss, s),
                        run_record(model, "ufp4", seed, loss * gap, loss, s),
                        run_record(model, "e2m1", seed, loss * (gap + 0.002), loss, s)]
    records += [run_record(model, label, 3, 9.0 - (label == "bf16"), 8.0, s) for label in ("bf16", "ufp4", "e2m1")]
    fit = bench.fit_scaling(records)["dense"]
    assert fit["sizes"] == 5 and fit["exponent"]["bf16"] == pytest.approx((0.05, 0), abs=1e-9)
    for label in ("ufp4", "e2m1"):                      # slopes -0.001, -0.002, -0.003; t(2, 0.975) = 4.303
        assert fit["gap"][label] == pytest.approx((-0.002, 4.303 * 0.001 / math.sqrt(3)), abs=1e-9)
    assert fit["difference"] == pytest.approx((-0.002, 0), abs=1e-9)            # without seed 3, which has one size
    records[-4]["val_loss"] = None                      # seed 2 diverged at one size, with e2m1: no line through it
    assert records[-4]["label"] == "e2m1" and records[-4]["seed"] == 2
    fit = bench.fit_scaling(records)["dense"]
    assert fit["gap"]["ufp4"] == pytest.approx((-0.0015, 12.71 * 0.0005), abs=1e-9)
    largest = list(bench.SIZES["dense"])[-1]            # stopped before a recipe's last size
    fit = bench.fit_scaling([r for r in records if (r["model"], r["label"]) != (largest, "e2m1")])["dense"]
    assert fit["gap"].keys() == {"ufp4"} and fit["difference"] is None
    s = train.parse_args([*bench.MODELS["moe-32"], "--device", "cpu"])          # by hand: 3 of 16 experts a token
    active = 4 * 32**2 + 4 * 3 * 32 * 32 + 16 * 32 + 2 * 32 + 32 + 2 * 256 * 32
    total = active + 13 * 3 * 32 * 32
    assert bench.compute(vars(s)) == (total, 6 * active * 800 * 8 * 256)


def bench_args(tmp_path, *estimators, train=()):
    return argparse.Namespace(models=["nano"], seeds=1, estimators=estimators, jobs=1, runs=tmp_path / "runs",
                              rows=None, quick=False, train=list(train))


def test_runs_are_repeated_where_their_weights_are_needed(tmp_path, monkeypatch):
    """And a run is compared with the BF16 run that it branched from, also after that was repeated with another loss."""
    ran, total = [], itertools.count(1)

    def run(job, args):
        ran.append((job["label"], job["estimator"]))
        loss = float(next(total))
        for path in bench.weights(args, job):
            path.mkdir(parents=True, exist_ok=True)
        (bench.folder(args, job) / "log.jsonl").write_text(json.dumps({"val_loss": loss}))
        return {"val_loss": loss}

    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "train_run", run)
    monkeypatch.setattr(bench, "forward_run", lambda job, args: (ran.append((job["label"], job["estimator"])),
                                                                 {"val_loss": 1.0})[1])

    def names(rows, *estimators, name="loss"):
        ran.clear()
        records = bench.train_all(bench_args(tmp_path, *estimators), bench.BASE_ROWS[:rows], name)
        assert len({(r["label"], r["estimator"]) for r in records}) == len(records)
        return ran

    def losses(name):
        return {r["label"]: (r["val_loss"], r["bf16_val_loss"])
                for r in json.loads((tmp_path / f"{name}.json").read_text())["runs"]}

    assert names(2, "branched") == [("bf16", "scratch"), ("ufp4", "branched")]
    assert names(2, "branched") == []
    shutil.copy(tmp_path / "loss.json", tmp_path / "ablate.json")
    shutil.rmtree(tmp_path / "runs")                    # as in a fresh clone: records, but no weights
    assert names(2, "branched") == []
    assert names(3, "branched") == [("bf16", "scratch"), ("e2m1", "branched")]
    assert losses("loss") == {"bf16": (3, 3), "ufp4": (2, 1), "e2m1": (4, 3)}
    assert names(3, "branched", name="ablate") == [("e2m1", "branched")]        # from loss's weights, not its own
    assert losses("ablate") == {"bf16": (1, 1), "ufp4": (2, 1), "e2m1": (5, 3)}
    assert names(2, "bf16 forward") == [("ufp4", "branched"), ("ufp4", "bf16 forward")]
    steps = bench.weights(bench_args(tmp_path), {"model": "nano", "label": "bf16", "estimator": "scratch", "seed": 0})
    assert [path.name for path in steps] == ["ckpt-0000533", "ckpt-0000800"]
    steps[1].rename(steps[1].with_name("ckpt-0000544"))                         # a repeat that was stopped
    monkeypatch.setattr(bench, "train_run", lambda job, args: (ran.append((job["label"], job["estimator"])),
                                                               {"val_loss": 6.0})[1])
    assert names(2, "own forward") == [("bf16", "scratch"), ("ufp4", "own forward")]


def test_what_a_run_resumes(tmp_path, monkeypatch):
    """Not a run with other flags; nor, as train.py keeps two checkpoints, a BF16 run that would go on to lose the one
    from which others branch."""
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        return argparse.Namespace(returncode=3, stderr="it diverged")

    def resumes(job, *names, train=()):
        args = bench_args(tmp_path, train=train)
        shutil.rmtree(bench.folder(args, job), ignore_errors=True)
        for name in names:
            (bench.folder(args, job) / name).mkdir(parents=True)
        with contextlib.suppress(RuntimeError):
            bench.train_run(job, args)
        return "--resume" in commands[-1]

    monkeypatch.setattr(bench.subprocess, "run", run)
    bf16 = {"model": "nano", "label": "bf16", "recipe": "bf16", "flags": [], "seed": 0, "estimator": "scratch"}
    ufp4_run = {**bf16, "label": "ufp4", "recipe": "ufp4", "estimator": "branched"}
    assert resumes(bf16, "ckpt-0000400") and resumes(bf16, "ckpt-0000400", "ckpt-0000533")
    assert resumes(bf16, "ckpt-0000533", "ckpt-0000800")
    assert not resumes(bf16) and not resumes(bf16, "ckpt-0000533", "ckpt-0000539")
    assert not resumes(bf16, "ckpt-0000539", "ckpt-0000800")
    assert resumes(ufp4_run, "ckpt-0000539") and not resumes(ufp4_run)
    assert commands[-1][-2:] == ["--branch", str(tmp_path / "runs" / "nano-scratch-bf16-s0" / "ckpt-0000533")]
    quick = ["--steps", "300"]
    assert not resumes(ufp4_run, train=quick) and resumes(ufp4_run, "ckpt-0000250", train=quick)
    assert commands[-1][commands[-1].index("--save-interval") + 1] == "200"
    assert len({bench.folder(bench_args(tmp_path, train=flags), bf16) for flags in (
        [], quick, ["--steps", "30"], ["--warmup", "30"])}) == 4
    assert bench.train_run(ufp4_run, bench_args(tmp_path)) == {"val_loss": None, "error": "it diverged"}
    with pytest.raises(RuntimeError, match="it diverged"):                      # nothing to compare with
        bench.train_run(bf16, bench_args(tmp_path))
    forward = {**ufp4_run, "estimator": "bf16 forward"}
    assert bench.forward_run(forward, bench_args(tmp_path))["val_loss"] is None


@pytest.mark.parametrize("command", ("loss", "ablate", "scaling"))
def test_quick_runs_have_files_of_their_own(command, monkeypatch):
    written = []
    monkeypatch.setattr(bench, "train_all", lambda args, rows, name: written.append(name) or [])
    monkeypatch.setattr(bench, "save", lambda name, results: written.append(name))
    monkeypatch.setattr(bench, "figure", lambda name, *more: written.append(name))
    getattr(bench, f"bench_{command}")(argparse.Namespace(
        models=["nano"], seeds=5, estimators=["branched"], rows=None, quick=True, train=[]))
    assert len(written) >= 2 and set(written) == {f"{command}-quick"}


def test_every_run_of_loss_ablate_and_scaling_fits_its_model():
    rows = {m: bench.BASE_ROWS for sizes in (*bench.SIZES.values(), bench.VARIED) for m in sizes}
    rows["nano"] = bench.LOSS_ROWS + [row for group in bench.ABLATIONS.values() for row in group]
    for model, label, recipe, flags in ((m, *row) for m in rows for row in rows[m]):
        s = train.parse_args([*bench.MODELS[model], "--recipe", recipe, *flags, "--device", "cpu"])
        with torch.device("meta"):
            train.GPT(s, train.make_recipe(s), 256)     # raises if a layer's size does not fit the recipe's blocks


def test_loss_errors_are_paired_by_seed_and_signed():
    records = [run_record("nano", "bf16", s, loss, loss) for s, loss in enumerate((2.0, 1.0, 4.0))]
    records += [run_record("nano", "ufp4", 0, 2.2, 2.0), run_record("nano", "ufp4", 1, 0.9, 1.0)]
    records += [run_record("nano", "e2m1", 0, None, 2.0), run_record("nano", "e2m1", 1, 1.2, 1.0)]
    assert bench.relative_errors(records, "nano", "branched", "ufp4") == pytest.approx({0: 0.1, 1: -0.1})
    assert bench.relative_errors(records, "nano", "branched", "e2m1") == pytest.approx({0: INF, 1: 0.2})
    assert bench.compare(records, "nano", "branched", "ufp4", "ufp4") == ("0.00 ± 127.10 (2)", "")
    assert bench.compare(records, "nano", "branched", "e2m1", "ufp4") == ("inf (2)", "inf")
    records += [run_record("nano", label, s, 1.0 + e, 1.0) for label, errors in {
        "a": (0.01, 0.05, 0.03), "b": (0.02, 0.08)}.items() for s, e in enumerate(errors)]
    assert bench.compare(records, "nano", "branched", "b", "a") == ("5.00 ± 38.13 (2)", "2.00 ± 12.71")
    assert bench.contrast(records, "nano", "branched", {"a": 0.5, "b": 0.5})[0] == pytest.approx(0.04)
    assert bench.contrast(records, "nano", "branched", {"a": 1, "none such": -1}) is None
    mean, half = bench.interval([1.0, 2.0, 3.0, 4.0])   # t(3, 0.975) = 3.182, standard deviation sqrt(5/3)
    assert mean == 2.5 and half == pytest.approx(3.182 * math.sqrt(5 / 3 / 4))
    assert bench.interval([1.0, INF]) == (INF, None)    # a run that diverged


def test_the_reduction_of_the_loss_error_and_its_interval():
    """The interval, which takes the ratio as linear, against its coverage: of 400 draws of 10 seeds, in which two
    models' reductions have a part in common, 95% hold the true one, give or take 3.5 standard deviations of that count.
    """
    def records(e2m1, ufp4, model="nano"):
        return [run_record(model, label, s, 2.0 * (1 + e), 2.0) for label, errors in (("e2m1", e2m1), ("ufp4", ufp4))
                for s, e in enumerate(errors)]

    assert bench.reduction(records([0.01, 0.02, 0.03], [0.008, 0.016, 0.024]), "nano") == pytest.approx((0.2, 0))
    assert bench.reduction(records([0.02], [0.01]), "nano") == (pytest.approx(0.5), None)
    assert bench.reduction(records([0.01, 0.03], [0.01, INF]), "nano") is None
    assert bench.reduction(records([0.01], []), "nano") is None
    both = records([0.03, 0.05], [0.02, 0.03]) + records([0.02], [0.01], "nano-moe")        # of 0.10 in all, 0.06
    assert bench.reduction(both, "nano", "nano-moe")[0] == pytest.approx(0.4)
    g, held = gen(), 0
    for _ in range(400):
        common, drawn = 0.001 * torch.randn(10, generator=g), []
        for model in ("nano", "nano-moe"):
            e2m1 = 0.01 + 0.001 * torch.randn(10, generator=g)
            better = 0.8 * e2m1 + common + 0.001 * torch.randn(10, generator=g)
            drawn += records(e2m1.tolist(), better.tolist(), model)
        part, half = bench.reduction(drawn, "nano", "nano-moe")
        held += abs(part - 0.2) < half
    assert abs(held - 380) < 3.5 * math.sqrt(400 * 0.95 * 0.05)


def test_each_estimator_end_to_end(text, tmp_path, monkeypatch):
    def run(command, **kwargs):                         # with data of its own
        process = run_train(command[2:], text, tmp_path)
        return argparse.Namespace(stderr=process.communicate()[0], returncode=process.returncode)

    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(train, "prepare", lambda name: prepare.prepare(name, root=tmp_path / "data"))
    args = bench_args(tmp_path, *bench.ESTIMATORS, train=[*TINY, "--steps", "6", "--data", str(text)])
    records, _ = bench.bench_training(args, "loss", [bench.BF16, ("e2m1", "e2m1", [])], "e2m1")
    losses = {(r["label"], r["estimator"]): r["val_loss"] for r in records}
    assert len(set(losses.values())) == len(losses) == 5 and {r["bf16_val_loss"] for r in records} == {
        losses["bf16", "scratch"]}
    job = next(r for r in records if (r["label"], r["estimator"]) == ("e2m1", "branched"))
    assert read_log(bench.folder(args, job))[1]["step"] == 5                          # the last third of 6 steps
    own = next(r for r in records if r["estimator"] == "own forward")
    assert 0.9 < own["slope"] < 1 and 0 < own["noise"] < 0.1 and len(own["depth"]) == 2 + 1         # blocks, logits
    assert all(0.9 < slope < 1.1 and 0 < noise < 0.1 for slope, noise in own["depth"])
    flags = [*bench.MODELS["nano"], *args.train, "--device", "meta"]                # a loaded model is where flags say
    model = bench.load_model(flags, bench.weights(args, job)[-1])[2]
    assert all(p.is_meta for p in model.parameters())


def test_readme_tables_are_the_files_in_data_results():
    texts = [page.read_text() for page in bench.PAGES]
    assert [bench.fill_tables(text) for text in texts] == texts         # if not: python bench.py readme
    assert sorted(re.findall(r"<!-- (\w\S*) -->", "".join(texts))) == sorted(bench.TABLES)


def test_links_between_the_pages_lead_somewhere():
    def anchors(page):                                  # as GitHub makes them from headings
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
                for title in re.findall(r"^#+ (.*)", page.read_text(), re.M)}

    for page in bench.PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)]*)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            to = (page.parent / path).resolve() if path else page
            assert to.exists() and (not anchor or anchor in anchors(to)), target


def test_tables_have_no_row_for_what_was_not_run(monkeypatch):
    monkeypatch.setattr(bench, "load_results", lambda name: {"runs": []})
    assert len(bench.noise_table().splitlines()) == 2   # the head


# ---------------------------------------------------------------------------------------------------------------
# kernels.py: against the reference bit for bit, on a GPU if there is one and else in Triton's interpreter

try:
    import kernels
except ImportError:                                     # no Triton for this platform
    kernels = None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIGNS = random_signs(0)
EVERY_FORMAT = ("e2m1", "e1m2", "int4", "e2m1-max2", "e2m1-max3", "e2m1-max4")


def same(x, fmt, scale, block, rows=True, cols=False, row_signs=None, col_signs=None, seed=None, two_d=False):
    """Asserts that the kernel's codes and scales are those of the reference, for the orientations asked for."""
    f = ufp4.get_format(fmt)
    out = kernels.quantize(x.to(DEVICE), f, scale, block, rows, cols, row_signs, col_signs, seed, two_d=two_d)
    assert [p is not None for p in out] == [rows, cols]
    for col, (p, signs) in enumerate(zip(out, (row_signs, col_signs))):
        if p is None:
            continue
        unit = max(block, len(signs or ()))
        y = torch.nn.functional.pad(x.T, (0, -x.shape[0] % unit)) if col else x
        bits = None if seed is None else kernels.noise(seed, *y.shape, stream=col)
        y = y.float() if signs is None else ufp4.rht(y, signs, len(signs))
        ref = reference(y, f, scale, block, bits, two_d)
        s, t = p.scale.cpu(), 1.0 if p.tensor_scale is None else p.tensor_scale.cpu()
        torch.testing.assert_close(t, ref.tensor_scale, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(s.float(), ref.scale.float(), rtol=0, atol=0, equal_nan=True)
        assert s.dtype == ref.scale.dtype and p.codes.shape == ref.codes.shape
        got = ufp4.Quantized(p.codes.cpu(), s, t, f).dequantize()
        torch.testing.assert_close(got, ref.dequantize(), rtol=0, atol=0, equal_nan=True)
        meant = (got == got).view(*ref.codes.shape, 2)           # codes of a block that is NaN have no meaning
        differ = (p.codes.cpu() ^ ref.codes) & (meant[..., 0] * 15 + meant[..., 1] * 240)
        assert not differ.any(), f"{differ.count_nonzero()} bytes of codes differ"


def reference(y, f, scale, block, bits, two_d):
    """ufp4.quantize, on given noise."""
    random_bytes = ufp4.random_bytes
    ufp4.random_bytes = lambda *_: bits
    try:
        return ufp4.quantize(y, f.name, scale, block, bits is not None, two_d=two_d)
    finally:
        ufp4.random_bytes = random_bytes


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def neighbours(v):
    """Each positive value, and the float32 on either side of it."""
    v = torch.tensor(v, dtype=torch.float32)
    return torch.cat([v, torch.nextafter(v, torch.tensor(math.inf)), torch.nextafter(v, torch.tensor(0.0))])


def ties(f, scale):
    """Blocks of 16 that hold, times `scale`, every level and every tie of a format with its neighbours, both signs."""
    levels = [v for v in f.levels if v <= f.max]
    v = neighbours(levels[1:] + [(a + b) / 2 for a, b in zip(levels, levels[1:])])
    v = torch.cat([v, -v, torch.tensor([0.0, -0.0])]).clamp(-f.max, f.max)
    v = torch.nn.functional.pad(v, (0, -len(v) % 15)).view(-1, 15)
    return torch.cat([torch.full((len(v), 1), f.max), v], 1) * scale


@pytest.fixture(scope="class")
def lowered(request):
    """What is compiled for other GPUs: begun with the first test of TestKernels, in processes beside them."""
    calls = [test.callspec.params["call"] for test in request.session.items if "compile_to" in test.name]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield {call: pool.submit(bench.lowering, *call) for call in calls}


@pytest.mark.usefixtures("lowered")
@pytest.mark.skipif(kernels is None or kernels.INTERPRET and kernels.VERSION < (3, 9),
                    reason="no Triton, or an interpreter (before 3.9) that rounds tl.fma twice")
class TestKernels:
    @pytest.mark.parametrize("fmt", EVERY_FORMAT)
    @pytest.mark.parametrize("scale, block", SCALE_BLOCKS)
    @pytest.mark.parametrize("seed", (None, 1234567890123))
    def test_both_orientations_equal_the_reference(self, fmt, scale, block, seed):
        """Every format, scale and rounding; rows as they are, columns rotated and ragged, then the other way around."""
        x = randn(40, 64) * torch.exp2(randn(40, 1, seed=1) * 4)
        same(x, fmt, scale, block, True, True, None, SIGNS, seed)
        same(x.bfloat16(), fmt, scale, block, True, True, SIGNS, None, seed)

    @pytest.mark.parametrize("fmt", EVERY_FORMAT)
    @pytest.mark.parametrize("scale, block", SCALE_BLOCKS)
    def test_ties_and_their_neighbours(self, fmt, scale, block):
        """At scales from the smallest subnormal to the largest; the kernel's division changes at 2^-80 and 2^80."""
        f = ufp4.get_format(fmt)
        scales = (2.0**-149, 3 * 2.0**-149, 1e-41, 2.0**-126, 2.0**-81, 0.99 * 2.0**-80, 1.0, 1 / 3, 1.1 * 2.0**80,
                  4e37)
        for group in (scales[:5], scales[5:]) if scale != "e4m3" else ((s, s * 1.3, s * 0.01) for s in scales[1::2]):
            x = torch.cat([ties(f, s) for s in group])
            x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 4)).view(-1, 64)
            same(x, fmt, scale, block)
            same(x, fmt, scale, block, seed=7)

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
    @pytest.mark.parametrize("scale, block", SCALE_BLOCKS)
    def test_blocks_of_every_magnitude(self, dtype, scale, block):
        """From subnormals to where the RHT overflows; nearly all E4M3 scales are 0, E2M1's also by rounding."""
        least, most = (-24, 15) if dtype == torch.float16 else (-133, 127)
        power = torch.linspace(least, most, 128).round().double().view(32, 4).repeat_interleave(16, 1)
        x = (randn(32, 64).double().clamp(-1.9, 1.9) * 2.0**power).to(dtype)
        if dtype == torch.bfloat16 and kernels.INTERPRET:   # which misreads bfloat16's subnormals
            x[x.abs() < 2.0**-126] = 0.0
        for fmt, n in (("e1m2", 16), ("e2m1", 16), ("e2m1", 32)):
            same(x, fmt, scale, block, True, True, random_signs(0, n), None)
            same(x, fmt, scale, block, True, True, None, random_signs(1, n), seed=7)

    @pytest.mark.parametrize("fmt", ("e2m1", "e1m2", "int4"))
    @pytest.mark.parametrize("scale, block", SCALE_BLOCKS)
    def test_zeros_subnormals_huge_values_nan_and_inf(self, fmt, scale, block):
        top, least = torch.finfo(torch.float32).max, 2.0**-149
        x = randn(8, 32)
        x[0] = 0.0
        x[1] = -0.0
        x[2] = torch.arange(32) * least                             # subnormal
        x[3] = torch.arange(32) * 7 * least * (-1) ** torch.arange(32)
        x[4, :16], x[4, 16:] = least, 2.0**-126
        same(x, fmt, scale, block, True, True)
        same(x, fmt, scale, block, True, True, SIGNS, SIGNS, seed=3)
        x[5, 3], x[5, 20] = top, -top                               # overflows when rotated
        same(x, fmt, scale, block, True, True, None, SIGNS, seed=3)
        for bad in (-math.inf, math.nan):
            x[6, 17] = bad
            same(x, fmt, scale, block, True, True, SIGNS, None, seed=3)

    def test_a_scale_that_overflows_is_nan(self):
        """amax / g_max is infinite only where g_max is below 1."""
        x = torch.full((16, 32), torch.finfo(torch.float32).max)
        assert fake_quantize(x, "e1m2-max0.5").isnan().all()
        same(x, "e1m2-max0.5", "fp32", 16, True, True)
        out, _ = kernels.quantize(x.to(DEVICE), get_format("e1m2-max0.5"), decoded=(True, False))
        assert out.codes.isnan().all()

    @pytest.mark.parametrize("seed", range(24))
    def test_fuzz(self, seed, monkeypatch):
        """Shapes with every remainder of the tiles, dtypes, strides, formats, scales and rotations; the tiles of a
        strip shared between two programs, or all of them one's."""
        r = random.Random(seed)
        monkeypatch.setattr(kernels, "processors", lambda _: seed % 2)
        monkeypatch.setattr(kernels, "SHAPES", {k: (*v[:3], 2, v[4]) for k, v in kernels.SHAPES.items()})
        fmt, (scale, block) = r.choice(EVERY_FORMAT), r.choice(SCALE_BLOCKS)
        signs = ufp4.random_signs(seed, r.choice((16, 32)) if seed % 3 else 16)
        unit = max(block, len(signs))
        R, C = r.choice((1, 15, 16, 31, 33, 64, 65, 97, 161)), unit * r.choice((1, 2, 3, 5))
        x = randn(2 * R, 2 * C, seed=seed).exp() * r.choice((1, 1e-30, 1e30))
        x = x.to(r.choice((torch.float32, torch.bfloat16, torch.float16))).clamp(-6e4, 6e4)
        x = r.choice((lambda: x[:R, :C], lambda: x[::2, ::2], lambda: x.view(2 * C, 2 * R)[:C, :R].T,
                      lambda: x[:1, :C].expand(R, C)))()
        rows, cols = r.choice(((True, False), (False, True), (True, True)))
        same(x, fmt, scale, block, rows, cols, r.choice((None, signs)) if rows or unit == block else None,
             signs if cols else None, r.choice((None, seed)))

    @pytest.mark.skipif(DEVICE != "cpu", reason="takes 5 GB, which a CPU's memory only promises")
    def test_strides_beyond_32_bits(self):
        """The last token of each of 16 long texts: elements lie more than 2^31 apart."""
        x = torch.empty(16, 2**20 + 2**17, 128, dtype=torch.bfloat16)[:, -1]
        x.copy_(randn(16, 128))
        same(x, "e1m2", "e4m3", 16, True, True)

    def test_without_tokens(self, monkeypatch):
        """Y and dX without rows, dW of zeros, dense and of one expert; a scale for nothing."""
        monkeypatch.setenv("UFP4_BACKEND", "triton")
        for w, offs in ((randn(32, 64), None), (randn(1, 32, 64), torch.zeros(1, dtype=torch.int32, device=DEVICE))):
            x, w = randn(0, 64).to(DEVICE).requires_grad_(), w.to(DEVICE).requires_grad_()
            y = ufp4.linear(x, w, "nvfp4", offs)
            y.sum().backward()
            assert y.shape == (0, 32) and x.grad.shape == (0, 64) and not w.grad.any()
        empty, _ = kernels.quantize(x.detach(), get_format("e2m1"), "e4m3")
        assert empty.shape == (0, 64) and empty.tensor_scale == 1

    @pytest.fixture(autouse=True)
    def poisoned_outputs(self, monkeypatch):
        """torch.empty, for all of these tests, gives junk between guards that nothing may touch."""
        guarded = []

        def empty(*shape, dtype=torch.float32, device=None):
            shape = shape[0] if isinstance(shape[0], tuple) else shape
            n = math.prod(shape)
            memory = torch.full(((n + 128) * dtype.itemsize,), 0x5A, dtype=torch.uint8, device=device)
            guarded.append((memory, n * dtype.itemsize))
            return memory[64 * dtype.itemsize:][:n * dtype.itemsize].view(dtype).view(shape)

        real = kernels.torch
        monkeypatch.setattr(kernels, "torch", type("Torch", (), {
            "empty": staticmethod(empty), "__getattr__": lambda self, name: getattr(real, name)})())
        yield
        for memory, n in guarded:
            if type(memory) is not torch.Tensor:                    # torch.compile's stand-ins have no data
                continue
            guard = (len(memory) - n) // 2
            assert (memory[:guard] == 0x5A).all() and (memory[guard + n:] == 0x5A).all(), "written outside the output"

    @pytest.mark.parametrize("scale, block", SCALE_BLOCKS)
    def test_two_d_blocks(self, scale, block):
        """A block x block tile shares a scale, and W and W^T have the same values."""
        x = randn(96, 64)
        same(x, "e2m1", scale, block, True, True, two_d=True)
        a, b = kernels.quantize(x.to(DEVICE), ufp4.get_format("e2m1"), scale, block, True, True, two_d=True)
        a, b = (ufp4.Quantized(p.codes.cpu(), p.scale.cpu(), 1.0, p.fmt).dequantize() for p in (a, b))
        assert torch.equal(a, b.T)

    def test_noise_is_philox_and_moves_with_seed_offset_and_stream(self):
        """The known answer of Philox4x32-7 for key 0 and counter 0 (Random123), low halves first."""
        words = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
        high, low = kernels.noise(0, 1, 16).int()
        assert (high * 256 + low).view(-1)[:8].tolist() == [h for w in words for h in (w & 0xFFFF, w >> 16)]
        assert torch.equal(kernels.noise(5, 4, 32)[:, 1:], kernels.noise(5, 3, 32, offset=4))
        a = kernels.noise(5, 64, 64)
        for b in (kernels.noise(6, 64, 64), kernels.noise(5, 64, 64, stream=1)):
            assert (a == b).float().mean() < 0.01
        x, f = randn(32, 32).to(DEVICE), ufp4.get_format("e1m2")
        a, b = (kernels.quantize(x, f, seed=5, offset=o)[0].codes for o in (0, 64))
        again = kernels.quantize(x, f, seed=torch.tensor([5], device=DEVICE))[0].codes
        assert torch.equal(a, again) and not torch.equal(a, b)

    def test_swizzled_scales(self):
        """Scale (r, g) at [r // 128, g // 4, r % 32, (r // 32 % 4) * 4 + g % 4], zeros elsewhere."""
        x, f = randn(150, 96).to(DEVICE), ufp4.get_format("e2m1")
        plain, swizzled = (kernels.quantize(x, f, "e4m3", swizzle=s)[0].scale.view(torch.uint8) for s in (False, True))
        assert swizzled.shape == (2, 2, 32, 16)
        r, g = torch.meshgrid(torch.arange(150), torch.arange(6), indexing="ij")
        at = (r // 128, g // 4, r % 32, r // 32 % 4 * 4 + g % 4)
        assert torch.equal(swizzled[at], plain)
        swizzled[at] = 0
        assert not swizzled.any()

    @pytest.mark.parametrize("fmt, scale, block", (("e2m1", "e4m3", 16), ("e1m2", "fp32", 16), ("int4", "e8m0", 32)))
    def test_decode_equals_the_reference(self, fmt, scale, block):
        """Every code in every block; E4M3 and E8M0 scales exactly, FP32 ones rounded once to bfloat16, ties to even."""
        x = randn(70, 160) * torch.exp2(randn(70, 1, seed=1) * 6)
        x[3, 5] = math.inf if scale != "e4m3" else 0.0
        for row, ulps in ((4, 1), (5, 3)):              # E1M2: powers of two come halfway, the even one below or above
            x[row, :16] = torch.tensor([1.75, 0.25, -0.5, 1.0] * 4) * (1 + ulps * 2.0**-8)
        x[6] *= 2.0**-125 / x[6].abs().max()            # E8M0's least scale, 2^-127
        p, _ = kernels.quantize(x.to(DEVICE), ufp4.get_format(fmt), scale, block)
        expected = ufp4.Quantized(p.codes.cpu(), p.scale.cpu(), 1.0, p.fmt).dequantize()
        got = kernels.decode_bf16(p).cpu()
        torch.testing.assert_close(got, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)
        part = dataclasses.replace(p, codes=p.codes[:, :32], scale=p.scale[:, :64 // block])        # not contiguous
        torch.testing.assert_close(kernels.decode_bf16(part).cpu(), got[:, :64], rtol=0, atol=0, equal_nan=True)
        if scale != "fp32":
            torch.testing.assert_close(got.float(), expected, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("fmt, scale, block, rht_block, seed", (
        ("e1m2", "fp32", 16, 16, None), ("e1m2", "fp32", 16, 16, 3), ("int4", "e8m0", 32, 16, 3),
        ("e2m1", "e4m3", 16, 32, None), ("e2m1", "fp32", 32, 32, 3)))
    def test_decoded_at_once_is_what_decoding_gives(self, fmt, scale, block, rht_block, seed):
        """Bit for bit but for the sign of zero, which INT4 has not; ragged tiles, NaN blocks, every element written."""
        x = randn(70, 96) * torch.exp2(randn(70, 1, seed=1) * 6)
        x[3, 5], x[9] = math.inf if scale != "e4m3" else 0.0, 0.0
        args = (x.to(DEVICE), ufp4.get_format(fmt), scale, block, True, True, random_signs(0, rht_block), None, seed)
        packed = kernels.quantize(*args)
        for decoded in ((True, True), (False, True), (True, False)):
            for a, b, whole in zip(kernels.quantize(*args, decoded=decoded), packed, decoded):
                assert a.shape == b.shape and (a.scale is None) == whole
                got, expected = kernels.decode_bf16(a), kernels.decode_bf16(b)
                assert got.dtype == torch.bfloat16 and a.tensor_scale == b.tensor_scale
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)

    # The interpreter reads E4M3 scales as E8M0 in dot_scaled, so the FP4 paths are tested here with E8M0 ones.
    @pytest.mark.parametrize("path, fmt, scale, block", (
        ("fp4", "e2m1", "e8m0", 32), ("fp8", "e1m2", "e8m0", 32), ("fp4x4", "e1m2", "e8m0", 32),
        ("decode", "e1m2", "e8m0", 32), ("decode", "e1m2", "fp32", 16), ("decode", "e2m1", "e4m3", 16),
        ("cublas", "e1m2", "e4m3", 16), ("cublas", "e1m2", "fp32", 16)))
    def test_matmul_multiplies_the_decoded_operands(self, path, fmt, scale, block):
        """Ragged tiles in M, N and K. Products of codes and scales are exact: only the order of the sums differs."""
        f = ufp4.get_format(fmt)
        x, w = randn(129, 96), randn(136, 96, seed=1)             # fewer than the elements that make ufp4 compile
        swizzle = path != "cublas"
        a, b = (kernels.quantize(v.to(DEVICE), f, scale, block, row_signs=SIGNS, swizzle=swizzle)[0]
                for v in (x, w))
        exact = [ufp4.fake_quantize(ufp4.rht(v, SIGNS), fmt, scale, block).double() for v in (x, w)]
        with torch.autocast(a.codes.device.type, torch.bfloat16):               # which rounds no sum
            got = kernels.matmul(a, b, path, torch.float32).cpu()
        assert within(got, *exact, rounded=scale == "fp32" and (path == "cublas" or not kernels.INTERPRET))
        if path == "cublas":                            # what a layer in bfloat16 asks for
            assert within(kernels.matmul(a, b, path).cpu(), *exact, rounded=scale == "fp32", results=1)

    def test_routes_and_refusals(self):
        """The path of each recipe, and the combinations that a Triton version gets wrong."""
        path = lambda name, arch, version=(3, 9): kernels.route(ufp4.RECIPES[name], arch, version)[0]
        for arch in kernels.ARCHITECTURES:
            assert path("bf16", arch) == "bf16" and path("ufp4", arch) == path("e2m1", arch) == "cublas"
        assert [path("nvfp4", a) for a in kernels.ARCHITECTURES] == ["cublas"] * 2 + ["fp4"] * 3 + ["cublas"]
        assert [path("mxfp4", a) for a in kernels.ARCHITECTURES] == ["cublas"] * 2 + ["fp4"] * 4
        assert [path("ufp4-mx", a) for a in kernels.ARCHITECTURES] == ["cublas"] * 2 + ["fp8"] * 4
        assert [path("ufp4-e4m3", a) for a in kernels.ARCHITECTURES] == ["cublas"] * 4 + ["fp4x4", "cublas"]
        assert path("nvfp4", "sm_121", (3, 7)) == "cublas" and path("nvfp4", "sm_121", (3, 8)) == "fp4"
        for name in ("ufp4-e4m3", "ufp4-mx"):
            assert kernels.route(dataclasses.replace(RECIPES[name], fmt="int4"), "sm_103", (3, 9))[0] == "cublas"
        for fields in ({"alpha": 1.0}, {"swap": ("w:e2m1",)}, {"fmt": "e2m1+e1m2"}, {"scale": "e4m3-nearest"},
                       {"block": 8}, {"rht_block": 8}):
            assert kernels.route(dataclasses.replace(RECIPES["ufp4"], **fields), "sm_90")[0] == "reference", fields

    # The count is of one program's code. On sm_10x an instruction is 128 x 256 x 256 bits of K, and the first step of
    # the loop is peeled off it; mma.sync has 16 x 8 x 256 bits a warp; wgmma 64 x 128 x 16 numbers a warp group.
    @pytest.mark.parametrize("recipe, call, instruction, count", (
        ("nvfp4", ("fp4", "sm_100", "e2m1", "e4m3", 16), "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale",
         2 * 256 // 64),
        ("mxfp4", ("fp4", "sm_103", "e2m1", "e8m0", 32), "tcgen05.mma.cta_group::1.kind::mxf4.block_scale",
         2 * 256 // 64),
        ("ufp4-mx", ("fp8", "sm_100", "e1m2", "e8m0", 32), "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale",
         2 * 128 // 32),
        ("ufp4-e4m3", ("fp4x4", "sm_120", "e1m2", "e4m3", 16),
         "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X",
         4 * 128 // 16 * 128 // 8 * 64 // 64 // 8),
        ("ufp4", ("decode", "sm_90", "e1m2", "fp32", 16), "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
         64 // 16),
        ("mxfp4", ("fp4", "gfx950", "e2m1", "e8m0", 32), "v_mfma_scale_f32_32x32x64_f8f6f4",
         128 // 32 * 128 // 32 * 128 // 64 // 4)))
    def test_what_recipes_compile_to(self, recipe, call, instruction, count, lowered):
        r, (path, arch, *numbers) = ufp4.RECIPES[recipe], call
        assert numbers == [r.fmt, r.scale, r.block] and (path == "decode" or kernels.route(r, arch)[0] == path)
        got = lowered[call].result()
        assert got.get("instruction", got).startswith(instruction) and got["count"] == count, got
        assert got["spills"] in (0, None, 12) and got["shared"] <= (101376 if arch == "sm_120" else 232448)
        # Codes taken apart byte by byte, not eight at a time, would be 4760 (fp8) and 3168 (fp4x4)
        assert got["instructions"] is None or got["instructions"] < 3000

    @pytest.mark.parametrize("call, spilled", ((("one orientation, nearest", "sm_90"), 0.02),
                                               (("dY of a layer", "sm_90"), 0.05)))
    def test_what_quantizers_compile_to(self, call, spilled, lowered):
        """On sm_90 the loop fetches the next tile while it computes, and keeps (nearly) all it needs in registers."""
        got = lowered[call].result()
        assert got["prefetched"] and got["spills"] <= spilled * got["instructions"], got

    def test_errors_are_one_clear_sentence(self, monkeypatch):
        f = ufp4.get_format("e1m2")
        with pytest.raises(TypeError, match="bfloat16, float16 and float32, not torch.float64"):
            kernels.quantize(randn(16, 16).double(), f)
        with pytest.raises(ValueError, match="blocks and Hadamard matrices of 16 and 32"):
            kernels.quantize(randn(16, 16).to(DEVICE), f, block=8)
        with pytest.raises(ValueError, match="multiples of 16, got 24"):
            kernels.quantize(randn(16, 24).to(DEVICE), f)
        x, refuse = randn(40, 96).to(DEVICE), functools.partial(pytest.raises, ValueError)
        with refuse(match="single formats.* got e2m1.e1m2 and fp32"):
            kernels.quantize(x, ufp4.get_format("e2m1+e1m2"))
        with refuse(match="the scales fp32, e4m3, e8m0; got e1m2 and e8m0-up"):
            kernels.quantize(x, f, "e8m0-up")
        with refuse(match=r"one matrix for both orientations; got blocks of 16 and matrices of \[16, 32\]"):
            kernels.quantize(x, f, cols=True, row_signs=SIGNS, col_signs=SIGNS * 2)
        with refuse(match=r"2-D scaling needs rows and columns in multiples of 16, got \(40, 96\)"):
            kernels.quantize(x, f, two_d=True)
        e1m2, e2m1 = (kernels.quantize(x, ufp4.get_format(n), swizzle=True)[0] for n in ("e1m2", "e2m1"))
        with refuse(match="in common, got 96 e1m2 fp32 16 and 96 e2m1 fp32 16"):
            kernels.matmul(e1m2, e2m1, "decode")
        two_levels, odd = (kernels.quantize(x[:, :n], f, "e4m3", swizzle=True)[0] for n in (96, 48))
        for p, path in ((e1m2, "fp4"), (e2m1, "fp8"), (e2m1, "fp9"), (e2m1, "fp4"), (two_levels, "fp8"),
                        (odd, "fp4x4")):
            with refuse(match=f"got '{path}' for {p.fmt.name}, {p.kind} of 16, K = {p.shape[1]}"):
                kernels.matmul(p, p, path)
        with refuse(match="only the path cublas multiplies groups, not 'decode'"):
            kernels.matmul(e1m2, e1m2, "decode", offs=torch.tensor([40]).to(DEVICE), stacked=0)
        monkeypatch.setattr(kernels, "INTERPRET", False)
        with pytest.raises(ValueError, match="need a GPU tensor"):
            kernels.quantize(torch.zeros(16, 16), f)

    @compiling()
    def test_compiles_without_graph_breaks(self):
        """Quantize, multiply and decode under torch.compile: one graph, the same numbers."""
        f = ufp4.get_format("e2m1")

        def product(x, w, seed):
            a, at = kernels.quantize(x, f, "e8m0", 32, True, True, SIGNS, None, seed, swizzle=True)
            b, _ = kernels.quantize(w, f, "e8m0", 32, row_signs=SIGNS, swizzle=True)
            c, _ = kernels.quantize(w, f, "e4m3", 16)
            exact = kernels.matmul(c, c, "cublas", torch.float32)
            return kernels.matmul(a, b, "decode", torch.float32), exact, at.codes

        args = [v.to(DEVICE) for v in (randn(40, 64), randn(32, 64, seed=1), torch.tensor([3]))]
        for got, expected in zip(torch.compile(product, fullgraph=True, backend="aot_eager")(*args), product(*args)):
            torch.testing.assert_close(got, expected)


# ---------------------------------------------------------------------------------------------------------------
# What a linear layer keeps, and how often it quantizes


def kept_bytes(recipe, path, monkeypatch, training=True):
    """Bytes that autograd keeps for the input X (128, 64) of a layer, over bfloat16's. The weight doesn't count: it
    is at hand anyway."""
    monkeypatch.setenv("UFP4_BACKEND", path)
    x = torch.randn(128, 64, generator=gen()).to(DEVICE).requires_grad_()
    w = torch.randn(64, 64, generator=gen(1)).to(DEVICE).requires_grad_(training)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ufp4.linear(x, w, recipe)
    assert y.requires_grad and not any(t.data_ptr() == x.data_ptr() for t in kept)
    return sum(t.nbytes for t in kept if t is not w) / (2 * x.numel())


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("name,most", [("ufp4", 0.38), ("ufp4-e4m3", 0.29), ("nvfp4", 0.29), ("mxfp4", 0.27)])
def test_the_backward_pass_keeps_the_input_in_4_bits(name, most, path, monkeypatch):
    needs(path)
    assert 0.25 < kept_bytes(name, path, monkeypatch) <= most
    assert kept_bytes(name, path, monkeypatch, training=False) == 0             # a frozen weight has no wgrad


def quantizations(monkeypatch):
    """A list that gets (operand, rows, cols) of each quantize_operand."""
    calls, plain = [], ufp4.quantize_operand

    def spy(x, operand, *args, rows=None, cols=None, **more):
        calls.append((operand, rows, cols))
        return plain(x, operand, *args, rows=rows, cols=cols, **more)

    monkeypatch.setattr(ufp4, "quantize_operand", spy)
    return calls


def test_only_what_a_gradient_needs_is_quantized(monkeypatch):
    calls = quantizations(monkeypatch)
    x, w = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    for a, b, backward in ((x, w, [("dy", "dgrad", "wgrad"), ("w", None, "dgrad")]),
                           (x.detach(), w, [("dy", None, "wgrad")]),
                           (x, w.detach(), [("dy", "dgrad", None), ("w", None, "dgrad")])):
        calls.clear()
        y = ufp4.linear(a, b, "ufp4")
        assert calls == [("x", "fprop", "wgrad" if b is w else None), ("w", "fprop", None)]
        calls.clear()
        y.sum().backward()
        assert calls == backward
    calls.clear()
    with torch.no_grad():
        ufp4.linear(x, w, "ufp4")
    assert calls == [("x", "fprop", None), ("w", "fprop", None)]


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_quantized_once_is_once_a_weight_and_changes_nothing(path, monkeypatch):
    needs(path)
    monkeypatch.setenv("UFP4_BACKEND", path)
    calls = quantizations(monkeypatch)
    layers = [ufp4.Linear(32, 32, recipe=r).to(DEVICE) for r in ("ufp4", "nvfp4")]
    x = torch.randn(2, 16, 32, generator=gen()).to(DEVICE)

    def forward(part):
        return layers[1](layers[0](part))

    def step(run=forward):
        torch.manual_seed(0)
        for layer in layers:
            layer.zero_grad()
        for part in x:
            run(part).square().sum().backward()
        return [layer.weight.grad for layer in layers]

    plain = step()
    calls.clear()
    with ufp4.quantized_once():
        once = step()
        assert calls.count(("w", "fprop", "dgrad")) == 2 and len([c for c in calls if c[0] == "w"]) == 2
        # to backward W comes as another tensor on the same memory, or as a copy
        again = step(lambda part: torch.utils.checkpoint.checkpoint(forward, part, use_reentrant=False))
        assert len([c for c in calls if c[0] == "w"]) == 2
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            copied = step()
        assert calls.count(("w", None, "dgrad")) == 2 and len([c for c in calls if c[0] == "w"]) == 4
        assert len(ufp4.WEIGHTS) == 2
        for grads in (again, copied):
            assert all(torch.equal(a, b) for a, b in zip(plain, grads))
        with torch.no_grad():                           # the old operands are out of date
            layers[0].weight += 1
        layers[0](x[0])
        assert calls.count(("w", "fprop", "dgrad")) == 3
        with ufp4.quantized_once():                     # and so they are after a step, which leaves _version when fused
            layers[0](x[0])
            torch.optim.SGD(layers[0].parameters(), fused=True).step()
            layers[0](x[0])
        layers[0](x[0])
        assert calls.count(("w", "fprop", "dgrad")) == 6
        with torch.inference_mode():                    # whose tensors have no version
            w = layers[0].weight.clone()
            assert torch.equal(ufp4.linear(x[0], w, "ufp4"), ufp4.linear(x[0], layers[0].weight, "ufp4"))
        for recipe, dtype in itertools.product(("ufp4", "e2m1"), (torch.float32, torch.bfloat16)):
            got = ufp4.linear(x[0].to(dtype), layers[0].weight, recipe)
            with monkeypatch.context() as m:            # another recipe or dtype has other operands
                m.setattr(ufp4, "WEIGHTS", None)
                assert torch.equal(got, ufp4.linear(x[0].to(dtype), layers[0].weight, recipe)) and got.dtype == dtype
        one = torch.eye(32, device=DEVICE)              # and so has another weight where one was freed
        corners = [ufp4.linear(one, torch.full((32, 32), v, device=DEVICE), "e2m1")[0, 0].item() for v in (1., 2., 3.)]
        assert corners == pytest.approx([1, 2, 3], rel=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(plain, once)) and ufp4.WEIGHTS is None


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_recomputed_activations_replay_the_noise(path, monkeypatch):
    """With activation checkpointing, and in the same seed's next run, the same gradients; not in another seed's."""
    needs(path)
    monkeypatch.setenv("UFP4_BACKEND", path)
    recipe = dataclasses.replace(RECIPES["ufp4"], sr=ufp4.OPERANDS)
    layer = ufp4.Linear(32, 32, recipe=recipe).to(DEVICE)
    x = torch.randn(16, 32, generator=gen()).to(DEVICE).requires_grad_()

    def gradient(seed, f):
        torch.manual_seed(seed)
        return torch.autograd.grad(f(x).sum(), layer.weight)[0]

    again = functools.partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False)
    assert all(torch.equal(gradient(0, layer), gradient(0, f)) for f in (layer, again))
    assert not torch.equal(gradient(0, layer), gradient(1, layer))


# ---------------------------------------------------------------------------------------------------------------
# The kernels behind the linear layers


def needs(path):
    if path == "triton" and (kernels is None or kernels.INTERPRET and kernels.VERSION < (3, 9)):
        pytest.skip("no Triton, or an interpreter (before 3.9) that rounds tl.fma twice")


def same_noise(monkeypatch, seed):
    """Both backends draw the noise of `seed`: the reference as kernels.noise lays it out, for columns transposed."""
    def drawn(shape, device, generator=None):
        bits = kernels.noise(seed, *(shape[::-1] if drawn.stream else shape), stream=drawn.stream, device=device)
        return bits.mT if drawn.stream else bits

    monkeypatch.setattr(ufp4, "random_bytes", drawn)
    monkeypatch.setattr(torch, "randint", lambda *_, device, **__: torch.tensor([seed], device=device))
    return drawn


@pytest.mark.parametrize("seed", range(12))
def test_wiring_fuzz(seed, monkeypatch):
    """Recipes, shapes, dtypes and strides: the operands of quantize_operand are those of the reference, bit for bit."""
    needs("triton")
    r = random.Random(seed)
    recipe = ufp4.RECIPES[r.choice(PLAIN)]
    recipe = dataclasses.replace(recipe, sign_seed=seed, rht=tuple(g for g in ufp4.GEMMS if r.random() < 0.6),
                                 sr=r.choice(((), ("dy",), ufp4.OPERANDS)))
    assert kernels.supports(recipe)
    R, C = (recipe.unit * r.choice((1, 2, 3)) for _ in range(2))
    dtype = r.choice((torch.float32, torch.bfloat16, torch.float16))
    x = randn(2 * R, 2 * C, seed=seed).exp().to(dtype)
    x = r.choice((lambda: x[:R, :C], lambda: x[::2, ::2], lambda: x.view(2 * C, 2 * R)[:C, :R].T))().to(DEVICE)
    drawn = same_noise(monkeypatch, seed)
    for operand, rows, cols in (("x", "fprop", "wgrad"), ("w", "fprop", "dgrad"), ("dy", "dgrad", "wgrad")):
        packed, values = (ufp4.quantize_operand(x, operand, recipe, "cublas", dtype, rows, cols, keep=keep)
                          for keep in ((rows, cols), ()))
        for drawn.stream, (p, v, which) in enumerate(zip(packed, values, ({"rows": rows}, {"cols": cols}))):
            ref, kept = (ufp4.quantize_operand(x, operand, recipe, None, torch.float32, **which, keep=k)[drawn.stream]
                         for k in ((), (rows, cols)))
            assert torch.equal(kernels.decode_bf16(p), v.codes)
            got = ufp4.Quantized(p.codes, p.scale, 1.0 if p.tensor_scale is None else p.tensor_scale, p.fmt)
            torch.testing.assert_close(got.dequantize(), ref, rtol=0, atol=0)
            if not drawn.stream:                        # what the reference keeps holds the same codes and scales
                assert torch.equal(kept.codes, p.codes) and torch.equal(kept.scale.float(), p.scale.float())
            else:
                assert torch.equal(kept.codes.mT, p.codes) and torch.equal(kept.scale.float().mT, p.scale.float())
                values = ufp4.decode(kept.codes, kept.scale.float(), kept.tensor_scale, kept.fmt, -2)
                assert same_bits(values.mT.contiguous(), ref.contiguous())


def multiplied(p):
    """Float64 of an operand as cuBLAS gets it, times its tensor scale."""
    return kernels.decode_bf16(p).double() * (1.0 if p.tensor_scale is None else p.tensor_scale)


def within(got, a, b, rounded=False, results=0):
    """|got - a b^T| is at most what the arithmetic can lose, for float64 operands a (M, K), b (N, K): 2^-8 of each, if
    they were `rounded` to bfloat16; 2^-23 of the terms with each of K additions in float32 (2^-24, and tensor cores
    may truncate); and 2^-8 of the sum whenever it is rounded to bfloat16, `results` times."""
    terms = a.abs() @ b.abs().T
    lost = terms * (((1 + 2.0**-8) ** 2 - 1 if rounded else 0) + a.shape[1] * 2.0**-23)
    return bool(((got.double() - a @ b.T).abs() <= lost + ((1 + 2.0**-8) ** results - 1) * (terms + lost)).all())


@pytest.mark.parametrize("name", ["ufp4", "nvfp4", "mxfp4"])                    # one of each kind of scales
@pytest.mark.parametrize("grouped", [False, True])
def test_kernels_multiply_the_operands_of_the_three_gemms(name, grouped, monkeypatch):
    """Each GEMM of a layer on the kernels' path is the float64 product of its decoded operands, group by group."""
    needs("triton")
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    sizes, seen, plain = [5, 0, 43] if grouped else [48], [], ufp4.matmul

    def spy(*args, **more):
        seen.append((args, plain(*args, **more)))
        return seen[-1][1]

    monkeypatch.setattr(ufp4, "matmul", spy)
    x = randn(48, 64).to(DEVICE).requires_grad_()
    w = randn(*([3] if grouped else []), 32, 64, seed=1).to(DEVICE).requires_grad_()
    y = ufp4.linear(x, w, name, torch.tensor(sizes).cumsum(0).to(DEVICE) if grouped else None)
    grads = torch.autograd.grad(y, (x, w), randn(48, 32, seed=2).to(DEVICE))
    assert [t.dtype for t in (y, *grads)] == [torch.float32] * 3 and len(seen) == 3
    for ((a, b, path, *_), got), inner in zip(seen, (64, 32, None)):
        if path != "cublas":                            # a GPU that multiplies natively has swizzled scales
            continue
        a, b = multiplied(a), multiplied(b)
        if not grouped:
            assert within(got, a, b)
            continue
        ends = [0, 16, 16, 64] if RECIPES[name].unit == 16 else [0, 32, 32, 96]
        for e, (start, end) in enumerate(zip(ends, ends[1:])):
            group = slice(start, end)
            one = ((a[:, group], b[:, group], got[e]) if inner is None else
                   (a[group], b[e * 32:][:32] if inner == 64 else b[:, e * 32:][:, :32], got[group]))
            assert within(one[2], *one[:2], results=1 + (RECIPES[name].scale == "e4m3"))


# The interpreter's dot_scaled is right from 3.8 on, with E8M0 scales.
@pytest.mark.parametrize("name,path", [("mxfp4", "fp4"), ("ufp4-mx", "fp8")])
def test_a_layer_on_blackwells_paths_equals_the_reference(name, path, monkeypatch):
    """Swizzled operands, kept ones too, and tokens filled up to whole rows for the copy engine: both passes are exact
    up to the order of the sums; with experts, or where features are not whole rows, the layer goes by cuBLAS."""
    needs("triton")
    if not kernels.INTERPRET:
        pytest.skip("runs where the hardware has such a path, or in the interpreter")
    monkeypatch.setattr(kernels, "architecture", lambda device: "sm_120")
    ufp4.cached_path.cache_clear()
    recipe = dataclasses.replace(RECIPES[name], sr=())
    asked, plain = [], kernels.matmul
    monkeypatch.setattr(kernels, "matmul", lambda a, b, p, *args, **k: asked.append(p) or plain(a, b, p, *args, **k))
    results = []
    for backend in ("triton", "torch"):
        monkeypatch.setenv("UFP4_BACKEND", backend)
        x, w = randn(40, 64).requires_grad_(), randn(96, 64, seed=1).requires_grad_()
        y = ufp4.linear(x, w, recipe)
        results.append((y, *torch.autograd.grad(y, (x, w), randn(40, 96, seed=2))))
    assert asked == [path] * 3 and all(close(a, b, 96) for a, b in zip(*results))
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    y = ufp4.linear(randn(0, 64), w, recipe)            # no tokens, so a gradient of zeros
    assert y.shape == (0, 96) and not torch.autograd.grad(y.sum(), w)[0].any()
    asked.clear()
    for k, n in ((48, 96), (96, 48)):                   # not whole rows
        ufp4.linear(randn(40, k), randn(n, k), dataclasses.replace(RECIPES["nvfp4"], rht=()))
    ufp4.linear(randn(40, 64), randn(2, 96, 64), recipe, torch.tensor([7, 40]))
    assert asked == ["cublas"] * 3
    ufp4.cached_path.cache_clear()


@compiling()
def test_a_layer_compiles_without_graph_breaks_on_the_kernels(monkeypatch):
    """Dense, with and without tokens to fill up, and grouped, both passes: one graph, the same numbers; manual_seed
    fixes the noise."""
    needs("triton")
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    offs = torch.tensor([5, 5, 40], device=DEVICE)
    for tokens, w, offs in ((40, randn(32, 64), None), (48, randn(32, 64), None), (40, randn(3, 32, 64), offs)):
        x, w = (t.to(DEVICE).requires_grad_() for t in (randn(tokens, 64, seed=1), w))

        def results(f):
            torch.manual_seed(0)
            y = f(x, w)
            return y, *torch.autograd.grad(y.square().sum(), (x, w))

        def layer(recipe):
            return lambda x, w: ufp4.linear(x, w, recipe, offs)

        def graph(recipe):
            return torch.compile(layer(recipe), fullgraph=True, backend="aot_eager")

        plain = dataclasses.replace(RECIPES["nvfp4"], sr=())                    # noise may be another stream in a graph
        assert all(torch.equal(a, b) for a, b in zip(results(layer(plain)), results(graph(plain))))
    noisy = graph(RECIPES["nvfp4"])
    assert all(torch.equal(a, b) for a, b in zip(results(noisy), results(noisy)))


def test_backends_are_chosen_and_said(monkeypatch):
    """Unknown: an error. triton: the kernels or an error. Else a GPU that can't use them says why, once."""
    x, w = torch.randn(16, 32), torch.randn(16, 32)
    monkeypatch.setenv("UFP4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="UFP4_BACKEND is torch.*'cuda'"):
        ufp4.linear(x, w, "ufp4")
    needs("triton")
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    odd = dataclasses.replace(RECIPES["ufp4"], block=8)
    for recipe, dtype, message in ((odd, torch.float32, "blocks and Hadamard matrices of 16 and 32"),
                                   ("ufp4", torch.float64, "float32, not torch.float64")):
        with pytest.raises((ValueError, TypeError), match=message):
            ufp4.linear(x.to(dtype), w.to(dtype), recipe)
    monkeypatch.setattr(kernels, "INTERPRET", False)
    with pytest.raises(ValueError, match="need a GPU tensor"):
        ufp4.linear(x, w, dataclasses.replace(RECIPES["ufp4"], sign_seed=99))
    monkeypatch.delenv("UFP4_BACKEND")
    gpu = torch.device("cuda:99")                       # which no machine has
    for broken, message in ((odd, "blocks and Hadamard"), (dataclasses.replace(odd, block=16, sign_seed=98), "")):
        ufp4.cached_path.cache_clear()
        with pytest.warns(UserWarning, match=f"runs on the reference path.*{message}") as said:
            for _ in range(3):
                assert ufp4.choose_path(broken.key, gpu, torch.float32) is None
        assert len(said) == 1
    ufp4.cached_path.cache_clear()
    monkeypatch.setattr(kernels, "require", lambda *_: None)
    monkeypatch.setattr(kernels, "architecture", lambda _: "sm_121")
    route = kernels.route                               # as an older Triton would take it
    monkeypatch.setattr(kernels, "route", lambda r, a, version=(3, 6): route(r, a, version))
    with pytest.warns(UserWarning, match="slower path 'cublas'.*Triton before 3.8") as said:
        assert [ufp4.choose_path(RECIPES["nvfp4"].key, gpu, torch.float32) for _ in range(2)] == ["cublas"] * 2
    assert len(said) == 1 and ufp4.choose_path(RECIPES["ufp4"].key, gpu, torch.float32) == "cublas"
    ufp4.cached_path.cache_clear()


def test_without_triton_it_says_so_once():
    code = ("import sys; sys.modules['triton'] = None; import torch, ufp4; gpu = torch.device('cuda');"
            "print([ufp4.choose_path(ufp4.get_recipe('ufp4').key, gpu, torch.float32) for _ in 'ab'])")
    done = python(code, UFP4_BACKEND="")
    assert done.stdout == "[None, None]\n" and done.stderr.count("needs Triton 3.6 or newer") == 1
    done = python(code, UFP4_BACKEND="triton")
    assert done.returncode and done.stderr.strip().splitlines()[-1].startswith("ImportError: kernels.py needs Triton")


def test_every_row_of_the_speed_table_runs(monkeypatch, tmp_path):
    """At tiny sizes, with a timer that only calls: what it would measure on a GPU."""
    needs("triton")
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    calls = []
    tiny = ["--layers", "1", "--dim", "32", "--heads", "2", "--hidden", "32", "--seq-len", "16", "--batch-size", "1"]
    sizes = {"n": 64, "linear": (32, 64, 32), "vocabulary": 64, "models": (["--model", "nano", *tiny],) * 2}

    def once(f, ahead=True):
        f()
        calls.append(ahead)
        return 1.0, 1.0, 1.0

    rows = list(bench.kernel_speeds(sizes, once, DEVICE, lambda model: model))
    assert [name for name, *_ in rows] == ["copy", "cuBLAS bf16", *bench.SPEEDS]
    assert calls == [True] * 8 + [False] * 2 + [True] * 4 + [False] * 4         # Python's time counts: layer, steps
    both = 64 * 64 * (2 + 2 * (0.5 + 4 / 16))           # bf16 in, two operands of codes and FP32 scales out
    assert rows[3][2] == both / (2 * 64 * 64 * 2)
    assert rows[0][2] == 2 * 64 * 64 * 2 / 1e6 and rows[1][2] == pytest.approx(2 * 64**3 / 1e9)
    monkeypatch.setattr(bench, "TRIED", {k: ((32, 32, 1, 1, 64), (32, 64, 3, 9, 128)) for k in kernels.SHAPES})
    used = dict(kernels.SHAPES)
    assert [(name, shape) for name, shape, _ in bench.shape_speeds(64, once, DEVICE)] == [
        (name, shape) for name, call in bench.QUANTIZED.items() for shape in bench.TRIED[call[:2]]]
    assert kernels.SHAPES == used
    monkeypatch.setattr(bench, "RESULTS", tmp_path)     # then README's table has them; before, its rows are open
    assert bench.kernel_table().count("not measured: `python bench.py kernels`") == len(bench.SPEEDS)
    bench.save("kernels-some-GPU", {"rows": [{"row": n, "ms": ms, "value": v, "unit": u} for n, ms, v, u in rows]})
    assert "not measured" not in bench.kernel_table() and "(1.000 ms, 1.000 to 1.000)" in bench.kernel_table()
