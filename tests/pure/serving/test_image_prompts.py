"""Chats with images become prompts whose placeholders are those of the images, and of nothing else."""

from dataclasses import replace

import pytest

from engine.errors import InvalidRequest, PromptTooLong
from engine.serving.image_prompts import ImagePrompts
from engine.serving.tokenization import tokenize_or_detokenize
from engine.text.tokenizer import Tokenizer
from engine.wire import parse_request
from tests.image_requests import VISION_TOKENS, a_file, a_reader, an_image_part, write_vision_model
from tests.images import an_image
from tests.pure.service_fakes import an_input_processor

FILES = [a_file(an_image(28 * rows, 28 * columns)) for rows, columns in ((1, 1), (2, 3), (3, 1))]
PAD = VISION_TOKENS[0]


def a_processor(directory, **files):
    write_vision_model(directory, **files)
    tokenizer = Tokenizer.load(directory)
    images = ImagePrompts(tokenizer, a_reader(directory), max_images=3)
    return an_input_processor(tokenizer, tokenizer.vocab_size, (600, 500, 100), images=images)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    processor = a_processor(tmp_path_factory.mktemp("model"))
    yield processor
    processor.close()


@pytest.fixture(scope="module")
def text_template(tmp_path_factory):
    """Return the processor of a model whose chat template takes texts only."""
    processor = a_processor(tmp_path_factory.mktemp("model"), template=None)
    yield processor
    processor.close()


def a_request(*content, **fields):
    return parse_request({"req_id": "a", "messages": [{"role": "user", "content": list(content)}], **fields})


def a_text(text):
    return {"type": "text", "text": text}


def shown(processor, prompt):
    """Return the text of a prompt with the number of tokens in place of each image."""
    text, end = "", 0
    for span in prompt.spans:
        assert (
            prompt.token_ids[span.start : span.end] == [processor.images.reader.processor.image_token_id] * span.length
        )
        text += processor.tokenizer.decode(prompt.token_ids[end : span.start], skip_special_tokens=False)
        text, end = f"{text}[{span.length}]", span.end
    return text + processor.tokenizer.decode(prompt.token_ids[end:], skip_special_tokens=False)


def refusal(processor, request):
    with pytest.raises(InvalidRequest) as caught:
        processor.process(request)
    return str(caught.value)


BEGIN, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["processor", "text_template"])
def test_each_image_has_its_tokens_where_the_template_writes_it(name, request):
    processor = request.getfixturevalue(name)
    parts = [a_text("a"), an_image_part(FILES[1]), a_text("b"), an_image_part(FILES[0]), an_image_part(FILES[2])]
    prompt = processor.process(a_request(*parts))
    images = "a<|vision_start|>[6]<|vision_end|>b<|vision_start|>[1]<|vision_end|><|vision_start|>[3]<|vision_end|>"
    assert shown(processor, prompt) == BEGIN + images + END
    own = processor.images.reader.processor
    pixels = [own.resize(an_image(28 * rows, 28 * columns)) for rows, columns in ((2, 3), (1, 1), (3, 1))]
    assert [span.pixels for span in prompt.spans] == [each.tobytes() for each in pixels]
    assert [span.content_hash for span in prompt.spans] == [own.content_hash(each) for each in pixels]
    assert [span.grid for span in prompt.spans] == [(1, 2, 3), (1, 1, 1), (1, 3, 1)]


@pytest.mark.parametrize("name", ["processor", "text_template"])
def test_a_text_that_spells_the_placeholder_is_no_image(name, request):
    processor = request.getfixturevalue(name)
    spelled = f"x{PAD}{PAD}y"
    parts = [a_text(spelled), an_image_part(FILES[1]), a_text(spelled), a_text(PAD[:5]), a_text(PAD[5:])]
    prompt = processor.process(a_request(*parts, system=spelled, chat_template_kwargs={"more": [spelled]}))
    image = "<|vision_start|>[6]<|vision_end|>"
    system = f"<|im_start|>system\n{spelled}<|im_end|>\n"
    assert shown(processor, prompt) == f"{system}{BEGIN}{spelled}{image}{spelled}{PAD}{END}"
    assert prompt.token_ids.count(processor.images.reader.processor.image_token_id) == 6


