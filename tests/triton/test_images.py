"""Images over the whole server: every protocol gives the answer of `LLM`, also when the engine dies in the middle."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request

import numpy as np
import openai
import pytest
from PIL import Image

from engine.llm import LLM
from tests.family_checkpoints import make_checkpoint
from tests.image_requests import a_data_url, a_file, add_vision_tokens, an_image_part
from tests.images import an_image
from tests.patience import wait_until
from tests.server import running_server
from tests.triton.asking import GrpcStream, post

FILES = [a_file(an_image(60, 200, seed)) for seed in range(3)]
BLOCK = 16  # tokens
LONG = "".join(f"word {number} " for number in range(12))  # more than a block
OPTIONS = {"max_dec_len": 12, "temperature": 0, "ignore_eos": True}


def a_chat(*files, text="What is it?"):
    return [{"role": "user", "content": [*map(an_image_part, files), {"type": "text", "text": text}]}]


CHATS = {name: a_chat(*files) for name, files in (("one", FILES[:1]), ("other", FILES[1:2]), ("two", FILES[:2]))}


THOROUGH = [pytest.param(family, marks=pytest.mark.thorough) for family in ("qwen3_vl", "qwen3_5")]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "paddleocr_vl", *THOROUGH])
def checkpoint(request, tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", request.param, seed=0)
    add_vision_tokens(directory)
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return the answers of `LLM` to CHATS: their token ids and texts."""
    llm = LLM(checkpoint, device="cpu", block_size=BLOCK, export_cache_dir=str(checkpoint.parent))
    try:
        answers = llm.chat(list(CHATS.values()), OPTIONS, progress=False)
    finally:
        llm.close()
    return dict(zip(CHATS, answers, strict=True))


@pytest.fixture(scope="module")
def server(checkpoint, expected, tmp_path_factory):
    settings = {"MODEL_DIR": str(checkpoint), "DEVICE": "cpu", "BLOCK_SIZE": str(BLOCK)}
    settings["EXPORT_CACHE_DIR"] = str(checkpoint.parent)  # where `expected` has exported it
    with running_server(tmp_path_factory.mktemp("server"), settings) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(server, path, body):
    status, answer = post(server, path, body)
    assert status == 200, answer
    return answer


def metric(server, family):
    with urllib.request.urlopen(f"{server.http_url}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{family} "))


def native(server, messages, **more):
    body = {"messages": messages, **OPTIONS, "return_usage": True, "req_id": str(time.monotonic_ns()), **more}
    return asked(server, "/v1/chat/completions", body)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHATS)
def test_every_protocol_gives_the_answer_of_the_offline_engine(server, client, checkpoint, expected, name):
    chat, answer = CHATS[name], expected[name]
    assert native(server, chat)["tokens_all_ids"] == answer.token_ids
    options = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    choice = client.chat.completions.create(model="default", messages=chat, max_tokens=12, **options)
    assert choice.choices[0].message.content == answer.text
    assert choice.usage.prompt_tokens == len(answer.prompt_token_ids)
    image_token_id = json.loads((checkpoint / "config.json").read_text())["image_token_id"]
    num_image_tokens = choice.usage.prompt_tokens_details.model_dump()["image_tokens"]
    assert num_image_tokens == answer.prompt_token_ids.count(image_token_id) > 0
    *images, text = chat[0]["content"]
    urls = [part["image_url"]["url"] for part in images]
    items = [*({"type": "input_image", "image_url": url} for url in urls), {"type": "input_text", "text": text["text"]}]
    given = [{"role": "user", "content": items}]
    assert (
        client.responses.create(model="default", input=given, max_output_tokens=12, **options).output_text
        == answer.text
    )
    sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} for url in urls]
    blocks = [*({"type": "image", "source": source} for source in sources), text]
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "messages": [{"role": "user", "content": blocks}]}
    assert asked(server, "/v1/messages", body)["content"][0]["text"] == answer.text
    body = {"messages": chat, **OPTIONS, "req_id": f"grpc-{name}"}
    assert GrpcStream(server).lines(body)[-1]["tokens_all_ids"] == answer.token_ids
    tokens = asked(server, "/tokenize", {"messages": chat})["tokens"]
    assert tokens == answer.prompt_token_ids


