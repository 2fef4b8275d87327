"""A client's request body, and the bodies derived from it for the prefill and the decode engine.

Bodies stay raw JSON per top-level field (``msgspec.Raw``). Fields that the proxy does not read reach the engines byte
for byte, and a prompt of a megabyte is not parsed more often than needed.
"""

import enum
import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.proxy.messages.transfer_params import UNREADABLE

# Only the proxy names sources of KV: a client must not make engines connect to hosts. vLLM also takes these fields from
# ``vllm_xargs``, whose content it gives to the connector.
_TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")

# Fields that request more than the one token of the prefill engine, or output that is not used. Those that constrain
# the answer stay: vLLM also renders tools, tool_choice and response_format into prompts (Kimi K3's).
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

# The same fields in the ``sampling_params`` of tokens-in/tokens-out.
_NOT_FOR_PREFILL_SAMPLING = (
    *("min_tokens", "logprobs", "logprob_token_ids", "output_kind", "prompt_logprobs", "prompt_logprob_token_ids"),
)

_Fields = dict[str, msgspec.Raw]
_OBJECT, _OBJECTS = msgspec.json.Decoder(_Fields), msgspec.json.Decoder(list[_Fields])
_NULL = msgspec.Raw(b"null")
_UUID = (b"uuid", *(b"\\u%04x" % letter for letter in b"uid"))  # as it may be written in JSON
_MAX_ID_CHARS = 256

# Of a chat, what templates render before its messages.
_BEFORE_MESSAGES = ("tools", "documents")

# Parts of a message that the template renders as text.
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
# The fields with messages, and those of a score, whose texts have parts as a message has.
MESSAGE_FIELDS = frozenset(("messages", "input", "system", "content_parts"))
SCORE_FIELDS = frozenset(("data_1", "data_2", "queries", "query", "documents", "items", "text_1", "text_2"))
# Types of parts that are media, and the fields by which vLLM knows media that have a name.
_MEDIA = frozenset(
    "image_url input_image image_pil image_embeds audio_url input_audio audio_embeds video_url video_embeds "
    "prompt_embeds".split()
)
# Fields of a message that have parts: ``output`` of a tool, in /v1/responses; vLLM 0.33 takes ``reasoning`` as a part.
_PARTS = ("content", "output", "reasoning")
# What a picture, or other media, counts for at most: 1,024 tokens, however many bytes it is sent in.
_MAX_MEDIA_CHARS = 4096

# Parsing blocks the event loop, and a list takes fifty times as much memory as `[]`. No engine takes as many tokens,
# and no route has a tenth of the fields.
_MAX_VALUES = 1 << 21
_MAX_FIELDS = 1024
_MAX_MEDIA = 1 << 14  # with names, in one request


class Route(enum.Enum):
    """The generating routes whose prompt a prefill engine can compute. All streams end in ``[DONE]``."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/inference/v1/generate"


class BadRequest(KVTierError):
    """The client's request cannot be routed; the message is for the client."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param


