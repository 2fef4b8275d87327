"""What the workers are to bring: an offer and vLLM's blocks as arrays, a row a block."""

import numpy as np

from vllm_kvtier.scheduler.exports import GroupBlocks
from vllm_kvtier.scheduler.ledger import Entry, Keys
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.worker.work import GroupLoad, GroupPull, LoadOrder, PullOrder

Rows = list[list[tuple[Entry, int]]]  # per group: a block to fill, and the source's block or slot for it


def tail_hash(t: Tracked, tokens: int, unit: int) -> bytes:
    """Chain hash of the partial block that ends at ``tokens``; empty where there is none, or not hashed so far yet."""
    if tokens % unit == 0 or len(t.request.block_hashes) < tokens // unit:
        return b""
    return vr.tail_hash(t.request, tokens, unit)


def rows(
    t: Tracked,
    groups: list[tuple[int, int | None]],
    unit: int,
    keys: Keys,
    block_ids: tuple[list[int], ...],
    tokens: int,
) -> Rows:
    """The blocks of tokens [t.local, tokens) that vLLM gave the request; noted in ``t`` too."""
    # Blocks count whole, up to the offer's end, even if the last token is not taken: so the source summed them.
    most = t.offer.tokens
    hashes, variant, out = vr.chain(t.request, most, unit), vr.variant(t.request), []
    t.entries, t.slots, t.hashes = [], [], []
    for g, (size, window) in enumerate(groups):
        theirs = GroupBlocks(size, [0] * (t.offer.start // size) + t.offer.blocks[g], window)
        of_group = []
        for place in range(t.local // size, -(-tokens // size)):
            local = block_ids[g][place] if place < len(block_ids[g]) else 0
            if not local:
                continue  # outside a sliding window: vLLM gave no block, nobody reads it
            end = min((place + 1) * size, most)
            block_hash = hashes[end // unit - 1] if end % unit == 0 else tail_hash(t, end, unit)
            entry = Entry(g, local, keys.key(block_hash, g, variant), end - place * size)
            of_group.append((entry, theirs.ids[place] if place < len(theirs.ids) else 0))
            t.hashes.append(block_hash)
        t.entries += [entry for entry, _ in of_group]
        t.slots += [remote for _, remote in of_group]
        out.append(of_group)
    return out


def pull_order(t: Tracked, groups: Rows, timeout: float) -> PullOrder:
    pulls = [
        GroupPull(g, *_arrays(of_group), np.array([e.valid for e, _ in of_group], np.int32))
        for g, of_group in enumerate(groups)
    ]
    return PullOrder(t.request.request_id, t.offer.instance, pulls, timeout, promised=not t.offer.lease)


def load_order(t: Tracked, groups: Rows, timeout: float) -> LoadOrder:
    loads = []
    for g, of_group in enumerate(groups):
        if of_group:
            blocks, slots, keys = _arrays(of_group)
            loads.append(GroupLoad(g, blocks, keys, slots))
    return LoadOrder(t.request.request_id, loads, timeout, t.offer.instance)


def _arrays(of_group: list[tuple[Entry, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Our block ids, the source's, and the keys."""
    return (
        np.array([e.block for e, _ in of_group], np.int64),
        np.array([remote for _, remote in of_group], np.int64),
        np.array([e.key for e, _ in of_group], np.uint64),
    )
