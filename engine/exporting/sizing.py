"""Memory that a model needs, from config.json and the shapes of its tensors. No weights are read."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.exporting.expert_sizes import ExpertSizes
from engine.exporting.export import ExportOptions, plan_of
from engine.exporting.manifest import Manifest
from engine.models.checkpoint import weight_files
from engine.models.config_fields import ModelError, an_object
from engine.models.experts import is_stack
from engine.models.formats import Fp8
from engine.models.modelopt import read_config
from engine.models.paddlenlp import rank_files
from engine.models.quantization import read_quantization
from engine.models.weights import Weight

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of one rank of a model: its weights and, in the manifest, its KV caches."""

    manifest: Manifest
    weight_bytes: int
    experts: ExpertSizes


def sizes_of(checkpoint_dir: Path, options: ExportOptions, *, widens_fp8: bool) -> ModelSizes:
    """Return the sizes of a checkpoint, which may consist of config.json alone. With `widens_fp8`, matrices of 8-bit
    floats become bfloat16 when they are loaded, as on CPUs. Raises ModelError if the model is not supported."""
    plan = plan_of(checkpoint_dir, _fitting(options, checkpoint_dir), log.info)
    sizes, mixture = [_array_bytes(weight, widens_fp8) for weight in plan.weights], plan.model.mixture
    stacks = [of_arrays[0] for weight, of_arrays in zip(plan.weights, sizes, strict=True) if is_stack(weight.name)]
    num_experts = len(plan.shards[0].experts(mixture.num_experts)) if mixture else 0
    experts = ExpertSizes(len(stacks) // 2, num_experts, sum(stacks))
    return ModelSizes(plan.manifest, sum(map(sum, sizes)), experts)


def _fitting(options: ExportOptions, directory: Path) -> ExportOptions:
    """Return the options, for a folder without weights with the types that config.json declares."""
    try:
        if options.load_format == "dummy" or rank_files(directory) or weight_files(directory):
            return options
    except ModelError as error:
        log.info("%s", error)
    keys = read_config(directory)
    declared = [each.get("torch_dtype") or each.get("dtype") for each in (keys, an_object(keys, "text_config"))]
    quantizations = read_quantization(keys)
    dtype = "float32" if "float32" in declared else "bfloat16"
    return replace(
        options,
        load_format="dummy",
        dtype=dtype if options.dtype == "auto" else options.dtype,
        quant_type=quantizations[0].format if quantizations and options.quant_type == "none" else options.quant_type,
    )


def _array_bytes(weight: Weight, widens_fp8: bool) -> list[int]:
    """Return the bytes of the arrays in which a weight is stored, first those of its values or codes."""
    num_rows, *inner = weight.shape
    if widens_fp8 and isinstance(weight.format, Fp8):
        return [2 * num_rows * math.prod(inner)]
    of_a_row = weight.format.store(np.zeros((1, *inner), np.dtype(weight.format.read_as)))
    return [num_rows * array.nbytes for array in of_a_row]
