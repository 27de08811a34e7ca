"""A fresh process that compares two models: `python -m xrlflow.backends.onnxruntime.worker FOLDER`.

Reads FOLDER/request.json and FOLDER/feeds.npz, writes FOLDER/result.json: {"comparison": ...} or {"error":
one line}. Started by `measure_in_fresh_processes`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from xrlflow.backends.onnxruntime.session import Optimization
from xrlflow.backends.onnxruntime.timing import measure
from xrlflow.backends.onnxruntime.wire import load_feeds, to_json
from xrlflow.backends.protocol import BackendError


def main(folder: Path) -> int:
    """Serve the one request in `folder`; the exit status is 0 when a result or an error was written."""
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    request = json.loads((folder / "request.json").read_text())
    feeds = load_feeds(folder / "feeds.npz", request["feeds"])
    try:
        comparison = measure(
            request["models"],
            feeds,
            threads=request["threads"],
            time_limit=request["time_limit"],
            target_width=request["target_width"],
            optimization=Optimization(request["optimization"]),
            session_options=request["session_options"],
            load_reversed=request["load_reversed"],
        )
        answer: dict[str, object] = {"comparison": to_json(comparison)}
    except BackendError as error:
        answer = {"error": str(error)}
    (folder / "result.json").write_text(json.dumps(answer))
    return 0


def _leave_with_parent(parent: int) -> None:
    """End this process when its parent is gone (killed, so that it could not end us)."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
