"""Adapter of the functions of engine.ops.cuda, or of a similar module, to numpy arrays in and out as in
engine.ops.reference, and the distance of their results from the expected ones."""

import ml_dtypes  # noqa: F401 - lets numpy know bfloat16
import numpy as np
import torch

from engine.ops import cuda

BF16_STEP = 2**-7  # the relative distance of neighbours, at most


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def assert_close(found, expected, tolerance=2e-6):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max(initial=0) <= tolerance * max(1, np.abs(expected).max(initial=0))


def distance(found, expected):
    """Return the distance of a tensor from an array, relative to the array, over all elements."""
    found = found.float().cpu().numpy()
    assert found.shape == expected.shape
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def tensor(value, device, dtype=None):
    """Return an array as a tensor: uint16 as bfloat16, float32 as `dtype`. Other values are returned as they are."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == np.uint16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16).to(device)
    made = torch.from_numpy(np.ascontiguousarray(value)).to(device, copy=True)
    return made.to(dtype) if dtype is not None and made.dtype == torch.float32 else made


def array(value):
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).cpu().numpy().view(np.uint16)
    return value.cpu().numpy()


def as_on_device(cache):
    """Return a cache of int8 rows, each with the two bytes of its scale, in the layout of the GPU
    (engine/ops/cuda/int8_cache.py).
    """
    num_blocks = len(cache)
    scales = np.ascontiguousarray(cache[..., -2:]).view(np.int16)[..., 0]  # [blocks, 2, heads, positions]
    parts = cache[..., :-2], np.stack((scales[:, 0], scales[:, 1]), axis=-1)
    flat = [np.ascontiguousarray(part).reshape(num_blocks, -1).view(np.int8) for part in parts]
    return np.concatenate(flat, axis=1).reshape(cache.shape)


def as_in_catalogue(cache):
    num_blocks, two, heads, positions, stored = cache.shape
    flat = cache.reshape(num_blocks, -1)
    end = two * heads * positions * (stored - 2)
    codes = flat[:, :end].reshape(num_blocks, two, heads, positions, stored - 2)
    pairs = np.ascontiguousarray(flat[:, end:]).view(np.int16).reshape(num_blocks, heads, positions, 2)
    scales = np.ascontiguousarray(np.moveaxis(pairs, 3, 1))[..., None].view(np.int8)
    return np.concatenate((codes, scales), axis=-1)


class Ops:
    """Ops of a device that take and return arrays. In-place inputs are updated in place, as in the reference."""

    def __init__(self, device, ops=cuda):
        self._device, self._ops = device, ops

    def __getattr__(self, op):
        def run(*inputs, **attributes):
            has_int8_cache = op == "paged_attention" and inputs[2].dtype == np.int8
            arrays = [as_on_device(each) if has_int8_cache and n == 2 else each for n, each in enumerate(inputs)]
            given = [tensor(value, self._device) for value in arrays]
            results = getattr(self._ops, op)(*given, **attributes)
            if not isinstance(results, tuple):
                return array(results)
            first, updated = results
            place = next(at for at, each in enumerate(given) if each is updated)
            inputs[place][...] = as_in_catalogue(array(updated)) if has_int8_cache else array(updated)
            return array(first), inputs[place]

        return run
