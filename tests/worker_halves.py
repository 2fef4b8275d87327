"""Workers of a rank: with real NIXL, reading each other, or without threads."""

from types import SimpleNamespace

import torch
from pull_fakes import batch_of, pull_of
from support import Uncontained, eventually

from vllm_kvtier.jobs.transfer_jobs import PullJob, StepWork
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.link import LinkPlace, LinkServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker
from vllm_kvtier.worker.context import CacheSetup, RankContext
from vllm_kvtier.worker.job_table import JobTable
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.nixl_pull.nixl_transport import UcxLimits
from vllm_kvtier.worker.nixl_pull.pulls import Stage
from vllm_kvtier.worker.peer_exchange import PeerExchange


def worker_without_threads(containment=None):
    """Nothing is set up; what would run on the reactor's thread is in ``queued``."""
    made = KVTierConnectorWorker.__new__(KVTierConnectorWorker)
    made.queued, made._jobs = [], JobTable()
    made._reactor = SimpleNamespace(call_soon=made.queued.append, errors=0)
    made._link = SimpleNamespace(send=lambda message: None)
    made._context = RankContext(0, made._reactor, lambda message: made._link.send(message), made._jobs.finish)
    made._exchange = PeerExchange(made._context, "agent", None, None)
    contain_with(made, containment or Uncontained())
    made._store = made._submitted = made._device = made._step_events = made._before = made.drafting = None
    made._errors, made._idle = 0, False
    return made


def contain_with(worker, containment):
    worker._contain = worker._exchange._contain = containment


class Half:
    """A worker over ``view``, and a list of its messages to the scheduler."""

    def __init__(self, folder, number, view, memory=lambda view: CacheMemory(view, False)):
        self.view, self.heard, self.reactor = view, [], Reactor(f"s{number}")
        path = str(folder / f"{number}.sock")
        self.server = LinkServer(self.reactor, path, self.heard.append)
        self.reactor.start()
        self.made, self.steps = (
            KVTierConnectorWorker(0, f"agent{number}", LinkPlace(path), ["UCX"], Uncontained(), UcxLimits(True)),
            0,
        )
        self.made.register(CacheSetup(lambda: self.view, memory, lambda view: (0,)))

    def info(self, count=1):
        """Of the ``count``-th time that it registered."""
        said = eventually(lambda: len(found := self.said(m.Register)) >= count and found, 20)
        return said[count - 1].info

    def said(self, kind):
        return [message for message in self.heard if isinstance(message, kind)]

    def serve(self):
        self.reactor.call_soon(lambda: self.server.send(m.Serve(True)))

    def sum(self, *blocks):
        self.steps += 1
        self.made.submit(StepWork(self.steps, [batch_of(blocks)]))
        eventually(lambda: m.ChecksumsReady(0, self.steps) in self.heard, 20)

    def pull(self, name, local, remote, source="s/1", infos=None, timeout=20.0):
        order = PullJob(name, source, [pull_of([local], [remote])], timeout)
        work = StepWork(self.steps, pulls=[order], new_peers=infos or {})
        self.made.begin(work)
        self.made.submit(work)

    def reading(self):
        """Whether a NIXL read was started."""
        return any(pull.stage is Stage.READING for pull in list(self.made._exchange.pulls._pulls))

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
