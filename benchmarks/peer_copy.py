"""Rate of blocks from another GPU's KV cache by the peer copy kernel, by the size of a layer's page.

A source process shares its cache on one GPU (CUDA IPC). A reader maps it on another GPU and copies scattered blocks to
scattered positions, with checksums computed and verified, and without (for the measurement only). For comparison, as
many bytes in one piece: torch's copy_, cuMemcpyPeerAsync, and cuMemcpyAsync from the mapping. Medians by the device's
clock; GB = 10^9 bytes. Every copy with checksums must be right, its blocks are checked again by another kernel, and
wrong keys must be detected.

    python benchmarks/peer_copy.py                # GPU 0 to GPU 1, under a minute
    python benchmarks/peer_copy.py --sweep        # forms of tiles, warps, programs
    python benchmarks/peer_copy.py --one          # both processes on GPU 0, to see that it runs
    python benchmarks/peer_copy.py --isolated     # each process sees its own GPU only, as engines often do
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from vllm_kvtier.kernels.peer_copy_plan import SHAPE, Shape

from vllm_kvtier.jobs.transfer_jobs import GroupPull
from vllm_kvtier.shapes.tp_mapping import map_source_ranks
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.messages import HeadRange, RankInfo
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.device import cuda_driver
from vllm_kvtier.worker.device.cuda_driver import Driver
from vllm_kvtier.worker.integrity.checksums import BlockChecksums
from vllm_kvtier.worker.peer_fetch import cuda_ipc
from vllm_kvtier.worker.peer_fetch.base import CopyJob
from vllm_kvtier.worker.peer_fetch.cuda_copier import CudaPeerCopier

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGES = (4, 8, 16, 32, 64, 256)
PROGRAMS = (8, 16, 20, 32)
SWEEP_PAGES = (8, 64)
SWEEP_TILES = (
    (512, 8), (1024, 4), (2048, 2), (4096, 1), (1024, 2), (2048, 1), (1024, 8), (2048, 4), (4096, 2), (8192, 1),
)  # fmt: skip
SWEEP_WARPS = (8, 16)
SWEEP_PROGRAMS = (16, 20)


def make_view(cache: torch.Tensor, page: int, layers: int) -> CacheView:
    """A layer after the other, as vLLM lays them out; cells of 512 bytes (256 in the smallest pages)."""
    heads = max(1, min(8, page // (16 * 512)))
    inner = min(512, page // heads // 16)
    tokens = page // heads // inner
    blocks = cache.numel() // (page * layers)
    regions = tuple(
        Region(
            f"l{i}", cache.data_ptr() + i * blocks * page, page, heads, tokens * inner if heads > 1 else 0, 0, tokens,
            inner, inner, dtype="bfloat16",
        )
        for i in range(layers)
    )  # fmt: skip
    group = GroupView(0, tokens, "full", None, regions)
    return CacheView([group], blocks, cache.device, [cache.untyped_storage()])


def keys_of(blocks: np.ndarray) -> np.ndarray:
    return blocks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)


def serve(pipe, gpu: int, nbytes: int, layers: int) -> None:
    """The source: answers a page size with the data for a reader, with checksums ready, until the end message."""
    torch.cuda.set_device(gpu)
    cache = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    torch.manual_seed(0)
    for at in range(0, nbytes, GIB):
        cache[at : at + GIB].view(torch.int64).random_()
    table = torch.zeros(nbytes // (layers * min(PAGES) * KIB), dtype=torch.int64, device="cuda")
    spans = [(t.data_ptr(), t.numel() * t.element_size()) for t in (cache, table)]
    shared = cuda_ipc.share(spans, cache.device)
    while (page := pipe.recv()) is not None:
        view = make_view(cache, page, layers)
        ids = np.arange(view.num_blocks)
        tokens = np.full(len(ids), view.groups[0].block_tokens)
        table[: len(ids)] = BlockChecksums(view).compute(0, ids, keys_of(ids), tokens)
        torch.cuda.synchronize()
        where = (table.data_ptr(), (HeadRange(0, view.groups[0].regions[0].outer),), shared)
        pipe.send(RankInfo(0, "", b"", "VRAM", gpu, view.num_blocks, view.groups, view.geometry(), *where))


class Timed:
    """Seconds on the device between two points of a stream. The device is kept busy first, so that the host's time to
    launch the work is not included."""

    AHEAD = 6_000_000  # cycles, 3 ms

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream
        self._ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __enter__(self) -> "Timed":
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self.AHEAD)
        self._ends[0].record(self._stream)
        return self

    def __exit__(self, *_) -> None:
        self._ends[1].record(self._stream)
        self._ends[1].synchronize()
        self.seconds = self._ends[0].elapsed_time(self._ends[1]) / 1e3


def plain(theirs: int, mine: int, nbytes: int, mapped: int, cache: torch.Tensor, repeats: int) -> dict[str, float]:
    """GB/s of one piece, by the ways in which CUDA and torch copy it. ``theirs`` < 0: that GPU is not visible here."""
    stream = torch.cuda.Stream()
    driver = Driver(mine)
    driver.enter()
    library = cuda_driver._library()
    library.cuMemcpyPeerAsync.argtypes = [ctypes.c_uint64, ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_void_p]
    target = cache.data_ptr()
    ways = {
        "mapped memcpy": lambda: library.cuMemcpyAsync(target, mapped, nbytes, stream.cuda_stream),
    }
    if theirs >= 0:
        other = Driver(theirs)
        there = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", theirs))

        def with_torch() -> int:
            with torch.cuda.stream(stream):
                cache[:nbytes].copy_(there, non_blocking=True)
            return 0

        ways["copy_"] = with_torch
        ways["memcpy peer"] = lambda: library.cuMemcpyPeerAsync(
            target, driver._context, there.data_ptr(), other._context, nbytes, stream.cuda_stream
        )
    found = {}
    for name, way in ways.items():
        times = []
        for i in range(repeats + 1):
            with Timed(stream) as timed:
                result = way()
            if result:
                raise RuntimeError(f"{name} failed: CUDA error {result}")
            if i:
                times.append(timed.seconds)
        found[name] = round(nbytes / statistics.median(times) / 1e9, 1)
    return found


class Reader:
    def __init__(self, pipe, args, gpus: tuple[int, int]):
        self.pipe, self.args = pipe, args
        self.theirs, self.mine = gpus
        torch.cuda.set_device(self.mine)
        self.cache = torch.empty(args.cache_gib * GIB, dtype=torch.uint8, device="cuda")
        self.mappings = cuda_ipc.Mappings(Driver(self.mine))
        self.rows: list[dict] = []
        self.best = 0.0

    def ask(self, page: int) -> RankInfo:
        self.pipe.send(page)
        if not self.pipe.poll(60):
            raise TimeoutError("the source does not answer")
        return self.pipe.recv()

    def prepare(self, page: int):
        """(view, parts, job) of copies of pages of ``page`` bytes, random blocks to random blocks."""
        info = self.ask(page)
        view = make_view(self.cache, page, self.args.layers)
        group = view.groups[0]
        n = min(self.args.move_mib * MIB // group.block_bytes, view.num_blocks // 2)
        rng = np.random.default_rng(page)
        local, remote = (rng.permutation(np.arange(1, view.num_blocks))[:n] for _ in range(2))
        valid = np.full(n, group.block_tokens, dtype=np.int32)
        job = CopyJob("source", [GroupPull(0, local, remote, keys_of(remote), valid)])
        return view, map_source_ranks(view.groups, (HeadRange(0, group.regions[0].outer),), 0, [info]), job

    def measure(self, prepared, shape: Shape, checked: bool, name: str) -> dict:
        view, parts, job = prepared
        table = torch.zeros(view.num_blocks, dtype=torch.int64, device="cuda")
        copier = CudaPeerCopier(view, table, shape, checked, mappings=self.mappings)
        began = time.perf_counter()
        copier.add("source", parts)
        added = time.perf_counter() - began
        times, hosts = [], []
        for i in range(self.args.repeats + 1):
            with Timed(copier._stream) as timed:
                start = time.perf_counter()
                copy = copier.start([job])
                host = time.perf_counter() - start
            assert copy.done()
            bad = len(copy.bad(0))
            if checked and bad:
                raise AssertionError(f"{bad} of {len(job.groups[0].local)} blocks are bad")
            if i:
                times.append(timed.seconds)
                hosts.append(host)
        copier.close()
        page = view.groups[0].regions[0].block_bytes
        rate = copy.nbytes / statistics.median(times) / 1e9
        row = {
            "page KiB": page // KIB, "way": name, "programs": shape.programs, "warps": shape.warps,
            "tiles": list(shape.tiles), "checked": checked, "GB/s": round(rate, 1), "ratio": round(rate / self.best, 3),
            "host_us": round(statistics.median(hosts) * 1e6), "add_ms": round(added * 1e3, 1),
            "blocks": len(job.groups[0].local),
        }  # fmt: skip
        self.rows.append(row)
        return row

    def verify(self, prepared) -> None:
        """Verify the copied blocks by the checksums of another kernel; wrong keys must be detected."""
        view, parts, job = prepared
        pull = job.groups[0]
        table = torch.zeros(view.num_blocks, dtype=torch.int64, device="cuda")
        copier = CudaPeerCopier(view, table, mappings=self.mappings)
        copier.add("source", parts)
        view.pages(view.groups[0].regions[0])[torch.from_numpy(pull.local[:64]).cuda()] = 0
        torch.cuda.synchronize()
        wrong = GroupPull(0, pull.local, pull.remote, pull.keys.copy(), pull.valid)
        wrong.keys[1] ^= np.uint64(4)
        copy = copier.start([CopyJob("source", [wrong])])
        assert copy.wait(10) and copy.bad(0) == {int(pull.local[1])}, copy.bad(0)
        sums = BlockChecksums(view).compute(0, pull.local, pull.keys, pull.valid)
        index = torch.from_numpy(pull.local).cuda()
        right = sums == table[index]
        assert not right[1] and int(right.sum()) == len(pull.local) - 1 and table[index[1]] == 0
        copy = copier.start([job])
        assert copy.wait(10) and not copy.bad(0)
        assert torch.equal(BlockChecksums(view).compute(0, pull.local, pull.keys, pull.valid), table[index])
        copier.close()

    def run(self) -> dict:
        args = self.args
        info = self.ask(PAGES[-1] * KIB)
        mapped = self.mappings.open(info.shared)
        first = info.groups[0].regions[0].base
        nbytes = min(args.move_mib * MIB, self.cache.numel())
        reference = plain(self.theirs, self.mine, nbytes, mapped.translate(first, nbytes), self.cache, args.repeats)
        self.best = max(reference.values())
        print(f"{nbytes // MIB} MiB in one piece, GB/s:", reference, flush=True)
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "plain": reference}
        result |= {"gpus": [self.theirs, self.mine], "isolated": args.isolated, "rows": self.rows}
        for page in SWEEP_PAGES if args.sweep else args.pages:
            prepared = self.prepare(page * KIB)
            self.verify(prepared)
            if args.sweep:
                self.sweep(prepared)
            else:
                self.compare(prepared)
            if args.out:  # after each size, so that a crash leaves what there is
                args.out.write_text(json.dumps(result, indent=1) + "\n")
        self.mappings.close(mapped)
        return result

    def compare(self, prepared) -> None:
        for checked in (True, False):
            cells = []
            for programs in self.args.programs:
                row = self.measure(prepared, Shape(SHAPE.tiles, SHAPE.warps, programs), checked, "kvtier")
                cells.append(f"{programs:3d}: {row['GB/s']:6.1f} ({row['ratio']:.2f})")
            words = "checksums on " if checked else "checksums off"
            print(f"{row['page KiB']:4d} KiB, {words}  {'   '.join(cells)}   host {row['host_us']} us", flush=True)

    def sweep(self, prepared) -> None:
        words = prepared[0].groups[0].regions[0].block_bytes // 8
        for tile in SWEEP_TILES:
            if tile[0] > words:
                continue
            for warps in SWEEP_WARPS:
                for programs in SWEEP_PROGRAMS:
                    row = self.measure(prepared, Shape((tile,), warps, programs), True, "sweep")
                    form = f"{tile[1]} x {tile[0]} words, {warps:2d} warps, {programs} programs"
                    print(f"{row['page KiB']:4d} KiB  {form}: {row['GB/s']:6.1f} GB/s ({row['ratio']:.2f})", flush=True)


def read(pipe, args, gpus: tuple[int, int]) -> None:
    began = time.monotonic()
    result = Reader(pipe, args, gpus).run()
    pipe.send(None)
    print(f"{time.monotonic() - began:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs=2, default=(0, 1), metavar=("SOURCE", "READER"))
    parser.add_argument("--one", action="store_true", help="both processes on the first GPU")
    parser.add_argument("--isolated", action="store_true", help="each process sees its own GPU only")
    parser.add_argument("--sweep", action="store_true", help="forms of tiles instead of page sizes")
    parser.add_argument("--pages", type=int, nargs="+", default=list(PAGES), metavar="KIB")
    parser.add_argument("--programs", type=int, nargs="+", default=list(PROGRAMS))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--cache-gib", type=int, default=8, help="of each side")
    parser.add_argument("--move-mib", type=int, default=1024, help="bytes of one measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="e.g. benchmarks/results/peer_copy.json")
    args = parser.parse_args()
    needed = 1 if args.one else max(args.gpus) + 1
    if torch.cuda.device_count() < needed:
        sys.exit(f"{torch.cuda.device_count()} CUDA devices here, {needed} needed" + ("" if args.one else " (--one?)"))
    theirs, mine = (args.gpus[0],) * 2 if args.one else args.gpus
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    nbytes = args.cache_gib * GIB
    processes = []
    for name, gpu, target in (("source", theirs, serve), ("reader", mine, read)):
        # What a process sees is decided before it first asks.
        visible, before = str(gpu) if args.isolated else None, os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        if target is serve:
            arguments = (there, 0 if args.isolated else gpu, nbytes, args.layers)
        else:
            gpus = (-1, 0) if args.isolated else (theirs, mine)
            arguments = (here, args, gpus)
        process = context.Process(target=target, args=arguments, name=name, daemon=True)
        process.start()
        processes.append(process)
        if visible is not None:
            if before is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
    source, reader = processes
    here.close()
    there.close()
    reader.join()
    source.join(10)
    if source.exitcode is None:
        source.kill()
    sys.exit(reader.exitcode)


if __name__ == "__main__":
    main()
