"""XLA's passes: each alone, counts, crashes, the cache, the default order, equivalence."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.passes.snippets import SNIPPETS
from xrlflow.passes import CompilerError, Metric, Module, Summary, hlo_passes, run
from xrlflow.passes import hlo as hlo_modules
from xrlflow.passes.cache import Cache, Outcome
from xrlflow.passes.hlo_passes import PASSES
from xrlflow.passes.inputs import Draw, Floats, arrays
from xrlflow.passes.pool import Died, Pool
from xrlflow.passes.worker import Refusal
from xrlflow.passes.xla import XlaCompiler, XlaOptions

pytestmark = pytest.mark.process

TWO = """HloModule two
square { p = f32[] parameter(0)
 ROOT m = f32[] multiply(p, p) }
ENTRY e { x = f32[8,4] parameter(0)
 y = f32[4,16] parameter(1)
 d = f32[8,16] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
 s = f32[8,16] map(d), dimensions={0,1}, to_apply=square
 unused = f32[8,16] exponential(d)
 ROOT r = f32[8,16] add(s, d) }
"""


@pytest.fixture(scope="module")
def xla() -> Iterator[XlaCompiler]:
    with XlaCompiler(XlaOptions(workers=1)) as compiler:
        yield compiler


def names(module: Module) -> dict[str, int]:
    return dict(module.summary.opcodes)


def test_counts(xla: XlaCompiler) -> None:
    module = xla.load(TWO)
    # Dead code is not counted. The function's multiplication is.
    assert names(module) == {"add": 1, "dot": 1, "map": 1, "multiply": 1, "parameter": 3}
    assert module.summary.operations == 4
    assert module.summary.computations == (3, 1)
    # dot 2 * 8 * 4 * 16, map and add 8 * 16 each
    assert module.summary.flops == 1024 + 128 + 128
    elements = (32 + 64 + 128) + (128 + 128) + (3 * 128)
    assert module.summary.bytes_accessed == 4 * elements


def test_a_call_of_a_library_costs_what_it_reads_and_writes(xla: XlaCompiler) -> None:
    """XLA says -1 for each, so that a pass that makes calls would seem to save bytes and flops."""
    call = 'f32[4,4] custom-call({}), custom_call_target="nothing"'
    function = f"f {{ p = f32[4,4] parameter(0)\n ROOT c = {call.format('p')} }}"
    for entry, calls, adds in (
        (f"a = {call.format('x')}\n b = {call.format('a')}\n ROOT r = f32[4,4] add(b, x)", 2, 1),
        ("a = f32[4,4] call(x), to_apply=f\n ROOT r = f32[4,4] call(a), to_apply=f", 2, 0),
        (f"ROOT r = {call.format('x')}", 1, 0),
    ):
        module = xla.load(f"HloModule m\n{function}\nENTRY e {{ x = f32[4,4] parameter(0)\n {entry} }}")
        assert module.summary.flops == 16 * adds
        assert module.summary.bytes_accessed == calls * 2 * 64 + adds * 3 * 64


def test_a_module_is_read_again_as_it_was_written(xla: XlaCompiler) -> None:
    module = xla.load(TWO)
    assert xla.load(xla.write(module)) == module
    assert xla.load(module.data) == module


def test_the_digest_ignores_names_but_not_sharing(xla: XlaCompiler) -> None:
    module = xla.load(TWO)
    assert xla.load(TWO.replace("square", "pow2").replace(" d ", " dd ").replace("(d)", "(dd)").replace(
        "s, d)", "s, dd)"
    )) == module  # fmt: skip
    once = "HloModule m\nENTRY e { x = f32[4] parameter(0)\n a = f32[4] exponential(x)\n ROOT r = f32[4] add(a, a) }"
    twice = once.replace("ROOT r = f32[4] add(a, a)", "b = f32[4] exponential(x)\n ROOT r = f32[4] add(a, b)")
    assert xla.load(once) != xla.load(twice)


def test_stablehlo_is_read(xla: XlaCompiler) -> None:
    text = """module @m { func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
      %0 = stablehlo.exponential %a : tensor<4xf32>
      return %0 : tensor<4xf32> } }"""
    assert names(xla.load(text)) == {"exponential": 1, "parameter": 1}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("HloModule m\nENTRY e { ROOT x = f32[4] nonsense() }", "nonsense"),
        ("module @m { func.func @main( }", "error"),
        ("   ", "empty"),
        (b"\xff\xff\xff", "no HLO module"),
        (b"\x1a\x04\x0a\x02ab", "damaged: it has no instruction or computation 0"),
    ],
)
def test_what_is_no_module_is_refused_in_one_line(xla: XlaCompiler, source: str | bytes, says: str) -> None:
    with pytest.raises(CompilerError, match=says) as raised:
        xla.load(source)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("before", ["// a comment\n", "\ufeff", "/* two\nlines */\n\n"])
def test_hlo_text_may_begin_with_something_else(xla: XlaCompiler, before: str) -> None:
    assert xla.load(before + TWO) == xla.load(TWO)


STABLEHLO = """module @m attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.exponential %a : tensor<4xf32>
    return %0 : tensor<4xf32> } }"""


def test_a_module_of_several_devices_is_refused(xla: XlaCompiler) -> None:
    """XLA's own form of a module does not say it, so the result would be for one device."""
    for text, says in (
        (TWO.replace("two", "two, replica_count=2", 1), "replica_count 2"),
        (TWO.replace("two", "two, num_partitions=8", 1), "num_partitions 8"),
        (STABLEHLO, "num_partitions 4"),
        (bytecode(STABLEHLO), "num_partitions 4"),
    ):
        with pytest.raises(CompilerError, match=f"for several devices .{says}.; only one is supported"):
            xla.load(text)
    one = STABLEHLO.replace("partitions = 4", "partitions = 1")
    assert xla.load(one) == xla.load(bytecode(one))
    assert xla.load(TWO.replace("two", "two, replica_count=1", 1)) == xla.load(TWO)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("t = (f32[4], f32[4]) parameter(0)\n ROOT r = f32[4] get-tuple-element(t), index=1",
         "parameter t is a tuple: give its parts as parameters"),
        ("x = f32[4] parameter(0)\n t = (f32[4], f32[4]) tuple(x, x)\n"
         " ROOT r = ((f32[4], f32[4]), f32[4]) tuple(t, x)", "the result r has tuples in a tuple"),
    ],
)  # fmt: skip
def test_a_module_whose_interface_would_change_is_refused(xla: XlaCompiler, entry: str, says: str) -> None:
    with pytest.raises(CompilerError, match=says):
        xla.load(f"HloModule m\nENTRY e {{ {entry} }}")


