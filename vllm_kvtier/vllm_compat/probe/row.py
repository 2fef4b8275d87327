"""A row of the probe's table, and the features that rows carry."""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_kvtier.vllm_compat.probe import checks

Release = tuple[int, int, int]


class Feature(enum.Enum):
    ALL = "everything"
    HANDOFFS = "hand-offs of prefills"
    GROUPS = "models with several KV cache groups, or MLA without chunked prefill"
    STATES = "recurrent states"
    STATE_HITS = "vLLM's own prefix cache of models with recurrent states beside attention"
    LOCAL_HITS = "hand-offs behind what attention has (recurrent states)"
    IDLE = "work while the engine is idle"
    PAUSES = "loads that end vLLM's pauses between empty steps"
    QUEUES = "steps that stay short with a long queue"
    ADMISSION = "blocks that exports give back as soon as vLLM admits a request with them"
    PRIORITIES = "engines that schedule by priority (--scheduling-policy priority)"
    DRAINING = "hand-offs that are read while the engine ends"
    PAUSED = "resets of a paused engine that has loads under way"
    PEER_FETCH = "peer fetch"
    SYNC_LOADS = "synchronous loads"
    SESSIONS = "KV of sessions that get more input"
    EVENTS = "KV events"
    HIT_SOURCES = "vLLM's metrics of cache hits by source"
    HIDDEN_METRICS = "old names of renamed metrics"
    PROMPTS = "questions about prompts (kvtier doctor --prompt, pin, warm)"
    ADAPTERS = "sharing of LoRA adapters' KV"
    CODECS = "codecs"
    TOKEN_SCALE = "KV caches with scales per token and head"
    CPU_CACHE = "KV caches of CPUs"
    CPU_CODECS = "codecs on CPUs"
    CONTEXT_PARALLEL = "context parallelism"
    MM_EMBEDDINGS = "refusal of media without their embeddings"
    REPLACEMENT = "warning about a connector that vLLM replaces (--kv-offloading-size)"
    LAUNCHER = "launches of compiled kernels without Triton's launcher"


class Side(enum.Enum):
    SCHEDULER = "scheduler"
    WORKER = "worker"
    BOTH = "both"


class Absence(NamedTuple):
    """A field that versions before ``since``, or from ``until`` on, lack; there its value would be ``means``."""

    means: Any
    since: Release | None = None
    until: Release | None = None

    def fits(self, release: Release) -> bool:
        return (self.since is not None and release < self.since) or (self.until is not None and release >= self.until)


@dataclass(frozen=True)
class Row:
    """One need of vLLM. Paths are "module:name" or "module:Class.name".

    ``calls``: (path, number of positional arguments, names of keyword arguments) of our calls; ``fields``: declared
    fields or properties of a class; ``sets``: attributes that ``__init__`` of a class sets; ``optional``: fields by
    "module:Class.name"; ``trial``: tries the behaviour on a small instance and raises Unmet; ``tried``: the paths that
    it covers.
    """

    name: str
    feature: Feature
    need: str
    side: Side = Side.SCHEDULER
    names: tuple[str, ...] = ()
    calls: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, Absence] = field(default_factory=dict)
    trial: Callable[[], None] | None = None
    tried: tuple[str, ...] = ()
    tries: str = "behaviour"  # the subject of ``trial``: that, or only "signature", "fields" or "code"
    since: Release | None = None  # older versions lack it
    until: Release | None = None  # this version and later ones lack it
    works_since: Release | None = None  # older versions may have it, but it is wrong or untried there
    late: bool = False  # checked when it is first needed: it takes seconds to import, and not every worker needs it

    @property
    def how(self) -> str:
        ways = [("signature", self.calls), ("fields", self.fields or self.optional), ("code", self.sets)]
        used = {way for way, of in [*ways, ("name", self.names), (self.tries, self.trial)] if of}
        return " + ".join(way for way in ("behaviour", "signature", "code", "fields", "name") if way in used)

    def covers(self) -> Iterable[str]:
        """Every path that this row verifies."""
        yield from self.names
        yield from (path for path, *_ in self.calls)
        yield from self.optional
        yield from self.tried
        for of in (self.fields, self.sets):
            for owner, listed in of.items():
                yield owner
                yield from (f"{owner}.{each}" for each in listed.split())

    def check(self, release: Release) -> None:
        """Raises Unmet."""
        if self.works_since is not None and release < self.works_since:
            raise checks.NotHere(f"it needs vLLM {'.'.join(map(str, self.works_since))} or later")
        for path in self.names:
            checks.find(path)
        for path, positional, keywords in self.calls:
            checks.takes(path, positional, keywords)
        for owner, listed in self.fields.items():
            checks.has_fields(owner, listed.split())
        for owner, listed in self.sets.items():
            checks.sets(owner, listed.split())
        for path, absence in self.optional.items():
            if not absence.fits(release):
                owner, _, name = path.rpartition(".")
                checks.has_fields(owner, [name])
        if self.trial is not None:
            checks.trial(self.trial)
