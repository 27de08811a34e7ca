"""Episodes over both compilers: rewards, masks, checks, Gymnasium's own checker."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import pytest
from gymnasium.utils.env_checker import check_env

import models
from rewrite_rules import LIBRARY
from tests.passes.snippets import SNIPPETS
from xrlflow.passes import Applied, Comparison, Compiler, CompilerError, Metric, Module, ModuleGraph, Summary
from xrlflow.passes.compiler import Arrays
from xrlflow.passes.environment import (
    Check,
    Configuration,
    EpisodeError,
    Masking,
    PassEnv,
    Problem,
    SemanticsError,
    first_difference,
)
from xrlflow.passes.rules import RuleCompiler
from xrlflow.rewrite import Library

pytestmark = pytest.mark.process


class Halving:
    """A compiler of numbers: "halve" halves an even one, "break" adds one, "fail" fails. A number is its operations."""

    name = "halving"
    passes = ("halve", "break", "fail")
    opcodes = ("one",)

    def __init__(self) -> None:
        self.measured: list[tuple[str, ...]] = []

    def load(self, source: str | bytes) -> Module:
        number = int(source)
        return Module(
            str(number),
            str(number).encode(),
            Summary(number, 2.0 * number, 0.0, (("one", number),), (number,)),
        )

    def write(self, module: Module) -> str:
        return module.data.decode()

    def apply(self, module: Module, name: str) -> Applied:
        number = int(module.data)
        match name:
            case "halve" if number % 2 == 0:
                return Applied(self.load(str(number // 2)), True)
            case "break":
                return Applied(self.load(str(number + 1)), True)
            case "fail":
                return Applied(module, False, "it always fails")
        return Applied(module, False)

    def apply_each(self, module: Module, names: Sequence[str]) -> list[Applied]:
        return [self.apply(module, name) for name in names]

    def default(self, module: Module, names: Sequence[str] | None = None) -> Module:
        return module

    def graph(self, module: Module) -> ModuleGraph:
        count = int(module.data)
        return ModuleGraph(
            np.zeros(count, np.int64),
            np.ones((count, 6), np.float32),
            np.stack([np.arange(count - 1), np.arange(1, count)]),
            np.zeros(count - 1, np.int64),
        )

    def compare(
        self, reference: Module, module: Module, seed: int = 0, inputs: Sequence[Arrays] = ()
    ) -> Comparison:
        odd = int(module.data) % 2 == 1
        return Comparison(not odd, float(odd), 1.0, "odd" if odd else None)

    def seconds(
        self, modules: Sequence[Module], repetitions: int = 20, seed: int = 0
    ) -> list[tuple[float, ...]]:
        self.measured.append(tuple(m.digest for m in modules))
        return [(float(m.data),) * repetitions for m in modules]


def halving(configuration: Configuration | None = None, *numbers: int) -> PassEnv:
    compiler = Halving()
    problems = [Problem(str(n), compiler.load(str(n))) for n in numbers or (24,)]
    return PassEnv(compiler, problems, configuration or Configuration())


HALVE, BREAK, FAIL, STOP = range(4)


@cache
def rules() -> RuleCompiler:
    return RuleCompiler(Library(LIBRARY))


@cache
def squeezenet() -> Module:
    return rules().load(models.small("squeezenet").SerializeToString())


def test_an_episode() -> None:
    env = halving(Configuration(horizon=6))
    observation, information = env.reset(seed=0)
    assert information["trace"] == ()
    assert information["initial"] == 24
    total = 0.0
    for action, left, reward in ((HALVE, 12, 0.5), (FAIL, 12, 0.0), (HALVE, 6, 0.25), (BREAK, 7, -1 / 24)):
        observation, got, terminated, truncated, information = env.step(action)
        assert got == pytest.approx(reward)
        assert information["value"] == left
        assert information["error"] == ("it always fails" if action == FAIL else None)
        assert information["changed"] is (action != FAIL)
        assert not terminated
        assert not truncated
        total += got
    assert information["best"].digest == "6"
    assert total == pytest.approx((24 - 7) / 24)
    assert observation["figures"][3:5] == pytest.approx([7 / 24, 2 / 6])
    assert observation["history"].tolist() == [BREAK, HALVE, FAIL, HALVE, 3, 3, 3, 3]
    assert observation["applied"] == pytest.approx(np.log2([3, 2, 2]))
    _, reward, terminated, truncated, information = env.step(STOP)
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert information["trace"] == ("halve", "fail", "halve", "break")
    with pytest.raises(EpisodeError, match="call reset"):
        env.step(STOP)


def test_the_horizon_cuts_off() -> None:
    env = halving(Configuration(horizon=2))
    env.reset(seed=0)
    assert env.step(HALVE)[2:4] == (False, False)
    assert env.step(HALVE)[2:4] == (False, True)


def test_the_mask_learns_what_has_no_effect() -> None:
    env = halving(Configuration(masking=Masking.KNOWN), 3)
    observation, _ = env.reset(seed=0)
    assert observation["action_mask"].tolist() == [1, 1, 1, 1]
    observation, *_ = env.step(HALVE)
    assert observation["action_mask"].tolist() == [0, 1, 1, 1]
    observation, *_ = env.step(BREAK)
    assert observation["action_mask"].tolist() == [1, 1, 1, 1]
    observation, _ = env.reset(seed=0)
    assert observation["action_mask"].tolist() == [0, 1, 1, 1]


def test_the_mask_may_be_complete_or_absent() -> None:
    observation, _ = halving(Configuration(masking=Masking.ALL), 3).reset(seed=0)
    assert observation["action_mask"].tolist() == [0, 1, 0, 1]
    env = halving(Configuration(masking=Masking.NONE), 3)
    env.reset(seed=0)
    observation, *_ = env.step(HALVE)
    assert observation["action_mask"].tolist() == [1, 1, 1, 1]


def test_rewards_of_other_metrics() -> None:
    env = halving(Configuration(reward=Metric.BYTES))
    env.reset(seed=0)
    assert env.step(HALVE)[1] == 0.5
    env = halving(Configuration(reward=Metric.FLOPS))
    env.reset(seed=0)
    assert env.step(HALVE)[1] == 0.0


def test_seconds_are_measured_at_the_end() -> None:
    env = halving(Configuration(reward=Metric.SECONDS, horizon=3))
    env.reset(seed=0)
    assert env.step(HALVE)[1] == 0.0
    assert env.step(HALVE)[1] == 0.0
    _, reward, terminated, _, information = env.step(STOP)
    assert terminated
    assert reward == pytest.approx(1 - 6 / 24)
    assert information["value"] == pytest.approx(6 / 24)
    assert env.compiler.measured == [("24", "6")]  # type: ignore[attr-defined]


def test_a_changed_result_is_an_error_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    env = halving(Configuration(check=Check.STEP))
    env.reset(seed=0)
    env.step(HALVE)
    _, reward, terminated, _, information = env.step(BREAK)
    assert (reward, terminated, information["changed"]) == (0.0, False, False)
    assert information["error"] == "24 after halve, break: odd"
    assert "24 after halve, break: odd" in caplog.text
    assert information["module"].digest == "12"  # as it was before the step
    assert information["mask"][BREAK] == 0
    env = halving(Configuration(check=Check.END))
    env.reset(seed=0)
    env.step(BREAK)
    with pytest.raises(SemanticsError):
        env.step(STOP)
    result = first_difference(env.compiler, env.problems["24"].module, ["halve", "fail", "break", "halve"])
    assert result == (2, "odd")


def test_wrong_arguments() -> None:
    with pytest.raises(EpisodeError, match="at least one problem"):
        PassEnv(Halving(), [])
    with pytest.raises(EpisodeError, match="one name"):
        halving(Configuration(), 2, 2)
    with pytest.raises(EpisodeError, match="horizon"):
        Configuration(horizon=0)
    env = halving(Configuration(), 2, 4)
    with pytest.raises(EpisodeError, match="no problem is called '6'; there are: 2, 4"):
        env.reset(options={"problem": "6"})
    env.reset(options={"problem": "4"})
    with pytest.raises(EpisodeError, match="action 4 of 3 passes and stop"):
        env.step(4)


def test_problems_are_drawn_by_the_seed() -> None:
    env = halving(Configuration(), 2, 4, 6, 8)
    drawn = {seed: env.reset(seed=seed)[1]["problem"] for seed in range(20)}
    assert set(drawn.values()) == {"2", "4", "6", "8"}
    assert drawn == {seed: env.reset(seed=seed)[1]["problem"] for seed in range(20)}


def checked(env: PassEnv) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(infinity|render|spec).*")
        check_env(env, skip_render_check=True)


@pytest.mark.parametrize("graph", [False, True])
def test_gymnasium_accepts_it(graph: bool) -> None:
    checked(halving(Configuration(graph=graph)))


def test_gymnasium_accepts_the_rules() -> None:
    checked(PassEnv(rules(), [Problem("squeezenet", squeezenet())], Configuration(horizon=3, graph=True)))


def test_rule_families_are_passes() -> None:
    compiler, module = rules(), squeezenet()
    assert {"slices", "convolution", "transpose"} <= set(compiler.passes)
    assert compiler.load(module.data) == module
    applied = compiler.apply(module, "slices")
    assert applied.changed
    assert applied.module.summary.operations < module.summary.operations
    assert dict(applied.module.summary.opcodes).keys() <= dict(module.summary.opcodes).keys() | {
        "Slice",
        "Split",
    }
    assert not compiler.apply(applied.module, "slices").changed
    assert compiler.compare(module, applied.module).equal
    default = compiler.default(module)
    assert default.summary.operations < module.summary.operations
    assert compiler.load(compiler.write(default)).summary == default.summary
    with pytest.raises(CompilerError, match="no family 'cse'"):
        compiler.apply(module, "cse")
    with pytest.raises(CompilerError):
        compiler.load(b"nonsense")


def twice_relu(type: str, names: str = "xy") -> bytes:
    """Relu of Relu of x, and of y, as an ONNX file. `names`: the order of the inputs."""
    inputs = ", ".join(f"{type}[3] {name}" for name in names)
    text = f"""<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => ({type}[3] a, {type}[3] b)
        {{ c = Relu(x) a = Relu(c) d = Relu(y) e = Relu(d) b = Relu(e) }}"""
    made: bytes = onnx.parser.parse_model(text).SerializeToString()
    return made


def test_graphs_of_other_types_or_inputs_are_other_modules() -> None:
    """A pass must not give one module the inputs of another that was read after it."""
    sources = [twice_relu("float"), twice_relu("double"), twice_relu("float", "yx")]
    compiler = RuleCompiler(Library([r for r in LIBRARY if r.family == "identity"]))
    modules = [compiler.load(source) for source in sources]
    assert len(set(modules)) == len(modules)
    for module in modules:
        graph = onnx.ModelProto.FromString(compiler.apply(module, "identity").module.data).graph
        assert graph.input == onnx.ModelProto.FromString(module.data).graph.input
        assert compiler.load(compiler.write(module)) == module


def test_texts_are_compared() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (string[3] x) => (string[3] y)
        { a = Identity(x) b = Identity(a) y = Identity(b) }"""
    module = rules().load(onnx.parser.parse_model(text).SerializeToString())
    assert rules().compare(module, rules().apply(module, "identity").module).equal


