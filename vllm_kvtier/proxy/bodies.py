"""A client's request body, and the bodies made of it for P and for D.

Bodies stay raw JSON per top-level field (``msgspec.Raw``): what the proxy does not have to understand
reaches the engines byte for byte, and a prompt of a megabyte is not taken apart more often than needed.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.proxy.params import UNREADABLE

# Only the proxy says where KV comes from: a client must not aim engines at hosts. vLLM would also take
# these from ``vllm_xargs``, whose content it hands to the connector.
_TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")

# Fields that ask for more than the one token that P computes, or for output that nobody would read.
_NOT_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "best_of",
    "echo",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_prompt_text",
)

_MAX_ID_CHARS = 256


class Route(enum.Enum):
    """The two OpenAI routes that generate."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class BadRequest(KVTierError):
    """The client's request cannot be routed; the message is for the client."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param


class ClientRequest:
    """One request as the client sent it, less what is the proxy's.

    Attributes: ``route``; ``fields`` (raw JSON by name, to be forwarded); ``stream``; ``model``;
    ``conversation_id`` and ``client_salt`` (consumed, or None); ``prompt`` (messages, text, token ids, or
    None where there is no single prompt).
    """

    def __init__(self, route: Route, body: bytes, *, header_conversation_id: str | None = None):
        """Raises BadRequest."""
        self.route = route
        try:
            self.fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except UNREADABLE as error:
            raise BadRequest(f"The request body is not a JSON object: {error}.") from error
        for name in _TRANSFER_FIELDS:
            self.fields.pop(name, None)
        self._clean_xargs()
        conversation_id = self._take_text("conversation_id") or header_conversation_id
        if conversation_id is not None and len(conversation_id) > _MAX_ID_CHARS:
            raise BadRequest(
                f"The conversation id has {len(conversation_id)} characters; {_MAX_ID_CHARS} is the most.",
                param="conversation_id",
            )
        self.conversation_id = conversation_id
        self.client_salt = self._take_text("cache_salt")
        self.stream = self.get("stream") is True
        model = self.get("model")
        self.model = model if isinstance(model, str) else ""
        self.prompt = self._single_prompt()

    @property
    def prompt_chars(self) -> int:
        """About how long the prompt is, in characters; a token counts as four."""
        if self.prompt is None:
            return 0
        if self.route is Route.CHAT:
            return len(self.fields["messages"])
        return len(self.prompt) if isinstance(self.prompt, str) else 4 * len(self.prompt)

    @property
    def can_prefill_elsewhere(self) -> bool:
        """Whether P's KV can serve the answer.

        Not for several prompts in one request (one set of params cannot name several exports), not for beam
        search, and not where logprobs of the prompt's own tokens are asked for: these need the prompt
        computed on D.
        """
        if self.prompt is None or self.get("use_beam_search") is True:
            return False
        if self.get("prompt_logprobs") is not None:
            return False
        logprobs = self.get("logprobs")
        # Completions take a number here, and 0 asks for the tokens' own.
        return not (self.get("echo") is True and logprobs is not None and logprobs is not False)

    def body_for_prefill(self, salt: str, transfer: dict[str, Any]) -> bytes:
        """The one-token probe that makes P compute the prompt and export its KV."""
        body: dict[str, Any] = {k: v for k, v in self.fields.items() if k not in _NOT_FOR_PREFILL}
        # A client's limit may be larger than what P has room for beside the prompt, so it must not stay.
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        body |= {"max_tokens": 1, "n": 1, "stream": False, "cache_salt": salt, "kv_transfer_params": transfer}
        return msgspec.json.encode(body)

    def body_for_decode(self, salt: str, transfer: msgspec.Raw | dict[str, Any]) -> bytes:
        """The client's request for D, with P's params as they came, or with the proxy's own."""
        body: dict[str, Any] = {**self.fields, "cache_salt": salt, "kv_transfer_params": transfer}
        return msgspec.json.encode(body)

    def get(self, name: str) -> Any:
        """A field's value; None if it is absent or null."""
        raw = self.fields.get(name)
        return None if raw is None else _decode(raw, name)

    def _take_text(self, name: str) -> str | None:
        value = self.get(name)
        self.fields.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise BadRequest(f"{name} must be a non-empty string if it is given.", param=name)
        return value

    def _clean_xargs(self) -> None:
        xargs = self.get("vllm_xargs")
        if isinstance(xargs, dict) and any(name in xargs for name in _TRANSFER_FIELDS):
            kept = {k: v for k, v in xargs.items() if k not in _TRANSFER_FIELDS}
            self.fields["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(kept))

    def _single_prompt(self) -> Any:
        if self.route is Route.CHAT:
            messages = self.get("messages")
            return messages if isinstance(messages, list) and messages else None
        if self.get("prompt_embeds") is not None:
            return None  # vLLM counts them as further prompts
        prompt = self.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
            return None
        return prompt if isinstance(prompt, (str, list)) and prompt else None


def _decode(raw: msgspec.Raw, name: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except UNREADABLE as error:
        raise BadRequest(f"The field {name} is not valid JSON: {error}.", param=name) from error
