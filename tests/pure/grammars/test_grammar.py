"""Tests of structured output from a model with random logits, with the real sampler and the real grammars."""

import random
import re
from concurrent.futures import Future

import jsonschema
import pytest

from engine.core.types import Request, Sampling
from engine.errors import InvalidRequest
from engine.grammars.matcher import Matcher
from engine.grammars.pool import GrammarPool
from engine.text.grammars import ReasoningPrefix, limited_reasoning, unconstrained_answer, unlimited_reasoning
from engine.wire.structured_output_fields import MAX_CHOICES
from tests.byte_tokenizer import EOS_ID
from tests.pure.guided import PROMPT, STOP_IDS, Guided, a_request, begun
from tests.pure.random_schemas import random_schema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def guided(tokenizer):
    return Guided(tokenizer)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("method", "first"), [("none", 0), ("ngram", 100)])
def test_every_answer_to_a_hundred_schemas_is_valid(tokenizer, method, first):
    guided = Guided(tokenizer, speculate_method=method)
    schemas = {str(seed): random_schema(seed) for seed in range(first, first + 100)}
    guided.run(*(a_request(name, "guided_json", schema, seed=int(name)) for name, schema in schemas.items()))
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for name, schema in schemas.items():
        jsonschema.validate(guided.json(name), schema, format_checker=checker)
    assert sum("$ref" in schema for schema in schemas.values()) == 20


def test_json_without_whitespace_when_that_is_wished(guided):
    text = guided.run(a_request("a", "guided_json", PERSON, any_whitespace=False))
    assert re.fullmatch(r'\{"name":"[^"]*","age":\d+\}', text)


def test_whitespace_between_parts_of_json_has_an_end(guided, tokenizer):
    spaces = tuple((token_id, 100.0) for token_id in tokenizer.encode(" \n"))
    texts = {
        guided.run(a_request(f"{seed}", "guided_json", {"type": "array", "maxItems": 0}, seed=seed, logit_bias=spaces))
        for seed in range(9)
    }
    assert texts == {"[ ]", "[\n" + " " * 24 + "]"}


@pytest.mark.slow
@pytest.mark.parametrize("regex", [r"[a-f]{3}-\d+", r"^(ab|c/d)+$", r"(\w+ ){2}\w{1,3}", "é|ü|😀{2}"])
def test_an_answer_to_a_regular_expression_matches_it(guided, regex):
    for seed in range(5):
        text = guided.run(a_request(f"{seed}", "guided_regex", regex, seed=seed))
        assert guided.ends[str(seed)] == "stop"
        assert re.fullmatch(regex, text, re.ASCII)


def test_an_answer_to_a_choice_is_one_of_it(guided):
    choices = ["yes", "no", 'a "quote"\n', "\\", "yes and no", "<|im_end|>"]
    texts = {guided.run(a_request(str(seed), "guided_choice", choices, seed=seed)) for seed in range(40)}
    assert len(texts) > 3
    assert texts <= set(choices)


