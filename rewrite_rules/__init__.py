"""The rule library: one module per family, rules and nothing else. `LIBRARY` holds them all."""

from rewrite_rules import attention, identity, normalisation, reshape, shared_weights, transpose
from xrlflow.rewrite import AnyRule

LIBRARY: tuple[AnyRule, ...] = (
    *identity.RULES,
    *transpose.RULES,
    *normalisation.RULES,
    *attention.RULES,
    *reshape.RULES,
    *shared_weights.RULES,
)

__all__ = ["LIBRARY"]
