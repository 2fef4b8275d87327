"""Recurrent states that a step loads and goes on from."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cache_groups import cache_groups, mamba
from source_fakes import load_context
from support import FakePool, make_request

from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob
from vllm_kvtier.scheduler.context import BlockGeometry
from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import ExportTable, LeaseKind
from vllm_kvtier.scheduler.sources.job_builder import state_copies
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker

BLOCK = 8
GEOMETRY = BlockGeometry(cache_groups([(BLOCK, None), mamba(BLOCK), mamba(2 * BLOCK)]), BLOCK)


@pytest.mark.parametrize(
    "tokens, prompt, goes_on",
    [(16, 99, True), (32, 33, True), (8, 16, True), (8, 17, False), (15, 16, True), (31, 32, True), (31, 33, False)],
)
def test_step_goes_on_from_a_state_within_its_block_up_to_the_blocks_end(tokens, prompt, goes_on):
    """Or vLLM would have the block in its prefix cache, with the state of fewer tokens than its hash is of."""
    assert GEOMETRY.goes_on_in_step(tokens, prompt) is goes_on
    attention = BlockGeometry(cache_groups([(BLOCK, None), (BLOCK, 20)]), BLOCK)
    assert attention.goes_on_in_step(tokens, prompt)


def test_states_are_copied_to_the_block_that_the_step_changes():
    """16 tokens are loaded, and up to 4 blocks of tokens computed."""
    tables = [11, 12, 13, 14], [0, 21, 0, 22], [31, 32]
    job = LoadJob("r", [load(0, 11, 12), load(1, 21), load(2, 31)], 60.0, "life")
    assert state_copies(GEOMETRY, tables, job) == [(1, 21, 22), (2, 31, 32)]


def test_state_whose_block_the_step_changes_is_not_copied():
    tables = [11, 12], [0, 21], [31]
    assert state_copies(GEOMETRY, tables, LoadJob("r", [load(0, 12), load(1, 21)], 60.0, "life")) == []


@pytest.mark.parametrize("unverified", [False, True])
def test_state_of_a_pending_load_is_not_exported(unverified):
    """Of another request with the same tokens, whose own state left vLLM's prefix cache."""
    load, request = load_context([(BLOCK, None), mamba(BLOCK)], BLOCK), make_request("r", list(range(BLOCK)), BLOCK)
    name, fake = bytes(request.block_hashes[0]), FakePool(8, BLOCK)
    fake.cached[name, 1] = 5
    engine = replace(load.engine, pool=BlockPool(fake, group_tokens=[BLOCK, BLOCK]))
    table = ExportTable(BLOCK, dict.fromkeys(LeaseKind, 2))
    exporter = ExportBuilder(
        engine, table, load.checksum_index, unverified=lambda block_hash: unverified and block_hash == name
    )
    assert exporter._has_state(request, 1, BLOCK) is not unverified


def load(group, *blocks):
    return GroupLoad(group, np.array(blocks), np.zeros(len(blocks), np.uint64), np.array(blocks))


def test_worker_copies_states_behind_the_loads():
    calls, jobs = [], [LoadJob("r", [], 60.0, "life"), LoadJob("s", [], 60.0, "life")]
    jobs[1].state_copies = [(1, 21, 22)]
    view = SimpleNamespace(copy_blocks=lambda copies: calls.append(copies))
    worker = SimpleNamespace(_exchange=SimpleNamespace(view=view), _event_before=lambda work: "before")
    KVTierConnectorWorker._begin_now(worker, lambda jobs, after: calls.append((jobs, after)), jobs, None)
    assert calls == [(jobs, "before"), [(1, 21, 22)]]
    KVTierConnectorWorker._begin_now(worker, lambda jobs, after: None, jobs[:1], None)
    assert len(calls) == 2
