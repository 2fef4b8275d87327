"""Leases of other engines' blocks: requests them, keeps them alive and releases them.

Runs on the reactor's thread; the scheduler's thread calls ``ask``, ``cancel`` and ``release``, which only queue, and
reads ``PendingLease.outcome``. Engines of this node are reached over their Unix socket (``wire.local``), others over
TCP. After a handshake that failed or was refused the address is not asked for a while, so that each request does not
wait for it.

The requests on a connection that ends or cannot be made end at once, as "unreachable". Time limits find a peer that
stops answering without that (its machine is gone, or it hangs).
"""

import itertools
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import zmq

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import remember_peer
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.leases.exports import Refusal
from vllm_kvtier.scheduler.leases.pending_leases import FollowedLease, LeasedBlocks, PendingLease, Rehash
from vllm_kvtier.scheduler.matching.transfer_params import Address, PrefillHandoff
from vllm_kvtier.scheduler.sources.base import LookupHit, LookupMiss
from vllm_kvtier.shapes.read_paths import Reach, ReadPath
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey, is_loopback
from vllm_kvtier.wire.dealer import Dealer, endpoint_of
from vllm_kvtier.wire.lease_connections import ClientConnection, LeaseConnections
from vllm_kvtier.wire.local import LocalDealer
from vllm_kvtier.wire.reactor import Reactor, Timer

logger = get_logger(__name__)

SAME_NODE = -1  # in place of a port: the address is the name of an instance, by which its socket on this node is found
REFUSED_PAUSE = 30.0  # seconds before an incompatible peer is asked again
REFUSED_RELEASES = 1.0  # seconds between handshakes with one for the sake of the exports that it keeps for us
MAX_REFUSED = 4096  # of these, until the next
DOWN_PAUSE = 2.0  # seconds before an unreachable peer is asked again
IDLE_CLOSE_SECONDS = 600.0  # seconds after which an unused connection is closed
MAX_CONNECTIONS = 512
MIN_LEASE_SECONDS = 0.3  # heartbeats keep no shorter ones
MAX_HASH_SIZE_RATIO = 64  # of two engines' hash blocks
MAX_FOLLOW_WAITS = 10  # a prefill may wait in its engine's queue for so many times ``transfer_timeout``

# Codes of refusals. They become labels of metrics, and a process at an address that a client named may send any.
REFUSAL_CODES = frozenset(
    {"namespace_mismatch", "peer_restarted", "peer_starting", "malformed", *(each.value for each in Refusal)}
)
# Causes that the user can remove; the others are normal.
LOGGED_CODES = ("namespace_mismatch", "layout", "malformed", "timeout", "unreachable")


@dataclass(eq=False)
class _Connection(ClientConnection):
    welcome: m.Welcome | None = None
    reach: Reach | None = None  # with ``welcome``
    hash_block_size: int = 0  # ours, as we greeted
    waiting: list[PendingLease] = field(default_factory=list)  # for the handshake
    asked: dict[int, PendingLease] = field(default_factory=dict)
    unanswered: int = 0  # asks in a row that timed out
    lost: LookupMiss | None = None  # its connection ended, and leases wait for ZMQ to make it anew


