"""Vision encoder on a GPU: runs the tower of the model on one image after the other, in a thread and on a stream of its
own beside the steps of the decoder."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from engine.core.image_queue import EncodedPart
from engine.core.spans import PromptSpan
from engine.executors.cuda.host_transfers import Download, Uploads
from engine.executors.cuda.program import CudaProgram, Inputs
from engine.executors.image_inputs import ImageInputs
from engine.models.vision import EMBEDDINGS, PATCHES, SEGMENT_ENDS, WINDOW_ENDS
from engine.ops.cuda.vision import QueryTiles, query_tiles

PIXELS, TOKENS = "pixels", "tokens"  # arrays that are sent, but are no inputs of the tower
FEW = 1, 2  # tokens in each direction of the small images for which other kernels are compiled


class CudaVisionEncoder:
    """Vision tower on the GPU of the first rank. An image is one part, because its kernels share the GPU with those of
    the decoder's steps."""

    def __init__(self, program: CudaProgram, images: ImageInputs, device: torch.device, dtype: torch.dtype):
        """Take the program of the tower. `dtype`: of activations."""
        self._program, self._images, self._device = program, images, device
        self._colours = torch.from_numpy(images.processor.normalized).to(device, dtype).flatten()  # of 3 x 256 values
        self.check = images.check
        self._thread, self._uploads = ThreadPoolExecutor(1, "vision"), Uploads(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.num_bytes = 0  # memory of an image beside the parameters
        self._span: PromptSpan | None = None

    def begin(self, span: PromptSpan) -> None:
        self._span = span

    def advance(self) -> Future[EncodedPart]:
        if self._stream:
            return self._thread.submit(self._encode, self._span)
        part: Future[EncodedPart] = Future()  # the interpreter of kernels runs in one thread only
        part.set_result(self._encode(self._span))
        return part

    def warm_up(self) -> None:
        """Encode small images and the largest usual one, so that all kernels are compiled, and measure its memory."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        for span in (*map(self._images.square, FEW), self._images.largest()):
            self.begin(span)
            self.advance().result()
        self.num_bytes = torch.cuda.max_memory_allocated(self._device) - before

    def close(self) -> None:
        self._thread.shutdown()

    @torch.inference_mode()
    def _encode(self, span: PromptSpan | None) -> EncodedPart:
        assert span
        started = time.monotonic()
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            embeddings = torch.cat(self._program.run(self._inputs(span)), dim=1)
            found = Download.of({EMBEDDINGS: embeddings.float()}, self._device).wait()
        ended = time.monotonic()
        return EncodedPart(found[EMBEDDINGS].tobytes(), ended, ended - started)

    def _inputs(self, span: PromptSpan) -> Inputs:
        tokens, arrays = self._images.places(span)
        tiles = {name: query_tiles(array) for name, array in arrays.items() if name in (SEGMENT_ENDS, WINDOW_ENDS)}
        sent = self._uploads.send({**arrays, **tiles, PIXELS: self._images.pixels(span), TOKENS: tokens})
        patches = self._patches(sent.pop(PIXELS), sent.pop(TOKENS))
        return {**sent, **{name: QueryTiles(sent[name]) for name in tiles}, PATCHES: patches}

    def _patches(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        """Return what `ImageProcessor.patches` returns for the pixels u8 [height, width, 3], in the order of the
        tower."""
        processor, (height, width, _) = self._images.processor, pixels.shape
        size, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
        colours = self._colours[pixels.long() + torch.arange(0, 768, 256, device=self._device)]
        grid = colours.view(height // processor.unit, merge, size, width // processor.unit, merge, size, 3)
        patches = grid.permute(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
        values = patches.expand(*patches.shape[:5], frames, size, size).reshape(len(tokens), -1)
        return values[tokens].view(len(tokens) * merge**2, -1)