class ClientRequest:
    """One request as the client sent it, without the fields that the proxy consumes.

    Attributes: ``route``; ``fields`` (raw JSON by name, to be forwarded); ``stream``; ``model``; ``conversation_id``
    and ``client_salt`` (consumed, or None); ``prompt`` (messages, text or token ids; None if there is no single
    prompt); ``before_messages``: of a chat, its tools and documents; ``prompt_chars``: the approximate length of all
    prompts in characters, where a token counts as four; ``has_media``: a message has a part that is not text; of a
    large one ``prompt`` has a hash.
    """

    def __init__(self, route: Route, body: bytes, *, header_conversation_id: str | None = None):
        """Raises BadRequest."""
        self.route = route
        self.fields = read_object(body)
        remove_transfer_fields(self.fields)
        #: Tokens-in/tokens-out has all sampling options in one object.
        self._sampling = self._read_sampling() if route is Route.GENERATE else {}
        conversation_id = self._take_text("conversation_id") or header_conversation_id
        if conversation_id is not None and len(conversation_id) > _MAX_ID_CHARS:
            raise BadRequest(
                f"The conversation id has {len(conversation_id)} characters; at most {_MAX_ID_CHARS} are allowed.",
                param="conversation_id",
            )
        self.conversation_id = conversation_id
        self.client_salt = self._take_text("cache_salt")
        self.stream = self.get("stream") is True
        model = self.get("model")
        self.model = model if isinstance(model, str) else ""
        self.has_media = False
        self._extra_chars = 0  # of media, that count for nothing
        self.prompt = self._single_prompt()
        self._has_prompt = self.prompt is not None
        rendered = _BEFORE_MESSAGES if route is Route.CHAT else ()
        self.before_messages = [self.fields[name] for name in rendered if not _is_null(self.fields, name)]
        self.prompt_chars = self._count_chars()

    def drop_prompt(self) -> None:
        """Of many short messages, it takes ten times as much memory as ``fields``, which have it, too."""
        self.prompt = None

    @property
    def can_prefill_elsewhere(self) -> bool:
        """Whether the KV of a prefill engine can serve the answer.

        False for several prompts in one request (one set of params names one export), for beam search, and for logprobs
        of prompt tokens, which the decode engine must compute.
        """
        # Engines take 1 and "yes" for true, too.
        if not self._has_prompt or self.get("use_beam_search"):
            return False
        if self.route is Route.GENERATE:
            return all(_is_null(self._sampling, name) for name in ("prompt_logprobs", "prompt_logprob_token_ids"))
        if self.get("prompt_logprobs") is not None:
            return False
        # Of a chat, vLLM gives them with ``echo``; of a completion with ``logprobs``, too, and 0 is a number of these.
        return not self.get("echo") or (self.route is Route.COMPLETIONS and self.get("logprobs") is None)

    def body_for_prefill(self, salt: str, transfer: dict[str, Any]) -> bytes:
        """The one-token request that makes the prefill engine compute the prompt and export its KV."""
        body: dict[str, Any] = {k: v for k, v in self.fields.items() if k not in _NOT_FOR_PREFILL}
        if self.route is Route.GENERATE:
            sampling = {k: v for k, v in self._sampling.items() if k not in _NOT_FOR_PREFILL_SAMPLING}
            body["sampling_params"] = _with_params(sampling | {"max_tokens": 1, "n": 1}, transfer)
            if "output_mode" in body:
                body["output_mode"] = "tokens"
            return msgspec.json.encode(body | {"stream": False, "cache_salt": salt, "kv_transfer_params": transfer})
        # A client's limit may exceed what fits beside the prompt in the prefill engine.
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        body |= {"max_tokens": 1, "n": 1, "stream": False, "cache_salt": salt, "kv_transfer_params": transfer}
        return msgspec.json.encode(body)

    def body_for_decode(self, salt: str, transfer: msgspec.Raw | dict[str, Any]) -> bytes:
        """The client's request for the decode engine, with the prefill engine's params or with the proxy's."""
        body: dict[str, Any] = {**self.fields, "cache_salt": salt, "kv_transfer_params": transfer}
        if self.route is Route.GENERATE:
            body["sampling_params"] = _with_params(self._sampling, transfer)
        return msgspec.json.encode(body)

    def get(self, name: str) -> Any:
        """A field's value; None if it is absent or null."""
        return read_field(self.fields, name)

    def rename_media(self, rename: Callable[[str], str]) -> None:
        """As the function of this name."""
        rename_media(self.fields, rename)
        if self.route is Route.GENERATE and "features" in self.fields:
            self.fields["features"] = _with_hashes_renamed(self.fields["features"], _limited(rename))

    def _take_text(self, name: str) -> str | None:
        value = self.get(name)
        self.fields.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise BadRequest(f"{name} must be a non-empty string if given.", param=name)
        return value

    def _read_sampling(self) -> dict[str, Any]:
        raw = self.fields.get("sampling_params")
        sampling: dict[str, Any] = {} if raw is None else _decode(raw, "sampling_params", _Fields)
        remove_transfer_fields(sampling, "extra_args")
        return sampling

    def _media(self, part: dict[str, Any]) -> Any:
        """What ``prompt`` has of a part that is not text."""
        self.has_media = True
        encoded = msgspec.json.encode(part, order="sorted")
        extra = len(encoded) - _MAX_MEDIA_CHARS
        if extra <= 0:
            return part
        self._extra_chars += extra
        return str(hash(encoded)).ljust(_MAX_MEDIA_CHARS)

    def _count_chars(self) -> int:
        if self.route is Route.CHAT:
            raw = self.fields.get("messages", b"")
            return max(0, len(raw) - self._extra_chars) + sum(map(len, self.before_messages))
        if self.prompt is None:  # several, or none that an engine takes
            return len(self.fields.get("prompt" if self.route is Route.COMPLETIONS else "token_ids", b""))
        return len(self.prompt) if isinstance(self.prompt, str) else 4 * len(self.prompt)

    def _single_prompt(self) -> Any:
        if self.route is Route.GENERATE:
            tokens = self.get("token_ids")
            valid = isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)
            return tokens if valid else None
        if self.route is Route.CHAT:
            messages = self.get("messages")
            if not (isinstance(messages, list) and messages):
                return None
            for message in messages:
                content = message.get("content") if isinstance(message, dict) else None
                for index, part in enumerate(content if isinstance(content, list) else ()):
                    # vLLM takes media without a type, too.
                    kind = part.get("type", "text" if "text" in part else "") if isinstance(part, dict) else "text"
                    if kind not in _TEXT_PARTS:
                        content[index] = self._media(part)
            return messages
        if self.get("prompt_embeds") is not None:
            return None  # vLLM counts them as additional prompts
        prompt = self.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
            return None
        return prompt if isinstance(prompt, (str, list)) and prompt else None