def test_a_placeholder_that_only_the_template_puts_together_is_refused(tmp_path):
    """Such a template joins texts of the client, so that neither of them has the whole placeholder."""
    image = "{% for part in messages[0]['content'] %}{{ part['text'] or '" + PAD + "' }}{% endfor %}"
    processor = a_processor(tmp_path, template=image + "{{ (a or '') + (b or '') }}")
    request = a_request(an_image_part(FILES[0]), a_text("x"), chat_template_kwargs={"a": PAD[:4], "b": PAD[4:]})
    assert refusal(processor, request) == (
        "The chat template wrote 2 placeholders of images for the 1 images in `messages`"
    )
    processor.close()


def test_a_template_that_leaves_an_image_out_is_refused(processor):
    messages = [{"role": "assistant", "content": "x"}, {"role": "user", "content": [an_image_part(FILES[0])]}]
    request = parse_request({"req_id": "a", "messages": messages})
    assert len(processor.process(request).spans) == 1
    leaving_out = replace(processor.images, tokenizer=LeavingOut(processor.tokenizer))
    assert "wrote 0 placeholders of images for the 1 images" in refusal(replace(processor, images=leaving_out), request)


class LeavingOut:
    """A tokenizer whose chat template writes images of one-message chats only."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def render_chat(self, messages, **variables):
        return self.tokenizer.render_chat(messages if len(messages) == 1 else messages[:1], **variables)


def test_a_chat_without_images_is_as_before(processor):
    texts = processor.process(a_request(a_text("a"), a_text("b")))
    assert texts.spans == () and shown(processor, texts) == f"{BEGIN}ab{END}"


def test_a_model_without_images_names_the_part(processor):
    request = a_request(a_text("a"), an_image_part(FILES[0]))
    assert refusal(replace(processor, images=None), request) == (
        "The `messages[0].content[1].image_url` is an image: "
        "the model takes text only, or ENABLE_MM=0 has turned images off"
    )


def test_the_number_of_images_is_limited(processor):
    message = refusal(processor, a_request(*[an_image_part(FILES[0])] * 4))
    assert message == (
        "The `messages[0].content[3].image_url` is one image too many: "
        "the prompt has 4, the limit is 3 (LIMIT_MM_PER_PROMPT)"
    )


def test_images_that_are_longer_than_a_prompt_are_not_all_read(processor, monkeypatch):
    short, read = replace(processor, lengths=replace(processor.lengths, max_seq_len=30)), []
    original = processor.images.reader.read
    monkeypatch.setattr(processor.images.reader, "read", lambda *args: read.append(args) or original(*args))
    monkeypatch.setattr(ImagePrompts, "render", lambda images, chat: [PAD * len(chat.images)])
    lengths = replace(short.lengths, max_seq_len=6)
    with pytest.raises(PromptTooLong, match=r"up to `messages\[0\].content\[1\].image_url` have 7 tokens"):
        replace(short, lengths=lengths).process(a_request(*map(an_image_part, (FILES[1], FILES[0], FILES[2]))))
    assert len(read) == 2


def test_a_prompt_with_images_is_not_truncated(processor):
    assert "would cut a prompt with images" in refusal(
        processor, a_request(an_image_part(FILES[0]), truncate_prompt_tokens=5)
    )
    assert processor.process(a_request(an_image_part(FILES[0]), truncate_prompt_tokens=400)).spans


def test_pixels_of_a_request_are_limited_by_its_own_field(processor):
    request = a_request(an_image_part(FILES[1]), mm_processor_kwargs={"image_max_pixels": 784 * 4, "fps": 2})
    assert processor.process(request).spans[0].length == 2


def test_questions_about_tokens_count_those_of_images(processor):
    messages = [{"role": "user", "content": [an_image_part(FILES[1]), a_text("hi")]}]
    answer = tokenize_or_detokenize({"tokenize": {"messages": messages}}, processor)
    assert answer.tokens == processor.process(a_request(an_image_part(FILES[1]), a_text("hi"))).token_ids
