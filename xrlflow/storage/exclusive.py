"""Locks between processes of this machine. They end with the process that holds them, however it ends.

Two latencies that are measured at once on one machine disturb each other. What measures for a batch holds the lock of
`measuring`, so jobs of several batches, workers or users take turns.
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
def locked(path: Path, waiting: Callable[[str], None] | None = None, *, mode: int = 0o644) -> Iterator[None]:
    """Hold the lock of a file, which is created with this mode if it is missing.

    `waiting` is told once, in a few words, who holds it, before this waits for the lock. Without it, this does not
    wait and raises LockedError. Locks of one process exclude each other, too. Raises OSError if there can be no file.
    """
    descriptor = _held(path, waiting, mode)
    try:
        _sign(descriptor)
        yield
    finally:
        # A process that was forked in the meantime has the descriptor, too: closing ours would leave it the lock.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _held(path: Path, waiting: Callable[[str], None] | None, mode: int) -> int:
    """A descriptor with the lock of the file that is there now: who waits may wait for one that has been removed."""
    told = False
    while True:
        descriptor = _opened(path, mode)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                said = f"process {holder} has it" if holder.isdigit() else "another process has it"
                if waiting is None:
                    raise LockedError(said) from None
                if not told:
                    waiting(said)
                    told = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def measuring_lock() -> Path:
    """The file of this machine's lock: the one that `VARIABLE` names, or one in the folder of temporary files. A child
    that gets a TMPDIR of its own has to be told it."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / _NAME


@contextmanager
def measuring(waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold this machine's lock of measurements (see `locked`)."""
    path = measuring_lock()
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(path, waiting, mode=0o666))
        except OSError as error:
            said = (
                f"it cannot be locked ({error.strerror}): set {VARIABLE} to a file that every user may write"
            )
            raise OSError(error.errno, said, os.fspath(path)) from error
        yield


def _sign(descriptor: int) -> None:
    """Write who has the lock. Only messages say so, and a full disk does not matter."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        return  # its folder may be anybody's, and its other name that of somebody's data
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _opened(path: Path, mode: int) -> int:
    """A descriptor of the file. A link is not followed, since the folder may be anybody's."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags)
        with contextlib.suppress(FileExistsError):  # another process was faster
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(descriptor, mode)  # whatever the umask is: every user of the machine has to lock it
            return descriptor
