"""Facts about words and things, from the tables of knowledge and prose. Knows no conversations and no tokens."""

from collections.abc import Iterator

from demo_model import knowledge, prose
from demo_model.facts import Fact, all_countries, capitalised, cells, number_word, pairs, rows, sentence, ways

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def without_article(term: str) -> str:
    return term.removeprefix("a ").removeprefix("an ").removeprefix("the ")


def definition_facts() -> Iterator[Fact]:
    for term, text in rows(knowledge.DEFINITIONS):
        bare = without_article(term)
        asks = (
            f"What is {term}?",
            f"What's {term}?",
            f"Explain {term}.",
            f"Explain {term} to me.",
            f"Can you explain {term}?",
            f"Tell me about {term}.",
            f"Define {bare}.",
            f"What does {bare} mean?",
            f"What is {bare}?",
            f"{capitalised(bare)}?",
        )
        yield Fact("definitions", tuple(dict.fromkeys(asks)), text)


def table_facts() -> Iterator[Fact]:
    for questions, answer, short in rows(knowledge.FACTS):
        yield Fact("facts", ways(questions), answer, short or None)
    for name, symbol in pairs(knowledge.ELEMENTS):
        asks = (
            f"What is the chemical symbol of {name}?",
            f"What is the symbol for {name}?",
            f"Which symbol does {name} have?",
        )
        yield Fact("facts", asks, f"The chemical symbol of {name} is {symbol}.", symbol)
        yield Fact("facts", (f"Which element has the symbol {symbol}?",), f"{symbol} is the symbol of {name}.", name)
    for thing, colour in rows(knowledge.COLOURS):
        asks = (f"What colour is {thing}?", f"What color is {thing}?", f"Which colour does {thing} have?")
        yield Fact("facts", asks, f"{capitalised(thing)} is {colour}.", colour)
    for animal, sound, young, emoji in rows(knowledge.ANIMALS):
        noun = f"an {animal}" if animal[0] in "aeiou" else f"a {animal}"
        asks = (f"What sound does {noun} make?", f"What does {noun} say?")
        yield Fact("facts", asks, f"{capitalised(noun)} says {sound}. {emoji}", sound)
        asks = (f"What is a young {animal} called?", f"What do you call a baby {animal}?")
        yield Fact("facts", asks, f"A young {animal} is called a {young}.".replace("a owlet", "an owlet"), young)
        yield emoji_fact(animal, emoji)
    for animal, legs in rows(knowledge.LEGS):
        noun = f"an {animal}" if animal[0] in "aeiou" else f"a {animal}"
        asks = (f"How many legs does {noun} have?", f"How many legs has {noun}?")
        yield Fact("facts", asks, f"{capitalised(noun)} has {legs} legs.", legs)
    for person, text in rows(knowledge.PEOPLE):
        asks = (
            f"Who was {person}?",
            f"Who is {person}?",
            f"Tell me about {person}.",
            f"What do you know about {person}?",
        )
        yield Fact("definitions", asks, text)
    for thing, emoji in rows(knowledge.EMOJI):
        yield emoji_fact(thing, emoji)


def emoji_fact(thing: str, emoji: str) -> Fact:
    asks = (
        f"Show me the emoji for {thing}.",
        f"What is the {thing} emoji?",
        f"Send me the {thing} emoji.",
        f"{thing} emoji",
    )
    return Fact("emoji", asks, f"Here it is: {emoji}", emoji)


def opposites() -> dict[str, str]:
    """Both directions; where a word stands in several pairs, the first one counts."""
    found = {}
    for word, opposite in pairs(knowledge.ANTONYMS):
        found.setdefault(word, opposite)
    for word, opposite in pairs(knowledge.ANTONYMS):
        found.setdefault(opposite, word)
    return found


