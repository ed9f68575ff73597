"""CpuProgram: an exported graph as the list of calls that `llm_run` makes. Every value has its memory before the first
step, so that no work remains between two kernels. Independent of batches."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engine.core.cache_groups import table_name
from engine.dtypes import held_as
from engine.executors.cpu.fp8_weights import FloatsAsBf16, with_bf16_weights
from engine.executors.expert_usage import HostCounter, routed_layers
from engine.graph import Graph, GraphError, Node, Value
from engine.graph.fusion import fuse
from engine.models.layers import LOGIT_ROWS, TOKEN_IDS
from engine.ops import cpu
from engine.ops.catalogue import OPS
from engine.ops.cpu.calls import NUMBER, ArgumentError, Call, Operand, Packed
from engine.ops.cpu.kernels import BF16_OPS, CpuOps
from engine.ops.cpu.library import CAdapterRows, Counts
from engine.paddle_files import release

ALIGNMENT = 64  # bytes of a cache line
Held = dict[str, tuple[tuple[str, int] | None, np.ndarray]]  # parameters by name: how they are packed, and the array


class RowInputs(NamedTuple):
    """Names of the inputs that say how many rows a step has."""

    of_tokens: str = TOKEN_IDS
    of_logits: str = LOGIT_ROWS  # values that are computed from it have a row for each of its rows
    of_requests: str = table_name(0)


class CpuProgram:
    """Executable form of a graph. Owns aligned copies of the parameters in large pages, which a mapped file does not
    provide, and two call lists: one for steps without adapters and one for steps with them.

    Raises GraphError for a graph with float16 parameters.
    """

    row_inputs = RowInputs()

    def __init__(self, graph: Graph, params: Mapping[str, np.ndarray], shares: CpuProgram | None = None):
        """Load a graph. Parameters that the program `shares` has with the same names and shapes are used
        together with it."""
        if halves := [name for name, value in graph.parameters.items() if value.dtype == "float16"]:
            raise GraphError(f"parameter {halves[0]} is float16, which only GPUs compute with: export with bfloat16")
        graph, numbers = with_bf16_weights(graph, params)
        self._graph = graph
        self._kernels = cpu.load()
        self._held: Held = _copied(graph, numbers, self._kernels, shares._held if shares else {})
        self._params = {graph.parameters[name].id: array for name, (_, array) in self._held.items()}
        self._caches: dict[int, np.ndarray] = {}
        self._inputs = {name: np.empty(0, held_as(value.dtype)) for name, value in graph.inputs.items()}
        self._max_rows = (0, 0)  # the largest numbers of token rows and of logit rows
        of_logits = self.row_inputs.of_logits
        self.routed = routed_layers(graph)
        self._counter: HostCounter | None = None  # of the experts that tokens choose
        chosen = [layer.topk_ids for layer in self.routed]
        self._fused = CallList(fuse(graph, NUMBER), of_logits, chosen)
        self._adapted = CallList(fuse(graph, NUMBER, keep_products=True), of_logits, chosen)  # for steps with adapters

    def width_of(self, name: str) -> int:
        """Return the size of the last axis of an input, or 0 if the graph has none of that name."""
        return self._graph.inputs[name].shape[-1] if name in self._graph.inputs else 0

    def count_experts(self) -> HostCounter:
        """Count the experts that tokens choose from now on, and return the counter. The graph must have some."""
        self._counter = HostCounter(len(self.routed), self.routed[0].num_experts)
        return self._counter

    def set_caches(self, caches: Mapping[str, np.ndarray]) -> None:
        """Set the caches that every step updates, by the names of the graph's inputs. An empty mapping releases the
        current ones."""
        self._caches = {self._graph.inputs[name].id: array for name, array in caches.items()}
        self._clear()

    def run(
        self, inputs: Mapping[str, np.ndarray], groups: ctypes.Array[CAdapterRows] | None = None
    ) -> dict[str, np.ndarray]:
        """Run the graph and return its outputs by name, valid until the next call.

        `inputs` are all inputs except the caches; `groups` are the rows that have adapters. Raises GroupError.
        """
        counts = self._place(inputs)
        if groups:
            counts.groups, counts.num_groups = ctypes.addressof(groups), len(groups)
        calls = self._bound(self._adapted if groups else self._fused)
        self._kernels.run(calls.address, len(calls.records), counts)
        if self._counter:
            num_rows = counts.tokens, counts.logits
            chosen = [layer.topk_ids for layer in self.routed]
            self._counter.count([calls.arrays[each][: num_rows[calls.has_logit_rows(each)]] for each in chosen])
        return self._outputs(calls, counts)

    def _place(self, inputs: Mapping[str, np.ndarray]) -> Counts:
        """Copy the inputs of a step to where the calls read them. Return its sizes."""
        if any(array.size > self._inputs[name].size for name, array in inputs.items()):
            self._inputs |= {
                name: np.empty(max(self._inputs[name].size, array.size), array.dtype) for name, array in inputs.items()
            }
            self._clear()
        for name, array in inputs.items():
            self._inputs[name][: array.size] = array.ravel()
        names = self.row_inputs
        num_rows, num_logits = len(inputs[names.of_tokens]), len(inputs[names.of_logits])
        self._max_rows = max(self._max_rows[0], num_rows), max(self._max_rows[1], num_logits)
        num_requests, *width = inputs[names.of_requests].shape
        return Counts(num_rows, num_logits, num_requests, *width)

    def _bound(self, calls: CallList) -> CallList:
        """Return the calls with memory for every value."""
        if not calls.is_bound:
            given = {self._graph.inputs[name].id: array for name, array in self._inputs.items()}
            calls.bind(given | self._params | self._caches, self._max_rows)
        return calls

    def _outputs(self, calls: CallList, counts: Counts) -> dict[str, np.ndarray]:
        """Return the outputs of a step that has been computed, by name."""
        num_rows = counts.tokens, counts.logits
        return {
            name: calls.arrays[value.id][: num_rows[calls.has_logit_rows(value.id)]]
            for name, value in self._graph.outputs.items()
        }

    def _clear(self) -> None:
        for calls in (self._fused, self._adapted):
            calls.clear()


class CallList:
    """Calls of a graph, and the memory of the values that they compute. `kept` are the ids of values that are read
    after the calls, beside the outputs."""

    def __init__(self, graph: Graph, of_logits: str, kept: Sequence[int]):
        self._graph = graph
        self._root = _roots(graph)
        self._of_logits = graph.values_by_rows_of(of_logits)
        self._kept = {self._root[value_id] for value_id in kept}
        self.clear()

    def has_logit_rows(self, value_id: int) -> bool:
        """Return whether the value with this id has a row for each logit row, not for each token."""
        return value_id in self._of_logits

    def clear(self) -> None:
        self.arrays: dict[int, np.ndarray] = {}
        self.records, self.address, self.is_bound = bytearray(), 0, False
        self.ends: list[int] = []  # of the records of the calls

    def bind(self, given: Mapping[int, np.ndarray], max_rows: tuple[int, int]) -> None:
        """Assign memory to every value. A buffer is reused after its value has been read for the last time.

        `given` are inputs, parameters and caches by value id; `max_rows` are the largest numbers of token rows and of
        logit rows.
        """
        graph, arrays = self._graph, dict(given)
        last_use = {self._root[v.id]: node for node in graph.nodes for v in (*node.inputs, *node.outputs) if v}
        kept = arrays.keys() | self._kept | {self._root[value.id] for value in graph.outputs.values()}
        free: defaultdict[tuple[tuple[int, ...], np.dtype], list[np.ndarray]] = defaultdict(list)
        records = []
        for node in graph.nodes:
            for value in node.outputs:
                if (root := self._root[value.id]) not in arrays:
                    shape = (max_rows[value.id in self._of_logits], _width(value))
                    kind = (shape, np.dtype(value.dtype))
                    arrays[root] = free[kind].pop() if free[kind] else _aligned(*kind)
                arrays[value.id] = arrays[root]
            records.append(_record(node, arrays, node.outputs[0].id in self._of_logits))
            for root in {self._root[value.id] for value in (*node.inputs, *node.outputs) if value}:
                if last_use[root] is node and root not in kept:
                    free[arrays[root].shape, arrays[root].dtype].append(arrays[root])
        self.arrays, self.records, self.is_bound = arrays, bytearray(b"".join(records)), True
        self.ends = list(itertools.accumulate(map(len, records)))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.records))


def _width(value: Value) -> int:
    """Return the width of an output, which must be f32 or i32 [rows, width]. Raises GraphError."""
    if value.dtype not in ("float32", "int32") or len(value.shape) != 2 or value.shape[1] < 0:
        raise GraphError(f"unsupported graph output {value}: the CPU executor needs 2-D float32 of known width")
    return value.shape[1]


def _record(node: Node, arrays: Mapping[int, np.ndarray], of_logits: bool) -> bytes:
    """Return the binary record of one call for `llm_run`. Raises GraphError for an op that is unknown or used
    wrongly."""
    if node.op not in NUMBER:
        raise GraphError(f"the graph has the op {node.op}, which is not built for CPUs")
    try:
        inputs = [None if value is None else _operand(value, arrays[value.id]) for value in node.inputs]
        call = Call(OPS[node.op], inputs, node.attributes)
        call.shapes()
        for index, value in enumerate(node.outputs):
            call.set_output(index, arrays[value.id].ctypes.data)
        return call.record(of_logits)
    except (ArgumentError, TypeError) as error:
        raise GraphError(f"the graph has a wrong op: {error}") from None


def _operand(value: Value, array: np.ndarray) -> Operand:
    """Describe an input of a call. Sizes that vary between steps stay -1."""
    known = value.shape if -1 in value.shape else array.shape
    return Operand(array.ctypes.data, array.dtype, known, isinstance(array, Packed))


def _roots(graph: Graph) -> dict[int, int]:
    """Return, for each value id, the id of the value whose memory it shares. An op that updates an input returns that
    input."""
    values = (*graph.inputs.values(), *graph.parameters.values())
    roots = {value.id: value.id for value in values}
    for node in graph.nodes:
        roots |= {value.id: value.id for value in node.outputs}
        if node.updated:
            roots[node.outputs[-1].id] = roots[node.updated.id]
    return roots


def _copied(graph: Graph, params: Mapping[str, np.ndarray | FloatsAsBf16], kernels: CpuOps, held: Held) -> Held:
    """Copy the parameters into aligned memory in large pages, in the packed layout where the op has one. Those that are
    `held` with the same shape and layout are not copied again."""
    packings = {
        value.id: (node.op, _num_matrices(node))
        for node in graph.nodes
        if node.op in OPS and (OPS[node.op].weights or OPS[node.op].is_mixture)
        for value, declared in zip(node.inputs, OPS[node.op].inputs, strict=False)
        if value and declared.is_packable
    }
    packing_of = {name: packings.get(graph.parameters[name].id) for name in params}
    layouts = {name: (packing, array.shape) for name, (packing, array) in held.items()}
    shared = {name: held[name] for name in params if layouts.get(name) == (packing_of[name], params[name].shape)}
    params = {name: array for name, array in params.items() if name not in shared}
    packed = {
        name: kernels.packed_bytes(op, array.shape, array.dtype.itemsize, num_matrices)
        for name, array in params.items()
        if (packing := packing_of[name])
        for op, num_matrices in [packing]
        if op not in BF16_OPS or array.dtype == np.uint16
    }
    sizes = [packed.get(name) or array.nbytes for name, array in params.items()]
    starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    memory, copies = large_pages(starts[-1]), dict(shared)
    for (name, array), start in zip(params.items(), starts, strict=False):
        copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        if (packing := packing_of[name]) and packed.get(name):
            op, num_matrices = packing
            kernels.pack(op, np.ascontiguousarray(array), copy, num_matrices, done=release)
            copy = copy.view(Packed)
        else:
            np.copyto(copy, array)
        if isinstance(array, np.ndarray):
            release(array)  # it would count as memory of this process a second time
        copies[name] = packing_of[name], copy
    return copies


def _num_matrices(node: Node) -> int:
    """Return how many matrices, each packed by itself, the weight of an op consists of: of an expert the one that
    makes gates, the one that these are multiplied with, and `down`."""
    num_experts = int(node.attributes.get("num_experts", 1))
    return 2 * num_experts if node.op.startswith("expert_gate_up") else num_experts


def large_pages(num_bytes: int) -> np.ndarray:
    """Return u8 zeros whose memory is allocated when it is first written, in pages of 2 MiB where the system supports
    them."""
    # A shared mapping would be shmem, for which Linux uses small pages unless it is configured otherwise.
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # This fails on a kernel without large pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array of this shape that begins at a page boundary."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return large_pages(num_bytes)[:num_bytes].view(dtype).reshape(shape)


def allocated(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return zeros of a dtype of `engine.dtypes`, whose memory is allocated when it is first touched."""
    kind = held_as(dtype)
    return large_pages(math.prod(shape) * kind.itemsize).view(kind)[: math.prod(shape)].reshape(shape)
