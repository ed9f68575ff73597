"""Tests of the conversion of a checked request to tokens and sampling parameters, within the limits of model and
server.
"""

import json
import re
from dataclasses import replace

import pytest
from tokenizers import processors

from engine.core.block_pool import BlockPool
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.limits import Limits
from engine.core.types import Request, Sampling
from engine.errors import InvalidRequest, PromptTooLong
from engine.serving.grammar_builder import GrammarBuilder
from engine.serving.input_processor import InputProcessor
from engine.serving.length_limits import LengthLimits
from engine.settings.config import Config
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.wire import parse_request
from tests.byte_tokenizer import EOS_ID, write_tokenizer
from tests.pure.service_fakes import an_input_processor
from tests.pure.text.test_tokenizer import SPECIAL, a_byte_level_backend

VOCAB_SIZE = 330


@pytest.fixture(scope="module")
def processor(tokenizer):
    return an_input_processor(tokenizer, VOCAB_SIZE)


def a_request(**fields):
    if not fields.keys() & {"text", "messages"}:
        fields.setdefault("input_ids", [1, 2, 3])
    return parse_request({"req_id": "a", **fields})


def sampling_of(processor, **fields):
    return processor.process(a_request(**fields)).sampling


def refusal(processor, **fields):
    with pytest.raises(InvalidRequest) as caught:
        processor.process(a_request(**fields))
    return caught.value


# --- tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "x" * 100_000},
        {"text": "x" * 100_000, "apply_chat_template": False},
        {"text": "x", "system": "x" * 100_000},
        {"messages": [{"content": "x" * 100_000}]},
        {"messages": [{"content": "x", "role": "x" * 100_000}]},
        {"messages": [{"content": ""}] * 10_000},
    ],
    ids=["text", "continued", "system", "content", "role", "many messages"],
)
def test_a_text_that_can_never_fit_is_refused_without_tokenizing_it(processor, monkeypatch, fields):
    monkeypatch.setattr(Tokenizer, "encode", None)
    assert re.search(r"The prompt has \d{6} bytes, at most", str(refusal(processor, **fields)))


def test_text_that_the_chat_template_leaves_out_does_not_count(processor):
    parts = [{"type": "text", "text": "x", "cache_control": "y" * 100_000}]
    assert processor.process(a_request(messages=[{"content": parts}])).token_ids


