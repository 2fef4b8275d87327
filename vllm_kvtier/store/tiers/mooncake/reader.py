"""The tier process that looks up and reads objects of Mooncake Store.

A read that fails, or takes too long, may still write into its slots at any later time (Mooncake stops no transfer).
Only the end of this process stops it. Therefore it ends then; the server gives the slots back when it is reaped, and
starts another. Before its end it reports the place of the objects, which the next one avoids until the master has
noticed that the place is gone.

A read takes the first complete copy of an object and no other. So one read asks for objects of one place, and a failure
is that place's.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.tiers.mooncake.client import HARMLESS, Client, Code, MooncakeClient, key_of
from vllm_kvtier.store.tiers.mooncake.connection import Connect, MasterConnection, slots_of
from vllm_kvtier.store.tiers.mooncake.options import MooncakeOptions
from vllm_kvtier.store.tiers.prefix_search import Name, Prefix, end_of, names_by_position
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.main import TierProcessMain
from vllm_kvtier.store.tiers.request_pool import RequestPool
from vllm_kvtier.wire.reactor import Timer

LOOK_SECONDS = 1.0  # of a lookup; then the master has failed
READ_SECONDS, READ_RATE = 3.0, 100e6  # of a read: seconds, and bytes/s for more bytes
AVOID_SECONDS = 10.0  # the master's client_ttl: objects of a node that is gone seem to exist for so long
PARALLEL_LOOKUPS, PARALLEL_READS = 4, 4  # threads
FIRST_NAMES, MORE_NAMES = 64, 2048  # asked for at a time: most prefixes end early


class MooncakeReader:
    """A ``tiers.process.main.Backend``. Options of Open: those of MooncakeOptions."""

    def __init__(self, host: TierProcessMain, options: m.Options, connect: Connect = MooncakeClient):
        self._host = host
        self._master = MasterConnection(host, MooncakeOptions.parse(options), 0, connect)
        self._lookups = RequestPool(host, PARALLEL_LOOKUPS, "look")
        self._reads = RequestPool(host, PARALLEL_READS, "read")
        self._deadlines: dict[int, Timer] = {}  # of calls that have begun
        self._numbers = itertools.count()
        self._avoided: dict[str, float] = {}  # place -> until when
        self._answered = 0.0  # when the master last answered a lookup

    def open(self) -> m.Opened:
        self._master.open()
        return m.Opened(writable=False)

    def handle(self, message: m.ToTierProcess) -> None:
        if isinstance(message, m.Look):
            self._look(message)
        elif isinstance(message, m.Read):
            self._read(message)
        elif isinstance(message, m.Avoid):
            self._avoided[message.place] = time.monotonic() + message.seconds
        elif not isinstance(message, m.Release):  # lookups hold nothing
            raise KVTierError(f"unexpected message {type(message).__name__}")

    def close(self) -> None:
        self._master.close()
        self._lookups.close()
        self._reads.close()

    # -- lookups ------------------------------------------------------------------------------------------------

    def _look(self, message: m.Look) -> None:
        prefix = Prefix(message.hash_block_size, message.groups, message.block_hashes, message.start)
        began = time.monotonic()
        client = self._master.client
        timer: Timer | None = None

        def answer(end: int) -> None:
            nonlocal timer
            if timer is not None:
                timer.cancel()
                timer = None
                token = message.id if end > message.start else 0
                self._host.send(m.Located(message.id, token, end, seconds=time.monotonic() - began))

        def late() -> None:
            if self._answered < began:  # else only this process's queue is long
                self._master.failed(f"the master has not answered a lookup within {LOOK_SECONDS:g} s", late=True)
            answer(message.start)

        timer = self._host.reactor.call_later(LOOK_SECONDS, self._host.guard(late))
        if client is None:
            answer(message.start)
            return

        def look() -> int:
            return message.start if timer is None else self._end_of(client, prefix, message.namespace_id)

        self._lookups.do(look, lambda end: answer(end if isinstance(end, int) else message.start))

    def _end_of(self, client: Client, prefix: Prefix, namespace_id: bytes) -> int:
        """End of the prefix that is stored at places that are not avoided. Blocks."""
        names, stored = names_by_position(prefix), set[Name]()
        full = {group for group, shape in enumerate(prefix.groups) if shape.cache_kind.whole_prefix}
        at, count = 0, FIRST_NAMES
        while at < len(names):
            asked = names[at : at + count]
            keys = [key_of(namespace_id, *name) for name in asked]
            codes = self._master.check(client.exist(keys))
            self._answered = time.monotonic()
            avoided = self._avoided_keys(client, [key for key, code in zip(keys, codes, strict=True) if code == 1])
            found = {
                name for name, key, code in zip(asked, keys, codes, strict=True) if code == 1 and key not in avoided
            }
            stored |= found
            if any(name not in found for name in asked if name[0] in full):
                break
            at, count = at + count, MORE_NAMES
        return end_of(prefix, stored)

    def _avoided_keys(self, client: Client, keys: list[str]) -> set[str]:
        now = time.monotonic()
        self._avoided = {place: until for place, until in self._avoided.items() if now < until}
        if not self._avoided or not keys:
            return set()
        return {key for key, places in client.places(keys).items() if not places or places[0] in self._avoided}

    # -- reads --------------------------------------------------------------------------------------------------

    def _read(self, message: m.Read) -> None:
        began = time.monotonic()
        addresses, sizes = slots_of(self._host, message.moves)
        keys = [key_of(move.namespace_id, move.group, move.hash) for move in message.moves]
        good = [False] * len(keys)
        waiting = 0

        def answer() -> None:
            self._host.send(m.Moved(message.id, good, "", time.monotonic() - began))

        def begin(places: object) -> None:
            nonlocal waiting
            if not isinstance(places, dict):
                answer()
                return
            by_place = defaultdict[str, list[int]](list)
            for i, key in enumerate(keys):
                if (copies := places.get(key)) and copies[0] not in self._avoided:
                    by_place[copies[0]].append(i)
            waiting = len(by_place)
            for place, at in by_place.items():
                into = [[each[i] for i in at] for each in (addresses, sizes)]
                self._get(place, [keys[i] for i in at], *into, ended=partial(ended, at))
            if not waiting:
                answer()

        def ended(at: list[int], codes: list[int]) -> None:
            nonlocal waiting
            for i, code in zip(at, codes, strict=True):
                good[i] = code == sizes[i]
            waiting -= 1
            if not waiting:
                answer()

        client = self._master.client
        if client is None:
            answer()
        else:
            self._lookups.do(partial(client.places, keys), begin)

    def _get(
        self,
        place: str,
        keys: list[str],
        addresses: list[int],
        sizes: list[int],
        *,
        ended: Callable[[list[int]], None],
    ) -> None:
        """Read objects of one place; ``ended(codes)`` is called unless that fails, which ends this process."""
        number, seconds = next(self._numbers), READ_SECONDS + sum(sizes) / READ_RATE
        call_soon, guard = self._host.reactor.call_soon, self._host.guard

        def late() -> None:
            self._fail(place, f"a read from {place} took more than {seconds:.1f} s")

        def watch() -> None:
            self._deadlines[number] = self._host.reactor.call_later(seconds, guard(late))

        def get() -> list[int]:
            client = self._master.client
            if client is None:
                return [Code.MASTER_GONE] * len(keys)
            call_soon(guard(watch))
            return client.get(keys, addresses, sizes)

        def done(codes: object) -> None:
            if number in self._deadlines:
                self._deadlines.pop(number).cancel()
            assert isinstance(codes, list)
            if harmful := [code for code in codes if code < 0 and code not in HARMLESS]:
                self._fail(place, f"a read from {place} failed (code {harmful[0]})")
            else:
                self._master.check(codes)
                ended(codes)

        self._reads.do(get, done)

    def _fail(self, place: str, reason: str) -> None:
        """End this process, whose reads may still write to their slots."""
        self._host.send(m.Avoid(place, AVOID_SECONDS))
        self._host.fail(reason)
