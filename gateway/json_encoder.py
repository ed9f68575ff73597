"""JSON as every protocol writes it."""

from __future__ import annotations

import json
from typing import Any

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)


def dump(fields: Any) -> bytes:
    """Compact, readable in a terminal, and one line for every reader.

    Some clients split lines at U+0085, U+2028 and U+2029, which JSON lets pass as they are: these are escaped. A lone
    surrogate, which has no UTF-8, becomes "?".
    """
    text = ENCODER.encode(fields)
    if not text.isascii():
        text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
    return text.encode("utf-8", "replace")