def read_object(body: bytes) -> _Fields:
    """The fields of a JSON object. Raises BadRequest."""
    try:
        data = as_utf8(body)
        if len(data) > _MAX_VALUES and data.count(b":") > _MAX_VALUES:
            raise _too_many("The request body", "colons", _MAX_VALUES)
        found: _Fields = msgspec.json.decode(data, type=_Fields)
    except (*UNREADABLE, UnicodeError) as error:
        raise BadRequest(f"The request body is not a JSON object: {error}.") from error
    if len(found) > _MAX_FIELDS:
        raise _too_many("The request body", "fields", _MAX_FIELDS)
    return found


def read_field(fields: _Fields, name: str) -> Any:
    """A field's value; None if it is absent or null. Raises BadRequest."""
    raw = fields.get(name)
    return None if raw is None else _decode(raw, name)


def as_utf8(body: bytes) -> bytes:
    """JSON in UTF-8. Engines (FastAPI, ``json.loads``) also take it with a byte order mark, in UTF-16 and in UTF-32.
    Raises UnicodeError."""
    encoding = json.detect_encoding(body)
    return body if encoding == "utf-8" else body.decode(encoding).encode()


def remove_transfer_fields(fields: _Fields, nested: str = "vllm_xargs") -> None:
    """Remove the transfer params from a body and from its object ``nested``. Raises BadRequest."""
    for name in _TRANSFER_FIELDS:
        fields.pop(name, None)
    raw = fields.get(nested)
    if raw is None:
        return
    args = _decode(raw, nested)
    if isinstance(args, dict) and any(name in args for name in _TRANSFER_FIELDS):
        kept = {k: v for k, v in args.items() if k not in _TRANSFER_FIELDS}
        fields[nested] = msgspec.Raw(msgspec.json.encode(kept))


def rename_media(fields: _Fields, rename: Callable[[str], str], searched: frozenset[str] = MESSAGE_FIELDS) -> bool:
    """Rename the media that the client has named: engines keep media by these names, for the requests of all tenants.
    ``searched``: the fields that may have media. True if there are any. Raises BadRequest."""
    found, rename = False, _limited(rename)
    for name in searched & fields.keys():
        raw = fields[name]
        text = bytes(raw)
        if not any(sign in text for sign in _UUID):
            continue
        _refuse_many(raw, name)
        try:
            renamed = _with_parts_renamed(raw, rename, is_parts=name == "content_parts")
        except UNREADABLE as error:
            raise _unreadable(name, error) from error
        found |= renamed is not raw
        fields[name] = renamed
    return found


