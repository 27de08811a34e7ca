"""The functions and commands for files, over the toy compiler in XLA's place."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.levels import whole
from tests.passes.toy import VALLEY, Words
from xrlflow.cli import PASS_METRICS, PASS_SEARCHES, app
from xrlflow.passes import Comparison, CompilerError, Metric, Module, orders
from xrlflow.passes.agent import AgentConfig, random_agent
from xrlflow.storage import files

pytestmark = pytest.mark.learns


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Words:
    compiler = Words()

    @contextmanager
    def toy(workers: int | None = None) -> Iterator[Words]:
        yield compiler

    monkeypatch.setattr(orders, "xla", toy)
    return compiler


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "word.hlo"
    path.write_text(VALLEY)
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["passes", *(str(a) for a in arguments)])


def test_the_command_line_knows_all_searches_and_metrics() -> None:
    assert set(PASS_SEARCHES) == {s.value for s in orders.Search}
    assert set(PASS_METRICS) == {m.value for m in Metric}


def test_list() -> None:
    result = invoke("list", "--json")
    assert {"name", "does"} == json.loads(result.stdout)[0].keys()
    lines = invoke("list").stdout.splitlines()
    assert len(lines) == len(json.loads(result.stdout)) >= 20
    assert lines[0].startswith("algsimp")


@pytest.mark.parametrize("search", whole(["beam", "mcts", "evolution", "random"], ("beam",)))
def test_optimize_writes_the_best_module(words: Words, file: Path, tmp_path: Path, search: str) -> None:
    output = tmp_path / "out.hlo"
    result = invoke("optimize", file, "-o", output, "--search", search, "--horizon", 8, "--json")
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert output.read_text() == "dad"
    assert (outcome["before"], outcome["default"], outcome["after"]) == (4, 4, 3)
    assert outcome["reduction_against_default"] == pytest.approx(0.25)
    assert outcome["outputs_equal"] is True
    assert outcome["passes"] == ["open", "merge", "drop", "merge"]
    message = invoke("optimize", file, "-o", output, "--search", search, "--horizon", 8).stdout
    assert "operations: 4 before, 4 after XLA's order, 3 after this one" in message
    assert "25.0% less" in message
    assert "outputs compared" in message


@pytest.mark.parametrize("search", ["beam", "greedy", "mcts", "evolution", "random", "refined"])
def test_ctrl_c_keeps_the_best_so_far(
    words: Words, file: Path, tmp_path: Path, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pass, done = Words.apply, []

    def interrupted(self: Words, module: Module, name: str) -> Any:
        done.append(name)
        if len(done) == 3:
            raise KeyboardInterrupt
        return run_pass(self, module, name)

    monkeypatch.setattr(Words, "apply", interrupted)
    output = tmp_path / "out.hlo"
    result = invoke("optimize", file, "-o", output, "--search", search, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["interrupted"]
    assert output.exists()


def test_ctrl_c_keeps_the_best_that_computes_the_same(
    words: Words, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words.passes = Words(wrong=True).passes
    run_pass, done = Words.apply, []

    def interrupted(self: Words, module: Module, name: str) -> Any:
        done.append(name)
        if len(done) == 60:
            assert "wrong" in done
            raise KeyboardInterrupt
        return run_pass(self, module, name)

    monkeypatch.setattr(Words, "apply", interrupted)
    result = orders.optimize(file, search=orders.Search.RANDOM, horizon=8)
    assert result.interrupted
    assert result.contents != "e"
    assert result.compared.equal
    assert result.refused


def test_the_compilers_own_order_is_the_result_if_none_is_better(words: Words, tmp_path: Path) -> None:
    (tmp_path / "word").write_text("aaaadddd")
    result = orders.optimize(tmp_path / "word", steps=1)
    assert result.is_default
    assert result.contents == "ad"
    assert result.after == result.default == 2
    assert result.to_json()["default_order"] is True


@pytest.mark.parametrize("search", [s.value for s in orders.WITHOUT_AGENT])
def test_a_step_that_changes_what_is_computed_is_refused(
    words: Words, file: Path, tmp_path: Path, search: str
) -> None:
    """The best order that computes the same is the result, and the step is named."""
    words.passes = Words(wrong=True).passes
    output = tmp_path / "out.hlo"
    result = invoke("optimize", file, "-o", output, "--search", search, "--horizon", 8, "--steps", 400)
    assert result.exit_code == 0
    assert "refused, because it changes what the module computes: wrong after no other pass: output 0" in (
        result.stderr
    )
    assert output.read_text() == ("dbbd" if search == "greedy" else "dad")


def test_steps_that_are_refused_are_in_the_facts_and_in_the_log(
    words: Words, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words.passes = Words(wrong=True).passes
    result = orders.optimize(file, search=orders.Search.BEAM, horizon=8)
    assert "wrong" not in result.order.passes
    assert result.to_json()["refused"] == list(result.refused)
    assert any(line.startswith("wrong after ") for line in result.refused)
    assert "a pass changes what the module computes: wrong after" in caplog.text
    assert result.order.curve[-1][1] == result.after  # what was refused is no improvement


def test_a_result_that_differs_on_other_inputs_is_not_written(
    words: Words, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(reference: Module, module: Module, seed: int = 0, inputs: object = ()) -> Comparison:
        return Comparison(seed == 0 or module == reference, 0.0, 1.0, "output 0: an e")

    monkeypatch.setattr(words, "compare", differs)
    result = invoke("optimize", file, "-o", tmp_path / "out.hlo", "--search", "beam", "--seed", 5)
    assert result.exit_code == 1
    assert "changes what the module computes" in result.stderr
    assert "nothing is written" in result.stderr
    assert not (tmp_path / "out.hlo").exists()


def test_a_wrong_default_order_is_no_result(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "default", lambda module: words.load("e"))
    (tmp_path / "word").write_text("abab")
    result = orders.optimize(tmp_path / "word", steps=5)
    assert not result.is_default
    assert result.contents == "abab"
    assert result.after == 4
    assert result.refused == ("the compiler's own order: output 0: an e",)


def test_measured_seconds_can_be_reduced(words: Words, file: Path) -> None:
    result = orders.optimize(file, metric=Metric.SECONDS, search=orders.Search.RANDOM, horizon=8)
    assert (result.before, result.default, result.after) == (4.0, 4.0, 3.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimize", "{}/none.hlo", "-o", "{}/out"], "none.hlo cannot be read: No such file or directory"),
        (["optimize", "{}/bad.hlo", "-o", "{}/out"], "bad.hlo: column 3: unknown letter 'x'"),
        (["optimize", "{}/word.hlo", "-o", "{}/word.hlo"], "output and file are one file"),
        (["optimize", "{}/word.hlo", "-o", "{}/none/out"], "there is no folder"),
        (["optimize", "{}/word.hlo", "-o", "{}"], "is a folder"),
        (["optimize", "{}/word.hlo", "-o", "{}/out", "--search", "dfs"], "--search dfs: choose one of beam"),
        (
            ["optimize", "{}/word.hlo", "-o", "{}/out", "--metric", "x"],
            "--metric x: choose one of operations",
        ),
        (["optimize", "{}/word.hlo", "-o", "{}/out", "--search", "agent"], "for other passes than words has"),
        (
            ["optimize", "{}/word.hlo", "-o", "{}/out", "--search", "agent", "--agent", "{}/bad.hlo"],
            "no checkpoint, or is damaged",
        ),
        (["train", "{}/bad.hlo", "-o", "{}/agent"], "bad.hlo: column 3"),
        (["train", "{}/word.hlo", "-o", "{}/word.hlo"], "one file"),
        (["train", "{}/word.hlo", "-o", "{}/agent", "--log", "{}/bad.hlo"], "is a file: name a folder"),
        (
            ["train", "{}/word.hlo", "-o", "{}/agent", "--horizon", "1000000000"],
            "horizon is an integer of 1 to",
        ),
        (["optimize", "/dev/zero", "-o", "{}/out"], "/dev/zero cannot be read: it has more than 1000 bytes"),
        (["bench", "{}/bad.hlo"], "bad.hlo: column 3"),
        (["bench", "{}/word.hlo", "--searches", "beam,dfs"], "--searches dfs"),
        *(
            ([command, "{}/word.hlo", *output, "--seed", "1" + 20 * "0"], "a seed is an integer of 0 to")
            for command, output in (
                ("optimize", ["-o", "{}/out"]),
                ("train", ["-o", "{}/agent"]),
                ("bench", ["--searches", "greedy"]),
            )
        ),
        (["bench", "{}/word.hlo", "--searches", ","], "no search is named"),
    ],
)
def test_an_error_is_one_line(
    words: Words, file: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    (file.parent / "bad.hlo").write_text("abx")
    result = invoke(*(a.format(file.parent) for a in arguments))
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("xrlflow: error: ")
    assert message in lines[0]
    assert not (file.parent / "out").exists()


def test_without_jax_the_error_names_the_extra(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "jax" in name else known(name))
    result = invoke("optimize", file, "-o", file.parent / "out")
    assert result.exit_code == 2
    assert "pip install 'xrlflow[xla]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_torch_the_error_names_the_extra(
    words: Words, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else known(name))
    result = invoke("train", file, "-o", file.parent / "agent")
    assert result.exit_code == 2
    assert "agents need torch: install them with `pip install 'xrlflow[train]'`" in result.stderr


@pytest.mark.whole
def test_train_then_optimize_with_the_agent(words: Words, file: Path, tmp_path: Path) -> None:
    agent, output = tmp_path / "agent", tmp_path / "out"
    options = ["--iterations", 12, "--steps", 96, "--horizon", 8, "--seed", 1]
    result = invoke("train", file, "-o", agent, *options, "--log", tmp_path / "log", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["iterations"] == 12
    assert facts["reduction"] == pytest.approx(0.25)
    assert list((tmp_path / "log").iterdir())
    for search in ("agent", "guided", "refined"):
        outcome = invoke(
            "optimize", file, "-o", output, "--search", search, "--agent", agent, "--steps", 60, "--json"
        )
        assert json.loads(outcome.stdout)["after"] == 3
        assert output.read_text() == "dad"


def test_training_goes_on_where_it_was_stopped(words: Words, file: Path, tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    options = ["--steps", 32, "--horizon", 8, "--json"]
    assert (
        json.loads(invoke("train", file, "-o", agent, "--iterations", 2, *options).stdout)["iterations"] == 2
    )
    words.steps = 0
    assert (
        json.loads(invoke("train", file, "-o", agent, "--iterations", 2, *options).stdout)["iterations"] == 2
    )
    assert words.steps == 0
    assert (
        json.loads(invoke("train", file, "-o", agent, "--iterations", 3, *options).stdout)["iterations"] == 3
    )
    assert words.steps > 0
    other = invoke("train", file, "-o", agent, "--iterations", 3, *options, "--seed", 1)
    assert other.exit_code == 2
    assert "agent.training is of a run with other seed: restart, or name another output" in other.stderr
    again = invoke("train", file, "-o", agent, "--iterations", 1, *options, "--seed", 1, "--restart")
    assert json.loads(again.stdout)["iterations"] == 1
    state = tmp_path / "agent.training"
    refused = invoke("train", state, "-o", agent, *options)
    assert "would be overwritten by the state of the training" in refused.stderr


def test_the_default_search_is_that_of_the_shipped_agent_where_it_fits(
    words: Words, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of the package knows XLA's passes, and not those of the toy."""
    output, search = tmp_path / "out", orders.Search
    assert orders.optimize(file, horizon=8).search is search.EVOLUTION
    shipped = tmp_path / "shipped"
    random_agent(words, AgentConfig(width=8, horizon=8)).save(shipped)
    monkeypatch.setattr(orders, "PRETRAINED", shipped)
    assert orders.optimize(file, horizon=8).search is search.REFINED
    assert (
        json.loads(invoke("optimize", file, "-o", output, "--search", "guided", "--json").stdout)["after"]
        == 3
    )
    assert orders.optimize(file, search=search.GREEDY).search is search.GREEDY
    monkeypatch.setattr(orders, "_missing", lambda: ["torch"])
    assert orders.optimize(file, horizon=8).search is search.EVOLUTION
    with pytest.raises(orders.OrderError, match="agents need torch"):
        orders.optimize(file, search=search.AGENT)


