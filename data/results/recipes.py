"""Recipes that were tried beside those of ufp4.py. This is a file for --with:

    python train.py --with data/results/recipes.py --recipe four-over-six
"""
import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

import ufp4
from ufp4 import GEMMS, RECIPES, Quantizer, Recipe

@dataclass(eq=False)
class Sloped(Quantizer):
    """Rounds to nearest, and then rescales so that <Q(x), x> / <x, x> is `slope`.

    What is rounded stochastically stays as it is."""
    slope: float = 1.0

    def __call__(self, x, rand=None):
        q = super().__call__(x, rand)
        if self.stochastic:
            return q
        x = Quantizer(None, signs=self.signs)(x).double()
        product = (q * x).sum().clamp(min=1e-300)           # not 0, if all are zeros
        return q * (self.slope * x.square().sum() / product).float()

@dataclass(eq=False)
class Noisy(Quantizer):
    """Adds Gaussian noise to Q(x), so that the error has `times` its own power, in each
    block."""
    times: float = 1.0

    def __call__(self, x, rand=None):
        q = super().__call__(x, rand)
        error = q - Quantizer(None, signs=self.signs)(x)
        power = error.unflatten(-1, (-1, self.block)).square().mean(-1, keepdim=True)
        noise = torch.randn_like(q).unflatten(-1, (-1, self.block))
        return q + ((self.times - 1) * power).sqrt().mul(noise).flatten(-2)

@dataclass
class Experiment(Recipe):
    """A recipe with another quantizer in some places: in GEMMs, or for pairs of an
    operand and a GEMM. Its class is `kind`, and it has the fields in `given`."""
    places: tuple = GEMMS
    kind: type = Quantizer
    given: dict = None

    def quantizer(self, operand, gemm):
        q = super().quantizer(operand, gemm)
        if gemm in self.places or (operand, gemm) in self.places:
            q = self.kind(**vars(q) | self.given)
        return q

def experiment(name, like, places=GEMMS, kind=Quantizer, **given):
    """Add such a recipe to RECIPES."""
    copied = {f.name: getattr(RECIPES[like], f.name) for f in fields(Recipe)}
    RECIPES[name] = Experiment(**copied | {"name": name}, places=places, kind=kind,
                               given=given)

@dataclass(eq=False)
class Choosing(Quantizer):
    """Each block takes the format, fmt or other, that has the smaller squared error.

    The error is that of rounding to nearest. Under SR a choice by the error of the
    random result would bias it."""
    other: ufp4.Format = ufp4.E1M2

    def levels_and_scales(self, x, rand=None):
        found, errors = [], []
        for fmt in (self.fmt, self.other):
            nearest = Quantizer(fmt, self.scale, self.block)
            level, s = nearest.levels_and_scales(x)
            error = (level * s).flatten(-2) - x
            errors.append(error.square().unflatten(-1, (-1, self.block)).sum(-1, True))
            if self.stochastic:
                q = Quantizer(fmt, self.scale, self.block, stochastic=True)
                level, s = q.levels_and_scales(x, rand)
            found.append((level, s))
        (level, s), (other_level, other_s) = found
        other = errors[1] < errors[0]
        level = torch.where(other, other_level, level)
        if isinstance(s, ufp4.TwoScales):               # with the same t
            return level, ufp4.TwoScales(torch.where(other, other_s.s, s.s), s.t)
        return level, torch.where(other, other_s, s)

# ---- Bins: what do the lopsided bins of E2M1 cost? ----
#
# A mean gain (Sloped) is not the paper's claim. That is a bias that depends on the
# magnitude: from 3.5 to 5 numbers become 4. So here are E2M1 without biased bins,
# E1M2 with biased bins, and uniform grids with as much noise as E2M1 and more.
# Only what is rounded to nearest changes.

