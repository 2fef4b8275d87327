"""Connectors whose methods can be timed while the engine runs, for overhead.py --shares.

"kv_connector": "KVTierConnector", "kv_connector_module_path": "timed_connectors", with this folder in PYTHONPATH, and
$KVTIER_TIMES a folder. A connector in process PID makes the file PID there. SIGUSR1 to that process begins timing, or
ends it; then PID.N.json, N counting signals, is written there (``write``). Before, no method is wrapped, so that turns
that are not timed run the connector as it is.
"""

import functools
import inspect
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import idle_connector
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

FOLDER = Path(os.environ["KVTIER_TIMES"])
_connectors: list[KVConnectorBase_V1] = []  # of this process: the scheduler's and the worker's
_calls: dict[tuple[str, str, int], list[int]] = {}  # (role, method, thread) -> calls, nanoseconds, longest
_inside: set[int] = set()  # threads in a method: what it calls of the same connector is its own time
_signals = itertools.count(1)


def timed(role: str, name: str, method):
    def call(*args, **kwargs):
        thread = threading.get_ident()
        if thread in _inside:
            return method(*args, **kwargs)
        _inside.add(thread)
        begin = time.perf_counter_ns()
        try:
            return method(*args, **kwargs)
        finally:
            took = time.perf_counter_ns() - begin
            _inside.discard(thread)
            cell = _calls.setdefault((role, name, thread), [0, 0, 0])
            cell[0] += 1
            cell[1] += took
            cell[2] = max(cell[2], took)

    return call


def methods(connector: KVConnectorBase_V1) -> list[str]:
    """Those that the connector's class has instead of vLLM's base class."""
    own = [kind for kind in type(connector).__mro__ if not kind.__module__.endswith("kv_connector.v1.base")]
    return sorted({n for kind in own for n, f in vars(kind).items() if inspect.isfunction(f) and n[0] != "_"})


def toggle(number, frame) -> None:
    count = next(_signals)
    for connector in _connectors:
        for name in methods(connector):
            if count % 2:
                setattr(connector, name, timed(connector.role.name.lower(), name, getattr(connector, name)))
            else:
                delattr(connector, name)
    write(count)
    if count % 2 == 0:
        _calls.clear()


def write(count: int) -> None:
    """``threads``: native id -> name; ``calls``: role, method, thread's name, calls, nanoseconds, longest."""
    threads = threading.enumerate()
    names = {thread.ident: thread.name for thread in threads}
    calls = [[role, name, names.get(thread, "?"), *cell] for (role, name, thread), cell in list(_calls.items())]
    found = {"threads": {thread.native_id: thread.name for thread in threads}, "calls": calls}
    part = FOLDER / f"{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(FOLDER / f"{os.getpid()}.{count}.json")


class Timed:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not _connectors:  # vLLM makes them on the main thread
            signal.signal(signal.SIGUSR1, toggle)
            (FOLDER / str(os.getpid())).touch()
        _connectors.append(self)


@functools.cache
def __getattr__(name: str) -> type:
    """The timed subclass of a connector that vLLM knows, with the same name: engines have options by name."""
    if name.startswith("_"):
        raise AttributeError(name)
    known = KVConnectorFactory.get_connector_class_by_name
    kind = idle_connector.IdleConnector if name == "IdleConnector" else known(name)
    return type(name, (Timed, kind), {})
