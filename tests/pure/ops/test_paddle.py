"""The Paddle operators give what the kernels give, in a graph of Paddle's as well."""

import numpy as np
import pytest

from engine.dtypes import to_bf16
from engine.ops import cpu
from engine.paddle_files import write_params
from tests.pure.paged_batch import PagedBatch

paddle = pytest.importorskip("paddle", reason="needs paddlepaddle")
EagerParamBase = pytest.importorskip("paddle.base.framework").EagerParamBase


@pytest.fixture(scope="module")
def ops():
    from engine.ops.cpu.paddle_ops import register_paddle_ops

    paddle.set_device("cpu")
    return register_paddle_ops()


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def tensor(array):
    if array is None:
        return None
    if array.dtype == np.uint16:
        return paddle.to_tensor(array.view(np.int16)).view("bfloat16")
    return paddle.to_tensor(array)


def i32(*values):
    return np.array(values, np.int32)


BYTES, CODES = (
    np.arange(84, dtype=np.int8).reshape(7, 12),
    np.arange(7 * 64, dtype=np.int32).astype(np.uint8).reshape(7, 64),
)
WIDE_BYTES = np.arange(600, dtype=np.int32).astype(np.uint8).reshape(3, 200) & 0xF7  # none of which is no number
PAIRS = np.arange(96, dtype=np.uint8).reshape(6, 16)
EXPONENTS = np.arange(120, 126, dtype=np.uint8)[:, None]
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
EXPERTS = np.array([[0, 2], [1, 0], [2, 1], [2, 0]], np.int32)
GATED = {"num_experts": 3, "activation": 0, "limit": 7.0, "alpha": 1.702, "offset": 1.0}
CALLS = {
    "embedding": ((i32(3, 0, 3, 9), to_bf16(random(5, 12))), {"first_id": 2}),
    "all_reduce": ((random(5, 12),), {}),
    "all_gather": ((random(5, 12),), {"num_ranks": 1, "width": 11}),
    "gather_rows": ((random(5, 12), i32(4, 1)), {}),
    "replace_rows": ((random(5, 12), i32(-1, 0, 1, -1, 0), random(2, 24)), {}),
    "add_gathered_rows": ((random(5, 12), i32(-1, 0, 1, -1, 0), random(2, 36)), {"column": 12}),
    "mrope_angles": (
        (np.arange(9, dtype=np.int32).reshape(3, 3), random(4), i32(0, 1, 2, 0)),
        {"attention_scaling": 1.2},
    ),
    "rms_norm": ((random(5, 12), random(12)), {"epsilon": 1e-5}),
    "layer_norm": ((random(5, 12), random(12), random(12)), {"epsilon": 1e-5}),
    "layer_norm without bias": ((random(5, 12), random(12)), {"epsilon": 1e-5}),
    "head_norm": ((random(5, 64), random(8), random(8)), {"num_heads": 4, "num_kv_heads": 2, "epsilon": 1e-5}),
    "linear": ((random(5, 12), random(7, 12), random(7)), {}),
    "linear bf16": ((random(5, 12), to_bf16(random(7, 12))), {}),
    "linear_int8": ((random(5, 12), BYTES, random(7), random(7)), {}),
    "linear_a8w8": ((random(5, 12), BYTES, random(7)), {}),
    "linear_int4": ((random(5, 12), CODES, to_bf16(random(7, 2)), to_bf16(random(7, 2) + 8), random(7)), {}),
    "linear_int4 without zero": ((random(5, 12), CODES, to_bf16(random(7, 2)), None, random(7)), {}),
    "linear_fp8": ((random(5, 12), BYTES.view(np.uint8) + 40, random(7, 1), random(7)), {}),
    "linear_fp8 of blocks": ((random(2, 200), WIDE_BYTES, random(3, 2)), {}),
    "linear_a8w8_fp8": ((random(2, 200), WIDE_BYTES, random(3, 2)), {}),
    "rotary_angles": ((i32(0, 5, 70), random(4)), {"attention_scaling": 1.2}),
    "swiglu": ((random(5, 12),), {}),
    "geglu": ((random(5, 12),), {}),
    "gelu": ((random(5, 12),), {}),
    "gelu_erf": ((random(5, 12),), {}),
    "concat_rows": ((random(5, 12), i32([4, 1], [0, 2], [3, 3])), {}),
    "interpolate_rows": ((random(5, 12), i32([4, 1], [0, 2]), random(2, 2)), {}),
    "bidirectional_attention": (
        (random(5, 48), random(5, 6), i32(2, 5)),
        {"num_heads": 2, "scale": 0.3, "is_bf16": 1},
    ),
    "relu_squared": ((random(5, 12),), {}),
    "add": ((random(5, 12), random(5, 12)), {}),
    "scale": ((random(5, 12),), {"factor": 0.3}),
    "softcap": ((random(5, 12),), {"cap": 0.7}),
    "square_sums": ((random(5, 64),), HEADS),
    "wide_norm": (
        (random(5, 64), random(5, 2) ** 2, random(32), random(16)),
        {**HEADS, "q_size": 64, "k_size": 32, "epsilon": 1e-5},
    ),
    "rotate_heads": ((random(5, 64), random(5, 6)), HEADS),
    "expert_gate_up": ((random(4, 12), EXPERTS, random(48, 12), random(48)), GATED),
    "expert_down bf16": ((random(4, 12), EXPERTS, random(4, 2), to_bf16(random(21, 6))), {"num_experts": 3}),
    "expert_gate_up_int8": ((random(4, 12), EXPERTS, BYTES[:6], random(6), random(6)), GATED),
    "expert_down_a8w8": ((random(4, 24), EXPERTS, random(4, 2), BYTES[:6], random(6)), {"num_experts": 3}),
    "expert_down_int4": (
        (random(4, 24), EXPERTS, random(4, 2), CODES[:6], to_bf16(random(6, 2)), to_bf16(random(6, 2) + 8), random(6)),
        {"num_experts": 3},
    ),
    "expert_gate_up_fp8": ((random(4, 12), EXPERTS, BYTES[:6].view(np.uint8) + 40, random(6, 1)), GATED),
    "expert_gate_up_mxfp4": ((random(4, 32), EXPERTS, PAIRS, EXPONENTS), GATED),
    "expert_down_mxfp4": ((random(4, 64), EXPERTS, random(4, 2), PAIRS, EXPONENTS, random(6)), {"num_experts": 3}),
    "add_gated": ((random(5, 12), random(5, 12), random(5, 8), random(1, 8)), {}),
}


