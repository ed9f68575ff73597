"""Text as it is generated: however the tokens are cut, it is the text of all of them up to a stop string."""

import random

import pytest

from engine.text.detokenizer import Detokenizer
from engine.text.text_stream import StopMatcher, TextOptions, TextStream
from engine.text.tokenizer import Tokenizer
from tests.byte_tokenizer import write_tokenizer
from tests.pure.text.test_tokenizer import BACKENDS, TEXTS, a_byte_level_backend, a_sentencepiece_backend


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request):
    return Tokenizer(BACKENDS[request.param]())


@pytest.fixture(scope="module")
def letters():
    """Return a tokenizer with one token for each character, so that a reader can count them."""
    return Tokenizer(a_byte_level_backend())


def ids_of(tokenizer, text):
    """Return one token for each byte."""
    by_byte = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


def parts_of(items, rng):
    """Return `items` cut at random places, some parts of which are empty."""
    cuts = sorted(rng.choices(range(len(items) + 1), k=rng.randrange(8)))
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


def read(stream, parts):
    """Return the whole text, the number of tokens that belong to it, and the stop string."""
    deltas = [stream.push(part) for part in parts]
    deltas.append(stream.finish())
    return "".join(delta.text for delta in deltas), sum(len(delta.ends) for delta in deltas), stream.stop_string