def may_begin(guided, request, token_ids):
    """Return whether an answer may begin with these tokens."""
    request.token_ids = [*PROMPT, *token_ids]
    try:
        return bool(begun(guided.grammars, request))
    except InvalidRequest:
        return False


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("alphabet", "length"),
    [
        pytest.param("abc d", 34, marks=pytest.mark.slow),
        ('\\"/|[](){}*+?.^$#<>-\t\n\b\0\x7f', 24),
        pytest.param("é日😀\u2028n\u0303", 12, marks=pytest.mark.slow),
    ],
)
def test_of_4096_texts_each_can_be_the_answer_and_nothing_else(guided, tokenizer, alphabet, length):
    """Every other text is a prefix of another one. Their total length is the largest that is allowed."""
    rng = random.Random(0)
    texts = ["".join(rng.choices(alphabet, k=length)) for _ in range(MAX_CHOICES // 2)]
    texts += [text[: rng.randrange(4, length)] for text in texts]
    request = a_request("a", "guided_choice", texts)
    for text in texts[:: MAX_CHOICES // 256]:  # the wholes and the beginnings of others
        whole, part = tokenizer.encode(text), tokenizer.encode(text[:3])
        assert may_begin(guided, request, [*whole, EOS_ID])
        assert not may_begin(guided, request, [*part, EOS_ID])
    answers = [guided.run(a_request(f"{seed}", "guided_choice", texts, seed=seed)) for seed in range(20)]
    assert set(answers) <= set(texts) and len(set(answers)) > 3
    over = tokenizer.encode("hm</think>")
    text = guided.run(
        a_request(
            "b", "guided_choice", texts, token_ids=over, reasoning=ReasoningPrefix(unlimited_reasoning("</think>"))
        )
    )
    assert any(text[num_spaces:] in texts for num_spaces in range(5))


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "(" root ")" | [0-9]',
        '# a comment\n\n  digit ::= [0-9]\r\n  root\t::=\n "(" root ")" | digit',
        'start: "(" start ")" | /[0-9]/',
        '?start: nested\nnested: "(" nested ")" | /[0-9]/',
        '!start : nested\n?nested: "(" nested ")" | DIGIT // never "root ::="\nDIGIT: /[0-9]/',
        '%import common.DIGIT\nnested: "(" nested ")" | DIGIT\nstart[capture]: nested',
    ],
)
def test_an_answer_to_a_grammar_follows_it(guided, grammar):
    text = guided.run(a_request("a", "guided_grammar", grammar))
    assert re.fullmatch(r"\(*[0-9]\)*", text)
    assert text.count("(") == text.count(")")


def test_an_answer_of_some_tokens_has_no_other_and_ends_only_by_one_of_them(guided):
    without, with_end = [65, 70, 71], [65, min(STOP_IDS)]
    guided.run(a_request("a", "allowed_token_ids", without, max_new_tokens=200))
    assert (set(guided.token_ids["a"]), len(guided.token_ids["a"]), guided.ends["a"]) == ({*without}, 200, "length")
    ends = {"stop_token_ids": (*STOP_IDS, 70), "logit_bias": ((70, 100.0),)}
    guided.run(a_request("b", "allowed_token_ids", with_end, **ends))
    *words, end = guided.token_ids["b"]
    assert (set(words) <= {65}, end, guided.ends["b"]) == (True, min(STOP_IDS), "stop")  # not by 70


def test_an_answer_may_be_one_token_over_and_over_also_the_end_that_is_ignored(guided):
    guided.run(a_request("a", "allowed_token_ids", [65], max_new_tokens=40))
    assert (guided.token_ids["a"], guided.ends["a"]) == ([65] * 40, "length")
    ignored = {"stop_token_ids": (), "max_new_tokens": 40}
    guided.run(a_request("b", "allowed_token_ids", [min(STOP_IDS)], **ignored))
    assert (guided.token_ids["b"], guided.ends["b"]) == ([min(STOP_IDS)] * 40, "length")
    assert "[65]" not in guided.grammars._compiler._grammars


def test_an_answer_of_some_tokens_that_goes_on_has_no_other(guided):
    guided.run(a_request("a", "allowed_token_ids", [65, 70], token_ids=[70, 65], max_new_tokens=10, forks=1))
    assert set(guided.token_ids["a"]) | set(guided.token_ids["a-"]) == {65, 70}
    guided.run(a_request("b", "allowed_token_ids", [65, 70], token_ids=[66]))
    assert "`answer_ids` do not have the form that `allowed_token_ids` asks for" in guided.errors["b"].message({})


def test_structures_are_kept_in_free_text(guided, tokenizer):
    tag = {"triggers": ["<"], "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}]}
    likely = tuple((token_id, 3.0) for token_id in tokenizer.encode("<"))
    guided.run(a_request("a", "structural_tag", tag, logit_bias=likely, max_new_tokens=300))
    structures = re.findall("<[^>]*>[^<]*<[^>]*>", guided.text("a"))
    assert len(structures) > 1
    assert all(re.fullmatch(r"<n>\s*-?\d+\s*</n>", each) for each in structures)


def test_structured_output_begins_after_the_reasoning(guided, tokenizer):
    over = tokenizer.encode("hm {</think>\n")
    reasoning = ReasoningPrefix(unlimited_reasoning("</think>"))
    text = guided.run(a_request("a", "guided_json", PERSON, token_ids=over, reasoning=reasoning))
    jsonschema.validate(guided.json("a"), PERSON)
    free = guided.run(a_request("b", "guided_json", PERSON, reasoning=reasoning, max_new_tokens=5))
    assert not free.lstrip().startswith("{")
    assert text.lstrip().startswith("{")


CONSTRAINTS = {
    "guided_choice": (["yes", "no"], r"yes|no"),
    "guided_regex": ("[ab]{3}", r"[ab]{3}"),
    "guided_json": ({"enum": ["yes"]}, r'"yes"'),
    "guided_grammar": ('start: "(" /[0-9]/ ")"', r"\([0-9]\)"),
}


@pytest.mark.parametrize("field", CONSTRAINTS)
@pytest.mark.parametrize("mark", ["text", "token"])
def test_an_answer_without_reasoning_follows_its_grammar_from_the_first_token_on(guided, tokenizer, field, mark):
    """ "<" begins a thought, ">" ends it."""
    value, pattern = CONSTRAINTS[field]
    [begin] = tokenizer.encode("<")
    reasoning = ReasoningPrefix(unlimited_reasoning(">"), f"<[{begin}]>" if mark == "token" else '"<"')
    for seed in range(5):
        text = guided.run(
            a_request(f"{seed}", field, value, reasoning=reasoning, seed=seed, logit_bias=((begin, -100.0),))
        )
        assert re.fullmatch(pattern, text)
        bias = ((begin, 80.0), (tokenizer.encode(">")[0], 90.0))
        text = guided.run(a_request(f"thinks {seed}", field, value, reasoning=reasoning, seed=seed, logit_bias=bias))
        assert re.fullmatch(rf"(?s:<.*?>)[ \n]{{0,4}}({pattern})", text)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_thought_ends_when_its_tokens_are_spent(tokenizer, method):
    """ "<" begins it, ">" ends it; the model would never do so."""
    guided = Guided(tokenizer, speculate_method=method)
    begin, end, a = tokenizer.encode("<>a")
    reasoning = limited_reasoning(5, ">", (end, *STOP_IDS))

    def ids(name, begin, likes):
        structured_output = ("reasoning_max_tokens", unconstrained_answer(reasoning, begin))
        options = {"temperature": 1.0, "max_new_tokens": 30, "stop_token_ids": STOP_IDS, "logit_bias": likes}
        guided.run(Request(name, list(PROMPT), len(PROMPT), Sampling(**options, structured_output=structured_output)))
        return guided.token_ids[name]

    never = (end, -100.0)
    assert ids("begun", None, ((a, 90.0), never)) == [*[a] * 5, end, *[a] * 24]
    assert ids("begins", ("<", begin), ((begin, 90.0), never)) == [*[begin] * 6, end, *[begin] * 23]
    assert ids("has none", ("<", begin), ((a, 90.0), never)) == [a] * 30
    assert ids("ends early", None, ((end, 90.0),)) == [end] * 30
    guided.run(
        a_request(
            "form", "guided_regex", "[ab]{3}", reasoning=ReasoningPrefix(reasoning), logit_bias=((begin, 90.0), never)
        )
    )
    assert guided.token_ids["form"][:6] == [*[begin] * 5, end]
    assert re.fullmatch(r"[ \n]{0,4}[ab]{3}", guided.text("form")[6:])


def test_the_answer_ends_with_its_grammar_without_another_step(guided):
    guided.run(a_request("a", "guided_regex", "[ab]"))
    assert (len(guided.token_ids["a"]), guided.token_ids["a"][-1]) == (2, STOP_IDS[0])
    assert guided.ends["a"] == "stop"
    assert guided.model.num_steps == 1
    guided.run(a_request("b", "guided_choice", ["(x)"]))
    assert guided.model.num_steps == 1 + 2  # the prompt with the first token; all others were forced


def test_where_a_grammar_may_end_the_stop_ids_of_the_request_are_allowed(guided, tokenizer):
    [own] = tokenizer.encode("!")
    bias = ((own, 100.0), *((each, 50.0) for each in STOP_IDS))
    guided.run(a_request("a", "guided_regex", "[ab]{3}[ab]*", stop_token_ids=(own,), logit_bias=bias))
    assert (guided.ends["a"], len(guided.token_ids["a"]), guided.token_ids["a"][-1]) == ("stop", 4, own)
    guided.run(a_request("b", "guided_regex", "[ab]{3}[ab]*", logit_bias=bias))
    assert (len(guided.token_ids["b"]), guided.token_ids["b"][-1] in STOP_IDS) == (4, True)


@pytest.mark.slow
def test_forced_tokens_are_those_that_would_be_chosen_anyway(tokenizer, monkeypatch):
    schemas = {str(seed): random_schema(seed) for seed in range(60)}

    def answers(**settings):
        guided = Guided(tokenizer, **settings)
        guided.run(*(a_request(name, "guided_json", schema, seed=int(name)) for name, schema in schemas.items()))
        return {name: guided.text(name) for name in schemas}, guided.loop.stats()

    with_forced, stats = answers()
    assert 0 < stats["num_accepted_tokens"] == stats["num_drafted_tokens"]
    assert answers(speculate_method="ngram")[0] == with_forced
    monkeypatch.setattr(Matcher, "forced", lambda self: ())
    without, stats = answers()
    assert without == with_forced
    assert stats["num_drafted_tokens"] == 0
    with_drafts, stats = answers(speculate_method="ngram")  # some of which are not allowed
    assert with_drafts == with_forced
    assert 0 < stats["num_accepted_tokens"] < stats["num_drafted_tokens"]


@pytest.mark.slow
def test_an_answer_goes_on_from_its_tokens_at_any_place(guided):
    """This happens after a crash, or with `answer_ids`."""
    guided.run(a_request("whole", "guided_json", PERSON, seed=3))
    *whole, stop_id = guided.token_ids["whole"]
    assert stop_id in STOP_IDS
    for count in range(len(whole) + 1):
        guided.run(a_request(f"{count}", "guided_json", PERSON, seed=3, token_ids=whole[:count]))
        assert whole[:count] + guided.token_ids[f"{count}"][:-1] == whole


def test_an_answer_that_began_otherwise_is_refused(guided):
    guided.run(a_request("a", "guided_choice", ["yes"], token_ids=[5]))
    assert isinstance(guided.errors["a"], InvalidRequest)
    assert str(guided.errors["a"]) == "The `answer_ids` do not have the form that `guided_choice` asks for"


@pytest.mark.slow
def test_preempted_answers_are_the_same(tokenizer):
    def answers(num_blocks):
        guided = Guided(tokenizer, num_blocks)
        schema = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 5}
        guided.run(*(a_request(f"{seed}", "guided_json", schema, seed=seed, max_new_tokens=150) for seed in range(12)))
        return {name: guided.text(name) for name in guided.ends}, guided.loop.stats()["num_preemptions"]

    alone, _ = answers(4096)
    cramped, num_preemptions = answers(20)
    assert num_preemptions > 0
    assert cramped == alone


def test_several_answers_to_one_prompt_have_a_grammar_each(guided):
    request = a_request("a", "guided_json", PERSON, seed=5, forks=2)
    guided.run(request)
    texts = [guided.text(name) for name in ("a", "a-", "a--")]
    for index, text in enumerate(texts):
        assert guided.run(a_request(f"alone {index}", "guided_json", PERSON, seed=5 + index)) == text
    assert len(set(texts)) == 3


def test_free_answers_beside_guided_ones_are_as_without_them(guided, tokenizer):
    guided.run(a_request("a", None, None, max_new_tokens=40))
    alone = guided.token_ids["a"]
    other = Guided(tokenizer)
    other.run(a_request("a", None, None, max_new_tokens=40), a_request("b", "guided_json", PERSON))
    assert other.token_ids["a"] == alone
    assert other.model.num_masked < other.model.num_steps


# What is hostile

HOSTILE = {
    "wide": ("guided_json", {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2000)}}),
    "a product": ("guided_json", {"type": "integer", "multipleOf": 99991, "minimum": 3, "maximum": 10**15}),
    "never ends": ("guided_json", {"$ref": "#"}),
    "no type": ("guided_json", {"type": "objekt"}),
    "all of any": (
        "guided_json",
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]},
    ),
    "look-ahead": ("guided_regex", "a(?=b)"),
    "not closed": ("guided_regex", "(a{1,1000}){1,1000"),
    "deep": ("guided_regex", "(" * 5000 + "a" + ")" * 5000),
    "unknown rule": ("guided_grammar", "start: b"),
    "open brackets": ("guided_grammar", "start: " + "(" * 20000 + '"a"' + ")" * 20000),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_its_own_request_only(guided, name):
    guided.run(a_request("bad", *HOSTILE[name]), a_request("good", "guided_json", PERSON))
    assert isinstance(guided.errors["bad"], InvalidRequest), guided.text("bad")
    assert len(str(guided.errors["bad"])) < 500
    jsonschema.validate(guided.json("good"), PERSON)
    guided.loop.scheduler.check()


