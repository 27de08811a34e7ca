"""The tables on the pages of docs/benchmarks: a bench command with `--write` puts what it found there.

A table stands between two marks, `<!-- table: NAME -->` and `<!-- end of table: NAME -->`. What is around them is
written by hand and stays.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


def marks(name: str) -> tuple[str, str]:
    return f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"


def tables(folder: Path = FOLDER) -> dict[str, Path]:
    """The names of all tables, and the page of each."""
    return {
        name: page
        for page in sorted(folder.glob("*.md"))
        for name in re.findall(r"^<!-- table: (.+) -->$", page.read_text(), re.MULTILINE)
    }


def read(name: str, folder: Path = FOLDER) -> str:
    """What stands between the marks of a table. Raises SystemExit if no page has it."""
    begin, end = marks(name)
    return _page(name, folder).read_text().split(begin)[1].split(end)[0].strip()


def write(name: str, text: str, folder: Path = FOLDER) -> Path:
    """Put `text` between the marks of a table; gives its page. Raises SystemExit if no page has such a table."""
    page = _page(name, folder)
    begin, end = marks(name)
    before, rest = page.read_text().split(begin)
    after = rest.split(end)[1]
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")
    return page


def _page(name: str, folder: Path) -> Path:
    known = tables(folder)
    if name not in known:
        raise SystemExit(f"no page of {folder} has a table {name!r}; there are {', '.join(known)}")
    return known[name]
