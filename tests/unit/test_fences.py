"""Marks on the engine's stream that are used again."""

import torch

from vllm_kvtier.worker import fences


def test_an_event_is_used_again_when_many_others_were(monkeypatch):
    class Event:
        def __init__(self):
            self.recorded = []

        def record(self, stream):
            self.recorded.append(stream)

    streams = iter(range(1000))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (device, next(streams)))
    ring = fences.Fences(3)
    marks = [ring.mark() for _ in range(2 * fences.RING)]
    assert len(set(map(id, marks))) == fences.RING
    assert marks[: fences.RING] == marks[fences.RING :]
    assert marks[0].recorded == [(3, 0), (3, fences.RING)], "on the stream of the moment"
