"""``CudaPeerCopier`` and the mappings beneath it: streams, events and other processes' memory on fakes, the kernel in
the interpreter. Two processes and two GPUs: ``test_peer_processes``."""

import ctypes
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import copier_fakes as fakes
import numpy as np
import peer_engines as engines
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_engines import Layer, Layout
from support import WITHOUT_SHRINKING
from vllm_kvtier.kernels import peer_copy, peer_copy_plan

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.shapes.tp_mapping import map_source_ranks
from vllm_kvtier.wire.messages import Shared, SharedSpan
from vllm_kvtier.worker.copy import pinned_buffers
from vllm_kvtier.worker.device.cuda_driver import CudaError
from vllm_kvtier.worker.peer_fetch import cuda_copier, cuda_ipc, process_memory
from vllm_kvtier.worker.peer_fetch.base import CopyJob

SHAPE = peer_copy_plan.Shape(((64, 2),), warps=1, programs=2)


class FakeCuda(fakes.FakeCuda):
    def stream(self, _):
        return nullcontext()


class IpcDriver(fakes.FakeDriver):
    """Another process's memory is a copy of it, made when it is mapped, and gone when it is unmapped."""

    def __init__(self):
        super().__init__()
        self.exported: dict[bytes, np.ndarray] = {}  # handle -> memory
        self.mapped: dict[int, np.ndarray] = {}  # address -> the copy
        self.opened = 0
        self.refuse = ""  # what the driver says to the next handle
        self.short = 0  # bytes that an allocation lacks

    def export(self, memory: torch.Tensor, device: str = "GPU-a") -> Shared:
        handle = len(self.exported).to_bytes(64, "little")
        self.exported[handle] = memory.numpy()
        span = SharedSpan(memory.data_ptr(), memory.numel(), handle)
        return Shared(*process_memory.identity(), device, (span,))

    def open_ipc(self, handle):
        if self.refuse:
            raise CudaError(self.refuse)
        self.opened += 1
        twin = self.exported[handle].copy()
        self.mapped[twin.ctypes.data] = twin
        return twin.ctypes.data

    def close_ipc(self, address):
        self.mapped.pop(address)[:] = 0xEE

    def address_range(self, address):
        return address, len(self.mapped[address]) - self.short


