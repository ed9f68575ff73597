"""SentencePiece models are read as the library reads them: small ones trained here, texts that are hard to cut."""

import io
import json
import random
import re

import pytest
import sentencepiece

from engine.errors import TokenizerError
from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions, copied_files
from engine.protobuf import fields
from engine.text.gguf_tokenizer import write_tokenizer
from engine.text.sentencepiece import SentencePiece
from engine.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint

WORDS = "the server reads a model and answers 12 345 requests café naïve 你好 世界 こんにちは x=f(y) ▁ -- ...".split()
LLAMA = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "character_coverage": 0.995,
    "allow_whitespace_only_pieces": True,
}
SYMBOLS = ["<|im_start|>", "<|im_end|>", "<|im|>", "<mask:0>", "\n"]
ERNIE = LLAMA | {"control_symbols": ["<cls>", "<sep>"], "user_defined_symbols": SYMBOLS}
MODELS = {
    "bpe as of Llama": {"model_type": "bpe", "vocab_size": 420, **LLAMA},
    "bpe as of ERNIE": {"model_type": "bpe", "vocab_size": 420, **ERNIE},
    "bpe of NFKC": {"model_type": "bpe", "vocab_size": 200},
    "unigram as of Llama": {"model_type": "unigram", "vocab_size": 420, **LLAMA},
    "unigram without a prefix": {"model_type": "unigram", "vocab_size": 420, "add_dummy_prefix": False, **ERNIE},
    "unigram of NFKC": {"model_type": "unigram", "vocab_size": 200},
}
FRAGMENTS = [
    *WORDS,
    *SYMBOLS,
    " ",
    "  ",
    "    ",
    "\t",
    "\r\n",
    "<0x0A>",
    "<0x41>",
    "<",
    "aaaa",
    "①ﬁ",
    "😀",
    "\u200d",
    "é",
]


def trained(**options):
    """Return the bytes of a model file."""
    rng, out = random.Random(3), io.BytesIO()
    made = ["".join(rng.choices(["re", "s", "ta", "no", "qu", "er", "ing", "ed"], k=4)) for _ in range(200)]
    lines = [" ".join(rng.choices(WORDS * 8 + made, k=12)) for _ in range(600)]
    trainer = sentencepiece.SentencePieceTrainer
    trainer.train(sentence_iterator=iter(lines), model_writer=out, minloglevel=3, num_threads=1, **options)
    return out.getvalue()


@pytest.fixture(scope="module")
def llama():
    return trained(**MODELS["bpe as of Llama"])


def a_model_dir(directory, model, name="tokenizer.model", **files):
    """Write a model file, and for each item of `files` NAME.json with this content."""
    (directory / name).write_bytes(model)
    for stem, content in files.items():
        (directory / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.mark.parametrize("kind", MODELS)
def test_texts_have_the_tokens_that_the_library_gives_them(kind, tmp_path):
    model, rng = trained(**MODELS[kind]), random.Random(5)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = Tokenizer.load(a_model_dir(tmp_path, model))

    def score(token_ids):
        return round(sum(map(library.get_score, token_ids)), 3)

    for _ in range(1000):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randrange(8)))
        found, wanted = ours.encode(text, add_special_tokens=False), library.encode(text)
        if kind.startswith("unigram"):  # of splits that are equally likely either may be found: ▁ ▁▁ and ▁▁ ▁
            assert (sorted(found), score(found)) == (sorted(wanted), score(wanted)), repr(text)
        else:
            assert found == wanted, repr(text)


@pytest.mark.parametrize("kind", ["bpe as of Llama", "bpe as of ERNIE"])
def test_texts_have_the_same_tokens_if_the_model_is_in_a_gguf_file(kind, tmp_path):
    library, rng = sentencepiece.SentencePieceProcessor(model_proto=trained(**MODELS[kind])), random.Random(5)
    ids = range(library.vocab_size())
    symbols = MODELS[kind].get("user_defined_symbols", ())
    types = dict.fromkeys(symbols, 4) | dict.fromkeys(map(library.id_to_piece, filter(library.is_byte, ids)), 6)
    types |= dict.fromkeys(map(library.id_to_piece, filter(library.is_control, ids)), 3) | {"<unk>": 2}
    metadata = {
        "model": "llama",
        "tokens": [library.id_to_piece(token_id) for token_id in ids],
        "scores": [library.get_score(token_id) for token_id in ids],
        "token_type": [types.get(library.id_to_piece(token_id), 1) for token_id in ids],
        "bos_token_id": library.bos_id(),
        "eos_token_id": library.eos_id(),
    }
    write_tokenizer({f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, tmp_path)
    ours = Tokenizer.load(tmp_path)
    for _ in range(300):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randrange(8)))
        assert ours.encode(text, add_special_tokens=False) == library.encode(text), repr(text)
    assert ours.encode("the")[0] == library.bos_id()
    assert library.eos_id() in ours.eos_token_ids


