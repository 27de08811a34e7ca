"""The end of a worker's socket in the process that started the worker. Sending and receiving never wait for the
worker.

Bytes that the socket does not accept at once are sent by a thread, so that several workers get their tasks at the same
time.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence

_LENGTH = struct.Struct("!i")
_GREAT_LENGTH = struct.Struct("!iQ")
"""The headers of messages, in the format of `multiprocessing.connection.Connection`, which the other end uses. The
second header begins with -1, and is for messages of 2 GiB and more.
"""
_CHUNK = 1 << 18
_LONGEST_WAIT = 1e6


class Channel:
    """Sends and receives messages. `ended`: the other end is closed, and all its messages were received."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._lock = threading.Lock()  # guards the unsent bytes and their sender
        self._sender: threading.Thread | None = None
        self._received = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        size = len(message)
        header = _LENGTH.pack(size) if size < 1 << 31 else _GREAT_LENGTH.pack(-1, size)
        with self._lock:
            self._unsent += (memoryview(header), memoryview(message))
            if self._sender is None and not self._push():
                self._sender = threading.Thread(target=self._send_rest, daemon=True)
                self._sender.start()

    def _send_rest(self) -> None:
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        while True:
            poll.poll()
            with self._lock:
                if self._push():
                    self._sender = None
                    return

    def _push(self) -> bool:
        """Send as many bytes as the socket accepts now. Returns whether no bytes are left."""
        try:
            while self._unsent:
                rest = self._unsent[0][self._socket.send(self._unsent[0]) :]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return False
        except OSError:  # the other end is closed; `receive` notices this, too
            self._unsent.clear()
        return True

    def receive(self) -> list[bytearray]:
        """The messages that have arrived."""
        try:
            while data := self._socket.recv(_CHUNK):
                self._received += data
            self.ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> bytearray | None:
        """The first message, if all of it has arrived."""
        start = _LENGTH.size
        if len(self._received) < start:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        if size < 0:
            start = _GREAT_LENGTH.size
            if len(self._received) < start:
                return None
            _, size = _GREAT_LENGTH.unpack_from(self._received)
        if len(self._received) < start + size:
            return None
        message = self._received[start : start + size]
        del self._received[: start + size]
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the socket was closed before
            self._socket.shutdown(socket.SHUT_RDWR)
        if (sender := self._sender) is not None:
            sender.join()
        self._socket.close()

    def disown(self) -> None:
        """Close this process's copy of the socket. This process is a forked copy of another one, which continues to
        use the socket.
        """
        self._socket.close()


def wait(channels: Sequence[Channel], seconds: float = math.inf) -> list[Channel]:
    """Wait until there is something to receive, or for `seconds`. Returns the channels that are ready."""
    poll = select.poll()
    for channel in channels:
        poll.register(channel, select.POLLIN)
    ready = {number for number, _ in poll.poll(math.ceil(1e3 * min(seconds, _LONGEST_WAIT)))}
    return [channel for channel in channels if channel.fileno() in ready]
