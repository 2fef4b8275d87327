"""What a step waits for its loads' memory, while another thread is at it: all requests of the engine wait as well."""

import threading
import time
from contextlib import contextmanager

import pytest
from pull_fakes import pull_of
from test_fetches import on_device, order_of, there  # noqa: F401
from test_tiering import load, worker  # noqa: F401

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.worker import fetches as fetches_module
from vllm_kvtier.worker import tiering


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


def test_loads_are_not_begun_while_memory_is_given_back(worker):  # noqa: F811
    tier, began = worker.tier, time.monotonic()
    with held(tier._lock):
        with pytest.raises(KVTierError, match="too long"):
            tier.load_now([load("r")], None)
        assert not worker.copier.calls and not tier._hurried
    assert time.monotonic() - began < 10 * tiering.MOST_LOCKED
    tier.load_now([load("r")], None)
    tier.settle(10.0)
    assert [result.request_id for result in worker.finished] == ["r"]


def test_loads_are_not_waited_for_beyond_their_time(worker):  # noqa: F811
    worker.copier.polls = 3
    worker.tier.load_now([load("r")], None)
    began = time.monotonic()
    with held(worker.tier._lock):
        worker.tier.settle(0.05)
        assert time.monotonic() - began < 5.0 and not worker.finished


def test_copies_are_not_begun_while_a_source_is_mapped(there):  # noqa: F811
    fetches, copier = on_device(there)
    with held(fetches.lock):
        began = time.monotonic()
        with pytest.raises(KVTierError, match="too long"):
            fetches.start_now([order_of(pull_of([5], [3], 4))])
        assert fetches.settle(0.05) == [] and time.monotonic() - began < 10 * fetches_module.MOST_LOCKED
    assert not copier.copies and not fetches.active
