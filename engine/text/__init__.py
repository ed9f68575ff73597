"""Conversion between token ids and text: tokenizer, chat template, detokenizer, stop strings, and grammars."""
