"""A graph as a list of calls: weights that were put in another order and calls that were made one change no bit."""

import ctypes
import os
import threading

import numpy as np
import pytest

from engine.dtypes import to_bf16
from engine.executors.cpu.program import CpuProgram
from engine.graph import Graph, Node, Value
from engine.ops import cpu
from engine.ops.cpu import kernels
from engine.ops.cpu.library import CAdapterPair, CAdapterRows

VOCAB, NUM_TOKENS = 83, 70


def random(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def of_rows(number: int, width: int) -> Value:
    return Value(number, "float32", (-1, width))


def gated_graph(hidden: int, inner: int, is_read_twice: bool) -> tuple[Graph, dict[str, np.ndarray]]:
    """Return a graph of embedding, gated linear, linear and logits, for which the table is used again, and its
    parameters."""
    params = {
        "table": to_bf16(random(VOCAB, hidden)),
        "gate_up": to_bf16(random(2 * inner, hidden)),
        "bias": random(2 * inner),
        "down": to_bf16(random(hidden, inner)),
    }
    inputs = {name: Value(n, "int32", (-1,)) for n, name in enumerate(("token_ids", "logit_rows"))}
    inputs["block_tables"] = Value(2, "int32", (-1, -1))
    weights = {name: Value(10 + n, str(array.dtype), array.shape) for n, (name, array) in enumerate(params.items())}
    x, both, gated, y, some, logits = (
        of_rows(20 + n, width) for n, width in enumerate((hidden, 2 * inner, inner, hidden, hidden, VOCAB))
    )
    nodes = (
        Node("embedding", (inputs["token_ids"], weights["table"]), (x,), {"first_id": 0}),
        Node("linear", (x, weights["gate_up"], weights["bias"]), (both,), {}),
        Node("swiglu", (both,), (gated,), {}),
        Node("linear", (gated, weights["down"], None), (y,), {}),
        Node("gather_rows", (y, inputs["logit_rows"]), (some,), {}),
        Node("linear", (some, weights["table"], None), (logits,), {}),
    )
    outputs = {"hidden": y, "logits": logits} | ({"both": both} if is_read_twice else {})
    return Graph(inputs, weights, nodes, outputs), params


@pytest.mark.parametrize(
    ("hidden", "inner", "is_read_twice"),
    [(96, 160, False), (33, 80, False), (64, 72, False), (1300, 16, False), (96, 96, False), (96, 160, True)],
)
def test_a_program_makes_the_bits_of_its_ops(hidden, inner, is_read_twice):
    graph, params = gated_graph(hidden, inner, is_read_twice)
    program = CpuProgram(graph, params)
    token_ids = np.random.default_rng(0).integers(0, VOCAB, NUM_TOKENS, dtype=np.int32)
    rows = np.arange(0, NUM_TOKENS, 3, dtype=np.int32)
    inputs = {"token_ids": token_ids, "logit_rows": rows, "block_tables": np.zeros((1, 1), np.int32)}
    x = cpu.embedding(token_ids, params["table"], first_id=0)
    both = cpu.linear(x, params["gate_up"], params["bias"])
    y = cpu.linear(cpu.swiglu(both), params["down"])
    logits = cpu.linear(np.ascontiguousarray(y[rows]), params["table"])

    found = program.run(inputs)
    assert np.array_equal(found["logits"], logits)
    assert not is_read_twice or np.array_equal(found["both"], both)  # of all tokens


def test_programs_share_parameters_of_one_name_and_shape():
    graph, params = gated_graph(96, 160, False)
    first = CpuProgram(graph, params)
    other, other_params = gated_graph(64, 160, False)
    again, another = CpuProgram(graph, params, first), CpuProgram(other, other_params, first)
    assert all(again._held[name][1] is first._held[name][1] for name in params)
    assert [name for name in params if another._held[name][1] is first._held[name][1]] == ["bias"]


def product_graph(op: str, width: int, num_out: int) -> tuple[Graph, dict[str, np.ndarray]]:
    """Build a graph that multiplies rows of a table with a quantized weight and computes the swiglu of the product."""
    packed_width = -(-width // 128) * 64 if op.startswith("linear_int4") else width
    weight = np.random.default_rng(0).integers(-128, 128, (num_out, packed_width), np.int8)
    params = {"table": random(VOCAB, width), "weight": weight, "scale": random(num_out), "bias": random(num_out)}
    if op.startswith("linear_int4"):
        groups = (num_out, 2 * packed_width // (32 if "of 32" in op else 64))
        scale, zero = to_bf16(random(*groups)), to_bf16(8 + random(*groups))
        params |= {"weight": weight.view(np.uint8), "scale": scale, "zero": zero}
    inputs = {name: Value(n, "int32", (-1,)) for n, name in enumerate(("token_ids", "logit_rows"))}
    inputs["block_tables"] = Value(2, "int32", (-1, -1))
    values = {name: Value(10 + n, str(array.dtype), array.shape) for n, (name, array) in enumerate(params.items())}
    x, both, gated = of_rows(20, width), of_rows(21, num_out), of_rows(22, num_out // 2)
    given = [values[name] for name in ("weight", "scale", "zero", "bias") if name in params]
    nodes = (
        Node("embedding", (inputs["token_ids"], values["table"]), (x,), {"first_id": 0}),
        Node(op.split()[0], (x, *given), (both,), {}),
        Node("swiglu", (both,), (gated,), {}),
    )
    return Graph(inputs, values, nodes, {"gated": gated}), params


@pytest.mark.parametrize("op", ["linear_int8", "linear_a8w8", "linear_int4", "linear_int4 of 32"])
@pytest.mark.parametrize(("width", "num_out"), [(70, 82), (70, 64), (2300, 192)])  # of whole panels, and not
@pytest.mark.parametrize("num_rows", [1, 9, 600])
def test_weights_of_few_bits_are_packed_and_change_no_bit(op, width, num_out, num_rows):
    graph, params = product_graph(op, width, num_out)
    token_ids = np.arange(num_rows, dtype=np.int32) % VOCAB
    found = CpuProgram(graph, params).run(
        {"token_ids": token_ids, "logit_rows": token_ids, "block_tables": np.zeros((1, 1), np.int32)}
    )
    given = [params[name] for name in ("weight", "scale", "zero", "bias") if name in params]
    assert np.array_equal(found["gated"], cpu.swiglu(getattr(cpu, op.split()[0])(params["table"][token_ids], *given)))


@pytest.mark.parametrize("graph", [gated_graph(256, 256, False), product_graph("linear_int4", 2048, 256)])
def test_weights_are_packed_without_threads_that_stay(graph):
    """The steps run on another thread."""
    left, before = set(), cpu.num_threads()

    def make():
        there = set(os.listdir("/proc/self/task"))
        CpuProgram(*graph)
        left.update(set(os.listdir("/proc/self/task")) - there)

    cpu.set_num_threads(3)
    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    cpu.set_num_threads(before)
    assert not left


def test_an_adapter_changes_what_a_swiglu_reads():
    """The result is as if the two ops were not fused, which is the case if another op reads the product as well."""
    found = []
    for is_read_twice in (False, True):
        program = CpuProgram(*gated_graph(96, 160, is_read_twice))
        rows = np.arange(5, dtype=np.int32)
        inputs = {"token_ids": rows, "logit_rows": rows, "block_tables": np.zeros((1, 1), np.int32)}
        without = program.run(inputs)["logits"].copy()
        a, b = random(1, 96), random(1, 320)
        pairs, groups = (
            (CAdapterPair * 1)(CAdapterPair(1, 1, 0, 320, a.ctypes.data, b.ctypes.data)),
            (CAdapterRows * 1)(),
        )
        groups[0].pair, groups[0].end = ctypes.addressof(pairs), ctypes.addressof(pairs) + ctypes.sizeof(pairs)
        groups[0].rows[0], groups[0].num_rows[0] = rows.ctypes.data, len(rows)
        found.append(program.run(inputs, groups)["logits"].copy())
        assert (found[-1] != without).any(axis=1).all()
    assert np.array_equal(*found)


@pytest.mark.parametrize(("op", "dtype"), [("linear", np.uint16), ("linear_int8", np.int8)])
@pytest.mark.parametrize(("num_matrices", "num_rows"), [(1, 64), (1, 129), (3, 150)])
def test_weights_are_packed_in_pieces_that_are_released(op, dtype, num_matrices, num_rows, monkeypatch):  # noqa: PLR0913
    ops, rows = cpu.load(), np.random.default_rng(0).integers(1, 99, (num_matrices * num_rows, 36)).astype(dtype)
    num_bytes = ops.packed_bytes(op, rows.shape, rows.itemsize, num_matrices)
    whole, in_pieces = (np.zeros(num_bytes, np.uint8) for _ in range(2))
    ops.pack(op, rows, whole, num_matrices)
    monkeypatch.setattr(kernels, "PACKED_AT_ONCE", 1)
    pieces: list[np.ndarray] = []
    ops.pack(op, rows, in_pieces, num_matrices, done=pieces.append)
    np.testing.assert_array_equal(in_pieces, whole)
    np.testing.assert_array_equal(np.concatenate(pieces), rows)
    assert max(map(len, pieces)) == 64


def test_a_program_releases_a_weight_while_it_is_packed(monkeypatch):
    graph, params = gated_graph(64, 96, is_read_twice=False)
    if not cpu.load().packed_bytes("linear", params["table"].shape, 2):
        pytest.skip("the kernels of this CPU read matrices of bfloat16 as they are stored")
    released: list[np.ndarray] = []
    monkeypatch.setattr("engine.executors.cpu.program.release", released.append)
    monkeypatch.setattr(kernels, "PACKED_AT_ONCE", 1)
    CpuProgram(graph, params)
    assert [len(each) for each in released if np.shares_memory(each, params["table"])] == [64, VOCAB - 64, VOCAB]
