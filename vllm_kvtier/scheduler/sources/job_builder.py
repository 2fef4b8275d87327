"""The workers' jobs: the blocks of a hit and vLLM's blocks as arrays, a row a block.

Blocks of the node store are always whole, so that a load's arrays are made without looking at single blocks: a long
prompt has thousands, and its request waits meanwhile. A pull may end in a partial block.
"""

from collections.abc import Sequence

import numpy as np

from vllm_kvtier.jobs.transfer_jobs import FailedJob, FillingJob, GroupLoad, GroupPull, LoadJob, PeerFetchJob, PullJob
from vllm_kvtier.scheduler.context import BlockGeometry
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumEntry, ContentKeys
from vllm_kvtier.scheduler.leases.pending_leases import LeasedBlocks
from vllm_kvtier.scheduler.matching.request_state import lora_fingerprint_of
from vllm_kvtier.scheduler.sources.base import BlockIds, LookupHit, RequestState
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.vllm_compat import requests as vr


def tail_hash(state: RequestState, tokens: int, hash_block_size: int, hashes: Sequence[bytes] | None = None) -> bytes:
    """Hash of the partial block that ends at ``tokens``; empty without one, or while it is not hashed so far.
    ``hashes``: if the request's own are those of another block size."""
    before = state.request.block_hashes if hashes is None else hashes
    if tokens % hash_block_size == 0 or len(before) < tokens // hash_block_size:
        return b""
    return vr.tail_hash(state.request, tokens, hash_block_size, before)


def pull_job(
    state: RequestState, geometry: BlockGeometry, keys: ContentKeys, block_ids: BlockIds, tokens: int, timeout: float
) -> PullJob:
    """The blocks of tokens [state.num_computed_tokens, tokens) that vLLM gave the request; in ``state.entries`` too.
    ``keys``: of the hit's engine, whose blocks may be of other sizes."""
    pulls, state.entries = pull_rows(state, state.hit, geometry, keys, block_ids, state.num_computed_tokens, tokens)
    hit, request_id = state.hit, state.request.request_id
    staged = hit.path is ReadPath.STAGED
    return PullJob(request_id, hit.instance, pulls, timeout, promised=not hit.lease, staged=staged)


def pull_rows(
    state: RequestState,
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
    hashes = vr.block_hashes(state.request, most, hash_block_size) if own else state.other_hashes[hash_block_size]
    lora_fingerprint = lora_fingerprint_of(state.request)
    pulls, entries = [], []
    their_sizes = hit.block_tokens or [size for size, _ in geometry.groups]
    for g, ((size, _), their_size) in enumerate(zip(geometry.groups, their_sizes, strict=True)):
        if own and size == their_size:
            pull, new = _rows_of_equal_blocks(state, hit, g, size, hash_block_size, keys, block_ids[g], start, tokens)
            pulls.append(pull)
            entries += new
            continue
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
                    else tail_hash(state, end, hash_block_size, hashes)
                )
                entry = ChecksumEntry(g, local, keys.key(block_hash, g, lora_fingerprint), end - place * their_size)
                rows.append((entry, hit.blocks[g][place - before] if 0 <= place - before < len(hit.blocks[g]) else 0))
                shifts.append(position * size - place * their_size)
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


