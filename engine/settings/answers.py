"""Settings: who may ask, and how they are answered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from engine.errors import ConfigError
from engine.settings.keys import Owner, is_key, read_keys
from engine.settings.setting import expanded, setting

# By REASONING_PARSER: an answer begins with a thought "never", "may" if it says so, "does" whether it says so or not.
REASONING_MODES = {"none": "never", "qwen3": "may", "deepseek_r1": "does", "ernie": "does"}
OF_ERNIE = ("ernie-x1", "ernie-45-vl", "ernie-45-vl-thinking", "ernie45")  # FastDeploy's names of its parsers, vLLM's
REASONING_SYNONYMS = {  # other names of the first two are SGLang's and vLLM's
    **dict.fromkeys(("deepseek-r1", "qwen3-thinking"), "deepseek_r1"),
    **dict.fromkeys(("deepseek-v3", "deepseek_v3"), "qwen3"),  # its chat template begins and ends thoughts
    **dict.fromkeys(OF_ERNIE, "ernie"),
}
TOOL_CALL_SYNONYMS = {
    **dict.fromkeys(("ernie", *OF_ERNIE), "hermes"),  # its models write them like this
    **dict.fromkeys(("qwen", "qwen25"), "hermes"),  # SGLang's names, as "llama3" and "deepseekv3" are
    "llama3": "llama3_json",
    **dict.fromkeys(("deepseekv3", "deepseekv31", "deepseek_v3", "deepseek_v31"), "deepseek"),
}


@dataclass(frozen=True)
class AnswerSettings:
    push_mode_http_workers: int = setting(
        1, "PUSH_MODE_HTTP_WORKERS", "gateway processes on the HTTP and gRPC ports", minimum=1, maximum=64
    )
    generation_config: str = setting(
        "auto",
        "GENERATION_CONFIG",
        "`auto`: OpenAI's and Anthropic's requests without `temperature`, `top_p`, `top_k`, `min_p` or"
        " `repetition_penalty` take them from generation_config.json of the model; `none`: they take OpenAI's defaults",
        choices=("auto", "none"),
        synonyms={"vllm": "none"},  # vLLM's name
    )
    reasoning_parser: str = setting(
        "none",
        "REASONING_PARSER",
        "the reasoning of the model is separated in OpenAI's answers, and structured output begins "
        "after it: the kind of model",
        choices=tuple(REASONING_MODES),
        synonyms=REASONING_SYNONYMS,
    )
    tool_call_parser: str = setting(
        "auto",
        "TOOL_CALL_PARSER",
        "how the model writes calls of tools; `auto`: as its chat template does; or a file `*.py` that tells it",
        choices=("auto", "none", "hermes", "llama3_json", "mistral", "deepseek"),
        other=".py",
        synonyms=TOOL_CALL_SYNONYMS,
    )
    guided_decoding_disable_any_whitespace: bool = setting(
        False,
        "GUIDED_DECODING_DISABLE_ANY_WHITESPACE",
        "JSON that an answer must be has no whitespace between its parts, unless the request says otherwise",
    )
    disable_streaming: bool = setting(False, "DISABLE_STREAMING", "send every answer in one response")
    stored_response_ttl_s: float = setting(
        3600.0,
        "STORED_RESPONSE_TTL",
        "seconds that a response with `store` or `background` can be retrieved after its end",
        minimum=1,
    )
    max_stored_response_tokens: int = setting(
        1 << 20,
        "MAX_STORED_RESPONSE_TOKENS",
        "tokens of all stored responses with their prompts; beyond, the oldest of the API key with most are deleted",
        minimum=1,
    )
    max_body_bytes: int = setting(
        4 << 20,
        "MAX_BODY_BYTES",
        "longest request: the HTTP body, or the text over gRPC; 33554432 by default with a model that reads images",
        minimum=1024,
    )
    api_key: str = setting(
        "",
        "API_KEY",
        "HTTP and gRPC requests must carry it, health does not; empty: no key is needed",
        is_shown=False,
    )
    tls_cert_file: str = setting(
        "", "TLS_CERT_FILE", "certificate chain in PEM for the HTTP and gRPC ports; empty: they are not encrypted"
    )
    tls_key_file: str = setting("", "TLS_KEY_FILE", "its private key in PEM, without a password")
    api_keys: str = setting(
        "", "API_KEYS", "a file of keys by name, with limits ([docs/operation.md](operation.md#keys)), beside API_KEY"
    )
    cors_allow_origin: str = setting(
        "*",
        "CORS_ALLOW_ORIGIN",
        "whose pages in a browser may call HTTP: one origin, or `*`; empty: none",
        may_be_empty=True,
    )

    @property
    def reasoning(self) -> str:
        return REASONING_MODES[self.reasoning_parser]

    @cached_property
    def owners(self) -> dict[str, Owner]:
        """Return the API keys that HTTP and gRPC requests may use, with their owners; empty if no key is required.
        Raises ConfigError.
        """
        anonymous = {self.api_key: Owner()} if self.api_key else {}
        return {**(read_keys(str(expanded("API_KEYS", self.api_keys))) if self.api_keys else {}), **anonymous}

    def check_key(self) -> None:
        _ = self.owners
        if self.api_key and not is_key(self.api_key):  # a secret: not shown
            raise ConfigError("API_KEY has a character that is no visible ASCII, which no HTTP header can carry")

    def check_origin(self) -> None:
        if not re.fullmatch(r"|\*|null|[a-z][a-z0-9+.-]*://[^\s/,*?#]+", self.cors_allow_origin, re.IGNORECASE):
            expected = "one origin such as https://chat.example.com, or *"
            raise ConfigError(f"CORS_ALLOW_ORIGIN is {self.cors_allow_origin!r}, it must be {expected}")

    def check_tls(self) -> None:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            missing = "TLS_KEY_FILE" if self.tls_cert_file else "TLS_CERT_FILE"
            raise ConfigError(f"{missing} is not set; TLS needs both TLS_CERT_FILE and TLS_KEY_FILE")
