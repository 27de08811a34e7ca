#!/usr/bin/env bash
# onnxruntime 1.31.1 (Linux): `import onnxruntime` alone creates an identifier of this machine's user, a database of
# events and a thread that sends them, and opens a socket within two minutes. A process that only sets
# ORT_DISABLE_TELEMETRY before that does none of it.
#
# Guess: telemetry is of builds for Windows, as it was until 1.28, or it begins with a session. Seen: files appear
# during the import, in ~/.cache (or XDG_CACHE_HOME) and TMPDIR. An empty variable, and 0, leave it on; 1 and "true" turn
# it off. disable_telemetry_events() is called too late: the files are there, and the thread stays. A variable CI,
# GITHUB_ACTIONS or TF_BUILD turns it off as well: so a test in CI never sees what users get.
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


def seen(name, setting):
    """Threads after the import, and after telemetry is disabled; and the files of a user whom nothing else has."""
    home = folder / name
    temporary = home / "tmp"
    temporary.mkdir(parents=True)
    variables = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(temporary), **setting}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    files = sorted(path.name for path in home.rglob("*") if path.is_file())
    return [int(n) for n in done.stdout.split()], files


collects, nothing = ([1, 1], [".ses", "deviceid", "onnxruntime.db"]), ([0, 0], [])
disabled = {value: {"ORT_DISABLE_TELEMETRY": value} for value in ("", "0", "1", "true")}
settings = {"unset": {}, **disabled, **{name: {name: "true"} for name in ("CI", "GITHUB_ACTIONS", "TF_BUILD")}}
wanted = {name: collects if name in ("unset", "", "0") else nothing for name in settings}
found = {name: seen(name or "empty", setting) for name, setting in settings.items()}
print(f"threads and files by setting: {found}")
assert found == wanted, "this has changed"
PYTHON
