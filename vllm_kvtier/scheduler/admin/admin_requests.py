"""Answers to the ``kvtier`` commands: where a prompt's KV is and why not more, pins, promotions, the identity."""

from collections import deque
from collections.abc import Callable

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.admin.explain import Explainer
from vllm_kvtier.scheduler.admin.gpu_prefix import gpu_prefix
from vllm_kvtier.scheduler.admin.store_admin import StoreAdmin
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.leases.exports import ExportTable, Refusal
from vllm_kvtier.scheduler.leases.lease_server import Answer, Question
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.vllm_compat.requests import hash_prompt
from vllm_kvtier.wire import messages as m

logger = get_logger(__name__)

MAX_WAITING = 64  # questions for vLLM's scheduler thread, which answers all between two steps; more are refused


class AdminRequests:
    def __init__(
        self,
        context: LoadContext,
        exports: ExportTable,
        matcher: RequestMatcher,
        store: StoreAdmin | None,
        offloader: Offloader | None,
        wake: Callable[[], None],
    ):
        """``wake`` has vLLM's scheduler thread call :meth:`run` soon."""
        engine = context.engine
        self._info, self._pool, self._identity = engine.info, engine.pool, engine.identity
        self._exports, self._peers, self._matcher = exports, context.lease_client, matcher
        self._store, self._offloader, self._wake = store, offloader, wake
        self.waiting: deque[Callable[[], None]] = deque()  # for :meth:`run`
        self._explainer = Explainer(context, exports, store, self._on_engine)

    def run(self) -> None:
        """Answer on the scheduler's thread."""
        for _ in range(len(self.waiting)):  # later ones wake this thread again: steps go on in between
            try:
                self.waiting.popleft()()
            except Exception:  # a question must never cost the engine
                logger.exception("kvtier: a question could not be answered")

    def ask(self, question: Question, answer: Answer) -> None:
        """On the reactor ``kvtier-scheduler``, where hashing a prompt delays no step. Only vLLM's scheduler thread may
        read vLLM's pool."""
        if len(self.waiting) >= MAX_WAITING:
            answer(m.LeaseRefused(question.question, Refusal.BUSY.value, "too many questions wait here"))
            return
        match question:
            case m.Inspect():
                self._on_engine(lambda: answer(self._inspect(question)))
                return
            case m.GetIdentity():
                self._on_engine(lambda: answer(m.Identity(question.question, self._identity.describe())))
                return
            case m.Explain():
                self._explainer.ask(question, answer)
                return
        hash_block_size = self._pool.hash_block_size
        tokens = question.tokens[: self._info.max_tokens]
        block_hashes = hash_prompt(self._info, tokens, question.cache_salt, hash_block_size)
        match question:
            case m.PinPrompt():
                self._pin(question.question, question.pinned, block_hashes, answer)
            case m.Warm():
                promoted = self._store is not None and self._store.promote(block_hashes)
                reason = "" if promoted else "this engine's node store has no secondary tier, or does not answer"
                answer(m.PinResult(question.question, len(block_hashes) if promoted else 0, reason))
            case _:
                self._query(question.question, len(question.tokens), block_hashes, answer)

    def _query(self, number: int, prompt: int, block_hashes: list[bytes], answer: Answer) -> None:
        """``prompt``: its tokens. The question itself is not kept: a client may send millions of tokens."""

        def on(num_hash_blocks: int) -> None:
            stored = num_hash_blocks * self._pool.hash_block_size
            self._on_engine(lambda: answer(self._look_up(number, prompt, block_hashes, stored)))

        pending = self._store.inspect(block_hashes) if self._store is not None and block_hashes else None
        on(0) if pending is None else pending.then(lambda p: on(getattr(p.outcome, "num_hash_blocks", 0)))

    def _pin(self, number: int, pinned: bool, block_hashes: list[bytes], answer: Answer) -> None:
        def on(count: int, reason: str) -> None:
            answer(m.PinResult(number, count, reason))

        pending = self._store.pin(block_hashes, pinned) if self._store is not None else None
        if pending is None:
            on(0, "this engine uses no node store")
        else:
            pending.then(lambda p: on(getattr(p.outcome, "count", 0), getattr(p.outcome, "reason", "")))

    def _on_engine(self, job: Callable[[], None]) -> None:
        self.waiting.append(job)
        self._wake()

    def _look_up(self, number: int, prompt: int, block_hashes: list[bytes], stored: int) -> m.PrefixLengths:
        return m.PrefixLengths(
            number,
            prompt=prompt,
            gpu_cache=gpu_prefix(self._pool, self._info, block_hashes),
            exported=self._exports.longest_prefix(block_hashes, b""),
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
            violations=RequestLifecycle.violations,
            copying_blocks=self._offloader.pinned if self._offloader is not None else 0,
            store=self._store.instance if self._store is not None else "",
        )
