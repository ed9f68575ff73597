"""The journal stores the pixels of an image once, and until the last answer that needs them has ended."""

from engine.core.spans import PromptSpan
from engine.core.types import Sampling
from engine.link.engine_set import prefix_keys
from engine.link.journal import Journal, JournalEntry, Submission


def a_span(start, name, pixels=None):
    return PromptSpan(start, 1, name, b"", (1, 1, 1), pixels or b"pixels of " + name)


def opened(journal, name, spans, n=1):
    answers = [Submission(f"{name}-{index}", Sampling(5), None) for index in range(n)]
    entry = JournalEntry.of([1, 2, 3], answers, "", ("", 0), spans)
    journal.open(entry)
    return entry


def test_several_requests_share_an_image():
    journal = Journal()
    first, again = (
        opened(journal, "a", [a_span(0, b"cat"), a_span(1, b"dog")]),
        opened(journal, "b", [a_span(2, b"cat")]),
    )
    assert again.spans[0].pixels is first.spans[0].pixels
    assert [(span.start, span.content_hash) for span in again.spans] == [(2, b"cat")]
    assert len(journal.pixels) == 2


def test_pixels_are_released_when_the_last_answer_ends():
    journal = Journal()
    opened(journal, "a", [a_span(0, b"cat"), a_span(1, b"cat")], n=2)
    opened(journal, "b", [a_span(0, b"cat"), a_span(1, b"dog")])
    journal.enter("a-0", [5], is_end=True)
    journal.remove("a-1")
    assert len(journal.pixels) == 2
    journal.enter("b-0", [5], is_end=True)
    assert len(journal.pixels) == 0
    opened(journal, "c", [a_span(0, b"cat")])
    journal.remove_all()
    assert len(journal.pixels) == 0
    assert opened(journal, "d", [a_span(0, b"cat", b"new")]).spans[0].pixels == b"new"


def test_a_prompt_that_moves_to_another_journal_takes_its_pixels_along():
    first, second = Journal(), Journal()
    opened(first, "a", [a_span(0, b"cat")])
    second.open(first.take("a-0"))
    assert (len(first.pixels), len(second.pixels)) == (0, 1)
    assert second.find("a-0")[0].spans[0].pixels == b"pixels of cat"


def test_prompts_with_other_images_have_other_prefixes():
    """A request is therefore placed on the engine that has its images."""
    answers = [Submission("a", Sampling(5), None)]
    cat, dog, late = (
        prefix_keys(JournalEntry.of([7] * 200, answers, "", ("", 0), [PromptSpan(start, 60, name, b"", (1, 6, 10))]))
        for start, name in ((0, b"cat"), (0, b"dog"), (70, b"cat"))
    )
    plain = prefix_keys(JournalEntry.of([7] * 200, answers, "", ("", 0)))
    assert len(set(cat + dog)) == 2 * len(cat) == 6
    assert late[0] == plain[0] and late[1:] != plain[1:]
