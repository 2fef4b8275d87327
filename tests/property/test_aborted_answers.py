"""Answers that vLLM ends by aborting their requests are stored as those that it ends itself.

Its frontend finds stop strings, and has the engine core abort the request; a session that is closed is aborted too. The
world is that of ``test_kept_blocks_lives``, which compares each block that is copied with its hash.
"""

import pytest
from test_kept_blocks_lives import GROUPS, HASH_BLOCK_SIZE, Life, live, make, options_of  # noqa: F401
from vllm.v1.request import RequestStatus

from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

pytestmark = pytest.mark.skipif(
    not granted(Feature.SYNC_LOADS), reason="its model runner is that of vLLM 0.29 and later"
)

PROMPT, ANSWER = [1] * 41, 60


def stored_blocks(life):
    """Blocks of the first group that the store has once all copies have ended."""
    for _ in range(40):
        life.step()
    life.settle_down()
    return sum(item.group == 0 and item.outcome == "committed" for item in life.tier.items.values())


def answered(make, groups, asynchronous, drafts=0, more=100):  # noqa: F811
    """A request; ``ANSWER`` tokens of its answer were read."""
    life = Life(make, GROUPS[groups], 1, asynchronous=asynchronous, drafts=drafts, share=1.0)
    life.sessions = 0.0
    life.new(list(PROMPT), ANSWER + more)
    (request,) = life.live.values()
    while life.live and request.num_output_tokens < ANSWER:
        life.step()
    return life, request


def abort(life, request):
    life.live.clear()
    life.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("groups", ["full", "sizes"])
def test_answer_with_a_stop_string_is_stored_as_one_of_its_length(make, groups, asynchronous, drafts):  # noqa: F811
    life, request = answered(make, groups, asynchronous, drafts, more=0)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    size, whole = life.groups[0].block_tokens, stored_blocks(life)
    assert whole == (len(PROMPT) + ANSWER - 1) // size
    life, request = answered(make, groups, asynchronous, drafts)
    abort(life, request)
    assert stored_blocks(life) == (request.num_tokens - 1) // size >= whole
    life.end()


def test_blocks_of_an_answer_that_are_not_kept_at_once_are_offered_again(make):  # noqa: F811
    life, request = answered(make, "full", True)
    life.tier.die(life.tier.instance)
    abort(life, request)
    life.reactor.run()
    life.tier.live()
    assert stored_blocks(life) == (request.num_tokens - 1) // HASH_BLOCK_SIZE


def test_session_that_is_closed_is_stored_to_its_end(make):  # noqa: F811
    life = Life(make, GROUPS["full"], 1, asynchronous=True, share=1.0)
    life.sessions = 1.0
    life.new(list(PROMPT), ANSWER)
    (request,) = life.live.values()
    life.rng.random = lambda: 0.9  # a session gets no more input, and is closed
    while life.live:
        life.step()
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert stored_blocks(life) == (len(PROMPT) + ANSWER - 1) // HASH_BLOCK_SIZE


@pytest.mark.parametrize("tokens, preemptions, kept", [(0, 0, False), (1, 0, True), (1, 1, False)])
def test_aborted_request_is_right_behind_a_token_and_without_a_preemption(make, tokens, preemptions, kept):  # noqa: F811
    life = Life(make, GROUPS["full"], 1, asynchronous=False)
    life.new(list(PROMPT), ANSWER)
    (request,) = life.live.values()
    request.append_output_token_ids([1] * tokens)
    request.num_preemptions, request.status = preemptions, RequestStatus.FINISHED_ABORTED
    assert vr.kept_well(request) is kept and not vr.ended_well(request)
    request.status = RequestStatus.FINISHED_ERROR
    assert not vr.kept_well(request)
    request.status = RequestStatus.FINISHED_REPETITION
    assert vr.kept_well(request) and vr.ended_well(request)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_blocks_of_aborted_answers_hold_what_their_hash_says(make, groups, asynchronous, drafts):  # noqa: F811
    aborted = 0
    for seed in range(2):
        life = Life(make, GROUPS[groups], seed, asynchronous=asynchronous, drafts=drafts, **options_of(seed))
        finished = life.offloader.finished

        def counted(state, table, *args, finished=finished):
            nonlocal aborted
            finished(state, table, *args)
            aborted += table is not None and table.ended > 0 and not vr.ended_well(state.request)

        life.offloader.finished = counted
        live(life, {life.abort: 2})
        life.end()
    assert aborted > 0
