"""Marks on the engine's stream, one a step: what waits for one runs behind all that was launched before it.

An event is used again ``RING`` marks later: making and destroying one a step takes the model runner's thread longer
than recording it. Whoever is told to wait for such an old one waits for a later mark instead, which serves as well: the
engine's stream runs in order, and waits for no copy that waits for a step before.
"""

import itertools

import torch

# Steps that a load may wait in a queue before it begins behind a later mark than its own.
RING = 64


class Fences:
    """On one thread, with ``device`` current."""

    def __init__(self, device: int):
        self._device = device
        self._events = itertools.cycle([torch.cuda.Event() for _ in range(RING)])

    def mark(self) -> torch.cuda.Event:
        event = next(self._events)
        event.record(torch.cuda.current_stream(self._device))
        return event
