"""The demo's judgement: what it must not let pass, and what it must."""

import importlib.util
from types import SimpleNamespace

import msgspec
import pytest

from vllm_kvtier.devtools.clients import Answer, PromptTokens


@pytest.fixture(scope="module")
def demo(root):
    spec = importlib.util.spec_from_file_location("multiturn_demo", root / "examples" / "multiturn_demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ARGS = SimpleNamespace(recalls=True, pull_threshold=1, fit=SimpleNamespace(block=32))


@pytest.fixture
def good(demo):
    """Rounds as they should be: 100 tokens more each turn, the decode engine computes one token, the prefill engine
    pulls what it lacks."""

    def played(bidirectional: bool):
        rounds = []
        for number, turn in enumerate(demo.CONVERSATION):
            known, total = 100 * number, 100 * (number + 1)
            lost = known if turn.p_lost else 0
            pulled = lost if bidirectional else 0
            p = PromptTokens(computed=100 + lost - pulled, cached=known - lost, pulled=pulled)
            d = PromptTokens(computed=1, cached=known, pulled=99)
            assert p.total == d.total == total
            answer = f"It is {turn.code}." if turn.code else "Noted."
            reports = {"prefill": pulled, "decode": 100}
            rounds.append(demo.Played(p=p, d=d, first_token=0.1, answer=answer, reported=reports))
        return rounds

    return played


def replaced(rounds, index, **changes):
    rounds = list(rounds)
    rounds[index] = msgspec.structs.replace(rounds[index], **changes)
    return rounds


@pytest.mark.parametrize("bidirectional", [False, True])
def test_demo_good_round_passes(demo, good, bidirectional):
    assert demo.judge(good(bidirectional), bidirectional, ARGS) == []


@pytest.mark.parametrize("bidirectional", [False, True])
def test_demo_failures_are_detected(demo, good, bidirectional):
    rounds = good(bidirectional)
    asked = next(n for n, turn in enumerate(demo.CONVERSATION) if turn.code)
    lost = next(n for n, turn in enumerate(demo.CONVERSATION) if turn.p_lost)
    nothing = PromptTokens(computed=0, cached=0, pulled=0)
    alone = PromptTokens(computed=100, cached=100, pulled=0)
    for changed, words in (
        (replaced(rounds, asked, answer="It is 00000."), "was answered 'It is 00000.'"),
        (replaced(rounds, 1, d=alone), "tokens and pulled none"),
        (replaced(rounds, 1, p=nothing), "the prefill engine got no request"),
        (replaced(rounds, lost, reported={"prefill": 5}), "prefill reports 5 tokens pulled"),
    ):
        problems = demo.judge(changed, bidirectional, ARGS)
        assert any(words in problem for problem in problems), words


def test_demo_prefill_pulls_outside_bidirectional_round_are_a_failure(demo, good):
    on, off = good(True), good(False)
    assert all("although" in problem for problem in demo.judge(on, False, ARGS))
    assert len(demo.judge(on, False, ARGS)) == len([t for t in demo.CONVERSATION if t.p_lost])
    assert all("had lost its cache" in problem for problem in demo.judge(off, True, ARGS))


def test_demo_accepts_turns_below_pull_threshold(demo, good):
    alone = PromptTokens(computed=100, cached=100, pulled=0)
    rounds = replaced(good(False), 1, d=alone, reported={})
    assert demo.judge(rounds, False, SimpleNamespace(recalls=True, pull_threshold=128, fit=ARGS.fit)) == []


def test_demo_counts_last_token_as_computed(demo):
    whole = PromptTokens(computed=0, cached=32, pulled=9)
    assert demo.at_least_one_computed(whole) == PromptTokens(computed=1, cached=32, pulled=8)
    part = PromptTokens(computed=2, cached=32, pulled=9)
    assert demo.at_least_one_computed(part) == part


def test_demo_reads_reports_by_role(demo):
    report = {"prefill": {"pulled_tokens": 7, "pulled_from": None}, "decode": {}, "v": 1}
    assert demo.reported({"kvtier": report}) == {"prefill": 7}
    assert demo.reported(None) == demo.reported({}) == {}


@pytest.mark.parametrize(
    ("given", "tied"),
    [("ab", True), ("ac", True), ("ad", False), ("b", False), ("", False)],
)
def test_near_tie_of_logprobs_is_recognised(demo, given, tied):
    def step(token, **others):
        top = [{"token": token, "logprob": -0.7}, *({"token": t, "logprob": p} for t, p in others.items())]
        return {"token": token, "logprob": -0.7, "top_logprobs": top}

    steps = [step("a", b=-3.0), step("x", b=-0.8, c=-0.9, d=-2.0)]
    expected = Answer(text="ax", finish_reason="stop", usage=None, params=None, seconds=0, logprobs=steps)
    assert demo.nearly_tied(expected, given) is tied


def test_demo_filler_file_is_deterministic(demo):
    assert demo.python_file(1, 2) == demo.python_file(1, 2) != demo.python_file(2, 2)
    compile(demo.python_file(1, 18), "ballast", "exec")


def test_demo_sizes_cache_of_model_with_states_by_vllm_log(demo, tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("INFO KV cache size: 9,999 tokens, Maximum concurrency for 3,456 tokens per request: 12.50x\n")
    assert demo.fitted(SimpleNamespace(log_path=log), 100) is None, "blocks are as asked for"
    log.write_text(f"INFO Setting attention block size to 544 tokens to ensure\n{log.read_text()}")
    fit = demo.fitted(SimpleNamespace(log_path=log), 100)
    assert (fit.block, fit.prompt) == (544, 8)
    made = fit.engine([], 2 * 3456 // demo.BLOCK, 3456)
    assert made == {"num_blocks": 17, "args": ["--max-num-batched-tokens", "544"]}, "two prompts, and one more"
    assert fit.engine([0], 1, 3456)["args"] == [] and demo.Fit().engine([], 7, 3456) == {"num_blocks": 7, "args": []}
