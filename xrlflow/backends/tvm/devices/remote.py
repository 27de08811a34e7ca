"""Devices behind TVM's RPC tracker: how to find one and to open a session with it.

The device runs `python -m tvm.exec.rpc_server --tracker HOST:PORT --key KEY`. Trackers and servers do not authenticate:
everybody who reaches one can run any program on its machine. Use them only in a private network.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.toolchain.import_tvm import last_line, tvm

PATIENCE = 10.0
"""Seconds to wait for a device that is in use or restarts."""
_REPLY_SECONDS = 5.0  # seconds that a tracker may take to answer
_PAUSE = 0.2  # seconds between requests for a device that is not available


class DeviceError(BackendError):
    """The tracker does not answer or does not know the device, or the device does not answer."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A device: the address of its tracker, and the key under which it is registered."""

    host: str
    port: int
    key: str

    @staticmethod
    def parse(text: str) -> Remote:
        """Parse `HOST:PORT/KEY` (an IPv6 address is in brackets). Raises BackendError."""
        address, _, key = text.partition("/")
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not key or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise BackendError(
                f"remote device {text!r}: write it as HOST:PORT/KEY, such as tracker.lan:9190/board"
            )
        if key.split() != [key]:
            raise BackendError(f"remote device {text!r}: a key has no spaces")
        return Remote(host, int(port), key)

    @property
    def tracker(self) -> str:
        """The tracker's address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.tracker}/{self.key}"


def connect(remote: Remote, *, patience: float = PATIENCE, limit: float = 0.0) -> Any:
    """A session with the device (TVM's RPCSession). The device ends it after `limit` seconds (0: never).

    If the tracker does not list the device, it is asked again for `patience` seconds. If the device is in use, the call
    waits for `patience` seconds, at least one second. Raises DeviceError.
    """
    tvm()
    from tvm import rpc

    end = time.monotonic() + patience
    while True:
        try:
            host, port, match = _assigned(remote, max(1.0, end - time.monotonic()))
            return rpc.connect(host, port, match, limit)
        except DeviceError:
            if time.monotonic() >= end:
                raise
        except Exception as error:  # the device disappeared after the tracker's answer
            if time.monotonic() >= end:
                raise DeviceError(f"remote device {remote} does not answer: {last_line(error)}") from error
        time.sleep(_PAUSE)


def _assigned(remote: Remote, patience: float) -> tuple[str, int, str]:
    """Host, port and password of the device that the tracker assigns. (TVM's own client would wait for ever.)

    Raises DeviceError.
    """
    from tvm.rpc import base

    try:
        with socket.create_connection((remote.host, remote.port), timeout=_REPLY_SECONDS) as tracker:
            keys = _keys(tracker, remote)
            if remote.key not in keys:
                listed = f"it has {', '.join(sorted(set(keys)))}" if keys else "it has none"
                raise DeviceError(f"the tracker at {remote.tracker} has no device {remote.key!r} ({listed})")
            base.sendjson(tracker, [base.TrackerCode.REQUEST, remote.key, "", 1])
            tracker.settimeout(patience)
            try:
                _, (host, port, match) = base.recvjson(tracker)
            except TimeoutError as error:
                raise DeviceError(f"remote device {remote} is in use, or does not answer") from error
            return str(host), int(port), str(match)
    except (OSError, ValueError, TypeError, KeyError, struct.error) as error:
        raise DeviceError(f"no tracker of TVM's answers at {remote.tracker}: {last_line(error)}") from error


def _keys(tracker: socket.socket, remote: Remote) -> list[str]:
    """The key of each device that the tracker lists, in use or not."""
    from tvm.rpc import base

    tracker.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
    if base.recvall(tracker, 4) != struct.pack("<i", base.RPC_TRACKER_MAGIC):
        raise DeviceError(f"{remote.tracker} is no tracker of TVM's")
    base.sendjson(tracker, [base.TrackerCode.SUMMARY])
    _, summary = base.recvjson(tracker)
    return [str(server["key"]).removeprefix("server:") for server in summary["server_info"] if server]


def count_devices(remote: Remote) -> int:
    """The number of devices with this key; 1 if the tracker does not answer, because the opening of a session will
    report the reason."""
    tvm()
    try:
        with socket.create_connection((remote.host, remote.port), timeout=_REPLY_SECONDS) as tracker:
            return max(1, _keys(tracker, remote).count(remote.key))
    except (OSError, ValueError, TypeError, KeyError, struct.error, DeviceError):
        return 1


def what_happened(error: Exception, remote: Remote | None, limit: float = 0.0) -> str:
    """An error of TVM's client on one line: how the session ended, or the message about the model."""
    text = last_line(error)
    if "RPCSessionTimeoutError" in text:
        return f"remote device {remote} ended the session after {limit:g} s"
    # Messages with these words mean an unexpected reply, or a closed connection.
    if "RPCCode" in text or "SockChannel" in text:
        return f"the session with remote device {remote} ended: its process died, or the network"
    return f"remote device {remote}: {text}"


def use_threads(session: Any, remote: Remote, threads: int | None) -> int:
    """Set the number of threads of a session's kernels (None: as many as the server has). Returns that number.

    Raises BackendError for more threads than the server was started with.
    """
    available = int(session.get_function("runtime.NumThreads")())
    if threads is not None and threads > available:
        raise BackendError(
            f"remote device {remote} has {available} threads, not {threads}: start its server with "
            f"TVM_NUM_THREADS={threads}"
        )
    if threads is not None:
        session.get_function("runtime.config_threadpool")(1, threads)
    return threads or available
