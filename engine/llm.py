"""The engine offline, in this process: a list of prompts in, a list of answers out."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from engine.core.loop import EngineLoop
from engine.core.types import Logprobs, Request
from engine.core.updates import FAILED, Update
from engine.errors import ConfigError, InvalidRequest, NoToken
from engine.executors import make_executor
from engine.executors.memory import allocate_cache
from engine.exporting.cache import export_cached
from engine.exporting.export_options import options_of
from engine.exporting.manifest import Manifest, is_exported
from engine.grammars.pool import GrammarPool
from engine.serving.completion_output import CompletionOutput, select_best
from engine.serving.input_processor import InputProcessor, Prompt
from engine.settings.config import Config
from engine.settings.device import with_device
from engine.settings.disaggregation import MIXED
from engine.settings.foreign.keywords import own_keywords
from engine.text.tokenizer import Tokenizer
from engine.wire import GenerationRequest, parse_request
from engine.wire.fields import FIELDS

NAME_OF = {alias: name for name, (aliases, _) in FIELDS.items() for alias in aliases}


@dataclass(frozen=True)
class Answer:
    """Answer to a prompt."""

    text: str
    token_ids: list[int]  # without the stop id
    finish_reason: str  # "stop" or "length"
    prompt_token_ids: list[int]
    logprobs: list[Logprobs]  # one for each token id, when asked for
    prompt_logprobs: list[Logprobs]  # one for each token of the prompt but the first, when asked for
    embedding: list[float]  # of the prompt, or its scores, when asked for: not normalized


def _plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays to the corresponding Python values."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


@dataclass(frozen=True)
class _Open:
    """A request and its answer in the making."""

    options: GenerationRequest
    request: Request
    answer: CompletionOutput
    prompt: Prompt

    def finished(self) -> Answer:
        answer = self.answer
        assert answer.finish_reason
        return Answer(
            text=answer.text,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            prompt_token_ids=self.request.token_ids[: self.request.prompt_len],
            logprobs=[logprobs for logprobs in answer.logprobs if logprobs and self.options.logprobs >= 0],
            prompt_logprobs=self.request.prompt_logprobs,
            embedding=list(memoryview(self.prompt.pooled(self.request.pooled)).cast("f"))
            if self.request.pooled
            else [],
        )


@contextlib.contextmanager
def _naming(index: int | str) -> Iterator[None]:
    """Begin the text of an InvalidRequest with the number of the prompt."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"prompt {index}: {error}") from None


