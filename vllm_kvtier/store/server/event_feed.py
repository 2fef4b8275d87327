"""A feed of block locations, for engines that publish KV events. Clients follow namespaces and get batches of changes.

The store knows half of a block's hash; an event needs the whole hash, the parent's hash and the tokens. Engines attach
these as a *label*, whose content the store does not interpret. A block without a label is not reported. A label lives
as long as its block is in the store's memory (bit 1 of ``places``) or in a secondary tier (bit ``2 << i`` for the i-th
tier of Welcome), and while a tier that had it cannot be used.

A message holds the current locations, not a history of changes. A change marks the block for each follower of its
namespace; the location is read when the message is made. A slow follower therefore gets fewer, but correct, changes; a
very slow one gets its namespace again from the beginning. One message per follower is in flight until its ChangesAck.
Without followers the feed costs nothing.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.block_entry import READY, BlockEntry
from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.index.types import HASH_BYTES, BadRequest
from vllm_kvtier.store.tiers.base import Tier

BATCH_BLOCKS, BATCH_BYTES = 512, 4 << 20  # per message
MAX_WAITING = 1 << 16  # unsent changes of a namespace per follower; beyond, the namespace is sent again
# Bound of all labels; beyond it the oldest of the largest namespace are dropped, and their blocks no longer reported.
LABEL_BYTES = 256 << 20
OLDEST_LABELS = 1 << 14  # labels of a namespace that are listed together, to be dropped one by one
LABEL_COST = 300  # approximate bytes of a label beside its content
RECHECK_LABELS = 4096  # labels checked before other messages are handled
MAX_CHECKED_NAMES = 4096  # names checked per message: most may be of removed blocks
MAX_AWAITED_LABELS = 4096  # labels of blocks being written, before a check for those that were never committed

Key = tuple[int, bytes]  # (group, hash) within a namespace


@dataclass(eq=False, slots=True)
class _Label:
    content: bytes
    places: int
    hidden: int = 0  # bits of tiers that had the block and cannot be used now


@dataclass(eq=False)
class _Follower:
    """State of one client, by namespace. ``rest``: blocks to send because the namespace is sent from the beginning."""

    namespaces: dict[bytes, None] = field(default_factory=dict)  # the one sent last is last
    # OrderedDict: finding the first key of a dict is slow after many removals at its front.
    waiting: dict[bytes, OrderedDict[Key, None]] = field(default_factory=dict)
    rest: dict[bytes, Iterator[Key]] = field(default_factory=dict)
    anew: set[bytes] = field(default_factory=set)
    under_way: bool = False  # a message without its ChangesAck


class EventFeed:
    """On the server's reactor thread; it watches the index from the first follower on.

    tiers: secondary tiers, in Welcome's order. send_changes(client, message). soon: the reactor's ``call_soon``.
    """

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Tier],
        send_changes: Callable[[int, m.Changes], None],
        soon: Callable[[Callable[[], None]], None],
        label_bytes: int = LABEL_BYTES,
    ):
        self._index, self._tiers, self._send_changes, self._soon = index, tiers, send_changes, soon
        self._max_bytes = label_bytes
        self._bytes = 0
        self._labels: dict[bytes, dict[Key, _Label]] = {}  # by namespace; oldest first
        # By namespace: its oldest labels; some may be gone. Finding the first key of the dict itself is slow.
        self._oldest: dict[bytes, Iterator[Key]] = {}
        self._sizes: dict[bytes, int] = {}  # by namespace, its share of _bytes
        self._awaited: dict[tuple[bytes, Key], None] = {}  # labelled while they were being written
        self._max_awaited = MAX_AWAITED_LABELS
        self._followers: dict[int, _Follower] = {}
        self._watching = self._sending = False
        self._recheck: Iterator[tuple[bytes, Key]] | None = None

    # -- clients -------------------------------------------------------------------------------------------------

    def follow(self, client: int, namespaces: Sequence[bytes]) -> None:
        """Set the namespaces that a client follows. Raises BadRequest if one has other groups than the client's."""
        for namespace_id in namespaces:
            self._index.inspect(client, namespace_id, b"")
        if namespaces and not self._watching:
            self._watch()
        if not namespaces:
            self._followers.pop(client, None)
            return
        follower = self._followers.setdefault(client, _Follower())
        for namespace_id in set(follower.namespaces) - set(namespaces):
            for each in (follower.namespaces, follower.waiting, follower.rest):
                each.pop(namespace_id, None)
            follower.anew.discard(namespace_id)
        for namespace_id in namespaces:
            if namespace_id not in follower.namespaces:
                follower.namespaces[namespace_id] = None
                self._begin_anew(follower, namespace_id)
        self._send_soon()

    def acknowledged(self, client: int) -> None:
        """The client has handled the last message."""
        follower = self._followers.get(client)
        if follower is not None:
            follower.under_way = False
            self._send(client, follower)

    def left(self, client: int) -> None:
        self._followers.pop(client, None)

    def label(self, client: int, r: m.Labels) -> None:
        """Label blocks. Ignored: blocks that are not stored or have a label, and namespaces that the client does not
        follow (it may have stopped while the message was in flight). Raises BadRequest for lists of different
        lengths."""
        count = len(r.groups)
        if len(r.hashes) != count * HASH_BYTES or len(r.labels) != count:
            raise BadRequest(f"{count} blocks, {len(r.hashes)} bytes of hashes and {len(r.labels)} labels")
        follower = self._followers.get(client)
        if follower is None or r.namespace_id not in follower.namespaces:
            return
        for i, (group, content) in enumerate(zip(r.groups, r.labels, strict=True)):
            self._label(r.namespace_id, (group, r.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]), content)
        self._make_room()
        if len(self._awaited) > self._max_awaited:
            for namespace_id, key in list(self._awaited):
                if self._index.find(namespace_id, *key) is None:
                    self.moved(namespace_id, *key)
            self._max_awaited = max(MAX_AWAITED_LABELS, 2 * len(self._awaited))

    @property
    def labelled(self) -> tuple[int, int]:
        """(number of labels, their approximate bytes)."""
        return sum(map(len, self._labels.values())), self._bytes

    # -- changes -------------------------------------------------------------------------------------------------

    def stored(self, entries: Sequence[BlockEntry]) -> None:
        for entry in entries:
            self.moved(*entry.name)

    def used(self, entries: Sequence[BlockEntry]) -> None:
        """A use changes no location."""

    def gone(self, entry: BlockEntry) -> None:
        self.moved(*entry.name)

    def moved(self, namespace_id: bytes, group: int, block_hash: bytes) -> None:
        """The block's location may have changed."""
        key = group, block_hash
        label = self._labels.get(namespace_id, {}).get(key)
        if label is None:
            return
        entry = self._index.find(namespace_id, group, block_hash)
        places = self._places(namespace_id, key, entry)
        had = (label.places | label.hidden) & ~(places | 1)
        label.hidden = had & self._unusable() if had else 0
        if entry is None or entry.state is READY:
            self._awaited.pop((namespace_id, key), None)
            if not (places or label.hidden):
                self._remove(namespace_id, key)
        elif not places:
            self._awaited[namespace_id, key] = None  # it is nowhere now, and its write may be aborted
        if places != label.places:
            label.places = places
            self._note(namespace_id, key)

    def _places(self, namespace_id: bytes, key: Key, entry: BlockEntry | None) -> int:
        places = int(entry is not None and entry.state is READY)
        for i, tier in enumerate(self._tiers):
            if tier.keeps(namespace_id, *key):
                places |= 2 << i
        return places

    def _unusable(self) -> int:
        """Bits of the tiers that cannot be used now."""
        return sum(2 << i for i, tier in enumerate(self._tiers) if not tier.usable)

    def _watch(self) -> None:
        self._watching = True
        self._index.watches.append(self)
        for tier in self._tiers:
            tier.on_moved = self.moved
            tier.on_change = partial(self._tier_changed, tier.on_change)

    def _tier_changed(self, before: Callable[[], None]) -> None:
        before()
        self._recheck_all()

    def _recheck_all(self) -> None:
        """Check all locations, because a tier became usable or unusable."""
        running = self._recheck is not None
        # Lazy: a namespace's keys are copied when its check begins.
        self._recheck = (
            (namespace_id, key) for namespace_id, labels in list(self._labels.items()) for key in list(labels)
        )
        if not running:
            self._soon(self._recheck_some)

    def _recheck_some(self) -> None:
        some = list(itertools.islice(self._recheck or (), RECHECK_LABELS))
        for namespace_id, key in some:
            self.moved(namespace_id, *key)
        if len(some) < RECHECK_LABELS:
            self._recheck = None
        else:
            self._soon(self._recheck_some)

    # -- labels --------------------------------------------------------------------------------------------------

    def _label(self, namespace_id: bytes, key: Key, content: bytes) -> None:
        labels = self._labels.get(namespace_id)
        if labels is not None and key in labels:
            return
        entry = self._index.find(namespace_id, *key)
        places = self._places(namespace_id, key, entry)
        if entry is None and not places:
            return
        self._labels.setdefault(namespace_id, {})[key] = _Label(content, places)
        size = len(content) + LABEL_COST
        self._bytes += size
        self._sizes[namespace_id] = self._sizes.get(namespace_id, 0) + size
        if places:
            self._note(namespace_id, key)
        else:
            self._awaited[namespace_id, key] = None

    def _remove(self, namespace_id: bytes, key: Key) -> None:
        labels = self._labels[namespace_id]
        size = len(labels.pop(key).content) + LABEL_COST
        self._bytes -= size
        self._sizes[namespace_id] -= size
        if not labels:
            del self._labels[namespace_id], self._sizes[namespace_id]
            self._oldest.pop(namespace_id, None)

    def _make_room(self) -> None:
        """Drop labels of namespaces without followers first, then the oldest of the largest namespace, so that a new
        namespace gets its share."""
        if self._bytes <= self._max_bytes:
            return
        followed = set[bytes]().union(*(follower.namespaces for follower in self._followers.values()))
        order = sorted(self._labels, key=lambda each: (each in followed, -self._sizes[each]))
        for each in order:
            labels = self._labels[each]
            while labels:
                if self._bytes <= self._max_bytes:
                    return
                key = next(self._oldest.get(each, iter(())), None)
                if key is None:
                    self._oldest[each] = iter(list(itertools.islice(labels, OLDEST_LABELS)))
                elif key in labels:
                    self._remove(each, key)
                    self._awaited.pop((each, key), None)
                    self._note(each, key)

    # -- sending -------------------------------------------------------------------------------------------------

    def _note(self, namespace_id: bytes, key: Key) -> None:
        for follower in self._followers.values():
            if namespace_id in follower.namespaces:
                waiting = follower.waiting.setdefault(namespace_id, OrderedDict())
                waiting[key] = None
                if len(waiting) > MAX_WAITING:
                    self._begin_anew(follower, namespace_id)
                self._send_soon()

    def _begin_anew(self, follower: _Follower, namespace_id: bytes) -> None:
        follower.anew.add(namespace_id)
        follower.waiting.pop(namespace_id, None)
        follower.rest[namespace_id] = iter(list(self._labels.get(namespace_id, ())))

    def _send_soon(self) -> None:
        if not self._sending:
            self._sending = True
            self._soon(self._send_all)

    def _send_all(self) -> None:
        self._sending = False
        for client, follower in list(self._followers.items()):
            self._send(client, follower)

    def _send(self, client: int, follower: _Follower) -> None:
        if follower.under_way:
            return
        unsent = follower.anew, follower.waiting, follower.rest
        if not any(unsent):
            return
        namespace_id = next(each for each in follower.namespaces if any(each in some for some in unsent))
        # Move it to the end, so that a busy namespace does not starve the others.
        del follower.namespaces[namespace_id]
        follower.namespaces[namespace_id] = None
        labels, nbytes = self._labels.get(namespace_id, {}), 0
        batch: dict[Key, _Label | None] = {}
        for key, is_rest in itertools.islice(self._next(follower, namespace_id), MAX_CHECKED_NAMES):
            label = labels.get(key)
            if label is not None and not label.places:
                label = None  # being written
            if label is None and is_rest:
                continue  # it was never reported
            batch[key] = label
            nbytes += len(label.content) if label is not None else 0
            if len(batch) >= BATCH_BLOCKS or nbytes >= BATCH_BYTES:
                break
        anew = namespace_id in follower.anew
        follower.anew.discard(namespace_id)
        if not batch and not anew:
            self._send_soon()  # there may be more, of this namespace or another
            return
        follower.under_way = True
        self._send_changes(
            client,
            m.Changes(
                namespace_id,
                anew,
                [group for group, _ in batch],
                b"".join(block_hash for _, block_hash in batch),
                [label.places if label is not None else 0 for label in batch.values()],
                [label.content if label is not None else b"" for label in batch.values()],
            ),
        )

    @staticmethod
    def _next(follower: _Follower, namespace_id: bytes) -> Iterator[tuple[Key, bool]]:
        """(key, whether it is of ``rest``) of unsent changes; removes them from the follower."""
        waiting = follower.waiting.get(namespace_id)
        while waiting:
            yield waiting.popitem(last=False)[0], False
        follower.waiting.pop(namespace_id, None)
        for key in follower.rest.get(namespace_id, ()):
            yield key, True
        follower.rest.pop(namespace_id, None)
