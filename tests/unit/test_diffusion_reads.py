"""A diffusion model that is only to read (``diffusion_read_only``): no step writes the KV of the canvas it emits."""

from offloader_harness import GROUPS, HASH_BLOCK_SIZE, Engine, run, stored
from source_fakes import load_context
from support import FakePool, make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import ExportTable, LeaseKind
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle
from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.scheduler.matching.transfer_params import Hints
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool

PROMPT, TOKENS = 21, 50


def emit(request, canvas):
    """As vLLM's scheduler does with the canvas of the step that ends the request."""
    request.sampling_params.extra_args = {"diffusion_read_only": 1}
    request.append_output_token_ids(canvas)
    request.num_computed_tokens = request.num_tokens
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED


def test_offloader_stores_nothing_of_a_canvas_that_is_only_read():
    """The harness compares what is copied with what was written."""
    engine, tokens = Engine(GROUPS["full"], 1, 0), [i % 7 for i in range(TOKENS)]
    r = engine.new_request(tokens[:PROMPT], PROMPT)
    run(engine, r)
    engine.grow(r, TOKENS)
    emit(r.request, tokens[PROMPT:])
    r.plan = tokens
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(PROMPT // HASH_BLOCK_SIZE))


def test_export_has_nothing_of_a_canvas_that_is_only_read():
    load = load_context(
        [(HASH_BLOCK_SIZE, None)], HASH_BLOCK_SIZE, config=KVTierConfig(bidirectional=True),
        pool=BlockPool(FakePool(20, HASH_BLOCK_SIZE)),
    )  # fmt: skip
    table = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, 20))
    exporter = ExportBuilder(load.engine, table, load.checksum_index)
    request = make_request("r", list(range(PROMPT)), HASH_BLOCK_SIZE)
    emit(request, list(range(PROMPT, TOKENS)))
    state = RequestState(request, Hints(), RequestLifecycle("r"))
    export = exporter.finished(state, (list(range(1, 2 + TOKENS // HASH_BLOCK_SIZE)),))
    assert export.tokens == PROMPT // HASH_BLOCK_SIZE * HASH_BLOCK_SIZE
