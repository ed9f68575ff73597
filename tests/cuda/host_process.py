"""One host of a model on two, as a process tree of its own:

    python -m tests.cuda.host_process GRAPH_DIR HOST PORT NUM_RANKS PROMPTS SETTINGS

The master prints the answers as JSON, then computes until it is killed. PROMPTS is a JSON list of prompts and, last, of
the number of tokens of an answer; SETTINGS is a JSON object of fields of `Config`. The hosts have the addresses
127.0.0.1 and 127.0.0.2."""

import dataclasses
import json
import logging
import sys
from pathlib import Path

from engine.core.loop import EngineLoop
from engine.errors import HostLost, SetupError
from engine.executors import memory
from engine.executors.distributed.hosts import follow, lead
from engine.log import configure
from tests.cuda.test_executor import SETTINGS, generate


def main() -> int:
    graph_dir, host, port, num_ranks, prompts, settings = sys.argv[1:]
    configure("INFO")
    report = logging.getLogger(__name__).info
    memory.with_device = lambda config: config  # with the interpreter the CPU is the device of every rank
    config = dataclasses.replace(
        SETTINGS, device="gpu", mp_num=int(num_ranks), mp_nnode=2, pod_ips="127.0.0.1,127.0.0.2",
        host_ip=f"127.0.0.{int(host) + 1}", inter_node_port=int(port), **json.loads(settings),
    )  # fmt: skip
    try:
        if not config.machines.is_master:
            follow(Path(graph_dir), config, report)
        executor = lead(Path(graph_dir), config, report)
        loop = EngineLoop(executor, memory.allocate_cache(executor, config, 512), config)
        cases = json.loads(prompts)
        count = cases.pop()
        sys.stdout.write(json.dumps(generate(loop, cases, max_new_tokens=count)) + "\n")
        sys.stdout.flush()
        while True:
            generate(loop, [[1, 2, 3]], max_new_tokens=50)
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status if isinstance(error, HostLost) else 1


if __name__ == "__main__":
    sys.exit(main())
