"""Just enough of torch.cuda and of the driver to run ``CudaCopier`` on host memory, in Triton's interpreter.

Streams keep what they were given and do it only when asked, in an order that respects the events and is otherwise
random: a missing wait shows as wrong bytes.
"""

import ctypes
import random
from contextlib import nullcontext

import numpy as np


class Event:
    def __init__(self, **_):
        self.token = None  # of the latest record

    def record(self, stream):
        self.token = object()
        token = self.token
        stream.world.enqueue(stream, ("record", token))

    def query(self):
        return self.token is None or self.token in World.current.reached

    def synchronize(self):
        World.current.run(self)


class Stream:
    def __init__(self, device=None, priority=0):
        self.world, self.queue = World.current, []
        self.world.streams.append(self)
        self.cuda_stream = len(self.world.streams)

    def wait_event(self, event):
        if event.token is not None:
            self.world.enqueue(self, ("wait", event.token))


class World:
    """All streams; ``run`` does the work of a random ready stream until an event is reached, or all of it."""

    current: "World"

    def __init__(self, seed: int):
        World.current = self
        self.streams, self.reached, self.random = [], set(), random.Random(seed)

    def enqueue(self, stream, item):
        stream.queue.append(item)

    def _ready(self):
        return [s for s in self.streams if s.queue and (s.queue[0][0] != "wait" or s.queue[0][1] in self.reached)]

    def run(self, until=None):
        while until is None or not until.query():
            ready = self._ready()
            if not ready:
                left = [s.cuda_stream for s in self.streams if s.queue]
                assert not left and until is None, f"streams {left} wait for each other or for nothing"
                return
            kind, what = self.random.choice(ready).queue.pop(0)
            if kind == "record":
                self.reached.add(what)
            elif kind == "work":
                what()


class FakeCuda:
    """In place of ``torch.cuda`` in the module under test."""

    Event, Stream = Event, Stream

    def __init__(self, world):
        self.world = world

    def device(self, _):
        return nullcontext()

    def current_device(self):
        return 0

    def get_device_name(self, _):
        return "fake"

    def synchronize(self, _=None):
        self.world.run()


class FakeDriver:
    """In place of ``worker.cuda.Driver``: the DMA engine is memmove."""

    def __init__(self, index):
        self.registered = {}
        self.batches = []

    def enter(self):
        pass

    def close(self):
        pass

    def register(self, address, nbytes):
        self.registered[address] = nbytes

    def unregister(self, address):
        del self.registered[address]

    def _enqueue(self, handle, work):
        World.current.enqueue(World.current.streams[handle - 1], ("work", work))

    def copy_batch(self, targets, sources, sizes, handle, order):
        assert {a.dtype for a in (targets, sources, sizes)} == {np.dtype(np.uint64)}
        assert all(a.flags.c_contiguous for a in (targets, sources, sizes))
        if not len(sizes):
            return
        copies = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self.batches.append(len(copies))
        self._enqueue(handle, lambda: [ctypes.memmove(*copy) for copy in copies])

    def copy_lines(self, target, target_pitch, source, source_pitch, width, height, handle):
        self.batches.append((width, height))
        for line in range(height):
            a, b = target + line * target_pitch, source + line * source_pitch
            self._enqueue(handle, lambda a=a, b=b: ctypes.memmove(a, b, width))


def later(mover):
    """``pages.Mover`` whose launches are work of their stream, done when the stream comes to it."""

    class Later(mover):
        def launch(self, table, n, rows, acc, stream):
            work = super().launch
            World.current.enqueue(stream, ("work", lambda: work(table, n, rows, acc, None)))

    return Later
