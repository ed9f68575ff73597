"""Prompt outputs of a step, computed on the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engine.core.types import PromptOutputs
from engine.executors.cuda.host_transfers import Download
from engine.executors.cuda.program import Outputs
from engine.executors.prompt_outputs import Specs, make_outputs, scored_rows
from engine.ops.cuda.sampler import compute_logprobs
from engine.ops.sampling_rows import SampledRows


class StepPromptOutputs:
    """The prompt outputs of one step, from its launch until they are on the host."""

    def __init__(self, specs: Specs):
        self._specs, self._rows = specs, scored_rows(specs)
        self._num_scored = len(self._rows.temperature)
        self._num_pooled = sum(spec.num_pooled for spec, _ in specs)
        self._download: Download | None = None

    def fields_to_send(self) -> dict[str, np.ndarray]:
        """Return the arrays that `begin` needs on the device."""
        assert self._rows.given is not None
        return {"scored": self._rows.given, "num_scored_logprobs": self._rows.num_logprobs}

    def begin(self, outputs: Outputs, sent: Mapping[str, Tensor]) -> None:
        """Start to compute and download. The last rows of `outputs` belong to the scored tokens, followed by the pooled
        ones."""
        hidden = outputs.hidden[len(outputs.hidden) - self._num_pooled :].to(torch.float32)
        first = len(outputs.logits) - self._num_pooled - self._num_scored
        logits = outputs.logits[first : first + self._num_scored]
        found = compute_logprobs(logits, sent["scored"], sent["num_scored_logprobs"], self._rows.max_logprobs)
        self._download = Download.of({"hidden": hidden, **found}, hidden.device)

    def result(self) -> list[PromptOutputs]:
        """Wait for the download. Return the outputs of each row that has a `prompt_spec`."""
        assert self._download and self._rows.given is not None
        arrays = self._download.wait()
        sampled = SampledRows(self._rows.given, arrays["logprobs"], arrays["top_ids"], arrays["top_logprobs"])
        return make_outputs(self._specs, sampled, arrays["hidden"])