def test_a_known_sequence_needs_no_agent(words: Words, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "SEQUENCE", ("open", "merge", "drop", "merge"))
    monkeypatch.setattr(orders, "_missing", lambda: ["torch"])
    result = orders.optimize(file, horizon=8, steps=4)
    assert result.search is orders.Search.REFINED
    assert (result.contents, result.order.steps) == ("dad", 4)
    assert orders.optimize(file, horizon=3, steps=4).order.passes == ()  # the sequence is cut off


def test_what_is_shipped_is_for_xlas_passes() -> None:
    from xrlflow.passes.hlo import OPCODES
    from xrlflow.passes.hlo_passes import PASSES
    from xrlflow.passes.pretrained import PRETRAINED, SEQUENCE

    assert set(SEQUENCE) <= {p.name for p in PASSES}
    agent = orders.load_agent(PRETRAINED)
    assert agent.passes == tuple(p.name for p in PASSES)
    assert agent.opcodes == OPCODES


def test_bench(words: Words, file: Path) -> None:
    result = invoke("bench", file, "--searches", "greedy,beam", "--horizon", 8, "--json")
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert [(r["search"], r["operations"], r["equal"]) for r in table["rows"]] == [
        ("greedy", 4, True),
        ("beam", 3, True),
    ]
    # The toy's seconds are the letters.
    assert table["time"] == pytest.approx([4 / 3] * 3)
    assert table["control"] == pytest.approx([1.0] * 3)
    output = invoke("bench", file, "--searches", "greedy,beam", "--horizon", 8).stdout
    assert "time after XLA's order / after the best: 1.333" in output


