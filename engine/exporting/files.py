"""Names of files of an exported model that are used outside the package, and the identity of the model."""

import hashlib
import json
from pathlib import Path

CONFIG, MANIFEST = "config.json", "manifest.json"
NUM_RANKS_KEY = "infer_model_num_ranks"  # in the config


def model_hash(graph_dir: Path) -> str:
    """Return a hash of the manifest and the config, the latter with a hash of the weights (`infer_model_checkpoint`).

    It is equal on machines that have exported the same checkpoint in the same way.
    """
    return hashlib.sha256(b"".join((graph_dir / name).read_bytes() for name in (MANIFEST, CONFIG))).hexdigest()[:16]


def model_hash_of_any_ranks(graph_dir: Path) -> str:
    """Return a hash of the config, with a hash of the weights and the options of the export, but without the number of
    ranks."""
    config = json.loads((graph_dir / CONFIG).read_text())
    config.pop(NUM_RANKS_KEY, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
