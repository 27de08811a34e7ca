"""Makes text from outside (names in models, messages of runtimes) safe to print."""

from __future__ import annotations


def printable(text: object) -> str:
    """Text on one line; characters that cannot be printed (control characters, changes of direction) are escaped."""
    return printable_words(" ".join(str(text).split()))


def printable_words(line: str) -> str:
    """A line with its spaces unchanged; characters that cannot be printed are escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def shortened(text: str, limit: int, end: int = 0) -> str:
    """At most about `limit` characters: the middle is cut out, the last `end` characters stay."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - end]} [...] {text[-end:]}" if end else f"{text[: limit - 3]}..."
