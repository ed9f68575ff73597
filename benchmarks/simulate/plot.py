"""Plot of simulated latencies against the load, as an SVG file.

python -m benchmarks.simulate.plot docs/simulation.svg
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.simulate.__main__ import DEMO_MODEL
from benchmarks.simulate.replicas import Cluster, simulate
from benchmarks.simulate.traffic import arrivals

RATES, NUM_REPLICAS, SECONDS = (5, 10, 20, 40, 60, 80, 100), (1, 3), 20.0
COLORS = ("#c0392b", "#2471a3")  # by number of replicas
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 320, 60, 280, 20
LOW_MS, HIGH_MS = 5.0, 5000.0


def place(rate: float, milliseconds: float) -> tuple[float, float]:
    """Return the coordinates of a point; the vertical axis is logarithmic."""
    share = math.log(min(max(milliseconds, LOW_MS), HIGH_MS) / LOW_MS) / math.log(HIGH_MS / LOW_MS)
    return LEFT + (WIDTH - LEFT - 150) * rate / max(RATES), BOTTOM - (BOTTOM - TOP) * share


def lines() -> Iterator[str]:
    """Yield the elements of the plot."""
    for milliseconds in (5, 10, 50, 100, 500, 1000, 5000):
        y = place(0, milliseconds)[1]
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - 150}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{milliseconds} ms</text>'
    for rate in RATES:
        yield f'<text x="{place(rate, 5)[0]:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{rate}</text>'
    yield f'<text x="{LEFT}" y="{BOTTOM + 34}">requests per second, of all replicas together</text>'
    for count, color in zip(NUM_REPLICAS, COLORS, strict=True):
        results = [simulate(Cluster(count, DEMO_MODEL), arrivals(0, rate, SECONDS, 64)) for rate in RATES]
        for name, dashes in (("ttft", "4 3"), ("e2e", "none")):
            medians = [1e3 * statistics.median(getattr(result, f"{name}_s")) for result in results]
            points = [place(*point) for point in zip(RATES, medians, strict=True)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            style = f'fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"'
            yield f'<polyline points="{path}" {style}/>'
            label = f"{'first token' if name == 'ttft' else 'answer'}, {count}x"
            yield f'<text x="{points[-1][0] + 8:.1f}" y="{points[-1][1] + 4:.1f}" fill="{color}">{label}</text>'


if __name__ == "__main__":
    font = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>'
    text = "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *lines(), "</svg>", ""])
    Path(sys.argv[1]).write_text(text)
