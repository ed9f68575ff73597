"""Writes what Hugging Face transformers computes, for tests that run without it. Run by hand, needs torch:

    python -m tests.golden.make_golden

FAMILY.npz  for the checkpoint `make_checkpoint(..., FAMILY)` and prompts of several lengths N: prompt_N, logits_N of
            the last positions, tokens_N chosen greedily.
prompt_outputs.npz  for the same checkpoints: log-probabilities and hidden states of a prompt of READ_LEN, and the
            answers of beam search to it, best first, for each of BEAMS.
rope.json   inverse frequencies and attention scaling of several rope configurations.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.golden.beams import BEAMS, MAX_NEW_TOKENS, STOP_IDS
from tests.golden.chat_cases import make_chat_cases

FOLDER = Path(__file__).parent
PROMPT_LENS = (1, 7, 63, 64, 65, 130, 200)
READ_LEN = 65
NUM_TOKENS = 64
NUM_LOGIT_ROWS = 2  # the last positions of a prompt
MADE_WITH = f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}"
ROPES = [  # config.json keys beside those all have
    {"rope_theta": 1000000.0},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
        }
    },
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "attention_factor": 1.25,
            "original_max_position_embeddings": 2048,
        }
    },
]


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[np.ndarray, list[int], float]:
    """Return the logits of the prompt's last positions, the tokens that follow, and the smallest margin among them."""
    out = model(torch.tensor([prompt]), use_cache=True)
    logits, tokens, gap = out.logits[0, -NUM_LOGIT_ROWS:].numpy(), [], float("inf")
    for _ in range(NUM_TOKENS):
        best = out.logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return logits, tokens, gap


def make_family(family: str, directory: Path) -> None:
    make_checkpoint(directory, family)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rng = np.random.default_rng(7)
    arrays = {"made_with": np.array(MADE_WITH), "checksum": np.array(weights_checksum(directory))}
    gaps, varieties = [], []
    for length in PROMPT_LENS:
        prompt = rng.integers(0, 310, length).tolist()
        logits, tokens, gap = greedy(model, prompt)
        arrays[f"prompt_{length}"] = np.array(prompt, np.int32)
        arrays[f"logits_{length}"] = logits
        arrays[f"tokens_{length}"] = np.array(tokens, np.int32)
        gaps.append(gap)
        varieties.append(len(set(tokens)))
    np.savez_compressed(FOLDER / f"{family}.npz", **arrays)
    print(f"{family}: closest call {min(gaps):.4f}, at least {min(varieties)} different tokens of {NUM_TOKENS}")


def make_prompt_outputs(family: str, directory: Path) -> dict[str, np.ndarray]:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompt = torch.from_numpy(np.load(FOLDER / f"{family}.npz")[f"prompt_{READ_LEN}"].astype(np.int64))[None]
    out = model(prompt, output_hidden_states=True)
    logprobs = out.logits[0, :-1].log_softmax(-1).gather(1, prompt[0, 1:, None])[:, 0]
    hidden = out.hidden_states[-1][0]
    arrays = {"scores": logprobs, "last": hidden[-1], "mean": hidden.mean(0)}
    arrays = {f"{family}_{name}": array.numpy() for name, array in arrays.items()}
    for width, penalty in BEAMS:
        found = model.generate(
            prompt,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=list(STOP_IDS),
            pad_token_id=319,
            do_sample=False,
        )
        arrays[f"{family}_beams_{width}_{penalty}"] = found[:, READ_LEN:].numpy().astype(np.int32)
    return arrays


def weights_checksum(directory: Path) -> int:
    """Return a checksum by which a test can tell different random weights from a different network."""
    return zlib.crc32((directory / "model.safetensors").read_bytes())


def make_ropes() -> list[dict]:
    cases = []
    for keys in ROPES:
        keys = {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 32768, **keys}
        config = transformers.LlamaConfig.from_dict(json.loads(json.dumps(keys)))
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        cases.append(
            {
                "config": keys,
                "inv_freq": rotary.inv_freq.tolist(),
                "attention_scaling": rotary.attention_scaling,
            }
        )
    return cases


def make_all_prompt_outputs(folder: Path) -> None:
    arrays = {"made_with": np.array(MADE_WITH)}
    for family in FAMILIES:
        arrays |= make_prompt_outputs(family, make_checkpoint(folder / f"{family}-again", family))
    np.savez_compressed(FOLDER / "prompt_outputs.npz", **arrays)


def write_json(name: str, cases: list[dict]) -> None:
    text = json.dumps({"made_with": MADE_WITH, "cases": cases}, indent=1, ensure_ascii=False)
    (FOLDER / name).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    transformers.logging.set_verbosity_error()
    write_json("rope.json", make_ropes())
    write_json("chat_templates.json", make_chat_cases())
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            make_family(family, Path(folder) / family)
        make_all_prompt_outputs(Path(folder))


if __name__ == "__main__":
    main()
