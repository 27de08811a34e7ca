"""Names and families of rules stay what they are: agents, traces and the selection know them."""

from __future__ import annotations

import json
from pathlib import Path

from rewrite_rules import LIBRARY

FAMILIES = Path(__file__).with_name("families.json")


def test_no_rule_has_another_name_or_family() -> None:
    """A new rule is added to families.json; one that is renamed or moved is unknown to every agent and trace."""
    known = {name: family for family, names in json.loads(FAMILIES.read_text()).items() for name in names}
    assert {rule.name: rule.family for rule in LIBRARY} == known
