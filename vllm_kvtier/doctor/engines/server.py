"""Queries to a vLLM server over HTTP: version, metrics, tokens of a prompt."""

import http.client
import json
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_kvtier.errors import KVTierError

PREFIX = "vllm:kvtier_"
# Engines are reached directly, not through the proxy that the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Prompt = str | dict[str, Any]  # a text, or the body for /tokenize of a chat
# (name without _total, "kind" or None) -> sum over engines
Metrics = dict[tuple[str, str | None], float]


class Server:
    """``url``: http://HOST:PORT. Every method raises KVTierError with the reason of a failure."""

    def __init__(self, url: str, seconds: float = 10.0):
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._seconds = seconds

    def version(self) -> str:
        """vLLM's."""
        return str(self._json("/version").get("version", ""))

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids as a completion of this text, or this chat, would have."""
        answer = self._json("/tokenize", {"prompt": prompt} if isinstance(prompt, str) else prompt)
        if not isinstance(answer.get("tokens"), list):
            raise KVTierError(f"{self.url} does not tokenize: its answer has no tokens")
        return answer["tokens"]

    def metrics(self) -> "Scrape":
        return Scrape(self._read("/metrics").decode(errors="replace"))

    def _json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = json.loads(self._read(path, body))
        except (ValueError, RecursionError) as error:
            raise KVTierError(f"{self.url}{path} answers with something that is not JSON") from error
        if not isinstance(answer, dict):
            raise KVTierError(f"{self.url}{path} answers like no vLLM server")
        return answer

    def _read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
            with _DIRECT.open(request, timeout=self._seconds) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(500).decode(errors="replace")
            raise KVTierError(f"{self.url}{path} answers {error.code} {error.reason}: {text}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            raise KVTierError(f"no vLLM server answers at {self.url}{path}: {reason}") from error


class Scrape:
    """A reading of ``/metrics``. ``values``: all samples except histogram buckets, summed over other labels than
    ``kind``; ``series``: how many samples each sum has. ``has_connector``: whether the engine runs KVTierConnector;
    ``is_proxy``: this is no engine, but `kvtier proxy`.
    ``cache``: labels of vLLM's cache_config_info."""

    def __init__(self, text: str):
        self.values: Metrics = {}
        self.series: Counter[tuple[str, str | None]] = Counter()
        self.cache: dict[str, str] = {}
        self.has_connector = self.is_proxy = False
        try:
            for family in text_string_to_metric_families(text):
                self.has_connector |= family.name.startswith(PREFIX)
                self.is_proxy |= family.name.startswith("kvtier_proxy_")
                for sample in family.samples:
                    if family.name == "vllm:cache_config_info":
                        self.cache = dict(sample.labels)
                    if sample.name.endswith(("_bucket", "_created")):
                        continue
                    kind = sample.labels.get("kind") if family.name.startswith(PREFIX) else None
                    key = sample.name.removesuffix("_total"), kind
                    self.values[key] = self.values.get(key, 0.0) + sample.value
                    self.series[key] += 1
        except ValueError as error:
            raise KVTierError(f"/metrics cannot be read: {error}") from error

    def total(self, name: str) -> float:
        """Sum over kinds; 0 if it never happened. ``name``: with its prefix, without _total."""
        return sum(value for (known, _), value in self.values.items() if known == name)

    def ours(self, name: str, kind: str | None = None) -> float:
        """Of ``telemetry.stats.MEANINGS``; of one kind, or of all."""
        if kind is None:
            return self.total(PREFIX + name)
        return self.values.get((PREFIX + name, kind), 0.0)

    def mean(self, name: str, kind: str | None = None) -> float | None:
        """Of a gauge (its name with its prefix), over engines: data-parallel ranks. None: not exported."""
        key = name, kind
        return self.values[key] / self.series[key] if key in self.values else None

    def stores_skipped(self) -> dict[str, float]:
        """Blocks that are not in the store, by reason."""
        return {kind: n for kind, n in self.kinds("stores_skipped").items() if kind != "already_stored"}

    def kinds(self, name: str) -> dict[str, float]:
        """{kind: how often}, most often first, without zeros."""
        found = {k or "": v for (known, k), v in self.values.items() if known == PREFIX + name and v}
        return dict(sorted(found.items(), key=lambda item: -item[1]))
