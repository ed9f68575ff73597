#!/usr/bin/env python3
"""Fetch a model by name. Downloads are resumable and verified; a second run transfers nothing.

    python download_model.py --model_name Qwen/Qwen2.5-0.5B-Instruct/weight_only_int8 --dir models

By default the checkpoint is fetched from the Hugging Face hub (HF_ENDPOINT and HF_TOKEN are respected), and
the third part of the name is the quantization to export. If MODEL_MIRROR is set, for instance to
https://example.com/models/static, the exported static graph is fetched from
`$MODEL_MIRROR/$tag/$model_name/{model,node1,node2,mtp}/`. In both cases the files are stored in `dir/model_name`.

huggingface_hub provides the file list, checksums and tokens. The bytes are fetched by engine.download, because
current versions of huggingface_hub drop a partial file when the process ends, and compare sizes, not checksums.
"""

import argparse
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from engine.download.copy import Record, fill
from engine.download.files import Denied, DownloadError
from engine.download.sources import list_hub, list_mirror
from engine.download.transfer import Policy
from engine.settings.model import QUANT_TYPES

DEFAULT_MODEL = "deepseek-ai/DeepSeek-R1/weight_only_int4"
DEFAULT_TAG = "3.0.0.b4"
QUANTS = (*QUANT_TYPES, "float16", "bfloat16", "float32")
MODES = ("master", "slave")
# A mirror has separate names for static graphs for two nodes or with a draft layer; the hub has one checkpoint.
MIRROR_VARIANT = re.compile(r"^(deepseek-ai/DeepSeek-(?:R1|V3))(?:-MTP)?(?:-2nodes)?$")
NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True)
class DownloadOptions:
    """Options of a download: the source, and the part of the model that this node needs."""

    mirror: str | None = None  # base URL of a mirror of static models; None: the Hugging Face hub
    tag: str = DEFAULT_TAG  # version folder of the mirror
    hub_endpoint: str | None = None  # None: huggingface_hub's own
    nnodes: int = 1
    mode: str = "master"
    speculate_dir: str | None = None  # folder for the draft model; None: no draft model
    policy: Policy = field(default_factory=Policy)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **others: Any) -> "DownloadOptions":
        """Read the options from environment variables. Raise DownloadError if one is invalid.

        `others` are fields that have no variable: `nnodes`, `mode` and `speculate_dir`.
        """
        rehash = environ.get("MD5_CHECK", "0")
        if rehash not in ("", "0", "1"):
            raise DownloadError(f"MD5_CHECK is {rehash!r}, it must be 0 or 1")
        return cls(
            mirror=environ.get("MODEL_MIRROR") or None,
            tag=environ.get("tag") or DEFAULT_TAG,
            hub_endpoint=environ.get("HF_ENDPOINT", "").rstrip("/") or None,
            policy=Policy(rehash=rehash == "1"),
            **others,
        )

    def check(self) -> None:
        """Raise DownloadError if an option is invalid or two of them contradict each other."""
        if self.nnodes < 1:
            raise DownloadError(f"nnodes is {self.nnodes}, it must be at least 1")
        if self.mode not in MODES:
            raise DownloadError(f"mode is {self.mode!r}, it must be one of {', '.join(MODES)}")
        if self.mirror is None:
            if self.hub_endpoint is not None:
                _check_url("HF_ENDPOINT", self.hub_endpoint)
            if self.speculate_dir is not None:
                raise DownloadError(
                    "speculate_model_path is for a mirror of static models (MODEL_MIRROR), which has the "
                    "draft in a folder of its own; in a checkpoint of the hub it is part of the model: leave it out. A "
                    "smaller model that drafts is fetched by its own name, and SPECULATE_MODEL_PATH is its folder"
                )
            return
        _check_url("MODEL_MIRROR", self.mirror)
        if not _is_name(self.tag):
            raise DownloadError(f"tag is {self.tag!r}, it must be a version such as {DEFAULT_TAG}")
        if self.nnodes > 2:
            raise DownloadError(
                f"nnodes is {self.nnodes}: a mirror of static models has folders for one node (model) and "
                "for two (node1, node2) only"
            )

    @property
    def part(self) -> str:
        """Return the folder of the mirror that has this node's part of the model."""
        if self.nnodes == 1:
            return "model"
        return "node1" if self.mode == "master" else "node2"


@dataclass(frozen=True)
class ModelDownload:
    """Result of a finished download."""

    model_dir: Path
    quant: str | None  # quantization to export with; None: the checkpoint's own data type
    is_static: bool  # the files are an exported static graph, not a checkpoint
    speculate_dir: Path | None = None
    num_fetched: int = 0  # number of files that were transferred; the others were complete already


def parse_model_name(name: str) -> tuple[str, str | None]:
    """Split `org/model[/quant]` into `org/model` and the quantization, which is None if absent.

    Raise DownloadError for characters that are unsafe in a path or a URL, and for an unknown quantization.
    """
    parts = name.split("/")
    if len(parts) not in (2, 3) or not all(map(_is_name, parts)):
        raise DownloadError(f"model_name is {name!r}, it must be org/model or org/model/quantization")
    quant = parts[2] if len(parts) == 3 else None
    if quant is not None and quant not in QUANTS:
        raise DownloadError(f"model_name ends in {quant!r}, the quantizations are: {', '.join(QUANTS)}")
    return "/".join(parts[:2]), quant


