"""Worker process that decodes and resizes images: `python -m engine.images.worker FD`.

`engine.images.pool` is the other side. The process has a limit of memory, and ends when the connection is closed.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np

from engine.images.decoding import decode
from engine.images.processor import ImageError, ImageProcessor

NICENESS = 5  # the cores are needed for the model


class ImageSetup(NamedTuple):
    """The first message to a worker."""

    directory: str  # of the model
    max_pixels: int  # of a file
    memory_bytes: int  # for one image, beside the code
    timeout_s: float  # of one image


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    os.nice(NICENESS)
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    setup = ImageSetup(*msgpack.unpackb(connection.recv_bytes()))
    processor = ImageProcessor.read(Path(setup.directory))
    assert processor, "the model reads no images"
    limit_memory(setup.memory_bytes)
    connection.send_bytes(b"ready")
    while True:
        try:
            limits = msgpack.unpackb(connection.recv_bytes())
            data = connection.recv_bytes()
        except EOFError:
            return
        signal.alarm(2 * math.ceil(setup.timeout_s))  # ends the process if its parent cannot any more
        header, pixels = answer(processor.with_limits(*limits), data, setup.max_pixels)
        connection.send_bytes(msgpack.packb(header))
        if pixels is not None:
            connection.send_bytes(pixels.data.cast("B"))
        signal.alarm(0)
        del data, pixels


def limit_memory(num_bytes: int) -> None:
    """Let this process have so many more bytes."""
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer(processor: ImageProcessor, data: bytes, max_pixels: int) -> tuple[tuple, np.ndarray | None]:
    """Return (grid, content hash) and the pixels of the image in a file, or (what is wrong,) and None."""
    try:
        image = decode(data, max_pixels)
        pixels = processor.resize(image)
        return (processor.grid_of(image.height, image.width), processor.content_hash(pixels)), pixels
    except ImageError as error:
        return (str(error),), None
    except MemoryError:
        return ("needs more memory than an image may take",), None


if __name__ == "__main__":
    main()
