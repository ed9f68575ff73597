"""Writes what Hugging Face transformers computes with the 3-D positions of images, for tests that run without it.
Run by hand, needs torch:

    python -m tests.golden.make_mrope

mrope.npz: positions of a prompt with images, tokens chosen greedily behind it by the text model of Qwen2.5-VL and their
logprobs, and which position makes each angle in the interleaved layout of Qwen3-VL.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from tests.checkpoints import make_checkpoint
from tests.span_models import IMAGES, MROPE, PROMPT_WITH_IMAGES

NUM_TOKENS = 20
SECTIONS = ([24, 20, 20], [11, 11, 10])
MADE_WITH = f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}"


def text_model(directory: Path, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return the text model of Qwen2.5-VL with the weights of a checkpoint of Qwen2."""
    keys = json.loads((directory / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": keys["rope_theta"], "mrope_section": MROPE["mrope_section"]}
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    sizes = {name: keys[name] for name in (*names, "rms_norm_eps", "vocab_size", "max_position_embeddings")}
    config = transformers.Qwen2_5_VLTextConfig(
        **sizes, rope_parameters=rope, use_sliding_window=False, bos_token_id=0, eos_token_id=0
    )
    config._attn_implementation = "eager"
    model = qwen2_5_vl.Qwen2_5_VLTextModel(config).eval()
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    return model


def positions_of(token_ids: list[int]) -> torch.Tensor:
    """Return the positions [3, 1, T] of the prompt, then of text behind it."""
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    model = qwen2_5_vl.Qwen2_5_VLModel.__new__(qwen2_5_vl.Qwen2_5_VLModel)
    object.__setattr__(model, "config", SimpleNamespace(vision_config=vision))
    ids, is_image = torch.tensor([token_ids]), torch.zeros(1, len(token_ids), dtype=torch.int32)
    for image in IMAGES:
        is_image[0, image.start : image.end] = 1
    grids = torch.tensor([[frames, 2 * rows, 2 * columns] for frames, rows, columns in (each.grid for each in IMAGES)])
    positions, _ = model.get_rope_index(ids, mm_token_type_ids=is_image, image_grid_thw=grids)
    return positions


@torch.no_grad()
def greedy(model: torch.nn.Module, table: torch.Tensor) -> tuple[list[int], list[float]]:
    token_ids, logprobs = list(PROMPT_WITH_IMAGES), []
    for _ in range(NUM_TOKENS):
        embeddings = table[torch.tensor(token_ids)].clone()
        for image in IMAGES:
            numbers = np.frombuffer(image.embeddings, np.float32).reshape(image.length, -1)
            embeddings[image.start : image.end] = torch.from_numpy(numbers.copy())
        out = model(inputs_embeds=embeddings[None], position_ids=positions_of(token_ids), use_cache=False)
        best = (out.last_hidden_state[0, -1] @ table.T).log_softmax(-1).max(-1)
        token_ids.append(int(best.indices))
        logprobs.append(float(best.values))
    return token_ids[len(PROMPT_WITH_IMAGES) :], logprobs


def interleaved_axes(sections: list[int]) -> np.ndarray:
    axes = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, sum(sections)).clone()
    layout = SimpleNamespace(mrope_section=sections)
    return qwen3_vl.Qwen3VLTextRotaryEmbedding.recomposition_frequencies(layout, axes)[0, 0, : sum(sections)].numpy()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = make_checkpoint(Path(folder) / "qwen2", "qwen2")
        weights = load_file(directory / "model.safetensors")
        checksum = zlib.crc32((directory / "model.safetensors").read_bytes())
        tokens, logprobs = greedy(text_model(directory, weights), weights["model.embed_tokens.weight"])
    np.savez(
        Path(__file__).parent / "mrope.npz",
        made_with=np.array(MADE_WITH),
        checksum=np.array(checksum),
        positions=positions_of([*PROMPT_WITH_IMAGES, *tokens])[:, 0].numpy().astype(np.int32),
        tokens=np.array(tokens, np.int16),
        logprobs=np.array(logprobs, np.float32),
        **{"axes_" + "_".join(map(str, each)): interleaved_axes(each).astype(np.int8) for each in SECTIONS},
    )


if __name__ == "__main__":
    main()
