"""Export of a draft model (SPECULATE_METHOD=draft) for an exported model, and the checks that the two fit together, or
that the export has a layer that drafts (SPECULATE_METHOD=mtp or eagle3)."""

from __future__ import annotations

from pathlib import Path

from engine.core.cache_groups import PAGED
from engine.errors import ConfigError, SetupError
from engine.exporting.manifest import Manifest, is_exported
from engine.log import Report
from engine.models.config import DRAFT_GRAPHS
from engine.settings.config import Config
from engine.text.tokenizer import Tokenizer


def export_draft_model(graph_dir: Path, config: Config, report: Report) -> Path | None:
    """Return the folder of the exported draft model, or None without one. Export it if necessary, for one rank and with
    the block size of the model in `graph_dir`. Raises ConfigError if the two do not fit together."""
    path, model = config.draft_model_path, Manifest.read(graph_dir)
    if path is None or config.speculate_method in DRAFT_GRAPHS:
        return None
    try:
        if not is_exported(path):
            from engine.exporting.cache import export_cached  # slow to import; an engine starts without it
            from engine.exporting.export import ExportOptions

            options = ExportOptions(block_size=model.block_size)
            path = export_cached(path, Path(config.export_cache_dir).expanduser(), options, report)
        _check_graphs(model, Manifest.read(path))
        _check_tokenizers(graph_dir, path)
    except SetupError as error:
        raise ConfigError(f"SPECULATE_MODEL_PATH is {config.speculate_model_path!r}: {error}") from None
    return path


def check_layer(graph_dir: Path, config: Config) -> None:
    """Raise ConfigError unless the exported model has the layer that drafts for it."""
    method = config.speculate_method
    if method not in Manifest.read(graph_dir).graphs:
        raise ConfigError(
            f"SPECULATE_METHOD is {method}, {graph_dir} was exported without the layer that drafts; export its"
            f" checkpoint again with --{method}"
        )


def _check_graphs(model: Manifest, draft: Manifest) -> None:
    """Raise ConfigError if the caches of the draft model cannot have the block ids of the model."""
    if all(group.kind != PAGED for group in model.graph().cache_groups):
        raise ConfigError("the served model has no layer with full attention, whose blocks a draft model could share")
    for group in draft.graph().cache_groups:
        if group.kind != PAGED:
            what = "a sliding window" if group.window else "a state"
            raise ConfigError(f"layer_types: a layer of the draft model has {what}, all must have full attention")
    if draft.block_size != model.block_size:
        raise ConfigError(
            f"block_size is {draft.block_size}, the served model has {model.block_size}; export the draft model again,"
            " or name its checkpoint"
        )
    if draft.num_ranks != 1:
        raise ConfigError(f"num_ranks is {draft.num_ranks}, a draft model runs on one rank; name its checkpoint")


def _check_tokenizers(graph_dir: Path, draft_dir: Path) -> None:
    """Raise ConfigError unless each token id stands for the same text in both models."""
    ours, theirs = Tokenizer.load(graph_dir).vocabulary, Tokenizer.load(draft_dir).vocabulary
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        raise ConfigError(
            f"tokenizer.json: the draft model has {len(theirs)} tokens, the served model has {len(ours)}; they must be"
            " the same"
        )
    token = min(token for token in ours if theirs.get(token) != ours[token])
    raise ConfigError(
        f"tokenizer.json: the token {token!r} has the id {theirs.get(token)} in the draft model, and {ours[token]} in"
        " the served model; they must be the same"
    )
