"""A reset of the prefix cache ends when no rank has a checksum of before any more."""

import logging

import pytest
from support import eventually

from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire.link import LinkClient, LinkPlace, LinkServer, link_path
from vllm_kvtier.wire.reactor import Reactor


class Ranks:
    """Workers behind a real link: ``cleared`` has (rank, generation), ``silent`` those that don't answer."""

    def __init__(self, count: int):
        self.cleared, self.silent, self.reported = [], set(), set()
        path = link_path("engine", "instance")
        self.reactors = [Reactor(f"rank {rank}") for rank in range(count)]
        self.clients = [
            LinkClient(reactor, LinkPlace(path), lambda message, rank=rank: self._clear(rank, message))
            for rank, reactor in enumerate(self.reactors)
        ]
        scheduler = Reactor("scheduler")
        server = LinkServer(scheduler, path, lambda message: self.on_message(message))
        self.clearing = ChecksumClearing(lambda message: scheduler.call_soon(lambda: server.send(message)))
        self.reactors.append(scheduler)
        for rank, reactor in enumerate(self.reactors):
            reactor.start()
            if rank < count:
                self._send(rank, lm.ChecksumsReady(rank, 1))
        eventually(lambda: len(self.reported) == count)

    def on_message(self, message):
        if isinstance(message, lm.ChecksumsCleared):
            self.clearing.cleared(message)
        else:
            self.clearing.present(message.rank)
            self.reported.add(message.rank)

    def _send(self, rank, message):
        self.reactors[rank].call_soon(lambda: self.clients[rank].send(message))

    def _clear(self, rank, message):
        self.cleared.append((rank, message.generation))
        if rank not in self.silent:
            self.clients[rank].send(lm.ChecksumsCleared(rank, message.generation))

    def answer(self, rank, generation):
        self.silent.discard(rank)
        self._send(rank, lm.ChecksumsCleared(rank, generation))


@pytest.fixture
def ranks(run_dir):
    made = Ranks(3)
    yield made
    for reactor in made.reactors:
        reactor.stop()


def test_clearing_returns_when_all_ranks_have_cleared(ranks, caplog):
    for generation in (1, 2):
        ranks.clearing.clear(30.0)
        assert sorted(ranks.cleared[-3:]) == [(rank, generation) for rank in range(3)]
        assert ranks.clearing.generation == generation
    assert not caplog.records


def test_clearing_names_a_silent_rank_and_does_not_wait_for_ever(ranks, caplog):
    ranks.silent.add(1)
    with caplog.at_level(logging.WARNING):
        ranks.clearing.clear(0.2)
    assert "ranks [1] have not cleared" in caplog.text
    caplog.clear()
    ranks.answer(1, 1)  # late: it is not taken for the next one's answer
    ranks.clearing.clear(30.0)
    assert sorted(ranks.cleared[3:]) == [(0, 2), (1, 2), (2, 2)] and not caplog.records


def test_clearing_waits_for_no_rank_that_has_not_reported(caplog):
    sent = []
    clearing = ChecksumClearing(sent.append)
    clearing.clear(30.0)
    assert sent == [lm.ClearChecksums(1)] and not caplog.records