@contextmanager
def faked(seed=0):
    if torch.cuda.is_available():
        pytest.skip("the interpreter is not in use here")
    world = fakes.World(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        names = ("device", "empty", "int64")
        real = cuda_copier.torch
        patch.setattr(
            cuda_copier, "torch", SimpleNamespace(cuda=FakeCuda(world), **{n: getattr(real, n) for n in names})
        )
        patch.setattr(pinned_buffers, "pinned", lambda n: real.empty(n, dtype=real.uint8))

        class Later(peer_copy.PeerPageCopier):
            def launch(self, source, words, rows, moves, stream):
                work = super().launch
                world.enqueue(stream, ("work", lambda: work(source, words, rows, moves, None)))

        patch.setattr(peer_copy, "PeerPageCopier", Later)
        yield world


class Bench:
    """A reader and two sources of two ranks each."""

    def __init__(self, max_rows=8):
        self.driver = IpcDriver()
        layers, heads = [Layer(32, 4)] * 2, 4
        self.sources = {
            name: engines.engine(layers, layout, heads, 2, 6, "cpu", seed)
            for seed, (name, layout) in enumerate([("a", Layout()), ("b", Layout(engines.ORDERS[1], (1, 0, 0)))])
        }
        self.target = engines.engine(layers, Layout(gaps=(0, 1, 0)), heads, 1, 12, "cpu", 9)[0]
        for ranks in self.sources.values():
            for rank in ranks:
                rank.shared = self.driver.export(rank.memory)
        shape = replace(SHAPE, max_rows=max_rows)
        self.copier = cuda_copier.CudaPeerCopier(self.target.view, self.target.table, shape, driver=self.driver)

    def parts(self, name):
        infos = [rank.info(rank.shared) for rank in self.sources[name]]
        return map_source_ranks((self.target.group,), (self.target.heads,), 0, infos)

    def add(self, name):
        self.copier.add(name, self.parts(name))

    def job(self, name, local, remote):
        n = len(local)
        pull = engines.pull(local, remote, np.arange(n) + 3, [4] * (n - 1) + [2])
        for rank in self.sources[name]:
            rank.vouch(pull.remote, pull.keys, pull.valid)
        return CopyJob(name, [pull])

    def expected(self, jobs):
        data = self.target.data()
        for job in jobs:
            ranks = {rank.number: rank for rank in self.sources[job.instance]}
            data, _ = engines.expect(self.target, ranks, self.parts(job.instance), job.groups, data)
        return data


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=40, phases=WITHOUT_SHRINKING)
def test_peer_cuda_copier_equals_reference_with_any_stream_order(seed, data):
    with faked(seed) as world:
        bench = Bench(data.draw(st.sampled_from([8, 16, 64])))
        local = data.draw(st.permutations(range(12)))
        calls, at = [], 0
        for _ in range(data.draw(st.integers(1, 3))):
            jobs = []
            for name in data.draw(st.sampled_from([["a"], ["b"], ["a", "b"]])):
                n = data.draw(st.integers(0, 3))
                if at + n <= 12:
                    remote = data.draw(st.permutations(range(6)))[:n] if n else []
                    jobs.append((name, local[at : at + n], remote))
                    at += n
            calls.append(jobs)
        # Checksums of one block by one key: later jobs of the same source rows would take the place of earlier ones.
        taken, jobs_of = set(), []
        for jobs in calls:
            kept = []
            for name, mine, theirs in jobs:
                pairs = [(m, t) for m, t in zip(mine, theirs, strict=True) if (name, t) not in taken]
                taken |= {(name, t) for _, t in pairs}
                if pairs:
                    kept.append(bench.job(name, *zip(*pairs, strict=True)))
            jobs_of.append(kept)
        wrong = None
        everything = [(c, j) for c, jobs in enumerate(jobs_of) for j in range(len(jobs))]
        if everything and data.draw(st.booleans()):
            wrong = data.draw(st.sampled_from(everything))
            pull = jobs_of[wrong[0]][wrong[1]].groups[0]
            bench.sources[jobs_of[wrong[0]][wrong[1]].instance][1].poke(1, int(pull.remote[0]), 0, 0, 5)
        expected = bench.expected([job for jobs in jobs_of for job in jobs])
        for name in bench.sources:
            bench.add(name)
            for rank in bench.sources[name]:
                rank.memory.zero_()  # only what is mapped is to be read
        before = bench.target.data()
        ready = fakes.Event(bench.driver)
        ahead = fakes.Stream()
        world.enqueue(ahead, ("work", lambda: seen.append(bench.target.data())))
        seen: list[np.ndarray] = []
        ready.record(ahead)
        copies = [bench.copier.start(jobs, ready) for jobs in jobs_of]
        for copy in copies:
            copy.wait_on(world.forward)
        world.enqueue(world.forward, ("work", lambda: seen.append(bench.target.data())))
        if data.draw(st.booleans()):
            bench.copier.remove("a")
        world.run(lambda: len(seen) == 2)
        if everything:
            assert (seen[0] == before).all(), "written before it might be"
        assert (seen[1] == expected).all(), "what runs behind it saw all of it"
        for c, (copy, jobs) in enumerate(zip(copies, jobs_of, strict=True)):
            assert copy.wait(0) and copy.done()
            assert copy.nbytes == sum(len(j.groups[0].local) * bench.target.group.block_bytes for j in jobs)
            for j, job in enumerate(jobs):
                assert copy.bad(j) == ({int(job.groups[0].local[0])} if (c, j) == wrong else set())
                assert copy.why(j) == ""
        bench.copier.close()
        bench.copier.close()
        assert not bench.driver.mapped and list(bench.driver.events) == [ready.cuda_event]


