"""Watches processes whose memory is mapped here: a GPU's memory is free only when no process maps it any more."""

import os
from collections.abc import Callable, Iterable
from functools import partial

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store import linux
from vllm_kvtier.wire.messages import Shared
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.peer_fetch import process_memory

logger = get_logger(__name__)

# Seconds between checks of a process where the system gives no descriptor of it.
RECHECK_SECONDS = 2.0


def _check(process: Shared) -> None:
    """Raise KVTierError if it has ended, OSError if that is unknown, as without file descriptors."""
    try:
        process_memory.check(process)
    except KVTierError as error:
        raise error.__cause__ or error from None


class PeerProcessWatch:
    def __init__(self, reactor: Reactor, gone: Callable[[str], None]):
        """``gone`` is called on the reactor's thread, once per source."""
        self._reactor, self._gone = reactor, gone
        self._followed: dict[str, list[int]] = {}  # descriptors of its processes
        reactor.on_stop(self._close)

    def follow(self, instance: str, shared: Iterable[Shared]) -> None:
        """Watch the processes of a source, once. Any thread."""
        processes = list({(each.pid, each.started): each for each in shared}.values())
        self._reactor.call_soon(lambda: self._follow(instance, processes))

    def close(self) -> None:
        """Watch nothing any more; nothing may be followed later. Any thread; idempotent."""
        self._reactor.off_stop(self._close)
        self._reactor.call_soon(self._close)

    def _follow(self, instance: str, processes: list[Shared]) -> None:
        if instance in self._followed:
            return
        descriptors = self._followed[instance] = []
        try:
            for each in processes:
                descriptor = linux.pidfd_open(each.pid)
                descriptors.append(descriptor)
                self._reactor.add_fd(descriptor, lambda events: self._ended(instance))
                _check(each)  # another process may have had the pid by then
        except (KVTierError, ProcessLookupError):
            self._ended(instance)
        except OSError as error:  # an old kernel, or a sandbox
            logger.debug("kvtier: peer fetch: no descriptor of a process (%s); it is polled", error)
            self._look(instance, processes)

    def _look(self, instance: str, processes: list[Shared]) -> None:
        if instance not in self._followed:
            return
        try:
            for each in processes:
                _check(each)
        except KVTierError:
            self._ended(instance)
            return
        except OSError as error:
            logger.debug("kvtier: peer fetch: a process cannot be looked up now (%s)", error)
        self._reactor.call_later(RECHECK_SECONDS, partial(self._look, instance, processes))

    def _ended(self, instance: str) -> None:
        descriptors = self._followed.pop(instance, None)
        if descriptors is None:
            return
        self._drop(descriptors)
        self._gone(instance)

    def _drop(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            self._reactor.remove_fd(descriptor)
            os.close(descriptor)

    def _close(self) -> None:
        while self._followed:
            self._drop(self._followed.popitem()[1])
