"""The GPU backend without its kernels: what needs no Triton.

1. Which matrix product a recipe takes on which GPU; `python bench.py plan` asks, too.
2. The check that the kernels pass when a recipe is first used on a GPU.
3. What torch.compile needs, to trace a layer of kernels.py.
"""
import functools

import torch

import ufp4

# ---- 1. Which product a recipe takes -------------------------------------------------

# How the codes of a format are read as bits, which ufp4.py need not know: the number of
# mantissa bits, and where the binade with the exponent 1 begins. Below it lie the
# subnormal numbers, which have the same spacing as that binade. INT4 has subnormal
# numbers only.
BITS = {"e2m1": (1, 1.0), "e1m2": (2, 1.0), "int4": (3, 8.0),
        **{fmt.name: (1, 1.0) for fmt in ufp4.E2M1_TRUNCATED}}

# The scales of ufp4.py, and how each is stored.
STORED = {ufp4.scale_fp32: "fp32", ufp4.scale_e4m3: "e4m3", ufp4.scale_e4m3_up: "e4m3",
          ufp4.scale_e8m0: "e8m0", ufp4.scale_e8m0_up: "e8m0"}

# Tensor cores apply scales that are E4M3 (16 numbers a block) or E8M0 (32 a block), and
# none applies float32 scales. By mantissa bits of the codes, stored scale and block:
# the path of kernels.matmul_kernel, and the GPUs on which it is taken.
BLACKWELL = ("sm_100", "sm_103", "sm_120", "sm_121")
NATIVE = {(1, "e4m3", 16): ("fp4", BLACKWELL),
          (1, "e8m0", 32): ("fp4", (*BLACKWELL, "gfx950")),
          (2, "e8m0", 32): ("fp8", (*BLACKWELL, "gfx950")),
          # On sm_100 four FP4 products take as long as one in bfloat16. On sm_103
          # Triton 3.9 overwrites operands that the last of them still reads.
          (2, "e4m3", 16): ("fp4x4", ("sm_120", "sm_121"))}

def misfit(recipe):
    """Why the kernels cannot quantize as this recipe says, or None if they can."""
    if type(recipe) is not ufp4.Recipe:
        return "the Triton kernels take no subclass of Recipe"
    known = ufp4.FORMATS.get(recipe.fmt.name) == recipe.fmt and recipe.fmt.name in BITS
    if not known or recipe.scale not in STORED:
        return "the Triton kernels have the formats and scales of ufp4.py alone"
    if not {recipe.block, recipe.rht_block if recipe.rht else 16} <= {16, 32}:
        return "the Triton kernels have blocks and Hadamard matrices of 16 and 32"
    return None

def route(recipe, arch, version=(3, 8)):
    """The path of a recipe on an architecture, such as "sm_90", by a version of Triton.

    It is one of NATIVE's; or "cublas", a product in bfloat16 of decoded operands; or
    "bf16", where nothing is quantized; or "reference", where ufp4.py does it all."""
    if recipe.fmt is None:
        return "bf16"
    if misfit(recipe):
        return "reference"
    form = BITS[recipe.fmt.name][0], STORED[recipe.scale], recipe.block
    path, archs = NATIVE.get(form, ("cublas", ()))
    emulated = arch == "sm_121" and version < (3, 8)        # in bfloat16, or not at all
    return path if arch in archs and not emulated else "cublas"

# quantize_kernel's tile, TR and TC, and how many registers a thread of its 4 warps may
# have, for (rows, cols). Found by counting instructions (python bench.py dispatch);
# python bench.py tune measures others on a GPU.
SHAPES = {(True, False): ((32, 128), {"maxnreg": 64}),
          (False, True): ((64, 64), {"maxnreg": 64}),
          (True, True): ((64, 64), {"maxnreg": 128})}

def product_shape(path, block, arch):
    """matmul_kernel's BM, BN, BK, and options.

    They fit into registers and shared memory (228 KB a program on data centre GPUs, 99
    KB on sm_12x), and hold whole tiles of scales: 128 rows, four blocks of K."""
    if arch in ("sm_100", "sm_103"):
        BK, stages = (256, 4) if path == "fp4" else (128, 3)
        return (128, 256, BK), {"num_warps": 4, "num_stages": stages}
    BK = 4 * block if path == "fp4x4" else 128
    return (128, 128, BK), {"num_warps": 8, "num_stages": 2 if arch == "gfx950" else 3}

# ---- 2. Do the kernels give what ufp4.py gives? --------------------------------------

def failure(kernels, fields, device, dtype):
    """A sentence that says where the kernels differ from ufp4.py, or None.

    Nobody may have run them on this GPU yet. So a small layer is tried: its operands,
    as kernels.QuantizedMatmul makes them, and GEMM 1. The reference is computed on the
    CPU, because a GPU divides a tensor by a Python number inexactly."""
    if not has_data():
        return None
    try:
        where = check(kernels, recipe_of(fields), device, dtype)
    except Exception as e:      # no compiler for Triton's launcher, an old driver, ...
        line = str(e).strip().partition("\n")[0]
        return f"Triton cannot run a kernel here: {type(e).__name__}: {line}"
    return where and f"the Triton kernels differ from ufp4.py on {device}, in {where}"

