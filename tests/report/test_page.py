"""The data of report pages, and the file that they are written to."""

from __future__ import annotations

import html
import json
import re
import resource
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.report.pages import HOSTILE, control_flow, layered, measured, optimised, profiles
from tests.rules.harness import model
from xrlflow import api
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime.profile import OperatorProfile, OperatorTime, profile_operators, summed
from xrlflow.backends.results import SpeedUp
from xrlflow.cli import app
from xrlflow.onnxio import ModelError, load
from xrlflow.options import OptionError
from xrlflow.pipeline.pages import data_of_trace, drawing, result_page, write_page
from xrlflow.report.page.advice import advice
from xrlflow.report.page.changes import differences
from xrlflow.report.page.document import VERSION
from xrlflow.report.page.drawing import LONGEST, Drawing
from xrlflow.report.page.html import embedded, page_html
from xrlflow.report.page.server import PageServer
from xrlflow.report.page.summary import summary_html
from xrlflow.report.progress import progress, time_left

MODELS = ("small", "large", "control", "hostile")


def page(name: str) -> Any:
    return result_page([measured(optimised(name))], profiled=False)


def drawn(proto: onnx.ModelProto) -> Drawing:
    imported = load(proto)
    return drawing("model", imported, imported.graph)


def ops(drawing: Drawing, indices: tuple[int, ...]) -> list[str]:
    return sorted(drawing.boxes[i].op for i in indices)


# --- graphs ---


@pytest.mark.parametrize("name", MODELS)
def test_edges_lead_forward_and_parts_are_nested(name: str) -> None:
    found = page(name)
    for graph in (found.before, found.runs[0].after):
        assert all(a < b < len(graph.boxes) for a, b in graph.edges)
        for part in graph.parts:
            assert part.start < part.end
            if part.parent >= 0:
                outer = graph.parts[part.parent]
                assert outer.start <= part.start
                assert part.end <= outer.end


def test_every_operator_is_drawn_once() -> None:
    proto = layered(4, tail=8)
    found = drawn(proto)
    assert sorted(b.name for b in found.boxes) == sorted([n.name for n in proto.graph.node] + ["x", "y"])
    assert len(found.indices) == len(proto.graph.node) == 65
    (product,) = [b for b in found.boxes if b.name.startswith("/layer.2/MatMul")]
    assert (product.type, product.reads) == ("float[4,8]", "float[8,8]")


def test_layers_fold_and_have_the_names_of_the_file() -> None:
    found = drawn(layered(100, tail=2))
    (stack,) = [part for part in found.parts if part.times > 1]
    assert (stack.times, stack.end - stack.start) == (100, 1400)
    assert [p.title for p in found.parts if p.times == 1] == [f"/layer.{i}" for i in range(100)]


def test_bodies_are_drawn_in_their_node() -> None:
    found = drawn(control_flow())
    titles = [part.title for part in found.parts]
    assert titles == ["If", "else_branch", "Loop", "body", "then_branch"]
    kinds = [box.op for box in found.boxes]
    branch = kinds.index("If")
    inner = [(a, b) for a, b in found.edges if b == branch]
    # The condition, and the result of each branch.
    assert sorted(kinds[a] for a, _ in inner) == ["Input", "Output", "Output"]
    relu = kinds.index("Relu")
    assert {kinds[b] for a, b in found.edges if a == relu} == {"Neg", "Loop"}


# --- changes ---


def test_a_substitution_has_its_place_on_both_sides() -> None:
    found = page("small")
    run = found.runs[0]
    assert len(run.substitutions) == 8
    seen: set[int] = set()
    for s in run.substitutions:
        kind = {"CancelTransposes": "Transpose", "CancelInvolution": "Neg"}[s.rule]
        assert ops(found.before, s.before) == [kind, kind]
        assert s.after == ()
        assert set(ops(run.after, s.near)) <= {"MatMul", "Softplus", "Softsign"}
        assert s.near
        assert s.gain is not None
        assert s.gain > 0
        assert not seen & set(s.before)
        seen.update(s.before)
    assert len({s.region for s in run.substitutions}) == 8


