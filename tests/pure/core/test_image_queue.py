"""Images are encoded in parts between the steps, once for all requests, and only where the prefix cache does not have
their tokens."""

import random
from concurrent.futures import Future

import pytest

from engine.core.image_queue import EncodedPart, ImageQueue
from engine.core.loop import EngineLoop
from engine.core.spans import PromptSpan
from engine.core.types import Request, Sampling
from engine.errors import InvalidRequest
from engine.settings.config import Config
from tests.pure.core.test_scheduler import a_request
from tests.pure.counting_executor import CountingExecutor, answer

PLACEHOLDER = 7
BLOCK_SIZE = 4


class PartEncoder:
    """Encodes an image in as many parts as its hash has bytes. Writes them, and the steps of the executor, down."""

    def __init__(self):
        self.events: list[str] = []
        self.begun: list[bytes] = []

    def check(self, span):
        assert span.pixels

    def begin(self, span):
        self.begun.append(span.content_hash)
        self.span, self.num_left = span, len(span.content_hash)

    def advance(self):
        self.events.append("part")
        self.num_left -= 1
        part: Future[EncodedPart] = Future()
        part.set_result(EncodedPart(None if self.num_left else embeddings_of(self.span), 0.0, 0.25))
        return part


def embeddings_of(span):
    return b"embeddings of " + span.content_hash


