"""Of a hit the last tokens are computed again where KV of draft layers may belong to another continuation, or the whole
block that they are in. What is stored or leased of a window suffices for the rest, at every length."""

import time
from types import SimpleNamespace

import pytest
from source_fakes import load_context
from support import FakePool, make_request
from tier_fakes import make_tier
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, Lease, LeaseKind
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle
from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.scheduler.matching.transfer_params import read
from vllm_kvtier.scheduler.planner.load_or_recompute import LoadOrRecompute
from vllm_kvtier.scheduler.sources.base import LookupHit
from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool

HASH_BLOCK_SIZE, NAMESPACE_ID, PAGES = 16, b"n" * 16, 1 << 20
GROUPS = {
    "a window": [(16, None), (16, 128)],
    "a window that is not of whole blocks": [(16, None), (16, 100)],
    "windows in blocks of several sizes": [(256, None), (64, 128), (16, 16)],
}
GEOMETRIES = [(False, 0), (False, 1), (False, 3), (True, 0), (True, 1), (True, 3)]


def used(load, tokens, prompt, blocks):
    """Tokens of this hit that a request loads."""
    source = SimpleNamespace(is_current=lambda state, hit: True, cost_key="")
    now, hit = time.monotonic(), LookupHit(source, "i", 1, 0, tokens, blocks)
    state = SimpleNamespace(taken_hit=hit, request=SimpleNamespace(num_tokens=prompt), pending=None, hit_at=now)
    return LoadOrRecompute(load).usable_tokens(state, 0, now)


@pytest.mark.parametrize("whole_blocks, ahead", GEOMETRIES)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_store_leases_windows_that_suffice_behind_drafts(groups, whole_blocks, ahead):
    context = {"info": {"whole_blocks": whole_blocks, "draft_lookahead": ahead, "world_size": 1}}
    tier = make_tier(groups, hash_block_size=HASH_BLOCK_SIZE, pull_threshold=1, context=context)
    hashes, geometry = [bytes([i]) * 16 for i in range(64)], tier.load.engine.geometry
    pool = SlotPool(PAGES)
    index = Index(pool, None, time.monotonic)
    index.grow(PAGES)
    index.connect(1, HASH_BLOCK_SIZE, tier.tier.plan.shapes)
    for g, (size, _) in enumerate(groups):
        per = size // HASH_BLOCK_SIZE
        names = hashes[per - 1 :: per]
        parents = [bytes(16), *names[:-1]]
        slots = index.reserve(1, NAMESPACE_ID, b"", [g] * len(names), b"".join(names), b"".join(parents), PAGES)
        assert index.commit(1, slots) == len(names)
    for num_hash_blocks in range(2 * geometry.alignment // HASH_BLOCK_SIZE, len(hashes) + 1):
        found = index.lookup(1, NAMESPACE_ID, b"".join(hashes[:num_hash_blocks]), 0, PAGES)
        tokens = found.num_hash_blocks * HASH_BLOCK_SIZE
        assert tokens == num_hash_blocks * HASH_BLOCK_SIZE // geometry.alignment * geometry.alignment
        assert used(tier.load, tokens, tokens + 1, found.slots) == geometry.usable_tokens(tokens, tokens + 1) > 0


@pytest.mark.parametrize("whole_blocks, ahead", GEOMETRIES)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_export_is_leased_if_its_windows_suffice_behind_drafts(groups, whole_blocks, ahead):
    info = {"whole_blocks": whole_blocks, "draft_lookahead": ahead}
    load = load_context(groups, HASH_BLOCK_SIZE, config=KVTierConfig(pull_threshold=1), info=info)
    geometry, leased = load.engine.geometry, 0
    step = geometry.alignment if whole_blocks else 1
    hashes = [bytes(h) for h in make_request("r", list(range(1024)), HASH_BLOCK_SIZE).block_hashes]
    for tokens in range(512, 1024, step):
        for missing in range(64):  # of the last window
            rows = []
            for size, kind in geometry.groups:
                ids = list(range(1, 1 + -(-tokens // size)))
                rows.append(ids if kind.whole_prefix else [0] * missing + ids[missing:])
            exports = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, 1 << 10))
            blocks = [GroupBlocks(size, ids, kind) for (size, kind), ids in zip(geometry.groups, rows, strict=True)]
            whole = hashes[: tokens // HASH_BLOCK_SIZE]
            exports.add(Export("e", LeaseKind.RETAINED, tokens, whole, b"", b"", blocks, [], -1, time.monotonic() + 60))
            lease = exports.lease_export("e", b"", b"", 0, "reader", 5.0)
            gain = used(load, tokens, tokens + 1, rows)
            if not isinstance(lease, Lease):
                assert not (gain and ahead), "no more is asked for than is needed"
                break
            assert gain == geometry.usable_tokens(tokens, tokens + 1) > 0
            leased += 1
    assert leased


@pytest.mark.parametrize("whole_blocks, ahead", GEOMETRIES)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_export_has_windows_that_suffice_behind_drafts(groups, whole_blocks, ahead):
    """vLLM has freed the blocks before its own window. Its prefix cache has them."""
    pool = FakePool(512, HASH_BLOCK_SIZE)
    info = {"whole_blocks": whole_blocks, "draft_lookahead": ahead}
    config = KVTierConfig(pull_threshold=1)
    load = load_context(groups, HASH_BLOCK_SIZE, config=config, info=info, pool=BlockPool(pool))
    exports = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, 512))
    exporter = ExportBuilder(load.engine, exports, load.checksum_index)
    for prompt in (1023, 1024, 1025):
        request = make_request(f"r{prompt}", list(range(prompt)), HASH_BLOCK_SIZE, {"do_remote_decode": True})
        request.num_computed_tokens, tables, block = prompt, [], 0
        for g, group in enumerate(load.engine.geometry.groups):
            size, ids = group.block_tokens, []
            for i in range(group.num_blocks(prompt)):
                block += 1
                if (end := (i + 1) * size) <= prompt:
                    pool.cached[bytes(request.block_hashes[end // HASH_BLOCK_SIZE - 1]), g] = block
                ids.append(block if i >= group.num_skipped_blocks(prompt) else 0)
            tables.append(ids)
        request.append_output_token_ids(1)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        state = RequestState(request, read(request.kv_transfer_params), RequestLifecycle(request.request_id))
        export = exporter.finished(state, tuple(tables))
        loaded = used(load, export.tokens, prompt, [group.ids for group in export.groups])
        assert loaded == load.engine.geometry.usable_tokens(export.tokens, prompt) > 0
