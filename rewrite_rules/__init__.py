"""The rule library: one module per family, rules and nothing else. `LIBRARY` holds them all."""

from rewrite_rules import (
    attention,
    identity,
    linear,
    merge,
    normalisation,
    recurrent,
    reshape,
    shared_weights,
    slices,
    transpose,
)
from xrlflow.rewrite import AnyRule

LIBRARY: tuple[AnyRule, ...] = (
    *identity.RULES,
    *transpose.RULES,
    *reshape.RULES,
    *slices.RULES,
    *linear.RULES,
    *merge.RULES,
    *shared_weights.RULES,
    *recurrent.RULES,
    *normalisation.RULES,
    *attention.RULES,
)

__all__ = ["LIBRARY"]