def test_a_text_is_one_turn_of_the_user_or_continued_as_it_stands(processor, tokenizer):
    chat = processor.process(a_request(text="hello")).token_ids
    assert tokenizer.decode(chat, skip_special_tokens=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert processor.process(a_request(text="hello", apply_chat_template=False)).token_ids == tokenizer.encode("hello")


def test_a_chat_begins_with_the_system_field(processor, tokenizer):
    for fields in ({"text": "hi"}, {"messages": [{"content": "hi"}]}):
        token_ids = processor.process(a_request(system="be brief", **fields)).token_ids
        assert tokenizer.decode(token_ids, False).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user")


def test_token_ids_win_over_text_and_text_over_messages(processor, tokenizer):
    messages = [{"content": "no"}]
    assert processor.process(a_request(input_ids=[5], text="no", messages=messages)).token_ids == [5]
    token_ids = processor.process(a_request(text="yes", messages=messages, apply_chat_template=False)).token_ids
    assert tokenizer.decode(token_ids) == "yes"


def test_a_template_that_writes_the_beginning_of_the_text_gets_no_second_one():
    backend = a_byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = ChatTemplate({"default": "{{ bos_token }}{{ messages[0].content }}"}, SPECIAL)
    tokenizer = Tokenizer(backend, SPECIAL, template)
    processor = an_input_processor(tokenizer, 500)
    chat, plain = (processor.process(a_request(text="hi", apply_chat_template=on)).token_ids for on in (True, False))
    assert chat == plain == tokenizer.encode("hi")
    assert plain.count(0) == 1


def test_variables_reach_the_chat_template(processor):
    with_start = processor.process(a_request(text="hi")).token_ids
    without = processor.process(a_request(text="hi", chat_template_kwargs={"add_generation_prompt": False})).token_ids
    assert with_start[: len(without)] == without != with_start


def test_an_answer_goes_on_with_the_last_message_when_that_is_wished(processor, tokenizer):
    chat = [{"role": "user", "content": "the er"}, {"role": "assistant", "content": "the er"}]
    going_on = a_request(messages=chat, chat_template_kwargs={"continue_final_message": True})
    text = tokenizer.decode(processor.process(going_on).token_ids, skip_special_tokens=False)
    assert tokenizer.render_chat(chat, add_generation_prompt=False).startswith(text) and text.endswith(
        "assistant\nthe er"
    )
    assert going_on.is_continuation  # so its first space is kept, and there are no thoughts first
    assert str(
        refusal(
            processor,
            messages=[*chat[:1], {**chat[1], "content": " "}],
            chat_template_kwargs={"continue_final_message": True},
        )
    ).startswith("the last message has no content")


def test_a_prompt_without_tokens_is_refused(tokenizer, processor):
    silent = Tokenizer(tokenizer._backend, {}, ChatTemplate({"default": "{# nothing #}"}, {}))
    assert str(refusal(replace(processor, tokenizer=silent), text="hi")) == "The prompt has no tokens"


@pytest.mark.parametrize("name", ["input_ids", "eos_token_ids", "bad_words_token_ids"])
def test_ids_outside_of_the_vocabulary_are_refused(processor, name):
    assert sampling_of(processor, **{name: [VOCAB_SIZE - 1]})
    error = refusal(processor, **{name: [3, VOCAB_SIZE]})
    assert str(error) == f"The `{name}` holds {VOCAB_SIZE}, the vocabulary has {VOCAB_SIZE} tokens"


def test_a_bias_outside_of_the_vocabulary_is_refused(processor):
    assert "The `logit_bias` holds 330" in str(refusal(processor, logit_bias={"330": 1}))


def test_a_text_with_a_token_that_the_model_does_not_know_is_refused(processor):
    small = replace(processor, vocab_size=EOS_ID)
    assert "The `text` holds" in str(refusal(small, text="hi"))
    assert small.process(a_request(text="hi", apply_chat_template=False))


def test_an_expression_that_ends_within_an_escape_is_refused(processor):
    for pattern in ("a\\", "\\", "a\\\\\\"):
        error = refusal(processor, guided_regex=pattern)
        assert (error.field, str(error)) == (
            "guided_regex",
            "The `guided_regex` ends with a backslash that escapes nothing",
        )
    assert processor.process(a_request(guided_regex="a\\\\")).sampling.structured_output


# --- lengths: the model takes 100 tokens, of these 80 in the prompt and 50 in the answer


@pytest.mark.parametrize(
    ("prompt_len", "fields", "max_new_tokens"),
    [
        (10, {}, 50),
        (60, {}, 40),
        (80, {}, 20),
        (60, {"max_dec_len": 40}, 40),
        (10, {"max_dec_len": 50}, 50),
        (10, {"max_dec_len": 1}, 1),
        (50, {"min_dec_len": 50}, 50),
        (10, {"min_dec_len": 7, "max_dec_len": 7}, 7),
    ],
)
def test_an_answer_is_as_long_as_asked_or_as_fits(processor, prompt_len, fields, max_new_tokens):
    sampling = sampling_of(processor, input_ids=[1] * prompt_len, **fields)
    assert sampling.max_new_tokens == max_new_tokens
    assert sampling.min_new_tokens == fields.get("min_dec_len", 0)


@pytest.mark.parametrize(
    ("prompt_len", "fields", "message"),
    [
        (81, {}, "Length of input token(81) exceeds the limit MAX_SEQ_LEN(80)."),
        (10, {"max_dec_len": 51}, "The parameter max_dec_len(51) exceeds the limit MAX_DEC_LEN(50)."),
        (10, {"min_dec_len": 51}, "The parameter min_dec_len(51) exceeds the limit MAX_DEC_LEN(50)."),
        (10, {"min_dec_len": 5, "max_dec_len": 4}, "The parameter min_dec_len(5) exceeds max_dec_len(4)."),
        (
            61,
            {"max_dec_len": 40},
            "Input text is too long, input_ids_len (61) + max_dec_len (40) > max_seq_len (100)",
        ),
        (
            61,
            {"min_dec_len": 40},
            "Input text is too long, input_ids_len (61) + min_dec_len (40) > max_seq_len (100)",
        ),
    ],
)
def test_a_length_that_does_not_fit_is_refused_never_cut(processor, prompt_len, fields, message):
    error = refusal(processor, input_ids=[1] * prompt_len, **fields)
    assert str(error) == message
    assert (type(error) is PromptTooLong) == ("nput t" in message or "Length" in message)


def test_a_length_that_may_be_cut_is_as_long_as_there_is_room(processor):
    def length(prompt_len, **fields):
        return sampling_of(processor, input_ids=[1] * prompt_len, cut_max_dec_len=True, **fields).max_new_tokens

    assert [length(10, max_dec_len=10**6), length(70, max_dec_len=10**6), length(10, max_dec_len=5)] == [50, 30, 5]
    assert length(10, max_dec_len=4, min_dec_len=4) == 4
    with pytest.raises(InvalidRequest, match="min_dec_len"):
        length(10, max_dec_len=4, min_dec_len=5)


def test_a_prompt_may_fill_the_model_but_for_one_token(processor):
    processor = replace(processor, lengths=LengthLimits(100, 100, 50))
    assert sampling_of(processor, input_ids=[1] * 99).max_new_tokens == 1
    for fields in ({}, {"max_dec_len": 5, "cut_max_dec_len": True}):
        too_long = refusal(processor, input_ids=[1] * 100, **fields)
        assert str(too_long) == "The prompt has 100 tokens, the model takes 99 and an answer"
        assert (type(too_long), too_long.field) == (PromptTooLong, "input_ids")
    assert refusal(processor, input_ids=[1] * 100, max_dec_len=1).field == "max_dec_len"


@pytest.mark.parametrize(
    ("fields", "prompt_len"),
    [
        ({}, 99),
        ({"max_dec_len": 5}, 95),
        ({"max_dec_len": 0}, 100),
        ({"min_dec_len": 7}, 93),
        ({"max_dec_len": 40, "cut_max_dec_len": True}, 60),
        ({"max_dec_len": 10**6, "cut_max_dec_len": True}, 50),
        ({"pooling": "last"}, 100),
    ],
)
def test_a_prompt_is_cut_so_that_the_answer_that_is_asked_for_fits(processor, fields, prompt_len):
    long, ids = replace(processor, lengths=LengthLimits(100, 100, 50)), [*range(200)]
    read = long.process(a_request(input_ids=ids, truncate_prompt_tokens=-1, **fields))
    assert read.token_ids == ids[-prompt_len:]
    short = processor.process(a_request(input_ids=ids, truncate_prompt_tokens=-1, **fields)).token_ids
    assert len(short) == min(80, prompt_len)


def test_the_models_own_length_is_not_blamed_on_a_setting(processor):
    processor = replace(processor, lengths=LengthLimits(16, 16, 16))
    assert (
        str(refusal(processor, input_ids=[1] * 17)) == "Length of input token(17) exceeds the limit of the model(16)."
    )
    too_long = refusal(processor, input_ids=[1], max_dec_len=17)
    assert str(too_long) == "The parameter max_dec_len(17) exceeds the limit of the model(16)."
    assert "fit the limit of the model(16)" in str(refusal(processor, text="x" * 10_000))
    cut = replace(processor, lengths=LengthLimits(16, 16, 16, is_cut_by_setting=True))
    assert "exceeds the limit MAX_MODEL_LEN(16)." in str(refusal(cut, input_ids=[1] * 17))
    why = "max_seq_len (16): MAX_MODEL_LEN limits prompt and answer together"
    assert why in str(refusal(cut, input_ids=[1] * 10, max_dec_len=7))


def test_several_answers_whose_length_may_be_reduced_need_not_fit_the_kv_cache_at_once(processor):
    small = replace(processor, lengths=LengthLimits(100, 80, 50, lambda: (5, 10)))
    fields = {"input_ids": [1] * 10, "max_dec_len": 10**6, "cut_max_dec_len": True}
    lengths = [sampling_of(small, n=n, **fields).max_new_tokens for n in (1, 2)]
    assert lengths == [41, 41]
    assert sampling_of(small, use_beam_search=True, n=2, **fields).max_new_tokens == 21


@pytest.mark.parametrize(
    ("cache_size", "n", "max_new_tokens"),
    [
        (None, 1, 50),  # not known yet
        ((3, 10), 1, 21),  # the last token needs no place
        ((6, 10), 1, 50),
        ((1, 10), 1, 1),
        ((1, 5), 1, 1),
        ((5, 10), 2, 21),  # a shared block and two more for each
        ((4, 10), 2, 11),
        ((15, 4), 2, 23),  # of ten tokens two are in a block that is copied
    ],
)
def test_without_a_length_all_answers_fit_the_kv_cache(processor, cache_size, n, max_new_tokens):
    small = replace(processor, lengths=LengthLimits(100, 80, 50, lambda: cache_size))
    assert sampling_of(small, input_ids=[1] * 10, n=n).max_new_tokens == max_new_tokens
    if cache_size and max_new_tokens > 1:
        pool = BlockPool(*cache_size)
        leader, *forks = [Request("", [1] * 10, 10, Sampling(max_new_tokens)) for _ in range(n)]
        leader.forks = forks
        cache = KVCacheManager(pool, Limits(max_batch=n, max_batched_tokens=n))
        assert cache.max_blocks(leader) <= pool.num_blocks
        if max_new_tokens < processor.lengths.max_dec_len:
            for each in (leader, *forks):
                each.sampling = Sampling(max_new_tokens + 1)
            assert cache.max_blocks(leader) > pool.num_blocks


def test_the_seeds_of_several_answers_count_up_from_the_first(processor):
    request = parse_request({"req_id": "a", "input_ids": [1], "n": 3, "seed": 2**64 - 1})
    prompt = processor.process(request)
    samplings = [prompt.sampling_of(index) for index in range(prompt.n)]
    assert [each.seed for each in samplings] == [2**64 - 1, 0, 1]
    assert samplings[0] == prompt.sampling
    assert [replace(each, seed=0) for each in samplings] == [replace(prompt.sampling, seed=0)] * 3


# --- sampling


def test_every_field_reaches_the_sampler(processor):
    sampling = sampling_of(
        processor,
        topp=0.5,
        top_k=3,
        min_p=0.25,
        temperature=0,
        penalty_score=1.5,
        frequency_score=0.5,
        presence_score=-0.5,
        logit_bias={"4": 2},
        logprobs=3,
    )
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.temperature) == (0.5, 3, 0.25, 0)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, 0.5, -0.5)
    assert (sampling.logit_bias, sampling.num_logprobs) == (((4, 2.0),), 3)


