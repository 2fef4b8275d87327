"""How fast pages come over: our descriptors through our transport, beside NIXL's own prepared lists, same pages.

Two processes hold a KV cache of Qwen3-8B's shape (36 layers, pages of 64 KiB at 16 tokens a block), on two GPUs
or in host memory. The reader pulls N tokens' blocks, either allocated in sequence (as a fresh engine does) or
in reverse (as after a request was freed), in opposite orders
on the two sides, or scattered, by these ways:

  kvtier    what our workers read: prepared strided lists, blocks in an order that merges, checksums along
            (without the moves within the GPU that an opposite order needs afterwards)
  mapped    what they copy of engines of the same node, by a kernel on GPUs, verified
  prepared  NIXL's prepared lists of the same pages, blocks in the order of the prompt, as vLLM's NixlConnector does
  pages     one descriptor a page, nothing prepared

Each line: microseconds to build and post the request, milliseconds to the end, GB/s; medians.

    python benchmarks/pull_rate.py --gpus 0 1        # NVLink or PCIe
    python benchmarks/pull_rate.py                   # host memory, shared-memory or TCP transport
"""

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from vllm_kvtier.jobs.transfer_jobs import GroupPull
from vllm_kvtier.shapes.tp_mapping import map_source_ranks
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.messages import HeadRange, RankInfo
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.integrity.checksums import BlockChecksums
from vllm_kvtier.worker.nixl_pull.descriptors import PageRows, Side
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport, Transfer, TransferState
from vllm_kvtier.worker.peer_fetch import cuda_ipc, process_memory
from vllm_kvtier.worker.peer_fetch.base import CopyJob
from vllm_kvtier.worker.peer_fetch.fetch_jobs import make_peer_copier

PAGE = 64 << 10
HEADS = 8


def cache(blocks: int, layers: int, gpu: int | None) -> CacheView:
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    memory = torch.randint(0, 255, (layers, blocks, PAGE), dtype=torch.uint8, device=device)
    inner = PAGE // HEADS // 16
    regions = tuple(
        Region(f"layer{i}", memory.data_ptr() + i * blocks * PAGE, PAGE, HEADS, 16 * inner, 0, 16, inner, inner)
        for i in range(layers)
    )
    group = GroupView(0, 16, "full", None, regions)
    return CacheView([group], blocks, device, [memory.untyped_storage()])


def open_transport(name: str, view: CacheView) -> NixlTransport:
    transport = NixlTransport(name, ["UCX"])
    cuda = view.device.type == "cuda"
    transport.register(list(view.spans), "VRAM" if cuda else "DRAM", view.device.index or 0 if cuda else 0)
    return transport


def serve(pipe, blocks: int, layers: int, gpu: int | None) -> None:
    if gpu is not None:
        torch.cuda.set_device(gpu)
    view = cache(blocks, layers, gpu)
    transport = open_transport("source", view)
    table, ids = torch.zeros(blocks, dtype=torch.int64, device=view.device), np.arange(blocks)
    table[:] = BlockChecksums(view).compute(0, ids, keys_of(ids), np.full(blocks, 16))
    spans, memory = [*view.spans, (table.data_ptr(), blocks * 8)], "DRAM" if gpu is None else "VRAM"
    shared = process_memory.share(spans) if gpu is None else cuda_ipc.share(spans, view.device)
    if gpu is not None:
        torch.cuda.synchronize()
    where = (table.data_ptr(), (HeadRange(0, HEADS),), shared)
    info = RankInfo(0, "", b"", memory, gpu or 0, blocks, view.groups, view.geometry(), *where)
    pipe.send((transport.metadata(), info))
    while not pipe.poll(0.0002):
        transport.progress()


def keys_of(blocks: np.ndarray) -> np.ndarray:
    return blocks.astype(np.uint64) + np.uint64(1)


class Mapped:
    """The copier of peer fetches, reading the source's mapped memory."""

    def __init__(self, view: CacheView, source: RankInfo):
        table = torch.zeros(view.num_blocks, dtype=torch.int64, device=view.device)
        self._copier = make_peer_copier(view, table)
        self._copier.add("source", map_source_ranks(view.groups, source.heads, 0, [source]))

    def begin(self, near: np.ndarray, far: np.ndarray):
        full = np.full(len(far), 16, np.int32)
        return self._copier.start([CopyJob("source", [GroupPull(0, near, far, keys_of(far), full)])])


