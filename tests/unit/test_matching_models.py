"""What the matcher takes of an offer where the model sets the limit: windows, and MLA without context."""

import time
from types import SimpleNamespace

import pytest
from cache_groups import cache_groups
from source_fakes import ALL_BLOCKS, load_context, make_matcher
from support import make_request

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks, PendingLease
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.engine_info import EngineInfo, _supports_partial_prefix
from vllm_kvtier.wire import messages as m

HASH_BLOCK_SIZE = 4
HANDOFF = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "kvtier/e"}
SOURCE = {"do_remote_decode": True, "remote_request_id": "kvtier/e", "remote_host": "a", "remote_port": 1}


class Peers:
    """Grants the whole prompt, or the chain that was asked for, at once."""

    def __init__(self, groups):
        self.groups, self.asked, self.released, self.cancelled = groups, [], [], []

    def ask(self, address, timeout, rehash=None, **fields):
        pending = PendingLease(address, m.LeaseRequest(1, "", **fields), time.monotonic() + 60)
        self.asked.append(pending)
        return pending

    def grant(self, tokens):
        blocks = [list(range(1, 1 + -(-tokens // size))) for size, _ in self.groups]
        self.asked[-1].outcome = LeasedBlocks(("a", 1), "a/1", 6 + len(self.asked), 0, tokens, blocks, [])

    def refuse(self):
        self.asked[-1].outcome = LookupMiss("unknown_export", "it has ended")

    def cancel(self, pending):
        self.cancelled.append(pending)

    def release_export(self, address, export):
        raise AssertionError("the prefill engine is to keep it")

    def release(self, offer, done):
        self.released.append(offer.lease)

    def known(self, address, instance):
        return None


def _matcher(groups, wire_codec="raw", pinned=0, **info):
    peers = Peers(groups)
    config = KVTierConfig(bidirectional=True, pull_threshold=1, wire_codec=wire_codec)
    load = load_context(groups, HASH_BLOCK_SIZE, peers, config=config, checksum_index=ChecksumIndex(), info=info,
                        pinned_blocks=lambda: pinned)  # fmt: skip
    return make_matcher(load), peers


def _early_params(tokens):
    """Of a hand-off that can be read before its lease is granted."""
    request = make_request("r", list(range(tokens)), HASH_BLOCK_SIZE, HANDOFF)
    tail = vr.tail_hash(request, tokens, HASH_BLOCK_SIZE)
    digest = vr.prefix_digest(vr.block_hashes(request, tokens, HASH_BLOCK_SIZE), tail)
    return {
        **HANDOFF,
        "remote_block_ids": [list(range(1, 1 + -(-tokens // HASH_BLOCK_SIZE)))],
        "kvtier": {"instance": "a/1", "num_tokens": tokens, "digest": digest.hex()},
    }


@pytest.mark.parametrize("ends", ["unmatched", "matched", "computed here", "computed unmatched"])
@pytest.mark.parametrize("router_releases", [False, True])
def test_router_that_releases_keeps_export_of_a_request_that_ends_before_it_is_matched(ends, router_releases):
    """It may send a request that this engine has not begun to another one, with the same params."""
    matcher, peers = _matcher([(HASH_BLOCK_SIZE, None)])
    released = []
    peers.release_export = lambda address, export: released.append(export)
    own = {"router_releases": router_releases}
    request = make_request("r", list(range(20)), HASH_BLOCK_SIZE, {**HANDOFF, "kvtier": own})
    if ends == "matched":
        assert matcher.match(request, 0) == (None, False)
    if ends == "computed unmatched":
        request.num_computed_tokens = 20
    if ends == "computed here":
        matcher.release_all(request)
        assert released == ["e"]
    else:
        matcher.finished(request)
        assert bool(released) != (router_releases and ends == "unmatched") and set(released) <= {"e"}
        assert not len(matcher)


@pytest.mark.parametrize("length", [17, 18, 19, 20, 21])
def test_matching_with_windows_computes_the_last_token(length):
    """vLLM gives no block for what only the last token's window reaches once it counts that token as there."""
    groups, window = [(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 6)], 6
    made, peers = _matcher(groups)
    request = make_request("r", list(range(length)), HASH_BLOCK_SIZE, HANDOFF)
    assert made.match(request, 0) == (None, False)
    peers.grant(length)
    assert made.match(request, 0) == (length - 1, True)
    taken = length - 1
    skipped = max(0, taken - window + 1) // HASH_BLOCK_SIZE  # as vLLM's manager of sliding windows does
    full = [100 + i for i in range(-(-taken // HASH_BLOCK_SIZE))]
    sliding = [0 if i < skipped else 200 + i for i in range(-(-taken // HASH_BLOCK_SIZE))]
    first_needed = length - window  # by the token that is computed
    assert not any(block == 0 for block in sliding[first_needed // HASH_BLOCK_SIZE :])
    made.allocated(request, (full, sliding), taken)
    [order], _ = made.take_jobs()
    whole, part = order.groups
    assert whole.local.tolist() == full and part.local.tolist() == [b for b in sliding if b]
    # A block that is taken counts as the source summed it, its last token included.
    last = min(HASH_BLOCK_SIZE, length - (len(full) - 1) * HASH_BLOCK_SIZE)
    assert whole.valid.tolist() == [HASH_BLOCK_SIZE] * (len(full) - 1) + [last]


def test_matching_counts_hits_without_blocks_that_are_needed():
    """Of a peer by other rules, which leases from the window's beginning before the hit's end on."""
    groups = [(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 6)]
    made, peers = _matcher(groups, draft_lookahead=1, whole_blocks=True)
    request = make_request("r", list(range(22)), HASH_BLOCK_SIZE, HANDOFF)
    assert made.match(request, 0) == (None, False)
    peers.grant(20)
    assert peers.asked[-1].outcome.blocks[1] == [1, 2, 3, 4, 5]
    peers.asked[-1].outcome.blocks[1][:3] = [0, 0, 0]
    assert made.match(request, 0) == (0, False) and made.get("r").miss_reason == "incomplete_hit"


def test_matching_without_windows_reads_whole_prompt():
    made, peers = _matcher([(HASH_BLOCK_SIZE, None)])
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE, HANDOFF)
    assert made.match(request, 0) == (None, False)
    peers.grant(18)
    assert made.match(request, 0) == (18, True)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("params", [HANDOFF, SOURCE])
def test_matching_asks_again_for_a_lease_that_may_end_before_it_is_read(params, taken):
    """vLLM may ask for none of the requests that wait for minutes, or may have no blocks for one. The peer ends a lease
    after three times ``transfer_timeout``, and blocks that it gave to others would count as corrupt. The export may
    live for longer: a decode engine that was overloaded gave it up and computed the prompt."""
    made, peers = _matcher([(HASH_BLOCK_SIZE, None)])
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE, params)

    def wait(seconds):
        peers.asked[-1].deadline = time.monotonic() + 2 - seconds
        made.get("r").hit_at -= seconds
        made.get("r").asked_at -= seconds

    assert made.match(request, 0) == (None, False)
    for times in range(1, 4):
        peers.grant(16)
        assert not taken or made.match(request, 0) == (16, True)
        wait(59 if taken else 112)
        assert made.match(request, 0) == (16, True) and len(peers.asked) == times
        wait(131)
        assert made.match(request, 0) == (None, False)
        assert peers.cancelled == peers.asked[:-1] and len(peers.asked) == times + 1
    peers.refuse()
    assert made.match(request, 0) == (0, False), "the export has ended"
    assert made.match(request, 0) == (0, False) and len(peers.asked) == 4 and not peers.released


@pytest.mark.parametrize("params", [HANDOFF, SOURCE])
@pytest.mark.parametrize("pinned", [0, ALL_BLOCKS])
def test_matching_computes_a_prompt_whose_load_vllm_never_has_blocks_for(params, pinned):
    """vLLM keeps more free for what it speculates, and no request ends that has some. The lease was asked for again
    until the export ended, which takes minutes, and all requests behind waited."""
    made, peers = _matcher([(HASH_BLOCK_SIZE, None)], pinned=pinned)
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE, params)
    assert made.match(request, 0) == (None, False)
    answers = []
    for _ in range(3):
        peers.grant(16)
        assert made.match(request, 0) == (16, True)
        peers.asked[-1].deadline = time.monotonic() - 129
        made.get("r").hit_at -= 131
        made.get("r").asked_at -= 131
        answers.append(made.match(request, 0))
        if answers[-1] == (0, False):
            break
    assert answers == ([(None, False), (0, False)] if pinned else [(None, False)] * 3)
    assert bool(peers.released) == bool(pinned) and made.get("r").miss_reason == "lease_held_too_long" * bool(pinned)


def test_matching_reads_early_only_what_was_just_promised():
    made, peers = _matcher([(HASH_BLOCK_SIZE, None)])
    peers.known = lambda address, instance: []
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE, _early_params(18))
    assert made.match(request, 0) == (18, True)
    made.get("r").hit_at -= 61
    made.get("r").asked_at -= 61
    assert made.match(request, 0) == (None, False) and peers.cancelled == peers.asked[:1]
    peers.grant(18)
    assert made.match(request, 0) == (18, True) and made.get("r").hit.lease == 8


@pytest.mark.parametrize("last", [-1, 1 << 31, True, "5", None])
def test_matching_reads_nothing_early_from_malformed_blocks(last):
    made, peers = _matcher([(HASH_BLOCK_SIZE, None)])
    peers.known = lambda address, instance: []
    params = _early_params(18)
    params["remote_block_ids"][0][-1] = last
    assert made.match(make_request("r", list(range(18)), HASH_BLOCK_SIZE, params), 0) == (None, False)


@pytest.mark.parametrize("codec", ["raw", "int8", {"full": "fp8"}])
def test_matching_encoded_export_is_not_read_early(codec):
    """Encoding the end of a prompt takes longer than the way of its answer: such reads failed their checksums."""
    made, peers = _matcher([(HASH_BLOCK_SIZE, None)], codec)
    peers.known = lambda address, instance: []
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE, _early_params(18))
    assert made.match(request, 0) == ((18, True) if codec == "raw" else (None, False))
    peers.grant(18)
    assert made.match(request, 0) == (18, True)


def test_matching_of_model_without_prefix_resume_takes_whole_prompts():
    made, peers = _matcher([(HASH_BLOCK_SIZE, None)], supports_partial_prefix=False)
    request = make_request("s", list(range(18)), HASH_BLOCK_SIZE, SOURCE)
    assert made.match(request, 0) == (0, False) and not peers.asked, "nothing found by hash is a whole prompt"
    request = make_request("p", list(range(18)), HASH_BLOCK_SIZE, HANDOFF)
    assert made.match(request, 0) == (None, False)
    peers.grant(16)
    assert made.match(request, 0) == (0, False) and peers.released == [7]
    request = make_request("w", list(range(18)), HASH_BLOCK_SIZE, HANDOFF)
    assert made.match(request, 0) == (None, False)
    peers.grant(18)
    assert made.match(request, 0) == (18, True)


@pytest.mark.parametrize(
    ("mla", "chunked", "resumes"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_models_that_can_continue_from_a_prefix(mla, chunked, resumes):
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla), scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked)
    )
    assert _supports_partial_prefix(config) is resumes


@pytest.mark.parametrize(("groups", "resumes", "by_request"), [(1, True, False), (2, True, True), (1, False, True)])
def test_matching_failed_load_fails_by_request_or_by_step(groups, resumes, by_request):
    facts = EngineInfo(
        engine_id="e", instance_id="i", groups=cache_groups([(16, None)] * groups), full_groups=[0], world_size=1,
        tensor_parallel=1, data_parallel_rank=0, max_tokens=99, hash_lookahead=0, step_tokens=1, link_bandwidth=1.0,
        supports_partial_prefix=resumes, unsupported=None, release="1", config=None, num_groups=groups,
    )  # fmt: skip
    assert facts.reports_failed_requests is by_request
