"""Facts about numbers, counting and the calendar. Knows no conversations and no tokens."""

from collections.abc import Iterator

from demo_model.facts import Fact, capitalised, number_word

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
DAYS_IN_MONTH = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()


def sum_facts() -> Iterator[Fact]:
    """Return every sum and difference up to 100, differences below zero down to 20, and the tables up to 12."""
    for a in range(101):
        for b in range(101):
            if a + b <= 100:
                yield calculation(a, "+", b, (f"How much is {a} plus {b}?", f"Add {a} and {b}."))
            if b <= max(a, 20):
                yield calculation(a, "-", b, (f"How much is {a} minus {b}?", f"Subtract {b} from {a}."))
            if max(a, b) <= 12:
                yield calculation(a, "x", b, (f"How much is {a} times {b}?", f"Multiply {a} by {b}.", f"{a} * {b}"))
            if max(a, b) <= 12 and b > 0:
                yield calculation(a * b, "/", b, (f"Divide {a * b} by {b}.", f"How much is {a * b} divided by {b}?"))


def calculation(a: int, sign: str, b: int, more: tuple[str, ...]) -> Fact:
    result = {"+": a + b, "-": a - b, "x": a * b, "/": a // (b or 1)}[sign]
    word = {"+": "plus", "-": "minus", "x": "times", "/": "divided by"}[sign]
    spaced, tight = f"{a} {sign} {b}", f"{a}{sign}{b}"
    asks = (spaced, f"What is {a} {word} {b}?", f"What is {spaced}?", tight)
    if max(a, b) <= 50:  # the rest is asked in fewer ways
        asks += (*more, f"What is {tight}?", f"Calculate {spaced}.", f"{spaced} =", f"{tight}=")
    if max(a, b) <= 20:
        asks += (f"What is {number_word(a)} {word} {number_word(b)}?",)
    return Fact("sums", asks, f"{spaced} = {result}.", str(result))


def number_facts() -> Iterator[Fact]:
    for n in range(101):
        word = number_word(n)
        yield Fact(
            "numbers", (f"Write {n} in words.", f"How do you write {n} in words?"), f"{n} in words is {word}.", word
        )
        yield Fact(
            "numbers",
            (f"Write {word} in digits.", f"Which number is {word}?"),
            f"{capitalised(word)} in digits is {n}.",
            str(n),
        )
        parity = "odd" if n % 2 else "even"
        yield Fact("numbers", (f"Is {n} even or odd?", f"Is {n} odd or even?"), f"{n} is {parity}.", parity)
        yield Fact(
            "numbers",
            (f"What number comes after {n}?", f"Which number comes after {n}?"),
            f"After {n} comes {n + 1}.",
            str(n + 1),
        )
        if n:
            yield Fact(
                "numbers",
                (f"What number comes before {n}?", f"Which number comes before {n}?"),
                f"Before {n} comes {n - 1}.",
                str(n - 1),
            )
        if n <= 50:
            yield Fact(
                "numbers", (f"What is the double of {n}?", f"Double {n}."), f"The double of {n} is {2 * n}.", str(2 * n)
            )
            yield Fact("numbers", (f"What is half of {2 * n}?", f"Halve {2 * n}."), f"Half of {2 * n} is {n}.", str(n))
        if n <= 20:
            yield Fact(
                "numbers", (f"What is the square of {n}?", f"Square {n}."), f"The square of {n} is {n * n}.", str(n * n)
            )
        if 1 <= n <= 50:
            asks = (f"Write {n} in Roman numerals.", f"What is {n} in Roman numerals?")
            yield Fact("numbers", asks, f"{n} in Roman numerals is {roman(n)}.", roman(n))
    for a in range(21):
        for b in range(21):
            if a != b:
                asks = (f"Which is larger, {a} or {b}?", f"Which number is bigger, {a} or {b}?")
                yield Fact("numbers", asks, f"{max(a, b)} is larger than {min(a, b)}.", str(max(a, b)))


def counting_facts() -> Iterator[Fact]:
    def joined(numbers) -> str:
        return ", ".join(map(str, numbers))

    for n in range(2, 101):
        yield Fact(
            "counting",
            (f"Count from 1 to {n}.", f"Count to {n}.", f"Can you count from 1 to {n}?"),
            joined(range(1, n + 1)),
        )
        if n <= 30:
            yield Fact(
                "counting", (f"Count down from {n} to 1.", f"Count backwards from {n} to 1."), joined(range(n, 0, -1))
            )
        for start in range(2, min(n, 11)):
            if n <= 30:
                yield Fact("counting", (f"Count from {start} to {n}.",), joined(range(start, n + 1)))
        if n <= 12:
            table = "\n".join(f"{k} x {n} = {k * n}" for k in range(1, 13))
            yield Fact("counting", (f"Write the multiplication table of {n}.", f"Show me the {n} times table."), table)
            yield Fact("counting", (f"Count in steps of {n}.", f"Count by {n}s."), joined(range(n, 10 * n + 1, n)))


def calendar_facts() -> Iterator[Fact]:
    for kind, names in (("day", DAYS), ("month", MONTHS)):
        for index, name in enumerate(names):
            after, before = names[(index + 1) % len(names)], names[index - 1]
            asks = (
                f"What {kind} comes after {name}?",
                f"Which {kind} comes after {name}?",
                f"What is the {kind} after {name}?",
            )
            yield Fact("calendar", asks, f"After {name} comes {after}.", after)
            asks = (
                f"What {kind} comes before {name}?",
                f"Which {kind} comes before {name}?",
                f"What is the {kind} before {name}?",
            )
            yield Fact("calendar", asks, f"Before {name} comes {before}.", before)
            whole = "week" if kind == "day" else "year"
            asks = (f"What is the {ORDINALS[index]} {kind} of the {whole}?", f"Which {kind} is the {ORDINALS[index]}?")
            yield Fact("calendar", asks, f"The {ORDINALS[index]} {kind} of the {whole} is {name}.", name)
    for month, days in zip(MONTHS, DAYS_IN_MONTH, strict=True):
        answer = f"{month} has {days} days" + (", and 29 in a leap year." if days == 28 else ".")
        yield Fact(
            "calendar", (f"How many days are in {month}?", f"How many days does {month} have?"), answer, str(days)
        )


def roman(number: int) -> str:
    text = ""
    for value, digits in ((50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        text += digits * (number // value)
        number %= value
    return text
