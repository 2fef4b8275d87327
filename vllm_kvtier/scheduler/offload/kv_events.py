"""KV events of the tiers, for vLLM to publish: which blocks are in the node store's memory, on its disk, in its bucket.

The store sends this engine the tiers of the labelled blocks of its namespaces (``store/server/event_feed.py``): the
*view*, kept on the reactor's thread. Another table has what vLLM published. ``take`` compares a bounded number of
blocks that may differ, and returns the events that make the second table equal to the first. So nothing overflows: a
block that came and went meanwhile has no event, and a store that disconnects leaves an empty view.

A *label* is what an event needs beside the store's name of a block. The engine that stores or loads a block makes it,
and any engine of the namespace reads it.
"""

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from vllm_kvtier.cache_kinds import CacheGroup
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.protocol import HASH_BYTES, MAX_FOLLOWED, MAX_LABEL, Changes
from vllm_kvtier.telemetry.events import MEMORY, PLACES, STORED, TIERS, Label, Place, Removed, Stored
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

MAX_BLOCKS_PER_TAKE = 512  # blocks a step: what a large one fills
MAX_LABELS, MAX_LABEL_BYTES = 1024, 4 << 20  # labels a message
UNUSED_SECONDS = 600.0  # after which a namespace that was not used gives way to another one


Key = tuple[int, bytes]  # (group, hash as the store cuts it), in a namespace
EventKeys = tuple[Any, Any]  # lora name, extra keys
Raw = tuple[int, bytes, bytes, bytes, EventKeys]  # group, hash, parent, tokens, keys
_NOWHERE: tuple[int, Label | None] = 0, None

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Label)


