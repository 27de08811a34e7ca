"""A page as one HTML file. Everything is in it: nothing is fetched, and its policy forbids to."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from xrlflow.common.text import printable, shortened

_PLACES = {
    "/*STYLE*/": "page.css",
    "/*LAYOUT*/": "dagre.min.js",
    "/*LIBRARY LICENCE*/": "dagre.LICENSE",
    "/*SCRIPT*/": "page.js",
}
# In a script, these would end it, begin a comment, or break a line.
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
    parts = {place: (folder / name).read_text(encoding="utf-8") for place, name in _PLACES.items()}
    parts["<!--TITLE-->"] = html.escape(shortened(printable(data["title"]), 80))
    parts["/*DATA*/"] = embedded(data)
    places = re.compile("|".join(map(re.escape, parts)))
    # In one go: what is put in may hold any of the places.
    text = places.sub(lambda place: parts[place[0]], (folder / "page.html").read_text(encoding="utf-8"))
    # Lone surrogates (undecodable bytes of a file name) cannot be written.
    return text.encode("utf-8", "replace").decode("utf-8")
