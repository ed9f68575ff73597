"""Variables that are set and do nothing: misspelt ones, and settings of an export where the model is exported already.
Those of other servers are in engine/settings/foreign."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import fields

from engine.settings.config import Config
from engine.settings.foreign.table import VARIABLES

OF_AN_EXPORT = ("dtype", "quant_type", "block_size", "use_cache_kv_int8", "load_format", "hf_overrides")

OF_FASTDEPLOY = "FD_"


def set_for_an_export(config: Config) -> list[str]:
    """Return the variables that are set but have no effect, because the model is already exported."""
    are_set = [f for f in fields(Config) if f.name in OF_AN_EXPORT and getattr(config, f.name) != f.default]
    return [f.metadata["setting"].env for f in are_set]


def likely_misspelt(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return one sentence for each unknown variable whose name resembles a setting, because it is probably misspelt, or
    begins as those of FastDeploy."""
    settings = [f.metadata["setting"] for f in fields(Config)]
    known = {name.upper(): name for s in settings for name in (s.env, *s.old)} | {
        name.upper(): name for name in VARIABLES
    }
    sentences = []
    for name in sorted(environ.keys() - set(known.values())):
        written = (name.upper(), name.upper().removeprefix("MAX_"))  # MAX_BATCH_SIZE is BATCH_SIZE
        if close := [match for each in written for match in difflib.get_close_matches(each, known, 1, cutoff=0.88)]:
            sentences.append(f"{name} is no setting, did you mean {known[close[0]]}?")
        elif name.startswith(OF_FASTDEPLOY) and environ[name]:
            sentences.append(f"{name} has no effect: there is no such setting")
    return sentences
