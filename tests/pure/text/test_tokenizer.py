"""Text to token ids and back, on small tokenizers of the two kinds that models have."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.errors import ConfigError, InvalidRequest
from engine.text.tokenizer import Tokenizer, TokenizerError

LINES = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox does not.",
    "What is the capital of France? The capital of France is Paris.",
    "你好，世界！今天天气很好。",
    "def add(a, b):\n    return a + b\n",
] * 3
TEXTS = [
    "",
    "The fox",
    "  two spaces  in  front and behind  ",
    "你好，世界！繁體字也行。",
    "family: 👩‍👩‍👧‍👦, flag: 🇫🇷, thumb: 👍🏽!",
    "cafe\u0301 e\u0301\u0323 नमस्ते \u200bสวัสดี",
    "line\nline\r\n\ttab \x00 nul",
    "unseen: ßäöü ∑∞ 𝔘𝔫𝔦",
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def a_byte_level_backend():
    """Return a tokenizer like that of GPT-2, Llama 3 and Qwen: tokens are made of bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>", "<|end▁it|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def a_sentencepiece_backend():
    """Return a tokenizer like that of Llama 2 and Mistral: words begin with ▁, and characters without a token are
    bytes.
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(merge) for merge in learnt["merges"]]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def a_metaspace_backend():
    """Return a tokenizer like that of T5 and early Llama conversions: the decoder drops the first space by itself."""
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -2.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    options = {"special_tokens": ["<unk>", "<s>", "</s>"], "unk_token": "<unk>", "show_progress": False}
    backend.train_from_iterator(LINES, trainers.UnigramTrainer(vocab_size=120, **options))
    return backend


BACKENDS = {
    "byte level": a_byte_level_backend,
    "sentencepiece": a_sentencepiece_backend,
    "metaspace": a_metaspace_backend,
}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]()


def a_model_dir(directory, backend=None, **files):
    """Write tokenizer.json, and for each item of `files` NAME.json with this content."""
    (backend or a_byte_level_backend()).save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


# --- encode and decode ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("build", [a_byte_level_backend, a_sentencepiece_backend])
def test_text_survives_the_way_there_and_back(build, text):
    tokenizer = Tokenizer(build())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_any_ids_decode_as_the_library_decodes_them(backend):
    tokenizer, rng = Tokenizer(backend), random.Random(1)
    # Incomplete characters made of <0xE4> and the like have a test of their own.
    plain = [index for index in range(tokenizer.vocab_size) if not is_byte(backend, index)]
    for _ in range(500):
        ids = rng.choices(plain, k=rng.randrange(12))
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


def is_byte(backend, token_id):
    return re.fullmatch("<0x..>", backend.id_to_token(token_id)) is not None


def test_random_bytes_decode_as_the_library_decodes_them():
    backend, rng = a_byte_level_backend(), random.Random(2)
    tokenizer = Tokenizer(backend)
    singles = [index for index in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(index)) == 1]
    assert len(singles) == 256
    leads = [index for index in singles if tokenizer.token_bytes(index) >= b"\x80"]
    for _ in range(3000):
        ids = rng.choices(leads, k=rng.randrange(6)) + rng.choices(singles, k=rng.randrange(3))
        assert tokenizer.decode(ids) == backend.decode(ids)


def test_a_broken_byte_does_not_spoil_the_characters_beside_it():
    """The library replaces every byte of the run; streamed text cannot be taken back, so ours keeps 你."""
    backend = a_sentencepiece_backend()
    tokenizer = Tokenizer(backend)
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode() + b"\xe4"]
    assert tokenizer.decode(ids) == "你\ufffd"
    assert backend.decode(ids) == "\ufffd" * 4


def test_special_tokens_are_skipped_or_kept():
    tokenizer = Tokenizer(a_byte_level_backend(), SPECIAL)
    ids = tokenizer.encode("<s>fox<tool></s>")
    assert tokenizer.decode(ids) == "fox<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>fox<tool></s>"


def test_ids_beyond_the_vocabulary_say_nothing(backend):
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("The fox")
    assert tokenizer.decode([tokenizer.vocab_size, *ids, 2**31 - 1]) == tokenizer.decode(ids)


def test_a_continuation_keeps_its_first_space():
    for build in (a_sentencepiece_backend, a_metaspace_backend):
        tokenizer = Tokenizer(build())
        ids = tokenizer.encode("The fox")
        assert tokenizer.decode(ids) == "The fox"
        assert tokenizer.decode(ids, is_continuation=True) == " The fox"


def test_a_tokenizer_without_decoder_has_spaces_between_tokens():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([0, 1, 0]) == backend.decode([0, 1, 0]) == "a b a"
    assert tokenizer.token_bytes(1) == b"b"


def test_a_decoder_that_is_not_known_is_refused():
    backend = a_byte_level_backend()
    backend.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="CTC.*ByteLevel"):
        Tokenizer(backend)


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path):
    backend = a_byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(a_model_dir(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"


def test_a_lone_surrogate_is_the_clients_mistake():
    with pytest.raises(InvalidRequest, match="surrogate"):
        Tokenizer(a_byte_level_backend()).encode("a\ud83d")


def test_threads_do_not_disturb_each_other(backend):
    tokenizer = Tokenizer(backend)

    def there_and_back(text):
        return tokenizer.decode(tokenizer.encode(text))

    texts = TEXTS * 50
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(there_and_back, texts)) == list(map(there_and_back, texts))


# --- single tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(text):
    tokenizer = Tokenizer(a_byte_level_backend())
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_bytes_and_text_of_a_token():
    backend = a_sentencepiece_backend()
    tokenizer = Tokenizer(backend)
    newline, the, end = (backend.token_to_id(token) for token in ("<0x0A>", "▁the", "</s>"))
    assert tokenizer.token_bytes(newline) == b"\n"
    assert tokenizer.token_bytes(the) == b" the"
    assert tokenizer.token_text(end) == "</s>"
    assert tokenizer.token_text(backend.token_to_id("<0xE4>")) == "\ufffd"


def test_vocab_size_counts_added_tokens():
    backend = a_byte_level_backend()
    tokenizer = Tokenizer(backend)
    assert backend.id_to_token(tokenizer.vocab_size - 1) == "<tool>"
    assert backend.id_to_token(tokenizer.vocab_size) is None


# --- files ------------------------------------------------------------------------------------------


def test_a_missing_file_names_the_directory_and_the_format(tmp_path):
    (tmp_path / "vocab.json").touch()
    expected = rf"no tokenizer\.json in {re.escape(str(tmp_path))} \(found vocab\.json\).*Hugging Face"
    with pytest.raises(TokenizerError, match=expected):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path, name):
    (a_model_dir(tmp_path) / name).write_text('{"a": ', encoding="utf-8")
    with pytest.raises(TokenizerError, match=re.escape(name)):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        *(("generation_config", "eos_token_id", value) for value in ("2", [2, -7], True, 1.0, [[2]], 2**31, {"2": 2})),
        *(("tokenizer_config", "added_tokens_decoder", value) for value in ([], {"x": {"content": "a"}})),
        *(("tokenizer_config", "added_tokens_decoder", {"7": value}) for value in ("a", {}, {"content": 3})),
        ("tokenizer_config", "added_tokens_decoder", {"7": {"content": "a", "lstrip": "no"}}),
        *(("tokenizer_config", "additional_special_tokens", value) for value in ("<a>", [3], [{"text": "a"}])),
        *(("special_tokens_map", "eos_token", value) for value in (3, {"text": "a"})),
        *(("tokenizer_config", "chat_template", value) for value in (3, [3], [{"name": "default"}], {"default": 3})),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_what_is_expected(tmp_path, file, name, value):
    directory = a_model_dir(tmp_path, **{file: {name: value}})
    wrong = value.get("7", value) if isinstance(value, dict) else value
    wrong = wrong[0] if name == "additional_special_tokens" and isinstance(wrong, list) else wrong
    with pytest.raises(TokenizerError, match=f"{name} of the tokenizer is {re.escape(repr(wrong))}, it must be a"):
        Tokenizer.load(directory)


def test_a_chat_template_that_is_no_utf_8_is_named(tmp_path):
    (a_model_dir(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer.load(tmp_path)


def test_a_wrong_chat_template_is_named_with_its_file_and_line(tmp_path):
    wrong = "{{ bos_token }}\n{% for %}"
    directory = a_model_dir(tmp_path, tokenizer_config={"chat_template": {"default": "", "tool_use": wrong}})
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(directory)
    place = f"the chat template 'tool_use' in {directory / 'tokenizer_config.json'} is wrong in its line 2: "
    assert str(caught.value).startswith(place)
    (directory / "chat_template.jinja").write_text(wrong)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(directory)
    place = f"the chat template in {directory / 'chat_template.jinja'} is wrong in its line 2: "
    assert str(caught.value).startswith(place)


def test_eos_ids_are_the_tokenizers_and_the_generation_configs(tmp_path):
    directory = a_model_dir(
        tmp_path,
        tokenizer_config={"eos_token": "</s>"},
        generation_config={"eos_token_id": [2, 1, 7]},
        config={"eos_token_id": 9},
    )
    assert Tokenizer.load(directory).eos_token_ids == (1, 2, 7)


def test_the_models_config_is_asked_last(tmp_path):
    directory = a_model_dir(tmp_path, config={"eos_token_id": 9, "bos_token_id": 0})
    assert Tokenizer.load(directory).eos_token_ids == (9,)


def test_without_any_hint_nothing_ends_an_answer(tmp_path):
    assert Tokenizer.load(a_model_dir(tmp_path)).eos_token_ids == ()


def test_special_tokens_may_be_written_as_objects_in_either_file(tmp_path):
    directory = a_model_dir(
        tmp_path,
        special_tokens_map={"eos_token": "<s>", "pad_token": {"content": "<pad>", "lstrip": False}},
        tokenizer_config={"eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": None},
    )
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.encode("<pad>") == [tokenizer.vocab_size - 1]


def test_a_special_token_that_is_null_is_ignored(tmp_path):
    plain = Tokenizer.load(a_model_dir(tmp_path))
    nulls = dict.fromkeys(("pad_token", "unk_token", "additional_special_tokens", "added_tokens_decoder"))
    directory = a_model_dir(tmp_path, special_tokens_map=nulls, tokenizer_config=nulls)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.vocab_size == plain.vocab_size
    assert tokenizer.encode("None") == plain.encode("None")


def test_tokens_that_only_the_config_knows_are_added(tmp_path):
    backend = a_byte_level_backend()
    size = Tokenizer(backend).vocab_size
    new = {
        "content": "<|new|>",
        "special": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    tool = new | {"content": "<tool>", "special": True}
    config = {
        "eos_token": "<|new|>",
        "additional_special_tokens": ["<|more|>"],
        "added_tokens_decoder": {str(size): new, str(size - 1): tool},
    }
    tokenizer = Tokenizer.load(a_model_dir(tmp_path, backend, tokenizer_config=config))
    assert tokenizer.encode("<|new|><|more|>") == [size, size + 1]
    assert tokenizer.eos_token_ids == (size,)
    assert {size - 1, size, size + 1} <= tokenizer.special_ids


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "<s>fox"),
        ({"add_bos_token": True}, "<s>fox"),
        ({"add_bos_token": None, "add_eos_token": None}, "<s>fox"),
        ({"add_bos_token": False}, "fox"),
        ({"add_bos_token": False, "add_eos_token": True}, "fox</s>"),
    ],
)
def test_llama_tokenizers_go_by_their_flags(tmp_path, flags, expected):
    backend = a_byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    config = SPECIAL | flags | {"tokenizer_class": "LlamaTokenizerFast"}
    tokenizer = Tokenizer.load(a_model_dir(tmp_path, backend, tokenizer_config=config))
    assert tokenizer.decode(tokenizer.encode("fox"), skip_special_tokens=False) == expected
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.decode(plain, skip_special_tokens=False) == "fox"
