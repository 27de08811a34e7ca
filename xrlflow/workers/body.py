"""What runs in a worker's process on a node of a cluster, where this package and the handler's imports are
installed."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from xrlflow.workers.protocol import Failure, Hand, MakeHand, own_version


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of a worker: its machine, Ray's name of its node, and the version of its package."""

    host: str
    node: str
    version: str


class Body:
    """The worker on the node. Ray calls its methods one after another, in the order of the requests."""

    def __init__(self) -> None:
        self._hand: Hand | None = None
        self._failure: Failure | None = None

    def greet(self) -> Greeting:
        node = ray.get_runtime_context().get_node_id()
        return Greeting(socket.gethostname(), node, own_version())

    def make(self, make: MakeHand) -> None:
        """Create the handler. If that fails, the reply to every task is the failure."""
        try:
            self._hand = make()
        except Exception as error:
            self._failure = Failure.of(error)

    def do(self, order: Any, names: Sequence[str], *arrays: Any) -> Any:
        """Carry out a task whose fields `names` are `arrays`."""
        if self._failure is not None or self._hand is None:
            return self._failure
        try:
            return self._hand.do(replace(order, **dict(zip(names, arrays))) if names else order)
        except Exception as error:
            return Failure.of(error)
