"""Load a part of a prompt, or compute it: whichever is expected to be done first.

``decide`` compares the time until a load would be usable, behind what its source already has to do, with the time
that computing the same tokens would add. Both come from what this engine measured (``rates``).

All or nothing. vLLM continues a prompt from a prefix, so a partial load would be tokens [start, m) with [m, end)
computed after it. A loaded token costs the same wherever it is, a computed one costs more the further back it is
(attention), so the total as a function of m has no minimum between its ends: either m = start or m = end is best.

Computing has a queue as well: prompts that are not loaded (``will_compute``), as far as they are in no step yet
(``computes``). Of many prompts that come at once some are loaded and some computed, so that both end at about the same
time. For that, a load may take a few times as long as computing its tokens (``BEHIND``), since each prompt that is
computed delays all others.

What is not known is loaded: before the first prefills, and for steps far larger than any seen. The GPU is free for
others meanwhile, and the engine learns both rates as it goes.

A source that got slow is declined, and would never be measured again. So what was seen of a source fades while
nothing of it is under way, towards what was believed at first, until one load tries it again; the ones that come
meanwhile still go by what was last seen.

Not thread-safe: the scheduler half's thread owns it. No method takes more than some 20 microseconds.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from vllm_kvtier.scheduler.rates import Handover, LoadRate, StepCost

# Why a decision was taken: labels for metrics, few and fixed.
FASTER = "faster"  # loaded: expected to arrive before it could be computed
UNMEASURED = "unmeasured"  # loaded: what computing or loading costs is not known yet
SLOWER = "slower"  # computed: even an idle source would be slower
QUEUED = "queued"  # computed: the source is fast enough, but has too much to do
TRIAL = "trial"  # loaded although expected to be slower: it was declined many times, and might be fast again
NOTHING = "nothing"  # computed: no tokens or no bytes
SHORT = "short"  # computed: the source is fast enough, but others' steps delay its use
REASONS = (FASTER, UNMEASURED, SLOWER, QUEUED, TRIAL, NOTHING, SHORT)

# A source that was found slow is tried once in so many times that it is declined for it.
TRIAL_EVERY = 16

# Smaller prefills drown in a step's fixed cost: they are neither measured nor waited behind.
LEAST_TOKENS = 32

# Among prompts that wait to be computed, a load may take this many times longer than computing its tokens.
BEHIND = 8

DEFAULT_BANDWIDTH = 10e9  # of a source without a prior: a PCIe 4 x8 link


@dataclass(frozen=True, slots=True)
class Decision:
    """load: whether to. load_seconds, compute_seconds: expected; compute_seconds is None where not known.
    reason: one of REASONS. queued_bytes: what the load would wait for, to be given back to ``observe_load``."""

    load: bool
    load_seconds: float
    compute_seconds: float | None
    reason: str
    queued_bytes: int = 0

    def __str__(self) -> str:
        compute = "unknown" if self.compute_seconds is None else f"{self.compute_seconds * 1e3:.1f} ms"
        choice = "load" if self.load else "compute"
        return f"{choice} ({self.reason}): loading {self.load_seconds * 1e3:.1f} ms, computing {compute}"


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
class Source:
    rate: LoadRate
    queue: Queue
    loads: int = 0  # decisions
    declined: int = 0
    slow: int = 0  # times in a row
    warm: bool = False  # its first load has ended
    measured: int = 0


class Planner:
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
        self._sources: dict[str, Source] = {}
        self._steps, self._handover = StepCost(), Handover(half_life / 4)
        self._decodes = 0.0  # in a step, lately
        self._hopeless = 0  # times that nobody need have been asked
        # What is to be computed and is in no step yet: request -> (end of its prompt, seconds); and their sum.
        self._to_compute: dict[str, tuple[int, float]] = {}
        self._backlog = 0.0
        self.decisions = dict.fromkeys(REASONS, 0)
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

    def will_compute(self, request_id: str, start: int, prompt: int) -> None:
        """Tokens [start, prompt) of this request are in no step yet, and are computed as far as is known."""
        self.forget(request_id)
        seconds = self._steps.prefill_seconds(start, prompt, 0, 0.0)
        if seconds > 0 and prompt - start > LEAST_TOKENS:  # of fewer, ``computes`` is not told when they are
            self._to_compute[request_id] = prompt, seconds
            self._backlog += seconds

    def computes(self, request_id: str, end: int) -> None:
        """A step was scheduled that computes this request up to token ``end``."""
        waiting = self._to_compute.get(request_id)
        if waiting is not None:
            self.will_compute(request_id, min(end, waiting[0]), waiting[0])

    def forget(self, request_id: str) -> None:
        """It is loaded, is being decided about, or has ended."""
        waiting = self._to_compute.pop(request_id, None)
        if waiting is not None:  # a sum of floats that comes and goes: exactly 0 whenever nothing waits
            self._backlog = max(0.0, self._backlog - waiting[1]) if self._to_compute else 0.0

    def _behind(self, seconds: float) -> float:
        """Seconds after which tokens that take ``seconds`` would be computed, among what waits to be computed."""
        return seconds + min(self._backlog, BEHIND * seconds)

    def started(self, source: str, nbytes: int) -> None:
        """A load was ordered. Each must end, by ``ended`` with the same numbers, whatever became of it."""
        self._source(source).queue.add(nbytes)

    def ended(self, source: str, nbytes: int) -> None:
        if not self._source(source).queue.remove(nbytes):
            raise ValueError(f"a load of {nbytes} bytes from {source} ended that had not started")

    def observe_load(self, source: str, nbytes: int, queued_bytes: int, seconds: float) -> None:
        """A load succeeded. queued_bytes: its Decision's; seconds: from the order until the request could go on.

        Failed loads are not observed: they say nothing about the link.
        """
        place = self._source(source)
        if not place.warm:
            place.warm = True  # and not measured: drivers, allocators and kernels were made on the way
        elif 0 < seconds < math.inf and nbytes > 0:
            place.rate.observe(nbytes + queued_bytes, seconds, self._clock())
            place.measured += 1

    def observe_handover(self, seconds: float) -> None:
        """A load among others was of use so long after its end."""
        step = self.step_seconds()
        if step > 0 and 0 <= seconds < math.inf:
            self._handover.observe(seconds / step, self._clock())

    def handover_seconds(self) -> float:
        """How long after its end a load is of use, where others run: a step, until more is known; 0 while that is not
        known either."""
        return self._handover.steps(self._clock()) * self.step_seconds()

    def decide(
        self,
        source: str,
        start_tokens: int,
        end_tokens: int,
        nbytes: int,
        prompt_tokens: int,
        least: float = 0.0,
    ) -> Decision:
        """Whether to load tokens [start_tokens, end_tokens) of a prompt of ``prompt_tokens``.

        nbytes: what the load moves, in the same measure as in ``started`` and ``observe_load`` (with tensor
        parallelism, one rank's share). least: seconds from its end until it is of use: ``handover_seconds`` among
        others, in whose steps it could be computed meanwhile.
        """
        place = self._source(source)
        found = self.weigh(source, start_tokens, end_tokens, nbytes, prompt_tokens, least)
        reason = found.reason
        if reason == NOTHING:
            self.decisions[NOTHING] += 1
            return found
        if reason != SHORT:  # which says nothing about the source
            place.slow = place.slow + 1 if reason == SLOWER else 0
        if place.slow >= TRIAL_EVERY:
            place.slow, reason = 0, TRIAL
        load = found.load or reason == TRIAL
        place.loads += load
        place.declined += not load
        self.decisions[reason] += 1
        return replace(found, load=load, reason=reason)

    def weigh(
        self, source: str, start_tokens: int, end_tokens: int, nbytes: int, prompt_tokens: int, least: float = 0.0
    ) -> Decision:
        """What ``decide`` would say, but for trials. Nothing is counted."""
        place = self._source(source)
        if end_tokens <= start_tokens or nbytes <= 0:
            return Decision(False, 0.0, None, NOTHING)
        queued = place.queue.before(nbytes)
        now = None if place.queue.loads else self._clock()
        alone = place.rate.seconds(nbytes, now)
        load_seconds = place.rate.seconds(nbytes + queued, now)
        compute_seconds = self.compute_seconds(start_tokens, end_tokens, prompt_tokens)
        computed_after = math.inf if compute_seconds is None else self._behind(compute_seconds)
        if compute_seconds is None or place.measured < self._known:
            reason = UNMEASURED
        elif load_seconds <= computed_after:
            reason = FASTER
        else:
            reason = QUEUED if alone <= computed_after else SLOWER
        # Of a source that was not measured nothing is expected.
        if reason in (FASTER, UNMEASURED) and least + (load_seconds if reason == FASTER else 0.0) > computed_after:
            reason = SHORT
        return Decision(reason in (FASTER, UNMEASURED), load_seconds, compute_seconds, reason, queued)

    def report(self) -> dict[str, float]:
        """The model and how good it is, as flat numbers for metrics and logs.

        prefill_seconds_per_token, _pair, step_seconds, step_seconds_per_decode, step_seconds_with_prompt (more than
        one that only generates, whatever is in it): 0 while unknown; step_error and SOURCE_error: mean of
        |ln(actual / predicted)| lately (0.1: 10 % off); SOURCE_bandwidth in bytes/s, SOURCE_latency in s,
        SOURCE_queued_bytes, SOURCE_loads and SOURCE_declined (decisions).
        """
        base, token, pair, decode, prompt = self._steps.coefficients if self._steps.known else (0.0,) * 5
        numbers = {
            "step_seconds": base,
            "prefill_seconds_per_token": token,
            "prefill_seconds_per_pair": pair,
            "step_seconds_per_decode": decode,
            "step_seconds_with_prompt": prompt,
            "step_error": self._steps.error.size,
        }
        now = self._clock()
        for name, place in self._sources.items():
            when = None if place.queue.loads else now
            numbers[f"{name}_bandwidth"] = place.rate.bandwidth(when)
            numbers[f"{name}_latency"] = place.rate.latency(when)
            numbers[f"{name}_error"] = place.rate.error.size
            numbers[f"{name}_queued_bytes"] = place.queue.nbytes
            numbers[f"{name}_loads"] = place.loads
            numbers[f"{name}_declined"] = place.declined
        return numbers

    def loading(self, source: str) -> bool:
        """Whether a load of this source is under way."""
        return self._source(source).queue.loads > 0

    def moving_seconds(self, source: str, nbytes: int) -> float:
        """The part of a load's time that its bytes take, and not what goes before: what a device is busy for."""
        place = self._source(source)
        return nbytes / place.rate.bandwidth(None if place.queue.loads else self._clock())

    def load_seconds(self, source: str, nbytes: int) -> float:
        """How long a load would take from now on, behind what its source has to do. No decision is counted."""
        place = self._source(source)
        now = None if place.queue.loads else self._clock()
        return place.rate.seconds(nbytes + place.queue.before(nbytes), now)

    def hopeless(self, start: int, end: int, prompt: int, trial: bool = True, least: float = 0.0) -> bool:
        """Whether computing [start, end) is over before the least load of any source that was measured would be of
        use, ``least`` seconds after its end: then ``decide`` would decline whatever part of it is offered. Not each
        time, if this may be a ``trial``: then what is offered is one."""
        measured = [place for place in self._sources.values() if place.measured >= max(1, self._known)]
        seconds = self.compute_seconds(start, end, prompt) if measured else None
        if seconds is None:
            return False
        now = self._clock()
        until = self._behind(seconds)
        if any(place.rate.latency(None if place.queue.loads else now) + least <= until for place in measured):
            return False
        if not trial:
            return True
        self._hopeless += 1
        if self._hopeless % TRIAL_EVERY:
            return True
        for place in measured:  # declined so often, as it were: what is offered next is tried, if it is not worth it
            place.slow = TRIAL_EVERY
        return False

    def step_seconds(self) -> float:
        """What a step lately takes that only generates; 0 while not known."""
        base, _, _, decode, _ = self._steps.coefficients
        return base + decode * self._decodes if self._steps.known else 0.0

    def compute_seconds(self, start: int, end: int, prompt: int) -> float | None:
        """What computing [start, end) adds to a prefill of [end, prompt); None if not known."""
        size = self._step_tokens
        if not self._steps.covers(min(size, end - start)):
            return None
        # At least one step is needed after a load too: vLLM computes the last token in any case.
        steps = max(1, -(-(prompt - start) // size)) - max(1, -(-(prompt - end) // size))
        return self._steps.prefill_seconds(start, end, steps, self._decodes)

    def _source(self, name: str) -> Source:
        return self._sources.get(name) or self._add(name, DEFAULT_BANDWIDTH)

    def _add(self, name: str, bandwidth: float) -> Source:
        source = Source(LoadRate(bandwidth, self._latency, self._half_life), Queue())
        self._sources[name] = source
        return source
