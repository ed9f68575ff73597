"""Requests that share a stream: the model's end, and the gateway's, which puts what comes on two streams in order."""

import asyncio
import json
import threading
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine import wire
from engine.errors import Overloaded, RequestError, TimedOut
from engine.serving import shared_streams
from engine.serving.shared_streams import SharedStreams
from gateway.backend import ModelLost
from gateway.shared_stream import ReorderBuffer
from gateway.triton_client import TritonBackend
from gateway.triton_connections import TritonConnections
from tests.patience import PATIENCE_S

END = wire.write_shared([])


class Sender:
    def __init__(self):
        self.sent = []  # payload, final
        self.cancelled = self.is_broken = False

    def send(self, payload, final):
        assert not any(is_last for _, is_last in self.sent), "Triton: the response sender is closed"
        if self.is_broken:
            raise RuntimeError("no shared memory")
        self.sent.append((payload, final))

    def is_cancelled(self):
        return self.cancelled


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(shared_streams, "IDLE_S", 0.0)
    return SharedStreams()


def written(number):
    return wire.write_answer(a_delta(number, number + 1))


def test_deltas_of_several_requests_are_one_response_and_their_ends_are_their_own(streams):
    shared, own, other = Sender(), Sender(), Sender()
    streams.open("s", shared)
    a, b = streams.join("s", 7, own), streams.join("s", 8, other)
    a.send(written(1), False)
    b.send(written(2), False)
    assert shared.sent == []
    streams.flush()
    streams.flush()
    a.send(written(3), True)
    assert shared.sent == [(wire.write_shared([(7, written(1)), (8, written(2))]), False)]
    assert (own.sent, other.sent) == ([(written(3), True)], [])


def test_the_last_response_of_a_request_overtakes_nothing(streams):
    shared, own = Sender(), Sender()
    streams.open("s", shared)
    a = streams.join("s", 7, own)
    a.send(written(1), False)
    own.send = lambda payload, final: shared.sent.append(payload)
    a.send(written(2), True)
    assert shared.sent == [(wire.write_shared([(7, written(1))]), False), written(2)]


@pytest.mark.parametrize("name", ["s", "another"])
def test_without_a_shared_stream_all_goes_on_the_requests_own(streams, name):
    own = Sender()
    streams.open("s", Sender())
    streams.close()
    a = streams.join(name, 7, own)
    a.send(written(1), False)
    a.send(written(2), True)
    assert own.sent == [(written(1), False), (written(2), True)]


def test_a_shared_stream_ends_when_it_has_no_requests_and_not_before(streams):
    shared = Sender()
    streams.open("s", shared)
    a = streams.join("s", 7, Sender())
    streams.end_unused()
    assert shared.sent == []
    a.send(written(1), True)
    time.sleep(0.001)
    streams.end_unused()
    assert shared.sent == [(END, True)]


def test_lines_that_come_while_the_stream_is_asked_about_its_client_are_sent_after_that(streams):
    shared = Sender()
    streams.open("s", shared)
    a = streams.join("s", 7, Sender())

    def is_cancelled():
        a.send(written(1), False)
        streams.flush()
        return False

    shared.is_cancelled = is_cancelled
    streams.end_unused()
    assert shared.sent == [(wire.write_shared([(7, written(1))]), False)]


@pytest.mark.parametrize("end", ["cancelled", "opened again", "closed"])
def test_a_stream_ends_once_whatever_ends_it(streams, end):
    shared = Sender()
    streams.open("s", shared)
    a = streams.join("s", 7, Sender())
    a.send(written(1), False)
    if end == "cancelled":
        shared.cancelled = True
        streams.end_unused()
    elif end == "opened again":
        streams.open("s", Sender())
    for _ in range(2):
        streams.close()
        streams.end_unused()
    assert shared.sent == [(wire.write_shared([(7, written(1))]), False), (END, True)]


@pytest.mark.parametrize("last", ["flush", "close"])
def test_much_is_sent_in_several_responses(streams, monkeypatch, last):
    monkeypatch.setattr(shared_streams, "MAX_RESPONSE_BYTES", 2 * len(written(0)) + 1)
    shared = Sender()
    streams.open("s", shared)
    a = streams.join("s", 7, Sender())
    for number in range(5):
        a.send(written(number), False)
    a.send(written(5), False)
    getattr(streams, last)()
    parts = [wire.write_shared([(7, written(number)) for number in numbers]) for numbers in ((0, 1, 2), (3, 4, 5))]
    assert shared.sent == [(part, False) for part in parts] + [(END, True)] * (last == "close")


