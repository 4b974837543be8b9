"""Which matrix product the operands of a recipe meet on which GPU.

kernels.py needs this, and so does `python bench.py plan`, which runs without Triton.
"""
import ufp4

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
# none applies float32 scales. By mantissa bits of the codes, stored scale and block: the
# path of kernels.matmul_kernel, and the GPUs on which it is taken.
BLACKWELL = ("sm_100", "sm_103", "sm_120", "sm_121")
NATIVE = {(1, "e4m3", 16): ("fp4", BLACKWELL),
          (1, "e8m0", 32): ("fp4", (*BLACKWELL, "gfx950")),
          (2, "e8m0", 32): ("fp8", (*BLACKWELL, "gfx950")),
          # On sm_100 four FP4 products take as long as one in bfloat16. On sm_103 Triton
          # 3.9 overwrites operands that the last of them still reads.
          (2, "e4m3", 16): ("fp4x4", ("sm_120", "sm_121"))}

def misfit(recipe):
    """Why the kernels cannot quantize as this recipe says, or None if they can."""
    if type(recipe) is not ufp4.Recipe:
        return "the Triton kernels take no subclass of Recipe"
    known = ufp4.FORMATS.get(recipe.fmt.name) == recipe.fmt and recipe.fmt.name in BITS
    if not known or recipe.scale not in STORED:
        return "the Triton kernels have the formats and scales of ufp4.py, and no others"
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
