"""Random LoRA adapters for an exported model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.models.adapters import CONFIG, WEIGHTS, Adapter, identified, network_of
from engine.models.layers import Linear
from engine.models.weights import found_in


def make_adapter(directory: Path, graph_dir: Path, rank: int, seed: int) -> Adapter:
    """Write an adapter with small random numbers for every linear layer into `directory`, and return it."""
    rng, tensors = np.random.default_rng(seed), {}
    for linear in found_in(network_of(graph_dir), Linear):
        for part in linear.weight.parts:
            num_outputs, num_inputs = part.shape
            for which, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                name = f"base_model.model.{part.tensor.removesuffix('weight')}lora_{which}.weight"
                tensors[name] = 0.01 * rng.standard_normal(shape, np.float32)
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return identified(directory)
