"""A Mooncake cluster that is a dict, with the faults that the real one has been seen to have."""

import threading

from vllm_kvtier.store.tiers.mooncake.client import Code


class FakeCluster:
    """``memory``: the pool. ``objects``: by key its bytes, ``copies``: the places of its copies.

    Faults: ``gone`` (places whose reads fail at once; the master still lists them), ``hung`` (places whose reads block
    until ``resume``, and then write into the slots after all), ``refuses`` (a code that every put returns),
    ``half_made`` (keys: their put returns 0 and stores nothing), ``stays`` (keys that cannot be removed), ``master`` (a
    code that every call returns), ``short`` (bytes that objects lack).
    """

    def __init__(self, memory: memoryview):
        self.memory = memory
        self.objects: dict[str, bytes] = {}
        self.copies: dict[str, list[str]] = {}
        self.gone: set[str] = set()
        self.hung: set[str] = set()
        self.half_made: set[str] = set()
        self.stays: set[str] = set()
        self.refuses = 0
        self.master = 0
        self.short = 0
        self.fails = int(Code.TRANSFER)  # of reads from places that are gone
        self.resume = threading.Event()
        self.calls: list[tuple[str, list[str]]] = []

    def asked(self, call: str) -> int:
        return sum(name == call for name, _ in self.calls)


class FakeClient:
    """Of ``place``."""

    def __init__(self, cluster: FakeCluster, place: str):
        self.cluster, self.name = cluster, place

    def _begin(self, call, keys):
        self.cluster.calls.append((call, list(keys)))
        return [self.cluster.master] * len(keys) if self.cluster.master else None

    def exist(self, keys):
        return self._begin("exist", keys) or [int(key in self.cluster.objects) for key in keys]

    def places(self, keys):
        return (
            {} if self._begin("places", keys) else {k: self.cluster.copies[k] for k in keys if k in self.cluster.copies}
        )

    def get(self, keys, addresses, sizes):
        failed = self._begin("get", keys)
        if failed:
            return failed
        codes = []
        for key, address, _ in zip(keys, addresses, sizes, strict=True):
            place = self.cluster.copies[key][0]
            if place in self.cluster.hung:
                self.cluster.resume.wait()  # then it writes, when no call is waiting for it any more
            data = self.cluster.objects[key]
            if place in self.cluster.gone:
                codes.append(self.cluster.fails)
                continue
            data = data[: len(data) - self.cluster.short]
            self.cluster.memory[address : address + len(data)] = data
            codes.append(len(data))
        return codes

    def put(self, keys, addresses, sizes):
        failed = self._begin("put", keys)
        if failed:
            return failed
        if self.cluster.refuses:
            return [self.cluster.refuses] * len(keys)
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            if key not in self.cluster.half_made and key not in self.cluster.objects:
                self.cluster.objects[key] = bytes(self.cluster.memory[address : address + size])
                self.cluster.copies[key] = [self.name]
        return [0] * len(keys)

    def copy(self, key):
        failed = self._begin("copy", [key])
        if failed:
            return failed[0]
        self.cluster.copies[key].append(self.name)
        return 0

    def remove(self, keys):
        failed = self._begin("remove", keys)
        for key in () if failed else set(keys) - self.cluster.stays:
            self.cluster.objects.pop(key, None)
            self.cluster.copies.pop(key, None)
        return failed or [0] * len(keys)

    def ping(self):
        return self.cluster.master
