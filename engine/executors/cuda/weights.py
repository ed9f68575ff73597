"""Parameters of a graph on the device: copied from the mapped file, or drawn at random where there is none."""

from __future__ import annotations

import math
import zlib
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from engine.executors.expert_placement import GatheredRows
from engine.graph import Graph, Value
from engine.graph.random_params import MXFP4_EXPONENT
from engine.ops import cuda

CHUNK = 16 << 20  # bytes that each reader copies at a time
NUM_READERS = 4  # a disk is faster with several requests in flight
DRAWN_WIDTH = 0.02  # standard deviation
CODES_WIDTH = {torch.int8: 73.3, torch.uint8: 4.32}  # standard deviation of uniform codes of 8 and 4 bits


def load(graph: Graph, params: Mapping[str, np.ndarray | GatheredRows], device: torch.device) -> dict[str, Tensor]:
    """Copy the parameters to the device. `params` are the arrays of the mapped file, by name. Each byte is read once,
    through pinned memory on a GPU."""
    tensors = {name: _empty(value, device) for name, value in graph.parameters.items()}
    copy = _Copy(device)
    pieces = [
        (target[start : start + CHUNK], source[start : start + CHUNK])
        for name, tensor in tensors.items()
        for target, source in _parts(tensor, params[name])
        for start in range(0, len(source), CHUNK)
    ]
    with ThreadPoolExecutor(NUM_READERS) as readers:
        list(readers.map(copy, *zip(*pieces, strict=True)))
    return _as_the_ops_want_them(graph, tensors)


def draw(graph: Graph, constants: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Draw random matrices or codes and set norms to one, biases to zero. `constants` keep their values. What is drawn
    for a parameter depends on its name only. All numbers of matrices are those of bfloat16, as in released models.
    """
    generator = torch.Generator(device)
    of_fp8 = [value for node in graph.nodes if node.op.endswith("_fp8") for value in node.inputs if value]
    floats = {value.id for value in of_fp8 if value.dtype == "uint8"}
    tensors = {}
    for name, value in graph.parameters.items():
        generator.manual_seed(zlib.crc32(name.encode()))
        if name in constants:
            tensors[name] = torch.from_numpy(constants[name]).to(device)
        elif name.endswith("_scale") and value.dtype == "uint8":
            tensors[name] = _empty(value, device).fill_(MXFP4_EXPONENT)
        elif name.endswith("_scale"):
            codes = graph.parameters[name.removesuffix("_scale")]
            width = 1 if codes.id in floats else CODES_WIDTH[_dtype(codes)]
            tensors[name] = _empty(value, device).fill_(DRAWN_WIDTH / width)
        elif value.id in floats:
            numbers = torch.empty(value.shape, device=device).normal_(generator=generator)
            tensors[name] = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        elif _dtype(value) == torch.uint8:  # two codes of 4 bits each, with a mean of 8, which stands for zero
            low, high = (_empty(value, device).random_(1, 16, generator=generator) for _ in range(2))
            tensors[name] = low | high << 4
        elif _dtype(value) == torch.int8:
            tensors[name] = _empty(value, device).random_(-127, 128, generator=generator)
        elif len(value.shape) == 1:
            tensors[name] = torch.full(value.shape, float("norm" in name), device=device)
        else:
            numbers = _empty(value, device).normal_(0, DRAWN_WIDTH, generator=generator)
            tensors[name] = numbers.to(torch.bfloat16).to(numbers.dtype)
    return _as_the_ops_want_them(graph, tensors)


def without(graph: Graph, names: Container[str]) -> Graph:
    """Return the graph with only those parameters that are not among `names`, and the nodes that read one of these."""
    parameters = {name: value for name, value in graph.parameters.items() if name not in names}
    own = {value.id for value in parameters.values()}
    nodes = tuple(node for node in graph.nodes if any(value and value.id in own for value in node.inputs))
    return replace(graph, parameters=parameters, nodes=nodes)


def num_bytes(graph: Graph) -> int:
    return sum(math.prod(value.shape) * _dtype(value).itemsize for value in graph.parameters.values())


class _Copy:
    """Copies bytes to the device. Each call owns a pinned buffer and a stream while it runs."""

    def __init__(self, device: torch.device):
        self._device = device
        self._free: SimpleQueue[tuple[Tensor, torch.cuda.Stream | None]] = SimpleQueue()
        is_gpu = device.type == "cuda"
        for _ in range(NUM_READERS):
            buffer = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=is_gpu)
            self._free.put((buffer, torch.cuda.Stream(device) if is_gpu else None))

    def __call__(self, target: Tensor, source: np.ndarray) -> None:
        buffer, stream = self._free.get()
        try:
            buffer.numpy()[: len(source)] = source
            with torch.cuda.stream(stream):  # without a stream this has no effect
                target.copy_(buffer[: len(source)], non_blocking=True)
            if stream:
                stream.synchronize()
        finally:
            self._free.put((buffer, stream))  # otherwise the next calls would wait for it forever


def _as_the_ops_want_them(graph: Graph, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pack quantization codes, convert biases of linear layers to the dtype of the product, as the ops expect, and
    store routers in bfloat16 if that changes no value, as in models that were released in bfloat16."""
    names = {value.id: name for name, value in graph.parameters.items()}
    for node in graph.nodes:
        if pack := cuda.packer(node.op):
            stored = [names[value.id] for value in node.inputs[:-1] if value and value.id in names]
            packed = pack(*[tensors[name] for name in stored])
            tensors |= dict(zip(stored, packed, strict=False))
        if node.op == "linear" and (bias := node.inputs[2]):
            weight = node.inputs[1]
            assert weight
            tensors[names[bias.id]] = tensors[names[bias.id]].to(_dtype(weight))
        if node.op == "moe_route" and (router := node.inputs[1]):
            exact = tensors[names[router.id]]
            rounded = exact.to(torch.bfloat16)
            if torch.equal(rounded.float(), exact.float()):
                tensors[names[router.id]] = rounded
    return tensors


def _empty(value: Value, device: torch.device) -> Tensor:
    return torch.empty(value.shape, dtype=_dtype(value), device=device)


def _dtype(value: Value) -> torch.dtype:
    return getattr(torch, value.dtype)


def _parts(tensor: Tensor, param: np.ndarray | GatheredRows) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Yield the bytes of a tensor and of the arrays of the file that they are copied from."""
    target = tensor.view(torch.uint8).view(-1)
    for source in map(_bytes, param.parts if isinstance(param, GatheredRows) else (param,)):
        yield target[: len(source)], source
        target = target[len(source) :]


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
