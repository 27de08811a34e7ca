"""Workers on the nodes of a Ray cluster. Each is an actor: a separate process on a node that Ray chooses.

Results do not depend on the cluster, so a worker that is lost (its process was killed, its node left) is only
reported, and the caller gives its task to another worker. If the cluster itself is gone, all workers are lost, and
later workers start on the next cluster at the same address.
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

from xrlflow.workers.protocol import Failure, Kind, MakeHandler, Worker, WorkerError, WorkerLost, own_version
from xrlflow.workers.remote import RemoteWorker

_rays: Any = ray  # the type stubs of Ray lack some of its functions
LOCAL = "local"
LATENCY = "latency"
"""A Ray resource. Each node that measures times has 1 unit of it, and a worker that measures reserves this unit."""
_MODE = "RAY_AUTH_MODE"
_REFUSED = "InvalidAuthToken"
LARGE = 1 << 16
"""An array in tasks that has at least this many bytes is sent to each node once, even if several workers of the node
need it.
"""
_ANSWER = 5.0  # seconds that the head of a cluster may take to reply
_JOIN = 60.0  # seconds that joining a cluster may take
_READY = 15.0  # seconds after which a head that replies is ready
_LOOK = 1.0  # seconds between checks of the head while no reply arrives
_START = 120.0  # seconds that a worker may take to start, with the wait for a core that other programs use
_BACK = 120.0  # seconds for which a cluster may be gone
_FETCH = 60.0  # seconds that the transfer of a reply to this machine may take


class ClusterError(WorkerError):
    """There is no cluster, or it cannot be used. The message is one line."""


class Cluster:
    """A worker factory: the Ray cluster at an address (HOST:PORT of its head), or a cluster of this machine alone
    ("local").

    This machine becomes a node of the cluster. `close` ends the workers and, if the cluster is local, the cluster.
    Raises ClusterError.
    """

    def __init__(self, address: str, patience: float = _BACK) -> None:
        self.address = address
        self._patience = patience
        self._open: dict[int, RayWorker] = {}
        self._sent: list[tuple[Any, Any]] = []
        # Becomes True once workers were lost: Ray may continue to count the cores of a node that has left.
        self._shrunk = False
        # If the caller has a Ray session already, this session is used, and it is not closed.
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
        """The number of cores of all nodes."""
        return max(1, int(self._total("CPU")))

    @property
    def measuring(self) -> int:
        """How many nodes measure times. Raises ClusterError if no node does."""
        if count := int(self._total(LATENCY)):
            return count
        raise ClusterError(
            f"no node of the Ray cluster {self.address} takes times: start one with `ray start "
            f"--address={self._head} --resources='{{\"{LATENCY}\": 1}}'`"
        )

    def worker(self, make: MakeHandler, name: str, kind: Kind = Kind.COMPUTE) -> RayWorker:
        """A new worker. Raises ClusterError if no node has the resources, or if the cluster is gone and does not come
        back.
        """
        if not self._there():
            self._rejoin()
        options = self._resources(kind)
        actor: Any = ray.remote(RemoteWorker)
        actor = actor.options(**options).remote()
        new = RayWorker(self, actor, make, name, kind)
        self._open[id(new)] = new
        return new

    def replied(self, workers: Sequence[Worker], seconds: float | None = None) -> list[Worker]:
        """See `WorkerFactory.replied`. A worker that is lost counts as if it had replied."""
        end = None if seconds is None else time.monotonic() + seconds
        mine = [worker for worker in workers if isinstance(worker, RayWorker)]
        while True:
            done: list[Worker] = [worker for worker in mine if worker.lost]
            seconds_left = _LOOK if end is None else min(_LOOK, max(0.0, end - time.monotonic()))
            running = {worker.task: worker for worker in mine if worker.task is not None}
            if not done and running:
                ready, _ = ray.wait(list(running), num_returns=1, timeout=seconds_left)
                if ready:
                    ready, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
                done = [running[reference] for reference in ready]
            if done or not running or (end is not None and time.monotonic() >= end):
                return done
            self._look(mine)

    def share(self, array: Any) -> Any:
        """A reference to an array that several tasks contain. The array becomes read-only."""
        for sent, reference in self._sent:
            if sent is array:
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
        with contextlib.suppress(Exception):  # the session may have ended
            ray.shutdown()
        _authenticate(self._mode)

    def _resources(self, kind: Kind) -> dict[str, Any]:
        """Ray's options for an actor: the resources that the actor reserves, and the nodes on which it may run."""
        in_use = sum(worker.kind is kind for worker in self._open.values())
        if kind is Kind.WAIT:
            return {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        if kind is Kind.MEASURE:
            if in_use >= self.measuring:
                raise ClusterError(f"all {self.measuring} nodes that take times are in use")
            return {"num_cpus": 0, "resources": {LATENCY: 1}}
        if in_use < self._total("CPU") and not self._shrunk:
            return {"num_cpus": 1}
        return {"num_cpus": 0, "scheduling_strategy": self._least_used()}

    def _least_used(self) -> NodeAffinitySchedulingStrategy:
        """The node with the fewest workers per core. Only workers that this object started count."""
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
        """Whether the head of the joined cluster still runs. Another head may have its address by now; Ray ends a
        process that mistakes the new head for the old one.
        """
        return ray.is_initialized() and _listens(self._head) and _identity(self._head) == self._identity

    def _look(self, workers: Sequence[RayWorker]) -> None:
        """While no reply arrives: check that the head still runs, and that all workers have started."""
        if not self._there():
            self._rejoin()
            return
        for worker in workers:
            worker.check_started()

    def _rejoin(self) -> None:
        """Wait until there is a cluster at the address again, and join it. All earlier workers are lost."""
        for worker in list(self._open.values()):
            worker.lost = True
        self._open, self._sent, self._shrunk = {}, [], False
        self._leave()
        _join(self.address, self._patience)
        self._head = str(ray.get_runtime_context().gcs_address)
        self._identity = _identity(self._head)


class RayWorker:
    """A worker on a node: a Ray actor, and its present task."""

    def __init__(self, cluster: Cluster, actor: Any, make: MakeHandler, name: str, kind: Kind) -> None:
        self.name, self.kind = name, kind
        self.lost, self.ready = False, True  # assumed until the opposite is known
        self.node = ""
        self.task: Any = None
        self._cluster, self._actor = cluster, actor
        self._greeting: Any = actor.greet.remote()
        self._begun: float = time.monotonic()
        actor.make.remote(make)

    def begin(self, task: Any) -> None:
        if self.lost:
            raise WorkerLost(f"{self.name} is lost")
        small, large = _without_arrays(task)
        shared = [self._cluster.share(array) for array in large.values()]
        self.task = self._actor.do.remote(small, tuple(large), *shared)

    def reply(self) -> Any:
        if self.task is None and not self.lost:
            raise WorkerError(f"{self.name} has no task")
        self._cluster.replied([self])
        task, self.task = self.task, None
        if self.lost:
            raise WorkerLost(f"{self.name} is lost: its cluster is gone, or has no core for it")
        try:
            self._greeted()
            result = ray.get(task, timeout=_FETCH)
        except RayTaskError as error:  # the node cannot unpickle the task
            raise _unreadable(self.name, error) from error
        except (RayError, GetTimeoutError) as error:
            if "ModuleNotFoundError" in str(error):
                raise _unreadable(self.name, error) from error
            self.lost = True
            raise WorkerLost(f"{self.name} is lost: {_gist(error)}") from error
        if isinstance(result, Failure):
            raise result.as_error(self.name)
        return result

    def messages(self) -> list[Any]:
        """An empty list: messages of handlers are not sent between machines."""
        return []

    def release(self) -> None:
        """Does nothing: Ray ends workers one by one in any case."""

    def check_started(self) -> None:
        """End the worker, as lost, if it has waited too long for a core that other programs use."""
        if self._greeting is None or self.kind is Kind.MEASURE or time.monotonic() < self._begun + _START:
            return
        ready, _ = ray.wait([self._greeting], timeout=0)
        if not ready:
            self.lost = True

    def close(self) -> None:
        self._cluster.forget(self)
        self.task = None
        with contextlib.suppress(Exception):  # the actor may have ended already
            ray.kill(self._actor)
        self.lost = True

    def _greeted(self) -> None:
        """Raise ClusterError if the worker has another version of this package."""
        if self._greeting is None:
            return
        greeting = ray.get(self._greeting, timeout=_FETCH)
        self._greeting, self.node = None, greeting.node
        if greeting.version != own_version():
            raise ClusterError(
                f"node {greeting.host} of the Ray cluster has xrlflow {greeting.version}, this machine has "
                f"{own_version()}: install the same there"
            )


def _without_arrays(task: Any) -> tuple[Any, dict[str, Any]]:
    """A task without its large arrays, and these arrays by field name."""
    if not dataclasses.is_dataclass(task) or isinstance(task, type):
        return task, {}
    values = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    large = {n: v for n, v in values.items() if isinstance(v, np.ndarray) and v.nbytes >= LARGE}
    return (dataclasses.replace(task, **dict.fromkeys(large)) if large else task), large


def _check_listens(address: str) -> None:
    if address != LOCAL and not _listens(address):
        raise ClusterError(
            f"no Ray cluster answers at {address}: start its head there with `ray start --head --port="
            f"{address.rpartition(':')[2]}`"
        )


def _join(address: str, patience: float) -> None:
    """Connect this process to a cluster that may still be starting; wait `patience` seconds. Raises ClusterError."""
    # By default Ray reports usage to its developers and looks for accelerators; both are switched off.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if (
        address == LOCAL
    ):  # workers run at the priority of this process, and may start slowly on a busy machine
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
    """A text that distinguishes the cluster of this head from earlier clusters at its address; None if the head does
    not reply.
    """
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
    """Set whether Ray sends the user's token to clusters: "token" sends it, "disabled" does not, None is Ray's
    default.
    """
    if mode is None:
        os.environ.pop(_MODE, None)
    else:
        os.environ[_MODE] = mode
    _rays._raylet.Config.initialize("")


def _mode_of(address: str) -> str:
    """Whether a cluster requires a token. Raises ClusterError.

    A separate process tries to connect, because without a working cluster Ray waits for minutes, or ends the process.
    If the user has set the mode, the result is this mode.
    """
    mode_by_user = os.environ.get(_MODE)
    for mode in ("disabled", "token") if mode_by_user is None else (mode_by_user,):
        error = _try(address, mode)
        if error is None:
            return mode
        if _REFUSED not in error:
            raise ClusterError(f"the Ray cluster {address} cannot be used: {_gist(error)}")
    raise ClusterError(
        f"the Ray cluster {address} asks for its token: copy the head's ~/.ray/auth_token to this machine"
    )


def _try(address: str, mode: str) -> str | None:
    """Connect a separate process to the cluster. Returns its error, or None if it is connected."""
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
            while trying.poll() is None and _REFUSED not in _content(log):  # Ray would retry for ever
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
    """The first meaningful line of an error of Ray's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("[")]
    return lines[0][:300] if lines else type(error).__name__


def _unreadable(name: str, error: BaseException) -> WorkerError:
    """The error for a node that cannot unpickle a message: the node lacks a module, or the content is broken."""
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
