"""The head of a checkpoint that classifies: a matrix that makes scores of labels of a prompt's last hidden state. It
lies beside the graph, which knows nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.checkpoint import Checkpoint
from engine.models.keys import ModelError, read_json
from engine.text.tokenizer import Tokenizer

FILE = "score.npy"  # f32 [labels, H]
TENSOR = "score.weight"
OF_TOKENS = "classifier_from_token"  # of config.json: two tokens, of which the model says the second where it agrees


def head_of(directory: Path, keys: Mapping[str, Any], checkpoint: Checkpoint, table: str) -> np.ndarray | None:
    """Return the classifier of a checkpoint, f32 [num_labels, hidden_size], or None if it has none. `table` is the name
    of the tensor that computes logits. Raises ModelError."""
    if TENSOR in checkpoint:
        head = checkpoint.rows(TENSOR)
    elif tokens := keys.get(OF_TOKENS):
        head = checkpoint.rows(table, _ids(directory, tokens))
        head = head[1:] - head[:1]
    else:
        return None
    if head.shape[1:] != (keys["hidden_size"],):
        raise ModelError(f"tensor {TENSOR} has shape {head.shape}, config.json asks for rows of {keys['hidden_size']}")
    return head


def load_head(graph_dir: Path) -> np.ndarray | None:
    path = graph_dir / FILE
    return np.load(path) if path.is_file() else None


def is_of_tokens(graph_dir: Path) -> bool:
    """Then the model was made to write, and reads the two texts of a pair as one."""
    return (graph_dir / FILE).is_file() and bool(read_json(graph_dir / "config.json").get(OF_TOKENS))


def _ids(directory: Path, tokens: Any) -> list[int]:
    tokenizer = Tokenizer.load(directory)
    ids = [tokenizer.encode(str(text), add_special_tokens=False) for text in tokens]
    if not isinstance(tokens, list) or len(ids) != 2 or any(len(each) != 1 for each in ids):
        raise ModelError(f"config.json: {OF_TOKENS} is {tokens!r}, it must be two texts of one token each")
    return [token_id for [token_id] in ids]
