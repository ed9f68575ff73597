"""The settings of the server: one frozen dataclass, read from the environment once, checked once.

`python -m engine.config` prints the table of the README.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

# In the run directory: the supervisor writes why it has given the engine up, the Triton model reads it.
ENGINE_FAILED_FILE = "engine.failed"


@dataclass(frozen=True)
class Setting:
    """How one field is read: its environment variable, what it means, and the values it takes."""

    env: str
    doc: str
    old: tuple[str, ...] = ()  # names of earlier generations that still work
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    may_be_empty: bool = False  # elsewhere an empty text is like an unset variable


def setting(default: Any, env: str, doc: str, **limits: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(env, doc, **limits)})


def port(default: int, env: str, doc: str, *old: str, minimum: int = 1) -> Any:
    return setting(default, env, doc, old=old, minimum=minimum, maximum=65535)


# Settings of the predecessor that change nothing here, and why. Set, they are named once in the log.
WITHOUT_EFFECT = {
    "MAX_PREFILL_BATCH": "MAX_NUM_BATCHED_TOKENS limits a step instead",
    "ENC_DEC_BLOCK_NUM": "blocks are taken one by one as a request grows",
    "ENGINE_MAX_NEED_NUM": "requests join at every step",
    "USE_HF_TOKENIZER": "the tokenizer is always Hugging Face's",
    "USE_FAST_TOKENIZER": "the tokenizer is always the fast one",
    "DISABLE_CAPACITY_CHECKER": "a request that cannot fit is refused with the numbers",
    "USE_CUSTOM_HEALTH_CHECKER": "the health port is always served",
    "MAX_STOP_SEQS_NUM": "the limit is fixed: 64 stop sequences",
    "STOP_SEQS_MAX_LEN": "the limit is fixed: 1024 characters a stop sequence",
    "SERVER_WAITTING_TIME": "ranks wait for each other",
    "SHM_UUID": "no named shared memory is used",
    "SPECULATE_METHOD": "speculative decoding is not supported yet",
    "SPECULATE_MAX_DRAFT_TOKEN_NUM": "speculative decoding is not supported yet",
    "SPECULATE_MAX_NGRAM_SIZE": "speculative decoding is not supported yet",
    "SPECULATE_MODEL_PATH": "speculative decoding is not supported yet",
    "SPECULATE_MODEL_QUANT_TYPE": "speculative decoding is not supported yet",
    "USE_CACHE_KV_INT4": "an int4 KV cache is not supported",
    "USE_DYNAMIC_GRAPH": "the exported graph is what runs",
    "RETURN_FULL_HIDDEN_STATES": "only speculative decoding would need them",
    "POD_IPS": "one machine is supported",
    "POD_0_IP": "one machine is supported",
    "HOST_IP": "one machine is supported, SERVICE_HOST is where it listens",
    "CUDA_VISIBLE_DEVICES": "GPUs are not used yet",
    "FLAGS_blha_use_fp32_qk_sum": "GPUs are not used yet",
    "FLAGS_mla_use_tensorcore": "GPUs are not used yet",
    "FLAGS_cascade_attention_max_partition_size": "GPUs are not used yet",
    "CONFIG_JSON_FILE": "the file is config.json, in MODEL_DIR",
    "FD_MODEL_CONFIG_PATH": "the file is config.json, in MODEL_DIR",
    "DISTRIBUTED_CONFIG": "one machine is supported",
    "FD_DEBUG": "LOG_LEVEL=DEBUG logs more",
    "BAD_TOKENS": "bad_words_token_ids of a request are what must not appear",
    "FIRST_TOKEN_ID": "it had none before",
    "STOP_THRESHOLD": "it had none before",
    "RECORD_TIME_INTERVAL": "it had none before",
    "INFERENCE_MSG_QUEUE_ID": "no System V message queue is used",
}


@dataclass(frozen=True)
class Config:
    # Ports
    health_http_port: int = port(
        8110, "HEALTH_HTTP_PORT", "health over HTTP: `/v2/health/live`, `/v2/health/ready`", "HTTP_PORT"
    )
    service_grpc_port: int = port(8811, "SERVICE_GRPC_PORT", "Triton's gRPC", "GRPC_PORT")
    metrics_http_port: int = port(8722, "METRICS_HTTP_PORT", "Triton's Prometheus metrics, `/metrics`", "METRICS_PORT")
    inter_proc_port: int = port(
        56666,
        "INTER_PROC_PORT",
        "between the Triton model and the engine, loopback only",
        "INTER_QUEUE_PORT",
        "INFER_QUEUE_PORT",
    )
    service_http_port: int = port(
        9965, "SERVICE_HTTP_PORT", "HTTP requests; -1: gRPC only", "PUSH_MODE_HTTP_PORT", minimum=-1
    )
    service_host: str = setting("0.0.0.0", "SERVICE_HOST", "address the gRPC, HTTP, health and metrics ports listen on")

    # Model
    model_dir: str = setting(
        "/models", "MODEL_DIR", "checkpoint or exported model; with a model name, where it is kept"
    )
    model_name: str = setting("", "model_name", "model to fetch at start (the argument of `start_server`)")
    served_model_name: str = setting(
        "", "SERVED_MODEL_NAME", "name in `/v1/models`; empty: the model name, else the directory's"
    )
    export_cache_dir: str = setting(
        "~/.cache/llm-server/exported", "EXPORT_CACHE_DIR", "where checkpoints are exported to, once each"
    )
    device: str = setting("cpu", "DEVICE", "what runs the graph", choices=("cpu",))
    dtype: str = setting(
        "auto",
        "DTYPE",
        "weights of an export; `auto`: float32 stays, 16-bit becomes bfloat16",
        choices=("auto", "float32", "bfloat16"),
    )
    block_size: int = setting(64, "BLOCK_SIZE", "tokens of a KV block, decided at export", minimum=8, maximum=1024)
    mp_num: int = setting(1, "MP_NUM", "tensor-parallel ranks; more than 1 is not supported yet", minimum=1, maximum=1)
    mp_nnode: int = setting(1, "MP_NNODE", "machines; more than 1 is not supported yet", minimum=1, maximum=1)
    use_cache_kv_int8: int = setting(0, "USE_CACHE_KV_INT8", "int8 KV cache; not supported yet", minimum=0, maximum=0)

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
        "with BLOCK_BS unset: share of the free memory for KV blocks",
        minimum=0.01,
        maximum=0.95,
    )
    max_cached_task_num: int = setting(
        128, "MAX_CACHED_TASK_NUM", "waiting requests; beyond, new ones are refused", minimum=1
    )
    max_num_batched_tokens: int = setting(
        256,
        "MAX_NUM_BATCHED_TOKENS",
        "tokens of one step, or twice BATCH_SIZE if more; longer prompts are prefilled in chunks beside decodes",
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
    use_warmup: bool = setting(False, "USE_WARMUP", "run the longest step once before the server is ready")

    # Gateway and answers
    push_mode_http_workers: int = setting(
        1, "PUSH_MODE_HTTP_WORKERS", "gateway processes on the HTTP port", minimum=1, maximum=64
    )
    disable_streaming: bool = setting(False, "DISABLE_STREAMING", "send every answer in one response")
    max_body_bytes: int = setting(4 << 20, "MAX_BODY_BYTES", "largest HTTP body", minimum=1024)
    api_key: str = field(
        default="",
        repr=False,
        metadata={
            "setting": Setting("API_KEY", "HTTP requests must carry it, health does not; empty: anybody may ask")
        },
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
    check_health_interval_s: float = setting(
        60.0,
        "CHECK_HEALTH_INTERVAL",
        "seconds without a step or heartbeat until the engine counts as hanging",
        minimum=1,
    )
    engine_max_crashes: int = setting(
        8, "ENGINE_MAX_CRASHES", "crashes of the engine in a row after which requests fail", minimum=1
    )
    run_dir: str = setting(
        "", "RUN_DIR", "pid files and generated configuration; empty: a folder of this user under /tmp"
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
        """Raises ConfigError that names the variable, its value and what was expected."""
        values = {}
        for f in fields(cls):
            name, text = _given(f.metadata["setting"], environ)
            if text is not None:
                values[f.name] = _parse(name, text, str(f.type), f.metadata["setting"])
        config = cls(**values)
        config._check()
        return config

    def changed(self, **settings: Any) -> Config:
        """With other values, by the names of the fields. Checked like the environment's: raises ConfigError."""
        values = dict(settings)
        for f in fields(self):
            if f.name in settings and not (settings[f.name] is None and f.default is None):
                values[f.name] = _parse(f.name, str(settings[f.name]), str(f.type), f.metadata["setting"])
        config = replace(self, **values)
        config._check()
        return config

    def _check(self) -> None:
        ports: dict[int, str] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_port") and value > 0:
                env = f.metadata["setting"].env
                if value in ports:
                    raise ConfigError(f"{env} is {value}, which {ports[value]} has already; every port needs its own")
                ports[value] = env
        for env, text in (("MODEL_DIR", self.model_dir), ("EXPORT_CACHE_DIR", self.export_cache_dir)):
            _expanded(env, text)
        if not all("!" <= char <= "~" for char in self.api_key):  # a secret: not shown
            raise ConfigError("API_KEY has a character that is no visible ASCII, which no HTTP header can carry")
        if self.service_http_port == 0:
            raise ConfigError("SERVICE_HTTP_PORT is 0, it must be a port from 1 to 65535, or -1 for gRPC only")

    @property
    def max_step_tokens(self) -> int:
        """MAX_NUM_BATCHED_TOKENS, but enough that prompts go on beside a full batch of decodes."""
        return max(self.max_num_batched_tokens, 2 * self.batch_size)

    @property
    def run_path(self) -> Path:
        return _expanded("RUN_DIR", self.run_dir or f"/tmp/llm-server-{os.getuid()}")

    @property
    def log_path(self) -> Path:
        return _expanded("FD_LOG_DIR", self.log_dir).absolute()


