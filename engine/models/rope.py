"""Rotary position embeddings: computes inverse frequencies from the keys of config.json, in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.models.config_fields import ModelError, an_object, number, whole_number


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. At position p, elements i of the two halves of a head turn by p * inv_freq[i]."""

    inv_freq: np.ndarray  # f32 [rotary_dim / 2]
    attention_scaling: float = 1.0  # cosines and sines are multiplied by it
    max_positions: int = 0  # tokens that the scaling supports; 0: it does not say
    name: str = "inv_freq"  # name of the frequencies in the graph; layers may have different ones
    long: Rope | None = None  # replaces this one if a model is exported for more than `long_from` tokens
    long_from: int = 0  # tokens
    axes: np.ndarray | None = None  # i32 [rotary_dim / 2]: M-RoPE, which of three positions each angle depends on

    def for_length(self, max_seq_len: int) -> Rope:
        """Return the rope of a model that is exported for sequences of at most `max_seq_len` tokens."""
        return replace(self.long, axes=self.axes) if self.long and max_seq_len > self.long_from else self


def read_rope(keys: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier versions).

    Raises ModelError.
    """
    scaling = {**an_object(keys, "rope_scaling"), **an_object(keys, "rope_parameters")}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelError(f"config.json: rope_parameters is {scaling!r}, one set for all layers is supported")
    return _read(keys, scaling, head_dim, max_position_embeddings)


def ropes_by_layer_type(
    keys: Mapping[str, Any], head_dim: int, max_position_embeddings: int, local: Mapping[str, Any] | None = None
) -> tuple[Rope, Rope]:
    """Return the ropes of layers with full attention and of those with sliding attention. Raises ModelError.

    `local` are the parameters of sliding layers if config.json does not have a set for each type. None stands for the
    base of the others without scaling.
    """
    given = an_object(keys, "rope_parameters")
    full, sliding = given.get("full_attention"), given.get("sliding_attention")
    if not isinstance(full, Mapping) and not isinstance(sliding, Mapping):
        full = {**an_object(keys, "rope_scaling"), **given}
        sliding = {"rope_theta": full.get("rope_theta", keys.get("rope_theta"))} if local is None else local
    ropes = [_read(keys, each or {}, head_dim, max_position_embeddings) for each in (full, sliding)]
    return ropes[0], replace(ropes[1], name="inv_freq_sliding")


def no_rotation() -> Rope:
    """Return the rope of layers without rotation: all angles are zero."""
    return Rope(np.zeros(1, np.float32), name="inv_freq_none")


def _read(keys: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> Rope:
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise ModelError(f"config.json: rope_type is {rope_type!r}, supported are {supported}")
    factor = number(scaling, "partial_rotary_factor", default=number(keys, "partial_rotary_factor", default=1.0))
    rotary_dim = int(head_dim * factor)
    if factor > 1 or rotary_dim % 2 or not rotary_dim:
        raise ModelError(
            f"config.json: partial_rotary_factor is {factor:g}, of a head of {head_dim} an even number must be rotated"
        )
    theta = number(scaling, "rope_theta", default=number(keys, "rope_theta", default=10000.0))
    # Values are rounded where transformers rounds them: the last bit of a frequency changes angles of late positions.
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    inv_freq = np.float32(1.0) / (theta ** exponents.astype(np.float64)).astype(np.float32)
    original = keys.get("original_max_position_embeddings")  # has precedence, as in transformers
    scaling = {
        "original_max_position_embeddings": max_position_embeddings,
        **scaling,
        **({"original_max_position_embeddings": original} if original else {}),
        "theta": theta,
        "max_position_embeddings": max_position_embeddings,
    }
    try:
        rope = ROPE_TYPES[rope_type](inv_freq, scaling)
    except (ArithmeticError, ValueError) as error:  # such as the logarithm of a length of 1, by which YaRN divides
        raise ModelError(f"config.json: rope_type {rope_type!r} is not possible with {scaling}: {error}") from None
    return replace(rope, axes=_axes(scaling, len(inv_freq)))


def _axes(scaling: Mapping[str, Any], num_angles: int) -> np.ndarray | None:
    """Return, for each angle, whether it depends on time (0), height (1) or width (2); None without M-RoPE.

    The sections follow one another (Qwen2-VL). With `mrope_interleaved` they alternate, and time has the angles that
    are left after the sections of height and width (Qwen3-VL).
    """
    sections = scaling.get("mrope_section")
    if sections is None:
        return None
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(each) is int for each in sections):
        raise ModelError(f"config.json: mrope_section is {sections!r}, it must be a list of three whole numbers")
    if min(sections) < 0 or sum(sections) != num_angles:
        raise ModelError(f"config.json: mrope_section is {sections}, its sum must be {num_angles}")
    if not scaling.get("mrope_interleaved"):
        return np.repeat(np.arange(3, dtype=np.int32), sections)
    axes = np.zeros(num_angles, np.int32)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _linear(inv_freq: np.ndarray, scaling: Mapping[str, Any]) -> Rope:
    return Rope(inv_freq / np.float32(number(scaling, "factor")))


def _dynamic(inv_freq: np.ndarray, scaling: Mapping[str, Any]) -> Rope:
    """Return the unscaled rope, which is valid up to the model's length, or one whose base `alpha` stretches."""
    if not scaling.get("alpha"):
        return Rope(inv_freq)
    dim = 2 * len(inv_freq)
    base = scaling["theta"] * number(scaling, "alpha") ** (dim / (dim - 2))
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return Rope(np.float32(1.0) / (base ** exponents.astype(np.float64)).astype(np.float32))


def _longrope(inv_freq: np.ndarray, scaling: Mapping[str, Any]) -> Rope:
    """Return LongRoPE (Ding et al., 2024): a factor per dimension, with one set up to the original length and another
    beyond it.

    The length that a model is exported for selects one set for all positions, since cached keys must not change.
    """
    original = whole_number(scaling, "original_max_position_embeddings")
    ratio = number(scaling, "factor", default=scaling["max_position_embeddings"] / original)
    magnitude = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    magnitude = number(scaling, "attention_factor", default=magnitude)
    short, long = (_divided(inv_freq, scaling, name) for name in ("short_factor", "long_factor"))
    return Rope(short, magnitude, long=Rope(long, magnitude), long_from=original)


def _divided(inv_freq: np.ndarray, scaling: Mapping[str, Any], name: str) -> np.ndarray:
    factors = scaling.get(name)
    if not isinstance(factors, list) or not all(isinstance(each, int | float) and each > 0 for each in factors):
        raise ModelError(f"config.json: {name} is {str(factors)[:80]}, it must be a list of positive numbers")
    if len(factors) != len(inv_freq):
        raise ModelError(f"config.json: {name} has {len(factors)} numbers, positions need {len(inv_freq)}")
    return (inv_freq / np.array(factors, np.float32)).astype(np.float32)


def _llama3(inv_freq: np.ndarray, scaling: Mapping[str, Any]) -> Rope:
    """Return Llama 3's rope: short wavelengths stay, long ones are stretched by `factor`, others interpolated."""
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
    """Return YaRN (Peng et al., 2023): a ramp over the dimensions from unscaled (fast) to scaled by `factor` (slow)."""
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
    """Return the limits of the ramp: the dimensions that turn beta_fast and beta_slow times in `original` tokens."""

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
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "mrope": lambda inv_freq, scaling: Rope(inv_freq),  # has 3-D positions, see Rope.axes
    "su": _longrope,  # the first name of longrope
    "yarn": _yarn,
}
