"""Clients of the stress test. Each runs one request in one protocol and yields the parts that its client receives.

A generator that ends without a last part, or raises one of CUT, means that the connection was cut.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import grpc
from PIL import Image
from tritonclient.grpc import service_pb2_grpc

from benchmarks.hostile_grammars import hostile_grammar
from benchmarks.storm.ledger import Part
from engine.wire.triton import infer_request

CUT = (aiohttp.ClientError, OSError, grpc.RpcError)
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 1000)]
NUM_CHANNELS = 4
LAST_EVENT_ID = "Last-Event-ID"  # of OpenAI's streams; here also a field of the request
PROMPTS = ("What is the capital of {}?", "List 3 countries like {}.", "Is {} in Europe?", "Tell me a story of {}.")
PLACES = "France Italy Japan Kenya Peru Canada Norway India Brazil Egypt Spain Cuba Chile Ghana Nepal Poland".split()
BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"text": ""}, {"text": 3}, {"text": "hi", "max_dec_len": -1}, {"text": "hi", "topp": 1.5}, {"input_ids": [10**7]},
    {"text": "hi", "max_declen": 5}, {"text": "word " * 9000}, {"messages": [{"role": "user"}], "req_id": "x"},
)  # fmt: skip
NUM_IMAGES = 12  # different ones
WITH_GRAMMAR = 0.2  # share of the requests
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"guided_choice": ["Paris", "Rome", "Parma", "none of these"]},
    {"guided_regex": "[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9}){0,20}"},
    {"guided_json": {"type": "array", "items": {"enum": PLACES}, "minItems": 2, "maxItems": 9}},
    {"guided_grammar": 'root ::= "(" root ")" | [0-9]{1,8}'},
)

Parts = AsyncGenerator[Part, None]


def a_request(rng: random.Random, image_share: float = 0.0) -> dict[str, Any]:
    """Return the native fields of a random request: greedy or seeded, with a short or a long answer, and with images in
    a share of the requests."""
    grammar = rng.choice(GRAMMARS) if rng.random() < WITH_GRAMMAR else {}
    text = rng.choice(PROMPTS).format(rng.choice(PLACES))
    images = [an_image(rng) for _ in range(rng.choice([1, 1, 2]))] if rng.random() < image_share else []
    content = [*images, {"type": "text", "text": text}]
    return {
        **({"messages": [{"role": "user", "content": content}]} if images else {"text": text}),
        "temperature": rng.choice([0, 1]),
        "topp": 0.9,
        "infer_seed": rng.randrange(2**31),
        "max_dec_len": rng.choice([8, 60, 120, 250]),
        "ignore_eos": rng.random() < 0.5 and not grammar,
        "penalty_score": rng.choice([1.0, 1.1]),
        **grammar,
    }


def an_image(rng: random.Random) -> dict[str, Any]:
    """Return an image part with one of NUM_IMAGES images, so that some are cached."""
    own = random.Random(rng.randrange(NUM_IMAGES))
    small = Image.frombytes("RGB", (8, 8), own.randbytes(192))
    file = io.BytesIO()
    small.resize((own.randint(30, 400), own.randint(30, 400)), Image.Resampling.NEAREST).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def a_hostile_request(rng: random.Random) -> dict[str, Any]:
    """Return a request whose grammar may take any time and memory, or crash the grammar compiler."""
    return {"text": "Hello", "max_dec_len": 60, "temperature": 1, **hostile_grammar(rng)}


class Clients:
    """Clients of the server on these ports, one for each protocol. Create it inside a running event loop."""

    def __init__(self, http_port: int, grpc_port: int):
        self._base = f"http://127.0.0.1:{http_port}/v1"
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**13
        )
        target = f"127.0.0.1:{grpc_port}"
        self._channels = [grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) for _ in range(NUM_CHANNELS)]
        self._stubs = itertools.cycle(map(service_pb2_grpc.GRPCInferenceServiceStub, self._channels))
        self.styles = {
            "native stream": self.native_stream,
            "OpenAI stream": self.openai_stream,
            "gRPC stream": self.grpc_stream,
            "whole": self.whole,
        }

    async def close(self) -> None:
        await self._http.close()
        for channel in self._channels:
            await channel.close()

    async def native_stream(self, fields: dict[str, Any]) -> Parts:
        async with self._http.post(f"{self._base}/completions", json=fields | {"stream": True}) as response:
            async for line in response.content:
                yield native_part(json.loads(line))

    async def whole(self, fields: dict[str, Any]) -> Parts:
        async with self._http.post(f"{self._base}/chat/completions", json=fields) as response:
            answer = json.loads(await response.read())
            delta = {"token": answer.get("tokens_all"), "token_ids": answer.get("tokens_all_ids"), "send_idx": 0}
            yield native_part(answer | delta | {"is_end": 1})

    async def openai_stream(self, fields: dict[str, Any]) -> Parts:
        headers = {LAST_EVENT_ID: fields.get(LAST_EVENT_ID) or "0", "X-Request-Id": fields["req_id"]}
        url, event_id = f"{self._base}/chat/completions", ""
        async with self._http.post(url, json=as_openai(fields), headers=headers) as response:
            if response.status != 200:
                yield openai_part(json.loads(await response.read()))
                return
            async for line in response.content:
                if line.startswith(b"id: "):
                    event_id = line[4:].decode().strip()
                elif line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield openai_part(json.loads(line[6:]))._replace(event_id=event_id)

    async def grpc_stream(self, fields: dict[str, Any]) -> Parts:
        call = next(self._stubs).ModelStreamInfer(iter([infer_request(fields)]))
        try:
            async for response in call:
                if response.error_message:  # an error of Triton itself: the process of its model has died
                    yield Part(error="engine_unavailable")
                    return
                answer = json.loads(response.infer_response.raw_output_contents[0][4:])
                yield native_part(answer[0] if isinstance(answer, list) else answer)
        finally:
            call.cancel()


def native_part(answer: dict[str, Any]) -> Part:
    if answer["error_code"]:
        return Part(error=answer["error_type"])
    finish_reason = answer["finish_reason"] if answer["is_end"] else None
    return Part(answer["token"], tuple(answer["token_ids"]), answer["send_idx"], finish_reason)


def as_openai(fields: dict[str, Any]) -> dict[str, Any]:
    messages = fields.get("messages") or [{"role": "user", "content": fields["text"]}]
    body = {"model": "default", "messages": messages, "stream": True}
    body |= {name: fields[name] for name in ("temperature", "ignore_eos")}
    body |= {"top_p": fields["topp"], "seed": fields["infer_seed"], "max_tokens": fields["max_dec_len"]}
    body |= {name: value for name, value in fields.items() if name.startswith("guided_")}
    return body | {"repetition_penalty": fields["penalty_score"], "request_id": fields["req_id"]}


def openai_part(chunk: dict[str, Any]) -> Part:
    if error := chunk.get("error"):
        return Part(error=error["code"] or error["type"])
    [choice] = chunk["choices"]
    return Part(choice["delta"].get("content") or "", finish_reason=choice["finish_reason"])
