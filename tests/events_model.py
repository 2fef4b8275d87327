"""A router's view of an engine's tiers, built from KV events, and a store's event feed whose messages a test delivers.
"""

from collections import Counter, deque
from collections.abc import Iterable
from types import SimpleNamespace

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.server.event_feed import EventFeed
from vllm_kvtier.telemetry.events import Place, Removed, Stored

Where = tuple[str, str | None]  # (medium, locality)


class Router:
    """Blocks by whole hash and group, and their tiers. ``localities``: whether it knows localities; ``clears``: whether
    AllBlocksCleared clears all tiers, or the GPU's cache alone."""

    def __init__(self, localities: bool = True, clears: bool = True):
        self.localities, self.clears = localities, clears
        self.view: dict[Where, set[tuple[bytes | int, int]]] = {}
        self.tokens: dict[bytes | int, tuple[int, ...]] = {}
        self.parents: dict[bytes | int, bytes | int | None] = {}
        self.seen: Counter[str] = Counter()

    def blocks(self, medium: str, locality: str | None = None) -> set[tuple[bytes | int, int]]:
        return self.view.get((medium, locality if self.localities else None), set())

    def hear(self, events: Iterable) -> None:
        for event in events:
            self.seen[type(event).__name__] += 1
            if isinstance(event, AllBlocksCleared):
                for where in list(self.view):
                    if self.clears or where[0] == "GPU":
                        del self.view[where]
            elif isinstance(event, BlockRemoved):
                known = self._at(event.medium, getattr(event, "locality", None))
                known.difference_update((each, event.group_idx) for each in event.block_hashes)
            elif isinstance(event, BlockStored):
                known = self._at(event.medium, getattr(event, "locality", None))
                size, parent = event.block_size, event.parent_block_hash
                assert len(event.token_ids) == size * len(event.block_hashes)
                for i, each in enumerate(event.block_hashes):
                    known.add((each, event.group_idx))
                    self.tokens[each] = tuple(event.token_ids[i * size : (i + 1) * size])
                    self.parents[each] = parent
                    parent = each

    def said(self, said: Iterable[Removed | Stored]) -> None:
        """The same of what has not been put into vLLM's words yet."""
        for each in said:
            known = self._at(each.place.medium, each.place.locality)
            if isinstance(each, Removed):
                assert len(set(each.hashes)) == len(each.hashes)
                known.difference_update((block_hash, each.group) for block_hash in each.hashes)
            else:
                for before, label in zip([None, *each.labels], each.labels, strict=False):
                    assert before is None or label.parent == before.hash, "blocks that do not follow each other"
                    known.add((label.hash, each.group))

    def _at(self, medium: str, locality: str | None) -> set:
        return self.view.setdefault((medium, locality if self.localities else None), set())


class FakeTier:
    """A secondary tier with the blocks that a test puts there."""

    def __init__(self, name: str):
        self.name, self.usable = name, True
        self.kept: set[tuple[bytes, int, bytes]] = set()
        self.on_change = lambda: None
        self.on_moved = lambda *name: None

    def keeps(self, *name) -> bool:
        return self.usable and name in self.kept

    def put(self, name: tuple) -> None:
        self.kept.add(name)
        self.on_moved(*name)

    def lose(self, name: tuple) -> None:
        self.kept.discard(name)
        self.on_moved(*name)

    def turn(self, usable: bool) -> None:
        self.usable = usable
        self.on_change()


class Loop:
    """``reactor.call_soon`` whose calls wait for ``run``."""

    def __init__(self):
        self._soon = deque()

    def call_soon(self, callback) -> None:
        self._soon.append(callback)

    def run(self) -> None:
        while self._soon:
            self._soon.popleft()()


class Wire:
    """The store's end of what ``StoreClient`` does for events; messages are encoded, and wait in order."""

    def __init__(self, number: int, events: Events, tiers: list[str]):
        self.number, self.events, self.tiers = number, events, tuple(tiers)
        self.session, self.connected, self.on_changes = 0, False, lambda changes: None
        self.server: EventFeed | None = None
        self.to_store: deque[bytes] = deque()
        self.to_engine: deque[bytes] = deque()

    def connect(self, server: EventFeed) -> None:
        self.server, self.connected = server, True
        self.session += 1
        self.events.store_changed(self, True)

    def lose(self) -> None:
        if self.connected:
            self.server.left(self.number)
        self.server, self.connected = None, False
        self.to_store.clear()
        self.to_engine.clear()
        self.events.store_changed(self, False)

    def follow(self, namespaces, session=None) -> None:
        self._send(m.Follow(list(namespaces)))

    def label(self, namespace_id, groups, hashes, labels) -> None:
        self._send(m.Labels(namespace_id, list(groups), hashes, list(labels)))

    def _send(self, message) -> None:
        if self.connected:
            self.to_store.append(m.encode(message))

    def deliver_to_store(self) -> bool:
        if not self.to_store:
            return False
        request = m.decode_request(self.to_store.popleft())
        if isinstance(request, m.Follow):
            self.server.follow(self.number, request.namespaces)
        elif isinstance(request, m.Labels):
            self.server.label(self.number, request)
        else:
            self.server.acknowledged(self.number)
        return True

    def deliver_to_engine(self) -> bool:
        if not self.to_engine:
            return False
        self.on_changes(m.decode_reply(self.to_engine.popleft()))
        self._send(m.ChangesAck())
        return True


def fake_request(tokens: list[int], hashes: list[bytes]):
    nothing = dict(lora_request=None, mm_features=[], cache_salt=None, prompt_embeds=None)
    return SimpleNamespace(all_token_ids=tokens, block_hashes=hashes, **nothing)


def places_of(served: dict[str, set]) -> dict[Where, set]:
    """By medium and locality, as it is published; ``served`` by the store's names."""
    names = {"memory": Place("CPU", "LOCAL"), "disk": Place("STORAGE", "LOCAL"), "object": Place("STORAGE", "REMOTE")}
    names["mooncake"] = Place("EXTERNAL", "REMOTE")
    return {(names[name].medium, names[name].locality): blocks for name, blocks in served.items()}
