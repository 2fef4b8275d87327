"""Prefills that need much of the KV cache; see ``property/test_export_builder`` for the others."""

from source_fakes import load_context
from support import FakePool, make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import ExportTable, LeaseKind
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle
from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.scheduler.matching.transfer_params import read
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool

SIZE = 4


def test_prefill_larger_than_the_handoff_share_is_handed_off_alone():
    load = load_context([(SIZE, None)], SIZE, pool=BlockPool(FakePool(8, SIZE)))
    table = ExportTable(SIZE, dict.fromkeys(LeaseKind, 2))
    exporter = ExportBuilder(load.engine, table, load.checksum_index)
    for name, blocks in (("small", [1]), ("large", [2, 3, 4])):
        request = make_request(name, list(range(len(blocks) * SIZE)), SIZE, {"do_remote_decode": True})
        request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids(1)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        state = RequestState(request, read(request.kv_transfer_params), RequestLifecycle(name))
        assert exporter.finished(state, (blocks,)) is not None and table.has(name)
    assert not table.has("small")


def test_checksums_that_an_ended_prefill_lacks_are_awaited():
    """As those of a prompt that was loaded by the step that computed its last token."""
    load = load_context([(SIZE, None)], SIZE, pool=BlockPool(FakePool(8, SIZE)))
    exporter = ExportBuilder(load.engine, ExportTable(SIZE, dict.fromkeys(LeaseKind, 8)), load.checksum_index)
    request = make_request("p", list(range(2 * SIZE)), SIZE, {"do_remote_decode": True})
    request.num_computed_tokens = request.num_tokens
    request.append_output_token_ids(1)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    state = RequestState(request, read(request.kv_transfer_params), RequestLifecycle("p"))
    assert exporter.finished(state, ([1, 2],)) is not None and not exporter.urgent
    assert exporter.begin_step([]) and exporter.urgent
    assert not exporter.begin_step([]) and not exporter.urgent
