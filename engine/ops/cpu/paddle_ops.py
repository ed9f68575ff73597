"""Makes the catalogue known to Paddle as `llm_<op>`, for export and for Paddle Inference."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engine.ops import build

# op -> how many inputs (an optional one counts), then its attributes in the order of paddle_ops.cc
OPS = {
    "all_gather": (1, "num_ranks", "width"),
    "all_reduce": (1,),
    "embedding": (2, "first_id"),
    "gather_rows": (2,),
    "rms_norm": (2, "epsilon"),
    "add_rms_norm": (3, "epsilon"),
    "head_norm": (3, "num_heads", "num_kv_heads", "epsilon"),
    "linear": (3,),
    "linear_int8": (4,),
    "linear_a8w8": (4,),
    "linear_int4": (5,),
    "linear_fp8": (4,),
    "rotary_angles": (2, "attention_scaling"),
    "paged_attention": (6, "num_heads", "num_kv_heads", "scale"),
    "swiglu": (1,),
}


@functools.cache
def register_paddle_ops() -> SimpleNamespace:
    """Registers the ops, once a process. The result's functions have the signatures of `engine.ops.reference`
    and take Paddle tensors, or variables of a graph that is being exported."""
    library = build.library(build.PADDLE_OPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no ccache: we do not compile with this module
        from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

    load_op_meta_info_and_register_op(str(library))
    return SimpleNamespace(**{name: _function(name, *spec) for name, spec in OPS.items()})


def _function(name: str, num_inputs: Any, *attributes: Any) -> Callable:
    from paddle import _C_ops
    from paddle.jit.marker import unified

    def op(*inputs, **values):
        if values.keys() != set(attributes):
            raise TypeError(f"{name}: attributes are {', '.join(attributes)}, not {', '.join(values)}")
        missing = [None] * (num_inputs - len(inputs))
        in_order = [values[attribute] for attribute in attributes]
        outputs = _C_ops._run_custom_op(  # type: ignore[attr-defined]
            f"llm_{name}", *inputs, *missing, *in_order
        )
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    op.__name__ = op.__qualname__ = name
    return unified(op)