def test_a_response_that_takes_long_holds_up_one_thread_which_sends_what_comes_meanwhile(streams):
    shared = Sender()
    streams.open("s", shared)
    a, gate, entered = streams.join("s", 7, Sender()), threading.Event(), threading.Event()
    send = shared.send
    shared.send = lambda payload, final: (entered.set(), gate.wait(PATIENCE_S), send(payload, final))
    a.send(written(1), False)
    sending = threading.Thread(target=streams.flush)
    sending.start()
    assert entered.wait(PATIENCE_S)
    a.send(written(2), False)
    streams.flush()
    streams.end_unused()
    assert shared.sent == []
    gate.set()
    sending.join(PATIENCE_S)
    assert shared.sent == [(wire.write_shared([(7, written(1))]), False), (wire.write_shared([(7, written(2))]), False)]


def test_deltas_that_are_left_when_a_stream_breaks_are_lost_with_it(streams, monkeypatch):
    """The rest of the answer is not sent."""
    monkeypatch.setattr(shared_streams, "MAX_RESPONSE_BYTES", 1)
    shared, own = Sender(), Sender()
    streams.open("s", shared)
    a = streams.join("s", 7, own)
    shared.is_broken = True
    for number in range(3):
        a.send(written(number), False)
    flushing = threading.Thread(target=streams.flush, daemon=True)
    flushing.start()
    flushing.join(PATIENCE_S)
    assert not flushing.is_alive()
    a.send(written(3), True)
    assert own.sent == [(written(3), True)]


def test_a_stream_that_breaks_is_left(streams):
    shared, own = Sender(), Sender()
    streams.open("s", shared)
    a = streams.join("s", 7, own)
    shared.is_broken = True
    a.send(written(1), False)
    streams.flush()
    a.send(written(2), False)
    assert own.sent == [(written(2), False)]
    streams.end_unused()
    assert shared.sent == []


# --- the gateway


def a_delta(send_idx, *token_ids):
    return wire.Delta("a", "", list(token_ids), send_idx, wire.Usage(1, send_idx + len(token_ids)), 5)


def a_final(send_idx, *token_ids):
    given = {"req_id": "a", "token": "", "token_ids": list(token_ids), "send_idx": send_idx, "infer_seed": 5}
    of_all = {"finish_reason": "stop", "tokens_all": "", "tokens_all_ids": []}
    return wire.Final(**given, **of_all, usage=wire.Usage(1, send_idx + len(token_ids)))


async def all_of(arrivals, count):
    return [(await arrivals.next()).send_idx for _ in range(count)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0], [1, 3, 0, 2]])
def test_answers_are_read_in_the_order_of_their_tokens(order):
    answers = [a_delta(0, 1), a_delta(1, 2, 3), a_delta(3, 4), a_final(4)]

    async def scenario():
        arrivals = ReorderBuffer()
        for index in order:
            arrivals.put(answers[index])
        assert await all_of(arrivals, 4) == [0, 1, 3, 4]

    asyncio.run(scenario())


