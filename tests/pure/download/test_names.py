"""Names, options and addresses: what they mean, and which are refused before anybody is asked."""

import re
from dataclasses import replace

import pytest

import download_model
from download_model import DownloadError, DownloadOptions, download, parse_model_name
from tests.pure.download.models import NAME


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", ("Qwen/Qwen2.5-0.5B-Instruct", None)),
        ("deepseek-ai/DeepSeek-R1/weight_only_int4", ("deepseek-ai/DeepSeek-R1", "weight_only_int4")),
        ("deepseek-ai/DeepSeek-R1-2nodes/a8w8_fp8", ("deepseek-ai/DeepSeek-R1-2nodes", "a8w8_fp8")),
    ],
)
def test_a_model_name_is_split_into_repository_and_quantization(name, parsed):
    assert parse_model_name(name) == parsed


def test_an_unknown_quantization_is_refused_with_the_list_of_the_known():
    with pytest.raises(DownloadError, match="'int3'.*weight_only_int8, weight_only_int4, .*a8w8c8_fp8, .*float32"):
        parse_model_name("an-org/a-model/int3")


@pytest.mark.parametrize(
    "name",
    ["", "model", "/etc/passwd", "../a", "a/..", "a/b/../c", "a//b", "a/b?c", "a/b c", "a\\b/c", "a/b\n"],
)
def test_a_model_name_that_is_no_name_is_refused(name):
    with pytest.raises(DownloadError, match="model_name is .* it must be org/model"):
        parse_model_name(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nnodes": 0}, "nnodes is 0, it must be at least 1"),
        ({"nnodes": 3}, "nnodes is 3: .* folders for one node .* two"),
        ({"mode": "leader"}, "mode is 'leader'"),
        ({"mirror": "file:///etc"}, "MODEL_MIRROR is 'file:///etc'"),
        ({"tag": "../.."}, "tag is '../..'"),
    ],
)
def test_an_impossible_option_is_refused_by_name_and_value(changes, message, mirror, server, tmp_path):
    with pytest.raises(DownloadError, match=message):
        download(NAME, tmp_path, replace(mirror, **changes))
    assert server.requests == []


@pytest.mark.parametrize(
    "url",
    ["hub.example", "http://", "http://[::1", "http://a b", "http://h:99999", "http://h/?a=1", "ftp://h"],
)
def test_an_endpoint_or_mirror_that_is_no_url_is_refused_by_name_and_value(url, tmp_path):
    for name, options in (
        ("HF_ENDPOINT", DownloadOptions(hub_endpoint=url)),
        ("MODEL_MIRROR", DownloadOptions(mirror=url)),
    ):
        with pytest.raises(DownloadError, match=f"^{name} is {re.escape(repr(url))}, it must be an http"):
            download(NAME, tmp_path, options)


def test_a_password_in_a_url_is_refused_and_not_repeated(tmp_path):
    for options in DownloadOptions(hub_endpoint="http://me:pass@h"), DownloadOptions(mirror="http://me:pass@h"):
        with pytest.raises(DownloadError, match="has a user name or password in it") as caught:
            download(NAME, tmp_path, options)
        assert "pass@" not in str(caught.value)


def test_options_come_from_the_environment():
    environ = {"MODEL_MIRROR": "http://m", "tag": "3.1", "MD5_CHECK": "1", "HF_ENDPOINT": "http://h/"}
    options = DownloadOptions.from_env(environ, nnodes=2)
    assert (options.mirror, options.tag, options.hub_endpoint) == ("http://m", "3.1", "http://h")
    assert options.policy.rehash and options.nnodes == 2
    assert DownloadOptions.from_env({}) == DownloadOptions(tag="3.0.0.b4")
    with pytest.raises(DownloadError, match="MD5_CHECK is 'yes'"):
        DownloadOptions.from_env({"MD5_CHECK": "yes"})


def test_the_command_line_has_the_short_and_the_long_options():
    short = download_model.parse_args("-m a/b -d models -n 2 -M slave -s draft".split())
    long = download_model.parse_args(
        "--model_name a/b --dir models --nnodes 2 --mode slave --speculate_model_path draft".split()
    )
    assert short == long
    defaults = {"dir": "downloads", "nnodes": 1, "mode": "master", "speculate_model_path": None}
    assert vars(download_model.parse_args([])) == defaults | {"model_name": download_model.DEFAULT_MODEL}
