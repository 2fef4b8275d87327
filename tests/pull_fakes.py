"""Caches of two engines in one process, and a transport between them that copies, corrupts, stalls and breaks."""

import ctypes
import weakref
from types import SimpleNamespace

import numpy as np
import torch

from vllm_kvtier import codecs
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, GroupPull, PullJob
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.geometry import Field, GroupView, Region
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull import direct_reads
from vllm_kvtier.worker.nixl_pull import pulls as pulls_module
from vllm_kvtier.worker.nixl_pull.encoded_memory import EncodedMemory
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.nixl_pull.nixl_transport import Transfer, TransferState
from vllm_kvtier.worker.nixl_pull.pulls import Pulls

TOKENS, HEADS, INNER, LAYERS = 4, 2, 16, 3


def cache(blocks: int, seed: int, groups: int = 1) -> CacheView:
    """Of random bytes, that no codec may touch."""
    generator = torch.Generator().manual_seed(seed)
    page = HEADS * TOKENS * INNER
    memory = torch.randint(0, 256, (groups, LAYERS, blocks, page), dtype=torch.uint8, generator=generator)
    made = []
    for g in range(groups):
        regions = tuple(
            Region(f"g{g}.l{n}", memory[g, n].data_ptr(), page, HEADS, TOKENS * INNER, 0, TOKENS, INNER, INNER)
            for n in range(LAYERS)
        )
        made.append(GroupView(g, TOKENS, "full", None, regions))
    return CacheView(made, blocks, "cpu", [memory.untyped_storage()])


