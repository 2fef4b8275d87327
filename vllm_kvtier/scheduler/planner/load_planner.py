"""Load a part of a prompt, or compute it: whichever is expected to be done first.

``decide`` compares the time until a load would be usable, behind what its source already has to do, with the time
that computing the same tokens would add. Both come from what this engine measured (``scheduler.planner.cost_model``).

All or nothing. vLLM continues a prompt from a prefix, so a partial load would be tokens [start, m) with [m, end)
computed after it. A loaded token costs the same wherever it is, a computed one costs more the further back it is
(attention), so the total as a function of m has no minimum between its ends: either m = start or m = end is best.

Computing has a queue as well: prompts that are not loaded (``will_compute``), as far as they are in no step yet
(``computes``). Each prompt that is computed delays all others: those behind it, and those whose loads end meanwhile.
Therefore a load may take a few times as long as computing its tokens (``MAX_BACKLOG_FACTOR``). Of many prompts that
come at once all are loaded from a fast source; from a slow one some, and the others computed, so that both end at about
the same time.

What is not known is loaded: before the first prefills, and for steps far larger than any seen. The GPU is free for
others meanwhile, and the engine learns both rates as it goes.

A source that got slow is declined, and would never be measured again. So what was seen of a source fades while
nothing of it is under way, towards what was believed at first, until one load tries it again; the ones that come
meanwhile still go by what was last seen.

Not thread-safe: vLLM's scheduler thread owns it. No method takes more than some 20 microseconds.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from vllm_kvtier.scheduler.planner.cost_model import Handover, LoadRate, StepCost

# Why a decision was taken: labels for metrics, few and fixed.
FASTER = "faster"  # loaded: expected to arrive before it could be computed
UNMEASURED = "not_measured"  # loaded: what computing or loading costs is not known yet
SLOWER = "slower"  # computed: even an idle source would be slower
QUEUED = "queued"  # computed: the source is fast enough, but has too much to do
PROBE = "probe"  # loaded although expected to be slower: it was declined many times, and might be fast again
NOTHING = "empty"  # computed: no tokens or no bytes
SHORT = "compute_within_step"  # computed: the source is fast enough, but others' steps delay its use
REASONS = (FASTER, UNMEASURED, SLOWER, QUEUED, PROBE, NOTHING, SHORT)

# A source that was found slow is tried once in so many times that it is declined for it.
PROBE_EVERY = 16

# Smaller prefills drown in a step's fixed cost: they are neither measured nor waited behind.
MIN_PREFILL_TOKENS = 32

# Among prompts that wait to be computed or loaded, a load may take this many times longer than computing its tokens.
MAX_BACKLOG_FACTOR = 8

DEFAULT_BANDWIDTH = 10e9  # of a source without a prior: a PCIe 4 x8 link


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """should_load: load or recompute. load_seconds, compute_seconds: expected; compute_seconds is None where not known.
    reason: one of REASONS. queued_bytes: what the load would wait for, to be given back to ``observe_load``."""

    should_load: bool
    load_seconds: float
    compute_seconds: float | None
    reason: str
    queued_bytes: int = 0


class Queue:
    """Loads of one source under way, by size class (powers of two).

    The worker serves short loads first, so a load waits for the smaller ones, and of a larger one for no more
    than its own size.
    """

    def __init__(self) -> None:
        self._classes: dict[int, list[int]] = {}  # bit length -> [loads, bytes]
        self.loads = self.nbytes = 0

    def add(self, nbytes: int) -> None:
        entry = self._classes.setdefault(nbytes.bit_length(), [0, 0])
        entry[0] += 1
        entry[1] += nbytes
        self.loads += 1
        self.nbytes += nbytes

    def remove(self, nbytes: int) -> bool:
        """False if no such load was added."""
        entry = self._classes.get(nbytes.bit_length())
        if not entry or entry[1] < nbytes:
            return False
        entry[0] -= 1
        entry[1] -= nbytes
        if not entry[0]:
            del self._classes[nbytes.bit_length()]
        self.loads -= 1
        self.nbytes = sum(size for _, size in self._classes.values())
        return True

    def before(self, nbytes: int) -> int:
        """Bytes that a load of ``nbytes`` waits for."""
        own = nbytes.bit_length()
        return sum(size if bits <= own else loads * nbytes for bits, (loads, size) in self._classes.items())


@dataclass(slots=True)
class SourceCost:
    rate: LoadRate
    queue: Queue
    slow: int = 0  # decisions in a row that found it slower than computing
    warm: bool = False  # its first load has ended
    measured: int = 0


class LoadPlanner:
    """prior: bytes/s of each source before anything was measured (the pinned-copy rate, a link's rate); a source
    may be asked for that is not in it.
    step_tokens: most tokens the engine takes into one step (vLLM's max_num_batched_tokens).
    latency: seconds that the smallest load takes, before anything was measured.
    half_life: seconds without news of an idle source until what was learned counts half, in the logarithm: a source
    found 16 times slower than its prior is expected to be 4 times slower after one, 2 times after two.
    known: loads measured before a source is judged; until then its prior is no more than a guess.
    """

    def __init__(
        self,
        prior: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
        *,
        step_tokens: int = 8192,
        latency: float = 0.002,
        half_life: float = 120.0,
        known: int = 0,
    ):
        self._clock, self._step_tokens, self._latency, self._half_life = clock, step_tokens, latency, half_life
        self._known = known
        self._costs: dict[str, SourceCost] = {}
        self._steps, self._handover = StepCost(), Handover(half_life / 4)
        self._decodes = 0.0  # in a step, lately
        self._skipped_lookups = 0
        # What is to be computed and is in no step yet: request -> (end of its prompt, seconds); and their sum.
        self.to_compute: dict[str, tuple[int, float]] = {}
        self._backlog = 0.0
        for name, bandwidth in prior.items():
            self._add(name, bandwidth)

    def observe_step(self, seconds: float, work: Iterable[tuple[int, int]], decodes: int) -> None:
        """A model step took ``seconds`` (idle time not counted).

        work: (new tokens, tokens of the request before them) of each prefilling request; decodes: how many others
        got one token.
        """
        if not 0 < seconds < math.inf:
            return
        self._decodes += (decodes - self._decodes) / 16
        self._steps.observe(seconds, work, decodes)

    def fit_steps(self) -> None:
        """Fit what was observed, if it was not: else the next decision does."""
        if self._steps.fit_due:
            self._steps.fit()

    def will_compute(self, request_id: str, start: int, prompt: int) -> None:
        """Tokens [start, prompt) of this request are in no step yet, and are computed as far as is known."""
        self.remove_request(request_id)
        seconds = self._steps.prefill_seconds(start, prompt, 0, 0.0)
        if seconds > 0 and prompt - start > MIN_PREFILL_TOKENS:
            self.to_compute[request_id] = prompt, seconds
            self._backlog += seconds

    def computes(self, request_id: str, end: int) -> None:
        """A step was scheduled that computes this request up to token ``end``."""
        waiting = self.to_compute.get(request_id)
        if waiting is not None:
            self.will_compute(request_id, min(end, waiting[0]), waiting[0])

    def remove_request(self, request_id: str) -> None:
        """The request is loaded, is matched, or has ended."""
        waiting = self.to_compute.pop(request_id, None)
        if waiting is not None:  # a sum of floats that comes and goes: exactly 0 whenever nothing waits
            self._backlog = max(0.0, self._backlog - waiting[1]) if self.to_compute else 0.0

    def _seconds_with_backlog(self, seconds: float) -> float:
        """Seconds after which tokens that take ``seconds`` would be computed, among what waits to be computed, and as
        many for each load that ends meanwhile: its request waits for the step that computes them."""
        backlog = self._backlog
        for cost in self._costs.values():
            if cost.queue.loads:
                backlog += cost.queue.loads * seconds * min(1.0, seconds / cost.rate.seconds(cost.queue.nbytes, None))
        return seconds + min(backlog, MAX_BACKLOG_FACTOR * seconds)

    def started(self, cost_key: str, nbytes: int) -> None:
        """A load begins. Each must end by ``ended`` with the same numbers, also if it failed."""
        self._cost(cost_key).queue.add(nbytes)

    def ended(self, cost_key: str, nbytes: int) -> None:
        if not self._cost(cost_key).queue.remove(nbytes):
            raise ValueError(f"a load of {nbytes} bytes from {cost_key} ended that had not started")

    def observe_load(self, cost_key: str, nbytes: int, queued_bytes: int, seconds: float) -> None:
        """A load succeeded. queued_bytes: its LoadDecision's; seconds: from the order until the request could go on.

        Of failed loads see ``observe_timeout``.
        """
        cost = self._cost(cost_key)
        if not cost.warm:
            cost.warm = True  # and not measured: drivers, allocators and kernels were made on the way
        elif 0 < seconds < math.inf and nbytes > 0:
            cost.rate.observe(nbytes + queued_bytes, seconds, self._clock())
            cost.measured += 1

    def observe_timeout(self, cost_key: str, nbytes: int, queued_bytes: int, seconds: float) -> None:
        """A load failed at its time limit, after ``seconds``: it would have taken longer. Other failures say nothing
        about the link. Arguments as of ``observe_load``. One is enough: the next load would wait as long.
        """
        cost = self._cost(cost_key)
        if nbytes > 0 and cost.rate.seconds(nbytes + queued_bytes, None) < seconds < math.inf:
            cost.rate.observe(nbytes + queued_bytes, seconds, self._clock(), lasting=True)
            cost.warm, cost.measured = True, max(cost.measured, self._known) + 1

    def observe_handover(self, seconds: float) -> None:
        """A load among other requests was of use ``seconds`` after its end."""
        step = self.step_seconds()
        if step > 0 and 0 <= seconds < math.inf:
            self._handover.observe(seconds / step, self._clock())

    def handover_seconds(self) -> float:
        """Seconds from the end of a load until it is of use, if other requests run: a step, until it was measured; 0
        while no step was."""
        return self._handover.steps(self._clock()) * self.step_seconds()

    def decide(
        self, cost_key: str, start_tokens: int, end_tokens: int, nbytes: int, prompt_tokens: int, least: float = 0.0
    ) -> LoadDecision:
        """Whether to load tokens [start_tokens, end_tokens) of a prompt of ``prompt_tokens``.

        nbytes: what the load moves, in the same measure as in ``started`` and ``observe_load`` (with tensor
        parallelism, one rank's share). least: seconds from its end until it is of use: ``handover_seconds`` among
        others, in whose steps it could be computed meanwhile.
        """
        cost = self._cost(cost_key)
        found = self.weigh(cost_key, start_tokens, end_tokens, nbytes, prompt_tokens, least)
        if found.reason not in (NOTHING, SHORT):  # which say nothing about the source
            cost.slow = cost.slow + 1 if found.reason == SLOWER else 0
        if found.reason == NOTHING or cost.slow < PROBE_EVERY:
            return found
        cost.slow = 0
        return replace(found, should_load=True, reason=PROBE)

    def weigh(
        self, cost_key: str, start_tokens: int, end_tokens: int, nbytes: int, prompt_tokens: int, least: float = 0.0
    ) -> LoadDecision:
        """What ``decide`` returns, without probes. Changes nothing."""
        cost = self._cost(cost_key)
        if end_tokens <= start_tokens or nbytes <= 0:
            return LoadDecision(False, 0.0, None, NOTHING)
        queued = cost.queue.before(nbytes)
        now = None if cost.queue.loads else self._clock()
        alone = cost.rate.seconds(nbytes, now)
        load_seconds = cost.rate.seconds(nbytes + queued, now)
        compute_seconds = self.compute_seconds(start_tokens, end_tokens, prompt_tokens)
        computed_after = math.inf if compute_seconds is None else self._seconds_with_backlog(compute_seconds)
        if compute_seconds is None or cost.measured < self._known:
            reason = UNMEASURED
        elif load_seconds <= computed_after:
            reason = FASTER
        else:
            reason = QUEUED if alone <= computed_after else SLOWER
        # For a source that was not measured no duration is expected.
        if reason in (FASTER, UNMEASURED) and least + (load_seconds if reason == FASTER else 0.0) > computed_after:
            reason = SHORT
        return LoadDecision(reason in (FASTER, UNMEASURED), load_seconds, compute_seconds, reason, queued)

    def report(self) -> dict[str, float]:
        """For metrics: step_error and KEY_error, mean of |ln(actual / predicted)| lately (0.1: 10 % off);
        KEY_bandwidth in bytes/s; KEY_queued_bytes. KEY: of each cost key."""
        numbers, now = {"step_error": self._steps.error.size}, self._clock()
        for key, cost in self._costs.items():
            numbers[f"{key}_bandwidth"] = cost.rate.bandwidth(None if cost.queue.loads else now)
            numbers[f"{key}_error"] = cost.rate.error.size
            numbers[f"{key}_queued_bytes"] = cost.queue.nbytes
        return numbers

    def loading(self, cost_key: str) -> bool:
        """Whether a load is under way there."""
        return self._cost(cost_key).queue.loads > 0

    def loading_bytes(self, cost_key: str) -> int:
        """Of the loads that are under way there."""
        return self._cost(cost_key).queue.nbytes

    def moving_seconds(self, cost_key: str, nbytes: int) -> float:
        """The part of a load's duration in which the device copies, without its latency."""
        cost = self._cost(cost_key)
        return nbytes / cost.rate.bandwidth(None if cost.queue.loads else self._clock())

    def load_seconds(self, cost_key: str, nbytes: int) -> float:
        """Expected duration of a load that begins now, with the loads that are under way."""
        cost = self._cost(cost_key)
        now = None if cost.queue.loads else self._clock()
        return cost.rate.seconds(nbytes + cost.queue.before(nbytes), now)

    def cannot_beat_compute(self, start: int, end: int, prompt: int, probe: bool = True, least: float = 0.0) -> bool:
        """Whether computing [start, end) ends before the shortest load of any measured source would be of use,
        ``least`` seconds after its end: ``decide`` would decline any part of it. ``probe``: sometimes False, and the
        next hit of these sources is loaded as a probe."""
        measured = [cost for cost in self._costs.values() if cost.measured >= max(1, self._known)]
        seconds = self.compute_seconds(start, end, prompt) if measured else None
        if seconds is None:
            return False
        now = self._clock()
        until = self._seconds_with_backlog(seconds)
        if any(cost.rate.latency(None if cost.queue.loads else now) + least <= until for cost in measured):
            return False
        if not probe:
            return True
        self._skipped_lookups += 1
        if self._skipped_lookups % PROBE_EVERY:
            return True
        for cost in measured:  # as if declined so often: the next hit is loaded, even if it is slower
            cost.slow = PROBE_EVERY
        return False

    def step_seconds(self) -> float:
        """Duration of a step that only generates; 0 while not known."""
        self.fit_steps()
        base, _, _, decode, _ = self._steps.coefficients
        return base + decode * self._decodes if self._steps.known else 0.0

    def compute_seconds(self, start: int, end: int, prompt: int) -> float | None:
        """What computing [start, end) adds to a prefill of [end, prompt); None if not known."""
        size = self._step_tokens
        if not self._steps.covers(min(size, end - start)):
            return None
        # A load needs at least one step too: vLLM computes the last token in any case.
        steps = max(1, -(-(prompt - start) // size)) - max(1, -(-(prompt - end) // size))
        return self._steps.prefill_seconds(start, end, steps, self._decodes)

    def _cost(self, name: str) -> SourceCost:
        return self._costs.get(name) or self._add(name, DEFAULT_BANDWIDTH)

    def _add(self, name: str, bandwidth: float) -> SourceCost:
        cost = self._costs[name] = SourceCost(LoadRate(bandwidth, self._latency, self._half_life), Queue())
        return cost
