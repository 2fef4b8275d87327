"""Events on the engine's stream, one per step: work that waits for one runs behind all that was launched before it.

An event is recorded again ``RING_EVENTS`` steps later, since making and destroying one takes the model runner's thread
longer than recording it. A copy that waits for such an old event waits for the later step instead. That is safe: the
engine's stream runs in order, and it waits for no copy that waits for an earlier step.
"""

import itertools
from collections.abc import Callable

import torch

# Steps that a load may be queued before it waits for a later step than its own.
RING_EVENTS = 64
# The driver's handle of a device's current stream, as compiled models call it; None: this build of torch has no CUDA.
_stream_handle: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class StepEvents:
    """Used by one thread, with ``device`` current."""

    def __init__(self, device: int):
        self._device = device
        self._events = itertools.cycle([torch.cuda.Event() for _ in range(RING_EVENTS)])
        self._handle: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def record(self) -> torch.cuda.Event:
        event, handle = next(self._events), None if _stream_handle is None else _stream_handle(self._device)
        # vLLM's stream stays the same, and making the object for it takes longer than recording.
        if handle is None or handle != self._handle:
            self._handle, self._stream = handle, torch.cuda.current_stream(self._device)
        event.record(self._stream)
        return event
