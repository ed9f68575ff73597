"""Triton's side of the server: tensors in, responses out. No scheduling, no tokens, no sockets here."""

import os
import sys

# Triton's interpreter is isolated: it ignores PYTHONPATH and virtual environments. The supervisor says where we live.
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
    """engine.serving.reply.Sender over one request's response sender."""

    def __init__(self, response_sender):
        self._response_sender = response_sender

    def send(self, payload, final):
        output = pb_utils.Tensor("OUT", np.array([payload], dtype=np.object_))
        self._response_sender.send(pb_utils.InferenceResponse([output]), flags=FINAL if final else 0)

    def is_cancelled(self):
        return self._response_sender.is_cancelled()


class TritonPythonModel:
    def initialize(self, args):
        config = Config.from_env()
        configure(config.log_level)
        self.drain_timeout_s = config.drain_timeout_s
        self.service = build_service(config)
        self.metrics = MetricsThread(self.service, config.batch_size, pb_utils)
        collect_garbage_seldom(OF_REQUESTS)

    def execute(self, requests):
        for request in requests:
            sender = TritonSender(request.get_response_sender())
            # The input's memory is Triton's again as soon as we return: copy it out now.
            payload = bytes(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)[0])
            self.service.submit(payload, sender)
        return None  # decoupled: every answer goes through its sender

    def finalize(self):
        self.service.close(self.drain_timeout_s)
        self.metrics.close()
