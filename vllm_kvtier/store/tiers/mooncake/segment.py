"""The tier process that gives memory to the cluster, and writes. It never reads objects.

Its end loses the objects in its memory, so nothing ends it but the store's end and its own death. A call that hangs
(up to 60 s, if another node is stopped) delays later writes; the slots that it reads stay leased until it returns.
"""

from collections.abc import Sequence
from functools import partial

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.tiers.mooncake.client import Client, Code, MooncakeClient, key_of
from vllm_kvtier.store.tiers.mooncake.connection import Connect, MasterConnection, slots_of
from vllm_kvtier.store.tiers.mooncake.options import MooncakeOptions
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.main import TierProcessMain
from vllm_kvtier.store.tiers.request_pool import RequestPool

WriteResult = tuple[list[bool], str]  # by block whether it is stored; why writes are to pause, or ""


class MooncakeSegment:
    """A ``tiers.process.main.Backend``. Options of Open: those of MooncakeOptions."""

    def __init__(self, host: TierProcessMain, options: m.Options, connect: Connect = MooncakeClient):
        self._host = host
        parsed = MooncakeOptions.parse(options)
        self._replicas = parsed.replicas
        self._master = MasterConnection(host, parsed, parsed.segment_bytes, connect)
        self._writes = RequestPool(host, 1, "write")  # in order: parents before children
        self._others = RequestPool(host, 1, "copy")

    def open(self) -> m.Opened:
        self._master.open()
        return m.Opened(writable=True)

    def handle(self, message: m.ToTierProcess) -> None:
        client = self._master.client
        if isinstance(message, m.Write):
            self._write(client, message)
        elif isinstance(message, m.Drop) and client is not None:
            self._others.do(partial(client.remove, _keys(message.moves)), lambda codes: None)
        elif isinstance(message, m.Replicate) and client is not None:
            self._others.do(partial(self._replicate, client, _keys(message.moves)), lambda nothing: None)
        elif not isinstance(message, m.Drop | m.Replicate | m.Release):
            raise KVTierError(f"unexpected message {type(message).__name__}")

    def close(self) -> None:
        self._master.close()
        self._writes.close()
        self._others.close()

    def _write(self, client: Client | None, message: m.Write) -> None:
        def answer(result: object) -> None:
            good, refused = result if isinstance(result, tuple) else ([False] * len(message.moves), "")
            self._host.send(m.Moved(message.id, good, refused, writable=not refused))

        if client is None:
            answer(None)
            return
        addresses, sizes = slots_of(self._host, message.moves)
        put = partial(self._put, client, _keys(message.moves), addresses, sizes, message.replaced)
        self._writes.do(put, answer)

    def _put(
        self, client: Client, keys: list[str], addresses: list[int], sizes: list[int], replaced: list[int]
    ) -> WriteResult:
        """Write what is not stored yet, or corrupt, and ask what is stored now. Blocks."""
        if replaced:
            self._master.check(client.remove([keys[i] for i in replaced]))
        stored = self._master.check(client.exist(keys))
        kept = {i for i in replaced if stored[i] != 0}  # could not be removed
        missing = [i for i, code in enumerate(stored) if code == 0]
        codes = [code for code in stored if code < 0]
        if missing:
            of = [[each[i] for i in missing] for each in (addresses, sizes)]
            codes += self._master.check(client.put([keys[i] for i in missing], *of))
            stored = self._master.check(client.exist(keys))  # 0 of a put is no proof
            codes += stored
        return [code == 1 and i not in kept for i, code in enumerate(stored)], _refused(codes)

    def _replicate(self, client: Client, keys: list[str]) -> None:
        """Ask for a copy in this node's segment of what has none there, and fewer than wanted."""
        for key, places in client.places(keys).items():
            if places and client.name not in places and len(places) < self._replicas:
                self._master.check([client.copy(key)])


def _refused(codes: Sequence[int]) -> str:
    """Why the cluster refuses writes, by the errors among ``codes``; "": there is none."""
    if Code.NO_SPACE in codes:
        return f"the cluster's memory is full (code {int(Code.NO_SPACE)})"
    code = min(codes, default=0)
    return f"a write to the cluster failed (code {code})" if code < 0 else ""


def _keys(moves: Sequence[m.Move]) -> list[str]:
    return [key_of(move.namespace_id, move.group, move.hash) for move in moves]
