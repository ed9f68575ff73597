"""Classifier of a checkpoint: a matrix that computes the scores of labels from a prompt's last hidden state. It is a
file beside the graph, which does not use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.checkpoint import Checkpoint
from engine.models.config_fields import ModelError, read_json
from engine.text.tokenizer import Tokenizer

FILE = "score.npy"  # f32 [labels, H]
TENSOR = "score.weight"
TOKENS_KEY = "classifier_from_token"  # in config.json: two tokens, of which the model generates the second if it agrees


def read_classifier(directory: Path, keys: Mapping[str, Any], checkpoint: Checkpoint, table: str) -> np.ndarray | None:
    """Return the classifier of a checkpoint, f32 [num_labels, hidden_size], or None if it has none. `table` is the name
    of the tensor that computes logits. Raises ModelError."""
    if TENSOR in checkpoint:
        classifier = checkpoint.rows(TENSOR)
    elif tokens := keys.get(TOKENS_KEY):
        classifier = checkpoint.rows(table, _ids(directory, tokens))
        classifier = classifier[1:] - classifier[:1]
    else:
        return None
    if classifier.shape[1:] != (width := keys["hidden_size"],):
        raise ModelError(f"tensor {TENSOR} has shape {classifier.shape}, config.json asks for rows of {width}")
    return classifier


def load_classifier(graph_dir: Path) -> np.ndarray | None:
    """Return the classifier of an exported model, f32 [num_labels, hidden_size], or None if it has none."""
    path = graph_dir / FILE
    return np.load(path) if path.is_file() else None


def has_token_classifier(graph_dir: Path) -> bool:
    """Return whether the classifier compares the logits of two tokens. Such a model generates text and reads the two
    texts of a pair as one."""
    return (graph_dir / FILE).is_file() and bool(read_json(graph_dir / "config.json").get(TOKENS_KEY))


def _ids(directory: Path, tokens: Any) -> list[int]:
    tokenizer = Tokenizer.load(directory)
    ids = [tokenizer.encode(str(text), add_special_tokens=False) for text in tokens]
    if not isinstance(tokens, list) or len(ids) != 2 or any(len(each) != 1 for each in ids):
        raise ModelError(f"config.json: {TOKENS_KEY} is {tokens!r}, it must be two texts of one token each")
    return [token_id for [token_id] in ids]
