"""Grammars of structured output, compiled and followed in worker processes of their own."""