@dataclass(eq=False)
class OwnMeans(Quantizer):
    """Rounds to nearest, but a code means the mean of its bin: sum s^2 a / sum s^2 over
    the numbers of the tensor with this code, where a is a magnitude over its scale s.
    These are the values with the least squared error. No bin has a bias. (The bin of 0
    has the mean 0.) What is rounded stochastically stays as it is.

    fill: fresh noise is added, up to the power that the error has without own means. In
    a block it is proportional to s^2, as that of rounding is."""
    fill: bool = False

    def levels_and_scales(self, x, rand=None):
        level, s = super().levels_and_scales(x, rand)
        if self.stochastic:
            return level, s
        x = x.unflatten(-1, (-1, self.block))
        a = torch.where(s > 0, x.abs() / s, 0.0).double()
        weight = s.double().square().expand_as(a)
        own = torch.zeros_like(a)
        for value in self.fmt.levels[1:]:
            bin = (level.abs() == value) * weight
            mean = (bin * a).sum() / bin.sum().clamp(min=1e-300)
            own = torch.where(level.abs() == value, mean, own)
        error = (weight * (own - a).square()).sum()
        own = torch.copysign(own.float(), x)
        if self.fill:
            more = (weight * (level.abs() - a).square()).sum() - error
            variance = more / weight.sum().clamp(min=1e-300)
            own = own + torch.randn_like(own) * variance.clamp(min=0).sqrt().float()
        return own, s

class Shifted(ufp4.Format):
    """A format whose thresholds of rounding to nearest lie `shift` steps higher than
    halfway."""
    shift = 0.0

    def round(self, a, rand=None):
        if rand is not None:
            return super().round(a, rand)
        q = torch.zeros_like(a)
        for low, high in zip(self.levels, self.levels[1:]):
            q = torch.where(a > low + (0.5 + self.shift) * (high - low), high, q)
        return q

def shifted(fmt, shift):
    new = Shifted(f"{fmt.name}-shift{shift:+}", fmt.levels)
    object.__setattr__(new, "shift", shift)
    return new

# ---- Other block scales, as rules like those of ufp4.py ----

def scale_e4m3_256(amax, g_max):
    """E4M3 scales with t = max(amax) / (256 * 6), whatever g_max is, so that blocks
    whose largest number becomes 4 and blocks whose largest becomes 6 share one t
    (arXiv 2512.02010). The largest s is 384, that of amax / 4."""
    t = (amax.max() if amax.numel() else amax.new_zeros(())) / (256.0 * 6)
    t = torch.where(t == 0, 1.0, t)
    s = (amax / g_max / t).clamp(max=448.0)
    return ufp4.TwoScales(s.to(torch.float8_e4m3fn).float(), t)

def scale_power(amax, g_max):
    """The power of two that is nearest to amax / g_max, by its logarithm."""
    s = torch.exp2(torch.log2(amax / g_max).round().clamp(-126, 127))
    return torch.where(amax < math.inf, s, math.nan)

def scale_hif4(amax, g_max):
    """The scales of HiFloat4 (arXiv 2602.11287), for blocks of 4.

    64 numbers share s, in E6M2: an 8-bit float without a sign, with three significant
    bits. The largest of them becomes the largest level times 4 s. Of each 8 numbers one
    bit says whether their scale is 2 s. It is, if their largest is at least 4 s. Of
    each 4 numbers one bit says whether theirs is twice as large again. It is, if their
    largest is at least twice their scale. In all these are 4.5 bits a number."""
    n = amax.shape[-2]                                      # amax (..., K/4, 1)
    of_4 = F.pad(amax, (0, 0, 0, -n % 16)).unflatten(-2, (-1, 8, 2))
    of_8 = of_4.amax(-2, keepdim=True)
    of_64 = of_8.amax(-3, keepdim=True)                     # (..., K/64, 1, 1, 1)
    mantissa, exponent = torch.frexp(of_64 / (4 * g_max))
    s = torch.ldexp((8 * mantissa).round() / 8, exponent).clamp(2.0**-48, 49152.0)
    s = torch.where(of_64 < math.inf, s, math.nan)
    s = torch.where(of_8 >= 4 * s, 2 * s, s)
    s = torch.where(of_4 >= 2 * s, 2 * s, s)
    return s.flatten(-4, -2)[..., :n, :]

