"""What the node store learns of this engine's cached blocks, and when: only while other engines are present."""

from types import SimpleNamespace

import numpy as np
import pytest
from cache_groups import cache_groups

from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumEntry, ChecksumIndex, ContentKeys
from vllm_kvtier.scheduler.leases import peer_directory_client as module
from vllm_kvtier.scheduler.leases.peer_directory_client import PeerDirectoryClient

GROUPS = cache_groups([(4, 8), (16, None)])  # a window, and the group that stands for prefixes
KEYS = ContentKeys(5)


class Client:
    def __init__(self):
        self.connected, self.session, self.peer_count = True, 1, 0
        self.presented, self.said, self.forget = [], [], False

    def present(self, family, host, port, instance, session=1):
        self.presented.append((family, host, port, instance))

    def send_cached(self, added, gone, session, anew):
        if session == self.session:
            assert anew is (not self.said or self.forget)
            self.forget = False
            self.said.append(tuple(np.frombuffer(keys, "<u8").tolist() for keys in (added, gone)))


@pytest.fixture
def world(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    checksum_index, woken = ChecksumIndex([size for size, _ in GROUPS]), []
    sharing = PeerDirectoryClient(checksum_index, lambda: KEYS, GROUPS, 4, "me/1", lambda: woken.append(1))
    return SimpleNamespace(now=now, checksum_index=checksum_index, woken=woken, sharing=sharing, client=Client())


def in_company(world):
    world.sharing.opened(("10.0.0.1", 77))
    world.sharing.store_changed(world.client)
    world.client.peer_count = 1
    world.sharing.store_changed(world.client)
    world.sharing.publish_changes()


def test_directory_client_alone_sends_and_keeps_nothing(world):
    world.sharing.store_changed(world.client)
    assert not world.client.presented, "no engine could reach us yet"
    world.sharing.opened(("10.0.0.1", 77))
    assert world.client.presented == [(KEYS.compat_id, "10.0.0.1", 77, "me/1")]
    world.checksum_index.mark(ChecksumEntry(1, 3, 333, 16), 1)
    world.sharing.publish_changes()
    world.sharing.publish_changes(idle=True)
    assert not world.sharing.active and not world.client.said and not world.checksum_index.published and not world.woken
    assert world.sharing.key_params(b"") == (b"", 1)


def test_directory_client_sends_snapshot_then_changes(world):
    world.checksum_index.mark(ChecksumEntry(1, 3, 333, 16), 1)
    world.checksum_index.mark(ChecksumEntry(1, 4, 444, 9), 1)  # not whole
    world.checksum_index.mark(ChecksumEntry(0, 5, 555, 4), 1)  # of the other group
    in_company(world)
    assert world.woken, "an idle engine would not look"
    assert world.sharing.active and world.client.said == [([333], [])]
    assert world.sharing.key_params(b"v") == (KEYS.key_mask(1, b"v"), 4)
    block_hash = bytes(range(32))
    head, mix = int.from_bytes(block_hash[:8], "little"), int.from_bytes(KEYS.key_mask(1, b"v"), "little")
    assert head ^ mix == KEYS.key(block_hash, 1, b"v")
    world.checksum_index.mark(ChecksumEntry(1, 6, 666, 16), 2)
    world.sharing.publish_changes()
    assert len(world.client.said) == 1, "a moment later is soon enough"
    world.checksum_index.remove([3])
    world.now[0] += 1
    world.sharing.publish_changes()
    assert world.client.said[1] == ([666], [333])
    world.checksum_index.remove([6])
    world.sharing.publish_changes(idle=True)
    assert world.client.said[2] == ([], [666]), "no later message would say so while the engine sleeps"
    world.sharing.publish_changes(idle=True)
    assert len(world.client.said) == 3


def test_directory_client_sends_many_changes_at_once(world):
    in_company(world)
    assert world.client.said == [([], [])], "nothing, but anew"
    world.checksum_index.mark(ChecksumEntry(1, 1, 1, 16), 1)
    world.now[0] += 1
    world.sharing.publish_changes()
    for n in range(2, 300):
        world.checksum_index.mark(ChecksumEntry(1, n, n, 16), 1)
    world.sharing.publish_changes()
    assert [len(added) for added, _ in world.client.said[1:]] == [1, 298]


def test_directory_client_resends_on_reconnect_and_stops_when_alone(world):
    world.checksum_index.mark(ChecksumEntry(1, 3, 333, 16), 1)
    in_company(world)
    world.client.connected, world.client.peer_count = False, 0
    world.sharing.store_changed(world.client)
    world.sharing.publish_changes()
    assert not world.sharing.active and not world.checksum_index.published
    world.client.connected, world.client.session, world.client.forget = True, 2, True
    world.sharing.store_changed(world.client)
    world.client.peer_count = 2
    world.sharing.store_changed(world.client)
    world.sharing.publish_changes(idle=True)
    assert len(world.client.presented) == 2 and world.client.said == [([333], []), ([333], [])]
    world.client.peer_count = 0
    world.sharing.store_changed(world.client)
    world.checksum_index.mark(ChecksumEntry(1, 9, 999, 16), 1)
    world.sharing.publish_changes(idle=True)
    assert not world.sharing.active and len(world.client.said) == 2


def test_directory_client_after_leave_shares_nothing(world):
    world.checksum_index.mark(ChecksumEntry(1, 3, 333, 16), 1)
    in_company(world)
    world.sharing.leave()
    world.sharing.publish_changes()
    families = [family for family, *_ in world.client.presented]
    assert len(families) == 2 and families[0] == KEYS.compat_id != families[1]
    assert not world.sharing.active and world.sharing.key_params(b"") == (b"", 1)
    assert world.checksum_index.find(333) is None
    world.client.session = 2
    world.sharing.store_changed(world.client)
    world.sharing.publish_changes(idle=True)
    assert world.client.presented[2][0] != KEYS.compat_id and not world.sharing.active and len(world.client.said) == 1
