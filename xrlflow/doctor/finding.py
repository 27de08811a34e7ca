"""The result of a check."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Status(enum.Enum):
    OK = "ok"
    WARN = "warn"
    """The thing that was checked works with restrictions, or measurements may mislead."""
    FAIL = "fail"
    """The thing that was checked does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one thing that was checked."""

    name: str
    status: Status
    found: str  # what was observed
    advice: str = ""  # what to do about it; "" if nothing
    needed: bool = False  # whether optimising for ONNX Runtime requires it

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"status": self.status.value}
