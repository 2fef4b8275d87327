"""Pulls between two processes of this machine by NIXL, as between engines: their pages, in order and scattered.

Beside it ``memcpy`` on one core in host memory; between GPUs a copy within one.
"""

import ctypes
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import numpy as np
import torch

from vllm_kvtier.bench.row import Row, rates, repeat
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.tiers.process.nixl_agent import load_nixl
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull.descriptors import PageRows, Side
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport, TransferState

PAGE_BYTES = 64 << 10  # of a layer, as Qwen3-8B's
LAYERS, BLOCKS, PULLED_BLOCKS, BLOCK_TOKENS = 36, 160, 64, 16  # blocks of a cache, of one pull
START_SECONDS, PULL_SECONDS = 60.0, 60.0


def _cache(device: torch.device) -> tuple[CacheView, torch.Tensor]:
    page, cell = PAGE_BYTES, PAGE_BYTES // 128
    memory = torch.ones((LAYERS, BLOCKS, page), dtype=torch.uint8, device=device)
    regions = tuple(
        Region(f"layer{i}", memory.data_ptr() + i * BLOCKS * page, page, 8, page // 8, 0, BLOCK_TOKENS, cell, cell)
        for i in range(LAYERS)
    )
    view = CacheView([GroupView(0, BLOCK_TOKENS, "full", None, regions)], BLOCKS, device, [memory.untyped_storage()])
    return view, memory


def _open(name: str, view: CacheView, backends: list[str]) -> NixlTransport:
    load_nixl()  # which silences its loggers
    transport = NixlTransport(name, backends)
    cuda = view.device.type == "cuda"
    transport.register(list(view.spans), "VRAM" if cuda else "DRAM", view.device.index or 0)
    return transport


def serve(pipe: Connection, device: str, backends: list[str]) -> None:
    """The source process: serves reads until the pipe gets a message."""
    try:
        if device != "cpu":
            torch.cuda.set_device(device)
        view, memory = _cache(torch.device(device))
        transport = _open("kvtier-bench-source", view, backends)
    except Exception as error:  # reported to the parent
        pipe.send(f"{type(error).__name__}: {error}")
        return
    if memory.is_cuda:
        torch.cuda.synchronize()
    pipe.send((transport.metadata(), view.groups[0]))
    while not pipe.poll(0.0002):
        transport.progress()
    os._exit(0)  # libraries that NIXL brings crash at the end of the interpreter


class Puller:
    """Reads PULLED_BLOCKS blocks of the other process's cache."""

    def __init__(self, device: str, backends: list[str]):
        """Raises KVTierError if NIXL or the source process fails."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=serve, args=(theirs, device, backends), daemon=True)
        self._child.start()
        theirs.close()
        try:
            view, self.memory = _cache(torch.device(device))
            self._transport = _open("kvtier-bench-reader", view, backends)
            if not self._pipe.poll(START_SECONDS):
                raise KVTierError(f"the bench's source process did not start within {START_SECONDS:g} s")
            reply = self._pipe.recv()
            if isinstance(reply, str):
                raise KVTierError(f"the bench's source process failed: {reply}")
        except (KVTierError, EOFError) as error:
            self._child.kill()
            raise KVTierError(str(error) or "the bench's source process ended") from error
        metadata, source = reply
        self._transport.add_peer(metadata, "kvtier-bench-source")
        kind = "DRAM" if device == "cpu" else "VRAM"
        # The first bytes take the place of the checksum tables.
        here, there = view.spans[0][0], source.regions[0].base
        self._rows = PageRows(Side([view.groups[0]], BLOCKS, here), Side([source], BLOCKS, there))
        self._lists = (
            self._transport.prepare("kvtier-bench-source", self._rows.local, kind, ours=True),
            self._transport.prepare("kvtier-bench-source", self._rows.remote, kind, ours=False),
        )

    def pull(self, scattered: bool, seconds: float) -> tuple[int, float]:
        random = np.random.default_rng(1)
        ours = theirs = np.arange(1, PULLED_BLOCKS + 1)
        if scattered:
            ours, theirs = (random.permutation(np.arange(1, BLOCKS))[:PULLED_BLOCKS] for _ in range(2))

        def once() -> int:
            read = self._rows.indices([(0, ours, theirs)])
            local, remote = self._lists
            transfer = self._transport.read("kvtier-bench-source", local, read.local, remote, read.remote, read.size)
            deadline = time.monotonic() + PULL_SECONDS
            while (state := self._transport.poll(transfer)) is TransferState.RUNNING and time.monotonic() < deadline:
                continue  # engines poll NIXL as often
            self._transport.release(transfer)
            if state is not TransferState.DONE:
                raise KVTierError("a pull failed: see the messages of NIXL and UCX above")
            return PULLED_BLOCKS * LAYERS * PAGE_BYTES

        return repeat(once, seconds)

    def close(self) -> None:
        if self._child.is_alive():
            self._pipe.send("end")
        self._child.join(10)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()
        self._transport.retire()


def measure(seconds: float, backends: list[str], cuda: bool | None = None) -> list[Row]:
    cuda = torch.cuda.is_available() if cuda is None else cuda
    puller = Puller("cuda:0" if cuda else "cpu", backends)
    half = puller.memory.numel() // 2
    flat = puller.memory.view(-1)

    def copy(seconds: float) -> tuple[int, float]:
        def once() -> int:
            if cuda:
                flat[:half].copy_(flat[half : 2 * half])
                torch.cuda.synchronize()
            else:
                ctypes.memmove(flat.data_ptr(), flat.data_ptr() + half, half)
            return half

        return repeat(once, seconds)

    try:
        puller.pull(False, 0.0)  # connections are made
        found = rates(
            {
                "copy": copy,
                "in order": lambda seconds: puller.pull(False, seconds),
                "scattered": lambda seconds: puller.pull(True, seconds),
            },
            seconds,
        )
    finally:
        puller.close()
    word = "a copy within the GPU" if cuda else "memcpy on one core"
    return [Row("pull", way, found[way], found["copy"], word) for way in ("in order", "scattered")]