def test_a_second_question_about_an_image_finds_it_in_the_prefix_cache(server):
    """Another image of the same size has other blocks, although their token ids are equal."""

    def cached(file, question):
        answer = native(server, a_chat(file, text=question), system=LONG)
        return answer["usage"]["cached_tokens"], answer["tokens_all_ids"]

    first, _ = cached(FILES[2], "a")
    again, _ = cached(FILES[2], "b")
    cached(a_file(an_image(60, 200, seed=8)), "b")  # a model with states keeps one where this prompt branches off
    other, _ = cached(a_file(an_image(60, 200, seed=7)), "b")
    before_image = len(asked(server, "/tokenize", {"prompt": f"<|im_start|>system\n{LONG}<|im_end|>\n"})["tokens"])
    assert (first, other) == (0, before_image // BLOCK * BLOCK)
    assert again >= other + BLOCK  # of which the image is a part
    wait_until(lambda: metric(server, "llm_images_encoded_total") >= 2)  # which follows once a second
    assert metric(server, "llm_image_encoding_seconds_total") > 0


@pytest.mark.sampled(2)
def test_an_answer_goes_on_when_the_engine_dies(server, expected):
    long = {"max_dec_len": 150, "n": 2, "temperature": 0.8, "infer_seed": 5, "logprobs": 1}
    expected_ids, killed = ends(streamed(server, CHATS["two"], **long)), []

    def kill_the_engine(line):
        """Kill it at the first line, because a slow reader may get all tokens in few lines."""
        if not killed:
            killed.append(line)
            os.kill(server.pid_of("engine"), signal.SIGKILL)

    assert ends(streamed(server, CHATS["two"], kill_the_engine, **long)) == expected_ids
    assert native(server, CHATS["one"])["tokens_all_ids"] == expected["one"].token_ids


def ends(lines):
    """Return the token ids of each answer of a stream."""
    return {line["index"]: line["tokens_all_ids"] for line in lines if "tokens_all_ids" in line}


def streamed(server, messages, on_line=lambda line: None, **options):
    """Return the lines of a streamed native answer."""
    body = {"messages": messages, **OPTIONS, **options, "stream": True, "req_id": str(time.monotonic_ns())}
    request = urllib.request.Request(f"{server.http_url}/v1/chat/completions", json.dumps(body).encode())
    found = []
    with urllib.request.urlopen(request, timeout=240) as response:
        for line in response:
            found.append(json.loads(line))
            assert not found[-1]["error_msg"], found[-1]
            on_line(found[-1])
    return found


def test_an_image_of_many_megabytes_comes_through(server):
    noise = np.random.default_rng(0).integers(0, 256, (2300, 2300, 3), np.uint8)
    file = a_file(Image.fromarray(noise), compress_level=0)
    assert 15 << 20 < len(file)
    assert native(server, a_chat(file))["tokens_all_num"] == 12


def test_a_wrong_image_is_refused_with_400_and_the_reason(server, client):
    for file, problem in ((FILES[0][:200], "is no valid PNG file"), (b"hello", "is no image in a supported format")):
        with pytest.raises(openai.BadRequestError, match=r"`messages\[0\].content\[1\].image_url` " + problem):
            client.chat.completions.create(model="default", messages=a_chat(FILES[0], file))
    with pytest.raises(openai.BadRequestError, match="ALLOWED_MEDIA_DOMAINS"):
        part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": [part]}])
    [model] = client.models.list().data
    assert model.input_modalities == ["text", "image"]


def test_a_stored_response_is_continued_with_its_images(server, client):
    url = a_data_url(FILES[0])
    given = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    first = client.responses.create(model="default", input=given, max_output_tokens=5, store=True)
    again = client.responses.create(
        model="default", input="And?", previous_response_id=first.id, max_output_tokens=5, temperature=0
    )
    messages = [
        {"role": "user", "content": [an_image_part(FILES[0])]},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And?"},
    ]
    assert again.usage.input_tokens == asked(server, "/tokenize", {"messages": messages})["count"]
