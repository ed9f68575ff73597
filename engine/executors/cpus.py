"""Number of CPUs that this process may keep busy."""

from __future__ import annotations

import math
import os
from pathlib import Path


def num_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of CPUs in the process's affinity mask, or its container's CPU quota if that is less, rounded
    up.

    With more threads than the quota (`docker --cpus=2`), the threads would use up the quota and then all stop until the
    next period.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return allowed if quota is None else min(allowed, max(1, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Return the quota in CPUs, read from the files of cgroup v2 or v1, or None without a limit."""
    try:
        fields = (cgroup / "cpu.max").read_text().split()
    except OSError:
        try:
            fields = [(cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        except OSError:
            return None
    quota, period = fields
    return int(quota) / int(period) if quota.isdigit() else None  # "max" or -1 means no limit
