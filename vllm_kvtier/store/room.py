"""Room for new blocks: free slots first, then another size's cold memory, then this size's coldest blocks."""

from collections.abc import Callable, Iterable, Sequence

from vllm_kvtier.store.entries import READY, Entry
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.policies import Lru, Policy

STEPS = 16384  # entries looked at in vain before a reservation gives up: bounds its time where much is leased
STEAL_TRIES = 4
STEAL_ENTRIES = 16384  # most blocks that may go for one slab


class Tenant:
    """``queues``: its ready blocks by slot size, only kept where tenants have a share."""

    def __init__(self):
        self.pages = 0
        self.queues: dict[int, Lru] = {}


class Room:
    """``forget(entry)`` is called for each victim before its slot is freed: it must be found no more.

    tenant_share: of the pool, that one named tenant's slots may take; 1.0: no limit. Beyond it a tenant's own blocks
    go first, and if none may, it gets nothing. Requests that name no tenant (b"") are under no share.
    """

    def __init__(
        self, pool: SlotPool, policy: Callable[[], Policy], tenant_share: float, forget: Callable[[Entry], None]
    ):
        self.pool = pool
        self.evictions = 0
        self._make, self._share, self._forget = policy, tenant_share, forget
        self._policies: dict[int, Policy] = {}  # by slot size
        self._at: dict[int, Entry] = {}  # every slot in use
        self._tenants: dict[bytes, Tenant] = {}

    @property
    def tenants(self) -> int:
        return len(self._tenants)

    def pages_of(self, tenant: bytes) -> int:
        return self._tenants[tenant].pages if tenant in self._tenants else 0

    def take(self, entries: Sequence[Entry], limit: int) -> int:
        """Gives slots to the first of ``entries`` (one size, one tenant), ascending, below page ``limit``.

        Returns how many got one. They are RESERVED already, and linked, so none of their parents can be a victim.
        """
        size, name, n = entries[0].size, entries[0].tenant, len(entries)
        tenant = self._tenants.setdefault(name, Tenant())
        if name and self._share < 1:
            due = int(self._share * self.pool.pages)
            over = tenant.pages + n * size - due
            if over > 0 and size in tenant.queues:
                self._evict(tenant.queues[size], -(-over // size), limit, name)
            n = max(0, min(n, (due - tenant.pages) // size))
        slots = self.pool.alloc(size, n, limit)
        while len(slots) < n and self._steal(size, limit, force=False):
            slots += self.pool.alloc(size, n - len(slots), limit)
        if len(slots) < n:
            self._evict(self._policy(size), n - len(slots), limit)
            slots += self.pool.alloc(size, n - len(slots), limit)
        while len(slots) < n and self._steal(size, limit, force=True):
            slots += self.pool.alloc(size, n - len(slots), limit)
        slots.sort()
        for entry, slot in zip(entries, slots, strict=False):
            entry.slot = slot
            self._at[slot] = entry
        tenant = self._tenants.setdefault(name, tenant)  # it goes with its last block, so perhaps just now
        tenant.pages += len(slots) * size
        if not tenant.pages:
            del self._tenants[name]
        return len(slots)

    def put_back(self, entry: Entry) -> None:
        """It lies in its slot already, which the pool has taken (``SlotPool.restore``)."""
        self._at[entry.slot] = entry
        tenant = self._tenants.get(entry.tenant)
        if tenant is None:
            tenant = self._tenants[entry.tenant] = Tenant()
        tenant.pages += entry.size

    def free(self, entry: Entry) -> None:
        """Its slot may hold another block from now on."""
        del self._at[entry.slot]
        self.pool.free(entry.slot)
        tenant = self._tenants[entry.tenant]
        tenant.pages -= entry.size
        if not tenant.pages:
            del self._tenants[entry.tenant]

    def admit(self, entries: Iterable[Entry]) -> None:
        """Ready and not pinned: they may be victims from now on. The last block of a chain first."""
        for entry in entries:
            self._policy(entry.size).add(entry)
            if self._share < 1:
                self._tenants[entry.tenant].queues.setdefault(entry.size, Lru()).add(entry)

    def withdraw(self, entry: Entry, evicted: bool = False) -> None:
        """The opposite of ``admit``."""
        self._policies[entry.size].remove(entry, evicted)
        if self._share < 1:
            self._tenants[entry.tenant].queues[entry.size].remove(entry, evicted)

    def touch(self, size: int, entries: list[Entry]) -> None:
        """Used by one request; all admitted, of one size, the last block of a chain first."""
        if entries:
            self._policies[size].touch(entries)
            if self._share < 1:
                for entry in entries:
                    self._tenants[entry.tenant].queues[size].touch((entry,))

    def _policy(self, size: int) -> Policy:
        policy = self._policies.get(size)
        if policy is None:
            policy = self._policies[size] = self._make()
        return policy

    def _drop(self, entry: Entry) -> None:
        self.withdraw(entry, evicted=True)
        self._forget(entry)
        self.free(entry)
        self.evictions += 1

    def _evict(self, policy: Policy, n: int, limit: int, tenant: bytes | None = None) -> None:
        """Up to ``n`` blocks that ``policy`` calls coldest, each by way of its leaves; of ``tenant`` only, if given.

        A victim that may not go itself (leased, written, pinned, out of the asker's reach), or under which such a
        block is found, is deferred, and everything above it too: so a long chain in use is walked once, not once
        for each of its blocks.
        """

        def mine(entry: Entry) -> bool:
            return tenant is None or entry.tenant == tenant

        def may_go(entry: Entry) -> bool:
            return entry.evictable and entry.slot + entry.size <= limit and mine(entry)

        in_use: set[Entry] = set()  # found so, and deferred; ``left``: blocks that are neither so nor gone
        steps, left = STEPS + n, len(policy)
        while n > 0 and steps > 0 and left > 0:
            path = _path_to_victim(policy.coldest(), in_use)
            if not path:
                return
            steps -= len(path)
            if may_go(path[-1]):
                # Upwards while there is need: the next coldest is the rest of this path anyway.
                while path and n > 0 and may_go(path[-1]):
                    self._drop(path.pop())
                    n, left = n - 1, left - 1
                continue
            path.reverse()
            above = path[-1].parent
            while above is not None and above not in in_use:
                path.append(above)
                above = above.parent
            steps -= len(path)
            held = [e for e in path if e.state is READY and not e.pinned and mine(e)]
            left -= sum(e not in in_use for e in held)
            in_use.update(path)
            policy.defer(held)

    def _steal(self, size: int, limit: int, force: bool) -> bool:
        """Empty a slab (or neighbours) of another size for a slot of ``size``; False: nothing was done.

        Without ``force`` only if on average it is colder than this size's own coldest block.
        """
        own = self._policies.get(size)
        mine = own.coldest() if own else None
        for _ in range(STEAL_TRIES):
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
                self._drop(entry)
            return True
        return False


def _path_to_victim(entry: Entry | None, in_use: set[Entry]) -> list[Entry]:
    """From the entry along the oldest children to a leaf, or to the first block that is in use."""
    path = []
    while entry is not None:
        path.append(entry)
        entry = None if entry.in_use or entry in in_use else entry.first
    return path


def _with_descendants(roots: list[Entry]) -> list[Entry] | None:
    """All of them, children before parents; None: too many."""
    seen: set[Entry] = set()
    order: list[Entry] = []
    stack = [(root, False) for root in roots]
    while stack:
        entry, done = stack.pop()
        if done:
            order.append(entry)
        elif entry not in seen:
            seen.add(entry)
            if len(seen) > STEAL_ENTRIES:
                return None
            stack.append((entry, True))
            stack.extend((child, False) for child in entry.children())
    return order
