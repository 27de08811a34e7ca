"""Files that are written whole or not at all.

What is written goes to a new file, of a name that nobody can foresee, beside the place where it belongs; when it is on
the disk it takes that place in one step. A symbolic link is followed once, to the file that is written; a file that is
replaced leaves its mode and owner to the new one. Other hard links to it keep what it held.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import BinaryIO

# What names of unfinished files begin with.
UNFINISHED = ".xrlflow-"

Path = str | os.PathLike[str]


def destination(path: Path) -> str:
    """The file that writing to `path` writes: an absolute path without symbolic links.

    Raises OSError if something else than a regular file is there (a folder, a pipe, a device), if the file is
    read-only, if links lead in a circle, or if the folder is missing.
    """
    found = os.path.realpath(path)
    if not os.path.isdir(os.path.dirname(found)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), found)
    try:
        there = os.lstat(found)
    except FileNotFoundError:
        return found
    if stat.S_ISLNK(there.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), found)
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), found)
    if not stat.S_ISREG(there.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", found)
    if not os.access(found, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, "The file there is read-only", found)
    return found


class NewFile:
    """A file that is being written in a folder; it is gone at the end of the block, unless it was given its place.

    `durable=False` leaves it to the system when the content reaches the disk.
    """

    def __init__(self, folder: str, *, durable: bool = True) -> None:
        self._name = os.path.join(folder, f"{UNFINISHED}{secrets.token_hex(16)}")
        self._durable = durable
        self.file: BinaryIO

    def __enter__(self) -> NewFile:
        # O_EXCL: what has the name already, a link too, is an error. The mode is the umask's to narrow.
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
            with contextlib.suppress(OSError):  # what could not be written is told already, or is not wanted
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
        """Take the place of `target` (see `destination`), or of nothing."""
        self._complete()
        with contextlib.suppress(FileNotFoundError):
            _like(self.file.fileno(), os.stat(target))
        os.replace(self._name, target)
        if self._durable:
            _sync(os.path.dirname(target))

    def claim(self, target: str) -> bool:
        """Take the place of nothing; False, and nothing is changed, if there is something."""
        self._complete()
        try:
            os.link(self._name, target)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            try:
                os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            os.replace(self._name, target)
        if self._durable:
            _sync(os.path.dirname(target))
        return True

    def is_at(self, path: str) -> bool:
        """Whether this is the file that is there."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False


def _sync(folder: str) -> None:
    """Have the names in a folder on the disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _like(descriptor: int, old: os.stat_result) -> None:
    """Give a file the mode and, where we may, the owner of the one that it replaces."""
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode) & 0o777)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends without an exception. Raises OSError."""
    target = destination(path)
    with NewFile(os.path.dirname(target), durable=durable) as new:
        yield new.file
        new.replace(target)


def put(finished: Path, path: Path) -> None:
    """Have a file that was written elsewhere on the same file system take the place of `path`. Raises OSError."""
    target = destination(path)
    with open(finished, "rb+") as file:
        os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            _like(file.fileno(), os.stat(target))
    os.replace(finished, target)
    _sync(os.path.dirname(target))


def write(path: Path, content: bytes) -> None:
    """Replace a file's content. Raises OSError."""
    with replacing(path) as file:
        file.write(content)


def check(path: Path) -> None:
    """Raise OSError if `path` could not be written."""
    with NewFile(os.path.dirname(destination(path)), durable=False):
        pass
