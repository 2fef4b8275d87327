"""All that lies below the server's memory, as the server sees it: one object, whatever tiers there are."""

from collections.abc import Callable
from dataclasses import replace

from vllm_kvtier.store.index import Index
from vllm_kvtier.store.limits import parse_bytes
from vllm_kvtier.store.lower.admission import admission
from vllm_kvtier.store.lower.base import Tier, TierCounts, Want
from vllm_kvtier.store.lower.demotion import Demotion
from vllm_kvtier.store.lower.disk.tier import DiskTier
from vllm_kvtier.store.lower.durations import Durations
from vllm_kvtier.store.lower.nodes.lending import Lending
from vllm_kvtier.store.lower.nodes.tier import NodesTier
from vllm_kvtier.store.lower.objects.names import store_digest
from vllm_kvtier.store.lower.objects.tier import ObjectTier
from vllm_kvtier.store.lower.promotion import Promotion, Waiter
from vllm_kvtier.store.memory import PoolMemory
from vllm_kvtier.store.messages import Below
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.policies import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.records import BadRequest, Found
from vllm_kvtier.wire.reactor import Reactor

# Numbers of ours among the index's clients; connections count up from 1.
PROMOTION, DEMOTION, LENDING = -1, -1_000_000, -1_000_001


class Lower:
    """On the server's reactor thread. ``tiers``: nearest first."""

    def __init__(self, index: Index, tiers: list[Tier], demotion: Demotion | None, promotion: Promotion):
        self._index, self._tiers = index, tiers
        self._demotion, self._promotion = demotion, promotion
        self._waiting: dict[int, set[Waiter]] = {}  # by client
        if demotion is not None:
            index.watch = demotion
            if index.fates is not None:
                index.fates.judge = demotion.fate
            for tier in tiers:
                tier.on_change = demotion.tiers_changed

    @property
    def names(self) -> list[str]:
        return [tier.name for tier in self._tiers]

    @property
    def all(self) -> list[Tier]:
        """Nearest first."""
        return list(self._tiers)

    @property
    def lent(self) -> int:
        """How often, so far, other nodes were lent of this memory."""
        return sum(tier.lent for tier in self._tiers)

    def start(self) -> None:
        for tier in self._tiers:
            tier.start()

    def stop(self) -> None:
        for tier in self._tiers:
            tier.stop()

    def lookup(
        self,
        client: int,
        want: Want,
        pages_limit: int,
        patience: float,
        answer: Callable[[Found, Below | None], None],
    ) -> None:
        """Index.lookup of ``want.chain`` from ``want.start``, and what is below of the rest, which is on its way up
        from now on. ``answer`` is called once, at once or, while more is on its way, within ``patience`` seconds; not
        at all if the client goes meanwhile."""
        found = self._index.lookup(client, want.space, want.chain, want.start, pages_limit)
        ahead = self._promotion.ahead(replace(want, start=found.units), pages_limit)
        if ahead is None or not ahead.waits_for and ahead.asking is None:
            if ahead is not None and ahead.units > found.units:
                # It came up at once: it had been on its way.
                self._index.release(client, found.lease)
                found = self._index.lookup(client, want.space, want.chain, want.start, pages_limit)
            answer(found, None)
        elif patience <= 0:
            answer(found, self._promotion.below(ahead))
        else:
            self._wait(client, want, pages_limit, patience, ahead, found, answer)

    def _wait(self, client, want, pages_limit, patience, ahead, found, answer) -> None:
        def over() -> None:
            waiting.discard(waiter)
            if found.lease:
                self._index.release(client, found.lease)
            try:
                again = self._index.lookup(client, want.space, want.chain, want.start, pages_limit)
            except BadRequest:  # the space was cleared, and belongs to an engine with other groups now
                again = Found(0, want.start, [[] for _ in want.shapes])
            more = not ahead.over and (ahead.asking is not None or ahead.units > again.units)
            answer(again, self._promotion.below(ahead) if more else None)

        waiting = self._waiting.setdefault(client, set())
        waiter = self._promotion.wait(ahead, patience, over)
        waiting.add(waiter)

    def warm(self, want: Want, pages_limit: int) -> None:
        """A request that will come needs this: what of it is below comes up; nothing is leased for anybody."""
        units = self._index.reach(want.space, want.chain, 0, pages_limit)
        self._promotion.ahead(replace(want, start=units), pages_limit)

    def peek(self, want: Want) -> int:
        """How far the chain, at hand up to ``want.start``, might go on in the tiers; nothing is begun."""
        return self._promotion.peek(want)

    def forget(self, client: int) -> None:
        """It is gone: nobody waits for what it asked. What is on its way goes on."""
        for waiter in self._waiting.pop(client, ()):
            waiter.cancel()

    def discard(self, space: bytes, group: int, block_hash: bytes) -> None:
        for tier in self._tiers:
            tier.discard(space, group, block_hash)

    def clear(self, space: bytes | None) -> None:
        for tier in self._tiers:
            tier.clear(space)

    def durations(self) -> dict[tuple[str, str], Durations]:
        """Of requests to tiers' processes, by tier and kind, as they are now."""
        return {(tier.name, kind): d.copy() for tier in self._tiers for kind, d in tier.durations.items()}

    def counts(self) -> list[TierCounts]:
        """Nearest first; ``extra`` with what demotion did and dropped."""
        lanes = self._demotion.stats() if self._demotion is not None else {}
        counts = [tier.counts() for tier in self._tiers]
        for each in counts:
            each.extra = {**each.extra, **lanes.get(each.name, {})}
        return counts