class LeaseClient(LeaseConnections[_Connection]):
    def __init__(
        self,
        reactor: Reactor,
        config: KVTierConfig,
        key: ClusterKey | None,
        hello: Callable[[], m.Hello | None],
        reach: Callable[[list[m.RankInfo]], Reach],
        world: int = 1,
    ):
        """``hello``: our greeting, None while the engine starts or sleeps: then nothing is asked. ``reach``: how our
        ranks can read a peer's. ``world``: the number of our ranks."""
        super().__init__(reactor, m.decode_engine, _Connection)
        self._config, self._key = config, key
        self._hello, self._reach, self._world = hello, reach, world
        # A followed prefill gives up without an answer for as long as a transfer may take.
        self._heartbeat_seconds = min(config.lease_seconds, config.transfer_timeout) / 3
        self._unmappable: OrderedDict[str, None] = OrderedDict()  # instances
        self._unreadable: OrderedDict[str, float] = OrderedDict()  # instance -> time from which another request may try
        self._kept: Mapping[str, PrefillHandoff] = {}  # see ``keep_exports``
        self._refused: dict[Address, list[str]] = {}  # exports of peers that refuse us, to be released
        self._keeping: Timer | None = None
        self._keep_at = math.inf  # when it fires
        self.steps: Callable[[], int] = itertools.count().__next__  # number of those that vLLM has scheduled
        self._kept_step = -1  # when exports were last kept
        self._lookup_ids = itertools.count(1)
        reactor.on_stop(self._release_all)

    # -- scheduler's thread ------------------------------------------------------------------------------------

    def ask(
        self,
        address: Address,
        timeout: float = math.inf,
        same_node_instance: str = "",
        prefer_mapped: bool = False,
        rehash: Rehash | None = None,
        **fields: Any,
    ) -> PendingLease:
        """Queue a request; the answer, a refusal or a time-out appears in ``outcome``. ``timeout``: seconds, if fewer
        than the option's. ``same_node_instance``: the instance, if it should be on this node. ``prefer_mapped``: copy
        from mapped memory, if that is possible, whatever the option ``same_node_pulls`` says. ``rehash``: replaces
        fields for an engine with another block size; without it such an engine is not asked."""
        request = m.LeaseRequest(lookup_id=next(self._lookup_ids), instance="", **fields)
        deadline = time.monotonic() + min(timeout, self._config.lookup_timeout)
        pending = PendingLease(address, request, deadline, same_node_instance, prefer_mapped, rehash)
        connection = self._connections.get(address)
        reach = connection.reach if connection is not None else None
        pending.on_this_node = reach is not None and ReadPath.MAPPED in reach.paths
        self._reactor.call_soon(lambda: self._begin(pending))
        return pending

    def follow(
        self,
        address: Address,
        max_wait: float,
        notify: Callable[[], object],
        rehash: Rehash | None = None,
        **fields: Any,
    ) -> FollowedLease:
        """Queue a lease request for a prefill that may not have ended. ``max_wait``: seconds without an answer, or
        without a further one, after which it ends. ``stop_following`` must follow, whatever came. ``notify``: called on
        the reactor's thread after each change. ``rehash``: as of ``ask``."""
        fields["wait_seconds"] = min(max_wait, 86400.0)
        request = m.LeaseRequest(lookup_id=next(self._lookup_ids), instance="", follow=True, **fields)
        deadline = time.monotonic() + max_wait
        last = time.monotonic() + MAX_FOLLOW_WAITS * max_wait
        pending = FollowedLease(
            address, request, deadline, rehash=rehash, max_wait=max_wait, last_deadline=last, notify=notify
        )
        self._reactor.call_soon(lambda: self._begin(pending))
        return pending

    def stop_following(self, pending: FollowedLease, done: bool) -> None:
        """Release all that was granted; what is granted from now on goes back at once. ``done``: the prefill engine may
        free the export. Idempotent."""
        self._reactor.call_soon(lambda: self._stop_following(pending, done))

    def cancel(self, pending: PendingLease) -> None:
        def cancel() -> None:
            pending.cancelled = True
            if isinstance(pending.outcome, LeasedBlocks):
                self._release(pending.outcome, done=False)

        self._reactor.call_soon(cancel)

    def release(self, leased: LeasedBlocks | LookupHit, done: bool) -> None:
        self._reactor.call_soon(lambda: self._release(leased, done))

    def release_export(self, address: Address, export: str) -> None:
        """Tell the engine at ``address`` that ``export`` will not be pulled. If the message is lost, it expires."""

        def send() -> None:
            paused = self._pause_reason(address)
            connection = self._connections.get(address) or (self._connect(address) if paused is None else None)
            if connection is not None:
                self._send(connection, m.ReleaseExport(export))
            elif paused is not None and paused.code != "unreachable":
                self._release_refused(address, export)

        self._reactor.call_soon(send)

    def keep_exports(self, exports: Mapping[str, PrefillHandoff], expires_in: float) -> None:
        """By request: prefills that engines are to keep, because their requests are queued here, perhaps for longer
        than they live. The caller goes on changing them, and calls this after it added one, with its ``expires_in``."""
        self._kept = exports
        if time.monotonic() + min(expires_in, self._config.handoff_seconds) / 3 < self._keep_at:
            self._reactor.call_soon(self._keep_later)

    def known(self, address: Address, instance: str) -> list[m.RankInfo] | None:
        """The ranks of an engine that we shook hands with, if it is still that instance and NIXL reads its pages as
        they lie."""
        connection = self._connections.get(address)
        if self._hello() is None or connection is None:
            return None
        welcome, reach = connection.welcome, connection.reach  # the reactor sets ``reach`` last
        if welcome is None or reach is None or welcome.instance != instance or connection.lost is not None:
            return None
        if instance in self._unreadable:
            return None
        return welcome.ranks if self._path(instance, reach, False) is ReadPath.DIRECT else None

    def unmappable(self, instance: str) -> None:
        """The workers cannot map this engine's memory: from now on it is read by NIXL, if at all."""
        remember_peer(self._unmappable, instance, None)

    def unreadable(self, instance: str) -> None:
        """The workers' last read by NIXL failed, or did not end in time, though the engine answers. Until ``readable``
        one request in ``transfer_timeout`` tries again: the others would wait for as long as that."""
        remember_peer(self._unreadable, instance, self._unreadable.get(instance, 0.0))

    def readable(self, instance: str) -> None:
        self._unreadable.pop(instance, None)

    def _path(self, instance: str, reach: Reach, prefer_mapped: bool) -> ReadPath | None:
        """The path by which this engine is read; None: by none."""
        nixl = [ReadPath.DIRECT, ReadPath.STAGED]
        order = [ReadPath.DIRECT, ReadPath.MAPPED, ReadPath.STAGED]
        option = self._config.same_node_pulls
        if prefer_mapped or option == "mapped" or (option == "auto" and reach.by_kernels):
            order = [ReadPath.MAPPED, *nixl]
        elif option == "nixl":
            order = nixl
        mappable = instance not in self._unmappable
        return next((path for path in order if path in reach.paths and (mappable or path in nixl)), None)

    def held_leases(self) -> int:
        return sum(len(c.leases) for c in list(self._connections.values()))

    # -- reactor's thread --------------------------------------------------------------------------------------

    def _begin(self, pending: PendingLease) -> None:
        if self._hello() is None:
            self._set_outcome(pending, LookupMiss("unreachable", "this engine is still starting, or sleeps"))
            return
        here, connection = (pending.same_node_instance, SAME_NODE), None
        paused = self._pause_reason(here) or self._pause_reason(pending.address)
        if paused is not None:
            self._set_outcome(pending, paused)
            return
        if pending.same_node_instance:
            connection = self._connections.get(here) or self._connect(here)
        if connection is None:
            connection = self._connections.get(pending.address) or self._connect(pending.address)
        if connection is None:
            self._set_outcome(pending, LookupMiss("unreachable", "no connection can be made to this address"))
            return
        if connection.lost is not None:
            self._set_outcome(pending, connection.lost)
            return
        connection.last_used = time.monotonic()
        pending.timer = self._reactor.call_later(
            max(0.0, pending.deadline - time.monotonic()), lambda: self._timed_out(connection, pending)
        )
        if connection.welcome is None:
            connection.waiting.append(pending)
        else:
            self._send_ask(connection, pending)

    def _release_refused(self, address: Address, export: str) -> None:
        """A peer that refuses our handshake releases what is named behind it. Not a handshake for each: it has one for
        all of a while."""
        names = self._refused.get(address)
        if names is None and len(self._refused) < MAX_CONNECTIONS:
            names = self._refused[address] = []
            self._reactor.call_later(REFUSED_RELEASES, lambda: self._flush_refused(address))
        if names is not None and len(names) < MAX_REFUSED:
            names.append(export)

    def _flush_refused(self, address: Address) -> None:
        names = self._refused.pop(address)
        connection = self._connections.get(address) or self._connect(address)
        if connection is not None:
            for name in names:
                self._send(connection, m.ReleaseExport(name))

    def _connect(self, address: Address) -> _Connection | None:
        hello = self._hello()
        if hello is None:
            return None
        host, port = address
        if port != SAME_NODE and self._key is None and not is_loopback(host.strip("[]")):
            # A client may have named it, and this engine would compute with what it sends.
            self._log_once(address, "the address is not loopback and no cluster_key_file is set")
            return None
        if len(self._connections) >= MAX_CONNECTIONS and not self._close_longest_unused():
            self._log_once(address, f"{MAX_CONNECTIONS} connections are open already")
            return None
        try:
            connect: Callable[..., LocalDealer | Dealer]
            if port == SAME_NODE:
                connect = partial(LocalDealer, self._reactor, host, m.MAX_MESSAGE)
            else:
                connect = partial(Dealer, self._reactor, endpoint_of(host, port), self._key, m.MAX_MESSAGE)
            connection = self._open(address, hello, connect)
        except (KVTierError, OSError, zmq.ZMQError, ValueError) as error:
            if port != SAME_NODE:
                self._log_once(address, f"cannot connect: {error}")
            return None
        connection.hash_block_size = hello.namespace.hash_block_size
        late = LookupMiss("unreachable", "the handshake was not answered")
        self._after(
            connection, "hello", self._config.handshake_timeout, lambda: self._close(connection, late, DOWN_PAUSE)
        )
        self._watch_idle(connection)
        return connection

    def _close_longest_unused(self) -> bool:
        """False if all connections are in use."""
        unused = [each for each in self._connections.values() if not (each.leases or each.asked or each.waiting)]
        if unused:
            self._close(min(unused, key=lambda each: each.last_used), LookupMiss("idle", "idle"), 0.0)
        return bool(unused)

    def _lost(self, connection: _Connection, why: str) -> None:
        """The connection ended, or could not be made: its requests will not be answered."""
        outcome = LookupMiss("unreachable", why)
        known = connection.welcome is not None
        if known:  # the silent peer is gone; the next request finds out at once whether another listens
            self._paused.pop(connection.address, None)
        if not connection.leases or isinstance(connection.dealer, LocalDealer):  # that process has ended
            self._close(connection, outcome, 0.0 if known else DOWN_PAUSE)
            return
        # Perhaps only the connection broke: heartbeats and releases that wait in the socket go out when ZMQ has made it
        # anew. A request among them is granted, and released at once.
        connection.lost = outcome
        self._end_asks(connection, outcome)
        if "lost" not in connection.timers:
            self._after(connection, "lost", self._config.lease_seconds, lambda: self._close(connection, outcome, 0.0))

    def _found(self, connection: _Connection) -> None:
        connection.lost = None
        connection.cancel("lost")

    def _malformed(self, connection: _Connection, reason: str) -> None:
        self._close(connection, LookupMiss("malformed", reason), REFUSED_PAUSE)

    def _handle(self, connection: _Connection, message: m.EngineMessage) -> None:
        if connection.unanswered:  # slow, but alive
            connection.unanswered = 0
            self._paused.pop(connection.address, None)
        match message:
            case m.Welcome():
                self._welcomed(connection, message)
            case m.LeaseGranted():
                self._granted(connection, message)
            case m.StillPrefilling():
                pending = connection.asked.get(message.lookup_id)
                if isinstance(pending, FollowedLease):
                    self._wait_on(connection, pending)
            case m.LeaseRefused(lookup_id=0):
                pause = DOWN_PAUSE if message.code == "peer_starting" else REFUSED_PAUSE
                self._close(connection, _refusal(message), pause)
            case m.LeaseRefused(code="peer_restarted"):
                self._restarted(connection, _refusal(message))
            case m.LeaseRefused() if message.lookup_id in connection.asked:
                self._fail(connection.asked.pop(message.lookup_id), _refusal(message))
            case m.LeaseRefused():
                pass  # its request has timed out
            case _:
                raise msgspec.DecodeError(f"unexpected {type(message).__name__}")

    def _restarted(self, connection: _Connection, outcome: LookupMiss) -> None:
        """Another instance answers at this address: greet it, and send the requests once more: they may be for it."""
        again = [p for p in connection.asked.values() if not (p.again or p.cancelled) and p.outcome is None]
        for pending in again:
            del connection.asked[pending.request.lookup_id]
            if pending.timer is not None:
                pending.timer.cancel()
            pending.again = True
        self._close(connection, outcome, 0.0)
        for pending in again:
            self._begin(pending)

    def _welcomed(self, connection: _Connection, welcome: m.Welcome) -> None:
        connection.cancel("hello")
        connection.welcome, connection.reach = welcome, self._reach(welcome.ranks)
        waiting, connection.waiting = connection.waiting, []
        for pending in waiting:
            if pending.outcome is None and not pending.cancelled:
                self._send_ask(connection, pending)

    def _send_ask(self, connection: _Connection, pending: PendingLease) -> None:
        welcome, reach = connection.welcome, connection.reach
        assert welcome is not None and reach is not None, "requests wait for the handshake"
        path = self._path(welcome.instance, reach, pending.prefer_mapped)
        if path is None:
            self._set_outcome(pending, LookupMiss("layout", reach.reason or "its memory cannot be mapped"))
            return
        request, size = self._rehash(connection, pending), welcome.hash_block_size or connection.hash_block_size
        if isinstance(request, LookupMiss):
            self._set_outcome(pending, request)
            return
        if not request.export and max(request.partial_up_to, len(request.block_hashes) * size) <= request.start:
            self._set_outcome(pending, LookupMiss(Refusal.NOTHING.value, "no whole block of the prompt lacks"))
            return
        if path is not ReadPath.MAPPED and self._unreadable.get(welcome.instance, 0.0) > time.monotonic():
            self._set_outcome(pending, LookupMiss("unreachable", "NIXL's last read from it failed or took too long"))
            return
        pending.path, pending.tries = path, path is not ReadPath.MAPPED and welcome.instance in self._unreadable
        connection.asked[request.lookup_id] = pending
        request = msgspec.structs.replace(
            request,
            instance=welcome.instance,
            mapped=path is ReadPath.MAPPED,
            stretches=request.stretches and path is not ReadPath.STAGED,
        )
        self._send(connection, request)
        if request.follow:
            self._keep_alive(connection, self._heartbeat_seconds)

    @staticmethod
    def _rehash(connection: _Connection, pending: PendingLease) -> m.LeaseRequest | LookupMiss:
        """The request for the block size of the connection's engine; the reason if that is impossible."""
        theirs, ours = connection.welcome.hash_block_size if connection.welcome else 0, connection.hash_block_size
        if theirs in (0, ours):
            return pending.request
        reason = f"the block size differs: {ours} here, {theirs} there"
        if pending.rehash is None or max(theirs, ours) > MAX_HASH_SIZE_RATIO * min(theirs, ours):
            return LookupMiss("layout", f"{reason}, and this prompt cannot be hashed in blocks of {theirs}")
        try:
            return msgspec.structs.replace(pending.request, **pending.rehash(theirs))
        except KVTierError as error:
            return LookupMiss("layout", f"{reason}, and {error}")
        except Exception as error:
            logger.exception("kvtier: lease client: hashing a prompt in blocks of %d tokens failed", theirs)
            return LookupMiss("layout", f"{reason}, and hashing the prompt failed: {error}")

    def _granted(self, connection: _Connection, granted: m.LeaseGranted) -> None:
        pending = connection.asked.get(granted.lookup_id)
        leased = self._leased(connection, granted, pending)
        connection.leases.add(granted.lease)
        # The time is the peer's: its option may be shorter than ours.
        self._keep_alive(connection, min(self._heartbeat_seconds, max(MIN_LEASE_SECONDS, granted.expires_in) / 3))
        # Not of one that was asked before, and perhaps read early: that read may be the one that failed.
        if pending is not None and pending.tries and not pending.cancelled and leased.instance in self._unreadable:
            self._unreadable[leased.instance] = time.monotonic() + self._config.transfer_timeout
        if isinstance(pending, FollowedLease):
            self._granted_stretch(connection, pending, leased)
            return
        connection.asked.pop(granted.lookup_id, None)
        if pending is None or pending.cancelled or pending.outcome is not None:
            self._release(leased, done=False)  # too late: no request waits for it
            if pending is not None and pending.timer is not None:
                pending.timer.cancel()  # it was answered: the peer is not to be taken for silent
        else:
            self._set_outcome(pending, leased)

    def _granted_stretch(self, connection: _Connection, pending: FollowedLease, leased: LeasedBlocks) -> None:
        connection.last_used = time.monotonic()
        pending.last_deadline = time.monotonic() + MAX_FOLLOW_WAITS * pending.max_wait
        self._wait_on(connection, pending)
        if leased.final:
            del connection.asked[pending.request.lookup_id]
            if pending.timer is not None:
                pending.timer.cancel()
        pending.grants.append(leased)
        if pending.outcome is None:
            pending.outcome = leased
            pending.answered.set()
        pending.notify()

    def _wait_on(self, connection: _Connection, pending: FollowedLease) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        pending.deadline = min(time.monotonic() + pending.max_wait, pending.last_deadline)
        seconds = max(0.0, pending.deadline - time.monotonic())
        pending.timer = self._reactor.call_later(seconds, lambda: self._timed_out(connection, pending))

    def _stop_following(self, pending: FollowedLease, done: bool) -> None:
        pending.cancelled = True
        if pending.timer is not None:
            pending.timer.cancel()
        for connection in list(self._connections.values()):
            if pending in connection.waiting:
                connection.waiting.remove(pending)
            if connection.asked.get(pending.request.lookup_id) is pending:
                del connection.asked[pending.request.lookup_id]
                self._send(connection, m.StopFollowing(pending.request.lookup_id))
        for leased in pending.grants:
            self._release(leased, done and leased.final)

    def _fail(self, pending: PendingLease, outcome: LookupMiss) -> None:
        """No answer, or no further one, comes."""
        if pending.outcome is None:
            self._set_outcome(pending, outcome)
        if isinstance(pending, FollowedLease):
            if pending.timer is not None:
                pending.timer.cancel()
            if pending.ended is None:
                pending.ended = outcome
            pending.notify()

    def _leased(self, connection: _Connection, granted: m.LeaseGranted, pending: PendingLease | None) -> LeasedBlocks:
        welcome, reach = connection.welcome, connection.reach
        ranks = welcome.ranks if welcome is not None else []
        groups = ranks[0].groups if ranks else ()
        nbytes = sum(len(ids) * group.block_bytes for ids, group in zip(granted.blocks, groups, strict=False))
        return LeasedBlocks(
            connection.address if pending is None else pending.address,
            welcome.instance if welcome is not None else "", granted.lease, granted.start, granted.tokens,
            granted.blocks, ranks, ReadPath.DIRECT if pending is None else pending.path,
            reach is not None and ReadPath.DIRECT in reach.paths, int(nbytes * len(ranks) / max(1, self._world)),
            granted.tail, granted.final, welcome.hash_block_size if welcome is not None else 0,
            tuple(group.block_tokens for group in groups),
        )  # fmt: skip

    def _timed_out(self, connection: _Connection, pending: PendingLease) -> None:
        # A grant that still comes is released on arrival.
        sent = connection.asked.pop(pending.request.lookup_id, None) is not None
        if pending in connection.waiting:
            connection.waiting.remove(pending)
        if isinstance(pending, FollowedLease):  # the prefill may wait for its turn: the engine is not taken for silent
            if sent and self._connections.get(connection.address) is connection:
                self._send(connection, m.StopFollowing(pending.request.lookup_id))
            self._fail(pending, LookupMiss("timeout", "the prefill took too long"))
        elif pending.outcome is None:
            outcome = LookupMiss("timeout", "no answer in time")
            if sent and self._connections.get(connection.address) is connection:
                # It may have died since the handshake: not every request should have to wait.
                connection.unanswered += 1
                pause = min(DOWN_PAUSE * 2 ** (connection.unanswered - 1), REFUSED_PAUSE)
                self._pause(connection.address, pause, outcome)
            self._set_outcome(pending, outcome)

    def _set_outcome(self, pending: PendingLease, outcome: LeasedBlocks | LookupMiss) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        if isinstance(outcome, LookupMiss) and outcome.code in LOGGED_CODES:
            self._log_once(pending.address, f"{outcome.reason}; prompts are computed instead")
        pending.outcome = outcome
        pending.answered.set()

    def _heartbeat(self, connection: _Connection) -> bool:
        needed = bool(connection.leases) or any(each.request.follow for each in connection.asked.values())
        if needed:
            self._send(connection, m.Ping())
        return needed

    def _keep_later(self) -> None:
        """In a third of the shortest time that one of them lives for. If that is not known, it is taken for ours."""
        pause = min([self._config.handoff_seconds, *(each.expires_in for each in list(self._kept.values()))]) / 3
        at = time.monotonic() + pause
        if at < self._keep_at:
            if self._keeping is not None:
                self._keeping.cancel()
            self._keep_at, self._keeping = at, self._reactor.call_later(pause, self._keep)

    def _keep(self) -> None:
        self._keep_at, self._keeping = math.inf, None  # first: an export that is added from now on finds no timer
        exports: defaultdict[Address, list[str]] = defaultdict(list)
        before, self._kept_step = self._kept_step, self.steps()
        for each in list(self._kept.values()) if self._kept_step != before else ():  # else vLLM hangs
            exports[each.address].append(each.export)
        for address, names in exports.items():
            connection = self._connections.get(address)
            if connection is None and self._pause_reason(address) is None:
                connection = self._connect(address)
            if connection is None:
                continue
            for i in range(0, len(names), m.MAX_KEPT_EXPORTS):
                self._send(connection, m.Ping(names[i : i + m.MAX_KEPT_EXPORTS]))
        if self._kept:
            self._keep_later()

    def _watch_idle(self, connection: _Connection) -> None:
        """Close a connection that was not used for long: its peer may be gone for good."""
        left = connection.last_used + IDLE_CLOSE_SECONDS - time.monotonic()
        if left <= 0 and not (connection.leases or connection.asked):
            self._close(connection, LookupMiss("idle", "idle"), 0.0)
        else:
            self._after(connection, "idle", max(left, 1.0), lambda: self._watch_idle(connection))

    def _release(self, leased: LeasedBlocks | LookupHit, done: bool) -> None:
        for address in ((leased.instance, SAME_NODE), leased.address):
            connection = self._connections.get(address)
            if connection is None or leased.lease not in connection.leases:
                continue  # the connection is gone and the lease with it
            if connection.welcome is None or connection.welcome.instance != leased.instance:
                continue  # the engine was restarted: that number is another request's lease there
            connection.leases.discard(leased.lease)
            self._send(connection, m.Release(leased.lease, done))
            return

    def _release_all(self) -> None:
        for connection in self._connections.values():
            for lease in connection.leases:
                self._send(connection, m.Release(lease, done=False))
            if isinstance(connection.dealer, LocalDealer):  # ZMQ's go with their context, when this has left
                connection.dealer.close()

    def _close(self, connection: _Connection, outcome: LookupMiss, pause: float) -> None:
        """End the connection; every ask on it ends with ``outcome``."""
        if self._end(connection):
            if pause:
                self._pause(connection.address, pause, outcome)
            self._end_asks(connection, outcome)

    def _end_asks(self, connection: _Connection, outcome: LookupMiss) -> None:
        asks = [*connection.waiting, *connection.asked.values()]
        connection.waiting, connection.asked = [], {}
        for pending in asks:
            self._fail(pending, outcome)

    def _log_once(self, address: Address, text: str) -> None:
        if self._is_new(address, text):
            # A host comes with a request: whatever is in it, it does not begin a line of the log or break it.
            words = ascii(f"{address[0]}:{address[1]}: {text}")[1:-1]
            logger.warning("kvtier: no pull from %s", words)


def _refusal(message: m.LeaseRefused) -> LookupMiss:
    return LookupMiss(message.code if message.code in REFUSAL_CODES else "refused", message.reason)
