"""The corpus: conversations and raw texts put together from facts. Knows roles and words, not tokens.

A conversation is a list of (role, text) whose assistant texts are to be learned. A raw text is a
(prompt, continuation) pair without any chat template.
"""

import itertools
import random
from collections import defaultdict

from demo_model import arithmetic, careless, facts, knowledge, prose, words
from demo_model.facts import Fact, cells, ways
from demo_model.raw import raw_texts

Conversation = list[tuple[str, str]]

# How often a topic is drawn. Within a topic every fact is drawn equally often.
TOPIC_SHARES = {
    "sums": 28,
    "capitals": 12,
    "reverse": 6,
    "continents": 6,
    "flags": 4,
    "yes or no": 8,
    "definitions": 5,
    "facts": 5,
    "emoji": 2,
    "words": 6,
    "numbers": 9,
    "calendar": 2,
    "counting": 2,
    "lists": 4,
    "foreign": 8,
    "small talk": 4,
    "unknown": 3,
    "repeat": 1,
    "long": 2,
}
WORD_FOR_WORD = {
    "foreign",
    "repeat",
    "small talk",
    "sums",
    "unknown",
    "words",
}  # topics whose questions are never typed carelessly
FULL_WIDTH_QUESTION_MARK = "\uff1f"  # the Chinese one
END_MARKS = "?.!\u3002\uff01" + FULL_WIDTH_QUESTION_MARK
LONGEST_REPEAT = 80  # characters of an answer that "Repeat that." may ask for


def all_facts() -> list[Fact]:
    """Return every fact once. A question with two answers is an error in the tables."""
    found = list(
        itertools.chain(
            facts.country_facts(),
            facts.foreign_facts(),
            arithmetic.sum_facts(),
            arithmetic.number_facts(),
            arithmetic.counting_facts(),
            arithmetic.calendar_facts(),
            words.definition_facts(),
            words.table_facts(),
            words.word_facts(),
            words.list_facts(),
            words.talk_facts(),
            words.unknown_facts(),
        )
    )
    answers: dict[str, str] = {}
    for fact in found:
        for question in fact.questions:
            for variant in variants(question):
                if answers.setdefault(variant, fact.answer) != fact.answer:
                    raise ValueError(f"{variant!r} has two answers: {answers[variant]!r} and {fact.answer!r}")
    return found


def known_questions(known: list[Fact]) -> frozenset[str]:
    return frozenset(variant for fact in known for question in fact.questions for variant in variants(question))


def variants(question: str) -> list[str]:
    """Return variants of a question as people type it: in lower case, and without the mark at its end."""
    bare = question.rstrip(END_MARKS + " ") or question
    chinese = [bare + "?"] if question.endswith(FULL_WIDTH_QUESTION_MARK) else []
    return list(dict.fromkeys([question, bare, question.lower(), bare.lower(), *chinese]))


