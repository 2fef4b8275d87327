"""Tokens in, tokens out through the proxy and two real engines, and the routes that it passes on."""

import random

import httpx
import pytest

REPORT = {"X-KVTier-Report": "1", "Authorization": "Bearer ann"}


@pytest.fixture
def client(fleet, make_proxy):
    """A client of a proxy with a prefill and a decode engine."""
    with make_proxy([fleet.prefill], [fleet.decode]) as proxy:
        with httpx.Client(base_url=proxy.base_url, timeout=120) as client:
            yield client


def test_token_routes_pull_and_return_equal_tokens(client):
    """The decode engine pulls the prefilled prompt, and both routes give the same tokens."""
    tokens = [random.Random(1).randrange(100, 900) for _ in range(200)]
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"model": "model", "token_ids": tokens, "sampling_params": sampling}
    reply = client.post("/inference/v1/generate", json=body, headers=REPORT)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    report = answer["kv_transfer_params"]["kvtier"]
    assert report["prefill"]["num_tokens"] == 200 and report["decode"]["pulled_tokens"] >= 199, report
    made = answer["choices"][0]["token_ids"]
    assert len(made) == 8

    body["sampling_params"] = sampling | {"seed": 1}
    got, streamed = client.post("/inference/v1/generate", json=body | {"stream": True}, headers=REPORT), []
    assert got.status_code == 200 and got.text.rstrip().endswith("data: [DONE]")
    for line in got.text.splitlines():
        if line.startswith("data: {"):
            for choice in httpx.Response(200, text=line[6:]).json()["choices"]:
                streamed += choice["token_ids"] or []
    assert streamed == made

    # The next turn: the prefill engine pulls what the decode engine generated.
    longer = {**body, "token_ids": [*tokens, *made, *([5] * 100)], "sampling_params": sampling}
    report = client.post("/inference/v1/generate", json=longer, headers=REPORT).json()["kv_transfer_params"]["kvtier"]
    assert report["decode"]["prompt_tokens"] == 308

    # What else is passed on to an engine.
    assert client.get("/v1/models").json()["data"][0]["id"] == "model"
    told = client.post("/tokenize", json={"model": "model", "prompt": "a b c"}).json()
    assert told["count"] == len(told["tokens"]) > 0
    text = client.post("/detokenize", json={"model": "model", "tokens": told["tokens"]}).json()
    assert "a" in text["prompt"]
    response = client.post("/v1/responses", json={"model": "model", "input": "hello", "max_output_tokens": 4})
    assert response.status_code == 200, response.text
    message = {"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    assert client.post("/v1/messages", json=message).status_code == 200
    assert client.post("/sleep").status_code == 404
    page = client.get("/metrics").text
    assert 'kvtier_proxy_requests_total{outcome="ok",route="/inference/v1/generate"} 3.0' in page
