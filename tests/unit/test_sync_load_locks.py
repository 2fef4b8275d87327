"""What a step waits for its loads' memory, while another thread is at it: all requests of the engine wait as well."""

import threading
import time
from contextlib import contextmanager

import pytest
from pull_fakes import pull_of
from test_fetch_jobs import on_device, order_of, there  # noqa: F401
from test_store_worker import load, worker  # noqa: F401

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.worker.peer_fetch import fetch_jobs as fetch_jobs_module
from vllm_kvtier.worker.store import store_worker


@contextmanager
def held(lock):
    """By another thread, as while memory is mapped or unpinned, which may take seconds."""
    taken, release = threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(10)
    try:
        yield
    finally:
        release.set()
        thread.join()


def test_load_now_waits_bounded_time_for_lock(worker):  # noqa: F811
    tier, began = worker.tier, time.monotonic()
    with held(tier._lock):
        with pytest.raises(KVTierError, match="too long"):
            tier.load_now([load("r")], None)
        assert not worker.copier.calls and not tier._sync_loads
    assert time.monotonic() - began < 10 * store_worker.MAX_LOCK_SECONDS
    tier.load_now([load("r")], None)
    tier.wait_until_done(10.0)
    assert [result.request_id for result in worker.finished] == ["r"]


def test_wait_until_done_returns_at_timeout_with_lock_held(worker):  # noqa: F811
    worker.copier.polls = 3
    worker.tier.load_now([load("r")], None)
    began = time.monotonic()
    with held(worker.tier._lock):
        worker.tier.wait_until_done(0.05)
        assert time.monotonic() - began < 5.0 and not worker.finished


def test_start_now_waits_bounded_time_for_mapping(there):  # noqa: F811
    fetches, copier = on_device(there)
    with held(fetches.lock):
        began = time.monotonic()
        with pytest.raises(KVTierError, match="too long"):
            fetches.start_now([order_of(pull_of([5], [3], 4))])
        assert fetches.wait_until_done(0.05) == []
        assert time.monotonic() - began < 10 * fetch_jobs_module.MAX_LOCK_SECONDS
    assert not copier.copies and not fetches.active
