"""Input processing: converts a checked request into prompt token ids and sampling parameters, within the limits of the
model and the server."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.core.cache_groups import FULL_ATTENTION, PAGED
from engine.core.spans import PromptSpan
from engine.core.types import Sampling
from engine.errors import InvalidRequest
from engine.exporting.classifier import has_token_classifier, load_classifier
from engine.exporting.manifest import Manifest
from engine.images.reader import ImageReader
from engine.serving.grammar_builder import GrammarBuilder
from engine.serving.image_prompts import Chat, ImagePrompts
from engine.serving.length_limits import CacheSize, LengthLimits
from engine.serving.lora_registry import LoraRegistry
from engine.serving.prompt_outputs import check_classifier, check_prompt_outputs
from engine.settings.config import Config
from engine.text.tokenizer import Tokenizer
from engine.wire import SCORE, GenerationRequest, shown


@dataclass(frozen=True)
class Prompt:
    """Tokenized prompt with the sampling parameters of its answers."""

    token_ids: list[int]
    sampling: Sampling  # of the first answer
    n: int = 1  # answers to generate
    salt: str = ""  # prompts with different salts do not share prefix cache blocks
    classifier: np.ndarray | None = None  # f32 [num_labels, hidden_size]; None: scores are not requested
    reasoning: str | None = None  # see `GrammarBuilder.reasoning_of`
    spans: tuple[PromptSpan, ...] = ()  # of its images

    def pooled(self, hidden: bytes) -> bytes:
        """Return the pooled output for the hidden state `hidden`, f32 [hidden_size]: the scores, f32 [num_labels], if
        they are requested, else the hidden state."""
        return hidden if self.classifier is None else (self.classifier @ np.frombuffer(hidden, np.float32)).tobytes()

    def sampling_of(self, index: int) -> Sampling:
        """Return the sampling parameters of answer `index`. Seeds count up: the answer of n=1 is the first of n=2."""
        return replace(self.sampling, seed=(self.sampling.seed + index) % 2**64)


@dataclass(frozen=True)
class InputProcessor:
    """Validates, renders and tokenizes the requests of one model. Immutable, so threads can share it."""

    tokenizer: Tokenizer
    vocab_size: int  # of the model; at least the tokenizer's
    lengths: LengthLimits
    loras: LoraRegistry
    grammar_builder: GrammarBuilder = GrammarBuilder()
    classifier: np.ndarray | None = None  # f32 [num_labels, hidden_size] of a model that scores and does not generate
    joins_pairs: bool = False  # the classifier reads logits of a generative model: a pair is one concatenated text
    images: ImagePrompts | None = None  # None: the model takes text only, or images are turned off
    model_hash: str = ""  # equal on servers of the same model; empty: not a server

    @classmethod
    def load(
        cls,
        config: Config,
        graph_dir: Path,
        tokenizer: Tokenizer,
        cache_size: CacheSize = lambda: None,
        loras: LoraRegistry | None = None,
    ) -> InputProcessor:
        """Return the processor of the exported model in `graph_dir`. `cache_size` is that of LengthLimits."""
        model, reader = Manifest.read(graph_dir), ImageReader.load(config, graph_dir)
        model_len = config.model_len(model.max_seq_len)
        max_seq_len, max_dec_len = min(config.max_prompt_len, model_len), min(config.max_answer_len, model_len)
        num_paged, num_bounded = _cache_groups(model, config)
        lengths = LengthLimits(
            model_len=model_len,
            max_seq_len=max_seq_len,
            max_dec_len=max_dec_len,
            cache_size=cache_size,
            is_cut_by_setting=model_len < model.max_seq_len,
            num_paged=num_paged,
            num_bounded=num_bounded,
        )
        return cls(
            tokenizer=tokenizer,
            vocab_size=model.vocab_size,
            lengths=lengths,
            loras=loras or LoraRegistry(config, graph_dir),
            grammar_builder=GrammarBuilder.of_server(config),
            classifier=load_classifier(graph_dir),
            joins_pairs=has_token_classifier(graph_dir),
            images=ImagePrompts(tokenizer, reader, config.max_images) if reader else None,
        )

    def process(self, request: GenerationRequest) -> Prompt:
        """Tokenize the request and check it against all limits. Raises InvalidRequest, whose message names the field,
        the value and the limit."""
        token_ids, spans = self._prompt_ids(request)
        check_classifier(request, self.classifier is not None)
        self.check_ids(request.source, token_ids)
        max_new_tokens = self.lengths.max_new_tokens(request, len(token_ids))
        check_prompt_outputs(request, len(token_ids))
        self.check_ids("eos_token_ids", request.eos_token_ids)
        self.check_ids("bad_words_token_ids", request.bad_words_token_ids)
        self.check_ids("logit_bias", [token_id for token_id, _ in request.logit_bias])
        reasoning = self.grammar_builder.reasoning_of(request, token_ids, self.tokenizer)
        sampling = self._sampling(request, max_new_tokens, reasoning)
        self._check_not_all_banned(sampling)
        for answer in request.answer_ids:
            self.check_ids("answer_ids", answer)
            if len(answer) > max_new_tokens:
                text = "The `{field}` has {value} tokens, the answer at most {limit}"
                raise InvalidRequest(text, field="answer_ids", value=len(answer), limit=max_new_tokens)
        classifier = self.classifier if request.pooling == SCORE else None
        n = request.n if request.use_beam_search else request.best_of or request.n
        return Prompt(token_ids, sampling, n, request.cache_salt or "", classifier, reasoning, tuple(spans))

    def close(self) -> None:
        """End the processes that decode images."""
        if self.images:
            self.images.reader.close()

    def _sampling(self, request: GenerationRequest, max_new_tokens: int, reasoning: str | None) -> Sampling:
        stop_ids = self._stop_ids(request)
        grammar = self.grammar_builder.build(request, reasoning, stop_ids, self.tokenizer)
        if request.structured_output and request.structured_output.kind == "token_ids":
            self.check_ids(request.structured_output.field, request.structured_output.value)
        is_choosing = request.is_chosen and not request.use_beam_search
        return Sampling(
            max_new_tokens=max_new_tokens,
            min_new_tokens=request.min_dec_len or 0,
            **vars(request.parameters),
            seed=secrets.randbits(63) if request.infer_seed is None else request.infer_seed % 2**64,
            stop_token_ids=stop_ids,
            bad_words=self._bad_words(request),
            logit_bias=request.logit_bias,
            num_logprobs=max(request.logprobs, 0) if is_choosing else request.logprobs,
            num_beams=(request.best_of or request.n) if request.use_beam_search else 0,
            length_penalty=request.length_penalty,
            num_prompt_logprobs=request.prompt_logprobs,
            pooling="last" if request.pooling == SCORE else request.pooling or "",
            structured_output=grammar,
            adapter=self.loras.find(request.lora_name) if request.lora_name else (),
        )

    def _prompt_ids(self, request: GenerationRequest) -> tuple[list[int], list[PromptSpan]]:
        try:
            token_ids, spans = self._token_ids(request)
        except InvalidRequest as error:  # errors of the tokenizer and the template have no field
            raise (error if error.field else error.blaming(request.source)) from None
        if not token_ids:
            raise InvalidRequest("The prompt has no tokens", field=request.source)
        if limit := request.truncate_prompt_tokens:
            num_kept = limit if limit > 0 else self.lengths.longest_prompt(request)
            if spans and num_kept < len(token_ids):
                text = "The `{field}` would cut a prompt with images, which has {value} tokens"
                raise InvalidRequest(text, field="truncate_prompt_tokens", value=len(token_ids), limit=num_kept)
            token_ids = token_ids[-num_kept:]
        return token_ids, spans

    def _token_ids(self, request: GenerationRequest) -> tuple[list[int], list[PromptSpan]]:
        if request.input_ids is not None:
            return list(request.input_ids), []
        if request.text_pair is not None and request.text is not None:
            return self._pair_ids(request, request.text, request.text_pair), []
        if request.text is None and request.images:
            return self.encode_images(self._chat_of(request, request.messages or []))
        if request.text is None:
            return self._chat_ids(request, request.messages or []), []
        if self.tokenizer.has_chat_template and request.apply_chat_template:
            return self._chat_ids(request, [{"role": "user", "content": request.text}]), []
        self.check_size("text", request.text)
        return self.tokenizer.encode(request.text), []

    def encode_images(self, chat: Chat) -> tuple[list[int], list[PromptSpan]]:
        """Return the token ids of a chat with images, and the spans of these. Raises InvalidRequest."""
        if self.images is None:
            raise chat.images[0].error("is an image: the model takes text only, or ENABLE_MM=0 has turned images off")
        parts = self.images.render(chat)
        self.check_size("messages", "".join(parts))
        return self.images.encode(parts, chat, self.lengths.max_seq_len)

    def _pair_ids(self, request: GenerationRequest, text: str, pair: str) -> list[int]:
        """Return the token ids of a pair: by the chat template if it has the roles query and document, else by the
        tokenizer's pair encoding."""
        if self.tokenizer.writes_pairs:
            messages = [{"role": "query", "content": text}, {"role": "document", "content": pair}]
            return self._chat_ids(request, messages)
        if request.chat_template_kwargs:
            needed = "a chat template that writes pairs, by the roles query and document"
            raise InvalidRequest(f"The `{{field}}` needs {needed}", field="chat_template_kwargs")
        self.check_size("text", text)
        self.check_size("text_pair", pair)
        return self.tokenizer.encode(text + pair) if self.joins_pairs else self.tokenizer.encode(text, pair=pair)

    def check_size(self, field: str, text: str) -> None:
        """Raise PromptTooLong if `text` cannot fit with any tokenization."""
        num_bytes = len(text.encode("utf-8", "surrogatepass"))  # the tokenizer refuses lone surrogates
        self.lengths.check_bytes(field, num_bytes, self.tokenizer.max_token_bytes)

    def _chat_ids(self, request: GenerationRequest, messages: list[dict]) -> list[int]:
        chat = self._chat_of(request, messages)
        text = self.tokenizer.render_chat(chat.messages, **chat.variables)
        self.check_size(request.source, text)
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template adds them

    def _chat_of(self, request: GenerationRequest, messages: list[dict]) -> Chat:
        if request.system:
            messages = [{"role": "system", "content": request.system}, *messages]
        return Chat(messages, request.images, request.chat_template_kwargs or {}, request.mm_processor_kwargs)

    def _stop_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        stop_ids = request.eos_token_ids
        if not request.ignore_eos:
            stop_ids += tuple(token_id for token_id in self.tokenizer.eos_token_ids if token_id < self.vocab_size)
        return tuple(dict.fromkeys(stop_ids))

    def _check_not_all_banned(self, sampling: Sampling) -> None:
        banned = {word[-1] for word in sampling.bad_words}
        if sampling.min_new_tokens:
            banned.update(sampling.stop_token_ids)
        if len(banned) >= self.vocab_size:
            others = "`{bad_words_token_ids}` and, with `{min_dec_len}`, `{eos_token_ids}`"
            raise InvalidRequest(f"The `{{field}}`, {others} may ban every token", field="bad_words")

    def check_ids(self, name: str, token_ids: list[int] | tuple[int, ...]) -> None:
        """Raise InvalidRequest for the field `name` if an id is not in the model's vocabulary."""
        if token_ids and max(token_ids) >= self.vocab_size:
            text = "The `{field}` holds {value}, the vocabulary has {limit} tokens"
            raise InvalidRequest(text, field=name, value=max(token_ids), limit=self.vocab_size)

    def _bad_words(self, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
        """Return the banned token sequences. A word is tokenized differently at the beginning of a text and after a
        space, so both sequences are banned."""
        words: list[tuple[int, ...]] = [(token_id,) for token_id in request.bad_words_token_ids]
        for word in request.bad_words:
            for text in (word, f" {word}"):
                token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if not token_ids:
                    text = "The `{field}` item {value} has no tokens"
                    raise InvalidRequest(text, field="bad_words", value=shown(word))
                words.append(token_ids)
        return tuple(dict.fromkeys(words))


def _cache_groups(model: Manifest, config: Config) -> tuple[int, int]:
    """Return the number of paged cache groups, and the blocks that the other groups of a request need at most."""
    groups = [group for graph in model.graphs.values() for group in graph.cache_groups] or FULL_ATTENTION
    others = [group for group in groups if group.kind != PAGED]
    num_blocks = -(-model.max_seq_len // model.block_size)
    sizes = [group.max_blocks(num_blocks, model.block_size, config.max_step_tokens) for group in others]
    return len(groups) - len(others), sum(sizes)
