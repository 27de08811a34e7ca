"""The rule library: one module per family, rules and nothing else. `LIBRARY` holds them all."""

from xrlflow.rewrite import AnyRule

LIBRARY: tuple[AnyRule, ...] = ()

__all__ = ["LIBRARY"]
