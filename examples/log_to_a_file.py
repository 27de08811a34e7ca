"""Log progress to a file: `python examples/log_to_a_file.py [MODEL.onnx]` writes progress.jsonl.

`optimize` calls a listener with the phase, how far it is, and a note. Here each call becomes a line of JSON, as
services collect them. What a listener raises ends the optimisation, so a full disk is a warning here, and no more.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from types import TracebackType

import onnx
from slow_model import slow_model

import xrlflow


class FileLog:
    """A listener that writes a line whenever the phase changes, and in between at most once in `every` seconds."""

    def __init__(self, path: Path, every: float = 0.5) -> None:
        self._begin = time.monotonic()
        self._file = path.open("w", encoding="utf-8")
        self._every = every
        self._phase, self._last = "", -every

    def __call__(self, phase: str, done: int, total: int, note: str) -> None:
        now = time.monotonic() - self._begin
        if phase == self._phase and now - self._last < self._every:
            return
        self._phase, self._last = phase, now
        line = {"seconds": round(now, 3), "phase": phase, "done": done, "total": total, "note": note}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()  # for `tail -f`
        except OSError as error:
            warnings.warn(f"the log is incomplete: {error}", stacklevel=2)

    def __enter__(self) -> FileLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "slow.onnx")
    if len(sys.argv) == 1:
        onnx.save(slow_model(), path)
    log = Path("progress.jsonl")
    with FileLog(log) as listener:
        result = xrlflow.optimize(
            path, search="greedy", cost="roofline", measure=False, time_limit=15, listener=listener
        )
    result.save(path.with_suffix(".fast.onnx"))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    print("phases:", ", ".join(dict.fromkeys(line["phase"] for line in lines)))
    print(f"wrote {len(lines)} lines to {log}")


if __name__ == "__main__":
    main()
