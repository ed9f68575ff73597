"""Options of `start_server`: every setting under its own name (MAX_DEC_LEN is `--max-dec-len`), and those of other
servers (engine/settings/foreign). An option is written to the environment, where all processes read it.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from engine.errors import ConfigError
from engine.settings.config import Config
from engine.settings.foreign import table
from engine.settings.foreign.row import FASTDEPLOY, VLLM, OptionRow
from engine.settings.setting import Setting
from server_scripts.completion import REFUSED, add_completion

# Shown by --help; the others are in docs/settings.md.
COMMON = (
    *("MODEL_DIR", "SERVED_MODEL_NAME", "SERVICE_HTTP_PORT", "SERVICE_GRPC_PORT", "SERVICE_HOST", "DEVICE", "DTYPE"),
    *("QUANT_TYPE", "MP_NUM", "MAX_MODEL_LEN", "MAX_SEQ_LEN", "MAX_DEC_LEN", "BATCH_SIZE", "BLOCK_BS", "CPU_THREADS"),
    *("REASONING_PARSER", "TOOL_CALL_PARSER", "SPECULATE_METHOD", "RUN_DIR", "FD_LOG_DIR"),
)
IS_CLOSE, IS_COMMON = 0.62, 0.05  # least similarity (0..1) of a suggested option; bonus of common options


SHORT = {"--grpc-port": "SERVICE_GRPC_PORT", "--health-port": "HEALTH_HTTP_PORT"}  # additional names of this server
BOOLEANS = {"0": False, "1": True, "false": False, "true": True}
# Options that may have several values, as in vLLM and SGLang: the form of a value, and what separates them in a setting
SEVERAL = {
    **dict.fromkeys(("--lora-modules", "--lora-paths"), (re.compile(r"[^-{\[][^=]*=.*"), " ")),
    "--served-model-name": (re.compile(r"[^-].*"), ","),  # if the model itself is named before
    **dict.fromkeys(("--cudagraph-capture-sizes", "--cuda-graph-sizes", "--cuda-graph-bs"), (re.compile(r"\d+"), ",")),
}
FOREIGN = "foreign"  # destination of other servers' options
SETTINGS: dict[str, Setting] = {f.metadata["setting"].env: f.metadata["setting"] for f in fields(Config)}


class _Foreign(argparse.Action):
    """Collects (row, name, value) of other servers' options, in the order in which they are given."""

    def __call__(self, parser: argparse.ArgumentParser, given: Any, value: Any, option: str | None = None) -> None:
        row, name = self.const, option or ""
        if row.is_always_refused:
            parser.error(f"{name} is not supported: {row.instead}")
        if row.is_flag:
            value = str(int(not name.startswith("--no-")))
        setattr(given, self.dest, [*(getattr(given, self.dest) or ()), (row, name, value)])


