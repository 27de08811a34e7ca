"""Cuts a release: `python tools/release.py 0.2.0`, which `make release VERSION=0.2.0` calls.

What stands under "Unreleased" in CHANGELOG.md becomes the section of the version, and the version is written to
`xrlflow/__init__.py`, where pyproject.toml reads it, and to CITATION.cff. Nothing is committed, tagged or uploaded.
docs/releasing.md has the rest of the list.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTHING_YET = "## Unreleased\n"
_VERSION = re.compile(r'^__version__ = "(\d+\.\d+\.\d+)"$', re.MULTILINE)


class NotReady(Exception):
    """What has to be put right before the release."""


def version(root: Path = ROOT) -> str:
    """The version of the package as it is."""
    found = _VERSION.search((root / "xrlflow" / "__init__.py").read_text())
    if found is None:
        raise NotReady("xrlflow/__init__.py: has no line __version__ with three numbers")
    return found[1]


def check(new: str, root: Path = ROOT) -> None:
    """Raise NotReady if this version cannot be released."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", new):
        raise NotReady(f"{new!r}: a version has three numbers, as 0.2.0")
    if _numbers(new) <= _numbers(version(root)):
        raise NotReady(f"{new}: is not after {version(root)}, the version of today")
    if not _unreleased((root / "CHANGELOG.md").read_text()).strip():
        raise NotReady("CHANGELOG.md: nothing is listed under Unreleased")
    if "OWNER" in (root / "pyproject.toml").read_text():
        raise NotReady(
            "pyproject.toml: put the owner of the repository into [project.urls], in the place of OWNER"
        )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if changed:
        raise NotReady(f"there are changes that are not committed:\n{changed.rstrip()}")


def cut(new: str, day: str, root: Path = ROOT) -> None:
    """Write the version and its section of the changelog. `day`: as 2026-11-28."""
    _replace(root / "CHANGELOG.md", re.escape(NOTHING_YET), f"{NOTHING_YET}\n## {new} ({day})\n")
    _replace(root / "xrlflow" / "__init__.py", _VERSION.pattern, f'__version__ = "{new}"')
    _replace(root / "CITATION.cff", r"^version: .*$", f"version: {new}")
    _replace(root / "CITATION.cff", r"^date-released: .*$", f"date-released: {day}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _unreleased(changelog: str) -> str:
    """What stands under "Unreleased", without its headings."""
    section = changelog.partition(NOTHING_YET)[2].partition("\n## ")[0]
    return re.sub(r"^### .*$", "", section, flags=re.MULTILINE)


def _replace(file: Path, pattern: str, by: str) -> None:
    """Replace the one place of a file that matches."""
    text, count = re.subn(pattern, by, file.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise NotReady(f"{file.name}: {count} places match {pattern!r}, and one is needed")
    file.write_text(text)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python tools/release.py VERSION", file=sys.stderr)
        return 2
    try:
        check(arguments[0])
        cut(arguments[0], datetime.now(timezone.utc).date().isoformat())
    except NotReady as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments[0]} is cut: look at `git diff`, then go on with docs/releasing.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
