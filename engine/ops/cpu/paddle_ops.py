"""Makes the catalogue known to Paddle as `llm_<op>`, for export and for Paddle Inference."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engine.ops import build
from engine.ops.catalogue import EXPORTED
from engine.ops.declaration import Op


@functools.cache
def register_paddle_ops() -> SimpleNamespace:
    """Register the ops with Paddle, once in a process. The functions of the result have the signatures of
    `engine.ops.reference` and take Paddle tensors, or variables of a graph that is being exported.
    """
    library = build.library(build.PADDLE_OPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that there is no ccache: this module compiles nothing
        from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

    load_op_meta_info_and_register_op(str(library))
    return SimpleNamespace(**{op.name: _function(op) for op in EXPORTED})


def _function(declared: Op) -> Callable:
    from paddle import _C_ops
    from paddle.jit.marker import unified

    name, num_inputs = declared.name, len(declared.inputs)
    attributes = [each.name for each in declared.attributes]

    def op(*inputs: Any, **values: Any) -> Any:
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
