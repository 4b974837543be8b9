"""To be pasted into bench.py: `python bench.py plan --gpus N [flags of train.py]`. In main(): a
parser "plan" with --gpus (type=train.positive, default 1); args.train = rest; bench_plan(args)."""
import sys

import torch

import kernels
import train
import ufp4

# -------------------------------------------------------------------------------------------------
# plan: what a run would cost, counted, not measured

# Dense peaks in TFLOP/s by path of kernels.route. From NVIDIA's data sheets: H200 (half the figures
# with sparsity), and an eighth of HGX B200's and HGX B300's (FP4: 72 and 108 PFLOP/s dense). A path
# that isn't listed multiplies in BF16.
PEAKS = {"H200": ("sm_90", {"bf16": 989}),
         "B200": ("sm_100", {"bf16": 2250, "fp8": 4500, "fp4": 9000}),
         "B300": ("sm_103", {"bf16": 2250, "fp8": 4500, "fp4": 13500})}


def activation_bytes(s, recipe):
    """Bytes a token that the backward pass needs, in BF16 autocast: (of a block, of what follows
    the blocks). A quantized layer keeps its input as codes and scales, another in BF16. In BF16,
    too, attention keeps qkv, the turned q and k and its output; an MLP gate, up and silu(gate); a
    mixture what it sums. In float32 a norm keeps two tensors, the router one. A logit takes 10
    bytes with its gradient. --compile may fuse some of this away."""
    scale = 0 if recipe.fmt is None else 4 if recipe.scale.__name__ == "fp32" else 1
    kept = 2 if recipe.fmt is None else 0.5 + scale / recipe.block
    mlps = s.top_k + 1                                  # with the shared one; or the only one
    inputs = 2 * s.dim + mlps * (s.dim + s.hidden)
    bf16 = 6 * s.dim + 3 * mlps * s.hidden + s.top_k * s.dim
    float32 = s.dim * (5 if s.experts else 4)
    ends = (2 + 8) * s.dim + 10 * train.vocabulary(s.data)
    return kept * inputs + 2 * bf16 + 4 * float32, ends


def bench_plan(args):
    """Prints sizes, memory and bounds on speed of train.py with the flags args.train on args.gpus
    GPUs."""
    s = train.parse_args(args.train)
    if s.batch_size % (args.gpus * s.grad_accum):
        sys.exit(f"bench.py: --batch-size {s.batch_size} must be a multiple of {args.gpus} GPUs x "
                 f"--grad-accum {s.grad_accum}")
    recipe, vocab = train.make_recipe(s), train.vocabulary(s.data)
    with torch.device("meta"):
        model = train.GPT(s, recipe, vocab)
    total, active, flops = train.counts(model, s)
    quantized = 6 * sum(m.weight.numel() for m in model.modules()
                        if isinstance(m, ufp4.Linear) and m.recipe.fmt is not None)
    blocks = sum(p.numel() for p in model.blocks.parameters())
    # What FSDP gathers, float32: embedding, head and their gradients; a block's weights, the
    # next's, and its gradient.
    gathered = 4 * (2 * (total - blocks) + 3 * blocks // s.layers) if args.gpus > 1 else 0
    # Autograd keeps a BF16 cast of each weight that is not quantized until it has been used.
    plain = blocks if recipe.fmt is None else blocks * s.keep_bf16 // s.layers
    casts = 2 * (model.lm_head.weight.numel() + plain // (s.layers if s.remat else 1))
    block, ends = activation_bytes(s, recipe)
    tokens = s.batch_size * s.seq_len // (args.gpus * s.grad_accum)
    kept = 4 * s.dim * s.layers + block if s.remat else block * s.layers
    rows = {"weights, float32": 4 * total / args.gpus, "gradients, float32": 4 * total / args.gpus,
            "AdamW, float32": 8 * total / args.gpus, "gathered for the moment": gathered,
            "weights cast to BF16": casts, "activations": tokens * (kept + ends)}
    print(f"{s.model}, recipe {train.variant(s)}, vocabulary {vocab}: {total / 1e9:.3f}B "
          f"parameters, {active / 1e9:.3f}B active a token")
    print(f"{args.gpus} GPUs, {s.batch_size} x {s.seq_len} tokens a step, {tokens} a GPU at a time"
          + (", --remat" if s.remat else ""))
    for name, size in (*rows.items(), ("together", sum(rows.values()))):
        print(f"  {name:24s}{size / 2**30:10.2f} GiB a GPU")
    print(f"{flops / 1e9:.3f} GFLOPs a token, {quantized / flops:.0%} of them in quantized layers "
          "other than experts")
    for name, (arch, peaks) in PEAKS.items():
        path = kernels.route(recipe, arch)[0]           # experts' products, too, are in BF16
        seconds = quantized / peaks.get(path, peaks["bf16"]) + (flops - quantized) / peaks["bf16"]
        print(f"  {name}: at most {args.gpus * 1e12 / seconds:,.0f} tokens/s on path {path} "
              f"({arch}), if every product ran at its peak")
