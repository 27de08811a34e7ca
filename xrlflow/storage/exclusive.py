"""Locks between processes of this machine. They end with the process that holds them, however it ends.

Two measurements of latency at the same time on one machine disturb each other. A process that measures for a batch
holds the lock of `measuring`, so that jobs of several batches, workers or users do not measure at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "XRLFLOW_MEASURING_LOCK"
"""The environment variable that names another file. Containers on one machine need one that they share."""
_NAME = "xrlflow.measuring"


class LockedError(OSError):
    """Another process holds a lock. The message is the end of a sentence: "process 12 has it"."""


@contextmanager
def locked(path: Path, on_wait: Callable[[str], None] | None = None, *, mode: int = 0o644) -> Iterator[None]:
    """Hold the lock of a file, which is created with the permissions `mode` if it is missing.

    If another process holds the lock, `on_wait` is called once with a few words about this process, and `locked` waits.
    Without `on_wait`, `locked` raises LockedError instead. Two threads of one process exclude each other, too. Raises
    OSError if the file cannot be opened.
    """
    descriptor = _acquire(path, on_wait, mode)
    try:
        _sign(descriptor)
        yield
    finally:
        # A process that was forked in the meantime has the descriptor, too, and would hold the lock if this process
        # only closed its own.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _acquire(path: Path, on_wait: Callable[[str], None] | None, mode: int) -> int:
    """A descriptor with the lock of the file. If the file was replaced during the wait, the new file is locked."""
    reported = False
    while True:
        descriptor = _opened(path, mode)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                message = f"process {holder} has it" if holder.isdigit() else "another process has it"
                if on_wait is None:
                    raise LockedError(message) from None
                if not reported:
                    on_wait(message)
                    reported = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def measuring_lock() -> Path:
    """The file of this machine's lock: the file that the environment variable `VARIABLE` names, or one in the folder of
    temporary files. A child process with another TMPDIR needs the variable."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else Path(tempfile.gettempdir()) / _NAME


@contextmanager
def measuring(on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold this machine's lock of measurements (see `locked`)."""
    path = measuring_lock()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(path, on_wait, mode=0o666))
        except OSError as error:
            message = (
                f"it cannot be locked ({error.strerror}): set {VARIABLE} to a file that every user may write"
            )
            raise OSError(error.errno, message, os.fspath(path)) from error
        yield


def _sign(descriptor: int) -> None:
    """Write this process's id into the lock file, for messages. A full disk does not matter."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        return  # in a shared folder the lock file may be a link to somebody's data
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _opened(path: Path, mode: int) -> int:
    """A descriptor of the file. A link is not followed, since other users may write to the folder."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags)
        with contextlib.suppress(FileExistsError):  # another process was faster
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(descriptor, mode)  # regardless of the umask: every user of the machine has to lock it
            return descriptor
