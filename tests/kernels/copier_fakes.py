"""Just enough of torch.cuda and of the driver to run ``CudaCopier`` on host memory, in Triton's interpreter.

Streams keep what they were given and do it only when asked, in an order that respects the events and is otherwise
random: a missing wait shows as wrong bytes.
"""

import ctypes
import random
from contextlib import nullcontext


class Event:
    """``torch.cuda.Event`` as far as copiers look at it: its handle."""

    def __init__(self, driver):
        self._driver, self.cuda_event = driver, driver.new_event()

    def record(self, stream):
        self._driver.record(self.cuda_event, stream.cuda_stream)


class Stream:
    def __init__(self, device=None, priority=0):
        self.world, self.queue = World.current, []
        self.world.streams.append(self)
        self.cuda_stream = len(self.world.streams)

    def synchronize(self):
        self.world.run(lambda: not self.queue)


class World:
    """All streams; ``run`` does the work of a random ready stream until an event is reached, or all of it."""

    current: "World"

    def __init__(self, seed: int):
        World.current = self
        self.streams, self.reached, self.random = [], set(), random.Random(seed)
        self.forward = Stream()  # the model's

    def enqueue(self, stream, item):
        stream.queue.append(item)

    def _ready(self):
        return [s for s in self.streams if s.queue and (s.queue[0][0] != "wait" or s.queue[0][1] in self.reached)]

    def run(self, until=lambda: False):
        while not until():
            ready = self._ready()
            if not ready:
                left = [s.cuda_stream for s in self.streams if s.queue]
                assert not left and not until(), f"streams {left} wait for each other or for nothing"
                return
            kind, what = self.random.choice(ready).queue.pop(0)
            if kind == "record":
                self.reached.add(what)
            elif kind == "work":
                what()


class FakeCuda:
    """In place of ``torch.cuda`` in the module under test."""

    Stream = Stream

    def __init__(self, world):
        self.world = world

    def device(self, _):
        return nullcontext()

    def current_device(self):
        return 0

    def current_stream(self, _=None):
        return self.world.forward

    def get_device_name(self, _):
        return "fake"

    def synchronize(self, _=None):
        self.world.run()


class FakeDriver:
    """In place of ``worker.device.cuda_driver.Driver``: the DMA engine is memmove."""

    def __init__(self, device=0):
        self.registered, self.batches = {}, []
        self.events, self._number = {}, 0  # handle -> what marks its latest record

    def enter(self):
        pass

    def close(self):
        pass

    def register(self, address, nbytes):
        self.registered[address] = nbytes

    def unregister(self, address):
        del self.registered[address]

    def new_event(self):
        self._number += 1
        self.events[self._number] = None
        return self._number

    def destroy_event(self, event):
        del self.events[event]

    def record(self, event, stream):
        self.events[event] = token = object()
        World.current.enqueue(World.current.streams[stream - 1], ("record", token))

    def wait(self, stream, event):
        if self.events[event] is not None:
            World.current.enqueue(World.current.streams[stream - 1], ("wait", self.events[event]))

    def reached(self, event):
        return self.events[event] is None or self.events[event] in World.current.reached

    def is_capturing(self, stream):
        return False

    def synchronize(self, event):
        World.current.run(lambda: self.reached(event))

    def launch(self, *_):
        raise AssertionError("the interpreter compiles nothing")

    launcher = launch

    def _enqueue(self, handle, work):
        World.current.enqueue(World.current.streams[handle - 1], ("work", work))

    def set_word(self, address, handle):
        self.batches.append(("pause", handle))
        self._enqueue(handle, lambda: ctypes.memset(address, 0, 4))

    def copy_batch(self, targets, sources, sizes, n, handle, order):
        assert n > 0
        arrays = [(ctypes.c_uint64 * n).from_address(address) for address in (targets, sources, sizes)]
        copies = list(zip(*arrays, strict=True))
        self.batches.append(len(copies))
        self._enqueue(handle, lambda: [ctypes.memmove(*copy) for copy in copies])

    def copy_lines(self, target, target_pitch, source, source_pitch, width, height, handle):
        self.batches.append((width, height))
        for line in range(height):
            a, b = target + line * target_pitch, source + line * source_pitch
            self._enqueue(handle, lambda a=a, b=b: ctypes.memmove(a, b, width))


def later(page_copier):
    """``pages.Mover`` whose launches are work of their stream, done when the stream comes to it."""

    class Later(page_copier):
        def launch(self, table, n, stream):
            work = super().launch
            World.current.enqueue(stream, ("work", lambda: work(table, n, None)))

    return Later
