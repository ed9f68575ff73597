"""Scores, embeddings and the best of several answers on the real server, by the clients that ask for them."""

from __future__ import annotations

import base64
import json

import numpy as np
import openai
import pytest

from tests.server import running_server
from tests.triton.asking import GrpcStream, post

SETTINGS = {"BATCH_SIZE": "8"}
TEXT = "The capital of France is Paris. The capital of Italy is Rome."


def ids_of(server, text):
    return post(server, "/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]


def loglikelihoods(client, pairs):
    """Ask for log-likelihoods as lm-eval does. Return the sum of each continuation, and whether it is the likeliest."""
    answer = client.completions.create(
        model="m",
        prompt=[context + continuation for context, continuation in pairs],
        **{"max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234, "echo": True},
    )
    found = []
    for choice, (context, _) in zip(sorted(answer.choices, key=lambda each: each.index), pairs, strict=True):
        logprobs = choice.logprobs.token_logprobs[len(context) : -1]
        tops = choice.logprobs.top_logprobs[len(context) : -1]
        is_greedy = all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))
        found.append((len(logprobs), sum(logprobs), is_greedy))
    return found


def test_what_the_model_would_say_is_the_likeliest_and_its_score_that_of_its_saying_so(server, client):
    """This includes an answer that its stop id ends: lm-eval takes the last logprob as that of the one generated
    token.
    """
    context = ids_of(server, TEXT[:40])
    said = client.completions.create(
        **{"model": "m", "prompt": context, "max_tokens": 12, "temperature": 0, "logprobs": 1},
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ).choices[0]
    other = [context[0]] * 5
    (count, score, is_greedy), (_, unlikely, is_other_greedy) = loglikelihoods(
        client, [(context, said.token_ids), (context, other)]
    )
    assert (count, is_greedy, is_other_greedy) == (12, True, False)
    assert score == pytest.approx(sum(said.logprobs.token_logprobs), abs=1e-4)
    assert unlikely < score


def test_scores_are_the_same_over_grpc_again_and_in_vllms_shape(server, client):
    ids = ids_of(server, TEXT)
    with GrpcStream(server) as stream:
        stream.ask({"input_ids": ids, "req_id": "s", "max_dec_len": 0, "prompt_logprobs": 2})
        [last] = stream.next()
    assert (last["is_end"], last["tokens_all_ids"], last["usage"]["completion_tokens"]) == (1, [], 0)
    scores = [each.get("logprob") for each in last["prompt_logprobs"]]
    assert scores[0] is None and len(scores) == len(ids)
    again = client.completions.create(model="m", prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 2}).to_dict()
    reported = again["choices"][0]["prompt_logprobs"]
    assert [each and each[str(token_id)]["logprob"] for each, token_id in zip(reported, ids, strict=True)] == scores
    chat = {"messages": [{"role": "user", "content": "Hi"}], "model": "m", "max_tokens": 2, "return_token_ids": True}
    fields = post(server, "/v1/chat/completions", chat)[1]
    assert len(fields["prompt_token_ids"]) == fields["usage"]["prompt_tokens"]
    assert len(fields["choices"][0]["token_ids"]) == fields["usage"]["completion_tokens"]


def test_cached_tokens_are_counted_in_the_usage(client):
    body = {"model": "m", "prompt": "What is it that " * 40, "max_tokens": 1}
    usages = [client.completions.create(**body).usage for _ in range(2)]
    assert usages[0].prompt_tokens_details.cached_tokens == 0
    assert 0 < usages[1].prompt_tokens_details.cached_tokens < usages[1].prompt_tokens


def test_embeddings_of_openais_client_are_alike_for_texts_that_are(server, client):
    texts = [TEXT, "The capital of Italy is Rome.", "12 + 7 = 19", TEXT]
    for pooling in ("last", "mean"):
        asked = {"model": "m", "extra_body": {"pooling": pooling}}
        answer = client.embeddings.create(input=texts, **asked)
        first, second, third, fourth = (np.array(each.embedding) for each in answer.data)
        assert np.linalg.norm(first) == pytest.approx(1)
        np.testing.assert_array_equal(first, fourth)
        assert first @ second > first @ third
        of_ids = client.embeddings.create(input=[ids_of(server, text) for text in texts[:2]], **asked)
        np.testing.assert_allclose(of_ids.data[0].embedding, first, atol=1e-6)
        few = client.embeddings.create(input=TEXT, dimensions=8, encoding_format="float", **asked).data[0].embedding
        np.testing.assert_allclose(few, first[:8] / np.linalg.norm(first[:8]), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="`dimensions` is 100000, the model has"):
        client.embeddings.create(model="m", input="a", dimensions=100_000)


