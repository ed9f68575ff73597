"""An exported graph as the list of calls that `llm_run` makes: every value has its place in memory before the first
step, so that between two kernels there is nothing to do. Knows no batches."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from engine.dtypes import held_as, scale_bytes
from engine.executors.cpu.widening import Widened, widened
from engine.graph import Graph, GraphError, Node, Value
from engine.ops import cpu
from engine.ops.cpu.kernels import CpuOps
from engine.ops.cpu.library import WEIGHT_KINDS, Call, Counts, Group

OF_LOGITS = "logit_rows"
PACKED = ("linear", "linear_int8", "linear_a8w8", "linear_int4")  # what these multiply with is, where that is faster
NUMBERS = ("epsilon", "scale", "attention_scaling")  # attributes that are no whole numbers; no op has two of them
ALIGNMENT = 64  # bytes: of a cache line


class Program:
    """Takes a copy of the parameters: what is mapped from a file is neither aligned nor in large pages."""

    def __init__(self, graph: Graph, params: Mapping[str, np.ndarray]):
        if halves := [name for name, value in graph.parameters.items() if value.dtype == "float16"]:
            raise GraphError(f"parameter {halves[0]} is float16, which only GPUs compute with: export with bfloat16")
        graph, numbers = widened(graph, params)
        self._graph = graph
        self._root = _roots(graph)
        self._of_logits = graph.values_by_rows_of(OF_LOGITS)
        self._gated = _only_gated(graph)
        self._kernels = cpu.load()
        self._params = {value.id: array for value, array in _copied(graph, numbers, self._kernels)}
        self._caches: dict[int, np.ndarray] = {}
        self._room = dict.fromkeys(graph.inputs, 0)  # elements of each input, and rows of everything else
        self._arrays: dict[int, np.ndarray] = {}
        self._calls = (Call * 0)()

    def set_caches(self, caches: Mapping[str, np.ndarray]) -> None:
        """By the names of the graph's inputs; updated by every step. Nothing: lets go of those that are there."""
        self._caches = {self._graph.inputs[name].id: array for name, array in caches.items()}
        self._arrays.clear()
        if caches:
            self._bind()

    def run(self, inputs: Mapping[str, np.ndarray], groups: ctypes.Array[Group] | None = None) -> dict[str, np.ndarray]:
        """The graph's outputs by name, valid until the next call. `inputs`: its own but for the caches, i32; `groups`:
        the rows that have adapters. Raises GroupError."""
        if any(array.size > self._room[name] for name, array in inputs.items()):
            for name, array in inputs.items():
                self._room[name] = max(self._room[name], array.size)
            self._bind()
        for name, array in inputs.items():
            self._arrays[self._graph.inputs[name].id][: array.size] = array.ravel()
        tables, num_logits = inputs["block_tables"], len(inputs[OF_LOGITS])
        counts = Counts(len(inputs["token_ids"]), num_logits, *tables.shape)
        if groups:
            counts.groups, counts.num_groups = ctypes.addressof(groups), len(groups)
        self._kernels.run(self._calls, counts)
        return {name: self._arrays[value.id][:num_logits] for name, value in self._graph.outputs.items()}

    def _bind(self) -> None:
        """Gives every value its memory: where it is read for the last time, another one's begins."""
        graph, arrays = self._graph, dict(self._params | self._caches)
        arrays |= {value.id: np.empty(self._room[name], np.int32) for name, value in self._inputs()}
        last_use = {self._root[v.id]: node for node in graph.nodes for v in (*node.inputs, *node.outputs) if v}
        kept = arrays.keys() | {self._root[value.id] for value in graph.outputs.values()}
        free: defaultdict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)
        calls = []
        for node in graph.nodes:
            for value in node.outputs:
                if (root := self._root[value.id]) not in arrays:
                    shape = self._shape(value)
                    arrays[root] = free[shape].pop() if free[shape] else _aligned(shape)
                arrays[value.id] = arrays[root]
            calls.append(self._call(node, arrays))
            for root in {self._root[value.id] for value in (*node.inputs, *node.outputs) if value}:
                if last_use[root] is node and root not in kept:
                    free[arrays[root].shape].append(arrays[root])
        self._arrays, self._calls = arrays, (Call * len(calls))(*calls)

    def _inputs(self) -> list[tuple[str, Value]]:
        return [(name, value) for name, value in self._graph.inputs.items() if value.id not in self._caches]

    def _shape(self, value: Value) -> tuple[int, int]:
        if value.dtype != "float32" or len(value.shape) != 2 or value.shape[1] < 0:
            raise GraphError(f"{value} is nothing that a step can make here")
        return self._room[OF_LOGITS if value.id in self._of_logits else "token_ids"], value.shape[1]

    def _call(self, node: Node, arrays: Mapping[int, np.ndarray]) -> Call:
        if node.op not in SIZES:
            raise GraphError(f"the graph has the op {node.op}, which is not built for CPUs")
        made = node.outputs[:-1] if node.updated else node.outputs
        at = [arrays[value.id].ctypes.data if value else None for value in (*node.inputs, *made)]
        sizes = SIZES[node.op](*[value and arrays[value.id] for value in node.inputs], **node.attributes)
        number = next((float(node.attributes[name]) for name in NUMBERS if name in node.attributes), 0.0)
        call = Call(list(SIZES).index(node.op), node.outputs[0].id in self._of_logits)
        call.at[: len(at)], call.size[: len(sizes)], call.number = at, sizes, number
        if node.outputs[0].id in self._gated:
            call.size[len(sizes)] = True
        return call


