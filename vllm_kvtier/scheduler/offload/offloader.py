"""Offloading: full blocks go to the node store as requests fill them.

A block is *collected* in the step that fills it, and pinned, so that vLLM does not reuse its memory. It is *reserved*
when the store lacks it, *copied* by the workers behind the forward that writes it, then committed and unpinned. A block
that the store has, or has no space for, is unpinned when the store answers. The number of pins is bounded: beyond it,
and when vLLM is short of blocks, the newest blocks are *taken back*, from the end of their prefixes. They are offered
again with the next block that their request fills, and after it ended (``kept_well``), while vLLM's prefix cache has
them.

Blocks of a LoRA adapter are offered once, when their request has ended (see ``provenance``): vLLM's prefix cache may
have the KV of other weights under their hashes later.

Of recurrent states (kinds that are not ``by_position``) those are stored that vLLM's prefix cache keeps, and no others:
under whose hash it has a block is looked up when the request fills a block, and at its end. Nothing is stored where its
hashes do not say which state a block holds (``EngineContext.states_within_blocks``).

A stored prefix has no gap: a block is committed after its parent, or not at all. Jobs of a group are copied in their
order; if one is cut short, so is all that depends on its missing blocks.

Collecting and unpinning happen here, on the scheduler's thread (the pool has no lock); the rest on the reactor's, see
``store_jobs``.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm_kvtier.scheduler.context import EngineContext
from vllm_kvtier.scheduler.matching.request_state import RequestState, lora_fingerprint_of
from vllm_kvtier.scheduler.offload.block_tables import Growth, Table
from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.scheduler.offload.store_jobs import (
    BLOCKS_NEEDED,
    INFLIGHT_LIMIT,
    PARENT_NOT_STORED,
    STORE_UNAVAILABLE,
    STORED,
    STORED_ALREADY,
    Batch,
    Item,
    Run,
    StoreJobs,
)
from vllm_kvtier.scheduler.sources.node_store import NodeStore
from vllm_kvtier.store.protocol import HASH_BYTES, NO_PARENT
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.wire import link as m

# Blocks are reserved together: every thread that handles a message takes the interpreter from the engine's. A long
# prompt reserves at once, so that its copy begins behind its forward; short ones and ended requests a few steps later,
# because other requests may begin with them, but behind the steps of prompts that came together; generated blocks in
# large lots. If vLLM is short of blocks, and would have them before they are copied, none of them waits as long.
RESERVE_AT_BLOCKS = 512  # of a batch, or this share of the blocks that may be pinned, if they are fewer
RESERVE_AT_SHARE = 1 / 2
RESERVE_AFTER_STEPS = 8, 64  # of a batch with blocks of prompts or ended requests, and without
MAX_REWINDS = 2
STATE_NOT_KEPT = "state_not_kept"  # behind whole blocks, so that no prompt could be loaded
# Without room, each step checks so many ended requests (and this part of them) with blocks to offer again, and drops
# those that vLLM has evicted.
MIN_PRUNED_TABLES, PRUNED_TABLE_SHARE = 8, 64
# The oldest go first. A token takes about 10 bytes, for hashes and block ids; 40 more where KV events are published.
MAX_ENDED_TABLES, MAX_ENDED_TOKENS = 1024, 1 << 21
# Steps between counts of the pinned blocks that no request holds, after a count that was too low: a count takes a
# millisecond with tens of thousands of pins, and vLLM may be short of blocks in every step.
RECOUNT_AFTER_STEPS = 8


class Offloader:
    def __init__(
        self,
        engine: EngineContext,
        store: NodeStore,
        send: Callable[[m.StoreBlocks | m.CancelStores], None],
        on_free: Callable[[], None],
        unverified: Callable[[bytes], bool],
        events: Events | None = None,
    ):
        """``send``: to all workers. ``on_free`` is called (reactor's thread) when blocks wait to be unpinned.
        ``unverified``: whether what vLLM's prefix cache has under a block hash may not be verified yet."""
        config, pool, groups, step_tokens = engine.config, engine.pool, engine.geometry.groups, engine.info.step_tokens
        self._store, self._pool, self._keys = store, pool, engine.identity.content_keys
        self._writes, self._prompts_only = config.store_write != "off", config.store_write == "prompt"
        self._without_states = self._writes and engine.states_within_blocks
        self._writes &= not self._without_states
        self._groups, self._counters, self._reactor = groups, engine.counters, engine.reactor
        self._taken_blocks = engine.geometry.taken_blocks
        self._unverified, self.events = unverified, events
        self._hash_block_size, self._by_position = engine.geometry.hash_block_size, engine.geometry.by_position
        self._speculates = engine.info.speculates
        self._max_pinned = int(pool.num_blocks * config.store_inflight_share)
        self._reserve_at = min(RESERVE_AT_BLOCKS, int(self._max_pinned * RESERVE_AT_SHARE))
        self._step_tokens = step_tokens
        # Free blocks that are left for a step when blocks of ended requests are pinned again.
        self._spare = min(self._taken_blocks(step_tokens), pool.num_blocks // 4)
        self.pinned = 0  # blocks held for copies
        # Pinned blocks that no request held at the last count, and the step from which on they are counted again.
        self._alone, self._recount_at = 0, 0
        self._held: Counter[int] = Counter()  # the blocks of these pins
        self._open: dict[tuple[bytes, bytes], Batch] = {}
        # Of requests that ended and have blocks to offer again: one for each content, by namespace id and the hash
        # of the last full block; the one checked longest ago first.
        self._ended: dict[tuple[bytes, bytes], Table] = {}
        self._ended_tokens = 0
        self._step = self._needed = 0
        self.jobs = StoreJobs(store, groups, engine.counters, engine.reactor, send, on_free)

    def wanted(self) -> bool:
        return self._writes

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def begin_step(self, step: int, growth: list[Growth], needed: int = 0, idle: bool = False) -> None:
        """``needed``: blocks that stay free for requests; blocks of ended ones that were cut for them are not pinned
        again before they are served. ``idle``: the step computes nothing, and the output of the one before it may wait
        for this."""
        self._step, self._needed = step, needed
        if self.jobs.returned and (needed or not idle):
            self.drain()
        if not (growth or self._open or self._ended):
            return
        if self._writes:  # tables may be followed for other engines' sake
            if self._ended:
                self._offer_ended()  # first: what running requests hold is not evicted meanwhile
            if growth and self._store.limit():
                for tracked, table, computed in growth:
                    self._collect(table, self._full(tracked.request, computed))
        if self._open:
            self._ask(False)
        if growth:
            self._leave_room(growth)

    def idle(self) -> None:
        """The engine has no requests: go on with blocks of ended ones."""
        self._needed = 0
        self.drain()
        self._offer_ended()
        self._ask(True)

    def _leave_room(self, growth: list[Growth]) -> None:
        """Free blocks for the next part of prompts: vLLM preempts a request that gets none."""
        left = sum([max(0, state.request.num_prompt_tokens - computed) for state, _, computed in growth])
        if not left:
            return
        left = min(self._step_tokens, left)
        short = self._taken_blocks(left) - self._pool.free_count()
        if short > 0:
            self.cancel_for_requests(short)

    def finished(self, state: RequestState, table: Table | None, block_ids: tuple[list[int], ...], last: bool) -> None:
        """The request ended: collect its last blocks, if they are right, and reserve them soon. ``last``: the engine
        has no other request, so that maybe no step follows."""
        request = state.request
        self._recount_at = 0  # no other request may hold its blocks now
        if self._without_states and vr.kept_well(request):
            full = self._full(request, vr.written_tokens(request))
            count = sum([full // size for size, kind in self._groups if kind.by_position])
            self._counters.count("stores_skipped", STATE_NOT_KEPT, count)
        if table is not None:
            table.running, table.groups = False, block_ids
            if self.wanted() and vr.kept_well(request):
                table.ended = self._full(request, vr.written_tokens(request))
                table.namespace_id = self._store.namespace_id(lora_fingerprint_of(request))
                if self._store.limit():
                    self._collect(table, table.ended, leaving=True)
                if request.lora_request is not None or request.prompt_embeds is not None:
                    if self._left(table):
                        self._count_skipped(table)
                    table.ended = 0  # these blocks are offered once
            # Copies may be under way, and blocks to offer be left, for long.
            table.request = vr.ended_copy(request, self.events is not None)
            if table.ended:
                self._keep_ended(table)
        if last:
            self._ask(True)

    def _full(self, request: Any, tokens: int) -> int:
        """The first of these tokens whose full blocks are to be stored."""
        if request.lora_request is not None and not self._by_position:
            return 0  # only vLLM's prefix cache says where the states are
        full = min(tokens, len(request.block_hashes) * self._hash_block_size)
        return min(full, request.num_prompt_tokens) if self._prompts_only else full

    def _left(self, table: Table) -> bool:
        return any(self._last(table, g, table.ended) > done for g, done in enumerate(table.offered))

    def _last(self, table: Table, g: int, full: int) -> int:
        size, kind = self._groups[g]
        if kind.by_position:
            return min(full // size, len(table.groups[g]))
        if table.running or self._speculates:  # of generated tokens one state is stored, once it is certain
            full = min(full, table.request.num_prompt_tokens)
        return full // size

    def _offer_ended(self) -> None:
        """Collect blocks of ended requests that were taken back, as far as vLLM has them and there is room. Nothing
        without a store, which may never come."""
        if not self._store.limit():
            return
        most = MIN_PRUNED_TABLES + len(self._ended) // PRUNED_TABLE_SHARE
        for checked in range(len(self._ended)):
            if checked >= most and not self._room(ended=True):
                return
            table = self._take_ended(next(iter(self._ended)))
            if self._store.namespace_id(lora_fingerprint_of(table.request)) != table.namespace_id:
                self._count_skipped(table)  # a new namespace was started
                continue
            self._collect(table, table.ended)
            self._keep_ended(table)

    def _keep_ended(self, table: Table) -> None:
        """Keep the table if blocks are left to offer again, in place of one of the same content."""
        if not self._left(table):
            return
        key = table.namespace_id, bytes(table.request.block_hashes[table.ended // self._hash_block_size - 1])
        if key in self._ended:
            same = self._take_ended(key)
            if same.instance == table.instance:
                table.offered = [min(pair) for pair in zip(table.offered, same.offered, strict=True)]
            else:
                table.offered = [0] * len(self._groups)  # they were offered to different stores
            table.rewinds, table.why = max(table.rewinds, same.rewinds), table.why or same.why
        self._ended[key] = table
        self._ended_tokens += table.ended
        while len(self._ended) > MAX_ENDED_TABLES or self._ended_tokens > MAX_ENDED_TOKENS:
            self._count_skipped(self._take_ended(next(iter(self._ended))))

    def _take_ended(self, key: tuple[bytes, bytes]) -> Table:
        table = self._ended.pop(key)
        self._ended_tokens -= table.ended
        return table

    def _count_skipped(self, table: Table) -> None:
        why = table.why or self._no_room()
        for g, done in enumerate(table.offered):
            self._counters.count("stores_skipped", why, max(0, self._last(table, g, table.ended) - done))

    def _no_room(self) -> str:
        return INFLIGHT_LIMIT if self._store.limit() else STORE_UNAVAILABLE

    def _room(self, ended: bool = False) -> int:
        """Blocks that may be pinned now, if the store is there. ``ended``: of an ended request, so that vLLM has fewer
        free blocks then."""
        room = self._max_pinned - self.pinned
        return max(0, min(room, self._pool.free_count() - max(self._spare, self._needed)) if ended else room)

    def _collect(self, table: Table, full: int, leaving: bool = False) -> None:
        """Pin blocks of the first ``full`` tokens that were not offered yet, as far as there is room. ``leaving``: the
        request ends, and its table has exactly the blocks that it still holds."""
        if leaving and table.request.lora_request is not None:  # nor may the request that computed a hit have done so
            table.offered = [0] * len(self._groups)
        if table.instance != self._store.instance:
            self._follow_store(table, leaving)
        request = table.request
        lora_fingerprint, hashes = vr.lora_fingerprint(request), request.block_hashes
        assert lora_fingerprint is not None, "the request is private"
        for g, (size, _) in enumerate(self._groups):
            if full // size <= table.offered[g]:
                continue
            indices, ids = self._positions(table, g, full, leaving)
            if not indices:
                continue
            batch, per, raws = self._batch(request, lora_fingerprint), size // self._hash_block_size, []
            # All that may raise comes first, so that no block is pinned that is in no batch.
            first, last = indices[0], indices[-1] + 1
            if last - first == len(indices):
                whole = hashes[(first + 1) * per - 1 : last * per : per]
                parents = [hashes[first * per - 1] if first else NO_PARENT]
            else:
                whole = [hashes[(i + 1) * per - 1] for i in indices]
                parents = [hashes[i * per - 1] if i else NO_PARENT for i in indices]
            if self.events is not None:
                raws = self.events.describe(batch.namespace_id, request, g, indices)
            run = Run(table, g, indices, ids, whole, parents, table.begun)
            blocks = self._pool.pin(ids)
            self.pinned += len(blocks)
            self._held.update(blocks)
            batch.runs.append(run)
            batch.count += len(ids)
            if self.events is not None:
                for item, h in zip(batch.make_items(), whole, strict=True):
                    item.label = self.events.label_of(batch.namespace_id, g, h)
            batch.raws += raws
            batch.soon |= leaving or first * size < request.num_prompt_tokens
            batch.step = max(batch.step, self._step)

    def _positions(self, table: Table, g: int, full: int, leaving: bool) -> tuple[Sequence[int], Sequence[int]]:
        """Indices and ids of a group's blocks to pin next; they count as offered.

        While the request runs, and at its end, its own; later, and of those that vLLM has freed, the ones in which its
        prefix cache has the content. Without it a block is not stored, nor are those after it if they need it.
        """
        (size, kind), hashes = self._groups[g], table.request.block_hashes
        ended = not table.running and not leaving
        if not kind.by_position:
            return self._states(table, g, self._last(table, g, full), self._room(ended))
        per, room, found, ids = size // self._hash_block_size, self._room(ended), [], table.groups[g]
        own, first, last = len(ids) if ended else 0, table.offered[g], self._last(table, g, full)
        if not (kind.whole_prefix or ended or leaving):
            own = self._groups[g].first_own_block(table.request.num_computed_tokens)
        if own <= first and last - first <= room and 0 not in (new := ids[first:last]):  # mostly
            table.offered[g] = max(first, last)
            return range(first, max(first, last)), new
        for i in range(first, last):
            block = ids[i] if i >= own else 0
            if not block and table.request.lora_request is None:
                content = bytes(hashes[(i + 1) * per - 1])
                if self._unverified(content):
                    break  # offered again later
                block = self._pool.cached_block(content, g)
            if block and not room:
                table.why = self._no_room()
                break
            if block:
                found.append((i, block))
                room -= 1
            elif kind.whole_prefix:
                self._counters.count("stores_skipped", table.why or INFLIGHT_LIMIT, last - i)
                table.offered[g] = last
                break
            elif table.why:
                self._counters.count("stores_skipped", table.why)
            table.offered[g] = i + 1
        return _split(found)

    def _states(self, table: Table, g: int, last: int, room: int) -> tuple[Sequence[int], Sequence[int]]:
        """As ``_positions``, up to block ``last``, of a group whose blocks only vLLM's prefix cache names: all of the
        prompt's states that it keeps, and the last one of generated tokens."""
        size, request, found = self._groups[g].block_tokens, table.request, list[tuple[int, int]]()
        per, generated = size // self._hash_block_size, request.num_prompt_tokens // size
        for i in range(table.offered[g], last):
            content = bytes(request.block_hashes[(i + 1) * per - 1])
            if self._unverified(content):
                break
            block = self._pool.cached_block(content, g)
            if block and found and found[-1][0] >= generated:
                found[-1] = i, block
            elif block and len(found) < room:
                found.append((i, block))
            elif block:
                table.why = self._no_room()
                break
            table.offered[g] = i + 1
        return _split(found)

    def _follow_store(self, table: Table, leaving: bool) -> None:
        """If another store serves now, or the first one, offer all blocks again that a reader of the whole blocks
        needs: of those that vLLM has freed, the ones in its prefix cache (``_positions``)."""
        instance = self._store.instance
        if not instance or instance == table.instance:
            return
        if table.instance:
            table.offered, table.rewinds = [0] * len(self._groups), 0
        table.instance = instance
        for g, group in enumerate(self._groups):
            if group.kind.whole_prefix or not group.kind.by_position:
                continue
            if leaving:
                own = next((i for i, block in enumerate(table.groups[g]) if block), 0)
            else:
                computed = table.request.num_computed_tokens
                whole = computed // group.block_tokens * group.block_tokens
                own = min(group.first_own_block(computed), group.first_needed_block(whole))
            table.offered[g] = max(table.offered[g], own)

    def _batch(self, request: Any, lora_fingerprint: bytes) -> Batch:
        salt = request.cache_salt
        tenant = hashlib.blake2b(salt.encode(), digest_size=8).digest() if salt else b""
        key = self._store.namespace_id(lora_fingerprint), tenant
        batch = self._open.get(key)
        if batch is None:
            keys = partial(self._keys().of, lora_fingerprint=lora_fingerprint)
            batch = self._open[key] = Batch(*key, self._step, keys)
            if self.events is not None:
                self.events.join(batch.namespace_id)  # even if nothing was looked up there
        return batch

    def _ask(self, now: bool) -> None:
        """Have the collected blocks reserved, once that is worth a message."""
        scarce = self._pool.free_count() < max(self._spare, self._needed)
        for key, batch in list(self._open.items()):
            late = self._step - batch.since >= RESERVE_AFTER_STEPS[0 if batch.soon or scarce else 1]
            if now or late or (scarce and batch.soon) or batch.count >= self._reserve_at:
                self.jobs.ask(batch, self.events, now)
                del self._open[key]
                if self.events is not None:
                    self.events.send_labels(batch.namespace_id, batch.raws)  # behind the reservations

    def drain(self) -> None:
        """Unpin what was copied or refused, and offer again what is to be stored nevertheless."""
        returned = self.jobs.returned
        while returned:
            items, why = returned[0]
            ids = [item.block for item in items]
            self._pool.free(ids)
            returned.popleft()
            self.pinned -= len(ids)
            held = self._held
            for i in ids:
                if left := held[i] - 1:
                    held[i] = left
                else:
                    held.pop(i)  # ``del`` is Python code of Counter
            if why == STORED_ALREADY:
                self._counters.count("stores_skipped", why, len(items))
            elif why != STORED:
                self._not_stored(items, why)

    def _not_stored(self, items: list[Item], why: str) -> None:
        by_table: defaultdict[Table, list[Item]] = defaultdict(list)
        for item in items:
            by_table[item.table].append(item)
        for table, mine in by_table.items():
            again = table.begun != mine[0].begun  # since these were collected, they were offered again
            if not again and not self._again(table, why):
                self._counters.count("stores_skipped", why, len(mine))
                continue
            table.why = why
            for item in mine:
                table.offered[item.group] = min(table.offered[item.group], item.index)
            if not again:
                table.begun += 1
                if why == PARENT_NOT_STORED:
                    self._rewind(table)
            if table.ended:
                self._keep_ended(table)

    def _again(self, table: Table, why: str) -> bool:
        """Whether blocks are to be offered again: a few times only, unless the reason is temporary. A store that keeps
        losing or refusing them is too small."""
        if table.request.lora_request is not None or not (table.running or table.ended):
            return False
        if why in (STORE_UNAVAILABLE, BLOCKS_NEEDED):
            return True
        table.rewinds += 1
        return table.rewinds <= MAX_REWINDS

    def _rewind(self, table: Table) -> None:
        """Offer the prefix from its beginning, which the store lost."""
        for g, (_, kind) in enumerate(self._groups):
            if kind.whole_prefix or not kind.by_position:
                table.offered[g] = 0
        table.due = 0

    def has_frees(self) -> bool:
        return bool(self.jobs.returned)

    def cancel_for_requests(self, short: int) -> None:
        """vLLM lacks ``short`` blocks: cancel copies that have not begun, newest first, if that frees enough.

        It mostly does not, because requests still use the blocks. And an engine under load always has a request that
        waits for more than all copies hold: nothing would be stored there.
        """
        if short <= self.pinned and (short <= self._alone or self._step >= self._recount_at):
            self._alone = self._pool.held_once(self._held, short)
            if short <= self._alone:
                short -= self._cut_batches(short)
                self.jobs.cut_flights(short, self._pool.held_once)
            else:
                self._recount_at = self._step + RECOUNT_AFTER_STEPS
        self.drain()

    def _cut_batches(self, short: int) -> int:
        """Take back up to ``short`` blocks that no request uses and that are not reserved yet; returns their number."""
        cut = 0
        for key, batch in reversed(list(self._open.items())):
            names: set[tuple[bytes, int, bytes]] = set()
            batch.make_items()
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
                if item.name in names or (item.namespace_id, item.group, item.parent) in names:
                    names.add(item.name)
                    gone.append(item)
                else:
                    kept.append(item)
            self.jobs.returned.append((gone, BLOCKS_NEEDED))
            batch.items, batch.count = kept, len(kept)
            batch.raws = [
                raw for raw in batch.raws if (batch.namespace_id, raw[0], bytes(raw[1])[:HASH_BYTES]) not in names
            ]
            if not kept:
                del self._open[key]
        return cut

    def cancel_all(self, seconds: float) -> None:
        """Cancel copies, and wait at most ``seconds`` (usually milliseconds) for those that have begun: vLLM is about
        to reset its prefix cache, which fails while a block is held."""
        for batch in self._open.values():  # which may raise, and then all of this is tried again
            batch.make_items()
        self.jobs.returned.extend([(batch.items, BLOCKS_NEEDED) for batch in self._open.values()])
        self._open.clear()
        self._reactor.call_soon(lambda: self.jobs.cancel(BLOCKS_NEEDED))
        self.jobs.wait_quiet(seconds)
        self.drain()
        while self._ended:
            self._count_skipped(self._take_ended(next(iter(self._ended))))


def _split(found: list[tuple[int, int]]) -> tuple[Sequence[int], Sequence[int]]:
    """Indices and blocks of pairs."""
    return [i for i, _ in found], [block for _, block in found]
