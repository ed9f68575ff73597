"""Which tokens an answer of a given form may have next: forms (engine.text.forms) compiled with llguidance, and masks
over the vocabulary. Knows tokens and their bytes; of requests what they have and how they end, of steps nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from engine.core.grammar import Choice
from engine.core.types import Grammar, Request
from engine.errors import InvalidRequest, RequestError, literally
from engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_CACHED = 1 << 20  # characters of compiled forms: a hostile one takes some 400 bytes of memory for each
STACK_BYTES = 256 << 20  # the library descends into rules: 6 KB a level, some 10,000 levels fit into a request's limit
# Of one form, found by all its answers together: about 0.4 s to compile and 15 ms a token at worst. A long one may have
# a state for each of its bytes: a choice of many texts has.
MIN_LEXER_STATES = 50_000
# What most texts of JSON allow is looked up by so many characters, where the library has 10 and 30: the masks of
# `benchmarks.forms` take 40% less time.
IN_A_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{IN_A_TEXT}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 15, 20)), f"{IN_A_TEXT}+"]
QUIET = 0
MAX_ERROR_LEN = 300
NO_END = "no text has this form"
NOTHING: Sequence[int] = ()
T = TypeVar("T")


class Matcher:
    """An `engine.core.grammar.Grammar`: what one answer may still become. `field` asks for that."""

    def __init__(self, matcher: LLMatcher, field: str):
        self.matcher = matcher
        self._field = field
        self.error: RequestError | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.matcher.is_stopped()

    def advance(self, token_ids: Sequence[int]) -> None:
        self.matcher.consume_tokens(list(token_ids))
        self.note_error()

    def forced(self) -> Sequence[int]:
        return self.matcher.compute_ff_tokens() if self.error is None else NOTHING

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return self.matcher.validate_tokens(list(token_ids)) if self.error is None else 0

    def note_error(self) -> None:
        if self.error is None and self.matcher.is_error():
            text = f"The `{{field}}` cannot be followed any further: {literally(_brief(self.matcher))}"
            self.error = InvalidRequest(text, field=self._field)


class MatcherGrammars:
    """`engine.core.grammar.Grammars` of one model. `vocab_size` is the model's, at least the tokenizer's; that is
    loaded when it is needed."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int):
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # least recently used first
        self._masking = LLExecutor()

    def load(self) -> Future[None]:
        """What the first request would wait for, and others with it: a vocabulary of 150,000 tokens holds Python's lock
        for most of a second."""
        return self._submit(self._load)

    def begin(self, request: Request) -> Future[Sequence[Grammar]]:
        return self._submit(self._begin, request)

    def _submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        stack_bytes = threading.stack_size(STACK_BYTES)  # of the thread, which begins with the first call
        try:
            return self._thread.submit(work, *arguments)
        finally:
            threading.stack_size(stack_bytes)

    def masks(self, choices: Sequence[Choice]) -> np.ndarray:
        """u32 [S, ceil(V / 32)], as `engine.core.types.Step.mask` wants it."""
        guided: list[tuple[Request, Matcher, int, list[int]]] = []  # with its first row
        num_rows = 0
        for request, drafts in choices:
            if isinstance(request.grammar, Matcher):
                guided.append((request, request.grammar, num_rows, list(drafts)))
            num_rows += 1 + len(drafts)
        bits = np.full((num_rows, -(-self._vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        where = (bits.ctypes.data, 4 * bits.shape[1], num_rows)
        if plain := [(grammar.matcher, row) for _, grammar, row, drafts in guided if not drafts]:
            self._masking.unsafe_compute_mask_ptr(plain, *where)
        if drafted := [(grammar.matcher, row, drafts) for _, grammar, row, drafts in guided if drafts]:
            self._masking.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        for request, grammar, row, drafts in guided:
            grammar.note_error()
            says_which = request.sampling.form[0] == "allowed_token_ids"  # may end it, too
            if not says_which and self._words.eos_ids.symmetric_difference(request.sampling.stop_token_ids):
                self._let_end(bits[row : row + 1 + len(drafts)], request.sampling.stop_token_ids)
        return bits

    def _let_end(self, bits: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Where the form may end, the stop ids of the request may be chosen instead of the usual ones."""
        eos = self._words.eos_token_id
        may_end = (bits[:, eos // 32] >> (eos % 32) & 1).astype(bool)
        for token_id in self._words.eos_ids:
            bits[may_end, token_id // 32] &= ~np.uint32(1 << token_id % 32)
        for token_id in stop_ids:
            bits[may_end, token_id // 32] |= np.uint32(1 << token_id % 32)

    # The thread

    def _load(self) -> None:
        if self._tokenizer.eos_token_ids:  # else no answer can have a form
            _ = self._words

    def _begin(self, request: Request) -> Sequence[Grammar]:
        field, form = request.sampling.form
        compiled = self._compile(field, form)
        matchers = []
        for each in (request, *request.forks):
            matchers.append(matcher := Matcher(compiled.deep_copy(), field))
            known = each.token_ids[each.prompt_len :]
            if known and matcher.num_allowed(known) < len(known):
                text = f"The `{{field}}` do not have the form that `{{{field}}}` asks for"
                raise InvalidRequest(text, field="answer_ids")
            matcher.advance(known)
        return matchers

    def _compile(self, field: str, form: str) -> LLMatcher:
        if compiled := self._compiled.get(form):
            self._compiled.move_to_end(form)
            return compiled
        started = time.monotonic()
        max_states = max(MIN_LEXER_STATES, len(form.encode()))
        limits = LLParserLimits(max_lexer_states=max_states, verbose_errors=False)
        compiled = LLMatcher(self._words.vocabulary, form, log_level=QUIET, limits=limits)
        if not compiled.is_error():
            compiled.deep_copy().compute_bitmask()  # the first mask finds out what is left
            compiled.compute_bitmask()
        if compiled.is_error():
            text = f"The `{{field}}` cannot be compiled: {literally(_brief(compiled))}"
            raise InvalidRequest(text, field=field)
        log.info("a form of %d characters compiled in %.0f ms", len(form), 1e3 * (time.monotonic() - started))
        self._compiled[form] = compiled
        while len(self._compiled) > 1 and sum(map(len, self._compiled)) > MAX_CACHED:
            self._compiled.popitem(last=False)
        return compiled

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load_tokenizer()

    @cached_property
    def _words(self) -> _Words:
        return _Words(self._tokenizer, self._vocab_size)


class _Words:
    """The tokenizer as the library wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.special_token_ids = sorted(each for each in tokenizer.special_ids if each < vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        for token_id in self.special_token_ids:
            self.tokens[token_id] = b"\xff" + _named(self.tokens[token_id])  # no text: 0xff is in no character
        self.eos_ids = frozenset(each for each in tokenizer.eos_token_ids if each < vocab_size)
        self.eos_token_id = min(self.eos_ids)
        self._tokenizer = tokenizer
        self.vocabulary = LLTokenizer(self, vocab_size, sorted(self.eos_ids), SLICES)  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """How forced text is written: with the tokens that the model is used to, if they say just that."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if b"".join([self.tokens[token_id] for token_id in token_ids]) != text.encode():
            return self.vocabulary.greedy_tokenize(text)
        return token_ids


def _named(token: bytes) -> bytes:
    """As a grammar can name a special token: <eos> so, [eos] as <|[eos]|>."""
    return token if token.startswith(b"<") and token.endswith(b">") else b"<|" + token + b"|>"


def _brief(matcher: LLMatcher) -> str:
    reason = matcher.get_error().partition("\n<")[0].strip()[:MAX_ERROR_LEN]
    return NO_END if reason.startswith("NoExtension") else reason
