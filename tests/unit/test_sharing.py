"""What the node store is told of this engine's resident blocks, and when: only in company."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_kvtier.scheduler import sharing as module
from vllm_kvtier.scheduler.ledger import Entry, Keys, Ledger
from vllm_kvtier.scheduler.sharing import Sharing

GROUPS = [(4, 8), (16, None)]  # a window, and the group that stands for prefixes
KEYS = Keys(5)


class Client:
    def __init__(self):
        self.connected, self.session, self.company = True, 1, 0
        self.presented, self.said, self.forget = [], [], False

    def present(self, family, host, port, instance, session=1):
        self.presented.append((family, host, port, instance))

    def resident(self, added, gone, session, anew):
        if session == self.session:
            assert anew is (not self.said or self.forget)
            self.forget = False
            self.said.append(tuple(np.frombuffer(keys, "<u8").tolist() for keys in (added, gone)))


@pytest.fixture
def world(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ledger, woken = Ledger([size for size, _ in GROUPS]), []
    sharing = Sharing(ledger, lambda: KEYS, GROUPS, 4, "me/1", lambda: woken.append(1))
    return SimpleNamespace(now=now, ledger=ledger, woken=woken, sharing=sharing, client=Client())


def in_company(world):
    world.sharing.opened(("10.0.0.1", 77))
    world.sharing.store_changed(world.client)
    world.client.company = 1
    world.sharing.store_changed(world.client)
    world.sharing.settle()


def test_alone_nothing_is_told_or_kept(world):
    world.sharing.store_changed(world.client)
    assert not world.client.presented, "nobody could reach us yet"
    world.sharing.opened(("10.0.0.1", 77))
    assert world.client.presented == [(KEYS.family, "10.0.0.1", 77, "me/1")]
    world.ledger.mark(Entry(1, 3, 333, 16), 1)
    world.sharing.settle()
    world.sharing.settle(idle=True)
    assert not world.sharing.active and not world.client.said and not world.ledger.published and not world.woken
    assert world.sharing.names(b"") == (b"", 1)


def test_company_hears_of_all_and_then_of_changes(world):
    world.ledger.mark(Entry(1, 3, 333, 16), 1)
    world.ledger.mark(Entry(1, 4, 444, 9), 1)  # not whole
    world.ledger.mark(Entry(0, 5, 555, 4), 1)  # of the other group
    in_company(world)
    assert world.woken, "an idle engine would not look"
    assert world.sharing.active and world.client.said == [([333], [])]
    assert world.sharing.names(b"v") == (KEYS.mix(1, b"v"), 4)
    block_hash = bytes(range(32))
    head, mix = int.from_bytes(block_hash[:8], "little"), int.from_bytes(KEYS.mix(1, b"v"), "little")
    assert head ^ mix == KEYS.key(block_hash, 1, b"v")
    world.ledger.mark(Entry(1, 6, 666, 16), 2)
    world.sharing.settle()
    assert len(world.client.said) == 1, "a moment later is soon enough"
    world.ledger.forget([3])
    world.now[0] += 1
    world.sharing.settle()
    assert world.client.said[1] == ([666], [333])
    world.ledger.forget([6])
    world.sharing.settle(idle=True)
    assert world.client.said[2] == ([], [666]), "nobody would tell them while the engine sleeps"
    world.sharing.settle(idle=True)
    assert len(world.client.said) == 3


def test_many_changes_do_not_wait(world):
    in_company(world)
    assert world.client.said == [([], [])], "nothing, but anew"
    world.ledger.mark(Entry(1, 1, 1, 16), 1)
    world.now[0] += 1
    world.sharing.settle()
    for n in range(2, 300):
        world.ledger.mark(Entry(1, n, n, 16), 1)
    world.sharing.settle()
    assert [len(added) for added, _ in world.client.said[1:]] == [1, 298]


def test_a_new_connection_is_told_again_and_solitude_ends_it(world):
    world.ledger.mark(Entry(1, 3, 333, 16), 1)
    in_company(world)
    world.client.connected, world.client.company = False, 0
    world.sharing.store_changed(world.client)
    world.sharing.settle()
    assert not world.sharing.active and not world.ledger.published
    world.client.connected, world.client.session, world.client.forget = True, 2, True
    world.sharing.store_changed(world.client)
    world.client.company = 2
    world.sharing.store_changed(world.client)
    world.sharing.settle(idle=True)
    assert len(world.client.presented) == 2 and world.client.said == [([333], []), ([333], [])]
    world.client.company = 0
    world.sharing.store_changed(world.client)
    world.ledger.mark(Entry(1, 9, 999, 16), 1)
    world.sharing.settle(idle=True)
    assert not world.sharing.active and len(world.client.said) == 2


def test_an_engine_whose_weights_may_have_changed_shares_nothing_more(world):
    world.ledger.mark(Entry(1, 3, 333, 16), 1)
    in_company(world)
    world.sharing.leave()
    world.sharing.settle()
    families = [family for family, *_ in world.client.presented]
    assert len(families) == 2 and families[0] == KEYS.family != families[1]
    assert not world.sharing.active and world.sharing.names(b"") == (b"", 1) and world.ledger.find(333) is None
    world.client.session = 2
    world.sharing.store_changed(world.client)
    world.sharing.settle(idle=True)
    assert world.client.presented[2][0] != KEYS.family and not world.sharing.active and len(world.client.said) == 1
