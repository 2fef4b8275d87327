"""What other nodes' slots are read to on a GPU: copies from device memory straight into the cache, on fakes; on a GPU
all of a worker's load, from another process's memory as it were, by NIXL."""

import threading
from types import SimpleNamespace

import copier_fakes as fakes
import numpy as np
import pytest
import torch
from remote_store_fakes import FarNode
from support import eventually
from test_cuda_copier import content, faked, make_pool, make_view
from test_cuda_copier_encoded import LOSSY, round_trip, two_groups

from vllm_kvtier import codecs
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob, RemoteStoreInfo
from vllm_kvtier.remote_store.nixl_agent import Server
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE, slot_layout
from vllm_kvtier.worker.context import RankContext
from vllm_kvtier.worker.copy import cuda_copier
from vllm_kvtier.worker.remote_store import staging_ring
from vllm_kvtier.worker.remote_store.remote_store_worker import RemoteStoreWorker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as in test_coded


@pytest.mark.parametrize("name", LOSSY)
def test_remote_store_copier_encoded_and_raw_groups_use_kernels_only(name):
    """Both kinds of groups go by kernels of one stream, which share a scratch."""
    with faked(3):
        view = two_groups(torch.device("cpu"), 6)
        layouts = [part_layout(g, codecs.choose(name, g)) for g in view.groups]
        pool, handle = make_pool(48)
        driver = fakes.FakeDriver()
        offsets = [slot_layout([x, x]).part_offsets[1] for x in layouts]
        copier = cuda_copier.CudaCopier(view, handle, layouts, offsets, staging_ring._TUNING, driver=driver)
        copier.register(0, 24 * PAGE)
        copier.register(24 * PAGE, 24 * PAGE)
        copier.warm_up()
        after = fakes.Event(driver)
        after.record(fakes.Stream())
        round_trip(copier, view, layouts, offsets, pool, after)
        assert not driver.batches, "nothing went through another ring"
        copier.close()


@pytest.mark.gpu
@pytest.mark.parametrize("host", [False, True], ids=["straight", "through host memory"])
def test_remote_store_load_on_gpu_end_to_end(host, caplog):
    device = torch.device("cuda", 0)
    truth, mine = make_view(device, blocks=40, seed=1), make_view(device, blocks=40, seed=2)
    node = FarNode(truth, ranks=2, pages=400)
    keys = np.arange(1, 30, dtype=np.uint64) * np.uint64(7919)
    server = Server(SimpleNamespace(address=node.address, nbytes=node.nbytes), "server of a node")
    stop, reactor, told, results = threading.Event(), Reactor("far"), [], []

    def progress():
        while not stop.wait(2e-4):
            server.progress()

    thread = threading.Thread(target=progress)
    thread.start()
    try:
        worker = RemoteStoreWorker(RankContext(1, reactor, told.append, results.append), mine, node.setup(host))
        assert told == [m.PoolReady(1, "far", worker._ring.nbytes)], caplog.text
        assert worker._ring.on_device is not host, caplog.text
        reactor.start()
        slots = node.fill(0, range(1, 30), keys ^ worker._salts[0], rank=1)
        server.register({0})  # UCX registers it with CUDA, as the copies that fill it did: another process in service
        source = RemoteStoreInfo("node", server.name, node.address, server.metadata, 1)
        load = GroupLoad(0, np.arange(1, 30), keys, slots)
        worker.load([LoadJob("r", [load], 20.0, "node", remote_store=source)], None)
        eventually(lambda: results, 20)
        assert not results[0].failed, results[0]
        torch.cuda.synchronize()
        assert all(content(mine, b) == content(truth, b) for b in range(1, 30))
        node.bytes[int(slots[4]) * PAGE + node.offsets[1][0] + 5] ^= 1
        worker.load([LoadJob("s", [load], 20.0, "node", remote_store=source)], None)
        eventually(lambda: len(results) > 1, 20)
        assert results[1].corrupt == [(0, int(slots[4]))]
        worker.load([LoadJob("t", [load], 20.0, "node", remote_store=source)], None)
        worker.suspend()
        eventually(lambda: len(results) > 2, 20)
        before = [content(mine, b) for b in range(40)]
        eventually(lambda: len(worker._ring.free) == worker._ring.count, 20)
        assert before == [content(mine, b) for b in range(40)]
    finally:
        stop.set()
        thread.join()
        reactor.stop()