def _rows_of_equal_blocks(
    state: RequestState, hit: LookupHit | LeasedBlocks, g: int, size: int, hash_block_size: int, keys: ContentKeys,
    block_ids: Sequence[int], start: int, tokens: int,
) -> tuple[GroupPull, list[ChecksumEntry]]:  # fmt: skip
    """The rows of group ``g``, a block of ours being one of theirs."""
    first, hashes = start // size, state.request.block_hashes
    blocks = np.array(block_ids[first : -(-tokens // size)], np.int64)
    rows = np.flatnonzero(blocks)  # vLLM gave no block for what is not needed
    blocks, places = blocks[rows], first + rows
    ends = np.minimum((places + 1) * size, hit.tokens)
    content = [hashes[end // hash_block_size - 1] for end in ends.tolist() if end % hash_block_size == 0]
    if len(content) < len(ends):  # the last block is partial
        content.append(tail_hash(state, hit.tokens, hash_block_size))
    keyed = keys.of(content, g, lora_fingerprint_of(state.request))
    skipped = max(0, first - hit.start // size)
    valid, theirs = (ends - places * size).astype(np.int32), np.array(hit.blocks[g][skipped:], np.int64)
    at = places - hit.start // size - skipped
    remote, there = np.zeros(len(at), np.int64), (at >= 0) & (at < len(theirs))
    remote[there] = theirs[at[there]]
    new = [ChecksumEntry(g, *row) for row in zip(blocks.tolist(), keyed, valid.tolist(), strict=True)]
    return GroupPull(g, blocks, remote, np.array(keyed, np.uint64), valid), new


def unchanged(
    state: RequestState, entries: list[ChecksumEntry], geometry: BlockGeometry, block_ids: BlockIds, tokens: int
) -> list[ChecksumEntry]:
    """Those of ``entries`` that hold after a load of ``tokens`` tokens. vLLM goes on computing in the block of the next
    one, or computes a prompt's last token in it again: the source's checksum is not that of its content then."""
    first = min(tokens, state.request.num_tokens - 1)
    pairs = zip(block_ids, geometry.groups, strict=True)
    again = {ids[first // size] for ids, (size, _) in pairs if first // size < len(ids)}
    return [entry for entry in entries if entry.block not in again]


def load_job(
    state: RequestState, geometry: BlockGeometry, keys: ContentKeys, block_ids: BlockIds, tokens: int, timeout: float
) -> LoadJob:
    """The same from a store; ``state.positions`` says which block of the prompt each row is."""
    loads = [GroupLoad(*row) for row in _whole_blocks(state, geometry, keys, block_ids, tokens)]
    return LoadJob(state.request.request_id, loads, timeout, state.hit.instance)


def peer_fetch_job(
    state: RequestState, geometry: BlockGeometry, keys: ContentKeys, block_ids: BlockIds, tokens: int, timeout: float
) -> PeerFetchJob:
    """The same from another engine of this node; in ``state.entries`` and ``state.positions`` too."""
    fetches, state.entries = [], []
    for g, blocks, keyed, remote in _whole_blocks(state, geometry, keys, block_ids, tokens):
        # A block for which the peer leased none (0) stays in, and the workers refuse the job: vLLM would have it in its
        # prefix cache, whatever its content.
        size = geometry.groups[g][0]
        fetches.append(GroupPull(g, blocks, remote, keyed, np.full(len(blocks), size, np.int32)))
        pairs = zip(blocks.tolist(), keyed.tolist(), strict=True)
        state.entries += [ChecksumEntry(g, block, key, size) for block, key in pairs]
    return PeerFetchJob(state.request.request_id, state.hit.instance, fetches, timeout)


def positions(
    geometry: BlockGeometry, block_ids: BlockIds, start: int, tokens: int
) -> dict[int, np.ndarray]:
    """By group, the numbers in the prompt of the blocks that vLLM gave for tokens [start, tokens)."""
    return {
        g: start // size + np.flatnonzero(np.array(block_ids[g][start // size : -(-tokens // size)], np.int64))
        for g, (size, _) in enumerate(geometry.groups)
    }


def failed_job(
    state: RequestState, geometry: BlockGeometry, block_ids: BlockIds, tokens: int, start: int = -1, reason: str = ""
) -> FailedJob:
    """For a load whose job could not be built, or whose rest does not come: vLLM's blocks of tokens [start, tokens);
    -1: from state.num_computed_tokens on."""
    start, failed = state.num_computed_tokens if start < 0 else start, []
    state.positions = positions(geometry, block_ids, start, tokens)
    for g, rows in state.positions.items():
        blocks = np.array(block_ids[g], np.int64)[rows]
        failed.append(GroupLoad(g, blocks, np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.int64)))
    return FailedJob(state.request.request_id, failed, state.synchronous, reason=reason)


def _whole_blocks(
    state: RequestState, geometry: BlockGeometry, keys: ContentKeys, block_ids: BlockIds, tokens: int
) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """By group: (group, our block ids, keys, the hit's slots or block ids for them)."""
    hash_block_size = geometry.hash_block_size
    hashes = state.request.block_hashes[: state.hit.tokens // hash_block_size]  # all of one length
    whole = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)
    hash_prefixes = np.ascontiguousarray(whole[:, :8]).view("<u8")[:, 0]
    lora_fingerprint, found = lora_fingerprint_of(state.request), []
    state.positions = {}
    for g, (size, _) in enumerate(geometry.groups):
        first, last, per = state.num_computed_tokens // size, -(-tokens // size), size // hash_block_size
        blocks = np.array(block_ids[g][first:last], np.int64)
        skipped = first - state.hit.start // size
        theirs = np.array(state.hit.blocks[g][skipped : skipped + len(blocks)], np.int64)
        rows = np.flatnonzero(blocks)  # vLLM gave no block for what is not needed
        if len(rows):
            positions = first + rows
            state.positions[g] = positions
            keyed = keys.keys(hash_prefixes[(positions + 1) * per - 1], g, lora_fingerprint)
            found.append((g, blocks[rows], keyed, theirs[rows]))
    return found


def state_copies(geometry: BlockGeometry, block_ids: BlockIds, job: FillingJob) -> list[tuple[int, int, int]]:
    """(group, block, the request's block that the step changes) of each state that ``job`` loads into another block
    than the step changes. See ``BlockGeometry.goes_on_in_step``."""
    copies = []
    for load in job.groups:
        last = block_ids[load.group][-1]
        if not geometry.groups[load.group].kind.by_position and len(load.blocks) and load.blocks[-1] != last:
            copies.append((load.group, int(load.blocks[-1]), last))
    return copies


def hashes_of(
    state: RequestState, geometry: BlockGeometry, corrupt: list[tuple[int, int]]
) -> list[tuple[int, int, bytes]]:
    """(group, slot, block hash) of those of ``corrupt`` (group, slot) that ``state.job`` asked for."""
    found = []
    for load in state.job.groups if state.job is not None else ():
        per = geometry.groups[load.group][0] // geometry.hash_block_size
        slots = {slot for group, slot in corrupt if group == load.group}
        for row in np.flatnonzero(np.isin(load.slots, list(slots))).tolist():
            position = int(state.positions[load.group][row])
            block_hash = bytes(state.request.block_hashes[(position + 1) * per - 1])
            found.append((load.group, int(load.slots[row]), block_hash))
    return found
