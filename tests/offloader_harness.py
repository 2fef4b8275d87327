"""The real Offloader and BlockTables in random sequences of a small engine, with a simulated store and workers.

The model knows the content of each block: for every cell the whole prefix of tokens that its KV depends on. When a
worker copies a block, possibly long after the job was made, the block must still match its hash, because the checksum
is computed then. Every pinned block is unpinned exactly once, and not before the store refused it or all writers ended.
"""

import random
from types import SimpleNamespace

import numpy as np
from cache_groups import cache_groups, chunked, mamba
from offloader_fakes import FakeReactor, FakeTier
from source_fakes import load_context
from support import FakePool, make_request, step_output
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.integrity.checksum_index import ContentKeys
from vllm_kvtier.scheduler.leases.export_builder import RESERVE_PER_REQUEST
from vllm_kvtier.scheduler.offload.block_tables import BlockTables
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.protocol import EXISTS, HASH_BYTES, NO_PARENT, Reserved
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.wire import link as m

HASH_BLOCK_SIZE = 4
BLOCKS = 100
KEYS = ContentKeys(0x51A7)
GROUPS = {
    "full": [(HASH_BLOCK_SIZE, None)],
    "windows": [(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 6)],
    "chunks": [chunked(HASH_BLOCK_SIZE, 3 * HASH_BLOCK_SIZE), (HASH_BLOCK_SIZE, None)],
    "states": [(HASH_BLOCK_SIZE, None), mamba(2 * HASH_BLOCK_SIZE), mamba(2 * HASH_BLOCK_SIZE)],
    "states alone": [mamba(HASH_BLOCK_SIZE)],
    "sizes": [(2 * HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 9), (HASH_BLOCK_SIZE, None)],
}


class Running:
    def __init__(self, name, plan, prompt, groups, salt):
        self.request = make_request(name, plan[:prompt], HASH_BLOCK_SIZE, salt=salt)
        self.plan, self.prompt = plan, prompt
        self.tables = [[] for _ in groups]
        self.status = "waiting"  # waiting, running, preempted
        self.hit = 0  # tokens that were in the GPU's prefix cache
        self.unread = 0  # tokens sampled whose output was not read yet


