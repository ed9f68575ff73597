"""Beam searches whose answers by transformers are in prompt_outputs.npz."""

BEAMS = ((2, 1.0), (4, 1.0), (4, 2.0), (3, -0.5))  # width, length_penalty
STOP_IDS = tuple(range(0, 320, 9))  # so that some of the answers end soon
MAX_NEW_TOKENS = 24