def first_stop(text, stops):
    """Return the stop string that ends first, or the longest of several, and its start. This is the definition."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return len(text), None
    end, _, stop = min(found)
    return end - len(stop), stop


# --- without stop strings ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_however_the_tokens_are_cut_the_text_is_the_same(tokenizer, text):
    rng, ids = random.Random(text), tokenizer.encode(text)
    for _ in range(30):
        assert read(TextStream(tokenizer), parts_of(ids, rng)) == (tokenizer.decode(ids), len(ids), None)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("is_continuation", [True, False])
def test_random_tokens_are_text_too(tokenizer, skip, is_continuation):
    rng = random.Random(3)
    options = TextOptions(skip_special_tokens=skip, is_continuation=is_continuation)
    for _ in range(500):
        ids = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(rng.randrange(20))]
        text = tokenizer.decode(ids, skip, is_continuation)
        assert read(TextStream(tokenizer, options), parts_of(ids, rng)) == (text, len(ids), None)


def test_a_character_is_not_shown_before_it_is_complete(letters):
    stream = TextStream(letters)
    texts = [stream.push([token_id]).text for token_id in ids_of(letters, "a👍é")]
    assert texts == ["a", "", "", "", "👍", "", "é"]


def test_a_token_that_is_held_back_in_part_is_not_counted_yet(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    [the] = [index for index in range(tokenizer.vocab_size) if tokenizer.token_bytes(index) == b"th"]
    stream = TextStream(tokenizer, TextOptions(stop=("hot",)))
    assert stream.push([the]) == ("t", [], None)
    assert stream.push([ord("e")]) == ("he", [2, 3], None)


def test_the_tokens_of_a_character_become_visible_with_it(letters):
    stream = TextStream(letters)
    assert [len(stream.push([token_id]).ends) for token_id in ids_of(letters, "a👍")] == [1, 0, 0, 0, 4]


def test_an_incomplete_end_is_flushed(letters):
    stream = TextStream(letters)
    assert stream.push(ids_of(letters, "a👍")[:-1]).text == "a"
    assert stream.finish() == ("\ufffd", [1, 1, 1], None)


def test_invalid_bytes_in_the_middle_are_shown_at_once(letters):
    stream = TextStream(letters)
    broken = ids_of(letters, "é")[:1]
    assert stream.push(broken + ids_of(letters, "a")) == ("\ufffda", [0, 2], None)


def test_the_first_space_is_dropped_and_the_others_are_not():
    tokenizer = Tokenizer(a_sentencepiece_backend())
    stream = TextStream(tokenizer)
    assert "".join(stream.push([token_id]).text for token_id in tokenizer.encode("the dog")) == "the dog"
    assert stream.push(tokenizer.encode("the dog")).text == " the dog"


def test_special_tokens_are_skipped_unless_wanted(letters):
    ids = letters.encode("<s>fox</s>")
    assert read(TextStream(letters), [ids]) == ("fox", len(ids), None)
    assert read(TextStream(letters, TextOptions(skip_special_tokens=False)), [ids])[0] == "<s>fox</s>"


def test_no_tokens_no_text(tokenizer):
    assert read(TextStream(tokenizer), []) == ("", 0, None)
    assert read(TextStream(tokenizer, TextOptions(stop=("a",))), [[], []]) == ("", 0, None)


# --- stop strings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped"),
    [
        ("one STOP two", ["STOP"], "one ", "STOP"),
        ("one STO", ["STOP"], "one STO", None),
        ("STOP", ["STOP"], "", "STOP"),
        ("ends with STOP", ["STOP"], "ends with ", "STOP"),
        ("aaab", ["aab"], "a", "aab"),  # a beginning within a beginning
        ("ababac", ["abac"], "ab", "abac"),
        ("abc", ["b", "abc"], "a", "b"),  # the one that ends first
        ("xabc", ["c", "abc", "bc"], "x", "abc"),  # of those that end together the longest
        ("abcd", ["abce", "bcd"], "a", "bcd"),
        ("abcabd", ["abcabe", "abd"], "abc", "abd"),
        ("你好。再见", ["。"], "你好", "。"),
        ("e\u0301!", ["\u0301"], "e", "\u0301"),
        ("👩‍👩‍👧", ["👧"], "👩‍👩‍", "👧"),
        ("text", [], "text", None),
    ],
)
def test_the_text_ends_before_the_stop_string(letters, text, stops, shown, stopped):
    assert first_stop(text, stops) == (len(shown), stopped)
    ids, rng = ids_of(letters, text), random.Random(text)
    num_tokens = len(shown.encode()) if stopped else len(ids)
    for _ in range(30):
        stream = TextStream(letters, TextOptions(stop=tuple(stops)))
        assert read(stream, parts_of(ids, rng)) == (shown, num_tokens, stopped)
        stream = TextStream(letters, TextOptions(stop=tuple(stops), include_stop=True))
        num_tokens_with_stop = len((shown + (stopped or "")).encode())
        assert read(stream, parts_of(ids, rng)) == (shown + (stopped or ""), num_tokens_with_stop, stopped)


def test_text_that_may_become_a_stop_string_is_held_back(letters):
    stream = TextStream(letters, TextOptions(stop=("<end>",)))
    texts = [stream.push([token_id]).text for token_id in ids_of(letters, "a<en<end>")]
    assert texts == ["a", "", "", "", "<en", "", "", "", ""]
    assert stream.stop_string == "<end>"


def test_a_stop_string_that_is_kept_needs_no_holding_back(letters):
    stream = TextStream(letters, TextOptions(stop=("<end>",), include_stop=True))
    assert [stream.push([token_id]).text for token_id in ids_of(letters, "a<end>")] == list("a<end>")


def test_text_that_was_held_back_is_flushed(letters):
    stream = TextStream(letters, TextOptions(stop=("<end>",)))
    assert stream.push(ids_of(letters, "a<en")) == ("a", [1], None)
    assert stream.finish() == ("<en", [2, 3, 4], None)


def test_tokens_after_the_stop_are_ignored(letters):
    stream = TextStream(letters, TextOptions(stop=("b",)))
    assert stream.push(ids_of(letters, "abc")) == ("a", [1], "b")
    assert stream.push(ids_of(letters, "def")) == ("", [], "b")
    assert stream.finish() == ("", [], "b")


def test_a_token_that_is_visible_in_part_belongs_to_the_answer(letters):
    ids = letters.encode("The capital")
    assert [letters.token_text(token_id) for token_id in ids] == ["The", " capital"]
    assert read(TextStream(letters, TextOptions(stop=("pit",))), [ids]) == ("The ca", 2, "pit")
    assert read(TextStream(letters, TextOptions(stop=(" cap",))), [ids]) == ("The", 1, " cap")


def test_the_flush_may_complete_a_stop_string(letters):
    stream = TextStream(letters, TextOptions(stop=("a\ufffd",)))
    assert stream.push(ids_of(letters, "xaé")[:-1]) == ("x", [1], None)
    assert stream.finish() == ("", [], "a\ufffd")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@pytest.mark.slow
def test_random_stop_strings_in_random_texts(letters):
    rng = random.Random(4)
    for _ in range(3000):
        text = "".join(rng.choices("ab¢", k=rng.randrange(25)))
        stops = tuple("".join(rng.choices("ab¢", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4)))
        include = rng.random() < 0.5
        end, stop = first_stop(text, stops)
        visible = text[: end + len(stop or "")] if include else text[:end]
        stream = TextStream(letters, TextOptions(stop=stops, include_stop=include))
        assert read(stream, parts_of(ids_of(letters, text), rng)) == (visible, len(visible.encode()), stop)


def test_stop_strings_with_real_tokens(tokenizer):
    rng = random.Random(5)
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.vocab_size + 1) for _ in range(rng.randrange(1, 12))]
        text, include = tokenizer.decode(ids), rng.random() < 0.5
        stops = stops_in(text, rng)
        end, stop = first_stop(text, stops)
        visible = text[: end + len(stop or "")] if include else text[:end]
        num_tokens = num_tokens_of(tokenizer, ids, len(visible), include) if stop else len(ids)
        stream = TextStream(tokenizer, TextOptions(stop=stops, include_stop=include))
        assert read(stream, parts_of(ids, rng)) == (visible, num_tokens, stop)


def stops_in(text, rng):
    """Return up to three stop strings, most of them taken from the text."""
    starts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(4))]
    found = [text[start : start + rng.randrange(1, 6)] + rng.choice(["", "", "x"]) for start in starts]
    return tuple(filter(None, found))


def num_tokens_of(tokenizer, ids, num_chars, include_stop):
    """Return the smallest number of tokens that show `num_chars` characters, including silent tokens between them and
    the stop.
    """
    reader = Detokenizer(tokenizer.token_table, tokenizer.special_ids)
    num_read = num_tokens = 0
    while num_read < num_chars and num_tokens < len(ids):
        num_read += len(reader.push(ids[num_tokens]))
        num_tokens += 1
    if num_read == num_chars and not (include_stop or reader.is_inside_character):
        while num_tokens < len(ids) and not reader.bytes_of(ids[num_tokens]):
            num_tokens += 1
    return num_tokens


def test_a_long_answer_keeps_little(letters):
    """The state of a stream does not grow with the text, and neither does the work for a token."""
    stream = TextStream(letters, TextOptions(stop=("aaab",)))
    ids = ids_of(letters, "a")
    for _ in range(10_000):
        stream.push(ids)
    assert (len(stream._held), len(stream._ends)) == (3, 3)
