"""A service on an engine that is driven by hand."""

import pytest

from engine.serving import service as service_module
from engine.serving.options import ServiceOptions
from engine.serving.service import Service
from tests.pure.service_fakes import FakeEngine, FakeSender, a_payload, an_input_processor


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(service_module, "MIN_CANCEL_POLL_S", 0.002)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def make(tokenizer, engine):
    """Return a function that makes a service on the fake engine. Every sender that `ask` makes is checked at the
    end.
    """
    services, senders = [], []

    def make(checked=True, **options):
        service = Service(an_input_processor(tokenizer), engine, ServiceOptions(**options))

        def ask(prompt=(1, 2), req_id="a", before_send=lambda fields, final: None, **fields):
            sender = FakeSender(before_send)
            senders.append(sender)
            service.submit(a_payload(req_id=req_id, input_ids=list(prompt), **fields), sender)
            return sender

        service.ask = ask
        services.extend([service] * checked)
        return service

    yield make
    for service in services:
        service.close(drain_s=0)
        assert service.num_open == 0
    for sender in senders:
        assert sender.final


@pytest.fixture
def service(make):
    return make()
