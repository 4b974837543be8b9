"""Each test states one property and compares it with an oracle of its own: codes written out by
hand, exact fractions, float64, brute force. Those of ufp4.py alone: pytest -k core test_ufp4.py"""
import argparse
import concurrent.futures
import dataclasses
import functools
import http.server
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

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"        # before triton is imported: runs kernels on the CPU

import bench
import gpu
import train
import ufp4
from data import prepare
from ufp4 import (E2M1, FORMATS, GEMMS, RECIPES, SCALES, Quantizer, Recipe, fake_quantize,
                  quantize, random_key, random_signs, rht)

HERE = Path(__file__).resolve().parent
INF, NAN = math.inf, math.nan
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max
SCALE_BLOCKS = (("fp32", 16), ("e4m3", 16), ("e4m3_up", 16), ("e8m0", 32), ("e8m0_up", 32))
# The formats, written out by hand: magnitudes by code, and the grids that are used
MAGNITUDES = {"e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6], "int4": [0, 1, 2, 3, 4, 5, 6, 7],
              "e1m2": [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]}
GRIDS = MAGNITUDES | {f"e2m1-max{m}": [v for v in MAGNITUDES["e2m1"] if v <= m] for m in (2, 3, 4)}
QUANTIZED = ("ufp4", "e2m1", "ufp4-int4", "ufp4-e4m3", "ufp4-mx", "e2m1-full-rht", "nvfp4", "mxfp4")
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

# ---- kernels.py, bit for bit against the reference -----------------------------------
try:
    import kernels
    works = not kernels.INTERPRET or kernels.VERSION >= (3, 9)
except ImportError:
    works = False
needs_kernels = pytest.mark.skipif(
    not works, reason="no Triton, or an interpreter (before 3.9) that rounds tl.fma twice")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIGNS = random_signs(0)
BLOCKS = {name: 32 if "e8m0" in name else 16 for name in SCALES}
ONE_OF_EACH = ("fp32", "e4m3_up", "e8m0")

def randn(*shape, seed=0):
    return torch.randn(shape, generator=gen(seed))

def quantized(x, rows=None, cols=None, forms=("packed", "packed")):
    """What quantize_kernel makes of rows and of columns, Packed, in the forms asked for.

    The random bits are those of the keys that gen(0) and gen(1) draw first."""
    keys = torch.stack([random_key("cpu", gen(i)) for i in range(2)]).to(DEVICE)
    signs = next((q.signs.to(DEVICE) for q in (rows, cols) if q and q.signs is not None), None)
    names = [q and kernels.operand_name(q, form) for q, form in zip((rows, cols), forms)]
    *made, t = torch.ops.ufp4.quantize(x.to(DEVICE), signs, keys, *names)
    return [name and kernels.Packed(*made[2 * i:][:2], t[i], name)
            for i, name in enumerate(names)]

def reference(x, q, i=0):
    """ufp4.quantize of x as q says, with the random bits that quantized() has for it."""
    x = x.float() if q.signs is None else rht(x, q.signs)
    return quantize(x, q.fmt, q.scale, q.block, q.stochastic, gen(i), two_d=q.tiles)

