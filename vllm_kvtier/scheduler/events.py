"""KV events of the tiers: what lies in the node store's memory, on its disk and in its bucket, told to vLLM.

The store tells this engine where the labelled blocks of its spaces lie (``store/changes.py``); that is the *view*, kept
on the reactor's thread. What vLLM was told of so far is the other table. ``take`` looks at the blocks that may differ,
a bounded number at a time, and says what makes the second equal to the first. So nothing can overflow: a block that
came and went meanwhile is not mentioned, and a store that died leaves an empty view behind, until another one tells of
itself.

A *label* is what an event needs beside the store's own name of a block; the engine that stores or loads a block makes
it, and any engine of the space reads it.
"""

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.messages import HASH, MAX_FOLLOWED, MAX_LABEL, Changes
from vllm_kvtier.telemetry.events import MEMORY, PLACES, STORED, TIERS, Label, Place, Removed, Stored
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger("vllm.kvtier.events")

TAKE = 512  # blocks a step: what a large one fills
SEND, SEND_BYTES = 1024, 4 << 20  # labels a message


Key = tuple[int, bytes]  # (group, hash as the store cuts it), in a space
Raw = tuple[int, bytes, bytes, bytes, tuple]  # group, hash, parent, tokens, (lora id, lora name, extra keys)
_PLAIN = None, None, None
_NOWHERE: tuple[int, Label | None] = 0, None

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Label)


