"""How a matrix of weights is stored in a graph, and which op multiplies with it. Knows neither checkpoints nor models.

To add one: a class like `Dense` and its line in FORMATS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.dtypes import WEIGHT_DTYPES


class Format(Protocol):
    """One matrix [N, K] becomes one or several parameters of the graph."""

    name: str  # in the manifest

    @property
    def read_as(self) -> str:
        """The dtype that `store` wants the checkpoint's numbers in."""
        ...

    def parameters(self, name: str) -> tuple[str, ...]:
        """The names of what is stored of the weight `name`."""
        ...

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        """Their values, of a rank's share of the matrix."""
        ...

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        """x [T, K] times the matrix: [T, N]."""
        ...


@dataclass(frozen=True)
class Dense:
    """One number an element. Norms, biases and tables are stored like this whatever the format of the matrices."""

    name: str

    @property
    def read_as(self) -> str:
        return self.name

    def parameters(self, name: str) -> tuple[str, ...]:
        return (name,)

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        return (matrix,)

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        return ops.linear(x, *stored, bias)


FLOAT32 = Dense("float32")
FORMATS: dict[str, Format] = {name: Dense(name) for name in WEIGHT_DTYPES}
