"""Between token ids and text: tokenizer, chat template, characters as they become whole, stop strings."""
