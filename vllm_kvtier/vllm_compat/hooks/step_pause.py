"""vLLM's pause after a step without tokens, in which all requests wait: 1 ms, so that other threads get on.

A load that ended is seen by vLLM's scheduler a step later, and its request is scheduled another one later: two pauses
after the last byte. This module ends a pause when there is something to do. The engine core (0.25.1 to 0.33) sleeps by
``time.sleep``, with ``time`` a global of its module, which is replaced by one whose ``sleep`` waits for an event.
"""

import threading
import time
from types import ModuleType
from typing import Any

from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

PAUSE_SECONDS = 0.001  # vLLM's; it may sleep elsewhere for other reasons

_over = threading.Event()


def end_pause() -> None:
    """End the pause of this process's engine, or else leave out its next one. Any thread."""
    _over.set()


class _Time:
    """The module ``time``, except for that pause."""

    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def sleep(self, seconds: float) -> None:
        if seconds != PAUSE_SECONDS:
            self._module.sleep(seconds)
            return
        _over.wait(seconds)
        _over.clear()


def install() -> None:
    """Idempotent."""
    if granted(Feature.PAUSES):
        from vllm.v1.engine import core

        if core.time is time:
            core.time = _Time(time)
