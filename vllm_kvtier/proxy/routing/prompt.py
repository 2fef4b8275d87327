"""What the router knows of one request's prompt."""

from dataclasses import dataclass

from vllm_kvtier.proxy.engines.refusals import Wants
from vllm_kvtier.proxy.kv_events.index import PromptTokens
from vllm_kvtier.proxy.routing.conversations import Name


@dataclass(frozen=True)
class Prompt:
    """``tokens``: their number, estimated from the text unless ``ids`` are known. ``ids``: only for a policy that asks
    for them, and not for every prompt. ``wants``: what not every engine may have."""

    name: Name
    tokens: int = 0
    ids: PromptTokens | None = None
    wants: Wants = None
