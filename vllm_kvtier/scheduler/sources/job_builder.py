"""The workers' jobs: the blocks of a hit and vLLM's blocks as arrays, a row a block.

Blocks of the node store are always whole, so that a load's arrays are made without looking at single blocks: a long
prompt has thousands, and its request waits meanwhile. A pull may end in a partial block.
"""

from collections.abc import Sequence

import numpy as np

from vllm_kvtier.jobs.transfer_jobs import FailedJob, GroupLoad, GroupPull, LoadJob, PeerFetchJob, PullJob
from vllm_kvtier.scheduler.context import BlockGeometry
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumEntry, ContentKeys
from vllm_kvtier.scheduler.leases.pending_leases import LeasedBlocks
from vllm_kvtier.scheduler.matching.request_state import lora_fingerprint_of
from vllm_kvtier.scheduler.sources.base import BlockIds, LookupHit, RequestState
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.vllm_compat import requests as vr


def tail_hash(t: RequestState, tokens: int, hash_block_size: int, hashes: Sequence[bytes] | None = None) -> bytes:
    """Hash of the partial block that ends at ``tokens``; empty without one, or while it is not hashed so far.
    ``hashes``: if the request's own are those of another block size."""
    before = t.request.block_hashes if hashes is None else hashes
    if tokens % hash_block_size == 0 or len(before) < tokens // hash_block_size:
        return b""
    return vr.tail_hash(t.request, tokens, hash_block_size, before)


def pull_job(
    t: RequestState, geometry: BlockGeometry, keys: ContentKeys, block_ids: BlockIds, tokens: int, timeout: float
) -> PullJob:
    """The blocks of tokens [t.num_computed_tokens, tokens) that vLLM gave the request; in ``t.entries`` too. ``keys``:
    of the hit's engine, whose blocks may be of other sizes."""
    pulls, t.entries = pull_rows(t, t.hit, geometry, keys, block_ids, t.num_computed_tokens, tokens)
    staged = t.hit.path is ReadPath.STAGED
    return PullJob(t.request.request_id, t.hit.instance, pulls, timeout, promised=not t.hit.lease, staged=staged)