def test_documents_are_ranked_by_what_they_have_in_common_with_the_query(server):
    documents = ["12 + 7 = 19", "The capital of Italy is Rome.", TEXT]
    body = {"query": TEXT, "documents": documents, "top_n": 2, "truncate_prompt_tokens": 1000}
    best = post(server, "/v1/rerank", body)[1]["results"]
    assert [each["index"] for each in best] == [2, 1] and best[0]["document"] == {"text": TEXT}
    assert best[0]["relevance_score"] == pytest.approx(1)
    scores = post(server, "/v1/score", {"text_1": TEXT, "text_2": documents})[1]["data"]
    assert [scores[each["index"]]["score"] for each in best] == [each["relevance_score"] for each in best]


def test_the_best_of_several_and_a_search_over_openais_client(client):
    body = {"model": "m", "prompt": "The capital of", "max_tokens": 6}
    best = client.completions.create(**body, n=2, best_of=5, logprobs=0, seed=3, temperature=1)
    means = [np.mean(choice.logprobs.token_logprobs) for choice in best.choices]
    assert means == sorted(means, reverse=True) and len(means) == 2
    asked = {"use_beam_search": True, "best_of": 4, "length_penalty": 0, "ignore_eos": True}
    found = client.completions.create(**body, n=4, logprobs=0, extra_body=asked)
    sums = [sum(choice.logprobs.token_logprobs) for choice in found.choices]
    greedy = client.completions.create(**body, logprobs=0, temperature=0, extra_body={"ignore_eos": True})
    assert sums == sorted(sums, reverse=True) and len({choice.text for choice in found.choices}) > 1
    assert sums[0] >= sum(greedy.choices[0].logprobs.token_logprobs) - 1e-4
    stream = client.completions.create(**body, n=2, stream=True, extra_body=asked)
    texts = {chunk.choices[0].index: chunk.choices[0].text for chunk in stream if chunk.choices[0].text}
    assert [texts[0], texts[1]] == [choice.text for choice in found.choices[:2]]
    with pytest.raises(openai.BadRequestError, match="`best_of` is 9, the server computes 8 answers at once"):
        client.completions.create(**body, extra_body={**asked, "best_of": 9})


def test_embeddings_and_a_search_are_the_same_over_grpc(server, client):
    ids = ids_of(server, TEXT)
    searched = {"max_tokens": 6, "n": 2, "extra_body": {"use_beam_search": True, "best_of": 4, "length_penalty": 2}}
    texts = [choice.text for choice in client.completions.create(model="m", prompt=ids, **searched).choices]
    embedding = client.embeddings.create(model="m", input=ids, extra_body={"normalize": False}).data[0].embedding
    with GrpcStream(server) as stream:
        stream.ask({"input_ids": ids, "req_id": "e", "pooling": "last"})
        reported = np.frombuffer(base64.b64decode(stream.next()[0]["embedding"]), "<f4")
        asked = {"max_dec_len": 6, "n": 2, "use_beam_search": True, "best_of": 4, "length_penalty": 2}
        stream.ask({"input_ids": ids, "req_id": "b", **asked})
        found = {answer["index"]: answer["tokens_all"] for answer in (stream.next()[0], stream.next()[0])}
    assert found == dict(enumerate(texts)) and len(set(texts)) == 2
    np.testing.assert_allclose(reported, embedding, rtol=0, atol=1e-6)


@pytest.mark.thorough
def test_a_model_that_was_made_to_write_scores_by_two_of_its_tokens_when_the_server_is_started_so(client, tmp_path):
    """vLLM serves Qwen3-Reranker like this: the score is the share of the second token if the next one is one of
    both.
    """
    overrides = json.dumps({"classifier_from_token": ["No", "Yes"], "is_original_qwen3_reranker": True})
    query, documents = "Is Paris in France? ", ["Say Yes or No.", "Paris is the capital of France."]
    with running_server(tmp_path, {"HF_OVERRIDES": overrides}) as reranker:
        _, scored = post(reranker, "/v1/score", {"text_1": query, "text_2": documents})
        _, ranked = post(reranker, "/v1/rerank", {"query": query, "documents": documents})
        reported = {text: ids_of(reranker, text) for text in ("No", "Yes", *(query + each for each in documents))}
        status, refused = post(reranker, "/v1/chat/completions", {"text": "Hi", "req_id": "a"})
    assert (status, refused["error_type"]) == (400, "invalid_request") and "writes no answers" in refused["error_msg"]
    shares = []
    for document in documents:
        ids = reported[query + document]
        pairs = [(ids, reported[word]) for word in ("No", "Yes")]
        no, yes = np.exp([score for _, score, _ in loglikelihoods(client, pairs)])
        shares.append(yes / (no + yes))
    assert [each["score"] for each in scored["data"]] == pytest.approx(shares, abs=0.01)
    assert [each["index"] for each in ranked["results"]] == [int(each) for each in np.argsort(shares)[::-1]]