def test_what_is_made_of_what_was_made_has_one_region() -> None:
    proto = model(
        "agraph (float[4,6] x) => (float[4,3] y, float[4] z) { m = MatMul(x, w) y = Add(m, b)"
        " p = Neg(x) q = Neg(p) z = ReduceSum<keepdims=0>(q, axes) }",
        w=np.ones((6, 3), np.float32),
        b=np.ones(3, np.float32),
        axes=np.array([1]),
    )
    result = api.optimize(proto, search="greedy", cost="roofline", backend="onnxruntime", measure=False)
    found = result_page([result], profiled=False)
    run = found.runs[0]
    by_rule = {s.rule: s for s in run.substitutions}
    fused = next(s for s in run.substitutions if "MatMul" in ops(found.before, s.before))
    assert ops(run.after, fused.after) == ["Gemm"]
    assert by_rule["CancelInvolution"].region != fused.region


def test_changes_in_bodies_are_placed() -> None:
    found = page("control")
    run = found.runs[0]
    placed: dict[str, list[list[str]]] = {}
    for s in run.substitutions:
        placed.setdefault(s.rule, []).append(ops(found.before, s.before))
    assert placed == {"CancelInvolution": [["Neg", "Neg"]] * 2, "RemoveIdentity": [["Identity"]]}


def test_two_files_are_compared_without_a_trace() -> None:
    first, second = load(layered(4, tail=8)), load(optimised("small").model)
    before, after = drawing("A", first, first.graph), drawing("B", second, second.graph)
    found = differences(first.graph, second.graph, before, after)
    places = sorted(ops(before, region.before) for region in found)
    assert places == [["Neg"] * 2] * 4 + [["Transpose"] * 2] * 4
    assert all(r.after == () for r in found)


def test_equal_files_do_not_differ() -> None:
    first, second = load(layered(4, tail=8)), load(layered(4, tail=8))
    before, after = drawing("A", first, first.graph), drawing("B", second, second.graph)
    assert differences(first.graph, second.graph, before, after) == ()


def test_another_operator_in_the_same_place_is_one_region() -> None:
    text = "agraph (float[4] x) => (float[4] y) {{ a = Exp(x) b = {}(a) c = Tanh(b) y = Relu(c) }}"
    first, second = (load(model(text.format(kind))) for kind in ("Sin", "Cos"))
    before, after = drawing("A", first, first.graph), drawing("B", second, second.graph)
    (region,) = differences(first.graph, second.graph, before, after)
    assert (ops(before, region.before), ops(after, region.after)) == (["Sin"], ["Cos"])


# --- the file ---