def pull_rows(
    t: RequestState,
    hit: LookupHit | LeasedBlocks,
    geometry: BlockGeometry,
    keys: ContentKeys,
    block_ids: BlockIds,
    start: int,
    tokens: int,
) -> tuple[list[GroupPull], list[ChecksumEntry]]:
    """The blocks of tokens [start, tokens), which ``hit`` has, and the checksums of those that are of our size."""
    own = hit.hash_block_size in (0, geometry.hash_block_size)
    hash_block_size = geometry.hash_block_size if own else hit.hash_block_size
    # Up to the hit's end, even if the last token is not taken: the peer's checksums cover its blocks so far.
    most = hit.tokens
    hashes = vr.block_hashes(t.request, most, hash_block_size) if own else t.other_hashes[hash_block_size]
    lora_fingerprint = lora_fingerprint_of(t.request)
    pulls, entries = [], []
    their_sizes = hit.block_tokens or [size for size, _ in geometry.groups]
    for g, ((size, _), their_size) in enumerate(zip(geometry.groups, their_sizes, strict=True)):
        rows, shifts, before = [], [], hit.start // their_size
        for position in range(start // size, -(-tokens // size)):
            local = block_ids[g][position] if position < len(block_ids[g]) else 0
            if not local:
                continue  # not needed: vLLM gave no block
            for place in range(position * size // their_size, -(-min((position + 1) * size, tokens) // their_size)):
                end = min((place + 1) * their_size, most)
                block_hash = (
                    hashes[end // hash_block_size - 1]
                    if end % hash_block_size == 0
                    else tail_hash(t, end, hash_block_size, hashes)
                )
                entry = ChecksumEntry(g, local, keys.key(block_hash, g, lora_fingerprint), end - place * their_size)
                rows.append((entry, hit.blocks[g][place - before] if 0 <= place - before < len(hit.blocks[g]) else 0))
                shifts.append(position * size - place * their_size)
        if own and size == their_size:
            entries += [entry for entry, _ in rows]
        pulls.append(
            GroupPull(
                g,
                np.array([e.block for e, _ in rows], np.int64),
                np.array([remote for _, remote in rows], np.int64),
                np.array([e.key for e, _ in rows], np.uint64),
                np.array([e.valid for e, _ in rows], np.int32),
                None if size == their_size else np.array(shifts, np.int32),
            )
        )
    return pulls, entries


def unchanged(
    t: RequestState, entries: list[ChecksumEntry], geometry: BlockGeometry, block_ids: BlockIds, tokens: int
) -> list[ChecksumEntry]:
    """Those of ``entries`` that hold after a load of ``tokens`` tokens. vLLM goes on computing in the block of the next
    one, or computes a prompt's last token in it again: the source's checksum is not that of its content then."""
    first = min(tokens, t.request.num_tokens - 1)
    pairs = zip(block_ids, geometry.groups, strict=True)
    again = {ids[first // size] for ids, (size, _) in pairs if first // size < len(ids)}
    return [entry for entry in entries if entry.block not in again]


def load_job(
    t: RequestState, geometry: BlockGeometry, keys: ContentKeys, block_ids: BlockIds, tokens: int, timeout: float
) -> LoadJob:
    """The same from a store; ``t.positions`` says which block of the prompt each row is."""
    loads = [GroupLoad(*row) for row in _whole_blocks(t, geometry, keys, block_ids, tokens)]
    return LoadJob(t.request.request_id, loads, timeout, t.hit.instance)


def peer_fetch_job(
    t: RequestState, geometry: BlockGeometry, keys: ContentKeys, block_ids: BlockIds, tokens: int, timeout: float
) -> PeerFetchJob:
    """The same from another engine of this node; in ``t.entries`` and ``t.positions`` too."""
    fetches, t.entries = [], []
    for g, blocks, keyed, remote in _whole_blocks(t, geometry, keys, block_ids, tokens):
        # A block for which the peer leased none (0) stays in, and the workers refuse the job: vLLM would have it in its
        # prefix cache, whatever its content.
        size = geometry.groups[g][0]
        fetches.append(GroupPull(g, blocks, remote, keyed, np.full(len(blocks), size, np.int32)))
        pairs = zip(blocks.tolist(), keyed.tolist(), strict=True)
        t.entries += [ChecksumEntry(g, block, key, size) for block, key in pairs]
    return PeerFetchJob(t.request.request_id, t.hit.instance, fetches, timeout)


def failed_job(
    t: RequestState, geometry: BlockGeometry, block_ids: BlockIds, tokens: int, start: int = -1, reason: str = ""
) -> FailedJob:
    """For a load whose job could not be built, or whose rest does not come: vLLM's blocks of tokens [start, tokens);
    -1: from t.num_computed_tokens on."""
    t.positions, failed = {}, []
    start = t.num_computed_tokens if start < 0 else start
    for g, (size, _) in enumerate(geometry.groups):
        blocks = np.array(block_ids[g][start // size : -(-tokens // size)], np.int64)
        rows = np.flatnonzero(blocks)
        t.positions[g] = start // size + rows
        failed.append(GroupLoad(g, blocks[rows], np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.int64)))
    return FailedJob(t.request.request_id, failed, t.synchronous, reason=reason)


def _whole_blocks(
    t: RequestState, geometry: BlockGeometry, keys: ContentKeys, block_ids: BlockIds, tokens: int
) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """By group: (group, our block ids, keys, the hit's slots or block ids for them)."""
    hash_block_size = geometry.hash_block_size
    hashes = t.request.block_hashes[: t.hit.tokens // hash_block_size]  # all of one length
    whole = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)
    hash_prefixes = np.ascontiguousarray(whole[:, :8]).view("<u8")[:, 0]
    lora_fingerprint, found = lora_fingerprint_of(t.request), []
    t.positions = {}
    for g, (size, _) in enumerate(geometry.groups):
        first, last, per = t.num_computed_tokens // size, -(-tokens // size), size // hash_block_size
        blocks = np.array(block_ids[g][first:last], np.int64)
        skipped = first - t.hit.start // size
        theirs = np.array(t.hit.blocks[g][skipped : skipped + len(blocks)], np.int64)
        rows = np.flatnonzero(blocks)  # vLLM gave no block for what is not needed
        if len(rows):
            positions = first + rows
            t.positions[g] = positions
            keyed = keys.keys(hash_prefixes[(positions + 1) * per - 1], g, lora_fingerprint)
            found.append((g, blocks[rows], keyed, theirs[rows]))
    return found


def hashes_of(t: RequestState, geometry: BlockGeometry, corrupt: list[tuple[int, int]]) -> list[tuple[int, int, bytes]]:
    """(group, slot, block hash) of those of ``corrupt`` (group, slot) that ``t.job`` asked for."""
    found = []
    for load in t.job.groups if t.job is not None else ():
        per = geometry.groups[load.group][0] // geometry.hash_block_size
        slots = {slot for group, slot in corrupt if group == load.group}
        for row in np.flatnonzero(np.isin(load.slots, list(slots))).tolist():
            position = int(t.positions[load.group][row])
            found.append((load.group, int(load.slots[row]), bytes(t.request.block_hashes[(position + 1) * per - 1])))
    return found
