"""Declarations of ops: what `engine/ops/catalogue.py` says of each op, parsed.

A declaration lists arrays as text, such as `x [T, K], weight i8 [N, K], bias? [N]`: name, types (`f32` where none is
given, alternatives separated by `|`), shape. `?` marks an optional input, `!` a weight that a device may pack when it
loads it. Shapes are integer expressions of symbols and attributes; `pad(K, 128)` is K rounded up to a multiple of 128.
An output with the name of an input is that input, updated in place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# Sizes that differ from step to step: tokens (of an op behind `gather_rows`: rows whose logits are wanted), rows whose
# logits are wanted, requests, and blocks of the longest block table.
STEP_SYMBOLS = ("T", "S", "B", "max_blocks")
LOGITS = "output logits"  # in `fuses`: the output is that one of the graph
TYPES = ("f32", "bf16", "f16", "i8", "u8", "i32")
ARRAY = re.compile(r"(\w+)([?!]*) *([\w|]*) *\[([^]]*)\]")
SYMBOL = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Array:
    """An input or output of an op."""

    name: str
    shape: tuple[str, ...]  # an expression for each axis
    types: tuple[str, ...] = ("f32",)
    is_optional: bool = False
    is_packable: bool = False

    def __str__(self) -> str:
        return f"{'|'.join(self.types)} [{', '.join(self.shape)}]"


@dataclass(frozen=True)
class Attribute:
    """A number that is a constant of the graph: `int` or `float`."""

    name: str
    type: str


@dataclass(frozen=True)
class Op:
    """An op of the catalogue. `fuses` names the ops, one behind the other, that it computes in one call: such an op is
    never exported, executors put it in their place. LOGITS stands for no op, but for an output of the graph."""

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    attributes: tuple[Attribute, ...]
    formula: str  # Markdown, for docs/ops.md
    requires: tuple[str, ...] = ()  # conditions on symbols and attributes, in the syntax that Python and C++ share
    ids_below: tuple[tuple[str, str], ...] = ()  # (input, expression): its numbers are ids from 0 to below that
    header: str = ""  # in engine/ops/cpu, that defines the kernel; empty: the op has none for CPUs
    cuda: str = ""  # module of engine/ops/cuda with the function; empty: the op has none for GPUs
    is_row_wise: bool = True  # on GPUs, too: a row of the output has the same bits whatever the other rows are
    fuses: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()  # of a linear layer: the inputs that store the matrix x is multiplied with

    @property
    def hides_product(self) -> bool:
        """Return whether the product of a linear layer is never stored as a whole."""
        return bool(self.fuses and self.weights and self.fuses[-1] != LOGITS)

    @property
    def is_mixture(self) -> bool:
        """Return whether the op multiplies by the stacked matrices of experts."""
        return any(each.name == "num_experts" for each in self.attributes)

    @cached_property
    def updated(self) -> int | None:
        """Return the input that the op updates in place and returns as its last output."""
        names = [array.name for array in self.inputs]
        return names.index(self.outputs[-1].name) if self.outputs[-1].name in names else None

    @property
    def rows_of(self) -> int:
        """Return the input that has as many rows as the output: the step's tokens, or its logits."""
        rows = self.outputs[0].shape[0]
        return next(index for index, array in enumerate(self.inputs) if rows in array.shape)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Return the symbols of the shapes in order of appearance, without attributes."""
        known = {attribute.name for attribute in self.attributes} | {"pad"}
        found = dict.fromkeys(
            symbol for array in (*self.inputs, *self.outputs) for axis in array.shape for symbol in SYMBOL.findall(axis)
        )
        return tuple(symbol for symbol in found if symbol not in known)


def arrays(text: str) -> tuple[Array, ...]:
    """Parse a list of arrays. Raises ValueError where the text has anything else."""
    if rest := ARRAY.sub("", text).replace(",", "").strip():
        raise ValueError(f"cannot read {rest!r} in {text!r}")
    found = []
    for name, mark, types, shape in ARRAY.findall(text):
        kinds = tuple(types.split("|")) if types else ("f32",)
        if unknown := set(kinds) - set(TYPES):
            raise ValueError(f"{name} has the unknown type {min(unknown)}")
        axes = tuple(axis.strip() for axis in re.split(r",(?![^(]*\))", shape))
        found.append(Array(name, axes, kinds, "?" in mark, "!" in mark))
    return tuple(found)


def attributes(text: str) -> tuple[Attribute, ...]:
    return tuple(Attribute(*item.split()) for item in text.split(",") if item.strip())


def table(ops: Sequence[Op]) -> str:
    """Return the ops as the Markdown table of docs/ops.md."""

    def listed(items: Sequence[Array], of: Op) -> str:
        names = {array.name for array in of.inputs}
        cells = []
        for array in items:
            if items is of.outputs and array.name in names:
                cells.append(f"`{array.name}` in place")
            else:
                cells.append(f"`{array.name}` {array}".replace("|", " or ") + (" or none" if array.is_optional else ""))
        return ", ".join(cells)

    rows = ["| op (registered as `llm_<op>`) | inputs | outputs | attributes |", "| --- | --- | --- | --- |"]
    for op in ops:
        given = ", ".join(f"`{each.name}` {each.type}" for each in op.attributes)
        rows.append(f"| `{op.name}` | {listed(op.inputs, op)} | {listed(op.outputs, op)} | {given} |")
    return "\n".join(rows) + "\n"
