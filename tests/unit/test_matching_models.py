"""What the matcher takes of an offer where the model sets the limit: windows, and MLA without context."""

import time
from types import SimpleNamespace

import pytest
from support import make_request

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.ledger import Keys, Ledger
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.offers import Offer, PendingAsk
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.facts import EngineFacts, _resumes
from vllm_kvtier.wire import messages as m

UNIT = 4
HANDOFF = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "e"}
SOURCE = {"do_remote_decode": True, "remote_host": "a", "remote_port": 1}


class Peers:
    """Grants the whole prompt, or the chain that was asked for, at once."""

    def __init__(self, groups):
        self.groups, self.asked, self.released = groups, [], []

    def ask(self, address, **fields):
        pending = PendingAsk(address, m.Ask(1, "", **fields), time.monotonic() + 60)
        self.asked.append(pending)
        return pending

    def grant(self, tokens):
        blocks = [list(range(1, 1 + -(-tokens // size))) for size, _ in self.groups]
        self.asked[-1].outcome = Offer(("a", 1), "a/1", 7, 0, tokens, blocks, [])

    def cancel(self, pending):
        raise AssertionError("answered, so there is nothing to cancel")

    def release(self, offer, done):
        self.released.append(offer.lease)

    def known(self, address, instance):
        return None


def _matcher(groups, wire_codec="raw", **options):
    peers = Peers(groups)
    config = KVTierConfig(bidirectional=True, pull_threshold=1, wire_codec=wire_codec)
    made = Matcher(config, peers, Ledger(), lambda: Keys(3), groups, UNIT, lambda: ("me", 9), Counters(), **options)
    return made, peers


@pytest.mark.parametrize("length", [17, 18, 19, 20, 21])
def test_with_windows_the_last_token_is_computed_not_read(length):
    """vLLM gives no block for what only the last token's window reaches once it counts that token as there."""
    groups, window = [(UNIT, None), (UNIT, 6)], 6
    made, peers = _matcher(groups)
    request = make_request("r", list(range(length)), UNIT, HANDOFF)
    assert made.match(request, 0) == (None, False)
    peers.grant(length)
    assert made.match(request, 0) == (length - 1, True)
    taken = length - 1
    skipped = max(0, taken - window + 1) // UNIT  # as vLLM's manager of sliding windows does
    full = [100 + i for i in range(-(-taken // UNIT))]
    sliding = [0 if i < skipped else 200 + i for i in range(-(-taken // UNIT))]
    first_needed = length - window  # by the token that is computed
    assert not any(block == 0 for block in sliding[first_needed // UNIT :])
    made.allocated(request, (full, sliding), taken)
    [order], _ = made.take_orders()
    whole, part = order.groups
    assert whole.local.tolist() == full and part.local.tolist() == [b for b in sliding if b]
    # A block that is taken counts as the source summed it, its last token included.
    last = min(UNIT, length - (len(full) - 1) * UNIT)
    assert whole.valid.tolist() == [UNIT] * (len(full) - 1) + [last]


def test_without_windows_the_whole_prompt_is_read():
    made, peers = _matcher([(UNIT, None)])
    request = make_request("r", list(range(18)), UNIT, HANDOFF)
    assert made.match(request, 0) == (None, False)
    peers.grant(18)
    assert made.match(request, 0) == (18, True)


@pytest.mark.parametrize("codec", ["raw", "int8", {"full": "fp8"}])
def test_what_is_encoded_is_not_read_before_it_is_granted(codec):
    """Encoding the end of a prompt takes longer than the way of its answer: such reads failed their checksums."""
    made, peers = _matcher([(UNIT, None)], codec)
    peers.known = lambda address, instance: []
    request = make_request("r", list(range(18)), UNIT, HANDOFF)
    digest = vr.chain_digest(vr.chain(request, 18, UNIT), vr.tail_hash(request, 18, UNIT))
    request.kv_transfer_params = {
        **HANDOFF,
        "remote_block_ids": [[1, 2, 3, 4, 5]],
        "kvtier": {"instance": "a/1", "num_tokens": 18, "digest": digest.hex()},
    }
    assert made.match(request, 0) == ((18, True) if codec == "raw" else (None, False))
    peers.grant(18)
    assert made.match(request, 0) == (18, True)


def test_a_model_that_cannot_go_on_from_a_prefix_takes_whole_prompts_only():
    made, peers = _matcher([(UNIT, None)], resumes=False)
    request = make_request("s", list(range(18)), UNIT, SOURCE)
    assert made.match(request, 0) == (0, False) and not peers.asked, "nothing found by hash is a whole prompt"
    request = make_request("p", list(range(18)), UNIT, HANDOFF)
    assert made.match(request, 0) == (None, False)
    peers.grant(16)
    assert made.match(request, 0) == (0, False) and peers.released == [7]
    request = make_request("w", list(range(18)), UNIT, HANDOFF)
    assert made.match(request, 0) == (None, False)
    peers.grant(18)
    assert made.match(request, 0) == (18, True)


@pytest.mark.parametrize(
    ("mla", "chunked", "resumes"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_who_can_go_on_from_a_prefix(mla, chunked, resumes):
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla), scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked)
    )
    assert _resumes(config) is resumes


@pytest.mark.parametrize(("groups", "resumes", "by_request"), [(1, True, False), (2, True, True), (1, False, True)])
def test_what_a_failed_pull_costs(groups, resumes, by_request):
    facts = EngineFacts(
        engine_id="e", instance_id="i", groups=[(16, None)] * groups, full_groups=[0], world_size=1, tensor_parallel=1,
        data_parallel_rank=0, max_tokens=99, hash_lookahead=0, step_tokens=1, link_bandwidth=1.0,
        resumes=resumes, unsupported=None, release="1", config=None,
    )  # fmt: skip
    assert facts.fails_by_request is by_request
