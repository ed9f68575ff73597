"""Reads the tensors of a checkpoint piece by piece into numpy arrays, and finds them in its files. Independent of
families of models."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

from engine.dtypes import FP8_BLOCK
from engine.models.config_fields import ModelError, read_json
from engine.models.formats import Dense, Format, Fp8
from engine.models.fp4 import with_fp4
from engine.models.fp8 import ScaledFp8Tensor, fp8_bytes, stacked, with_fp8
from engine.models.gguf_model import read_gguf
from engine.models.paddle_checkpoint import read_pdparams
from engine.models.quantize import Codes
from engine.models.quantized_tensors import FLOATS as DTYPES
from engine.models.quantized_tensors import Quantization, QuantizedLayer, QuantizedMatrix
from engine.models.stored_tensors import StoredTensor
from engine.models.weights import AxisShard, TensorShard, Weight

LFS_POINTER = b"version https://git-lfs"  # begins the small file in place of one that `git clone` did not fetch
WEIGHTS = ("model.safetensors", "model_state.pdparams")
TABLE, LM_HEAD = TABLES = ("model.embed_tokens.weight", "lm_head.weight")
HEADS = ("lm_head.", "score.")  # tensor names with these prefixes do not get the prefix `model.`
CONVERT = (
    'convert it with transformers and PyTorch if you trust it: python -c "from transformers import AutoModelForCausalLM'
    " as M; M.from_pretrained('{0}', torch_dtype='auto').save_pretrained('{0}')\""
)
NOT_READ = (  # computed, and scales of KV caches; compressed-tensors first called them output_scale
    "rotary_emb.inv_freq",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
STORED_AT_ONCE = 1 << 24  # elements that are quantized together
READ_AT_ONCE = 1 << 20  # elements; bounds the memory that reading needs in addition to the result


class Checkpoint:
    """The tensors of a checkpoint by name, and the quantizations that determine which tensors store a linear layer."""

    def __init__(self, tensors: Mapping[str, StoredTensor], quantizations: Sequence[Quantization] = ()):
        self._quantizations = quantizations
        self._tensors = tensors

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def extended(self, tensors: Mapping[str, StoredTensor], without: str = "") -> Checkpoint:
        """Return the checkpoint with more tensors, and without one of them."""
        kept = {name: tensor for name, tensor in self._tensors.items() if name != without}
        return Checkpoint(kept | dict(tensors), self._quantizations)

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors have the same dtype, shape and bytes."""
        a, b = self._find(one), self._find(other)
        if (a.get_dtype(), a.get_shape()) != (b.get_dtype(), b.get_shape()) or not a.get_shape():
            return False
        rows = _steps(AxisShard.whole(a.get_shape()[0]), a.get_shape())
        return all(a[start:stop].tobytes() == b[start:stop].tobytes() for start, stop in rows)

    def rows(self, tensor: str, indices: Collection[int] | None = None) -> np.ndarray:
        """Return all rows of a tensor, or those at `indices`, as float32. Raises ModelError for unsupported dtypes."""
        stored = self._find(tensor)
        if stored.get_dtype() not in DTYPES:
            raise ModelError(f"tensor {tensor} has dtype {stored.get_dtype()}, supported are {', '.join(DTYPES)}")
        wanted = range(stored.get_shape()[0]) if indices is None else indices
        return np.concatenate([stored[index : index + 1] for index in wanted]).astype(np.float32)

    def graph_dtype(self, tensor: str) -> str:
        """Return the dtype that `auto` selects for a tensor: float32 for float32, bfloat16 for the 16-bit floats."""
        return "float32" if self._find(tensor).get_dtype() == "F32" else "bfloat16"

    def digest(self) -> str:
        """Return a hash of the names, dtypes, shapes and first rows of all tensors.

        It distinguishes checkpoints of one architecture without reading them whole, as training changes every matrix.
        """
        digest = hashlib.sha256()
        for name, tensor in sorted(self._tensors.items()):
            digest.update(f"{name} {tensor.get_dtype()} {tensor.get_shape()}".encode())
            digest.update(tensor[:1].tobytes() if tensor.get_shape() else b"")
        return digest.hexdigest()[:16]

    def check(self, weights: Collection[Weight], ignored: Collection[str] = ()) -> None:
        """Raise ModelError unless the checkpoint has exactly the tensors that these weights and `ignored` name.

        An unknown tensor belongs to a part of the model that would otherwise be left out silently.
        """
        parts = {part.tensor: part for weight in weights for part in weight.parts}
        read = set(ignored)
        for part in parts.values():
            if isinstance(quantized := self._quantized(part.tensor), QuantizedLayer):
                read |= quantized.tensors.keys()
            else:
                self._check(part)
                read.add(part.tensor)
        unread = self._tensors.keys() - read
        left = sorted(name for name in unread if not name.endswith(NOT_READ) and not self._is_zero_bias(name))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(f"the checkpoint has tensor {left[0]}{more}, for which this model type has no place")

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros of a quantized layer. AutoGPTQ writes one for each layer, also
        where the model has none."""
        layer, _, end = name.rpartition(".")
        return end == "bias" and self._quantized(f"{layer}.weight") is not None and not self._tensors[name][:].any()

    @cached_property
    def quantized(self) -> dict[str, QuantizedMatrix]:
        """Return the matrices of linear layers that are stored quantized, by the names of their plain weights."""
        names = {name for name in self._tensors if name.endswith(".weight")}
        for quantization in self._quantizations:
            end = quantization.ends[0]
            names |= {f"{name.removesuffix(end)}weight" for name in self._tensors if name.endswith(f".{end}")}
        return {
            name: quantized for name in sorted(names) if (quantized := self._quantized(name)) and name not in TABLES
        }

    @property
    def fp8_matrices(self) -> frozenset[str]:
        """Return the names of the matrices that are stored as 8-bit floats."""
        return frozenset(name for name, tensor in self._tensors.items() if isinstance(tensor, ScaledFp8Tensor))

    @property
    def column_block(self) -> int:
        """Return how many columns of the matrices in blocks of 8-bit floats share a scale, or 1 without such blocks."""
        blocks = (FP8_BLOCK, FP8_BLOCK)
        are_there = any(
            isinstance(tensor, ScaledFp8Tensor) and tensor.sides == blocks for tensor in self._tensors.values()
        )
        return FP8_BLOCK if are_there else 1

    def plain(self, weights: Iterable[Weight], kinds: type[Format] | UnionType) -> frozenset[str]:
        """Return the tensors of weights in formats of these kinds that the checkpoint does not store quantized.

        The result is empty if none is stored quantized: then the format is not a choice of the checkpoint.
        """
        names = {part.tensor for weight in weights if isinstance(weight.format, kinds) for part in weight.parts}
        plain = frozenset(names - self.fp8_matrices - self.quantized.keys())
        return plain if plain != names else frozenset()

    def stored(self, weight: Weight) -> tuple[np.ndarray, ...]:
        """Return the arrays that a rank's graph stores for a weight in its format.

        Each has one row per row of the matrix.
        """
        return weight.in_order(self._arrays(weight))

    def _arrays(self, weight: Weight) -> tuple[np.ndarray, ...]:
        if isinstance(weight.format, Fp8):
            found = [(self._find(part.tensor), part) for part in weight.parts]
            shares = [tensor.share(*part.axes) for tensor, part in found if isinstance(tensor, ScaledFp8Tensor)]
            if len(shares) == len(found):
                return stacked(shares)
        is_read = all(part.tensor in self._tensors for part in weight.parts)
        if isinstance(weight.format, Dense) and (
            is_read or not any(self._quantized(part.tensor) for part in weight.parts)
        ):
            return weight.format.store(self.read(weight))
        # Quantized in pieces, so that a table or the matrices of all experts are never in memory as float32.
        parts = [self._stored(part, weight.format) for part in weight.parts]
        return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))

    def _stored(self, part: TensorShard, format: Format) -> tuple[np.ndarray, ...]:
        quantized = self._quantized(part.tensor)
        rows, columns = part.axes
        if quantized is None:
            multiple = format.block_rows if isinstance(format, Fp8) else 1
            height = max(1, STORED_AT_ONCE // max(1, columns.size * multiple)) * multiple
            parts = [TensorShard(part.tensor, (piece, columns)) for piece in rows.pieces(height)]
            of_parts = [format.store(self.read(Weight(each.tensor, (each,), format))) for each in parts]
            return tuple(np.concatenate(arrays) for arrays in zip(*of_parts, strict=True))
        try:
            codes = quantized.codes()
            self._check_codes(codes, part, quantized)
            step = max(1, READ_AT_ONCE // max(1, part.shape[1] * FP8_BLOCK)) * FP8_BLOCK
            pieces = [
                format.store_codes(
                    codes.part(slice(start, min(start + step, rows.stop)), slice(columns.start, columns.stop))
                )
                for start in range(rows.start, max(rows.stop, rows.start + 1), step)
            ]
        except (ModelError, ValueError) as error:
            raise ModelError(f"tensor {quantized.name}: {error}") from None
        stored = tuple(np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        if all(share.stop - share.start == share.size for share in part.axes):
            return stored
        wanted = format.store(np.zeros(part.rank_shape, np.float32))  # including the zeros that pad the last share
        return tuple(_filled_up(array, zeros) for array, zeros in zip(stored, wanted, strict=True))

    @staticmethod
    def _check_codes(codes: Codes, part: TensorShard, quantized: QuantizedMatrix) -> None:
        if codes.codes.shape != part.shape:
            raise ModelError(f"has codes for {codes.codes.shape}, config.json asks for {part.shape}")
        expected = quantized.method.num_groups(part.shape[1]) if isinstance(quantized, QuantizedLayer) else 0
        groups = (part.shape[0], expected or codes.scale.shape[1])
        if codes.scale.shape != groups or (codes.zero is not None and codes.zero.shape != groups):
            zero = "" if codes.zero is None else f" and zero points for {codes.zero.shape}"
            raise ModelError(f"has scales for {codes.scale.shape}{zero}, config.json asks for {groups}")

    def _quantized(self, tensor: str) -> QuantizedMatrix | None:
        """Return the quantized matrix that stands for a plain weight, or None if it is not quantized."""
        found = self._tensors.get(tensor)
        if isinstance(found, QuantizedMatrix):
            return found
        layer = tensor.removesuffix(".weight")
        named = [each for each in self._quantizations if each.names(layer)]
        others = [each for each in self._quantizations if "Linear" in each.targets]
        for quantization in (*named, *others):
            if quantized := quantization.layer(tensor, self._tensors):
                return quantized
        return None

    def read(self, weight: Weight) -> np.ndarray:
        """Return a rank's share of a weight, rounded to nearest (ties to even) to the dtype that its format reads."""
        result = np.zeros(weight.read_shape, np.dtype(weight.format.read_as))
        row = 0
        for part in weight.parts:
            self._read_part(part, result[row : row + part.rank_shape[0]])
            row += part.rank_shape[0]
        return result + np.float32(weight.offset) if weight.offset else result

    def _read_part(self, part: TensorShard, target: np.ndarray) -> None:
        tensor, (rows, *columns) = self._find(part.tensor), part.axes
        inner = tuple(slice(share.start, share.stop) for share in columns)
        filled = tuple(slice(share.stop - share.start) for share in columns)
        for start, stop in _steps(rows, part.shape):
            with np.errstate(invalid="ignore", over="ignore"):  # NaN stays NaN, and too large values become infinite
                source = (slice(start, stop), *inner)
                place = (slice(start - rows.start, stop - rows.start), *filled)
                target[place] = tensor[source]

    def _check(self, part: TensorShard) -> None:
        tensor = self._find(part.tensor)
        shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if shape != part.shape:
            raise ModelError(f"tensor {part.tensor} has shape {shape}, config.json asks for {part.shape}")
        if dtype not in DTYPES:
            raise ModelError(f"tensor {part.tensor} has dtype {dtype}, supported are {', '.join(DTYPES)}")

    def _find(self, tensor: str) -> StoredTensor:
        if tensor not in self._tensors:
            raise ModelError(f"tensor {tensor} is missing in the checkpoint")
        return self._tensors[tensor]


