"""Workers on the nodes of a Ray cluster. Each is an actor: a process of its own on a node that Ray chooses.

Results do not depend on the cluster, so a worker that is lost (its process was killed, its node left) is only reported:
whoever gave the order gives it to another one. If the cluster itself is gone, all workers are lost, and the next ones
are made on the cluster that has its address then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xrlflow.workers.body import Body
from xrlflow.workers.protocol import Failure, Kind, MakeHand, Worker, WorkerError, WorkerLost, own_version

_rays: Any = ray  # Ray's types leave out some of its functions
LOCAL = "local"
LATENCY = "latency"
"""The resource of a node that takes times: 1 of it is there, and a worker that measures takes it."""
_MODE = "RAY_AUTH_MODE"
_REFUSED = "InvalidAuthToken"
LARGE = 1 << 16
"""Arrays of orders that have at least so many bytes go to each node once, however many workers get them."""
_ANSWER = 5.0  # seconds that the head of a cluster may take to answer
_JOIN = 60.0  # seconds that joining a cluster may take
_READY = 15.0  # seconds after which a head that answers is ready
_LOOK = 1.0  # seconds between looks at the head while nothing arrives
_START = 120.0  # seconds that a worker may wait for a core that others use, and to start
_BACK = 120.0  # seconds that a cluster may be gone
_FETCH = 60.0  # seconds that an answer may take from its node to here


class ClusterError(WorkerError):
    """There is no cluster, or it cannot be used. The message is one line."""


class Cluster:
    """A Ray cluster: the one of an address (HOST:PORT of its head), or one of this machine alone ("local").

    This machine is one of its nodes. Close it, which ends the workers and, if it is local, the cluster. Raises
    ClusterError.
    """

    def __init__(self, address: str, patience: float = _BACK) -> None:
        self.address = address
        self._patience = patience
        self._open: dict[int, RayWorker] = {}
        self._sent: list[tuple[Any, Any]] = []
        # Workers were lost: Ray may still count on the cores of a node that has left.
        self._shrunk = False
        # A session that the caller has begun is used, and left.
        self._own = not ray.is_initialized()
        self._mode = os.environ.get(_MODE)
        if self._own:
            _check_listens(address)
            _join(address, _READY)
        self._head = str(ray.get_runtime_context().gcs_address)
        self._identity = _identity(self._head)
        if not self._own and address not in (LOCAL, self._head):
            raise ClusterError(f"this process is connected to another cluster than {address}: {self._head}")

    @property
    def cores(self) -> int:
        """The cores of all nodes."""
        return max(1, int(self._total("CPU")))

    @property
    def measuring(self) -> int:
        """How many nodes take times. Raises ClusterError if none does."""
        if count := int(self._total(LATENCY)):
            return count
        raise ClusterError(
            f"no node of the Ray cluster {self.address} takes times: start one with `ray start "
            f"--address={self._head} --resources='{{\"{LATENCY}\": 1}}'`"
        )

    def worker(self, make: MakeHand, name: str, kind: Kind = Kind.COMPUTE) -> RayWorker:
        """A new worker. Raises ClusterError if no node has what it needs, or if the cluster is gone and stays away."""
        if not self._there():
            self._rejoin()
        options = self._place(kind)
        actor: Any = ray.remote(Body)
        actor = actor.options(**options).remote()
        made = RayWorker(self, actor, make, name, kind)
        self._open[id(made)] = made
        return made

    def answered(self, workers: Sequence[Worker], seconds: float | None = None) -> list[Worker]:
        """See `Place.answered`. A worker that is lost has answered. If the cluster is gone, all are lost."""
        end = None if seconds is None else time.monotonic() + seconds
        mine = [worker for worker in workers if isinstance(worker, RayWorker)]
        while True:
            done: list[Worker] = [worker for worker in mine if worker.lost]
            left = _LOOK if end is None else min(_LOOK, max(0.0, end - time.monotonic()))
            orders = {worker.order: worker for worker in mine if worker.order is not None}
            if not done and orders:
                ready, _ = ray.wait(list(orders), num_returns=1, timeout=left)
                if ready:
                    ready, _ = ray.wait(list(orders), num_returns=len(orders), timeout=0)
                done = [orders[reference] for reference in ready]
            if done or not orders or (end is not None and time.monotonic() >= end):
                return done
            self._look(mine)

    def share(self, array: Any) -> Any:
        """A reference to an array that several orders have. The array cannot be changed any more."""
        for known, reference in self._sent:
            if known is array:
                return reference
        array.flags.writeable = False
        reference = ray.put(array)
        self._sent = [*self._sent[-3:], (array, reference)]
        return reference

    def forget(self, worker: RayWorker) -> None:
        self._shrunk |= worker.lost and id(worker) in self._open
        self._open.pop(id(worker), None)

    def close(self) -> None:
        for worker in list(self._open.values()):
            worker.close()
        self._sent = []
        if self._own:
            self._leave()

    def _leave(self) -> None:
        with contextlib.suppress(Exception):  # there may be nothing to leave
            ray.shutdown()
        _authenticate(self._mode)

    def _place(self, kind: Kind) -> dict[str, Any]:
        """Ray's options for an actor: what it takes of a node, and where it may be."""
        taken = sum(worker.kind is kind for worker in self._open.values())
        if kind is Kind.WAIT:
            return {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        if kind is Kind.MEASURE:
            if taken >= self.measuring:
                raise ClusterError(f"all {self.measuring} nodes that take times are in use")
            return {"num_cpus": 0, "resources": {LATENCY: 1}}
        if taken < self._total("CPU") and not self._shrunk:
            return {"num_cpus": 1}
        return {"num_cpus": 0, "scheduling_strategy": self._least_used()}

    def _least_used(self) -> NodeAffinitySchedulingStrategy:
        """The node with the fewest workers of ours for its cores."""
        used: dict[str, int] = {}
        for worker in self._open.values():
            used[worker.node] = used.get(worker.node, 0) + 1
        cores = {n["NodeID"]: n["Resources"].get("CPU", 0.0) for n in _rays.nodes() if n["Alive"]}
        able = {node: count for node, count in cores.items() if count > 0}
        if not able:
            raise ClusterError(f"no node of the Ray cluster {self.address} has a core for workers")
        node = min(able, key=lambda n: (used.get(n, 0) + 1) / able[n])
        return NodeAffinitySchedulingStrategy(node, soft=True)

    def _total(self, resource: str) -> float:
        return float(_rays.cluster_resources().get(resource, 0.0))

    def _there(self) -> bool:
        """Whether the head of the cluster that was joined is there. Another one may listen in its place: Ray ends the
        process that takes it for the old one."""
        return ray.is_initialized() and _listens(self._head) and _identity(self._head) == self._identity

    def _look(self, workers: Sequence[RayWorker]) -> None:
        """While nothing arrives: is the head there, and have all workers begun?"""
        if not self._there():
            self._rejoin()
            return
        for worker in workers:
            worker.look()

    def _rejoin(self) -> None:
        """Wait until there is a cluster at the address again, and join it. All workers are lost."""
        for worker in list(self._open.values()):
            worker.lost = True
        self._open, self._sent, self._shrunk = {}, [], False
        self._leave()
        _join(self.address, self._patience)
        self._head = str(ray.get_runtime_context().gcs_address)
        self._identity = _identity(self._head)


class RayWorker:
    """An actor, and what it was asked."""

    def __init__(self, cluster: Cluster, actor: Any, make: MakeHand, name: str, kind: Kind) -> None:
        self.name, self.kind = name, kind
        self.lost, self.ready = False, True  # as far as is known
        self.node = ""
        self.order: Any = None
        self._cluster, self._actor = cluster, actor
        self._greeting: Any = actor.greet.remote()
        self._begun: float = time.monotonic()
        actor.make.remote(make)

    def begin(self, order: Any) -> None:
        if self.lost:
            raise WorkerLost(f"{self.name} is lost")
        rest, large = _without_arrays(order)
        shared = [self._cluster.share(array) for array in large.values()]
        self.order = self._actor.do.remote(rest, tuple(large), *shared)

    def answer(self) -> Any:
        if self.order is None and not self.lost:
            raise WorkerError(f"{self.name} has no order")
        self._cluster.answered([self])
        order, self.order = self.order, None
        if self.lost:
            raise WorkerLost(f"{self.name} is lost: its cluster is gone, or has no core for it")
        try:
            self._greeted()
            found = ray.get(order, timeout=_FETCH)
        except RayTaskError as error:  # what it was sent cannot be read there
            raise _unreadable(self.name, error) from error
        except (RayError, GetTimeoutError) as error:
            if "ModuleNotFoundError" in str(error):
                raise _unreadable(self.name, error) from error
            self.lost = True
            raise WorkerLost(f"{self.name} is lost: {_gist(error)}") from error
        if isinstance(found, Failure):
            raise found.as_error(self.name)
        return found

    def said(self) -> list[Any]:
        """What is told on another machine stays there."""
        return []

    def release(self) -> None:
        """Ray ends workers one by one."""

    def look(self) -> None:
        """Is it waiting in vain for a core that others use?"""
        if self._greeting is None or self.kind is Kind.MEASURE or time.monotonic() < self._begun + _START:
            return
        ready, _ = ray.wait([self._greeting], timeout=0)
        if not ready:
            self.lost = True

    def close(self) -> None:
        self._cluster.forget(self)
        self.order = None
        with contextlib.suppress(Exception):  # it may be gone
            ray.kill(self._actor)
        self.lost = True

    def _greeted(self) -> None:
        """Raise WorkerError if its package is another one than ours."""
        if self._greeting is None:
            return
        greeting = ray.get(self._greeting, timeout=_FETCH)
        self._greeting, self.node = None, greeting.node
        if greeting.version != own_version():
            raise ClusterError(
                f"node {greeting.host} of the Ray cluster has xrlflow {greeting.version}, this machine has "
                f"{own_version()}: install the same there"
            )


def _without_arrays(order: Any) -> tuple[Any, dict[str, Any]]:
    """An order without its large arrays, and those by field."""
    if not dataclasses.is_dataclass(order) or isinstance(order, type):
        return order, {}
    values = {f.name: getattr(order, f.name) for f in dataclasses.fields(order)}
    large = {n: v for n, v in values.items() if isinstance(v, np.ndarray) and v.nbytes >= LARGE}
    return (dataclasses.replace(order, **dict.fromkeys(large)) if large else order), large


def _check_listens(address: str) -> None:
    if address != LOCAL and not _listens(address):
        raise ClusterError(
            f"no Ray cluster answers at {address}: start its head there with `ray start --head --port="
            f"{address.rpartition(':')[2]}`"
        )


def _join(address: str, patience: float) -> None:
    """Connect this process to a cluster, which may still be starting for so many seconds. Raises ClusterError."""
    # Ray would tell its makers who uses it, and look for accelerators.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == LOCAL:  # workers do what this process would: no less of the cores, on a busy machine, too
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    end = time.monotonic() + patience
    while True:
        try:
            _check_listens(address)
            return _connect(address)
        except ClusterError:
            if address == LOCAL or time.monotonic() >= end:
                raise
            time.sleep(_LOOK)


def _identity(head: str) -> str | None:
    """What tells the cluster of this head from an earlier one at its address; None if it does not answer."""
    try:
        return str(_rays._raylet.GcsClient(address=head).cluster_id)
    except RayError:
        return None


def _connect(address: str) -> None:
    own: dict[str, Any] = {"address": address}
    if address == LOCAL:
        own |= {"resources": {LATENCY: 1}, "include_dashboard": False}
    else:
        _authenticate(_mode_of(address))
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(**own, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises exceptions of many types
        with contextlib.suppress(Exception):
            ray.shutdown()
        raise ClusterError(f"the Ray cluster {address} cannot be used: {_gist(error)}") from error


def _authenticate(mode: str | None) -> None:
    """Show the user's token to clusters ("token") or not ("disabled"); None: as Ray would without us."""
    if mode is None:
        os.environ.pop(_MODE, None)
    else:
        os.environ[_MODE] = mode
    _rays._raylet.Config.initialize("")


def _mode_of(address: str) -> str:
    """Whether a cluster asks for a token. Raises ClusterError.

    Another process tries: where there is no cluster, or half of one, Ray waits for minutes, or ends the process. What
    the user has set is taken.
    """
    given = os.environ.get(_MODE)
    for mode in ("disabled", "token") if given is None else (given,):
        said = _try(address, mode)
        if said is None:
            return mode
        if _REFUSED not in said:
            raise ClusterError(f"the Ray cluster {address} cannot be used: {_gist(said)}")
    raise ClusterError(
        f"the Ray cluster {address} asks for its token: copy the head's ~/.ray/auth_token to this machine"
    )


def _try(address: str, mode: str) -> str | None:
    """Connect another process. Returns what it says if it cannot be connected."""
    program = (
        "import logging, sys, ray\n"
        "try: ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)\n"
        "except Exception as error: sys.exit(f'{type(error).__name__}: {error}')\n"
    )
    end = time.monotonic() + _JOIN
    with tempfile.TemporaryFile() as log:
        trying = subprocess.Popen(
            [sys.executable, "-c", program, address], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            env={**os.environ, _MODE: mode},
        )  # fmt: skip
        try:
            while trying.poll() is None and _REFUSED not in _content(
                log
            ):  # it would be tried again and again
                if time.monotonic() >= end:
                    raise ClusterError(
                        f"what answers at {address} is no head of a Ray cluster, or it is hung"
                    )
                time.sleep(0.05)
            return None if trying.poll() == 0 else _content(log)
        finally:
            trying.kill()
            trying.wait()


def _content(log: IO[bytes]) -> str:
    return os.pread(log.fileno(), 1 << 16, 0).decode(errors="replace")


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()
    except OSError:
        return False
    return True


def _gist(error: object) -> str:
    """The first line of an error of Ray's that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("[")]
    return lines[0][:300] if lines else type(error).__name__


def _unreadable(name: str, error: BaseException) -> WorkerError:
    """A node lacks what its work needs, or something is wrong with what it was sent."""
    text = str(error)
    missing = re.search(r"No module named '([\w.]+)'", text)
    where = re.search(r"ip=([\w.:]+)", text)
    if missing:
        node = f"node {where[1]}" if where else "a node"
        extra = "" if missing[1].startswith("xrlflow") else f", for {missing[1]}"
        return ClusterError(
            f"{node} of the Ray cluster has no module {missing[1]}: install xrlflow there, as it is here{extra}"
        )
    return WorkerError(f"{name} cannot read what it was sent: {text.splitlines()[-1] if text else error!r}")
