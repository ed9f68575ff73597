"""The options of `start_server`: every setting under its own name (MAX_DEC_LEN is `--max-dec-len`), and under those of
other servers. An option is written into the environment, where all processes find it."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import MutableMapping, Sequence
from dataclasses import fields
from typing import NoReturn

from engine.settings.config import Config
from server_scripts.completion import add_completion

# Shown by --help; the others are in docs/settings.md.
COMMON = (
    *("MODEL_DIR", "SERVED_MODEL_NAME", "SERVICE_HTTP_PORT", "SERVICE_GRPC_PORT", "SERVICE_HOST", "DEVICE", "DTYPE"),
    *("QUANT_TYPE", "MP_NUM", "MAX_SEQ_LEN", "MAX_DEC_LEN", "BATCH_SIZE", "BLOCK_BS", "CPU_THREADS"),
    *("REASONING_PARSER", "TOOL_CALL_PARSER", "SPECULATE_METHOD", "RUN_DIR", "FD_LOG_DIR"),
)
# Other names, most of them vLLM's and FastDeploy's.
SYNONYMS = {
    "--port": "SERVICE_HTTP_PORT",
    "--grpc-port": "SERVICE_GRPC_PORT",
    "--health-port": "HEALTH_HTTP_PORT",
    "--metrics-port": "METRICS_HTTP_PORT",
    "--host": "SERVICE_HOST",
    "--model": "model_name",
    "--tensor-parallel-size": "MP_NUM",
    "--nnodes": "MP_NNODE",
    "--ips": "POD_IPS",
    "--max-num-seqs": "BATCH_SIZE",
    "--quantization": "QUANT_TYPE",
    "--kv-cache-ratio": "BLOCK_RATIO",
    "--log-dir": "FD_LOG_DIR",
    "--ssl-certfile": "TLS_CERT_FILE",
    "--ssl-keyfile": "TLS_KEY_FILE",
    "--guided-decoding-disable-any-whitespace": "GUIDED_DECODING_DISABLE_ANY_WHITESPACE",
}
# Options of theirs that are none here, and what is.
ANSWERS = {
    "--max-model-len": "prompt and answer have a limit each, --max-seq-len and --max-dec-len",
    "--api-key": "others on the machine can read a command line; set the variable API_KEY, or --api-keys FILE",
    "--otel-exporter-otlp-headers": "they may hold a secret; set the variable OTEL_EXPORTER_OTLP_HEADERS",
    "--kv-cache-dtype": "--use-cache-kv-int8 stores the cache in 8 bits",
    "--enforce-eager": "--no-use-cudagraph does that",
    "--workers": "--push-mode-http-workers is the number of gateway processes",
    "--speculative-config": "--speculate-method ngram, --speculate-max-draft-token-num",
    "--enable-lora": "--lora-modules and --lora-dir say where adapters are",
    "--max-cpu-loras": "--max-loras is how many adapters are in memory",
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--tokenizer": "the tokenizer is the checkpoint's",
    "--chat-template": "the chat template is the checkpoint's",
    "--pipeline-parallel-size": "layers are split over ranks, --mp-num",
    "--data-parallel-size": "start several servers, each with ports and a --run-dir of its own",
    "--enable-chunked-prefill": "it always is; --max-num-batched-tokens is the size of a step",
    "--enable-auto-tool-choice": "calls of tools are always read; --tool-call-parser says in which format",
    "--engine-worker-queue-port": "the engine listens on a Unix socket in --run-dir",
    "--allowed-origins": "--cors-allow-origin",
}


class Parser(argparse.ArgumentParser):
    """Takes the options of `Config` beside its own, and answers what it does not know."""

    def __init__(self, usage: str, description: str):
        epilog = "Every setting of docs/settings.md is an option and an environment variable; the option wins."
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog="start_server",
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=raw,
            allow_abbrev=False,
        )
        self.envs: dict[str, tuple[str, ...]] = {}  # destination -> the setting's names, the one that counts first
        values = {}
        group = self.add_argument_group("common settings")
        for f in fields(Config):
            setting = f.metadata["setting"]
            if setting.internal or not f.repr:  # others on the machine can read a command line
                continue
            names = dict.fromkeys(
                [*(name for name, env in SYNONYMS.items() if env == setting.env), own_name(setting.env)]
            )
            text = f"{setting.doc} ({setting.env})".replace("%", "%%").replace("`", "")
            self.envs[f"env_{f.name}"] = (setting.env, *setting.old)
            how = {"action": argparse.BooleanOptionalAction} if f.type == "bool" else {"metavar": "VALUE"}
            shown = text if setting.env in COMMON else argparse.SUPPRESS
            group.add_argument(*names, dest=f"env_{f.name}", default=None, help=shown, **how)
            values[f"env_{f.name}"] = setting.choices
        add_completion(self, values)

    def parse_into(
        self, environ: MutableMapping[str, str], arguments: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """What is no setting; the settings are in `environ` then."""
        given, unknown = self.parse_known_args(arguments)
        if unknown:
            self._answer(unknown)
        for destination, names in self.envs.items():
            if (value := getattr(given, destination)) is not None:
                for name in names:
                    environ.pop(name, None)
                environ[names[0]] = str(int(value)) if isinstance(value, bool) else value
        return given

    def _answer(self, unknown: Sequence[str]) -> NoReturn:
        name = next((each for each in unknown if each.startswith("-")), unknown[0]).partition("=")[0]
        if why := ANSWERS.get(name.replace("_", "-")):
            self.error(f"{name} is no option here: {why}")
        known = [each for each in self._option_string_actions if each.startswith("--")]
        close = difflib.get_close_matches(name, known, n=1)
        self.error(f"{name} is no option{f', did you mean {close[0]}?' if close else ', see --help'}")


def own_name(env: str) -> str:
    return f"--{env.lower().replace('_', '-')}"
