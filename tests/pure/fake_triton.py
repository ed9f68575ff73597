"""Replacement of the parts of Triton's `triton_python_backend_utils` that model.py and the metrics use, with the traps
of the real one.
"""

from __future__ import annotations

import types

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class Tensor:
    def __init__(self, name, array):
        self.name, self.array = name, array

    def as_numpy(self):
        return self.array


class InferenceResponse:
    def __init__(self, output_tensors, error=None):
        self.output_tensors, self.error = output_tensors, error


class ResponseSender:
    def __init__(self):
        self.sent = []  # payload, flags
        self.cancelled = False

    def send(self, response, flags=0):
        assert not self.is_over, "Triton: the response sender is closed"
        [output] = response.output_tensors
        assert (output.name, output.array.dtype, output.array.shape) == ("OUT", np.object_, (1,))
        self.sent.append((output.array[0], flags))

    def is_cancelled(self):
        assert not self.is_over, "Triton crashes here"
        return self.cancelled

    @property
    def is_over(self):
        return any(flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL for _, flags in self.sent)


class Request:
    """Request with one input. Its memory belongs to Triton again when `execute` has returned."""

    def __init__(self, payload):
        self.memory = bytearray(payload)
        array = np.empty(1, np.object_)
        array[0] = memoryview(self.memory)
        self.inputs = {"IN": Tensor("IN", array)}
        self.response_sender = ResponseSender()

    def get_response_sender(self):
        return self.response_sender

    def take_memory_back(self):
        self.memory[:] = bytes(len(self.memory))


def get_input_tensor_by_name(request, name):
    return request.inputs[name]


class Metric:
    def __init__(self, kind):
        self.kind, self.value, self.calls = kind, 0.0, 0

    def increment(self, amount):
        assert self.kind == MetricFamily.COUNTER
        assert amount >= 0, "Triton: a counter never falls"
        self.value += amount
        self.calls += 1

    def set(self, value):
        assert self.kind == MetricFamily.GAUGE
        self.value = value
        self.calls += 1


class MetricFamily:
    COUNTER, GAUGE = 1, 2
    made: dict[str, MetricFamily] = {}  # by name

    def __init__(self, name, description, kind):
        assert name not in self.made, f"Triton: {name} exists already"
        self.description, self.kind = description, kind
        self.metrics: dict[tuple, Metric] = {}  # by labels
        self.made[name] = self

    def Metric(self, labels):
        key = tuple(labels.items())
        assert key not in self.metrics
        self.metrics[key] = Metric(self.kind)
        return self.metrics[key]


def as_module() -> types.ModuleType:
    module = types.ModuleType("triton_python_backend_utils")
    module.__dict__.update({name: value for name, value in globals().items() if not name.startswith("__")})
    MetricFamily.made.clear()
    return module
