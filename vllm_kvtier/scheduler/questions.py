"""What others ask an engine: what it has of a prompt and why not more, to pin one, to have one ready, who it is."""

from collections import deque
from collections.abc import Callable

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.endpoint import Answer, Question
from vllm_kvtier.scheduler.explaining import Explainer
from vllm_kvtier.scheduler.exports import ExportTable
from vllm_kvtier.scheduler.lifecycle import Lifecycle
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.offloading import Offloader
from vllm_kvtier.scheduler.peers import Peers
from vllm_kvtier.scheduler.tier import HostTier
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.vllm_compat.facts import EngineFacts
from vllm_kvtier.vllm_compat.requests import hash_prompt
from vllm_kvtier.wire import messages as m

logger = get_logger("vllm.kvtier.scheduler")


class Questions:
    def __init__(
        self,
        facts: EngineFacts,
        pool: BlockPool,
        exports: ExportTable,
        peers: Peers,
        matcher: Matcher,
        tier: HostTier | None,
        offloader: Offloader | None,
        wake: Callable[[], None],
        explainer: Callable[[Callable[[Callable[[], None]], None]], Explainer],
        identity: Callable[[], list[tuple[str, str]]],
    ):
        """``wake`` has vLLM's scheduler thread call :meth:`run` soon. ``explainer``: makes one, given how to get to
        that thread; ``identity``: for Identified, on that thread."""
        self._facts, self._pool, self._exports, self._peers = facts, pool, exports, peers
        self._matcher, self._tier, self._offloader, self._wake = matcher, tier, offloader, wake
        self._jobs: deque[Callable[[], None]] = deque()
        self._explainer, self._identity = explainer(self._on_engine), identity

    def run(self) -> None:
        """Scheduler's thread: what only it may look at."""
        for _ in range(len(self._jobs)):  # what is asked meanwhile wakes this thread again: steps go on in between
            try:
                self._jobs.popleft()()
            except Exception:  # a question must never cost the engine
                logger.exception("kvtier: a question could not be answered")

    def ask(self, question: Question, answer: Answer) -> None:
        """Reactor's thread, where hashing a prompt holds nobody up: the pool may only be asked on the engine's."""
        if isinstance(question, m.Inspect):
            self._on_engine(lambda: answer(self._inspect(question)))
            return
        if isinstance(question, m.Identify):
            self._on_engine(lambda: answer(m.Identified(question.question, self._identity())))
            return
        if isinstance(question, m.Explain):
            self._explainer.ask(question, answer)
            return
        tokens = question.tokens[: self._facts.max_tokens]
        unit = self._pool.hash_block_tokens
        chain = hash_prompt(tokens, question.cache_salt, self._facts.hash_function(), unit)
        if isinstance(question, m.Keep):
            self._keep(question, chain, answer)
            return
        if isinstance(question, m.Warm):
            warmed = self._tier is not None and self._tier.warm(chain, b"")
            reason = "" if warmed else "this engine's node store has no tier below its memory, or does not answer"
            answer(m.Kept(question.question, len(chain) if warmed else 0, reason))
            return
        stored = self._tier.inspect(chain) if self._tier is not None and chain else None
        if stored is None:
            self._on_engine(lambda: answer(self._look_up(question, chain, 0)))
        else:
            stored.then(
                lambda p: self._on_engine(
                    lambda: answer(self._look_up(question, chain, getattr(p.outcome, "units", 0) * unit))
                )
            )

    def _keep(self, question: m.Keep, chain: list[bytes], answer: Answer) -> None:
        pending = self._tier.pin(chain, question.pinned) if self._tier is not None else None
        if pending is None:
            answer(m.Kept(question.question, 0, "this engine uses no node store"))
            return
        pending.then(
            lambda p: answer(
                m.Kept(question.question, getattr(p.outcome, "count", 0), getattr(p.outcome, "reason", ""))
            )
        )

    def _on_engine(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._wake()

    def _look_up(self, query: m.Query, chain: list[bytes], stored: int) -> m.Holding:
        unit = self._pool.hash_block_tokens
        return m.Holding(
            query.question,
            prompt=len(query.tokens),
            gpu_cache=self._pool.cached_tokens(chain, self._facts.full_groups, unit),
            exported=self._exports.longest_prefix(chain, b""),
            stored=stored,
        )

    def _inspect(self, question: m.Inspect) -> m.Inspection:
        counts = self._exports.counts()
        return m.Inspection(
            question.question,
            blocks=self._pool.num_blocks,
            free_blocks=self._pool.free_count(),
            exports=counts["exports"],
            leases=counts["leases"],
            exported_blocks=counts["handoff_blocks"] + counts["retained_blocks"],
            held_leases=self._peers.held_leases(),
            requests=len(self._matcher),
            violations=Lifecycle.violations,
            copying_blocks=self._offloader.pinned if self._offloader is not None else 0,
            store=self._tier.instance if self._tier is not None else "",
        )
