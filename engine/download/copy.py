"""Makes a directory a verified copy of a listing, and remembers what has been verified.

A file under its final name is complete and verified; anything else is called `.partial`. A later run
believes a file whose size and time stamp are those of its verification and reads any other again, so
a restart does not read hundreds of gigabytes, and a touched or foreign file is still noticed.
"""

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from engine.download.files import (
    LOCK,
    RECORD,
    DownloadError,
    Listing,
    RemoteFile,
    Temporary,
    has_digest,
    partial_of,
    place,
)
from engine.download.transfer import Policy, Progress, Stop, Transfer
from engine.file_lock import file_lock, unfollowed

log = logging.getLogger(__name__)

ListFiles = Callable[[Policy, Stop], Listing]


@dataclass
class Record:
    """A directory's `download.json`."""

    source: str  # what the directory is a copy of
    quant: str | None = None
    is_static: bool = False
    revision: str | None = None
    is_complete: bool = False
    files: dict[str, dict] = field(default_factory=dict)  # path -> digest, size, mtime_ns when verified

    @classmethod
    def load(cls, root: Path) -> "Record | None":
        """Return the record of a directory, or None if it is missing or damaged; then the files are verified by reading
        them."""
        try:
            return cls(**json.loads((root / RECORD).read_text()))
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            return None

    def save(self, root: Path) -> None:
        draft = partial_of(root / RECORD)
        with open(draft, "w", opener=unfollowed) as file:
            file.write(json.dumps(asdict(self), indent=1) + "\n")
        draft.replace(root / RECORD)

    def note(self, path: str, digest: str, target: Path) -> None:
        stat = target.stat()
        self.files[path] = {"digest": digest, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}

    def is_unchanged(self, path: str, target: Path, digest: str | None = None) -> bool:
        """Return whether `target` still is the file that was recorded, with this digest if one is given."""
        noted = self.files.get(path)
        if noted is None or not target.is_file() or digest not in (None, noted["digest"]):
            return False
        stat = target.stat()
        return (noted["size"], noted["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)

    def has_everything(self, root: Path) -> bool:
        return self.is_complete and all(self.is_unchanged(path, root / path) for path in self.files)


def fill(root: Path, wanted: Record, list_files: ListFiles, policy: Policy, twins: Iterable[Path] = ()) -> int:
    """Download what is missing in `root` and return the number of fetched files. `twins` are directories that may
    contain the same large files. Raises DownloadError."""
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        waits = "%s: another download is at work there, waiting for it"
        with file_lock(root / LOCK, lambda: log.info(waits, root)):
            try:
                root.mkdir(parents=True, exist_ok=True)  # again: another download may just have removed it
                return _fill(root, wanted, list_files, policy, twins)
            finally:
                _remove_if_empty(root, made)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES) and not policy.rehash and _is_complete(root, wanted):
            log.info("%s cannot be written to, and is complete", root)  # mounted for reading only
            return 0
        raise DownloadError(f"{root}: {error}") from error


def _remove_if_empty(root: Path, made: Iterable[Path]) -> None:
    """Remove the folders `made` for a download that has brought nothing, such as one of a mistyped name."""
    with contextlib.suppress(OSError):  # another download may be at work there
        if made and [path.name for path in root.iterdir()] == [LOCK]:
            (root / LOCK).unlink()
            for folder in made:
                folder.rmdir()


def _is_complete(root: Path, wanted: Record) -> bool:
    record = Record.load(root)
    return record is not None and record.source == wanted.source and record.has_everything(root)


def _fill(root: Path, wanted: Record, list_files: ListFiles, policy: Policy, twins: Iterable[Path]) -> int:
    stop = Stop()
    old = Record.load(root)
    if old is not None and old.source != wanted.source:
        raise DownloadError(f"{root} holds {old.source}, not {wanted.source}: choose another directory")
    wanted.files = old.files if old is not None else {}
    if old is None or not old.has_everything(root):
        return _Run(root, wanted, policy, stop, twins).fill(list_files(_few_tries(policy, 3), stop))
    try:
        listing = list_files(_few_tries(policy, 2), stop)
    except Temporary as error:  # a server that is down is no reason not to start what is here
        log.warning("%s; going on with the complete copy in %s", error, root)
        wanted.revision, wanted.is_complete = old.revision, True
        wanted.save(root)
        return 0
    return _Run(root, wanted, policy, stop, twins).fill(listing)


def _few_tries(policy: Policy, num_tries: int) -> Policy:
    """Return the policy with fewer tries, for requests before the first download, when nothing would be lost."""
    return replace(policy, num_tries=min(policy.num_tries, num_tries))


@dataclass
class _Run:
    """One listing on its way into one directory."""

    root: Path
    record: Record
    policy: Policy
    stop: Stop
    twins: Iterable[Path]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # around the record
        self._twins = [(twin, record) for twin in self.twins if (record := Record.load(twin))]

    def fill(self, listing: Listing) -> int:
        self.record.revision = listing.revision
        progress = Progress(self.record.source)
        self._transfer = Transfer(self.policy, self.stop, progress, listing.authorization)
        try:
            num_fetched = self._bring_first(listing) if listing.check else 0
            self._check_room(listing, progress)
            self.record.save(self.root)  # from here on it is not complete
            num_fetched += self._bring_all(listing.files, progress)
        finally:
            progress.close()
        for path in self.record.files.keys() - {file.path for file in listing.files}:
            place(self.root, path).unlink(missing_ok=True)  # an earlier revision's; it was ours
            del self.record.files[path]
        self.record.is_complete = True
        self.record.save(self.root)
        return num_fetched

    def _bring_first(self, listing: Listing) -> int:
        assert listing.check
        first = listing.files[0]
        how = self._bring(first)
        listing.check(place(self.root, first.path))
        return how == "fetched"

    def _bring_all(self, files: list[RemoteFile], progress: Progress) -> int:
        num_fetched = 0
        pool = ThreadPoolExecutor(self.policy.num_workers, thread_name_prefix="download")
        try:
            running = {pool.submit(self._bring, file): file for file in files}
            for num_done, future in enumerate(as_completed(running), start=1):
                how = future.result()
                num_fetched += how == "fetched"
                if not progress.is_visible:
                    log.info("%d/%d %s: %s", num_done, len(files), running[future].path, how)
        except BaseException as error:
            self.stop.set()
            # Who interrupts does not want to wait for a server that is silent.
            pool.shutdown(wait=isinstance(error, DownloadError), cancel_futures=True)
            raise
        pool.shutdown()
        return num_fetched

    def _bring(self, file: RemoteFile) -> str:
        try:
            target = place(self.root, file.path)
            how = self._obtain(file, target)
        except DownloadError as error:
            raise type(error)(f"{file.path}: {error}") from None
        except OSError as error:
            raise DownloadError(f"{file.path}: {error.strerror or error}") from error
        with self._lock:
            self.record.note(file.path, file.digest, target)
            self.record.save(self.root)
        return how

    def _obtain(self, file: RemoteFile, target: Path) -> str:
        if not self.policy.rehash and self.record.is_unchanged(file.path, target, file.digest):
            return "already here"
        if target.is_file() and has_digest(target, file.digest):
            return "already here, verified again"
        target.parent.mkdir(parents=True, exist_ok=True)
        if twin := self._link_twin(file, target):
            return f"the same as in {twin}"
        partial = partial_of(target)
        self._transfer.fetch(file, partial)
        partial.replace(target)
        return "fetched"

    def _find_twin(self, file: RemoteFile) -> Path | None:
        """Return an identical file in another directory, or None. Only weights are shared: they are large and not
        edited, so a hard link is safe."""
        if not file.path.endswith(".safetensors"):
            return None
        twins = (dir for dir, record in self._twins if record.is_unchanged(file.path, dir / file.path, file.digest))
        return next(twins, None)

    def _link_twin(self, file: RemoteFile, target: Path) -> Path | None:
        link = partial_of(partial_of(target))  # a name that is not written to, which would change the twin
        twin = self._find_twin(file)
        if twin is not None:
            link.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not every file system has hard links
                os.link(twin / file.path, link)
                link.replace(target)
                partial_of(target).unlink(missing_ok=True)
                return twin
        return None

    def _check_room(self, listing: Listing, progress: Progress) -> None:
        needed = 0
        for file in listing.files:
            target = place(self.root, file.path)
            if file.size and not target.exists() and self._find_twin(file) is None:
                partial = partial_of(target)
                have = partial.stat().st_size if partial.is_file() else 0
                progress.at(file.path, have, file.size)
                needed += file.size - have
        free = shutil.disk_usage(self.root).free
        if needed > free:
            raise DownloadError(f"{self.root}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB are free")
