"""Curricula: what is drawn, how it is split, and that workers can be given one."""

from __future__ import annotations

import functools
import pickle
from dataclasses import replace

import pytest
import torch

import models
from models.rule_graphs import rule_graph
from models.valleys import FAMILIES, WIDE, Valley
from rewrite_rules import LIBRARY
from xrlflow.cost import Machine, Roofline
from xrlflow.ir import Graph
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rl.agent import Agent
from xrlflow.rl.curriculum import Curriculum, CurriculumError, Problems, Source, mixed, split
from xrlflow.rl.env import EnvConfig, Problem, RewriteEnv
from xrlflow.rl.features import Vocabulary
from xrlflow.rl.parameters import AgentConfig
from xrlflow.rl.situation import choices
from xrlflow.rl.train import TrainConfig, train

pytestmark = pytest.mark.learns


def zoo(name: str) -> Graph:
    return load(models.small(name)).graph


def valley(family: str, depth: int, width: int, seed: int) -> Graph:
    return load(Valley(FAMILIES[family], depth, width, seed).model()).graph


def wide() -> Machine:
    return WIDE


SOURCES = (
    Source("squeezenet", "zoo", functools.partial(zoo, "squeezenet")),
    *(
        Source(f"rules-{seed}", "rules", functools.partial(rule_graph, LIBRARY, seed, 2), scrambled=2)
        for seed in range(6)
    ),
    *(
        Source(
            f"groups-{seed}", "valleys", functools.partial(valley, "wide-groups", 1, 2, seed), machine=wide
        )
        for seed in range(3)
    ),
)


def fails() -> Graph:
    raise AssertionError("it was built")


def test_a_split_depends_on_the_name_alone() -> None:
    many = [Source(f"s{i}", "g", fails) for i in range(400)]
    train, held_out = split(many, 0.2)
    assert {*train, *held_out} == {*many}
    assert 50 < len(held_out) < 110
    again, other = split(many[::-2], 0.2)
    assert {*again} <= {*train}
    assert {*other} <= {*held_out}
    assert split(many, 0.0) == (tuple(many), ())


def test_groups_are_drawn_in_their_shares() -> None:
    many = [Source(f"{g}{i}", g, fails) for g in "ab" for i in range(100)]
    drawn = mixed(many, {"a": 3, "b": 1}, 40, seed=1)
    assert sum(s.group == "a" for s in drawn) == 30
    assert len({*drawn}) == 40
    assert drawn == mixed(many, {"a": 3, "b": 1}, 40, seed=1)
    assert drawn != mixed(many, {"a": 3, "b": 1}, 40, seed=2)
    assert len(mixed(many, {"a": 1}, 1000)) == 100


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(CurriculumError, match="'c'"):
        mixed([Source("x", "a", fails)], {"c": 1}, 4)
    with pytest.raises(CurriculumError, match="positive"):
        mixed([Source("x", "a", fails)], {"a": 0}, 4)
    with pytest.raises(CurriculumError, match="between"):
        split((), 2.0)
    one = Source("x", "a", fails)
    with pytest.raises(CurriculumError, match="nothing"):
        Curriculum((), (), LIBRARY)
    with pytest.raises(CurriculumError, match="two sources"):
        Curriculum((one, one), (), LIBRARY)
    with pytest.raises(CurriculumError, match="held out"):
        Curriculum((one,), (one,), LIBRARY)
    with pytest.raises(CurriculumError, match="kept"):
        Curriculum((one,), (), LIBRARY, kept=0)


def test_nothing_is_built_before_it_is_asked_for() -> None:
    curriculum = Curriculum((Source("x", "a", fails), SOURCES[0]), (Source("y", "a", fails),), LIBRARY)
    task = curriculum(Vocabulary.of(curriculum.library()))
    assert len(task.problems) == 2
    assert task.problems[1].name == "squeezenet"
    assert task.problems[-1] is task.problems[1]
    assert isinstance(task.problems, Problems)
    with pytest.raises(AssertionError, match="built"):
        task.problems[0]
    with pytest.raises(IndexError):
        task.problems[2]


def test_what_was_asked_for_last_is_kept() -> None:
    built = []

    def make(source: Source) -> Problem:
        built.append(source.name)
        return Problem(source.name, RewriteState.start(source.build(), Library(())), 1.0)

    problems = Problems(SOURCES[1:5], make, kept=2)
    names = [problems[i].name for i in (0, 1, 0, 2, 0, 1)]
    assert names == ["rules-0", "rules-1", "rules-0", "rules-2", "rules-0", "rules-1"]
    assert built == ["rules-0", "rules-1", "rules-2", "rules-1"]


def test_problems_are_those_of_their_machines() -> None:
    curriculum = Curriculum(SOURCES, (), LIBRARY)
    task = curriculum(Vocabulary.of(curriculum.library()))
    groups = next(p for p in task.problems if p.name == "groups-0")
    assert groups.cost == pytest.approx(Roofline(WIDE).cost(groups.state.graph))
    assert groups.cost != pytest.approx(Roofline().cost(groups.state.graph))
    env = RewriteEnv(task.problems, task.observe, EnvConfig(horizon=5))
    changing = [p for p in task.problems if choices(p.state, {p.state.fingerprint})]
    of_rules = next(p.name for p in changing if p.name.startswith("rules-"))
    for name in ("squeezenet", of_rules, "groups-0"):
        problem = next(p for p in changing if p.name == name)
        _, info = env.reset(seed=0, options={"problem": name})
        assert info["initial"] == problem.cost
        successor = problem.state.apply(choices(problem.state, {problem.state.fingerprint})[0])
        *_, info = env.step(0)
        # What is modelled of a step is what the graph costs afterwards, on the problem's own machine.
        machine = WIDE if name == "groups-0" else Machine.reference()
        assert info["cost"] == pytest.approx(Roofline(machine).cost(successor.graph))


def test_rules_can_be_off_for_a_source() -> None:
    off = frozenset({"MergeGroupConv"})
    sources = (SOURCES[-1], replace(SOURCES[-1], name="without", without=off))
    curriculum = Curriculum(sources, (), LIBRARY)
    task = curriculum(Vocabulary.of(curriculum.library()))
    with_it, without = ({m.rule.name for m in p.state.candidates} for p in task.problems)
    assert with_it - without == off


def test_scrambling_is_the_same_in_every_process() -> None:
    made = []
    for _ in range(2):
        curriculum = pickle.loads(pickle.dumps(Curriculum(SOURCES, (), LIBRARY, seed=3)))
        task = curriculum(Vocabulary.of(curriculum.library()))
        made.append({p.name: p.state.fingerprint for p in task.problems})
    assert made[0] == made[1]
    plain = Curriculum(tuple(replace(s, scrambled=0) for s in SOURCES), (), LIBRARY)
    task = plain(Vocabulary.of(plain.library()))
    assert sum(p.state.fingerprint != made[0][p.name] for p in task.problems) >= 3


def test_an_agent_is_trained_on_it() -> None:
    torch.set_num_threads(1)
    curriculum = Curriculum(SOURCES[1:4], SOURCES[7:8], LIBRARY)
    vocabulary = Vocabulary.of(curriculum.library())
    config = TrainConfig(
        iterations=1, steps=24, workers=0, environments=2, env=EnvConfig(horizon=6),
    )  # fmt: skip
    trained = train(curriculum, vocabulary, config)
    assert isinstance(trained.agent, Agent)
    assert trained.agent.config == AgentConfig()
    assert [o.problem for o in trained.score.outcomes] == ["groups-0"]
    assert trained.steps >= 24
