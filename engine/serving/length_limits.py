"""Length limits of prompt and answer: by the model, the settings and the size of the KV cache. It handles numbers of
tokens only, no token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import InvalidRequest, PromptTooLong
from engine.wire import GenerationRequest

CacheSize = Callable[[], tuple[int, int] | None]


@dataclass(frozen=True)
class LengthLimits:
    """Length limits of a server, in tokens. `model_len` limits prompt and answer together. `cache_size` returns the
    number of blocks of the KV cache and the tokens per block, or None while the engine is starting."""

    model_len: int
    max_seq_len: int
    max_dec_len: int
    cache_size: CacheSize = lambda: None
    is_cut_by_setting: bool = False  # model_len is MAX_MODEL_LEN
    num_paged: int = 1  # cache groups that store every position
    num_bounded: int = 0  # upper bound of the blocks that a request needs in its other cache groups

    def check_bytes(self, field: str, num_bytes: int, max_token_bytes: int) -> None:
        """Raise PromptTooLong for a text that exceeds the limit with any tokenization, before it is tokenized."""
        limit = self.max_seq_len * max_token_bytes
        if num_bytes > limit:
            name = self._limit("MAX_SEQ_LEN", self.max_seq_len)
            sentence = f"The prompt has {{value}} bytes, at most {{limit}} fit the limit {name}({self.max_seq_len})."
            raise PromptTooLong(sentence, field=field, value=num_bytes, limit=limit)

    def longest_prompt(self, request: GenerationRequest) -> int:
        """Return the length to which a prompt must be truncated so that the requested answer fits."""
        answer_len = 0 if request.pooling else _shortest_answer(request)
        wanted = request.max_dec_len or 0
        if request.cut_max_dec_len:
            wanted = min(wanted, self.max_dec_len, self.model_len // 2)
        answer_len = max(answer_len, wanted)
        return max(1, min(self.max_seq_len, self.model_len - answer_len))

    def max_new_tokens(self, request: GenerationRequest, prompt_len: int) -> int:
        """Return the maximum length of each answer to a prompt of `prompt_len` tokens. Raises InvalidRequest."""
        if prompt_len > self.max_seq_len:
            name = self._limit("MAX_SEQ_LEN", self.max_seq_len)
            text = f"Length of input token({{value}}) exceeds the limit {name}({{limit}})."
            raise PromptTooLong(text, field=request.source, value=prompt_len, limit=self.max_seq_len)
        if request.pooling:
            return 0
        minimum, maximum = _shortest_answer(request), request.max_dec_len
        longest = self._longest_answer(request, prompt_len)
        if maximum is not None and request.cut_max_dec_len:
            maximum = min(maximum, max(minimum, longest))
        for name, value in (("min_dec_len", minimum), ("max_dec_len", maximum or 1)):
            if value > self.max_dec_len:
                limit = self._limit("MAX_DEC_LEN", self.max_dec_len)
                text = f"The parameter {{field}}({{value}}) exceeds the limit {limit}({{limit}})."
                raise InvalidRequest(text, field=name, value=value, limit=self.max_dec_len)
        if request.min_dec_len:
            self._check_fits("min_dec_len", prompt_len, minimum)
        elif (maximum is None or request.cut_max_dec_len) and prompt_len + minimum > self.model_len:
            text = f"The prompt has {{value}} tokens, the model takes {{limit}} and an answer{self._why()}"
            raise PromptTooLong(text, field=request.source, value=prompt_len, limit=self.model_len - minimum)
        if maximum is None:
            return max(minimum, longest)
        if minimum > maximum:
            text = "The parameter {field}({value}) exceeds {max_dec_len}({limit})."
            raise InvalidRequest(text, field="min_dec_len", value=minimum, limit=maximum)
        self._check_fits("max_dec_len", prompt_len, maximum)
        return maximum

    def _longest_answer(self, request: GenerationRequest, prompt_len: int) -> int:
        """Return the longest possible answer. If the client gives a length, the n answers need not fit the KV cache at
        once: those that do not fit wait."""
        are_at_once = request.max_dec_len is None or request.use_beam_search
        room = self._room(prompt_len, (request.best_of or request.n) if are_at_once else 1)
        return min(self.model_len - prompt_len, self.max_dec_len, room)

    def _limit(self, setting: str, value: int) -> str:
        """Return the name of the effective limit: if the model is the limit, a larger setting does not help."""
        if value < self.model_len:
            return setting
        return "MAX_MODEL_LEN" if self.is_cut_by_setting else "of the model"

    def _why(self) -> str:
        return ": MAX_MODEL_LEN limits prompt and answer together" if self.is_cut_by_setting else ""

    def _room(self, prompt_len: int, n: int) -> int:
        """Return the maximum length of each of `n` answers that run at once. They share the full blocks of the prompt,
        and the last token is not stored."""
        if (cache_size := self.cache_size()) is None:
            return self.model_len
        num_blocks, block_size = cache_size
        if not self.num_paged:
            return self.model_len
        num_blocks = max(0, num_blocks - n * self.num_bounded) // self.num_paged
        num_shared = prompt_len // block_size
        return (num_shared + (num_blocks - num_shared) // n) * block_size - prompt_len + 1

    def _check_fits(self, name: str, prompt_len: int, answer_len: int) -> None:
        if prompt_len + answer_len > self.model_len:
            text = f"Input text is too long, input_ids_len ({prompt_len}) + {{field}} ({{value}}) > "
            text += f"max_seq_len ({self.model_len}){self._why()}"
            raise PromptTooLong(text, field=name, value=answer_len, limit=self.model_len - prompt_len)


def _shortest_answer(request: GenerationRequest) -> int:
    return request.min_dec_len or int(request.max_dec_len != 0)
