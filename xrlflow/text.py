"""Text from outside (names in models, what runtimes say) on its way to a terminal or a message."""

from __future__ import annotations


def printable(text: object) -> str:
    """On one line, and what cannot be printed (control characters, marks that turn the direction) escaped."""
    return printable_words(" ".join(str(text).split()))


def printable_words(line: str) -> str:
    """A line with its spaces as they are, and what cannot be printed escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def shortened(text: str, limit: int, end: int = 0) -> str:
    """At most about `limit` characters: the middle is left out, and the last `end` stay."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - end]} [...] {text[-end:]}" if end else f"{text[: limit - 3]}..."
