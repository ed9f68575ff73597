"""Triton Python-backend model: passes requests from Triton to the service and responses back.

It converts tensors to bytes and bytes to tensors. Scheduling, tokens and sockets are handled elsewhere.
"""

import os
import sys

# Triton's interpreter is isolated: it ignores PYTHONPATH and virtual environments. The supervisor passes the import
# path in this variable.
sys.path[:0] = os.environ["LLM_SERVER_SYS_PATH"].split(os.pathsep)

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402

from engine.garbage import OF_REQUESTS, collect_garbage_seldom  # noqa: E402
from engine.log import configure  # noqa: E402
from engine.serving.build import build_service  # noqa: E402
from engine.serving.metrics import MetricsThread  # noqa: E402
from engine.settings.config import Config  # noqa: E402

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonSender:
    """Implementation of `engine.serving.reply.Sender` that writes to the response sender of one Triton request."""

    def __init__(self, response_sender):
        self._response_sender = response_sender

    def send(self, payload, final):
        """Send `payload` (bytes) as the output tensor OUT. `final` marks the last response of the request."""
        output = pb_utils.Tensor("OUT", np.array([payload], dtype=np.object_))
        self._response_sender.send(pb_utils.InferenceResponse([output]), flags=FINAL if final else 0)

    def is_cancelled(self):
        """Return True if the client has cancelled the request or disconnected."""
        return self._response_sender.is_cancelled()


class TritonPythonModel:
    """Entry point of Triton's Python backend. It owns the service and the thread that exports metrics."""

    def initialize(self, args):
        """Start the service from the environment's settings. `args` of Triton are not used."""
        config = Config.from_env()
        configure(config.log_level)
        self.drain_timeout_s = config.drain_timeout_s
        self.service = build_service(config)
        self.metrics = MetricsThread(self.service, config.max_running, pb_utils)
        collect_garbage_seldom(OF_REQUESTS)

    def execute(self, requests):
        """Submit each Triton request to the service. Responses are sent later, through the response senders."""
        for request in requests:
            sender = TritonSender(request.get_response_sender())
            # Triton reuses the input's memory as soon as this function returns, so the bytes are copied now.
            payload = bytes(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)[0])
            self.service.submit(payload, sender)
        return None  # decoupled model: responses go through the response sender

    def finalize(self):
        """Drain running requests for at most DRAIN_TIMEOUT, then stop the service and the metrics thread."""
        self.service.close(self.drain_timeout_s)
        self.metrics.close()
