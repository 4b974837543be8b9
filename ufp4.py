"""UFP4: 4-bit pretraining on a uniform grid. The whole method in one file, to be read top to bottom.

The method is "Rethinking Shrinkage Bias in LLM FP4 Pretraining: Geometric Origin, Systemic Impact, and UFP4
Recipe" (Zhao et al., arXiv 2606.20381). In short:

1. A linear layer costs three GEMMs a training step. Write M tokens, K in_features, N out_features:

       GEMM 1  fprop   Y  (M, N) = X    (M, K) W (N, K)^T    contracts over K
       GEMM 2  dgrad   dX (M, K) = dY   (M, N) W (N, K)      contracts over N
       GEMM 3  wgrad   dW (N, K) = dY^T (N, M) X (M, K)      contracts over M

   4-bit training quantizes both operands of all three, in blocks of 16 values along the dimension that the GEMM
   contracts (so X, W and dY are each quantized twice, in two directions). The values of a block share one scale
   s = amax / g_max, its largest magnitude over the largest number of the format. Each becomes the 4-bit code of
   rho(x / s), rho rounding to the format's grid, and stands for Q(x) = s rho(x / s).

2. The accelerator's 4-bit float, E2M1, has magnitudes 0 0.5 1 1.5 2 3 4 6. Where the spacing doubles, at 2 and at
   4, more numbers round down to the level than up to it: with a locally uniform density the expected error in the
   bin of level q_i is (l_i - r_i) / 2, l and r the bin's half-widths: -0.125 at 2 and -0.25 at 4. So rounding to
   nearest shrinks: the slope alpha = <Q(A), A> / <A, A> is below 1 (0.9959 on Gaussian data). Noise averages out
   over a deep network; a factor alpha_A alpha_B in every GEMM A B compounds. A uniform grid has l = r, and its
   slope stays near 1 (1.0006: a density that falls within a bin leaves it a trace of expansion).

3. The random Hadamard transform (RHT) spreads an outlier over its block. That serves a uniform grid, which lacks
   dynamic range. It hurts E2M1, the paper finds: mass moves from the tails to the middle magnitudes, where the
   lopsided bins are.

4. Stochastic rounding (SR) rounds up or down at random, so that the mean is exact, and pays with a larger error each
   time. A bias in the gradient adds up over layers and steps, where noise cancels, so the output gradient dY gets SR.
   X and W do not: in the authors' runs with E2M1, more SR than on dY made things worse.

5. Hence the recipe: a uniform grid (E1M2 or INT4), RHT on both operands of all three GEMMs, SR on dY alone. `RECIPES`
   below has it as one row of data, beside the baselines that it is compared with.

Here the arithmetic is emulated ("fake quantization"): operands are rounded to values that 4 bits can hold, then
multiplied as ordinary floats, in float32 for float32 inputs and in bfloat16 under autocast. A 4-bit code times an
FP32 scale does not fit bfloat16's 8 significant bits, so on that path each operand is rounded once more, by up to
2^-8 of itself; in float32 by 2^-24. Real 4-bit storage is what `quantize` returns, and what a layer keeps of X for
its backward pass. On a GPU the linear layers use kernels.py instead, which does the same in Triton, on packed operands.

    import ufp4
    model = ufp4.convert(model, recipe="ufp4")      # any model with nn.Linear layers, then train as before
"""
import contextlib
import dataclasses
import functools
import math
import os
import random
import warnings
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

# ---------------------------------------------------------------------------------------------------------------
# 1. Formats: what four bits can say


