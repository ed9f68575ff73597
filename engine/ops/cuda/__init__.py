"""The ops of `docs/ops.md` on NVIDIA GPUs: the functions of `engine.ops.reference` on torch's tensors.

Matrix products of many rows are torch's (cuBLASLt), all else is kernels in the Triton language, which the interpreter
of that language (TRITON_INTERPRET=1) also runs on the CPU. Activations have the type of the embedding table, float32,
bfloat16 or float16; sums are float32. Grids follow from shapes alone, never from values: every call can be part of a
CUDA graph.
"""

from engine.ops.cuda.attention import paged_attention
from engine.ops.cuda.fp8 import gated_linear_fp8, linear_fp8
from engine.ops.cuda.group import all_gather, all_reduce, all_reduce_add_rms_norm, of_first
from engine.ops.cuda.lowbit import (
    gated_linear_a8w8,
    gated_linear_int4,
    gated_linear_int8,
    linear_a8w8,
    linear_int4,
    linear_int8,
    logits_int8,
)
from engine.ops.cuda.norms import add_rms_norm, rms_norm
from engine.ops.cuda.placing import head_norm
from engine.ops.cuda.pointwise import embedding, last_tokens_in, rotary_angles, swiglu
from engine.ops.cuda.products import gated_linear, gather_rows, linear, logits

__all__ = [
    "add_rms_norm",
    "all_gather",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "embedding",
    "gated_linear",
    "gated_linear_a8w8",
    "gated_linear_fp8",
    "gated_linear_int4",
    "gated_linear_int8",
    "gather_rows",
    "head_norm",
    "last_tokens_in",
    "linear",
    "linear_a8w8",
    "linear_fp8",
    "linear_int4",
    "linear_int8",
    "logits",
    "logits_int8",
    "of_first",
    "paged_attention",
    "rms_norm",
    "rotary_angles",
    "swiglu",
]
