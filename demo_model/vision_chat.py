"""Chats with pictures as the model that reads images sees them: its chat template, and the same for the training."""

from demo_model.pictures import Turn

VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pieces_of(turn: Turn, num_tokens: int, is_picture_first: bool) -> tuple[str, str, str]:
    """Return the text of a turn before the answer, the answer with its end, and what follows. A picture has
    `num_tokens` tokens."""
    picture = VISION[0] + VISION[1] * num_tokens + VISION[2]
    parts = [picture * bool(turn.image), turn.question]
    asked = "".join(parts if is_picture_first else parts[::-1])
    return f"{USER}{asked}{ASSISTANT}", turn.answer + END, "\n"