class LLM:
    """Engine with one model in this process. `model` is an exported model or a checkpoint, which is exported once.
    Settings other than the environment's are given by their field names, `LLM(path, batch_size=8)`, or as FastDeploy
    and vLLM name them (`max_num_seqs=8`), and checked like those: raises ConfigError.

    With `mp_num` above 1, if a rank ends, the running call and later ones raise RankFailed or GroupError: close this
    object and make another one. On GPUs, and with several machines, the end of a rank ends this process at once and
    without an exception, because nothing else would wake the threads that wait for the rank."""

    def __init__(self, model: str | Path, **settings: Any):
        config = with_device(Config.from_env().changed(**own_keywords(settings)))
        if config.splitwise_role != MIXED:
            raise ConfigError(f"SPLITWISE_ROLE is {config.splitwise_role}: an LLM computes prompts and answers itself")
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"DATA_PARALLEL_SIZE is {config.data_parallel_size}: an LLM is one engine; several need a server"
            )
        graph_dir = Path(model)
        if not is_exported(graph_dir):
            options = options_of(config, graph_dir)
            graph_dir = export_cached(graph_dir, Path(config.export_cache_dir).expanduser(), options)
        self.tokenizer = Tokenizer.load(graph_dir)
        executor = make_executor(graph_dir, config, owns_process=False)
        self._num_blocks = allocate_cache(executor, config, Manifest.read(graph_dir).max_seq_len)
        # The limits of a server do not apply here.
        self._config = replace(config, max_cached_task_num=2**31, max_waiting_tokens=2**62)
        self._grammars = GrammarPool(partial(Tokenizer.load, graph_dir), Manifest.read(graph_dir).vocab_size, config)
        self._loop = EngineLoop(executor, self._num_blocks, self._config, self._grammars)
        self._lock = threading.Lock()  # of the loop: calls from several threads take turns
        self._pid, self._is_closed = os.getpid(), False
        cache_size = (self._num_blocks, executor.block_size)
        self._processor = InputProcessor.load(config, graph_dir, self.tokenizer, lambda: cache_size)

    def generate(
        self,
        prompts: str | dict[str, Any] | Sequence[str | list[int] | dict[str, Any]],
        sampling: dict[str, Any] | None = None,
        progress: bool = True,
    ) -> list[Answer]:
        """Generate answers to prompts, in their order. A prompt is a text (continued as it stands), token ids, or a
        dict of native request fields such as `{"messages": [...]}`. `sampling` holds native request fields for all of
        them (`max_dec_len`, ...); fields of a prompt take precedence, under any of their names. A prompt with `n` gives
        `n` consecutive answers; with `best_of` or `use_beam_search` the most likely ones, best first.

        Raises InvalidRequest before anything runs if a prompt is refused, NoToken if the model gives no usable logits,
        RuntimeError after `close` and in a fork of the process that created this object.
        """
        if os.getpid() != self._pid:  # it would wait for threads that are its parent's
            text = f"this LLM belongs to process {self._pid}, of which this is a fork: start processes with 'spawn', "
            raise RuntimeError(text + "with an LLM in each")
        if not isinstance(sampling or {}, dict):
            raise TypeError(f"`sampling` is of type {type(sampling).__name__}, it must be a dict of request fields")
        prompts = [prompts] if isinstance(prompts, str | dict) else prompts
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
            raise TypeError(f"`prompts` is of type {type(prompts).__name__}, it must be a prompt or a list of prompts")
        by_prompt = [self._open(index, prompt, sampling or {}) for index, prompt in enumerate(prompts)]
        opened = [item for answers in by_prompt for item in answers]
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this LLM is closed")
            try:
                for index, (first, *_) in enumerate(by_prompt):
                    with _naming(index):
                        self._loop.add(first.request)
                self._run(opened, progress)
            except BaseException:
                # Refused, or interrupted at any line of the scheduler's books: the next call begins with new ones.
                self._grammars.close()
                executor = self._loop.executor
                self._loop = EngineLoop(executor, self._num_blocks, self._config, self._grammars)
                raise
        return [item.finished() for answers in by_prompt for item in select_best(answers, answers[0].options.n)]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling: dict[str, Any] | None = None,
        progress: bool = True,
    ) -> list[Answer]:
        """Generate the next message of a conversation, or of each of several ones. Messages are those of the native
        protocol and OpenAI's: texts, and images as `image_url` parts. `sampling` holds request fields for all of them,
        such as `tools`, `chat_template_kwargs` and `mm_processor_kwargs`. Raises the errors of `generate`."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        return self.generate([{"messages": each} for each in conversations], sampling, progress)

    def close(self) -> None:
        """Free the model when the running call has ended. Has no effect if it is closed, or in a fork of the
        process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._processor.close()
                self._grammars.close()
                self._loop.executor.close()

    def _run(self, opened: list[_Open], progress: bool) -> None:
        by_id = {item.request.request_id: item for item in opened}
        started, num_tokens = time.monotonic(), 0
        with tqdm(total=len(opened), desc="answers", disable=not progress, unit="") as bar:
            while not self._loop.is_idle:
                for update in self._loop.step():
                    num_tokens += len(update.token_ids)
                    bar.update(self._advance(by_id[update.request.request_id], update))
                bar.set_postfix_str(f"{num_tokens / (time.monotonic() - started):.1f} tok/s", refresh=False)

    def _open(self, index: int, prompt: str | list[int] | dict[str, Any], sampling: dict[str, Any]) -> list[_Open]:
        """Return one open request per answer; the others are forks of the first."""
        if isinstance(prompt, str):
            prompt = {"text": prompt, "apply_chat_template": False}
        elif isinstance(prompt, Sequence | np.ndarray):
            prompt = {"input_ids": [_plain(token_id) for token_id in prompt]}
        elif not isinstance(prompt, dict):
            kind = type(prompt).__name__
            raise TypeError(
                f"prompt {index} is of type {kind}, it must be a text, token ids or a dict of request fields"
            )
        own = {NAME_OF.get(key, key) for key in prompt}
        shared = {key: value for key, value in sampling.items() if NAME_OF.get(key, key) not in own}
        fields = {key: _plain(value) for key, value in {**shared, **prompt}.items()}
        with _naming(index):
            request = parse_request({**fields, "req_id": str(index)})
            if request.resume_from is not None or request.answer_ids:
                raise InvalidRequest("`resume_from` and `answer_ids` are for a server")
            read = self._processor.process(request)
        requests = [
            Request(
                f"{index}-{number}",
                list(read.token_ids),
                len(read.token_ids),
                read.sampling_of(number),
                salt=read.salt,
                spans=read.spans,
            )
            for number in range(read.n)
        ]
        requests[0].forks = requests[1:]
        return [_Open(request, each, CompletionOutput(self.tokenizer, request), read) for each in requests]

    def _advance(self, item: _Open, update: Update) -> int:
        """Process an update of the engine loop. Return the number of answers that it has ended."""
        if update.finish_reason == FAILED:
            with _naming(item.request.request_id.partition("-")[0]):
                raise update.error or NoToken()
        logprobs: Sequence[Logprobs | None] = update.logprobs or [None] * len(update.token_ids)
        item.answer.push(list(zip(update.token_ids, logprobs, strict=True)), update.finish_reason)
        if item.answer.finish_reason and not update.finish_reason:  # a stop string
            self._loop.drop(item.request.request_id)
        return int(item.answer.finish_reason is not None)
