"""Tests of the rendezvous of several machines, which are threads at 127.0.0.1, 127.0.0.2, ..., and of callers that are
refused.
"""

import contextlib
import os
import socket
import threading
from concurrent.futures import Future
from multiprocessing.connection import Pipe

import pytest

from engine.core.types import Batch
from engine.errors import HostLost, SetupError
from engine.executors.distributed import hosts, rendezvous
from engine.executors.distributed.ranks import pack, unpack
from engine.settings.machines import Machines
from tests.patience import PATIENCE_S, wait_until
from tests.pure.counting_executor import CountingExecutor
from tests.server import free_ports

FACTS = {"MP_NUM": 4, "BATCH_SIZE": 50}


class Hosts:
    """Hosts of a group, of which each test uses the parts that it needs. `waits` are the messages of the waiting
    master.
    """

    def __init__(self, count):
        self.ips = tuple(f"127.0.0.{n + 1}" for n in range(count))
        self.machines = [Machines(self.ips, host, count) for host in range(count)]
        [self.port] = free_ports(1)
        self.waits = []

    def master(self):
        """Start the master. Return a function that waits for its followers and peers."""
        master = in_thread(rendezvous.wait_for_followers, self.machines[0], self.port, FACTS, self.waits.append)
        wait_until(lambda: self.waits)
        return master

    def follower(self, host, facts=FACTS):
        """Start a follower. Return a function that waits for its connection to the master and for its peers."""
        return in_thread(rendezvous.join_master, self.machines[host], self.port, facts)

    def stranger(self, payload=b"", ip="127.0.0.2"):
        sock = socket.create_connection((self.ips[0], self.port), PATIENCE_S, (ip, 0))
        sock.sendall(payload)
        return sock

    def call(self, host, *hello):
        return rendezvous.connect_to(self.machines[host], 0, self.port, pack(*hello))


def in_thread(function, *arguments):
    """Start the function in a thread and return a function that waits for its result. A thread that never ends does not
    block the test run.
    """
    result = Future()

    def run():
        try:
            result.set_result(function(*arguments))
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def speak(peers_of):
    """Let each host send its number to all others. Return what each receives, in the order of its connections."""
    for host, peers in enumerate(peers_of):
        for peer in peers:
            peer.sendall(bytes([host]))
    heard = [[peer.recv(1)[0] for peer in peers] for peers in peers_of]
    for peer in (peer for peers in peers_of for peer in peers):
        peer.close()
    return heard


@pytest.mark.parametrize("order", ["master first", "master last"])
def test_four_hosts_meet_and_each_is_connected_with_all_in_their_order(order):
    four = Hosts(4)
    master = four.master() if order == "master first" else None
    followers = [four.follower(host) for host in (3, 1, 2)]
    _, peers = (master or four.master()).result(PATIENCE_S)
    third, first, second = (follower.result(PATIENCE_S)[1] for follower in followers)
    assert speak([peers, first, second, third]) == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


def test_the_master_tells_for_whom_it_waits():
    three = Hosts(3)
    master = three.master()
    assert three.waits == ["waits for 127.0.0.2, 127.0.0.3"]
    followers = [three.follower(1)]
    wait_until(lambda: len(three.waits) > 1)
    assert three.waits[1] == "waits for 127.0.0.3"
    followers.append(three.follower(2))
    speak([each.result(PATIENCE_S)[1] for each in (master, *followers)])


JUNK = {
    "silent and gone": b"",
    "no length": b"GET / HTTP/1.0\r\n\r\n",
    "too long": (2**30).to_bytes(4, "big") + b"x" * 5000,
    "no msgpack": (3).to_bytes(4, "big") + b"\xc1\xc1\xc1",
    "no list": (1).to_bytes(4, "big") + b"\x07",
    "an empty list": (1).to_bytes(4, "big") + b"\x90",
    "unhashable keys": (4).to_bytes(4, "big") + b"\x91\x81\x80\x01",
    "cut off": (100).to_bytes(4, "big") + b"\x93",
}


@pytest.mark.parametrize("payload", JUNK.values(), ids=JUNK)
def test_a_connection_that_makes_no_sense_is_closed_and_does_no_harm(payload):
    two = Hosts(2)
    master = two.master()
    with two.stranger(payload) as sock:
        with contextlib.suppress(OSError):  # it may be closed already
            sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    speak([two.follower(1).result(PATIENCE_S)[1], master.result(PATIENCE_S)[1]])


