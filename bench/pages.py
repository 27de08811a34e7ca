"""The tables of docs/benchmarks and of the README: a bench command with `--write` writes its results there.

A table is between two marks, `<!-- table: NAME -->` and `<!-- end of table: NAME -->`. The text around them is written
by hand and stays. Short tables are on the pages that say what they show, long ones in files of docs/benchmarks/data.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def tables(root: Path = ROOT) -> dict[str, Path]:
    """The names of all tables, and the page of each."""
    pages = [root / "README.md", *sorted((root / "docs" / "benchmarks").rglob("*.md"))]
    return {
        name: page
        for page in pages
        for name in re.findall(r"^<!-- table: (.+) -->$", page.read_text(), re.MULTILINE)
    }


def read(name: str, root: Path = ROOT) -> str:
    """The text between the marks of a table. Raises SystemExit if no page has it."""
    begin, end = _marks(name)
    return _page(name, root).read_text().split(begin)[1].split(end)[0].strip()


def write(name: str, text: str, root: Path = ROOT) -> Path:
    """Write `text` between the marks of a table, and return its page. Raises SystemExit if no page has such a table."""
    page = _page(name, root)
    begin, end = _marks(name)
    before, rest = page.read_text().split(begin)
    after = rest.split(end)[1]
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")
    return page


def kept(path: Path) -> list[dict[str, Any]]:
    """The rows of a file with a JSON object in each line; none if it does not exist yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(text: str) -> list[dict[str, str]]:
    """The rows of the first Markdown table in a text, by the names of its columns."""
    lines = re.search(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    if lines is None:
        return []
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    return [dict(zip(head, cells, strict=True)) for cells in body]


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"


def _page(name: str, root: Path) -> Path:
    known = tables(root)
    if name not in known:
        raise SystemExit(f"no page has a table {name!r}; there are {', '.join(known)}")
    return known[name]
