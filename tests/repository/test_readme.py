"""What README shows: its commands exist or run, and its report is the one that is printed.

`test_documented` runs the commands `xrlflow ...` and the Python of README, as of all pages.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import onnx
import pytest
import typer
from typer.testing import CliRunner

from models.__main__ import main as models
from rewrite_rules import LIBRARY
from tests.report.pages import measured, optimised
from tests.repository.test_docs import ROOT
from tests.repository.test_documented import RUN, blocks
from xrlflow.cli import app
from xrlflow.report import show

README = ROOT / "README.md"
TEXT = README.read_text()
PLAIN = [text for language, text in blocks(README) if not language]
(SHOWN,) = (text for text in PLAIN if text.startswith("operator "))
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


def lines() -> list[str]:
    """The commands of the blocks, without comments."""
    typed = "".join(text for text in PLAIN if text != SHOWN).splitlines()
    return [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in typed) if line]


def is_checked(line: str) -> bool:
    """Whether a command is one that a test runs, a target of the Makefile, or an installation of what there is."""
    words = shlex.split(line)
    if words[:1] == ["make"]:
        return re.search(rf"^{words[1]}:", MAKEFILE, re.MULTILINE) is not None
    if words[:2] == ["pip", "install"]:
        return (
            re.fullmatch(r"\.(\[(\w+)\])?", words[2]) is not None
            and set(re.findall(r"\w+", words[2])) <= EXTRAS
        )
    return line in {command.strip() for command in RUN}


def test_every_command_is_checked() -> None:
    assert len(lines()) >= 6
    assert [line for line in lines() if not is_checked(line)] == []


@pytest.mark.parametrize(
    "line", ["make nothing", "pip install '.[nothing]'", "pip install nothing", "xrlflow no"]
)
def test_a_command_that_is_none(line: str) -> None:
    assert not is_checked(line)


def test_options_and_commands_in_the_text_exist() -> None:
    """Those without a command are options of `optimize`."""
    program = typer.main.get_command(app)
    code = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL))
    named = {words[1] for words in map(str.split, code) if words[0] == "xrlflow" and len(words) > 1}
    assert {"optimize", "rules"} <= named <= program.commands.keys()
    known = {option for parameter in program.commands["optimize"].params for option in parameter.opts}
    options = {words[0] for words in map(str.split, code) if words[0].startswith("--")}
    assert {"--report", "--portable", "--opset"} <= options <= known


def test_the_report_is_the_one_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show.optimization(measured(optimised("small")).report, "out.onnx")
    printed = capsys.readouterr().out
    _, substitutions, summary, _ = SHOWN.split("\n\n")
    rules = {line.split()[0] for line in substitutions.splitlines()[1:]} - {"..."}
    assert rules
    assert rules <= {rule.name for rule in LIBRARY}
    labels = [re.split("  +", line)[0] for line in summary.splitlines()]
    assert len(labels) >= 5
    assert [name for name in labels if not re.search(rf"^{re.escape(name)}  ", printed, re.MULTILINE)] == []
    explained = re.findall(r"^- \*([^*]+)\*", TEXT, re.MULTILINE)
    assert len(explained) >= 5
    assert [
        name for name in explained if not re.search(rf"^{re.escape(name)}\b", printed, re.MULTILINE)
    ] == []


def test_the_demo_begins_with_as_many_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (operators,) = re.findall(r"unrolled into (\d+) operators", TEXT)
    assert re.search(rf"^all +{operators} ", SHOWN, re.MULTILINE)
    monkeypatch.setattr("sys.argv", ["models", "build", "lstm-unrolled", "-o", str(tmp_path / "m.onnx")])
    models()
    assert len(onnx.load(tmp_path / "m.onnx").graph.node) == int(operators)


def test_there_are_as_many_rules() -> None:
    (least,) = re.findall(r"more than (\d+) rules", TEXT)
    ran = CliRunner().invoke(app, ["rules", "--json"])
    assert ran.exit_code == 0
    assert ran.output.count('"equation"') > int(least)
