"""Worker halves with real NIXL, that read each other; what their scheduler halves would hear and order."""

import torch
from pull_fakes import batch_of, pull_of
from support import Uncontained, eventually

from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.link import LinkServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.half import WorkerHalf
from vllm_kvtier.worker.memory import CacheMemory
from vllm_kvtier.worker.pulls import Stage
from vllm_kvtier.worker.work import PullOrder, StepWork


class Half:
    """One over ``view``; what it says to its scheduler half is in ``heard``."""

    def __init__(self, folder, number, view, memory=lambda view: CacheMemory(view, False)):
        self.view, self.heard, self.reactor = view, [], Reactor(f"s{number}")
        path = str(folder / f"{number}.sock")
        self.server = LinkServer(self.reactor, path, self.heard.append)
        self.reactor.start()
        self.made, self.steps = WorkerHalf(0, f"agent{number}", path, ["UCX"], Uncontained(), movable=True), 0
        self.made.register(lambda: self.view, memory, lambda view: (0,))

    def info(self, count=1):
        """Of the ``count``-th time that it registered."""
        said = eventually(lambda: len(found := self.said(m.Register)) >= count and found, 20)
        return said[count - 1].info

    def said(self, kind):
        return [message for message in self.heard if isinstance(message, kind)]

    def serve(self):
        self.reactor.call_soon(lambda: self.server.tell(m.Serve(True)))

    def sum(self, *blocks):
        self.steps += 1
        self.made.submit(StepWork(self.steps, [batch_of(blocks)]))
        eventually(lambda: m.Summed(0, self.steps) in self.heard, 20)

    def pull(self, name, local, remote, source="s/1", infos=None, timeout=20.0):
        order = PullOrder(name, source, [pull_of([local], [remote])], timeout)
        work = StepWork(self.steps, pulls=[order], sources=infos or {})
        self.made.begin(work)
        self.made.submit(work)

    def reading(self):
        """Whether NIXL was told to read."""
        return any(pull.stage is Stage.READING for pull in list(self.made._pulls._pulls))

    def results(self, count=1):
        found = []
        eventually(lambda: found.extend(self.made.collect().results) or len(found) >= count, 30)
        return found

    def fill(self, value):
        """As memory that was given back holds anything."""
        for region in self.view.groups[0].regions:
            self.view.pages(region).fill_(value)

    def block(self, block):
        return [self.view.pages(region)[block].clone() for region in self.view.groups[0].regions]

    def end(self):
        self.made.shutdown()
        self.reactor.stop()


def same(here, local, there, remote):
    return all(torch.equal(a, b) for a, b in zip(here.block(local), there.block(remote), strict=True))