def lower_tiers(options: StoreOptions, index: Index, memory: PoolMemory, reactor: Reactor, tick: Callable[[], None]):
    """``Lower`` as the options say, nearest first: disk, other nodes' memory, objects. Nothing is begun yet.

    ``tick``: the index has a deadline that somebody must look after. Raises ConfigError in words for what cannot be.
    """
    written: dict[Tier, tuple[str, int]] = {}  # those that blocks are written to: what admits them
    tiers: list[Tier] = []
    lending = None
    if options.disk_path:
        disk = DiskTier(
            {
                "path": options.disk_path,
                "size": parse_bytes(options.disk_size, "store option disk_size"),
                "preallocate": options.disk_preallocate,
                "backend": options.disk_backend,
                "direct": options.disk_direct,
            },
            memory.fd,
            memory.nbytes,
            reactor,
            index.shapes,
            policy=POLICIES[options.policy or DEFAULT_POLICY],
            tenant_share=options.tenant_share,
        )
        tiers.append(disk)
        written[disk] = options.disk_admission, options.disk_min_tokens
    if options.nodes or options.node_listen or options.cluster_key_file:
        objects = store_digest(options.object_url, options.object_endpoint) if options.object_url else ""
        lending = Lending(index, LENDING, tick, objects=objects)
        tiers.append(
            NodesTier(
                options.nodes,
                options.node_listen,
                options.cluster_key_file,
                lending,
                memory.fd,
                memory.nbytes,
                reactor,
                objects=objects,
            )
        )
    if options.object_url:
        bucket = ObjectTier(
            options.object_url,
            options.object_endpoint,
            options.object_region,
            options.object_backend,
            memory.fd,
            memory.nbytes,
            reactor,
        )
        tiers.append(bucket)
        written[bucket] = options.object_admission, options.disk_min_tokens
    demotion = None
    if written:
        # What waits holds no memory; it is only lost if memory needs its place before its turn. What is being written
        # does: not so much that promotions find no room.
        queue = options.disk_queue_mib << 20 or memory.nbytes
        batch = memory.nbytes // 8
        demotion = Demotion(
            index, list(written), DEMOTION, lambda tier: admission(*written[tier]), queue, batch, reactor
        )
    lower = Lower(index, tiers, demotion, Promotion(index, tiers, PROMOTION, reactor.call_later))
    if lending is not None:
        lending.below = lower
    return lower