def test_a_grammar_that_becomes_too_complex_during_decoding_is_refused_by_name(guided):
    """The second token could be one of too many, which the first mask does not show."""
    wide = " | ".join(f'"{{x{i}"' for i in range(2100))
    guided.run(a_request("a", "guided_grammar", f'start: "a" ({wide})'))
    error = guided.errors["a"]
    assert (type(error), error.field) == (InvalidRequest, "guided_grammar")
    assert str(error).startswith("The `guided_grammar` cannot be followed any further: Parser Error: ")
    assert error.message({"guided_grammar": "tools"}).startswith("The `tools` cannot")


@pytest.mark.parametrize("name", ["T", "r"])
def test_ten_thousand_rules_one_below_the_other_are_survived(guided, name):
    """The library recurses into the rules, and the thread has the stack for it."""
    rules = [f"{name}{i}: {name}{i + 1}" for i in range(8000)]
    text = guided.run(a_request("a", "guided_grammar", "\n".join([f"start: {name}0", *rules, f'{name}8000: "a"'])))
    assert text == "a"


class SlowGrammars:
    """Compiled when the test says so."""

    is_busy = True

    def __init__(self):
        self.futures, self.cancelled = [], []

    def begin(self, request):
        self.futures.append(Future())
        return self.futures[-1]

    def cancel(self, begun):
        self.cancelled.append(begun)

    def poll(self, timeout_s=0.0): ...


