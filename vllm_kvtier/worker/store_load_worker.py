"""What the worker's parts for the node store and for remote stores have in common: how their loads are called.

The model runner's thread calls the public methods. Copies run under ``_lock``, on that thread or on the reactor's.
"""

import hashlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_kvtier import codecs
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.jobs.results import ABORTED
from vllm_kvtier.jobs.transfer_jobs import LoadJob
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.slots import layout_digest
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.context import ASLEEP, RankContext


class StoreLoadWorker(ABC):
    """Loads blocks from one kind of store into this rank's cache; their results go to ``context.finish``."""

    def __init__(self, context: RankContext, view: CacheView, setup: m.PoolSetup | m.RemoteStoreSetup):
        self._rank, self._reactor = context.rank, context.reactor
        self._send, self._finish = context.send, context.finish
        self._view, self.on_device = view, view.device.type == "cuda"
        self._layouts = [
            part_layout(group, codecs.get(name)) for group, name in zip(view.groups, setup.codecs, strict=True)
        ]
        self._part_bytes = [layout.nbytes for layout in self._layouts]
        # By group, for the keys of checksums in slots: a late copy may find the same block there, but of an engine that
        # keeps other parts of it.
        nodes = setup.nodes if isinstance(setup, m.PoolSetup) else []
        ranks = repr([rank for rank, node in enumerate(nodes) if node == nodes[context.rank]]).encode()
        parts = [layout_digest([each], [layout]) for each, layout in zip(view.groups, self._layouts, strict=True)]
        digests = [hashlib.blake2b(part + ranks, digest_size=8).digest() for part in parts]
        self._salts = [np.uint64(int.from_bytes(digest, "little")) for digest in digests]
        self._offsets = setup.offsets[context.rank]
        self._lock = threading.RLock()
        self._suspended = False  # the cache has no memory until the next step
        self.launching = -math.inf  # since when a step's forward is being launched

    def step(self, step: int, event: Any) -> bool:
        """The forward of ``step`` was launched; ``event`` marks its end, None without a device. A negative step is a
        call of vLLM without a step of the scheduler. Returns whether ``collect`` is due though nothing is loaded."""
        if step >= 0:
            self._suspended = False
        return False

    @abstractmethod
    def load(self, jobs: list[LoadJob], after: Any) -> None:
        """Begin loads; their blocks may be written behind ``after`` (torch.cuda.Event; None without a device)."""

    @abstractmethod
    def under_way(self) -> set[str]:
        """Requests whose loads have not ended. Any thread."""

    @abstractmethod
    def collect(self, idle: bool = False) -> None:
        """See which loads ended. Call after each step's launch; ``idle``: the step computes nothing."""

    def cancel_loads(self, request_ids: list[str]) -> None:
        """Begin no more of these requests' loads. Each load still ends when nothing writes its blocks any more."""

        gone = set(request_ids)

        def cancel() -> None:
            with self._lock:
                self._cancel(lambda job: job.request_id in gone, ABORTED)
            self._reactor_poll()

        self._reactor.call_soon(cancel)  # behind the loads that went this way

    def suspend(self) -> None:
        """Stop using the cache's memory until the next step: vLLM takes it away when this returns."""
        with self._lock:
            self._suspended = True
            self._cancel_all(ASLEEP)
            if self.on_device:
                torch.cuda.synchronize(self._view.device)
            ended = self._take_ended()
        self._report(ended)

    # -- for ``cancel_loads`` and ``suspend``, under the lock except ``_reactor_poll`` and ``_report`` ----------------

    @abstractmethod
    def _cancel(self, which: Callable[[LoadJob], bool], reason: str) -> None: ...

    @abstractmethod
    def _cancel_all(self, reason: str) -> None:
        """Begin nothing of what waits."""

    @abstractmethod
    def _take_ended(self) -> Any:
        """Results of the copies, which have all ended on the device."""

    @abstractmethod
    def _report(self, ended: Any) -> None: ...

    @abstractmethod
    def _reactor_poll(self) -> None:
        """Reactor's thread."""
