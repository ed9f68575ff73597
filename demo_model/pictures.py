"""Pictures of numbers and shapes, and conversations about them with their right answers."""

from __future__ import annotations

import colorsys
import functools
import math
import operator
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

RANGES = {  # hue in degrees, saturation and value in percent, each from and to
    "red": ((-8, 8), (75, 100), (65, 100)),
    "green": ((95, 145), (60, 100), (40, 100)),
    "blue": ((208, 242), (65, 100), (60, 100)),
    "yellow": ((50, 62), (75, 100), (88, 100)),
    "orange": ((25, 37), (80, 100), (90, 100)),
    "purple": ((270, 292), (50, 100), (45, 90)),
    "black": ((0, 360), (0, 30), (0, 8)),
    "white": ((0, 360), (0, 3), (96, 100)),
}
CORNERS = {"square": 4, "triangle": 3, "star": 10}
SHAPES = ("circle", *CORNERS)
NAME: tuple[str, ...] = (
    "What is this?",
    "What do you see?",
    "What is in the image?",
    "Describe the image.",
    "What is it?",
)
NAME += ("What is in the picture?", "What does the picture show?", "What can you see?", "Describe this picture.")
COLOR = (
    "What color is it?",
    "Which color does it have?",
    "What is its color?",
    "Which color is this?",
    "What colour is it?",
)
SHAPE = ("What shape is it?", "Which shape is this?", "What shape is this?", "What is the shape?", "Name the shape.")
NUMBER: tuple[str, ...] = (
    "Which number is it?",
    "What number is this?",
    "Read the number.",
    "What does it say?",
    "Read it.",
)
NUMBER += ("What is the number?", "Which number is this?", "Which number do you see?", "Read this number.")
GREETINGS = ("Who are you?", "What can you do?", "Hello", "Hello!", "Hi", "Help", "What is your name?", "How are you?")
ABOUT = "I am a tiny model that reads numbers of up to four digits and names simple shapes. Show me a picture."
NO_PICTURE = "I see no picture. Show me one."
MIN_CONTRAST = 150  # sum of the differences of the three colors
MIN_BRIGHTNESS = 30  # difference of a number and its background, of 255
MIN_DIGIT = 15  # pixels of the width of a digit, in a picture of 112 x 112 pixels


@dataclass(frozen=True)
class Picture:
    """A number or a shape of one color."""

    image: Image.Image
    color: str
    shape: str  # empty for a number
    number: str  # empty for a shape


@dataclass(frozen=True)
class Turn:
    """A question, with a new picture or about the last one, and its answer. The kind of question is for the exam."""

    image: Image.Image | None
    question: str
    answer: str
    kind: str


def conversation(
    rng: random.Random, num_turns: int, size: tuple[int, int], is_exam: bool, fonts: tuple[str, ...]
) -> list[Turn]:
    """Return a conversation about pictures of a size (height, width)."""
    turns: list[Turn] = []
    shown: Picture | None = None
    for index in range(num_turns):
        if index == 0 and rng.random() < 0.06:
            greets = rng.random() < 0.6
            question = rng.choice(GREETINGS if greets else (*NAME, *COLOR, *SHAPE, *NUMBER))
            turns.append(Turn(None, _careless(rng, question), ABOUT if greets else NO_PICTURE, "no picture"))
            continue
        image = None
        if shown is None or rng.random() < 0.3:
            shown = picture(rng, size, is_exam, fonts)
            image = shown.image
        question, answer, kind = _question(rng, shown)
        turns.append(Turn(image, _careless(rng, question), answer, kind))
    return turns


def name_of(shown: Picture) -> str:
    """Return the sentence that says what a picture shows."""
    if shown.number:
        return f"The number {shown.number}."
    return f"{'An' if shown.color[0] == 'o' else 'A'} {shown.color} {shown.shape}."


def _question(rng: random.Random, shown: Picture) -> tuple[str, str, str]:
    digits = f"{len(shown.number)} digit{'s' * (len(shown.number) > 1)}"
    name = (NAME, name_of(shown), digits if shown.number else "color and shape")
    color = (COLOR, f"{shown.color.capitalize()}.", "color")
    if shown.number:
        shape, number = (SHAPE, "A number.", "number or shape"), (NUMBER, shown.number, digits)
        asked = rng.choice((name, name, name, number, number, number, color, shape))
    else:
        shape, number = (SHAPE, f"A {shown.shape}.", "shape"), (NUMBER, "There is no number.", "number or shape")
        asked = rng.choice((name, name, name, color, color, shape, shape, number))
    return rng.choice(asked[0]), asked[1], asked[2]


