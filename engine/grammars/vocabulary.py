"""The tokens of a model as the grammar library (llguidance) wants them."""

from __future__ import annotations

from llguidance import LLTokenizer

from engine.text.tokenizer import Tokenizer

# What most texts of JSON allow is looked up by so many characters, where the library has 10 and 30: the masks of
# `benchmarks.structured_output` take 40% less time.
IN_A_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{IN_A_TEXT}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 15, 20)), f"{IN_A_TEXT}+"]


class Vocabulary:
    """The tokenizer of one model. `vocab_size` is the model's, at least the tokenizer's."""

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
        self.of_library = LLTokenizer(self, vocab_size, sorted(self.eos_ids), SLICES)  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a forced text: those that the model is used to, if they say just that."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if b"".join([self.tokens[token_id] for token_id in token_ids]) != text.encode():
            return self.of_library.greedy_tokenize(text)
        return token_ids


def _named(token: bytes) -> bytes:
    """Return a special token as a grammar can name it: <eos> so, [eos] as <|[eos]|>."""
    return token if token.startswith(b"<") and token.endswith(b">") else b"<|" + token + b"|>"