class Events:
    """``hash_block_size``: tokens a block hash covers. ``wake`` has vLLM's scheduler thread take what there is, if it
    is idle."""

    def __init__(
        self, groups: Sequence[CacheGroup], hash_block_size: int, reactor: Reactor, wake: Callable[[], None]
    ):
        self._groups, self._hash_block_size, self._reactor, self._wake = groups, hash_block_size, reactor, wake
        self._client: StoreClient | None = None
        self._followed = 0  # session of the store's connection that knows what we follow
        self._bits: list[int] = []  # by bit of the store's places
        self._lock = threading.Lock()  # guards what is below
        self._namespaces: dict[bytes, None] = {}
        self._used: dict[bytes, float] = {}  # when each was last joined; written without the lock
        self._view: dict[bytes, dict[Key, tuple[int, Label]]] = {}  # by namespace: places of a block
        self._published: dict[tuple[bytes, Key], tuple[int, Label]] = {}  # what of the view vLLM knows
        # Two namespaces may have blocks of one hash, as before and after a change of weights. It is published while one
        # is there.
        self._claims: dict[tuple[bytes, int, int], int] = {}  # (hash, group, place's bit) -> namespaces
        # True: publish again in any case. A dict would find its first item slowly when many were taken.
        self._differing: OrderedDict[tuple[bytes, Key], bool] = OrderedDict()
        self._sweeps: deque[Iterator[tuple[tuple[bytes, Key], bool]]] = deque()  # more of these
        self._repeating: Iterator[tuple[tuple[bytes, Key], bool]] | None = None  # one of them, of ``publish_again``
        self._woken = False
        self.too_long = 0  # labels

    # -- reactor's thread ----------------------------------------------------------------------------------------

    def store_changed(self, client: StoreClient, reachable: bool) -> None:
        """``reachable``: this engine's workers can load what the store has."""
        self._client = client
        if not client.connected:
            if self._followed:
                self._followed = 0
                self._lose_all()
        elif reachable and self._followed != client.session:
            if self._followed:
                self._lose_all()
            self._followed = client.session
            self._bits = [MEMORY, *(TIERS.get(name, 0) for name in client.tiers)]
            client.on_changes = self.changed
            client.follow(list(self._namespaces), client.session)

    def changed(self, changes: Changes) -> None:
        """From the store: its present state of these blocks."""
        malformed = 0
        with self._lock:
            if changes.namespace_id not in self._namespaces or not self._followed:
                return
            if changes.anew:
                self._sweep(changes.namespace_id)
            view = self._view.setdefault(changes.namespace_id, {})
            for i, (group, places, content) in enumerate(
                zip(changes.groups, changes.places, changes.labels, strict=True)
            ):
                key = group, changes.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
                mine = sum(bit for j, bit in enumerate(self._bits) if places >> j & 1)
                label = self._read(key, content, view) if mine else None
                if label is None:
                    malformed += bool(mine)
                    mine = 0
                    view.pop(key, None)
                else:
                    view[key] = mine, label
                if self._published.get((changes.namespace_id, key), _NOWHERE)[0] != mine:
                    self._differing.setdefault((changes.namespace_id, key), False)
        if malformed:
            logger.warning("kvtier: %d blocks are not published: the store tells nonsense of them", malformed)
        self._look()

    def publish_again(self) -> None:
        """Publish all again: vLLM publishes that all of this engine's blocks are gone, and some readers take that for
        the blocks of all tiers."""

        def repeat() -> None:
            with self._lock:
                # All that vLLM knows, not the view: a lost connection may have dropped the view, and it may be back,
                # equal, before the sweep compares it: nothing would differ. Copied here, not on the scheduler's thread.
                names = [(name, True) for name in self._published]
                if self._repeating is not None and self._repeating in self._sweeps:  # its rest is among these names
                    self._sweeps.remove(self._repeating)
                self._repeating = iter(names)
                self._sweeps.append(self._repeating)
            self._look()

        self._reactor.call_soon(repeat)

    def _read(self, key: Key, content: bytes, view: dict[Key, tuple[int, Label]]) -> Label | None:
        """A label that another process made; None if it is malformed."""
        try:
            label = _decoder.decode(content)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None
        if key[0] >= len(self._groups) or len(label.tokens) != 4 * self._groups[key[0]][0]:
            return None
        if label.hash[:HASH_BYTES] != key[1]:
            return None
        before = view.get((key[0], label.parent[:HASH_BYTES]), _NOWHERE)[1]
        if before is not None and before.hash == label.parent:
            force_setattr(label, "parent", before.hash)  # one copy of it
        return label

    def _lose_all(self) -> None:
        with self._lock:
            for namespace_id in list(self._view):
                self._sweep(namespace_id)
        self._look()

    def _sweep(self, namespace_id: bytes) -> None:
        """Drop the view of a namespace. ``take`` compares its blocks later."""
        before = self._view.pop(namespace_id, None)
        if before:
            # No generator: that would be closed with the one in ``_next``, when a part of it has been taken.
            self._sweeps.append(map(lambda key: ((namespace_id, key), False), before))  # noqa: C417

    def _look(self) -> None:
        with self._lock:
            if self._woken or not (self._differing or self._sweeps):
                return
            self._woken = True
        self._wake()

    # -- any thread ----------------------------------------------------------------------------------------------

    def join(self, namespace_id: bytes) -> None:
        """This engine loads from and stores to this namespace from now on."""
        self._used[namespace_id] = time.monotonic()
        if namespace_id in self._namespaces:
            return
        with self._lock:
            if not namespace_id or (len(self._namespaces) >= MAX_FOLLOWED and not self._drop_unused()):
                return
            self._namespaces[namespace_id], self._used[namespace_id] = None, time.monotonic()
        self._reactor.call_soon(self._follow)

    def _drop_unused(self) -> bool:
        """Leave the namespace that was unused for longest. False if all are used."""
        self._used = {each: self._used.get(each, 0.0) for each in self._namespaces}
        oldest = min(self._used, key=self._used.__getitem__)
        if time.monotonic() - self._used[oldest] < UNUSED_SECONDS:
            return False
        del self._namespaces[oldest]
        self._sweep(oldest)
        left = list(self._namespaces)
        self._reactor.call_soon(lambda: self._follow(left))  # if it is joined again, the store sends all of it
        return True

    def leave(self) -> None:
        """This engine leaves all namespaces that it joined."""
        with self._lock:
            self._namespaces.clear()
            for namespace_id in list(self._view):
                self._sweep(namespace_id)
        self._reactor.call_soon(lambda: self._follow([]))  # if it is joined again, the store sends all of it
        self._look()

    def _follow(self, namespaces: list[bytes] | None = None) -> None:
        if self._client is not None and self._followed:
            self._client.follow(list(self._namespaces) if namespaces is None else namespaces, self._followed)

    # -- scheduler's thread --------------------------------------------------------------------------------------

    def describe(self, namespace_id: bytes, request: Any, group: int, blocks: Iterable[int]) -> list[Raw]:
        """The parts of labels for these blocks of a request, in rising order, without those that have one already."""
        size = self._groups[group][0]
        per, hashes, known = size // self._hash_block_size, request.block_hashes, self._view.get(namespace_id, {})
        rows = [i for i in blocks if (group, hashes[(i + 1) * per - 1][:HASH_BYTES]) not in known]
        if not rows:
            return []
        first, last = rows[0], rows[-1] + 1
        tokens = np.array(request.all_token_ids[first * size : last * size], "<i4").tobytes()
        beside: Iterable[EventKeys] = itertools.repeat((None, None))
        if not vr.is_plain(request):
            beside = vr.event_keys(request, ((i * size, (i + 1) * size) for i in rows))
        return [
            (
                group,
                hashes[(i + 1) * per - 1],
                hashes[i * per - 1] if i else b"",
                tokens[4 * size * (i - first) : 4 * size * (i - first + 1)],
                keys,
            )
            for i, keys in zip(rows, beside, strict=False)
        ]

    def label_of(self, namespace_id: bytes, group: int, block_hash: bytes) -> Label | None:
        """The block's label in the view. The store may have dropped both just now: see ``send_labels_again``."""
        found = self._view.get(namespace_id, {}).get((group, block_hash[:HASH_BYTES]))
        return None if found is None else found[1]

    def send_labels_again(self, namespace_id: bytes, labels: Iterable[tuple[int, Label]]) -> None:
        """``labels``: (group, label) of blocks that the store lacked after all, and reserved slots for."""
        self.send_labels(
            namespace_id, [(g, x.hash, x.parent, x.tokens, (x.lora_name, x.extra)) for g, x in labels]
        )

    def send_labels(self, namespace_id: bytes, raws: list[Raw]) -> None:
        """Label these blocks, after their slots were reserved, or if the store has them."""
        if raws:
            self._reactor.call_soon(lambda: self._label(namespace_id, raws))

    def loaded(self, namespace_id: bytes, request: Any, start: int, end: int) -> None:
        """The request's tokens [start, end) came from the store: send the labels that it lacks, as after a restart
        with a disk."""
        for group, (size, _) in enumerate(self._groups):
            last = min(end // size, len(request.block_hashes) * self._hash_block_size // size)
            self.send_labels(namespace_id, self.describe(namespace_id, request, group, range(start // size, last)))

    @property
    def behind(self) -> bool:
        """There may be more to take."""
        return bool(self._differing or self._sweeps)

    def take(self, most: int = MAX_BLOCKS_PER_TAKE) -> list[Removed | Stored]:
        """The next events, after comparing ``most`` blocks at most. [] if all are published, and also while ``behind``,
        if these blocks have none."""
        if not self.behind:
            self._woken = False
            return []
        removed: dict[tuple[int, Place], Removed] = {}
        stored = _Runs()
        with self._lock:
            self._woken = False
            for name, again in itertools.islice(self._next(), most):
                self._compare(name, again, removed, stored)
        # Removed first: if a block is still in the other kind of storage, that event follows.
        return [*removed.values(), *stored.all]

    def _next(self) -> Iterator[tuple[tuple[bytes, Key], bool]]:
        while self._differing:
            yield self._differing.popitem(last=False)
        while self._sweeps:
            yield from self._sweeps[0]
            self._sweeps.popleft()

    def _compare(
        self, name: tuple[bytes, Key], again: bool, removed: dict[tuple[int, Place], Removed], stored: "_Runs"
    ) -> None:
        namespace_id, (group, _) = name
        now = self._view.get(namespace_id, {}).get(name[1])
        places, label = now or _NOWHERE
        before, known = self._published.pop(name, _NOWHERE)
        whole = known.hash if known is not None else b""
        gone = before & ~places
        if now is not None:
            if before and now[1].hash != whole:  # labelled anew, and one label is wrong: another block of this name
                gone = before
            self._published[name] = now
        repeat = places & before if again else 0
        for bit in _bits(gone):
            claim = whole, group, bit
            self._claims[claim] -= 1
            if self._claims[claim]:
                continue
            del self._claims[claim]
            place = PLACES[bit.bit_length() - 1]
            removed.setdefault((group, place), Removed(group, place, [])).hashes.append(whole)
            if bit & STORED:
                repeat |= places & before & STORED  # a reader without localities took that for gone as well
        if label is None:
            return
        for bit in _bits(places & ~(before & ~gone)):
            claim = label.hash, group, bit
            self._claims[claim] = self._claims.get(claim, 0) + 1
            if self._claims[claim] == 1:
                repeat |= bit
        for bit in _bits(repeat):
            stored.add(group, PLACES[bit.bit_length() - 1], label)

    # -- reactor's thread ----------------------------------------------------------------------------------------

    def _label(self, namespace_id: bytes, raws: list[Raw]) -> None:
        if self._client is None or not self._followed:
            return
        groups: list[int] = []
        hashes: list[bytes] = []
        labels: list[bytes] = []
        nbytes = 0
        for group, block_hash, parent, tokens, (lora_name, extra) in raws:
            try:
                content = _encoder.encode(Label(block_hash, parent, tokens, lora_name, extra))
            except (TypeError, ValueError, OverflowError):  # vLLM hashed what it could not publish itself either
                continue
            if len(content) > MAX_LABEL:
                self._too_long(group, len(content))
                continue
            if len(labels) == MAX_LABELS or nbytes + len(content) > MAX_LABEL_BYTES:
                self._client.label(namespace_id, groups, b"".join(hashes), labels)
                groups, hashes, labels, nbytes = [], [], [], 0
            groups.append(group)
            hashes.append(block_hash[:HASH_BYTES])
            labels.append(content)
            nbytes += len(content)
        if labels:
            self._client.label(namespace_id, groups, b"".join(hashes), labels)

    def _too_long(self, group: int, nbytes: int) -> None:
        """Logged when there are twice as many as at the last time."""
        self.too_long += 1
        if self.too_long & (self.too_long - 1) == 0:
            logger.warning(
                "kvtier: %d labels so far were too long for the node store, and their blocks are not published: the "
                "last, of %d tokens, has %d bytes, %d are possible",
                self.too_long, self._groups[group][0], nbytes, MAX_LABEL,
            )  # fmt: skip


class _Runs:
    """Joins blocks to the event of their parents."""

    def __init__(self) -> None:
        self.all: list[Stored] = []
        self._ends: dict[tuple[int, Place, bytes], Stored] = {}

    def add(self, group: int, place: Place, label: Label) -> None:
        run = self._ends.pop((group, place, label.parent), None) if label.parent else None
        if run is None or run.labels[-1].lora_name != label.lora_name:
            run = Stored(group, place, [])
            self.all.append(run)
        run.labels.append(label)
        self._ends[group, place, label.hash] = run


def _bits(places: int) -> Iterator[int]:
    while places:
        bit = places & -places
        yield bit
        places ^= bit
