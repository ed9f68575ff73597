"""Asks the checkpoint its 50 questions with Hugging Face transformers, greedy, as a second opinion on the engine.

python -m demo_model.check demo_model
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 640


def main() -> int:
    folder = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    questions = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    num_right = 0
    for entry in questions:
        chat = [{"role": "user", "content": entry["question"]}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        written = model.generate(token_ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0, token_ids.shape[1] :]
        answer = tokenizer.decode(written, skip_special_tokens=True)
        right = answer == entry["answer"]
        num_right += right
        if not right:
            print(f"{entry['question']}\n  wanted {entry['answer']!r}\n  got    {answer!r}")
    print(f"{num_right} of {len(questions)} right")
    return 0 if num_right == len(questions) else 1


if __name__ == "__main__":
    sys.exit(main())