def test_peer_copy_under_way_keeps_mapping():
    with faked() as world:
        bench = Bench()
        bench.add("a")
        bench.add("a")
        assert bench.driver.opened == 2  # a rank each, once
        job = bench.job("a", [1, 2], [3, 4])
        bench.copier.remove("a")
        assert not bench.driver.mapped  # nothing was under way
        bench.add("a")
        expected = bench.expected([job])
        copy = bench.copier.start([job])
        bench.copier.remove("a")
        bench.copier.remove("a")
        bench.add("a")  # came back meanwhile: mapped once
        assert len(bench.driver.mapped) == 2 and not copy.done() and not copy.wait(0.001)
        bench.copier.remove("a")
        assert len(bench.driver.mapped) == 2
        world.run()
        assert copy.done() and copy.bad(0) == set() and not bench.driver.mapped
        assert (bench.target.data() == expected).all()


def test_peer_cuda_copier_unmappable_source_raises_and_leaks_nothing():
    with faked():
        bench = Bench()
        bench.driver.refuse = "cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID_DEVICE (101), invalid device ordinal"
        with pytest.raises(KVTierError, match=r"process \d+ \(GPU-a\) cannot be mapped: .* invalid device ordinal"):
            bench.add("a")
        bench.driver.refuse = ""
        bench.driver.short = 1
        with pytest.raises(KVTierError, match="only .* are mapped"):
            bench.add("a")
        bench.driver.short = 0
        rank = bench.sources["a"][1]
        rank.shared = Shared(*process_memory.identity()._replace(started=1), "GPU-a", rank.shared.spans)
        with pytest.raises(KVTierError, match="has ended, and another has its pid"):
            bench.add("a")
        assert not bench.driver.mapped
        bench.add("b")


def test_peer_cuda_copier_unaligned_pages_are_refused():
    with faked():
        bench = Bench()
        parts = bench.parts("a")
        group = parts[0].groups[0]
        odd = engines._moved(group.regions[0].source, 2)
        regions = (type(group.regions[0])(odd, group.regions[0].target, 0, 2, 0), *group.regions[1:])
        parts = [type(parts[0])(parts[0].source, (type(group)(0, regions, False),))]
        with pytest.raises(KVTierError, match="multiples of 4 bytes"):
            bench.copier.add("a", parts)
        assert not bench.driver.mapped


