"""The gRPC port: streams of several requests, their errors, cancellation, keys, the end."""

import asyncio
import json
import time

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import InvalidRequest
from engine.wire.triton import LENGTH_BYTES
from gateway import retry
from gateway.body_memory import LARGE_BYTES
from gateway.grpc_server import stream as stream_module
from gateway.triton_connections import SERVICE
from tests.pure.gateway_fake import FakeBackend
from tests.pure.inference_fake import (
    NEVER,
    PATIENCE_S,
    WAIT,
    FakeTriton,
    a_client,
    a_request,
    answers,
    run,
    serving,
    text_of,
)

METHODS = [method.name for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]
OPEN = {"ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"}


def test_an_answer_is_passed_on_as_it_is_and_the_request_is_written_anew(tmp_path):
    async def scenario():
        triton = FakeTriton("any", "text")
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            request = a_request("an id")
            responses = [each async for each in stub.ModelStreamInfer(iter([request]))]
        assert [text_of(each) for each in responses] == ["any", "text"]
        assert [each.infer_response.id for each in responses] == ["an id"] * 2
        assert triton.requests == [request]

    run(scenario())


def test_a_malformed_request_of_a_stream_does_not_affect_the_others(tmp_path):
    async def scenario():
        async with serving(tmp_path, FakeTriton("a", "b")) as (_, port), a_client(port) as stub:
            wrong = a_request("wrong")
            wrong.model_name = "other"
            found = await answers(stub.ModelStreamInfer(iter([a_request("1"), wrong, a_request("2")])))
        for name in "12":
            assert [each[1] for each in found if each[0] == name] == ["a", "b"]
        assert [each for each in found if each[2]] == [("wrong", "", "Request for unknown model: 'other' is not found")]
        assert len(found) == 5

    run(scenario())


def test_a_refusal_has_the_names_by_which_the_client_has_called_the_fields(tmp_path):
    error = InvalidRequest("{field} of {max_dec_len}", field="min_dec_len", value=9)
    body = {"req_id": "a", "max_tokens": 5, "min_dec_len": 9}

    async def scenario():
        triton = FakeTriton(wire.write_answer(wire.Failure(error, "a")))
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            [(_, failure, _)] = await answers(stub.ModelStreamInfer(iter([a_request(**body)])))
        assert (failure["error_msg"], failure["error_field"]) == ("min_dec_len of max_tokens", "min_dec_len")
        [response] = [each async for each in stream_module._replicated(FakeBackend(error), "a", body)]
        assert b'"error_msg": "min_dec_len of max_tokens"' in response

    run(scenario())


def test_a_client_that_leaves_cancels_all_its_requests(tmp_path):
    async def scenario():
        triton = FakeTriton(WAIT)
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            call = stub.ModelStreamInfer()
            for name in "abc":
                await call.write(a_request(name))
            while len(triton.requests) < 3:
                await asyncio.sleep(0.005)
            call.cancel()
            while triton.num_cancelled < 3:
                await asyncio.sleep(0.005)

    run(scenario())


def test_writing_to_a_client_that_has_just_left_is_not_an_error():
    class Context:
        async def write(self, message):
            raise grpc.aio.InternalError("execute_batch failed")

    async def scenario():
        stream = stream_module.InferStream(None, Context(), None, wire.Owner())
        await stream._write(b"an answer")
        assert stream.num_responses == 0

    run(scenario())


def test_a_deadline_of_the_client_cancels_its_request(tmp_path):
    async def scenario():
        triton = FakeTriton(WAIT)
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            timeout_s = 0.1
            while not triton.requests:  # on a busy machine the time may be over before the request has arrived
                timeout_s *= 2
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await answers(stub.ModelStreamInfer(iter([a_request()]), timeout=timeout_s))
                assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await triton.is_cancelled.wait()

    run(scenario())


