"""Scheduler half of the connector: wires matching, exporting, the endpoint and the peers to vLLM's calls.

Two threads: vLLM's scheduler thread, which owns block tables and the pool, and a reactor with all sockets. They meet
in ``ExportTable`` (locked), in queued calls, and in the ``outcome`` of what was asked. The scheduler's thread never
waits, but for milliseconds for the node store where nobody else is served, and where vLLM resets its prefix cache.
"""

import hashlib
import logging
import os
import time
from typing import Any

import msgspec

from vllm_kvtier.codecs import Codec, choice
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.endpoint import Endpoint
from vllm_kvtier.scheduler.exporting import Exporter, alignment
from vllm_kvtier.scheduler.exports import ExportTable, Kind
from vllm_kvtier.scheduler.hurry import Hurry
from vllm_kvtier.scheduler.ledger import Keys, Ledger
from vllm_kvtier.scheduler.lifecycle import State
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.offloading import Offloader
from vllm_kvtier.scheduler.pace import Pace
from vllm_kvtier.scheduler.params import write, write_report
from vllm_kvtier.scheduler.peers import Address, Peers
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.questions import Questions
from vllm_kvtier.scheduler.tables import BlockTables
from vllm_kvtier.scheduler.tier import HostOffer, HostTier
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.vllm_compat.engine import EngineThread
from vllm_kvtier.vllm_compat.facts import EngineFacts
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.geometry import geometry_mismatch
from vllm_kvtier.wire.link import LinkServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.offload import LoadResult
from vllm_kvtier.worker.pulls import PullResult
from vllm_kvtier.worker.work import LoadOrder, PullOrder, StepWork

logger = logging.getLogger("vllm.kvtier.scheduler")

# A reset of vLLM's prefix cache waits so long for copies to the node store to end; they take milliseconds. A store that
# hangs is given up after ``ask_timeout``, and only then are the blocks free that it was asked about.
RESET_PATIENCE = 1.0


