"""The layout of an exported model: what it adds to the checkpoint's config.json, and where the files of each rank lie.

The export writes it, everything that runs or serves a graph reads it. Knows no tensors and no Paddle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.dtypes import WEIGHT_DTYPES
from engine.models.keys import ModelError, read_json, whole_number

GRAPH_VERSION = 3  # raised whenever the same checkpoint exports to another graph
CONFIG = "config.json"
STEM = "model"  # of the two files of a rank
PROGRAM, PARAMETERS = f"{STEM}.json", f"{STEM}.pdiparams"
VERSION_KEY = "infer_model_graph_version"


@dataclass(frozen=True)
class ExportedModel:
    """What config.json of an exported model says to those who run it."""

    vocab_size: int  # the checkpoint's own key
    block_size: int  # tokens of a KV block
    max_seq_len: int  # tokens of prompt and answer
    dtype: str  # of matrices and KV cache: float32 or bfloat16
    num_ranks: int = 1

    @classmethod
    def read(cls, directory: Path) -> ExportedModel:
        """Raises ModelError that names the file and the key, or says which other thing `directory` is."""
        keys = _keys_of(directory)
        if keys.get(VERSION_KEY) != GRAPH_VERSION:
            _refuse_static_graph(directory, keys)
            raise ModelError(f"{directory} is not an exported model: {CONFIG} has no {VERSION_KEY}")
        try:
            return cls(
                vocab_size=whole_number(keys, "vocab_size"),
                block_size=whole_number(keys, "infer_model_block_size"),
                max_seq_len=whole_number(keys, "infer_model_max_seq_len"),
                dtype=_dtype(keys),
                num_ranks=whole_number(keys, "infer_model_num_ranks"),
            )
        except ModelError as error:  # it begins with the file's name
            raise ModelError(f"{directory}/{error}; export the model again from its checkpoint") from None

    def keys(self) -> dict[str, Any]:
        """What the export adds to the checkpoint's config.json."""
        return {
            "infer_model_block_size": self.block_size,
            "infer_model_max_seq_len": self.max_seq_len,
            "infer_model_dtype": self.dtype,
            "infer_model_cachekv_int8_type": None,
            "infer_model_num_ranks": self.num_ranks,
            VERSION_KEY: GRAPH_VERSION,
        }


def rank_dir(directory: Path, rank: int = 0) -> Path:
    return directory / f"rank_{rank}"


def is_exported(directory: Path) -> bool:
    """True for the result of an export that this version of the server can run."""
    try:
        model = ExportedModel.read(directory)
    except ModelError:
        return False
    return not _missing_files(directory, model.num_ranks)


def refuse_static_graph(directory: Path) -> None:
    """Raises ModelError where a checkpoint is expected and `directory` is a static graph, ours or another's."""
    _refuse_static_graph(directory, _keys_of(directory))


def _refuse_static_graph(directory: Path, keys: Mapping[str, Any]) -> None:
    if VERSION_KEY not in keys:
        if _has_foreign_graph(directory):
            raise ModelError(
                f"{directory} is a static graph of another program, which cannot be served here;"
                " a Hugging Face checkpoint is needed"
            )
        return
    if keys[VERSION_KEY] != GRAPH_VERSION:
        raise ModelError(
            f"{directory} is a static graph of version {keys[VERSION_KEY]} of this server, which reads version"
            f" {GRAPH_VERSION}; export it again from its checkpoint"
        )
    if missing := _missing_files(directory, ExportedModel.read(directory).num_ranks):
        raise ModelError(f"{directory} is an exported graph, but {missing[0]} is missing; export it again")
    raise ModelError(f"{directory} is an exported graph, a Hugging Face checkpoint is expected")


def _keys_of(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not path.exists() and _has_foreign_graph(directory):
        return {}
    return read_json(path)


def _has_foreign_graph(directory: Path) -> bool:
    """Paddle's files, and no weights of a checkpoint beside them."""
    patterns = ("*.pdmodel", "*.pdiparams", "rank_*/")
    return not any(directory.glob("*.safetensors")) and any(any(directory.glob(pattern)) for pattern in patterns)


def _dtype(keys: Mapping[str, Any]) -> str:
    value = keys.get("infer_model_dtype")
    if value not in WEIGHT_DTYPES:
        raise ModelError(f"{CONFIG}: infer_model_dtype is {value!r}, it must be {' or '.join(WEIGHT_DTYPES)}")
    return value


def _missing_files(directory: Path, num_ranks: int) -> list[Path]:
    paths = [rank_dir(directory, rank) / name for rank in range(num_ranks) for name in (PROGRAM, PARAMETERS)]
    return [path.relative_to(directory) for path in paths if not path.is_file()]
