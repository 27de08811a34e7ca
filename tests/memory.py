"""The memory of this process that no file stands for. Linux only."""

from __future__ import annotations

import threading
from pathlib import Path


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell anonymous memory")


class Peak(threading.Thread):
    """Samples the memory of the process until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.005):
            self.bytes = max(self.bytes, anonymous())