@pytest.mark.parametrize("name", MODELS)
def test_a_page_is_one_file_that_fetches_nothing(name: str) -> None:
    text = page_html(page(name).to_json())
    assert len(text.encode()) < 500_000  # of 3 MB that it may have
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//|@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    assert text.count("<script") == 3
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data) == json.loads(
        json.dumps(page(name).to_json() | {"environment": json.loads(data)["environment"]})
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_any_text_can_be_embedded(name: str) -> None:
    text = embedded({"name": name})
    assert json.loads(text) == {"name": name}
    assert not re.search("[<>&\u2028\u2029\u202e\u2066]", text)


def test_long_names_are_shortened_and_directions_escaped() -> None:
    boxes = page("hostile").before.boxes
    assert max(len(box.name) for box in boxes) <= LONGEST + 10
    assert not any("\u202e" in box.name for box in boxes)
    assert any(r"\u202e" in box.name for box in boxes)
    assert any("<img src=x" in box.name for box in boxes)


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded({"x": float("nan")})


def test_a_lone_surrogate_is_replaced() -> None:
    data = page("small").to_json() | {"title": "bad\udcff.onnx"}
    assert "bad?.onnx" in page_html(data)


@pytest.mark.parametrize("place", ["/*DATA*/", "/*STYLE*/", "/*SCRIPT*/", "<!--TITLE-->"])
def test_a_name_that_is_a_place_of_the_page_stays_a_name(place: str) -> None:
    data = page("small").to_json() | {"title": f"{place}.onnx", "environment": {}}
    text = page_html(data)
    assert text.count('id="data">') == 1
    told = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert told is not None
    assert json.loads(told[1]) == json.loads(json.dumps(data))
    assert f"<title>{html.escape(place)}.onnx - xrlflow</title>" in text


# --- commands ---


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_page_of_an_optimisation_and_of_its_trace(tmp_path: Path) -> None:
    onnx.save(layered(4, tail=8), tmp_path / "m.onnx")
    report, trace, again = tmp_path / "r.html", tmp_path / "t.json", tmp_path / "again.html"
    done = invoke(
        "optimize", tmp_path / "m.onnx", "-o", tmp_path / "fast.onnx", "--search", "greedy", "--cost", "roofline",
        "--no-measure", "--report", report, "--trace", trace, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)["page"]
    assert data["version"] == 1
    assert data["runs"][0]["lines"] == ["No times by operator: nothing was measured (--no-measure)."]
    assert invoke("report", trace, "-o", again).exit_code == 0
    assert again.read_bytes() == report.read_bytes()
    assert json.loads(trace.read_text())["page"] == data
    replayed = invoke(
        "optimize",
        tmp_path / "m.onnx",
        "-o",
        tmp_path / "b.onnx",
        "--cost",
        "roofline",
        "--no-measure",
        "--replay",
        trace,
    )
    assert replayed.exit_code == 0, replayed.output
    assert (tmp_path / "b.onnx").read_bytes() == (tmp_path / "fast.onnx").read_bytes()


def test_without_a_report_json_has_no_page(tmp_path: Path) -> None:
    onnx.save(layered(1, tail=1), tmp_path / "m.onnx")
    done = invoke(
        "optimize",
        tmp_path / "m.onnx",
        "-o",
        tmp_path / "f.onnx",
        "--cost",
        "roofline",
        "--no-measure",
        "--json",
    )
    assert "page" not in json.loads(done.stdout)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"model": "m", "steps": []}', "it has 0 substitutions, but neither graphs nor measurements"),
        ('{"model": "m", "steps": [], "page": {"version": 0}}', "write it again with --trace"),
        ("[]", "not a trace of xrlflow"),
        ('{"steps": 3}', "not a trace of xrlflow"),
        (f'{{"steps": [], "page": {{"version": {VERSION}}}}}', "write it again with --trace"),
        (
            f'{{"steps": [], "page": {{"version": {VERSION}, "title": "t", "x": NaN}}}}',
            "not a trace of xrlflow (NaN",
        ),
        ("{", "not a trace of xrlflow"),
    ],
)
def test_a_trace_without_a_page_says_what_it_lacks(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "t.json").write_text(content)
    done = invoke("report", tmp_path / "t.json")
    assert done.exit_code == 2
    assert said in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_bad_paths_are_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no such trace"):
        data_of_trace(tmp_path / "none.json")
    with pytest.raises(ModelError, match="cannot be written"):
        write_page(page("small").to_json(), tmp_path / "no" / "r.html")
    onnx.save(layered(1, tail=1), tmp_path / "m.onnx")
    for arguments in (
        ("optimize", tmp_path / "m.onnx", "-o", tmp_path / "f.onnx", "--report", tmp_path / "m.onnx"),
        ("optimize", tmp_path / "m.onnx", "-o", tmp_path / "f.onnx", "--report", tmp_path / "f.onnx"),
        ("compare", tmp_path / "m.onnx", "--report", tmp_path / "m.onnx"),
    ):
        done = invoke(*arguments)
        assert done.exit_code == 2
        assert "are one file" in done.stderr


def test_strategies_side_by_side(tmp_path: Path) -> None:
    compared = api.compare(
        layered(1, tail=2), searches=("greedy", "taso"), cost="roofline", measure=False, time_limit=10.0
    )
    data = compared.page
    assert (data["kind"], [run["name"] for run in data["runs"]]) == ("compare", ["greedy", "taso"])
    assert [r.search for r in compared.reports] == ["greedy", "taso"]
    assert compared.report_html().startswith("<!DOCTYPE html>")


def test_a_server_answers_this_machine_only() -> None:
    with PageServer("<p>page ü</p>") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with urllib.request.urlopen(server.url) as answer:
                assert answer.read().decode() == "<p>page ü</p>"
            wrong = urllib.request.Request(server.url, headers={"Host": "elsewhere.example"})
            for request, status in ((wrong, 421), (f"{server.url}other", 404)):
                with pytest.raises(urllib.error.HTTPError) as error:
                    urllib.request.urlopen(request)
                assert error.value.code == status
                error.value.close()
            with (
                pytest.raises(OptionError, match="cannot be used"),
                api.serving(page("small").to_json(), server.server_address[1]),
            ):
                pass
        finally:
            server.shutdown()


