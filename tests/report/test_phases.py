"""Every phase of an optimisation has a name in the summary."""

from __future__ import annotations

import re
from pathlib import Path

from xrlflow.pipeline import context
from xrlflow.report import reasons


def test_every_phase_has_a_name() -> None:
    sources = Path(context.__file__).parent.glob("*.py")
    phases = {name for path in sources for name in re.findall(r'clock\.phase\("(\w+)"', path.read_text())}
    assert {"correct", "search", "verify"} <= phases
    assert phases <= reasons.PHASES.keys()
