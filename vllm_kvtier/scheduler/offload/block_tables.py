"""Block tables of the requests we follow, step by step: which blocks a request fills in the step being scheduled.

vLLM passes a connector only what is new in a step. Exports and offloading need the blocks that become complete, while
they certainly belong to the request. On vLLM's scheduler thread only.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_kvtier.cache_kinds import CacheGroup
from vllm_kvtier.scheduler.matching.request_state import RequestState

BlockIds = tuple[list[int], ...]  # by group


@dataclass(eq=False)
class Table:
    """Block table of one request as vLLM handed it out: ids only ever get appended.

    Blocks that vLLM frees while the request runs (behind a window) stay listed here: of such a group an id is certainly
    the request's own only in the step that fills it.
    """

    groups: Sequence[list[int]]
    request: Any = None
    checksums_ready: list[int] = field(default_factory=list)  # per group: blocks before this position are in the index
    tailed: bool = False  # the prompt's partial tail is in the index
    offered: list[int] = field(default_factory=list)  # per group: blocks before this position were offered to the store
    begun: int = 0  # how often offering them began again
    rewinds: int = 0  # of these, how often for a cause that may last
    instance: str = ""  # of the store they were offered to; "" for none yet
    due: int = 0  # computed tokens at which it may fill a block again
    why: str = ""  # why blocks are to be offered again
    running: bool = True
    ended: int = 0  # once it does not run: tokens whose full blocks are to be stored; 0 if it did not end well
    namespace_id: bytes = b""  # where these are to be stored

    def __post_init__(self) -> None:
        self.checksums_ready = self.checksums_ready or [0] * len(self.groups)
        self.offered = self.offered or [0] * len(self.groups)


class Growth(NamedTuple):
    """One request in one step: its first ``computed`` tokens are in the cache once the step ran."""

    tracked: RequestState
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
    ):
        """``hash_block_size``: tokens a block hash covers. ``handed_out`` is called with blocks that get new content;
        ``wanted``: whether a request is to be followed. ``followed``: of blocks by vLLM's groups, those of ``groups``;
        None: all are."""
        self._groups, self._hash_block_size = groups, hash_block_size
        self._handed_out, self._wanted, self._followed = handed_out, wanted, followed
        self._smallest = math.gcd(*(size for size, _ in groups))
        self._tables: dict[str, Table] = {}
        self._step = 0
        self._calendar: defaultdict[int, set[str]] = defaultdict(set)  # step -> requests to look at in it

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def begin_step(self, output: Any, tracked: Callable[[str], RequestState | None]) -> list[Growth]:
        """Follow a step's scheduling. Returns the followed requests that fill a block in it, or end their prompt.

        A request that only generates is checked in the first step in which it can have filled a block: hundreds of
        them are in every step.
        """
        self._step += 1
        look = self._calendar.pop(self._step, set())
        for new in output.scheduled_new_reqs:
            self._admit(new.req_id, new.block_ids, new.num_computed_tokens, tracked(new.req_id))
            look.add(new.req_id)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=False):
            if blocks and request_id not in cached.resumed_req_ids:
                self._extend(request_id, blocks)
        if cached.resumed_req_ids:
            for i, request_id in enumerate(cached.req_ids):
                if request_id in cached.resumed_req_ids:
                    blocks = cached.new_block_ids[i] or ()
                    self._admit(request_id, blocks, cached.num_computed_tokens[i], tracked(request_id))
            look |= cached.resumed_req_ids
        scheduled = output.num_scheduled_tokens
        look.update([request_id for request_id, tokens in scheduled.items() if tokens > 1])
        out = []
        for request_id in look:
            table = self._tables.get(request_id)
            t = tracked(request_id) if table is not None else None
            if table is None or t is None:
                continue
            request = t.request
            computed = request.num_computed_tokens + scheduled.get(request_id, 0)
            if computed >= table.due and request_id in scheduled:
                out.append(Growth(t, table, computed))
                # Hashes may lag behind by a step: then the block is looked at again.
                full = min(computed, len(request.block_hashes) * self._hash_block_size)
                table.due = (full // self._smallest + 1) * self._smallest
                if computed < request.num_prompt_tokens < table.due:
                    table.due = request.num_prompt_tokens
            self._calendar[self._step + max(1, table.due - computed)].add(request_id)
        return out

    def forget(self, request_id: str) -> Table | None:
        """The request ended; its table as far as it was followed."""
        return self._tables.pop(request_id, None)

    def clear(self) -> None:
        """Stop following the present requests: their blocks are not to be kept."""
        self._tables.clear()
        self._calendar.clear()

    def _admit(self, request_id: str, blocks: tuple[list[int], ...], computed: int, t: RequestState | None) -> None:
        if self._followed is not None and blocks:
            blocks = self._followed(blocks)
        for g, ids in enumerate(blocks):
            # From the block on that the next token goes to: after a pull of the whole prompt its last token is
            # computed again, into a full block whose checksum was right until then.
            self._handed_out(ids[computed // self._groups[g][0] :])
        if t is not None and blocks and self._wanted(t):
            offered = [computed // size for size, _ in self._groups]  # the request that computed these offered them
            table = Table([list(ids) for ids in blocks], t.request, offered=offered)
            preempted = self._tables.get(request_id)
            if preempted is not None:
                # The store may lack what it had not offered, and may have lost what it computes again.
                preempted.offered = [min(pair) for pair in zip(preempted.offered, offered, strict=True)]
                preempted.groups, preempted.checksums_ready = table.groups, table.checksums_ready
                preempted.tailed, preempted.due, table = False, 0, preempted
            self._tables[request_id] = table

    def _extend(self, request_id: str, blocks: tuple[list[int], ...]) -> None:
        table = self._tables.get(request_id)
        if self._followed is not None:
            blocks = self._followed(blocks)
        for g, ids in enumerate(blocks):
            self._handed_out(ids)
            if table is not None:
                table.groups[g].extend(ids)