class CheckingExecutor(CountingExecutor):
    """Checks that a request starts with the embeddings of all spans that it computes."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.vision = PartEncoder()
        self.takes_spans, self.max_drafts, self.runs_ahead = True, 0, False
        self.max_prompt_logits, self.block_bytes = 16, 1

    def launch(self, batch):
        if self.vision:
            self.vision.events.append("step")
        start_of = {row.slot: row.start for row in batch.rows}
        for arrival in batch.arrivals:
            for span in arrival.spans:
                if span.end > start_of.get(arrival.slot, span.end):
                    assert span.embeddings == embeddings_of(span)
        return super().launch(batch)


def a_loop(num_blocks=60, **settings):
    config = Config(**{"batch_size": 4, "block_ratio": 0.99, "max_num_batched_tokens": 16, **settings})
    loop = EngineLoop(CheckingExecutor(num_blocks, BLOCK_SIZE), num_blocks, config)
    return loop, loop.executor.vision


def with_image(name, content=b"cat", num_tokens=20):
    request = a_request([PLACEHOLDER] * num_tokens, 3, name)
    request.spans = [PromptSpan(6, 11, content, pixels=b"pixels")]
    return request


def run(loop):
    """Return the ids of the requests in the order in which they end."""
    ended = []
    while not loop.is_idle:
        ended += [update.request.request_id for update in loop.step() if update.finish_reason]
    loop.scheduler.check()
    return ended


def test_requests_pass_one_that_waits_for_its_image_and_no_two_parts_come_between_their_steps():
    loop, encoder = a_loop()
    loop.add(with_image("image", content=b"c" * 12))
    for number in range(3):
        loop.add(a_request([100 * number], 5, f"text {number}"))
    assert run(loop) == ["text 0", "text 1", "text 2", "image"]
    while_text_runs = encoder.events[: encoder.events.index("step") + 9]
    assert "part part" not in " ".join(while_text_runs[while_text_runs.index("step") :])
    assert encoder.events.count("part") == 12


def test_an_image_of_several_requests_is_encoded_once():
    loop, encoder = a_loop(enable_prefix_caching=False)
    for number in range(3):
        loop.add(with_image(str(number)))
    run(loop)
    loop.add(with_image("later"))
    run(loop)
    assert encoder.begun == [b"cat"]
    stats = loop.stats()
    assert (stats["num_image_queries"], stats["num_image_hits"], stats["num_images_encoded"]) == (4, 1, 1)
    assert stats["image_time_s"] == 3 * 0.25


def test_an_image_that_the_prefix_cache_has_is_not_encoded_and_one_that_it_lost_is():
    loop, encoder = a_loop(num_blocks=12)
    loop.add(with_image("first", num_tokens=24))
    run(loop)
    loop._images._embeddings.clear()
    loop.add(with_image("found", num_tokens=24))
    run(loop)
    assert encoder.begun == [b"cat"]
    loop.add(a_request(range(1000, 1040), 4, "other"))  # takes the blocks
    run(loop)
    assert loop.stats()["num_image_queries"] == 1  # an image in a cached prefix is not looked up
    loop.add(with_image("lost", num_tokens=24))
    run(loop)
    assert encoder.begun == [b"cat", b"cat"]


def test_the_embeddings_of_the_least_recently_used_images_are_dropped():
    queue = ImageQueue(PartEncoder(), max_bytes=len(b"embeddings of a") * 2)

    def is_there(content):
        request = with_image(content.decode(), content)
        found = queue.fill_or_enqueue(request, 0)
        while queue.is_busy:
            queue.advance()
        return found

    assert [is_there(each) for each in (b"a", b"b", b"a", b"c", b"a", b"b")] == [False, False, True, False, True, False]


def test_a_dropped_request_lets_the_next_image_begin():
    loop, encoder = a_loop()
    loop.add(with_image("first", b"c" * 100))
    loop.add(with_image("second", b"dog"))
    loop.step()
    loop.drop("first")
    assert run(loop) == ["second"]
    assert encoder.events.count("part") <= 2 + 3
    loop.add(with_image("third", b"c" * 100))
    loop.step()
    loop.drop("third")
    assert run(loop) == [] and loop.is_idle


@pytest.mark.slow
def test_long_waits_for_images_end_at_a_number_of_requests():
    loop, encoder = a_loop(max_cached_task_num=2000)
    for number in range(300):
        loop.add(with_image(str(number), number.to_bytes(2, "big")))
    loop.step()
    assert sum(request.images_from >= 0 for request in loop.scheduler.waiting) == 256
    assert len(run(loop)) == 300 and len(encoder.begun) == 300


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_start_with_the_embeddings_that_they_compute(seed):
    """Few blocks, so that requests are preempted; forks; images that share prefixes, come again and are dropped."""
    rng = random.Random(seed)
    loop, encoder = a_loop(num_blocks=rng.choice([20, 30]))
    loop._images._max_bytes = rng.choice([0, 60, 1000])
    requests = []
    for number in range(40):
        request = a_request([PLACEHOLDER] * rng.randint(16, 32), rng.randint(1, 20), str(number))
        request.spans = [
            PromptSpan(start, rng.choice([1, 3, 4]), rng.choice([b"cat", b"dog", b"horse"]), pixels=b"pixels")
            for start in rng.sample([0, 4, 8, 12], rng.randint(0, 3))
        ]
        request.spans = sorted(request.spans, key=lambda span: span.start)
        request.forks = [
            Request(f"{number}.{n}", list(request.token_ids), request.prompt_len, request.sampling, spans=request.spans)
            for n in range(rng.choice([0, 0, 2]))
        ]
        requests += [request, *request.forks]
        loop.add(request)
        for _ in range(rng.choice([0, 1, 3])):
            loop.step()
        if rng.random() < 0.15:
            dropped = rng.choice(requests)
            loop.drop(dropped.request_id)
            requests.remove(dropped)
    run(loop)
    for request in requests:
        prompt = request.token_ids[: request.prompt_len]
        assert request.token_ids[request.prompt_len :] == answer(prompt, request.sampling)
    assert loop.stats()["num_preemptions"] > 0 and set(encoder.begun) == {b"cat", b"dog", b"horse"}


def test_pixels_are_refused_where_no_device_can_encode_them():
    executor = CheckingExecutor(10, BLOCK_SIZE)
    executor.vision = None
    loop = EngineLoop(executor, 10, Config(batch_size=2))
    with pytest.raises(InvalidRequest, match="cannot compute the model's vision network"):
        loop.add(with_image("image"))
    request = Request("plain", [1, 2], 2, Sampling(1, temperature=0.0))
    loop.add(request)
    assert run(loop) == ["plain"]