def test_an_idle_stream_waits_for_its_client(tmp_path):
    async def scenario():
        async with serving(tmp_path, FakeTriton("a")) as (_, port), a_client(port) as stub:
            call = stub.ModelStreamInfer()
            await asyncio.sleep(0.1)
            await call.write(a_request())
            assert text_of(await call.read()) == "a"
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() == grpc.StatusCode.OK

    run(scenario())


@pytest.mark.parametrize(
    "failure",
    [
        (grpc.StatusCode.UNAVAILABLE, "the model server does not answer", 503),
        (grpc.StatusCode.DATA_LOSS, "the model server failed: DATA_LOSS", 500),
    ],
)
@pytest.mark.parametrize("before", [[], ["a"]])
def test_a_failure_of_tritonserver_is_the_last_answer_and_shows_no_address(tmp_path, monkeypatch, failure, before):
    monkeypatch.setattr(retry, "CHECK_EVERY_S", 0.01)
    code, text, status = failure

    async def scenario():
        triton = FakeTriton(*before, code)
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            *_, (name, fields, _) = await answers(stub.ModelStreamInfer(iter([a_request("x", req_id="r")])))
        assert (name, fields["error_msg"], fields["error_code"]) == ("x", text, status)
        assert (fields["is_end"], fields["token"]) == (1, "")
        assert len(triton.requests) == (1 + retry.MAX_LOSSES if status == 503 else 1)

    run(scenario())


def test_a_request_outlives_tritonserver_and_goes_on_after_what_has_come(tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "CHECK_EVERY_S", 0.01)

    async def scenario():
        triton = FakeTriton()
        triton.scripts = [
            [a_line("a", [7, 8], 0, num_cached=4), grpc.StatusCode.UNAVAILABLE],
            ["", grpc.StatusCode.INTERNAL],
            [a_line("b", [9], 2, is_last=True)],
        ]
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            asked = a_request("x", req_id='"token_ids": [1]', temperature=1)
            responses = [each async for each in stub.ModelStreamInfer(iter([asked]))]
        assert list(map(text_of, responses)) == ["a", "", "b"]
        [last] = json.loads(responses[-1].infer_response.raw_output_contents[0][LENGTH_BYTES:])
        assert last["usage"]["cached_tokens"] == 4  # the first process has told that
        known = {"resume_from": [2], "answer_ids": [[7, 8]], "infer_seed": 5}
        assert [body_of(each) for each in triton.requests] == [
            body_of(asked),
            {**body_of(asked), **known},
            {**body_of(asked), **known},
        ]
        assert {each.id for each in triton.requests} == {"x"}

    run(scenario())


def test_after_the_last_line_nothing_is_asked_again(tmp_path):
    async def scenario():
        triton = FakeTriton(a_line("a", [7], 0, is_last=True), grpc.StatusCode.UNAVAILABLE)
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            found = [each async for each in stub.ModelStreamInfer(iter([a_request("x", req_id="r")]))]
        assert (len(found), len(triton.requests)) == (1, 1)

    run(scenario())


def a_line(text, token_ids, send_idx, is_last=False, num_cached=None):
    delta_fields = {"req_id": "r", "token": text, "token_ids": token_ids, "send_idx": send_idx, "infer_seed": 5}
    delta_fields["usage"] = wire.Usage(cached_tokens=num_cached)
    last = {"finish_reason": "stop", "tokens_all": "", "tokens_all_ids": [1, 2]}
    return wire.write_answer(wire.Final(**delta_fields, **last) if is_last else wire.Delta(**delta_fields))


def body_of(request):
    [body] = json.loads(request.raw_input_contents[0][4:])
    return body


def test_no_tritonserver_is_the_same(tmp_path):
    async def scenario():
        async with serving(tmp_path, FakeTriton()) as (front, port), a_client(port) as stub:
            front._connections._target = f"unix:{tmp_path}/missing"
            [(_, fields, _)] = await answers(stub.ModelStreamInfer(iter([a_request()])))
            assert fields["error_msg"] == "the model server does not answer"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ServerLive(service_pb2.ServerLiveRequest())
            assert caught.value.details() == "the model server does not answer"

    run(scenario())


