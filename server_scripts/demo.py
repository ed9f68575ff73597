"""`make demo`: starts the server with the bundled model, asks it three questions and shows how to go on."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from engine.address import in_url
from engine.errors import ConfigError
from engine.settings.config import Config
from server_scripts.ports import connect_host
from server_scripts.run_dir import RunDir, State

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ("Who are you?", "What is the capital of France?", "What is 7 plus 5?")
EXAMPLES = """
The server goes on running. Ask it yourself, with curl:

curl -N {url}/v1/chat/completions{header} \\
  -d '{{"text": "What is the capital of Japan?", "max_dec_len": 64, "temperature": 0, "stream": true}}'

with Python and OpenAI's client (pip install openai):

import openai, os
client = openai.OpenAI(base_url="{url}/v1", api_key=os.environ.get("API_KEY", "none"))
messages = [{{"role": "user", "content": "What is the capital of Japan?"}}]
for chunk in client.chat.completions.create(model="default", messages=messages, temperature=0, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)

with Triton's gRPC ({python}):

import json, queue
import numpy as np
import tritonclient.grpc as triton
answers = queue.Queue()
client = triton.InferenceServerClient("{grpc}")
client.start_stream(lambda result, error: answers.put(result))
request = triton.InferInput("IN", [1], "BYTES")
body = {{"text": "What is the capital of Japan?", "req_id": "1", "max_dec_len": 64, "temperature": 0}}
request.set_data_from_numpy(np.array([json.dumps([body])], dtype=object))
client.async_stream_infer("model", [request])
while True:
    [answer] = json.loads(answers.get().as_numpy("OUT")[0])
    print(answer["token"], end="", flush=True)
    if answer["is_end"]:
        break

client.stop_stream()
client.close()

Health: {health}   Metrics: {metrics}   Logs: {logs}
Stop it: {stop}"""


def main() -> int:
    started = time.monotonic()
    try:
        config = Config.from_env()
        run_dir = RunDir(config.run_path)
    except ConfigError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    state = running(run_dir)
    if state is None:
        status = start()
        state = running(run_dir)
        if status or state is None:
            return status or 1
    else:
        print(f"a server runs already, asking that one: {state.model}")
    if "SERVICE_HTTP_PORT" not in state.ports:
        print("demo: the running server has no HTTP port (SERVICE_HTTP_PORT=-1)", file=sys.stderr)
        return 1
    try:
        for question in QUESTIONS:
            print(f"\n> {question}")
            for piece in answer(state, question, config.api_key):
                print(piece, end="", flush=True)
            print()
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"demo: the server did not answer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted")
    print(examples(state, bool(config.api_key)))
    print(f"(the demo took {time.monotonic() - started:.0f} s)")
    return 0


def start() -> int:
    """start_server's exit status. Ctrl-C reaches it, too: it ends what it has begun, and is waited for."""
    with subprocess.Popen([sys.executable, "-m", "server_scripts.start"], env=demo_environment()) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()  # it may have been meant for us alone
            return process.wait()


def demo_environment() -> dict[str, str]:
    """The bundled model, whichever the caller's environment names."""
    return {**os.environ, "MODEL_DIR": str(ROOT / "demo_model"), "model_name": ""}


def running(run_dir: RunDir) -> State | None:
    state = run_dir.read_state()
    return state if state and state.phase == "ready" and state.supervisor.is_alive else None


def answer(state: State, question: str, api_key: str = "") -> Iterator[str]:
    """The answer as it is generated: OpenAI's protocol, server-sent events."""
    connection = http.client.HTTPConnection(connect_host(state.host), state.ports["SERVICE_HTTP_PORT"], timeout=120)
    body = {"model": "default", "stream": True, "temperature": 0, "max_tokens": 128}
    body["messages"] = [{"role": "user", "content": question}]
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read().decode(errors='replace')[:500]}")
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise ValueError(event["error"].get("message"))
            yield from (choice["delta"].get("content") or "" for choice in event["choices"])
    connection.close()


def examples(state: State, with_key: bool = False) -> str:
    host, ports = in_url(connect_host(state.host)), state.ports
    url = f"http://{host}:{{}}"
    stop = shutil.which("stop_server") or str(Path(sys.executable).with_name("stop_server"))
    return EXAMPLES.format(
        header=' -H "Authorization: Bearer $API_KEY"' if with_key else "",
        url=url.format(ports["SERVICE_HTTP_PORT"]),
        grpc=f"{host}:{ports['SERVICE_GRPC_PORT']}",
        health=url.format(ports["HEALTH_HTTP_PORT"]) + "/v2/health/ready",
        metrics=url.format(ports["METRICS_HTTP_PORT"]) + "/metrics",
        logs=state.log_dir,
        python=shlex.quote(sys.executable),
        stop=shlex.quote(stop),
    )


if __name__ == "__main__":
    sys.exit(main())