@pytest.mark.parametrize("call", CALLS)
def test_paddle_op_equals_the_kernel(ops, call):
    name, (inputs, attributes) = call.split()[0], CALLS[call]
    found = getattr(ops, name)(*map(tensor, inputs), **attributes)
    assert np.array_equal(found.numpy(), getattr(cpu, name)(*inputs, **attributes))


def test_a_route_has_ids_and_weights(ops):
    given = {"top_k": 2, "scoring": 1, "num_groups": 2, "top_groups": 1, "group_best": 2}
    given |= {"renormalize": 1, "epsilon": 1e-20, "minimum": 0.0, "factor": 2.5, "first_expert": 3}
    inputs = random(5, 12), random(8, 12), None, random(8)
    ids, weights = ops.moe_route(*map(tensor, inputs), **given)
    expected_ids, expected = cpu.moe_route(*inputs, **given)
    assert ids.numpy().dtype == np.int32 and np.array_equal(ids.numpy(), expected_ids)
    assert np.array_equal(weights.numpy(), expected)


def test_residual_is_changed_in_place(ops):
    x, residual, weight = random(3, 16), random(3, 16) + 1, random(16)
    given = tensor(residual)
    y, same = ops.add_rms_norm(tensor(x), given, tensor(weight), epsilon=1e-6)
    expected, residual = cpu.add_rms_norm(x, residual, weight, epsilon=1e-6)
    assert np.array_equal(y.numpy(), expected)
    assert np.array_equal(given.numpy(), residual)
    assert np.array_equal(same.numpy(), residual)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_cache_is_changed_in_place(ops, dtype):
    batch = PagedBatch([0, 5], [9, 1], dtype=dtype)
    cache = tensor(batch.kv_cache)
    arrays = (batch.query_starts, batch.context_lens, batch.block_tables)
    given = (tensor(batch.qkv), tensor(batch.cos_sin), cache, *map(tensor, arrays), None)
    out, _ = ops.paged_attention(*given, **batch.attributes)
    expected = batch.run(cpu, batch.kv_cache)
    assert np.array_equal(out.numpy(), expected)
    found = cache.view("int16").numpy().view(np.uint16) if dtype == "bf16" else cache.numpy()
    assert np.array_equal(found, batch.kv_cache)


