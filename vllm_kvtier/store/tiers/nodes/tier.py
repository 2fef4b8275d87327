"""Other nodes' stores as a secondary tier of this one: looked up and read, never written."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_kvtier.ewma import Ewma
from vllm_kvtier.remote_store.bad_blocks import BadBlocks
from vllm_kvtier.remote_store.options import NodeOptions
from vllm_kvtier.store.index.block_entry import BlockName
from vllm_kvtier.store.tiers.base import Block, Find, TierCounts, Want
from vllm_kvtier.store.tiers.nodes.lease_table import NodeLeaseTable
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import OPENING, READY, ProcessTier, TierContext
from vllm_kvtier.store.tiers.read_time import ReadTime
from vllm_kvtier.wire.slots import PAGE

# The tier process answers well before these times, whatever its peers do. One that does not has hung.
LOOK_SECONDS = 30.0
READ_SECONDS = 75.0
FIRST_READ_RATE = 1e9, 0.005  # bytes per second and seconds of a read, before any measurement
FIRST_LATENCY = 0.005  # seconds of a find, before any measurement
LATENCY_WEIGHT = 0.2  # of the latest find
MAX_NAMED = 4  # stores that do not answer, in a reason
MAX_ORIGINS = 1 << 14  # remembered: a wrong block is found when it is loaded, soon after it was read


class NodesTier(ProcessTier):
    """options: of the tier process (see ``nodes.process``). leases: grants other nodes leases of this store's memory;
    owned by this tier.

    Raises ConfigError for invalid options, and for an address that requires a cluster key.
    """

    name = "nodes"
    writable = False

    def __init__(self, context: TierContext, options: m.Options, leases: NodeLeaseTable):
        parsed = NodeOptions.parse(options)
        self._listed = bool(parsed.nodes or parsed.names)
        self._nodes: dict[str, str | None] | None = None  # as in ListedNodes, of the process that is open
        self._leases = leases
        self._instance = 0  # of the tier process: tokens of another instance are invalid
        self._bad_blocks = BadBlocks()
        self._origins: dict[BlockName, str] = {}  # the store that a block was read from, oldest first
        self._looks: dict[int, tuple[Want, float]] = {}  # in flight; start time, 0: already measured
        self._latency, self._reads = Ewma(FIRST_LATENCY, LATENCY_WEIGHT), ReadTime(*FIRST_READ_RATE)
        super().__init__(context, options)

    @property
    def only_named(self) -> bool:
        return not self._listed

    @property
    def leases_granted(self) -> int:
        return self._leases.leases_granted

    # -- finding -------------------------------------------------------------------------------------------------

    def find(self, want: Want, done: Callable[[Find], None]) -> None:
        if not self.usable or not (self._listed or want.nodes):
            done(Find(want, want.start))
            return
        self._counts.lookups += 1
        instance = self._instance
        look = m.Look.of(self._tier_process.next_id(), want)

        def answered(reply: m.Located | None) -> None:
            if reply is not None:
                self._measure(look.id)
            self._looks.pop(look.id, None)
            if reply is None or not reply.token or not want.start < reply.num_hash_blocks <= want.num_hash_blocks:
                done(Find(want, want.start))
                return
            good = self._good_hash_blocks(want, reply.num_hash_blocks, reply.store)
            find = Find(want, good, (instance, reply.token, reply.store), reply.store)
            if find.num_hash_blocks > want.start:
                self._counts.found_blocks += sum(
                    (find.num_hash_blocks - want.start) // shape.hash_blocks_per_block for shape in want.shapes
                )
            else:
                self.release(find)
            done(find)

        self._looks[look.id] = want, self._clock()
        self._tier_process.request(look, LOOK_SECONDS, answered)

    def _measure(self, look: int) -> None:
        """Update the latency by the time until the first message; a peer reports the duration of a promotion itself."""
        _, began = self._looks[look]
        if began:
            self._latency.observe(self._clock() - began)

    def _promotion_status(self, status: m.PromotionStatus) -> None:
        if status.id not in self._looks:
            return
        self._measure(status.id)
        want, _ = self._looks[status.id]
        self._looks[status.id] = want, 0.0
        end = min(status.num_hash_blocks, want.num_hash_blocks)
        num_hash_blocks = self._good_hash_blocks(want, end, status.store)
        self.on_promotion_status(want, num_hash_blocks, status.seconds)

    def release(self, find: Find) -> None:
        instance, token, _ = find.token
        if instance == self._instance:
            self._tier_process.send(m.Release(token))

    def latency(self) -> float:
        return self._latency.value

    def _good_hash_blocks(self, want: Want, num_hash_blocks: int, store: str) -> int:
        return self._bad_blocks.good_hash_blocks(
            want.namespace_id, want.block_hashes, want.shapes, want.start, num_hash_blocks, store
        )

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, find: Find, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        instance, token, store = find.token
        if instance != self._instance or not self.usable:
            self._counts.read_failures += len(blocks)
            done([False] * len(blocks))
            return
        moves = [m.Move.of(block) for block in blocks]
        nbytes = sum(block.pages for block in blocks) * PAGE
        begun = self._reads.begin(nbytes, self._clock())

        def answered(reply: m.Moved | None) -> None:
            good = reply.good if reply is not None else [False] * len(blocks)
            self._reads.end(begun, nbytes, self._clock(), all(good))
            counts = self._counts
            counts.read_blocks += sum(good)
            counts.read_bytes += sum(block.pages for block, ok in zip(blocks, good, strict=True) if ok) * PAGE
            counts.read_failures += len(good) - sum(good)
            self._came_from(store, [block.name for block, ok in zip(blocks, good, strict=True) if ok])
            done(good)
            if not self._reads.under_way:
                self.on_quiet()

        self._tier_process.request(m.Read(self._tier_process.next_id(), token, moves), READ_SECONDS, answered)

    def seconds(self, nbytes: int) -> float:
        return self._reads.seconds(nbytes)

    @property
    def reading(self) -> bool:
        return self._reads.under_way > 0

    def discard(self, namespace_id: bytes, group: int, block_hash: bytes) -> None:
        store = self._origins.pop((namespace_id, group, block_hash), "")
        if store:  # else another tier's, or this store's own
            self._bad_blocks.add(namespace_id, group, block_hash, store)
            self._counts.discarded_blocks += 1

    def _came_from(self, store: str, names: Sequence[BlockName]) -> None:
        for name in names:
            self._origins.pop(name, None)
            self._origins[name] = store
        while len(self._origins) > MAX_ORIGINS:
            del self._origins[next(iter(self._origins))]

    # -- not supported -------------------------------------------------------------------------------------------

    def has(self, namespace_id: bytes, group: int, block_hash: bytes) -> bool:
        return False

    def write(self, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        done([False] * len(blocks))

    def clear(self, namespace_id: bytes | None) -> None:
        """Nothing to clear: the blocks belong to other nodes."""

    # -- its process ---------------------------------------------------------------------------------------------

    def counts(self) -> TierCounts:
        tier_process, leases = self._tier_process, self._leases
        state, reason = self._state()
        return replace(
            self._counts,
            state=state,
            reason=reason,
            nodes=self._nodes or {},
            read_seconds=self._reads.busy_seconds(self._clock()),
            restarts=tier_process.restarts,
            timeouts=tier_process.timeouts,
            extra={
                "leased_blocks": leases.leased_blocks,
                "leases_granted": leases.leases_granted,
                "lease_promotions": leases.promotions,
                "leases_out": len(leases),
            },
        )

    def _state(self) -> tuple[str, str]:
        """As in TierCounts: of the process, and if it is open, of the listed stores."""
        process = self._tier_process
        if process.state != READY:
            return "opening" if process.state == OPENING else "unavailable", process.reason
        if self._nodes is None:
            return "opening" if self._listed else "ready", ""
        errors = [f"{address}: {error}" for address, error in self._nodes.items() if error]
        answering = sum(error == "" for error in self._nodes.values())
        more = f"; and {len(errors) - MAX_NAMED} more" if len(errors) > MAX_NAMED else ""
        reason = f"{answering} of {len(self._nodes)} nodes answer: {'; '.join(errors[:MAX_NAMED])}{more}"
        if answering or not self._nodes:
            return "ready", reason if errors else ""
        return ("unavailable", reason) if len(errors) == len(self._nodes) else ("opening", "")

    def process_message(self, message: m.ToServer) -> None:
        if isinstance(message, m.PromotionStatus):
            self._promotion_status(message)
        elif isinstance(message, m.LeaseRequest | m.Return | m.Left):
            self._leases.handle(message, self._tier_process.send)
        elif isinstance(message, m.ListedNodes):
            self._nodes = message.errors
        else:
            self._tier_process.back_off(f"unexpected message {type(message).__name__}")

    def process_up(self, opened: m.Opened) -> None:
        self._instance += 1
        self.on_change()

    def process_down(self, reason: str) -> None:
        self._instance += 1
        self._nodes = None
        self._leases.end()
        self.on_change()
