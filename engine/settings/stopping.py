"""The announced end of the Triton model, in a file of the run directory, written by the supervisor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Stopping:
    """Times are seconds of the monotonic clock."""

    refuse_at: float  # from then on
    why: str = "the server is stopping"
    end_at: float | None = None  # when the open ones are ended; None: DRAIN_TIMEOUT later

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Stopping:
        return cls(**json.loads(text))
