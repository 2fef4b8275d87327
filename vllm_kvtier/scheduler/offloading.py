"""Offloading: full blocks go to the node store as requests fill them.

A block's way: *collected* in the step that fills it and pinned at once, so that nothing else gets its memory;
*reserved*, when the store says which of the collected it lacks; *copying*, ordered from the workers behind the
forward that writes it; then committed and unpinned. A block the store has, or has no room for, is unpinned after
the second stage. Pins are the one bound of what is under way: beyond it, and when vLLM is short of blocks, the newest
blocks are *taken back*, from the end of their chains, and are offered again: with the next block that their request
fills, and when it has ended well for as long as vLLM's prefix cache still has them.

Blocks of a LoRA adapter go when their request has ended (see ``provenance``), and are not offered again: what vLLM's
prefix cache has under their hashes later may be a step's that just loads other weights.

What is stored of a chain has no gap: a block is committed behind its parent, or not at all. Orders of a group are
copied in their order and end in it, and where one was cut short, so is all that depends on what it lacks.

Collecting and unpinning happen here, on the scheduler's thread (the pool has no lock); the rest on the reactor's, see
``store_jobs``.
"""

import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.events import Events
from vllm_kvtier.scheduler.ledger import Keys
from vllm_kvtier.scheduler.store_jobs import (
    FOR_REQUESTS,
    NO_BEGINNING,
    NO_STORE,
    STORED,
    STORED_ALREADY,
    TOO_MANY,
    Batch,
    Item,
    StoreJobs,
)
from vllm_kvtier.scheduler.tables import Growth, Table
from vllm_kvtier.scheduler.tier import HostTier
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.store.client import Pending
from vllm_kvtier.store.messages import HASH, MAX_ITEMS, NO_PARENT
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Reactor

# Blocks are asked for together: a request that only generates fills one in 16 steps, and a message a step for each
# would cost more than it saves: every thread that a message goes through takes the interpreter from the engine's. A
# long prompt asks at once, so that the copy begins behind its forward; a short one soon, because others may begin with
# it; what is generated is wanted when the request has ended, which asks as well.
ASK_AT = 32, 64  # blocks: where prompts are among them, and where not
ASK_AFTER = 8, 32  # steps, the same
REWINDS = 2
# Ended requests with blocks to offer again of which one is looked for in the prefix cache each step, while there is no
# room for them: those that vLLM has evicted are forgotten. The share of all keeps their number bounded.
PRUNED, PRUNED_SHARE = 8, 64
# Most of them: without a store all that end well wait for it, each with its whole request, as long as its beginning
# stays in the prefix cache; a step looks at a share of them, and at all when there is room again.
MOST_ENDED = 1024

# Steps after which it is looked again which of the pinned blocks no request holds, where these were too few: looking
# takes a millisecond where tens of thousands are pinned, and vLLM may be short of blocks in every step.
LOOK_AFTER = 8


