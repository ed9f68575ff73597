"""The journal: every open answer with its prompt, its sampling (with its seed) and the tokens received so far, which is
all that another engine needs to go on with it. Knows no sockets and no engine. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.types import Logprobs, PromptOutputs, Sampling
from engine.errors import RequestError


class Listener(Protocol):
    """Told what happens to one answer. Exactly one of `ended` and `tokens` with a finish_reason comes last."""

    def prompt_outputs(self, told: PromptOutputs) -> None:
        """Before the first tokens of an engine process."""
        ...

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None, finish_reason: str | None) -> None:
        """Those that came together, `finish_reason` of the last; `logprobs` has one for each, when asked for. None
        where none was asked for."""
        ...

    def ended(self, error: RequestError) -> None: ...


@dataclass
class Submission:
    """An answer that is wanted. A `request_id` is never used twice: tokens of one that was cancelled may still be on
    their way."""

    request_id: str
    sampling: Sampling
    listener: Listener
    token_ids: list[int] = field(default_factory=list)  # what was received


@dataclass
class Entry:
    """One prompt and its open answers."""

    name: str  # the id of the first
    prompt_ids: Sequence[int]
    answers: dict[str, Submission]
    salt: str = ""  # of the prefix cache
    standing: tuple[str, int] = ("", 0)  # its owner, and its priority: where it stands among those who wait
    submitted: bool = False  # to the engine process of now
    replay: bool = False

    @property
    def has_grammar(self) -> bool:
        return any(submission.sampling.form for submission in self.answers.values())


class Journal:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}  # by name
        self._entry_of: dict[str, Entry] = {}  # by the ids of open answers
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Open answers."""
        return len(self._entry_of)

    def open(
        self, prompt_ids: Sequence[int], submissions: Sequence[Submission], salt: str, standing: tuple[str, int]
    ) -> Entry:
        answers = {submission.request_id: submission for submission in submissions}
        entry = Entry(submissions[0].request_id, tuple(prompt_ids), answers, salt, standing)
        with self._lock:
            assert self._entry_of.keys().isdisjoint(answers), f"{entry.name} is open already"
            self._entries[entry.name] = entry
            self._entry_of.update(dict.fromkeys(answers, entry))
        return entry

    def find(self, name: str) -> tuple[Entry | None, list[Submission]]:
        """A prompt and what is open of it."""
        with self._lock:
            entry = self._entries.get(name)
            return entry, list(entry.answers.values()) if entry else []

    def name_of(self, request_id: str) -> str:
        """Return the name of the entry that an answer belongs to; empty when it is not open."""
        with self._lock:
            return self._entry_of[request_id].name if request_id in self._entry_of else ""

    def entries(self) -> dict[str, Entry]:
        with self._lock:
            return dict(self._entries)

    def enter(self, request_id: str, token_ids: Sequence[int], is_end: bool) -> tuple[Entry, Submission] | None:
        """Tokens that were received; None when nobody wants them any more."""
        with self._lock:
            entry = self._entry_of.get(request_id)
            if entry is None:
                return None
            submission = entry.answers[request_id]
            submission.token_ids += token_ids
            if is_end:
                self._remove(entry, request_id)
            return entry, submission

    def forget(self, request_id: str) -> tuple[Entry, Submission] | None:
        with self._lock:
            entry = self._entry_of.get(request_id)
            return None if entry is None else (entry, self._remove(entry, request_id))

    def forget_all(self) -> list[Submission]:
        with self._lock:
            submissions = [entry.answers[request_id] for request_id, entry in self._entry_of.items()]
            self._entries.clear()
            self._entry_of.clear()
            return submissions

    def _remove(self, entry: Entry, request_id: str) -> Submission:
        del self._entry_of[request_id]
        submission = entry.answers.pop(request_id)
        if not entry.answers:
            del self._entries[entry.name]
        return submission
