"""Which rules an optimisation uses: some left out, some alone, rules of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.testing import CliRunner

import xrlflow
from tests.rules.harness import model
from xrlflow.api import OptionError, list_rules, prove_rules
from xrlflow.cli import app
from xrlflow.cost import Roofline
from xrlflow.options import Options
from xrlflow.pipeline.library import library_for

pytestmark = pytest.mark.measures

HEAD = """
from xrlflow.rewrite import Rule


class {name}(Rule):
    \"\"\"{equation}.\"\"\"

    shapes = "x[...]:float"

    def source(self, op, x):
        return {source}

    def target(self, op, x):
        return {target}


RULES = ({name}(),)
"""
SOURCE = "op.Neg(op.Add(op.Neg(x), op.Neg(x)))"
RIGHT = HEAD.format(name="MySum", equation="-(-x + -x) -> x + x", source=SOURCE, target="op.Add(x, x)")
WRONG = HEAD.format(name="MySum", equation="-(-x + -x) -> x", source=SOURCE, target="x")


def sums() -> onnx.ModelProto:
    return model("agraph (float[N,4] x) => (float[N,4] y) { a = Neg(x) b = Neg(x) c = Add(a, b) y = Neg(c) }")


def optimize(**options: Any) -> xrlflow.Result:
    return xrlflow.optimize(
        sums(), search="greedy", cost=Roofline(), measure=False, threads=1, time_limit=20.0, **options
    )


def write(folder: Path, content: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(content)
    return folder / name


def test_a_rule_of_ones_own_is_proven_and_used(tmp_path: Path) -> None:
    result = optimize(rules=write(tmp_path, RIGHT), only=["MySum"])
    assert [(s.rule, s.family) for s in result.trace] == [("MySum", "mine")]
    assert [n.op_type for n in result.model.graph.node] == ["Add"]
    assert result.report.verified
    assert optimize(rules=write(tmp_path, RIGHT), only=["mine"]).trace == result.trace


def test_a_wrong_rule_is_refused_and_if_it_is_trusted_found_out(tmp_path: Path) -> None:
    file = write(tmp_path, WRONG)
    with pytest.raises(OptionError, match=r"mine\.py: MySum is not proven"):
        optimize(rules=file)
    trusted = optimize(rules=file, only=["MySum"], trust_rules=True)
    assert any(note.startswith("MySum was taken back: the models differ") for note in trusted.report.notes)
    assert not trusted.trace


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("RULES = (", "SyntaxError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("", "has no attribute 'RULES'"),
        ("RULES = (1,)", "RULES has 1, which is no rule"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (RIGHT.replace("return op.Neg(op.Add(op.Neg(x), op.Neg(x)))", "return 1 / 0"), "ZeroDivisionError"),
        (
            RIGHT.replace("return op.Neg(op.Add(op.Neg(x), op.Neg(x)))", "return op.either()"),
            "choice of nothing",
        ),
        (RIGHT.replace("MySum", "CancelTransposes"), "the library has a rule CancelTransposes"),
        (RIGHT.replace("(MySum(),)", "(MySum(), MySum())"), "two rules are called MySum"),
    ],
)
def test_a_file_that_is_no_module_of_rules(content: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"mine\.py") as caught:
        optimize(rules=write(tmp_path, content))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_and_families_are_left_out_or_used_alone() -> None:
    everything = library_for(Options()).rules
    family = everything["CancelTransposes"].family
    of_family = {name for name, rule in everything.items() if rule.family == family}
    assert set(library_for(Options(only=[family])).rules) == of_family
    assert set(library_for(Options(exclude=[family])).rules) == everything.keys() - of_family
    assert set(library_for(Options(only=[family], exclude=["CancelTransposes"])).rules) == of_family - {
        "CancelTransposes"
    }


def test_names_are_a_list() -> None:
    with pytest.raises(OptionError, match="only is a text, 'CancelTransposes': give a list"):
        optimize(only="CancelTransposes")


@pytest.mark.parametrize("option", ["only", "exclude"])
def test_names_that_are_not_known(option: str) -> None:
    with pytest.raises(
        OptionError, match=f"{option}: there is no rule or family 'CancelTransposs': did you mean"
    ):
        optimize(**{option: ["CancelTransposs"]})


def test_rules_of_ones_own_are_listed_and_proven(tmp_path: Path) -> None:
    file = write(tmp_path, RIGHT)
    assert [r["name"] for r in list_rules(own=file)] == ["MySum"]
    (certificate,) = prove_rules(own=file)
    assert certificate.proven
    ran = CliRunner().invoke(app, ["rules", "--prove", "--rules", str(write(tmp_path, WRONG))])
    assert ran.exit_code == 1
    missing = CliRunner().invoke(app, ["rules", "--rules", str(tmp_path / "no.py")])
    assert missing.exit_code == 2
    assert "no.py is no file" in missing.stderr


def test_the_agent_takes_rules_that_it_does_not_know(tmp_path: Path) -> None:
    result = xrlflow.optimize(
        sums(), rules=write(tmp_path, RIGHT), only=["mine"], cost=Roofline(), measure=False, time_limit=30.0
    )
    assert [s.rule for s in result.trace] == ["MySum"]


def test_the_command_line_takes_them(tmp_path: Path) -> None:
    source, output = tmp_path / "m.onnx", tmp_path / "fast.onnx"
    onnx.save(sums(), source)
    options = ["--only", "mine", "--rules", str(write(tmp_path, RIGHT)), "--cost", "roofline", "--no-measure"]
    ran = CliRunner().invoke(
        app, ["optimize", str(source), "-o", str(output), "--search", "greedy", *options]
    )
    assert ran.exit_code == 0, ran.output
    assert [n.op_type for n in onnx.load(output).graph.node] == ["Add"]
