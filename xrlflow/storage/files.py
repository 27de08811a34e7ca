"""Writes files completely or not at all.

The content goes to a new file with an unpredictable name in the same folder. When it has reached the disk, the new file
takes the place of the old one in one step. A symbolic link is followed once, to the file that is written. The new file
gets the mode and owner of the old one. Other hard links to the old file keep the old content.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import BinaryIO

# The prefix of the names of unfinished files.
UNFINISHED = ".xrlflow-"
# The prefix of the names of temporary folders.
TEMPORARY = "xrlflow-"
# The most bytes that are read of a file: protobuf allows no more, and an endless pipe would use up all memory.
MAX_BYTES = 1 << 31
_PART = 1 << 20

Path = str | os.PathLike[str]


class StandardInput(bytes):
    """The bytes of standard input: a file without a folder. Messages use its `name`."""

    name = "standard input"


def read(path: Path) -> bytes:
    """The bytes of a file, which may be a pipe. Raises OSError if it cannot be read or has more than MAX_BYTES."""
    content = bytearray()
    with open(path, "rb") as file:
        while part := file.read(_PART):
            content += part
            if len(content) > MAX_BYTES:
                raise OSError(
                    errno.EFBIG, f"it has more than {MAX_BYTES} bytes, or does not end", os.fspath(path)
                )
    return bytes(content)


def cannot_write(path: Path, error: OSError, instead: str = "choose another output") -> str:
    """One line that says why a file cannot be written, and what to do: `instead`, or, in our own temporary folders, to
    make room."""
    inside = os.path.relpath(os.path.abspath(path), os.path.abspath(tempfile.gettempdir()))
    if is_full(error) and inside.startswith(TEMPORARY):
        return no_room()
    why = error.strerror or " ".join(str(error).split())
    return f"{os.fspath(path)}: cannot be written ({why}): {instead}"


def is_full(error: OSError) -> bool:
    """Whether a file system has no room, or the user may use no more of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_room() -> str:
    return f"the temporary folder {tempfile.gettempdir()} is full: make room in it, or name another in TMPDIR"


def destination(path: Path) -> str:
    """The absolute path, without symbolic links, of the file that is written when writing to `path`.

    Raises OSError if there is something other than a regular file (a folder, pipe or device), if the file is read-only,
    if links form a cycle, or if the folder is missing.
    """
    target = os.path.realpath(path)
    if not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), target)
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return target
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), target)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", target)
    if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, "The file there is read-only", target)
    return target


class NewFile:
    """A file that is being written in a folder. It is removed at the end of the block unless it replaced its target.

    `durable=False`: do not wait until the content has reached the disk.
    """

    def __init__(self, folder: str, *, durable: bool = True) -> None:
        self._name = os.path.join(folder, f"{UNFINISHED}{secrets.token_hex(16)}")
        self._durable = durable
        self.file: BinaryIO

    def __enter__(self) -> NewFile:
        # O_EXCL fails if the name exists, even as a link. The umask may narrow the mode.
        descriptor = os.open(
            self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666
        )
        try:
            self.file = os.fdopen(descriptor, "w+b")
        except BaseException:
            os.close(descriptor)
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with contextlib.suppress(OSError):  # a failed write was reported before
                self.file.close()
        finally:
            self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name)

    def _complete(self) -> None:
        self.file.flush()
        if self._durable:
            os.fsync(self.file.fileno())

    def replace(self, target: str) -> None:
        """Give this file the name `target` (see `destination`). A file of that name is replaced."""
        self._complete()
        with contextlib.suppress(FileNotFoundError):
            _like(self.file.fileno(), os.stat(target))
        os.replace(self._name, target)
        if self._durable:
            _sync(os.path.dirname(target))

    def claim(self, target: str) -> bool:
        """Give this file the name `target` if no file has it, and return True. Otherwise change nothing and return
        False."""
        self._complete()
        try:
            os.link(self._name, target)
        except FileExistsError:
            return False
        except OSError:  # the file system has no hard links
            try:
                os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            os.replace(self._name, target)
        if self._durable:
            _sync(os.path.dirname(target))
        return True

    def is_at(self, path: str) -> bool:
        """Whether this file is the one at `path`."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False


def _sync(folder: str) -> None:
    """Wait until the names in a folder have reached the disk, if the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _like(descriptor: int, old: os.stat_result) -> None:
    """Give a file the mode and, where permitted, the owner of the file that it replaces."""
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode) & 0o777)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends without an exception. Raises OSError."""
    target = destination(path)
    with NewFile(os.path.dirname(target), durable=durable) as new:
        yield new.file
        new.replace(target)


def put(finished: Path, path: Path) -> None:
    """Let a finished file, on the same file system, replace `path`. Raises OSError."""
    target = destination(path)
    with open(finished, "rb+") as file:
        os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            _like(file.fileno(), os.stat(target))
    os.replace(finished, target)
    _sync(os.path.dirname(target))


def write(path: Path, content: bytes) -> None:
    """Replace the content of a file. Raises OSError."""
    with replacing(path) as file:
        file.write(content)


def check(path: Path) -> None:
    """Raise OSError if `path` cannot be written."""
    with NewFile(os.path.dirname(destination(path)), durable=False):
        pass
