"""What the parts of a rank's worker share, and how the worker learns about vLLM's KV cache."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvtier.jobs.results import Result
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull.peer_memory import PeerMemory

ASLEEP = "the engine went to sleep"  # reason of a job that failed because vLLM took the cache's memory away


@dataclass(frozen=True)
class RankContext:
    """``send`` sends a message to the scheduler side (reactor's thread). ``finish`` takes a job's result (any
    thread)."""

    rank: int
    reactor: Reactor
    send: Callable[[lm.LinkMessage], None]
    finish: Callable[[Result], None]


@dataclass(frozen=True)
class CacheSetup:
    """Describes the KV cache; called on the reactor's thread each time the cache gets memory.

    ``share`` makes what peers read: the cache itself, its mirror or encoded blocks. ``shards`` names, by group, the
    part of a block that this rank holds; ranks with equal bytes name the same part. ``heads`` names, by group, the KV
    heads; () if they are unknown. Only with heads, and if ``shares``, other processes of the node may read this rank's
    memory, and this rank reads theirs.
    """

    describe: Callable[[], CacheView]
    share: Callable[[CacheView], PeerMemory]
    shards: Callable[[CacheView], tuple[int, ...]]
    heads: Callable[[CacheView], tuple[m.HeadRange, ...]] = lambda view: ()
    shares: bool = True
