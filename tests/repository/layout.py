"""The layout of the code in docs/how-it-works/index.md, from what the docstrings of the folders say.

`python -m tests.repository.layout` writes it; a test compares it with the page.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-it-works" / "index.md"
BEGIN, END = "<!-- layout: python -m tests.repository.layout -->\n", "<!-- end of layout -->"


def layers(pyproject: str) -> list[str]:
    """The rooms of the package, upper ones first: what the first import contract says."""
    contract = re.search(r"^layers = (\[.*?^\])", pyproject, re.MULTILINE | re.DOTALL)
    assert contract is not None
    return [name for layer in ast.literal_eval(contract[1]) for name in layer.split(" | ")]


def said(file: Path) -> str:
    """The first paragraph of a module's docstring. Raises ValueError if it has none."""
    text = ast.get_docstring(ast.parse(file.read_text()))
    if not text:
        raise ValueError(f"{file}: the docstring has to say what is in the folder")
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def table(package: Path, order: list[str]) -> str:
    """A row for each module at the root of the package and for each folder of modules in it.

    Raises ValueError if `order` lacks one, or names one that does not exist.
    """
    there = {f.stem for f in package.glob("*.py")} | {f.parent.name for f in package.glob("*/__init__.py")}
    if there - {"__init__"} != set(order):
        differ = sorted(set(order) ^ there - {"__init__"})
        raise ValueError(f"the layers of the import contract and the folders differ by {', '.join(differ)}")
    lines = ["| folder | what is in it |", "|---|---|"]
    for name in order:
        file = package / f"{name}.py"
        if file.exists():
            lines.append(f"| `{package.name}/{name}.py` | {said(file)} |")
        for init in sorted((package / name).rglob("__init__.py")):
            lines.append(f"| `{init.parent.relative_to(package.parent)}/` | {said(init)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table of today."""
    before, rest = text.split(BEGIN)
    order = layers((ROOT / "pyproject.toml").read_text())
    return f"{before}{BEGIN}{table(ROOT / 'xrlflow', order)}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