# E2M1 that does not shrink, and E1M2 that shrinks as E2M1 does on Gaussian data
for like in ("e2m1", "e2m1-full-rht"):
    experiment(f"{like}-debiased", like, kind=Sloped, slope=1.0)
experiment("ufp4-shrunk", "ufp4", kind=Sloped, slope=0.996)
for gemm in GEMMS:
    experiment(f"ufp4-{gemm}-in-e2m1", "ufp4", (gemm,), fmt=ufp4.E2M1)
# E2M1 up to 2, 3 or 4, where it is uniform or nearly so. Can that replace a uniform
# format? (Section 4 of the paper, Q4)
for top in (2, 3, 4):
    fmt = ufp4.Format(f"e2m1-max{top}", tuple(v for v in ufp4.E2M1.levels if v <= top))
    experiment(fmt.name, "e2m1-full-rht", fmt=fmt)
experiment("e2m1-max4-rht-wgrad", "e2m1", fmt=fmt)
# Its largest number at level 6 or at level 4, in each block (arXiv 2512.02010)
experiment("four-over-six", "e2m1", kind=Choosing, other=fmt)
# Doses: more noise in fprop; a smaller slope in fprop, or wherever rounding is to
# nearest
for times in (1.25, 1.5, 2, 3):
    experiment(f"ufp4-noise-{times}", "ufp4", ("fprop",), Noisy, times=times)
for slope in (0.996, 0.98, 0.95, 0.9):
    experiment(f"ufp4-slope-{slope}", "ufp4", ("fprop",), Sloped, slope=slope)
for slope in (0.98, 0.9):
    experiment(f"ufp4-slope-{slope}-all", "ufp4", kind=Sloped, slope=slope)
# SR for one operand of one GEMM more than dY
for like in ("ufp4", "e2m1"):
    for place in (("x", "wgrad"), ("w", "dgrad")):
        experiment(f"{like}-sr-dy-{'-'.join(place)}", like, (place,), stochastic=True)
# Square tiles of W share a scale
experiment("e2m1-tiles", "e2m1", (("w", "fprop"), ("w", "dgrad")),
           scale=ufp4.Tiles(ufp4.scale_fp32))
# W in 4 bits; X in fprop is not rounded
for like in ("e2m1", "e2m1-full-rht", "ufp4"):
    experiment(f"{like}-weights", like, (("x", "fprop"),), fmt=None)
# Other scales under the uniform grid
experiment("ufp4-mx-nearest", "ufp4-mx", scale=scale_power)
experiment("ufp4-hif4", "ufp4", scale=scale_hif4, block=4)
# A rotation without random signs
experiment("ufp4-no-signs", "ufp4", signs=16 * (1.0,))
# Bins
experiment("e2m1-full-rht-own", "e2m1-full-rht", kind=OwnMeans)
experiment("e2m1-full-rht-own-fill", "e2m1-full-rht", kind=OwnMeans, fill=True)
for n in (7, 6):
    uniform = ufp4.Format(f"u{n}", tuple(map(float, range(n))))
    experiment(uniform.name, "ufp4", fmt=uniform)
for shift in (0.1, -0.1):
    experiment(f"ufp4-shift{shift:+}", "ufp4", kind=Sloped, slope=1.0,
               fmt=shifted(ufp4.E1M2, shift))
# The two by two under E4M3 scales, without tiles; E2M1 under HiFloat4's
for recipe in (Recipe("e2m1-e4m3", ufp4.E2M1, "e4m3", rht=("wgrad",), sr=("dy",)),
               Recipe("e2m1-full-rht-e4m3", ufp4.E2M1, "e4m3", rht=GEMMS, sr=("dy",)),
               Recipe("ufp4-e4m3-rht-wgrad", ufp4.E1M2, "e4m3", rht=("wgrad",),
                      sr=("dy",))):
    RECIPES[recipe.name] = recipe
experiment("e2m1-hif4", "e2m1", scale=scale_hif4, block=4)
experiment("four-over-six-e4m3", "e2m1", kind=Choosing, other=fmt,
           scale=scale_e4m3_256)
