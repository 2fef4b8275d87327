"""Stand-ins for the node store's client and an engine's ranks, under a real NodeStoreSource."""

import time
from types import SimpleNamespace

from cache_groups import cache_groups
from source_fakes import load_context

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.sources import node_store as node_store_module
from vllm_kvtier.scheduler.sources.peer_gpu import PeerGpuSource
from vllm_kvtier.scheduler.sources.store_source import NodeStoreSource
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.protocol import HASH_BYTES, PAGE, Found
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.geometry import GroupView, Region

NAMESPACE = m.Namespace("model", "auto", "sha256", "seed", 4, 1, 1)
POOL = 1 << 20  # pages that all workers reach


class FakePending:
    """``store.client.Pending`` as far as it is used here."""

    def __init__(self, session, asked=None, deadline=0.0):
        self.session, self.outcome, self.asked, self._callbacks = session, None, asked, []
        self.deadline = deadline

    def then(self, callback):
        if self.outcome is None:
            self._callbacks.append(callback)
        else:
            callback(self)

    def wait(self, seconds):
        return self.outcome is not None

    def resolve(self, outcome):
        assert self.outcome is None
        self.outcome = outcome
        for callback in self._callbacks:
            callback(self)


class FakeClient:
    """A ``StoreClient`` that records messages and lookups. Each lease must be released exactly once."""

    def __init__(self, reactor, path, hello, *, launch=None, lookup_timeout=2.0, on_change=None):
        self.path, self.hello, self.launch, self.on_change = path, hello, launch, on_change
        self.connected, self.instance, self.reason, self.session = False, "", "not connected yet", 0
        self.started, self.tiers, self.only_named, self.lookup_timeout = False, (), (), lookup_timeout
        self.peer_count, self.presence, self.places, self.pid = 0, None, {}, 77
        self.open = []  # lookups without an answer
        self.held = set()
        self.leases = 0
        self.told = []
        self.named = []  # namespaces, by touches of no blocks

    def start(self):
        self.started = True

    def connect(self, instance):
        self.connected, self.instance, self.reason = True, instance, ""
        self.session += 1
        self.on_change()

    def lose(self):
        self.connected, self.instance, self.reason = False, "", "gone"
        self.held.clear()
        asked, self.open = self.open, []
        for pending in asked:
            pending.resolve(Failed("gone"))
        self.on_change()

    def lookup(
        self,
        namespace_id,
        block_hashes,
        start,
        pages_limit,
        wait_seconds=0.0,
        nodes=(),
        key_mask=b"",
        hash_blocks_per_block=1,
    ):
        assert (
            len(namespace_id) == HASH_BYTES
            and len(block_hashes) % HASH_BYTES == 0
            and start <= len(block_hashes) // HASH_BYTES
            and pages_limit
        )
        asked = SimpleNamespace(
            namespace_id=namespace_id,
            block_hashes=block_hashes,
            start=start,
            limit=pages_limit,
            wait_seconds=wait_seconds,
            nodes=nodes,
            key_mask=key_mask,
            hash_blocks_per_block=hash_blocks_per_block,
        )
        pending = FakePending(self.session, asked, time.monotonic() + self.lookup_timeout + wait_seconds)
        if self.connected:
            self.open.append(pending)
        else:
            pending.resolve(Failed(self.reason))
        return pending

    def answer(self, pending, num_hash_blocks, slots, holders=()):
        """With a lease, as the store does if it found something."""
        self.open.remove(pending)
        self.leases += 1
        self.held.add(self.leases)
        pending.resolve(Found(1, self.leases, num_hash_blocks, slots, holders=list(holders)))

    def refuse(self, pending, outcome=None, holders=()):
        self.open.remove(pending)
        pending.resolve(outcome or Found(1, 0, pending.asked.start, [], holders=list(holders)))

    def touch(self, namespace_id, block_hashes):
        if block_hashes:
            self.told.append(("touch", namespace_id, block_hashes))
        elif self.connected:
            self.named.append(namespace_id)

    def release(self, lease, session=None):
        if self.connected and session == self.session:
            assert lease in self.held, f"lease {lease} is given back twice"
            self.held.discard(lease)

    def __getattr__(self, name):
        if name not in ("reserve", "commit", "abort", "discard", "pin", "leave", "inspect", "warm"):
            raise AttributeError(name)
        return lambda *args: self.told.append((name, *args))


def group_view(g, tokens, window=None, *, kind="full", layers=2, heads=2, inner=512, base=0, heads_first=True, gap=0):
    """One group of a rank; ``heads_first`` and ``gap`` change only where bytes lie in memory."""
    regions = []
    for layer in range(layers):
        page = heads * tokens * inner + gap
        outer, token = (tokens * inner, inner) if heads_first else (inner, heads * inner)
        regions.append(
            Region(
                layer=f"g{g}.l{layer}", base=base + layer * (1 << 24), block_stride=page, outer=heads,
                outer_stride=outer, first_token=0, tokens=tokens, token_stride=token, inner=inner, dtype="bfloat16",
            )
        )  # fmt: skip
    return GroupView(g, tokens, kind, window, tuple(regions))


def described(rank, groups, shards, **view):
    views = [
        group_view(g, size, kind.window, **{"kind": kind.name, **view})
        for g, (size, kind) in enumerate(cache_groups(groups))
    ]
    return lm.Described(rank, tuple(views), tuple(shards))


def make_tier(
    groups, ranks=None, *, hash_block_size=4, namespace=NAMESPACE, reached=POOL, connect=True, context=None,
    events=None, **options,
):  # fmt: skip
    """A NodeStoreSource with its fake client; ``ranks``: Described messages, one rank with everything if not given.
    ``context``: keywords of ``load_context``."""
    ranks = ranks or [described(0, groups, [0] * len(groups))]
    later, setups, lost = [], [], []
    reactor = SimpleNamespace(
        call_later=lambda delay, callback: later.append(callback), call_within=lambda seconds, callback: callback(),
        on_stop=lambda callback: None,
    )
    given = {"config": KVTierConfig(store="/nowhere/store.sock", **options), "info": {"world_size": len(ranks)}}
    load = load_context(groups, hash_block_size, **{**given, "reactor": reactor, **(context or {})})
    tier = NodeStoreSource(load, setups.append, lambda: lost.append(1), PeerGpuSource(load), None, events)
    real, node_store_module.StoreClient = node_store_module.StoreClient, FakeClient
    try:
        tier.open(namespace, {rank.rank: rank for rank in ranks})
    finally:
        node_store_module.StoreClient = real
    client = tier.client
    if connect:
        client.connect("life 1")
        for rank in ranks:
            tier.reached(lm.PoolReady(rank.rank, "life 1", reached * PAGE))
    return SimpleNamespace(tier=tier, client=client, setup=setups[0], lost=lost, later=later, load=load)
