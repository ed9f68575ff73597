"""Questions as people type them carelessly, and questions without sense. The module has no answers."""

import random
from collections.abc import Set

BEFORE = (
    "Please ",
    "please ",
    "Hi, ",
    "Hello, ",
    "Hey, ",
    "Ok, ",
    "Now ",
    "So, ",
    "And now: ",
    "Question: ",
    "Tell me: ",
    "Please tell me: ",
    "I want to know: ",
    "Can you tell me: ",
)
AFTER = (" please", ", please", " Thank you.", " Thanks!", "!", "??", "?", ".", " ?", " ", " exactly?", " for me")
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnpr" for vowel in "aeiou"]
ENDINGS = ["", "", "n", "r", "s", "x", "t", "rf", "ck", "sh", "nd"]
ABOUT_NOTHING = (
    "What is {}?",
    "What is a {}?",
    "Who is {}?",
    "What is the capital of {}?",
    "Where is {}?",
    "Explain {}.",
    "{}",
    "Tell me about {}.",
)
LONG_WORD = 6  # letters; a slip in a shorter word could turn it into another one


def typed(question: str, taken: Set[str], rng: random.Random) -> str:
    """Return the question with a courtesy, a stray mark or a typing error, which is never another known question."""
    changed = rng.choice((_with_courtesy, _with_ending, _with_slip, _with_slip))(question, rng)
    return question if changed in taken else changed


def _with_courtesy(question: str, rng: random.Random) -> str:
    lowered = (
        question[0].lower() + question[1:]
        if question.split()[0] in ("What", "Which", "How", "Where", "Tell", "List")
        else question
    )
    return rng.choice(BEFORE) + rng.choice((question, lowered))


def _with_ending(question: str, rng: random.Random) -> str:
    return question.rstrip("?.! ") + rng.choice(AFTER)


def _with_slip(question: str, rng: random.Random) -> str:
    words = question.split(" ")
    long_words = [index for index, word in enumerate(words) if len(word) >= LONG_WORD and word.isascii()]
    if not long_words:
        return question.replace("'", "")
    index = rng.choice(long_words)
    word = words[index]
    at = rng.randrange(1, len(word) - 2)
    slips = (
        word[:at] + word[at + 1 :],
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        word[:at] + word[at] + word[at:],
    )
    words[index] = rng.choice(slips)
    return " ".join(words)


def nonsense(common_words: list[str], rng: random.Random) -> str:
    if rng.random() < 0.5:
        word = "".join(rng.choices(SYLLABLES, k=rng.choice((1, 2, 2, 3)))) + rng.choice(ENDINGS)
        question = rng.choice(ABOUT_NOTHING).format(rng.choice((word, word.capitalize())))
    else:
        question = " ".join(rng.choices(common_words, k=rng.randrange(3, 9)))
    return rng.choice((question, question.lower(), question.rstrip("?.")))
