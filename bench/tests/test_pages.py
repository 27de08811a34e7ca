"""Tables and pictures of the docs are those that the benchmarks write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import latency, pages, pictures

ROOT = Path(__file__).resolve().parents[2]


def test_pages_of_benchmarks_are_short() -> None:
    """Long tables are files of data/, and a page links to each."""
    folder = ROOT / "docs" / "benchmarks"
    lines = {page.name: len(page.read_text().splitlines()) for page in folder.glob("*.md")}
    assert {name: count for name, count in lines.items() if count > 80} == {}
    linked = {
        name for page in folder.glob("*.md") for name in re.findall(r"\(data/(.+?\.md)\)", page.read_text())
    }
    assert linked == {page.name for page in (folder / "data").glob("*.md")}
    assert {f"{name}.md" for name, page in pages.tables().items() if page.parent.name == "data"} == linked


def test_the_readme_shows_rows_of_the_latency_table() -> None:
    assert pages.read("latency-short") == latency.short(pages.read("latency"))
    assert pages.read("latency-kernels-short") == latency.kernels_short(pages.read("latency-kernels"))


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_what_the_script_draws(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    assert (pictures.FOLDER / f"{name}.svg").read_text() == drawn, "run: python bench/pictures.py"


def test_a_table_is_put_on_its_page(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "benchmarks"
    folder.mkdir(parents=True)
    (tmp_path / "README.md").write_text("no table\n")
    page = folder / "page.md"
    (folder / "data").mkdir()
    raw = folder / "data" / "b.md"
    raw.write_text("<!-- table: b -->\n<!-- end of table: b -->\n")
    page.write_text("before\n<!-- table: a -->\nold\n<!-- end of table: a -->\nafter\n")
    assert pages.write("a", "| x | y |\n|---|---|\n| 1 | 2 |\n", tmp_path) == page
    assert page.read_text() == (
        "before\n<!-- table: a -->\n| x | y |\n|---|---|\n| 1 | 2 |\n<!-- end of table: a -->\nafter\n"
    )
    assert pages.rows(pages.read("a", tmp_path)) == [{"x": "1", "y": "2"}]
    with pytest.raises(SystemExit, match="no page has a table 'c'; there are b, a"):
        pages.write("c", "", tmp_path)
    assert pages.write("b", "|", tmp_path) == raw
    assert raw.read_text() == "<!-- table: b -->\n|\n<!-- end of table: b -->\n"