@dataclass(frozen=True)
class Format:
    """A 4-bit element format: a sign and the 3 bits of a magnitude, `c`.

    The low `mbits` bits of c are the mantissa m, the rest is the exponent e. As in IEEE 754, e = 0 is the subnormal
    range, with the same spacing as e = 1 and no hidden bit:

        magnitude = min_normal * 2^-mbits * (m                if e == 0 else
                                             (2^mbits + m) * 2^(e-1))

    E2M1 has exponents 0..3, so the spacing goes 0.5, 0.5, 1, 2: lopsided bins where it changes. (Its code c = 101 has
    e = 10 and m = 1: 1 * 2^-1 * (2 + 1) * 2 = 3.)
    E1M2 has exponents 0 and 1 only, and those two share one spacing: 0 .25 .5 .75 | 1 1.25 1.5 1.75. That is how
    a float with an exponent bit comes to be a uniform grid.
    INT4 has no exponent bits at all: every code is "subnormal", a plain integer 0..7. Its grid is E1M2's times 4;
    since the scale absorbs the 4, E1M2 and INT4 decode to identical values. They differ in the nibble alone: E1M2
    (and E2M1) keep the sign in bit 3, INT4 is two's complement and never uses -8, which has no positive partner.
    """
    name: str
    mbits: int                  # mantissa bits
    min_normal: float           # smallest magnitude with a hidden bit; the spacing is constant below twice this
    max: float                  # g_max: the level that a block's amax is scaled to
    uniform: bool               # equal spacing throughout, so no shrinkage
    twos_complement: bool = False
    other: "Format | None" = None       # a second format, and each block takes the one that errs less (get_format)

    @property
    def levels(self):
        """The 8 magnitudes, ascending; the index is the code without its sign."""
        unit, half = self.min_normal * 2.0**-self.mbits, 1 << self.mbits
        return tuple(unit * (c if c < half else (half + c % half) * 2 ** (c // half - 1)) for c in range(8))

    @property
    def values(self):
        """What each of the 16 nibbles decodes to."""
        if self.twos_complement:
            return self.levels + (-8.0,) + tuple(-v for v in self.levels[:0:-1])
        return self.levels + tuple(-v for v in self.levels)


FORMATS = {f.name: f for f in (
    Format("e2m1", mbits=1, min_normal=1.0, max=6.0, uniform=False),
    Format("e1m2", mbits=2, min_normal=1.0, max=1.75, uniform=True),
    Format("int4", mbits=3, min_normal=8.0, max=7.0, uniform=True, twos_complement=True),
)}
SCALES = ("fp32", "e4m3", "e8m0", "e4m3-nearest", "e4m3-up", "e8m0-floor", "e8m0-up")
GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = ("x", "w", "dy")


def get_format(name):
    """The Format of that name. A suffix restricts the range: "e2m1-max3" scales amax to 3, so that the codes of 4 and
    6 are never used and the grid kept is nearly uniform (the paper's Q4; meant for FP32 scales, the others may round
    down and clip). Two names joined by + let each block choose: "e2m1+e1m2". ValueError if unknown."""
    if not isinstance(name, str):
        raise ValueError(f"a format is given by its name, one of {', '.join(FORMATS)}; got {name!r}")
    first, plus, second = name.partition("+")
    if plus:
        first, second = get_format(first), get_format(second)
        if second.other is not None or first.twos_complement or second.twos_complement:
            raise ValueError("+ joins two formats that have a sign bit, as in e2m1+e1m2 (E1M2 has INT4's values); got "
                             f"{name!r}")
        return dataclasses.replace(first, name=name, other=second)
    base, _, top = name.partition("-max")
    if base in FORMATS:
        levels = {f"{v:g}": v for v in FORMATS[base].levels[1:]}
        if top in levels:
            return dataclasses.replace(FORMATS[base], name=name, max=levels[top])
        if name == base:
            return FORMATS[base]
    raise ValueError(f"unknown format {name!r}: choose from {', '.join(FORMATS)}, restrict one to one of its levels as "
                     "in e2m1-max3, or join two as in e2m1+e1m2")


# ---------------------------------------------------------------------------------------------------------------
# 2. Scales: one per block


def pow2_floor(x):
    """The largest power of two <= x, elementwise, for positive normal float32: the exponent bits alone."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def pow2_ceil(x):
    """The smallest power of two >= x: any mantissa bit carries into the exponent."""
    return ((x.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


E4M3_MAX = 448.0                # 1.75 * 2^8; E4M3's normals start at 2^-6 and have 3 mantissa bits
TINY = 2.0**-149                # the smallest positive float32: keeps a scale of tiny values from rounding to zero


def block_scales(amax, fmt, scale):
    """Scales from the block maxima `amax` (float32, any shape): (block scales, tensor scale).

    fp32  s = amax / g_max, one FP32 a block: the paper's choice (its Table 1).
    e4m3  two levels, as in NVFP4 (arXiv 2509.25149): one FP32 t = amax(tensor) / (448 g_max) for the tensor, and
          s = E4M3(amax / (g_max t)) a block.
    e8m0  a power of two, as in the MX formats of the Open Compute Project (OCP): for E2M1
          s = 2^(floor(log2 amax) - 2), because E2M1's largest numbers, 4 and 6, are 2^2 and more.

    NVFP4 rounds s to nearest and MX rounds it down, so about half of all E4M3 blocks and many E8M0 blocks have
    amax / s > g_max: their largest values clip. Clipping shrinks, and no rounding of the remainder can undo it: the
    slope alpha of E2M1 under *stochastic* rounding on Gaussian data is 1.000 with FP32 scales, but 0.997 (E4M3) and
    0.980 (E8M0, blocks of 16) by these rules (`python bench.py bias`). E2M1 follows the rules of its standards to the
    letter. For a uniform grid, which exists to be free of bias, the same scales round UP: nothing clips, and SR stays
    unbiased, at 1.000 with all three kinds. The price: a coarser grid, and under rounding to *nearest*, as X and W
    have it, a slope of 1.006 (E4M3). A block's largest value then lies below the top level, often rounds up to it,
    and nothing above is there to round down.
    To compare the rules on either grid, a suffix names one: e4m3-nearest, e4m3-up, e8m0-floor, e8m0-up.
    """
    scale, _, rule = scale.partition("-")
    up = rule == "up" if rule else fmt.uniform
    if scale == "fp32":
        s, t = (amax / fmt.max).clamp(min=TINY), 1.0
    elif scale == "e4m3":
        t = ((amax.amax() if amax.numel() else amax.new_zeros(())) / (E4M3_MAX * fmt.max)).clamp(min=TINY)
        r = amax / fmt.max / t
        step = pow2_floor(r.clamp(min=2.0**-6)) * 2.0**-3               # E4M3's spacing at r
        s = (torch.ceil(r / step) if up else torch.round(r / step)) * step
        s = s.clamp(max=E4M3_MAX)
    else:
        r = amax / fmt.max
        s = pow2_ceil(r) if up else pow2_floor(amax) / 2.0 ** math.floor(math.log2(fmt.max))
        s, t = torch.where(r <= 2.0**-127, 2.0**-127, s.clamp(2.0**-127, 2.0**127)), 1.0        # E8M0's range
    return torch.where(amax < math.inf, s, math.nan), t                 # a block with NaN or Inf stays non-finite


# ---------------------------------------------------------------------------------------------------------------
# 3. Rounding: one function for every format, nearest and stochastic


def round_to_grid(a, fmt, noise=None):
    """Round magnitudes `a` (float32, 0 <= a <= fmt.max) to the format's grid.

    The spacing at a is that of its binade (from one power of two to the next), and constant in the subnormal range.
    Divided by it (a power of two, so exactly), a rounds to an integer: to nearest, ties to the even integer, which is
    also the even code; or, given `noise` uniform in (0, 1), stochastically between its two neighbours, up with
    probability equal to the fraction. A value on the grid stays where it is.
    """
    step = pow2_floor(a).clamp(min=fmt.min_normal) * 2.0**-fmt.mbits
    return (torch.round(a / step) if noise is None else torch.floor(a / step + noise)) * step


def random_bytes(shape, device, generator=None):
    """Noise for stochastic rounding: two random bytes an element, uint8 of shape (2, *shape).

    Stochastic rounding needs far fewer random bits than a float32 holds, and on a CPU drawing them is much of its cost.
    `generator` as in torch.rand: None stands for the device's default one, which torch.manual_seed seeds.
    """
    n = 2 * math.prod(shape)
    words = torch.randint(-2**63, 2**63 - 1, (-(-n // 8),), device=device, generator=generator)        # 8 bytes each
    return words.view(torch.uint8)[:n].view(2, *shape)


def centred_noise(bits):
    """(2, ...) random bytes -> float32 in (0, 1), centred: mean exactly 1/2, so a rounding error of at most 2^-17 of
    a step is all the bias that 16 bits leave. Without the half, truncated noise would itself shrink."""
    high, low = bits.float().unbind(0)
    return (high * 256 + low + 0.5) * 2.0**-16


def snap(x, bits, dim, fmt, scale, block, two_d):
    """x (R, C) float32 -> its values on the grid q, block scales s, tensor scale t, with x ~ q * |s| * t.

    `dim` is the blocked dimension: -1 gives q (R, C/block, block) and s (R, C/block, 1); -2 gives
    q (R/block, block, C) and s (R/block, 1, C), which is the transposed operand without transposing it.
    Where a block chose the second of two formats, s has a minus: a scale's sign is a bit that nothing else uses.
    """
    xb = x.unflatten(dim, (-1, block))
    amax = xb.abs().amax(dim, keepdim=True)
    if two_d:                                   # tiles of block x block: `block` neighbouring blocks share an amax
        other = -3 if dim == -1 else -1
        tiles = amax.unflatten(other, (-1, block))
        amax = tiles.amax(other, keepdim=True).expand_as(tiles).reshape(amax.shape)
    noise = None if bits is None else centred_noise(bits.unflatten(dim, (-1, block)))

    def on(f, noise):
        s, t = block_scales(amax, f, scale)
        # Divide: multiplying by a reciprocal changes codes, and overflows for tiny blocks. An E4M3 scale may have
        # rounded to 0, and the block decodes to 0. Clamp before rounding: x / s can exceed g_max by an ulp, or more.
        d = s * t
        a = (xb.abs() / torch.where(d == 0, math.inf, d)).clamp(max=f.max)
        return round_to_grid(a, f, noise), s, t

    q, s, t = on(fmt, noise)
    if fmt.other is not None:                   # choose by nearest rounding: noise in the choice would bias the result
        first, second = (((q * s * t - xb.abs()) ** 2).sum(dim, keepdim=True)
                         for q, s, t in (on(fmt, None), on(fmt.other, None)))
        q2, s2, _ = on(fmt.other, noise)
        q, s = torch.where(second < first, q2, q), torch.where(second < first, -s2, s)
    return torch.copysign(q, xb), s, t


# ---------------------------------------------------------------------------------------------------------------
# 4. The random Hadamard transform


def hadamard(n):
    """The n x n Sylvester-Hadamard matrix, n a power of two, scaled by 1/sqrt(n) to be orthonormal (and symmetric).
    ValueError for another n."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"a Sylvester-Hadamard matrix has a power of two of rows, not {n}")
    h = torch.ones(1, 1, dtype=torch.float32)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h * n**-0.5


def random_signs(seed, n=16):
    """n signs, +1.0 or -1.0, a fixed function of the seed."""
    bits = random.Random(seed).getrandbits(n)
    return tuple(1.0 - 2.0 * (bits >> i & 1) for i in range(n))


def rht(x, signs, n=16, dim=-1):
    """x -> x S H in blocks of n along `dim`: S = diag(signs), H = hadamard(n). Shape kept, result float32.

    Orthonormal, so (X S H) (W S H)^T = X W^T: the GEMM undoes it, if both operands use the same signs and both are
    rotated along the dimension it contracts. Each output is a signed sum of n inputs: outliers spread out. H is
    never formed: log2(n) rounds of sums and differences, in a fixed order, so every machine gets the same bits.
    The result is not rounded to x.dtype: bfloat16 would change about one in 200 of the codes that follow.
    Raises ValueError if the length along dim is not a multiple of n, n not a power of two, or not n signs.
    """
    if n < 1 or n & (n - 1) or x.shape[dim] % n:
        raise ValueError(f"rht needs a power of two that divides the dimension: got n = {n}, dimension {x.shape[dim]}")
    if len(signs) != n:
        raise ValueError(f"rht with n = {n} needs {n} signs, got {len(signs)}")
    dim = dim % x.dim() - x.dim()                       # counted from the end, as unbind and stack below need it
    v = [a * s for a, s in zip(x.float().unflatten(dim, (-1, n)).unbind(dim), signs)]
    h = 1
    while h < n:
        for i in range(0, n, 2 * h):
            for j in range(i, i + h):
                v[j], v[j + h] = v[j] + v[j + h], v[j] - v[j + h]
        h *= 2
    return (torch.stack(v, dim) * n**-0.5).flatten(dim - 1, dim)


# ---------------------------------------------------------------------------------------------------------------
# 5. quantize and fake_quantize


@dataclass
class Quantized:
    """Packed 4-bit values, two a byte."""
    codes: torch.Tensor                 # uint8 (..., K/2): element 2i in the low nibble, 2i + 1 in the high one
    scale: torch.Tensor                 # (..., K/block): float32, float8_e4m3fn or float8_e8m0fnu; signed by a choice
    tensor_scale: torch.Tensor | float  # float32 scalar of the two-level kind; 1.0 for the others
    fmt: Format

    def dequantize(self):
        """float32 (..., K)."""
        return decode(self.codes, self.scale.float(), self.tensor_scale, self.fmt)


STORED = {"fp32": torch.float32, "e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}


def decode(codes, s, t, fmt, dim=-1, dtype=torch.float32):
    """Codes and scales s (float32), packed and blocked along dim, and tensor scale t -> values."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim).flatten(dim - 1, dim).int()
    nibbles = nibbles.unflatten(dim, (s.shape[dim], nibbles.shape[dim] // max(1, s.shape[dim])))
    s = s.unsqueeze(dim)
    q, *q2 = (torch.tensor(f.values, dtype=torch.float32, device=codes.device)[nibbles]
              for f in (fmt, fmt.other) if f is not None)
    return ((torch.where(s < 0, q2[0], q) if q2 else q) * s.abs() * t).flatten(dim - 1, dim).to(dtype)


def check(shape, fmt, scale, block, two_d):
    """Raise ValueError, with what was given and what is allowed, for arguments that quantize can't serve."""
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}: choose from {', '.join(SCALES)}")
    if block < 2 or block % 2:
        raise ValueError(f"block must be even and positive, got {block}: two codes share a byte")
    if not shape or shape[-1] % block or not shape[-1]:
        raise ValueError(f"the last dimension must be a multiple of the block: got K = {shape[-1] if shape else 0}, "
                         f"block = {block}")
    if "+" in str(fmt) and scale != "fp32":
        raise ValueError(f"a choice of two formats, as in {fmt}, needs fp32 scales, whose sign records it; got {scale}")
    if two_d and "+" in str(fmt):
        raise ValueError(f"2-D scaling has one scale a tile, but {fmt} chooses for each block")
    if two_d and (len(shape) < 2 or shape[-2] % block):
        raise ValueError(f"2-D scaling needs both last dimensions to be multiples of {block}, got {tuple(shape)}")
    return get_format(fmt)


def quantize(x, fmt="e1m2", scale="fp32", block=16, stochastic=False, generator=None, two_d=False):
    """Quantize x (..., K), any float dtype, to 4-bit codes in blocks of 1 x `block` along the last dimension.

    fmt "e2m1", "e1m2" or "int4", or see `get_format`; scale "fp32", "e4m3" (meant for block=16) or "e8m0" (for
    block=32), or see `block_scales`. Rounds to nearest, ties to the even code, or stochastically with noise from
    `generator` (None: torch's default one). two_d shares a scale among block x block values of the last two dimensions,
    as NVFP4 does for weights, so that W and W^T quantize alike. Returns a `Quantized`. A block with NaN or Inf decodes
    to NaN; a value within a step of float32's largest may round to infinity, as in any rounding to nearest.
    Raises ValueError for an unknown name, and where K is not a multiple of the block.
    """
    f = check(x.shape, fmt, scale, block, two_d)
    bits = random_bytes((x.numel() // x.shape[-1], x.shape[-1]), x.device, generator) if stochastic else None
    codes, s, t = rotate_pack(x.detach().reshape(-1, x.shape[-1]), bits, None, -1, f, scale, block, two_d)
    s = s.to(STORED[scale[:4]]).view(*x.shape[:-1], x.shape[-1] // block)
    return Quantized(codes.view(*x.shape[:-1], x.shape[-1] // 2), s, t, f)


def fake_quantize(x, fmt="e1m2", scale="fp32", block=16, stochastic=False, generator=None, two_d=False):
    """quantize(...).dequantize(), bit for bit, without packing. Same arguments; float32 (..., K)."""
    f = check(x.shape, fmt, scale, block, two_d)
    flat = x.reshape(-1, x.shape[-1])
    bits = random_bytes(flat.shape, x.device, generator) if stochastic else None
    return fused(rotate_round, flat, bits, None, -1, f, scale, block, two_d, torch.float32).view(x.shape)


def rotate(x, bits, signs, dim, fmt, scale, block, two_d, alpha):
    """RHT (unless signs is None) and snap x (R, C) in blocks along dim; elementwise ops throughout, but for `alpha`,
    which changes the tensor scale so that the slope <Q(x), x> / <x, x> is alpha."""
    x = x.float() if signs is None else rht(x, signs, len(signs), dim)
    q, s, t = snap(x, bits, dim, fmt, scale, block, two_d)
    if alpha is not None:
        unit = x.abs().amax().clamp(min=TINY)                                   # so that squares stay in range
        v, x = (q * s.abs() * t).flatten(dim - 1, dim) / unit, x / unit
        t = t * (alpha * (x * x).sum() / (v * x).sum().clamp(min=TINY))
    return q, s, t


def rotate_round(x, bits, signs, dim, fmt, scale, block, two_d, dtype, alpha=None):
    """x (R, C) -> its quantized values."""
    q, s, t = rotate(x, bits, signs, dim, fmt, scale, block, two_d, alpha)
    v = q * s.abs() * t
    if fmt.twos_complement:                     # INT4 has one zero: -0.0, which its codes can't say, becomes +0.0
        v = torch.where(q == 0, v.abs(), v)
    return v.flatten(dim - 1, dim).to(dtype)


def rotate_pack(x, bits, signs, dim, fmt, scale, block, two_d, alpha=None):
    """x (R, C) -> codes packed along dim, scales in float32, tensor scale. With dim -2 codes (R/2, C) and scales
    (R/block, C) lie as x does, a byte holding two neighbours in a column."""
    q, s, t = rotate(x, bits, signs, dim, fmt, scale, block, two_d, alpha)
    low, high = (encode(v, s, fmt) for v in q.unflatten(dim, (-1, 2)).unbind(dim))
    return (low | high << 4).flatten(dim - 1, dim).to(torch.uint8), s.squeeze(dim), t


def encode(q, s, fmt):
    """The nibbles of values on the grid, int32. A magnitude's code counts the levels up to it (NaN: any will do)."""
    code, *code2 = (sum((q.abs() >= level).to(torch.int32) for level in f.levels[1:])
                    for f in (fmt, fmt.other) if f is not None)
    code = torch.where(s < 0, code2[0], code) if code2 else code
    return torch.where(q.view(torch.int32) < 0, -code & 15 if fmt.twos_complement else code | 8, code)


def fused(f, x, *args):
    """f (rotate_round, rotate_pack or decode) through torch.compile where that pays: one pass over memory in place of
    thirty, the same bits (but `alpha` takes sums, whose order may differ). Compiling takes seconds, once per
    combination of arguments; small tensors do without."""
    x = x.detach()
    plain = x.numel() < 2**14 or type(x) is not torch.Tensor or x.is_meta       # small, or a stand-in without data
    if plain or torch.compiler.is_compiling() or not can_compile(x.device.type):
        return f(x, *args)
    # Sizes of x may vary; the rest, the format's numbers above all, are constants of the compiled code.
    try:
        with torch._dynamo.config.patch(specialize_int=True, specialize_float=True, recompile_limit=64):
            return compiled(f)(x, *args)
    except torch._dynamo.exc.TorchDynamoException as e:     # such as a library half written when a process was killed
        warnings.warn("torch.compile failed, so quantization runs uncompiled and several times slower; deleting its "
                      f"cache ({torch._inductor.codecache.cache_dir()}) may help: {str(e).splitlines()[0]}")
        return f(x, *args)


@functools.cache
def compiled(f):
    import torch._inductor.config as config
    # On a GPU, a compiled "/" may be off by an ulp; ask for IEEE's, where this torch knows the option.
    known = hasattr(getattr(config, "eager_numerics", None), "division_rounding")
    options = {"eager_numerics.division_rounding": True} if known else None
    return torch.compile(f, dynamic=True, options=options)


@functools.cache
def can_compile(device):
    """Whether torch.compile works here: on a CPU it needs a C++ compiler. Says so once if not."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(16, device=device))
        return True
    except Exception as e:
        warnings.warn(f"torch.compile does not work here, so quantization runs uncompiled and several times slower "
                      f"(on a CPU, install a C++ compiler such as g++): {type(e).__name__}: {str(e).splitlines()[0]}")
        return False


# ---------------------------------------------------------------------------------------------------------------
# 6. Recipes: what is quantized how. One row of data each


@dataclass(frozen=True)
class Recipe:
    """How the three GEMMs of a linear layer quantize their operands. dataclasses.replace changes a field.
    Raises ValueError if a field's value is not among those that exist."""
    name: str
    fmt: str | None = "e1m2"            # element format; None: no quantization at all
    scale: str = "fp32"                 # block scales, one of SCALES
    block: int = 16                     # values that share a scale, along the contraction dimension
    rht: tuple = ()                     # GEMMs whose two operands are rotated
    sr: tuple = ()                      # operands rounded stochastically, in each GEMM they enter; the rest: nearest
    two_d: bool = False                 # W in block x block tiles
    rht_block: int = 16                 # size of the Hadamard matrix
    sign_seed: int = 0                  # fixes the random signs of the RHT
    swap: tuple = ()                    # other formats for some operands (or GEMMs), as in ("w:e2m1", "dgrad:e2m1")
    alpha: float | None = None          # give each operand rounded to nearest this slope: 1 undoes its shrinkage
    format: Format = dataclasses.field(init=False, repr=False)          # derived from the fields above
    signs: tuple = dataclasses.field(init=False, repr=False)
    swapped: dict = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        for field, allowed in (("rht", GEMMS), ("sr", OPERANDS)):
            given = getattr(self, field)
            if not isinstance(given, (tuple, list)) or not set(given) <= set(allowed):
                raise ValueError(f"{field} takes a tuple with some of {', '.join(allowed)}; got {given!r}")
            object.__setattr__(self, field, tuple(given))
        object.__setattr__(self, "swap", tuple(self.swap))
        swaps = [str(s).split(":") for s in self.swap]
        if any(len(s) != 2 or s[0] not in GEMMS + OPERANDS for s in swaps) or len({s[0] for s in swaps}) < len(swaps):
            raise ValueError(f"swap takes NAME:FORMAT, NAME one of {', '.join(GEMMS + OPERANDS)}; got {self.swap}")
        if self.alpha is not None and not (isinstance(self.alpha, float) and 0 < self.alpha < math.inf):
            raise ValueError(f"alpha is a slope, a float above 0, or None; got {self.alpha!r}")
        if self.fmt is not None:
            for fmt in [self.fmt] + [fmt for _, fmt in swaps]:
                check((self.block, self.block), fmt, self.scale, self.block, self.two_d)
        hadamard(self.rht_block)
        if self.unit % self.block or self.rht and self.unit % self.rht_block:
            raise ValueError(f"block = {self.block} and rht_block = {self.rht_block}: one must divide the other")
        object.__setattr__(self, "format", None if self.fmt is None else get_format(self.fmt))
        object.__setattr__(self, "swapped", {which: get_format(fmt) for which, fmt in swaps})
        object.__setattr__(self, "signs", random_signs(self.sign_seed, self.rht_block))

    @property
    def unit(self):
        """What in_features and out_features must be multiples of, and tokens are padded to."""
        return max(self.block, self.rht_block if self.rht else 1)

    def format_of(self, operand, gemm):
        """The Format of an operand in a GEMM; where `swap` names both, the operand's."""
        return self.swapped.get(operand) or self.swapped.get(gemm) or self.format


RECIPES = {r.name: r for r in (
    Recipe("bf16", fmt=None),
    Recipe("ufp4", "e1m2", rht=GEMMS, sr=("dy",)),                            # the method (the paper's Table 1)
    Recipe("ufp4-int4", "int4", rht=GEMMS, sr=("dy",)),                       # same values, other nibbles
    Recipe("ufp4-e4m3", "e1m2", "e4m3", rht=GEMMS, sr=("dy",)),               # with NVFP4's two-level scales
    Recipe("ufp4-mx", "e1m2", "e8m0", 32, rht=GEMMS, sr=("dy",)),             # with MX's power-of-two scales
    Recipe("e2m1", "e2m1", rht=("wgrad",), sr=("dy",)),                     # the paper's strong baseline (Table 1)
    Recipe("e2m1-full-rht", "e2m1", rht=GEMMS, sr=("dy",)),
    Recipe("e2m1-max2", "e2m1-max2", rht=GEMMS, sr=("dy",)),                  # 0 .5 1 1.5 2: uniform, but 9 values
    Recipe("e2m1-max3", "e2m1-max3", rht=GEMMS, sr=("dy",)),
    Recipe("e2m1-max4", "e2m1-max4", rht=GEMMS, sr=("dy",)),
    Recipe("e2m1-debiased", "e2m1", rht=GEMMS, sr=("dy",), alpha=1.0),        # e2m1-full-rht without its shrinkage
    Recipe("ufp4-shrunk", "e1m2", rht=GEMMS, sr=("dy",), alpha=0.996),        # ufp4 with E2M1's, on Gaussian data
    # The neighbours' choice per block, the rest as in e2m1 (the paper's section 5 lists them): the maximum to 6 or to 4
    # (Four Over Six, arXiv 2512.02010, which has E4M3 scales), and E2M1 or E1M2 (MixFP4, arXiv 2605.31035).
    Recipe("four-over-six", "e2m1+e2m1-max4", rht=("wgrad",), sr=("dy",)),
    Recipe("mixfp4", "e2m1+e1m2", rht=("wgrad",), sr=("dy",)),
    Recipe("nvfp4", "e2m1", "e4m3", rht=("wgrad",), sr=("dy",), two_d=True),        # arXiv 2509.25149
    Recipe("mxfp4", "e2m1", "e8m0", 32, rht=("wgrad",), sr=("dy",)),        # the e2m1 row with OCP MX scales
)}


def get_recipe(recipe):
    """A Recipe from its name (or itself). ValueError, listing RECIPES, for an unknown one."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}: choose from {', '.join(RECIPES)}")
    return RECIPES[recipe]


# ---------------------------------------------------------------------------------------------------------------
# 7. The three GEMMs


def choose_path(recipe, device, dtype):
    """Which of two implementations of one arithmetic: None for the reference, the functions above; for the Triton
    kernels of kernels.py, which need a GPU, the name of a path of kernels.matmul. The environment's UFP4_BACKEND
    forces one: torch is the reference, triton the kernels."""
    return cached_path(os.environ.get("UFP4_BACKEND"), recipe, device, dtype)


choose_path._dynamo_marked_constant = True      # torch.compiler.assume_constant_result, less its slow imports


@functools.cache
def cached_path(backend, recipe, device, dtype):
    """Says once why a GPU does without the kernels, or without its best path. Raises ValueError for an unknown backend,
    and if triton is asked for, what keeps the kernels from running here."""
    if backend not in (None, "", "torch", "triton"):
        raise ValueError(f"UFP4_BACKEND is torch (the reference), triton (the kernels) or unset; got {backend!r}")
    if backend == "torch" or backend != "triton" and device.type != "cuda":
        return None
    try:
        import kernels
        kernels.require(recipe, device, dtype)
    except Exception as e:
        if backend == "triton":
            raise
        warnings.warn(f"recipe {recipe.name!r} runs on the reference path, several times slower: {e}")
        return None
    path, why = kernels.route(recipe, kernels.architecture(device))
    if path != kernels.route(recipe, kernels.architecture(device), version=(math.inf,))[0]:
        warnings.warn(f"recipe {recipe.name!r} takes the slower path {path!r}: {why}")
    return path


def quantize_operand(x, operand, recipe, path, dtype, rows=None, cols=None, keep=False):
    """X, W or dY, (R, C), for the GEMMs that it enters: GEMM `rows` contracts its rows, GEMM `cols` its columns.

    Returns both operands (None for a GEMM not named), each with the dimension that its GEMM contracts, and that has the
    blocks, last: (R, C) and (C, R). The experts of W (E, N, K) stack up to (E N, K), N being whole blocks. An operand
    is packed 4-bit codes and scales on a path of the kernels, which read x once for both. The reference multiplies
    values, in `dtype`, so it packs columns only to `keep` them for the backward pass.
    """
    x, stochastic, two_d = x.reshape(-1, x.shape[-1]), operand in recipe.sr, recipe.two_d and operand == "w"
    signs = {gemm: recipe.signs if gemm in recipe.rht else None for gemm in (rows, cols)}
    if path:
        import kernels
        seed = torch.randint(2**63 - 1, (1,), device=x.device) if stochastic else None
        return kernels.quantize(x, recipe.format, recipe.scale, recipe.block, bool(rows), bool(cols), signs[rows],
                                signs[cols], seed, two_d=two_d, swizzle=path != "cublas")

    def reference(gemm, dim):
        bits = random_bytes(x.shape, x.device) if stochastic else None
        fmt, alpha = recipe.format_of(operand, gemm), None if stochastic else recipe.alpha
        args = (x, bits, signs[gemm], dim, fmt, recipe.scale, recipe.block, two_d)
        if not (keep and dim == -2):
            return fused(rotate_round, *args, dtype, alpha)
        codes, s, t = fused(rotate_pack, *args, alpha)
        return Quantized(codes, s.to(STORED[recipe.scale[:4]]), t, fmt)         # packed along columns: for restore

    a, b = reference(rows, -1) if rows else None, reference(cols, -2) if cols else None
    return a, b if b is None or keep else b.mT


def matmul(a, b, path, dtype, offs=None, stacked=None):
    """Operands A (M, K) and B (N, K) -> A B^T (M, N) in `dtype`.

    With offs, one product a group: of the rows of A with an expert of B, which stack up along B's dimension `stacked`;
    or, where that is None, of the columns of both.
    """
    if path:
        import kernels
        return kernels.matmul(a, b, path, dtype, offs=offs, stacked=stacked)
    if offs is None:
        return a @ b.mT
    if stacked is not None:
        b = b.unflatten(stacked, (len(offs), -1)).movedim(stacked, 0)           # (E, N, K)
    return F.grouped_mm(a, b.mT, offs=offs)


WEIGHTS = None                                  # inside quantized_once, what has been quantized


@contextlib.contextmanager
def quantized_once():
    """A context in which each weight is quantized once, however often it is used: put it around the micro-batches of an
    optimizer step. It holds every weight's operands until it ends, on the kernels' paths in 4 bits. Eager mode only."""
    global WEIGHTS
    before, WEIGHTS = WEIGHTS, {}
    try:
        yield
    finally:
        WEIGHTS = before


def quantize_weight(w, recipe, path, dtype, rows=None, cols=None):
    """quantize_operand of W, or inside quantized_once what it returned before. Writing through w.data goes unseen; and
    with noise on W, each use has its own, which a recomputed forward pass draws again."""
    if torch.compiler.is_compiling() or WEIGHTS is None or "w" in recipe.sr:
        return quantize_operand(w, "w", recipe, path, dtype, rows=rows, cols=cols)
    key = (id(w), w._version, recipe, path, dtype)
    if key not in WEIGHTS:                      # which keeps w too: its id is not given to another
        WEIGHTS[key] = w, quantize_operand(w, "w", recipe, path, dtype, rows="fprop", cols="dgrad")
    return WEIGHTS[key][1]


def place_tokens(m, offs, unit, device):
    """Fill each group of m tokens with zeros to whole blocks: (rows that the tokens move to, where the groups end then,
    how many rows there are). Rows None: the tokens stay.

    A zero quantizes to zero and adds nothing to a sum over tokens, so wgrad is unchanged, but no block straddles two
    experts. The padded length depends on shapes alone: asking the GPU how many rows it needs would stall it.
    """
    if offs is None:
        return None, None, -(-m // unit) * unit
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))                         # unit 16, offs 5 5 40: sizes 5  0 35
    room = (sizes + unit - 1) // unit * unit                                    # rounded up:               16  0 48
    ends = torch.cumsum(room, 0)                                                # the padded groups end at  16 16 64
    shift = (ends - room) - (offs - sizes)                                      # each group moves by        0 11 11
    tokens = torch.arange(m, device=device)
    rows = tokens + shift[torch.searchsorted(offs, tokens, right=True)]
    return rows, ends.to(torch.int32), (m + len(offs) * (unit - 1)) // unit * unit


def spread(x, rows, total):
    """Tokens x (m, C) -> (total, C), token i at rows[i], zeros elsewhere."""
    if rows is None:
        return x if len(x) == total else F.pad(x, (0, 0, 0, total - len(x)))
    return x.new_zeros(total, x.shape[1]).index_copy_(0, rows, x)


def gather(y, rows, m):
    """The inverse: (total, C) -> (m, C)."""
    if rows is None:
        return y if len(y) == m else F.pad(y, (0, 0, 0, m - len(y)))
    return y[rows]


class QuantizedMatmul(torch.autograd.Function):
    """Y = X W^T with all three training GEMMs on quantized operands. Between the passes it keeps X's operand of GEMM 3,
    in 4 bits, and not X; W is at hand in any case. M here includes the zeros that fill up blocks of tokens."""

    @staticmethod
    def forward(ctx, x, w, offs, recipe, path, training):
        m, unit = len(x), recipe.unit if path in (None, "cublas") else max(32, recipe.unit)
        rows, offs, total = place_tokens(m, offs, unit, x.device)
        how = dict(recipe=recipe, path=path, dtype=x.dtype)
        x_rows, x_cols = quantize_operand(spread(x, rows, total), "x", **how, rows="fprop",
                                          cols="wgrad" if training else None, keep=True)
        w_rows, _ = quantize_weight(w, **how, rows="fprop")
        # GEMM 1, fprop: Y (M, N) = X (M, K) W (N, K)^T, blocks along K
        y = matmul(x_rows, w_rows, path, x.dtype, offs, stacked=0)
        ctx.how, ctx.total, ctx.fmt = how, total, x_cols.fmt if training else None
        kept = (x_cols.codes, x_cols.scale, x_cols.tensor_scale) if training else ()
        ctx.save_for_backward(w, rows, offs, *(t if isinstance(t, torch.Tensor) else None for t in kept))
        return gather(y, rows, m)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        w, rows, offs, *kept = ctx.saved_tensors
        need_dx, need_dw, how, m = *ctx.needs_input_grad[:2], ctx.how, len(dy)
        path, dx, dw = how["path"], None, None
        dy_rows, dy_cols = quantize_operand(spread(dy, rows, ctx.total), "dy", **how, rows="dgrad" if need_dx else None,
                                            cols="wgrad" if need_dw else None)
        if need_dx:
            # GEMM 2, dgrad: dX (M, K) = dY (M, N) W^T (K, N)^T, blocks along N
            _, w_cols = quantize_weight(w, **how, cols="dgrad")
            dx = gather(matmul(dy_rows, w_cols, path, dy.dtype, offs, stacked=1), rows, m)
        if need_dw:
            # GEMM 3, wgrad: dW (N, K) = dY^T (N, M) X^T (K, M)^T, blocks along M
            dw = matmul(dy_cols, restore(kept, ctx.fmt, **how), path, dy.dtype, offs).view(w.shape).to(w.dtype)
        return dx, dw, None, None, None, None


def restore(kept, fmt, recipe, path, dtype):
    """The operand whose codes, scales and tensor scale were kept."""
    codes, scale, t = kept
    if path:
        import kernels
        return kernels.Packed(codes, scale, t, fmt, recipe.scale, recipe.block, path != "cublas")
    return fused(decode, codes, scale.float(), 1.0 if t is None else t, fmt, -2, dtype).mT


def linear(x, w, recipe, offs=None):
    """X (..., K) times W (N, K)^T under a recipe -> (..., N). Differentiable; like F.linear, obeys autocast.

    Grouped, for mixtures of experts: W (E, N, K), X (M, K) sorted by expert, and offs (E,), the row at which each
    expert's tokens end (offs[-1] = M; an expert without tokens repeats its predecessor's end). Under E4M3 scales all
    experts share one tensor scale.
    On a GPU the kernels multiply in bfloat16 even if x is float32 (see kernels.matmul); Y has x's dtype in any case.
    In float16 a rotated operand can overflow: RHT makes a value up to 4 times as large. Gradients of gradients and
    torch.func are not supported.
    Raises ValueError if N or K is not a multiple of recipe.unit, or the shapes do not fit (what offs holds is not
    checked: that would stall a GPU).
    """
    recipe, device = get_recipe(recipe), x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    fits = w.dim() == 2 if offs is None else w.dim() == 3 and x.dim() == 2 and offs.shape == w.shape[:1]
    if not x.is_floating_point() or x.shape[-1] != w.shape[-1] or not fits:
        raise ValueError(f"linear needs floats X (..., K) and W (N, K), or X (M, K), W (E, N, K) and offs (E,); got "
                         f"{x.dtype} {tuple(x.shape)}, {tuple(w.shape)} and "
                         f"{'no offs' if offs is None else tuple(offs.shape)}")
    offs = None if offs is None else offs.to(torch.int32)
    if recipe.fmt is None:
        return F.linear(x, w.to(x.dtype)) if offs is None else F.grouped_mm(x, w.to(x.dtype).mT, offs=offs)
    check_features(*w.shape[-2:], recipe)
    path = choose_path(recipe, x.device, x.dtype)
    if path and path != "cublas" and (offs is not None or w.shape[-1] % 32 or w.shape[-2] % 32):
        path = "cublas"                         # groups, and packed rows that are not whole 16 bytes
    training = torch.is_grad_enabled() and w.requires_grad
    y = QuantizedMatmul.apply(x.reshape(-1, x.shape[-1]), w, offs, recipe, path, training)
    return y.view(*x.shape[:-1], w.shape[-2])


def check_features(n, k, recipe, name="a linear layer"):
    if recipe.fmt is not None and (n % recipe.unit or k % recipe.unit):
        raise ValueError(f"recipe {recipe.name!r} needs features in multiples of {recipe.unit}, but {name} has "
                         f"in_features = {k}, out_features = {n}; leave it out with skip=, or change its size")


# ---------------------------------------------------------------------------------------------------------------
# 8. Into a model


class Linear(nn.Linear):
    """nn.Linear whose three GEMMs follow a recipe (a name or a Recipe). The bias stays in high precision."""

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, recipe="ufp4"):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = get_recipe(recipe)
        check_features(out_features, in_features, self.recipe)

    def forward(self, x):
        if self.recipe.fmt is None:
            return super().forward(x)
        y = linear(x, self.weight, self.recipe)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self):
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


SKIP = ("lm_head",)


def convert(model, recipe="ufp4", skip=SKIP):
    """Make every nn.Linear of a model follow a recipe, in place, and return the model.

    Each layer stays the same object with the same parameters (so dtype, device, bias, ties and hooks survive) and
    changes class to `Linear`. `skip` names layers to leave alone: a whole dotted name, or any part of it ("lm_head",
    "blocks.0"). Converting again changes the recipe.

    Not reached: subclasses of nn.Linear (the projections of nn.MultiheadAttention, parametrized layers), and other
    classes that multiply (transformers' Conv1D). nn.TransformerEncoderLayer in evaluation without gradients uses its
    weights without calling its layers; torch.backends.mha.set_fastpath_enabled(False) makes it call them.

    Raises ValueError, before anything is changed, if the recipe is unknown, a name that the caller skips matches no
    linear layer, no layer is left, a layer's forward was replaced, or its size does not fit the recipe's blocks.
    """
    recipe = get_recipe(recipe)
    skip = (skip,) if isinstance(skip, str) else skip
    layers = {name: m for name, m in model.named_modules(remove_duplicate=False) if type(m) in (nn.Linear, Linear)}
    skipped = {s: [name for name in layers if f".{s}." in f".{name}."] for s in skip}
    unknown = [s for s, names in skipped.items() if not names]
    if unknown and skip is not SKIP:
        raise ValueError(f"skip names {', '.join(map(repr, unknown))}, which matches no linear layer; there are: "
                         f"{', '.join(layers) or 'none'}")
    kept = {id(layers[name]) for names in skipped.values() for name in names}
    chosen = {name: m for name, m in layers.items() if id(m) not in kept}
    if not chosen:
        raise ValueError(f"nothing to convert: the model's nn.Linear layers are {', '.join(layers) or 'none'}, "
                         f"skipped: {', '.join(skip) or 'none'}")
    for name, m in chosen.items():
        check_features(m.out_features, m.in_features, recipe, f"layer {name!r}")
        if "forward" in vars(m):                        # as accelerate's hooks do: Linear's would never be called
            raise ValueError(f"layer {name!r} has had its forward replaced; convert the model before that, or skip it")
    encoder = any(isinstance(m, nn.TransformerEncoderLayer) for m in model.modules())
    if encoder and torch.backends.mha.get_fastpath_enabled():
        warnings.warn("nn.TransformerEncoderLayer bypasses its converted layers in evaluation without gradients; "
                      "torch.backends.mha.set_fastpath_enabled(False) prevents that")
    for m in chosen.values():
        m.__class__, m.recipe = Linear, recipe
    return model