def test_peer_cuda_copier_regions_outside_shared_memory_are_refused():
    with faked():
        bench = Bench()
        rank = bench.sources["a"][0]
        parts = bench.parts("a")
        span = rank.shared.spans[0]
        rank.shared = Shared(*process_memory.identity(), "", (SharedSpan(span.base, span.nbytes // 2, span.handle),))
        part = type(parts[0])(rank.info(rank.shared), parts[0].groups)
        with pytest.raises(KVTierError, match="are not in the memory that the source shares"):
            bench.copier.add("a", [part])
        assert not bench.driver.mapped


def test_peer_cuda_copier_block_ids_out_of_range_are_refused():
    with faked():
        bench = Bench()
        bench.add("a")
        before = bench.target.data()
        for local, remote in ([1, 12], [0, 1]), ([1, -1], [0, 1]), ([1, 2], [0, 6]), ([1, 2], [-1, 0]):
            job = bench.job("a", [1, 2], [0, 1])
            job.groups[0].local[:], job.groups[0].remote[:] = local, remote
            with pytest.raises(ValueError, match="outside 0"):
                bench.copier.start([job])
        assert (bench.target.data() == before).all()


def test_copy_of_no_blocks_ends_at_once_and_unread_group_is_bad():
    with faked():
        bench = Bench()
        bench.add("a")
        none = engines.pull([], [], [], [])
        other = engines.pull([3], [3], [3], [4])
        other.group = 1
        copy = bench.copier.start([CopyJob("a", [none]), CopyJob("a", [other])])
        assert copy.done() and copy.bad(0) == set() and copy.bad(1) == {3}


@pytest.mark.parametrize("at", ["launch", "record"])
def test_peer_cuda_copier_failed_call_writes_nothing_after_it_raised(at):
    """Its blocks are another request's then."""
    with faked() as world:
        bench = Bench(max_rows=8)  # two launches
        job = bench.job("a", [1, 2, 3], [3, 4, 5])
        bench.add("a")
        launch, record, ended = bench.copier._page_copier.launch, bench.driver.record, []

        def launch_one(*arguments):
            if ended:
                fail()
            ended.append(launch(*arguments))

        def fail(*_):
            raise CudaError("cuLaunchKernel failed")

        if at == "launch":
            bench.copier._page_copier.launch = launch_one
        else:
            bench.driver.record = fail
        with pytest.raises(RuntimeError):
            bench.copier.start([job])
        assert not any(stream.queue for stream in world.streams) and (bench.target.table[1:4] >= 0).any()
        bench.copier._page_copier.launch, bench.driver.record = launch, record
        copy = bench.copier.start([job])
        world.run()
        assert copy.done() and copy.bad(0) == set()
        bench.copier.close()


def test_peer_cuda_copier_blocks_without_verification_result_are_bad():
    """Also where the memory for verdicts held good ones before."""
    with faked() as world:
        bench = Bench()
        job = bench.job("a", [1, 2], [3, 4])
        bench.add("a")
        copy = bench.copier.start([job])
        world.run()
        assert copy.done() and copy.bad(0) == set()
        bench.copier._page_copier.launch = lambda *_: None
        copy = bench.copier.start([job])
        world.run()
        assert copy.done() and copy.bad(0) == {1, 2}


def test_peer_cuda_copier_warm_up_compiles_for_own_layout():
    with faked() as world:
        bench = Bench()
        bench.copier.warm_up()
        world.run()
        flags = set(bench.copier._compiled)
        assert flags and all(dict(f)["CELL"] == 4 and dict(f)["TOKENS"] == 4 for f in flags)


class Exporting(fakes.FakeDriver):
    """Two allocations."""

    RANGES = [(4096, 1000), (8192, 500)]

    def uuid(self):
        return "GPU-1"

    def address_range(self, address):
        for base, nbytes in self.RANGES:
            if base <= address < base + nbytes:
                return base, nbytes
        raise CudaError("cuMemGetAddressRange failed: CUDA_ERROR_NOT_FOUND (500), named symbol not found")

    def ipc_handle(self, base):
        return base.to_bytes(64, "little")


def test_cuda_ipc_share_exports_each_allocation_once():
    shared = cuda_ipc.share([(8200, 100), (4100, 8), (5000, 96)], torch.device("cuda", 0), Exporting())
    assert [(s.base, s.nbytes, int.from_bytes(s.handle, "little")) for s in shared.spans] == [
        (4096, 1000, 4096), (8192, 500, 8192),
    ]  # fmt: skip
    assert shared.device == "GPU-1" and (shared.node, shared.pid, shared.started) == process_memory.identity()


@pytest.mark.parametrize("span, words", [((4100, 1000), "more than one allocation"), ((100, 4), "expandable_segments")])
def test_cuda_ipc_share_of_unsupported_memory_raises_with_cause(span, words):
    with pytest.raises(KVTierError, match=words):
        cuda_ipc.share([span], torch.device("cuda", 0), Exporting())


def test_cuda_ipc_handle_is_64_bytes_by_value():
    """64 bytes, as cuda.h has them."""
    from vllm_kvtier.worker.device import cuda_driver as cuda

    assert cuda.IPC_HANDLE_BYTES == 64 and cuda._SIGNATURES["cuIpcOpenMemHandle_v2"][1] is cuda._IpcHandle
    assert issubclass(cuda._IpcHandle, ctypes.Structure)
