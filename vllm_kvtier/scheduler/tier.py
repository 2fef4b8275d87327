"""The node store as a source of KV for this engine's requests, and where its blocks go.

The store knows blocks by content; what this engine adds is the *space* (everything a block's bytes depend on beside
its tokens), the layout of a slot, and the watermark up to which all its workers can reach the store's memory.
Asking never waits: answers come on the reactor's thread and are picked up when vLLM asks again.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from vllm_kvtier.codecs import Codec
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.events import Events
from vllm_kvtier.scheduler.offers import Address, NoOffer, Offer
from vllm_kvtier.scheduler.sharing import Holder, Sharing
from vllm_kvtier.scheduler.slots import Spaces, full_bytes, offered_bytes, plan_slots
from vllm_kvtier.store.client import Failed, Pending, StoreClient
from vllm_kvtier.store.launch import start_store, store_path
from vllm_kvtier.store.messages import HASH, MAX_UNITS, PAGE, Found, Hello
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.vllm_compat.facts import EngineFacts
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.work import FarSource

logger = get_logger("vllm.kvtier.tier")

PATIENCE = 10.0  # seconds without a store before that is said
EXPLAIN_PATIENCE = 0.5  # seconds that other nodes and buckets have to say what they have, when a person asks

# In place of an engine's address, where an offer is the node store's.
HOST: Address = ("", 0)


@dataclass(frozen=True)
class Further:
    """What is on its way up in the store: tokens [0, ``tokens``) as far as is known, expected in memory in
    ``seconds``; ``asking``: seconds until more is expected to be known, 0: nobody is being asked."""

    tokens: int
    seconds: float
    asking: float


@dataclass(frozen=True)
class HostOffer(Offer):
    """``blocks`` are slots; ``instance`` is the store's life they belong to, ``session`` the connection the lease is
    on; ``nbytes`` what one rank would load; ``logical`` the bytes of KV, all ranks, that this becomes; ``epoch`` the
    tier's when it was asked for."""

    session: int
    nbytes: int
    logical: int = 0
    epoch: int = 0
    further: Further | None = None
    holders: tuple[Holder, ...] = ()

    @property
    def place(self) -> str:
        return "host"

    def begin(self) -> FarSource | None:
        """It is being ordered. What the workers need to read it; None: nothing that they do not have."""
        return None


@dataclass(frozen=True)
class NotInMemory(NoOffer):
    further: Further | None = None
    holders: tuple[Holder, ...] = ()


def _store_options(config: KVTierConfig) -> StoreOptions:
    """Those of a store that this engine starts: what the engine's options say with ``store_`` before the name."""
    given = {option.name: getattr(config, f"store_{option.name}", None) for option in fields(StoreOptions)}
    given |= {name: str(given[name]) for name in ("size", "disk_size")}
    given["cluster_key_file"] = config.cluster_key_file
    return StoreOptions(**{name: value for name, value in given.items() if value is not None})


def packed(chain: list[bytes]) -> bytes:
    """The beginnings of the hashes, which are all of one length, without looking at each."""
    chain = chain[:MAX_UNITS]
    return np.frombuffer(b"".join(chain), np.uint8).reshape(len(chain), -1)[:, :HASH].tobytes() if chain else b""


class HostAsk:
    """A lookup under way; the same face as ``peers.PendingAsk``."""

    def __init__(
        self, tier: "HostTier", pending: Pending, start: int, most: int, instance: str, patience: float = 0.0
    ):
        """``start``, ``most``: tokens; ``patience``: seconds that the store may take for what comes from below."""
        self._tier, self._pending, self._instance = tier, pending, instance
        self.start, self.most, self.patience, self.epoch = start, most, patience, tier.epoch
        self.deadline = pending.deadline
        self._outcome: HostOffer | NoOffer | None = None

    @property
    def outcome(self) -> HostOffer | NoOffer | None:
        if self._outcome is None and self._pending.outcome is not None:
            self._outcome = self._tier.offer(self, self._pending, self._instance)
        return self._outcome

    def wait(self, seconds: float) -> None:
        self._pending.wait(seconds)


