"""The file of API keys: what is refused at the start, and that no key is ever shown."""

import json

import pytest

from engine.errors import ConfigError
from engine.settings.config import Config
from engine.settings.keys import Owner


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "keys.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_owners_are_found_by_their_keys(write):
    path = write(
        {"alice": {"key": "k1", "max_requests": 4, "tokens_per_minute": 1000, "priority": -1}, "b": {"key": "k2"}}
    )
    config = Config.from_env({"API_KEYS": path, "API_KEY": "k3"})
    assert config.owners == {"k1": Owner("alice", 4, 1000, -1), "k2": Owner("b"), "k3": Owner()}
    assert Config().owners == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": {"key": "s3cret"', "which is not valid JSON: Expecting ',' delimiter in line 1"),
        ("[" * 100_000, "which is not valid JSON"),
        ([], "must hold an object with a name or more"),
        ({}, "must hold an object with a name or more"),
        ({"a b": {"key": "s3cret"}}, "'a b' is no name of up to 64 letters"),
        ({"a": "s3cret"}, "a must have an object with a `key`"),
        ({"a": {}}, "a must have an object with a `key`"),
        ({"a": {"kye": "s3cret"}}, "a must have an object with a `key`"),
        ({"a": {"key": "s3cret\n"}}, "the key of a must be a text of visible ASCII"),
        ({"a": {"key": "a s3cret"}}, "the key of a must be a text of visible ASCII without blanks"),
        ({"a": {"key": "s3cret"}, "b": {"key": "s3cret"}}, "the key of b is that of a, too"),
        (
            {"a": {"key": "s3cret", "max_request": 1}},
            "a has 'max_request', there are key, max_requests, tokens_per_minute",
        ),
        ({"a": {"key": "s3cret", "max_requests": 0}}, "max_requests of a is 0, it must be a whole number from 1 to"),
        (
            {"a": {"key": "s3cret", "priority": True}},
            "priority of a is True, it must be a whole number from -100 to 100",
        ),
    ],
)
def test_a_file_that_is_wrong_stops_the_start(write, content, message):
    with pytest.raises(ConfigError) as caught:
        Config.from_env({"API_KEYS": write(content)})
    assert message in str(caught.value)
    assert str(caught.value).startswith("API_KEYS")
    assert "s3cret" not in str(caught.value)


def test_a_file_that_is_not_there_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match="API_KEYS is .*, a file that cannot be read: No such file"):
        Config.from_env({"API_KEYS": str(tmp_path / "none")})