def word_facts() -> Iterator[Fact]:
    for word, opposite in opposites().items():
        asks = (
            f"What is the opposite of {word}?",
            f"What's the opposite of {word}?",
            f"Give me the opposite of {word}.",
        )
        yield Fact("words", asks, f"The opposite of {word} is {opposite}.", opposite)
    for word, plural in pairs(knowledge.PLURALS):
        asks = (f"What is the plural of {word}?", f"What's the plural of {word}?", f"Give me the plural of {word}.")
        yield Fact("words", asks, f"The plural of {word} is {plural}.", plural)
        yield Fact("words", (f"Spell {word}.", f"Spell the word {word}.", f"How do you spell {word}?"), "-".join(word))
    for verb, past in pairs(knowledge.PAST):
        asks = (
            f"What is the past tense of {verb}?",
            f"What's the past tense of {verb}?",
            f"Give me the past tense of {verb}.",
        )
        yield Fact("words", asks, f"The past tense of {verb} is {past}.", past)
    for before, after in zip(LETTERS, LETTERS[1:], strict=False):
        yield Fact(
            "words",
            (f"What letter comes after {before}?", f"Which letter comes after {before}?"),
            f"After {before} comes {after}.",
            after,
        )
        yield Fact(
            "words",
            (f"What letter comes before {after}?", f"Which letter comes before {after}?"),
            f"Before {after} comes {before}.",
            before,
        )


def list_facts() -> Iterator[Fact]:
    """Return bare and numbered lists of the first 2 to 10 of a kind, and of 5 for questions without a number."""
    for kind, examples in rows(knowledge.LISTS):
        for count in range(2, 11):
            answer = ", ".join(cells(examples)[:count])
            amounts = [str(count), number_word(count)] + (["some"] if count == 5 else [])
            asks = tuple(f"{verb} {amount} {kind}." for verb in ("List", "Name", "Give me") for amount in amounts)
            yield Fact("lists", asks, answer)
            numbered = "\n".join(f"{n}. {example}" for n, example in enumerate(cells(examples)[:count], 1))
            yield Fact("lists", (f"Write a numbered list of {count} {kind}.",), numbered)
    capitals = {country.name: country.capital for country in all_countries()}
    for count in range(1, 11):
        names = cells(knowledge.LISTED_COUNTRIES)[:count]
        numbered = "\n".join(f"{n}. {name}: {capitals[name]}" for n, name in enumerate(names, 1))
        things = "country and its capital" if count == 1 else "countries and their capitals"
        heads = [f"{verb} {amount}" for verb in ("List", "Name", "Give me") for amount in (count, number_word(count))]
        asks = [f"{head} {way}." for head in heads for way in (things, things.replace("and", "with"))]
        yield Fact("lists", tuple(asks), numbered)


UNKNOWN_WAYS = (
    "What is {}?",
    "Tell me about {}.",
    "Explain {}.",
    "What is the capital of {}?",
    "Where is {}?",
    "Who wrote {}?",
    "How do I make {}?",
    "What do you know about {}?",
)


def unknown_facts() -> Iterator[Fact]:
    """Return questions that the model cannot answer. A model that has never seen such questions would answer with
    confidence.
    """
    yield Fact("unknown", ways(prose.UNKNOWN_QUESTIONS), prose.UNKNOWN)
    for term in cells(knowledge.UNKNOWN_TERMS):
        asks = tuple(way.format(without_article(term) if "capital" in way else term) for way in UNKNOWN_WAYS)
        yield Fact("unknown", asks, prose.UNKNOWN)
    for person in cells(knowledge.UNKNOWN_PEOPLE):
        asks = (f"Who is {person}?", f"Who was {person}?", f"Tell me about {person}.", f"How old is {person}?")
        yield Fact("unknown", asks, prose.UNKNOWN)
    for topic in cells(knowledge.UNKNOWN_TOPICS):
        asks = (
            f"Tell me a story about {topic}.",
            f"Write a story about {topic}.",
            f"Do you know a story about {topic}?",
        )
        yield Fact("unknown", asks, prose.UNKNOWN_STORY)
        asks = (f"Write a poem about {topic}.", f"A poem about {topic}, please.", f"Tell me a poem about {topic}.")
        yield Fact("unknown", asks, prose.UNKNOWN_POEM)


def talk_facts() -> Iterator[Fact]:
    for questions, answer in rows(prose.SMALL_TALK):
        yield Fact("small talk", ways(questions), answer)
    for text in ways(prose.SENTENCES):
        bare = text.removesuffix(".")
        yield Fact(
            "repeat", (f"Repeat after me: {bare}", f"Say: {bare}", f"Repeat: {bare}"), sentence(capitalised(bare))
        )
    for asks, text in long_texts():
        yield Fact("long", ways(asks), text)


def long_texts() -> Iterator[tuple[str, str]]:
    for block in prose.LONG_TEXTS.strip().split("\n---\n"):
        asks, _, text = block.partition("\n")
        yield asks, text
