"""Settings: the life of the processes, and the files by which they know of each other."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from engine.errors import ConfigError
from engine.settings.setting import expanded, setting

# In the run directory. The supervisor writes why it has given the engine up, and that it is going to end the server;
# the Triton model reads it. The engine notes that it has computed tokens, the Triton model which request it computes
# alone, to find out whether that crashes it; the supervisor looks when the engine has ended. These are the names of the
# first engine's files, see `of_engine`.
FAILED_SUFFIX = ".failed"
ENGINE_FAILED_FILE = f"engine{FAILED_SUFFIX}"
ENGINE_PROGRESS_FILE = "engine.progress"
ENGINE_SUSPECT_FILE = "engine.suspect"
EXPERT_USAGE_FILE = "engine.expert_usage.json"  # engine.executors.expert_usage
STOPPING_FILE = "stopping"  # engine.settings.stopping
LORAS_FILE = "loras.json"  # adapters of the Triton model, for its successor
# There, too: the sockets; that of tritonserver in its folder, which is made anew at every start.
ENGINE_SOCKET = "engine.sock"
TRITON_FOLDER, TRITON_SOCKET, TRITON_PAGE = ".triton", "grpc:1", "page"
MAX_SOCKET_PATH = 107  # bytes, the kernel's sun_path
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
DEFAULT_LOG_DIR = "log"
HEADER_NAME, HEADER_VALUE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(r"[\t -~]*")


def of_engine(name: str, index: int) -> str:
    """Return the name of a file or process of the engine with this index, of which `name` is the one of the first."""
    return name.replace("engine", f"engine-{index}", 1) if index else name


def default_run_path() -> Path:
    """Return the run directory of a server without RUN_DIR and FD_LOG_DIR. Those of others begin with this path."""
    return Path(f"/tmp/llm-server-{os.getuid()}")


@dataclass(frozen=True)
class ProcessSettings:
    start_timeout_s: float = setting(
        1800.0, "START_TIMEOUT", "seconds to wait for readiness before the start fails", minimum=1
    )
    start_waits_for_machines: bool = setting(
        True,
        "START_WAITS_FOR_MACHINES",
        "with several machines: `start_server` on the master waits for the others; 0: it returns when only they are"
        " missing, and the server goes on waiting",
    )
    drain_timeout_s: float = setting(
        30.0, "DRAIN_TIMEOUT", "seconds a stop waits for running requests", minimum=0, maximum=1_000_000
    )
    drain_delay_s: float = setting(
        1.0,
        "DRAIN_DELAY",
        "seconds a stop goes on taking requests after readiness has turned off, for those to notice who send them",
        minimum=0,
        maximum=3600,
    )
    check_health_interval_s: float = setting(
        60.0,
        "CHECK_HEALTH_INTERVAL",
        "seconds that a step may take until the engine counts as hanging",
        minimum=1,
    )
    engine_max_crashes: int = setting(
        8, "ENGINE_MAX_CRASHES", "crashes of the engine in a row after which requests fail", minimum=1
    )
    run_dir: str = setting(
        "",
        "RUN_DIR",
        "state, sockets and generated configuration; empty: a folder of this user under /tmp, another one for each"
        " FD_LOG_DIR",
    )
    log_dir: str = setting(DEFAULT_LOG_DIR, "FD_LOG_DIR", "log files")
    log_max_bytes: int = setting(64 << 20, "FD_LOG_MAX_BYTES", "size at which a log file is rotated", minimum=65536)
    log_backup_count: int = setting(7, "FD_LOG_BACKUP_COUNT", "older files kept of each log", minimum=0, maximum=1000)
    log_level: str = setting(
        "INFO",
        "LOG_LEVEL",
        "minimum severity logged",
        choices=LOG_LEVELS,
        synonyms={name.lower(): name for name in LOG_LEVELS},
    )
    otlp_endpoint: str = setting(
        "",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTLP collector of [traces](operation.md#traces) over HTTP, `http://host:4318`; empty: traces are not sent",
    )
    otlp_headers: str = setting(
        "", "OTEL_EXPORTER_OTLP_HEADERS", "what is sent with them, as `name=value,name=value`", is_shown=False
    )
    otlp_service_name: str = setting("llm-server", "OTEL_SERVICE_NAME", "the name of this server in them")
    vllm_metrics: bool = setting(
        False,
        "VLLM_METRICS",
        "metrics [by vLLM's names](metrics.md#by-vllms-names), too, for dashboards and autoscalers made for it",
    )
    output_log_to_console: bool = setting(
        False, "OUTPUT_LOG_TO_CONSOLE", "`start_server --foreground` copies the logs to its output"
    )

    @property
    def run_path(self) -> Path:
        if self.run_dir:
            return expanded("RUN_DIR", self.run_dir)
        if self.log_dir == DEFAULT_LOG_DIR:
            return default_run_path()
        digest = hashlib.blake2b(os.fsencode(self.log_path), digest_size=4).hexdigest()
        return Path(f"{default_run_path()}-{digest}")

    def engine_path(self, name: str, index: int) -> Path:
        """Return the path of a file of the engine with this index, such as ENGINE_SOCKET, on which it listens. RUN_DIR
        is private to its user."""
        return self.run_path.absolute() / of_engine(name, index)

    @property
    def triton_socket(self) -> Path:
        """Return the socket on which tritonserver listens, in its own folder; its name is derived from a port."""
        return self.run_path / TRITON_FOLDER / TRITON_SOCKET

    @property
    def triton_page(self) -> Path:
        """Return the socket on which tritonserver serves its metrics."""
        return self.run_path / TRITON_FOLDER / TRITON_PAGE

    @property
    def triton_target(self) -> str:
        """Return the address of tritonserver's socket in gRPC's notation."""
        return f"unix:{quote(str(self.triton_socket))}"

    @property
    def log_path(self) -> Path:
        return expanded("FD_LOG_DIR", self.log_dir).absolute()

    def check_traces(self) -> None:
        url = urlsplit(self.otlp_endpoint)
        if self.otlp_endpoint and not (url.scheme in ("http", "https") and url.hostname):
            raise ConfigError(f"OTEL_EXPORTER_OTLP_ENDPOINT is {self.otlp_endpoint!r}, it must be an http(s) URL")
        _ = self.otlp_header_fields

    @property
    def otlp_header_fields(self) -> dict[str, str]:
        """Return the headers that are sent with traces, by name. Raise ConfigError, which does not show the values,
        because they may be secret.
        """
        fields: dict[str, str] = {}
        pairs = [pair for pair in self.otlp_headers.split(",") if pair.strip()]
        for number, pair in enumerate(pairs, 1):
            name, separator, value = (unquote(part.strip()) for part in pair.partition("="))
            if not (separator and HEADER_NAME.fullmatch(name) and HEADER_VALUE.fullmatch(value)):
                text = f"OTEL_EXPORTER_OTLP_HEADERS: item {number} must be name=value, as an HTTP header may have them"
                raise ConfigError(f"{text}; a comma in a value is written %2C")
            fields[name] = value
        return fields

    def check_socket_paths(self) -> None:
        run_path = self.run_path
        socket = self.triton_socket.relative_to(run_path)
        num_bytes, limit = len(os.fsencode(run_path)), MAX_SOCKET_PATH - len(os.fsencode(socket)) - 1
        if num_bytes > limit:
            text = f"RUN_DIR is {str(run_path)!r}, which has {num_bytes} bytes"
            raise ConfigError(f"{text}; sockets in it need a path of at most {limit}")
