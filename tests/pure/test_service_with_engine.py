"""Service, journal and an engine process together, with the counting executor: crashes and clients that leave."""

import random
import time

import pytest

from engine.core.types import Sampling
from engine.link import client as client_module
from engine.link.client import EngineClient
from engine.serving import service as service_module
from engine.serving.prompt import PromptReader
from engine.serving.service import Service, ServiceOptions
from engine.text.tokenizer import Tokenizer
from tests.byte_tokenizer import write_tokenizer
from tests.pure.counting_executor import answer
from tests.pure.engine_helpers import a_free_address, an_engine_process
from tests.pure.service_fakes import FakeSender, a_payload, wait_until


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(client_module, "PING_INTERVAL_S", 0.01)
    monkeypatch.setattr(service_module, "MIN_CANCEL_POLL_S", 0.002)
    return a_free_address()


@pytest.fixture
def service(tmp_path, address):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    reader = PromptReader(tokenizer, vocab_size=2**31 - 1, model_len=160, max_seq_len=80, max_dec_len=120)
    service = Service(tokenizer, reader, EngineClient(address), ServiceOptions())
    yield service
    service.close(drain_s=0)


def ask(service, req_id, prompt, max_dec_len, **fields):
    sender = FakeSender()
    sampling = {"temperature": 0, "seed": req_id, "ignore_eos": True, "max_dec_len": max_dec_len, **fields}
    service.submit(a_payload(req_id=req_id, input_ids=prompt, **sampling), sender)
    sender.expected = answer(prompt, Sampling(max_dec_len, temperature=sampling["temperature"], seed=req_id))
    return sender


def test_a_kill_of_the_engine_is_a_pause_for_sixteen_streams(service, address):
    senders = [ask(service, n, [n + 1] * (n + 1), 60 + n, temperature=n % 2) for n in range(16)]
    with an_engine_process(address, max_steps=40):
        wait_until(lambda: sum(bool(sender.sent) for sender in senders) >= 8)
    assert not any(sender.is_over for sender in senders)
    with an_engine_process(address):
        for sender in senders:
            final = sender.final
            assert final["tokens_all_ids"] == sender.expected
            assert sum((fields["token_ids"] for fields, _ in sender.sent), []) == sender.expected
            assert "".join(fields["token"] for fields, _ in sender.sent) == final["tokens_all"]
    assert service.client.num_restarts == 1


def test_100_clients_that_leave_at_random_moments_leave_nothing_behind(service, address):
    rng = random.Random(0)
    with an_engine_process(address, step_s=0.0005):
        kept = [ask(service, n, [n], 100) for n in range(4)]
        wait_until(lambda: kept[0].sent)
        gone = []
        for n in range(100, 200):
            gone.append(ask(service, n, [n] * rng.randint(1, 50), 100))
            rng.choice(gone).cancelled = True
            time.sleep(rng.random() * 0.002)
        for sender in gone:
            sender.cancelled = True
        for sender in kept:
            assert sender.final["tokens_all_ids"] == sender.expected
        for sender in gone:
            assert sender.final.get("error_type", "length") in ("cancelled", "length", "overloaded")
        names = ("num_running", "num_waiting", "num_blocks_held")
        wait_until(lambda: [service.client.stats[name] for name in names] == [0, 0, 0])
        assert (service.num_open, service.client.num_open) == (0, 0)
        assert service.client.stats["num_dropped"] > 0
