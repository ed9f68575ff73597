"""The settings of the server: one frozen dataclass, read from the environment once, checked once."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.settings.answers import AnswerSettings
from engine.settings.capacity import CapacitySettings
from engine.settings.disaggregation import PREFILL, DisaggregationSettings, fill_in
from engine.settings.grammars import GrammarSettings
from engine.settings.images import ImageSettings
from engine.settings.loras import LoraSettings
from engine.settings.ports import PortSettings
from engine.settings.processes import ProcessSettings
from engine.settings.replicas import ReplicaSettings
from engine.settings.setting import expanded, given, parse

DRAFT_MODELS = {"draft": "draft model", "eagle3": "EAGLE-3 head"}  # what SPECULATE_MODEL_PATH is, by SPECULATE_METHOD
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Config(
    ProcessSettings,
    GrammarSettings,
    ImageSettings,
    AnswerSettings,
    CapacitySettings,
    LoraSettings,
    DisaggregationSettings,
    ReplicaSettings,
    PortSettings,
):  # dataclass takes the fields of the last one first
    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Read the settings from environment variables. Raises ConfigError, with one line for each wrong variable that
        gives its value and the expected ones."""
        values: dict[str, Any] = {}
        problems = []
        for f in fields(cls):
            try:
                name, text = given(f.metadata["setting"], environ)
                if text is not None:
                    values[f.name] = parse(name, text, str(f.type), f.metadata["setting"])
            except ConfigError as error:
                problems.append(str(error))
        try:
            fill_in(values)
        except ConfigError as error:
            problems.append(str(error))
        config = cls(**values)
        config._check(problems)
        return config

    def changed(self, **settings: Any) -> Config:
        """Return a copy with other values, given by field names and checked like the environment's. Raises
        ConfigError."""
        values, names = dict(settings), [f.name for f in fields(self)]
        if unknown := [name for name in settings if name not in names]:
            close = difflib.get_close_matches(unknown[0], names, n=1)
            raise ConfigError(
                f"there is no setting {unknown[0]}" + "".join(f"; did you mean {name}?" for name in close)
            )
        for f in fields(self):
            if f.name in settings and not (settings[f.name] is None and f.default is None):
                values[f.name] = parse(f.name, str(settings[f.name]), str(f.type), f.metadata["setting"])
        config = replace(self, **values)
        config._check([])
        return config

    def _check(self, problems: list[str]) -> None:
        """Check conditions between settings. `problems` lists what is wrong already; if it is not empty, such
        conditions cannot be checked.
        """
        of_each = (
            self.check_http_port,
            self.check_model_paths,
            self.check_overrides,
            self.check_engines,
            self.check_loras,
            self.check_replicas,
            self.check_disaggregation,
            self.check_socket_paths,
            self.check_key,
            self.check_origin,
            self.check_tls,
            self.check_capture_sizes,
            self.check_partial_prefills,
            self.check_swap_space,
            self._check_draft_model,
            self.check_traces,
            self.check_images,
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
        unused = {"inter_node_port"} if self.mp_nnode == 1 else set()
        if self.splitwise_role != PREFILL:
            unused.add("engine_worker_queue_port")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_port") and value > 0 and f.name not in unused:
                env = f.metadata["setting"].env
                if value in ports:
                    raise ConfigError(f"{env} is {value}, which {ports[value]} has already; every port needs its own")
                ports[value] = env

    @property
    def max_step_tokens(self) -> int:
        """Return MAX_NUM_BATCHED_TOKENS, raised so that prompts make progress next to a full batch of decodes."""
        on_device = 8192 if self.device == "gpu" else 256
        return max(self.max_num_batched_tokens or on_device, 2 * self.batch_size)

    @property
    def max_running(self) -> int:
        """Return how many requests can be in a step of one of the engines at the same time."""
        return self.batch_size * self.data_parallel_size

    @property
    def draft_model_name(self) -> str:
        """Return the draft model's or the EAGLE-3 head's name at the hub, or an empty text if it is a folder."""
        text = self.speculate_model_path
        is_name = self.speculate_method in DRAFT_MODELS and HUB_NAME.fullmatch(text)
        return text if is_name and not (Path(text) / "config.json").is_file() else ""

    @property
    def draft_model_path(self) -> Path | None:
        """Return the folder of the draft model or of the EAGLE-3 head, or None without one. A fetched one is below
        MODEL_DIR."""
        if self.speculate_method not in DRAFT_MODELS:
            return None
        parent = Path(self.model_dir).expanduser() if self.draft_model_name else Path()
        return (parent / expanded("SPECULATE_MODEL_PATH", self.speculate_model_path)).absolute()

    def _check_draft_model(self) -> None:
        needed = DRAFT_MODELS.get(self.speculate_method)
        if needed and not self.speculate_model_path:
            raise ConfigError(
                f"SPECULATE_METHOD is {self.speculate_method}, it needs SPECULATE_MODEL_PATH, the folder of the"
                f" {needed} or its name"
            )
        path = self.draft_model_path
        if path and not self.draft_model_name and not (path / "config.json").is_file():
            raise ConfigError(f"SPECULATE_MODEL_PATH is {self.speculate_model_path!r}, which has no config.json")

    def num_host_blocks(self, block_bytes: int) -> int:
        """Return the number of KV cache blocks of an engine that SWAP_SPACE holds, if each takes `block_bytes` on every
        rank."""
        return int(self.swap_space * 2**30) // (block_bytes * self.mp_num * self.data_parallel_size)

    @property
    def host_expert_bytes(self) -> int:
        """Return the bytes of the experts of one rank that EXPERTS_ON_HOST leaves in the host's memory."""
        return int(self.experts_on_host * 2**30) // (self.mp_num * self.data_parallel_size)
