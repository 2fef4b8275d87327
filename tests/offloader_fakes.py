"""Stand-ins for the node store and the reactor, under a real Offloader."""

from types import SimpleNamespace

import numpy as np
from tier_fakes import FakePending

from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.protocol import EXISTS, HASH_BYTES, MAX_ITEMS, NO_PARENT, NO_PARENT_STORED, NO_ROOM, Reserved


class FakeReactor:
    """Queued calls that the test runs."""

    def __init__(self):
        self.queue = []

    def call_soon(self, callback):
        self.queue.append(callback)

    def call_within(self, seconds, callback):
        self.queue.append(callback)

    def run(self):
        while self.queue:
            self.queue.pop(0)()


class FakeTier:
    """A store whose answers the test sends; it records the block of each slot."""

    def by_writers(self, items):
        return [(items, set(self.writers[items[0].group]))]

    def slot_array(self, slots):
        return np.array(slots, np.int64)

    def __init__(self, writers, full=()):
        self.writers, self.instance, self._session = writers, "s1", 1
        self.codecs, self.logical = [SimpleNamespace(name="none") for _ in writers], [100 for _ in writers]
        self.up, self.full = True, full
        self.asked = []  # (pending, items, limit)
        self.entries = {}  # (space, group, hash) -> slot
        self.items = {}  # slot -> SimpleNamespace
        self.next_slot = 0
        self.forgotten = set()  # (space, group, hash) that were stored once
        self.violations = []  # raised once already, where it may have been caught

    @property
    def session(self):
        return self._session if self.up else 0

    def limit(self):
        return 1 << 30 if self.up else 0

    def namespace_id(self, lora_fingerprint):
        return b"space".ljust(HASH_BYTES) if not lora_fingerprint else lora_fingerprint[:8].ljust(HASH_BYTES)

    def reserve(self, namespace_id, tenant, groups, hashes, parents):
        assert len(groups) * HASH_BYTES == len(hashes) == len(parents) and groups
        assert len(groups) <= MAX_ITEMS
        pending = FakePending(self._session)
        items = [
            SimpleNamespace(
                namespace_id=namespace_id, tenant=tenant, group=g, hash=hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES],
                parent=parents[i * HASH_BYTES : (i + 1) * HASH_BYTES], session=self._session, outcome=None,
                copied=set(),
            )
            for i, g in enumerate(groups)
        ]  # fmt: skip
        if self.up:
            self.asked.append((pending, items))
        else:
            pending.resolve(Failed("gone"))
        return pending

    def answer(self, at, full_groups, room=lambda: True):
        """Answer one question as the index would."""
        pending, items = self.asked.pop(at)
        out = []
        for item in items:
            key, parent = (item.namespace_id, item.group, item.hash), (item.namespace_id, item.group, item.parent)
            if key in self.entries:
                out.append(EXISTS)
            elif item.group in full_groups and item.parent != NO_PARENT and parent not in self.entries:
                out.append(NO_PARENT_STORED)
            elif not room():
                out.append(NO_ROOM)
            else:
                self.next_slot += 1
                self.entries[key] = self.next_slot
                self.items[self.next_slot] = item
                out.append(self.next_slot)
        pending.resolve(Reserved(1, out))

    def forget(self, slots):
        """Evicted, or its writer gave up."""
        for key in [k for k, slot in self.entries.items() if slot in slots]:
            del self.entries[key]
            self.forgotten.add(key)

    def die(self, instance):
        """All connections end; what was asked fails."""
        self.up = False
        reserved = [slot for slot, item in self.items.items() if item.outcome is None]
        for slot in reserved:
            self.items[slot].outcome = "died"
        self._drop(reserved)
        asked, self.asked = self.asked, []
        for pending, _ in asked:
            pending.resolve(Failed("gone"))
        if instance != self.instance:
            self.forgotten |= set(self.entries)
            self.entries.clear()
        self.next_instance = instance

    def live(self):
        self.up, self.instance, self._session = True, self.next_instance, self._session + 1

    def end(self, slots, session, outcome):
        try:
            self._end(slots, session, outcome)
        except AssertionError as error:
            self.violations.append(error)
            raise

    def _end(self, slots, session, outcome):
        for slot in slots:
            item = self.items[slot]
            assert item.session == session, "a slot is only of use on the connection that reserved it"
            if session != self.session:
                assert outcome == "aborted", "a message without receiver would count as stored"
                continue
            assert item.outcome is None, f"slot {slot} ends twice"
            item.outcome = outcome
            if outcome == "committed":
                assert item.copied == self.writers[item.group], "committed before every part was written"
                parent = (item.namespace_id, item.group, item.parent)
                if item.group in self.full and item.parent != NO_PARENT and parent not in self.forgotten:
                    assert self.items[self.entries[parent]].outcome == "committed", "a gap before it"

    def commit(self, slots, session):
        self.end(slots, session, "committed")

    def abort(self, slots, session):
        self.end(slots, session, "aborted")
        self._drop(slots)

    def _drop(self, slots):
        """They were never stored."""
        forgotten = set(self.forgotten)
        self.forget(set(slots))
        self.forgotten = forgotten
