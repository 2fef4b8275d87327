"""Questions of the ``kvtier`` commands to an engine."""

import weakref
from types import SimpleNamespace

import pytest
from source_fakes import load_context
from support import FakePool, make_request
from tier_fakes import FakePending

from vllm_kvtier.scheduler.admin import admin_requests
from vllm_kvtier.scheduler.admin.admin_requests import AdminRequests
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.wire import messages as m

HASH_BLOCK_SIZE = 4


class Tokens(list):
    """Of a question: a list that can be watched."""


def test_admin_requests_beyond_what_a_step_may_answer_are_refused():
    """While a step goes on, a client asks without end: the next step does not wait for all of its answers."""
    requests = AdminRequests(load_context([(4, None)], 4), None, None, None, None, wake=lambda: None)
    answers = []
    for number in range(1000):
        requests.ask(m.Inspect(number), answers.append)
    assert len(requests.waiting) == admin_requests.MAX_WAITING
    assert len(answers) == 1000 - admin_requests.MAX_WAITING
    assert {(type(answer), answer.code) for answer in answers} == {(m.LeaseRefused, "peer_busy")}
    requests.waiting.clear()
    requests.ask(m.Inspect(1000), answers.append)
    assert len(requests.waiting) == 1


@pytest.mark.parametrize("kind", [m.Query, m.PinPrompt, m.Explain])
def test_admin_request_that_waits_does_not_hold_its_tokens(kind):
    """Two million tokens take 75 MB, and the store or a step may take seconds to answer."""
    pending, answers, tokens = FakePending(1), [], Tokens(range(42))
    make_request("r", tokens, HASH_BLOCK_SIZE)  # makes vLLM's seed
    store = SimpleNamespace(
        inspect=lambda hashes: pending, pin=lambda hashes, pinned: pending, instance="life", problem="",
        explain=lambda hashes, fingerprint: pending, namespace=lambda fingerprint: "",
    )  # fmt: skip
    context = load_context(
        [(HASH_BLOCK_SIZE, None)], HASH_BLOCK_SIZE, pool=BlockPool(FakePool(100, HASH_BLOCK_SIZE)),
        info={"max_tokens": 1000},
    )  # fmt: skip
    exports = SimpleNamespace(longest_prefix=lambda hashes, fingerprint: 0)
    requests = AdminRequests(context, exports, None, store, None, wake=lambda: None)
    held = weakref.ref(tokens)
    requests.ask(kind(7, tokens), answers.append)
    del tokens
    assert held() is None and not answers
    pending.resolve(SimpleNamespace(reason="it does not answer"))
    requests.run()
    assert [answer.question for answer in answers] == [7] and getattr(answers[0], "prompt", 42) == 42


def test_answers_name_the_stores_of_an_engine_over_many_nodes():
    """They were refused as malformed from sixteen nodes on."""
    stores = " ".join(f"{node:032x}" for node in range(64))
    answers = [m.Inspection(1, *[0] * 8, store=stores), m.Explanation(1, 0, store=stores)]
    assert [m.decode_engine(m.encode(answer)) for answer in answers] == answers
