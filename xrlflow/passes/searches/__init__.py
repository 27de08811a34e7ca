"""Searches for orders of passes. Each takes a compiler, a module, a `Budget` and a seed, and returns an `Order`."""

from xrlflow.passes.searches.reducing import reducing
from xrlflow.passes.searches.sequences import Fixed, evolve, fixed, follow, refined
from xrlflow.passes.searches.simple import beam, greedy, random
from xrlflow.passes.searches.steps import (
    Budget,
    BudgetUsedUp,
    Explorer,
    Foreseeing,
    Interrupted,
    Meter,
    Node,
    Order,
    without_effect,
)
from xrlflow.passes.searches.tree import TreeConfig, tree

__all__ = [
    "Budget",
    "BudgetUsedUp",
    "Explorer",
    "Fixed",
    "Foreseeing",
    "Interrupted",
    "Meter",
    "Node",
    "Order",
    "TreeConfig",
    "beam",
    "evolve",
    "fixed",
    "follow",
    "greedy",
    "random",
    "reducing",
    "refined",
    "tree",
    "without_effect",
]