class OptionParser(argparse.ArgumentParser):
    """Argument parser with the options of `Config` and of other servers beside its own.

    Unknown options are answered with a suggestion.
    """

    def __init__(self, usage: str, description: str):
        epilog = (
            "examples:\n  start_server Qwen/Qwen2.5-0.5B-Instruct --port 8000\n"
            "  start_server ./folder --max-dec-len 4096\n  stop_server\n\n"
            "Every setting of docs/settings.md is an option and an environment variable; the option wins. Options of"
            "\nvLLM, SGLang, FastDeploy, TGI and llama-server are taken as well, or answered: docs/migrating.md."
        )
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog="start_server",
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=raw,
            allow_abbrev=False,
        )
        self.envs: dict[str, str] = {}  # destination -> the setting's variable
        self._flags: set[str] = set()  # options that take no value, or one of BOOLEANS
        values = {}
        group = self.add_argument_group("common settings")
        for f in fields(Config):
            setting = f.metadata["setting"]
            if setting.internal or not f.repr:  # secrets are no options, because other users can read a command line
                continue
            names = dict.fromkeys([*_synonyms(setting.env), own_name(setting.env)])
            choices = f"; one of {', '.join(setting.choices)}" if setting.choices else ""
            text = f"{setting.doc}{choices} ({setting.env})".replace("%", "%%").replace("`", "")
            self.envs[f"env_{f.name}"] = setting.env
            how = {"action": argparse.BooleanOptionalAction} if f.type == "bool" else {"metavar": "VALUE"}
            if f.type == "bool":
                self._flags |= set(names)
            shown = text if setting.env in COMMON else argparse.SUPPRESS
            group.add_argument(*names, dest=f"env_{f.name}", default=None, help=shown, **how)
            values[f"env_{f.name}"] = setting.choices
        for row in table.ROWS:
            self._add_foreign(row)
        add_completion(self, values)

    def parse_into(
        self, environ: MutableMapping[str, str], arguments: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """Parse the arguments and write the settings to `environ`.

        Return the arguments that are no settings, with a sentence in `notes` for each option without effect.
        """
        given, unknown = self.parse_known_args(self._normalized(sys.argv[1:] if arguments is None else arguments))
        if unknown:
            self._answer(unknown)
        for destination, name in self.envs.items():
            if (value := getattr(given, destination)) is not None:
                _set(environ, name, str(int(value)) if isinstance(value, bool) else value)
        given.notes = []
        for row, name, value in getattr(given, FOREIGN) or ():
            try:
                meaning = row.meaning(name, value, environ)
            except ConfigError as error:
                self.error(str(error))
            for env, text in meaning.settings.items():
                _set(environ, env, text)
            given.notes += meaning.notes
        return given

    def _add_foreign(self, row: OptionRow) -> None:
        """Add an option that is more than another name of a setting."""
        names = [name for name in row.names if name not in self._option_string_actions]
        if not row.is_option or not names:
            return
        if row.is_flag:
            self._flags |= set(names)
            names += [name.replace("--", "--no-", 1) for name in names if name.startswith("--")]
        nargs = 0 if row.is_flag else "?" if row.is_always_refused else None
        where = REFUSED if row.is_always_refused else FOREIGN
        self.add_argument(*names, dest=where, action=_Foreign, nargs=nargs, const=row, help=argparse.SUPPRESS)

    def _normalized(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments with dashes for underscores in names, and flags with a value (`--use-warmup 1`) as
        `--use-warmup` or `--no-use-warmup`, and several values (`--lora-modules a=x b=y`) as one.
        """
        rest, result = list(arguments), []
        while rest:
            name, sign, value = rest.pop(0).partition("=")
            if not name.startswith("--"):
                result.append(name + sign + value)
                continue
            name = table.dashed(name)
            if name in SEVERAL and (name != "--served-model-name" or _names_model(arguments)):
                (pattern, separator), values = SEVERAL[name], [value] if sign else []
                while rest and pattern.fullmatch(rest[0]):
                    values.append(rest.pop(0))
                sign, value = "=" if values else "", separator.join(values)
            if name in self._flags and not sign and rest and rest[0].lower() in BOOLEANS:
                sign, value = "=", rest.pop(0)
            if name in self._flags and value.lower() in BOOLEANS:
                result.append(name if BOOLEANS[value.lower()] else name.replace("--", "--no-", 1))
            else:
                result.append(name + sign + value)
        return result

    def _answer(self, unknown: Sequence[str]) -> NoReturn:
        name = next((each for each in unknown if each.startswith("-")), "").partition("=")[0]
        if not name:
            self.error(f"only one model can be served, {unknown[0]!r} is another argument")
        meant = self._closest(name)
        self.error(f"{name} is no option{f', did you mean {meant}?' if meant else ', see --help'}")

    def _closest(self, name: str) -> str | None:
        """Return the option that was probably meant. Of those that are about as similar it is one that --help shows."""
        scores = {
            option: difflib.SequenceMatcher(None, name.lstrip("-"), option.lstrip("-")).ratio()
            + (0 if action.help == argparse.SUPPRESS else IS_COMMON)
            for option, action in self._option_string_actions.items()
            if option.startswith("--")
        }
        best = max(scores, key=lambda option: scores[option])
        return best if scores[best] >= IS_CLOSE else None


def _names_model(arguments: Sequence[str]) -> bool:
    """Return whether the model is the first argument or has an option, so that no later argument names it."""
    options = {argument.partition("=")[0] for argument in arguments}
    return not arguments[0].startswith("-") or not options.isdisjoint(("--model", "--model-path"))


def _synonyms(env: str) -> list[str]:
    """Return other names of a setting, which --help shows: those of vLLM and FastDeploy."""
    rows = [row for row in table.ROWS if row.setting == env and row.is_option and row.is_synonym]
    short = [name for name, of in SHORT.items() if of == env]
    return short + [name for row in rows if {VLLM, FASTDEPLOY} & {*row.servers} for name in row.names]


def _set(environ: MutableMapping[str, str], env: str, text: str) -> None:
    """Set a setting's variable, and unset its old names."""
    for name in SETTINGS[env].old:
        environ.pop(name, None)
    environ[env] = text


def own_name(env: str) -> str:
    """Return the option of a setting's environment variable."""
    return f"--{env.lower().replace('_', '-')}"
