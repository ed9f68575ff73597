"""Command of `make demo`: starts the server with the bundled model and asks it three questions.

With `--images` it starts the bundled model that reads images and asks about pictures of numbers and shapes, which it
draws into the run directory.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.address import connect_host, in_url
from engine.errors import ConfigError
from engine.log import printable
from engine.settings.config import Config
from server_scripts.probe import Probe
from server_scripts.run_dir import RunDir, ServerState, make_folder, stop_command

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ("Who are you?", "What is the capital of France?", "What is 7 plus 5?")
SEEDS = (1, 5, 6)  # of the pictures
PICTURE_SIZE = (112, 112)
IMAGE_QUESTION = "What is this?"
PNG_URL = "data:image/png;base64,"
TEXT_EXAMPLE = '{"text": "What is the capital of Japan?", "max_dec_len": 64, "temperature": 0, "stream": true}'
HOW_TO_GO_ON = """
The server goes on running. Ask it yourself:

curl -N {url}/v1/chat/completions{header} \\
  -d '{example}'

{url} in a browser is a chat with it.
OpenAI's client finds it at {url}/v1, Triton's gRPC client at {grpc}; docs/quickstart.md has a program for each.
Stop it: {stop}"""


def main() -> int:
    """Run the demo and return its exit status: 0, 1 if the server did not start or answer, 2 for a wrong setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", action="store_true", help="with the model that reads images")
    started, has_images = time.monotonic(), parser.parse_args().images
    try:
        config = Config.from_env()
        run_dir = RunDir(config.run_path)
        pictures = draw(run_dir.path / "pictures") if has_images else {}
    except ConfigError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    model = ROOT / ("demo_model/vision" if has_images else "demo_model")
    if state := running(run_dir):
        print(f"a server is already running, using it: {printable(state.model)}")
        if has_images and state.model != model.name:
            print(f"demo: change its model first: {command('start_server')} {model} --reload", file=sys.stderr)
            return 1
    elif (status := start(model)) or (state := running(run_dir)) is None:
        return status or 1
    if "SERVICE_HTTP_PORT" not in state.ports:
        print("demo: the running server has no HTTP port (SERVICE_HTTP_PORT=-1)", file=sys.stderr)
        return 1
    try:
        for question, prompt in image_questions(pictures) if has_images else text_questions():
            print(f"\n> {question}")
            for piece in answer(state, prompt, config):
                print(printable(piece), end="", flush=True)
            print()
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"demo: the server did not answer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted")
    example = image_example(next(iter(pictures))) if has_images else TEXT_EXAMPLE
    print(how_to_go_on(state, config.run_path, bool(config.api_key), example))
    print(f"(the demo took {time.monotonic() - started:.0f} s)")
    return 0


def text_questions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each question, and the fields of its prompt."""
    for question in QUESTIONS:
        yield question, {"text": question}


def draw(folder: Path) -> dict[Path, str]:
    """Return the files of new pictures, each with the sentence that says what it shows. Raise ConfigError."""
    from demo_model.pictures import name_of, picture  # imported late: not every demo draws

    make_folder("RUN_DIR", folder)
    pictures = {}
    for number, seed in enumerate(SEEDS, 1):
        shown = picture(random.Random(seed), PICTURE_SIZE)
        path = folder / f"{number}.png"
        shown.image.save(path)
        pictures[path] = name_of(shown)
    return pictures


def image_questions(pictures: dict[Path, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the question about each picture with its file and the expected answer, and the fields of its prompt."""
    for path, expected in pictures.items():
        shown = f"{IMAGE_QUESTION}\n  picture: {printable(str(path))}\n  expected: {expected}"
        yield shown, image_prompt(PNG_URL + base64.b64encode(path.read_bytes()).decode())


def image_prompt(url: str) -> dict[str, Any]:
    """Return the fields of the prompt that asks about the picture at a URL."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": IMAGE_QUESTION}]
    return {"messages": [{"role": "user", "content": parts}]}


def image_example(path: Path) -> str:
    """Return a request about a picture, to be put between single quotes in a shell, which encodes the file."""
    body = json.dumps({**image_prompt(PNG_URL), "max_dec_len": 64, "temperature": 0, "stream": True})
    return body.replace(PNG_URL, f"{PNG_URL}'$(base64 -w0 {shlex.quote(str(path))})'")


def start(model: Path) -> int:
    """Run start_server with a bundled model, whichever model the environment names, and return its exit status.

    It receives Ctrl-C too, ends what it has started, and is waited for.
    """
    env = {**os.environ, "MODEL_DIR": str(model), "model_name": ""}
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


def answer(state: ServerState, prompt: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield the pieces of the answer to a prompt as they are generated, by the native protocol.

    Raise ValueError for an error response.
    """
    host, port = connect_host(state.host), state.ports["SERVICE_HTTP_PORT"]
    connection = Probe(config).connection(host, port)
    body = {**prompt, "max_dec_len": 128, "temperature": 0, "stream": True}
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


def how_to_go_on(state: ServerState, run_path: Path, with_key: bool = False, example: str = TEXT_EXAMPLE) -> str:
    """Return the instructions that the demo ends with."""
    host = in_url(connect_host(state.host))
    return HOW_TO_GO_ON.format(
        header=' -H "Authorization: Bearer $API_KEY"' if with_key else "",
        example=example,
        url=f"{state.scheme}://{host}:{state.ports['SERVICE_HTTP_PORT']}",
        grpc=f"{host}:{state.ports['SERVICE_GRPC_PORT']}",
        stop=stop_command(run_path, state.log_dir).replace("stop_server", str(command("stop_server"))),
    )


def command(name: str) -> Path:
    """Return the path of a command of this installation."""
    return Path(sys.executable).with_name(name)


if __name__ == "__main__":
    sys.exit(main())
