"""Every field that a known client or server has acts, is refused, or is listed with the reason why it does nothing."""

import functools
import typing

import pytest

from engine import wire
from engine.wire.field_descriptions import NO_EFFECT
from gateway.app import PROTOCOLS
from gateway.ignored_fields import NAMES
from tests.pure.gateway_fake import FakeBackend, running

CHAT, COMPLETIONS = "/v1/chat/completions/chat/completions", "/v1/chat/completions/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
# Of the requests for chats and completions of vLLM, SGLang and FastDeploy, beside OpenAI's own
OTHER_SERVERS = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words bad_words_token_ids best_of bootstrap_host
    bootstrap_port bootstrap_room cache_salt chat_template chat_template_kwargs collect_metrics completion_token_ids
    continue_final_message custom_labels custom_logit_processor custom_params data_parallel_rank disable_chat_template
    disagg_prefill_dp_rank disaggregate_info documents early_stopping ebnf echo ec_transfer_params enable_thinking
    extra_key guided_choice guided_decoding_backend guided_decoding_disable_any_whitespace guided_grammar guided_json
    guided_regex guided_whitespace_pattern ignore_eos images_config include_draft_logprobs
    include_logprobs_decode_token include_reasoning include_stop_str_in_output json_schema kv_transfer_params
    length_penalty logits_processors logits_processors_args logprob_token_ids lora_path max_streaming_response_tokens
    media_io_kwargs min_p min_tokens mm_hashes mm_processor_kwargs ngram_corpus_id no_stop_trim priority prompt_embeds
    prompt_logprobs prompt_token_ids reasoning_max_tokens regex repetition_detection repetition_penalty request_id
    response_max_tokens return_cached_tokens_details return_hidden_states return_meta_info return_mm_kwargs
    return_prompt_text return_prompt_token_ids return_routed_experts return_token_ids return_token_offsets
    return_tokens_as_token_ids rid routed_dp_rank routed_experts_prompt_start routed_experts_start_len
    separate_reasoning session_id session_params skip_special_tokens spaces_between_special_tokens stop_regex
    stop_token_ids stream_interval stream_reasoning structural_tag structured_outputs suffix temp_scaled_logprobs
    thinking_token_budget top_k top_p_normalized_logprobs trace_context truncate_prompt_tokens truncation_side
    use_beam_search vllm_xargs watermarking whitespace_pattern max_dynamic_patch min_dynamic_patch use_audio_in_video
""".split()
AS_HEADERS = {"betas", "user_profile_id", "workspace_id"}  # are sent so by Anthropic's client
VALUES = ("x", True, False, 5, {"a": 1}, ["x"])  # at least one of them asks for something, whatever the field is


def names_of(params):
    """Return the fields that OpenAI's or Anthropic's client has for these requests."""
    return {name for kind in typing.get_args(params) or (params,) for name in typing.get_type_hints(kind)}


@functools.cache
def cases():
    """Return for each path a request, and the fields that others may have."""
    # Imported late: the clients take more than a second of every test worker.
    from anthropic.types.beta import message_create_params as message_params
    from openai.types import completion_create_params as completion_params
    from openai.types import embedding_create_params as embedding_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params as response_params

    return {
        CHAT: ({"messages": MESSAGES}, {*names_of(chat_params.CompletionCreateParams), *OTHER_SERVERS}),
        COMPLETIONS: ({"prompt": "hi"}, {*names_of(completion_params.CompletionCreateParams), *OTHER_SERVERS}),
        "/v1/responses": ({"input": "hi"}, names_of(response_params.ResponseCreateParams)),
        "/v1/embeddings": ({"input": "hi"}, names_of(embedding_params.EmbeddingCreateParams)),
        "/v1/messages": (
            {"messages": MESSAGES, "max_tokens": 5},
            names_of(message_params.MessageCreateParams) - AS_HEADERS,
        ),
    }


@pytest.fixture(scope="module")
def gateway():
    with running(FakeBackend("a")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def without_effect(gateway):
    """Return, for each path, the fields of other protocols that are accepted with any value."""
    found = {}
    for path, (body, names) in cases().items():
        [protocol] = [each for each in PROTOCOLS if path in each.paths]
        unknown = names - {"include", *protocol.fields(path)}  # the first is checked, and asks for what is never there
        found[path] = {name for name in unknown if not is_refused(gateway, path, body, name)}
    return found


def is_refused(gateway, path, body, name):
    return any(gateway.send("POST", path, {**body, name: value})[0] == 400 for value in VALUES)


@pytest.mark.slow
def test_every_field_without_effect_is_listed_with_its_reason(without_effect):
    assert set().union(*without_effect.values()) == set(NAMES)
    assert len(NAMES) == len(set(NAMES))


def test_native_fields_without_effect_are_those_that_say_so():
    names = {name for name, meaning in wire.FIELD_DESCRIPTIONS.items() if meaning == NO_EFFECT}
    assert names == {"model", "response_type", "response_timeout", "enable_text_truncate"}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"store": True}),
        (CHAT, {"return_hidden_states": True}),
        (COMPLETIONS, {"guided_regex": "a+", "whitespace_pattern": " "}),
        (CHAT, {"structured_outputs": {"json": {}, "whitespace_pattern": " "}}),
        (CHAT, {"stream_reasoning": False}),
        (CHAT, {"prompt_token_ids": [1]}),
        (CHAT, {"options": {"temperature": 0}}),
        (COMPLETIONS, {"no_repeat_ngram_size": 3}),
        (CHAT, {"random_seed": 1}),
        (COMPLETIONS, {"num_predict": 5}),
        (CHAT, {"think": False}),
        (CHAT, {"metadata": {"enable_thinking": False}}),
        ("/v1/messages", {"thread": {"type": "create"}}),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(gateway, path, fields):
    status, answer = gateway.refused(path, {**cases()[path][0], **fields})
    name = next(reversed(fields))
    assert (status, name in answer["error"]["message"]) == (400, True)
