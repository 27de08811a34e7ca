"""Rewriting: the language of rules, patterns, the plans that match them, incremental matching, and rewrite states."""

from xrlflow.rewrite.build import GraphBuilder
from xrlflow.rewrite.library import Library, RuleStats
from xrlflow.rewrite.propagate import evaluate_small
from xrlflow.rewrite.rule import (
    AnyRule,
    Captures,
    Lit,
    Op,
    Reader,
    Refused,
    Region,
    RegionRule,
    Rule,
    RuleError,
    Val,
    accurate,
    common_source,
    declared_in,
    profitable,
    require,
)
from xrlflow.rewrite.state import Match, RewriteState

__all__ = [
    "AnyRule",
    "Captures",
    "GraphBuilder",
    "Library",
    "Lit",
    "Match",
    "Op",
    "Reader",
    "Refused",
    "Region",
    "RegionRule",
    "RewriteState",
    "Rule",
    "RuleError",
    "RuleStats",
    "Val",
    "accurate",
    "common_source",
    "declared_in",
    "evaluate_small",
    "profitable",
    "require",
]
