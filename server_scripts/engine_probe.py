"""Asks the engine itself, past tritonserver, whether it has anything to do: for the end of a server."""

from __future__ import annotations

import zmq

from engine.link import messages

TIMEOUT_MS = 300


def is_busy(port: int) -> bool:
    """False also when nobody answers: nothing is going to come of what is open then."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(messages.endpoint_to(f"tcp://127.0.0.1:{port}"))
        socket.send(messages.pack(messages.PING))
        if not socket.poll(TIMEOUT_MS):
            return False
        _, (_, stats) = messages.unpack(socket.recv())
        return bool(stats.get("num_running") or stats.get("num_waiting"))
    finally:
        context.destroy(linger=0)
