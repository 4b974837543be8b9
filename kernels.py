"""Triton kernels of UFP4: 4-bit tensors, made in one pass over memory and multiplied packed.

Layouts, in the letters of ufp4.py (a linear layer has M tokens, N out_features, K in_features). A packed operand is
(rows, K): K is always the dimension that its GEMM contracts, and the last one, whatever it was in the input.

1. codes   uint8 (rows, K/2). Element 2i is the low nibble of byte i, 2i + 1 the high one. Packed along K alone: packed
           along rows, the hardware's FP4 products run at the FP8 rate at best, and are wrong at worst (triton #11734).
2. scales  (rows, K/block), float32, float8_e4m3fn or float8_e8m0fnu. With `swizzle`, stored in the order in which
           tensor memory takes them, uint8 (rows/128, K/block/4, 32, 16), zero-padded: scale (r, g) is at
           [r // 128, g // 4, r % 32, (r // 32 % 4) * 4 + g % 4].
3. tiles   A program holds x[r0 : r0 + TR, c0 : c0 + TC] in registers, read once. Blocks along its rows are quantized
           as they lie, blocks along its columns from the transposed tile by the same code: that gives the second
           operand, (C, R), packed along R. A ragged last block of R is filled with zeros.
4. a unit  is what one thread owns: one block, or the larger of block and Hadamard size, unpacked to a tuple of
           tensors that hold element i of every unit. The transform is then additions between registers, the signs
           cost nothing, and no thread waits for another.
5. noise   16 bits an element. Elements 8g .. 8g+7 of the packed operand, counted row by row, share the four words of
           Philox4x32-10 with key `seed` and counter (offset + g, stream, 0, 0), stream 0 for rows and 1 for columns;
           element 8g + j takes word j // 2, its low half for even j. noise() gives the same bits to ufp4.quantize.

The specification is ufp4.py: codes and scales equal those of `ufp4.snap` bit for bit (a block that holds NaN or Inf
has a NaN scale in both, and codes without meaning). What that takes: float32 throughout, the butterfly in the order
of `ufp4.rht`, correctly rounded division, ties to even, scales rounded by integer arithmetic.
This file imports neither ufp4.py nor train.py. `fmt` is an ufp4.Format, or anything with its fields.
"""
import math
import os
import re
from dataclasses import dataclass

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as e:
    raise ImportError("kernels.py needs Triton 3.6 or newer: pip install triton (Linux); ufp4.py works without") from e

VERSION = tuple(int(n) for n in triton.__version__.split("+")[0].split(".")[:2])
if VERSION < (3, 6):
    raise ImportError(f"kernels.py needs Triton 3.6 or newer, found {triton.__version__}: pip install -U triton")
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")        # kernels run on the CPU, in numpy


# ---------------------------------------------------------------------------------------------------------------
# 1. Units: tuples of registers