def test_a_failure_comes_after_the_tokens_before_it():
    async def scenario():
        arrivals = ReorderBuffer()
        arrivals.put(wire.Failure(Overloaded("full"), "a", send_idx=2))
        arrivals.put(a_delta(0, 1, 2))
        assert await all_of(arrivals, 2) == [0, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_known_first", [True, False])
def test_deltas_lost_with_a_shared_stream_are_missed_when_it_has_ended(is_known_first):
    async def scenario():
        arrivals = ReorderBuffer()
        arrivals.put(a_delta(0, 1))
        for step in (arrivals.end_shared_stream, lambda: arrivals.put(a_delta(2, 3)))[:: 1 if is_known_first else -1]:
            step()
        assert await all_of(arrivals, 1) == [0]
        with pytest.raises(ModelLost):
            await arrivals.next()

    asyncio.run(scenario())


class SharingTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Fake Triton with shared streams. Items of `own[req_id]` are sent on that request's stream, items of `shared` on
    the shared one. None ends a stream, and an exception breaks it.
    """

    def __init__(self):
        self.own, self.shared, self.shares = {}, asyncio.Queue(), {}
        self.num_opened = 0
        self.cancelled = set()

    async def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        [body] = json.loads((await anext(aiter(request_iterator))).raw_input_contents[0][4:])
        if wire.SHARE in body:
            self.num_opened += 1
            name, queue = wire.SHARE, self.shared
        else:
            name, self.shares[body["req_id"]] = body["req_id"], body.get(wire.SHARED)
            queue = self.own.setdefault(name, asyncio.Queue())
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, grpc.StatusCode):
                    await context.abort(item, "so it goes")
                response = service_pb2.ModelStreamInferResponse()
                response.infer_response.raw_output_contents.append(len(item).to_bytes(4, "little") + item)
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.add(name)
            raise

    def share(self, req_id, *answers):
        tag = self.shares[req_id][1]
        self.shared.put_nowait(wire.write_shared([(tag, wire.write_answer(answer)) for answer in answers]))


def with_two(scenario, timeout_s=PATIENCE_S):
    """Run the scenario with a request that has begun, another one that shares its stream, and the results of the
    latter.
    """

    async def run():
        triton = SharingTriton()
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        backend = TritonBackend(TritonConnections(f"127.0.0.1:{port}"))

        async def ask(req_id, timeout_s=PATIENCE_S):
            return [answer.send_idx async for answer in backend.generate({"req_id": req_id}, timeout_s)]

        first = asyncio.create_task(ask("first"))
        await until(lambda: "first" in triton.shares)
        second = asyncio.create_task(ask("second", timeout_s))
        await until(lambda: "second" in triton.shares and triton.num_opened)
        try:
            await scenario(triton, first, second, ask)
        finally:
            for task in (first, second):
                task.cancel()
            await backend.close()
            await server.stop(None)
            await asyncio.gather(first, second, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_a_request_alone_shares_nothing_and_the_second_has_its_answers_from_two_streams():
    async def scenario(triton, first, second, ask):
        assert triton.shares["first"] is None
        triton.own["second"].put_nowait(wire.write_answer(a_final(2)))
        triton.share("second", a_delta(0, 1), a_delta(1, 2))
        triton.own["second"].put_nowait(None)
        assert await second == [0, 1, 2]
        third = asyncio.create_task(ask("third"))
        await until(lambda: "third" in triton.shares)
        assert triton.num_opened == 1
        triton.own["third"].put_nowait(wire.write_answer(wire.Failure(Overloaded("full"))))
        triton.own["third"].put_nowait(None)
        with pytest.raises(Overloaded):
            await third
        assert not triton.cancelled

    with_two(scenario)


def test_a_client_that_leaves_cancels_its_own_stream_alone():
    async def scenario(triton, first, second, ask):
        second.cancel()
        await until(lambda: "second" in triton.cancelled)
        triton.share("second", a_delta(0, 1))  # was on its way
        assert triton.cancelled == {"second"}

    with_two(scenario)


def test_a_request_that_shares_times_out_too():
    async def scenario(triton, first, second, ask):
        with pytest.raises(TimedOut, match=r"no response for 0.2 s"):
            await second
        await until(lambda: "second" in triton.cancelled)

    with_two(scenario, timeout_s=0.2)


def test_without_its_shared_stream_a_request_goes_on_and_the_next_opens_another():
    async def scenario(triton, first, second, ask):
        triton.share("second", a_delta(0, 1))
        triton.shared.put_nowait(None)
        for answer in (a_delta(1, 2), a_final(2)):
            triton.own["second"].put_nowait(wire.write_answer(answer))
        triton.own["second"].put_nowait(None)
        assert await second == [0, 1, 2]
        third = asyncio.create_task(ask("third"))
        await until(lambda: triton.num_opened == 2)
        third.cancel()

    with_two(scenario)


def test_requests_are_answered_without_a_shared_stream_that_is_refused():
    async def scenario(triton, first, second, ask):
        triton.shared.put_nowait(wire.write_answer(wire.Failure(RequestError("oh"))))
        triton.shared.put_nowait(None)
        triton.own["second"].put_nowait(wire.write_answer(a_final(0, 1)))
        triton.own["second"].put_nowait(None)
        assert await second == [0]

    with_two(scenario)


@pytest.mark.parametrize("which", ["own", "shared"])
def test_a_request_that_has_lost_a_part_is_lost(which):
    async def scenario(triton, first, second, ask):
        (triton.shared if which == "shared" else triton.own["second"]).put_nowait(grpc.StatusCode.UNAVAILABLE)
        triton.own["second"].put_nowait(wire.write_answer(a_final(1)))
        with pytest.raises(ModelLost):
            await second

    with_two(scenario)


@pytest.mark.parametrize("fields", [{"n": 2}, {"resume_from": [1]}])
def test_choices_and_answers_that_go_on_do_not_share(fields):
    triton = SharingTriton()

    async def scenario():
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        backend = TritonBackend(TritonConnections(f"127.0.0.1:{port}"))
        bodies = [{"req_id": "first"}, {"req_id": "second", **fields}]
        tasks = [asyncio.ensure_future(anext(backend.generate(body, PATIENCE_S))) for body in bodies]
        await until(lambda: len(triton.shares) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await backend.close()
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert triton.shares == {"first": None, "second": None}
