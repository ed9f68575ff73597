"""The engine offline, with the counting executor: byte tokens, so that "a" continues "bcd"."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from engine import llm as llm_module
from engine.core import block_pool, running_queue, scheduler
from engine.core.types import NO_TOKEN, StepOutput
from engine.errors import ConfigError, InvalidRequest, NoToken
from engine.exporting.manifest import Manifest
from engine.llm import LLM
from engine.settings.foreign.keywords import own_keywords
from tests.byte_tokenizer import write_tokenizer
from tests.pure.counting_executor import CountingExecutor

ROOT = Path(__file__).parents[3]
GREEDY = {"temperature": 0, "max_dec_len": 3}


@pytest.fixture
def llm(tmp_path, monkeypatch):
    write_tokenizer(tmp_path)
    Manifest(400, 64, 4, 1, "float32", {}).write(tmp_path)
    monkeypatch.setattr(llm_module, "is_exported", lambda directory: True)
    monkeypatch.setattr(llm_module, "make_executor", lambda directory, config, owns_process: CountingExecutor(12, 4))
    monkeypatch.setattr(llm_module, "allocate_cache", lambda executor, config, model_len: executor.num_blocks)
    llm = LLM(model=tmp_path, max_num_seqs=4)
    yield llm
    llm.close()
    assert llm._loop.executor.is_closed


def test_answers_come_in_the_order_of_their_prompts(llm):
    prompts = ["a", [ord("k")], {"input_ids": [ord("u")], "max_dec_len": 1}]
    answers = llm.generate(prompts, GREEDY, progress=False)
    assert [answer.text for answer in answers] == ["bcd", "lmn", "v"]
    assert [answer.token_ids for answer in answers] == [list(b"bcd"), list(b"lmn"), list(b"v")]
    assert [answer.prompt_token_ids for answer in answers] == [[ord("a")], [ord("k")], [ord("u")]]
    assert {answer.finish_reason for answer in answers} == {"length"}


def test_a_chat_is_one_conversation_or_several(llm):
    chat = [{"role": "user", "content": "a"}]
    parts = [{"type": "text", "text": "c"}]
    longer = [*chat, {"role": "assistant", "content": "b"}, {"role": "user", "content": parts}]
    expected = llm.generate([{"messages": chat}, {"messages": longer}], GREEDY, progress=False)
    assert llm.chat(chat, GREEDY, progress=False) == expected[:1]
    assert llm.chat([chat, longer], GREEDY, progress=False) == expected
    assert len(expected[1].prompt_token_ids) > len(expected[0].prompt_token_ids)
    assert llm.chat([], GREEDY, progress=False) == []
    with pytest.raises(InvalidRequest, match="prompt 1: .*messages"):
        llm.chat([chat, "text"], GREEDY, progress=False)


def test_settings_have_the_names_of_other_servers_as_well(tmp_path):
    given = {"max_num_seqs": 8, "quantization": "wint4", "speculative_config": {"method": "ngram"}, "max_model_len": 64}
    more = {
        "max_concurrency": 100,
        "enable_mm": False,
        "limit_mm_per_prompt": {"image": 10},
        "mm_processor_kwargs": None,
        "tokenizer": None,
        "data_parallel_size": 1,
        "enable_prefix_caching": False,
    }
    assert own_keywords({**given, **more}) == {
        "batch_size": "8",
        "max_cached_task_num": "92",
        "quant_type": "weight_only_int4",
        "speculate_method": "ngram",
        "max_model_len": 64,
        "data_parallel_size": 1,
        "enable_mm": False,
        "limit_mm_per_prompt": '{"image": 10}',
        "mm_processor_kwargs": None,
        "enable_prefix_caching": False,
    }
    with pytest.raises(ConfigError, match="^enable_mm_output is not supported"):
        LLM(tmp_path, enable_mm_output=True)
    with pytest.raises(ConfigError, match="there is no setting batchsize; did you mean batch_size?"):
        LLM(tmp_path, batchsize=8)


@pytest.mark.parametrize("prompt", ["a", {"text": "a", "apply_chat_template": False}, {"input_ids": [ord("a")]}])
def test_one_text_or_dict_is_one_prompt(llm, prompt):
    [answer] = llm.generate(prompt, GREEDY, progress=False)
    assert answer.text == "bcd"


@pytest.mark.parametrize("name", ["max_dec_len", "seq_len", "max_tokens"])
@pytest.mark.parametrize("shared", ["max_dec_len", "seq_len", "max_tokens"])
def test_a_field_of_a_prompt_wins_by_whichever_of_its_names(llm, name, shared):
    answers = llm.generate([{"input_ids": [ord("a")], name: 1}, "a"], {"temperature": 0, shared: 3}, progress=False)
    assert [answer.text for answer in answers] == ["b", "bcd"]


def test_more_prompts_than_the_server_would_take_are_all_answered(llm):
    answers = llm.generate(["a"] * 300, GREEDY, progress=False)
    assert [answer.text for answer in answers] == ["bcd"] * 300
    assert llm._loop.stats()["num_blocks_held"] == 0


def test_several_answers_to_a_prompt_follow_each_other_each_with_its_own_seed(llm):
    fields = {"temperature": 1, "max_dec_len": 5, "seed": 3}
    prompts = [{"input_ids": [ord("a")], "n": 3}, "k"]
    answers = llm.generate(prompts, fields, progress=False)
    assert llm._loop.stats()["num_prompt_tokens"] == 2
    alone = [llm.generate([[ord("a")]], {**fields, "seed": seed}, progress=False)[0] for seed in (3, 4, 5)]
    assert answers[:3] == alone
    assert answers[3:] == llm.generate("k", fields, progress=False)
    stopped = llm.generate("a", {**GREEDY, "n": 2, "stop": "c"}, progress=False)
    assert [answer.text for answer in stopped] == ["b", "b"]
    assert llm._loop.is_idle


@pytest.mark.parametrize("logprobs", [-1, 0])
def test_of_best_of_answers_the_n_likeliest_are_given_the_best_first(llm, logprobs):
    fields = {"temperature": 1, "max_dec_len": 5, "logprobs": 0}
    alone = [llm.generate("a", {**fields, "seed": seed}, progress=False)[0] for seed in (5, 6, 7, 8)]
    means = [sum(each.chosen for each in answer.logprobs) / len(answer.logprobs) for answer in alone]
    likeliest = [alone[means.index(mean)].token_ids for mean in sorted(means, reverse=True)]
    asked = {**fields, "seed": 5, "best_of": 4, "n": 2, "logprobs": logprobs}
    *answers, next_one = llm.generate(
        ["a", {"input_ids": [ord("k")], "best_of": 1, "n": 1, **GREEDY}], asked, progress=False
    )
    assert [answer.token_ids for answer in answers] == likeliest[:2]
    assert likeliest[:2] != [answer.token_ids for answer in alone[:2]]
    assert [bool(answer.logprobs) for answer in answers] == [logprobs == 0] * 2
    assert next_one.token_ids == list(b"lmn")


def test_more_answers_than_run_at_once_are_all_given(llm):
    answers = llm.generate("a", {**GREEDY, "n": 5}, progress=False)
    assert [answer.text for answer in answers] == ["bcd"] * 5


def test_a_stop_string_or_a_stop_id_ends_the_answer(llm):
    fields = {"temperature": 0, "max_dec_len": 9}
    by_string, by_id = llm.generate(
        [{"input_ids": [ord("a")], "stop": "de"}, {"input_ids": [ord("a")], "eos_token_ids": [ord("e")]}],
        fields,
        progress=False,
    )
    assert (by_string.text, by_string.finish_reason) == ("bc", "stop")
    assert (by_id.text, by_id.token_ids, by_id.finish_reason) == ("bcd", list(b"bcd"), "stop")
    assert llm._loop.is_idle


def test_each_token_of_the_answer_has_its_logprobs(llm):
    [answer] = llm.generate([[ord("a")]], {**GREEDY, "logprobs": 1, "eos_token_ids": [ord("d")]}, progress=False)
    assert [logprobs.top[0][0] for logprobs in answer.logprobs] == answer.token_ids == list(b"bc")


def test_a_wrong_prompt_is_named_and_nothing_of_the_call_remains(llm):
    with pytest.raises(InvalidRequest, match="prompt 1: .* exceeds the limit of the model"):
        llm.generate(["a", [1] * 65], GREEDY, progress=False)
    with pytest.raises(InvalidRequest, match="^prompt 1: .* need 13 KV blocks of 4 tokens, the server has 12"):
        llm.generate(["a", [1] * 40], {"temperature": 0, "max_dec_len": 12}, progress=False)
    assert llm._loop.is_idle
    assert llm.generate("k", GREEDY, progress=False)[0].text == "lmn"


def test_numbers_of_numpy_are_numbers(llm):
    [expected] = llm.generate([[3, 4, 5]], {"max_dec_len": 2, "temperature": 0})
    for prompt in (np.array([3, 4, 5]), [*np.array([3, 4, 5])], {"input_ids": np.array([3, 4, 5])}):
        assert llm.generate([prompt], {"max_dec_len": np.int64(2), "temperature": np.float32(0)}) == [expected]


def test_a_prompt_of_a_wrong_type_is_refused_with_the_type(llm):
    for prompts, place, kind in (([1, 2], 0, "int"), (["a", None], 1, "NoneType")):
        with pytest.raises(
            TypeError, match=f"^prompt {place} is of type {kind}, it must be a text, token ids or a dict"
        ):
            llm.generate(prompts)
    for prompts, kind in ((None, "NoneType"), (7, "int"), (b"a", "bytes")):
        with pytest.raises(TypeError, match=f"^`prompts` is of type {kind}, it must be a prompt or a list of prompts"):
            llm.generate(prompts)
    with pytest.raises(TypeError, match="^`sampling` is of type list, it must be a dict of request fields"):
        llm.generate("a", ["b"])
    with pytest.raises(InvalidRequest, match="^prompt 1: .*top_p"):
        llm.generate(["a", {"text": "b", "top_p": 7}])


def test_an_interrupted_call_does_not_disturb_the_next(llm, monkeypatch):
    def interrupt(batch):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm._loop.executor, "launch", interrupt)
        llm.generate(["a", "b"], GREEDY, progress=False)
    assert [answer.text for answer in llm.generate(["k", "a"], GREEDY, progress=False)] == ["lmn", "bcd"]


@contextmanager
def an_interrupt_at_line(number):
    """Raise KeyboardInterrupt at the n-th line of the scheduler, its queues or its block pool, as a signal does."""
    files, lines = (block_pool.__file__, running_queue.__file__, scheduler.__file__), count(1)

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and next(lines) == number:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_an_interrupt_in_the_middle_of_the_books_does_not_disturb_the_next_call(llm):
    for number in range(1, 500, 7):
        with an_interrupt_at_line(number), pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b" * 9], {**GREEDY, "max_dec_len": 9}, progress=False)
        assert [answer.text for answer in llm.generate(["k", "b"], GREEDY, progress=False)] == ["lmn", "cde"]
        llm._loop.scheduler.check()


def test_calls_from_several_threads_take_turns(llm, monkeypatch):
    launch = llm._loop.executor.launch
    monkeypatch.setattr(llm._loop.executor, "launch", lambda batch: time.sleep(0.001) or launch(batch))
    with ThreadPoolExecutor(4) as threads:
        calls = {text: threads.submit(llm.generate, [text] * 5, GREEDY, False) for text in "afkp"}
        answers = {text: {answer.text for answer in call.result()} for text, call in calls.items()}
    assert answers == {"a": {"bcd"}, "f": {"ghi"}, "k": {"lmn"}, "p": {"qrs"}}


def test_a_model_that_gives_no_token_is_an_error_and_the_next_call_goes_on(llm, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(NoToken):
        patch.setattr(llm._loop.executor, "_choose", lambda batch: StepOutput([[NO_TOKEN]], [None]))
        llm.generate("a", GREEDY, progress=False)
    assert llm.generate("k", GREEDY, progress=False)[0].text == "lmn"


def test_the_progress_bar_counts_answers(llm, capfd):
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capfd.readouterr().err


def test_a_directory_without_a_tokenizer_is_refused(llm, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="there is no tokenizer.json"):
        LLM(tmp_path / "empty")


@pytest.mark.slow
def test_the_offline_engine_needs_no_sockets():
    code = "import sys, engine.llm; sys.exit('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_wrong_setting_is_refused_with_its_keyword_and_its_limit(tmp_path):
    with pytest.raises(ConfigError, match="^batch_size is 0, it must be at least 1"):
        LLM(tmp_path, batch_size=0)
    with pytest.raises(ConfigError, match="^there is no setting batchsize; did you mean batch_size"):
        LLM(tmp_path, batchsize=8)
    with pytest.raises(ConfigError, match="^there is no setting nonsense$"):
        LLM(tmp_path, nonsense=3)


def test_a_closed_llm_may_be_closed_again_and_says_that_it_is(llm, monkeypatch):
    llm.close()
    monkeypatch.setattr(llm._loop.executor, "close", lambda: pytest.fail("closed twice"))
    llm.close()
    with pytest.raises(RuntimeError, match="^this LLM is closed$"):
        llm.generate("a", GREEDY, progress=False)


def test_a_fork_may_not_use_the_llm_of_its_parent_which_goes_on(llm):
    with llm._lock:  # by another thread of the parent, so it is not released in the child
        pid = os.fork()
        if not pid:
            signal.alarm(10)
            try:
                llm.close()
                llm.generate("a", GREEDY, progress=False)
            except RuntimeError as error:
                os._exit(0 if f"belongs to process {os.getppid()}" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [answer.text for answer in llm.generate("a", GREEDY, progress=False)] == ["bcd"]


@pytest.mark.slow
def test_a_prompt_whose_grammar_cannot_be_compiled_is_refused_and_the_next_call_works(llm):
    with pytest.raises(InvalidRequest, match="^prompt 1: The `guided_regex` cannot be compiled"):
        llm.generate(["a", {"text": "b", "guided_regex": "(", **GREEDY}], GREEDY, progress=False)
    assert [answer.text for answer in llm.generate(["a"], GREEDY, progress=False)] == ["bcd"]
