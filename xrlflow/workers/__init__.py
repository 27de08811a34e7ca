"""Workers: whatever carries out orders somewhere else, behind one interface.

A place makes workers: this process (`InProcess`), processes of this machine (`Processes`), or the nodes of a Ray
cluster (`cluster.Cluster`). What works there is a hand: any object with a method `do`, made where it works. A `Crew` of
workers takes orders from one queue. The answers do not depend on the place.
"""

from xrlflow.workers.crew import Crew
from xrlflow.workers.local import InProcess, Processes
from xrlflow.workers.protocol import Hand, Kind, MakeHand, Place, Worker, WorkerError, WorkerLost

__all__ = [
    "Crew",
    "Hand",
    "InProcess",
    "Kind",
    "MakeHand",
    "Place",
    "Processes",
    "Worker",
    "WorkerError",
    "WorkerLost",
]
