"""Answers what it was asked, piece by piece, and a probe with its readiness."""

import json
import os
import sys

sys.path[:0] = os.environ["LLM_SERVER_SYS_PATH"].split(os.pathsep)

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402

from engine import wire  # noqa: E402


def respond(sender, answer):
    output = pb_utils.Tensor("OUT", np.array([wire.write_answer(answer)], dtype=np.object_))
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if answer.is_end else 0
    sender.send(pb_utils.InferenceResponse([output]), flags=flags)


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            [body] = json.loads(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            for word in body.get("text", "").split():
                respond(sender, wire.Delta("", word, [], 0, wire.Usage(), 0))
            respond(sender, wire.ModelState(ready=True, reason=f"Python {sys.version_info[:2]}"))
