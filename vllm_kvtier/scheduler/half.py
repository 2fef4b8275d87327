"""Scheduler half of the connector: wires matching, exporting, the endpoint and the peers to vLLM's calls.

Two threads: vLLM's scheduler thread, which owns block tables and the pool, and a reactor with all sockets. They meet
in ``ExportTable`` (locked), in queued calls, and in the ``outcome`` of what was asked. The scheduler's thread never
waits, but for milliseconds for the node store where nobody else is served, and where vLLM resets its prefix cache.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_kvtier.codecs import Codec, choice
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.containment import Containment
from vllm_kvtier.logs import get_logger
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
from vllm_kvtier.scheduler.provenance import Provenance
from vllm_kvtier.scheduler.questions import Questions
from vllm_kvtier.scheduler.sharing import Sharing
from vllm_kvtier.scheduler.tables import BlockTables
from vllm_kvtier.scheduler.tier import HostOffer, HostTier
from vllm_kvtier.vllm_compat import events as vllm_events
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat import undo, weights
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.vllm_compat.engine import EngineThread
from vllm_kvtier.vllm_compat.facts import EngineFacts
from vllm_kvtier.vllm_compat.probe import Feature, granted
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.geometry import geometry_mismatch
from vllm_kvtier.wire.link import LinkServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.work import FailedOrder, FetchOrder, LoadOrder, PullOrder, StepWork, SumBatch

logger = get_logger("vllm.kvtier.scheduler")

# A reset of vLLM's prefix cache waits so long for peers to release what they read, and as long again for copies to the
# node store to end; both take milliseconds. A store that hangs is given up after ``ask_timeout``, and only then are the
# blocks free that it was asked about.
RESET_PATIENCE = 1.0
# So long the engine's thread waits, once and before it serves, for the weights' files to be read; a thousand of them on
# a slow file system take longer, and then it serves meanwhile.
FIRST_WAIT = 0.5
IDLE_TAKES = 4  # batches of KV events that an idle engine publishes in one go


class SchedulerHalf:
    def __init__(
        self,
        facts: EngineFacts,
        config: KVTierConfig,
        link_path: str,
        pool: BlockPool,
        connector: Any,
        containment: Containment,
    ):
        """``connector``: what this is a half of. Raises ConfigError if the endpoint cannot listen or the cluster key is
        unusable."""
        self._facts, self._config, self._pool = facts, config, pool
        self.counters, self._contain = connector.counters, containment
        containment.on_limit = self._become_passive
        self._passive = False
        self._refused: str | None = None  # why no other engine is asked or answered any more, whatever happens
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
            self._on_idle,
            containment,
            connector,
            lambda engine: undo.settle_failure_policy(engine, config.kv_load_failure_policy),
        )
        self._namespace: m.Namespace | None = None
        self._salt: Keys | None = None
        self._codec: str | dict[str, str] = Codec.RAW  # of the store, without "auto"
        self._wire_codec: str | dict[str, str] = Codec.RAW
        self._wire_codecs: dict[int, str | dict[str, str]] = {}  # as each rank understood the option
        self._ranks: dict[int, m.RankInfo] = {}
        self._summed: dict[int, int] = {}
        self.instance = self._new_instance()
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
                on_free=self._engine.wake, step_tokens=facts.step_tokens,
                verified=lambda: not self._hurry.awaits_verdict,
            )
        elif is_far(config) and not facts.unsupported:
            self._tier = FarTier(config, facts, unit, self._reactor, self._link.tell)
        self._events = None
        if self._offloader is not None and facts.publishes:
            self._events = Events(facts.groups, unit, self._reactor, self._engine.wake)
            self._tier.events = self._offloader.events = self._events
        self._sharing = None
        shares = config.peer_fetch == "auto" and granted(Feature.PEER_FETCH)
        if self._offloader is not None and shares and facts.resumes:
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
        self._outcomes = Outcomes(
            self._matcher, self._hurry, self._planner, self.counters, containment, self._form,
            self._pace.prompts_since,
        )
        self._gauges = Gauges(
            self.counters, self._matcher, self._planner, self._exports, self._peers, self._tier, self._offloader
        )
        self._exporter = Exporter(
            config, self._exports, pool, ledger, self._keys, facts.groups, self.counters, facts.hash_lookahead > 0,
            lambda: self._sharing is not None and self._sharing.active,
        )
        offload = self._offloader is not None and self._offloader.wanted()
        self._tables = BlockTables(
            facts.groups, unit, ledger.forget,
            lambda t: self._provenance.admitted(t) and (offload or self._exporter.sums(t)),
        )
        encoder_is_empty = (lambda: weights.encoder_is_empty(self.engine_scheduler)) if facts.multimodal else None
        self._provenance = Provenance(pool, facts.prefix_caching, encoder_is_empty)
        self._questions = Questions(
            facts, pool, self._exports, self._peers, self._matcher, self._tier, self._offloader, self._engine.wake,
            lambda on_engine: Explainer(
                config, facts, pool, self._exports, self._tier, self._planner, self._bytes_of, on_engine
            ),
            lambda: identity(facts, config, self._namespace, self._ranks, self._codec, self._wire_codec),
        )
        self._model = facts.fingerprint(config.model_fingerprint, self._engine.wake, self._resolve_codecs)
        self._waited = False  # for ``_model``
        pool.around_reset(self._before_reset, self._after_reset, containment)
        weights.watch(self)
        self._reactor.start()

    def _new_instance(self) -> str:
        """A restarted engine is another one, even with the same configured engine id and address; so is one that
        slept: what peers know of its memory is of no use any more."""
        return f"{self._facts.engine_id}/{os.urandom(4).hex()}"

    @property
    def address(self) -> Address:
        return self._endpoint.host, self._endpoint.port

    # -- vLLM's calls (scheduler's thread) ---------------------------------------------------------------------------

    def queued(self, request: Any) -> None:
        """vLLM will schedule a request: the store may be asked for it already, and what of it lies below the store's
        memory may come up, if others are before it."""
        if self._tier is None or self._facts.unsupported or self._passive or not self._provenance.foresees(request):
            return
        if len(self._matcher):
            self._matcher.warm(request)
        self._matcher.ask_ahead(request)

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        if self._passive:
            return self.compute(request)
        self._settle_namespace()
        self._run_jobs()
        if self._facts.unsupported:
            return 0, False
        admitted = self._provenance.admits(request, self._namespace is not None)
        if not admitted:
            # vLLM's prefix cache has blocks that are not verified yet: see ``Hurry``.
            if admitted is None or self._hurry.awaits_verdict:
                return None, False
            self._matcher.forgo(request)
            return 0, False
        tokens, asynchronous = self._matcher.match(request, computed)
        if tokens is not None:
            self._relieve(self._exporter.needed(request.num_tokens - computed))
        return tokens, asynchronous

    def compute(self, request: Any) -> tuple[int | None, bool]:
        """What ``match`` says of a request for which something of ours failed: it holds nothing any more."""
        self._provenance.refuse(request)
        self._let_go(request.request_id)
        # vLLM's prefix cache has blocks that are not verified yet: nobody else may use them.
        return (None, False) if self._hurry.awaits_verdict else (0, False)

    def _let_go(self, request_id: str, gone: bool = False) -> None:
        for give_back in self._matcher.let_go(request_id, gone):
            self._contain.attempt("giving back", give_back)

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

    def fail_load(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        """``allocated`` failed. If vLLM counts on a load, the workers report that it failed."""
        if external > 0:
            self._matcher.fail_load(request, block_ids, external)
        else:
            self._let_go(request.request_id)

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
        """Each part for itself: what fails costs what it brings, not the loads that vLLM counts on."""
        attempt, hurried = self._contain.attempt, self._hurry.awaits_verdict
        attempt("jobs", self._run_jobs)
        # Twice: of a request that loses its blocks in this step nobody will know later that its output is wrong.
        self._contain.insist("unverified output", self._hurry.watch)
        sums = [] if self._passive or self._facts.unsupported else self._follow(output, hurried)
        return self.step_work(sums or [], not output.total_num_scheduled_tokens)

    def _follow(self, output: Any, hurried: bool) -> list[SumBatch] | None:
        """What the step's requests fill: checksums to make, blocks to store."""
        attempt = self._contain.attempt
        attempt("relieve", lambda: self._relieve(self._exporter.reserve(len(output.num_scheduled_tokens))))
        growth = attempt("tables", self._tables.begin_step, output, self._matcher.get, repair=self._forget_tables) or []
        # A step that waits for a load says nothing about computing; and what it computes is looked at when all is
        # known to be right: as the request grows further, or at its end.
        attempt("pace", self._pace.begin_step, output, self._matcher.get, not hurried)
        if hurried:
            growth = [each for each in growth if each.tracked.life.state is not State.VERIFYING]
        # If that is not known, nothing of the step is shared.
        growth = attempt("provenance", lambda: [each for each in growth if self._provenance.shares(each.tracked)]) or []
        # Those that were to be made in this step are not: what says that they are is wrong.
        sums = attempt("checksums", self._exporter.begin_step, growth, repair=self._ledger.clear)
        if self._offloader is not None:
            attempt("offloading", self._offloader.begin_step, self._exporter.step, growth)
        attempt("asking ahead", self._matcher.expire)
        if self._sharing is not None:
            attempt("sharing", self._sharing.settle)
        return sums

    def missed_step(self) -> StepWork:
        """What ``begin_step`` is when it failed as a whole."""
        self._contain.insist("unverified output", self._hurry.watch)
        self._contain.insist("forgetting tables", self._forget_tables)
        return self.step_work()

    def _forget_tables(self) -> None:
        """They may lack blocks that vLLM handed out: by them content would get wrong names."""
        self._tables.clear()
        self._ledger.clear()

    def step_work(self, sums: Sequence[SumBatch] = (), idle: bool = False) -> StepWork:
        """What the workers are to do in this step. What is taken from the matcher is in the answer, or goes back."""
        orders, introductions, aborted = [], {}, []
        try:
            orders, introductions = self._matcher.take_orders()
            aborted = self._matcher.take_aborted()
            pulls, loads, fetches, failed = (
                [order for order in orders if isinstance(order, kind)] if orders else []
                for kind in (PullOrder, LoadOrder, FetchOrder, FailedOrder)
            )
            step, urgent = self._exporter.step, self._exporter.urgent
            return StepWork(step, list(sums), pulls, introductions, loads, fetches, aborted, idle, urgent, failed)
        except Exception:
            self._matcher.put_back(orders, introductions, aborted)
            raise

    def end_step(self) -> None:
        """A step's output was read."""
        attempt = self._contain.attempt
        attempt("pace", self._pace.end_step)
        # Not while a step is scheduled, which the request may be in already.
        if overdue := attempt("overdue verdict", self._hurry.overdue):
            self.arrived([overdue], set())
        if not self._facts.unsupported:
            attempt("gauges", self._gauges.refresh)

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
        shared = self._provenance.forget(request)
        if self._offloader is not None and not self._passive:
            table = table if shared else None
            self._contain.attempt("offloading", self._offloader.finished, tracked, table, block_ids)
        if self._facts.unsupported or self._refused or self._endpoint.unusable or not shared:
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

    def drop(self, request: Any) -> None:
        """``finished`` failed: nothing of the request is kept or offered; a load of it goes on until it ends."""
        attempt, request_id = self._contain.attempt, request.request_id
        attempt("dropping a request", self._let_go, request_id, True)
        attempt("dropping a table", self._tables.forget, request_id)
        attempt("dropping an export", self._exports.drop, request_id)
        self._provenance.forget(request)

    def has_pending_frees(self) -> bool:
        return self._exports.has_freed() or (self._offloader is not None and self._offloader.has_frees())

    @property
    def engine_scheduler(self) -> Any | None:
        return self._engine.scheduler

    def _before_reset(self) -> None:
        """The prefix cache is being reset, maybe for new weights: nothing may be pulled from it any more."""
        attempt, insist = self._contain.attempt, self._contain.insist
        insist("ending exports", self._exports.clear)
        attempt("unpinning", self._hurry.unpin, repair=self._hurry.unpin)
        insist("forgetting checksums", self._ledger.clear)  # nothing more is lent
        if self._events is not None:
            attempt("repeating events", self._events.say_again)
        insist("recalling blocks", lambda: self._exports.recall(RESET_PATIENCE))
        attempt("giving blocks back", self._exporter.drain, repair=self._exporter.drain)
        if self._offloader is not None:
            settle = functools.partial(self._offloader.settle, self._config.ask_timeout + RESET_PATIENCE)
            attempt("ending copies", settle, repair=settle)

    def _after_reset(self) -> None:
        self._contain.attempt("provenance", self._provenance.after_reset)
        self._contain.attempt("pinning again", self._hurry.pin_again, repair=self._hurry.pin_again)

    def reset(self) -> bool:
        """vLLM was asked to reset its connector's cache as well: what this engine stored is no longer its own."""
        self._before_reset()
        self._after_reset()
        if self._sharing is not None:
            self._contain.insist("leaving the node", self._sharing.leave)
            self._contain.attempt("sharing", self._sharing.settle)
        if self._tier is not None:
            self._contain.insist("renewing the store's space", self._tier.renew)
            # No block from before may go into the new space.
            self._contain.insist("forgetting tables", self._tables.clear)
        return True

    def _become_passive(self) -> None:
        """Too much of our code failed: nothing is loaded or kept any more, and all that is held goes."""
        self._passive = True
        attempt = self._contain.attempt
        attempt("refusing", self._refuse, "internal errors; see this engine's log")
        attempt("ending exports", self._exports.clear)
        attempt("giving blocks back", self._exporter.drain)
        if self._offloader is not None:
            attempt("ending copies", self._offloader.settle, 0.0)
        attempt("forgetting tables", self._tables.clear)
        for request_id in self._matcher.request_ids():
            attempt("giving back", self._let_go, request_id)

    def _refuse(self, reason: str) -> None:
        """For good: what the namespace names is not what this engine has."""
        self._refused = reason  # from here on nothing opens, whatever waits for the reactor's thread
        self._reactor.call_soon(self._close)

    def weights_changed(self, how: str) -> None:
        """They are no longer those that the namespace names. What is stored from here on is found by this engine alone,
        until it ends; others are neither asked nor answered, unless the option ``model_fingerprint`` names the weights,
        whatever they are."""
        logger.info("kvtier: the weights may have been changed (%s): what is stored is not used any more", how)
        self._engine.turns.turn(self._follow_weights)()

    def encoder_reset(self) -> None:
        self._contain.attempt("provenance", self._provenance.after_reset)

    def _follow_weights(self) -> None:
        self._provenance.weights_changing()
        if not self._config.model_fingerprint:
            self._refuse("its weights were changed while it ran, and no option model_fingerprint names them")
        self.reset()
        self._provenance.weights_changed()

    def shutdown(self) -> None:
        self._reactor.stop()

    # -- scheduler's thread, between calls -----------------------------------------------------------------------------

    def _on_idle(self) -> None:
        attempt = self._contain.attempt
        attempt("namespace", self._settle_namespace)
        attempt("jobs", self._run_jobs)
        if self._offloader is not None and not self._passive:
            attempt("offloading", self._offloader.idle)
        if self._sharing is not None:
            attempt("sharing", self._sharing.settle, True)
        attempt("events", self._publish_idle)

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
            self._contain.attempt("unpinning", self._offloader.drain)
        self._questions.run()

    def _resolve_codecs(self) -> None:
        """On the thread of ``_model``, before that is known: ``auto`` reads the weights' files."""
        options = self._config.codec if self._tier is not None else Codec.RAW, self._config.wire_codec
        self._codec, self._wire_codec = (choice.resolve(option, self._facts.record_key) for option in options)

    def _settle_namespace(self) -> None:
        """Once, when vLLM has made its hash seed: after the scheduler is built, before the first request. Requests that
        come before the weights' files were read are private, see ``Provenance``."""
        if self._namespace is None and not self._facts.unsupported:
            model = self._model.get(0.0 if self._waited else FIRST_WAIT)
            self._waited = True
            if model is None:
                return
            bare = self._facts.namespace(self._pool.hash_block_tokens, model)
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
                self._offloader.jobs.stored(message)
            case m.Register():
                self._ranks[message.info.rank] = message.info
                self._wire_codecs[message.info.rank] = message.wire_codec
                self._summed.setdefault(message.info.rank, -1)
                self._open_if_ready()
            case m.Unusable():
                self._close(message.reason)
            case m.Asleep():
                if self._endpoint.unusable is None:
                    self._ranks.clear()  # the others sleep too, though they have not said so yet
                self._ranks.pop(message.rank, None)
                self.instance = self._matcher.nearby.instance = self._new_instance()
                self._endpoint.close(self._refused or "the engine sleeps")
                if self._sharing is not None:  # vLLM has reset the cache, because the weights may change meanwhile
                    self._sharing.leave()
            case m.Summed():
                self._summed[message.rank] = max(self._summed.get(message.rank, -1), message.step)
                if len(self._summed) == self._facts.world_size:
                    self._endpoint.summed(min(self._summed.values()))

    def _close(self, reason: str = "") -> None:
        reason = self._refused or reason
        self._endpoint.close(reason)
        if self._sharing is not None:
            self._sharing.leave()
        logger.warning("kvtier: this engine serves without pulls: %s", reason)

    def _open_if_ready(self) -> None:
        if self._namespace is None:  # or if the engine is not supported, whatever its workers made of it
            return
        if self._tier is not None and not self._tier.opened and len(self._described) == self._facts.world_size:
            try:
                self._tier.open(self._namespace, self._described, self._codec)
            except ValueError as error:
                logger.warning("kvtier: serving without the node store: %s", error)
        if len(self._ranks) == self._facts.world_size and not self._refused:
            if any(codec != self._wire_codec for codec in self._wire_codecs.values()):
                # Each process looked for itself what "auto" means, and a record came in between. What it admits may
                # lose something that the namespace, which others go by, does not tell.
                self._refuse("this model was measured while the engine started: restart it")
                return
            ranks = [self._ranks[r] for r in sorted(self._ranks)]
            self._endpoint.open(self._namespace, m.Welcome(m.PROTOCOL, self.instance, ranks))
            if self._sharing is not None and all(info.shared is not None for info in ranks):
                self._sharing.opened(self.address)
            logger.info("kvtier: engine %s answers on %s:%d", self._facts.engine_id, *self.address)

    def _store_lost(self) -> None:
        """What was reserved there is nobody's now, or somebody else's: what has not been copied is not to be."""
        self.counters.count("store_lost")
        self._offloader.jobs.lost()

    def _hello(self) -> m.Hello | None:
        if self._refused or self._endpoint.unusable or self._namespace is None:
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
