"""Journal of open answers: prompt, sampling parameters (with seed) and received tokens, from which another engine
process can continue them. Independent of sockets. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.core.spans import PromptSpan
from engine.core.types import Logprobs, PromptOutputs, Sampling
from engine.errors import RequestError


class Listener(Protocol):
    """Callbacks of one answer. The last call is either `ended` or `tokens` with a finish_reason."""

    def prompt_outputs(self, outputs: PromptOutputs) -> None:
        """Take the prompt outputs, before the first tokens from an engine process."""
        ...

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None, finish_reason: str | None) -> None:
        """Take new tokens. `logprobs` has one item per token, or is None if not requested. `finish_reason`
        belongs to the last token."""
        ...

    def ended(self, error: RequestError) -> None:
        """Take the error that has ended the answer."""
        ...


@dataclass
class Submission:
    """Request for one answer. A `request_id` must never be reused: tokens of a cancelled answer may be in flight."""

    request_id: str
    sampling: Sampling
    listener: Listener
    token_ids: list[int] = field(default_factory=list)  # received tokens


@dataclass
class JournalEntry:
    """One prompt and its open answers."""

    name: str  # id of the first answer
    prompt_ids: Sequence[int]
    answers: dict[str, Submission]
    salt: str = ""  # of the prefix cache
    queue_position: tuple[str, int] = ("", 0)  # (owner, priority), which order the waiting requests
    spans: Sequence[PromptSpan] = ()
    cached_at: str = ""  # see Request
    submitted: bool = False  # to the current engine process
    replay: bool = False
    num_uncached: int = 0  # tokens of the prompt that are to be computed, until the first token of an answer
    has_moved: bool = False  # from a lost engine to another one

    @classmethod
    def of(  # noqa: PLR0913 - the parts of a submission
        cls,
        prompt_ids: Sequence[int],
        submissions: Sequence[Submission],
        salt: str = "",
        queue_position: tuple[str, int] = ("", 0),
        spans: Sequence[PromptSpan] = (),
        cached_at: str = "",
    ) -> JournalEntry:
        """Return the entry of a new request. `cached_at` is the address of a replica that has cached a part of the
        prompt."""
        answers = {submission.request_id: submission for submission in submissions}
        return cls(submissions[0].request_id, tuple(prompt_ids), answers, salt, queue_position, spans, cached_at)

    @property
    def has_grammar(self) -> bool:
        """Return whether an answer has structured output."""
        return any(submission.sampling.structured_output for submission in self.answers.values())


class SharedPixels:
    """Pixels of the images of open prompts, each image once."""

    def __init__(self) -> None:
        self._pixels: dict[bytes, bytes] = {}  # by content hash
        self._num_uses: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._pixels)

    def add(self, spans: Sequence[PromptSpan]) -> list[PromptSpan]:
        """Return the spans with the pixels that other prompts have of the same images."""
        self._num_uses.update(span.content_hash for span in spans)
        return [replace(span, pixels=self._pixels.setdefault(span.content_hash, span.pixels)) for span in spans]

    def remove(self, spans: Sequence[PromptSpan]) -> None:
        """Release the pixels of a prompt, which was added."""
        for span in spans:
            self._num_uses[span.content_hash] -= 1
            if not self._num_uses[span.content_hash]:
                del self._num_uses[span.content_hash], self._pixels[span.content_hash]


class Journal:
    """Open prompts with their answers. Thread-safe."""

    def __init__(self) -> None:
        self.pixels = SharedPixels()
        self._entries: dict[str, JournalEntry] = {}  # by name
        self._entry_of: dict[str, JournalEntry] = {}  # by the ids of open answers
        self.num_queued_tokens = 0  # sum of `num_uncached`
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of open answers."""
        return len(self._entry_of)

    def open(self, entry: JournalEntry) -> None:
        """Add an entry with all its answers."""
        with self._lock:
            assert self._entry_of.keys().isdisjoint(entry.answers), f"{entry.name} is open already"
            entry.spans = self.pixels.add(entry.spans)
            self._entries[entry.name] = entry
            self._entry_of.update(dict.fromkeys(entry.answers, entry))
            self.num_queued_tokens += entry.num_uncached

    def take(self, name: str) -> JournalEntry | None:
        """Remove an entry with its open answers, for another journal. Return None if it is not open."""
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._note_begun(entry)
                self.pixels.remove(entry.spans)
                for request_id in entry.answers:
                    del self._entry_of[request_id]
            return entry

    def find(self, name: str) -> tuple[JournalEntry | None, list[Submission]]:
        """Return the entry with this name, or None, and its open answers."""
        with self._lock:
            entry = self._entries.get(name)
            return entry, list(entry.answers.values()) if entry else []

    def name_of(self, request_id: str) -> str:
        """Return the name of the entry that an answer belongs to; empty when it is not open."""
        with self._lock:
            return self._entry_of[request_id].name if request_id in self._entry_of else ""

    def entries(self) -> dict[str, JournalEntry]:
        """Return a copy of all entries by name."""
        with self._lock:
            return dict(self._entries)

    def enter(self, request_id: str, token_ids: Sequence[int], is_end: bool) -> tuple[JournalEntry, Submission] | None:
        """Record received tokens. Return the answer and its entry, or None if the answer is not open any more."""
        with self._lock:
            entry = self._entry_of.get(request_id)
            if entry is None:
                return None
            submission = entry.answers[request_id]
            submission.token_ids += token_ids
            if entry.num_uncached:
                self._note_begun(entry)
            if is_end:
                self._remove(entry, request_id)
            return entry, submission

    def remove(self, request_id: str) -> tuple[JournalEntry, Submission] | None:
        """Remove an answer. Return it and its entry, or None if it is not open."""
        with self._lock:
            entry = self._entry_of.get(request_id)
            return None if entry is None else (entry, self._remove(entry, request_id))

    def remove_all(self) -> list[Submission]:
        """Remove all answers and return them."""
        with self._lock:
            submissions = [entry.answers[request_id] for request_id, entry in self._entry_of.items()]
            for entry in self._entries.values():
                self.pixels.remove(entry.spans)
            self._entries.clear()
            self._entry_of.clear()
            self.num_queued_tokens = 0
            return submissions

    def _remove(self, entry: JournalEntry, request_id: str) -> Submission:
        del self._entry_of[request_id]
        submission = entry.answers.pop(request_id)
        if not entry.answers:
            self._note_begun(entry)
            del self._entries[entry.name]
            self.pixels.remove(entry.spans)
        return submission

    def _note_begun(self, entry: JournalEntry) -> None:
        self.num_queued_tokens -= entry.num_uncached
        entry.num_uncached = 0
