"""How many CPUs this process may keep busy."""

from __future__ import annotations

import math
import os
from pathlib import Path


def num_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Those it may run on, or the CPU time its container is given if that is less (`docker --cpus=2`), rounded up:
    more threads than that would use up the quota and then all stand still until the next period."""
    allowed = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return allowed if quota is None else min(allowed, max(1, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """In CPUs, from the files of cgroup 2 or 1; None: no limit."""
    try:
        fields = (cgroup / "cpu.max").read_text().split()
    except OSError:
        try:
            fields = [(cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        except OSError:
            return None
    quota, period = fields
    return int(quota) / int(period) if quota.isdigit() else None  # no limit is "max" or -1
