"""Divides the time limit among the phases. Durations are in seconds, moments are values of time.monotonic."""

from __future__ import annotations

from dataclasses import dataclass, replace

DEFAULT_LIMIT = 60.0
# The part of the limit after which searching must be over; the first seconds of a search, which have priority over
# kernels (enough to load an agent and to search a graph of 2,000 nodes).
_SEARCH_UNTIL, _SEARCH_FIRST = 0.3, 4.0
# The parts of the limit that requested training may take (the first of them that leaves enough time for the rest), and
# the part of the search's time that training within a search may take.
_TRAINING, _TRAINING_IN_SEARCH = (0.5, 0.4, 0.3, 0.2), 0.6
# At most this part of the limit is reserved for verification and the last comparison. Nothing is reserved for a model
# of which a run takes so many seconds, since the selection could hardly compare anything.
_ENDING_AT_MOST, _SLOW = 0.5, 0.3
# But for a quantised model up to this part, if verification and the fewest processes that decide need it.
_DECIDING_AT_MOST = 0.65
# The time that a fast model may use of a limit of 60 s: seconds besides runs, and a number of runs. A model of 3 ms
# needs no full minute.
_ENOUGH, _ENOUGH_RUNS = 14.0, 1000
# The last comparison: seconds to start the fork server, number of processes, seconds to start each, and runs in each
# (the first of both models, warming up, interleaved samples).
_FORK_SERVER, _PROCESSES, _START, _RUNS = 0.5, 24, 0.12, 14
# The least number of processes for a decision.
_FEWEST_PROCESSES = 8
_LOADING_TVM = 4.0
# Verification: seconds besides runs, and runs of the original and the result together.
_VERIFYING, _VERIFYING_RUNS = 2.5, 16
# What is added for a quantised model, whose layers are evaluated one by one: seconds, runs, and sessions (of copies
# that show these layers, and of both models at several levels of optimisation).
_BY_LAYERS, _BY_LAYERS_RUNS, _BY_LAYERS_SESSIONS = 6.0, 60, 12
# The part of the limit that this is at most. In less time fewer sets of inputs are evaluated.
_BY_LAYERS_AT_MOST = 0.3
# One comparison of models in one process: the fewest and the most runs, and the runs that an interval needs.
_COMPARE_RUNS_AT_LEAST, _COMPARE_RUNS = 8, 60
_INTERVAL_RUNS = 40
_COMPARE_AT_LEAST, _COMPARE_AT_MOST = 1.5, 5.0
# After an interrupt: comparisons of the best proposal with the original.
_HURRIED_COMPARISONS = 2


