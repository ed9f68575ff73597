"""Rotary positions: from the keys of config.json to inverse frequencies. Plain numpy, no tensors of a framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.models.keys import ModelError, an_object, number, whole_number


@dataclass(frozen=True)
class Rope:
    """Positions of the two halves of a head: angle[p, i] = p * inv_freq[i]."""

    inv_freq: np.ndarray  # f32 [head_dim / 2]
    attention_scaling: float = 1.0  # multiplies cosines and sines
    max_positions: int = 0  # what the scaling was made for, where it says so


def read_rope(keys: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = {**an_object(keys, "rope_scaling"), **an_object(keys, "rope_parameters")}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelError(f"config.json: rope_parameters is {scaling!r}, one set for all layers is supported")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise ModelError(f"config.json: rope_type is {rope_type!r}, supported are {supported}")
    for source in (keys, scaling):
        if source.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
            factor = source["partial_rotary_factor"]
            raise ModelError(f"config.json: partial_rotary_factor is {factor!r}, supported is 1.0")
    theta = number(scaling, "rope_theta", default=number(keys, "rope_theta", default=10000.0))
    # Rounded where transformers rounds: the last digit of a frequency moves every late position.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = np.float32(1.0) / (theta ** exponents.astype(np.float64)).astype(np.float32)
    original = keys.get("original_max_position_embeddings")
    scaling = {"original_max_position_embeddings": original or max_position_embeddings, **scaling, "theta": theta}
    return ROPE_TYPES[rope_type](inv_freq, scaling)


def _linear(inv_freq: np.ndarray, scaling: Mapping[str, Any]) -> Rope:
    return Rope(inv_freq / np.float32(number(scaling, "factor")))


def _llama3(inv_freq: np.ndarray, scaling: Mapping[str, Any]) -> Rope:
    """Short waves stay, long ones are slowed down by `factor`, those between are a mixture of both."""
    factor = np.float32(number(scaling, "factor"))
    low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
    original = whole_number(scaling, "original_max_position_embeddings")
    if not low < high:
        raise ModelError(f"config.json: low_freq_factor is {low}, it must be below high_freq_factor, {high}")
    wavelength = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    mixed = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    slowed = np.where(wavelength > original / low, inv_freq / factor, mixed)
    return Rope(np.where(wavelength < original / high, inv_freq, slowed).astype(np.float32))


def _yarn(inv_freq: np.ndarray, scaling: Mapping[str, Any]) -> Rope:
    """Peng et al., 2023: a ramp over the dimensions from unscaled (fast) to scaled by `factor` (slow)."""
    original = whole_number(scaling, "original_max_position_embeddings")
    factor = number(scaling, "factor")
    low, high = _yarn_range(2 * len(inv_freq), original, scaling)
    ramp = np.clip((np.arange(len(inv_freq), dtype=np.float32) - low) / (high - low), 0, 1)
    mixed = inv_freq / np.float32(factor) * ramp + inv_freq * (1 - ramp)
    attention_scaling = _yarn_magnitude(factor, 1.0)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        mscale, mscale_all = number(scaling, "mscale"), number(scaling, "mscale_all_dim")
        attention_scaling = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all)
    attention_scaling = number(scaling, "attention_factor", default=attention_scaling)
    return Rope(mixed.astype(np.float32), attention_scaling, int(factor * original))


def _yarn_range(dim: int, original: int, scaling: Mapping[str, Any]) -> tuple[float, float]:
    """Between which dimensions the ramp lies: those that turn beta_fast and beta_slow times over `original`."""

    def dimension(num_turns: float) -> float:
        return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(scaling["theta"]))

    low = dimension(number(scaling, "beta_fast", default=32.0))
    high = dimension(number(scaling, "beta_slow", default=1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


ROPE_TYPES: dict[str, Callable[[np.ndarray, Mapping[str, Any]], Rope]] = {
    "default": lambda inv_freq, scaling: Rope(inv_freq),
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