def test_connections_from_other_addresses_are_closed():
    two = Hosts(2)
    master = two.master()
    with two.stranger(ip="127.0.0.3") as sock:
        assert is_closed(sock)
    speak([two.follower(1).result(PATIENCE_S)[1], master.result(PATIENCE_S)[1]])


@pytest.mark.slow
def test_a_host_that_says_nothing_holds_up_the_others_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_S", 1)
    two = Hosts(2)
    master = two.master()
    with two.stranger() as sock:
        assert is_closed(sock)
    speak([two.follower(1).result(PATIENCE_S)[1], master.result(PATIENCE_S)[1]])


def is_closed(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_host_with_other_settings_is_refused_with_the_differences():
    two = Hosts(2)
    master = two.master()
    with pytest.raises(SetupError, match="127.0.0.1, which serves, refuses 127.0.0.2: BATCH_SIZE is 8 there, 50 here"):
        two.follower(1, {"MP_NUM": 4, "BATCH_SIZE": 8}).result(PATIENCE_S)
    for odd in ("facts", {}, {"MP_NUM": [4]}):
        with rendezvous.IncomingConnection(1, two.call(1, rendezvous.FOLLOW, odd), ()).connection() as connection:
            assert unpack(connection.recv_bytes())[0] == rendezvous.REFUSED
    speak([two.follower(1).result(PATIENCE_S)[1], master.result(PATIENCE_S)[1]])


def test_a_host_that_waits_and_ends_is_waited_for_again():
    three = Hosts(3)
    master = three.master()
    sock = three.call(1, rendezvous.FOLLOW, FACTS)
    wait_until(lambda: three.waits[-1] == "waits for 127.0.0.3")
    sock.close()
    wait_until(lambda: three.waits[-1] == "waits for 127.0.0.2, 127.0.0.3")
    followers = [three.follower(1), three.follower(2)]
    speak([each.result(PATIENCE_S)[1] for each in (master, *followers)])


def test_a_host_that_calls_again_takes_the_place_of_its_earlier_call():
    three = Hosts(3)
    master = three.master()
    with three.call(1, rendezvous.FOLLOW, FACTS) as earlier:
        wait_until(lambda: three.waits[-1] == "waits for 127.0.0.3")
        followers = [three.follower(1)]
        assert is_closed(earlier)
        followers.append(three.follower(2))
        speak([each.result(PATIENCE_S)[1] for each in (master, *followers)])


@pytest.mark.slow
def test_a_connection_of_an_earlier_rendezvous_is_not_taken(monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_S", 1.0)
    two = Hosts(2)
    master = two.master()
    with rendezvous.IncomingConnection(1, two.call(1, rendezvous.FOLLOW, FACTS), ()).connection() as connection:
        assert unpack(connection.recv_bytes())[0] == rendezvous.GO
        with two.call(1, rendezvous.SUMS, "an earlier one") as sums:
            assert is_closed(sums)
        with pytest.raises(HostLost, match="127.0.0.2 has ended or cannot be reached"):
            master.result(PATIENCE_S)


def test_connections_to_other_hosts_stay_open_until_a_lost_one_is_noticed(monkeypatch):
    """A step may fail because of it; the watch over a connection that was closed here does not end the process."""
    (near, far), closed = Pipe(), []
    monkeypatch.setattr(hosts.time, "sleep", lambda seconds: closed.append((seconds, near.closed)))

    class Failing(CountingExecutor):
        def launch(self, batch):
            raise ValueError("the other host has gone")

    with pytest.raises(ValueError, match="the other host has gone"):
        hosts.HostsExecutor(Failing(), [near]).launch(Batch([]))
    assert closed[0] == (hosts.DETECTION_S, False)
    assert near.closed
    far.close()


def test_the_watch_over_a_host_ends_with_our_own_end_of_the_connection(monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("it was we who closed it"))
    near, far = socket.socketpair()
    connection = rendezvous.IncomingConnection(1, near, ()).connection()
    hosts.exit_with_host(connection, "127.0.0.2")
    connection.close()
    far.close()
    wait_until(lambda: not any(thread.name == "watches 127.0.0.2" for thread in threading.enumerate()))
