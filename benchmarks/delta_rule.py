"""Time of the gated delta rule alone on one GPU: `python -m benchmarks.delta_rule`.

States are compared with the recurrence in float64 first. Each case is a CUDA graph of a few layers, each with its
own state. The time of a whole layer contains the convolution before the rule and the gated norm behind it. The floor of
the rule is the larger of two times: that to read inputs and states and to write outputs and, in one of CHUNK steps,
states, and that of the products with the state, each as three TF32 products, which are as accurate as float32.
"""

from __future__ import annotations

import argparse
from types import ModuleType

import torch

from benchmarks.gpu import bandwidth
from benchmarks.gpu_times import microseconds as graph_time
from engine.ops import cuda
from engine.ops.catalogue_states import OPEN, conv_lines, delta_lines
from engine.ops.cuda import invariant
from engine.ops.cuda.delta_rule import CHUNK

K_HEADS, V_HEADS, WIDTH = 16, 32, 128
CASES = (1, 0, 8192), (8, 0, 1024), (1, 4096, 2048), (64, 1032, 4), (64, 1032, 1), (64, 1039, 1), (1, 1032, 1)
TF32X3 = 495e12 / 3  # operations per second of an H100 or H200


class Layer:
    """Inputs of the op for requests with `cached` tokens each, whose states are zeros, and `new` tokens."""

    def __init__(self, num_requests: int, cached: int, new: int, dtype: torch.dtype = torch.bfloat16, layers: int = 1):
        torch.manual_seed(0)
        num_tokens, channels = num_requests * new, (2 * K_HEADS + V_HEADS) * WIDTH
        self.first_line = conv_lines(channels, WIDTH)
        lines = self.first_line + delta_lines(K_HEADS, V_HEADS, WIDTH)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=dtype)

        def numbers(count: int, step: int) -> torch.Tensor:
            return torch.arange(count, dtype=torch.int32, device="cuda") * step

        self.rows = randn(num_tokens, channels), randn(num_tokens, 2 * V_HEADS)
        self.taps, self.gate = torch.randn(channels, 1, 4, device="cuda"), randn(num_tokens, V_HEADS * WIDTH)
        self.factors = torch.randn(V_HEADS, device="cuda") - 1, torch.randn(V_HEADS, device="cuda") - 1
        self.states = [torch.zeros(num_requests, 1, 1, lines, WIDTH, device="cuda") for _ in range(layers)]
        lens = torch.full((num_requests,), cached, dtype=torch.int32, device="cuda")
        self.where = numbers(num_requests + 1, new), lens, numbers(num_requests, 1).view(-1, 1)

    def run(self, ops: ModuleType, is_whole: bool = False) -> None:
        heads = {"num_k_heads": K_HEADS, "num_v_heads": V_HEADS, "head_dim": WIDTH, "first_line": self.first_line}
        (x, gates), weight = self.rows, torch.ones_like(self.factors[0])[:1].expand(WIDTH).contiguous()
        for state in self.states:
            where = state, *self.where
            given = gates, *self.factors, *where
            if is_whole and hasattr(ops, "gated_delta_net"):
                of_conv = x, self.taps, *where
                ops.gated_delta_net(*of_conv, *given, self.gate, weight, **heads, epsilon=1e-6)
            elif is_whole:
                qkv, _ = ops.causal_conv(x, self.taps, *where, head_dim=WIDTH)
                ops.gated_rms_norm(ops.gated_delta_rule(qkv, *given, **heads)[0], self.gate, weight, epsilon=1e-6)
            else:
                ops.gated_delta_rule(x, *given, **heads)


def recurrence(layer: Layer, num_tokens: int) -> torch.Tensor:
    """Compute the states of the only request behind `num_tokens` tokens in float64."""
    rows, factors = (each[:num_tokens].double() for each in layer.rows), (each.double() for each in layer.factors)
    (qkv, gates), (a_log, dt_bias) = rows, factors
    _, k, v = qkv.view(num_tokens, -1, WIDTH).split([K_HEADS, K_HEADS, V_HEADS], 1)
    k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(V_HEADS // K_HEADS, 1)
    beta = gates[:, :V_HEADS].sigmoid()
    decay = -a_log.exp() * torch.nn.functional.softplus(gates[:, V_HEADS:] + dt_bias)
    state = qkv.new_zeros(V_HEADS, WIDTH, WIDTH)
    for t in range(num_tokens):
        state *= decay[t].exp()[:, None, None]
        update = beta[t][:, None] * (v[t] - torch.einsum("hd,hde->he", k[t], state))
        state += k[t][:, :, None] * update[:, None]
    return state


def difference(ops: ModuleType, dtype: torch.dtype) -> float:
    """Return the distance of the states behind 688 tokens from the recurrence in float64, relative to their size."""
    layer = Layer(1, 0, 700, dtype)  # the last ones may be rejected, and are not in the state yet
    layer.run(ops)
    of_keys = layer.states[0].view(-1, WIDTH)[layer.first_line :].view(K_HEADS, -1, WIDTH)[:, OPEN:]
    found = of_keys.reshape(V_HEADS, -1, WIDTH)[:, :WIDTH]
    expected = recurrence(layer, 688)
    return ((found - expected).norm() / expected.norm()).item()


def microseconds(ops: ModuleType, num_requests: int, cached: int, new: int, is_whole: bool = False) -> float:
    layer = Layer(num_requests, cached, new, layers=2 if new > 4 else 8)
    return graph_time(lambda: layer.run(ops, is_whole)) / len(layer.states)


def floor(speed: float, num_requests: int, new: int) -> float:
    """Return the least time of the rule in microseconds."""
    tokens, states = num_requests * new, num_requests * V_HEADS * WIDTH**2 * 4
    moved = tokens * ((2 * K_HEADS + 2 * V_HEADS) * WIDTH + 2 * V_HEADS) * 2 + states * (1 + min(new / CHUNK, 1))
    return max(moved / speed, tokens * V_HEADS * 6 * WIDTH**2 / TF32X3) * 1e6


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}, {speed / 1e12:.2f} TB/s")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        print(f"{dtype}: difference of states from float64 {difference(invariant, dtype):.1e}")
    print("requests  cached     new   rule: us, BATCH_INVARIANT=1, floor   whole layer: us, BATCH_INVARIANT=1")
    for case in CASES:
        rule, layer = ([microseconds(ops, *case, is_whole) for ops in (cuda, invariant)] for is_whole in (False, True))
        times = *rule, floor(speed, case[0], case[2]), *layer
        print("{:8}{:8}{:8}".format(*case), *(f"{each:14.1f}" for each in times))


if __name__ == "__main__":
    main()
