"""A checkpoint is exported into the cache once: not again, not twice at a time, not when the result is stale."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

import engine.exporting.cache
from engine.errors import TokenizerError
from engine.exporting.cache import NUM_PIECES, PIECE, WHOLE_UP_TO, _fingerprint, _identity, export_cached
from engine.exporting.export import ExportOptions
from engine.exporting.manifest import GRAPH_VERSION, is_exported
from tests.patience import PATIENCE_S


def change_manifest(**keys):
    def change(directory: Path) -> None:
        path = directory / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return change


def test_an_incomplete_or_older_export_is_not_taken_for_one(exported, tmp_path):
    assert not is_exported(tmp_path)
    for damage in (
        lambda d: (d / "rank_0/model.pdiparams").unlink(),
        lambda d: (d / "manifest.json").write_text("{"),
        lambda d: (d / "manifest.json").unlink(),
        change_manifest(version=0),
        change_manifest(num_ranks=2),
    ):
        directory = shutil.copytree(exported("qwen2"), tmp_path / "copy")
        damage(directory)
        assert not is_exported(directory)
        shutil.rmtree(directory)


def test_the_cache_exports_once_until_something_changes(a_checkpoint, tmp_path, no_paddle):
    def cached(**options) -> Path:
        return export_cached(a_checkpoint, tmp_path / "cache", ExportOptions(**options))

    first = cached()
    assert is_exported(first)
    assert cached() == first
    assert len(no_paddle) == 1
    assert cached(block_size=32) != first
    os.utime(a_checkpoint / "model.safetensors", ns=(0, 0))
    assert cached() != first
    assert len(no_paddle) == 3


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_other_content_of_the_same_size_and_time_is_exported_anew(a_checkpoint, tmp_path, name, place):
    """Two fine-tunes of one model can look like this, in image layers and object stores whose files all have the same
    time.
    """
    path = a_checkpoint / name
    content, times = bytearray(path.read_bytes()), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    options = ExportOptions()
    first = _identity(a_checkpoint, options)
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=times)
    assert _identity(a_checkpoint, options) != first


def test_of_large_files_pieces_are_read_all_over(tmp_path):
    path = tmp_path / "model.safetensors"
    size = 3 * WHOLE_UP_TO
    with path.open("wb") as file:
        file.truncate(size)
    prints, longest = {_fingerprint(path)}, size // NUM_PIECES + PIECE
    for count, start in enumerate(range(0, size - longest + 1, longest), start=2):
        with path.open("r+b") as file:
            file.seek(start)
            file.write(bytes([count % 255 + 1]) * longest)
        prints.add(_fingerprint(path))
        assert len(prints) == count


def test_a_checkpoint_whose_tokenizer_cannot_be_read_is_refused_before_the_work(a_checkpoint, tmp_path, no_paddle):
    (a_checkpoint / "tokenizer.json").rename(a_checkpoint / "vocab.json")
    with pytest.raises(TokenizerError, match=rf"no tokenizer.json in {a_checkpoint} \(found vocab.json\)"):
        export_cached(a_checkpoint, tmp_path / "cache", ExportOptions())
    assert not (tmp_path / "cache").exists()
    assert no_paddle == []


def test_an_older_graph_version_in_the_cache_is_made_anew(a_checkpoint, tmp_path, no_paddle, monkeypatch):
    first = export_cached(a_checkpoint, tmp_path / "cache", ExportOptions())
    monkeypatch.setattr(engine.exporting.cache, "GRAPH_VERSION", GRAPH_VERSION + 1)
    assert export_cached(a_checkpoint, tmp_path / "cache", ExportOptions()) != first


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "rank_0/model.json").unlink(),
        lambda d: (d / "rank_0/model.pdiparams").write_bytes(b"cut off"),
        lambda d: (d / "tokenizer.json").unlink(),
        lambda d: (d / "manifest.json").write_text(""),
        lambda d: (d / "files.json").write_text(""),
        shutil.rmtree,
    ],
    ids=["no program", "other weights", "no tokenizer", "empty manifest", "empty sizes", "nothing"],
)
def test_a_damaged_entry_is_made_anew(a_checkpoint, tmp_path, no_paddle, damage):
    steps: list[str] = []
    made = export_cached(a_checkpoint, tmp_path / "cache", ExportOptions())
    files = {path: path.stat().st_size for path in made.rglob("*")}
    damage(made)
    says_so = [f"{made} is damaged, and is made anew"] if made.exists() else []
    assert export_cached(a_checkpoint, tmp_path / "cache", ExportOptions(), steps.append) == made
    assert {path: path.stat().st_size for path in made.rglob("*")} == files
    assert steps[: len(says_so)] == says_so
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [f".{made.name}.lock", made.name]


def test_nothing_takes_its_name_before_it_is_on_the_disk(a_checkpoint, tmp_path, no_paddle, monkeypatch):
    synced: list[str] = []

    def fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").resolve()
        assert ".partial" in str(path)
        synced.append(path.name)

    monkeypatch.setattr(os, "fsync", fsync)
    made = export_cached(a_checkpoint, tmp_path / "cache", ExportOptions())
    assert sorted(synced[:-1]) == sorted(path.name for path in made.rglob("*"))
    assert synced[-1].startswith(f".{made.name}.")


def test_the_leftovers_of_a_killed_export_are_removed(a_checkpoint, tmp_path, no_paddle):
    made = export_cached(a_checkpoint, tmp_path / "cache", ExportOptions())
    left_over = tmp_path / "cache" / f".{made.name}.abc.partial"
    made.rename(left_over)
    others = [tmp_path / "cache" / f".another-0123.{age}.partial" for age in ("old", "new")]
    for path in others:
        path.mkdir()
    os.utime(others[0], (0, 0))
    assert export_cached(a_checkpoint, tmp_path / "cache", ExportOptions()) == made
    assert not left_over.exists()
    assert [path.exists() for path in others] == [False, True]


def test_two_starts_at_once_export_once(a_checkpoint, tmp_path, no_paddle):
    steps: list[str] = []
    entered, waiting = threading.Event(), threading.Event()

    def first_progress(step: str) -> None:
        entered.set()
        assert waiting.wait(PATIENCE_S)

    def second_progress(step: str) -> None:
        steps.append(step)
        waiting.set()

    def start(progress) -> None:
        export_cached(a_checkpoint, tmp_path / "cache", ExportOptions(), progress)

    first = threading.Thread(target=start, args=(first_progress,))
    first.start()
    assert entered.wait(PATIENCE_S)
    start(second_progress)
    first.join()
    assert steps == ["wait for another process that exports the same checkpoint"]
    assert len(no_paddle) == 1
