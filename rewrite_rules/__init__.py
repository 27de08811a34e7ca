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
from xrlflow.rewrite import AnyRule, declared_in

_MODULES = (
    *(
        identity,
        transpose,
        reshape,
        slices,
        movement,
        demand,
        linear,
        merge,
        shared_weights,
        algebra,
        recurrent,
    ),
    *(native_recurrent, normalisation, attention, convolution, control, exports, idioms, weights_algebra),
    *(microsoft, expansion),
)

LIBRARY: tuple[AnyRule, ...] = tuple(rule for module in _MODULES for rule in declared_in(module))

__all__ = ["LIBRARY"]