@pytest.mark.parametrize("kind", ["bpe as of Llama", "unigram without a prefix"])
def test_tokens_are_the_text_again(kind, tmp_path):
    ours, rng = Tokenizer.load(a_model_dir(tmp_path, trained(**MODELS[kind]))), random.Random(7)
    for _ in range(300):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randrange(8))).replace("▁", " ")
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "<s> the"),
        ({"tokenizer_class": "LlamaTokenizer"}, "<s> the"),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": True}, " the</s>"),
        ({"tokenizer_class": "Ernie4_5_Tokenizer"}, " the"),
    ],
)
def test_a_text_begins_as_the_class_has_it(config, expected, llama, tmp_path):
    tokenizer = Tokenizer.load(a_model_dir(tmp_path, llama, tokenizer_config=config))
    names = map(tokenizer.token_name, tokenizer.encode("the"))
    assert "".join(names).replace("▁", " ") == expected
    assert tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize(("legacy", "begins"), [({}, [" a", " a"]), ({"legacy": False}, [" a", "a"])])
def test_each_segment_begins_with_a_space_unless_the_flag_says_otherwise(legacy, begins, llama, tmp_path):
    tokenizer = Tokenizer.load(a_model_dir(tmp_path, llama, tokenizer_config=legacy))
    ids = tokenizer.encode("a</s>a", add_special_tokens=False)
    names = "".join(map(tokenizer.token_name, ids)).replace("▁", " ")
    assert names.split("</s>") == begins


def test_tokens_that_are_listed_beside_the_model_have_their_ids(llama, tmp_path):
    size = sentencepiece.SentencePieceProcessor(model_proto=llama).vocab_size()
    listed = {"<|b|>": size + 1, "<|a|>": size}
    directory = a_model_dir(tmp_path, llama, added_tokens=listed, special_tokens_map={"eos_token": "<|a|>"})
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode("<|b|><|a|>", add_special_tokens=False) == [size + 1, size]
    assert tokenizer.eos_token_ids == (size,)
    assert size in tokenizer.special_ids
    assert size + 1 not in tokenizer.special_ids


@pytest.mark.slow
def test_a_checkpoint_with_another_name_of_the_model_is_exported_with_it(llama, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    (checkpoint / "tokenizer.json").unlink()
    a_model_dir(checkpoint, llama, "sentencepiece.bpe.model", tokenizer_config={})
    out = export_cached(checkpoint, tmp_path / "cache", ExportOptions(), lambda step: None)
    assert Tokenizer.load(out).encode("the server") == Tokenizer.load(checkpoint).encode("the server")
    (checkpoint / "sentencepiece.bpe.model").write_bytes(trained(**MODELS["bpe of NFKC"]))
    assert export_cached(checkpoint, tmp_path / "cache", ExportOptions(), lambda step: None) != out


def test_a_tokenizer_json_goes_before_the_model(llama, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    before = Tokenizer.load(checkpoint).encode("the server")
    a_model_dir(checkpoint, llama)
    assert Tokenizer.load(checkpoint).encode("the server") == before
    assert not any(path.suffix == ".model" for path in copied_files(checkpoint))


def test_several_models_are_named(llama, tmp_path):
    a_model_dir(a_model_dir(tmp_path, llama, "b.model"), llama, "a.model")
    with pytest.raises(TokenizerError, match=r"several SentencePiece models: a\.model, b\.model"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (b"", "exactly one piece of type UNKNOWN is needed"),
        (b"IQ== 0\nIg== 1\nIw== 2\n", "is not a SentencePiece model"),  # a file of ranks, as of Llama 3
        (trained(model_type="char"), r"model_type is 4, supported are 1 \(unigram\) and 2 \(BPE\)"),
        (trained(model_type="bpe", vocab_size=150, treat_whitespace_as_suffix=True), "treat_whitespace_as_suffix"),
    ],
    ids=["empty", "tiktoken", "characters", "suffix"],
)
def test_an_unreadable_file_is_refused_with_its_path(model, message, tmp_path):
    with pytest.raises(TokenizerError, match=re.escape(str(tmp_path / "tokenizer.model")) + ".*" + message):
        Tokenizer.load(a_model_dir(tmp_path, model))


def test_a_damaged_file_never_raises_anything_else(llama, tmp_path):
    rng = random.Random(9)
    for _ in range(100):
        damaged = bytearray(llama[: rng.randrange(len(llama))])
        for _ in range(4):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            SentencePiece.read(a_model_dir(tmp_path, bytes(damaged)) / "tokenizer.model")
        except TokenizerError:
            pass


def test_an_unknown_wire_type_is_an_error():
    with pytest.raises(ValueError, match="wire type 3"):
        list(fields(b"\x0b"))
