"""Allocates slots: free ones first, then another size's cold memory, then slots of this size's coldest blocks."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vllm_kvtier.store.eviction.base import Policy
from vllm_kvtier.store.eviction.lru import Lru
from vllm_kvtier.store.index.block_entry import READY, BlockEntry
from vllm_kvtier.store.memory.slot_pool import SlotPool

MAX_STEPS = 16384  # entries examined in vain by one reservation: bounds its time if much is leased
EVICT_AT_ONCE = 32  # blocks of a size, before one of another size may be the coldest
RECLAIM_TRIES = 4
RECLAIM_ENTRIES = 16384  # blocks that may be evicted for one slab


@dataclass
class Tenant:
    """``queues``: its ready blocks by slot size, maintained only if tenants have a share."""

    pages: int = 0
    queues: defaultdict[int, Lru] = field(default_factory=lambda: defaultdict(Lru))


class SlotAllocator:
    """``unlist(entry)`` is called for each victim before its slot is freed, and must unlist it.

    tenant_share: of the pool, for one named tenant; 1.0: no limit. Beyond it only the tenant's own blocks are evicted
    for it. Requests without a tenant (b"") have no limit.

    state_share: of the pool. If recurrent states fill more and no slot is free, a state evicts the coldest states
    rather than other blocks: there is one for each prompt, which is as large as the KV of many tokens, and most are
    superseded by the next prompt of their conversation.
    """

    def __init__(
        self,
        pool: SlotPool,
        policy: Callable[[], Policy],
        tenant_share: float,
        state_share: float,
        unlist: Callable[[BlockEntry], None],
    ):
        self.pool = pool
        self.evictions = 0
        self.state_pages = 0
        self._share, self._state_share, self._unlist = tenant_share, state_share, unlist
        self._states: defaultdict[int, Lru] = defaultdict(Lru)  # ready states by slot size
        self._policies: defaultdict[int, Policy] = defaultdict(policy)  # by slot size
        self._at: dict[int, BlockEntry] = {}  # every slot in use
        self._tenants: defaultdict[bytes, Tenant] = defaultdict(Tenant)

    @property
    def tenants(self) -> int:
        return len(self._tenants)

    def take(self, entries: Sequence[BlockEntry], limit: int) -> int:
        """Give slots to the first of ``entries`` (one size, one tenant, states or none), ascending, below page
        ``limit``.

        Returns the number of entries that got one. They are RESERVED and linked already, so that no parent can be a
        victim.
        """
        size, name, n = entries[0].size, entries[0].tenant, len(entries)
        tenant = self._tenants[name]
        if name and self._share < 1:
            due = int(self._share * self.pool.pages)
            for own in sorted(tenant.queues, key=lambda each: each != size):  # slots of this size can be used again
                if (over := tenant.pages + n * size - due) > 0:
                    self._evict(tenant.queues[own], -(-over // own), limit, name)
            n = max(0, min(n, (due - tenant.pages) // size))
        slots = self.pool.alloc(size, n, limit)
        state = entries[0].is_state
        if state and len(slots) < n and self.state_pages + n * size > self._state_share * self.pool.pages:
            self._evict(self._states[size], n - len(slots), limit)
            slots += self.pool.alloc(size, n - len(slots), limit)
        while len(slots) < n and self._reclaim_slab(size, limit, force=False):
            slots += self.pool.alloc(size, n - len(slots), limit)
        if len(slots) < n:
            self._evict(self._policies[size], n - len(slots), limit)
            slots += self.pool.alloc(size, n - len(slots), limit)
        while len(slots) < n and self._reclaim_slab(size, limit, force=True):
            slots += self.pool.alloc(size, n - len(slots), limit)
        slots.sort()
        for entry, slot in zip(entries, slots, strict=False):
            entry.slot = slot
            self._at[slot] = entry
        tenant = self._tenants.setdefault(name, tenant)  # the eviction of its last block may have removed it
        tenant.pages += len(slots) * size
        self.state_pages += len(slots) * size * state
        if not tenant.pages:
            del self._tenants[name]
        return len(slots)

    def exceeds_share(self, tenant: bytes, size: int) -> bool:
        """Whether a slot of ``size`` would be more than the tenant's share."""
        used = self._tenants[tenant].pages if tenant in self._tenants else 0
        return bool(tenant) and self._share < 1 and used + size > int(self._share * self.pool.pages)

    def is_taken(self, slot: int) -> bool:
        """Whether a block's slot begins there."""
        return slot in self._at

    def evict(self, count: int) -> None:
        """Evict up to ``count`` of the coldest blocks, of all sizes."""
        policies, until = list(self._policies.values()), self.evictions + count
        while self.evictions < until and policies:
            before, policy = self.evictions, min(policies, key=_coldest_use)
            # One by one would walk to the end of the coldest block's prompt for each.
            n = until - before if len(policies) == 1 else min(until - before, EVICT_AT_ONCE)
            self._evict(policy, n, self.pool.pages)
            if self.evictions == before:  # all of them are in use
                policies.remove(policy)

    def close(self) -> None:
        """Nothing is evicted any more. Ends the cycle of references with the owner of ``unlist``."""
        self._unlist = lambda entry: None

    def put_back(self, entry: BlockEntry) -> None:
        """Add a restored block, whose slot the pool has taken (``SlotPool.restore``)."""
        self._at[entry.slot] = entry
        self._tenants[entry.tenant].pages += entry.size
        self.state_pages += entry.size * entry.is_state

    def free(self, entry: BlockEntry) -> None:
        """Free the block's slot."""
        del self._at[entry.slot]
        self.pool.free(entry.slot)
        self.state_pages -= entry.size * entry.is_state
        tenant = self._tenants[entry.tenant]
        tenant.pages -= entry.size
        if not tenant.pages:
            del self._tenants[entry.tenant]

    def admit(self, entries: Iterable[BlockEntry]) -> None:
        """Make ready, unpinned blocks evictable. The last block of a prefix first."""
        for entry in entries:
            self._policies[entry.size].add(entry)
            if entry.is_state:
                self._states[entry.size].add(entry)
            if self._share < 1:
                self._tenants[entry.tenant].queues[entry.size].add(entry)

    def withdraw(self, entry: BlockEntry, evicted: bool = False) -> None:
        """The opposite of ``admit``."""
        self._policies[entry.size].remove(entry, evicted)
        if entry.is_state:
            self._states[entry.size].remove(entry, evicted)
        if self._share < 1:
            self._tenants[entry.tenant].queues[entry.size].remove(entry, evicted)

    def touch(self, size: int, entries: list[BlockEntry]) -> None:
        """Blocks of one group were used by one request: all admitted, the last block of a prefix first."""
        if entries:
            self._policies[size].touch(entries)
            if entries[0].is_state:
                self._states[size].touch(entries)
            if self._share < 1:
                for entry in entries:
                    self._tenants[entry.tenant].queues[size].touch((entry,))

    def _evict_block(self, entry: BlockEntry) -> None:
        self.withdraw(entry, evicted=True)
        self._unlist(entry)
        self.free(entry)
        self.evictions += 1

    def _evict(self, policy: Policy, n: int, limit: int, tenant: bytes | None = None) -> None:
        """Evict up to ``n`` of the policy's coldest blocks, leaves first; of ``tenant`` only, if given.

        A victim that cannot be evicted (leased, being written, pinned, beyond ``limit``), or has such a descendant, is
        deferred with all its ancestors, so that a long prefix in use is walked once, not once per block.
        """

        def mine(entry: BlockEntry) -> bool:
            return tenant is None or entry.tenant == tenant

        def may_go(entry: BlockEntry) -> bool:
            return entry.evictable and entry.slot + entry.size <= limit and mine(entry)

        in_use: set[BlockEntry] = set()  # deferred blocks; ``left``: blocks neither deferred nor evicted
        steps, left = MAX_STEPS + n, len(policy)
        while n > 0 and steps > 0 and left > 0:
            path = _path_to_victim(policy.coldest(), in_use)
            if not path:
                return
            steps -= len(path)
            if may_go(path[-1]):
                # Go on upwards: the next coldest block is the rest of this path anyway.
                while path and n > 0 and may_go(path[-1]):
                    self._evict_block(path.pop())
                    n, left = n - 1, left - 1
                continue
            path.reverse()
            parent = path[-1].parent
            while parent is not None and parent not in in_use:
                path.append(parent)
                parent = parent.parent
            steps -= len(path)
            held = [e for e in path if e.state is READY and not e.pinned and mine(e)]
            left -= sum(e not in in_use for e in held)
            in_use.update(path)
            policy.defer(held)

    def _reclaim_slab(self, size: int, limit: int, force: bool) -> bool:
        """Empty a slab (or neighbours) of another size for a slot of ``size``. False: nothing was done.

        Without ``force`` only if it is colder, on average, than this size's coldest block.
        """
        own = self._policies.get(size)
        mine = own.coldest() if own else None
        for _ in range(RECLAIM_TRIES):
            others = [(p, victim) for s, p in self._policies.items() if s != size and (victim := p.coldest())]
            if not others:
                return False
            policy, victim = min(others, key=lambda found: found[1].used)
            if mine is not None and not force and victim.used >= mine.used:
                return False
            slabs = self.pool.around(victim.slot, size, limit)
            if slabs is None:
                policy.defer((victim,))
                continue
            roots = [self._at[slot] for slab in slabs for slot in slab.slots()]
            going = _with_descendants(roots)
            if going is None or any(e.in_use for e in going):
                policy.defer((victim,))
                continue
            if mine is not None and not force and sum(e.used for e in going) >= mine.used * len(going):
                return False
            for entry in going:
                self._evict_block(entry)
            return True
        return False


def _coldest_use(policy: Policy) -> float:
    victim = policy.coldest()
    return math.inf if victim is None else victim.used


def _path_to_victim(entry: BlockEntry | None, in_use: set[BlockEntry]) -> list[BlockEntry]:
    """From the entry along the oldest children to a leaf, or to the first block that is in use."""
    path = []
    while entry is not None:
        path.append(entry)
        entry = None if entry.in_use or entry in in_use else entry.first
    return path


def _with_descendants(roots: list[BlockEntry]) -> list[BlockEntry] | None:
    """The roots and all their descendants, children before parents; None: too many."""
    seen: set[BlockEntry] = set()
    order: list[BlockEntry] = []
    stack = [(root, False) for root in roots]
    while stack:
        entry, done = stack.pop()
        if done:
            order.append(entry)
        elif entry not in seen:
            seen.add(entry)
            if len(seen) > RECLAIM_ENTRIES:
                return None
            stack.append((entry, True))
            stack.extend((child, False) for child in entry.children())
    return order