def test_a_limit_of_reasoning_tokens_is_a_grammar(tmp_path):
    write_tokenizer(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    added = fields["added_tokens"]
    marks = {text: added[-1]["id"] + index for index, text in enumerate(("<think>", "</think>"), 1)}
    added += [{**added[-1], "id": token_id, "content": text, "special": False} for text, token_id in marks.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    knowing = an_input_processor(Tokenizer.load(tmp_path), VOCAB_SIZE, grammar_builder=GrammarBuilder(reasoning="may"))

    def structured_output_of(processor, **fields):
        return sampling_of(processor, **{"text": "hi", "reasoning_max_tokens": 7, **fields}).structured_output

    field, structured_output = structured_output_of(knowing)
    begin, end = marks.values()
    assert (field, f"<[^{begin}]> rest" in structured_output, f"{end}]>{{0,7}}" in structured_output) == (
        field,
        True,
        True,
    )
    assert field == "reasoning_max_tokens"
    assert (
        "start: thought rest"
        in structured_output_of(replace(knowing, grammar_builder=GrammarBuilder(reasoning="does")))[1]
    )
    assert "start: thought rest" in structured_output_of(knowing, text=None, input_ids=[1, begin])[1]
    assert structured_output_of(knowing, text=None, input_ids=[1, begin, end]) == ()  # the template has left it out
    assert structured_output_of(knowing, apply_chat_template=False) == ()
    field, structured_output = structured_output_of(knowing, guided_regex="a")
    assert (field, "{0,7}" in structured_output, "lazy" in structured_output) == ("guided_regex", True, False)
    unknowing = an_input_processor(Tokenizer.load(tmp_path), VOCAB_SIZE)
    assert "REASONING_PARSER" in str(refusal(unknowing, text="hi", reasoning_max_tokens=7))


@pytest.mark.parametrize(
    ("parser", "expected"),
    [("none", "never"), ("qwen3", "may"), ("deepseek_r1", "does"), ("ernie", "does")],
)
def test_whether_a_model_thinks_and_says_so_is_a_setting(parser, expected, exported, tokenizer):
    processor = InputProcessor.load(Config(reasoning_parser=parser), exported("qwen2"), tokenizer)
    assert processor.grammar_builder.reasoning == expected


def test_a_thought_is_bounded_only_where_its_marks_are_tokens(processor):
    apart = replace(processor, grammar_builder=GrammarBuilder(reasoning="may"))
    assert "</think> is one token" in str(refusal(apart, text="hi", reasoning_max_tokens=7))


def test_a_seed_is_kept_and_without_one_every_request_has_its_own(processor):
    assert sampling_of(processor, infer_seed=0).seed == 0
    assert sampling_of(processor, seed=2**64 - 1).seed == 2**64 - 1
    assert sampling_of(processor, seed=-1).seed == 2**64 - 1
    assert sampling_of(processor).seed != sampling_of(processor).seed


def test_an_answer_stops_at_the_clients_ids_and_the_models(processor, tokenizer):
    own = tokenizer.eos_token_ids
    assert sampling_of(processor, eos_token_ids=[7, own[0]]).stop_token_ids == (7, *own)
    assert sampling_of(processor, eos_token_ids=7, ignore_eos=True).stop_token_ids == (7,)
    assert sampling_of(processor, ignore_eos=True).stop_token_ids == ()


def test_the_tokenizers_stop_ids_that_the_model_does_not_know_are_left_out(processor):
    assert sampling_of(replace(processor, vocab_size=EOS_ID)).stop_token_ids == (EOS_ID - 2,)


def test_a_bad_word_is_banned_at_the_beginning_and_after_a_space(processor, tokenizer):
    words = sampling_of(processor, bad_words=["to"], bad_words_token_ids=[9]).bad_words
    assert words == ((9,), tuple(tokenizer.encode("to")), tuple(tokenizer.encode(" to")))


def test_bans_that_may_leave_no_token_are_refused(processor):
    tiny = replace(processor, vocab_size=8)
    message = re.escape("`bad_words_token_ids` and, with `min_dec_len`, `eos_token_ids` may ban every token")
    assert sampling_of(tiny, bad_words_token_ids=[0, 1, 2, 3, 4, 5, 6])
    assert sampling_of(tiny, bad_words_token_ids=[0, 1, 2, 3, 4], eos_token_ids=[5, 6, 7])  # it stops there
    for fields in (
        {"bad_words_token_ids": [0, 1, 2, 3, 4, 5, 6, 7]},
        {"bad_words_token_ids": [0, 1, 2, 3, 4], "eos_token_ids": [5, 6, 7], "min_dec_len": 1},
    ):
        assert re.search(message, str(refusal(tiny, **fields)))