def cache_of_numbers(blocks: int, seed: int, device: str = "cpu") -> CacheView:
    """Of bfloat16 numbers: keys and values of 16 one after the other."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn((LAYERS, blocks, HEADS, TOKENS, 32), generator=generator).bfloat16().to(device)
    page, fields = HEADS * TOKENS * 64, (Field("k", 16), Field("v", 16))
    regions = tuple(
        Region(
            f"l{n}", memory[n].data_ptr(), page, HEADS, TOKENS * 64, 0, TOKENS, 64, 64, dtype="bfloat16", fields=fields
        )
        for n in range(LAYERS)
    )
    return CacheView([GroupView(0, TOKENS, "full", None, regions)], blocks, memory.device, [memory.untyped_storage()])


class List:
    """A prepared list; it holds its agent."""

    def __init__(self, rows, agent):
        self.rows, self.agent = rows, agent


class FakeTransport:
    """Copies when a read is polled for the last time; ``fault`` says how a read goes wrong. ``late_data`` writes what
    may still come of reads that did not end, unless the agent that reads has gone meanwhile."""

    def __init__(self):
        self.peers, self.registered = set(), []
        self.polls, self.fault, self.refuse_end = 0, None, 0
        self.running, self.unended, self.lists = [], [], []
        self.agent, self.ended, self.looks = 1, 0, 0  # numbers of agents: the present one, and the last that is gone

    def register(self, spans, memory, device):
        self.registered += spans

    def metadata(self):
        return b"metadata"

    def knows(self, name):
        return name in self.peers

    def add_peer(self, metadata, name):
        if metadata != b"metadata":
            raise KVTierError("not NIXL metadata")
        self.peers.add(name)

    def prepare(self, peer, rows, memory, *, ours):
        assert rows.dtype == np.uint64 and rows.shape[1] == 5
        made = List(rows, self.agent)
        self.lists.append(weakref.ref(made))
        return made

    def read(self, peer, local, near, remote, far, size):
        assert peer in self.peers and len(near) == len(far)
        assert local.agent == remote.agent == self.agent, "lists of an agent that is gone"
        if self.fault == "start":
            raise KVTierError("cannot start")

        def element(rows, i):
            per_row = int(rows[0, 4])
            row = rows[i // per_row]
            return int(row[0]) + int(row[3]) * (i % per_row), int(row[1])

        pairs = [(element(local.rows, int(a)), element(remote.rows, int(b))) for a, b in zip(near, far, strict=True)]
        assert sum(length for (_, length), _ in pairs) == size
        handle = SimpleNamespace(pairs=pairs, polls=self.polls, fault=self.fault, agent=self.agent)
        transfer = Transfer(handle, peer, size)
        self.running.append(transfer)
        return transfer

    def poll(self, transfer):
        handle = transfer.handle
        assert transfer in self.running, "polled after its release"
        if handle.polls:
            handle.polls -= 1
            return TransferState.RUNNING
        if handle.fault == "fails":
            return TransferState.FAILED
        if handle.fault == "never":
            return TransferState.RUNNING
        for (to, length), (come, other) in handle.pairs:
            assert length == other
            ctypes.memmove(to, come, length)
        if handle.fault == "corrupt":
            to, _ = handle.pairs[0][0]
            ctypes.memset(to + 3, ctypes.string_at(to + 3, 1)[0] ^ 0x10, 1)
        handle.pairs = []
        return TransferState.DONE

    def release(self, transfer):
        self.running.remove(transfer)
        if transfer.handle.pairs:
            self.unended.append(transfer)

    def retire(self):
        assert not self.running, "they hold the agent"
        self.agent += 1
        self.peers.clear()
        return self.retired()

    def retired(self):
        self.looks += 1
        held = [made() for made in self.lists if made() is not None and made().agent < self.agent]
        if self.refuse_end:
            self.refuse_end -= 1
        elif not held:
            self.ended = self.agent - 1
        return self.ended == self.agent - 1

    def late_data(self):
        """How many bytes of it came."""
        there = [t.handle for t in self.running + self.unended if t.handle.agent > self.ended]
        for handle in there:
            for (to, length), _ in handle.pairs:
                ctypes.memset(to, 0xEE, length)
        return sum(length for handle in there for (_, length), _ in handle.pairs)

    def progress(self):
        pass


def info(memory: CacheMemory, agent="source", rank=0) -> m.RankInfo:
    return m.RankInfo(
        rank, agent, b"metadata", memory.memory_type, 0, memory.view.num_blocks, memory.transfer_view.groups,
        memory.geometry(), memory.table.data_ptr(),
    )  # fmt: skip


def keys_of(ids):
    return np.array([0x1234567 * (i + 1) for i in ids], np.uint64)


def pull_of(local, remote, valid=None, group=0, keys=None) -> GroupPull:
    valid = [TOKENS] * len(local) if valid is None else valid
    keys = keys_of(remote) if keys is None else keys
    return GroupPull(group, np.array(local, np.int64), np.array(remote, np.int64), keys, np.array(valid, np.int32))


def batch_of(ids, valid=None, group=0) -> ChecksumJob:
    valid = [TOKENS] * len(ids) if valid is None else valid
    return ChecksumJob(group, np.array(ids, np.int64), keys_of(ids), np.array(valid, np.int32))


def split_reads(monkeypatch, max_reads: int) -> None:
    """Transfers have so many reads at most."""
    for module in (direct_reads, pulls_module):
        monkeypatch.setattr(module, "MAX_READS", max_reads)


class Pair:
    def __init__(self, host_buffer=False, groups=1, blocks=(12, 16), codec=None, device="cpu"):
        if codec is None:
            self.here, self.there = (CacheMemory(cache(n, i, groups), host_buffer) for i, n in enumerate(blocks))
        else:
            kept = [codecs.get(codec)]
            self.here, self.there = (EncodedMemory(cache_of_numbers(n, i, device), kept) for i, n in enumerate(blocks))
        self.transport = FakeTransport()
        self.pulls = Pulls(self.transport, self.here, 0)
        self.pulls.add_engine("s/1", [info(self.there, rank=1, agent="other"), info(self.there)])

    def order(self, *groups, timeout=5.0, source="s/1", name="r"):
        return PullJob(name, source, list(groups), timeout)

    def run(self, order, rounds=50):
        return self.goes_on(rounds, self.pulls.start(order))

    def goes_on(self, rounds, result=None):
        for _ in range(rounds):
            if result is not None:
                return result
            if self.here.view.device.type == "cuda":
                torch.cuda.synchronize()
            result = next(iter(self.pulls.poll()), None)
        return result

    def block(self, memory, block, valid=TOKENS, group=0):
        return [memory.view.pages(r)[block][:, :valid].clone() for r in memory.view.groups[group].regions]

    def equal(self, here, there, valid=TOKENS, group=0):
        pairs = zip(self.block(self.here, here, valid, group), self.block(self.there, there, valid, group), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)