def test_while_a_grammar_is_compiled_other_requests_continue(tokenizer):
    grammars = SlowGrammars()
    guided = Guided(tokenizer, grammars=grammars)
    guided.loop.add(a_request("slow", "guided_choice", ["a"]))
    guided.loop.add(a_request("free", None, None, max_new_tokens=3))
    while "free" not in guided.ends:
        guided.turn()
    assert not guided.loop.is_idle
    assert guided.loop.stats()["num_waiting"] == 1
    guided.turn()  # with nothing to do, it returns soon
    grammars.futures[0].set_exception(InvalidRequest("no"))
    guided.run()
    assert str(guided.errors["slow"]) == "no"


def test_a_client_that_disconnects_while_its_grammar_is_compiled_is_forgotten(tokenizer):
    grammars = SlowGrammars()
    guided = Guided(tokenizer, grammars=grammars)
    guided.loop.add(a_request("a", "guided_choice", ["a"], forks=1))
    guided.loop.drop("a")
    guided.loop.drop("a-")
    guided.loop.drop("a-")
    assert guided.loop.stats()["num_dropped"] == 2
    assert grammars.cancelled == grammars.futures
    grammars.futures[0].set_exception(InvalidRequest("no"))
    guided.run()
    assert guided.ends == {}


def test_of_several_answers_the_first_may_be_cancelled_while_the_grammar_is_compiled(guided):
    guided.loop.add(a_request("a", "guided_choice", ["x"], forks=1))
    guided.loop.drop("a")
    guided.run()
    assert guided.ends == {"a-": "stop"}