def download(name: str, directory: str | Path = "downloads", options: DownloadOptions | None = None) -> ModelDownload:
    """Fetch the model `name` into `directory/name`, which is complete and verified on return.

    Raise DownloadError if the name or an option is invalid, or if a file cannot be fetched or verified.
    """
    repo_id, quant = parse_model_name(name)
    options = options or DownloadOptions.from_env()
    options.check()
    model_dir = Path(directory) / name
    if options.mirror is None:
        num_fetched = _from_hub(repo_id, quant, model_dir, options)
        return ModelDownload(model_dir, quant, is_static=False, num_fetched=num_fetched)
    speculate_dir = Path(options.speculate_dir) if options.speculate_dir else None
    if speculate_dir is not None and speculate_dir.resolve() == model_dir.resolve():
        raise DownloadError(f"speculate_model_path is the model's own directory, {model_dir}")
    num_fetched = _from_mirror(name, options.part, model_dir, options)
    if speculate_dir is not None:
        num_fetched += _from_mirror(name, "mtp", speculate_dir, options)
    return ModelDownload(model_dir, quant, True, speculate_dir, num_fetched)


def _from_hub(repo_id: str, quant: str | None, model_dir: Path, options: DownloadOptions) -> int:
    repo_id = MIRROR_VARIANT.sub(r"\1", repo_id)
    checkpoint_dir = model_dir if quant is None else model_dir.parent
    others = [checkpoint_dir, *(checkpoint_dir / other for other in QUANTS)]
    try:
        return fill(
            model_dir,
            Record(f"{repo_id} of the hub", quant),
            lambda policy, stop: replace(
                list_hub(repo_id, options.hub_endpoint, policy, stop), check=_must_be_supported
            ),
            options.policy,
            twins=[other for other in others if other != model_dir],
        )
    except Denied as error:  # the hub lists gated models to everyone, but restricts access to their files
        raise DownloadError(f"{error}; set HF_TOKEN to a token of an account that may read the model") from None


def _must_be_supported(config_json: Path) -> None:
    """Raise DownloadError if the checkpoint cannot be exported. The check runs before the weights are fetched."""
    from engine.models.config_fields import ModelError, read_json
    from engine.models.families import read_model  # imported here because numpy would slow down --help

    try:
        read_model(read_json(config_json))
    except ModelError as error:
        raise DownloadError(f"{error}; nothing else of the model is fetched") from None


def _from_mirror(name: str, part: str, target_dir: Path, options: DownloadOptions) -> int:
    assert options.mirror
    mirror, place = options.mirror.rstrip("/"), f"{options.tag}/{name}/{part}"
    # The name does not say how the draft model is quantized.
    quant = None if part == "mtp" else parse_model_name(name)[1]
    return fill(
        target_dir,
        Record(f"{place} of a mirror", quant, is_static=True),
        lambda policy, stop: list_mirror(f"{mirror}/{place}", policy, stop),
        options.policy,
    )


def _is_name(part: str) -> bool:
    return NAME_PART.fullmatch(part) is not None and ".." not in part


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the host or the port is malformed
        is_url = False
    if is_url and parts.username is not None:  # the value is not repeated, because messages end up in logs
        raise DownloadError(f"{name} has a user name or password in it, which is not supported")
    if not is_url or re.search(r"[?#\s]", url):
        raise DownloadError(f"{name} is {url!r}, it must be an http(s) URL without query")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments: model_name, dir, nnodes, mode and speculate_model_path."""
    parser = _Parser(prog="download_model.py", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("-m", "--model_name", default=DEFAULT_MODEL, help="org/model or org/model/quantization; default: %(default)s")
    add("-d", "--dir", default="downloads", help="the model goes to dir/model_name; default: %(default)s")
    add("-n", "--nnodes", type=int, default=1, help="nodes that serve the model together; default: %(default)s")
    add("-M", "--mode", choices=MODES, default="master", help="which node this is, if two; default: %(default)s")
    add(
        "-s",
        "--speculate_model_path",
        help="where the draft model goes, only from a mirror; default: it is not fetched",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 1 after an error. Ctrl-C ends the process with 130."""
    args = parse_args(argv)
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("engine.download").setLevel(logging.INFO)
    part = {"nnodes": args.nnodes, "mode": args.mode, "speculate_dir": args.speculate_model_path}
    try:
        options = DownloadOptions.from_env(**part)
        done = download(args.model_name, args.dir, options)
    except DownloadError as error:
        print(f"download_model.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("download_model.py: interrupted; run the same command again to continue", file=sys.stderr, flush=True)
        os._exit(130)  # a normal exit would wait for threads that are blocked on the network
    kind = "static graph" if done.is_static else f"checkpoint, to be exported as {done.quant or 'it is'}"
    print(f"{done.model_dir}: complete, {done.num_fetched} files fetched ({kind})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
