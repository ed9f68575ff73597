"""Images are decoded in worker processes; one that ends or takes too long costs only its own request."""

import fcntl
import os
import signal
import struct
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.errors import EngineUnavailable
from engine.images.pool import ImageWorkerPool
from engine.images.processor import ImageError, ImageProcessor
from engine.images.worker import ImageSetup
from tests.image_requests import a_file, write_vision_model
from tests.images import an_image
from tests.patience import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_vision_model(directory)
    return directory


@pytest.fixture
def make(model):
    pools = []

    def make(size=1, max_pixels=10**6, memory_bytes=256 << 20, timeout_s=PATIENCE_S):
        pools.append(ImageWorkerPool(ImageSetup(str(model), max_pixels, memory_bytes, timeout_s), size))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def pool(model):
    pool = ImageWorkerPool(ImageSetup(str(model), 10**8, 100 << 20, PATIENCE_S), 1)
    yield pool
    pool.close()


def worker_pids():
    """Return the processes of this one that decode images."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as command:
                is_child = stat.read().rpartition(")")[2].split()[1] == str(os.getpid())
                if is_child and "engine.images.worker" in command.read():
                    pids.append(int(pid))
        except OSError:
            continue
    return pids


def pid_of_next(pool):
    """Return the processes after one more image."""
    assert pool.prepare(a_file(an_image(30, 30))).num_tokens > 0
    return worker_pids()


@pytest.mark.slow
def test_an_image_is_what_the_processor_makes_of_it(pool, model):
    image, processor = an_image(120, 200), ImageProcessor.read(model)
    prepared = pool.prepare(a_file(image), (processor.min_pixels, processor.max_pixels))
    pixels = processor.resize(image)
    assert prepared.pixels == pixels.tobytes()
    assert prepared.content_hash == processor.content_hash(pixels)
    assert prepared.grid == processor.grid_of(120, 200)
    assert prepared.num_tokens * 28 * 28 == np.prod(pixels.shape[:2])


def test_limits_of_a_request_make_an_image_smaller(pool):
    file = a_file(an_image(120, 200))
    assert pool.prepare(file, (784, 4 * 784)).num_tokens < pool.prepare(file).num_tokens <= 12


def test_a_refused_image_leaves_the_worker_alone(pool):
    pool.prepare(a_file(an_image(30, 30)))
    pids = worker_pids()
    with pytest.raises(ImageError, match="is no image"):
        pool.prepare(b"hello")
    with pytest.raises(ImageError, match="^is too narrow with 400 x 1 pixels: at most 200:1"):
        pool.prepare(a_file(an_image(1, 400)))
    pool.prepare(a_file(an_image(30, 30)))
    assert worker_pids() == pids != []


@pytest.mark.slow
def test_an_image_that_needs_too_much_memory_is_refused(pool):
    with pytest.raises(ImageError, match="memory"):
        pool.prepare(a_file(Image.new("1", (9000, 9000))))
    assert pool.prepare(a_file(an_image(30, 30))).num_tokens > 0


@pytest.mark.slow
def test_a_worker_that_stops_costs_only_its_own_request(make):
    pool, before = make(), set(worker_pids())
    pool.prepare(a_file(an_image(30, 30)))
    [pid] = set(worker_pids()) - before
    os.kill(pid, signal.SIGSTOP)
    [worker] = pool._free.queue
    worker._timeout_s = 1.0  # of this worker alone: others may need longer on a busy machine
    with pytest.raises(ImageError, match="could not be decoded within 1 s"):
        pool.prepare(a_file(an_image(30, 30)))
    assert pool.prepare(a_file(an_image(30, 30))).num_tokens > 0
    assert pid not in worker_pids()


@pytest.mark.slow
def test_a_worker_that_ends_costs_only_its_own_request(make):
    pool, before = make(), set(worker_pids())
    pool.prepare(a_file(an_image(30, 30)))
    [pid] = set(worker_pids()) - before
    os.kill(pid, signal.SIGSTOP)
    [worker] = pool._free.queue
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(pool.prepare, bytes(2 << 20))  # more than the socket holds
        wait_until(lambda: num_unread_bytes(worker._connection) > 1000)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ImageError, match="its decoder has ended"):
            asked.result()
    [pid] = set(pid_of_next(pool)) - before
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: " Z " in Path(f"/proc/{pid}/stat").read_text())
    assert pid not in pid_of_next(pool)  # it had ended between two images, which costs none


def num_unread_bytes(connection):
    """Return the number of bytes that were sent and that the other end has not read."""
    return struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]


@pytest.mark.slow
def test_threads_share_the_workers(make):
    pool, found, before = make(size=2), [], set(worker_pids())
    files = [a_file(an_image(40, 40, seed)) for seed in range(4)]
    threads = [threading.Thread(target=lambda: found.extend(map(pool.prepare, files))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(worker_pids()) - before) <= 2
    assert len({each.content_hash for each in found}) == 4 and len(found) == 16


def test_a_closed_pool_has_no_workers_and_takes_no_images(make):
    pool, before = make(), set(worker_pids())
    assert set(pid_of_next(pool)) - before
    pool.close()
    assert set(worker_pids()) == before
    with pytest.raises(EngineUnavailable):
        pool.prepare(a_file(an_image(30, 30)))
