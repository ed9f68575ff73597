"""The numbers that say how the next token of a request is chosen: each is declared here once.

Request fields with their checks, error messages and documentation, OpenAI's names, the fields of `Sampling`, the ranges
that the engine accepts, the columns of a step's sampling rows and their C structure follow from the declaration. The
kernels that read a column are `engine/ops/cpu/sampler.cc` and `engine/ops/cuda/sampler`. Imports nothing of the engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

MAX_INT = 2**31 - 1
Keeps = Callable[[Any, float], Any]  # (logits [V] of a row, value) -> bool [V]: the tokens that may be chosen


@dataclass(frozen=True)
class Parameter:
    """Name, limits and documentation of one numeric sampling parameter. `low` and `high` are inclusive."""

    name: str
    type: type[int] | type[float]
    neutral: float  # changes nothing
    meaning: str  # of docs/api.md
    low: float
    high: float
    default: float  # of a native request
    field: str  # of a native request
    aliases: tuple[str, ...]  # other names of that
    needs: str  # "must be ...", for the error message
    off: int | None = None  # another value that means the neutral one
    is_clipped: bool = False  # what is above `high` means `high`
    is_penalty: bool = False  # reads the tokens before: the next step waits for this one
    is_captured: bool = False  # sent with every step, because captured CUDA graphs read it
    keeps: Keeps | None = None  # the definition of one that excludes tokens by their logits, before min_p

    @property
    def openai_name(self) -> str:
        return self.aliases[-1] if self.aliases else self.field


def _parameter(neutral: float, low: float, high: float, meaning: str, **more: Any) -> Any:
    return dataclasses.field(default=neutral, metadata={"low": low, "high": high, "meaning": meaning, **more})


def _typical(logits: Any, share: float) -> Any:
    """Keep the tokens that are nearest to the mean of all logits, weighted by probability (Meister et al., 2022: the
    distance of a log-probability from the expected one is the same). The last one's ties are kept as well."""
    shifted = logits.astype(float) - logits.max()
    weights, is_allowed = math.e**shifted, shifted > -math.inf
    mean = (weights[is_allowed] * shifted[is_allowed]).sum() / weights.sum()
    distances = abs(shifted - mean).astype(logits.dtype)
    order = distances.argsort(kind="stable")
    running = weights[order].cumsum()
    return distances <= distances[order[running.searchsorted(share * running[-1])]]


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """The parameters of one request. The defaults are neutral."""

    top_p: float = _parameter(
        1.0,
        0,
        1,
        "0 to 1: choose from the likeliest tokens that have this probability together",
        field="topp",
        aliases=("top_p",),
        default=0.7,
        is_captured=True,
    )
    top_k: int = _parameter(
        0,
        0,
        MAX_INT,
        "choose from the likeliest k tokens; 0 or -1: from all",
        needs="must be an integer of at least -1, where -1 and 0 stand for all tokens",
        off=-1,
        is_clipped=True,
        is_captured=True,
    )
    min_p: float = _parameter(
        0.0,
        0,
        1,
        "0 to 1: choose from tokens with at least this share of the likeliest one's probability",
        is_captured=True,
    )
    top_n_sigma: float = _parameter(
        0.0,
        0,
        100,
        "0 to 100; above 0: choose from tokens whose logit is at most this many standard deviations below the largest",
        needs="must be in {limit}, or -1 for all tokens",
        off=-1,
        keeps=lambda logits, value: logits >= logits.max() - value * logits[logits > -math.inf].std(),
    )
    typical_p: float = _parameter(
        1.0,
        0,
        1,
        "0 to 1: choose from the tokens whose log-probabilities are nearest to the expected one, as many as have this "
        "probability together",
        keeps=_typical,
    )
    xtc_probability: float = _parameter(
        0.0,
        0,
        1,
        "0 to 1, how often XTC applies: of the tokens above `xtc_threshold` only the least likely can be chosen",
    )
    xtc_threshold: float = _parameter(
        0.1,
        0,
        1,
        "0 to 1: the probability from which on `xtc_probability` excludes likelier tokens; no effect above 0.5",
    )
    temperature: float = _parameter(
        1.0,
        0,
        100,
        "0 to 100; 0: always the likeliest token",
        default=0.95,
        needs="must be >= 0 and at most 100",
        is_captured=True,
    )
    repetition_penalty: float = _parameter(
        1.0,
        0.01,  # below, it is 0 for some device
        10,
        "0.01 to 10, for tokens of prompt and answer; above 1: fewer repetitions",
        field="penalty_score",
        aliases=("repetition_penalty",),
        needs="must be greater than 0 (at least 0.01) and at most 10",
        is_penalty=True,
    )
    frequency_penalty: float = _parameter(
        0.0,
        -2,
        2,
        "-2 to 2, times the occurrences in the answer",
        field="frequency_score",
        aliases=("frequency_penalty",),
        is_penalty=True,
    )
    presence_penalty: float = _parameter(
        0.0,
        -2,
        2,
        "-2 to 2, for tokens that are in the answer",
        field="presence_score",
        aliases=("presence_penalty",),
        is_penalty=True,
    )

    @property
    def has_penalty(self) -> bool:
        """Return whether the next token depends on the previous tokens beyond the logits."""
        return any(getattr(self, each.name) != each.neutral for each in PENALTIES)


def _declared(field: dataclasses.Field) -> Parameter:
    kind, neutral = (int if field.type == "int" else float), cast(float, field.default)
    defaults = {"field": field.name, "aliases": (), "default": neutral, "needs": "must be in {limit}"}
    return Parameter(field.name, kind, neutral, **{**defaults, **field.metadata})


PARAMETERS: tuple[Parameter, ...] = tuple(map(_declared, dataclasses.fields(SamplingParameters)))
PENALTIES = tuple(each for each in PARAMETERS if each.is_penalty)