def test_a_wrong_shape_is_named(ops):
    with pytest.raises(Exception, match=r"rms_norm: weight has shape \(7\), needs \(8\)"):
        ops.rms_norm(tensor(random(2, 8)), tensor(random(7)), epsilon=1e-6)
    with pytest.raises(TypeError, match="rms_norm: attributes are epsilon, not eps"):
        ops.rms_norm(tensor(random(2, 8)), tensor(random(8)), eps=1e-6)


def test_ops_can_be_exported_and_served(ops, tmp_path):
    """paddle.jit.save writes them, Paddle Inference runs them with another number of tokens."""

    class Net(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.weight = self.create_parameter([6, 8], dtype="bfloat16")

        def forward(self, x, residual):
            y, residual = ops.add_rms_norm(x, residual, paddle.ones([8]), epsilon=1e-6)
            return ops.linear(y, self.weight) + residual.sum()

    net = Net()
    weight = to_bf16(random(6, 8))
    net.weight.set_value(tensor(weight))
    specs = [paddle.static.InputSpec([None, 8], "float32", name) for name in ("x", "residual")]
    paddle.jit.save(paddle.jit.to_static(net, input_spec=specs, full_graph=True), str(tmp_path / "model"))
    config = paddle.inference.Config(str(tmp_path / "model.json"), str(tmp_path / "model.pdiparams"))
    config.disable_glog_info()
    predictor = paddle.inference.create_predictor(config)
    for rows in (1, 5):
        x, residual = random(rows, 8), random(rows + 1, 8)[:rows]
        (found,) = predictor.run([tensor(x), tensor(residual)])
        y, residual = cpu.add_rms_norm(x, residual.copy(), np.ones(8, np.float32), epsilon=1e-6)
        assert np.allclose(found.numpy(), cpu.linear(y, weight) + residual.sum(), atol=1e-5)


def test_a_file_of_parameters_is_the_one_that_paddle_writes(tmp_path):
    stored = {
        "a.weight": random(300, 2),
        "a.weight_scale": to_bf16(random(300)),
        "b": np.arange(-5, 5, dtype=np.int8).reshape(2, 5),
        "c": np.arange(200, dtype=np.uint8),
    }

    class Net(paddle.nn.Layer):
        def forward(self, x):
            return [x, *(each + each for each in self.kept)]

    net = Net()
    net.kept = [EagerParamBase.from_tensor(tensor(array), name=name, trainable=False) for name, array in stored.items()]
    for name, parameter in zip("pqrs", net.kept, strict=True):
        net.add_parameter(name, parameter)
    specs = [paddle.static.InputSpec([None, 8], "float32", "x")]
    paddle.jit.save(paddle.jit.to_static(net, input_spec=specs, full_graph=True), str(tmp_path / "model"))
    write_params(tmp_path / "ours", stored.items())
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "model.pdiparams").read_bytes()
