"""The settings of the server: one frozen dataclass, read from the environment once, checked once.

`python -m engine.settings.config` prints the table of docs/settings.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engine.errors import ConfigError
from engine.settings.keys import Owner, is_key, read_keys
from engine.settings.machines import Machines, read_machines
from engine.settings.setting import Setting, given, parse, port, setting

# In the run directory. The supervisor writes why it has given the engine up, and that it is going to end the server;
# the Triton model reads it. The engine notes that it has computed tokens, the supervisor looks when it has ended.
ENGINE_FAILED_FILE = "engine.failed"
ENGINE_PROGRESS_FILE = "engine.progress"
STOPPING_FILE = "stopping"  # engine.settings.stopping
# There, too: the sockets; that of tritonserver in its folder, which is made anew at every start.
ENGINE_SOCKET = "engine.sock"
TRITON_FOLDER, TRITON_SOCKET = ".triton", "grpc:1"
MAX_SOCKET_PATH = 107  # bytes, the kernel's sun_path


@dataclass(frozen=True)
class Config:
    # Ports
    health_http_port: int = port(
        8110,
        "HEALTH_HTTP_PORT",
        "health over HTTP: `/v2/health/live`, `/v2/health/ready`, `/v2/health/started`",
        "HTTP_PORT",
    )
    service_grpc_port: int = port(8811, "SERVICE_GRPC_PORT", "requests over Triton's gRPC", "GRPC_PORT")
    metrics_http_port: int = port(8722, "METRICS_HTTP_PORT", "Triton's Prometheus metrics, `/metrics`", "METRICS_PORT")
    service_http_port: int = port(
        9965, "SERVICE_HTTP_PORT", "HTTP requests; -1: gRPC only", "PUSH_MODE_HTTP_PORT", minimum=-1
    )
    triton_http_port: int = port(
        -1,
        "TRITON_HTTP_PORT",
        "a port, such as Triton's 8000, for what SERVICE_HTTP_PORT has, `/v2` among it; -1: none",
        minimum=-1,
    )
    inter_node_port: int = port(56667, "INTER_NODE_PORT", "between the engines of several machines, on HOST_IP")
    service_host: str = setting("0.0.0.0", "SERVICE_HOST", "address the gRPC, HTTP, health and metrics ports listen on")

    # Model
    model_dir: str = setting(
        "/models", "MODEL_DIR", "checkpoint or exported model; with a model name, where it is kept"
    )
    model_name: str = setting("", "model_name", "model to fetch at start (the argument of `start_server`)")
    served_model_name: str = setting(
        "", "SERVED_MODEL_NAME", "name in `/v1/models`; empty: the model name, else the directory's"
    )
    graph_dir: str = setting("", "GRAPH_DIR", "exported model that is served; empty: MODEL_DIR is one", internal=True)
    export_cache_dir: str = setting(
        "~/.cache/llm-server/exported", "EXPORT_CACHE_DIR", "where checkpoints are exported to, once each"
    )
    device: str = setting(
        "auto",
        "DEVICE",
        "what runs the graph; `auto`: a GPU if torch is installed and sees one",
        choices=("auto", "cpu", "gpu"),
    )
    load_format: str = setting(
        "auto",
        "LOAD_FORMAT",
        "`dummy`: export from config.json alone, with random weights drawn on the GPU",
        choices=("auto", "dummy"),
    )
    dtype: str = setting(
        "auto",
        "DTYPE",
        "weights of an export; `auto`: float32 stays, 16-bit becomes bfloat16",
        choices=("auto", "float32", "bfloat16"),
    )
    quant_type: str = setting(
        "none",
        "QUANT_TYPE",
        "matrices of an export with fewer bits (docs/ops.md); a model name's third part says it, too",
        choices=("none", "weight_only_int8", "weight_only_int4", "a8w8"),
    )
    block_size: int = setting(64, "BLOCK_SIZE", "tokens of a KV block, decided at export", minimum=8, maximum=1024)
    mp_num: int = setting(
        1, "MP_NUM", "tensor-parallel ranks of the model on all machines, a process each", minimum=1, maximum=64
    )
    mp_nnode: int = setting(
        1, "MP_NNODE", "machines that hold the model together; MP_NUM / MP_NNODE ranks each", minimum=1, maximum=16
    )
    pod_ips: str = setting("", "POD_IPS", "with several machines: their addresses, `10.0.0.1,10.0.0.2`")
    pod_0_ip: str = setting("", "POD_0_IP", "the one of POD_IPS that serves; empty: the first")
    host_ip: str = setting("", "HOST_IP", "the one of POD_IPS that this machine is; empty: the one that it has")
    use_cache_kv_int8: bool = setting(False, "USE_CACHE_KV_INT8", "KV cache of an export with 8 bits a number")

    # Capacity
    max_seq_len: int = setting(
        8192, "MAX_SEQ_LEN", "longest prompt, in tokens; the model's own limit also holds", minimum=1
    )
    max_dec_len: int = setting(1024, "MAX_DEC_LEN", "longest answer, in tokens", minimum=1)
    batch_size: int = setting(50, "BATCH_SIZE", "requests in one step at most", minimum=1, maximum=1024)
    block_bs: float | None = setting(
        None, "BLOCK_BS", "KV blocks = BLOCK_BS x blocks of the longest request; unset: from free memory", minimum=0.001
    )
    block_ratio: float = setting(
        0.75,
        "BLOCK_RATIO",
        "share of the blocks that prompts may take at admission; 1 or more: reserve the worst case, never preempt",
        minimum=0.01,
    )
    kv_cache_memory_fraction: float = setting(
        0.5,
        "KV_CACHE_MEMORY_FRACTION",
        "with BLOCK_BS unset: share of the free memory for KV blocks, on the CPU",
        minimum=0.01,
        maximum=0.95,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "GPU_MEMORY_UTILIZATION",
        "with BLOCK_BS unset: share of the GPU's memory for weights, steps and KV blocks together",
        minimum=0.01,
        maximum=0.99,
    )
    num_gpu_blocks_override: int | None = setting(
        None, "NUM_GPU_BLOCKS_OVERRIDE", "KV blocks on a GPU, whatever the rules above say", minimum=1
    )
    use_cudagraph: bool = setting(True, "USE_CUDAGRAPH", "record decode steps on a GPU once and replay them")
    cudagraph_capture_sizes: str = setting(
        "1,2,4,8,16,24,32,48,64,96,128,160,192,224,256",
        "CUDAGRAPH_CAPTURE_SIZES",
        "batch sizes that are recorded, up to BATCH_SIZE; a batch takes the next larger one",
    )
    max_cached_task_num: int = setting(
        128, "MAX_CACHED_TASK_NUM", "waiting requests; beyond, new ones are refused", minimum=1
    )
    max_waiting_tokens: int = setting(
        1 << 20,
        "MAX_WAITING_TOKENS",
        "tokens of all waiting prompts together; beyond, new requests are refused",
        minimum=1,
    )
    queue_timeout_s: float = setting(
        600.0,
        "QUEUE_TIMEOUT",
        "seconds that a request may wait until it begins, from its arrival on; 0: for ever",
        minimum=0,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "MAX_NUM_BATCHED_TOKENS",
        "tokens of one step, or twice BATCH_SIZE if more; longer prompts are prefilled in chunks beside decodes;"
        " unset: 256 on the CPU, 8192 on a GPU",
        minimum=1,
    )
    enable_prefix_caching: bool = setting(
        True, "ENABLE_PREFIX_CACHING", "keep full blocks for prompts that begin alike"
    )
    cpu_threads: int = setting(
        0,
        "CPU_THREADS",
        "threads of the CPU ops; 0: one per core, in a container no more than its CPU quota",
        minimum=0,
        maximum=1024,
    )
    speculate_method: str = setting(
        "none",
        "SPECULATE_METHOD",
        "`ngram`: what followed the same tokens before is tried several tokens a step, with the same answers",
        choices=("none", "ngram"),
    )
    speculate_max_draft_token_num: int = setting(
        4, "SPECULATE_MAX_DRAFT_TOKEN_NUM", "tokens tried in a step at most", minimum=1, maximum=16
    )
    speculate_max_ngram_size: int = setting(
        3, "SPECULATE_MAX_NGRAM_SIZE", "tokens that must have occurred before, at most", minimum=1, maximum=16
    )
    use_warmup: bool = setting(False, "USE_WARMUP", "run the longest step once before the server is ready")

    # Gateway and answers
    push_mode_http_workers: int = setting(
        1, "PUSH_MODE_HTTP_WORKERS", "gateway processes on the HTTP and gRPC ports", minimum=1, maximum=64
    )
    reasoning_parser: str = setting(
        "none",
        "REASONING_PARSER",
        "what the model thinks before it answers is told apart in OpenAI's answers, and the form of an answer begins "
        "after it: the kind of model",
        choices=("none", "deepseek_r1", "qwen3"),
    )
    tool_call_parser: str = setting(
        "auto",
        "TOOL_CALL_PARSER",
        "how the model writes calls of tools; `auto`: as its chat template does",
        choices=("auto", "none", "hermes", "llama3_json", "mistral"),
    )
    guided_decoding_disable_any_whitespace: bool = setting(
        False,
        "GUIDED_DECODING_DISABLE_ANY_WHITESPACE",
        "JSON that an answer must be has no whitespace between its parts, unless the request says otherwise",
    )
    disable_streaming: bool = setting(False, "DISABLE_STREAMING", "send every answer in one response")
    max_body_bytes: int = setting(
        4 << 20, "MAX_BODY_BYTES", "longest request: the HTTP body, or the text over gRPC", minimum=1024
    )
    api_key: str = field(
        default="",
        repr=False,
        metadata={
            "setting": Setting(
                "API_KEY", "HTTP and gRPC requests must carry it, health does not; empty: anybody may ask"
            )
        },
    )
    tls_cert_file: str = setting(
        "", "TLS_CERT_FILE", "certificate chain in PEM for the HTTP and gRPC ports; empty: they are not encrypted"
    )
    tls_key_file: str = setting("", "TLS_KEY_FILE", "its private key in PEM, without a password")
    api_keys: str = setting(
        "", "API_KEYS", "a file of keys by name, with limits ([docs/operation.md](operation.md#keys)), beside API_KEY"
    )
    cors_allow_origin: str = setting(
        "*",
        "CORS_ALLOW_ORIGIN",
        "whose pages in a browser may call HTTP: one origin, or `*`; empty: none",
        may_be_empty=True,
    )

    # Life of the processes
    start_timeout_s: float = setting(
        1800.0, "START_TIMEOUT", "seconds to wait for readiness before the start fails", minimum=1
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
        "", "RUN_DIR", "state, sockets and generated configuration; empty: a folder of this user under /tmp"
    )
    log_dir: str = setting("log", "FD_LOG_DIR", "log files")
    log_max_bytes: int = setting(64 << 20, "FD_LOG_MAX_BYTES", "size at which a log file is rotated", minimum=65536)
    log_backup_count: int = setting(7, "FD_LOG_BACKUP_COUNT", "older files kept of each log", minimum=0, maximum=1000)
    log_level: str = setting(
        "INFO", "LOG_LEVEL", "minimum severity logged", choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )
    output_log_to_console: bool = setting(
        False, "OUTPUT_LOG_TO_CONSOLE", "`start_server --foreground` copies the logs to its output"
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Raises ConfigError that names each wrong variable, its value and what was expected, a line each."""
        values, problems = {}, []
        for f in fields(cls):
            try:
                name, text = given(f.metadata["setting"], environ)
                if text is not None:
                    values[f.name] = parse(name, text, str(f.type), f.metadata["setting"])
            except ConfigError as error:
                problems.append(str(error))
        config = cls(**values)
        config._check(problems)
        return config

    def changed(self, **settings: Any) -> Config:
        """With other values, by the names of the fields. Checked like the environment's: raises ConfigError."""
        values = dict(settings)
        for f in fields(self):
            if f.name in settings and not (settings[f.name] is None and f.default is None):
                values[f.name] = parse(f.name, str(settings[f.name]), str(f.type), f.metadata["setting"])
        config = replace(self, **values)
        config._check([])
        return config

    def _check(self, problems: list[str]) -> None:
        """`problems` is what is wrong already. With one, what holds between settings cannot be told."""
        of_each = (
            self._check_http_port,
            self._check_paths,
            self._check_key,
            self._check_tls,
            self._check_capture_sizes,
        )
        for check in of_each if problems else (lambda: self.machines, self._check_ports, *of_each):
            try:
                check()
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))

    def _check_ports(self) -> None:
        ports: dict[int, str] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_port") and value > 0 and (f.name != "inter_node_port" or self.mp_nnode > 1):
                env = f.metadata["setting"].env
                if value in ports:
                    raise ConfigError(f"{env} is {value}, which {ports[value]} has already; every port needs its own")
                ports[value] = env

    def _check_http_port(self) -> None:
        for env, number in (("SERVICE_HTTP_PORT", self.service_http_port), ("TRITON_HTTP_PORT", self.triton_http_port)):
            if number == 0:
                raise ConfigError(f"{env} is 0, it must be a port from 1 to 65535, or -1 for none")

    def _check_paths(self) -> None:
        for env, text in (("MODEL_DIR", self.model_dir), ("EXPORT_CACHE_DIR", self.export_cache_dir)):
            _expanded(env, text)
        _check_length(self.run_path, self.triton_socket)

    def _check_key(self) -> None:
        _ = self.owners
        if self.api_key and not is_key(self.api_key):  # a secret: not shown
            raise ConfigError("API_KEY has a character that is no visible ASCII, which no HTTP header can carry")

    def _check_tls(self) -> None:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            missing = "TLS_KEY_FILE" if self.tls_cert_file else "TLS_CERT_FILE"
            raise ConfigError(f"{missing} is not set; TLS needs both TLS_CERT_FILE and TLS_KEY_FILE")

    def _check_capture_sizes(self) -> None:
        sizes = self.cudagraph_capture_sizes.split(",")
        if not all(size.strip().isdecimal() and int(size) for size in sizes):
            raise ConfigError(
                f"CUDAGRAPH_CAPTURE_SIZES is {self.cudagraph_capture_sizes!r}, it must be whole numbers from 1 with"
                " commas between them"
            )

    @cached_property
    def owners(self) -> dict[str, Owner]:
        """Who may ask over HTTP, by their keys; empty: anybody."""
        nobody = {self.api_key: Owner()} if self.api_key else {}
        return {**(read_keys(str(_expanded("API_KEYS", self.api_keys))) if self.api_keys else {}), **nobody}

    @cached_property
    def machines(self) -> Machines:
        texts = {"POD_IPS": self.pod_ips, "POD_0_IP": self.pod_0_ip, "HOST_IP": self.host_ip}
        return read_machines(self.mp_nnode, self.mp_num, texts)

    @property
    def http_ports(self) -> list[int]:
        """On which the gateway serves HTTP."""
        return [number for number in (self.service_http_port, self.triton_http_port) if number > 0]

    @property
    def max_step_tokens(self) -> int:
        """MAX_NUM_BATCHED_TOKENS, but enough that prompts go on beside a full batch of decodes."""
        on_device = 8192 if self.device == "gpu" else 256
        return max(self.max_num_batched_tokens or on_device, 2 * self.batch_size)

    @property
    def graph_path(self) -> Path:
        return Path(self.graph_dir or self.model_dir)

    @property
    def run_path(self) -> Path:
        return _expanded("RUN_DIR", self.run_dir or f"/tmp/llm-server-{os.getuid()}")

    @property
    def engine_socket(self) -> Path:
        """Where the engine listens: RUN_DIR is private to its user."""
        return self.run_path.absolute() / ENGINE_SOCKET

    @property
    def triton_socket(self) -> Path:
        """Where tritonserver listens: in its own folder, with the name that it makes of a port."""
        return self.run_path / TRITON_FOLDER / TRITON_SOCKET

    @property
    def triton_target(self) -> str:
        """The same as gRPC writes it."""
        return f"unix:{quote(str(self.triton_socket))}"

    @property
    def log_path(self) -> Path:
        return _expanded("FD_LOG_DIR", self.log_dir).absolute()


def _check_length(run_path: Path, socket: Path) -> None:
    num_bytes, limit = len(os.fsencode(run_path)), MAX_SOCKET_PATH - len(os.fsencode(socket.relative_to(run_path))) - 1
    if num_bytes > limit:
        raise ConfigError(
            f"RUN_DIR is {str(run_path)!r}, which has {num_bytes} bytes; sockets in it need a path of at most {limit}"
        )


def _expanded(env: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{env} is {text!r}, and there is no such home directory; write the path out") from None


def markdown_table() -> str:
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for f in fields(Config):
        s: Setting = f.metadata["setting"]
        if s.internal:
            continue
        old = f" (old name{'s' * (len(s.old) > 1)}: {', '.join(f'`{name}`' for name in s.old)})" if s.old else ""
        choices = f"; one of {', '.join(f'`{c}`' for c in s.choices)}" if s.choices else ""
        rows.append(f"| `{s.env}` | {_as_text(f.default)} | {s.doc}{choices}{old} |")
    return "\n".join(rows)


def _as_text(default: Any) -> str:
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return f"`{int(default)}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


if __name__ == "__main__":
    print(markdown_table())  # noqa: T201 - this is a command