class SchedulerHalf:
    def __init__(
        self, facts: EngineFacts, config: KVTierConfig, link_path: str, pool: BlockPool, connector: Any = None
    ):
        """``connector``: what this is a half of. Raises ConfigError if the endpoint cannot listen or the cluster key is
        unusable."""
        self._facts, self._config, self._pool = facts, config, pool
        self.counters = Counters()
        key = ClusterKey.load(config.cluster_key_file) if config.cluster_key_file else None
        budget = {
            Kind.HANDOFF: int(pool.num_blocks * config.handoff_share),
            Kind.RETAINED: int(pool.num_blocks * config.retain_share),
        }
        unit = pool.hash_block_tokens
        longest = 3 * config.transfer_timeout + config.lease_seconds  # an honest reader is through long before
        self._exports = ExportTable(
            unit, budget, align=alignment(facts.groups, unit) // unit, longest_lease=longest
        )
        self._engine = EngineThread(self._on_idle)
        self._namespace: m.Namespace | None = None
        self._salt: Keys | None = None
        self._codec: str | dict[str, str] = Codec.RAW  # of the store, without "auto"
        self._wire_codec: str | dict[str, str] = Codec.RAW
        self._wire_codecs: dict[int, str | dict[str, str]] = {}  # as each rank understood the option
        self._ranks: dict[int, m.RankInfo] = {}
        self._summed: dict[int, int] = {}
        self._failed_loads: set[str] = set()
        self._slowest: dict[str, tuple[float, bool]] = {}  # request -> seconds of the slowest rank, exact or at most
        # A restarted engine is another instance, even with the same configured engine id and address.
        self.instance = f"{facts.engine_id}/{os.urandom(4).hex()}"
        self._reactor = Reactor("kvtier-scheduler")
        self._link = LinkServer(self._reactor, link_path, self._heard)
        self._endpoint = Endpoint(
            self._reactor, config, key, self._exports,
            on_freed=self._engine.wake,
            on_question=lambda question, answer: self._questions.ask(question, answer),
            on_serving=lambda active: self._link.tell(m.Serve(active)),
            on_puller=lambda ask: self._matcher.whereabouts.note(ask.chain[-1], (ask.reply_host, ask.reply_port))
            if ask.chain
            else None,
            port_offset=facts.data_parallel_rank,
        )
        self._peers = Peers(self._reactor, config, key, self._hello, self._check_ranks)
        ledger = Ledger()
        self._ledger = ledger
        self._described: dict[int, m.Described] = {}
        self._planner = Planner({"host": facts.link_bandwidth}, step_tokens=facts.step_tokens, known=2)
        self._pace = Pace(self._planner)
        self._tier = self._offloader = None
        if config.store != "off" and not facts.unsupported:
            self._tier = HostTier(
                config, facts, unit, self._reactor, self._link.tell, on_lost=self._store_lost
            )
            self._offloader = Offloader(
                config, self._tier, pool, self._keys, facts.groups, self.counters, self._reactor, self._link.tell,
                on_free=self._engine.wake,
            )
        wait = config.sync_load_ms if facts.waits and facts.groups[0][0] == unit else 0.0
        self._hurry = Hurry(wait, config.transfer_timeout, pool, lambda: self._engine.scheduler, connector)
        self._matcher = Matcher(
            config, self._peers, ledger, self._keys, facts.groups, unit, lambda: self.address, self.counters,
            facts.resumes, self._tier, self._planner, self._hurry,
        )
        self._exporter = Exporter(
            config, self._exports, pool, ledger, self._keys, facts.groups, self.counters, facts.hash_lookahead > 0
        )
        offload = self._offloader is not None and self._offloader.wanted()
        self._tables = BlockTables(
            facts.groups, unit, ledger.forget, lambda t: offload or self._exporter.kind(t) is not None
        )
        self._questions = Questions(
            facts, pool, self._exports, self._peers, self._matcher, self._tier, self._offloader, self._engine.wake
        )
        pool.before_reset(self._before_reset)
        self._reactor.start()

    @property
    def address(self) -> Address:
        return self._endpoint.host, self._endpoint.port

    # -- vLLM's calls (scheduler's thread) ---------------------------------------------------------------------------

    def queued(self, request: Any) -> None:
        """vLLM will schedule a request, after others: what of it lies below the store's memory may come up already."""
        if self._tier is not None and len(self._matcher) and not self._facts.unsupported:
            self._matcher.warm(request)

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        self._settle_namespace()
        self._run_jobs()
        if self._facts.unsupported:
            return 0, False
        if overdue := self._hurry.overdue():
            self.arrived([overdue], set())
        tokens, asynchronous = self._matcher.match(request, computed)
        if tokens is not None:
            self._relieve(self._exporter.needed(request.num_tokens - computed))
        return tokens, asynchronous

    def _relieve(self, needed: int) -> None:
        """vLLM needs ``needed`` blocks: exports and copies that hold some give way, in this order."""
        if needed > self._pool.free_count():
            self._exporter.relieve(needed)
            short = needed - self._pool.free_count()
            if short > 0 and self._offloader is not None:
                self._offloader.relieve(short)

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        if not self._facts.unsupported:
            self._matcher.allocated(request, block_ids, external)

    def source(self, request_id: str) -> str:
        """Where the KV of this request is being brought from: handoff, retained or host."""
        tracked = self._matcher.get(request_id)
        return tracked.source if tracked is not None else ""

    def begin_step(self, output: Any) -> StepWork:
        self._run_jobs()
        self._relieve(self._exporter.reserve(len(output.num_scheduled_tokens)))
        growth = self._tables.begin_step(output, self._matcher.get)
        # A step that waits for a load says nothing about computing; and what it computes is looked at when all is
        # known to be right: as the request grows further, or at its end.
        hurried = self._hurry.awaits_verdict
        self._pace.begin_step(output, self._matcher.get, counts=not hurried)
        if hurried:
            growth = [each for each in growth if each.tracked.life.state is not State.VERIFYING]
        sums = self._exporter.begin_step(growth)
        if self._offloader is not None:
            self._offloader.begin_step(self._exporter.step, growth)
        orders, introductions = self._matcher.take_orders()
        pulls = [order for order in orders if isinstance(order, PullOrder)]
        loads = [order for order in orders if isinstance(order, LoadOrder)]
        aborted, idle = self._matcher.take_aborted(), not output.total_num_scheduled_tokens
        return StepWork(self._exporter.step, sums, pulls, introductions, loads, aborted, idle)

    def end_step(self) -> None:
        """A step's output was read."""
        self._pace.end_step()

    def arrived(self, results: list[PullResult | LoadResult], finished: set[str]) -> None:
        """``results`` of any rank; ``finished`` are the requests all ranks are through with, as vLLM counts."""
        judged = self._hurry.judged(results)
        for result in results:
            kind = "load" if isinstance(result, LoadResult) else "pull"
            self.counters.count(f"{kind}s", self._outcome(result))
            if result.request_id in judged:
                self.counters.count("synchronous_loads", self._outcome(result))
            self.counters.count(f"{kind}ed_bytes", amount=result.bytes)
            self.counters.count(f"{kind}_seconds", amount=result.seconds)
            if result.failed:
                self._failed_loads.add(result.request_id)
                if kind == "load" and result.corrupt:
                    self.counters.count("integrity_failures", amount=len(result.corrupt))
                    self._matcher.discard(result.request_id, result.corrupt)
                elif result.checksum:
                    self.counters.count("integrity_failures", amount=len(result.bad_blocks))
            elif kind == "load":
                seconds, timed = self._slowest.get(result.request_id, (0.0, True))
                self._slowest[result.request_id] = max(result.seconds, seconds), timed and result.timed
        for request_id in finished | judged:
            self._hurry.settle(request_id, results)
            tracked = self._matcher.get(request_id)
            failed = request_id in self._failed_loads
            self._failed_loads.discard(request_id)
            slowest = self._slowest.pop(request_id, None)
            if tracked is not None and not failed:
                name = "loaded_tokens" if tracked.source == "host" else "pulled_tokens"
                self.counters.count(name, tracked.source, tracked.pulled)
                if isinstance(tracked.offer, HostOffer):
                    self.counters.count("loaded_logical_bytes", amount=tracked.offer.logical)
                if slowest is not None and tracked.plan is not None:
                    seconds, timed = slowest
                    # What a load took at most says something only where more was expected.
                    if timed or seconds < tracked.plan.load_seconds:
                        self._planner.observe_load("host", tracked.offer.nbytes, tracked.plan.queued_bytes, seconds)
                    self.counters.count("planned_seconds", "expected", tracked.plan.load_seconds)
                    self.counters.count("planned_seconds", "taken", seconds)
                    self._count_stages(tracked, seconds)
            self._matcher.loaded(request_id, failed)

    def _count_stages(self, t: Tracked, seconds: float) -> None:
        """Where the time of a host hit went, until it could be scheduled or, if it was scheduled at once, verified."""
        end = t.ordered_at + seconds if t.hurried else time.monotonic()
        moments = t.begun_at, t.offered_at, t.ordered_at, end
        for stage, begin, end in zip(("asking", "placing", "loading"), moments, moments[1:], strict=False):
            self.counters.count("host_hit_seconds", stage, max(0.0, end - begin))

    def _outcome(self, result: PullResult | LoadResult) -> str:
        """For the metrics: a load that was stopped because its request was aborted is no failure."""
        tracked = self._matcher.get(result.request_id)
        aborted = tracked is not None and tracked.life.state is State.ABANDONED and isinstance(result, LoadResult)
        return "ok" if not result.failed else "aborted" if aborted and not result.checksum else "failed"

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """The request ended; returns the params for its answer. Its blocks are never held back: exports pin them."""
        tracked = self._matcher.finished(request)
        if self._hurry.awaits_verdict:
            self._hurry.finished(request, block_ids[0])
        table = self._tables.forget(request.request_id)
        if self._offloader is not None:
            self._offloader.finished(tracked, table, block_ids)
        if self._facts.unsupported or self._endpoint.unusable:
            export = None  # nobody could ask for it: pin nothing
        else:
            export = self._exporter.finished(tracked, block_ids)
        if export is not None:
            self._endpoint.changed()
        self._exporter.drain()
        if not tracked.hints.asked:
            return None
        report = tracked.report()
        if export is None:
            return write_report(report)
        return write(
            prefill=export.kind is Kind.HANDOFF,
            engine_id=self._facts.engine_id,
            instance=self.instance,
            address=self.address,
            export=export.id,
            tokens=export.tokens,
            digest=export.digest,
            block_ids=[group.ids for group in export.groups],
            seconds=self._config.handoff_seconds
            if export.kind is Kind.HANDOFF
            else self._config.retain_seconds,
            tensor_parallel=self._facts.tensor_parallel,
            report=report,
        )

    def has_pending_frees(self) -> bool:
        return self._exports.has_freed() or (self._offloader is not None and self._offloader.has_frees())

    @property
    def engine_scheduler(self) -> Any | None:
        return self._engine.scheduler

    def _before_reset(self) -> None:
        """The prefix cache is being reset, maybe for new weights: nothing may be pulled from it any more."""
        self._exports.clear()
        self._exporter.drain()
        self._ledger.clear()
        if self._offloader is not None:
            self._offloader.settle(self._config.ask_timeout + RESET_PATIENCE)

    def reset(self) -> bool:
        """vLLM was asked to reset its connector's cache as well: what this engine stored is no longer its own."""
        self._before_reset()
        if self._tier is not None:
            self._tier.renew()
            self._tables.clear()  # blocks from before must not go into the new space
        return True

    def shutdown(self) -> None:
        self._reactor.stop()

    # -- scheduler's thread, between calls -----------------------------------------------------------------------------

    def _on_idle(self) -> None:
        self._settle_namespace()
        self._run_jobs()

    def _run_jobs(self) -> None:
        self._exporter.drain()
        if self._offloader is not None:
            self._offloader.drain()
        self._questions.run()

    def _settle_namespace(self) -> None:
        """Once, when vLLM has made its hash seed: after the scheduler is built, before the first request."""
        if self._namespace is None:
            bare = self._facts.namespace(self._pool.hash_block_tokens, self._config.model_fingerprint)
            options = self._config.codec if self._tier is not None else Codec.RAW, self._config.wire_codec
            self._codec, self._wire_codec = (choice.resolve(option, self._facts.record_key) for option in options)
            words = choice.in_words(self._codec, self._wire_codec)
            self._namespace = msgspec.structs.replace(bare, codecs=words)
            digest = hashlib.blake2b(m.encode(self._namespace), digest_size=8).digest()
            self._salt = Keys(int.from_bytes(digest, "little"))
            self._reactor.call_soon(self._open_if_ready)

    def _keys(self) -> Keys:
        if self._salt is None:
            self._settle_namespace()
        return self._salt

    # -- reactor's thread --------------------------------------------------------------------------------------

    def _heard(self, message: m.LinkMessage) -> None:
        match message:
            case m.Described():
                self._described[message.rank] = message
                self._open_if_ready()
            case m.PoolReady() if self._tier is not None:
                self._tier.reached(message)
            case m.Stored() if self._offloader is not None:
                self._offloader.stored(message)
            case m.Register():
                self._ranks[message.info.rank] = message.info
                self._wire_codecs[message.info.rank] = message.wire_codec
                self._summed.setdefault(message.info.rank, -1)
                self._open_if_ready()
            case m.Unusable():
                self._endpoint.unusable = message.reason
                logger.warning("kvtier: this engine serves without pulls: %s", message.reason)
            case m.Summed():
                self._summed[message.rank] = max(self._summed.get(message.rank, -1), message.step)
                if len(self._summed) == self._facts.world_size:
                    self._endpoint.summed(min(self._summed.values()))

    def _open_if_ready(self) -> None:
        if self._namespace is None:
            return
        if self._tier is not None and not self._tier.opened and len(self._described) == self._facts.world_size:
            try:
                self._tier.open(self._namespace, self._described, self._codec)
            except ValueError as error:
                logger.warning("kvtier: serving without the node store: %s", error)
        if len(self._ranks) == self._facts.world_size:
            if any(codec != self._wire_codec for codec in self._wire_codecs.values()):
                # Each process looked for itself what "auto" means, and a record came in between. What it admits may
                # lose something that the namespace, which others go by, does not tell.
                self._heard(m.Unusable(0, "this model was measured while the engine started: restart it"))
                return
            ranks = [self._ranks[r] for r in sorted(self._ranks)]
            self._endpoint.open(self._namespace, m.Welcome(m.PROTOCOL, self.instance, ranks))
            logger.info("kvtier: engine %s answers on %s:%d", self._facts.engine_id, *self.address)

    def _store_lost(self) -> None:
        """What was reserved there is nobody's now, or somebody else's: what has not been copied is not to be."""
        self.counters.count("store_lost")
        self._offloader.lost()

    def _hello(self) -> m.Hello | None:
        if self._endpoint.unusable or self._namespace is None:
            return None
        return m.Hello(m.PROTOCOL, self.instance, self._namespace)

    def _check_ranks(self, theirs: list[m.RankInfo]) -> str | None:
        if sorted(info.rank for info in theirs) != sorted(self._ranks):
            return f"{len(self._ranks)} ranks here, {len(theirs)} there"
        for info in theirs:
            reason = geometry_mismatch(self._ranks[info.rank].geometry, info.geometry)
            if reason:
                return reason
        return None
