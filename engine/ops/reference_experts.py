"""The definition of the ops of a mixture of experts, in numpy. `engine.ops.reference` has them under their names.

The matrices of the experts are stacked along their rows. Each format of matrices is that of a linear op.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.ops.catalogue_experts import GELU_GATE, SIGMOID, SOFTMAX_OF_CHOSEN

Product = Callable[..., np.ndarray]  # a linear op


def moe_route(  # noqa: PLR0913 - the inputs of the catalogue, in its order
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    choice_bias: np.ndarray | None = None,
    *,
    top_k: int,
    scoring: int,
    num_groups: int,
    top_groups: int,
    group_best: int,
    renormalize: int,
    epsilon: float,
    minimum: float,
    factor: float,
    first_expert: int,
) -> tuple[np.ndarray, np.ndarray]:
    logits = (x.astype(np.float64) @ weight.T + (0 if bias is None else bias)).astype(np.float32)
    scores = logits if scoring == SOFTMAX_OF_CHOSEN else (_sigmoid if scoring == SIGMOID else _softmax)(logits)
    choice = scores if choice_bias is None else scores + choice_bias  # in float32: ties are part of the definition
    choice = np.where(np.isnan(choice), np.float32(-np.inf), choice)
    if num_groups > 1:
        grouped = choice.reshape(len(x), num_groups, len(weight) // num_groups)
        best = np.sort(grouped, axis=2)[:, :, ::-1][:, :, :group_best]
        total = best[:, :, 0]
        for rank in range(1, group_best):
            total = total + best[:, :, rank]
        is_kept = np.zeros(total.shape, bool)
        np.put_along_axis(is_kept, _largest(total, top_groups), True, axis=1)
        choice = np.where(is_kept[:, :, None], grouped, np.float32(-np.inf)).reshape(choice.shape)
    ids = _largest(choice, top_k)
    weights = np.take_along_axis(scores, ids, axis=1)
    if scoring == SOFTMAX_OF_CHOSEN:
        weights = _softmax(weights)
    if renormalize:
        wide = weights.astype(np.float64)
        weights = wide / np.maximum(wide.sum(axis=1, keepdims=True) + epsilon, minimum)
    return (ids - first_expert).astype(np.int32), (weights * np.float64(factor)).astype(np.float32)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the largest values of each row, the largest first, of equal ones the lower id first."""
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


def _softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def expert_ops(product: Product) -> tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]:
    """Return `expert_gate_up` and `expert_down` of the format in which `product` takes its weight."""

    def gate_up(  # noqa: PLR0913 - the inputs of the catalogue, in its order
        x: np.ndarray,
        topk_ids: np.ndarray,
        *stored: np.ndarray | None,
        num_experts: int,
        activation: int,
        limit: float,
        alpha: float,
        offset: float,
    ) -> np.ndarray:
        each = np.repeat(x[:, None], topk_ids.shape[1], axis=1)
        gate, up = np.split(_products(product, each, topk_ids, stored, num_experts).astype(np.float64), 2, axis=2)
        if limit > 0:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        if activation == GELU_GATE:
            h = up * gate / (1 + np.exp(-2 * 0.79788456 * (gate + 0.044715 * gate**3)))
        else:
            h = (up + offset) * gate / (1 + np.exp(-alpha * gate))
        return h.astype(np.float32).reshape(len(x), h.shape[1] * h.shape[2])

    def down(
        h: np.ndarray,
        topk_ids: np.ndarray,
        topk_weights: np.ndarray,
        *stored: np.ndarray | None,
        num_experts: int,
    ) -> np.ndarray:
        each = h.reshape(*topk_ids.shape, h.shape[1] // topk_ids.shape[1])
        products = _products(product, each, topk_ids, stored, num_experts).astype(np.float64)
        return (products * topk_weights[:, :, None]).sum(axis=1).astype(np.float32)

    return gate_up, down


def _products(
    product: Product, x: np.ndarray, topk_ids: np.ndarray, stored: tuple[np.ndarray | None, ...], num_experts: int
) -> np.ndarray:
    """Return the products [T, top_k, N] of the rows `x` [T, top_k, K] with the matrices of their experts. Those of
    experts that this rank does not have are zeros."""
    stacks = [None if each is None else each.reshape(num_experts, -1, *each.shape[1:]) for each in stored]
    assert stacks[0] is not None
    products = np.zeros((*topk_ids.shape, stacks[0].shape[1]), np.float32)
    for expert in np.intersect1d(topk_ids, np.arange(num_experts)):
        is_of_expert = topk_ids == expert
        of_expert = [None if each is None else each[expert] for each in stacks]
        products[is_of_expert] = product(x[is_of_expert], *of_expert)
    return products


def add_gated(x: np.ndarray, y: np.ndarray, hidden: np.ndarray, weight: np.ndarray) -> np.ndarray:
    gate = hidden.astype(np.float64) @ weight[0]
    return (x + y / (1 + np.exp(-gate[:, None]))).astype(np.float32)
