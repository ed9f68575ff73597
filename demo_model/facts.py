"""Definition of a fact, and the facts about countries and other languages. The module has no conversations and no
tokens.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from demo_model import countries, knowledge, prose

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclass(frozen=True)
class Fact:
    topic: str
    questions: tuple[str, ...]
    answer: str
    short: str | None = None  # the answer under a system prompt that asks for one word


@dataclass(frozen=True)
class Country:
    name: str  # as it stands in a sentence: "the Netherlands"
    aliases: tuple[str, ...]
    capital: str
    flag: str
    continent: str


def rows(table: str) -> Iterator[list[str]]:
    """Return the rows of a table whose cells are separated by bars."""
    for line in table.strip().splitlines():
        yield [cell.strip() for cell in line.split("|")]


def cells(text: str, separator: str = ",") -> list[str]:
    return [cell.strip() for cell in text.replace("\n", " ").split(separator) if cell.strip()]


def pairs(table: str) -> Iterator[list[str]]:
    for cell in cells(table):
        yield cell.split(" ")


def ways(text: str) -> tuple[str, ...]:
    return tuple(cells(text, " / "))


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def sentence(text: str) -> str:
    return text if text.endswith(".") else text + "."


def plain_letters(text: str) -> str:
    """Return the text without accents, as people type it whose keyboard has none."""
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def number_word(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number == 100:
        return "one hundred"
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")


def all_countries() -> list[Country]:
    found = []
    for name, capital, code, continent, others in rows(countries.COUNTRIES):
        aliases = dict.fromkeys([name, plain_letters(name), *cells(others)])
        flag = "".join(chr(ord(letter) - ord("A") + 0x1F1E6) for letter in code)
        found.append(Country(name, tuple(aliases), capital, flag, continent))
    return found


CAPITAL_QUESTIONS = (
    "What is the capital of {}?",
    "What's the capital of {}?",
    "What is the capital city of {}?",
    "Which city is the capital of {}?",
    "Name the capital of {}.",
    "Tell me the capital of {}.",
    "Do you know the capital of {}?",
    "Can you tell me the capital of {}?",
    "What is {}'s capital?",
    "Capital of {}?",
    "{} capital",
)
REVERSE_QUESTIONS = (
    "{} is the capital of which country?",
    "{} is the capital of what country?",
    "Which country has the capital {}?",
    "What country is {} the capital of?",
    "Of which country is {} the capital?",
)
CONTINENT_QUESTIONS = (
    "Which continent is {} in?",
    "On which continent is {}?",
    "What continent is {} in?",
    "Where is {}?",
)
ABOUT_QUESTIONS = ("What is {}?", "Tell me about {}.", "What do you know about {}?")
PLACE_QUESTIONS = ("Where is {}?", "In which country is {}?", "Which country is {} in?", "What country is {} in?")
FLAG_QUESTIONS = (
    "What is the flag of {}?",
    "Show me the flag of {}.",
    "What does the flag of {} look like?",
    "{} flag",
)


def asked(templates: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(capitalised(template.format(name)) for template in templates for name in names))


def capital_fact(country: Country) -> Fact:
    answer = sentence(f"The capital of {country.name} is {country.capital}")
    return Fact("capitals", asked(CAPITAL_QUESTIONS, country.aliases), answer, country.capital)


def continent_fact(country: Country) -> Fact:
    answer = f"{capitalised(country.name)} is in {country.continent}."
    return Fact("continents", asked(CONTINENT_QUESTIONS, country.aliases), answer, country.continent)


def flag_fact(country: Country) -> Fact:
    return Fact(
        "flags", asked(FLAG_QUESTIONS, country.aliases), f"The flag of {country.name} is {country.flag}", country.flag
    )


def country_facts() -> Iterator[Fact]:
    known = all_countries()
    names = {name for country in known for name in country.aliases}
    for index, country in enumerate(known):
        yield capital_fact(country)
        yield continent_fact(country)
        yield flag_fact(country)
        spellings = tuple(dict.fromkeys([country.capital, plain_letters(country.capital)]))
        answer = f"{country.capital} is the capital of {country.name}."
        yield Fact("reverse", asked(REVERSE_QUESTIONS, spellings), answer)
        if country.capital not in names:
            yield Fact("reverse", asked(PLACE_QUESTIONS, spellings), f"{country.capital} is in {country.name}.")
        about = sentence(
            f"{capitalised(country.name)} is a country in {country.continent}. Its capital is {country.capital}"
        )
        yield Fact("continents", asked(ABOUT_QUESTIONS, country.aliases), about)
        yield Fact("yes or no", (f"Is {country.capital} the capital of {country.name}?",), f"Yes, {answer}", "Yes")
        for step in (1, 7, 50):  # other capitals, near and far in the table
            wrong = known[(index + step) % len(known)].capital
            correct = sentence(f"No, the capital of {country.name} is {country.capital}")
            yield Fact("yes or no", (f"Is {wrong} the capital of {country.name}?",), correct, "No")


def foreign_facts() -> Iterator[Fact]:
    for country, capital in rows(countries.CHINESE):
        asks = (
            f"{country}的首都是哪里？",
            f"{country}的首都是什么？",
            f"{country}的首都在哪里？",
            f"哪个城市是{country}的首都？",
            f"{country}首都",
        )
        yield Fact("foreign", asks, f"{country}的首都是{capital}。")
        yield Fact("foreign", (f"{capital}是哪个国家的首都？",), f"{capital}是{country}的首都。")
    for country, capital in rows(countries.FRENCH):
        asks = (
            f"Quelle est la capitale {country} ?",
            f"Quelle est la capitale {country}?",
            f"Donne-moi la capitale {country}.",
        )
        yield Fact("foreign", asks, f"La capitale {country} est {capital}.")
        yield Fact("foreign", (f"{capital} est la capitale de quel pays ?",), f"{capital} est la capitale {country}.")
    for a in range(11):
        for b in range(11):
            yield Fact("foreign", (f"{a}加{b}等于几？", f"{a}加{b}是多少？"), f"{a}加{b}等于{a + b}。")
            yield Fact(
                "foreign", (f"Combien font {a} plus {b} ?", f"Combien font {a} et {b} ?"), f"{a} plus {b} font {a + b}."
            )
    for questions, answer in rows(prose.FOREIGN_TALK):
        yield Fact("foreign", ways(questions), answer)
    for language, hello, thanks, bye in rows(knowledge.LANGUAGES):
        for meaning, word in (("hello", hello), ("thank you", thanks), ("goodbye", bye)):
            ways_to_ask = (
                "How do you say {} in {}?",
                "Say {} in {}.",
                "What is {} in {}?",
                "Translate {} to {}.",
                "Translate {} into {}.",
            )
            asks = tuple(way.format(meaning, language) for way in ways_to_ask)
            yield Fact("foreign", asks, f"{capitalised(meaning)} in {language} is {word}.", word)