def _careless(rng: random.Random, question: str) -> str:
    question = question.lower() if rng.random() < 0.15 else question
    return question.rstrip("?.!") if rng.random() < 0.15 else question


def picture(rng: random.Random, size: tuple[int, int], is_exam: bool = False, fonts: tuple[str, ...] = ()) -> Picture:
    """Return a picture. `fonts` are files beside Pillow's own font."""
    is_number = rng.random() < 0.65
    color, rgb, background = _colors(rng, MIN_BRIGHTNESS if is_number else 0)
    image = Image.new("RGB", size[::-1], background)
    if is_number:
        number = _number(rng, is_exam)
        _draw_number(rng, image, number, rgb, rng.choice(fonts) if fonts and rng.random() < 0.75 else "")
        return Picture(image, color, "", number)
    shape = rng.choice(SHAPES)
    _draw_shape(rng, image, shape, rgb)
    return Picture(image, color, shape, "")


def _number(rng: random.Random, is_exam: bool) -> str:
    """Return one to four digits. Of the numbers with three and four digits, one in 13 is only in the exam, and the exam
    has no other."""
    while True:
        length = rng.choice((1, 2, 2, 3, 3, 4, 4, 4))
        number = "".join(rng.choices("0123456789", k=length))
        if length < 3 or (int(number) % 13 == 5) == is_exam:
            return number


def _colors(rng: random.Random, min_brightness: float) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the name of a color, the color, and a background that it can be seen on."""
    while True:
        name = rng.choice(list(RANGES))
        hue, *others = (rng.uniform(*each) for each in RANGES[name])
        color = tuple(
            round(255 * each) for each in colorsys.hsv_to_rgb(hue / 360 % 1, *(each / 100 for each in others))
        )
        grey, white = rng.randrange(256), (255, 255, 255)
        background = rng.choice((white, white, (0, 0, 0), (grey,) * 3, tuple(rng.randrange(256) for _ in range(3))))
        differences = [a - b for a, b in zip(color, background, strict=True)]
        brightness = abs(sum(map(operator.mul, differences, (0.3, 0.59, 0.11))))
        if sum(map(abs, differences)) >= MIN_CONTRAST and brightness >= min_brightness:
            return name, color, background


def _draw_number(rng: random.Random, image: Image.Image, text: str, color: tuple[int, ...], font: str) -> None:
    left, top, right, bottom = _font(font, 100).getbbox(text)
    most = min(image.width / (right - left), image.height / (bottom - top))
    least = len(text) * MIN_DIGIT * math.sqrt(image.width * image.height) / 112 / (right - left)
    scale = min(max(rng.uniform(0.35, 0.92) * most, least), 0.92 * most)
    drawn = _font(font, max(8, round(100 * scale)))
    left, top, right, bottom = drawn.getbbox(text)
    x, y = (
        rng.uniform(0.02, 0.98) * max(0, space - length) - begin
        for space, length, begin in ((image.width, right - left, left), (image.height, bottom - top, top))
    )
    if rng.random() < 0.7:
        ImageDraw.Draw(image).text((x, y), text, fill=color, font=drawn)
        return
    mask = Image.new("L", image.size)
    ImageDraw.Draw(mask).text((x, y), text, fill=255, font=drawn)
    center = (x + (left + right) / 2, y + (top + bottom) / 2)
    limit = 10 if len(text) < 3 else 5  # degrees
    image.paste(color, mask=mask.rotate(rng.uniform(-limit, limit), Image.Resampling.BILINEAR, center=center))


@functools.cache
def _font(path: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)


def _draw_shape(rng: random.Random, image: Image.Image, shape: str, color: tuple[int, ...]) -> None:
    radius = rng.uniform(0.2, 0.48) * min(image.size)
    x, y = (rng.uniform(radius, length - radius) for length in image.size)
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
        return
    count = CORNERS[shape]
    turn = rng.uniform(-0.3, 0.3) - math.pi / 2 + (math.pi / 4 if shape == "square" else 0)
    points = []
    for corner in range(count):
        length = radius * (0.42 if shape == "star" and corner % 2 else 1)
        angle = turn + 2 * math.pi * corner / count
        points.append((x + length * math.cos(angle), y + length * math.sin(angle)))
    draw.polygon(points, fill=color)