@triton.jit
def unbind(x, n: tl.constexpr):
    """Tile (B, n) -> n tensors (B,): element i of every unit."""
    if n == 1:
        return (tl.reshape(x, [x.numel]),)
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, [x.numel // n, 2, n // 2]), [0, 2, 1]))
        return unbind(low, n // 2) + unbind(high, n // 2)


@triton.jit
def bind(v, n: tl.constexpr):
    """The inverse: n tensors (B,) -> (B, n)."""
    if n == 1:
        return tl.expand_dims(v[0], 1)
    else:
        x = tl.join(bind(v[0:n // 2], n // 2), bind(v[n // 2:n], n // 2))
        return tl.reshape(tl.permute(x, [0, 2, 1]), [x.numel // n, n])


@triton.jit
def butterfly(v, n: tl.constexpr):
    """v -> v H sqrt(n): halves first, then their sums and differences; each sum is the one that ufp4.rht forms."""
    if n == 1:
        return v
    else:
        a = butterfly(v[0:n // 2], n // 2)
        b = butterfly(v[n // 2:n], n // 2)
        sums, differences = (), ()
        for i in tl.static_range(n // 2):
            sums += (a[i] + b[i],)
            differences += (a[i] - b[i],)
        return sums + differences


@triton.jit
def rotate(v, UNIT: tl.constexpr, N: tl.constexpr, SIGNS: tl.constexpr):
    """The random Hadamard transform of a unit in blocks of N, in float32. Bit i of SIGNS negates element i of each."""
    out = ()
    for start in tl.static_range(0, UNIT, N):
        signed = ()
        for i in tl.static_range(N):
            signed += (v[start + i] * -1.0 if (SIGNS >> i) & 1 else v[start + i],)      # -v is 0 - v in Triton 3.6:
        turned = butterfly(signed, N)                                                   # it would lose -0.0
        for i in tl.static_range(N):
            out += (turned[i] * N**-0.5,)
    return out


@triton.jit
def load_units(x, T: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr, SIGNS: tl.constexpr):
    """Tile x (T, K) -> its units as float32, rotated unless SIGNS is None."""
    raw = unbind(tl.reshape(x, [x.numel // UNIT, UNIT]), UNIT)
    v = ()
    for i in tl.static_range(UNIT):
        v += (raw[i].to(tl.float32),)
    if SIGNS is not None:
        v = rotate(v, UNIT, N, SIGNS)
    return v


@triton.jit
def largest(v, start: tl.constexpr, n: tl.constexpr):
    """max |v[i]| over n elements; NaN wins."""
    m = tl.abs(v[start])
    for i in tl.static_range(start + 1, start + n):
        m = tl.maximum(m, tl.abs(v[i]), propagate_nan=tl.PropagateNan.ALL)
    return m


# ---------------------------------------------------------------------------------------------------------------
# 2. Numbers: the arithmetic of ufp4.block_scales and ufp4.round_to_grid on bits


@triton.jit
def bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def number(b):
    return b.to(tl.float32, bitcast=True)


@triton.jit
def block_scale(amax, t, SCALE: tl.constexpr, MAX: tl.constexpr, TOP: tl.constexpr, UNIFORM: tl.constexpr):
    """ufp4.block_scales: amax -> (what is stored, the scale as float32). TOP is floor(log2 MAX)."""
    r = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    finite = amax < float("inf")
    if SCALE == "fp32":
        s = tl.where(finite, number(tl.maximum(bits(r), 1)), float("nan"))  # at least the least float32, 2^-149
        return s, s
    elif SCALE == "e4m3":
        # 3 mantissa bits, normal from 2^-6: the spacing at r is 2^-3 of its binade. With the binade's exponent as k
        # steps above 2^-6 and r = n spacings (8 <= n <= 16, less below 2^-6), the byte is 8 k + n: a carry is right.
        t += tl.zeros(amax.shape, tl.float32)
        r = tl.div_rn(r, t)
        finite &= t == t
        e = bits(tl.where(r < 2.0**-6, 2.0**-6, r)) & 0x7F800000
        n = r * number(0x7F000000 - e + (3 << 23))                          # r / (2^-3 of its binade), exactly
        n = tl.ceil(n) if UNIFORM else (n + 12582912.0) - 12582912.0        # 1.5 * 2^23: rounds to the even integer
        byte = tl.minimum(n.to(tl.int32) + (e >> 20) - (127 - 6) * 8, 0x7E)             # 0x7E is 448, the largest
        s = tl.minimum(n * number(e - (3 << 23)), 448.0)
        return tl.where(finite, byte, 0x7F).to(tl.uint8), tl.where(finite, s, float("nan"))
    else:
        if UNIFORM:
            s = number((bits(r) + 0x007FFFFF) & 0x7F800000)                 # the power of two above, or at, r
        else:
            s = number(bits(amax) & 0x7F800000) * 2.0**-TOP                 # the one below amax, over 2^TOP
        s = tl.minimum(tl.maximum(bits(s), 0x00400000), 0x7F000000)         # 2^-127 and 2^127, E8M0's range
        s = tl.where(bits(r) <= 0x00400000, 0x00400000, s)
        s = tl.where(finite, number(s), float("nan"))
        return (bits(s) >> 23).to(tl.uint8), s          # E8M0 is float32's exponent: 0 for the subnormal 2^-127


@triton.jit
def encode(y, noise, MBITS: tl.constexpr, MIN_EXP: tl.constexpr, UNIFORM: tl.constexpr):
    """ufp4.round_to_grid: 0 <= y <= g_max -> its code without the sign, in the low 4 bits.

    In the binade 2^k times the smallest normal, y is n spacings, and its code is n + k 2^mbits. Adding 1.5 * 2^23
    spacings leaves a float32 whose last bit is worth one spacing: the addition rounds y, ties to even, and n is the
    difference of the bits. A uniform grid is all one binade, k = 0. With noise, n = floor(y / spacing + noise).
    """
    if UNIFORM:
        if noise is None:
            return bits(y + 12582912.0 * 2.0**(MIN_EXP - MBITS))
        else:
            return (y * 2.0**(MBITS - MIN_EXP) + noise).to(tl.int32)
    else:
        e = bits(tl.maximum(y, 2.0**MIN_EXP)) & 0x7F800000
        k = (e >> (23 - MBITS)) - ((127 + MIN_EXP) << MBITS)
        if noise is None:
            magic = e + ((23 - MBITS) << 23) + (1 << 22)
            return bits(y + number(magic)) - magic + k
        else:
            return (y * number(0x7F000000 - e + (MBITS << 23)) + noise).to(tl.int32) + k


@triton.jit
def random_words(seed, group, stream, n: tl.constexpr):
    """4 n random words for groups group .. group + n - 1 of 8 elements (layout 5)."""
    words = ()
    for i in tl.static_range(n):
        counter = group + i
        w0, w1, w2, w3 = tl.philox(seed, counter, counter * 0 + stream, counter * 0, counter * 0)
        words += (w0, w1, w2, w3)
    return words


@triton.jit
def centred(word, HIGH: tl.constexpr):
    """16 bits h of a word -> (h + 1/2) / 2^16: h as mantissa bits of a number in [1, 2), less 1 - 2^-17. Exact."""
    h = (word >> 9) & 0x7FFF80 if HIGH else (word << 7) & 0x7FFF80
    return number((h | 0x3F800000).to(tl.int32)) - (1.0 - 2.0**-17)


# ---------------------------------------------------------------------------------------------------------------
# 3. Quantize


@triton.jit
def load_tile(x_ptr, r0, c0, R, C, stride_r, stride_c, TR: tl.constexpr, TC: tl.constexpr):
    """x[r0 : r0 + TR, c0 : c0 + TC], zeros outside. 64 bits locate the tile, 32 what is within it."""
    r, c = tl.arange(0, TR)[:, None], tl.arange(0, TC)[None, :]
    base = x_ptr + r0.to(tl.int64) * stride_r + c0.to(tl.int64) * stride_c
    return tl.load(base + r * stride_r + c * stride_c, mask=(r < R - r0) & (c < C - c0), other=0.0)


@triton.jit
def amax_kernel(x_ptr, amax_ptr, R, C, stride_r, stride_c, ROWS: tl.constexpr, COLS: tl.constexpr,
                ROW_SIGNS: tl.constexpr, COL_SIGNS: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr,
                TR: tl.constexpr, TC: tl.constexpr):
    """max |x| after each orientation's rotation -> amax_ptr[0] for rows, [1] for columns, which start at zero.
    As an integer, a non-negative float32 sorts as it does as a float, and NaN above all."""
    x = load_tile(x_ptr, tl.program_id(0) * TR, tl.program_id(1) * TC, R, C, stride_r, stride_c, TR, TC)
    if ROWS:
        m = largest(load_units(x, TR, UNIT, N, ROW_SIGNS), 0, UNIT)
        tl.atomic_max(amax_ptr, tl.max(bits(m), 0))
    if COLS:
        m = largest(load_units(tl.trans(x), TC, UNIT, N, COL_SIGNS), 0, UNIT)
        tl.atomic_max(amax_ptr + 1, tl.max(bits(m), 0))


@triton.jit
def tensor_scale(amax_ptr, t_ptr, MAX: tl.constexpr):
    """The tensor's scale under E4M3 block scales, amax / (448 g_max); stored for the GEMM, by every program alike."""
    t = tl.div_rn(number(tl.load(amax_ptr)), 448.0 * MAX)
    t = number(tl.maximum(bits(t), 1))                                      # at least the least float32, 2^-149
    tl.store(t_ptr, t)
    return t


@triton.jit
def quantize_tile(x, t, codes_ptr, scales_ptr, seed_ptr, offset, stream, r0, k0, rows, units,
                  SIGNS: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
                  MBITS: tl.constexpr, MIN_EXP: tl.constexpr, MAX: tl.constexpr, TOP: tl.constexpr,
                  UNIFORM: tl.constexpr, TWOS: tl.constexpr, SR: tl.constexpr, TWO_D: tl.constexpr,
                  SWIZZLE: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """Tile x (T, K) at (r0, k0) of an operand of `rows` rows with `units` units each: quantize along K and store."""
    U: tl.constexpr = K // UNIT
    W: tl.constexpr = UNIT // 8                                             # words of eight codes in a unit
    row = r0 + tl.arange(0, T)[:, None]                                     # (T, 1)
    unit = k0 // UNIT + tl.arange(0, U)[None, :]                            # (1, U)
    # hadamard
    v = load_units(x, T, UNIT, N, SIGNS)
    if SR:
        group = tl.reshape((row * units + unit) * W + offset, [T * U])
        words = random_words(tl.load(seed_ptr), group.to(tl.uint32), stream, W)
    packed = ()
    for start in tl.static_range(0, UNIT, BLOCK):
        # scale
        amax = largest(v, start, BLOCK)
        if TWO_D:                                                           # BLOCK neighbouring rows share an amax
            tiles = tl.max(tl.reshape(bits(amax), [T // BLOCK, BLOCK, U]), 1, keep_dims=True)
            amax = number(tl.reshape(tl.broadcast_to(tiles, [T // BLOCK, BLOCK, U]), [T * U]))
        stored, d = block_scale(amax, t, SCALE, MAX, TOP, UNIFORM)
        # x / d, correctly rounded: q = x (1/d), then one Newton step on its exact remainder. A power of two `safe`
        # keeps it in float32's range; what that rounds away is less than 2^-80 d. Where an E4M3 scale is 0, so is q.
        d *= t
        safe = 1.0
        if SCALE != "e8m0":                                                 # a power of two divides exactly
            safe = tl.where(d < 2.0**-80, 2.0**100, tl.where(d > 2.0**80, 2.0**-64, 1.0))
            d *= safe
        inverse, minus_d = tl.where(d == 0, 0.0, tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d)), -d
        for first in tl.static_range(start, start + BLOCK, 8):
            word = tl.zeros(d.shape, tl.uint32)
            for i in tl.static_range(first + 7, first - 1, -1):
                # round
                a = tl.abs(v[i]) * safe
                q = a * inverse
                if SCALE != "e8m0":
                    q = tl.fma(tl.fma(q, minus_d, a), inverse, q)
                noise = centred(words[i // 2], i % 2) if SR else None
                code = encode(tl.minimum(q, MAX), noise, MBITS, MIN_EXP, UNIFORM)
                # pack
                sign = bits(v[i]) >> 31
                code = ((code ^ sign) - sign) << 28 if TWOS else (code << 28) | (bits(v[i]) & -2147483648)
                word = (word << 4) | (code.to(tl.uint32, bitcast=True) >> 28)
            packed += (word.to(tl.int32, bitcast=True),)
        # store
        g, groups = unit * (UNIT // BLOCK) + start // BLOCK, units * (UNIT // BLOCK)
        if SWIZZLE:
            at = (row // 128 * tl.cdiv(groups, 4) + g // 4) * 512 + row % 32 * 16 + row // 32 % 4 * 4 + g % 4
        else:
            at = row * groups + g
        tl.store(scales_ptr + at, tl.reshape(stored, [T, U]), mask=(row < rows) & (unit < units))
    w = k0 // 8 + tl.arange(0, U * W)[None, :]
    tl.store(codes_ptr + row.to(tl.int64) * (units * W) + w, tl.reshape(bind(packed, W), [T, U * W]),
             mask=(row < rows) & (w < units * W))


@triton.jit
def quantize_kernel(x_ptr, amax_ptr, t_ptr, row_codes_ptr, row_scales_ptr, col_codes_ptr, col_scales_ptr, seed_ptr,
                    offset, R, C, stride_r, stride_c,
                    ROWS: tl.constexpr, COLS: tl.constexpr, ROW_SIGNS: tl.constexpr, COL_SIGNS: tl.constexpr,
                    N: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
                    MBITS: tl.constexpr, MIN_EXP: tl.constexpr, MAX: tl.constexpr, TOP: tl.constexpr,
                    UNIFORM: tl.constexpr, TWOS: tl.constexpr, SR: tl.constexpr, TWO_D: tl.constexpr,
                    SWIZZLE: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """x (R, C) -> codes and scales of its rows (R, C), of its columns (C, R padded to UNIT), or of both."""
    # load
    r0, c0 = tl.program_id(0) * TR, tl.program_id(1) * TC
    x = load_tile(x_ptr, r0, c0, R, C, stride_r, stride_c, TR, TC)
    if ROWS:
        t = tensor_scale(amax_ptr, t_ptr, MAX) if SCALE == "e4m3" else 1.0
        quantize_tile(x, t, row_codes_ptr, row_scales_ptr, seed_ptr, offset, 0, r0, c0, R, C // UNIT, ROW_SIGNS,
                      N, UNIT, BLOCK, SCALE, MBITS, MIN_EXP, MAX, TOP, UNIFORM, TWOS, SR, TWO_D, SWIZZLE, TR, TC)
    if COLS:
        t = tensor_scale(amax_ptr + 1, t_ptr + 1, MAX) if SCALE == "e4m3" else 1.0
        quantize_tile(tl.trans(x), t, col_codes_ptr, col_scales_ptr, seed_ptr, offset, 1, c0, r0, C, tl.cdiv(R, UNIT),
                      COL_SIGNS, N, UNIT, BLOCK, SCALE, MBITS, MIN_EXP, MAX, TOP, UNIFORM, TWOS, SR, TWO_D, SWIZZLE,
                      TC, TR)


# ---------------------------------------------------------------------------------------------------------------
# 4. Decode and multiply


@triton.jit
def minifloat(code, MBITS: tl.constexpr, MIN_EXP: tl.constexpr):
    """The float32 that a sign-free code stands for. Shifted to the place of float32's exponent and mantissa it is right
    up to a power of two, subnormals included: 1 in the exponent field is 2^-126 there and 2^MIN_EXP here."""
    return number(code << (23 - MBITS)) * 2.0**126 * 2.0**MIN_EXP


@triton.jit
def decode(nibble, MBITS: tl.constexpr, MIN_EXP: tl.constexpr, TWOS: tl.constexpr):
    """Codes in the low 4 bits of an int32 -> float32."""
    sign = (nibble << 28) >> 31
    magnitude = ((nibble ^ sign) - sign) & 15 if TWOS else nibble & 7
    return number(bits(minifloat(magnitude, MBITS, MIN_EXP)) | (sign & -2147483648))


@triton.jit
def decode_scale(s, SCALE: tl.constexpr):
    """Stored scales -> float32. NaN is 0x7F in E4M3, 0xFF in E8M0, whose 0 is the subnormal 2^-127."""
    if SCALE == "e4m3":
        b = s.to(tl.int32)
        return tl.where(b == 0x7F, float("nan"), minifloat(b, 3, -6))
    elif SCALE == "e8m0":
        b = s.to(tl.int32)
        return tl.where(b == 0xFF, float("nan"), number(tl.where(b == 0, 0x00400000, b << 23)))
    else:
        return s


@triton.jit
def decode_kernel(codes_ptr, scales_ptr, out_ptr, n, BLOCK: tl.constexpr, SCALE: tl.constexpr, MBITS: tl.constexpr,
                  MIN_EXP: tl.constexpr, TWOS: tl.constexpr, T: tl.constexpr):
    """n words of eight codes -> code * scale in bfloat16, two to a word. Exact, if the scale is E4M3 (whose tensor
    scale is left to the result) or E8M0; rounded once with float32 scales, as the reference is under autocast."""
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    word = tl.load(codes_ptr + i, mask=i < n, other=0)
    s = decode_scale(tl.load(scales_ptr + i // (BLOCK // 8), mask=i < n, other=0), SCALE)
    pairs = ()
    for j in tl.static_range(0, 8, 2):
        low = bits(decode(word >> (4 * j), MBITS, MIN_EXP, TWOS) * s)
        high = bits(decode(word >> (4 * j + 4), MBITS, MIN_EXP, TWOS) * s)
        if SCALE == "fp32":                                                 # bfloat16 is the upper half: round to it,
            low += 0x7FFF + ((low >> 16) & 1)                               # ties to even
            high += 0x7FFF + ((high >> 16) & 1)
        pair = ((low >> 16) & 0xFFFF) | (high & -65536)
        pairs += (tl.where(s == s, pair, 0x7FC07FC0),)                      # two NaNs
    tl.store(out_ptr + i[:, None] * 4 + tl.arange(0, 4)[None, :], bind(pairs, 4), mask=(i < n)[:, None])


@triton.jit
def load_scales(desc, row, group, ROWS: tl.constexpr, G: tl.constexpr):
    """Swizzled scales (layout 2), seen as (rows/128, groups/4, 2, 256), -> (ROWS, G)."""
    s = tl.reshape(desc.load([row // 128, group // 4, 0, 0]), [ROWS // 128, G // 4, 32, 4, 4])
    return tl.reshape(tl.permute(s, [0, 3, 2, 1, 4]), [ROWS, G])


@triton.jit
def widen(packed, ROWS: tl.constexpr, K: tl.constexpr, PATH: tl.constexpr, MBITS: tl.constexpr, MIN_EXP: tl.constexpr,
          TWOS: tl.constexpr, s, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """Packed bytes (ROWS, K/2) -> (ROWS, K), as FP8 or, for "decode", as DTYPE numbers times their scales s."""
    if PATH == "fp8":
        # E4M3's subnormals are a uniform grid, m 2^-9 with m = 0..7. E1M2's code is that byte, once its sign moves.
        x = tl.join((packed & 7) | ((packed & 8) << 4), ((packed >> 4) & 7) | (packed & 128))
        return tl.reshape(x, [ROWS, K]).to(tl.float8e4nv, bitcast=True)
    else:
        nibbles = tl.join(packed.to(tl.int32), packed.to(tl.int32) >> 4)
        x = tl.reshape(decode(nibbles, MBITS, MIN_EXP, TWOS), [ROWS, s.shape[1], K // s.shape[1]])
        return tl.reshape(x * decode_scale(s, SCALE)[:, :, None], [ROWS, K]).to(DTYPE)


@triton.jit
def e2m1_pair(packed):
    """E1M2 nibbles -> (high, low), E2M1 nibbles of the same sign. E2M1's magnitudes are 0 1 2 3 4 6 8 12 halves: 5 is
    4 + 1, 6 is its code 5, 7 is 6 + 1, and the others are there. So E1M2's m is (high + low) / (1/2), exactly."""
    five_or_seven = (packed >> 2) & packed & 0x11
    six_or_seven = (packed >> 2) & (packed >> 1) & 0x11
    return packed - five_or_seven - six_or_seven, five_or_seven | (packed & 0x88)


@triton.jit
def matmul_kernel(a_desc, a_scale_desc, b_desc, b_scale_desc, c_ptr, a_t_ptr, b_t_ptr, M, N, K, stride_c,
                  PATH: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, TWO_LEVEL: tl.constexpr,
                  FACTOR: tl.constexpr, MBITS: tl.constexpr, MIN_EXP: tl.constexpr, TWOS: tl.constexpr,
                  DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C (M, N) = A (M, K) B (N, K)^T over packed operands with swizzled scales. PATH says what multiplies:

    fp4      E2M1 by E2M1, the block scales applied by the tensor core
    fp4x4    E1M2 as the sum of two E2M1 that share its scale: four such products
    fp8      E1M2 widened to E4M3 as it is loaded, the E8M0 scales applied by the tensor core
    decode   numbers of DTYPE, decoded as they are loaded
    """
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK):
        a, b = a_desc.load([m, k // 2]), b_desc.load([n, k // 2])
        a_s = load_scales(a_scale_desc, m, k // BLOCK, BM, BK // BLOCK)
        b_s = load_scales(b_scale_desc, n, k // BLOCK, BN, BK // BLOCK)
        if PATH == "fp4":
            acc = tl.dot_scaled(a, a_s, "e2m1", b.T, b_s, "e2m1", acc)
        elif PATH == "fp4x4":
            a_high, a_low = e2m1_pair(a)
            b_high, b_low = e2m1_pair(b)
            acc = tl.dot_scaled(a_high, a_s, "e2m1", b_high.T, b_s, "e2m1", acc)
            acc = tl.dot_scaled(a_high, a_s, "e2m1", b_low.T, b_s, "e2m1", acc)
            acc = tl.dot_scaled(a_low, a_s, "e2m1", b_high.T, b_s, "e2m1", acc)
            acc = tl.dot_scaled(a_low, a_s, "e2m1", b_low.T, b_s, "e2m1", acc)
        else:
            a = widen(a, BM, BK, PATH, MBITS, MIN_EXP, TWOS, a_s, SCALE, DTYPE)
            b = widen(b, BN, BK, PATH, MBITS, MIN_EXP, TWOS, b_s, SCALE, DTYPE)
            if PATH == "fp8":
                acc = tl.dot_scaled(a, a_s, "e4m3", b.T, b_s, "e4m3", acc)
            else:
                acc = tl.dot(a, b.T, acc, input_precision="ieee")
    acc *= FACTOR
    if TWO_LEVEL:
        acc = acc * tl.load(a_t_ptr) * tl.load(b_t_ptr)
    rm, rn = m + tl.arange(0, BM)[:, None], n + tl.arange(0, BN)[None, :]
    tl.store(c_ptr + rm.to(tl.int64) * stride_c + rn, acc.to(c_ptr.dtype.element_ty), mask=(rm < M) & (rn < N))


# ---------------------------------------------------------------------------------------------------------------
# 5. From Python


@dataclass
class Packed:
    """A 4-bit operand (rows, K): layouts 1 and 2."""
    codes: torch.Tensor                     # uint8 (rows, K/2)
    scale: torch.Tensor                     # (rows, K/block), or uint8 / float32 (rows/128, K/block/4, 32, 16)
    tensor_scale: torch.Tensor | None       # float32 scalar of the two-level kind, which multiplies everything
    fmt: object
    kind: str                               # fp32, e4m3 or e8m0
    block: int
    swizzled: bool = False

    @property
    def shape(self):
        return self.codes.shape[0], self.codes.shape[1] * 2


STORED = {"fp32": torch.float32, "e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}


def check(x, block, unit, rows, cols):
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"the Triton kernels quantize bfloat16, float16 and float32, not {x.dtype}")
    if x.device.type == "cpu" and not INTERPRET:
        raise ValueError("the Triton kernels need a GPU tensor; for a CPU tensor call ufp4.quantize, or set "
                         "TRITON_INTERPRET=1 before triton is imported to run them in the interpreter")
    if x.dim() != 2 or not (rows or cols):
        raise ValueError(f"quantize takes a 2-D tensor and rows, cols or both, got {tuple(x.shape)}, {rows}, {cols}")
    if block not in (16, 32) or unit not in (16, 32):
        raise ValueError(f"the Triton kernels have blocks and Hadamard matrices of 16 and 32, got {block} and {unit}")
    if rows and x.shape[1] % unit:
        raise ValueError(f"blocks along the rows need columns in multiples of {unit}, got {x.shape[1]}")


def sign_mask(signs):
    """Bit i set: element i changes its sign."""
    return None if signs is None else sum((s < 0) << i for i, s in enumerate(signs))


def quantize(x, fmt, scale="fp32", block=16, rows=True, cols=False, row_signs=None, col_signs=None, seed=None,
             offset=0, two_d=False, swizzle=False):
    """x (R, C), bf16, fp16 or fp32, any strides -> (Packed of x, Packed of x^T), None for the one not asked for.

    `rows` blocks x along its rows: (R, C). `cols` blocks it along its columns: (C, R), R filled with zeros to whole
    blocks. Each is rotated by its own signs (tuples of +-1, one Hadamard size for both) unless they are None. With
    `seed`, an int64 tensor of one element or an int, rounds stochastically: layout 5, and a caller that uses a seed
    again moves `offset` by x.numel() / 8. E4M3 scales need the tensor's amax, and so one more read of x.
    """
    n = next((len(s) for s in (row_signs, col_signs) if s is not None), block)
    check(x, block, max(block, n), rows, cols)
    if isinstance(seed, int):
        seed = torch.full((1,), seed, dtype=torch.int64, device=x.device)
    row_codes, row_scales, col_codes, col_scales, t = torch.ops.ufp4.quantize(
        x.detach(), seed, offset, scale, block, rows, cols, sign_mask(row_signs), sign_mask(col_signs), n, two_d,
        swizzle, fmt.mbits, fmt.min_normal, fmt.max, fmt.uniform, fmt.twos_complement)

    def packed(codes, s, t):
        return Packed(codes.view(torch.uint8), s if swizzle else s.view(STORED[scale]),
                      t if scale == "e4m3" else None, fmt, scale, block, swizzle)

    return packed(row_codes, row_scales, t[0]) if rows else None, packed(col_codes, col_scales, t[1]) if cols else None


# Operators of their own, so that torch.compile traces past them without a graph break.


def outputs(x, scale, block, rows, cols, n, swizzle):
    """Uninitialized codes and scales of rows and columns (without elements where not asked for), and tensor scales."""
    stored = torch.float32 if scale == "fp32" else torch.uint8
    R, C, unit = *x.shape, max(block, n)
    out = []
    for r, k in ((R, C) if rows else (0, 0), (C, (R + unit - 1) // unit * unit) if cols else (0, 0)):
        shape = ((r + 127) // 128, (k // block + 3) // 4, 32, 16) if swizzle else (r, k // block)
        scales = torch.zeros if swizzle else torch.empty                    # a swizzled layout has gaps
        out += [torch.empty((r, k // 8), dtype=torch.int32, device=x.device),
                scales(shape, dtype=stored, device=x.device)]
    return out + [torch.empty((2,), dtype=torch.float32, device=x.device)]


@torch.library.custom_op("ufp4::quantize", mutates_args=())
def quantize_op(x: torch.Tensor, seed: torch.Tensor | None, offset: int, scale: str, block: int, rows: bool, cols: bool,
                row_signs: int | None, col_signs: int | None, n: int, two_d: bool, swizzle: bool, mbits: int,
                min_normal: float, top: float, uniform: bool, twos: bool) -> list[torch.Tensor]:
    (R, C), out = x.shape, outputs(x, scale, block, rows, cols, n, swizzle)
    TR, TC = (64, 64) if cols else (32, 128)        # 4096 elements, 32 a thread
    grid = (triton.cdiv(R, TR), triton.cdiv(C, TC))
    oriented = dict(ROWS=rows, COLS=cols, ROW_SIGNS=row_signs, COL_SIGNS=col_signs, N=n, UNIT=max(block, n),
                    TR=TR, TC=TC)
    amax = torch.zeros(2, dtype=torch.int32, device=x.device) if scale == "e4m3" else None
    if x.numel():
        if scale == "e4m3":
            amax_kernel[grid](x, amax, R, C, *x.stride(), **oriented)
        quantize_kernel[grid](x, amax, out[4], *out[:4], seed, offset, R, C, *x.stride(), BLOCK=block, SCALE=scale,
                              MBITS=mbits, MIN_EXP=int(math.log2(min_normal)), MAX=top, TOP=math.floor(math.log2(top)),
                              UNIFORM=uniform, TWOS=twos, SR=seed is not None, TWO_D=two_d, SWIZZLE=swizzle, **oriented)
    return out


@quantize_op.register_fake
def _(x, seed, offset, scale, block, rows, cols, row_signs, col_signs, n, two_d, swizzle, *_):
    return outputs(x, scale, block, rows, cols, n, swizzle)


def noise(seed, rows, k, stream=0, offset=0, device="cpu"):
    """The bits of layout 5 as ufp4.random_bytes shapes them: uint8 (2, rows, k), for a packed operand (rows, k)."""
    low = 0xFFFFFFFF
    c = [(torch.arange(rows * k // 8, device=device) + offset) & low, stream, 0, 0]
    key = [seed & low, seed >> 32 & low]
    for _ in range(10):                     # Philox4x32-10 (Salmon et al., 2011); int64 products keep 64 bits
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [q >> 32 & low ^ c[1] ^ key[0], q & low, p >> 32 & low ^ c[3] ^ key[1], p & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    words = torch.stack(c, -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).view(rows, k)
    return torch.stack((halves >> 8, halves & 255)).to(torch.uint8)


def decode_bf16(p):
    """Packed, scales as (rows, K/block) -> bfloat16 (rows, K), without the tensor scale (see decode_kernel)."""
    if p.swizzled:
        raise ValueError("decode_bf16 reads scales as (rows, K/block): quantize with swizzle=False")
    scale = p.scale if p.kind == "fp32" else p.scale.view(torch.uint8)
    return torch.ops.ufp4.decode(p.codes, scale, p.kind, p.block, p.fmt.mbits, p.fmt.min_normal, p.fmt.twos_complement)


@torch.library.custom_op("ufp4::decode", mutates_args=())
def decode_op(codes: torch.Tensor, scale: torch.Tensor, kind: str, block: int, mbits: int, min_normal: float,
              twos: bool) -> torch.Tensor:
    out = torch.empty((codes.shape[0], codes.shape[1] * 2), dtype=torch.bfloat16, device=codes.device)
    n = codes.numel() // 4
    if n:
        decode_kernel[(triton.cdiv(n, 512),)](codes.view(torch.int32), scale, out.view(torch.int32), n, BLOCK=block,
                                              SCALE=kind, MBITS=mbits, MIN_EXP=int(math.log2(min_normal)), TWOS=twos,
                                              T=512)
    return out


@decode_op.register_fake
def _(codes, scale, *_):
    return torch.empty((codes.shape[0], codes.shape[1] * 2), dtype=torch.bfloat16, device=codes.device)


def tiles(path, arch, block):
    """BM, BN, BK, warps, stages: what fits the registers, the shared memory (99 KB a block on sm_12x, 228 on the data
    centre's) and, for BM, the 128 rows of a scale's layout; BK is at least four blocks for the same reason."""
    if arch in ("sm_100", "sm_103") and path != "decode":
        return (128, 256, 256, 4, 4) if path == "fp4" else (128, 256, 128, 4, 3)
    if arch in ("sm_120", "sm_121") and path != "decode":
        return (128, 128, 64 if path == "fp4x4" else 128, 8, 3)
    if arch.startswith("gfx"):
        return (128, 128, 128, 8, 2)
    return (128, 128, 4 * block, 8, 3)


def matmul_constants(path, scale, block, mbits, min_normal, twos):
    """fp8 reads a code m as m 2^-9, and fp4x4 as m / 2, where the format means m times its spacing."""
    spacing = min_normal * 2.0**-mbits
    factor = {"fp8": (spacing * 2**9) ** 2, "fp4x4": (spacing * 2) ** 2}.get(path, 1.0)
    return dict(PATH=path, SCALE=scale, BLOCK=block, TWO_LEVEL=scale == "e4m3", FACTOR=factor, MBITS=mbits,
                MIN_EXP=int(math.log2(min_normal)), TWOS=twos)


def matmul(a, b, path, dtype=torch.bfloat16, arch=None, offs=None, stacked=None):
    """Packed A (M, K) and B (N, K) -> A B^T (M, N) by a path of `route`. "cublas" wants plain scales, the other paths
    swizzled ones. With E4M3 and E8M0 scales operands and products are exact; with float32 scales each operand is
    rounded to bfloat16 once, by up to 2^-8 of itself, whatever dtype is. Sums are float32.

    With offs (int32, where each group ends; "cublas" alone) one product a group: of rows of A with an expert of B,
    stacked along B's dimension `stacked`, or if that is None of columns of both. These come out of F.grouped_mm in
    bfloat16, so that with a tensor scale the result is rounded twice.
    """
    k = a.shape[1] * (len(offs) if offs is not None and stacked == 1 else 1)
    if (k, a.kind, a.block) != (b.shape[1], b.kind, b.block):
        raise ValueError(f"operands must have K, scale and block in common, got {k} {a.kind} {a.block} and "
                         f"{b.shape[1]} {b.kind} {b.block}")
    if path == "cublas":
        x, y = decode_bf16(a), decode_bf16(b)
        if offs is not None:
            if stacked is not None:
                y = y.unflatten(stacked, (len(offs), -1)).movedim(stacked, 0)                   # (E, N, K)
            z = torch.nn.functional.grouped_mm(x, y.mT, offs=offs)
        elif a.tensor_scale is None and dtype == torch.bfloat16:
            return x @ y.T
        else:                           # float32, so that nothing is rounded before the tensor scales are applied
            z = torch.mm(x, y.T, out_dtype=torch.float32) if x.is_cuda else x.float() @ y.T.float()
        return (z if a.tensor_scale is None else z.float() * a.tensor_scale * b.tensor_scale).to(dtype)
    if not (a.swizzled and b.swizzled):
        raise ValueError(f"the path {path!r} reads swizzled scales: quantize with swizzle=True")
    return torch.ops.ufp4.matmul(a.codes, a.scale, a.tensor_scale, b.codes, b.scale, b.tensor_scale, path, a.kind,
                                 a.block, a.fmt.mbits, a.fmt.min_normal, a.fmt.twos_complement, dtype, arch)


@torch.library.custom_op("ufp4::matmul", mutates_args=())
def matmul_op(a: torch.Tensor, a_scale: torch.Tensor, a_t: torch.Tensor | None, b: torch.Tensor, b_scale: torch.Tensor,
              b_t: torch.Tensor | None, path: str, kind: str, block: int, mbits: int, min_normal: float, twos: bool,
              dtype: torch.dtype, arch: str | None) -> torch.Tensor:
    BM, BN, BK, warps, stages = tiles(path, arch or architecture(a.device), block)
    c = torch.empty((len(a), len(b)), dtype=dtype, device=a.device)

    def descriptors(codes, scale, rows):
        scale = scale.view(*scale.shape[:2], 2, 256)                        # in rows of 256, for the copy engine
        if kind == "e4m3" and path != "decode":
            scale = scale.view(torch.float8_e4m3fn)
        return (TensorDescriptor.from_tensor(codes, [rows, BK // 2]),
                TensorDescriptor.from_tensor(scale, [rows // 128, BK // block // 4, 2, 256]))

    if c.numel():
        grid = (triton.cdiv(len(a), BM), triton.cdiv(len(b), BN))
        matmul_kernel[grid](*descriptors(a, a_scale, BM), *descriptors(b, b_scale, BN), c, a_t, b_t, len(a), len(b),
                            a.shape[1] * 2, len(b), DTYPE=tl.float32 if INTERPRET else tl.bfloat16, BM=BM, BN=BN, BK=BK,
                            num_warps=warps, num_stages=stages,
                            **matmul_constants(path, kind, block, mbits, min_normal, twos))
    return c


@matmul_op.register_fake
def _(a, a_scale, a_t, b, b_scale, b_t, path, kind, block, mbits, min_normal, twos, dtype, arch):
    return torch.empty((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)


# ---------------------------------------------------------------------------------------------------------------
# 6. Dispatch: what a recipe runs on, and what it compiles to


ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "gfx950")
BLACKWELL = ("sm_100", "sm_103", "sm_120", "sm_121")


def architecture(device):
    """"sm_90" and the like; the interpreter multiplies as sm_80 does."""
    if INTERPRET:
        return "sm_80"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_%d%d" % torch.cuda.get_device_capability(device)


def supports(recipe):
    """Whether these kernels quantize as a recipe (of ufp4.py) says. What they do not know, they do not support."""
    return (re.fullmatch(r"(e2m1|e1m2|int4)(-max[\d.]+)?", recipe.fmt) is not None and recipe.scale in STORED
            and recipe.block in (16, 32) and (not recipe.rht or recipe.rht_block in (16, 32))
            and not recipe.swap and recipe.alpha is None)


def require(recipe, device, dtype):
    """Raise what keeps a linear layer from using these kernels. Runs one, which takes a working compiler."""
    if not supports(recipe):
        raise ValueError("the Triton kernels have the formats e2m1, e1m2 and int4, the scales fp32, e4m3 and e8m0, and "
                         "blocks and Hadamard matrices of 16 and 32, the same for all operands and without a slope; "
                         f"recipe {recipe.name!r} differs")
    x = torch.zeros(32, 32, dtype=dtype, device=device)
    check(x, recipe.block, recipe.unit, True, True)
    try:
        quantize(x, recipe.format, recipe.scale, recipe.block)
    except Exception as e:                  # no compiler for Triton's launcher, a driver too old, and the like
        raise RuntimeError(f"Triton can't run a kernel here: {type(e).__name__}: {str(e).splitlines()[:1]}") from e


def route(recipe, arch, version=VERSION):
    """(path, why) that a recipe takes on an architecture; `matmul` says what the paths are, "bf16" is no quantization.
    `recipe` is an ufp4.Recipe, or has its fields; "reference" is the emulation in ufp4.py."""
    if recipe.fmt is None:
        return "bf16", "nothing is quantized"
    if not supports(recipe):
        return "reference", "the kernels do not have its formats or scales"
    fmt, kind = recipe.fmt.partition("-max")[0], (recipe.scale, recipe.block)
    if recipe.scale == "fp32":
        return "cublas", "no tensor core applies FP32 block scales"
    if kind not in (("e4m3", 16), ("e8m0", 32)):
        return "cublas", "tensor cores apply E4M3 scales to blocks of 16 and E8M0 scales to blocks of 32"
    if fmt == "int4":
        return "cublas", "no FP4 or FP8 number has two's complement codes"
    if not (arch in BLACKWELL or arch == "gfx950" and recipe.scale == "e8m0"):
        return "cublas", f"{arch} has no tensor core for {recipe.scale} block scales"
    if arch == "sm_121" and version < (3, 8):
        return "cublas", "Triton before 3.8 compiles block-scaled products for sm_121 to bf16, or not at all"
    if fmt == "e2m1":
        return "fp4", "E2M1 is the tensor core's own format"
    if recipe.scale == "e8m0":
        return "fp8", "E1M2's codes are subnormal E4M3 numbers"
    if arch == "sm_100":
        return "cublas", "four FP4 products take as long as one in bf16 here"
    if arch == "sm_103" and version < (3, 9):
        return "cublas", "four FP4 products fill more than the tensor memory as Triton before 3.9 allocates it"
    return "fp4x4", "E1M2 is the sum of two E2M1 numbers, and FP4 is more than four times as fast as bf16 here"