@dataclass(frozen=True, slots=True)
class Budget:
    """The time of one optimisation, from `begin` to `begin + limit`.

    `latency` and `loading` are rough.
    """

    begin: float
    limit: float
    latency: float = 0.0  # seconds of one run of the original; 0: unknown
    loading: float = 0.0  # seconds to load the original; 0: unknown
    verifying: bool = True  # the result will be verified
    hurried: bool = False  # after an interrupt: only the necessary time is reserved for selecting
    compiled: bool = False  # the processes of the last comparison load TVM
    compiling: float = 0.0  # seconds to choose and compile kernels
    reserved: float = 0.0  # the part of `compiling` that is still needed
    quantised: bool = False  # the model has quantised tensors

    @property
    def until(self) -> float:
        """The moment at which the limit ends."""
        return self.begin + self.limit

    @property
    def end(self) -> float:
        """The moment at which everything should be over. A fast model does not need all of a long limit."""
        if not self.latency or self.hurried:
            return self.until
        enough = _ENOUGH + self._by_layers + _ENOUGH_RUNS * self.latency
        enough *= max(1.0, self.limit / DEFAULT_LIMIT)
        return self.begin + min(self.limit, enough + self.compiling)

    def part(self, share: float) -> float:
        """The moment at which the part `share` of the time has passed."""
        return self.begin + share * (self.end - self.begin)

    @property
    def train_until(self) -> float | None:
        """The moment at which training before the search, which the user requested, must be over.

        Training takes at most half of the limit. Enough time for an optimisation with the default limit must remain,
        and if there is time now to search and compare, there must be after training. None: no time for training.
        """
        needed = min(_ENOUGH + _ENOUGH_RUNS * self.latency, DEFAULT_LIMIT) + self.compiling
        for part in _TRAINING:
            own = min(part * self.limit, self.limit - needed)
            remainder = replace(self, begin=self.begin + own, limit=self.limit - own)
            if remainder.begin > self.train_in_search_until and (remainder.useful or not self.useful):
                return remainder.begin
        return None

    @property
    def train_in_search_until(self) -> float:
        """The moment at which training that is a part of the search must be over."""
        return self.part(_TRAINING_IN_SEARCH * _SEARCH_UNTIL)

    @property
    def search_until(self) -> float:
        return self.part(_SEARCH_UNTIL)

    @property
    def verification(self) -> float:
        """Seconds that verification takes."""
        if not self.verifying:
            return 0.0
        return _VERIFYING + 2 * self.loading + _VERIFYING_RUNS * self.latency + self._by_layers

    @property
    def _by_layers(self) -> float:
        if not self.verifying or not self.quantised:
            return 0.0
        needed = _BY_LAYERS + _BY_LAYERS_RUNS * self.latency + _BY_LAYERS_SESSIONS * self.loading
        return min(needed, _BY_LAYERS_AT_MOST * self.limit)

    @property
    def comparison(self) -> float:
        """Seconds that the last comparison needs."""
        processes = _PROCESSES * (_START + 2 * self.loading + _RUNS * self.latency)
        return _FORK_SERVER + (_LOADING_TVM if self.compiled else 0.0) + processes

    @property
    def decision(self) -> float:
        """The fewest seconds to verify a result and to compare it with the original."""
        return self.verification + _FEWEST_PROCESSES / _PROCESSES * self.comparison

    @property
    def ending(self) -> float:
        """Seconds reserved for verification and the last comparison."""
        needed = self.verification + self.comparison
        if self.hurried:
            return needed
        whole = self.end - self.begin
        maximum = (1.0 - _SEARCH_UNTIL if self.latency > _SLOW else _ENDING_AT_MOST) * whole
        if self.quantised:
            maximum = max(maximum, min(self.decision, _DECIDING_AT_MOST * whole))
        return min(needed, maximum)

    @property
    def select_until(self) -> float:
        """The moment at which comparisons of models must be over.

        A short search and, if the model is not slow, one comparison have priority over the time reserved for kernels.
        """
        needed = _SEARCH_FIRST + (0.0 if self.latency > _SLOW else self._starting)
        return max(self.compile_until - self.reserved, min(self.begin + needed, self.compile_until))

    @property
    def compile_until(self) -> float:
        """The moment at which kernels must be compiled and compared."""
        return self.end - self.ending

    @property
    def compile_at_latest(self) -> float:
        """The moment at which a running compilation is ended. After it there is just enough time for verification and
        comparison."""
        return max(self.compile_until, self.until - self.decision)

    @property
    def begin_comparing_until(self) -> float:
        """The moment from which no further comparison of models begins."""
        return self.select_until - self._starting

    @property
    def _starting(self) -> float:
        """The fewest seconds of a comparison of models."""
        return 2 * self.loading + _COMPARE_RUNS_AT_LEAST * self.latency

    @property
    def each_comparison(self) -> float:
        """Seconds that one comparison of models may take."""
        maximum = 2 * self.loading + _COMPARE_RUNS * self.latency
        return max(_COMPARE_AT_LEAST, min(maximum, _COMPARE_AT_MOST), maximum / 2)

    @property
    def careful_comparison(self) -> float:
        """Seconds of one comparison with enough runs for an interval, also if the model is slow."""
        return max(self.each_comparison, 2 * self.loading + _INTERVAL_RUNS * self.latency)

    @property
    def useful(self) -> bool:
        """Whether there is time to search and then to compare models once."""
        return self.begin_comparing_until - self.search_until >= self.each_comparison

    def final(self, now: float) -> float:
        """Seconds that verification and the last comparison may take if they begin now: until the end of the limit.

        On a quiet machine they end long before. On a busy machine the last comparison needs more processes.
        """
        return self.until - now

    def can_verify(self, now: float) -> bool:
        """Whether verification, if it begins now, ends within the limit or shortly after."""
        return now + self.verification <= self.until + 0.05 * self.limit

    def hurry(self, now: float) -> Budget:
        """The budget after an interrupt: enough to compare, verify and measure, if the limit allows it."""
        needed = _HURRIED_COMPARISONS * self.each_comparison + self.verification + self.comparison
        return replace(self, begin=now, limit=min(self.until - now, needed), hurried=True)
