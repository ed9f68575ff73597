"""Parameters of a graph that depend only on config.json."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.models.config_fields import read_json
from engine.models.families import read_model
from engine.models.formats import FLOAT32
from engine.models.weights import Constant, Shard, found_in


def constants_of(model_dir: Path) -> dict[str, np.ndarray]:
    """Return the constants of a checkpoint or an exported model by name. They are equal on all ranks."""
    networks = read_model(read_json(model_dir / "config.json")).networks(Shard(FLOAT32, "float32", 1))
    return {each.name: each.values for network in networks.values() for each in found_in(network, Constant)}
