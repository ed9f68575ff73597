"""JSON encoder of all protocols."""

from __future__ import annotations

import json
from typing import Any

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)


def dump(fields: Any) -> bytes:
    """Return `fields` as compact UTF-8 JSON on one line.

    U+0085, U+2028 and U+2029 are escaped, because some clients split lines at these characters. A lone surrogate, which
    has no UTF-8 encoding, becomes "?".
    """
    text = ENCODER.encode(fields)
    if not text.isascii():
        text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
    return text.encode("utf-8", "replace")
