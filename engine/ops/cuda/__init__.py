"""The ops of `docs/ops.md` on NVIDIA GPUs: the functions of `engine.ops.reference` on torch's tensors.

Matrix products of many rows are torch's (cuBLASLt), all else is kernels in the Triton language, which the interpreter
of that language (TRITON_INTERPRET=1) also runs on the CPU. Activations have the type of the embedding table, float32 or
bfloat16; sums are float32. Grids follow from shapes alone, never from values: every call can be part of a CUDA graph.
"""

from engine.ops.cuda.attention import head_norm, paged_attention
from engine.ops.cuda.norms import add_rms_norm, rms_norm
from engine.ops.cuda.pointwise import embedding, last_tokens_in, rotary_angles, swiglu
from engine.ops.cuda.products import gated_linear, gather_rows, linear, logits

__all__ = [
    "add_rms_norm",
    "embedding",
    "gated_linear",
    "gather_rows",
    "head_norm",
    "last_tokens_in",
    "linear",
    "logits",
    "paged_attention",
    "rms_norm",
    "rotary_angles",
    "swiglu",
]