def check(kernels, recipe, device, dtype):
    """Where the kernels differ from the reference, or None."""
    shapes = (160, 96), (32, 96), (160, 32)             # no tile divides these sizes
    x, w, dy = (sample(shape, i, dtype) for i, shape in enumerate(shapes))
    keys = torch.stack([ufp4.random_key("cpu", seeded(i)) for i in range(2)]).to(device)
    native = route(recipe, kernels.architecture(device), kernels.VERSION) != "cublas"
    made = {}
    for grouped in (True, False) if native else (False,):       # experts' forms differ
        for v, operand, rows, cols in (
                (x, "x", "fprop", "wgrad"), (w, "w", "fprop", None),
                (w, "w", None, "dgrad"), (dy, "dy", "dgrad", "wgrad")):
            a, b = kernels.quantize(v.to(device), recipe, operand, rows, cols, grouped,
                                    keys)
            for i, (gemm, got) in enumerate(((rows, a), (cols, b))):
                if gemm:
                    made[operand, gemm], q = got, recipe.quantizer(operand, gemm)
                    where = difference(kernels, got, v.T if i else v, q, seeded(i))
                    if where:
                        return f"{operand} for {gemm}: {where}"
    return product_difference(kernels, made["x", "fprop"], made["w", "fprop"], dtype)

def seeded(seed):
    return torch.Generator("cpu").manual_seed(seed)

def sample(shape, seed, dtype):
    """Random numbers: rows of many sizes, outliers in a column, and blocks of zeros."""
    sizes = torch.randint(-6, 1, (shape[0], 1), generator=seeded(seed), device="cpu")
    x = torch.randn(shape, generator=seeded(seed), device="cpu") * torch.exp2(sizes)
    x[::7, 5] *= 50.0
    x[1], x[2, :32] = 0.0, -0.0
    return x.to(dtype)

def difference(kernels, got, x, q, generator):
    """Where `got` is not what ufp4.Quantizer q makes of x on the CPU, or None."""
    x = x if q.signs is None else ufp4.rht(x, q.signs)
    want = ufp4.quantize(x, q.fmt, q.scale, q.block, q.stochastic, generator, q.tiles)
    values = want._replace(tensor_scale=1.0).dequantize().bfloat16()
    same = {"values": got.decoded().cpu() == values}
    if kernels.OPERANDS[got.name].form != "decoded":
        scale = unswizzled(got.scale.cpu(), *want.scale.shape)
        scale = scale.view(want.scale.dtype)
        unused = want.scale.float() * want.tensor_scale == 0    # codes mean nothing
        codes = got.codes.cpu() == want.codes
        same = {"scale": scale.float() == want.scale.float(),
                "codes": codes | unused.repeat_interleave(q.block // 2, -1)} | same
    if got.tensor_scale is not None:
        same["tensor scale"] = got.tensor_scale.cpu().view(1, 1) == want.tensor_scale
    blocks = want.scale.shape[1]
    for what, ok in same.items():
        if not ok.all():
            row, column = (~ok).nonzero()[0].tolist()
            return f"{what} of row {row}, block {column * blocks // ok.shape[1]}"
    return None

def unswizzled(scale, rows, groups):
    """Scales in either order of layout 2 -> (rows, groups)."""
    if scale.dim() == 4:
        scale = scale.unflatten(-1, (4, 4)).permute(0, 3, 2, 1, 4)
        scale = scale.flatten(3).flatten(0, 2)
    return scale[:rows, :groups].contiguous()

def product_difference(kernels, a, b, dtype):
    """Where A B^T differs by more than `dtype` rounds, or None.

    By 2^-12 it may, for tensor cores need not sum in all of float32's bits."""
    got = kernels.matmul(a, b, dtype).cpu().double()
    t = 1.0
    if a.tensor_scale is not None:
        t = (a.tensor_scale * b.tensor_scale).cpu().double()
    a, b = (p.decoded().cpu().double() for p in (a, b))
    lost = t * (a.abs() @ b.abs().T) * max(torch.finfo(dtype).eps, 2.0**-12)
    wrong = ~((got - t * (a @ b.T)).abs() <= lost)
    if not wrong.any():
        return None
    row, column = wrong.nonzero()[0].tolist()
    return f"GEMM 1: row {row}, column {column} of Y"

# ---- 3. What torch.compile needs -----------------------------------------------------

def constant(f):
    """A function of plain values, computed once, and constant to torch.compile.

    Under FakeTensorMode, whose tensors have no data, nothing is remembered."""
    cached = functools.cache(f)
    call = torch.compiler.assume_constant_result(
        lambda *args: (cached if has_data() else f)(*args))
    call.cache_clear = cached.cache_clear
    return call

def has_data():
    """Do new tensors have data? False under FakeTensorMode."""
    return type(torch.empty(0, device="cpu")) is torch.Tensor

def fields(recipe):
    """All that the kernels have to know of a recipe: not its name, nor its seed."""
    return (recipe.fmt.name, recipe.scale.__name__, recipe.block, tuple(recipe.rht),
            tuple(recipe.sr), recipe.tiles, recipe.rht_block)

def recipe_of(fields):
    """The inverse of fields()."""
    fmt, scale, *rest = fields
    return ufp4.Recipe("", fmt, scale.removeprefix("scale_"), *rest)

@constant
def signs_on(seed, n, device):
    """ufp4.random_signs on a device, copied there once."""
    with torch.inference_mode(False):           # what is made in it must stay in it
        return ufp4.random_signs(seed, n).to(device)

OPERATORS = torch.library.Library("ufp4", "DEF")

def operator(name, fake):
    """A decorator that makes a function torch.ops.ufp4.NAME.

    `fake` gives shapes and dtypes of its results without data. (A call of what
    torch.library.custom_op makes takes several times as long.)"""
    def make(f):
        OPERATORS.define(name + torch.library.infer_schema(f, mutates_args=()))
        OPERATORS.impl(name, f, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ufp4::{name}", fake, lib=OPERATORS)
        return f
    return make
