"""The package's proxy with real engines: queries, and requests without prefill."""

import random

import httpx
import pytest

from vllm_kvtier.devtools.clients import prompt_tokens

ANN, BOB = {"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}
REPORT = {"X-KVTier-Report": "1"}
BLOCK = 32


@pytest.fixture
def client(fleet, make_proxy):
    """A client of a proxy whose decode engine computes short prompts."""
    with make_proxy([fleet.prefill], [fleet.decode]) as proxy:
        with httpx.Client(base_url=proxy.base_url, timeout=60) as client:
            yield client


def say(client, messages, headers=ANN, **fields):
    body = {"model": "model", "messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    reply = client.post("/v1/chat/completions", json=body | fields, headers=headers | REPORT)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask(client, headers=ANN, **body):
    """(prompt tokens, prefill engine's entry, decode engine's entry) of a query."""
    reply = client.post("/kvtier/query", json={"model": "model"} | body, headers=headers)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["prompt_tokens"], *answer["engines"]


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["amber", "brook", "cedar", "delta", "ember"]) for _ in range(count))


def held(line) -> tuple[int, int]:
    return line["gpu_cache_tokens"], line["exported_tokens"]


def test_query_reports_cached_tokens_after_generation(fleet, client):
    messages = [{"role": "user", "content": words(1, 150)}]
    n, p, d = ask(client, messages=messages)
    assert held(p) == held(d) == (0, 0)
    before = [prompt_tokens(engine.base_url) for engine in fleet[:2]]
    answer = say(client, messages)
    whole = n // BLOCK * BLOCK
    assert answer["usage"]["prompt_tokens"] == n and whole
    report = answer["kv_transfer_params"]["kvtier"]
    assert report["decode"]["pulled_tokens"] >= n - 1 and "pulled_from" not in report["decode"]

    # The same prompt again: both engines have its whole blocks, and the decode engine retains them.
    asked, p, d = ask(client, messages=messages, max_tokens=5, stream=True)
    assert asked == n and p["gpu_cache_tokens"] == whole and held(d) == (whole, whole)
    # The next turn: the decode engine also has the answer, as far as it tokenizes back.
    turn = [*messages, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
    longer, p, d = ask(client, messages=[*turn, {"role": "user", "content": "And then?"}])
    assert longer > n and p["gpu_cache_tokens"] == whole and d["gpu_cache_tokens"] >= whole
    # Another beginning, another salt, another tenant: nothing.
    for headers, fields in ((ANN, {"cache_salt": "x"}), (BOB, {}), ({}, {})):
        assert [held(line) for line in ask(client, headers, messages=messages, **fields)[1:]] == [(0, 0)] * 2
    assert held(ask(client, messages=[{"role": "user", "content": words(2, 150)}])[2]) == (0, 0)

    used = [prompt_tokens(engine.base_url) - b for engine, b in zip(fleet[:2], before, strict=True)]
    assert [u.total for u in used] == [n, n], "a query computes nothing"


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_completions_pull_and_answer_correctly(client, kind):
    prompt = words(3, 150) if kind == "text" else [random.Random(3).randrange(100, 900) for _ in range(200)]
    body = {"model": "model", "prompt": prompt, "max_tokens": 1}
    reply = client.post("/v1/completions", json=body, headers=ANN)
    n, p, d = ask(client, prompt=prompt)
    assert n == reply.json()["usage"]["prompt_tokens"]
    assert p["gpu_cache_tokens"] == d["gpu_cache_tokens"] == n // BLOCK * BLOCK > 0


def test_unknown_model_returns_engine_error(client):
    reply = client.post("/kvtier/query", json={"model": "none", "prompt": "x"})
    assert reply.status_code == 404 and "none" in reply.json()["error"]["message"]


def test_decode_engine_without_prefill_reports_tokens_by_source(client):
    messages = [{"role": "user", "content": words(4, 30)}]
    answer = say(client, messages)
    report = answer["kv_transfer_params"]["kvtier"]
    n = answer["usage"]["prompt_tokens"]
    assert report["prefill"] is None
    assert report["decode"]["computed_tokens"] == report["decode"]["prompt_tokens"] == n
    again = say(client, messages)["kv_transfer_params"]["kvtier"]["decode"]
    assert again["local_tokens"] == (n - 1) // BLOCK * BLOCK and again["pulled_tokens"] == 0
