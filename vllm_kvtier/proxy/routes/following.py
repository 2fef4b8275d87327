"""A request that is sent to a prefill engine and to a decode engine at the same time.

The proxy names the prefill's export. The decode engine asks the prefill engine for it at once, and pulls each step's
KV while the next one is computed. That needs a prefill engine whose endpoint is known from an answer: its first
request, and the first after a failure, are sent one after the other. So are requests beyond ``max_followed_prefills``.

Failures, where they differ from ``routes.generation``:

* The prefill engine dies: the decode engine goes on. It notices by itself, and computes what it lacks.
* The export is at another endpoint than before (data-parallel ranks behind one URL): the decode request is sent again.
  Such an engine is not followed any more.
* The prefill engine answers with an error, aborts the request, or was not reached: the decode request, which would wait
  long for a prefill that does not come, is cancelled. Then all is as without it.
* The decode engine answers before the prefill has ended (it has the prompt, or computed it): the prefill is cancelled.
* The decode engine fails: when the prefill has ended, the next one gets its params.
"""

import asyncio
import time
import uuid

from vllm_kvtier.proxy.engines.engine import Engine, EngineSlot
from vllm_kvtier.proxy.messages.transfer_params import Export, following_params
from vllm_kvtier.proxy.routes.client_answer import Answer
from vllm_kvtier.proxy.routes.generation import Generation, Prefill


class FollowingGeneration(Generation):
    """Runs one request, at both engines at once where that is possible."""

    async def _run(self, prefill: EngineSlot | None, decode: EngineSlot) -> Answer:
        if prefill is None or not self._can_follow(prefill.engine, decode.engine):
            return await super()._run(prefill, decode)
        engine = decode.engine
        engine.followed_prefills += 1
        try:
            outcome, answer, error = await self._both(prefill, decode)
        finally:
            engine.followed_prefills -= 1
        if answer is None and outcome is Prefill.FAILED:
            return await super()._run(prefill, decode)
        prefill.release()
        if answer is not None:
            return answer
        self._count_uncached(decode)
        return await self._decode(decode, error)

    def _can_follow(self, prefill: Engine, decode: Engine) -> bool:
        room = decode.followed_prefills < self._config.max_followed_prefills
        known = prefill.can_be_followed and prefill.last_named is not None
        return room and known and prefill.usable and decode.usable

    async def _both(
        self, prefill: EngineSlot, decode: EngineSlot
    ) -> tuple[Prefill | None, Answer | None, Answer | None]:
        """(How the prefill ended, None if it was cancelled; the client's answer, None if there is none yet; an answer
        of the decode engine for which another one is to be tried.)"""
        source, name = prefill.engine.last_named, uuid.uuid4().hex
        assert source is not None, "_can_follow"
        self._export = Export(source.host, source.port, name)
        self._core.count("followed")
        deadline = self._prefill_deadline()
        prefilling = asyncio.create_task(self._prefill_at(prefill.engine, self._prefill_body(name), deadline))
        params = following_params(source.engine_id, self._export)
        decoding = asyncio.create_task(self._decode_at(decode.engine, decode, params))
        taken: Answer | None = None
        try:
            await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
            if not prefilling.done():
                served, answer = decoding.result()
                if served:
                    taken = answer
                    return None, answer, None
            outcome = await prefilling
            if outcome is Prefill.LOST and time.monotonic() >= deadline:
                outcome = Prefill.FAILED  # it hangs, and the decode engine waits for it
            now = self._prefill_params.source if self._prefill_params is not None else None
            moved = now is not None and (now.host, now.port) != (source.host, source.port)
            if (outcome is Prefill.DONE and moved) or outcome is Prefill.FAILED:
                self._attempts = 0  # the decode request ends as if it had not been sent
                self._asked.clear()
                return outcome, None, None
            prefill.release()
            served, answer = await decoding
            taken = answer if served else None
            return outcome, taken, None if served else answer
        finally:
            await _end(prefilling)
            await _end(decoding)
            if not decoding.cancelled() and decoding.exception() is None:
                _, left = decoding.result()
                if left is not None and left is not taken and left.reply is not None:
                    left.reply.close()


async def _end(task: asyncio.Task) -> None:
    """Cancel a task, unless it is done, and wait until it has closed its connection."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
