"""How long prompt and answer may be: by the model, the settings, and the blocks of the KV cache. Knows no tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import InvalidRequest, PromptTooLong
from engine.wire import GenerationRequest

CacheSize = Callable[[], tuple[int, int] | None]


@dataclass(frozen=True)
class Lengths:
    """In tokens. `model_len` limits prompt and answer together; `cache_size` gives the blocks of the KV cache and the
    tokens of each, None when they are not known yet."""

    model_len: int
    max_seq_len: int
    max_dec_len: int
    cache_size: CacheSize = lambda: None

    def check_bytes(self, field: str, num_bytes: int, max_token_bytes: int) -> None:
        """Refuses what is too long whatever its tokens are, before time goes into finding them."""
        limit = self.max_seq_len * max_token_bytes
        if num_bytes > limit:
            name = self._limit("MAX_SEQ_LEN", self.max_seq_len)
            sentence = f"The prompt has {{value}} bytes, at most {{limit}} fit the limit {name}({self.max_seq_len})."
            raise PromptTooLong(sentence, field=field, value=num_bytes, limit=limit)

    def longest_prompt(self, request: GenerationRequest) -> int:
        """Beside the answer that is asked for."""
        answer_len = 0 if request.pooling else _shortest_answer(request)
        if not request.cut_max_dec_len:
            answer_len = max(answer_len, request.max_dec_len or 0)
        return max(1, min(self.max_seq_len, self.model_len - answer_len))

    def max_new_tokens(self, request: GenerationRequest, prompt_len: int) -> int:
        """Of each answer to such a prompt. Raises InvalidRequest."""
        if prompt_len > self.max_seq_len:
            name = self._limit("MAX_SEQ_LEN", self.max_seq_len)
            text = f"Length of input token({{value}}) exceeds the limit {name}({{limit}})."
            raise PromptTooLong(text, field=request.source, value=prompt_len, limit=self.max_seq_len)
        if request.pooling:
            return 0
        minimum, maximum = _shortest_answer(request), request.max_dec_len
        num_made = request.best_of or request.n
        longest = min(self.model_len - prompt_len, self.max_dec_len, self._room(prompt_len, num_made))
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
            text = "The prompt has {value} tokens, the model takes {limit} and an answer"
            raise PromptTooLong(text, field=request.source, value=prompt_len, limit=self.model_len - minimum)
        if maximum is None:
            return max(minimum, longest)
        if minimum > maximum:
            text = "The parameter {field}({value}) exceeds {max_dec_len}({limit})."
            raise InvalidRequest(text, field="min_dec_len", value=minimum, limit=maximum)
        self._check_fits("max_dec_len", prompt_len, maximum)
        return maximum

    def _limit(self, setting: str, value: int) -> str:
        """Whose limit it is: where the model ends, its length or its window, no setting helps."""
        return setting if value < self.model_len else "of the model"

    def _room(self, prompt_len: int, n: int) -> int:
        """The longest that each of `n` answers can be when they run at once. They share the full blocks of the prompt;
        the last token needs no place."""
        if (cache_size := self.cache_size()) is None:
            return self.model_len
        num_blocks, block_size = cache_size
        num_shared = prompt_len // block_size
        return (num_shared + (num_blocks - num_shared) // n) * block_size - prompt_len + 1

    def _check_fits(self, name: str, prompt_len: int, answer_len: int) -> None:
        if prompt_len + answer_len > self.model_len:
            text = f"Input text is too long, input_ids_len ({prompt_len}) + {{field}} ({{value}}) > "
            text += f"max_seq_len ({self.model_len})"
            raise PromptTooLong(text, field=name, value=answer_len, limit=self.model_len - prompt_len)


def _shortest_answer(request: GenerationRequest) -> int:
    return request.min_dec_len or int(request.max_dec_len != 0)