def test_a_defect_of_ours_ends_the_request_and_says_nothing_of_itself(tmp_path, monkeypatch):
    async def scenario():
        async with serving(tmp_path, FakeTriton("a")) as (front, port), a_client(port) as stub:
            monkeypatch.setattr(front._connections, "infer", lambda request: 1 // 0)
            [(_, fields, _)] = await answers(stub.ModelStreamInfer(iter([a_request()])))
        assert (fields["error_msg"], fields["error_code"]) == ("internal error", 500)

    run(scenario())


# --- methods and keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [name for name in METHODS if name not in OPEN | {"ModelStreamInfer"}])
def test_methods_that_are_not_for_clients_are_not_served_whatever_is_sent(tmp_path, method):
    async def scenario():
        async with serving(tmp_path, FakeTriton()) as (_, port):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for message in (b"", b"\xff" * 50, b"\x0a\x03abc"):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await channel.unary_unary(f"/{SERVICE}/{method}")(message)
                    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED

    run(scenario())


@pytest.mark.slow
def test_thousands_that_come_while_the_server_is_busy_wait_for_it(tmp_path):
    """gRPC on its own would cancel a few from the 1,000th on, and all from the 3,000th."""

    async def scenario():
        async with serving(tmp_path, FakeTriton()) as (_, port):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(4)]
            calls = [channels[n % 4].unary_unary("/a/Method").future(b"") for n in range(3500)]
            time.sleep(1)  # the event loop gets to none of them
            codes = await asyncio.to_thread(lambda: {call.code() for call in calls})
            for channel in channels:
                channel.close()
        assert codes == {grpc.StatusCode.UNIMPLEMENTED}

    run(scenario())


def test_forwarded_methods_get_only_the_name_and_the_version(tmp_path):
    async def scenario():
        triton = FakeTriton()
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            request = service_pb2.ModelMetadataRequest(name="model", version="1")
            unknown = request.FromString(request.SerializeToString() + b"\x9a\x06\x03abc")
            assert (await stub.ModelMetadata(unknown)).name == "model"
            assert triton.requests == [request]
            for name, code, text in (
                ("x", grpc.StatusCode.NOT_FOUND, "unknown model: 'x'"),
                ("x" * 257, grpc.StatusCode.INVALID_ARGUMENT, "257 characters, the limit is 256"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=name))
                assert (caught.value.code(), text in caught.value.details()) == (code, True)
            metadata = await stub.ServerMetadata(service_pb2.ServerMetadataRequest())
            assert (metadata.name, list(metadata.extensions)) == ("triton", ["statistics"])

    run(scenario())


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer x", "Basic key", "key", "Bearer key2"])
def test_without_the_key_only_health_is_answered(tmp_path, given):
    async def scenario():
        triton = FakeTriton("a")
        async with serving(tmp_path, triton, api_key="key") as (_, port), a_client(port) as stub:
            metadata = [] if given is None else [("authorization", given)]
            call = stub.ModelStreamInfer(metadata=metadata)  # says nothing: it is refused all the same
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError, match="authorization: Bearer"):
                await stub.ServerMetadata(service_pb2.ServerMetadataRequest(), metadata=metadata)
            assert (await stub.ServerLive(service_pb2.ServerLiveRequest(), metadata=metadata)).live
        assert triton.requests == []

    run(scenario())


@pytest.mark.parametrize("given", ["Bearer key", "bearer  key "])
def test_with_the_key_requests_are_answered_and_it_goes_no_further(tmp_path, given):
    async def scenario():
        async with serving(tmp_path, FakeTriton("a"), api_key="key") as (_, port), a_client(port) as stub:
            responses = stub.ModelStreamInfer(iter([a_request()]), metadata=[("authorization", given)])
            assert await answers(responses) == [("", "a", "")]

    run(scenario())


# --- the end ----------------------------------------------------------------------------------------------------


