"""What a step tells of prompts, found on the device: how likely their tokens were, and their hidden states."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engine.core.types import OfPrompt
from engine.executors.cuda.program import Outputs
from engine.executors.cuda.transfer import Download
from engine.executors.readings import Asked, rows_scored, told
from engine.ops.cuda.sampler import report
from engine.ops.sampling_rows import SampledRows


class StepReading:
    def __init__(self, asked: Asked):
        self._asked, self._rows = asked, rows_scored(asked)
        self._num_scored = len(self._rows.temperature)
        self._num_pooled = sum(reading.num_pooled for reading, _ in asked)
        self._download: Download | None = None

    def fields_to_send(self) -> dict[str, np.ndarray]:
        assert self._rows.given is not None
        return {"scored": self._rows.given, "num_scored_logprobs": self._rows.num_logprobs}

    def begin(self, outputs: Outputs, sent: Mapping[str, Tensor]) -> None:
        """`outputs`: those of the scored rows and then of the pooled ones are the last."""
        hidden = outputs.hidden[len(outputs.hidden) - self._num_pooled :].to(torch.float32)
        first = len(outputs.logits) - self._num_pooled - self._num_scored
        logits = outputs.logits[first : first + self._num_scored]
        found = report(logits, sent["scored"], sent["num_scored_logprobs"], self._rows.max_logprobs)
        self._download = Download.of({"hidden": hidden, **found}, hidden.device)

    def result(self) -> list[OfPrompt]:
        assert self._download and self._rows.given is not None
        arrays = self._download.wait()
        sampled = SampledRows(self._rows.given, arrays["logprobs"], arrays["top_ids"], arrays["top_logprobs"])
        return told(self._asked, sampled, arrays["hidden"])
