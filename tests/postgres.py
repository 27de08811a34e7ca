"""A PostgreSQL server of the tests' own (`make postgres` installs one)."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PASSWORD = "pa:ss@w/or%d"
QUOTED = "pa%3Ass%40w%2For%25d"


def programs() -> Path | None:
    """The folder of `initdb` and `postgres`, of the newest version that is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class Server:
    """A server on a port of this machine, with a folder of its own. PostgreSQL refuses to run as root: nobody does."""

    def __init__(self) -> None:
        bin = programs()
        assert bin is not None
        self.bin = bin
        self.folder = Path(tempfile.mkdtemp(prefix="xrlflow-postgres-", dir="/tmp"))
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        self.user = None
        if os.geteuid() == 0:
            self.user = "nobody"
            for path in (self.folder, secret):
                os.chown(path, pwd.getpwnam("nobody").pw_uid, -1)
        self._run("initdb", "-D", "data", "-U", "tester", "--auth=scram-sha-256", "--pwfile=password", "--no-sync",
                  "--encoding=UTF8", "--locale=C")  # fmt: skip

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self.bin / program, *arguments], cwd=self.folder, user=self.user, check=True, capture_output=True
        )

    def url(self, password: str = QUOTED, database: str = "postgres", port: int | None = None) -> str:
        return f"postgresql://tester:{password}@127.0.0.1:{port or self.port}/{database}"

    def start(self) -> None:
        settings = {
            "port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": self.folder, "fsync": "off",
            "max_connections": 40, "shared_buffers": "16MB",
        }  # fmt: skip
        options = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [self.bin / "postgres", "-D", "data", *options],
                cwd=self.folder,
                user=self.user,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + 30
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it. SIGINT: connections are closed; SIGQUIT: at once."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(30)
            self.process = None

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder)
