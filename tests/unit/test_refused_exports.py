"""Prefills that cannot be handed off; see ``property/test_export_builder`` for those that are."""

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


def test_prefill_that_is_larger_than_the_handoff_share_is_logged(caplog):
    load = load_context([(SIZE, None)], SIZE, pool=BlockPool(FakePool(8, SIZE)))
    exporter = ExportBuilder(load.engine, ExportTable(SIZE, dict.fromkeys(LeaseKind, 2)), load.checksum_index)
    for prompt in (2 * SIZE, 3 * SIZE):
        request = make_request("r", list(range(prompt)), SIZE, {"do_remote_decode": True})
        request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids(1)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        state = RequestState(request, read(request.kv_transfer_params), RequestLifecycle("r"))
        export = exporter.finished(state, ([1, 2, 3][: prompt // SIZE],))
        fits = prompt == 2 * SIZE
        assert (export is not None) == fits and ("handoff_share" in caplog.text) != fits
