"""Random parameters of a graph that was exported without weights (LOAD_FORMAT=dummy), each made when it is read."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from engine.dtypes import held_as, to_bf16
from engine.graph.nodes import Graph, Value
from engine.ops.catalogue import OPS

NUM_DRAWN = 1_000_003  # numbers that are drawn for all parameters of a kind; a prime, so that rows differ
WIDTH = 0.02  # standard deviation of weights
CODES_WIDTH = {"int8": 73.3, "uint8": 4.61}  # of uniform codes of 8 and 4 bits
MXFP4_EXPONENT = 120  # biased: the standard deviation of uniform codes is 2.93
FLOATS, CODES, FP8 = "floats", "codes", "fp8"


@dataclass(frozen=True, eq=False)
class RandomParam:
    """Random parameter that takes no memory. It is an array for np.asarray and for slices of rows."""

    value: Value
    kind: str  # FLOATS, CODES or FP8; empty: all elements are `filling`
    filling: float = 0.0

    @property
    def dtype(self) -> np.dtype:
        return held_as(self.value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        shape = (stop - start, *self.shape[1:])
        if not self.kind:
            return _held(np.full(shape, self.filling, np.float32), self.value.dtype)
        offset = start * math.prod(self.shape[1:]) % NUM_DRAWN
        return np.resize(np.roll(_numbers(self.kind, self.value.dtype), -offset), shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self[:]


def random_params(graph: Graph, constants: Mapping[str, np.ndarray]) -> dict[str, np.ndarray | RandomParam]:
    """Return random matrices or codes, norms of one and biases of zero. `constants` keep their values."""
    floats = {
        value.id
        for node in graph.nodes
        if node.op.endswith("_fp8")
        for value, declared in zip(node.inputs, OPS[node.op].inputs, strict=False)
        if value and declared.name == "weight"
    }
    return {
        name: constants[name] if name in constants else _param(graph.parameters, name, floats)
        for name in graph.parameters
    }


def _param(parameters: Mapping[str, Value], name: str, floats: set[int]) -> RandomParam:
    value = parameters[name]
    if name.endswith("_scale"):
        if value.dtype == "uint8":
            return RandomParam(value, "", MXFP4_EXPONENT)
        codes = parameters[name.removesuffix("_scale")]
        return RandomParam(value, "", WIDTH / (1 if codes.id in floats else CODES_WIDTH[codes.dtype]))
    if value.id in floats:
        return RandomParam(value, FP8)
    if value.dtype in CODES_WIDTH:
        return RandomParam(value, CODES)
    return RandomParam(value, FLOATS) if len(value.shape) > 1 else RandomParam(value, "", float("norm" in name))


@functools.cache
def _numbers(kind: str, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == CODES:
        low, high = (-127, 128) if dtype == "int8" else (0, 256)
        return rng.integers(low, high, NUM_DRAWN, held_as(dtype))
    drawn = rng.standard_normal(NUM_DRAWN, np.float32)
    if kind == FP8:
        return drawn.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return _held(WIDTH * drawn, dtype)


def _held(values: np.ndarray, dtype: str) -> np.ndarray:
    return to_bf16(values) if dtype == "bfloat16" else values.astype(held_as(dtype))