class Engine:
    """A small vLLM with asynchronous scheduling, if ``lag`` is 1: tokens are known a step after they are scheduled."""

    def __init__(self, groups, seed, lag, write="all", share=0.5, step_tokens=0, oldest=False, lot=1):
        """``oldest``: blocks are handed out in vLLM's order instead of any. ``lot``: as BlockTables."""
        self.rng, self.oldest = random.Random(seed), oldest
        # Of the states that steps leave behind, the prefix cache keeps a prompt's last one, some others too, or all.
        self.keeps = random.Random(~seed).choice(["last", "some", "all"])
        groups = cache_groups(groups)
        self.groups, self.lag, self.lot = groups, lag, lot
        self.full = {g for g, group in enumerate(groups) if group.kind.whole_prefix}
        self.fake = FakePool(BLOCKS, HASH_BLOCK_SIZE)
        self.reactor, self.counters = FakeReactor(), Counters()
        self.tier = FakeTier([{0} if g % 2 else {0, 1} for g in range(len(groups))], self.full)
        self.orders = {0: [], 1: []}  # by rank: StoreBlocks not reported yet
        self.given = {}  # (rank, order) -> [blocks copied, blocks to copy]
        self.well = []  # requests that ended well, how many tokens were written, and after which step
        self.entered = {}  # (hash, group) -> step in which it came into the prefix cache last
        self.owners = {}  # the same -> request that brought it
        self.woken = 0
        self.offloader = Offloader(
            load_context(
                groups, HASH_BLOCK_SIZE, config=KVTierConfig(store_write=write, store_inflight_share=share), keys=KEYS,
                pool=BlockPool(self.fake), counters=self.counters, reactor=self.reactor,
                info={"step_tokens": step_tokens},
            ).engine,
            self.tier, self.told, self.wake, lambda block_hash: False,
        )  # fmt: skip
        self.most = int(BLOCKS * share)
        self.tables = BlockTables(groups, HASH_BLOCK_SIZE, lambda ids: None, lambda t: self.offloader.wanted(), lot=lot)
        self.requests, self.made, self.step_number = {}, 0, 0
        self.content = [[None] * (4 * HASH_BLOCK_SIZE) for _ in range(BLOCKS)]
        self.meaning = {}  # (hash, salt) -> (full hash, tokens of the prefix)
        self.copies = self.restarts = 0

    def wake(self):
        self.woken += 1

    def told(self, message):
        """To all workers."""
        if isinstance(message, m.StoreBlocks):
            for rank in self.orders:
                if rank in self.tier.writers[message.group]:
                    self.orders[rank].append(message)
                    self.given[rank, message.order] = [0, len(message.slots) // 8]
        else:
            for order, count in message.orders:
                for rank in self.orders:
                    given = self.given.get((rank, order))
                    if given is not None and given[0] < given[1]:
                        given[1] = min(given[1], max(given[0], count))
                        self.ended(rank, order)

    # -- vLLM ------------------------------------------------------------------------------------------------------

    def new_request(self, plan=None, prompt=None, salt=None):
        rng = self.rng
        if plan is None:
            plan = [1] * (rng.randint(0, 4) * HASH_BLOCK_SIZE) + [
                int(rng.random() < 0.3) for _ in range(rng.randint(2, 9 * HASH_BLOCK_SIZE))
            ]
            prompt, salt = rng.randint(1, len(plan)), rng.choice([None, None, "tenant"])
        self.made += 1
        r = Running(f"r{self.made}", plan, prompt, self.groups, salt)
        r.tracked = SimpleNamespace(request=r.request)
        for i, full in enumerate(make_request("all", plan, HASH_BLOCK_SIZE, salt=salt).block_hashes):
            self.meaning[bytes(full)[:HASH_BYTES]] = bytes(full), (salt, *plan[: (i + 1) * HASH_BLOCK_SIZE])
        self.requests[r.request.request_id] = r
        return r

    def slide(self, r):
        for g, group in enumerate(self.groups):
            for i in range(min(len(r.tables[g]), group.num_skipped_blocks(r.request.num_computed_tokens))):
                self.give_back([r.tables[g][i]])
                r.tables[g][i] = 0

    def give_back(self, ids):
        self.fake.free_blocks([self.fake.blocks[i] for i in ids if i])

    def release(self, r):
        for ids in r.tables:
            self.give_back(ids[::-1])
        r.tables = [[] for _ in self.groups]

    def grow(self, r, tokens):
        """Blocks for ``tokens``; None if there are not enough."""
        lacking = [max(0, -(-tokens // size) - len(ids)) for (size, _), ids in zip(self.groups, r.tables, strict=True)]
        if sum(n if kind.by_position else min(n, 1) for n, (_, kind) in zip(lacking, self.groups, strict=True)) > len(
            self.fake.free_ids()
        ):
            return None
        new = []
        for g, (_, kind) in enumerate(self.groups):
            fresh = [] if kind.by_position else [0] * (lacking[g] - 1)  # a step leaves one state behind
            r.tables[g] += fresh
            while len(fresh) < lacking[g]:
                block = next(iter(self.fake.oldest)) if self.oldest else self.rng.choice(self.fake.free_ids())
                fresh.append(self.fake.take(block))
                r.tables[g].append(fresh[-1])
            new.append(fresh)
        return tuple(new)

    def end_at_state(self, first, tokens):
        """As vLLM does: no step passes the end of a block of states and goes on."""
        for size, kind in self.groups:
            end = first + tokens
            if not kind.by_position and end // size > first // size:
                tokens = (end // size * size if first % size == 0 else first // size * size + size) - first
        return tokens

    def relieve(self, needed):
        """As ``KVTierConnectorScheduler`` does."""
        short = needed - len(self.fake.free_ids())
        if short > 0:
            self.offloader.cancel_for_requests(short)

    def hit(self, r):
        """Blocks of another request with the same beginning, as a prefix cache finds them."""
        for other in self.requests.values():
            n = min(r.request.num_tokens - 1, other.request.num_computed_tokens - other.unread)
            n = n // (2 * HASH_BLOCK_SIZE) * (2 * HASH_BLOCK_SIZE)
            same = other.request.cache_salt == r.request.cache_salt and other.plan[:n] == r.plan[:n]
            if other is r or other.status != "running" or not n or not same:
                continue
            tables = []
            for g, group in enumerate(self.groups):
                skipped = group.num_skipped_blocks(n)
                tables.append([0] * skipped + other.tables[g][skipped : n // group.block_tokens])
            needed = [ids[group.num_skipped_blocks(n) :] for ids, group in zip(tables, self.groups, strict=True)]
            if all(all(ids) for ids in needed):
                return n, tables
        return 0, [[] for _ in self.groups]

    def step(self, every=0.8):
        rng, new, cached, scheduled = self.rng, [], [], {}
        self.read_outputs()
        self.offloader.drain()
        for name, r in list(self.requests.items()):
            request = r.request
            if rng.random() >= every:
                continue
            if r.status != "running":
                request.num_computed_tokens, tables = self.hit(r)
                r.hit = max(r.hit, request.num_computed_tokens)
                for ids in tables:
                    self.fake.touch([self.fake.blocks[i] for i in ids if i])
                r.tables = [list(ids) for ids in tables]
                left = request.num_tokens - request.num_computed_tokens
                self.relieve(sum(-(-left // size) for size, _ in self.groups))
            known = min(len(r.plan), request.num_tokens + r.unread)
            chunk = min(known - request.num_computed_tokens, rng.randint(1, 5 * HASH_BLOCK_SIZE))
            if chunk <= 0:
                continue
            before = request.num_computed_tokens
            chunk = self.end_at_state(before, chunk)
            if r.status == "running":
                self.slide(r)
            fresh = self.grow(r, before + chunk)
            if fresh is None:
                self.preempt(r)
                continue
            whole = tuple(list(ids) for ids in r.tables)
            if r.status == "running":
                cached.append((name, fresh, before, False))
            elif r.status == "preempted" and rng.random() < 0.5:
                cached.append((name, whole, before, True))
            else:
                new.append((name, whole, before))
            r.status, scheduled[name] = "running", chunk
        self.step_number += 1
        self.relieve(RESERVE_PER_REQUEST * len(scheduled) * len(self.groups))
        if self.lot > 1:
            self.tables.look_at_each_block(self.rng.random() < 0.1)
        for name, chunk in scheduled.items():
            self.cache(self.requests[name], self.requests[name].request.num_computed_tokens + chunk)
        growth = self.tables.begin_step(step_output(scheduled, new, cached), lambda name: self.requests[name].tracked)
        self.offloader.begin_step(self.step_number, growth, idle=not scheduled)
        for name, chunk in scheduled.items():
            r = self.requests[name]
            first = r.request.num_computed_tokens
            self.forward(r, first, first + chunk)
            r.request.num_computed_tokens += chunk
            if r.request.num_computed_tokens == r.request.num_tokens + r.unread < len(r.plan):
                r.unread += 1
        if not self.lag:
            self.read_outputs()

    def cache(self, r, tokens):
        """As vLLM does when it allocates: full blocks of tokens that are known; of states few, or all."""
        for g, (size, kind) in enumerate(self.groups):
            for i in range(min(tokens, r.request.num_tokens) // size):
                kept = kind.by_position or self.keeps == "all" or i + 1 == (r.prompt - 1) // size
                if r.tables[g][i] and (kept or (self.keeps == "some" and not r.request.block_hashes[i][0] % 4)):
                    name = bytes(r.request.block_hashes[(i + 1) * size // HASH_BLOCK_SIZE - 1]), g
                    if name not in self.fake.cached:
                        self.fake.cached[name] = r.tables[g][i]
                        self.entered[name], self.owners[name] = self.step_number, r

    def forward(self, r, first, last):
        """In the model it runs at once; orders of the step may be copied from now on."""
        for g, (size, kind) in enumerate(self.groups):
            if not kind.by_position:  # one state, in place or in a new block
                self.content[r.tables[g][(last - 1) // size]][:1] = [(r.request.cache_salt, *r.plan[:last])]
                continue
            for at in range(first, last):
                block = r.tables[g][at // size]
                if block:
                    self.content[block][at % size] = (r.request.cache_salt, *r.plan[: at + 1])

    def read_outputs(self):
        for r in self.requests.values():
            while r.unread:
                r.request.append_output_token_ids(r.plan[r.request.num_tokens])
                r.unread -= 1

    def preempt(self, r=None):
        running = [r for r in self.requests.values() if r.status == "running"] if r is None else [r]
        if running:
            r = self.rng.choice(running)
            self.release(r)
            while r.unread:
                r.request.append_output_token_ids(r.plan[r.request.num_tokens])
                r.unread -= 1
            r.status, r.request.num_computed_tokens = "preempted", 0

    def finish(self, r=None, well=None):
        if r is None and self.requests:
            r = self.rng.choice(list(self.requests.values()))
        if r is None:
            return
        well = self.rng.random() < 0.7 if well is None else well
        done = r.status == "running" and r.request.num_computed_tokens >= r.request.num_prompt_tokens
        r.request.status = (
            RequestStatus.FINISHED_STOPPED if well and done and not r.unread else RequestStatus.FINISHED_ABORTED
        )
        if r.request.status is RequestStatus.FINISHED_STOPPED:
            written = min(r.request.num_computed_tokens, r.request.num_tokens - 1)
            self.well.append((r, written, self.step_number))
        name = r.request.request_id
        last = len(self.requests) == 1
        self.offloader.finished(r.tracked, self.tables.remove(name), tuple(list(ids) for ids in r.tables), last)
        self.release(r)
        del self.requests[name]

    # -- the store and the workers -----------------------------------------------------------------------------------

    def store_answers(self):
        tier, rng = self.tier, self.rng
        if not tier.asked:
            return
        at = rng.randrange(len(tier.asked))
        how = rng.random()
        if how < 0.05:
            tier.asked.pop(at)[0].resolve(Failed("too slow"))
        elif how < 0.1:
            tier.asked.pop(at)[0].resolve(Reserved(1, [EXISTS]) if rng.random() < 0.5 else Reserved(1, []))
        else:
            tier.answer(at, self.full, lambda: rng.random() < 0.9)

    def store_forgets(self):
        ready = [slot for slot, item in self.tier.items.items() if item.outcome == "committed"]
        self.tier.forget(set(self.rng.sample(ready, min(len(ready), 3))))

    def store_restarts(self):
        if self.tier.up:
            self.restarts += 1
            self.tier.die(self.rng.choice([self.tier.instance, f"s{self.restarts + 1}"]))
        else:
            self.tier.live()

    def worker_acts(self, faults=0.1):
        """A rank goes on with the oldest order of a group, as far as it likes; or an order fails."""
        rank, rng = self.rng.choice([0, 1]), self.rng
        waiting = [o for o in self.orders[rank] if self.given[rank, o.order][0] < self.given[rank, o.order][1]]
        if not waiting:
            return
        if rng.random() < faults:
            self.fail(rank, rng.choice(self.orders[rank]))
            return
        group = rng.choice(waiting).group
        order = next(o for o in waiting if o.group == group)
        if order.instance != self.tier.instance:
            self.fail(rank, order, 0)
        elif order.step <= self.step_number:
            self.copy(rank, order, rng.randint(1, self.given[rank, order.order][1]))

    def fail(self, rank, order, kept=None):
        """No more of it is copied, and maybe less is of use than was."""
        copied = self.given[rank, order.order][0]
        self.given[rank, order.order] = [copied, copied]
        self.ended(rank, order.order, self.rng.randint(0, copied) if kept is None else kept)

    def ended(self, rank, order, kept=None):
        """Report it if nothing of it is left to copy."""
        copied, total = self.given[rank, order]
        if copied < total:
            return
        del self.given[rank, order]
        message, = (o for o in self.orders[rank] if o.order == order)
        self.orders[rank].remove(message)
        kept = copied if kept is None else kept
        whole = kept == len(message.slots) // 8
        told = m.Stored(rank, [order] if whole else [], [] if whole else [(order, kept)], 100 * kept, 0.1)
        assert m.decode_link(m.encode(told)) == told
        self.reactor.call_soon(lambda: self.offloader.jobs.stored(told))

    def copy(self, rank, order, count=1 << 30):
        """So many more of its blocks."""
        self.copies += 1
        size = self.groups[order.group][0]
        assert m.decode_link(m.encode(order)) == order
        blocks, slots = np.frombuffer(order.blocks, np.int64).tolist(), np.frombuffer(order.slots, np.int64).tolist()
        keys = np.frombuffer(order.keys, np.uint64).tolist()
        assert len(blocks) == len(keys) == len(slots) == len(set(slots)) > 0
        start, stop = self.given[rank, order.order]
        stop = min(stop, start + count)
        for block, key, slot in list(zip(blocks, keys, slots, strict=True))[start:stop]:
            item = self.tier.items[slot]
            full, prefix = self.meaning[item.hash]
            assert item.group == order.group and key == KEYS.key(full, order.group, b"")
            assert self.fake.blocks[block].ref_cnt > 0, "a block that is copied belongs to another request"
            tokens = len(prefix) - 1  # without the salt
            assert tokens % size == 0
            expected = [prefix[: tokens - size + j + 2] for j in range(size)]
            if self.groups[order.group].kind.by_position:
                assert self.content[block][:size] == expected, "this is not what the hash says"
            else:
                assert self.content[block][0] == prefix, "this is another state"
            if tokens > size:
                assert self.meaning[item.parent][1] == prefix[: tokens - size + 1]
            else:
                assert item.parent == NO_PARENT
            assert bool(item.tenant) == (prefix[0] is not None)
            item.copied.add(rank)
        self.given[rank, order.order][0] = stop
        self.ended(rank, order.order)

    # -- what always holds -------------------------------------------------------------------------------------------

    def bounds(self):
        assert not self.tier.violations
        assert 0 <= self.offloader.pinned <= self.most
        held = sum(b.ref_cnt for b in self.fake.blocks)
        ours = sum(1 for r in self.requests.values() for ids in r.tables for i in ids if i)
        assert held == ours + self.offloader.pinned
        waiting = {i for orders in self.orders.values() for o in orders for i in np.frombuffer(o.blocks, np.int64)}
        for block in waiting:
            assert self.fake.blocks[block].ref_cnt > 0

    def orders_end(self, how):
        """All that the workers have; ``how``: ``copy`` or ``fail``."""
        self.reactor.run()
        for rank in (0, 1):
            for order in list(self.orders[rank]):
                how(rank, order)
        self.reactor.run()

    def settle_down(self):
        """Everybody answers."""
        for _ in range(100):
            self.reactor.run()
            while self.tier.asked:
                self.tier.answer(0, self.full)
            self.reactor.run()
            for rank in (0, 1):
                for order in list(self.orders[rank]):
                    if order.instance == self.tier.instance:
                        self.copy(rank, order)
                    else:
                        self.fail(rank, order, 0)
            self.reactor.run()
            self.offloader.idle()
            if not (self.reactor.queue or self.tier.asked or any(self.orders.values())):
                return
        raise AssertionError("it never becomes quiet")

    def end(self):
        for r in list(self.requests.values()):
            self.finish(r, False)
        if not self.tier.up:
            self.tier.live()
        self.settle_down()
        self.bounds()
        assert self.offloader.pinned == 0 and not self.offloader.has_frees() and not len(self.tables)
        assert all(b.ref_cnt == 0 for b in self.fake.blocks)
        assert all(item.outcome for item in self.tier.items.values()), "a reservation was forgotten"


def run(engine, r, steps=40):
    """Schedule it until all its tokens are computed."""
    for _ in range(steps):
        engine.step(every=1.1)
        if r.request.num_computed_tokens == len(r.plan):
            return
    raise AssertionError("not computed")


def flush(engine, r):
    """Reserve all that was collected so far, as the end of the last request does."""
    engine.offloader.finished(r.tracked, None, (), True)
    engine.reactor.run()


def stored(engine, r, g=0):
    """Numbers of the blocks of the plan that the store has."""
    size = engine.groups[g][0]
    hashes = make_request("x", r.plan, HASH_BLOCK_SIZE, salt=r.request.cache_salt).block_hashes
    ready = {(item.group, item.hash) for item in engine.tier.items.values() if item.outcome == "committed"}
    present = {(group, h) for (_, group, h) in engine.tier.entries} & ready
    blocks = range(len(r.plan) // size)
    return [i for i in blocks if (g, bytes(hashes[(i + 1) * size // HASH_BLOCK_SIZE - 1])[:HASH_BYTES]) in present]


def cached_states(engine, r, g):
    """Numbers of the blocks of the prompt whose states the prefix cache has."""
    per = engine.groups[g][0] // HASH_BLOCK_SIZE
    hashes = r.request.block_hashes[per - 1 : r.prompt // HASH_BLOCK_SIZE : per]
    return [i for i, h in enumerate(hashes) if (bytes(h), g) in engine.fake.cached]
