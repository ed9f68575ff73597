"""Reads LoRA adapters in PEFT's format, and cuts them to the matrices of one rank. Independent of devices.

An adapter adds `B (A x)`, times a scale, to the output of a linear layer. The tensors in the file determine which
linear layers are adapted.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize

from engine.models.adapter_config import CONFIG, AdapterConfig, AdapterError
from engine.models.config_fields import object_in, read_json
from engine.models.formats import FLOAT32
from engine.models.layers import Linear
from engine.models.weights import Shard, TensorShard, found_in

if TYPE_CHECKING:
    from engine.models.decoder import Decoder

WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20  # of the weights file: names, shapes and metadata
PREFIX = "base_model.model."  # PEFT puts it before the checkpoint's name of a tensor
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
Adapter = tuple[str, ...]  # id of the files' content, folder; see `engine.core.types.Sampling`


@dataclass(frozen=True, eq=False)
class Pair:
    """LoRA matrices for one part of a linear layer of a rank, both float32."""

    parameter: str  # name of the layer's matrix in the graph
    first: int  # index of the first output of that matrix that the pair adds to
    a: np.ndarray  # [rank of the adapter, inputs]
    b: np.ndarray  # [rank of the adapter, outputs of this part], multiplied by the scale


def network_of(graph_dir: Path, rank: int = 0, num_ranks: int = 1) -> Decoder:
    """Return the network of one rank of an exported model, as `read_pairs` needs it."""
    from engine.models.families import read_model  # slow to import; the process that tokenizes starts without it

    return read_model(read_json(graph_dir / "config.json")).network(Shard(FLOAT32, "float32", 1, rank, num_ranks))


def identified(directory: Path) -> Adapter:
    """Return the id and the folder of an adapter.

    The id is a hash of the files' content: it changes when they change.
    """
    return _digest(_read(directory / CONFIG), _read(directory / WEIGHTS)), str(directory)


def checked(directory: Path, graph_dir: Path, max_rank: int) -> Adapter:
    """Return what `identified` returns, after checking the adapter against the exported model. Raises AdapterError."""
    if not _is_text(str(directory)):
        raise AdapterError(f"adapter {str(directory)!r}: its path is not UTF-8")
    dtype = read_json(graph_dir / "config.json").get("infer_model_dtype") or "float32"  # of activations
    return _read_adapter(directory, network_of(graph_dir), max_rank, dtype=dtype)[0]


def read_pairs(adapter: Adapter, network: Decoder, max_rank: int) -> list[Pair]:
    """Return the LoRA matrices of one rank.

    Raises AdapterError, also if the files have changed since `adapter` was made.
    """
    adapter_id, directory = adapter
    return _read_adapter(Path(directory), network, max_rank, adapter_id)[1]


def _read_adapter(
    directory: Path, network: Decoder, max_rank: int, adapter_id: str = "", dtype: str = "float32"
) -> tuple[Adapter, list[Pair]]:
    try:
        config = _read(directory / CONFIG, MAX_CONFIG_BYTES)
        ranks = AdapterConfig.read(object_in(config, CONFIG, AdapterError), max_rank)
        most = MAX_HEADER_BYTES + 4 * ranks.max_rank * sum(sum(part.shape) for part in _parts(network))
        weights = _read(directory / WEIGHTS, most)
        digest = _digest(config, weights)
        if adapter_id not in ("", digest):
            raise AdapterError("its files have changed since it was loaded")
        tensors = _tensors(weights)
        linears = found_in(network, Linear)
        pairs = [pair for linear in linears for pair in _pairs_of(linear, tensors, ranks, dtype)]
        if of_experts := [name for name in tensors if ".experts." in name]:
            raise AdapterError(f"{WEIGHTS} has tensor {min(of_experts)}: adapters of experts are not supported")
        if tensors:
            more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
            raise AdapterError(f"{WEIGHTS} has tensor {min(tensors)}{more}, for which the model has no place")
        if not pairs and network.layers:
            raise AdapterError(f"{WEIGHTS} has no tensor for any layer of the model")
    except AdapterError as error:
        raise AdapterError(f"adapter {directory}: {error}") from None
    return (digest, str(directory)), pairs


def most_bytes(network: Decoder, max_rank: int) -> int:
    """Return the size in bytes, on this rank, of an adapter of rank `max_rank` for every linear layer."""
    return sum(4 * max_rank * sum(part.rank_shape) for part in _parts(network))


def _parts(network: Decoder) -> list[TensorShard]:
    return [part for linear in found_in(network, Linear) for part in linear.weight.parts]


def _read(path: Path, max_bytes: int | None = None) -> bytes:
    """Return the content of a regular file of at most `max_bytes`. Anything else is refused without reading it, so that
    a request with a bad path does not delay other requests. Raises AdapterError."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AdapterError(f"{path.name} is no file")
            if max_bytes is not None and status.st_size > max_bytes:
                raise AdapterError(f"{path.name} has {status.st_size} bytes, at most {max_bytes} are read")
            return file.read(status.st_size)
    except OSError as error:
        raise AdapterError(f"{path.name} cannot be read: {error.strerror}") from None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a FIFO would otherwise wait for a writer


