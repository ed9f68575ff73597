"""Adapters in memory: the one that was not needed for the longest time makes room, unless requests need all of them."""

import pytest

from engine.core.adapters import Adapters
from engine.errors import InvalidRequest, Overloaded


class Memory:
    """An executor that only keeps adapters."""

    def __init__(self):
        self.loaded = []

    def load_adapter(self, adapter):
        if adapter[1] == "broken":
            raise InvalidRequest("not an adapter")
        self.loaded.append(adapter[0])

    def drop_adapter(self, adapter_id):
        self.loaded.remove(adapter_id)


def test_the_idle_adapter_that_was_needed_first_makes_room():
    memory, in_use = Memory(), {"b"}
    adapters = Adapters(memory, 2, lambda: in_use)
    for name in "abab":  # each is loaded once
        adapters.ensure_loaded((name, "folder"))
    assert memory.loaded == ["a", "b"]
    adapters.ensure_loaded(("c", "folder"))
    assert memory.loaded == ["b", "c"]
    in_use = {"c"}
    adapters.ensure_loaded(("a", "folder"))
    assert memory.loaded == ["c", "a"]


def test_while_requests_need_all_adapters_another_one_has_to_wait():
    memory = Memory()
    adapters = Adapters(memory, 2, lambda: {"a", "b"})
    adapters.ensure_loaded(("a", "folder"))
    adapters.ensure_loaded(("b", "folder"))
    with pytest.raises(Overloaded, match="2 adapters run or wait") as caught:
        adapters.ensure_loaded(("c", "folder"))
    assert (caught.value.field, caught.value.limit, memory.loaded) == ("lora_name", 2, ["a", "b"])


def test_an_adapter_that_cannot_be_loaded_takes_no_place():
    memory = Memory()
    adapters = Adapters(memory, 1, lambda: {"a"})
    with pytest.raises(InvalidRequest):
        adapters.ensure_loaded(("x", "broken"))
    adapters.ensure_loaded(("a", "folder"))
    assert memory.loaded == ["a"]
