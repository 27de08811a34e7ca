"""What rules make of their examples and near misses: `python -m tests.rules.results` writes results.json anew.

Of each result the operators are kept, and a digest of its text, with types, attributes and small constants. A rule that
writes more operators than it needs, or applies where it should not, is as right as before: only this shows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

from rewrite_rules import LIBRARY
from xrlflow.ir import Graph, apply_edit, text
from xrlflow.onnxio import load
from xrlflow.prover.proof import library_of, parse
from xrlflow.rewrite import AnyRule, Library
from xrlflow.rewrite.state import build_edit, match_all

FILE = Path(__file__).with_name("results.json")


def graphs_of(rule: AnyRule) -> list[Graph]:
    return [load(parse(source)).graph for source in (*rule.examples, *rule.near_misses)]


def result_of(graph: Graph, library: Library) -> str:
    """What the rule of a library makes of a graph, at each place where it applies; empty if there is none."""
    made = []
    for match in sorted(match_all(graph, library), key=lambda m: m.key):
        after = apply_edit(graph, build_edit(graph, match))[0]
        operators = " ".join(n.op for n in after.topological() if not n.const) or "nothing"
        made.append(f"{operators} {sha256(text(after).encode()).hexdigest()[:8]}")
    return "; ".join(made)


def results() -> Mapping[str, list[str]]:
    """Rule -> what it makes of each of its examples, and then of its near misses."""
    return {
        rule.name: [result_of(graph, library_of(rule)) for graph in graphs_of(rule)]
        for rule in LIBRARY
        if rule.examples or rule.near_misses
    }


@cache
def known() -> Mapping[str, list[str]]:
    return json.loads(FILE.read_text())  # type: ignore[no-any-return]


if __name__ == "__main__":
    FILE.write_text(json.dumps(results(), indent=1) + "\n")
