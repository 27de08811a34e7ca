#!/usr/bin/env bash
# onnxruntime 1.31.1 (Linux): `import onnxruntime` alone creates an identifier of this machine's user, a database of
# events and a thread that sends them, and opens a socket within two minutes. A process that only sets
# ORT_DISABLE_TELEMETRY before that does none of it.
#
# Guess: telemetry is of builds for Windows, as it was until 1.28, or it begins with a session. Seen: files appear
# during the import, in ~/.cache (or XDG_CACHE_HOME) and TMPDIR. An empty variable, and 0, leave it on; 1 and "true" turn
# it off. disable_telemetry_events() is called too late: the files are there, and the thread stays.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 numpy==2.3.5
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import os
import subprocess
import sys
from pathlib import Path

folder = Path(sys.argv[1])
program = """
import os
import numpy
before = len(os.listdir("/proc/self/task"))
import onnxruntime
print(len(os.listdir("/proc/self/task")) - before)
onnxruntime.disable_telemetry_events()
print(len(os.listdir("/proc/self/task")) - before)
"""


def seen(name, value):
    """Threads after the import, and after telemetry is disabled; and the files of a user whom nothing else has."""
    home = folder / name
    temporary = home / "tmp"
    temporary.mkdir(parents=True)
    variables = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY" and not k.startswith("XDG_")}
    variables |= {"HOME": str(home), "TMPDIR": str(temporary)}
    variables |= {} if value is None else {"ORT_DISABLE_TELEMETRY": value}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    files = sorted(path.name for path in home.rglob("*") if path.is_file())
    return [int(n) for n in done.stdout.split()], files


collects = ([1, 1], [".ses", "deviceid", "onnxruntime.db"])
wanted = {"unset": collects, "": collects, "0": collects, "1": ([0, 0], []), "true": ([0, 0], [])}
values = {"unset": None}
found = {name: seen(name or "empty", values.get(name, name)) for name in wanted}
print(f"threads and files by ORT_DISABLE_TELEMETRY: {found}")
assert found == wanted, "this has changed"
PYTHON
