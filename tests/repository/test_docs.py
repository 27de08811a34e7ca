"""README and docs/: the site builds, links lead somewhere, and what is made of other files agrees with them."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository import layout

ROOT = Path(__file__).resolve().parents[2]
READ_IN_PLACE = [
    ROOT / name
    for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h.lower()).strip()) for h in headings}


def broken_links(page: Path) -> Iterator[str]:
    """The relative links of a page that lead to no file, or to no heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def test_links_lead_somewhere() -> None:
    found = {str(p.relative_to(ROOT)): list(broken_links(p)) for p in (*READ_IN_PLACE, *DOCS)}
    assert {page: links for page, links in found.items() if links} == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](page.md#one-two) [b](#one-two) [c](none.md) [d](#three) `[e](code.md)`\n")
    assert list(broken_links(page)) == ["none.md", "#three"]


def test_the_site_builds(tmp_path: Path) -> None:
    """Without a warning: every page is in the navigation, every link and docstring can be rendered."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the extra `docs` is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = sorted((tmp_path / "site").rglob("*.html"))
    assert len(built) > len(DOCS)
    elsewhere = r"[^>]*(?:https?:)?//"
    fetched = re.compile(
        rf"<(?:script|img|iframe)[^>]*src=\"?(?:https?:)?//|<link[^>]*rel=\"?stylesheet\"?{elsewhere}"
    )
    assert [p.name for p in built if fetched.search(p.read_text())] == []
    reference = (tmp_path / "site" / "reference" / "api.html").read_text()
    assert "Make a model faster." in reference


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_commands_exist() -> None:
    said = "\n".join(p.read_text() for p in (*READ_IN_PLACE, *DOCS))
    scripts = set(re.findall(r"\b((?:bench|examples)/\w+\.py)\b", said)) - {
        "bench/tvm.py"
    }  # of the first plan
    assert [s for s in sorted(scripts) if not (ROOT / s).is_file()] == []
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make (\w+)", said, re.MULTILINE)) <= targets


def test_the_demo_is_the_one_that_is_described() -> None:
    command = re.search(
        r"^xrlflow optimize out/.*$", (ROOT / "docs/getting-started.md").read_text(), re.MULTILINE
    )
    assert command is not None
    assert f"$(BIN)/{command[0]}\n" in (ROOT / "Makefile").read_text()


def test_the_layout_is_that_of_the_folders() -> None:
    written = layout.PAGE.read_text()
    assert written == layout.page(written), "run: python -m tests.repository.layout"


def test_a_folder_that_the_layout_lacks(tmp_path: Path) -> None:
    for name in ("a", "b", "b/c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f'"""The room {name},\nwith things.\n\nMore."""\n')
    (tmp_path / "d.py").write_text('"""Loose."""')
    rows = layout.table(tmp_path, ["d", "b", "a"]).splitlines()[2:]
    folder = tmp_path.name
    assert rows == [
        f"| `{folder}/d.py` | Loose. |",
        f"| `{folder}/b/` | The room b, with things. |",
        f"| `{folder}/b/c/` | The room b/c, with things. |",
        f"| `{folder}/a/` | The room a, with things. |",
    ]
    with pytest.raises(ValueError, match="differ by a"):
        layout.table(tmp_path, ["d", "b"])
    with pytest.raises(ValueError, match="differ by e"):
        layout.table(tmp_path, ["d", "b", "a", "e"])
    (tmp_path / "b" / "c" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match="has to say"):
        layout.table(tmp_path, ["d", "b", "a"])


def test_the_glossary_names_classes_that_exist() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| \*\*.*$", text, re.MULTILINE)
    assert len(rows) == 40
    named = set(re.findall(r"`([A-Z][a-z]\w+)`", text))
    sources = "\n".join(file.read_text() for file in (ROOT / "xrlflow").rglob("*.py"))
    assert len(named) >= 8
    assert named <= set(re.findall(r"^class (\w+)", sources, re.MULTILINE))


def test_code_is_python() -> None:
    for page in (*READ_IN_PLACE, *DOCS):
        for language, code in FENCE.findall(page.read_text()):
            if language == "python":
                ast.parse(textwrap.dedent(code))
