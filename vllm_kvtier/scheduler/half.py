"""Scheduler half of the connector: wires matching, exporting, the endpoint and the peers to vLLM's calls.

Two threads: vLLM's scheduler thread, which owns block tables and the pool, and a reactor with all sockets. They meet
in ``ExportTable`` (locked), in queued calls, and in the ``outcome`` of what was asked. The scheduler's thread never
waits, but for milliseconds for the node store where nobody else is served, and where vLLM resets its prefix cache.
"""

import hashlib
import logging
import os
from typing import Any

import msgspec

from vllm_kvtier.codecs import Codec, choice
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.endpoint import Endpoint
from vllm_kvtier.scheduler.events import Events
from vllm_kvtier.scheduler.explaining import Explainer, identity
from vllm_kvtier.scheduler.exporting import Exporter, alignment
from vllm_kvtier.scheduler.exports import ExportTable, Kind
from vllm_kvtier.scheduler.far import FarTier, is_far, tier_bandwidth
from vllm_kvtier.scheduler.gauges import Gauges
from vllm_kvtier.scheduler.hurry import Hurry
from vllm_kvtier.scheduler.ledger import Keys, Ledger
from vllm_kvtier.scheduler.lending import Lender
from vllm_kvtier.scheduler.lifecycle import State
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.offers import Address
from vllm_kvtier.scheduler.offloading import Offloader
from vllm_kvtier.scheduler.outcomes import Outcomes, Result
from vllm_kvtier.scheduler.pace import Pace
from vllm_kvtier.scheduler.params import write, write_report
from vllm_kvtier.scheduler.peers import Peers
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.questions import Questions
from vllm_kvtier.scheduler.sharing import Sharing
from vllm_kvtier.scheduler.tables import BlockTables
from vllm_kvtier.scheduler.tier import HostOffer, HostTier
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import events as vllm_events
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat import undo
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.vllm_compat.engine import EngineThread
from vllm_kvtier.vllm_compat.facts import EngineFacts
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.geometry import geometry_mismatch
from vllm_kvtier.wire.link import LinkServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.work import FetchOrder, LoadOrder, PullOrder, StepWork

logger = logging.getLogger("vllm.kvtier.scheduler")