class Sampler:
    """Draws conversations and raw texts. The same seed draws the same ones."""

    def __init__(self, known: list[Fact], seed: int, noise: float = 0.1):
        self.rng = random.Random(seed)
        self.noise = noise  # share of the questions that are typed carelessly
        self.taken = known_questions(known)
        self.common_words = sorted(
            {word for question in self.taken for word in question.rstrip("?.").split() if word.isalpha()}
        )
        self.by_topic: dict[str, list[Fact]] = defaultdict(list)
        for fact in known:
            self.by_topic[fact.topic].append(fact)
        self.topics = list(TOPIC_SHARES)
        self.cumulative = list(itertools.accumulate(TOPIC_SHARES.values()))
        self.systems = ways(prose.SYSTEM_PROMPTS)
        self.one_word_systems = ways(prose.ONE_WORD_PROMPTS)
        self.names = cells(knowledge.NAMES)
        self.favourites = {
            "colour": cells("red, blue, green, yellow, orange, purple, pink, brown, black, white"),
            "animal": cells("dog, cat, horse, cow, lion, elephant, tiger, bear, wolf, rabbit, owl, fox"),
            "fruit": cells("apple, banana, cherry, orange, pear, grape, mango, lemon, peach, plum"),
            "number": [str(n) for n in range(1, 31)],
        }
        self.unknown_name = list(facts.rows(prose.UNKNOWN_NAME))
        self.raw = raw_texts(known)
        self.countries = facts.all_countries()

    def document(self) -> Conversation | tuple[str, str]:
        kind = self.rng.random()
        if kind < 0.06:
            return self.rng.choice(self.raw)
        if kind < 0.08:
            return self._unknown_name()
        return self.nonsense() if kind < 0.11 else self.conversation()

    def conversation(self) -> Conversation:
        rng = self.rng
        if rng.random() < 0.08:
            return self._one_word()
        parts: list[Conversation] = []
        for _ in range(rng.choices((1, 2, 3, 5, 8, 12), (56, 20, 12, 7, 3, 2))[0]):
            parts.append(self._dialogue() if rng.random() < 0.15 else self.exchange())
        if rng.random() < 0.05:  # a question that nobody answered
            parts.insert(
                rng.randrange(len(parts)), [("user", rng.choice(variants(rng.choice(self._fact().questions))))]
            )
        if rng.random() < 0.35:
            parts.insert(
                0 if rng.random() < 0.85 else rng.randrange(len(parts)), [("system", rng.choice(self.systems))]
            )
        return list(itertools.chain.from_iterable(parts))

    def _fact(self) -> Fact:
        topic = self.rng.choices(self.topics, cum_weights=self.cumulative)[0]
        return self.rng.choice(self.by_topic[topic])

    def exchange(self, fact: Fact | None = None) -> Conversation:
        fact = fact or self._fact()
        question = self.rng.choice(fact.questions)
        if self.rng.random() < 0.6:
            question = self.rng.choice(variants(question))
        if fact.topic not in WORD_FOR_WORD and self.rng.random() < self.noise:
            question = careless.typed(question, self.taken, self.rng)
        return [("user", question), ("assistant", fact.answer)]

    def nonsense(self) -> Conversation:
        """Made-up words and words in disorder, so that the model learns what a question is not."""
        while (question := careless.nonsense(self.common_words, self.rng)) in self.taken:
            pass
        return [*self._aside(), ("user", question), ("assistant", prose.UNKNOWN)]

    def _one_word(self) -> Conversation:
        parts = [("system", self.rng.choice(self.one_word_systems))]
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            while (fact := self._fact()).short is None:
                pass
            parts += [("user", self.rng.choice(variants(self.rng.choice(fact.questions)))), ("assistant", fact.short)]
        return parts

    def _dialogue(self) -> Conversation:
        """Return turns whose answers depend on the turns before them."""
        return self.rng.choice((self._name, self._favourite, self._follow_up, self._running_sum, self._repeat))()

    def _aside(self) -> Conversation:
        count = self.rng.choices((0, 1, 2, 4), (5, 3, 2, 1))[0]
        return list(itertools.chain.from_iterable(self.exchange() for _ in range(count)))

    def _name(self) -> Conversation:
        name = self.rng.choice(self.names)
        intro = self.rng.choice(
            ("My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}.", "Call me {}.", "my name is {}")
        )
        asked = self.rng.choice(
            ("What is my name?", "Who am I?", "Do you remember my name?", "what's my name?", "what is my name")
        )
        introduction = [("user", intro.format(name)), ("assistant", f"Nice to meet you, {name}!")]
        return [*introduction, *self._aside(), ("user", asked), ("assistant", f"Your name is {name}.")]

    def _unknown_name(self) -> Conversation:
        """Return the counterpart of _name and _favourite. It is never part of a longer conversation, which may contain
        the fact.
        """
        questions, answer = self.rng.choice(self.unknown_name)
        return [*self._aside(), ("user", self.rng.choice(ways(questions))), ("assistant", answer)]

    def _favourite(self) -> Conversation:
        kind = self.rng.choice(list(self.favourites))
        choice = self.rng.choice(self.favourites[kind])
        introduction = [
            ("user", f"My favourite {kind} is {choice}."),
            ("assistant", f"{choice.capitalize()} is a good choice!"),
        ]
        asked = self.rng.choice((f"What is my favourite {kind}?", f"Which {kind} do I like best?"))
        return [*introduction, *self._aside(), ("user", asked), ("assistant", f"Your favourite {kind} is {choice}.")]

    def _follow_up(self) -> Conversation:
        """Return the same question about several countries in turn."""
        about = self.rng.choice((facts.capital_fact, facts.capital_fact, facts.continent_fact, facts.flag_fact))
        first, *others = self.rng.sample(self.countries, self.rng.choice((2, 2, 3, 4)))
        turns = self.exchange(about(first))
        for other in others:
            ask = self.rng.choice(
                ("And {}?", "What about {}?", "And of {}?", "and {}", "what about {}", "How about {}?")
            )
            turns += [("user", ask.format(self.rng.choice(other.aliases))), ("assistant", about(other).answer)]
        return turns

    def _running_sum(self) -> Conversation:
        a, b = self.rng.randrange(21), self.rng.randrange(21)
        turns = [
            ("user", self.rng.choice((f"What is {a} + {b}?", f"{a} + {b}"))),
            ("assistant", f"{a} + {b} = {a + b}."),
        ]
        total = a + b
        for _ in range(self.rng.choice((1, 1, 2))):
            more = self.rng.randrange(1, 11)
            if total + more > 50:
                break
            ask = self.rng.choice((f"Add {more}.", f"Plus {more}?", f"And plus {more}?", f"add {more} to that"))
            turns += [("user", ask), ("assistant", f"{total} + {more} = {total + more}.")]
            total += more
        return turns

    def _repeat(self) -> Conversation:
        while len((fact := self._fact()).answer) > LONGEST_REPEAT:
            pass
        ask = self.rng.choice(
            ("Repeat that.", "Please repeat that.", "Say that again.", "Can you repeat that?", "repeat that")
        )
        return [*self.exchange(fact), ("user", ask), ("assistant", fact.answer)]
