"""The functions of engine.ops.cuda, or of one like it, as those of engine.ops.reference: numpy's arrays in and out."""

import ml_dtypes  # noqa: F401 - lets numpy know bfloat16
import numpy as np
import torch

from engine.ops import cuda


def tensor(value, device, dtype=None):
    """bf16 comes as uint16. `dtype`: of float32 arrays."""
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


class Ops:
    """In-place inputs are updated in place, as the reference does it."""

    def __init__(self, device, ops=cuda):
        self._device, self._ops = device, ops

    def __getattr__(self, op):
        def run(*inputs, **attributes):
            given = [tensor(value, self._device) for value in inputs]
            results = getattr(self._ops, op)(*given, **attributes)
            if not isinstance(results, tuple):
                return array(results)
            first, updated = results
            place = next(at for at, each in enumerate(given) if each is updated)
            inputs[place][...] = array(updated)
            return array(first), inputs[place]

        return run