# A reset of vLLM's prefix cache waits so long for peers to release what they read, and as long again for copies to the
# node store to end; both take milliseconds. A store that hangs is given up after ``ask_timeout``, and only then are the
# blocks free that it was asked about.
RESET_PATIENCE = 1.0
IDLE_TAKES = 4  # batches of KV events that an idle engine publishes in one go


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
            Kind.LENT: int(pool.num_blocks * config.lend_share),
        }
        unit = pool.hash_block_tokens
        longest = 3 * config.transfer_timeout + config.lease_seconds  # an honest reader is through long before
        align = alignment(facts.groups, unit) // unit
        self._exports = ExportTable(unit, budget, align=align, longest_lease=longest)
        self._engine = EngineThread(
            self._on_idle, connector, lambda engine: undo.settle_failure_policy(engine, config.kv_load_failure_policy)
        )
        self._namespace: m.Namespace | None = None
        self._salt: Keys | None = None
        self._codec: str | dict[str, str] = Codec.RAW  # of the store, without "auto"
        self._wire_codec: str | dict[str, str] = Codec.RAW
        self._wire_codecs: dict[int, str | dict[str, str]] = {}  # as each rank understood the option
        self._ranks: dict[int, m.RankInfo] = {}
        self._summed: dict[int, int] = {}
        # A restarted engine is another instance, even with the same configured engine id and address.
        self.instance = f"{facts.engine_id}/{os.urandom(4).hex()}"
        self._reactor = Reactor("kvtier-scheduler")
        self._link = LinkServer(self._reactor, link_path, self._heard)
        ledger = Ledger([size for size, _ in facts.groups])
        self._ledger = ledger
        lender = Lender(
            self._engine.turns, pool, ledger, self._exports, self._keys, facts.groups, unit, align,
            self.counters,
        )
        self._endpoint = Endpoint(
            self._reactor, config, key, self._exports,
            on_freed=self._freed,
            on_question=lambda question, answer: self._questions.ask(question, answer),
            on_serving=lambda active: self._link.tell(m.Serve(active)),
            on_puller=lambda ask: self._matcher.whereabouts.note(ask.chain[-1], (ask.reply_host, ask.reply_port))
            if ask.chain
            else None,
            lend=lender.ask,
            port_offset=facts.data_parallel_rank,
            instance=self.instance,
        )
        self._peers = Peers(self._reactor, config, key, self._hello, self._check_ranks, facts.world_size)
        if facts.unsupported:
            self._endpoint.unusable = facts.unsupported
        self._described: dict[int, m.Described] = {}
        bandwidths = {"host": tier_bandwidth(config, facts), "gpu": facts.peer_bandwidth}
        self._planner = Planner(bandwidths, step_tokens=facts.step_tokens, known=2)
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
        elif is_far(config) and not facts.unsupported:
            self._tier = FarTier(config, facts, unit, self._reactor, self._link.tell)
        self._events = None
        if self._offloader is not None and facts.publishes:
            self._events = Events(facts.groups, unit, self._reactor, self._engine.wake)
            self._tier.events = self._offloader.events = self._events
        self._sharing = None
        if self._offloader is not None and config.peer_fetch == "auto" and facts.resumes:
            self._sharing = self._tier.sharing = Sharing(
                ledger, self._keys, facts.groups, unit, self.instance, self._engine.wake
            )
        waits = facts.waits and facts.groups[0][0] == unit and not is_far(config)
        wait = config.sync_load_ms if waits else 0.0
        self._hurry = Hurry(
            wait, config.transfer_timeout, pool, lambda: self._engine.scheduler, connector, self._planner
        )
        self._matcher = Matcher(
            config, self._peers, ledger, self._keys, facts.groups, unit, lambda: self.address, self.counters,
            facts.resumes, self._tier, self._planner, self._hurry, self.instance, self._bytes_of, pool.free_count,
            None if is_far(config) else lambda chain: pool.cached_about(chain, facts.full_groups, unit),
        )
        self._outcomes = Outcomes(self._matcher, self._hurry, self._planner, self.counters, self._form)
        self._gauges = Gauges(
            self.counters, self._matcher, self._planner, self._exports, self._peers, self._tier, self._offloader
        )
        self._exporter = Exporter(
            config, self._exports, pool, ledger, self._keys, facts.groups, self.counters, facts.hash_lookahead > 0,
            lambda: self._sharing is not None and self._sharing.active,
        )
        offload = self._offloader is not None and self._offloader.wanted()
        self._tables = BlockTables(
            facts.groups, unit, ledger.forget, lambda t: offload or self._exporter.sums(t)
        )
        self._questions = Questions(
            facts, pool, self._exports, self._peers, self._matcher, self._tier, self._offloader, self._engine.wake,
            lambda on_engine: Explainer(
                config, facts, pool, self._exports, self._tier, self._planner, self._bytes_of, on_engine
            ),
            lambda: identity(facts, config, self._namespace, self._ranks, self._codec, self._wire_codec),
        )
        pool.around_reset(self._before_reset, self._hurry.pin_again)
        self._reactor.start()

    @property
    def address(self) -> Address:
        return self._endpoint.host, self._endpoint.port

    # -- vLLM's calls (scheduler's thread) ---------------------------------------------------------------------------

    def queued(self, request: Any) -> None:
        """vLLM will schedule a request: the store may be asked for it already, and what of it lies below the store's
        memory may come up, if others are before it."""
        if self._tier is None or self._facts.unsupported:
            return
        if len(self._matcher):
            self._matcher.warm(request)
        self._matcher.ask_ahead(request)

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        self._settle_namespace()
        self._run_jobs()
        if self._facts.unsupported:
            return 0, False
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
            t = self._matcher.get(request.request_id) if self._events is not None and external else None
            if t is not None and isinstance(t.offer, HostOffer) and t.offer.epoch == self._tier.epoch:
                self._events.loaded(self._tier.space(vr.variant(request)), request, t.local, t.local + external)

    def sources(self, request_id: str, tokens: int) -> dict[str, int]:
        """Where so many tokens of this request are being brought from: "host", the node store's memory, where they
        were; "disk", from where they came up for it; "below", where it has several tiers that they may have come up
        from; "peer", another engine or another node's store."""
        t = self._matcher.get(request_id)
        if t is None or t.source != "host" or not isinstance(self._tier, HostTier):
            return {"peer": tokens}
        risen = min(t.risen, tokens)
        kind = {("disk",): "disk", ("nodes",): "peer"}.get(self._tier.below, "below")
        return {"host": tokens - risen, kind: risen}

    def begin_step(self, output: Any) -> StepWork:
        self._run_jobs()
        if self._facts.unsupported:
            return StepWork(-1)
        self._relieve(self._exporter.reserve(len(output.num_scheduled_tokens)))
        growth = self._tables.begin_step(output, self._matcher.get)
        # A step that waits for a load says nothing about computing; and what it computes is looked at when all is
        # known to be right: as the request grows further, or at its end.
        hurried = self._hurry.awaits_verdict
        self._hurry.watch()
        self._pace.begin_step(output, self._matcher.get, counts=not hurried)
        if hurried:
            growth = [each for each in growth if each.tracked.life.state is not State.VERIFYING]
        sums = self._exporter.begin_step(growth)
        if self._offloader is not None:
            self._offloader.begin_step(self._exporter.step, growth)
        self._matcher.expire()
        orders, introductions = self._matcher.take_orders()
        pulls, loads, fetches = (
            [order for order in orders if isinstance(order, kind)] if orders else []
            for kind in (PullOrder, LoadOrder, FetchOrder)
        )
        if self._sharing is not None:
            self._sharing.settle()
        aborted, idle = self._matcher.take_aborted(), not output.total_num_scheduled_tokens
        urgent = self._exporter.urgent
        return StepWork(self._exporter.step, sums, pulls, introductions, loads, fetches, aborted, idle, urgent)

    def end_step(self) -> None:
        """A step's output was read."""
        self._pace.end_step()
        # Not while a step is scheduled, which the request may be in already.
        if overdue := self._hurry.overdue():
            self.arrived([overdue], set())
        if not self._facts.unsupported:
            self._gauges.refresh()

    def arrived(self, results: list[Result], finished: set[str]) -> None:
        """``results`` of any rank; ``finished`` are the requests all ranks are through with, as vLLM counts."""
        self._outcomes.arrived(results, finished)

    def take_events(self) -> list[Any]:
        """KV events for vLLM to publish after this step: what became of blocks in the tiers."""
        return vllm_events.vllm_events(self._events.take(), self._facts.kinds) if self._events is not None else []

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """The request ended; returns the params for its answer. Its blocks are never held back: exports pin them."""
        tracked = self._matcher.finished(request)
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
        self._hurry.unpin()
        self._ledger.clear()  # nothing more is lent
        if self._events is not None:
            self._events.say_again()
        self._exports.recall(RESET_PATIENCE)
        self._exporter.drain()
        if self._offloader is not None:
            self._offloader.settle(self._config.ask_timeout + RESET_PATIENCE)

    def reset(self) -> bool:
        """vLLM was asked to reset its connector's cache as well: what this engine stored is no longer its own."""
        self._before_reset()
        self._hurry.pin_again()
        if self._sharing is not None:
            self._sharing.leave()
            self._sharing.settle()
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
        if self._sharing is not None:
            self._sharing.settle(idle=True)
        self._publish_idle()

    def _publish_idle(self) -> None:
        """vLLM publishes events behind a step; an idle engine has none, and its tiers change all the same."""
        scheduler = self._engine.scheduler
        if self._events is None or scheduler is None:
            return
        for _ in range(IDLE_TAKES):
            events = self.take_events()
            if events:
                vllm_events.publish(scheduler, events)
            elif not self._events.behind:
                return
        self._engine.wake()  # there may be more; whatever else waits for this thread goes first

    def _freed(self) -> None:
        """Blocks are over with their export or lease (reactor's thread): back to vLLM with them."""
        if self._engine.turns.known:
            self._engine.turns.run(self._exporter.drain)
        else:
            self._engine.wake()

    def _bytes_of(self, tokens: int) -> int:
        """What one rank copies for so many tokens of full attention."""
        described = next(iter(self._described.values()), None)
        groups = described.groups if described is not None else ()
        return sum(tokens // group.block_tokens * group.block_bytes for group in groups if group.window is None)

    def _form(self, kind: str) -> str:
        """For the metrics, in what form a load, fetch or pull brings KV; of a hybrid model's groups maybe several."""
        if kind == "load" and self._tier is not None:
            return choice.names(self._tier.codecs)
        return Codec.RAW if kind == "fetch" else choice.names([self._wire_codec])

    def _run_jobs(self) -> None:
        self._exporter.drain()
        if self._offloader is not None:
            self._offloader.drain()
        self._questions.run()

    def _settle_namespace(self) -> None:
        """Once, when vLLM has made its hash seed: after the scheduler is built, before the first request."""
        if self._namespace is None and not self._facts.unsupported:
            bare = self._facts.namespace(self._pool.hash_block_tokens, self._config.model_fingerprint)
            options = self._config.codec if self._tier is not None else Codec.RAW, self._config.wire_codec
            self._codec, self._wire_codec = (choice.resolve(option, self._facts.record_key) for option in options)
            words = choice.in_words(self._codec, self._wire_codec)
            self._namespace = msgspec.structs.replace(bare, codecs=words)
            digest = hashlib.blake2b(m.encode(self._namespace.content()), digest_size=8).digest()
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
            case m.FarLost() if self._tier is not None:
                self._tier.lost(message)
            case m.Stored() if self._offloader is not None:
                self._offloader.stored(message)
            case m.Register():
                self._ranks[message.info.rank] = message.info
                self._wire_codecs[message.info.rank] = message.wire_codec
                self._summed.setdefault(message.info.rank, -1)
                self._open_if_ready()
            case m.Unusable():
                self._endpoint.unusable = message.reason
                if self._sharing is not None:
                    self._sharing.leave()
                logger.warning("kvtier: this engine serves without pulls: %s", message.reason)
            case m.Summed():
                self._summed[message.rank] = max(self._summed.get(message.rank, -1), message.step)
                if len(self._summed) == self._facts.world_size:
                    self._endpoint.summed(min(self._summed.values()))

    def _open_if_ready(self) -> None:
        if self._namespace is None:  # or if the engine is not supported, whatever its workers made of it
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
            if self._sharing is not None and all(info.shared is not None for info in ranks):
                self._sharing.opened(self.address)
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
            return f"tensor or pipeline parallelism differs: {len(self._ranks)} ranks here, {len(theirs)} there"
        for info in theirs:
            if not (info.agent and self._ranks[info.rank].agent):
                return f"NIXL does not work {'there' if self._ranks[info.rank].agent else 'here'}"
            reason = geometry_mismatch(self._ranks[info.rank].geometry, info.geometry)
            if reason:
                return reason
        return None