def test_a_step_does_not_wait_for_masks_that_fail(guided, monkeypatch):
    monkeypatch.setattr(guided.grammars, "masks", lambda choices: 1 / 0)
    masks = []
    monkeypatch.setattr("tests.pure.random_model.StepWhenAsked.mask", lambda self, bits: masks.append(bits))
    with pytest.raises(ZeroDivisionError):
        guided.run(a_request("a", "guided_choice", ["x"]))
    assert masks == [None]


def test_special_tokens_are_no_text(guided):
    """The end-of-sequence token does not match the text `<|im_end|>`."""
    assert guided.run(a_request("a", "guided_choice", ["<|im_end|>"])) == "<|im_end|>"
    assert EOS_ID not in guided.token_ids["a"][:-1]


def test_sampling_without_structured_output_needs_no_grammars(tokenizer):
    guided = Guided(tokenizer, grammars=SlowGrammars())
    guided.run(Request("a", list(PROMPT), len(PROMPT), Sampling(3)))
    assert guided.ends == {"a": "length"}
    assert guided.grammars.futures == []


@pytest.mark.slow
def test_a_model_without_an_end_of_sequence_token_starts_all_the_same():
    grammars = GrammarPool(Endless, 9)
    grammars.wait_until_loaded()
    grammars.close()


class Endless:
    eos_token_ids = ()
