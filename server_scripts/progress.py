"""What the one who starts a server gets to read while it comes up. Knows words, decides nothing."""

from __future__ import annotations

import os
import sys
import time

from server_scripts import logs
from server_scripts.child import Child
from server_scripts.processes import ENGINE, TRITONSERVER
from server_scripts.supervisor import Supervisor

NEWS_EVERY_S = 10.0  # silence would look like a hang
NUM_LAST_LINES = 15


class Told:
    """Lines with the seconds since the start. Raises BrokenPipeError when their reader has left."""

    def __init__(self, fd: int | None, started: float):
        self._file = sys.stdout if fd is None else os.fdopen(fd, "w")
        self.started = started  # monotonic seconds

    def __call__(self, text: str) -> None:
        first, *others = text.splitlines()
        lines = [f"[{time.monotonic() - self.started:6.1f} s] {first}", *(f"           {line}" for line in others)]
        self._file.write("\n".join(lines) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not sys.stdout:
            self._file.close()


class Progress:
    """Called at every tick of the start; speaks when there is news, or has been none for a while."""

    def __init__(self, supervisor: Supervisor, told: Told):
        self._supervisor = supervisor
        self._told = told
        self._text = ""
        self._told_at = 0.0

    def __call__(self) -> None:
        text, awaited = self._step()
        if text != self._text:
            self._text = text
        elif time.monotonic() - self._told_at > NEWS_EVERY_S:
            text = "\n".join([text, *(line[:160] for line in self._last_lines(awaited, 1))])
        else:
            return
        self._told_at = time.monotonic()
        self._told(text)

    def failed(self, reason: str) -> None:
        """The reason and the end of the log of whose fault it seems to be."""
        children = self._supervisor.children
        guilty = next((child for child in children if reason.startswith(f"{child.spec.name} ")), None)
        guilty = guilty or self._step()[1]
        lines = [f"failed: {reason}"]
        if guilty:
            lines.append(f"the end of {guilty.spec.log_path}:")
            lines += [f"  {line}" for line in self._last_lines(guilty, NUM_LAST_LINES)]
        try:
            self._told("\n".join(lines))
        except BrokenPipeError:
            pass

    def _step(self) -> tuple[str, Child | None]:
        """What is waited for now, and on which process it depends."""
        seen, named = self._supervisor.seen, self._supervisor.named
        if not seen.is_live:
            return "starting the engine and tritonserver", named(TRITONSERVER)
        if seen.state is None:
            return "tritonserver is up, waiting for its model", named(TRITONSERVER)
        if not seen.state.get("ready"):
            return f"tritonserver is up, {seen.state.get('reason') or 'its model is not ready'}", named(ENGINE)
        return "the engine is ready, sending a request to every port", named(ENGINE)

    def _last_lines(self, child: Child | None, num_lines: int) -> list[str]:
        return logs.tail(child.spec.log_path, num_lines) if child else []
