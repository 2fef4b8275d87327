"""Requests to engines and proxies, and the engines' counters, for the demo, the tests and the benchmarks.

They go there directly, not through the HTTP proxy that the environment names (``trust_env=False``).
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

TIMEOUT = httpx.Timeout(120.0, connect=5.0)
# vLLM's count of prompt tokens by source, independent of the connector's report.
_SOURCE = re.compile(r'^vllm:prompt_tokens_by_source_total\{[^}]*source="(\w+)"[^}]*\} ([\d.e+]+)$', re.M)


class Answer(msgspec.Struct, kw_only=True):
    """One answer. Times in seconds from sending; ``params`` is its top-level kv_transfer_params, if any."""

    text: str
    finish_reason: str | None
    usage: dict[str, Any] | None
    params: dict[str, Any] | None
    seconds: float
    first_token_seconds: float | None = None  # streamed answers only
    token_ids: list[int] | None = None  # where the request had return_token_ids
    logprobs: list[dict[str, Any]] | None = None  # a chat's, by token, where it asked for them; not streamed


class PromptTokens(msgspec.Struct, frozen=True):
    """Where an engine's prompt tokens came from, since its start or between two readings."""

    computed: int
    cached: int  # found in its own prefix cache
    pulled: int  # brought by the connector

    def __sub__(self, earlier: "PromptTokens") -> "PromptTokens":
        return PromptTokens(
            computed=self.computed - earlier.computed,
            cached=self.cached - earlier.cached,
            pulled=self.pulled - earlier.pulled,
        )

    @property
    def total(self) -> int:
        return self.computed + self.cached + self.pulled


def prompt_tokens(base_url: str) -> PromptTokens:
    """Read an engine's counters. Raises httpx.HTTPError if it does not answer."""
    response = httpx.get(f"{base_url}/metrics", timeout=TIMEOUT, trust_env=False)
    response.raise_for_status()
    by_source = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
    for source, value in _SOURCE.findall(response.text):
        by_source[source] += int(float(value))
    return PromptTokens(
        computed=by_source["local_compute"],
        cached=by_source["local_cache_hit"],
        pulled=by_source["external_kv_transfer"],
    )


def complete(base_url: str, prompt: str | Sequence[int], *, max_tokens: int = 16, **body: Any) -> Answer:
    """A greedy completion with token ids; ``body`` adds to the request or overrides it. Not streamed.

    Raises httpx.HTTPStatusError with the server's message.
    """
    defaults = {"model": "model", "temperature": 0, "return_token_ids": True}
    return _whole(base_url, "completions", {**defaults, "prompt": prompt, "max_tokens": max_tokens, **body})


def chat(
    base_url: str,
    messages: Sequence[Mapping[str, str]],
    *,
    max_tokens: int = 32,
    stream: bool = False,
    headers: Mapping[str, str] | None = None,
    **body: Any,
) -> Answer:
    """A greedy chat answer; streamed ones have ``first_token_seconds``. Raises as ``complete`` does."""
    body = {"model": "model", "temperature": 0, "messages": list(messages), "max_tokens": max_tokens, **body}
    if stream:
        return _streamed(base_url, "chat/completions", body, headers)
    return _whole(base_url, "chat/completions", body, headers)


def _whole(base_url: str, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    started = time.monotonic()
    response = httpx.post(f"{base_url}/v1/{path}", json=body, headers=headers, timeout=TIMEOUT, trust_env=False)
    seconds = time.monotonic() - started
    _check(response)
    document = response.json()
    choice = document["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(
        text=text or "",
        finish_reason=choice.get("finish_reason"),
        usage=document.get("usage"),
        params=document.get("kv_transfer_params"),
        seconds=seconds,
        token_ids=choice.get("token_ids"),
        logprobs=(choice.get("logprobs") or {}).get("content"),
    )


def _streamed(base_url: str, path: str, body: dict[str, Any], headers: Mapping[str, str] | None) -> Answer:
    answer = Answer(text="", finish_reason=None, usage=None, params=None, seconds=0.0)
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    started = time.monotonic()
    url = f"{base_url}/v1/{path}"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT, trust_env=False) as response:
        if response.status_code != 200:
            response.read()
            _check(response)
        for line in response.iter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise httpx.RemoteProtocolError(f"{url} ended its stream with {event['error']}")
            answer.usage = event.get("usage") or answer.usage
            answer.params = event.get("kv_transfer_params") or answer.params
            for choice in event["choices"]:
                piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
                if piece and answer.first_token_seconds is None:
                    answer.first_token_seconds = time.monotonic() - started
                answer.text += piece or ""
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.seconds = time.monotonic() - started
    return answer


def _check(response: httpx.Response) -> None:
    """raise_for_status with the server's message, which has the cause."""
    if response.is_error:
        raise httpx.HTTPStatusError(
            f"{response.request.url} answered {response.status_code}: {response.text[:500]}",
            request=response.request,
            response=response,
        )