class HostTier:
    def __init__(
        self,
        config: KVTierConfig,
        facts: EngineFacts,
        unit: int,
        reactor: Reactor,
        tell: Callable[[m.PoolSetup], None],
        on_lost: Callable[[], None],
    ):
        """``tell`` speaks to all workers; ``on_lost`` hears (reactor's thread) that the store went away. Raises
        ConfigError or KVTierError for a store that cannot be."""
        self._config, self._facts, self._unit, self._reactor = config, facts, unit, reactor
        self._tell, self._on_lost = tell, on_lost
        self._path = store_path() if config.store == "auto" else config.store
        self._options = _store_options(config)
        self._client: StoreClient | None = None
        self._spaces = Spaces()
        self._reached: dict[int, tuple[str, int]] = {}  # rank -> (instance, bytes its copies can reach)
        self._part_bytes: list[int] = []  # per group, of the largest rank
        self._pages: list[int] = []  # per group, of a slot
        self.writers: list[set[int]] = []  # per group, the ranks that write a part
        self.codecs: list[Codec] = []  # per group
        self.logical: list[int] = []  # per group, bytes of KV that a slot stands for
        self._instance = ""
        self._said = ""
        self._waiting = self._compared = False
        self.sharing: Sharing | None = None  # what other engines of the node have in their caches
        self.events: Events | None = None  # publishes what lies where

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def open(
        self, namespace: m.Namespace, described: dict[int, m.Described], codec: str | dict[str, str] = Codec.RAW
    ) -> None:
        """All ranks are known: lay out the slots, connect, and tell the workers where their parts are.

        ``codec``: the option's value as ``choice.resolve`` returned it.
        """
        plan = plan_slots(namespace, described, codec, self._facts.groups, self._unit, self._facts.release)
        self._spaces.base = plan.base
        self.codecs, self.writers, self.logical = plan.codecs, plan.writers, plan.logical
        self._part_bytes, self._pages = plan.part_bytes, [shape.slot_pages for shape in plan.shapes]
        names = [codec.name for codec in self.codecs]
        self._tell(m.PoolSetup(self._path, plan.offsets, plan.writes, names))
        hello = Hello(
            name=self._facts.engine_id[:200],
            pid=os.getpid(),
            kind="engine",
            unit_tokens=self._unit,
            groups=plan.shapes,
        )
        launch = (lambda: start_store(self._path, self._options)) if self._config.store == "auto" else None
        self._client = StoreClient(
            self._reactor,
            self._path,
            hello,
            launch=launch,
            ask_timeout=self._config.ask_timeout,
            on_change=self._changed,
        )
        if self.events is not None:
            self.events.join(self.space(b""))
        self._client.start()

    def reached(self, message: m.PoolReady) -> None:
        self._reached[message.rank] = (message.instance, message.nbytes)
        if self.events is not None:
            self.events.store_changed(self._client, bool(self.limit()))

    def _changed(self) -> None:
        client = self._client
        if client.instance != self._instance:
            self._instance = client.instance
            if not client.instance:
                self._on_lost()
        if self.sharing is not None:
            self.sharing.store_changed(client)
        if self.events is not None:
            self.events.store_changed(client, bool(self.limit()))
        if client.connected and not self._compared:
            self._compared = True
            wanted = {"disk": self._options.disk_path, "object": self._options.object_url, "nodes": self._options.nodes}
            lacking = [name for name, option in wanted.items() if option and name not in client.tiers]
            if lacking:
                logger.warning(
                    "kvtier: the node store that runs has no tier %s, as this engine's options ask for: it was started "
                    "with others; end it, and the next engine starts one anew", " or ".join(lacking),
                )
        if client.connected and self._said:
            self._said = ""
            logger.info("kvtier: the node store is there again")
        elif not client.connected and not self._waiting:
            self._waiting = True
            self._reactor.call_later(PATIENCE, self._still_without)

    def _still_without(self) -> None:
        """Said only if it lasts: a store that is being started, or started anew, is there in a second or two."""
        self._waiting = False
        reason = self._client.reason
        if reason and reason != self._said:
            self._said = reason
            logger.warning("kvtier: serving without the node store: %s", reason)

    # -- any thread ------------------------------------------------------------------------------------------------

    @property
    def opened(self) -> bool:
        return bool(self._spaces.base)

    @property
    def instance(self) -> str:
        return self._instance

    @property
    def session(self) -> int:
        """Number of the present connection: what is reserved on another one is of no use. 0: there is none."""
        return self._client.session if self._client is not None and self._client.connected else 0

    @property
    def below(self) -> tuple[str, ...]:
        """Names of the tiers below the store's memory."""
        return self._client.tiers if self._client is not None else ()

    def limit(self) -> int:
        """Pages of the present store's memory that all workers can reach; 0 without a store."""
        client, reached = self._client, list(self._reached.values())
        if client is None or not client.connected or len(reached) < self._facts.world_size:
            return 0
        if any(instance != client.instance for instance, _ in reached):
            return 0
        return min(nbytes for _, nbytes in reached) // PAGE

    @property
    def epoch(self) -> int:
        return self._spaces.epoch

    def space(self, variant: bytes) -> bytes:
        """``variant``: LoRA adapter fingerprint."""
        return self._spaces.of(variant)

    def renew(self) -> None:
        """What is stored so far is this engine's no longer: see ``Spaces``."""
        self._spaces.renew()
        if self.events is not None:
            self.events.leave()
            self.events.join(self.space(b""))

    def reserve(self, space: bytes, tenant: bytes, groups: list[int], hashes: bytes, parents: bytes) -> Pending:
        return self._client.reserve(space, tenant, groups, hashes, parents, self.limit())

    def commit(self, slots: list[int], session: int) -> None:
        self._client.commit(slots, session)

    def abort(self, slots: list[int], session: int) -> None:
        self._client.abort(slots, session)

    def discard(self, variant: bytes, group: int, block_hash: bytes, slot: int, session: int) -> None:
        self._client.discard(self.space(variant), group, block_hash[:HASH], slot, session)

    def touch(self, chain: list[bytes], variant: bytes) -> None:
        if self._client is not None:
            self._client.touch(self.space(variant), packed(chain))

    def pin(self, chain: list[bytes], pinned: bool) -> Pending | None:
        if self._client is None:
            return None
        return self._client.pin(self.space(b""), packed(chain), pinned)

    def inspect(self, chain: list[bytes]) -> Pending | None:
        if self._client is None:
            return None
        return self._client.inspect(self.space(b""), packed(chain))

    def explain(self, chain: list[bytes], variant: bytes) -> Pending | None:
        """Where the chain is, or what became of it; None without a store."""
        if self._client is None or not self.instance:
            return None
        mix, stride = self.sharing.names(variant) if self.sharing is not None else (b"", 1)
        return self._client.explain(self.space(variant), packed(chain), EXPLAIN_PATIENCE, mix, stride)

    @property
    def problem(self) -> str:
        """Why nothing can be had from it, in words; "" if something can."""
        if self._client is None:
            return "the engine's workers have not described their KV caches yet"
        if not self._client.connected:
            return self._client.reason
        return "" if self.limit() else "the engine's workers cannot reach the store's memory yet"

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def ask(
        self,
        start: int,
        chain: list[bytes],
        variant: bytes,
        nodes: tuple[str, ...] = (),
        patience: float = 0.0,
    ) -> HostAsk | None:
        """What the store has of ``chain`` from token ``start`` on; None without a store.

        ``nodes``: other nodes' stores that may have it. ``patience``: seconds it may wait for what comes from below.
        """
        limit = self.limit()
        if not limit:
            return None
        if start >= MAX_UNITS * self._unit:  # beyond what the store can be asked for
            return None
        if self.events is not None:
            self.events.join(self.space(variant))
        names = packed(chain)
        instance = self._client.instance
        mix, stride = self.sharing.names(variant) if self.sharing is not None else (b"", 1)
        pending = self._client.lookup(
            self.space(variant), names, start // self._unit, limit, patience, nodes, mix=mix, stride=stride
        )
        try:
            return HostAsk(self, pending, start, len(chain) * self._unit, instance, patience)
        except Exception:
            self._give_back(pending)
            raise

    def warm(self, chain: list[bytes], variant: bytes, nodes: tuple[str, ...] = ()) -> bool:
        """This will be asked for: what of it lies below the store's memory may come up. False: there is no below."""
        limit = self.limit()
        if not limit or not self._client.tiers:
            return False
        self._client.warm(self.space(variant), packed(chain), limit, nodes)
        return True

    def load_bytes(self, tokens: int) -> int:
        """What one rank loads for so many tokens, as far as they are in full attention."""
        return full_bytes(self._facts.groups, self._part_bytes, tokens)

    def offer(self, ask: HostAsk, pending: Pending, instance: str) -> HostOffer | NoOffer:
        """The reply as an offer; the store is another process, and its numbers become addresses here."""
        found = pending.outcome
        if isinstance(found, Failed):
            return NoOffer("no store", found.reason)
        if not isinstance(found, Found):
            return NoOffer("malformed", f"an answer of type {type(found).__name__}")
        tokens, limit, below = found.units * self._unit, self.limit(), found.below
        further = Further(below.units * self._unit, below.seconds, below.asking) if below is not None else None
        if ask.epoch == self.epoch:
            holders = tuple(Holder((h.host, h.port), h.instance, h.units * self._unit) for h in found.holders)
        else:
            holders = ()
        if not found.lease:
            return NotInMemory("not stored", "", further, holders)
        if tokens <= ask.start or ask.epoch != self.epoch:
            self._client.release(found.lease, pending.session)
            return NoOffer("not stored", "")
        right = tokens <= ask.most and len(found.slots) == len(self._facts.groups)
        if not right or any(
            tokens % size
            or len(slots) != (tokens - ask.start) // size
            or max(slots, default=0) + pages > limit
            or (window is None and not all(slots))
            for (size, window), pages, slots in zip(self._facts.groups, self._pages, found.slots, strict=True)
        ):
            self._client.release(found.lease, pending.session)
            if not limit:
                return NoOffer("no store", "the store went away")
            return NoOffer("malformed", "slots that this engine cannot reach")
        nbytes, logical = offered_bytes(found.slots, self._part_bytes, self.logical)
        return HostOffer(
            HOST,
            instance,
            found.lease,
            ask.start,
            tokens,
            found.slots,
            [],
            session=pending.session,
            nbytes=nbytes,
            logical=logical,
            epoch=ask.epoch,
            further=further,
            holders=holders,
        )

    def release(self, offer: HostOffer) -> None:
        self._client.release(offer.lease, offer.session)

    def cancel(self, ask: HostAsk) -> None:
        """A lease that still comes goes back at once."""
        self._give_back(ask._pending)

    def _give_back(self, pending: Pending) -> None:
        pending.then(
            lambda p: (
                self._client.release(p.outcome.lease, p.session)
                if isinstance(p.outcome, Found) and p.outcome.lease
                else None
            )
        )