class Packed(np.ndarray):
    """In the order that its op reads fastest, bf16 as kPackedBf16, in the shape that it had."""


def _kind(weight: np.ndarray) -> int:
    if isinstance(weight, Packed):
        return WEIGHT_KINDS.index("packed")
    return WEIGHT_KINDS.index("bfloat16" if weight.dtype == np.uint16 else "float32")


def _linear(x: np.ndarray, weight: np.ndarray, *_: np.ndarray | None) -> tuple[int, ...]:
    return x.shape[1], len(weight), _kind(weight)


def _attention(_: np.ndarray, angles: np.ndarray, cache: np.ndarray, *__: np.ndarray, **given: int) -> tuple[int, ...]:
    head_dim = cache.shape[4] - scale_bytes(cache.dtype)
    return given["num_heads"], given["num_kv_heads"], head_dim, angles.shape[1], cache.shape[3], 8 * cache.itemsize


# The ops in the order of LlmOp, and what `llm_run` is told of their inputs and attributes.
SIZES: dict[str, Callable[..., tuple[int, ...]]] = {
    "embedding": lambda ids, table, *, first_id: (table.shape[1], len(table), first_id, _kind(table)),
    "gather_rows": lambda x, rows: (x.shape[1],),
    "rms_norm": lambda x, weight, *, epsilon: (x.shape[1],),
    "add_rms_norm": lambda x, residual, weight, *, epsilon: (x.shape[1],),
    "head_norm": lambda qkv, q, k, *, num_heads, num_kv_heads, epsilon: (num_heads, num_kv_heads, q.size),
    "linear": _linear,
    "linear_int8": _linear,
    "linear_a8w8": _linear,
    "linear_int4": _linear,
    "rotary_angles": lambda positions, inv_freq, *, attention_scaling: (len(inv_freq),),
    "paged_attention": _attention,
    "swiglu": lambda gate_up: (gate_up.shape[1] // 2,),
    "all_reduce": lambda x: (x.shape[1],),
    "all_gather": lambda x, *, num_ranks, width: (x.shape[1], width),
}


def _roots(graph: Graph) -> dict[int, int]:
    """Of each value the one in whose memory it lies: an op that updates an input makes no other."""
    values = (*graph.inputs.values(), *graph.parameters.values())
    roots = {value.id: value.id for value in values}
    for node in graph.nodes:
        roots |= {value.id: value.id for value in node.outputs}
        if node.updated:
            roots[node.outputs[-1].id] = roots[node.updated.id]
    return roots


def _only_gated(graph: Graph) -> set[int]:
    """What a linear op makes for nobody but the swiglu right behind it: the kernels may do the two as one."""
    num_readers = Counter(value.id for node in graph.nodes for value in node.inputs if value)
    num_readers.update(value.id for value in graph.outputs.values())
    return {
        made.outputs[0].id
        for made, read in itertools.pairwise(graph.nodes)
        if made.op in PACKED
        and read.op == "swiglu"
        and read.inputs[0] == made.outputs[0]
        and num_readers[made.outputs[0].id] == 1
    }


def _copied(
    graph: Graph, params: Mapping[str, np.ndarray | Widened], kernels: CpuOps
) -> list[tuple[Value, np.ndarray]]:
    ops = {value.id: node.op for node in graph.nodes if node.op in PACKED for value in node.inputs[1:] if value}
    op_of = {name: ops.get(graph.parameters[name].id) for name in params}
    packed = {
        name: kernels.packed_bytes(op, array.shape, array.dtype.itemsize)
        for name, array in params.items()
        if (op := op_of[name]) and len(array.shape) == 2 and (op != "linear" or array.dtype == np.uint16)
    }
    sizes = [packed.get(name) or array.nbytes for name, array in params.items()]
    starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    memory, copies = large_pages(starts[-1]), []
    for (name, array), start in zip(params.items(), starts, strict=False):
        copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        if (op := op_of[name]) and packed.get(name):
            kernels.pack(op, np.ascontiguousarray(array), copy)
            copy = copy.view(Packed)
        else:
            np.copyto(copy, array)
        copies.append((graph.parameters[name], copy))
    return copies


def large_pages(num_bytes: int) -> np.ndarray:
    """u8 zeros that take no memory before they are written to; in pages of 2 MiB where the system has them."""
    # Private: what processes could share is shmem to Linux, which is in small pages unless an administrator says so.
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    num_bytes = math.prod(shape) * ctypes.sizeof(ctypes.c_float)
    return large_pages(num_bytes)[:num_bytes].view(np.float32).reshape(shape)


def allocated(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Zeros of one of `engine.dtypes`, in memory that is not taken before it is touched."""
    kind = held_as(dtype)
    return large_pages(math.prod(shape) * kind.itemsize).view(kind)[: math.prod(shape)].reshape(shape)
