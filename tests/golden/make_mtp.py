"""Writes what the MTP layers of the checkpoints of tests/mtp_checkpoints.py draft, computed with the decoder layers of
Hugging Face transformers, which leaves MTP layers out itself. Run by hand, needs torch:

    python -m tests.golden.make_mtp [FAMILY ...]

mtp/FAMILY.npz: for prompts of several lengths N prompt_N, first_N, the token that the model itself chooses behind it,
and the drafts behind that: tokens_N, chosen greedily, and their logprobs_N.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from torch.nn.functional import linear

from tests.checkpoints import write_tensors
from tests.golden.make_families import MADE_WITH
from tests.mtp_checkpoints import NAMES, Names, make_mtp_checkpoint

FOLDER = Path(__file__).parent / "mtp"
LENGTHS, NUM_DRAFTS = (3, 70), 4
ONE_LAYER = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), {"first_k_dense_replace": 0}),
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"]},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), {"layer_types": ["full_attention"], "mlp_only_layers": []}
    ),
}


def network_of(directory: Path) -> torch.nn.Module:
    [architecture] = json.loads((directory / "config.json").read_text())["architectures"]
    kind = getattr(transformers, architecture)
    config = kind.config_class.from_pretrained(directory)
    model, info = kind.from_pretrained(
        directory, config=config, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return model.eval()


def layer_alone(checkpoint: Path, directory: Path, family: str, names: Names) -> torch.nn.Module:
    """Return a model whose only decoder layer is the MTP layer, and whose final norm is the one behind it."""
    tensors, directory = load_file(checkpoint / "model.safetensors"), directory / "layer"
    kept = {name: tensor for name, tensor in tensors.items() if name in ("model.embed_tokens.weight", "lm_head.weight")}
    kept["model.norm.weight"] = tensors[f"{names.norm}.weight"]
    own = (names.embedding_norm, names.hidden_norm, names.projection, names.norm)
    for name, tensor in tensors.items():
        if name.startswith(f"{names.block}.") and not name.startswith(own):
            kept[f"model.layers.0.{name.removeprefix(f'{names.block}.')}"] = tensor
    directory.mkdir()
    keys = json.loads((checkpoint / "config.json").read_text()) | {"num_hidden_layers": 1} | ONE_LAYER[family]
    (directory / "config.json").write_text(json.dumps(keys))
    write_tensors(directory / "model.safetensors", kept)
    return network_of(directory)


def normed(x: torch.Tensor, weight: np.ndarray, epsilon: float, offset: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * (offset + torch.from_numpy(weight))


def make_family(family: str, folder: Path) -> dict[str, np.ndarray]:
    names, checkpoint = NAMES[family], make_mtp_checkpoint(folder / family, family)
    tensors = load_file(checkpoint / "model.safetensors")
    model, layer = network_of(checkpoint), layer_alone(checkpoint, folder / family, family, names)
    norm = (json.loads((checkpoint / "config.json").read_text())["rms_norm_eps"], float(names.block.startswith("mtp")))
    weights = [tensors[f"{each}.weight"] for each in (names.embedding_norm, names.hidden_norm, names.projection)]
    arrays, rng = {"made_with": np.array(MADE_WITH)}, np.random.default_rng(7)
    for length in LENGTHS:
        tokens = rng.integers(0, 310, length).tolist()
        arrays[f"prompt_{length}"] = np.array(tokens, np.int16)
        states = model.model(torch.tensor([tokens])).last_hidden_state[0]
        tokens.append(int(model.lm_head(states[-1]).argmax()))
        arrays[f"first_{length}"], logprobs = np.array(tokens[-1]), []
        for _ in range(NUM_DRAFTS):
            embedded = normed(model.model.embed_tokens(torch.tensor(tokens[1:])), weights[0], *norm)
            both = torch.cat([embedded, normed(states, weights[1], *norm)], dim=-1)
            own = layer.model(inputs_embeds=linear(both, torch.from_numpy(weights[2]))[None]).last_hidden_state[0]
            logprobs.append(layer.lm_head(own[-1]).log_softmax(-1).numpy())
            tokens.append(int(logprobs[-1].argmax()))
            states = torch.cat([states, own[-1:]])
        arrays[f"tokens_{length}"] = np.array(tokens[-NUM_DRAFTS:], np.int16)
        arrays[f"logprobs_{length}"] = np.stack(logprobs)
    return arrays


def main() -> None:
    transformers.logging.set_verbosity_error()
    FOLDER.mkdir(exist_ok=True)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for family in sys.argv[1:] or NAMES:
            arrays = make_family(family, Path(folder))
            np.savez_compressed(FOLDER / f"{family}.npz", **arrays)
            print(family, *(arrays[f"tokens_{length}"].tolist() for length in LENGTHS))


if __name__ == "__main__":
    main()
