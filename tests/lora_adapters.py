"""Small random LoRA adapters as PEFT writes them, and the checkpoints with their changes merged in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.checkpoints import write_tensors

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(directory: Path, checkpoint: Path, seed: int, rank: int = 4, **config: Any) -> Path:
    """Make an adapter for a checkpoint whose matrices can be read. `config` holds keys of adapter_config.json. The
    adapter is large enough to change every greedy answer.
    """
    patterns, default = config.get("rank_pattern", {}), rank
    rng = np.random.default_rng(seed)
    targets = config.get("target_modules", ALL_LINEAR)
    tensors = {}
    with safe_open(checkpoint / "model.safetensors", "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    for name, shape in shapes.items():
        if name.split(".")[-2] in targets and name.endswith(".weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            num_outputs, num_inputs = shape
            rank = of_module(patterns, name.removesuffix(".weight"), default)
            a, b = rng.standard_normal((rank, num_inputs)), rng.standard_normal((num_outputs, rank))
            tensors[f"{module}.lora_A.weight"] = (a / num_inputs**0.5).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = (b * 0.5 / rank**0.5).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    keys = {
        "peft_type": "LORA",
        "r": default,
        "lora_alpha": 2 * default,
        "bias": "none",
        "target_modules": list(targets),
    }
    (directory / "adapter_config.json").write_text(json.dumps({**keys, "init_lora_weights": True, **config}))
    return directory


def of_module(patterns: dict[str, int], module: str, default: int) -> int:
    """Return the value for a module as PEFT selects it: that of the first pattern that matches, else the default."""
    return next((each for key, each in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def merged(directory: Path, checkpoint: Path, adapter: Path | str) -> Path:
    """Return the checkpoint with the changes of the adapter merged into its matrices in float64."""
    adapter = Path(adapter)
    keys = json.loads((adapter / "adapter_config.json").read_text())
    tensors, added = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in added.items():
        if "lora_A" in name:
            b = added[name.replace("lora_A", "lora_B")].astype(np.float64)
            target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            alpha = of_module(keys.get("alpha_pattern", {}), target.removesuffix(".weight"), keys["lora_alpha"])
            scale = alpha / (len(a) ** 0.5 if keys.get("use_rslora") else len(a))
            tensors[target] = (tensors[target] + scale * (b @ a.astype(np.float64))).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.name != "model.safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    write_tensors(directory / "model.safetensors", tensors, "float32")
    return directory
