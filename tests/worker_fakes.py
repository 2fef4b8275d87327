"""Stand-ins for the worker's copier and orders for it: a modelled link, and a small cache of two groups."""

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import torch

from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob, StoreJob
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.store.copy_engine import CopyEngine

MIB = 1 << 20
LIFE = "life 1"


class Link:
    """A copier whose lanes move ``rate`` bytes a second each, one call after another, behind its fence's time."""

    on_model_stream = False

    def __init__(self, clock, rate=50e9, piece_bytes=32 * MIB, block_bytes=MIB):
        self.clock, self.rate, self.piece_bytes, self.block_bytes = clock, rate, piece_bytes, block_bytes
        self.free = {"load": 0.0, "store": 0.0}
        self.busy = {"load": 0.0, "store": 0.0}
        self.calls, self.bad, self.polls = [], set(), 0
        self.instance, self.copier, self.users = LIFE, self, 0

    def give(self):
        self.users -= 1

    def _call(self, kind, group, blocks, keys, slots, after):
        nbytes = len(blocks) * self.block_bytes
        start = max(self.clock(), self.free[kind], after or 0.0)
        self.free[kind] = start + nbytes / self.rate
        self.busy[kind] += nbytes / self.rate
        call = SimpleNamespace(kind=kind, group=group, blocks=blocks.tolist(), nbytes=nbytes, over=self.free[kind])
        call.bad = np.isin(blocks, list(self.bad)) if kind == "load" else None
        call.done, call.held = lambda: self._done(call), False
        call.make_stream_wait = lambda: setattr(call, "held", True)
        self.calls.append(call)
        return call

    def _done(self, call):
        self.polls += 1
        return self.clock() >= call.over

    def store(self, *arguments):
        return self._call("store", *arguments)

    def load(self, *arguments):
        return self._call("load", *arguments)


class CpuLink(Link):
    """Copies on the calling thread, as plain copies do."""

    def _call(self, *arguments):
        call = super()._call(*arguments)
        self.clock.now = call.over
        return call


def arrays(count, first=1):
    blocks = np.arange(first, first + count)
    return dict(blocks=blocks, keys=blocks.astype(np.uint64), slots=blocks * 256)


ids = itertools.count()


def store(count, step=0, group=0, first=1, instance=LIFE):
    return StoreJob(next(ids), group, **arrays(count, first), after_step=step, instance=instance)


def load(name, *counts, timeout=10.0, first=1, instance=LIFE):
    return LoadJob(name, [GroupLoad(g, **arrays(n, first)) for g, n in enumerate(counts)], timeout, instance)


def engine(link, clock, **options):
    return CopyEngine(SimpleNamespace(current=link), [link.block_bytes] * 2, clock=clock, **options)


def run(offload, clock, seconds, step=lambda: None):
    """Drive whenever the engine asks for it; what ended, in all, and how often it was driven."""
    end, drives = clock.now + seconds, 0
    loads, stored, cut = [], [], []
    while clock.now < end:
        step()
        ended = offload.poll()
        drives += 1
        loads += ended.loads
        stored += ended.stored
        cut += ended.cut
        pause = offload.next_poll()
        if pause is None:
            break
        clock.now += max(pause, 10e-6)  # what a drive takes
    return SimpleNamespace(loads=loads, stored=stored, cut=cut, drives=drives)


def run_real(offload, enough):
    """With the real clock, waiting as long as the engine says."""
    total = SimpleNamespace(loads=[], stored=[], cut=[])
    pause = threading.Event()
    for _ in range(10_000):
        ended = offload.poll()
        total.loads += ended.loads
        total.stored += ended.stored
        total.cut += ended.cut
        if enough(total):
            return total
        pause.wait(offload.next_poll())
    raise AssertionError(f"not within 10000 polls: {total}")


def cache(blocks, seed):
    """Two groups of three and two layers over their own memory."""
    generator = torch.Generator().manual_seed(seed)
    heads, tokens, inner = 2, 4, 16
    page = heads * tokens * inner
    memory = torch.randint(0, 256, (5, blocks, page), dtype=torch.uint8, generator=generator)
    groups, layer = [], 0
    for g, layers in enumerate((3, 2)):
        regions = []
        for _ in range(layers):
            base = memory[layer].data_ptr()
            regions.append(
                Region(f"l{layer}", base, page, heads, tokens * inner, 0, tokens, inner, inner, dtype="uint8")
            )
            layer += 1
        groups.append(GroupView(g, tokens, "full", None, tuple(regions)))
    return CacheView(groups, blocks, "cpu", [memory.untyped_storage()]), memory
