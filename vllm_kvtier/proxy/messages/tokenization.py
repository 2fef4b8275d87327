"""vLLM's ``/tokenize``: the body for a client's request, and the token ids of the answer."""

from typing import Any

import msgspec

from vllm_kvtier.proxy.messages.request_bodies import ClientRequest, Route
from vllm_kvtier.proxy.messages.transfer_params import UNREADABLE

# Fields of a request that /tokenize takes and that change the tokens.
_CHAT = (
    *("model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template"),
    *("chat_template_kwargs", "mm_processor_kwargs", "tools"),
)
_COMPLETION = ("model", "add_special_tokens")

# Fields of a chat request that vLLM gives to the template; /tokenize takes them in one object.
_TEMPLATE_FIELDS = ("documents", "reasoning_effort")


class Tokenized(msgspec.Struct):
    tokens: list[int]
    max_model_len: int | None = None


_TOKENIZED = msgspec.json.Decoder(Tokenized)


def tokenize_body(request: ClientRequest) -> dict[str, Any]:
    """The body for a completions or chat request with one prompt of text."""
    fields = request.fields
    if request.route is Route.COMPLETIONS:
        body: dict[str, Any] = {name: fields[name] for name in _COMPLETION if name in fields}
        return body | {"prompt": request.prompt}
    body = {name: fields[name] for name in _CHAT if name in fields}
    beside = {name: value for name in _TEMPLATE_FIELDS if (value := request.get(name)) is not None}
    if beside:
        given = request.get("chat_template_kwargs")
        body["chat_template_kwargs"] = {**(given if isinstance(given, dict) else {}), **beside}
    return body


def read_tokens(document: bytes) -> Tokenized | None:
    """The answer; None if it is malformed."""
    try:
        return _TOKENIZED.decode(document)
    except UNREADABLE:
        return None
