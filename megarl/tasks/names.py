"""Messages about names that are not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: `; did you mean "x"?` for the known name that is closest to `name`, else `; known: a, b, c.`"""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known: {', '.join(known)}." if known else "; none is known."