def test_bench_compares_the_compilers_own_order(
    words: Words, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "DIFFER" not in invoke("bench", file, "--searches", "greedy").stdout
    monkeypatch.setattr(words, "default", lambda module: words.load("e"))
    output = invoke("bench", file, "--searches", "greedy").stdout.splitlines()[0]
    assert output == "operations: 4 before, 1 after XLA's order; its outputs DIFFER"


def test_a_wrong_result_is_not_the_best_of_a_table(words: Words, file: Path) -> None:
    words.passes = Words(wrong=True).passes
    table = orders.bench(file, searches=[orders.Search.GREEDY], steps=50)
    assert [(r.operations, r.equal, len(r.refused)) for r in table.rows] == [(4, True, 1)]
    assert table.time == pytest.approx((1.0, 1.0, 1.0))


def test_binary_files_are_read_as_bytes(tmp_path: Path) -> None:
    class Binary(Words):
        def load(self, source: str | bytes) -> Module:
            self.got = source
            return super().load("ab")

    compiler = Binary()
    for content in (b"ML\xefR\x00\x01", b"\x08\x96\xff"):
        (tmp_path / "file").write_bytes(content)
        orders.read(compiler, tmp_path / "file")
        assert compiler.got == content
    (tmp_path / "file").write_bytes(b"HloModule m")
    orders.read(compiler, tmp_path / "file")
    assert compiler.got == "HloModule m"


def test_outputs_that_cannot_be_compared_are_an_error(
    words: Words, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(reference: Module, module: Module, seed: int = 0, inputs: object = ()) -> Comparison:
        raise CompilerError("inputs of element type 17 cannot be drawn")

    monkeypatch.setattr(words, "compare", refuse)
    result = invoke("optimize", file, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr == f"xrlflow: error: {file}: inputs of element type 17 cannot be drawn\n"
    assert words.steps == 0  # no search in vain
    assert not (tmp_path / "out").exists()


def test_a_module_that_differs_from_itself_is_an_error(
    words: Words, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(reference: Module, module: Module, seed: int = 0, inputs: object = ()) -> Comparison:
        return Comparison(False, 1.0, 1.0, "output 0: 0.1 instead of 0.7")

    monkeypatch.setattr(words, "compare", differs)
    for command in (["optimize", file, "-o", tmp_path / "out"], ["bench", file]):
        result = invoke(*command)
        assert result.exit_code == 2
        assert f"{file}: two runs of the module differ: output 0: 0.1 instead of 0.7" in result.stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from xrlflow.cli import app;"
        "assert CliRunner().invoke(app, ['passes', '--help']).exit_code == 0;"
        "print([m for m in ('torch', 'jax', 'gymnasium', 'onnx', 'numpy') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_an_agent_for_other_passes(words: Words, file: Path, tmp_path: Path) -> None:
    random_agent(Words(wrong=True), AgentConfig(width=8)).save(tmp_path / "agent")
    result = invoke(
        "optimize", file, "-o", tmp_path / "out", "--search", "agent", "--agent", tmp_path / "agent"
    )
    assert result.exit_code == 2
    assert "the agent is for other passes than words has: wrong" in result.stderr
