"""A subscriber to an engine's KV events on a thread of its own; its view is the one of ``examples/kv_events.py``."""

import importlib.util
import json
import threading
from functools import cache
from pathlib import Path
from types import ModuleType

BLOCK = 32


@cache
def example() -> ModuleType:
    """Imports vLLM: not before a test needs it."""
    path = Path(__file__).parent.parent / "examples" / "kv_events.py"
    spec = importlib.util.spec_from_file_location("kv_events_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def publishing(endpoint: str, replay: str | None = None) -> tuple[str, ...]:
    """Flags of an engine that publishes there."""
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    return ("--kv-events-config", json.dumps(config))


class Follower:
    """Follows an engine's events from now on, and counts their batches."""

    def __init__(self, endpoint: str):
        self.heard = 0
        self._endpoint, self._view, self._ends = endpoint, example().View(), False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ends = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "it stopped listening long ago"

    def count(self, place: str) -> int:
        with self._lock:
            return len(self._view.blocks.get(place, ()))

    def prefix(self, tokens: list[int]) -> dict[str, int]:
        with self._lock:
            return self._view.prefix(tokens, BLOCK)

    @property
    def missed(self) -> int:
        return self._view.missed

    def _run(self) -> None:
        for got in example().batches(self._endpoint):
            if self._ends:
                return
            if got is not None:
                with self._lock:
                    self._view.hear(*got)
                self.heard += 1
