"""The benchmark of orders of passes: its rows, its figures and its picture, on one tiny module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("jax")

from bench import passes
from models import hlo
from tests.passes.toy import Words
from xrlflow.passes import Comparison, CompilerError
from xrlflow.passes.agent import AgentConfig, random_agent
from xrlflow.passes.dqn import DQNConfig
from xrlflow.passes.ppo import TrainConfig

pytestmark = pytest.mark.learns

NAMES = ("gpt2-2-training", "bert-2-training")


class Named(Words):
    """The toy under the names of the benchmark's modules, with the passes that inline calls."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__(wrong)
        self.passes = (*self.passes, "flatten-call-graph", "call-inliner")

    def apply(self, module, name):  # type: ignore[no-untyped-def]
        return super().apply(module, "idle" if name in ("flatten-call-graph", "call-inliner") else name)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Named:
    words = dict(zip(NAMES, ("dbbd", "bbaad")))
    monkeypatch.setattr(hlo, "text", words.__getitem__)
    monkeypatch.setattr(hlo, "inputs", lambda name, seed: ())
    return Named()


@pytest.mark.whole
def test_quick_gives_the_figures_of_the_issue(compiler: Named) -> None:
    found = json.loads(json.dumps(passes.quick(compiler, None, NAMES, steps=300, seeds=2)))
    assert found["gpt2_training"] == pytest.approx(1 - 3 / 4)
    # "bbaad" is "bbad" after the default order, and "ad" at best.
    assert found["overall"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert 0 <= found["random_gpt2_training"] <= found["gpt2_training"]
    assert found["all_equal"] is True
    assert found["method"] == "evolution"


@pytest.mark.whole
def test_a_step_that_changes_what_is_computed_counts_for_nothing(compiler: Named) -> None:
    found = passes.quick(Named(wrong=True), None, NAMES, steps=300, seeds=1)
    assert found["all_equal"] is True
    assert found["refused"] >= 2
    assert found["gpt2_training"] == pytest.approx(1 - 3 / 4)


def test_a_difference_is_told(compiler: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the inputs of the benchmark, which the search has not seen; and XLA's own order is compared, too."""

    def differs(reference: object, module: object, seed: int = 0, inputs: object = ()) -> Comparison:
        return Comparison(inputs == () or module == reference, 0.0, 1.0, "output 0: an e")

    monkeypatch.setattr(compiler, "compare", differs)
    found = passes.quick(compiler, None, NAMES, steps=100, seeds=1)
    assert found["all_equal"] is False
    assert found["default_equal"] is False
    rows = passes.searches(compiler, NAMES[1:], ["greedy"], 1, 40, passes.Tools(), passes.Kept())
    wrong = [{**row, "equal": True} for row in rows]
    assert "| 4 (computes something else) |" in passes.modules_table(wrong)


def test_an_order_that_cannot_be_compared_is_not_equal(
    compiler: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise CompilerError("no inputs")

    monkeypatch.setattr(compiler, "compare", refuse)
    (row,) = passes.searches(compiler, NAMES[:1], ["greedy"], 1, 20, passes.Tools(), passes.Kept())
    assert (row["equal"], row["difference"]) == (False, "no inputs")


def test_kept_rows_are_not_made_again(compiler: Named, tmp_path: Path) -> None:
    def rows() -> list[passes.Row]:
        kept = passes.Kept(tmp_path / "rows.json")
        return passes.searches(compiler, NAMES, ["random", "greedy"], 2, 40, passes.Tools(), kept)

    first = rows()
    steps = compiler.steps
    assert rows() == first
    assert compiler.steps == steps
    assert len(first) == 6  # greedy draws nothing: one seed is enough


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows"
    passes.Kept(path).put("a", {"n": 1})
    with path.open("a") as file:
        file.write('["b", {"n"')
    kept = passes.Kept(path)
    assert kept.rows == {"a": {"n": 1}}
    assert "cut off" in capsys.readouterr().err
    kept.put("c", {"n": 3})
    assert passes.Kept(path).rows == {"a": {"n": 1}, "c": {"n": 3}}


def test_the_reducing_passes_are_a_control(compiler: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = passes.Tools(fixed=("open", "merge", "drop", "merge"), reducing=("merge", "open", "drop"))
    methods = ["reducing", "fixed", "greedy"]
    rows = passes.searches(compiler, NAMES, methods, 1, 100, tools, passes.Kept())
    by = {(r["module"], r["method"]): r for r in rows}
    assert by[NAMES[0], "reducing"]["operations"] == 3
    assert by[NAMES[0], "reducing"]["steps"] == 0
    assert by[NAMES[0], "greedy"]["operations"] == 4
    module = compiler.load(hlo.text(NAMES[0]))
    assert passes.result(compiler, module, by[NAMES[0], "reducing"]).digest == "dad"
    assert passes.over_reducing(rows, "fixed", NAMES) == pytest.approx((0 + 1 - 3 / 2) / 2)
    assert passes.over_reducing(rows, "greedy", NAMES[:1]) == pytest.approx(1 - 4 / 3)
    # Of equals, the one without steps is the best.
    assert "| reducing | merge, open, drop |" in passes.modules_table(rows)
    kept = passes.Kept()
    assert set(passes.reducing_passes(compiler, NAMES[:1], kept)) == {"merge", "open", "drop"}
    monkeypatch.setattr(compiler, "load", None)
    assert set(passes.reducing_passes(compiler, NAMES[:1], kept)) == {"merge", "open", "drop"}


def test_what_agents_learn_stands_beside_the_controls(
    compiler: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(iterations: int, steps: int) -> dict[str, TrainConfig | DQNConfig]:
        agent = AgentConfig(width=16, horizon=6)
        return {
            "PPO, all": TrainConfig(iterations, steps, evaluate_every=1, agent=agent),
            "DQN, all": DQNConfig(iterations * steps, evaluate_every=iterations * steps, agent=agent),
        }

    monkeypatch.setattr(passes, "variants", few)
    chosen = [(variant, seed) for variant in few(1, 8) for seed in range(2)]
    kept = passes.Kept()
    rows = passes.learning(compiler, chosen, NAMES[:1], NAMES[1:], 2, 16, kept)
    assert passes.learning(compiler, chosen, NAMES[:1], NAMES[1:], 2, 16, kept) == rows
    assert [(r["variant"], r["seed"]) for r in rows] == chosen
    assert all(r["left"].keys() == set(NAMES) for r in rows)
    tools = passes.Tools(fixed=("open", "merge", "drop", "merge"), reducing=("merge", "open", "drop"))
    beside = passes.controls(compiler, NAMES, tools, kept)
    default = passes.defaults(compiler, NAMES, kept)
    assert default == {NAMES[0]: 4, NAMES[1]: 4}
    table = passes.learning_table([*beside, *rows], default, NAMES[:1], NAMES[1:])
    assert "| reducing (control) | 1 | 25.0% | 50.0% | 0 | 0 | 2 of 2 |" in table
    assert "| DQN, all | 2 | " in table
    # An iteration of half as many steps twice is another run, though it has as many steps in all.
    assert passes.learning(compiler, chosen[:1], NAMES[:1], NAMES[1:], 4, 8, kept) != rows[:1]
    old = [{k: v for k, v in row.items() if k != "equal"} for row in rows]
    assert "| not compared |" in passes.learning_table(old, default, NAMES[:1], NAMES[1:])


def test_an_agents_wrong_result_counts_for_nothing(compiler: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compare", lambda *given: Comparison(False, 0.0, 1.0, "output 0"))
    tools = passes.Tools(fixed=("open", "merge", "drop", "merge"), reducing=("merge", "open", "drop"))
    for row in passes.controls(compiler, NAMES, tools, passes.Kept()):
        assert row["equal"] == dict.fromkeys(NAMES, False)
        assert row["left"] == {NAMES[0]: 4, NAMES[1]: 5}
    rows = passes.searches(compiler, NAMES, ["reducing"], 1, 40, tools, passes.Kept())
    assert passes.mean_less(rows, "reducing", NAMES) == 0.0
    assert passes.over_reducing(rows, "reducing", NAMES) == 0.0
    assert "| reducing | 0.0% |" in passes.searches_table(rows)
    assert "| reducing | 0.0% |" in passes.steps_table(rows)


def test_rows_of_another_agent_or_sequence_are_not_taken(compiler: Named, tmp_path: Path) -> None:
    def row(tools: passes.Tools, method: str) -> passes.Row:
        kept = passes.Kept(tmp_path / "rows")
        return passes.searches(compiler, NAMES[:1], [method], 1, 40, tools, kept)[0]

    sequences = [("merge",), ("open", "merge", "drop", "merge")]
    for passed in (*sequences, *sequences):
        assert (
            row(passes.Tools(fixed=passed), "fixed")["of"] == row(passes.Tools(fixed=passed), "fixed")["of"]
        )
        assert row(passes.Tools(fixed=passed), "fixed")["operations"] == (4 if passed == ("merge",) else 3)
    first, second = (random_agent(compiler, AgentConfig(width=8), seed) for seed in range(2))
    assert row(passes.Tools(first), "zero-shot")["of"] != row(passes.Tools(second), "zero-shot")["of"]
    # A row of an earlier version does not say what made it.
    kept = passes.Kept(tmp_path / "rows")
    kept.put("old", {"n": 1})
    assert kept.of("old", "anything") == {"n": 1}


def test_no_row_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["bench/passes.py", "searches", NAMES[0], NAMES[0], "--methods", "greedy,random,greedy"]
    monkeypatch.setattr("sys.argv", given)
    options = passes.arguments()
    assert options.names == NAMES[:1]
    assert options.methods == ["greedy", "random"]
    monkeypatch.setattr("sys.argv", [*given, "--seeds", "0"])
    with pytest.raises(SystemExit):
        passes.arguments()


def test_a_table_says_how_many_modules_it_has(compiler: Named) -> None:
    rows = passes.searches(compiler, NAMES, ["greedy"], 1, 40, passes.Tools(), passes.Kept())
    head = passes.searches_table(rows).splitlines()[0]
    assert "gpt2 training (1 of 4)" in head
    assert "all (2 of 30), calls inlined" in head


@pytest.mark.whole
def test_tables(compiler: Named) -> None:
    rows = passes.searches(compiler, NAMES, ["random", "beam"], 2, 300, passes.Tools(), passes.Kept())
    table = passes.searches_table(rows)
    assert "| gpt2 training (1 of 4) |" in table
    assert "| beam | 25.0% |" in table
    assert "4 of 4" in table
    by_module = passes.modules_table(rows)
    assert "| gpt2-2-training | 4 | 4 | 4 | 3 | 25.0% |" in by_module
    assert "open, merge, drop, merge" in by_module
    times = passes.times(compiler, rows, pairs=20)
    assert "1.333 [1.333, 1.333] | 1.000 [1.000, 1.000]" in passes.times_table(times)


def test_the_picture_of_an_episode() -> None:
    drawn = passes.picture("An episode", [5, 7, 3], ["open", "drop"], 4)
    assert drawn.startswith("<svg")
    for word in ("An episode", "start", "open", "drop", "XLA's order: 4".replace("'", "&#x27;")):
        assert word in drawn


def test_variants_differ_in_what_they_are_named_for() -> None:
    found = passes.variants(10, 64)
    everything = found["PPO, all"]
    assert isinstance(everything, TrainConfig)
    assert everything.plain() == found["PPO"]
    assert len({repr(c) for c in found.values()}) == len(found)
