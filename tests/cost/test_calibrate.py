"""The machine's figures: measured once, cached, and measured again when the cache is no good."""

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xrlflow.cost import calibrate
from xrlflow.cost.calibrate import calibrated, from_json, machine_file, to_json
from xrlflow.cost.machine import Machine, cache_bytes, cpu_name, vector_lanes
from xrlflow.cost.microbench import Sample
from xrlflow.ops.work import OpKind

pytestmark = pytest.mark.measures


class Measure:
    """Gives the reference figures, one hertz faster at each call."""

    def __init__(self, quiet: bool = True) -> None:
        self.calls = 0
        self.quiet = quiet

    def __call__(self, threads: int) -> tuple[Machine, bool]:
        self.calls += 1
        return replace(Machine.reference(), threads=threads, peak=1e11 + self.calls), self.quiet


def test_figures_survive_the_file() -> None:
    machine = replace(Machine.reference(), name="a name", grouped=((1, 0.1), (8, 0.2)))
    assert from_json(to_json(machine)) == machine


def test_the_second_call_reads_the_file(tmp_path: Path) -> None:
    measure = Measure()
    first = calibrated(2, tmp_path, measure)
    assert calibrated(2, tmp_path, measure) == first
    assert measure.calls == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_thread_counts_processors_and_versions_have_files_of_their_own(tmp_path: Path) -> None:
    measure = Measure()
    assert calibrated(1, tmp_path, measure).threads == 1
    assert calibrated(2, tmp_path, measure).threads == 2
    names = {machine_file(c, r, n) for c in "ab" for r in ("1.30", "1.31") for n in (1, 2, 12)}
    assert len(names) == 12


def older(text: str) -> str:
    data = json.loads(text)
    return json.dumps({**data, "version": data["version"] - 1})


def without_a_kind(text: str) -> str:
    data = json.loads(text)
    del data["machine"]["speeds"][OpKind.GEMM.value]
    return json.dumps(data)


@pytest.mark.parametrize(
    "damage", [lambda s: s[: len(s) // 2], lambda s: "", lambda s: "[1]", older, without_a_kind]
)
def test_a_damaged_file_is_replaced_with_a_warning(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    measure = Measure()
    calibrated(2, tmp_path, measure)
    [file] = tmp_path.iterdir()
    file.write_text(damage(file.read_text()))
    with pytest.warns(RuntimeWarning, match="calibrating afresh"):
        machine = calibrated(2, tmp_path, measure)
    assert machine.peak == 1e11 + 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calibrated(2, tmp_path, measure) == machine


def test_a_directory_that_cannot_be_written_is_warned_about(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="not kept"):
        assert calibrated(2, blocked / "cache", Measure()).threads == 2


def test_what_a_busy_machine_gives_is_not_remembered(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="rough and not kept"):
        assert calibrated(2, tmp_path, Measure(quiet=False)).threads == 2
    assert not list(tmp_path.iterdir())


def test_this_machine_gives_sane_figures() -> None:
    machine, _ = calibrate.calibrate(1, time_limit=0.005)
    assert machine.threads == 1
    assert machine.fork == 0
    assert set(machine.speeds) == set(OpKind)
    figures = [
        machine.peak,
        machine.cache_bandwidth,
        machine.memory_bandwidth,
        machine.cache,
        machine.overhead,
    ]
    assert all(math.isfinite(x) and x > 0 for x in figures)
    assert all(0 < s.compute <= 1 and 0 < s.bandwidth <= 1 for s in machine.speeds.values())
    assert [c for c, _ in machine.grouped] == [1, 2, 4, 8]
    assert from_json(to_json(machine)) == machine


@pytest.mark.parametrize("quiet", [True, False])
def test_beside_other_load_the_ratios_are_the_reference_s(
    quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample(2e-3, 1e-3, 3e-3, 10)
    monkeypatch.setattr(calibrate, "in_quiet", lambda once: (sample, quiet))
    machine, said = calibrate.calibrate(2)
    assert said is quiet
    assert (machine.speeds == Machine.reference().speeds) is not quiet
    assert machine.peak > 0


def test_beside_other_load_little_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is discarded is not measured, and nothing is measured again in the hope of quiet."""
    busy = Sample(2e-3, 1e-3, 3e-3, 10, 1.0)
    calls: list[str] = []

    def taken(node: Any, *_: Any, **__: Any) -> Sample:
        calls.append(node if isinstance(node, str) else node.op)
        return busy

    monkeypatch.setattr(calibrate, "call_seconds", lambda threads: taken("call"))
    monkeypatch.setattr(calibrate, "_chain", lambda threads: taken("chain"))
    monkeypatch.setattr(calibrate, "time_node", taken)
    calibrate.calibrate(2)
    assert calls[:3] == ["call"] * 3, "the first figure is taken again"
    assert calls[3:] == ["chain", "MatMul", "Conv", "Add", "Add", "Tanh", "Tanh"]


def test_the_processor_has_a_name_and_a_cache() -> None:
    assert cpu_name()
    assert cache_bytes() >= 1024


@pytest.mark.parametrize(
    ("system", "flags", "lanes"),
    [("x86_64", "fpu avx2 fma", 8), ("AMD64", "", 8), ("x86_64", "avx2 avx512f", 16), ("aarch64", "", 16)],
)
def test_blocks_of_channels_are_as_wide_as_the_processor_s_vectors(
    system: str, flags: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrlflow.cost.machine._processor", lambda: {"flags": flags})
    monkeypatch.setattr("platform.machine", lambda: system)
    assert vector_lanes() == lanes
    assert calibrate.calibrate(1, time_limit=0.005)[0].lanes == lanes