def test_a_stop_lets_running_requests_end_and_refuses_new_ones(tmp_path):
    async def scenario():
        triton = FakeTriton("a", WAIT, "b")
        async with serving(tmp_path, triton) as (front, port), a_client(port) as stub:
            call = stub.ModelStreamInfer()  # its client may have more to ask
            await call.write(a_request())
            await call.read()
            draining = asyncio.ensure_future(front.drain(PATIENCE_S))
            await asyncio.sleep(0.05)
            async with a_client(port) as late:
                with pytest.raises(grpc.aio.AioRpcError):
                    await answers(late.ModelStreamInfer(iter([a_request()])))
            triton.go.set()
            assert text_of(await call.read()) == "b"
            with pytest.raises(grpc.aio.AioRpcError, match="the server is stopping"):
                await call.read()
            await draining

    run(scenario())


def test_requests_that_run_longer_than_the_drain_timeout_end_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.grpc_server.server.ERROR_RESPONSES_S", 0.1)

    async def scenario():
        async with serving(tmp_path, FakeTriton("a", WAIT)) as (front, port), a_client(port) as stub:
            call = stub.ModelStreamInfer(iter([a_request("x")]))
            await call.read()
            draining = asyncio.ensure_future(front.drain(0.05))
            response = (await call.read()).infer_response
            fields = json.loads(response.raw_output_contents[0][4:])
            assert (response.id, fields["is_end"], fields["error_type"]) == ("x", 1, "engine_unavailable")
            assert fields["error_msg"] == "the server is stopping"
            await draining

    run(scenario())


def test_a_stop_does_not_wait_for_idle_streams(tmp_path):
    async def scenario():
        async with serving(tmp_path, FakeTriton()) as (front, port), a_client(port) as stub:
            call = stub.ModelStreamInfer()
            await call.wait_for_connection()
            while not front._streams:
                await asyncio.sleep(0.005)
            await front.drain(10 * PATIENCE_S)
            with pytest.raises(grpc.aio.AioRpcError, match="the server is stopping"):
                await call.read()

    run(scenario())


@pytest.mark.slow
def test_nothing_is_left_of_a_hundred_clients_that_leave(tmp_path):
    async def scenario():
        triton = FakeTriton(NEVER)
        async with serving(tmp_path, triton) as (front, port), a_client(port) as stub:
            calls = [stub.ModelStreamInfer(iter([a_request(text="x" * 2 * LARGE_BYTES)])) for _ in range(100)]
            while len(triton.requests) < 50:
                await asyncio.sleep(0.005)
            for call in calls:
                call.cancel()
            connections, budget = front._connections._connections, front._shared.body_memory
            while front._streams or budget.num_bytes or any(each.calls for each in connections):
                await asyncio.sleep(0.005)

    run(scenario())


# --- reflection ---


def test_a_client_without_the_proto_files_learns_the_services_of_the_port_without_a_key(tmp_path):
    def ask(port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            pool = DescriptorPool(database := ProtoReflectionDescriptorDatabase(channel))
            service = pool.FindServiceByName("inference.GRPCInferenceService")
            assert [method.name for method in service.methods] == METHODS
            assert pool.FindServiceByName("grpc.health.v1.Health").methods_by_name["Check"]
            with pytest.raises(KeyError):
                pool.FindServiceByName("inference.Other")
            return {*database.get_services()}

    async def scenario():
        async with serving(tmp_path, FakeTriton(), api_key="secret") as (_, port):
            services = await asyncio.to_thread(ask, port)
        names = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert services == {*names, "inference.GRPCInferenceService"}

    run(scenario())


@pytest.mark.parametrize("message", [b"\xff", b"\x22\x90\x4e" + b"x" * 10_000])
def test_a_malformed_reflection_request_is_refused_in_both_versions(tmp_path, message):
    async def scenario():
        async with (
            serving(tmp_path, FakeTriton()) as (_, port),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            for version in ("v1", "v1alpha"):
                ask = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
                assert b"inference.GRPCInferenceService" in [each async for each in ask(iter([b"\x3a\x00"]))][0]
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    [each async for each in ask(iter([b"\x3a\x00", message]))]
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    run(scenario())