class Offloader:
    def __init__(
        self,
        config: KVTierConfig,
        tier: HostTier,
        pool: BlockPool,
        keys: Callable[[], Keys],
        groups: list[tuple[int, int | None]],
        counters: Counters,
        reactor: Reactor,
        tell: Callable[[m.StoreBlocks | m.CancelStores], None],
        on_free: Callable[[], None],
        step_tokens: int,
        verified: Callable[[], bool],
    ):
        """``on_free`` hears (reactor's thread) that blocks wait to be unpinned. ``step_tokens``: most tokens of a step.
        ``verified``: whether all that vLLM's prefix cache has is known to be right."""
        self._config, self._tier, self._pool, self._keys = config, tier, pool, keys
        self._groups, self._counters, self._reactor, self._verified = groups, counters, reactor, verified
        self.events: Events | None = None
        self._unit = pool.hash_block_tokens
        self._most = int(pool.num_blocks * config.store_hold_share)
        # Free blocks that are left to vLLM when those of ended requests are pinned again: what a step may need.
        self._step_tokens = step_tokens
        step_blocks = sum(-(-step_tokens // size) for size, _ in groups)
        self._spare = min(step_blocks, pool.num_blocks // 4)
        self._pinned = 0
        # Of the pinned blocks so many were held by no request at the last look that found too few; until this step, or
        # until a request ends, it is not looked again.
        self._alone, self._look_at = 0, 0
        self._held: Counter[int] = Counter()  # the blocks of these pins
        self._open: dict[tuple[bytes, bytes], Batch] = {}
        # Of requests that ended well and have blocks to offer again: one for each content, by the store's space and the
        # hash of the last full block. The one looked at longest ago comes first.
        self._ended: dict[tuple[bytes, bytes], Table] = {}
        self._step = 0
        self.jobs = StoreJobs(tier, groups, counters, reactor, tell, on_free)

    def wanted(self) -> bool:
        return self._config.store_write != "off"

    @property
    def pinned(self) -> int:
        """Blocks held for copies."""
        return self._pinned

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def begin_step(self, step: int, growth: list[Growth]) -> None:
        self._step = step
        self.drain()
        if self.wanted():  # tables may be followed for other engines' sake
            self._offer_ended()  # first: what running requests hold is not evicted meanwhile
            if self._tier.limit():
                for tracked, table, computed in growth:
                    self._collect(table, self._full(tracked.request, computed))
        self._ask(False)
        self._leave_room(growth)

    def idle(self) -> None:
        """No request is there: what ended ones left goes on."""
        self.drain()
        self._offer_ended()
        self._ask(True)

    def _leave_room(self, growth: list[Growth]) -> None:
        """vLLM preempts a request for whose next part of the prompt there are no free blocks."""
        prompts = [(t.request.num_prompt_tokens, computed) for t, _, computed in growth]
        left = min(self._step_tokens, sum(max(0, tokens - computed) for tokens, computed in prompts))
        short = sum(-(-left // size) for size, _ in self._groups) - self._pool.free_count()
        if short > 0:
            self.relieve(short)

    def finished(self, t: Tracked, table: Table | None, block_ids: tuple[list[int], ...]) -> None:
        """The request ended; what it filled last goes too, if it ended well."""
        request = t.request
        self._look_at = 0  # what it held may be ours alone now
        if table is not None:
            table.ended, table.groups = 0, block_ids
            if self.wanted() and vr.ended_well(request):
                table.ended = self._full(request, vr.written_tokens(request))
                table.space = self._tier.space(vr.variant(request))
                if self._tier.limit():
                    self._collect(table, table.ended, leaving=True)
                if request.lora_request is None:
                    self._keep_ended(table)
                elif self._left(table):
                    self._give_up_ended(table)
        self._ask(True)

    def _full(self, request: Any, tokens: int) -> int:
        """Of the first ``tokens`` tokens, those whose full blocks are to be stored."""
        full = min(tokens, len(request.block_hashes) * self._unit)
        return min(full, request.num_prompt_tokens) if self._config.store_write == "prompt" else full

    def _left(self, table: Table) -> bool:
        return any(self._last(table, g, table.ended) > done for g, done in enumerate(table.offered))

    def _last(self, table: Table, g: int, full: int) -> int:
        """How many of the group's blocks are full and known."""
        return min(full // self._groups[g][0], len(table.groups[g]))

    def _offer_ended(self) -> None:
        """Blocks of ended requests that were taken back, as far as vLLM still has them and there is room."""
        if not self._verified():
            return
        most = PRUNED + len(self._ended) // PRUNED_SHARE
        for checked in range(len(self._ended)):
            if checked >= most and not self._room(ended=True):
                return
            table = self._ended.pop(next(iter(self._ended)))
            if self._tier.space(vr.variant(table.request)) != table.space:
                self._give_up_ended(table)  # what is stored from now on is something else
                continue
            self._collect(table, table.ended)
            self._keep_ended(table)

    def _keep_ended(self, table: Table) -> None:
        """If blocks are left to offer again: in place of a table of the same content, whose blocks it offers too."""
        if not self._left(table):
            return
        key = table.space, bytes(table.request.block_hashes[table.ended // self._unit - 1])
        same = self._ended.pop(key, None)
        if same is not None:
            if same.instance == table.instance:
                table.offered = [min(pair) for pair in zip(table.offered, same.offered, strict=True)]
            else:
                table.offered = [0] * len(self._groups)  # to one life of the store or the other
            table.rewinds, table.why = max(table.rewinds, same.rewinds), table.why or same.why
        self._ended[key] = table
        if len(self._ended) > MOST_ENDED:
            self._give_up_ended(self._ended.pop(next(iter(self._ended))))

    def _give_up_ended(self, table: Table) -> None:
        why = table.why or self._no_room()
        for g, done in enumerate(table.offered):
            self._counters.count("not_stored", why, max(0, self._last(table, g, table.ended) - done))

    def _no_room(self) -> str:
        return TOO_MANY if self._tier.limit() else NO_STORE

    def _room(self, ended: bool = False) -> int:
        """Blocks that may be pinned now. ``ended``: that no request holds, so that vLLM could hand them out."""
        room = self._most - self._pinned if self._tier.limit() else 0
        return max(0, min(room, self._pool.free_count() - self._spare) if ended else room)

    def _collect(self, table: Table, full: int, leaving: bool = False) -> None:
        """Blocks of the first ``full`` tokens not offered yet, as far as there is room. ``leaving``: the request ends,
        and its table has exactly what it holds still."""
        if leaving and table.request.lora_request is not None:  # whoever computed what was hit may not have offered it
            table.offered = [0] * len(self._groups)
        self._follow_store(table, leaving)
        if all(full // size <= done for (size, _), done in zip(self._groups, table.offered, strict=True)):
            return
        request = table.request
        variant, hashes = vr.variant(request), request.block_hashes
        batch, keys = self._batch(request, variant), self._keys()
        for g, (size, _) in enumerate(self._groups):
            places = self._places(table, g, full, leaving)
            if not places:
                continue
            # All that may raise first: no block is held that is in no batch.
            per, items, raws = size // self._unit, [], []
            whole = [bytes(hashes[(i + 1) * per - 1]) for i, _ in places]
            for (i, block), key, h in zip(places, keys.of(whole, g, variant), whole, strict=True):
                parent = bytes(hashes[i * per - 1])[:HASH] if i else NO_PARENT
                item = Item(table, g, i, block, key, batch.space, h[:HASH], parent, table.begun)
                if self.events is not None:
                    item.label = self.events.label_of(batch.space, g, h)
                items.append(item)
            if self.events is not None:
                raws = self.events.describe(batch.space, request, g, [i for i, _ in places])
            blocks = self._pool.pin([block for _, block in places])
            self._pinned += len(blocks)
            self._held.update(blocks)
            batch.items += items
            batch.raws += raws
            batch.prompts |= places[0][0] * size < request.num_prompt_tokens
            batch.step = max(batch.step, self._step)

    def _places(self, table: Table, g: int, full: int, leaving: bool) -> list[tuple[int, int]]:
        """(index, block) of a group's blocks to pin next; they count as offered.

        While the request runs, and at its end, its own; later, and where a window has passed, those in which vLLM's
        prefix cache has the content. What it has no more is not stored, nor, but for windows, what comes after it.
        """
        (size, window), hashes = self._groups[g], table.request.block_hashes
        ended = table.ended is not None and not leaving
        per, room, found, ids = size // self._unit, self._room(ended), [], table.groups[g]
        own, last = len(ids) if ended else 0, self._last(table, g, full)
        if window is not None and not ended and not leaving:
            own = self._still_held(table.request.num_computed_tokens, size, window)
        for i in range(table.offered[g], last):
            block = ids[i] if i >= own else 0
            if not block and self._verified() and table.request.lora_request is None:
                block = self._pool.cached_block(bytes(hashes[(i + 1) * per - 1]), g)
            if block and not room:
                table.why = self._no_room()
                break
            if block:
                found.append((i, block))
                room -= 1
            elif window is None:
                self._counters.count("not_stored", table.why or TOO_MANY, last - i)
                table.offered[g] = last
                break
            elif table.why:
                self._counters.count("not_stored", table.why)
            table.offered[g] = i + 1
        return found

    def _follow_store(self, table: Table, leaving: bool) -> None:
        """Another store serves, which has nothing of what the one before was offered: all of it goes again, but for
        what is behind a window."""
        instance = self._tier.instance
        if not instance or instance == table.instance:
            return
        if table.instance:
            table.offered, table.rewinds = [0] * len(self._groups), 0
        table.instance = instance
        for g, (size, window) in enumerate(self._groups):
            if window is None:
                continue
            if leaving:
                own = next((i for i, block in enumerate(table.groups[g]) if block), 0)
            else:
                own = self._still_held(table.request.num_computed_tokens, size, window)
            table.offered[g] = max(table.offered[g], own)

    @staticmethod
    def _still_held(before: int, size: int, window: int) -> int:
        """A windowed group's first block that is certainly still the request's own in a step that begins at token
        ``before``: vLLM has given up those behind the window, and what was filled long ago (the store was not there
        then) may be another request's by now."""
        return min(before // size, max(0, before - window + 1) // size + 1)

    def _batch(self, request: Any, variant: bytes) -> Batch:
        salt = getattr(request, "cache_salt", None)
        tenant = hashlib.blake2b(salt.encode(), digest_size=8).digest() if salt else b""
        key = self._tier.space(variant), tenant
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = Batch(*key, since=self._step)
            if self.events is not None:
                self.events.join(batch.space)  # what is stored there is published, whether or not it was asked for
        return batch

    def _ask(self, now: bool) -> None:
        """Reserve what was collected, as soon as that is worth a message."""
        for key, batch in list(self._open.items()):
            at, after = (limits[0 if batch.prompts else 1] for limits in (ASK_AT, ASK_AFTER))
            if not (now or len(batch.items) >= at or self._step - batch.since >= after):
                continue
            while batch.items:
                self._reserve(batch, batch.items[:MAX_ITEMS])
            del self._open[key]
            if self.events is not None:
                self.events.tell(batch.space, batch.raws)  # behind the reservations

    def _reserve(self, batch: Batch, items: list[Item]) -> None:
        instance = self._tier.instance
        groups, hashes = [item.group for item in items], b"".join([item.hash for item in items])
        parents = b"".join([item.parent for item in items])
        self.jobs.asked()
        try:
            pending = self._tier.reserve(batch.space, batch.tenant, groups, hashes, parents)
        except Exception:
            self._reactor.call_soon(self.jobs.count_answer)
            raise
        del batch.items[: len(items)]
        answered = functools.partial(self._on_answer, batch, items, instance)
        try:
            pending.then(answered)
        except Exception:  # else the blocks would stay pinned for ever
            pending.then(answered)
            raise

    def _on_answer(self, batch: Batch, items: list[Item], instance: str, pending: Pending) -> None:
        self._reactor.call_soon(lambda: self.jobs.reserved(batch, items, pending, instance, self.events))

    def drain(self) -> None:
        """Unpin what was copied or refused; what is to be stored all the same is offered again from there on."""
        returned = self.jobs.returned
        while returned:
            items, why = returned[0]
            ids = [item.block for item in items]
            self._pool.free(ids)
            returned.popleft()
            self._pinned -= len(ids)
            for i in ids:
                self._held[i] -= 1
                if not self._held[i]:
                    del self._held[i]
            if why == STORED_ALREADY:
                self._counters.count("not_stored", why, len(items))
            elif why != STORED:
                self._take_back(items, why)

    def _take_back(self, items: list[Item], why: str) -> None:
        by_table: defaultdict[Table, list[Item]] = defaultdict(list)
        for item in items:
            by_table[item.table].append(item)
        for table, mine in by_table.items():
            again = table.begun != mine[0].begun  # that was done since these were collected, from their parents on
            if not again and not self._again(table, why):
                self._counters.count("not_stored", why, len(mine))
                continue
            table.why = why
            for item in mine:
                table.offered[item.group] = min(table.offered[item.group], item.index)
            if not again:
                table.begun += 1
                if why == NO_BEGINNING:
                    self._rewind(table)
            if table.ended:
                self._keep_ended(table)

    def _again(self, table: Table, why: str) -> bool:
        """Whether blocks are to be offered again. A few times only, unless it is for something that passes: a store
        that keeps losing or refusing them is too small for them."""
        if table.ended == 0 or table.request.lora_request is not None:  # it did not end well, or must not be
            return False
        if why in (NO_STORE, FOR_REQUESTS):
            return True
        table.rewinds += 1
        return table.rewinds <= REWINDS

    def _rewind(self, table: Table) -> None:
        """The store lost the beginning of this: offer it from there."""
        for g, (_, window) in enumerate(self._groups):
            if window is None:
                table.offered[g] = 0
        table.due = 0

    def has_frees(self) -> bool:
        return bool(self.jobs.returned)

    def relieve(self, short: int) -> None:
        """vLLM lacks ``short`` blocks: give up copies that have not begun, newest first, if that makes up for it.

        It mostly does not: what a request still uses is not freed by our letting go of it. And an engine under load
        always has a request that waits for more than all copies hold; nothing would ever be stored there.
        """
        if short <= self._pinned and (short <= self._alone or self._step >= self._look_at):
            self._alone = self._pool.held_once(self._held, short)
            if short <= self._alone:
                short -= self._cut_batches(short)
                self.jobs.cut_flights(short, self._pool.held_once)
            else:
                self._look_at = self._step + LOOK_AFTER
        self.drain()

    def _cut_batches(self, short: int) -> int:
        """Give up so many blocks that no request uses, of those that the store was not asked about yet; how many there
        were."""
        cut = 0
        for key, batch in reversed(list(self._open.items())):
            names: set[tuple[bytes, int, bytes]] = set()
            for item in reversed(batch.items):
                if cut >= short:
                    break
                if self._pool.held_once([item.block]):
                    names.add(item.name)
                    cut += 1
            if not names:
                continue
            kept, gone = [], []
            for item in batch.items:  # parents come first
                if item.name in names or (item.space, item.group, item.parent) in names:
                    names.add(item.name)
                    gone.append(item)
                else:
                    kept.append(item)
            self.jobs.returned.append((gone, FOR_REQUESTS))
            batch.items = kept
            batch.raws = [raw for raw in batch.raws if (batch.space, raw[0], bytes(raw[1])[:HASH]) not in names]
            if not kept:
                del self._open[key]
        return cut

    def settle(self, seconds: float) -> None:
        """Give up what has not begun and wait for the copies that have: vLLM is about to reset its prefix cache,
        which fails while a block is held. Milliseconds, at most ``seconds``."""
        for batch in self._open.values():
            self.jobs.returned.append((batch.items, FOR_REQUESTS))
        self._open.clear()
        self._reactor.call_soon(lambda: self.jobs.cancel(FOR_REQUESTS))
        self.jobs.wait_quiet(seconds)
        self.drain()
        while self._ended:
            self._give_up_ended(self._ended.popitem()[1])
