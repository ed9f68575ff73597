"""Prompts with images: renders the chat, and replaces the placeholder of each image by as many as it has tokens.

Only placeholders that the chat template writes for an image count. Text of the client that spells a placeholder is
tokenized as ordinary text.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.core.spans import PromptSpan
from engine.errors import ChatTemplateError, InvalidRequest, PromptTooLong
from engine.images.pool import PreparedImage
from engine.images.reader import ImageReader
from engine.text.chat_template import with_joined_texts
from engine.text.tokenizer import Tokenizer
from engine.wire.images import ImagePart

Json = Mapping[str, Any]
IN_TEMPLATES = {"type": "image"}  # an image part as chat templates expect it


@dataclass(frozen=True)
class Chat:
    """A chat with images: what the prompt is made of."""

    messages: Sequence[Json]
    images: Sequence[ImagePart]  # of the messages, in order
    variables: Json  # of the chat template
    mm_processor_kwargs: Mapping[str, int] | None = None


@dataclass(frozen=True)
class ImagePrompts:
    """Makes prompts of chats with images, for one model that reads at most `max_images` of them in a prompt."""

    tokenizer: Tokenizer
    reader: ImageReader
    max_images: int

    def render(self, chat: Chat) -> list[str]:
        """Return the text of the prompt in parts, which are to be tokenized one by one. Raises InvalidRequest."""
        if len(chat.images) > self.max_images:
            text = "is one image too many: the prompt has {value}, the limit is {limit} (LIMIT_MM_PER_PROMPT)"
            raise chat.images[self.max_images].error(text, value=len(chat.images), limit=self.max_images)
        cut = f"\ue000{secrets.token_hex(8)}\ue000"
        given = [with_joined_texts(_for_template(each)) for each in chat.messages]
        messages, variables = _with_cuts([given, dict(chat.variables)], self._placeholder, cut)
        if not self._writes_images:
            messages = [_for_template(each, {"type": "text", "text": self._written_here}) for each in messages]
        rendered = self.tokenizer.render_chat(messages, **variables)
        return rendered.split(cut)

    def encode(self, parts: Sequence[str], chat: Chat, max_tokens: int) -> tuple[list[int], list[PromptSpan]]:
        """Return the token ids of a rendered prompt and the spans of its images. Images are not read to the end if they
        have more than `max_tokens` tokens together. Raises InvalidRequest."""
        token_ids = [each for part in parts for each in self.tokenizer.encode(part, add_special_tokens=False)]
        placeholder_id = self.reader.processor.image_token_id
        if token_ids.count(placeholder_id) != len(chat.images):
            text = "The chat template wrote {value} placeholders of images for the {limit} images in `{field}`"
            count = token_ids.count(placeholder_id)
            raise InvalidRequest(text, field="messages", value=count, limit=len(chat.images))
        limits = self.reader.limits_of(chat.mm_processor_kwargs)
        images: list[PreparedImage] = []
        for part in chat.images:
            images.append(self.reader.read(part, limits))
            if (num_tokens := sum(each.num_tokens for each in images)) > max_tokens:
                text = f"The images up to `{{field}}{part.path}` have {{value}} tokens, a prompt at most {{limit}}"
                raise PromptTooLong(text, field="messages", value=num_tokens, limit=max_tokens)
        return _expanded(token_ids, placeholder_id, images)

    @cached_property
    def _placeholder(self) -> str:
        return self.tokenizer.token_name(self.reader.processor.image_token_id)

    @cached_property
    def _writes_images(self) -> bool:
        """Return whether the chat template writes exactly one placeholder for an image part."""
        content = [{"type": "text", "text": "x"}, IN_TEMPLATES, {"type": "text", "text": "y"}]
        try:
            text = self.tokenizer.render_chat([{"role": "user", "content": content}])
        except ChatTemplateError:
            return False
        return text.count(self._placeholder) == 1 and str(IN_TEMPLATES) not in text

    @cached_property
    def _written_here(self) -> str:
        """Return what stands for an image in the text of a message, for a template that takes only text."""
        own = self.reader.processor
        ids = (own.start_token_id, own.image_token_id, own.end_token_id)
        return "".join(self.tokenizer.token_name(each) for each in ids if each is not None)


def _for_template(message: Json, image: Json = IN_TEMPLATES) -> Json:
    """Return the message with `image` in place of its image parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [part if part["type"] == "text" else image for part in content]}


def _with_cuts(value: Any, placeholder: str, cut: str) -> Any:
    """Return the JSON value with `cut` inside each placeholder of its texts, so that no part of the prompt has one."""
    if isinstance(value, str):
        middle = len(placeholder) // 2
        return value.replace(placeholder, placeholder[:middle] + cut + placeholder[middle:])
    if isinstance(value, list):
        return [_with_cuts(each, placeholder, cut) for each in value]
    if isinstance(value, dict):
        return {name: _with_cuts(each, placeholder, cut) for name, each in value.items()}
    return value


def _expanded(
    token_ids: Sequence[int], placeholder_id: int, images: Sequence[PreparedImage]
) -> tuple[list[int], list[PromptSpan]]:
    """Return the ids with as many placeholders as each image has tokens, and the spans of the images."""
    expanded: list[int] = []
    spans: list[PromptSpan] = []
    left = iter(images)
    for token_id in token_ids:
        if token_id != placeholder_id:
            expanded.append(token_id)
            continue
        image = next(left)
        spans.append(PromptSpan(len(expanded), image.num_tokens, image.content_hash, b"", image.grid, image.pixels))
        expanded += [placeholder_id] * image.num_tokens
    return expanded, spans
