"""Names of files of an exported model that are used outside the package, and the identity of the model."""

import hashlib
from pathlib import Path

CONFIG, MANIFEST = "config.json", "manifest.json"


def model_hash(graph_dir: Path) -> str:
    """Return a hash of the manifest and the config, the latter with a hash of the weights (`infer_model_checkpoint`).

    It is equal on machines that have exported the same checkpoint in the same way.
    """
    return hashlib.sha256(b"".join((graph_dir / name).read_bytes() for name in (MANIFEST, CONFIG))).hexdigest()[:16]
