"""Events on the engine's stream, one per step: work that waits for one runs behind all that was launched before it.

An event is recorded again ``RING_EVENTS`` steps later, since making and destroying one takes the model runner's thread
longer than recording it. A copy that waits for such an old event waits for the later step instead. That is safe: the
engine's stream runs in order, and it waits for no copy that waits for an earlier step.
"""

import itertools

import torch

# Steps that a load may be queued before it waits for a later step than its own.
RING_EVENTS = 64


class StepEvents:
    """Used by one thread, with ``device`` current."""

    def __init__(self, device: int):
        self._device = device
        self._events = itertools.cycle([torch.cuda.Event() for _ in range(RING_EVENTS)])

    def record(self) -> torch.cuda.Event:
        event = next(self._events)
        event.record(torch.cuda.current_stream(self._device))
        return event
