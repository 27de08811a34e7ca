"""The code that runs in a worker's process on a node of a cluster. The node must have this package and the packages
that the handler imports.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from xrlflow.workers.protocol import Failure, Handler, MakeHandler, own_version


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of a worker: its machine, Ray's name of its node, and the version of its package."""

    host: str
    node: str
    version: str


class RemoteWorker:
    """The worker on the node. Ray calls its methods one after another, in the order of the requests."""

    def __init__(self) -> None:
        self._handler: Handler | None = None
        self._failure: Failure | None = None

    def greet(self) -> Greeting:
        node = ray.get_runtime_context().get_node_id()
        return Greeting(socket.gethostname(), node, own_version())

    def make(self, make: MakeHandler) -> None:
        """Create the handler. If this fails, the reply to every task is the failure."""
        try:
            self._handler = make()
        except Exception as error:
            self._failure = Failure.of(error)

    def do(self, task: Any, names: Sequence[str], *arrays: Any) -> Any:
        """Carry out a task, whose fields `names` are the arrays in `arrays`."""
        if self._failure is not None or self._handler is None:
            return self._failure
        try:
            return self._handler.do(replace(task, **dict(zip(names, arrays))) if names else task)
        except Exception as error:
            return Failure.of(error)