def open_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files of a checkpoint by name. 8-bit and 4-bit floats are combined with
    their scales."""
    tensors: dict[str, StoredTensor] = {}
    paths = weight_files(directory)
    if paths[0].suffix == ".gguf":
        return read_gguf(paths)[1]
    for path in paths:
        tensors |= _open(path)
    return with_fp8(with_fp4(_with_prefix(tensors)))


def _with_prefix(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors by their names in a causal language model, also if the checkpoint stores the decoder alone."""
    if "embed_tokens.weight" not in tensors:
        return tensors
    return {name if name.startswith(HEADS) else f"model.{name}": tensor for name, tensor in tensors.items()}


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files: model.safetensors, else Paddle's model_state.pdparams, or the shards in its index, else
    GGUF files.

    Raises ModelError if one is missing.
    """
    there = [name for name in WEIGHTS if any(directory.glob(f"{name}*"))]
    if not there and (files := sorted(directory.glob("*.gguf"))):
        return files
    name = (there or WEIGHTS)[0]
    index_path = directory / f"{name}.index.json"
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(map(_is_path_inside, weight_map.values())):
            text = f"{index_path}: weight_map is {weight_map!r:.200}, it must be an object of paths in this folder"
            raise ModelError(text)
        paths = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        paths = [directory / name]
    for path in paths:
        if not path.exists():
            raise ModelError(f"{path} is missing; {_how_to_convert(directory)}")
    if not paths:
        raise ModelError(f"{index_path} names no files: weight_map is missing or empty")
    return paths


def _is_path_inside(value: Any) -> bool:
    return isinstance(value, str) and not Path(value).is_absolute() and ".." not in Path(value).parts


def _how_to_convert(directory: Path) -> str:
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (directory / name).exists():
            what = f"there is only {name}, which is not read because loading it may run code"
            return f"{what}; {CONVERT.format(directory)}"
    return "weights are read from model.safetensors or its shards"


def _filled_up(array: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    zeros[tuple(slice(size) for size in array.shape)] = array
    return zeros


def _open(path: Path) -> dict[str, StoredTensor]:
    if path.suffix == ".pdparams":
        return read_pdparams(path)
    try:
        file = safe_open(path, "numpy")
        handles = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - safe_open returns no mapping
        return handles | fp8_bytes(path)
    except SafetensorError as error:
        with path.open("rb") as start:
            if start.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ModelError(f"{path} is a pointer of Git LFS; `git lfs pull` fetches the file itself") from None
        size = path.stat().st_size
        raise ModelError(f"{path} ({size} bytes) is cut off or no safetensors file: {error}") from None


def _steps(rows: AxisShard, shape: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield the first row and the end of each piece of at most READ_AT_ONCE elements."""
    num_rows, *inner = shape
    at_once = max(1, READ_AT_ONCE // max(1, int(np.prod(inner))))
    for start in range(rows.start, rows.stop, at_once):
        yield start, min(start + at_once, rows.stop)
