"""An engine's worker that reads remote stores by a fake NIXL; tests run its reactor."""

import numpy as np
import pytest
from remote_store_fakes import FarNode, Network, Turns
from worker_fakes import cache

from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob
from vllm_kvtier.wire.slots import PAGE
from vllm_kvtier.worker.context import RankContext
from vllm_kvtier.worker.remote_store import staging_ring
from vllm_kvtier.worker.remote_store.remote_store_worker import RemoteStoreWorker

BLOCKS = 24


def keys_of(blocks) -> np.ndarray:
    return np.asarray(blocks, np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class World:
    """An engine's cache, its worker, and other nodes whose memory holds blocks of a cache that the test knows."""

    def __init__(self, *, ranks=1, rank=0, buffers=(3, 2 * PAGE), view=None, mine=None, names=None):
        self.network, self.turns, self.told, self.results = Network(), Turns(), [], {}
        self.truth, self.truth_bytes = view or cache(BLOCKS, seed=1)
        self.mine, self.bytes = mine or cache(BLOCKS, seed=2)
        self.nodes = {name: FarNode(self.truth, ranks, name, names) for name in ("a", "b")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging_ring, "HOST_BUFFERS", buffers)
            self.worker = RemoteStoreWorker(
                RankContext(rank, self.turns, self.told.append, self._finish), self.mine, self.nodes["a"].setup(),
                make_reader=self.network.reader,
            )
        self.ring = self.worker._ring

    def _finish(self, result):
        assert result.request_id not in self.results, "a load ends once"
        self.results[result.request_id] = result

    def order(self, name, node="a", groups=((0, (1, 2, 3)), (1, (4, 5))), rank=0, first=0, timeout=60.0) -> LoadJob:
        """Blocks of ours to be what the other cache has in the blocks ``first`` further on."""
        loads = []
        for group, blocks in groups:
            theirs = np.asarray(blocks) + first
            slots = self.nodes[node].fill(group, theirs, keys_of(theirs) ^ self.worker._salts[group], rank)
            loads.append(GroupLoad(group, np.asarray(blocks, np.int64), keys_of(theirs), slots))
        return LoadJob(name, loads, timeout, node, remote_store=self.nodes[node].source())

    def load(self, *orders) -> None:
        self.worker.load(list(orders), None)
        self.turn()

    def turn(self, count=1) -> None:
        for _ in range(count):
            for _ in range(len(self.turns.soon)):
                self.turns.soon.popleft()()

    def until(self, *names, turns=200) -> None:
        for _ in range(turns):
            if all(name in self.results for name in names):
                return
            self.turn()
        raise AssertionError(f"{names} did not end; {self.results}")

    def right(self, group, blocks, first=0) -> list[bool]:
        """Which blocks hold what they should."""
        layers = self.layers(group)
        return [bool((self.bytes[layers, b] == self.truth_bytes[layers, b + first]).all()) for b in blocks]

    @staticmethod
    def layers(group) -> slice:
        return slice(0, 3) if group == 0 else slice(3, 5)
