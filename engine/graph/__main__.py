"""Prints a graph, one line per node: python -m engine.graph MODEL_DIR [--rank N]."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from engine.errors import SetupError
from engine.graph import Graph, load


def lines(graph: Graph) -> Iterator[str]:
    """Yield one line per input, node and output. Parameters are shown by their names, other values by their ids."""
    names = {value.id: name for name, value in graph.parameters.items()}
    for name, value in graph.inputs.items():
        yield f"{value} = input {name}"
    for node in graph.nodes:
        outputs = ", ".join(str(value) for value in node.outputs)
        inputs = ", ".join("-" if v is None else names.get(v.id, f"%{v.id}") for v in node.inputs)
        attributes = "".join(f" {name}={value:g}" for name, value in sorted(node.attributes.items()))
        updates = "" if node.updated is None else f" updates %{node.updated.id}"
        yield f"{outputs} = {node.op}({inputs}){attributes}{updates}"
    for name, value in graph.outputs.items():
        yield f"output {name} {value}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.graph", description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    given = parser.parse_args()
    try:
        graph, params = load(given.model_dir, given.rank)
    except SetupError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    for line in lines(graph):
        print(line)  # noqa: T201
    num_bytes = sum(array.nbytes for array in params.values())
    print(f"{len(graph.nodes)} nodes, {len(params)} parameters, {num_bytes / 1e6:.1f} MB")  # noqa: T201
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe, as after `| head`, ends it without an error
    sys.exit(main())
