"""The page at `/` as HTTP has it, and /status, of which its live view is made. With a browser: tests/triton."""

import json
import re

import pytest

from engine.serving.latency import NUM_RECENT, LatencyStats, RequestRecord
from engine.wire import ModelState
from gateway.web import FILES
from tests.pure.gateway_fake import FakeBackend, running

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def gateway():
    with running(FakeBackend(), api_key="secret", served_model_name="its-name") as gateway:
        yield gateway


def test_a_browser_gets_the_page_without_a_key_and_a_program_what_there_is(gateway):
    status, headers, payload = gateway.send("GET", "/", headers=BROWSER)
    assert (status, headers.get_content_type(), headers["Vary"]) == (200, "text/html", "Accept")
    assert payload == FILES["index.html"].body and b"its-name" not in payload
    assert gateway.send("GET", "/")[0] == gateway.send("GET", "/", headers={"Accept": "*/*"})[0] == 401
    status, headers, payload = gateway.send("GET", "/", headers={"Authorization": "Bearer secret"})
    assert (status, json.loads(payload)["model"]) == (200, "its-name")
    assert gateway.send("GET", "/status", headers=BROWSER)[0] == 401


def test_its_files_are_all_served_guarded_against_scripts_and_not_sent_twice(gateway):
    named = re.findall(rb'(?:(?:src|href)="page/|from "\./)([\w.]+)"', b"".join(each.body for each in FILES.values()))
    assert {name.decode() for name in named} | {"index.html"} == set(FILES)
    for name, file in FILES.items():
        status, headers, payload = gateway.send("GET", f"/page/{name}")
        assert (status, headers.get_content_type(), payload) == (200, file.content_type, file.body)
        policy = dict(each.split(" ", 1) for each in headers["Content-Security-Policy"].split("; "))
        assert (policy["default-src"], policy["script-src"], policy["trusted-types"]) == ("'none'", "'self'", "'none'")
        assert headers["X-Content-Type-Options"] == "nosniff"
        again = {"If-None-Match": headers["ETag"]}
        status, headers, payload = gateway.send("GET", f"/page/{name}", headers=again)
        assert (status, payload, headers["ETag"], headers["Cache-Control"]) == (
            304,
            b"",
            again["If-None-Match"],
            "no-cache",
        )
    assert gateway.send("GET", "/page/style.css", headers={"If-None-Match": '"other"'})[0] == 200


@pytest.mark.parametrize("name", ["__init__.py", "none.js", "..%2fapp.py", "%2e%2e/app.py"])
def test_nothing_else_is_served(gateway, name):
    assert gateway.send("GET", f"/page/{name}")[0] in (401, 404)


def test_the_page_is_small_and_names_no_other_host(gateway):
    text = b"".join(file.body for file in FILES.values()).decode()
    assert len(text) < 50_000 and len(text.splitlines()) < 900
    assert set(re.findall(r"https?://[\w.]+", text)) == {"http://www.w3.org"}  # the name of SVG
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|localStorage", text)


def test_the_status_has_the_numbers_and_the_last_requests_without_their_words():
    latency = LatencyStats()
    for number in range(NUM_RECENT + 5):
        latency.record_end(RequestRecord("stop", float(number), 0.5, 30, number, "alice"))
    samples = [
        ["llm_kv_blocks", "gauge", "", [], 8, ""],
        ["llm_request_seconds", "histogram", "", [], 1.5, "_sum"],
        ["llm_request_seconds", "histogram", "", [["le", "1"]], 2, "_bucket"],
    ]
    state = ModelState(ready=False, reason="starting", model_len=64, metrics=samples, last_requests=latency.recent())
    with running(FakeBackend(state=state)) as gateway:
        reported = json.loads(gateway.send("GET", "/status")[2])
    assert (reported["model"], reported["ready"], reported["reason"], reported["model_len"]) == (
        "default",
        False,
        "starting",
        64,
    )
    assert reported["metrics"] == {"llm_kv_blocks": 8, "llm_request_seconds_sum": 1.5}
    assert len(reported["last_requests"]) == NUM_RECENT
    last = reported["last_requests"][0]
    assert last.pop("ended_at") > 1e9
    assert last == {
        **{"reason": "stop", "seconds": NUM_RECENT + 4, "first_token_s": 0.5, "num_prompt_tokens": 30},
        **{"num_generated_tokens": NUM_RECENT + 4, "key": "alice"},
    }
