"""A page as one HTML file that loads nothing from a network; its content security policy forbids such loading."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from xrlflow.common.text import printable, shortened

_ASSETS = {
    "/*STYLE*/": "page.css",
    "/*LAYOUT*/": "dagre.min.js",
    "/*LIBRARY LICENCE*/": "dagre.LICENSE",
    "/*SCRIPT*/": "page.js",
}
# Characters that would end a script element, begin a comment in it, or break one of its lines.
_ESCAPED = {
    ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e"
}
_ESCAPED |= {ord(c): f"\\u{ord(c):04x}" for c in "\u2066\u2067\u2068\u2069"}


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element, whatever texts are in it. Raises ValueError for numbers like NaN."""
    return json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPED)


def page_html(data: Mapping[str, Any]) -> str:
    """The page for the data of `Page.to_json`, in UTF-8's characters only."""
    folder = files("xrlflow.report.page") / "assets"
    parts = {slot: (folder / name).read_text(encoding="utf-8") for slot, name in _ASSETS.items()}
    parts["<!--TITLE-->"] = html.escape(shortened(printable(data["title"]), 80))
    parts["/*DATA*/"] = embedded(data)
    pattern = re.compile("|".join(map(re.escape, parts)))
    # All slots are filled in one pass, because an inserted text may itself contain the name of a slot.
    text = pattern.sub(lambda slot: parts[slot[0]], (folder / "page.html").read_text(encoding="utf-8"))
    # Lone surrogates (undecodable bytes of a file name) cannot be written.
    return text.encode("utf-8", "replace").decode("utf-8")
