"""Quantized matrices of a checkpoint: the tensors that store them, and how they are read as codes and scales.

Readers of single methods build a `Quantization`. Independent of files and ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from engine.models.config_fields import ModelError
from engine.models.quantize import Codes
from engine.models.stored_tensors import StoredTensor

KEY = "quantization_config"
WIDER = "weight_only_int8"  # the format of codes that do not fit in groups of 4-bit codes
FLOATS = ("F32", "F16", "BF16")  # dtypes of matrices that are not quantized, as safetensors spells them
G_IDX = ("g_idx", "weight_g_idx")  # tensors with the group of each input
Tensors = Mapping[str, np.ndarray]  # the tensors of one layer, by the suffixes of their names


@runtime_checkable
class QuantizedMatrix(Protocol):
    """A matrix that the checkpoint stores quantized."""

    @property
    def name(self) -> str:
        """Return the name of the tensor with the codes, for messages."""
        ...

    @property
    def format(self) -> str:
        """Return the key of engine.models.formats.FORMATS that stores it best; empty: floats in the tables' dtype."""
        ...

    @property
    def has_zero(self) -> bool:
        """Return whether its zero points differ from the middle of the codes."""
        ...

    @property
    def inexact(self) -> str:
        """Return how it is stored, if this format cannot keep its codes, for the log; else an empty string."""
        ...

    def codes(self) -> Codes:
        """Return the codes of the whole matrix."""
        ...


@dataclass(frozen=True)
class Quantization:
    """Storage of quantized linear layers of a checkpoint.

    Layers without the tensors in `ends` are not quantized.
    """

    method: str  # quant_method, for messages
    format: str  # a key of engine.models.formats.FORMATS
    has_zero: bool
    group_size: int  # inputs per scale; -1: a whole row; 0: the config does not say
    ends: tuple[str, ...]  # suffixes of the names of a layer's tensors; the first has the codes: `<layer>.qweight`
    read: Callable[[Tensors], Codes]
    optional: tuple[str, ...] = ()
    symmetric_word: int | None = None  # value of all words of `qzeros` if the zero points are symmetric
    targets: tuple[str, ...] = ("Linear",)  # layers: a class, which means all others, a name, or `re:` and a pattern
    inexact: str = ""  # see Coded.inexact

    def num_groups(self, num_columns: int) -> int:
        """Return how many scales a row of `num_columns` weights must have, or 0 if the config does not say."""
        if self.group_size < 1:
            return -self.group_size
        return -(-num_columns // self.group_size)

    def names(self, layer: str) -> bool:
        """Return whether a target names the layer itself and not its class."""
        return any(
            re.match(target[3:], layer) if target.startswith("re:") else target == layer for target in self.targets
        )

    def layer(self, tensor: str, tensors: Mapping[str, StoredTensor]) -> QuantizedLayer | None:
        """Return the quantized matrix whose plain weight would be `tensor`, or None if it is not quantized.

        Raises ModelError if some of its tensors are missing.
        """
        prefix = tensor.removesuffix("weight")
        first = tensors.get(f"{prefix}{self.ends[0]}")
        if first is None or first.get_dtype() in FLOATS:
            return None
        for end in self.ends:
            if f"{prefix}{end}" not in tensors:
                raise ModelError(f"tensor {prefix}{end} is missing in the checkpoint")
        ends = (*self.ends, *(end for end in self.optional if f"{prefix}{end}" in tensors))
        return QuantizedLayer(self, {f"{prefix}{end}": tensors[f"{prefix}{end}"] for end in ends}, prefix)


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """A quantized matrix that is stored as several tensors of a layer."""

    method: Quantization
    tensors: Mapping[str, StoredTensor]  # by their names
    prefix: str  # of these names

    @property
    def name(self) -> str:
        return f"{self.prefix}{self.method.ends[0]}"

    @property
    def has_zero(self) -> bool:
        """Return whether it has zero points, as the tensors have it, since configs may omit or misstate `sym`."""
        zeros = self.tensors.get(f"{self.prefix}qzeros")
        if self.method.has_zero or self.method.symmetric_word is None or zeros is None:
            return self.method.has_zero
        return bool((zeros[:].view(np.uint32) != np.uint32(self.method.symmetric_word)).any())

    @property
    def _is_permuted(self) -> bool:
        """Return whether its groups do not consist of consecutive inputs, which GPTQ calls desc_act or actorder."""
        found = [self.tensors[name] for end in G_IDX if (name := f"{self.prefix}{end}") in self.tensors]
        size = self.method.group_size
        return size > 0 and any(group_of(g_idx[:], size) is not None for g_idx in found)

    @property
    def format(self) -> str:
        return WIDER if self._is_permuted else self.method.format

    @property
    def inexact(self) -> str:
        if self._is_permuted:
            return f"{self.method.method} with desc_act"
        is_shifted = self.method.format == WIDER and self.has_zero
        return f"{self.method.method} of 8 bits with zero points" if is_shifted else self.method.inexact

    def codes(self) -> Codes:
        found = {name.removeprefix(self.prefix): tensor[:] for name, tensor in self.tensors.items()}
        return self.method.read(found)


def group_of(g_idx: np.ndarray | None, group_size: int) -> np.ndarray | None:
    """Return the group of each input, or None if each group consists of consecutive inputs.

    A `g_idx` of only -1 counts as not set.
    """
    if g_idx is None or (g_idx == -1).all() or np.array_equal(g_idx, np.arange(len(g_idx)) // group_size):
        return None
    return g_idx


def unpack(words: np.ndarray, axis: int, bits: int = 4) -> np.ndarray:
    """Return the unsigned numbers (u8) in int32 words, lowest bits first.

    The given axis becomes 32 / `bits` times as long.
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    shape = [size * (len(shifts) if i == axis else 1) for i, size in enumerate(words.shape)]
    return np.moveaxis(numbers, -1, axis + 1).reshape(shape).astype(np.uint8)


def need(config: Mapping[str, Any], what: str, **supported: tuple[Any, ...]) -> None:
    """Raise ModelError unless each of these keys of the config has one of the supported values."""
    for name, values in supported.items():
        if config.get(name) not in values:
            listed = ", ".join(repr(value) for value in values if value is not None)
            raise ModelError(f"config.json: {KEY}: {name} of {what} is {config.get(name)!r}, supported is {listed}")
