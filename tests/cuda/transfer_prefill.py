"""Process of a prefill instance for tests. Writes its port and computes until its standard input is closed.

`python -m tests.cuda.transfer_prefill GRAPH_DIR NUM_BLOCKS SETTINGS`
"""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path

from engine.core.loop import EngineLoop
from engine.executors import make_host
from engine.settings.config import Config
from tests.pure.transfer_pair import serve


def main() -> None:
    graph_dir, num_blocks, settings = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    config = Config(**settings["config"])
    executor = make_host(graph_dir, config)
    executor.allocate(num_blocks)
    loop = EngineLoop(executor, num_blocks, config)
    sys.stdout.write(f"{serve(loop, shares=settings['shares']).port}\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        loop.step()
        if loop.is_idle and not loop.jobs.num_open:
            select.select([sys.stdin], [], [], 0.001)


if __name__ == "__main__":
    main()
