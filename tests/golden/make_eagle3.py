"""Writes what the EAGLE-3 heads of tests/eagle3_checkpoints.py draft, computed with PyTorch from the hidden states of
Hugging Face transformers. Run by hand, needs torch:

    python -m tests.golden.make_eagle3

eagle3/FAMILY.npz: for prompts of several lengths N prompt_N, first_N, the token that the model itself chooses behind
it, and the drafts behind that: tokens_N, chosen greedily, and their logprobs_N in the vocabulary of the head.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from tests.eagle3_checkpoints import LAYER_IDS, LIKE_LLAMA, make_head, make_model
from tests.golden.make_families import MADE_WITH
from tests.golden.make_mtp import LENGTHS, NUM_DRAFTS, network_of

FOLDER = Path(__file__).parent / "eagle3"
FAMILIES = ("llama", "qwen3")
Tensors = dict[str, torch.Tensor]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return queries or keys [heads, T, D] rotated by their positions."""
    size = x.shape[-1]
    frequencies = LIKE_LLAMA["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(x.shape[1]), frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def layer(own: Tensors, embedded: torch.Tensor, hidden: torch.Tensor, norms_residual: bool) -> torch.Tensor:
    """Return the sum of the residual and of what the layer adds to it, [T, H]."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], own[f"{name}.weight"], LIKE_LLAMA["rms_norm_eps"])

    normed = norm("hidden_norm", hidden)
    both = torch.cat([norm("input_layernorm", embedded), normed], dim=-1)
    q, k, v = (
        linear(both, own[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, LIKE_LLAMA["head_dim"])).transpose(0, 1)
        for name in "qkv"
    )
    x = scaled_dot_product_attention(rotated(q)[None], rotated(k)[None], v[None], is_causal=True, enable_gqa=True)[0]
    x = linear(x.transpose(0, 1).flatten(1), own["self_attn.o_proj.weight"])
    residual = x + (normed if norms_residual else hidden)
    x = norm("post_attention_layernorm", residual)
    x = silu(linear(x, own["mlp.gate_proj.weight"])) * linear(x, own["mlp.up_proj.weight"])
    return residual + linear(x, own["mlp.down_proj.weight"])


def make_family(family: str, folder: Path) -> dict[str, np.ndarray]:
    checkpoint = make_model(folder / family, family)
    head = make_head(folder / f"{family}-head", family, checkpoint)
    tensors, model = load_file(head / "model.safetensors"), network_of(checkpoint)
    norms_residual = json.loads((head / "config.json").read_text()).get("norm_before_residual", False)
    block = "midlayer." if family == "llama" else "layers.0."
    own = {name.removeprefix(block): tensor for name, tensor in tensors.items() if name.startswith(block)}
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    table = tensors.get("embed_tokens.weight", model.model.embed_tokens.weight)
    arrays, rng = {"made_with": np.array(MADE_WITH)}, np.random.default_rng(7)
    for length in LENGTHS:
        tokens = rng.integers(0, 310, length).tolist()
        arrays[f"prompt_{length}"] = np.array(tokens, np.int16)
        found = model(torch.tensor([tokens]), output_hidden_states=True)
        entering = torch.cat([found.hidden_states[index][0] for index in LAYER_IDS[family]], dim=-1)
        states = linear(entering, tensors["fc.weight"])
        tokens.append(int(found.logits[0, -1].argmax()))
        arrays[f"first_{length}"], logprobs = np.array(tokens[-1]), []
        for _ in range(NUM_DRAFTS):
            out = layer(own, table[torch.tensor(tokens[1:])], states, norms_residual)[-1:]
            normed = rms_norm(out, out.shape[-1:], tensors["norm.weight"], LIKE_LLAMA["rms_norm_eps"])
            logprobs.append(linear(normed, tensors["lm_head.weight"])[0].log_softmax(-1).numpy())
            tokens.append(int(ids[logprobs[-1].argmax()]))
            states = torch.cat([states, out])
        arrays[f"tokens_{length}"] = np.array(tokens[-NUM_DRAFTS:], np.int16)
        arrays[f"logprobs_{length}"] = np.stack(logprobs)
    return arrays


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            arrays = make_family(family, Path(folder))
            np.savez_compressed(FOLDER / f"{family}.npz", **arrays)
            print(family, *(arrays[f"tokens_{length}"].tolist() for length in LENGTHS))


if __name__ == "__main__":
    main()
