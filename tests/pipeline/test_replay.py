"""A trace leads to the same graph whatever the cost model and the search of the replay are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import xrlflow
from tests.report.pages import control_flow
from xrlflow.cost import AdditiveCost, Roofline
from xrlflow.ir import Graph, Node
from xrlflow.options import OptionError
from xrlflow.search import TraceError


class NegIsFree(AdditiveCost):
    """With it, nothing is gained where two Neg cancel each other."""

    name = "free"

    def price(self, graph: Graph, node: Node, in_types: object) -> float:
        return 0.0 if node.op == "Neg" else 1e-6


def optimize(**options: Any) -> xrlflow.Result:
    return xrlflow.optimize(control_flow(), **{"search": "greedy", "measure": False, "threads": 1, **options})


@pytest.mark.parametrize(
    ("made", "replayed"),
    [
        ({"cost": Roofline()}, {"cost": NegIsFree()}),
        ({"cost": NegIsFree()}, {"cost": Roofline()}),
        ({"cost": Roofline()}, {"cost": "auto"}),
        ({"cost": Roofline()}, {"cost": Roofline(), "search": "random"}),
        ({"cost": Roofline(), "search": "random"}, {"cost": Roofline()}),
    ],
)
def test_bodies_become_what_they_became(
    tmp_path: Path, made: Mapping[str, Any], replayed: Mapping[str, Any]
) -> None:
    trace = tmp_path / "trace.json"
    result = optimize(**made)
    result.save_trace(trace)
    again = optimize(**replayed, replay=trace)
    assert again.graph.fingerprint == result.graph.fingerprint
    assert again.report.search == "replay", "nothing was searched for"
    assert [s.key for s in again.trace] == [s.key for s in result.trace]
    again.save_trace(tmp_path / "again.json")
    assert (
        json.loads((tmp_path / "again.json").read_text())["before"] == json.loads(trace.read_text())["before"]
    )


def test_a_trace_of_other_bodies_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    optimize(cost=Roofline()).save_trace(trace)
    data = json.loads(trace.read_text())
    assert len(data["steps"]) == sum(data["before"]) == 3
    trace.write_text(json.dumps(data | {"before": [0] * len(data["before"]) + data["before"]}))
    with pytest.raises(TraceError, match="bodies"):
        optimize(cost=Roofline(), replay=trace)
    for wrong in ([4], [-1, 1], "no", 3):
        trace.write_text(json.dumps(data | {"before": wrong}))
        with pytest.raises(OptionError, match="not a trace"):
            optimize(cost=Roofline(), replay=trace)


@pytest.mark.parametrize(
    "wrong",
    [{"at": []}, {"at": 3}, {"at": None}, {"at": ["a"]}, {"at": [[1]]}, {"at": [1.5]}, {"rule": 3}, {"rule": ["a"]},
     {"family": None}, {"cost": "much"}, {"cost": None}],
    ids=str,
)  # fmt: skip
def test_a_trace_with_a_damaged_step_is_refused(tmp_path: Path, wrong: Mapping[str, Any]) -> None:
    trace = tmp_path / "trace.json"
    optimize(cost=Roofline()).save_trace(trace)
    data = json.loads(trace.read_text())
    data["steps"][0] |= wrong
    trace.write_text(json.dumps(data))
    with pytest.raises(OptionError, match="not a trace"):
        optimize(cost=Roofline(), replay=trace)


@pytest.mark.parametrize(
    "content", ["[]", '{"steps": "ab"}', '{"steps": {}}', '{"steps": [3]}', '{"steps": [[]]}']
)
def test_another_file_of_json_is_no_trace(tmp_path: Path, content: str) -> None:
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(OptionError, match="not a trace"):
        optimize(cost=Roofline(), replay=tmp_path / "trace.json")
