"""``kv_events``: an engine has what its KV events say, tier by tier."""

from collections.abc import Callable

from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.kv_events.prefix_walk import Walks
from vllm_kvtier.proxy.routing.policies.base import Expected
from vllm_kvtier.proxy.routing.policies.prefix_hash import PrefixHash
from vllm_kvtier.proxy.routing.prompt import Prompt


class KVEventsPolicy(PrefixHash):
    """A loaded token costs the measured share of a computed one (``kv_events.load_costs``). For engines whose events
    are not known, and prompts whose token ids are not, ``prefix_hash`` decides; so it does where the index of an
    engine's blocks is not complete, if it expects more."""

    name = "kv_events"
    reads_tokens = True

    def keeps_conversation(self, prompt: Prompt, prefilled: bool) -> bool:
        # What the engine of the last turn has of it is in its cost already; other engines may be sooner by loading it.
        return prefilled or prompt.ids is None

    def expect(self, prompt: Prompt) -> Callable[[Engine], Expected]:
        ids = prompt.ids
        by_text = super().expect(prompt)
        if ids is None:
            return by_text
        walks: Walks = {}

        def expected(engine: Engine) -> Expected:
            index = self._events.index_of(engine)
            if index is None:
                return by_text(engine)
            held = index.prefix(ids, walks)
            uncached = max(0, prompt.tokens - sum(held))
            load = sum(tokens * share for tokens, share in zip(held, self._events.load_costs.of(engine), strict=True))
            found = Expected(uncached, uncached + load)
            return min(found, by_text(engine), key=lambda each: each.cost) if index.incomplete else found

        return expected
