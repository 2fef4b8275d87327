"""What the workers are to bring: an offer and vLLM's blocks as arrays, a row a block.

Blocks of the node store are always whole, so that a load's arrays are made without looking at single blocks: a long
prompt has thousands, and its request waits for each microsecond spent here. A pull may end in a partial block.
"""

import numpy as np

from vllm_kvtier.scheduler.exports import GroupBlocks
from vllm_kvtier.scheduler.ledger import Entry, Keys
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.worker.work import FailedOrder, FetchOrder, GroupLoad, GroupPull, LoadOrder, PullOrder

Groups = list[tuple[int, int | None]]  # (block tokens, window) of each


def tail_hash(t: Tracked, tokens: int, unit: int) -> bytes:
    """Chain hash of the partial block that ends at ``tokens``; empty where there is none, or not hashed so far yet."""
    if tokens % unit == 0 or len(t.request.block_hashes) < tokens // unit:
        return b""
    return vr.tail_hash(t.request, tokens, unit)


def pull_order(
    t: Tracked, groups: Groups, unit: int, keys: Keys, block_ids: tuple[list[int], ...], tokens: int, timeout: float
) -> PullOrder:
    """The blocks of tokens [t.local, tokens) that vLLM gave the request; noted in ``t.entries`` too."""
    # Blocks count whole, up to the offer's end, even if the last token is not taken: so the source summed them.
    most = t.offer.tokens
    hashes, variant, pulls = vr.chain(t.request, most, unit), vr.variant(t.request), []
    t.entries = []
    for g, (size, window) in enumerate(groups):
        theirs = GroupBlocks(size, [0] * (t.offer.start // size) + t.offer.blocks[g], window)
        rows = []
        for place in range(t.local // size, -(-tokens // size)):
            local = block_ids[g][place] if place < len(block_ids[g]) else 0
            if not local:
                continue  # outside a sliding window: vLLM gave no block, nobody reads it
            end = min((place + 1) * size, most)
            block_hash = hashes[end // unit - 1] if end % unit == 0 else tail_hash(t, end, unit)
            entry = Entry(g, local, keys.key(block_hash, g, variant), end - place * size)
            rows.append((entry, theirs.ids[place] if place < len(theirs.ids) else 0))
        t.entries += [entry for entry, _ in rows]
        pulls.append(
            GroupPull(
                g,
                np.array([e.block for e, _ in rows], np.int64),
                np.array([remote for _, remote in rows], np.int64),
                np.array([e.key for e, _ in rows], np.uint64),
                np.array([e.valid for e, _ in rows], np.int32),
            )
        )
    return PullOrder(t.request.request_id, t.offer.instance, pulls, timeout, promised=not t.offer.lease)


def load_order(
    t: Tracked, groups: Groups, unit: int, keys: Keys, block_ids: tuple[list[int], ...], tokens: int, timeout: float
) -> LoadOrder:
    """The same from the node store; ``t.places`` says which block of the chain each row is."""
    rows = _whole_blocks(t, groups, unit, keys, block_ids, tokens)
    loads = [GroupLoad(g, blocks, keyed, slots) for g, blocks, keyed, slots in rows]
    return LoadOrder(t.request.request_id, loads, timeout, t.offer.instance, far=t.offer.begin())


def fetch_order(
    t: Tracked, groups: Groups, unit: int, keys: Keys, block_ids: tuple[list[int], ...], tokens: int, timeout: float
) -> FetchOrder:
    """The same from another engine of this node; in ``t.entries`` and ``t.places`` too."""
    fetches, t.entries = [], []
    for g, blocks, keyed, remote in _whole_blocks(t, groups, unit, keys, block_ids, tokens):
        # A block of ours for which nothing was lent (0) stays in, and the workers refuse the order: vLLM would have it
        # in its prefix cache, whatever is in it.
        size = groups[g][0]
        fetches.append(GroupPull(g, blocks, remote, keyed, np.full(len(blocks), size, np.int32)))
        pairs = zip(blocks.tolist(), keyed.tolist(), strict=True)
        t.entries += [Entry(g, block, key, size) for block, key in pairs]
    return FetchOrder(t.request.request_id, t.offer.instance, fetches, timeout)


def failed_order(t: Tracked, groups: Groups, block_ids: tuple[list[int], ...], tokens: int) -> FailedOrder:
    """For a load that could not be ordered: vLLM's blocks of tokens [t.local, tokens)."""
    t.places, failed = {}, []
    for g, (size, _) in enumerate(groups):
        blocks = np.array(block_ids[g][t.local // size : -(-tokens // size)], np.int64)
        rows = np.flatnonzero(blocks)
        t.places[g] = t.local // size + rows
        failed.append(GroupLoad(g, blocks[rows], np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.int64)))
    return FailedOrder(t.request.request_id, failed, t.hurried)


def _whole_blocks(
    t: Tracked, groups: Groups, unit: int, keys: Keys, block_ids: tuple[list[int], ...], tokens: int
) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """By group: (group, our block ids, keys, what the offer has in their place: slots or its block ids)."""
    hashes = t.request.block_hashes[: t.offer.tokens // unit]  # all of one length
    whole = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)
    heads = np.ascontiguousarray(whole[:, :8]).view("<u8")[:, 0]
    variant, found = vr.variant(t.request), []
    t.places = {}
    for g, (size, _) in enumerate(groups):
        first, last, per = t.local // size, -(-tokens // size), size // unit
        blocks = np.array(block_ids[g][first:last], np.int64)
        offered = first - t.offer.start // size
        theirs = np.array(t.offer.blocks[g][offered : offered + len(blocks)], np.int64)
        rows = np.flatnonzero(blocks)  # without what lies outside a sliding window
        if len(rows):
            places = first + rows
            t.places[g] = places
            found.append((g, blocks[rows], keys.keys(heads[(places + 1) * per - 1], g, variant), theirs[rows]))
    return found


def hashes_of(t: Tracked, groups: Groups, unit: int, corrupt: list[tuple[int, int]]) -> list[tuple[int, int, bytes]]:
    """(group, slot, block hash) of those of ``corrupt`` (group, slot) that ``t.load`` asked for."""
    found = []
    for load in t.load.groups if isinstance(t.load, LoadOrder) else ():
        per = groups[load.group][0] // unit
        slots = {slot for group, slot in corrupt if group == load.group}
        for row in np.flatnonzero(np.isin(load.slots, list(slots))).tolist():
            place = int(t.places[load.group][row])
            found.append((load.group, int(load.slots[row]), bytes(t.request.block_hashes[(place + 1) * per - 1])))
    return found
