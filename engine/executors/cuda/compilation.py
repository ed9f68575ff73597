"""Compilation of Triton-language kernels before their first launch, in parallel, and a warning for each that was
missed.

Triton compiles a kernel when it is first launched with new types, constants or alignments, which takes 0.2 to 2 s each.
Its results are kept on disk (TRITON_CACHE_DIR, by default ~/.triton), so a later start only loads them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton

from engine.log import Report
from engine.ops.cuda import launch

log = logging.getLogger(__name__)


class KernelCompiler:
    """Collects the kernels that are missing while steps run, then compiles them."""

    def __init__(self, device: torch.device, report: Report):
        self._device, self._report = device, report
        self._missing: dict[tuple[int, str], tuple[Any, str]] = {}  # function and its specialization
        triton.knobs.runtime.jit_post_compile_hook = None  # removes the hook of an earlier executor

    def compile_missing(self, run: Callable[[], object]) -> None:
        """Compile the kernels that `run` launches, on all cores.

        `run` is called without those that are not compiled yet. The memory that such a kernel would have written is
        undefined, so the results must be discarded. Only indices are zeros (`launch.new_indices`).
        """

        def add(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            self._missing[id(fn.jit_function), key] = fn.jit_function, compile["specialization_data"]
            return True

        with _hook("jit_cache_hook", add), launch.recording():
            run()
        torch.cuda.synchronize(self._device)
        self._compile()

    def _compile(self) -> None:
        """Compile the collected kernels and report the progress."""
        total, started = len(self._missing), time.monotonic()
        if not total:
            return
        num_threads = min(total, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(num_threads, initializer=torch.cuda.set_device, initargs=(self._device,)) as pool:
            futures = [pool.submit(function.preload, data) for function, data in self._missing.values()]
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                self._report(f"compiling GPU kernels, {done} of {total} (kept for later starts)")
        self._missing.clear()
        log.info("%d GPU kernels compiled or loaded in %.1f s", total, time.monotonic() - started)


def warn_of_late_compilation() -> None:
    """Log every later compilation, because a request has to wait for it."""

    def warn(*, repr: str, **_: Any) -> None:
        log.warning("the kernel %s was compiled while requests waited for it", repr)

    triton.knobs.runtime.jit_post_compile_hook = warn


def expected() -> AbstractContextManager[None]:
    """Compile without a warning inside the context: no request waits."""
    return _hook("jit_post_compile_hook", None)


@contextlib.contextmanager
def _hook(name: str, function: Callable | None) -> Iterator[None]:
    """Set a runtime hook of Triton inside the context."""
    before = getattr(triton.knobs.runtime, name)
    setattr(triton.knobs.runtime, name, function)
    try:
        yield
    finally:
        setattr(triton.knobs.runtime, name, before)
