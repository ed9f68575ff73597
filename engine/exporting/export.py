"""Turns a Hugging Face checkpoint, or the static graph of another program, into the one that executors run.

The result (its layout: manifest.py) appears under its name complete or not at all. Paddle is imported only when
there is something to export.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.dtypes import WEIGHT_DTYPES
from engine.exporting import classifier
from engine.exporting.atomic_folder import atomic_folder
from engine.exporting.manifest import CONFIG, DECODER, GraphManifest, Manifest, rank_dir, refuse_static_graph
from engine.log import Report
from engine.models import eagle3
from engine.models.checkpoint import LM_HEAD, TABLE, Checkpoint, open_tensors
from engine.models.config import DecoderConfig
from engine.models.config_fields import ModelError, an_object, whole_number
from engine.models.families import read_model
from engine.models.formats import (
    FORMATS,
    QUANTIZED,
    Format,
    Fp8,
    Int4,
    Int8,
    Mxfp4Experts,
    expert_format,
    format_of,
    with_zero,
)
from engine.models.modelopt import check_stored, read_config
from engine.models.mtp import with_mtp
from engine.models.paddle_checkpoint import as_in_transformers
from engine.models.paddlenlp import rank_files, read_export
from engine.models.quantization import read_quantization, unused_settings
from engine.models.quantized_tensors import KEY, QuantizedMatrix
from engine.models.stacked_experts import with_single_experts
from engine.models.vision_checkpoint import with_tower
from engine.models.weights import Shard, Weight, weights_of
from engine.settings.setting import json_object
from engine.text.sentencepiece import model_file

log = logging.getLogger(__name__)

DTYPES = ("auto", *WEIGHT_DTYPES)
QUANT_TYPES = ("none", *QUANTIZED)
LOAD_FORMATS = ("auto", "dummy")
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


@dataclass(frozen=True)
class ExportOptions:
    """Options that are fixed at export and become part of the graph."""

    dtype: str = "auto"  # of weights and KV cache; auto: float32 stays, bfloat16 and float16 become bfloat16
    quant_type: str = "none"  # how the matrices of linear layers are stored instead
    block_size: int = 64  # tokens a KV block
    max_seq_len: int | None = None  # None: what the model was made for
    num_ranks: int = 1  # each with its own graph
    ranks: tuple[int, ...] = ()  # ranks to write, those of one machine; none: all
    int8_cache: bool = False  # keys and values as int8 instead
    load_format: str = "auto"  # dummy: only the graph, made from config.json; the executor draws random weights
    hf_overrides: str = ""  # a JSON object: what config.json says instead
    mtp: bool = False  # the layer of the checkpoint that drafts tokens is a second graph
    eagle3: str = ""  # folder of an EAGLE-3 head, which becomes a second graph
    expert_parallel: bool = False  # each rank has some of the experts, not a share of each

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ModelError(f"dtype is {self.dtype!r}, supported are {', '.join(DTYPES)}")
        if self.load_format not in LOAD_FORMATS:
            raise ModelError(f"load_format is {self.load_format!r}, supported are {', '.join(LOAD_FORMATS)}")
        if self.quant_type not in QUANT_TYPES:
            raise ModelError(f"quant_type is {self.quant_type!r}, supported are {', '.join(QUANT_TYPES)}")
        if self.block_size < 1:
            raise ModelError(f"block_size is {self.block_size}, it must be a positive number of tokens")
        if self.num_ranks < 1:
            raise ModelError(f"num_ranks is {self.num_ranks}, it must be a positive number of ranks")
        _ = self.overrides
        if not all(0 <= rank < self.num_ranks for rank in self.ranks):
            raise ModelError(f"ranks are {self.ranks}, they must be from 0 to {self.num_ranks - 1}")

    @property
    def overrides(self) -> dict[str, Any]:
        try:
            return json_object(self.hf_overrides)
        except ValueError as error:
            raise ModelError(f"hf_overrides is {self.hf_overrides!r}, it must be a JSON object: {error}") from None


@dataclass(frozen=True, eq=False)
class Plan:
    """Networks, manifest and tensors of an export of a checkpoint."""

    model: DecoderConfig  # for the longest sequence that is supported
    shards: list[Shard]  # of the ranks that are written
    manifest: Manifest
    keys: dict[str, Any]  # of config.json
    checkpoint: Checkpoint | None  # None: there are no weights
    scores: np.ndarray | None  # the head of a model that scores
    draft_ids: np.ndarray | None = None  # the tokens of an EAGLE-3 head

    @property
    def weights(self) -> list[Weight]:
        """Return the weights of one rank."""
        return _weights(self.model, self.shards[0])


def export(checkpoint_dir: Path, out_dir: Path, options: ExportOptions, report: Report = log.info) -> None:
    """Export a checkpoint to `out_dir`. Raises ModelError if the checkpoint is not supported, FileExistsError if
    `out_dir` is not empty."""
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise FileExistsError(f"{out_dir} exists and is not an empty folder")
    report(f"read {checkpoint_dir}")
    plan = plan_of(checkpoint_dir, options, report)
    keys, checkpoint, shards, manifest = plan.keys, plan.checkpoint, plan.shards, plan.manifest
    with atomic_folder(out_dir) as partial:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No ccache found")  # Paddle's own, at import
            from engine.exporting.save import save_graph
        for shard in shards:
            of_rank = f" of rank {shard.rank}" if len(shards) > 1 else ""
            report(f"load weights{of_rank} as {shard.format.name}")
            rank_dir(partial, shard.rank).mkdir()
            for name, network in plan.model.networks(shard).items():
                save_graph(rank_dir(partial, shard.rank), network, manifest.graph(name), checkpoint, report)
        report("write manifest.json, config.json and the tokenizer's files")
        _copy_files(checkpoint_dir, partial, report)
        if plan.scores is not None:
            np.save(partial / classifier.FILE, plan.scores)
        if plan.draft_ids is not None:
            np.save(partial / eagle3.FILE, plan.draft_ids)
        digest = checkpoint.digest() if checkpoint else "none"
        added = manifest.config_keys() | {"infer_model_dtype": shards[0].dtype, "infer_model_checkpoint": digest}
        (partial / CONFIG).write_text(json.dumps(keys | added, indent=2) + "\n")
        manifest.write(partial)
    report(f"{out_dir} is ready")


def plan_of(checkpoint_dir: Path, options: ExportOptions, report: Report) -> Plan:
    """Return what an export of the checkpoint writes, without reading weights. Raises ModelError if the checkpoint is
    not supported."""
    refuse_static_graph(checkpoint_dir)
    keys, checkpoint = _open(checkpoint_dir, options.load_format)
    keys |= options.overrides
    model, scores = _model_of(keys, checkpoint, report), None
    model = with_mtp(keys["model_type"], model, checkpoint) if options.mtp else model
    if checkpoint:
        scores = classifier.read_classifier(
            checkpoint_dir, keys, checkpoint, TABLE if model.tied_embeddings else LM_HEAD
        )
    draft_ids = None
    if options.eagle3:
        model, checkpoint, draft_ids = eagle3.with_eagle3(model, checkpoint, Path(options.eagle3))
    shards = _shards(model, keys, checkpoint, options)
    if checkpoint:
        _report_quantization(keys, checkpoint, shards[0], report)
    max_seq_len = _max_seq_len(model, options.max_seq_len)
    if options.max_seq_len is None:
        max_seq_len = min(max_seq_len, whole_number(keys, "infer_model_max_seq_len", max_seq_len))
    model = model.for_length(max_seq_len)
    manifest = _manifest(model, shards[0], max_seq_len, has_weights=checkpoint is not None)
    return Plan(model, shards, manifest, keys, checkpoint, scores, draft_ids)


def _open(directory: Path, load_format: str) -> tuple[dict[str, Any], Checkpoint | None]:
    """Read config.json, and open the weights unless they are to be drawn at random later."""
    if load_format == "dummy":
        return read_config(directory), None
    if rank_files(directory):
        return read_export(directory)
    keys = read_config(directory)
    quantizations, tensors = read_quantization(keys), open_tensors(directory)
    check_stored(an_object(keys, KEY), tensors)
    keys, tensors = as_in_transformers(*with_tower(keys, tensors))
    return keys, Checkpoint(with_single_experts(keys, tensors), quantizations)


def _model_of(keys: Mapping[str, Any], checkpoint: Checkpoint | None, report: Report) -> DecoderConfig:
    """Return the model that config.json describes. Whether embeddings are tied is decided by the tensors of the
    checkpoint, as in transformers."""
    model = read_model(keys)
    if checkpoint is None:
        return model
    if classifier.TENSOR in checkpoint and LM_HEAD not in checkpoint:  # it was made to score, and writes nothing
        return replace(model, tied_embeddings=True)
    if not model.tied_embeddings or LM_HEAD not in checkpoint or checkpoint.are_equal(TABLE, LM_HEAD):
        return model
    report(f"config.json: tie_word_embeddings is true, but {LM_HEAD} is not {TABLE}: it is used as it is stored")
    return replace(model, tied_embeddings=False)


def _shards(
    model: DecoderConfig, keys: Mapping[str, Any], checkpoint: Checkpoint | None, options: ExportOptions
) -> list[Shard]:
    """Return the shards of the ranks to write. Raises ModelError if the options do not fit the checkpoint."""
    dtype = options.dtype
    if dtype == "auto":
        dtype = checkpoint.graph_dtype(TABLE) if checkpoint else "bfloat16"
    weight_format, formats = _weight_formats(dtype, options.quant_type, checkpoint.quantized if checkpoint else {})
    if checkpoint and formats and not isinstance(weight_format, Fp8):  # beside integers, floats of the checkpoint stay
        formats |= dict.fromkeys(checkpoint.fp8_matrices, FORMATS["weight_only_fp8"])
    int8_cache = options.int8_cache or keys.get("infer_model_cachekv_int8_type") is not None
    if options.expert_parallel and not model.mixture:
        raise ModelError("ENABLE_EXPERT_PARALLEL is 1, but the model has no mixtures of experts; set it to 0")
    if isinstance(expert_format(weight_format), Mxfp4Experts) and not model.mixture:
        raise ModelError(f"quant_type is {options.quant_type!r}, a format of experts, but the model has none")
    first = Shard(weight_format, dtype, options.block_size, 0, options.num_ranks, int8_cache, formats)
    column_block = checkpoint.column_block if checkpoint else 1
    first = replace(first, expert_parallel=options.expert_parallel, column_block=column_block)
    kinds = Fp8 | Int8 | Int4 if options.quant_type == "none" else Fp8  # else integers are what the operator asks for
    if checkpoint and (plain := checkpoint.plain(_weights_of_model(model, first), kinds)):
        first = replace(first, formats=formats | dict.fromkeys(plain, FORMATS[dtype]))
    shards = [replace(first, rank=rank) for rank in options.ranks or range(options.num_ranks)]
    if checkpoint:
        ignored = (
            {classifier.TENSOR}
            | ({LM_HEAD} if model.tied_embeddings else set())
            | set(filter(model.ignores, checkpoint))
        )
        checkpoint.check(_weights_of_model(model, first), ignored)
    return shards


def _weight_formats(
    dtype: str, quant_type: str, quantized: Mapping[str, QuantizedMatrix]
) -> tuple[Format, dict[str, Format]]:
    """Return the format of matrices, and the formats of those that the checkpoint stores in another one.

    Matrices that are quantized in the checkpoint keep its codes, where there is a format for them. Raises ModelError
    if `quant_type` asks for another format, unless the codes of all are lost anyhow.
    """
    if not any(each.format for each in quantized.values()):
        return format_of(dtype if quant_type == "none" else quant_type, dtype), {}
    [(main, _)] = Counter(each.format for each in quantized.values() if each.format).most_common(1)
    wanted = format_of(main if quant_type == "none" else quant_type, dtype)
    if main not in (wanted.name, expert_format(wanted).name):
        if not all(each.inexact or not each.format for each in quantized.values()):
            raise ModelError(f"quant_type is {quant_type!r}, the checkpoint is quantized and exported as {main}")
        return wanted, {}
    formats = {
        name: with_zero(FORMATS[each.format]) if each.has_zero else FORMATS[each.format or dtype]
        for name, each in quantized.items()
    }
    return wanted, formats


def _report_quantization(keys: Mapping[str, Any], checkpoint: Checkpoint, shard: Shard, report: Report) -> None:
    """Report settings that are not used, and how many matrices could not keep the codes that the checkpoint has."""
    for message in unused_settings(keys):
        report(message)
    made = (
        f"{each.inexact}, requantized as {shard.formats.get(name, shard.format).name}"
        for name, each in checkpoint.quantized.items()
        if each.inexact
    )
    for kind, number in Counter(made).items():
        report(f"{number} matrices: {kind}")


def _copy_files(checkpoint_dir: Path, out_dir: Path, report: Report) -> None:
    paths = copied_files(checkpoint_dir)
    for path in paths:
        shutil.copyfile(path, out_dir / path.name)
    if not any(path.name == "tokenizer.json" or path.suffix == ".model" for path in paths):
        report(f"{checkpoint_dir} has no tokenizer.json: the graph can be run, but not served")


def copied_files(directory: Path) -> list[Path]:
    """Return those files of a checkpoint that an exported model has as well: its tokenizer, its image processor and
    what it generates by."""
    found = [path for name in COPIED_FILES if (path := directory / name).exists()]
    vocabulary = None if (directory / "tokenizer.json").exists() else model_file(directory)
    return [*found, vocabulary] if vocabulary else found


def _weights(model: DecoderConfig, shard: Shard) -> list[Weight]:
    """Return the weights of all networks; those that several share are there once."""
    networks = model.networks(shard).values()
    return list({name: weight for network in networks for name, weight in weights_of(network).items()}.values())


def _weights_of_model(model: DecoderConfig, first: Shard) -> list[Weight]:
    """Return weights of which the parts name all tensors of the checkpoint: those of the first rank, or of all ranks if
    each has other experts."""
    ranks = range(first.num_ranks if first.expert_parallel else 1)
    return [weight for rank in ranks for weight in _weights(model, replace(first, rank=rank))]


def _manifest(model: DecoderConfig, shard: Shard, max_seq_len: int, has_weights: bool) -> Manifest:
    graphs = {}
    for name, network in model.networks(shard).items():
        layout, stem = network.cache_layout, "model" if name == DECODER else name
        files = (f"{stem}.json", f"{stem}.pdiparams" if has_weights else "")
        graphs[name] = GraphManifest(*files, network.inputs, network.outputs, layout.caches, layout.groups)
    sizes = (model.vocab_size, max_seq_len, shard.block_size, shard.num_ranks)
    return Manifest(*sizes, shard.format.name, graphs, shard.expert_parallel)


def _max_seq_len(model: DecoderConfig, wanted: int | None) -> int:
    """Return the wanted length, or the longest."""
    length = model.max_position_embeddings if wanted is None else wanted
    if not 1 <= length <= model.max_position_embeddings:
        raise ModelError(f"max_seq_len is {length}, the model was made for 1 to {model.max_position_embeddings}")
    return length