def finish_copy(copy) -> None:
    while not copy.done():
        pass
    assert not copy.bad(0), f"{len(copy.bad(0))} blocks with wrong checksums"


def finish(transport: NixlTransport, handle) -> None:
    while (state := transport.poll(handle)) is TransferState.RUNNING:
        pass
    assert state is TransferState.DONE, state


def measure(view, transport, info, mapped, tokens, order, repeats, gpu, remote_gpu) -> list[dict]:
    source = info.groups[0]
    rng = np.random.default_rng(3)
    n = tokens // 16
    near = far = np.arange(1, n + 1)
    if order == "reverse":
        near = far = near[::-1]
    elif order == "opposite":
        near = near[::-1]
    elif order == "scattered":
        near, far = (rng.permutation(np.arange(1, view.num_blocks))[:n] for _ in range(2))
    here, memory = view.groups[0], "VRAM" if gpu is not None else "DRAM"
    local_device, remote_device = gpu or 0, remote_gpu or 0
    agent = transport._reader.nixl  # the comparison goes past our wrapper
    size = n * len(here.regions) * PAGE

    def lists(group: GroupView, device: int) -> np.ndarray:
        rows = [[r.base, PAGE, device, r.block_stride, view.num_blocks] for r in group.regions]
        return np.array(rows, np.uint64)

    prepared = [
        agent.prep_xfer_dlist("NIXL_INIT_AGENT", lists(here, local_device), memory),
        agent.prep_xfer_dlist("source", lists(source, remote_device), memory),
    ]
    steps = np.arange(len(here.regions), dtype=np.int32)[:, None] * view.num_blocks

    spare = view.spans[0][0]  # stands in for the tables of checksums
    blocks, table = view.num_blocks, source.regions[0].base
    rows = PageRows(Side([here], blocks, spare, local_device), Side([source], blocks, table, remote_device))
    ours_local = transport.prepare("source", rows.local, memory, ours=True)
    ours_remote = transport.prepare("source", rows.remote, memory, ours=False)

    def ours():
        read = rows.indices([(0, near, far)], rearrange=gpu is not None)
        return transport.read("source", ours_local, read.local, ours_remote, read.remote, read.size), len(read.local)

    def pages():
        a = np.array([[r.base + PAGE * i, PAGE, local_device] for r in here.regions for i in near], np.uint64)
        b = np.array([[r.base + PAGE * i, PAGE, remote_device] for r in source.regions for i in far], np.uint64)
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(a, memory), agent.get_xfer_descs(b, memory), "source"
        )
        agent.transfer(handle)
        return Transfer(handle, "source", size), len(a)

    def indices():
        a, b = ((steps + ids.astype(np.int32)).ravel().astype(np.int32) for ids in (near, far))
        handle = agent.make_prepped_xfer("READ", prepared[0], a, prepared[1], b)
        agent.transfer(handle)
        return Transfer(handle, "source", size), len(a)

    def copied():
        return mapped.begin(near, far), n

    results = []
    for name, begin in (("kvtier", ours), ("mapped", copied), ("prepared", indices), ("pages", pages)):
        posts, totals, count = [], [], 0
        for i in range(repeats + 1):
            start = time.perf_counter()
            handle, count = begin()
            posted = time.perf_counter()
            finish_copy(handle) if begin is copied else finish(transport, handle)
            end = time.perf_counter()
            if begin is not copied:
                transport.release(handle)
            if i:
                posts.append(posted - start)
                totals.append(end - start)
        total = statistics.median(totals)
        results.append(
            {
                "tokens": tokens, "blocks": order, "way": name, "descriptors": count,
                "post_us": round(statistics.median(posts) * 1e6), "total_ms": round(total * 1e3, 2),
                "GB/s": round(size / total / 1e9, 1),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    theirs, mine = args.gpus or (None, None)
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    child = context.Process(target=serve, args=(far_end, args.blocks, args.layers, theirs), daemon=True)
    child.start()
    if mine is not None:
        torch.cuda.set_device(mine)
    view = cache(args.blocks, args.layers, mine)
    transport = open_transport("reader", view)
    metadata, info = pipe.recv()
    transport.add_peer(metadata, "source")
    mapped = Mapped(view, info)
    rows = []
    for tokens in args.tokens:
        for order in ("in order", "reverse", "opposite", "scattered"):
            rows += measure(view, transport, info, mapped, tokens, order, args.repeats, mine, theirs)
    pipe.send("done")
    child.join(10)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