def _expanded(env: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{env} is {text!r}, and there is no such home directory; write the path out") from None


def _given(setting: Setting, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """The variable's name and text; an empty text is like an unset variable, where it says nothing."""
    names = [name for name in (setting.env, *setting.old) if name in environ]
    found = [(name, environ[name]) for name in names if environ[name] or setting.may_be_empty]
    if not found:
        return setting.env, None
    for name, text in found[1:]:
        if text != found[0][1]:
            raise ConfigError(f"{found[0][0]} is {found[0][1]!r} and {name}, its old name, is {text!r}; set only one")
    return found[0]


def _parse(name: str, text: str, kind: str, setting: Setting) -> Any:
    if setting.choices and text not in setting.choices:
        raise ConfigError(f"{name} is {text!r}, it must be one of: {', '.join(setting.choices)}")
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{name} is {text!r}, it must be 0 or 1")
        return text.lower() in ("1", "true")
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, it must be a {'whole ' if kind == 'int' else ''}number") from None
    if not math.isfinite(value):
        raise ConfigError(f"{name} is {text!r}, it must be a finite number")
    low, high = setting.minimum, setting.maximum
    if (low is not None and value < low) or (high is not None and value > high):
        raise ConfigError(f"{name} is {text}, it must be {_range(low, high)} ({setting.doc})")
    return value


def _range(low: float | None, high: float | None) -> str:
    if low == high:
        return f"{low:g}"
    limits = [f"at least {low:g}"] if low is not None else []
    return " and ".join(limits + [f"at most {high:g}"] if high is not None else limits)


def settings_without_effect(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One sentence for every variable of the predecessor that is set and does nothing here."""
    return [f"{name} has no effect: {why}" for name, why in WITHOUT_EFFECT.items() if environ.get(name)]


def likely_misspelt(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One sentence for every variable that is none of ours but looks like one: it was probably meant to be."""
    settings = [f.metadata["setting"] for f in fields(Config)]
    known = {name.upper(): name for s in settings for name in (s.env, *s.old)} | {
        name.upper(): name for name in WITHOUT_EFFECT
    }
    sentences = []
    for name in sorted(environ.keys() - set(known.values())):
        if close := difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.9):
            sentences.append(f"{name} is no setting, did you mean {known[close[0]]}?")
    return sentences


def markdown_table() -> str:
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for f in fields(Config):
        s: Setting = f.metadata["setting"]
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