def bytecode(text: str) -> bytes:
    from jaxlib import _jax

    made: bytes = _jax.mlir.serialize_portable_artifact(text, "1.0.0")
    return made


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("z = f32[] constant(0)\n o = f32[] constant(1)\n ROOT r = f32[4] rng(z, o), distribution=rng_uniform",
         "the module's rng draws other numbers in each run"),
        ("t = token[] after-all()\n i = (f32[4], token[]) infeed(t)\n ROOT r = f32[4] get-tuple-element(i), index=0",
         "the module's infeed waits for another program"),
        ("x = f32[4] parameter(0)\n t = token[] after-all()\n o = token[] outfeed(x, t), outfeed_shape=f32[4]\n"
         " ROOT r = f32[4] negate(x)", "the module's outfeed waits for another program"),
        ("x = f32[400000,400000] parameter(0)\n ROOT r = f32[400000,400000] negate(x)",
         "GB of memory, and "),
        ("x = f8e5m2[4] parameter(0)\n ROOT r = f32[4] convert(x)", "parameters of type f8e5m2 cannot be drawn"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_in_one_line(xla: XlaCompiler, body: str, says: str) -> None:
    module = xla.load(f"HloModule m\nENTRY e {{ {body} }}")
    crashes = xla.crashes
    with pytest.raises(CompilerError, match=says) as raised:
        xla.compare(module, module)
    assert "\n" not in str(raised.value)
    assert xla.crashes == crashes


def test_inputs_of_unknown_size_are_refused(xla: XlaCompiler) -> None:
    module = xla.load(STABLEHLO.replace("= 4 :", "= 1 :").replace("tensor<4x", "tensor<?x"))
    with pytest.raises(
        CompilerError, match="parameter 0 has a size that is not known: give the module static"
    ):
        xla.compare(module, module)


def test_every_pass_has_a_module_that_it_changes() -> None:
    assert len(PASSES) >= 20
    assert {p.name for p in PASSES} == set(SNIPPETS)


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_pass_alone(xla: XlaCompiler, name: str) -> None:
    module = xla.load(SNIPPETS[name])
    applied = xla.apply(module, name)
    assert applied.error is None
    assert applied.changed
    assert applied.module != module
    assert xla.compare(module, applied.module).equal


# What is there before and after: live instructions without parameters.
CHANGES = {
    "algsimp": ({"exponential": 2, "multiply": 1}, {"exponential": 1, "add": 1}),
    "cse": ({"exponential": 2, "add": 1}, {"exponential": 1, "add": 1}),
    "constant_folding": ({"constant": 1, "dot": 1, "add": 1}, {"constant": 1, "add": 1}),
    "reshape-mover": ({"reshape": 2, "add": 1}, {"reshape": 1, "add": 1}),
    "transpose-folding": ({"transpose": 1, "dot": 1}, {"dot": 1}),
    "call-inliner": ({"call": 1, "negate": 1}, {"negate": 1}),
    "map-inline": ({"map": 1, "add": 1}, {"add": 1}),
    "cse_barrier_expander": ({"opt-barrier": 1, "negate": 1}, {"negate": 1}),
    "operand_upcaster": ({"dot": 1}, {"convert": 2, "dot": 1}),
    "simplify-conditional": (
        {"constant": 1, "conditional": 1, "negate": 1, "exponential": 1},
        {"negate": 1},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_pass_does(xla: XlaCompiler, name: str) -> None:
    before, after = CHANGES[name]
    module = xla.load(SNIPPETS[name])

    def kinds(of: Module) -> dict[str, int]:
        return {op: count for op, count in names(of).items() if op != "parameter"}

    assert kinds(module) == before
    assert kinds(xla.apply(module, name).module) == after


def test_no_pass_changes_a_module_with_nothing_to_do(xla: XlaCompiler) -> None:
    module = xla.load("HloModule m\nENTRY e { x = f32[4] parameter(0)\n ROOT r = f32[4] negate(x) }")
    applied = xla.apply_each(module, xla.passes)
    assert [a for a in applied if a.changed or a.error] == []
    assert xla.default(module) == module


def test_an_unknown_pass_is_named(xla: XlaCompiler) -> None:
    with pytest.raises(CompilerError, match="no pass 'algebra'; there are: algsimp"):
        xla.apply(xla.load(TWO), "algebra")


# Without a check of ours, XLA aborts here: it expects what another pass leaves.
CRASHES = """HloModule m
add { p = f32[] parameter(0)
 q = f32[] parameter(1)
 ROOT s = f32[] add(p, q) }
ENTRY e { x = f32[3,8] parameter(0)
 i = s32[3,2,1] parameter(1)
 u = f32[3,2] parameter(2)
 ROOT r = f32[3,8] scatter(x, i, u), update_window_dims={}, inserted_window_dims={1},
  scatter_dims_to_operand_dims={1}, input_batching_dims={0}, scatter_indices_batching_dims={0}, index_vector_dim=2,
  to_apply=add }
"""


def test_a_pass_that_ends_the_process_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with XlaCompiler(XlaOptions(workers=1), Cache(tmp_path / "passes.sqlite")) as xla:
        module = xla.load(CRASHES)
        refused = xla.apply(module, "scatter_simplifier")
        assert refused.error is not None
        assert "batched_gather_scatter_normalizer first" in refused.error
        assert xla.crashes == 0
    monkeypatch.setattr(hlo_passes, "PASSES", [replace(p, unbatched=False) for p in PASSES])
    with XlaCompiler(XlaOptions(workers=1), Cache(tmp_path / "other.sqlite")) as xla:
        crashed, fine = xla.apply_each(module, ["scatter_simplifier", "batched_gather_scatter_normalizer"])
        assert crashed.module == module
        assert not crashed.changed
        assert crashed.error is not None
        assert "SIGABRT" in crashed.error
        assert "Check failed" in crashed.error
        assert fine.changed
        assert xla.crashes == 1
        assert xla.apply(module, "scatter_simplifier") == crashed
        assert xla.crashes == 1


def test_results_come_from_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "passes.sqlite"
    with XlaCompiler(XlaOptions(workers=1), cache := Cache(path)) as xla:
        module = xla.load(TWO)
        first = xla.apply_each(module, ["map-inline", "cse"])
        assert xla.steps == 2
        assert xla.apply_each(module, ["map-inline", "cse"]) == first
        assert xla.steps == 2
        cache.close()
    # Another program: no worker starts.
    with XlaCompiler(XlaOptions(workers=1), Cache(path), make=never) as xla:
        again = xla.apply_each(module, ["map-inline", "cse"])
        assert again == first
        assert again[0].module.data == first[0].module.data
        assert again[0].module.summary == first[0].module.summary
        assert [a.changed for a in again] == [True, False]


@pytest.mark.parametrize("way", ["refused", "aborted"])
def test_a_lack_of_memory_is_not_kept(way: str, xla: XlaCompiler, tmp_path: Path) -> None:
    """It hangs on what else runs now, and must not be the answer for ever."""
    module = xla.load(TWO)
    make = Refusing if way == "refused" else Aborting
    with XlaCompiler(XlaOptions(workers=1), cache := Cache(tmp_path / "passes.sqlite"), make=make) as short:
        failed = short.apply(module, "cse")
        assert not failed.changed
        assert failed.error is not None
        assert ("memory" if way == "refused" else "bad_alloc") in failed.error
        assert len(cache) == 0
    with XlaCompiler(XlaOptions(workers=1), Cache(tmp_path / "passes.sqlite")) as again:
        assert again.apply(module, "cse").error is None


class Refusing:
    def do(self, order: object) -> Refusal:
        return Refusal("it needs more memory than there is", lasting=False)


class Aborting:
    def do(self, order: object) -> None:
        print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr, flush=True)
        os.abort()


def never() -> Aborting:
    raise AssertionError("a worker was started")


SUM = "a = f32[4] exponential(x)\n b = f32[4] exponential(x)\n ROOT r = f32[4] add(a, b) }"


def test_a_cache_keeps_apart_what_modules_say_of_themselves(tmp_path: Path) -> None:
    """An input that gives its memory to the output: a module without that has the same instructions."""
    entry = f"ENTRY e {{ x = f32[4] parameter(0)\n {SUM}"
    with XlaCompiler(XlaOptions(workers=1), Cache(tmp_path / "passes.sqlite")) as xla:
        plain = xla.load(f"HloModule m\n{entry}")
        alias = xla.load(f"HloModule m, input_output_alias={{ {{}}: (0, {{}}, may-alias) }}\n{entry}")
        assert plain != alias
        assert "input_output_alias" not in xla.write(xla.apply(plain, "cse").module)
        assert "input_output_alias={ {}: (0, {}, may-alias) }" in xla.write(xla.apply(alias, "cse").module)
        assert xla.load(xla.write(alias)) == alias


def test_a_cache_keeps_apart_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some passes ask what the processor can do; a home directory may be on several machines."""
    for processor, steps in (("one", 1), ("other", 1), ("one", 0)):
        monkeypatch.setattr("xrlflow.passes.xla.cpu_name", lambda name=processor: name)
        with XlaCompiler(XlaOptions(workers=1), Cache(tmp_path / "passes.sqlite")) as xla:
            xla.apply(xla.load(TWO), "cse")
            assert xla.steps == steps


def test_flags_of_the_environment_change_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_all_hlo_passes=true")
    with XlaCompiler(XlaOptions(workers=1)) as xla:
        assert xla.apply(xla.load(SNIPPETS["cse"]), "cse").changed


def test_a_cache_keeps_the_figures_of_each_compiler_and_no_damaged_module(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "passes.sqlite")
    for compiler, flops in (("a", 1.0), ("b", 2.0)):
        module = Module("after", b"data", Summary(1, 1.0, flops, (("add", 1),), (1,)))
        cache.put(compiler, "before", "pass", Outcome("after"), module)
    for compiler, flops in (("a", 1.0), ("b", 2.0)):
        assert (item := cache.module(compiler, "after")) is not None
        assert item.summary.flops == flops
    cache.prune()
    assert cache.outcome("a", "before", "pass") == Outcome("after")
    cache.close()
    connection = sqlite3.connect(tmp_path / "passes.sqlite")
    connection.execute("UPDATE module SET data = x'00' WHERE digest LIKE 'a %'")
    connection.commit()
    connection.close()
    cache = Cache(tmp_path / "passes.sqlite")
    assert cache.module("a", "after") is None
    assert cache.module("b", "after") is not None


def test_no_row_that_a_disk_has_damaged_is_believed(tmp_path: Path) -> None:
    """One changed letter in a row makes it a missing one, and never another figure or module."""
    path = tmp_path / "passes.sqlite"
    summary = Summary(1195, 123456.0, 789.0, (("add", 17),), (1195,))
    for column, table in (
        ("after", "result"),
        ("error", "result"),
        ("summary", "module"),
        ("digest", "module"),
    ):
        cache = Cache(path)
        for number in "12":
            after = Module(number * 32, b"data", summary)
            cache.put("c", "before", f"pass {number}", Outcome(after.digest), after)
        cache.put("c", "before", "fails", Outcome("before", "why 1195"), None)
        cache.close()
        connection = sqlite3.connect(path)
        swapped = f"replace(replace(replace({column}, '1', '?'), '2', '1'), '?', '2')"
        connection.execute(f"UPDATE OR REPLACE {table} SET {column} = {swapped} || ''")
        connection.commit()
        connection.close()
        cache = Cache(path)
        for number in "12":
            result = cache.outcome("c", "before", f"pass {number}")
            assert result in (None, Outcome(number * 32))
            assert cache.module("c", number * 32) in (None, Module(number * 32, b"data", summary))
            kept = cache.module("c", number * 32)
            assert kept is None or kept.summary == summary
            assert (result is None) == (table == "result") or (kept is None) == (table == "module")
        assert cache.outcome("c", "before", "fails") in (None, Outcome("before", "why 1195"))
        cache.close()
        path.unlink()


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "passes.sqlite", limit=5000)
    rng = np.random.default_rng(0)
    for number in range(20):
        module = Module(f"{number:032x}", rng.bytes(1000), Summary(number, 1.0, 2.0, (("add", 1),), (1,)))
        cache.put("c", "before", f"pass {number}", Outcome(module.digest), module)
    cache.put("c", "before", "idle", Outcome("before"), None)
    cache.prune()
    assert cache.bytes <= 5000
    assert cache.outcome("c", "before", "pass 0") is None
    assert cache.module("c", f"{0:032x}") is None
    assert cache.outcome("c", "before", "pass 19") == Outcome(f"{19:032x}")
    assert (kept := cache.module("c", f"{19:032x}")) is not None
    assert kept.summary == Summary(19, 1.0, 2.0, (("add", 1),), (1,))
    assert cache.outcome("c", "before", "idle") == Outcome("before")


def test_the_default_order(xla: XlaCompiler) -> None:
    """XLA's own pipelines with our passes: maps inlined, transposes folded, equal instructions merged, in one go."""
    module = xla.load(
        "HloModule m\nneg { p = f32[] parameter(0)\n ROOT n = f32[] negate(p) }\n"
        "ENTRY e { x = f32[3,2] parameter(0)\n y = f32[3,4] parameter(1)\n"
        " t = f32[2,3] transpose(x), dimensions={1,0}\n"
        " d = f32[2,4] dot(t, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        " a = f32[2,4] map(d), dimensions={0,1}, to_apply=neg\n b = f32[2,4] map(d), dimensions={0,1}, to_apply=neg\n"
        " ROOT r = f32[2,4] multiply(a, b) }"
    )
    after = xla.default(module)
    assert {op for op, _ in after.summary.opcodes} <= {"parameter", "dot", "negate", "multiply", "transpose"}
    assert after.summary.operations < module.summary.operations
    assert xla.default(after).summary.operations == after.summary.operations
    assert xla.compare(module, after).equal
    one = run(xla, module, ["map-inline", "cse", "transpose-folding"])
    assert names(one) == {"parameter": 2, "dot": 1, "negate": 1, "multiply": 1}


def test_the_default_order_of_some_passes(xla: XlaCompiler) -> None:
    module = xla.load(SNIPPETS["transpose-folding"])
    assert xla.default(module, ["map-inline", "cse"]) == module
    assert xla.default(module, ["transpose-folding"]) == xla.apply(module, "transpose-folding").module
    with pytest.raises(CompilerError, match="no pass 'algebra'"):
        xla.default(module, ["algebra"])


def test_the_default_order_uses_only_the_passes_on_offer() -> None:
    with XlaCompiler(XlaOptions(workers=1), passes=["map-inline"]) as xla:
        module = xla.load(SNIPPETS["transpose-folding"])
        assert xla.default(module) == module
        module = xla.load(SNIPPETS["map-inline"])
        assert xla.default(module) == xla.apply(module, "map-inline").module


def test_a_wrong_module_is_told(xla: XlaCompiler) -> None:
    right = xla.load(TWO)
    assert xla.compare(right, run(xla, right, ["map-inline", "dot_decomposer"])).equal
    wrong = xla.load(TWO.replace("multiply(p, p)", "add(p, p)"))
    comparison = xla.compare(right, wrong)
    assert not comparison.equal
    assert comparison.difference is not None
    assert comparison.difference.startswith("output 0 (float32[8, 16]): ")
    turned = TWO.replace("r = f32[8,16] add(s, d)", "r = f32[16,8] transpose(s), dimensions={1,0}")
    assert xla.compare(right, xla.load(turned)).difference == (
        "output 0 (float32[8, 16]): float32[16, 8] instead"
    )


def test_a_small_error_is_told(xla: XlaCompiler) -> None:
    def scaled(by: str) -> Module:
        return xla.load(
            f"HloModule m\nENTRY e {{ x = f32[4] parameter(0)\n c = f32[] constant({by})\n"
            " b = f32[4] broadcast(c), dimensions={}\n ROOT r = f32[4] multiply(x, b) }"
        )

    assert xla.compare(scaled("2"), scaled("2.00001")).equal
    assert not xla.compare(scaled("2"), scaled("2.002")).equal


def test_both_modules_get_the_inputs_of_the_reference(xla: XlaCompiler) -> None:
    """Indices are drawn below the smallest dimension that is indexed, which differs between these modules."""
    wide = xla.load(
        "HloModule m\nENTRY e { x = f32[64] parameter(0)\n i = s32[8] parameter(1)\n"
        " f = s32[1] slice(i), slice={[0:1]}\n j = s32[] reshape(f)\n"
        " s = f32[1] dynamic-slice(x, j), dynamic_slice_sizes={1}\n ROOT r = (s32[8], f32[1]) tuple(i, s) }"
    )
    narrow = xla.load(
        "HloModule m\nENTRY e { x = f32[64] parameter(0)\n i = s32[8] parameter(1)\n"
        " h = f32[2] slice(x), slice={[0:2]}\n f = s32[1] slice(i), slice={[0:1]}\n j = s32[] reshape(f)\n"
        " s = f32[1] dynamic-slice(h, j), dynamic_slice_sizes={1}\n ROOT r = (s32[8], f32[1]) tuple(i, s) }"
    )
    assert xla.compare(narrow, wide).equal  # indices 0 and 1
    comparison = xla.compare(wide, narrow)  # indices up to 63; the first output is the indices
    assert not comparison.equal
    assert comparison.difference is not None
    assert comparison.difference.startswith("output 1 ")


def test_a_comparison_of_nothing_is_refused(xla: XlaCompiler) -> None:
    module = xla.load(
        "HloModule m\nENTRY e { x = f32[4] parameter(0)\n n = f32[4] subtract(x, x)\n ROOT r = f32[4] divide(n, n) }"
    )
    with pytest.raises(CompilerError, match="nothing can be compared"):
        xla.compare(module, module)


def test_seconds_are_measured_in_turn(xla: XlaCompiler) -> None:
    small, large = (
        xla.load(
            f"HloModule m\nENTRY e {{ x = f32[{n},{n}] parameter(0)\n"
            f" ROOT d = f32[{n},{n}] dot(x, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}} }}"
        )
        for n in (4, 384)
    )
    (quick,) = xla.seconds([small], repetitions=5)
    (slow,) = xla.seconds([large], repetitions=5)
    assert len(quick) == len(slow) == 5
    assert 0.0 < min(quick) < min(slow)
    with pytest.raises(ValueError, match="measured"):
        small.summary.of(Metric.SECONDS)


def test_the_graph(xla: XlaCompiler) -> None:
    module = xla.load(TWO)
    graph = xla.graph(module)
    kinds = [xla.opcodes[i] for i in graph.opcode]
    assert sorted(kinds) == ["add", "dot", "map", "multiply", "parameter", "parameter", "parameter"]
    edges = {(kinds[a], kinds[b], int(k)) for a, b, k in zip(*graph.edge_index, graph.edge_kind)}
    assert edges == {
        ("parameter", "dot", 0), ("parameter", "dot", 1), ("dot", "map", 0), ("map", "add", 0), ("dot", "add", 1),
        ("parameter", "multiply", 0), ("parameter", "multiply", 1), ("multiply", "map", 7),
    }  # fmt: skip
    dot = graph.x[kinds.index("dot")]
    assert dot[:3] == pytest.approx([np.log2(129), np.log2(513), 2])
    assert graph.x[kinds.index("add"), 3:].tolist() == [1.0, 1.0, 0.0]
    assert graph.x[kinds.index("multiply"), 3:].tolist() == [1.0, 0.0, 1.0]
    assert set(names(module)) <= set(hlo_modules.OPCODES)


def test_without_jax_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import importlib.util, importlib.machinery\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'jax' else find(name, package)\n"
        "from xrlflow.passes.xla import XlaCompiler\n"
        "try: XlaCompiler()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout == "CompilerError XLA's passes need jax: install it with `pip install 'xrlflow[xla]'`\n"
    )


class Sleepy:
    """Doubles numbers, sleeps at 13 and kills itself at 7."""

    def do(self, order: int) -> int:
        if order == 7:
            os.kill(os.getpid(), signal.SIGSEGV)
        if order == 13:
            signal.pause()
        return 2 * order


def test_a_pool_answers_in_order_and_survives() -> None:
    with Pool(Sleepy, 2, 0.5) as pool:
        answers = pool.ask_each([1, 7, 2, 13, 3, 4])
        assert [a for a in answers if isinstance(a, int)] == [2, 4, 6, 8]
        assert answers[1] == Died("the worker ended by SIGSEGV")
        assert answers[3] == Died("it took more than 0.5 s")
        assert pool.deaths == 2
    with pytest.raises(CompilerError, match="closed"):
        pool.ask(1)


def broken() -> Sleepy:
    raise RuntimeError("no luck")


def test_a_worker_that_does_not_start() -> None:
    with (
        Pool(broken, 1, 5.0) as pool,
        pytest.raises(CompilerError, match="no luck"),
    ):
        pool.ask(1)


def test_inputs_are_drawn_by_the_seed() -> None:
    with XlaCompiler(XlaOptions(workers=1)) as xla:
        data = xla.load(SNIPPETS["gather_expander"]).data
    table, index = arrays(data, Draw(0, Floats.NORMAL))
    assert table.shape == (8, 4)
    assert index.shape == (1, 1)
    assert (table < 0).any()
    positive, _ = arrays(data, Draw(0))
    assert positive.min() >= 0.5
    indices = {int(arrays(data, Draw(seed))[1].item()) for seed in range(80)}
    assert indices == set(range(8))
    empty = [bool((arrays(data, Draw(seed, Floats.SPARSE))[0] == 0).all()) for seed in range(40)]
    assert 10 < sum(empty) < 30
    assert np.array_equal(arrays(data, Draw(5))[0], arrays(data, Draw(5))[0])
    assert not np.array_equal(arrays(data, Draw(5))[0], arrays(data, Draw(6))[0])


@pytest.mark.parametrize(
    ("name", "ordinary"),
    [("cse", True), ("dot_decomposer", True), ("operand_upcaster", False), ("change-op-data-type", False),
     ("float-normalization-bf16", False), ("dynamic_padder", False)],
)  # fmt: skip
def test_what_is_an_ordinary_module(xla: XlaCompiler, name: str, ordinary: bool) -> None:
    module = xla.load(SNIPPETS[name])
    assert hlo_modules.is_ordinary(hlo_modules.parse(module.data)) is ordinary
    unusual = {p.name for p in PASSES if p.unusual}
    assert (unusual <= xla.without_effect(module)) is ordinary


@pytest.mark.parametrize("name", ["gather_simplifier", "call-inliner", "topk-rewriter"])
def test_a_pass_that_is_skipped_would_do_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that need kinds of instructions that a module lacks are not run. All run here."""
    with XlaCompiler(XlaOptions(workers=1)) as xla:
        module = xla.load(SNIPPETS[name])
        skipped = xla.apply_each(module, xla.passes)
        before = xla.steps
        assert before < len(PASSES) / 2
    monkeypatch.setattr(hlo_passes, "PASSES", [replace(p, needs=(), unusual=False) for p in PASSES])
    with XlaCompiler(XlaOptions(workers=1)) as xla:
        assert xla.apply_each(module, xla.passes) == skipped
        assert xla.steps == len(PASSES)


@pytest.mark.parametrize("reads", ["a", "b"])
def test_an_instruction_that_depends_on_itself_is_refused(reads: str) -> None:
    """A damaged file must not run in circles, which takes all memory."""
    module = hlo_modules._module_class(False)()
    computation = module.computations.add(id=1, root_id=2)
    numbers = {"a": 1, "b": 2}
    computation.instructions.add(name="a", opcode="negate", id=1, operand_ids=[numbers[reads]])
    computation.instructions.add(name="b", opcode="negate", id=2, operand_ids=[1])
    with pytest.raises(CompilerError, match=r"the instruction [ab] depends on itself"):
        hlo_modules.check_interface(hlo_modules.parse(module.SerializeToString()))
