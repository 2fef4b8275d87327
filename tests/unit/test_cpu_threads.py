"""torch on one thread alone, and the others as they were."""

import threading

import pytest
import torch

from vllm_kvtier.worker.device.cpu_threads import one_core, stay_on_one_core


@pytest.fixture
def two():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def on_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_one_core_sets_one_torch_thread(two):
    with one_core():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_stay_on_one_core_affects_its_thread_only(two):
    def alone():
        stay_on_one_core()
        large = torch.rand(1 << 20)
        (large + large).sum()  # what torch sets up at a thread's first work does not change it
        with one_core():
            pass
        return torch.get_num_threads()

    assert on_a_thread(alone) == 1
    assert torch.get_num_threads() == 2
    assert on_a_thread(torch.get_num_threads) == 2
