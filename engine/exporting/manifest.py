"""The layout of an exported model: manifest.json, which says what its graphs take and give, and the files of each rank.

The export writes it, everything that runs or serves a graph reads it. Independent of tensors and of Paddle.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.core.cache_groups import CacheGroup
from engine.exporting.files import CONFIG, MANIFEST, NUM_RANKS_KEY
from engine.models.config import DECODER
from engine.models.config_fields import ModelError, read_json
from engine.models.formats import QUANTIZED
from engine.models.kv_cache import CacheSpec

GRAPH_VERSION = 13  # raised whenever the same checkpoint exports to another graph or manifest
VERSION_KEY = "infer_model_graph_version"  # in config.json, of every version


@dataclass(frozen=True)
class GraphManifest:
    """One graph. Every rank has its own files and caches of these shapes."""

    program: str  # file in the rank's folder
    parameters: str  # empty: there are none, they are drawn when the graph is loaded
    inputs: tuple[str, ...]  # but for the caches
    outputs: tuple[str, ...]  # in the program's order
    caches: tuple[CacheSpec, ...]
    cache_groups: tuple[CacheGroup, ...]  # by the index of their block table


@dataclass(frozen=True)
class Manifest:
    """Description of an exported model for the processes that run it."""

    vocab_size: int
    max_seq_len: int  # tokens of prompt and answer
    block_size: int  # tokens of a KV block
    num_ranks: int
    weight_format: str  # of the matrices: a name of engine.models.formats
    graphs: Mapping[str, GraphManifest]  # by name
    expert_parallel: bool = False  # a rank has some of the experts, not a share of each

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a directory. Raises ModelError, which names the file and the key, or says what else the
        directory is."""
        version = _version(directory)
        if version is None:
            raise ModelError(f"{directory} is not an exported model: it has no {MANIFEST}")
        if version != GRAPH_VERSION:
            raise ModelError(
                f"{directory} is a static graph of version {version} of this server, which reads version"
                f" {GRAPH_VERSION}; export it again from its checkpoint"
            )
        document = read_json(directory / MANIFEST)
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise ModelError(f"{directory / MANIFEST}: {error}; export the model again from its checkpoint") from None

    def write(self, directory: Path) -> None:
        document = {"version": GRAPH_VERSION, **asdict(self)}
        (directory / MANIFEST).write_text(json.dumps(document, indent=2) + "\n")

    def config_keys(self) -> dict[str, Any]:
        """Return the keys that the export adds to config.json of the checkpoint."""
        return {
            "infer_model_block_size": self.block_size,
            "infer_model_max_seq_len": self.max_seq_len,
            "infer_model_quant_type": self.weight_format if self.weight_format in QUANTIZED else None,
            "infer_model_cachekv_int8_type": "dynamic" if self.graph().caches[0].dtype == "int8" else None,
            NUM_RANKS_KEY: self.num_ranks,
            VERSION_KEY: GRAPH_VERSION,
        }

    def graph(self, name: str = DECODER) -> GraphManifest:
        """Return the graph of this name. Raises ModelError that lists the names there are."""
        if name not in self.graphs:
            raise ModelError(f"the model has no graph {name!r}, only {', '.join(self.graphs)}")
        return self.graphs[name]

    def missing_files(self, directory: Path, ranks: Collection[int] = ()) -> list[Path]:
        """Return the missing files of these ranks, or of all ranks, relative to `directory`."""
        names = [name for graph in self.graphs.values() for name in (graph.program, graph.parameters) if name]
        paths = [rank_dir(directory, rank) / name for rank in ranks or range(self.num_ranks) for name in names]
        return [path.relative_to(directory) for path in paths if not path.is_file()]


def rank_dir(directory: Path, rank: int = 0) -> Path:
    return directory / f"rank_{rank}"


def is_exported(directory: Path, ranks: Collection[int] = ()) -> bool:
    """Return whether the directory is an export that this version of the server can run, complete for `ranks` or for
    all ranks."""
    try:
        return not Manifest.read(directory).missing_files(directory, ranks)
    except ModelError:
        return False


def refuse_static_graph(directory: Path, ranks: Collection[int] = ()) -> None:
    """Raise ModelError if `directory` is a static graph of this server, where a checkpoint is expected."""
    if _version(directory) is None:
        return
    if missing := Manifest.read(directory).missing_files(directory, ranks):
        raise ModelError(f"{directory} is an exported graph, but {missing[0]} is missing; export it again")
    raise ModelError(f"{directory} is an exported graph, a Hugging Face checkpoint is expected")


def _version(directory: Path) -> Any:
    """Return the graph version of an exported model, or None if the directory is not one."""
    manifest = read_json(directory / MANIFEST) if (directory / MANIFEST).exists() else {}
    return manifest["version"] if "version" in manifest else read_json(directory / CONFIG).get(VERSION_KEY)
