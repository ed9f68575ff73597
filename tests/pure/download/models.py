"""Helpers of the tests of download_model: a static model, a checkpoint, and checks of downloaded files."""

import hashlib
import json
import random
from pathlib import Path

from download_model import Policy

NAME = "an-org/a-model/weight_only_int8"
FOLDER = f"models/static/3.0.0.b4/{NAME}"
WEIGHTS = random.Random(0).randbytes(300_000)
STATIC = {
    "config.json": b'{"model_type": "llama"}',
    "rank_0/model.json": b"{}",
    "rank_0/model.pdiparams": WEIGHTS,
}
LLAMA = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8}
CHECKPOINT = {
    "config.json": json.dumps(LLAMA).encode(),
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "preprocessor_config.json": b"{}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
}
UNNEEDED = {
    "README.md": b"# A model",
    "pytorch_model.bin": b"pickles",
    "consolidated.safetensors": b"the same again",
    "a-model.Q4.gguf": b"other format",
    "original/tokenizer.model": b"other layout",
    "onnx/model.safetensors": b"other layout",
}
FAST = Policy(num_tries=3, backoff_s=0.001, timeout_s=5)


def files_in(root: Path) -> dict[str, bytes]:
    """Return the content of all files by path, except the files that a download writes for itself."""
    notes = ("download.json", ".download.lock")
    found = (path for path in root.rglob("*") if path.is_file() and path.name not in notes)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def weights_url() -> str:
    return f"/{FOLDER}/model/rank_0/model.pdiparams"


def cdn_url(body: bytes) -> str:
    return f"/cdn/{hashlib.sha256(body).hexdigest()}"
