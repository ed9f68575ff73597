"""One option or environment variable of another server, and its meaning here. The options themselves are in
table.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError

PADDLENLP = "PaddleNLP server"
FASTDEPLOY = "FastDeploy"
VLLM = "vLLM"
RANK_TABLE = "Rank-table deployment (vLLM on Ascend)"
SGLANG = "SGLang"
TGI = "Text Generation Inference"
LLAMA = "llama-server"
SERVERS = (PADDLENLP, FASTDEPLOY, VLLM, RANK_TABLE, SGLANG, TGI, LLAMA)


@dataclass
class OptionMeaning:
    """Translation of a given option: settings by their environment variables, and sentences for the operator."""

    settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


Reader = Callable[[str, str, Mapping[str, str]], OptionMeaning]  # of name, value and environment


@dataclass(frozen=True)
class OptionRow:
    """An option has dashes in front of its name, a variable has none. It sets a setting, or changes nothing (`why`),
    or is refused (`instead`)."""

    name: str
    servers: tuple[str, ...]
    setting: str = ""  # environment variable of the setting that it sets
    remark: str = ""  # for the documentation
    values: Mapping[str, str] = field(default_factory=dict)  # its values -> those of the setting
    refused: Mapping[str, str] = field(default_factory=dict)  # values that are not supported -> what to use instead
    read: Reader | None = None  # where the value's meaning takes more than `values`
    why: str = ""  # the reason why it changes nothing
    instead: str = ""  # what to use instead of it
    harmless: tuple[str, ...] = ()  # values that ask for nothing, of an option that is refused or sets something else
    is_flag: bool = False  # takes no value
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def is_option(self) -> bool:
        return self.name.startswith("-")

    @property
    def is_synonym(self) -> bool:
        """Return whether the option is another name of a setting, with the same values."""
        return bool(self.setting) and not (self.values or self.refused or self.read or self.harmless)

    @property
    def is_always_refused(self) -> bool:
        return bool(self.instead) and not self.harmless

    def meaning(self, name: str, value: str, environ: Mapping[str, str]) -> OptionMeaning:
        """Return what `value` of it comes to. Raises ConfigError where it is refused."""
        if value in self.refused:
            raise ConfigError(f"{name} {value} is not supported: {self.refused[value]}")
        if self.read:
            return self.read(name, value, environ)
        is_harmless = value in self.harmless
        if self.setting and not is_harmless:
            return OptionMeaning({self.setting: self.values.get(value, value)})
        if self.instead and not is_harmless:
            given = "" if self.is_always_refused or self.is_flag else f" {value}"
            raise ConfigError(f"{name}{given} is not supported: {self.instead}")
        reason = self.why or f"{value} is how it works here"
        given = f" {value}" if is_harmless and not self.is_flag else ""
        return OptionMeaning(notes=[f"{name}{given} has no effect: {reason}"])


def sets(name: str, setting: str, *servers: str, **more: Any) -> OptionRow:
    return OptionRow(name, servers, setting=setting, **more)


def ignored(name: str, why: str, *servers: str, **more: Any) -> OptionRow:
    return OptionRow(name, servers, why=why, **more)


def refused(name: str, instead: str, *servers: str, **more: Any) -> OptionRow:
    return OptionRow(name, servers, instead=instead, **more)
