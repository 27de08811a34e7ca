"""The rule library: one module for each kind of operator. `LIBRARY` holds the rules of all modules."""

from rewrite_rules import (
    activation,
    algebra,
    arithmetic,
    attention,
    control,
    convolution,
    expansion,
    exporter_cleanup,
    fold_into_weights,
    fourier,
    identity,
    logic,
    merge,
    microsoft,
    movement,
    normalisation,
    packed_weights,
    positions,
    precision,
    quantised,
    quantised_operators,
    recurrent,
    reduction,
    reshape,
    shared_weights,
    slice_pushdown,
    slices,
    substitutes,
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
        slice_pushdown,
        arithmetic,
        fold_into_weights,
        merge,
        shared_weights,
        algebra,
    ),
    *(
        recurrent,
        normalisation,
        activation,
        reduction,
        attention,
        convolution,
        control,
        exporter_cleanup,
        positions,
        logic,
    ),
    *(weights_algebra, microsoft, expansion, substitutes, fourier, precision),
    *(quantised, quantised_operators, packed_weights),
)

LIBRARY: tuple[AnyRule, ...] = tuple(rule for module in _MODULES for rule in declared_in(module))

__all__ = ["LIBRARY"]