def test_the_rules_work_in_the_environment() -> None:
    env = PassEnv(
        rules(), [Problem("squeezenet", squeezenet())], Configuration(masking=Masking.ALL, check=Check.END)
    )
    observation, information = env.reset(seed=0)
    names = env.compiler.passes
    effective = {name for name, on in zip(names, observation["action_mask"]) if on}
    assert "slices" in effective
    assert "recurrent" not in effective
    reward = env.step(names.index("slices"))[1]
    assert reward > 0
    env.step(len(names))
    opcode, x = observation["opcodes"], observation["figures"]
    assert len(opcode) == len(env.compiler.opcodes) + 1
    assert x[0] == pytest.approx(np.log2(1 + information["initial"]))


def test_the_rules_measure_seconds() -> None:
    first, second = rules().seconds([squeezenet(), squeezenet()], repetitions=3)
    assert len(first) == len(second) == 3
    assert min(first + second) > 0


@pytest.fixture(scope="module")
def xla() -> Iterator[Compiler]:
    pytest.importorskip("jax")
    from xrlflow.passes.xla import XlaCompiler, XlaOptions

    with XlaCompiler(
        XlaOptions(workers=1), passes=("cse", "algsimp", "map-inline", "call-inliner")
    ) as compiler:
        yield compiler


def test_gymnasium_accepts_xla(xla: Compiler) -> None:
    problems = [Problem(name, xla.load(SNIPPETS[name])) for name in ("cse", "algsimp", "map-inline")]
    checked(PassEnv(xla, problems, Configuration(horizon=3, graph=True)))


def test_xla_works_in_the_environment(xla: Compiler) -> None:
    problem = Problem("cse", xla.load(SNIPPETS["cse"]))
    configuration = Configuration(masking=Masking.ALL, check=Check.STEP, horizon=2)
    env = PassEnv(xla, [problem], configuration)
    observation, _ = env.reset(seed=0)
    assert observation["action_mask"].tolist() == [1, 0, 0, 0, 1]
    observation, reward, terminated, truncated, information = env.step(0)
    assert reward == pytest.approx(1 / 3)
    assert not terminated
    assert not truncated
    assert information["module"].summary.operations == 2
    timed = PassEnv(xla, [problem], replace(configuration, reward=Metric.SECONDS, repetitions=3))
    timed.reset(seed=0)
    timed.step(0)
    _, reward, terminated, _, information = timed.step(4)
    assert terminated
    assert reward == 1 - information["value"]
