"""The rule library: one module per family, rules and nothing else. `LIBRARY` holds them all."""

from rewrite_rules import (
    algebra,
    attention,
    control,
    convolution,
    demand,
    expansion,
    exports,
    identity,
    idioms,
    linear,
    merge,
    microsoft,
    movement,
    native_recurrent,
    normalisation,
    recurrent,
    reshape,
    shared_weights,
    slices,
    transpose,
    weights_algebra,
)
from xrlflow.rewrite import AnyRule

LIBRARY: tuple[AnyRule, ...] = (
    *identity.RULES,
    *transpose.RULES,
    *reshape.RULES,
    *slices.RULES,
    *movement.RULES,
    *demand.RULES,
    *linear.RULES,
    *merge.RULES,
    *shared_weights.RULES,
    *algebra.RULES,
    *recurrent.RULES,
    *native_recurrent.RULES,
    *normalisation.RULES,
    *attention.RULES,
    *convolution.RULES,
    *control.RULES,
    *exports.RULES,
    *idioms.RULES,
    *weights_algebra.RULES,
    *microsoft.RULES,
    *expansion.RULES,
)

__all__ = ["LIBRARY"]
