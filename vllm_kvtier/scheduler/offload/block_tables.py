"""Block tables of the requests we follow, step by step: which blocks a request fills in the step being scheduled.

vLLM passes a connector only what is new in a step. Exports and offloading need the blocks that become complete, while
they certainly belong to the request. On vLLM's scheduler thread only.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_kvtier.cache_kinds import CacheGroup
from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.scheduler.planner.step_timer import MAX_STEPS_AHEAD

LOT_BLOCKS = 16  # looking at a request costs the engine's thread as much for one block as for many

BlockIds = tuple[list[int], ...]  # by group


@dataclass(eq=False)
class Table:
    """Block table of one request as vLLM handed it out: ids only ever get appended.

    Blocks that vLLM frees while the request runs (behind a window) stay listed here.
    """

    groups: Sequence[list[int]]
    request: Any = None  # once it does not run: ``vllm_compat.requests.ended_copy`` of it
    checksums_ready: list[int] = field(default_factory=list)  # per group: blocks before this position are in the index
    clears: int = -1  # ``ChecksumIndex.clears`` when the first of these was entered
    tailed: bool = False  # the prompt's partial tail is in the index
    stretches_for: bytes = b""  # digest of the prompt, once an engine follows its prefill
    offered: list[int] = field(default_factory=list)  # per group: blocks before this position were offered to the store
    begun: int = 0  # how often offering them began again
    rewinds: int = 0  # of these, how often for a cause that may last
    instance: str = ""  # of the store they were offered to; "" for none yet
    due: int = 0  # computed tokens at which it may fill a block again
    why: str = ""  # why blocks are to be offered again
    running: bool = True
    ended: int = 0  # once it does not run: tokens whose full blocks are to be stored; 0 if none are
    namespace_id: bytes = b""  # where these are to be stored

    def __post_init__(self) -> None:
        self.checksums_ready = self.checksums_ready or [0] * len(self.groups)
        self.offered = self.offered or [0] * len(self.groups)


class Growth(NamedTuple):
    """One request in one step: its first ``computed`` tokens are in the cache for good once the step ran."""

    state: RequestState
    table: Table
    computed: int


class BlockTables:
    def __init__(
        self,
        groups: Sequence[CacheGroup],
        hash_block_size: int,
        handed_out: Callable[[Iterable[int]], None],
        wanted: Callable[[RequestState], bool],
        followed: Callable[[BlockIds], BlockIds] | None = None,
        lot: int = LOT_BLOCKS,
    ):
        """``hash_block_size``: tokens a block hash covers. ``handed_out`` is called with blocks that get new content;
        ``wanted``: whether a request is to be followed. ``followed``: of blocks by vLLM's groups, those of ``groups``;
        None: all are. ``lot``: blocks that a request generates between two looks at it, at most."""
        self._groups, self._hash_block_size = groups, hash_block_size
        self._handed_out, self._wanted, self._followed = handed_out, wanted, followed
        self._smallest = math.gcd(*(size for size, _ in groups))
        held = [(group.kind.held_tokens(), group.block_tokens) for group in groups]
        windows = [(tokens - 2 * size) // self._smallest for tokens, size in held if tokens is not None]
        self._lot = max(1, min([lot, *windows]))  # not so many that vLLM has freed one of them
        self._lots = 0  # requests that began to generate
        self._tables: dict[str, Table] = {}
        self._prompts: set[str] = set()  # requests whose prompt is not computed yet
        self._step = 0
        # Of steps whose output was not read: requests to be looked at later. As of ``StepTimer``, no more than 64.
        self._unread: deque[set[str]] = deque(maxlen=MAX_STEPS_AHEAD)
        self._calendar: defaultdict[int, set[str]] = defaultdict(set)  # step -> requests to look at in it
        self.each_block = False
        self.rewritten = 0  # last computed tokens whose KV the next step writes again: chained draft modules do

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def look_at_each_block(self, each: bool) -> None:
        """``each``: vLLM may soon preempt requests and reuse their blocks. Look at each block as it fills, and in
        this step at all that filled before."""
        if each and not self.each_block:
            for table in self._tables.values():
                table.due = 0
            self._calendar[self._step + 1].update(self._tables)
        self.each_block = each

    def begin_step(
        self, output: Any, tracked: Callable[[str], RequestState | None], unverified: bool = False
    ) -> list[Growth]:
        """Follow a step's scheduling. Returns the followed requests that are to be looked at: those that compute their
        prompt and fill a block or end it, and those that have generated a lot of blocks.

        ``unverified``: its new requests may compute on a load of another connector, and its output says whether that
        failed: they are looked at when it was read (``end_step``). A request that generates is checked in the first
        step in which that can be: hundreds of them are in every step.
        """
        self._step += 1
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        if unverified or any(self._unread):  # or they begin with the blocks of such a request
            self._unread.append({new.req_id for new in output.scheduled_new_reqs} | set(resumed))
        else:
            self._unread.append(set())
        for new in output.scheduled_new_reqs:
            self._admit(new.req_id, new.block_ids, new.num_computed_tokens, tracked(new.req_id))
        if copies := getattr(output, "kv_cache_block_copies", None):  # on write; new blocks are named here only
            self._handed_out([copy.dst_block_id for copy in copies])
        cached = output.scheduled_cached_reqs
        if resumed or any(cached.new_block_ids):
            self._extend(cached, tracked)
        look = self._calendar.pop(self._step, None)
        if not (look or self._prompts):
            return []
        out, scheduled = [], output.num_scheduled_tokens
        for request_id in (self._prompts | (look or set())).difference(*self._unread):
            table = self._tables.get(request_id)
            state = tracked(request_id) if table is not None else None
            if table is None or state is None:
                self._prompts.discard(request_id)
                continue
            request, tokens = state.request, scheduled.get(request_id, 0)
            computed = request.num_computed_tokens + tokens
            if self.rewritten:  # the next step begins behind the last known token if all drafts of this one are wrong
                computed = min(computed, request.num_tokens) - self.rewritten
            if computed >= table.due and tokens:
                out.append(Growth(state, table, computed))
                table.due = self._next(request_id, request, computed)
            if request_id not in self._prompts:
                self._calendar[self._step + max(1, (table.due - computed) // max(1, tokens))].add(request_id)
        return out

    def end_step(self) -> None:
        """The output of the oldest step was read."""
        if self._unread:
            self._unread.popleft()

    def _next(self, request_id: str, request: Any, computed: int) -> int:
        """The number of computed tokens at which this request is to be looked at again."""
        # Hashes may lag behind by a step: then the block is looked at again.
        full = min(computed, len(request.block_hashes) * self._hash_block_size) // self._smallest
        if computed < request.num_prompt_tokens:
            prompt: int = request.num_prompt_tokens
            return min((full + 1) * self._smallest, prompt)
        lot = 1 if self.each_block else self._lot
        if request_id in self._prompts:  # their first lots differ, so that requests of one step part
            self._prompts.discard(request_id)
            self._lots += 1
            lot = 1 + self._lots % lot
        return (full + lot) * self._smallest

    def remove(self, request_id: str) -> Table | None:
        """The request ended; its table as far as it was followed."""
        self._prompts.discard(request_id)
        return self._tables.pop(request_id, None)

    def clear(self) -> None:
        """Stop following the present requests: their blocks are not to be kept."""
        self._tables.clear()
        self._prompts.clear()
        self._calendar.clear()

    def _admit(self, request_id: str, blocks: tuple[list[int], ...], computed: int, state: RequestState | None) -> None:
        if self._followed is not None and blocks:
            blocks = self._followed(blocks)
        for g, ids in enumerate(blocks):
            # From the block on that the next token goes to: after a pull of the whole prompt its last token is
            # computed again, into a full block whose checksum was right until then.
            self._handed_out(ids[computed // self._groups[g][0] :])
        if state is not None and blocks and self._wanted(state):
            offered = [computed // size for size, _ in self._groups]  # the request that computed these offered them
            table = Table([list(ids) for ids in blocks], state.request, offered=offered)
            preempted = self._tables.get(request_id)
            if preempted is not None:
                # The store may lack what it had not offered, and may have lost what it computes again.
                preempted.offered = [min(pair) for pair in zip(preempted.offered, offered, strict=True)]
                preempted.groups, preempted.checksums_ready = table.groups, table.checksums_ready
                preempted.tailed, preempted.due, table = False, 0, preempted
            self._tables[request_id] = table
            self._prompts.add(request_id)

    def _extend(self, cached: Any, state: Callable[[str], RequestState | None]) -> None:
        """New blocks of requests that go on, or that were preempted and begin again."""
        handed_out: list[int] = []
        names, new, resumed = cached.req_ids, cached.new_block_ids, cached.resumed_req_ids
        # Of hundreds of requests that generate, few get a block in a step.
        for i in [i for i, blocks in enumerate(new) if blocks or resumed]:
            request_id, blocks = names[i], new[i]
            if request_id in resumed:
                self._admit(request_id, blocks or (), cached.num_computed_tokens[i], state(request_id))
            elif blocks:
                table = self._tables.get(request_id)
                if self._followed is not None:
                    blocks = self._followed(blocks)
                for g, ids in enumerate(blocks):
                    handed_out += ids
                    if table is not None:
                        table.groups[g].extend(ids)
        self._handed_out(handed_out)