def _is_text(path: str) -> bool:
    return all(not "\ud800" <= letter <= "\udfff" for letter in path)


def _digest(config: bytes, weights: bytes) -> str:
    return hashlib.blake2b(config + b"\0" + hashlib.blake2b(weights).digest(), digest_size=16).hexdigest()


def _tensors(weights: bytes) -> dict[str, np.ndarray]:
    try:
        stored: dict[str, Any] = dict(deserialize(weights))
    except SafetensorError as error:
        raise AdapterError(f"{WEIGHTS} ({len(weights)} bytes) is cut off or no safetensors file: {error}") from None
    for name, tensor in stored.items():
        if tensor["dtype"] not in DTYPES:
            raise AdapterError(f"tensor {name} has dtype {tensor['dtype']}, supported are {', '.join(DTYPES)}")
    return {  # of a model that reads images, transformers 5 calls the decoder `language_model`
        name.replace(f"{PREFIX}model.language_model.", f"{PREFIX}model.", 1): np.frombuffer(
            tensor["data"], DTYPES[tensor["dtype"]]
        ).reshape(tensor["shape"])  # type: ignore
        for name, tensor in stored.items()
    }


def _pairs_of(linear: Linear, tensors: dict[str, np.ndarray], ranks: AdapterConfig, dtype: str) -> Iterator[Pair]:
    """Yield the LoRA matrices of a layer, and remove its tensors from `tensors`."""
    first, used = 0, set()
    for part in linear.weight.parts:
        rows, columns = part.axes
        module = part.tensor.removesuffix(".weight")
        names = [f"{PREFIX}{module}.lora_{which}.weight" for which in "AB"]
        if any(name in tensors for name in names):
            rank, scale = ranks.rank_and_scale(module)
            _check(part, tensors, names, rank)
            if rows.kept[1]:  # the rows of the tensor belong to several matrices
                raise AdapterError(f"tensor {names[0]} belongs to a layer that supports no adapters")
            a, b = (tensors[name] for name in names)
            used.update(names)
            share = np.zeros((rank, columns.size), np.float32)
            share[:, : columns.stop - columns.start] = a[:, columns.start : columns.stop]
            order = rows.order()[: rows.stop - rows.start]  # without the padding of a rank's share
            with np.errstate(over="ignore"):
                b = b[rows.start : rows.stop][order].T.astype(np.float32) * np.float32(scale)
            for name, array in zip(names, (share, b), strict=True):
                _check_finite(name, array, dtype)
            yield Pair(linear.weight.name, first, share, b)
        first += rows.num_rows
    for name in used:  # a packed tensor belongs to several parts
        del tensors[name]


def _check(part: TensorShard, tensors: Mapping[str, np.ndarray], names: list[str], rank: int) -> None:
    (num_outputs, num_inputs) = part.shape
    for name, shape in zip(names, ((rank, num_inputs), (num_outputs, rank)), strict=True):
        if name not in tensors:
            raise AdapterError(f"tensor {name} is missing in {WEIGHTS}")
        if tensors[name].shape != shape:
            raise AdapterError(f"tensor {name} has shape {tensors[name].shape}, model and r ask for {shape}")


def _check_finite(name: str, array: np.ndarray, dtype: str) -> None:
    most = float(ml_dtypes.finfo(dtype).max)
    if array.size and not -most <= array.min() <= array.max() <= most:
        raise AdapterError(f"tensor {name} has a value, or with its scale has one, that is no number of {dtype}")
