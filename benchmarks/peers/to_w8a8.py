"""Conversion of the checkpoint to compressed-tensors, in vLLM's environment: `python -m benchmarks.peers.to_w8a8
CHECKPOINT OUT`.

The layers' matrices are int8 with a scale for each output, and activations have a scale for each token; the embeddings,
which are also the lm_head, stay in bfloat16.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}


def main(checkpoint: Path, out: Path) -> None:
    out.mkdir()
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = weight.float().abs().amax(1, keepdim=True) / 127
            tensors[f"{name}_scale"] = scale
            weight = (weight.float() / scale).round().to(torch.int8)
        tensors[name] = weight
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for file in checkpoint.glob("*token*.json"):
        shutil.copy(file, out)
    config = json.loads((checkpoint / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