def same(x, rows=None, cols=None):
    """Asserts that the kernel's codes and scales are those of the reference.

    Codes have no meaning where the scale is 0 or NaN, and more than one where a subnormal
    scale times a level is rounded: there, what they decode to is compared."""
    for i, (q, p) in enumerate(zip((rows, cols), quantized(x, rows, cols))):
        if q is None:
            continue
        want = reference(x.T if i else x, q, i)
        got = p.scale.cpu().view(want.scale.dtype).float()
        assert same_bits(got, want.scale.float())
        if kernels.STORED[q.scale] == "e4m3":
            assert same_bits(p.tensor_scale.cpu(), want.tensor_scale)
            got = got * p.tensor_scale.cpu()
        meant = (got >= 2.0**-124).repeat_interleave(q.block // 2, -1)
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
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        x[x.abs() < 2.0**-126] = 0.0            # which the interpreter misreads
    return x

def ties(fmt):
    """Blocks of 16 of the format's levels, and ties with their neighbours in float32, of
    both signs, at scales from the smallest subnormal to the largest. (The kernel divides
    in another way beyond 2^-80 and 2^80.)"""
    levels = torch.tensor(fmt.levels)
    v = torch.cat((levels[1:], (levels[1:] + levels[:-1]) / 2))
    v = torch.cat((v, v.nextafter(torch.tensor(math.inf)), v.nextafter(torch.tensor(0.0))))
    v = torch.cat((v, -v)).clamp(-fmt.max, fmt.max)
    v = F.pad(v, (0, -len(v) % 15)).view(-1, 15)
    blocks = torch.cat((torch.full((len(v), 1), fmt.max), v), 1)
    scales = (2.0**-149, 3 * 2.0**-149, 1e-41, 2.0**-126, 2.0**-81, 0.99 * 2.0**-80, 1.0,
              1 / 3, 1.1 * 2.0**80, 4e37)
    x = torch.cat([blocks * s for s in scales]).flatten()
    return F.pad(x, (0, -len(x) % 1024)).view(-1, 64)

@needs_kernels
@pytest.mark.parametrize("fmt", ("e2m1", "e1m2", "int4", "e2m1-max3"))
@pytest.mark.parametrize("scale", SCALES)
def test_kernels_equal_the_reference(fmt, scale):
    """Rows to nearest as they are, columns stochastic and rotated; random numbers, ties."""
    x = randn(16, 64) * torch.exp2(randn(16, 1, seed=1) * 4)
    if scale in ("fp32", "e8m0_up"):
        x = torch.cat((x, ties(FORMATS[fmt])))
    x = F.pad(x, (0, 0, 0, -len(x) % 32))
    q = Quantizer(FORMATS[fmt], SCALES[scale], BLOCKS[scale])
    same(x, q, dataclasses.replace(q, signs=SIGNS, stochastic=True))

@needs_kernels
@pytest.mark.parametrize("fmt, dtype, n", (
    ("e2m1", torch.bfloat16, 16), ("e1m2", torch.float16, 16),
    ("e1m2", torch.float32, 16), ("e2m1", torch.float32, 32)))
@pytest.mark.parametrize("scale", ONE_OF_EACH)
def test_kernels_know_every_magnitude_and_what_is_not_finite(fmt, dtype, n, scale):
    x = every_sort(dtype)
    q = Quantizer(FORMATS[fmt], SCALES[scale], BLOCKS[scale], stochastic=n == 32)
    same(x, q, dataclasses.replace(q, signs=random_signs(1, n)))
    for bad in (-math.inf, math.nan):
        x[6, 17] = bad
        same(x[:, :32], q, None)

@needs_kernels
@pytest.mark.parametrize("seed", range(8))
def test_kernels_equal_the_reference_on_any_shape(seed, monkeypatch):
    """Every remainder of the tiles, dtypes, strides, scales shared in tiles (as W's)."""
    r = random.Random(seed)
    monkeypatch.setattr(kernels, "SHAPES", dict.fromkeys(kernels.SHAPES, ((32, 32), {})))
    scale, n = r.choice(tuple(SCALES)), r.choice((16, 32))
    q = Quantizer(FORMATS[r.choice(tuple(FORMATS))], SCALES[scale], BLOCKS[scale],
                  stochastic=seed % 2 == 0, tiles=seed % 2 == 1)
    rotated = dataclasses.replace(q, signs=random_signs(seed, n))
    unit = max(n, q.block)
    R, C = (unit * r.choice((1, 2, 3)) for _ in range(2))
    x = randn(2 * R, 2 * C, seed=seed).exp() * r.choice((1, 1e-3))
    x = x.to(r.choice((torch.float32, torch.bfloat16, torch.float16)))
    x = r.choice((lambda: x[:R, :C], lambda: x[::2, ::2],
                  lambda: x.view(2 * C, 2 * R)[:C, :R].T, lambda: x[:1, :C].expand(R, C)))()
    rows, cols = r.choice(((rotated, None), (None, q), (q, rotated), (rotated, q)))
    same(x, rows, cols)

@needs_kernels
@pytest.mark.skipif(DEVICE != "cpu", reason="takes 5 GB, which a CPU only promises")
def test_kernels_take_strides_beyond_32_bits():
    """The last token of each of 16 long texts: elements lie more than 2^31 apart."""
    x = torch.empty(16, 2**20 + 2**17, 128, dtype=torch.bfloat16)[:, -1]
    x.copy_(randn(16, 128))
    same(x, Quantizer(), Quantizer())

@needs_kernels
@pytest.mark.parametrize("fmt, scale", (("e1m2", "fp32"), ("e2m1", "e4m3"), ("int4", "e8m0")))
def test_kernels_decode(fmt, scale):
    """Codes times scales, rounded to bfloat16 once, ties to even: from packed operands,
    from swizzled ones, and decoded at once. The swizzle is layout 2's, with zeros in its
    gaps. (INT4's codes have no -0, which decoded values have.)"""
    x = randn(160, 32) * torch.exp2(randn(160, 1, seed=1) * 6)
    x[3, 5], x[9] = math.inf if scale != "e4m3" else 0.0, -0.0
    for row, ulps in ((4, 1), (5, 3)):          # times a power of two, E1M2 comes halfway
        x[row, :16] = torch.tensor([1.75, 0.25, -0.5, 1.0] * 4) * (1 + ulps * 2.0**-8)
    x[6] *= 2.0**-125 / x[6].abs().max()        # E8M0's smallest scale, 2^-127
    q = Quantizer(FORMATS[fmt], SCALES[scale], BLOCKS[scale])
    packed, swizzled, decoded = (quantized(x, q, q, (form, form))
                                 for form in ("packed", "swizzled", "decoded"))
    for i, p in enumerate(packed):
        scales = p.scale.cpu().view(ufp4.STORED.get(q.scale, torch.float32))
        exact = ufp4.Quantized(p.codes.cpu(), scales, 1.0, q.fmt).dequantize().bfloat16()
        for form in (packed, swizzled, decoded):
            got = form[i].decoded().cpu()
            assert torch.equal(got.isnan(), exact.isnan()), form
            assert torch.equal(got.nan_to_num(), exact.nan_to_num())
        r, g = torch.meshgrid(*map(torch.arange, p.scale.shape), indexing="ij")
        scales, at = swizzled[i].scale, (r // 128, g // 4, r % 32, r // 32 % 4 * 4 + g % 4)
        assert scales.shape == (-(-len(r) // 128), -(-r.shape[1] // 4), 32, 16)
        assert torch.equal(scales[at].nan_to_num(), p.scale.nan_to_num())
        scales[at] = 0
        assert not scales.any()

@needs_kernels
@pytest.mark.parametrize("name", ("ufp4", "ufp4-int4", "mxfp4", "nvfp4"))
@pytest.mark.parametrize("operand, gemms", (("x", ("fprop", "wgrad")), ("dy", ("dgrad", "wgrad")),
                                            ("w", ("fprop", None)), ("w", (None, "dgrad"))))
def test_kernels_a_layers_operands_are_the_references(name, operand, gemms):
    """From the same seed, kept or not, of experts too: the values of ufp4's quantizers,
    but codes times FP32 scales are rounded to bfloat16."""
    recipe = replace(RECIPES[name], sr=("x", "dy"))
    x = randn(*((2, 32, 64) if operand == "w" else (64, 32)), seed=2)
    torch.manual_seed(3)
    made = kernels.quantize(x.to(DEVICE), recipe, operand, *gemms, grouped=operand == "w")
    torch.manual_seed(3)
    for got, gemm, v in zip(made, gemms, (x, x.mT)):
        if gemm is None:
            assert got is None
            continue
        expected = recipe.quantizer(operand, gemm)(v)
        if DEVICE == "cpu" or operand == "w":           # a GPU draws other keys than a CPU
            t = 1.0 if got.tensor_scale is None else got.tensor_scale.cpu()
            expected = expected.bfloat16().float() if "ufp4" in name else expected
            assert torch.equal(got.decoded().cpu().float() * t, expected)
        assert (got.codes.dtype == torch.uint8) >= (operand == "x" and gemm == "wgrad")

@needs_kernels
def test_kernels_a_new_seed_has_new_signs_and_compiles_nothing():
    """The signs are data: neither the name of an operand nor a kernel depends on them."""
    x = randn(32, 32).to(DEVICE)
    made = [kernels.quantize(x, replace(RECIPES["ufp4"], sign_seed=seed), "x", "fprop")[0]
            for seed in (0, 1)]
    assert made[0].name == made[1].name and not torch.equal(made[0].codes, made[1].codes)
    for seed, got in enumerate(made):
        expected = Quantizer(signs=random_signs(seed))(x.cpu()).bfloat16()
        assert torch.equal(got.decoded().cpu(), expected)
    assert kernels.signs_on(1, 16, x.device) is kernels.signs_on(1, 16, x.device)

# ---- The kernels' products, and a layer on them --------------------------------------
def within(got, a, b, rounded=False, results=0):
    """|got - a b^T| is at most what the arithmetic can lose, for float64 a (M, K), b (N, K):
    2^-8 of each, if they were `rounded` to bfloat16; 2^-23 of the terms with each of K
    additions in float32; 2^-8 of the sum whenever it is rounded to bfloat16, `results`
    times."""
    terms = a.abs() @ b.abs().T
    lost = terms * (((1 + 2.0**-8) ** 2 - 1 if rounded else 0) + a.shape[1] * 2.0**-23)
    lost += ((1 + 2.0**-8) ** results - 1) * (terms + lost)
    return bool(((got.double() - a @ b.T).abs() <= lost).all())

# The interpreter reads E4M3 scales as E8M0 in dot_scaled, so fp4x4 is tested with E8M0 ones.
@needs_kernels
@pytest.mark.parametrize("path, fmt, scale", (
    ("fp4", "e2m1", "e8m0"), ("fp8", "e1m2", "e8m0_up"), ("fp4x4", "e1m2", "e8m0_up"),
    ("cublas", "e1m2", "e4m3_up"), ("cublas", "e1m2", "fp32")))
def test_kernels_matmul_multiplies_the_decoded_operands(path, fmt, scale, monkeypatch):
    """Ragged tiles in M, N and K. Codes and scales multiply exactly: only sums differ."""
    if path != "cublas" and not kernels.INTERPRET:
        pytest.skip("runs where the hardware has such a path, or in the interpreter")
    q = Quantizer(FORMATS[fmt], SCALES[scale], BLOCKS[scale], SIGNS)
    if path != "cublas":
        monkeypatch.setitem(kernels.NATIVE, (kernels.BITS[fmt][0], "e8m0", 32), (path, ()))
    x, w = randn(129, 160), randn(130, 160, seed=1)
    forms = ("packed" if path == "cublas" else "swizzled", "")
    a, b = (quantized(v, q, None, forms)[0] for v in (x, w))
    if scale != "e4m3_up":
        a, b = a._replace(tensor_scale=None), b._replace(tensor_scale=None)
    for dtype, results in ((torch.float32, 0), (torch.bfloat16, 1)):
        with torch.autocast(DEVICE, torch.bfloat16):                    # rounds no sum
            got = kernels.matmul(a, b, dtype).cpu()
        assert got.dtype == dtype
        assert within(got, q(x).double(), q(w).double(), scale == "fp32", results)

def test_kernels_routes():
    """The path of each recipe, and the combinations that a Triton version gets wrong."""
    def path(name, arch, version=(3, 9)):
        return gpu.route(RECIPES[name], arch, version)

    archs = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "gfx950")
    for arch in archs:
        assert path("bf16", arch) == "bf16"
        assert path("ufp4", arch) == path("e2m1", arch) == "cublas"
    assert [path("nvfp4", a) for a in archs] == ["cublas"] * 2 + ["fp4"] * 3 + ["cublas"]
    assert [path("mxfp4", a) for a in archs] == ["cublas"] * 2 + ["fp4"] * 4
    assert [path("ufp4-mx", a) for a in archs] == ["cublas"] * 2 + ["fp8"] * 4
    assert [path("ufp4-e4m3", a) for a in archs] == ["cublas"] * 4 + ["fp4x4", "cublas"]
    assert path("nvfp4", "sm_121", (3, 7)) == "cublas"
    assert path("nvfp4", "sm_121", (3, 8)) == "fp4"
    other = replace(FORMATS["e2m1"], levels=(0.0, 1.0, 5.0))
    for changed, expected in (
            ({"scale": "e4m3", "fmt": "int4"}, "cublas"), ({"block": 8}, "reference"),
            ({"rht_block": 8}, "reference"), ({"scale": max}, "reference"),
            ({"fmt": other}, "reference")):
        assert gpu.route(replace(RECIPES["ufp4"], **changed), "sm_120") == expected

@pytest.fixture(scope="module", autouse=True)
def lowered(request):
    """What is compiled for other GPUs: in processes beside the tests, from the first on."""
    tests = [item for item in request.session.items if "compile_to" in item.name]
    calls = [test.callspec.params["call"] for test in tests]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield {call: pool.submit(bench.lowering, *call) for call in calls}

# The count is of one program's code. On sm_10x an instruction is 128 x 256 x 256 bits of K,
# and the loop's first step is peeled off it; mma.sync has 16 x 8 x 256 bits a warp.
@needs_kernels
@pytest.mark.parametrize("call, instruction, count", (
    (("matmul_kernel", "nvfp4", "sm_100"), "tcgen05.mma.cta_group::1.kind::mxf4nvf4", 8),
    (("matmul_kernel", "ufp4-mx", "sm_103"), "tcgen05.mma.cta_group::1.kind::mxf8f6f4", 8),
    (("matmul_kernel", "ufp4-e4m3", "sm_120"), "mma.sync.aligned.m16n8k64.row.col."
     "kind::mxf4nvf4.block_scale.scale_vec::4X", 4 * 128 // 16 * 128 // 8 // 8),
    (("matmul_kernel", "mxfp4", "gfx950"), "v_mfma_scale_f32_32x32x64_f8f6f4", 4 * 4 * 2 // 4)))
def test_kernels_what_products_compile_to(call, instruction, count, lowered):
    got = lowered[call].result()
    assert got.get("instruction", got).startswith(instruction) and got["count"] == count, got
    assert (got["spills"] or 0) <= 12, got

@needs_kernels
@pytest.mark.parametrize("call", [("quantize_kernel", "dY of a layer", "sm_90")])
def test_kernels_what_quantizers_compile_to(call, lowered):
    """All of its code, per element of a tile; it keeps (nearly) all it needs in registers."""
    got = lowered[call].result()
    assert got["spills"] <= 12 and got["per_element"] < 68, got

def as_if_on(arch, monkeypatch):
    """In the interpreter, which has no GPU but multiplies as Blackwell: routes of `arch`."""
    monkeypatch.setattr(kernels, "architecture", lambda device: arch)
    for cached in (kernels.layer_operand, kernels.failed_check):
        cached.cache_clear()

@pytest.fixture
def forget():
    """What a test made the kernels remember of a GPU that is not here, they forget."""
    yield
    if works:
        for cached in (kernels.layer_operand, kernels.failed_check):
            cached.cache_clear()

@needs_kernels
@pytest.mark.parametrize("name, grouped, arch, paths", (
    ("ufp4", False, "sm_120", []), ("ufp4", True, "sm_90", []), ("nvfp4", False, "sm_90", []),
    ("nvfp4", True, "sm_120", []), ("mxfp4", True, "sm_120", []),
    ("mxfp4", False, "sm_120", ["fp4"]), ("ufp4-mx", False, "sm_120", ["fp8"])))
def test_kernels_a_layer_equals_the_reference(name, grouped, arch, paths, forget, monkeypatch):
    """Both passes, from the same seed, on Blackwell's paths too, with tokens that fill no
    block. Exact up to the order of sums; with experts or FP32 scales up to bfloat16."""
    if kernels.INTERPRET:
        as_if_on(arch, monkeypatch)
    else:                                       # what this GPU has
        path = kernels.route(RECIPES[name], kernels.architecture(torch.device(DEVICE)))
        paths = [] if grouped or path == "cublas" else [path]
    offsets = torch.tensor([5, 40], device=DEVICE) if grouped else None
    taken, results, made = [], [], kernels.product_shape
    x = randn(40, 64).to(DEVICE).requires_grad_()
    w = randn(*([2] if grouped else []), 32, 64, seed=1).to(DEVICE).requires_grad_()
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    if kernels.INTERPRET and arch == "sm_120" and name == "nvfp4":
        # whose dot_scaled reads E4M3 scales as E8M0, which experts do not need
        monkeypatch.setattr(kernels, "failed_check", lambda *args: None)
    assert kernels.why_not(RECIPES[name], x.device, x.dtype) is None    # it checks itself
    monkeypatch.setattr(kernels, "product_shape", lambda *a: taken.append(a[0]) or made(*a))
    for backend in ("triton", "torch"):
        monkeypatch.setenv("UFP4_BACKEND", backend)
        torch.manual_seed(4)
        y = ufp4.linear(x, w, name, offsets)
        results.append((y, *torch.autograd.grad(y, (x, w), randn(40, 32, seed=2).to(DEVICE))))
    # 48 tokens, in blocks of 16, are no whole 16 bytes of codes: GEMM 3 of nvfp4 decodes
    assert taken == paths * (2 if name == "nvfp4" else 3)
    for got, expected in zip(*results):
        assert got.dtype == torch.float32 and got.shape == expected.shape
        error = (got - expected).abs().max() / expected.abs().max()
        assert error < (2.0**-7 if grouped or name == "ufp4" else 2.0**-20)

@needs_kernels
@pytest.mark.parametrize("name, most", (("ufp4", 0.38), ("nvfp4", 0.29), ("mxfp4", 0.27)))
def test_kernels_keep_the_input_in_4_bits(name, most, monkeypatch):
    """Bytes that autograd keeps of X, over bfloat16's; nothing with a frozen weight. (X^T is
    as large as swizzled scales are filled up: 128 rows, four blocks.)"""
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    x = randn(128, 128).to(DEVICE).requires_grad_()
    for training in (True, False):
        w, kept = randn(32, 128, seed=1).to(DEVICE).requires_grad_(training), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            ufp4.linear(x, w, name)
        ratio = sum(t.nbytes for t in kept if t is not w) / (2 * x.numel())
        assert 0.25 < ratio <= most if training else ratio == 0

@needs_kernels
@pytest.mark.parametrize("name", ("ufp4", "nvfp4"))
def test_kernels_take_a_batch_without_tokens_and_frozen_tensors(name, monkeypatch):
    """No tokens: outputs of no rows, and a gradient of zeros. Frozen X or W: no gradient."""
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
        assert ufp4.linear(mode.from_tensor(x), mode.from_tensor(x), recipe).shape == y.shape
    assert torch.equal(ufp4.linear(x, x, recipe), y) and y.isfinite().all()

@needs_kernels
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_kernels_a_layer_on_the_kernels_compiles_without_graph_breaks(backend, monkeypatch):
    """Both passes of a grouped layer in one graph, the same numbers; the seed fixes the
    random bits. (What inductor draws is its own, so dY is to nearest there.)"""
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    recipe = replace(RECIPES["nvfp4"], sr=("dy",) if backend == "aot_eager" else ())
    x, w = (randn(*shape).to(DEVICE).requires_grad_() for shape in ((24, 16), (2, 16, 16)))
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
            assert all(torch.equal(a, b) for a, b in zip(results(graph), results(other)))

# ---- The choice of backend -----------------------------------------------------------
class Mine(ufp4.Recipe):
    pass

@needs_kernels
def test_kernels_backends_are_chosen_and_said(forget, monkeypatch):
    """Unknown: an error. triton: the kernels, or an error. Else what the kernels can't do
    runs on the reference, and a GPU's user is told once."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda:99")         # which no machine has
    odd = (replace(RECIPES["ufp4"], block=8), Mine("mine"))
    monkeypatch.setenv("UFP4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="UFP4_BACKEND=cuda"):
        ufp4.choose_backend(RECIPES["ufp4"], cpu, torch.float32)
    monkeypatch.setenv("UFP4_BACKEND", "triton")
    chosen = ufp4.choose_backend(RECIPES["ufp4"], torch.device(DEVICE), torch.float32)
    assert chosen is kernels.QuantizedMatmul
    for recipe, why in zip(odd, ("blocks and Hadamard matrices of 16", "no subclass of Recipe")):
        with pytest.raises(ValueError, match=why):
            ufp4.choose_backend(recipe, cpu, torch.float32)
    if kernels.INTERPRET or DEVICE == "cuda":
        with pytest.raises(ValueError, match="float32, not torch.float64"):
            ufp4.choose_backend(RECIPES["ufp4"], cpu, torch.float64)
        with pytest.raises(ValueError, match="need a GPU"):
            ufp4.choose_backend(RECIPES["ufp4"], torch.device("meta"), torch.float32)
    monkeypatch.delenv("UFP4_BACKEND")
    for recipe, why in ((odd[0], "of 16"), (odd[1], "subclass"), (RECIPES["e2m1"], "cannot run")):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default")
            for _ in range(3):
                chosen = ufp4.choose_backend(recipe, gpu, torch.float32)
                assert chosen is ufp4.QuantizedMatmul
        assert len(said) == 1 and "runs on the reference" in str(said[0].message)
        assert why in str(said[0].message)

@needs_kernels
@pytest.mark.parametrize("arch", ("sm_90", "sm_120"))
@pytest.mark.parametrize("name", (*QUANTIZED, "e2m1-max3"))
def test_kernels_pass_their_own_check(name, arch, forget, monkeypatch):
    """Every recipe, as its operands are for cuBLAS and for Blackwell's tensor cores."""
    if kernels.INTERPRET:
        if kernels.route(RECIPES[name], arch) == "cublas" and arch == "sm_120":
            pytest.skip("the same as sm_90")
        if kernels.STORED[RECIPES[name].scale] == "e4m3" and arch == "sm_120":
            pytest.skip("the interpreter's dot_scaled reads E4M3 scales as E8M0")
        as_if_on(arch, monkeypatch)
    assert kernels.why_not(RECIPES[name], torch.device(DEVICE), torch.bfloat16) is None

def one_up(f):
    return lambda *args: tuple(v + (v == v) for v in f(*args))

@needs_kernels
@pytest.mark.skipif(works and not kernels.INTERPRET, reason="needs kernels in Python")
@pytest.mark.parametrize("name, broken, where", (
    ("round_to_grid", lambda f: lambda y, rand, Q: f(y * 0.97, rand, Q), "x for fprop: values of row 0, "),
    ("random_128", lambda f: lambda key, first, i: f(key, first + 8, i), "dy for dgrad: values"),
    ("block_scale", one_up, "x for fprop: values of row"),
    ("bind", lambda f: lambda v, n: f(v[::-1], n), "x for fprop: values of row"),
    ("decode_kernel", lambda f: {(3,): lambda *a: None}, "cannot run a kernel here: KeyError"),
    ("matmul", lambda f: lambda *a: f(*a) * 1.02, "GEMM 1: row 0, column 0 of Y")))
def test_kernels_their_check_catches_what_is_broken(name, broken, where, forget, monkeypatch):
    """A warning says what differs and where, and the reference takes over."""
    monkeypatch.setattr(kernels, name, broken(getattr(kernels, name)))
    kernels.failed_check.cache_clear()
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
            print(chosen is ufp4.QuantizedMatmul)
        """
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    said, error = done.stderr.split("Traceback")
    assert done.stdout == "True\nTrue\n" and said.count("'ufp4' runs on") == 1
    assert "ValueError" in error and all("triton" in text for text in (said, error))

def test_kernels_a_plan_needs_no_triton():
    code = """if True:
        import sys
        sys.modules["triton"] = None
        import bench
        bench.main(["plan", "--model", "small"])
        """
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert "path cublas (sm_90)" in done.stdout, done.stderr