def _limited(rename: Callable[[str], str]) -> Callable[[str], str]:
    """For one request. A name takes 3 us, and everything else waits."""
    count = itertools.count(1)

    def limited(name: str) -> str:
        if next(count) > _MAX_MEDIA:
            raise _too_many("The request", "media with names", _MAX_MEDIA)
        return rename(name)

    return limited


def _with_parts_renamed(
    raw: msgspec.Raw, rename: Callable[[str], str], *, is_parts: bool = False, depth: int = 0
) -> msgspec.Raw:
    """``raw``: a message, or lists of such; ``is_parts``: the parts of one, or one part. Not searched for names first:
    a body of pictures is large. Raises one of UNREADABLE."""
    change = _rename_part if is_parts else _rename_in_message
    kind = memoryview(raw)[0]
    if kind == ord("{"):
        fields = _OBJECT.decode(raw)
        return _encoded(fields) if change(fields, rename) else raw
    if kind != ord("[") or depth == 2:
        return raw
    try:
        objects = _OBJECTS.decode(raw)
    except msgspec.ValidationError:  # not of objects alone
        values = msgspec.json.decode(raw, type=list[msgspec.Raw])
        renamed = [_with_parts_renamed(each, rename, is_parts=is_parts, depth=depth + 1) for each in values]
        changed = any(new is not old for new, old in zip(renamed, values, strict=True))
        return _encoded(renamed) if changed else raw
    return _encoded(objects) if any([change(each, rename) for each in objects]) else raw


def _rename_in_message(message: _Fields, rename: Callable[[str], str]) -> bool:
    """Whether it had media with names."""
    found = False
    for name in _PARTS:
        if (parts := message.get(name)) is not None:
            message[name] = _with_parts_renamed(parts, rename, is_parts=True)
            found |= message[name] is not parts
    return found


def _rename_part(part: _Fields, rename: Callable[[str], str]) -> bool:
    """Whether it was one of media, with a name."""
    if "uuid" not in part or (_MEDIA.isdisjoint(part) and not _is_media_type(read_field(part, "type"))):
        return False
    if (given := read_field(part, "uuid")) is None:
        return False
    part["uuid"] = _encoded(rename(str(given)))
    return True


def _is_media_type(kind: Any) -> bool:
    return isinstance(kind, str) and kind in _MEDIA


def _with_hashes_renamed(raw: msgspec.Raw, rename: Callable[[str], str]) -> msgspec.Raw:
    """``raw``: the ``features`` of tokens-in/tokens-out: media that were rendered before, by name."""
    features = _decode(raw, "features", _Fields | None) or {}
    if (given := features.get("mm_hashes")) is None:
        return raw
    hashes = _decode(given, "features.mm_hashes", dict[str, list[str]])
    return _encoded(features | {"mm_hashes": {kind: list(map(rename, names)) for kind, names in hashes.items()}})


def _encoded(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _with_params(sampling: dict[str, Any], transfer: Any) -> dict[str, Any]:
    """Put the params in ``extra_args``: before 0.33, vLLM reads those of tokens-in/tokens-out only there."""
    given = sampling.get("extra_args")
    args = _decode(given, "sampling_params.extra_args") if given is not None else None
    args = args if isinstance(args, dict) else {}
    return {**sampling, "extra_args": {**args, "kv_transfer_params": transfer}}


def _is_null(fields: _Fields, name: str) -> bool:
    return (raw := fields.get(name)) is None or raw == _NULL


def _decode(raw: msgspec.Raw, name: str, kind: Any = Any) -> Any:
    _refuse_many(raw, name)
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNREADABLE as error:
        raise _unreadable(name, error) from error


def _refuse_many(raw: msgspec.Raw, name: str) -> None:
    if len(raw) > _MAX_VALUES and sum(map(bytes(raw).count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise _too_many(f"The field {name}", "values", _MAX_VALUES, name)


def _unreadable(name: str, error: Exception) -> BadRequest:
    return BadRequest(f"The field {name} cannot be read: {error}.", param=name)


def _too_many(what: str, of: str, limit: int, param: str | None = None) -> BadRequest:
    return BadRequest(f"{what} has more than {limit} {of}.", status=413, param=param)
