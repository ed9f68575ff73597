"""Option `--completion bash` or `zsh`, which prints a script for shell completion of a command's options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

SCRIPT = """\
_llm_{name}() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  case $before in
{cases}
  esac
  case $word in
    -*) COMPREPLY=($(compgen -W "{options}" -- "$word")) ;;
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _llm_{name} {name}
"""
CASE = '    {names}) COMPREPLY=($(compgen -W "{values}" -- "$word")); return ;;'
REFUSED = "refused"  # destination of known but unsupported options, which are not completed
BEFORE = {"bash": "", "zsh": "autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n"}


class _Print(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, given: Any, shell: Any, option: str | None = None) -> None:
        print(BEFORE[shell] + script(parser, self.const), end="")
        parser.exit()


def add_completion(parser: argparse.ArgumentParser, values: Mapping[str, Sequence[str]] = {}) -> None:  # noqa: B006
    """Add the option `--completion`. `values` maps destinations of options to values that argparse does not know."""
    text = "print what completes these options: source <(%(prog)s --completion bash)"
    parser.add_argument("--completion", action=_Print, choices=[*BEFORE], const=values, help=text)


def script(parser: argparse.ArgumentParser, values: Mapping[str, Sequence[str]]) -> str:
    """Return the completion script."""
    options = [action for action in parser._actions if action.option_strings and action.dest != REFUSED]
    cases = [
        CASE.format(names="|".join(action.option_strings), values=" ".join(map(str, known)))
        for action in options
        if (known := values.get(action.dest) or action.choices)
    ]
    names = sorted(name for action in options for name in action.option_strings)
    return SCRIPT.format(name=parser.prog, cases="\n".join(cases), options=" ".join(names))