class Events:
    """``groups``: (block tokens, window) a group; ``unit``: tokens a block hash covers. ``wake`` has the engine's
    thread take what there is, if it is idle."""

    def __init__(self, groups: list[tuple[int, int | None]], unit: int, reactor: Reactor, wake: Callable[[], None]):
        self._groups, self._unit, self._reactor, self._wake = groups, unit, reactor, wake
        self._client: StoreClient | None = None
        self._followed = 0  # session of the store's connection that knows what we follow
        self._bits: list[int] = []  # by bit of the store's places
        self._lock = threading.Lock()  # guards what is below
        self._spaces: dict[bytes, None] = {}
        self._view: dict[bytes, dict[Key, tuple[int, Label]]] = {}  # by space: places of a block
        self._told: dict[tuple[bytes, Key], tuple[int, Label]] = {}  # what of the view vLLM knows
        # Two spaces may have blocks of one hash, as before and after a change of weights: it is there while one is.
        self._claims: dict[tuple[bytes, int, int], int] = {}  # (hash, group, place's bit) -> spaces
        # True: to be said again, whatever was. No dict: its first is found slowly when many were taken.
        self._differing: OrderedDict[tuple[bytes, Key], bool] = OrderedDict()
        self._sweeps: deque[Iterator[tuple[tuple[bytes, Key], bool]]] = deque()  # more of these
        self._repeating: Iterator[tuple[tuple[bytes, Key], bool]] | None = None  # one of them, of ``say_again``
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
            client.follow(list(self._spaces), client.session)

    def changed(self, changes: Changes) -> None:
        """From the store: its present state of these blocks."""
        malformed = 0
        with self._lock:
            if changes.space not in self._spaces or not self._followed:
                return
            if changes.anew:
                self._sweep(changes.space)
            view = self._view.setdefault(changes.space, {})
            for i, (group, places, content) in enumerate(
                zip(changes.groups, changes.places, changes.labels, strict=True)
            ):
                key = group, changes.hashes[i * HASH : (i + 1) * HASH]
                mine = sum(bit for j, bit in enumerate(self._bits) if places >> j & 1)
                label = self._read(key, content, view) if mine else None
                if label is None:
                    malformed += bool(mine)
                    mine = 0
                    view.pop(key, None)
                else:
                    view[key] = mine, label
                if self._told.get((changes.space, key), _NOWHERE)[0] != mine:
                    self._differing.setdefault((changes.space, key), False)
        if malformed:
            logger.warning("kvtier: %d blocks are not published: the store tells nonsense of them", malformed)
        self._look()

    def say_again(self) -> None:
        """vLLM publishes that all of this engine's blocks are gone, which some take for those of all tiers."""

        def repeat() -> None:
            with self._lock:
                # Copied here, not on the scheduler's thread; names that are gone again by then are looked at in vain.
                names = [((space, key), True) for space, view in self._view.items() for key in view]
                if self._repeating in self._sweeps:  # what is left of it, these say as well
                    self._sweeps.remove(self._repeating)
                self._repeating = iter(names)
                self._sweeps.append(self._repeating)
            self._look()

        self._reactor.call_soon(repeat)

    def _read(self, key: Key, content: bytes, view: dict[Key, tuple[int, Label]]) -> Label | None:
        """Another process made it: it becomes an event only if it is what it should be."""
        try:
            label = _decoder.decode(content)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None
        if key[0] >= len(self._groups) or len(label.tokens) != 4 * self._groups[key[0]][0]:
            return None
        if label.hash[:HASH] != key[1]:
            return None
        before = view.get((key[0], label.parent[:HASH]), _NOWHERE)[1]
        if before is not None and before.hash == label.parent:
            force_setattr(label, "parent", before.hash)  # one copy of it
        return label

    def _lose_all(self) -> None:
        with self._lock:
            for space in list(self._view):
                self._sweep(space)
        self._look()

    def _sweep(self, space: bytes) -> None:
        """What was known of the space counts no more; vLLM hears of it by and by, unless it is there after all."""
        before = self._view.pop(space, None)
        if before:
            # No generator: that would be closed with the one in ``_next``, when a part of it has been taken.
            self._sweeps.append(map(lambda key: ((space, key), False), before))

    def _look(self) -> None:
        with self._lock:
            if self._woken or not (self._differing or self._sweeps):
                return
            self._woken = True
        self._wake()

    # -- any thread ----------------------------------------------------------------------------------------------

    def join(self, space: bytes) -> None:
        """This engine loads from and stores to this space from now on."""
        if space in self._spaces:
            return
        with self._lock:
            if not space or len(self._spaces) >= MAX_FOLLOWED:
                return
            self._spaces[space] = None
        self._reactor.call_soon(self._follow)

    def leave(self) -> None:
        """From no space of those so far."""
        with self._lock:
            self._spaces.clear()
            for space in list(self._view):
                self._sweep(space)
        self._reactor.call_soon(lambda: self._follow([]))  # also if it is joined again: then it is told anew
        self._look()

    def _follow(self, spaces: list[bytes] | None = None) -> None:
        """Those that it has joined, or these."""
        if self._client is not None and self._followed:
            self._client.follow(list(self._spaces) if spaces is None else spaces, self._followed)

    # -- scheduler's thread --------------------------------------------------------------------------------------

    def describe(self, space: bytes, request: Any, group: int, blocks: Iterable[int]) -> list[Raw]:
        """What labels of these blocks of a request's chain, in rising order, are made of; of those that have one
        already, nothing."""
        size = self._groups[group][0]
        per, hashes, known = size // self._unit, request.block_hashes, self._view.get(space, {})
        rows = [i for i in blocks if (group, hashes[(i + 1) * per - 1][:HASH]) not in known]
        if not rows:
            return []
        first, last = rows[0], rows[-1] + 1
        tokens = np.array(request.all_token_ids[first * size : last * size], "<i4").tobytes()
        if vr.is_plain(request):
            beside = itertools.repeat(_PLAIN)
        else:
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

    def label_of(self, space: bytes, group: int, block_hash: bytes) -> Label | None:
        """What the store is believed to have of the block. It may have forgotten both just now: see ``tell_again``."""
        found = self._view.get(space, {}).get((group, block_hash[:HASH]))
        return None if found is None else found[1]

    def tell_again(self, space: bytes, labels: Iterable[tuple[int, Label]]) -> None:
        """By group. Of blocks that the store lacked after all, and gave slots for."""
        self.tell(space, [(g, x.hash, x.parent, x.tokens, (x.lora_id, x.lora_name, x.extra)) for g, x in labels])

    def tell(self, space: bytes, raws: list[Raw]) -> None:
        """Label these; the store was asked for slots for them before, or has them."""
        if raws:
            self._reactor.call_soon(lambda: self._label(space, raws))

    def loaded(self, space: bytes, request: Any, start: int, end: int) -> None:
        """The request's tokens [start, end) came from the store: what has no label there, as after the store was
        restarted with a disk, gets one."""
        for group, (size, _) in enumerate(self._groups):
            last = min(end // size, len(request.block_hashes) * self._unit // size)
            self.tell(space, self.describe(space, request, group, range(start // size, last)))

    @property
    def behind(self) -> bool:
        """There may be more to take."""
        return bool(self._differing or self._sweeps)

    def take(self, most: int = TAKE) -> list[Removed | Stored]:
        """What vLLM is to be told next, after a look at so many blocks at most; [] when it knows all, and also while it
        is ``behind``, where there was nothing to say of these."""
        if not self.behind:
            self._woken = False
            return []
        removed: dict[tuple[int, Place], Removed] = {}
        stored = _Runs()
        with self._lock:
            self._woken = False
            for name, again in itertools.islice(self._next(), most):
                self._compare(name, again, removed, stored)
        # First what is gone: where a block is still in the other kind of storage, that is said again behind it.
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
        space, (group, _) = name
        places, label = now = self._view.get(space, {}).get(name[1], _NOWHERE)
        before, known = self._told.pop(name, _NOWHERE)
        whole = known.hash if known is not None else b""
        gone = before & ~places
        if label is not None:
            if before and label.hash != whole:  # labelled anew, and one of the labels lies: another block of this name
                gone = before
            self._told[name] = now
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
                repeat |= places & before & STORED  # one who knows no localities took that for gone as well
        for bit in _bits(places & ~(before & ~gone)):
            claim = label.hash, group, bit
            self._claims[claim] = self._claims.get(claim, 0) + 1
            if self._claims[claim] == 1:
                repeat |= bit
        for bit in _bits(repeat):
            stored.add(group, PLACES[bit.bit_length() - 1], label)

    # -- reactor's thread ----------------------------------------------------------------------------------------

    def _label(self, space: bytes, raws: list[Raw]) -> None:
        if self._client is None or not self._followed:
            return
        groups, hashes, labels, nbytes = [], [], [], 0
        for group, block_hash, parent, tokens, (lora_id, lora_name, extra) in raws:
            try:
                content = _encoder.encode(Label(block_hash, parent, tokens, lora_id, lora_name, extra))
            except (TypeError, ValueError, OverflowError):  # vLLM hashed what it could not publish itself either
                continue
            if len(content) > MAX_LABEL:
                self._too_long(group, len(content))
                continue
            if len(labels) == SEND or nbytes + len(content) > SEND_BYTES:
                self._client.label(space, groups, b"".join(hashes), labels)
                groups, hashes, labels, nbytes = [], [], [], 0
            groups.append(group)
            hashes.append(block_hash[:HASH])
            labels.append(content)
            nbytes += len(content)
        if labels:
            self._client.label(space, groups, b"".join(hashes), labels)

    def _too_long(self, group: int, nbytes: int) -> None:
        """Said when there were twice as many as when it was said last."""
        self.too_long += 1
        if self.too_long & (self.too_long - 1) == 0:
            logger.warning(
                "kvtier: %d labels so far were too long for the node store, and their blocks are not published: the "
                "last, of %d tokens, has %d bytes, %d are possible",
                self.too_long, self._groups[group][0], nbytes, MAX_LABEL,
            )  # fmt: skip


class _Runs:
    """Blocks put behind their parents, where these are said at the same time."""

    def __init__(self) -> None:
        self.all: list[Stored] = []
        self._ends: dict[tuple[int, Place, bytes], Stored] = {}

    def add(self, group: int, place: Place, label: Label) -> None:
        run = self._ends.pop((group, place, label.parent), None) if label.parent else None
        if run is None or (run.labels[-1].lora_id, run.labels[-1].lora_name) != (label.lora_id, label.lora_name):
            run = Stored(group, place, [])
            self.all.append(run)
        run.labels.append(label)
        self._ends[group, place, label.hash] = run


def _bits(places: int) -> Iterator[int]:
    while places:
        bit = places & -places
        yield bit
        places ^= bit
