"""The words for a server that a client cannot reach, with the errors of aiohttp's client."""

import asyncio
import socket

import aiohttp
import pytest

from server_scripts.connection_errors import reason_of


async def a_failure(scheme, answer):
    """Return the error of a request to a server that writes `answer` and closes the connection."""

    async def serve(reader, writer):
        await reader.read(1)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError) as caught:
            await session.get(f"{scheme}://127.0.0.1:{port}")
    return caught.value


@pytest.mark.parametrize(
    ("scheme", "answer", "reason"),
    [
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "over TLS: a server without TLS needs http://"),
        ("http", b"\x15\x03\x03\x00\x02\x02\x46\r\n", "what it answers is not HTTP; a server with TLS needs https://"),
        ("http", b"", "it closed the connection without an answer; a server with TLS needs https://"),
    ],
)
def test_a_server_that_speaks_otherwise_is_described(scheme, answer, reason):
    assert reason_of(asyncio.run(a_failure(scheme, answer))).endswith(reason)


def test_a_name_that_cannot_be_resolved_is_said():
    request = aiohttp.client_reqrep.ConnectionKey("nowhere", 80, False, True, None, None, None)
    error = aiohttp.ClientConnectorDNSError(request, socket.gaierror(-2, "Name or service not known"))
    assert reason_of(error) == "the name nowhere cannot be resolved (Name or service not known)"
