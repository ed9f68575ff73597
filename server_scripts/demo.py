"""Command of `make demo`: starts the server with the bundled model and asks it three questions."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from engine.address import connect_host, in_url
from engine.errors import ConfigError
from engine.log import printable
from engine.settings.config import Config
from server_scripts.probe import Probe
from server_scripts.run_dir import RunDir, ServerState

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ("Who are you?", "What is the capital of France?", "What is 7 plus 5?")
HOW_TO_GO_ON = """
The server goes on running. Ask it yourself:

curl -N {url}/v1/chat/completions{header} \\
  -d '{{"text": "What is the capital of Japan?", "max_dec_len": 64, "temperature": 0, "stream": true}}'

{url} in a browser is a chat with it.
OpenAI's client finds it at {url}/v1, Triton's gRPC client at {grpc}; docs/quickstart.md has a program for each.
Stop it: {stop}"""


def main() -> int:
    """Run the demo and return its exit status: 0, 1 if the server did not start or answer, 2 for a wrong setting."""
    started = time.monotonic()
    try:
        config = Config.from_env()
        run_dir = RunDir(config.run_path)
    except ConfigError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    if state := running(run_dir):
        print(f"a server is already running, using it: {printable(state.model)}")
    elif (status := start()) or (state := running(run_dir)) is None:
        return status or 1
    if "SERVICE_HTTP_PORT" not in state.ports:
        print("demo: the running server has no HTTP port (SERVICE_HTTP_PORT=-1)", file=sys.stderr)
        return 1
    try:
        for question in QUESTIONS:
            print(f"\n> {question}")
            for piece in answer(state, question, config):
                print(printable(piece), end="", flush=True)
            print()
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"demo: the server did not answer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted")
    print(how_to_go_on(state, bool(config.api_key)))
    print(f"(the demo took {time.monotonic() - started:.0f} s)")
    return 0


def start() -> int:
    """Run start_server with the bundled model, whichever model the environment names, and return its exit status.

    It receives Ctrl-C too, ends what it has started, and is waited for.
    """
    env = {**os.environ, "MODEL_DIR": str(ROOT / "demo_model"), "model_name": ""}
    with subprocess.Popen([sys.executable, "-m", "server_scripts.start"], env=env) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()  # it may have been meant for us alone
            return process.wait()


def running(run_dir: RunDir) -> ServerState | None:
    """Return the state of the server if it is ready, or None."""
    state = run_dir.read_state()
    return state if state and state.phase == "ready" and state.supervisor.is_alive else None


def answer(state: ServerState, question: str, config: Config) -> Iterator[str]:
    """Yield the pieces of the answer as they are generated, by the native protocol.

    Raise ValueError for an error response.
    """
    host, port = connect_host(state.host), state.ports["SERVICE_HTTP_PORT"]
    connection = Probe(config).connection(host, port)
    body = {"text": question, "max_dec_len": 128, "temperature": 0, "stream": True}
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read().decode(errors='replace')[:500]}")
    for line in response:
        piece = json.loads(line)
        if piece["error_code"]:
            raise ValueError(piece["error_msg"])
        yield piece["token"]
    connection.close()


def how_to_go_on(state: ServerState, with_key: bool = False) -> str:
    """Return the instructions that the demo ends with."""
    host = in_url(connect_host(state.host))
    return HOW_TO_GO_ON.format(
        header=' -H "Authorization: Bearer $API_KEY"' if with_key else "",
        url=f"{state.scheme}://{host}:{state.ports['SERVICE_HTTP_PORT']}",
        grpc=f"{host}:{state.ports['SERVICE_GRPC_PORT']}",
        stop=Path(sys.executable).with_name("stop_server"),
    )


if __name__ == "__main__":
    sys.exit(main())
