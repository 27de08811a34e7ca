"""What an examination found."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Status(enum.Enum):
    OK = "ok"
    WARN = "warn"
    """It works with less, or measurements may mislead."""
    FAIL = "fail"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one thing: what was found, and what to do about it (empty: nothing).

    `needed`: optimising for ONNX Runtime does not work without it.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    needed: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"status": self.status.value}
