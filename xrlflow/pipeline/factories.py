"""Chooses where workers run: on this machine, or on a cluster that the user names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from xrlflow.backends.limits import default_threads
from xrlflow.options import OptionError, check_ray
from xrlflow.workers import Processes, WorkerError, WorkerFactory


@contextmanager
def factory_of(ray: str | None) -> Iterator[WorkerFactory]:
    """Processes of this machine, or the nodes of a Ray cluster ("local" or HOST:PORT), from which this process
    disconnects at the end of the block.

    Raises OptionError if there is no such cluster, and in place of a WorkerError from the block.
    """
    check_ray(ray)
    try:
        if ray is None:
            yield Processes(default_threads())
        else:
            from xrlflow.workers.cluster import Cluster

            with closing(Cluster(ray)) as cluster:
                yield cluster
    except WorkerError as error:
        raise OptionError(str(error)) from error