def test_a_view_of_two_files_times_their_operators(tmp_path: Path) -> None:
    onnx.save(layered(1, tail=1), tmp_path / "a.onnx")
    onnx.save(layered(2, tail=1), tmp_path / "b.onnx")
    data = api.view(tmp_path / "a.onnx", tmp_path / "b.onnx", threads=1)
    (run,) = data["runs"]
    assert run["report"] is None
    for profile, layers in ((run["operators_before"], 1), (run["operators_after"], 2)):
        calls = {o["op"]: o["calls"] for o in profile["operators"]}
        assert calls["MatMul"] == layers
    alone = api.view(tmp_path / "a.onnx", measure=False)["runs"][0]
    assert alone["after"] is None
    assert alone["operators_before"] is None


# --- times by operator ---


def event(cat: str, name: str, ts: int, dur: int, op: str = "") -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"op_name": op}}


def test_a_profile_leaves_out_warming_up_and_counts_bodies_once() -> None:
    run = lambda at: [  # noqa: E731
        event("Session", "model_run", at, 100),
        event("Node", "if_kernel_time", at + 10, 60, "If"),
        event("Node", "exp_kernel_time", at + 20, 30, "Exp"),
        event("Node", "exp2_kernel_time", at + 75, 10, "Exp"),
        event("Node", "exp_fence_before", at + 20, 5, "Exp"),
    ]
    events = [*run(0), *run(1000), *run(2000), {"cat": "Session", "name": "no duration", "ts": 0}]
    events[0]["dur"] = 9999  # loading slows the first run
    found = summed(events, skipped=1)
    assert found == OperatorProfile((OperatorTime("Exp", 2.0, 0.04), OperatorTime("If", 1.0, 0.03)), 2, 0.1)
    assert summed(events, skipped=3) == OperatorProfile((), 0, 0.0)


def test_onnx_runtime_is_profiled() -> None:
    proto = control_flow()
    feeds = {
        "c": np.array(False), "x": np.ones(4, np.float32), "n": np.array(3, np.int64), "go": np.array(True),
    }  # fmt: skip
    found = profile_operators(proto.SerializeToString(), feeds, threads=1, seconds=0.0)
    assert found.runs >= 1
    calls = {o.op: o.calls for o in found.operators}
    assert calls["Loop"] == calls["If"] == 1
    assert calls["Tanh"] == 3
    assert 0 < sum(o.ms for o in found.operators) <= found.run_ms * 1.01


def test_a_page_has_no_times_where_there_is_no_room_for_a_profile() -> None:
    """ONNX Runtime writes a part of it, and does not complain."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        x = np.ones((4, 4), np.float32)
        proto = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 17]> g (float[4,4] x) => (float[4,4] y) { y = Relu(x) }'
        )
        with pytest.raises(
            BackendError, match=r"did not write its profile: the temporary folder .* is full: make"
        ):
            profile_operators(proto.SerializeToString(), {"x": x}, threads=1, seconds=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- words ---


def test_advice_follows_from_the_figures() -> None:
    report = measured(optimised("small")).report
    quiet = advice(report, optimised("small").verification, profiles()[1], {}, False)
    assert quiet == (
        "MatMul takes 100% of the time that is left. "
        "No other graph makes that faster; generated kernels may: --backend auto.",
    )
    noisy = replace(
        report,
        control=SpeedUp(1.1, 1.05, 1.2),
        speedup=SpeedUp(1.5, 1.2, 1.9),
        reason="no time (give it more with --time-limit)",
    )
    said = advice(noisy, None, None, {}, True)
    assert [line.split(".")[0] for line in said] == [
        "Time was short (see the notes)",
        "The original seems to be 1",
        "The interval is wide (1",
        "Inputs have open dimensions",
    ]


def test_a_notebook_shows_a_result() -> None:
    result = measured(optimised("hostile"))
    shown = result._repr_html_()
    assert "1.84 times as fast as the original" in shown
    assert "1.750 to 1.930" in shown
    named = summary_html(replace(result.report, model="<script>alert(1)</script>"))
    assert "<script>" not in named
    assert "&lt;script&gt;" in named


def test_progress_says_phase_best_and_time_left() -> None:
    console = Console(record=True, force_terminal=True, width=120)
    with progress(True, 60.0, console) as listener:
        assert listener is not None
        listener("search", 10, 100, "best so far 1.234 ms, modelled")
        listener("select", 1, 0, "measuring whole models [b]")
    said = console.export_text()
    assert "best so far 1.234 ms" in said
    assert "measuring whole models [b]" in said
    assert re.search(r"at most (60|59) s left", said)
    assert time_left(60.0, 61.5) == "62 s, the limit is over: it ends now"
    with progress(False) as nothing:
        assert nothing is None
