"""Vision encoder on the CPU: runs the tower of the model on one image after the other, in parts between the steps of
the decoder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from engine import graph
from engine.core.image_queue import EncodedPart
from engine.core.spans import PromptSpan
from engine.executors.cpu.program import CpuProgram, RowInputs
from engine.executors.image_inputs import ImageInputs
from engine.models.vision import PATCHES, SEGMENT_ENDS, TOKEN_ROWS, VISION_GRAPH
from engine.ops.cpu.library import Counts

# A part runs op by op until this time is over, so it may take as long as one op longer: that is the attention of a
# layer, 0.5 s for an image of 1512 x 1512 pixels in the tower of PaddleOCR-VL on two cores, about as long as a chunk
# of 512 tokens of its decoder. Longer parts would make others wait longer, and shorter ones gain nothing then.
PART_S = 0.1


class VisionProgram(CpuProgram):
    """Executable form of the graph of a tower, which can pause between two ops."""

    row_inputs = RowInputs(PATCHES, TOKEN_ROWS, SEGMENT_ENDS)

    def begin(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Take the inputs of an image."""
        self._counts: Counts = self._place(inputs)
        self._num_done = 0

    def advance(self, seconds: float) -> dict[str, np.ndarray] | None:
        """Run ops until the time is over. Return the outputs after the last one."""
        calls, deadline = self._bound(self._fused), time.monotonic() + seconds
        while self._num_done < len(calls.ends):
            start = calls.ends[self._num_done - 1] if self._num_done else 0
            self._kernels.run(calls.address + start, calls.ends[self._num_done] - start, self._counts)
            self._num_done += 1
            if time.monotonic() >= deadline and self._num_done < len(calls.ends):
                return None
        return self._outputs(calls, self._counts)

    def bytes_for(self, inputs: Mapping[str, np.ndarray]) -> int:
        """Return the memory of the inputs and values of an image, which is not allocated by that."""
        self._place(inputs)
        calls = self._bound(self._fused)
        own = {id(each) for each in (*self._params.values(), *self._inputs.values())}
        values = {array.ctypes.data: array.nbytes for array in calls.arrays.values() if id(array) not in own}
        return sum(values.values()) + sum(array.nbytes for array in self._inputs.values())


class CpuVisionEncoder:
    """Vision tower on the CPU. Its parts run in the thread of the executor's steps."""

    def __init__(self, graph_dir: Path, rank: int, thread: ThreadPoolExecutor):
        self._images, self._thread = ImageInputs(graph_dir), thread
        self.check = self._images.check
        self._program = VisionProgram(*graph.load(graph_dir, rank, VISION_GRAPH))
        self._span: PromptSpan | None = None
        self.reserved_bytes = self._program.bytes_for(self._images.of(self._images.largest()))

    def begin(self, span: PromptSpan) -> None:
        self._span, self._has_begun = span, False

    def advance(self) -> Future[EncodedPart]:
        return self._thread.submit(self._advance, self._span)

    def _advance(self, span: PromptSpan | None) -> EncodedPart:
        assert span
        started = time.monotonic()
        if not self._has_begun:
            self._program.begin(self._images.of(span))
            self._has_begun = True
        outputs = self._program.advance(PART_S)
        embeddings = None if outputs is None else np.concatenate(list(outputs.values()), axis=1).tobytes()
        ended = time.monotonic()
        return EncodedPart(embeddings, ended, ended - started)
