"""The page at `/` in a real browser: a chat with the real server, and with a scripted model what a model may write."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import pytest
from selenium.webdriver.common.keys import Keys

from engine.errors import EngineUnavailable
from engine.serving import metrics
from engine.serving.latency import LatencyStats, RequestRecord
from engine.serving.rate_limits import RateLimiter
from engine.wire import ModelState
from tests.browser import running_browser
from tests.image_requests import a_data_url, a_file
from tests.images import an_image
from tests.pure.gateway_fake import WAIT, FakeBackend, running
from tests.server import running_server


@pytest.fixture(scope="module")
def browser():
    with running_browser() as browser:
        yield browser


def a_state(**ended):
    """Return the state that a probe reports, with one request that has ended."""
    latency = LatencyStats()
    latency.record_end(RequestRecord("stop", 2.5, 0.5, 30, 21, **ended))
    stats = {"num_running": 3, "num_waiting": 2, "num_blocks": 8, "num_blocks_held": 6}
    service = SimpleNamespace(
        client=SimpleNamespace(stats=stats, num_restarts=0, engines=[None]),
        num_open=0,
        latency=latency,
        rate_limiter=RateLimiter(),
        vllm_model_name=str,
    )
    samples = [list(each) for each in metrics.samples(service, 1)]
    return ModelState(ready=True, model_len=8192, metrics=samples, last_requests=latency.recent())


def say(browser, text):
    browser.one("#prompt").send_keys(text, Keys.ENTER)
    browser.until(lambda: browser.find("article.assistant footer span") and browser.one("#send").is_displayed())


def texts(browser, selector):
    return [each.text for each in browser.find(selector)]


def live_texts(browser, selector):
    """Return the texts at one moment: the live view replaces its elements every second."""
    return browser.run(f"return [...document.querySelectorAll({json.dumps(selector)})].map((each) => each.innerText)")


def test_it_chats_with_the_real_server_shows_its_state_and_contacts_no_other_host(browser, tmp_path):
    with running_server(tmp_path, {}) as server:
        browser.open(server.http_url + "/")
        browser.until(lambda: texts(browser, "h1") == ["demo_model"])
        say(browser, "What is the capital of France?")
        say(browser, "What is the capital of Japan?")
        assert texts(browser, "article.user") == ["What is the capital of France?", "What is the capital of Japan?"]
        first, second = texts(browser, ".assistant > .text")
        assert ("Paris" in first, "Tokyo" in second) == (True, True)
        facts = texts(browser, "article.assistant footer span")[1]
        assert " tokens in " in facts and " tokens/s) · first token after " in facts
        assert len(browser.find("button.again")) == 1

        browser.one("#to-live").click()
        browser.until(lambda: len(browser.find("#last tbody tr")) >= 2)
        cells = live_texts(browser, "#last tbody tr:first-child td")
        assert cells[1] == "stop" and int(cells[2]) > 20 and int(cells[3]) > 3
        assert live_texts(browser, "#numbers dt")[:3] == ["Running", "Waiting", "KV blocks"]
        assert all(each.endswith("s") for each in live_texts(browser, "#latency tbody td:nth-child(2)"))

        browser.one("#to-chat").click()
        browser.one("#new").click()
        assert browser.find("article") == []
        urls = browser.asked_urls()
        assert len(urls) > 8 and [url for url in urls if not url.startswith(server.http_url + "/")] == []
        assert browser.complaints() == []


def test_an_answer_is_stopped_by_a_key_and_asked_again_by_a_button(browser):
    backend = FakeBackend("over", state=a_state())
    backend.scripts = [("so far", WAIT)]
    with running(backend) as gateway:
        browser.open(gateway.url + "/")
        browser.one("#prompt").send_keys("hi", Keys.ENTER)
        browser.until(lambda: texts(browser, ".assistant > .text") == ["so far"])
        assert browser.one("#stop").is_displayed() and not browser.one("#send").is_displayed()
        browser.one("#prompt").send_keys(Keys.ESCAPE)
        assert backend.cancelled.acquire(timeout=60)
        browser.until(lambda: "stopped" in browser.one("article.assistant footer").text)
        browser.one("button.again").click()
        browser.until(lambda: texts(browser, ".assistant > .text") == ["over"])
        browser.one("#prompt").send_keys("two", Keys.SHIFT, Keys.ENTER, Keys.NULL, "lines")
        say(browser, "")
    turns = [[(each["role"], each["content"]) for each in body["messages"]] for body in backend.bodies]
    assert turns[0] == turns[1] == [("user", "hi")]
    assert turns[2] == [("user", "hi"), ("assistant", "over"), ("user", "two\nlines")]


def test_images_are_chosen_pasted_and_dropped_if_the_model_reads_images(browser, tmp_path):
    file = tmp_path / "image.png"
    file.write_bytes(a_file(an_image(20, 30)))
    url = a_data_url(file.read_bytes())
    # A paste or a drop of a file, as the browser reports it
    brought = """const data = new DataTransfer();
        data.items.add(new File([Uint8Array.from(atob("%s"), (each) => each.charCodeAt(0))], "a.png", {type: "%s"}));
        document.querySelector("%s").dispatchEvent(new %s)"""
    encoded = url.partition(",")[2]
    paste = 'ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true})'
    drop = 'DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true})'
    backend = FakeBackend("seen", state=msgspec.structs.replace(a_state(), reads_images=True))
    with running(backend) as gateway:
        browser.open(gateway.url + "/")
        browser.until(lambda: browser.one("#attach").is_displayed())
        browser.one("#file").send_keys(str(file))
        browser.run(brought % (encoded, "image/png", "#prompt", paste))
        browser.run(brought % (encoded, "image/png", "#talk", drop))
        browser.run(brought % (encoded, "text/plain", "#talk", drop))
        browser.until(lambda: len(browser.find("#attached img")) == 3)
        assert texts(browser, "#messages .error") == ["a.png is no image"]
        browser.find("#attached button")[0].click()
        assert browser.run("return document.querySelector('#attached img').naturalWidth") == 30
        say(browser, "What is it?")
        assert len(browser.find("article.user img")) == 2 and browser.find("#attached img") == []
        browser.one("#new").click()
        assert browser.complaints() == []
    [body] = backend.bodies
    *images, text = body["messages"][0]["content"]
    assert [part["image_url"]["url"] for part in images] == [url] * 2
    assert text == {"type": "text", "text": "What is it?"}
    with running(FakeBackend("x", state=a_state())) as gateway:
        browser.open(gateway.url + "/")
        browser.until(lambda: "ready" in browser.one("#state").get_attribute("class"))
        assert not browser.one("#attach").is_displayed()


MARKDOWN = """# Title
Some **bold *both* text**, `a<b>` and [a link](https://example.org/?a=1&b=2).

1. one
   - inner
2. two

| a | b |
|---|---|
| 1 | ~~2~~ |

> said

```html
<b>**not bold**</b>
```
"""
EVIL = (
    "<img src=x onerror='window.evil=1'><script>window.evil=1</script>",
    "[run](javascript:window.evil=1) [data](data:text/html,x) ![seen](https://elsewhere.invalid/x.png)",
    "[<img src=x onerror=window.evil=1>](https://example.org/)",
    '[x](https://example.org/"onmouseover=window.evil=1)',
    "```<img src=x onerror=window.evil=1>\n</code></pre><script>window.evil=1</script>",
)


def test_answers_are_shown_as_markdown(browser):
    with running(FakeBackend(*MARKDOWN, state=a_state())) as gateway:
        browser.open(gateway.url + "/")
        say(browser, "<b>hi</b>")
    shown = {tag: texts(browser, f"article.assistant .text {tag}") for tag in ("h3", "strong", "em", "del", "li", "td")}
    assert shown == {
        **{"h3": ["Title"], "strong": ["bold both text"], "em": ["both"], "del": ["2"]},
        **{"li": ["one\ninner", "inner", "two"], "td": ["1", "2"]},
    }
    assert texts(browser, "article.assistant code") == ["a<b>", "<b>**not bold**</b>"]
    assert texts(browser, "blockquote p") == ["said"]
    link = browser.one("article.assistant a")
    assert (link.get_attribute("href"), link.text) == ("https://example.org/?a=1&b=2", "a link")
    assert texts(browser, "article.user") == ["<b>hi</b>"]


def test_nothing_that_the_model_or_another_user_writes_becomes_html(browser):
    call = {"name": EVIL[0], "arguments": {"a": EVIL[0]}}
    answer = f"<think>{EVIL[0]}</think>" + "\n\n".join(EVIL) + f"\n<tool_call>{json.dumps(call)}</tool_call>"
    backend = FakeBackend(answer, state=a_state(key=EVIL[0]))
    with running(backend, reasoning_parser="qwen3", tool_call_parser="hermes", served_model_name=EVIL[0]) as gateway:
        browser.open(gateway.url + "/")
        browser.one("#settings-button").click()
        tool = {"type": "function", "function": {"name": EVIL[0], "parameters": {}}}
        browser.run(f"document.querySelector('[name=tools]').value = {json.dumps(json.dumps([tool]))}")
        say(browser, EVIL[0])
        links = [each.get_attribute("href") for each in browser.find("article a")]
        assert sorted(links) == [
            "https://elsewhere.invalid/x.png",
            "https://example.org/",
            "https://example.org/%22onmouseover=window.evil=1",
        ]
        assert EVIL[0] in browser.one("article.assistant").text and EVIL[0] in texts(browser, "h1")
        browser.one("#to-live").click()
        browser.until(lambda: EVIL[0] in live_texts(browser, "#last td"))
        assert browser.find("main img, main script, [onerror], [onmouseover]") == []
        assert browser.run("return window.evil") is None
        assert [url for url in browser.asked_urls() if not url.startswith(gateway.url)] == []
        # Were one to slip through, the page's policy would run nothing of it.
        with pytest.raises(Exception, match="TrustedHTML"):
            browser.run("document.body.innerHTML = '<p>'")


def test_thoughts_are_folded_and_calls_of_tools_wait_for_their_results(browser):
    call = {"name": "weather", "arguments": {"city": "Bonn"}}
    backend = FakeBackend("It is ", "mild.", state=a_state())
    backend.scripts = [("<think>", "let me see", "</think>", "I ask.", f"<tool_call>{json.dumps(call)}</tool_call>")]
    with running(backend, reasoning_parser="qwen3", tool_call_parser="hermes") as gateway:
        browser.open(gateway.url + "/")
        browser.one("#settings-button").click()
        tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
        browser.one("[name=tools]").send_keys(json.dumps([tool]))
        browser.one("[name=system]").send_keys("Be brief")
        browser.one("[name=max_tokens]").send_keys("50")
        say(browser, "How is the weather?")
        assert texts(browser, "summary") == ["Reasoning"] and browser.one("details").get_attribute("open") is None
        browser.one("summary").click()
        assert texts(browser, "details .text") == ["let me see"]
        assert texts(browser, ".calls .code-head") == ["Tool call: weather"]
        assert json.loads(browser.one(".calls pre").text) == {"city": "Bonn"}
        browser.one(".results textarea").send_keys("15 degrees")
        browser.one(".results button").click()
        browser.until(lambda: "It is mild." in texts(browser, ".assistant > .text"))
    first, second = backend.bodies
    assert [each["role"] for each in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][3]["content"] == "15 degrees"
    assert first["max_tokens"] == 50 and "Bonn" not in json.dumps(first)


def test_a_key_is_asked_for_until_it_is_right_and_kept_in_the_tab_only(browser):
    with running(FakeBackend("yes", state=a_state()), api_key="a-secret") as gateway:
        browser.open(gateway.url + "/")
        for key, complaint in (("wrong", ""), ("a-secret", "The server rejects this key.")):
            browser.until(lambda: browser.one("#key-dialog").is_displayed())
            assert texts(browser, "#key-wrong") == [complaint]
            browser.one("#key").send_keys(key, Keys.ENTER)
            browser.until(lambda: not browser.one("#key-dialog").is_displayed() or browser.one("#key-wrong").text)
        browser.until(lambda: "ready" in browser.one("#state").get_attribute("class"))
        browser.driver.refresh()
        say(browser, "hi")
        assert texts(browser, ".assistant > .text") == ["yes"]
        assert browser.run("return [localStorage.length, document.cookie]") == [0, ""]
        browser.open(gateway.url + "/")
        browser.until(lambda: browser.one("#key-dialog").is_displayed())


def test_a_failure_is_reported_and_the_next_question_is_asked(browser):
    backend = FakeBackend("there", state=a_state())
    backend.scripts = [("half", EngineUnavailable("the engine has gone"))]
    with running(backend) as gateway:
        browser.open(gateway.url + "/")
        say(browser, "hi")
        assert texts(browser, ".error") == ["the engine has gone"]
        assert texts(browser, ".assistant > .text") == ["half"]
        say(browser, "again")
        assert texts(browser, ".assistant > .text")[-1] == "there"


def test_the_live_view_of_a_server_without_a_model_says_so(browser):
    with running(FakeBackend("x", state=ModelState(ready=True))) as gateway:
        browser.open(gateway.url + "/#live")
        browser.until(lambda: "has no model of its own" in browser.one("#trouble").text)
        assert browser.one("#numbers").text == ""


@pytest.mark.parametrize("is_dark", [False, True])
def test_it_fits_a_phone_has_a_name_for_everything_and_is_as_dark_as_the_system(browser, is_dark):
    with running(FakeBackend("word " * 60 + "\n```\n" + "x" * 300 + "\n```", state=a_state())) as gateway:
        browser.open(gateway.url + "/")
        browser.look_like(360, 640, is_dark)
        say(browser, "hi")
        browser.one("#settings-button").click()
        controls = [
            each for each in browser.find("button, input, textarea, select, a, [role=img]") if each.is_displayed()
        ]
        assert len(controls) > 15
        assert [each.get_attribute("outerHTML") for each in controls if not each.accessible_name] == []
        browser.one("#settings button").click()
        for selector in ("#chat", "#live"):
            browser.one(f"#to-{selector[1:]}").click()
            browser.until(lambda selector=selector: browser.one(selector).is_displayed())
            assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        [red, *_] = browser.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (red < 60) == is_dark
