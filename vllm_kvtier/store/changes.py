"""What becomes of blocks, for engines that publish KV events: who follows which space is told, in batches.

The store knows a block by half of its hash; an event needs all of it, its parent's, and its tokens. Who knows these
hangs a *label* on the block: bytes that only engines understand. A block without a label is told to nobody. Labels live
here, beside the index, as long as their block can be found anywhere: in the store's memory (bit 1 of its ``places``) or
in one of the tiers below (bit ``2 << i`` for the i-th that Welcome names).

What is told is not what happened but what is so when the message goes out: at each change the block's name is noted for
those who follow its space, and looked at when it is their turn. So a follower that is slow is told less, not wrong
things; one that is very slow is told all of a space anew. One message a follower is under way until it says Heard.
Nothing here costs anything before the first engine follows.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm_kvtier.store import messages as m
from vllm_kvtier.store.blocks import Watch
from vllm_kvtier.store.entries import READY, Entry
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower.base import Tier
from vllm_kvtier.store.records import HASH, BadRequest

BATCH_BLOCKS, BATCH_BYTES = 512, 4 << 20  # of one message
MOST_WAITING = 1 << 16  # changes of a space that a follower has not been told of; beyond, it begins anew
# Of all labels; beyond, the oldest of the space with most go, and their blocks are told no more until labelled again.
LABEL_BYTES = 256 << 20
OLDEST = 1 << 14  # labels of a space that are looked up together, to go one after the other
LABEL_COST = 300  # bytes beside its content, about
RECHECK = 4096  # labels looked at in one go
LOOKS = 4096  # names looked at for one message: most may be of what is gone
AWAITED = 4096  # labels of blocks being written, before those that never came are looked for

Key = tuple[int, bytes]  # (group, hash), in a space


class _Both:
    """Two who watch the index."""

    def __init__(self, first: Watch, second: Watch):
        self._first, self._second = first, second

    def stored(self, entries: Sequence[Entry]) -> None:
        self._first.stored(entries)
        self._second.stored(entries)

    def used(self, entries: Sequence[Entry]) -> None:
        self._first.used(entries)

    def gone(self, entry: Entry) -> None:
        self._first.gone(entry)
        self._second.gone(entry)


@dataclass(eq=False, slots=True)
class _Label:
    content: bytes
    places: int


@dataclass(eq=False)
class _Follower:
    """Of one client; all by space. ``rest``: what it is to be told of because it follows newly, or begins ``anew``."""

    spaces: dict[bytes, None] = field(default_factory=dict)  # the one that was told of last, last
    # The first of a dict is found slowly when many before it were taken: not so in these, which are slow to list.
    waiting: dict[bytes, OrderedDict[Key, None]] = field(default_factory=dict)
    rest: dict[bytes, Iterator[Key]] = field(default_factory=dict)
    anew: set[bytes] = field(default_factory=set)
    under_way: bool = False  # a message that it has not Heard


class Changes:
    """On the server's reactor thread; ``index.watch`` once somebody follows.

    tiers: below memory, in Welcome's order. tell(client, message) sends. soon: calls a function after whatever waits.
    """

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Tier],
        tell: Callable[[int, m.Changes], None],
        soon: Callable[[Callable[[], None]], None],
        label_bytes: int = LABEL_BYTES,
    ):
        self._index, self._tiers, self._tell, self._soon = index, tiers, tell, soon
        self._most = label_bytes
        self._bytes = 0
        self._labels: dict[bytes, dict[Key, _Label]] = {}  # by space; oldest first
        # By space: its oldest, some of which may be gone meanwhile. The first of a dict is found slowly when many went.
        self._oldest: dict[bytes, Iterator[Key]] = {}
        self._sizes: dict[bytes, int] = {}  # by space, its part of _bytes
        self._awaited: dict[tuple[bytes, Key], None] = {}  # labelled while they were being written
        self._most_awaited = AWAITED
        self._followers: dict[int, _Follower] = {}
        self._watching = self._sending = False
        self._recheck: Iterator[tuple[bytes, Key]] | None = None

    # -- clients -------------------------------------------------------------------------------------------------

    def follow(self, client: int, spaces: Sequence[bytes]) -> None:
        """From now on these and no others. Raises BadRequest for a space of other groups than the client's."""
        for space in spaces:
            self._index.inspect(client, space, b"")
        if spaces and not self._watching:
            self._watch()
        if not spaces:
            self._followers.pop(client, None)
            return
        follower = self._followers.setdefault(client, _Follower())
        for space in set(follower.spaces) - set(spaces):
            for each in (follower.spaces, follower.waiting, follower.rest):
                each.pop(space, None)
            follower.anew.discard(space)
        for space in spaces:
            if space not in follower.spaces:
                follower.spaces[space] = None
                self._begin_anew(follower, space)
        self._send_soon()

    def heard(self, client: int) -> None:
        """It is through with the last message."""
        follower = self._followers.get(client)
        if follower is not None:
            follower.under_way = False
            self._send(client, follower)

    def left(self, client: int) -> None:
        self._followers.pop(client, None)

    def label(self, client: int, r: m.Labels) -> None:
        """What is not there, or has a label, gets none; nor does anything of a space that the client does not follow:
        it may have left it while the message was under way. Raises BadRequest for lists of different lengths."""
        count = len(r.groups)
        if len(r.hashes) != count * HASH or len(r.labels) != count:
            raise BadRequest(f"{count} blocks, {len(r.hashes)} bytes of hashes and {len(r.labels)} labels")
        follower = self._followers.get(client)
        if follower is None or r.space not in follower.spaces:
            return
        for i, (group, content) in enumerate(zip(r.groups, r.labels, strict=True)):
            self._label(r.space, (group, r.hashes[i * HASH : (i + 1) * HASH]), content)
        self._make_room()
        if len(self._awaited) > self._most_awaited:
            for space, key in list(self._awaited):
                if self._index.find(space, *key) is None:
                    self.moved(space, *key)
            self._most_awaited = max(AWAITED, 2 * len(self._awaited))

    @property
    def labelled(self) -> tuple[int, int]:
        """(blocks that have a label, bytes these take, about)."""
        return sum(map(len, self._labels.values())), self._bytes

    # -- what happens --------------------------------------------------------------------------------------------

    def stored(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.moved(entry.space.name, entry.group, entry.hash)

    def used(self, entries: Sequence[Entry]) -> None:
        """Nothing that anybody is told."""

    def gone(self, entry: Entry) -> None:
        self.moved(entry.space.name, entry.group, entry.hash)

    def moved(self, space: bytes, group: int, block_hash: bytes) -> None:
        """The block may lie elsewhere now."""
        key = group, block_hash
        label = self._labels.get(space, {}).get(key)
        if label is None:
            return
        entry = self._index.find(space, group, block_hash)
        places = self._places(space, key, entry)
        if entry is None or entry.state is READY:
            self._awaited.pop((space, key), None)
            if not places:
                self._drop(space, key)
        elif not places:
            self._awaited[space, key] = None  # where it lay it is no more, and what is being written may be given up
        if places != label.places:
            label.places = places
            self._note(space, key)

    def _places(self, space: bytes, key: Key, entry: Entry | None) -> int:
        places = int(entry is not None and entry.state is READY)
        for i, tier in enumerate(self._tiers):
            if tier.keeps(space, *key):
                places |= 2 << i
        return places

    def _watch(self) -> None:
        self._watching = True
        self._index.watch = self if self._index.watch is None else _Both(self._index.watch, self)
        for tier in self._tiers:
            tier.on_moved = self.moved
            before = tier.on_change
            tier.on_change = lambda before=before: (before(), self._recheck_all())

    def _recheck_all(self) -> None:
        """A tier is usable again, or no more."""
        running = self._recheck is not None
        # A space's keys are copied when it is its turn.
        self._recheck = ((space, key) for space, labels in list(self._labels.items()) for key in list(labels))
        if not running:
            self._soon(self._recheck_some)

    def _recheck_some(self) -> None:
        some = list(itertools.islice(self._recheck, RECHECK))
        for space, key in some:
            self.moved(space, *key)
        if len(some) < RECHECK:
            self._recheck = None
        else:
            self._soon(self._recheck_some)

    # -- labels --------------------------------------------------------------------------------------------------

    def _label(self, space: bytes, key: Key, content: bytes) -> None:
        labels = self._labels.get(space)
        if labels is not None and key in labels:
            return
        entry = self._index.find(space, *key)
        places = self._places(space, key, entry)
        if entry is None and not places:
            return
        self._labels.setdefault(space, {})[key] = _Label(content, places)
        size = len(content) + LABEL_COST
        self._bytes += size
        self._sizes[space] = self._sizes.get(space, 0) + size
        if places:
            self._note(space, key)
        else:
            self._awaited[space, key] = None

    def _drop(self, space: bytes, key: Key) -> None:
        labels = self._labels[space]
        size = len(labels.pop(key).content) + LABEL_COST
        self._bytes -= size
        self._sizes[space] -= size
        if not labels:
            del self._labels[space], self._sizes[space]
            self._oldest.pop(space, None)

    def _make_room(self) -> None:
        """Those of spaces that nobody follows go first, then the oldest of the space that has most: a space that is new
        where another has filled all has its turn, too."""
        if self._bytes <= self._most:
            return
        followed = set().union(*(follower.spaces for follower in self._followers.values()))
        order = sorted(self._labels, key=lambda each: (each in followed, -self._sizes[each]))
        for each in order:
            labels = self._labels[each]
            while labels:
                if self._bytes <= self._most:
                    return
                key = next(self._oldest.get(each, iter(())), None)
                if key is None:
                    self._oldest[each] = iter(list(itertools.islice(labels, OLDEST)))
                elif key in labels:
                    self._drop(each, key)
                    self._awaited.pop((each, key), None)
                    self._note(each, key)

    # -- telling -------------------------------------------------------------------------------------------------

    def _note(self, space: bytes, key: Key) -> None:
        for follower in self._followers.values():
            if space in follower.spaces:
                waiting = follower.waiting.setdefault(space, OrderedDict())
                waiting[key] = None
                if len(waiting) > MOST_WAITING:
                    self._begin_anew(follower, space)
                self._send_soon()

    def _begin_anew(self, follower: _Follower, space: bytes) -> None:
        follower.anew.add(space)
        follower.waiting.pop(space, None)
        follower.rest[space] = iter(list(self._labels.get(space, ())))

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
        of_interest = follower.anew, follower.waiting, follower.rest
        if not any(of_interest):
            return
        space = next(each for each in follower.spaces if any(each in some for some in of_interest))
        del follower.spaces[space]  # one of which there is always something to tell leaves the others their turns
        follower.spaces[space] = None
        labels, nbytes = self._labels.get(space, {}), 0
        told: dict[Key, _Label | None] = {}
        for key, is_rest in itertools.islice(self._next(follower, space), LOOKS):
            label = labels.get(key)
            if label is not None and not label.places:
                label = None  # being written
            if label is None and is_rest:
                continue  # nobody was told that it is there
            told[key] = label
            nbytes += len(label.content) if label is not None else 0
            if len(told) >= BATCH_BLOCKS or nbytes >= BATCH_BYTES:
                break
        anew = space in follower.anew
        follower.anew.discard(space)
        if not told and not anew:
            self._send_soon()  # there may be more, of this space or another
            return
        follower.under_way = True
        self._tell(
            client,
            m.Changes(
                space,
                anew,
                [group for group, _ in told],
                b"".join(block_hash for _, block_hash in told),
                [label.places if label is not None else 0 for label in told.values()],
                [label.content if label is not None else b"" for label in told.values()],
            ),
        )

    @staticmethod
    def _next(follower: _Follower, space: bytes) -> Iterator[tuple[Key, bool]]:
        """Taken off the follower as they come."""
        waiting = follower.waiting.get(space)
        while waiting:
            yield waiting.popitem(last=False)[0], False
        follower.waiting.pop(space, None)
        for key in follower.rest.get(space, ()):
            yield key, True
        follower.rest.pop(space, None)
