"""Products that are summed over all ranks. The programs that compute the product of one row write it into the memory
of the other ranks, so that it is on its way before the kernel that adds up begins."""

from __future__ import annotations

from torch import Tensor

from engine.ops.cuda import experts, group, one_shot_all_reduce, products
from engine.ops.cuda.experts_few import sends
from engine.ops.cuda.one_shot_all_reduce import PeerBuffers


def linear_all_reduce_add_rms_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Compute `linear`, `all_reduce` and `add_rms_norm`."""
    to = group.peers_of(residual) if len(x) == 1 else None
    return _add_norm(products.linear(x, weight, bias, to), residual, norm_weight, epsilon, to)


def linear_add_all_reduce_add_rms_norm(  # noqa: PLR0913 - as the ops
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    *,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Compute `linear_add`, `all_reduce` and `add_rms_norm`."""
    to = group.peers_of(residual) if len(x) == 1 and bias is None else None
    return _add_norm(products.linear_add(x, weight, bias, z, to), residual, norm_weight, epsilon, to)


def expert_down_all_reduce_add_rms_norm(
    h: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    *,
    num_experts: int,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Compute `expert_down`, `all_reduce` and `add_rms_norm`."""
    to = group.peers_of(residual) if sends(topk_ids) else None
    y = experts.expert_down(h, topk_ids, topk_weights, weight, bias, num_experts=num_experts, to=to)
    return _add_norm(y, residual, norm_weight, epsilon, to)


def _add_norm(
    y: Tensor, residual: Tensor, weight: Tensor, epsilon: float, sent_to: PeerBuffers | None
) -> tuple[Tensor, Tensor]:
    if sent_to is None:
        return group.all_reduce_add_rms_norm(y, residual, weight, epsilon=epsilon)
    return one_shot_all_reduce.all_reduce(sent_to, y, residual, weight, epsilon, is_sent=True), residual
