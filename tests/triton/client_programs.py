"""Programs of other people's libraries, as their own pages show them, against a server. Run by test_clients.py in an
environment of its own (requirements-clients.txt), each in a process: `python client_programs.py NAME URL FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import pydantic

QUESTION = "What is the capital of France?"
CHAT = [{"role": "user", "content": QUESTION}]
MAX_TOKENS = 400  # JSON may have some whitespace in each place
NAMED = {"model": "default", "api_key": "none", "temperature": 0}


class City(pydantic.BaseModel):
    """A city, in which it may be warm."""

    name: Literal["Paris", "Rome"]
    is_warm: bool


def langchain_openai(url: str, _: Path) -> None:
    from langchain_core.messages import AIMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    @tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather in a city."""
        return f"sunny in {city}"

    chat = ChatOpenAI(base_url=f"{url}/v1", max_tokens=MAX_TOKENS, **NAMED)
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.content and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == answer.content
    called = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
    assert isinstance(called, AIMessage) and {call["name"] for call in called.tool_calls} == {"weather"}
    results = [weather.invoke(call) for call in called.tool_calls]
    assert all(isinstance(result, ToolMessage) and "sunny" in result.content for result in results)
    assert chat.bind_tools([weather]).invoke([("user", QUESTION), called, *results]).content
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke("Name a city."), City)
    in_other_words = ChatOpenAI(base_url=f"{url}/v1", max_tokens=MAX_TOKENS, use_responses_api=True, **NAMED)
    assert in_other_words.invoke(QUESTION).text == answer.content
    embeddings = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model="default", check_embedding_ctx_length=False
    )
    first, second, again = embeddings.embed_documents(["Paris", "Rome", "Paris"])
    assert first == again != second


def langchain_anthropic(url: str, _: Path) -> None:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(base_url=url, max_tokens=MAX_TOKENS, **NAMED)
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.content
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == answer.content
    assert isinstance(chat.with_structured_output(City).invoke("Name a city."), City)


def litellm(url: str, _: Path) -> None:
    import litellm

    fields = {"messages": CHAT, "api_key": "none", "temperature": 0, "max_tokens": MAX_TOKENS}
    for name, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        asked = {**fields, "model": f"{name}/default", "api_base": base}
        text = litellm.completion(**asked).choices[0].message.content
        chunks = litellm.completion(**asked, stream=True)
        assert "Paris" in text and "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    asked = {**fields, "model": "triton/model", "api_base": f"{url}/v2/models/model/generate"}
    asked |= {"allowed_openai_params": ["temperature"]}
    text = litellm.completion(**asked).choices[0].message.content
    chunks = litellm.completion(**asked, stream=True)
    assert "Paris" in text and "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    with_prices = {"model": "openai/default", "api_base": f"{url}/v1", "api_key": "none"}
    assert len(litellm.embedding(**with_prices, input=["a", "b"]).data) == 2
    ranked = litellm.rerank(
        model="hosted_vllm/default", api_base=url, api_key="none", query="Paris", documents=["x y z", "Paris"]
    )
    assert ranked.results[0]["index"] == 1
    try:
        litellm.completion(**{**fields, "temperature": 1000}, model="openai/default", api_base=f"{url}/v1")
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a limit was not reported")


def instructor(url: str, _: Path) -> None:
    import anthropic
    import instructor
    import openai

    asked = {"model": "default", "response_model": City, "messages": CHAT, "max_tokens": MAX_TOKENS, "max_retries": 0}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        assert isinstance(client.chat.completions.create(**asked), City)
    *_, last = client.chat.completions.create_partial(**asked)
    assert last.name in ("Paris", "Rome")
    # A model that cannot write JSON on being asked for it gets the schema from who asks.
    held = {**asked, "extra_body": {"guided_json": City.model_json_schema(), "response_format": {"type": "text"}}}
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.JSON)
    assert isinstance(client.chat.completions.create(**held), City)
    claude = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none"))
    assert isinstance(claude.messages.create(**asked), City)


def lm_eval(url: str, folder: Path) -> None:
    """Evaluate log-likelihoods by completions, and answers by chats."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    pairs = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Spain": "Madrid"}
    rows = [
        {"q": f"What is the capital of {land}?", "a": city, "choices": [*pairs.values()]}
        for land, city in pairs.items()
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
    choice = "doc_to_text: '{{q}} The capital is'\ndoc_to_choice: choices\ndoc_to_target: '{{choices.index(a)}}'\n"
    (folder / "choice.yaml").write_text(f"task: choice\n{files}output_type: multiple_choice\n{choice}")
    words = "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\ngeneration_kwargs: {max_gen_toks: 32, until: ['\\n']}\n"
    finds = "filter_list: [{name: city, filter: [{function: regex, regex_pattern: '(Paris|Rome|Tokyo|Madrid)'}]}]\n"
    metric = "metric_list: [{metric: exact_match}]\n"
    (folder / "words.yaml").write_text(f"task: words\n{files}output_type: generate_until\n{words}{finds}{metric}")
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    model = f"model=default,tokenizer={Path(__file__).parents[2] / 'demo_model'},num_concurrent=2"
    at = {"task_manager": tasks, "bootstrap_iters": 0, "log_samples": False}
    asked = f"base_url={url}/v1/completions,{model}"
    scored = lm_eval.simple_evaluate("local-completions", asked, tasks=["choice"], **at)
    assert scored["results"]["choice"]["acc,none"] >= 0.5, scored["results"]
    asked = f"base_url={url}/v1/chat/completions,{model}"
    said = lm_eval.simple_evaluate("local-chat-completions", asked, tasks=["words"], apply_chat_template=True, **at)
    assert said["results"]["words"]["exact_match,city"] == 1, said["results"]


PROGRAMS = {each.__name__: each for each in (langchain_openai, langchain_anthropic, litellm, instructor, lm_eval)}


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
