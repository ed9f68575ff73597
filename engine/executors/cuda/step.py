"""A launched step on a GPU, from its launch until its tokens are on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.core.types import Batch, StepOutput
from engine.executors.cuda.host_transfers import Download
from engine.executors.cuda.model_runner import ModelRunner
from engine.executors.cuda.prompt_outputs import StepPromptOutputs
from engine.executors.cuda.sampling import fields_to_send
from engine.executors.slots import Choices
from engine.ops.sampling_rows import SampledRows, SamplingRows

NO_CHOICES = Choices([], [], None)


class CudaStep:
    """Launched step. Its tokens are sampled once its mask has arrived, if it needs one."""

    def __init__(self, runner: ModelRunner, batch: Batch):
        """Launch a step, whose rows have been placed in the slots of the runner."""
        self._runner, self._batch, slots = runner, batch, runner.slots
        self._choices = choices = Choices.of(batch) if runner.samples else NO_CHOICES
        self._rows = slots.sampling_rows(choices) if choices.slots else SamplingRows.greedy(0)
        self._prompt_outputs: StepPromptOutputs | None = None
        fields = fields_to_send(self._rows) if choices.slots else {}
        if batch.has_prompt_outputs and runner.samples:
            self._prompt_outputs = StepPromptOutputs(slots.pooled_states.specs(batch))
            fields |= self._prompt_outputs.fields_to_send()
        self._launched = runner.launch(batch, choices, fields)
        outputs, sent, _ = self._launched
        if self._prompt_outputs:
            self._prompt_outputs.begin(outputs, sent)
        wanted = slice(len(choices.slots)) if choices.logit_rows is None else choices.logit_rows
        self._logits = outputs.logits[wanted]
        self._download: Download | None = None
        if not choices.slots:
            self._download = Download({}, runner.device)
            return
        slots.count_expected_tokens(choices)
        if not batch.has_mask:
            self._sample()

    def drafts(self) -> Mapping[int, Sequence[int]]:
        return {}

    def mask(self, bits: np.ndarray) -> None:
        self._rows.mask = bits
        self._sample()

    def result(self) -> StepOutput:
        assert self._download, "the step waits for its mask"
        arrays, output = self._download.wait(), StepOutput([], [])
        if arrays:
            sampled = SampledRows.empty(len(self._logits), 0)
            for name, array in arrays.items():
                setattr(sampled, name, array)
            output = self._runner.slots.accept(self._batch, self._choices, self._rows, sampled)
        return output._replace(prompt_outputs=self._prompt_outputs.result()) if self._prompt_outputs else output

    def _sample(self) -> None:
        self._download = self._runner.sample(self._logits, self._rows, self._launched)
