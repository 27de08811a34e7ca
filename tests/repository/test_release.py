"""What a public repository has besides code: workflows, templates, a citation, and how a release is cut."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import xrlflow
from tools import release
from tools.release import NotReady

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def jobs(workflow: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


def commands(workflow: Path) -> list[str]:
    return [step["run"] for job in jobs(workflow).values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(workflow: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = [word for line in commands(workflow) if line.startswith("make ") for word in line.split()[1:]]
    assert called
    assert {
        word for word in called if "=" not in word and not word.startswith(("$", "{", "}", "matrix"))
    } <= targets
    for job in jobs(workflow).values():
        assert job["timeout-minutes"] <= 120
        assert all(re.search(r"@v\d+$", step["uses"]) for step in job["steps"] if "uses" in step)


def test_every_python_is_tested() -> None:
    (matrix,) = (job["strategy"]["matrix"] for job in jobs(WORKFLOWS[0]).values() if "strategy" in job)
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert {"make test", "make test-python PY=${{ matrix.python }}"} <= set(commands(WORKFLOWS[0]))


def test_every_night_has_the_newest_runtime_and_all_proofs() -> None:
    assert {"make test-all", "make proofs", "make test-newest PYTHON=python3.13", "make coverage"} <= set(
        commands(WORKFLOWS[1])
    )


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues(form: Path) -> None:
    read = yaml.safe_load(form.read_text())
    assert read.keys() == {"name", "description", "labels", "body"}
    fields = read["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in fields)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == xrlflow.__version__ == release.version()
    assert citation["license"] == re.search(r'^license = "(.+)"', PYPROJECT, re.MULTILINE)[1]
    assert 'version = { attr = "xrlflow.__version__" }' in PYPROJECT
    released = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[1] == xrlflow.__version__


# --- cutting a release ---

CHANGELOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.1.0\n\n- All.\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with what a release writes, all of it committed."""
    (tmp_path / "xrlflow").mkdir()
    (tmp_path / "xrlflow" / "__init__.py").write_text('"""x."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "pyproject.toml").write_text('Repository = "https://forge.example/somebody/xrlflow"\n')
    shutil.copy(ROOT / "CITATION.cff", tmp_path)
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
    for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "-m", "All"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


def test_a_release_is_cut(checkout: Path) -> None:
    release.check("0.2.0", checkout)
    release.cut("0.2.0", "2026-12-01", checkout)
    assert release.version(checkout) == "0.2.0"
    assert (checkout / "CHANGELOG.md").read_text() == CHANGELOG.replace(
        "## Unreleased\n", "## Unreleased\n\n## 0.2.0 (2026-12-01)\n"
    )
    citation = yaml.safe_load((checkout / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == ("0.2.0", "2026-12-01")
    commit(checkout)
    with pytest.raises(NotReady, match="nothing is listed"):  # all of it is in the section of 0.2.0
        release.check("0.3.0", checkout)


@pytest.mark.parametrize(
    ("new", "match"), [("0.2", "three numbers"), ("v0.2.0", "three numbers"), ("0.1.0", "is not after 0.1.0")]
)
def test_a_version_that_is_none(checkout: Path, new: str, match: str) -> None:
    with pytest.raises(NotReady, match=match):
        release.check(new, checkout)


def test_the_tenth_version_is_after_the_ninth(checkout: Path) -> None:
    (checkout / "xrlflow" / "__init__.py").write_text('__version__ = "0.9.0"\n')
    with pytest.raises(NotReady, match=r"not committed:\n M xrlflow/__init__\.py"):
        release.check("0.10.0", checkout)


def test_a_release_has_an_address(checkout: Path) -> None:
    (checkout / "pyproject.toml").write_text('Repository = "https://forge.example/OWNER/xrlflow"\n')
    with pytest.raises(NotReady, match="in the place of OWNER"):
        release.check("0.2.0", checkout)


def test_a_file_without_the_place_of_the_version(checkout: Path) -> None:
    (checkout / "CITATION.cff").write_text("title: xrlflow\n")
    with pytest.raises(NotReady, match=r"CITATION\.cff: 0 places match"):
        release.cut("0.2.0", "2026-12-01", checkout)
