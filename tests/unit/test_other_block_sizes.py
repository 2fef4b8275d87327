"""A prompt whose KV an engine with another block size has: its hashes, its lease and the workers' rows."""

import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
from source_fakes import all_sources, load_context
from support import _hasher, make_request
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.request import Request

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.engine_identity import EngineIdentity
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex, ContentKeys
from vllm_kvtier.scheduler.leases.lease_client import FollowedLease, LeaseClient, LeasedBlocks, PendingLease
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.matching.request_state import lora_fingerprint_of
from vllm_kvtier.scheduler.sources import peer_lease
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.scheduler.sources.followed_prefill import FollowedPrefillSource
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.wire import messages as m

HANDOFF = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "kvtier/e"}
PEERS = {**HANDOFF, "kvtier_peers": ["a:1"], "do_remote_prefill": False, "do_remote_decode": True}
SIZES = [4, 8, 16]
PAIRS = [pair for pair in itertools.product(SIZES, SIZES) if pair[0] != pair[1]]
HASH_FN = get_hash_fn_by_name("sha256_cbor")


class Peers:
    """One engine with blocks of ``size`` tokens, which grants what a test says."""

    def __init__(self, size):
        self.size, self.asked, self.released = size, [], []

    def ask(self, address, timeout, rehash=None, **fields):
        pending = PendingLease(address, m.LeaseRequest(1, "", **{**fields, **rehash(self.size)}), time.monotonic() + 60)
        self.asked.append(pending)
        return pending

    def follow(self, address, max_wait, notify, rehash, **fields):
        request = m.LeaseRequest(1, "", follow=True, **{**fields, **rehash(self.size)})
        self.asked.append(FollowedLease(address, request, math.inf, max_wait=max_wait, notify=notify))
        return self.asked[-1]

    def stop_following(self, pending, done):
        self.released += [leased.lease for leased in pending.grants]

    def grant(self, tokens, groups=1, first=1, missing=()):
        start = self.asked[-1].request.start
        count = -(-tokens // self.size) - start // self.size
        ids = [0 if i in missing else first + i for i in range(count)]
        self.asked[-1].outcome = LeasedBlocks(
            ("a", 1), "a/1", 7, start, tokens, [list(ids) for _ in range(groups)], [], ReadPath.STAGED, False,
            hash_block_size=self.size, block_tokens=(self.size,) * groups,
        )  # fmt: skip
        if isinstance(self.asked[-1], FollowedLease):
            self.asked[-1].grants.append(self.asked[-1].outcome)

    def release(self, offer, done):
        self.released.append(offer.lease)

    def known(self, address, instance):
        return None


def made(mine, theirs, windows=()):
    peers = Peers(theirs)
    groups = [(mine, None), *((mine, window) for window in windows)]
    config = KVTierConfig(bidirectional=True, pull_threshold=1)
    load = load_context(groups, mine, peers, config=config, checksum_index=ChecksumIndex())
    return RequestMatcher(load, [FollowedPrefillSource(load), *all_sources(load)]), peers


def media_of(*spans):
    return [
        SimpleNamespace(identifier=f"m{at}", mm_position=SimpleNamespace(offset=at, length=n)) for at, n in spans
    ]


@pytest.mark.parametrize("fields", [
    {}, {"cache_salt": "tenant"}, {"lora_request": LoRARequest("one", 1, "/tmp/one")}, {"media": [(5, 9), (20, 3)]},
], ids=["plain", "salt", "adapter", "media"])  # fmt: skip
def test_hashes_are_those_that_vllm_makes_at_that_block_size(fields):
    fields = dict(fields)
    media = media_of(*fields.pop("media", ()))
    plain = make_request("r", list(range(50)), 4)
    for size in SIZES:
        request = Request("r", list(range(50)), plain.sampling_params, None, arrival_time=0.0, **fields)
        request.mm_features = media
        theirs = [bytes(each) for each in _hasher(size)(request)]
        assert vr.hash_blocks(request, 50, size, HASH_FN, []) == theirs and len(theirs) == 50 // size
        for known in range(len(theirs)):  # those that are known are not made again
            assert vr.hash_blocks(request, 50, size, HASH_FN, theirs[:known]) == theirs
        assert vr.hash_blocks(request, 50, size, None, theirs) == theirs
        tail = vr.tail_hash(request, 50, size, theirs)
        request.block_hashes = theirs
        assert tail == vr.tail_hash(request, 50, size)


@pytest.mark.parametrize("mine, theirs", PAIRS)
@pytest.mark.parametrize("length", [16, 33, 48, 63])
@pytest.mark.parametrize("follow", [False, True])
def test_handoff_of_other_block_size_is_asked_and_read_in_its_blocks(mine, theirs, length, follow):
    matcher, peers = made(mine, theirs)
    request = make_request("r", list(range(length)), mine, {**HANDOFF, "kvtier": {"follow": follow}})
    there = make_request("e", list(range(length)), theirs)
    computed = mine if length > mine else 0
    assert matcher.match(request, computed) == (None, False)
    tail = vr.tail_hash(there, length, theirs) if length % theirs else b""
    assert peers.asked[0].request.digest == vr.prefix_digest(vr.block_hashes(there, length, theirs), tail)
    assert not peers.asked[0].request.stretches, "they end with blocks of either side"
    peers.grant(length, first=100)
    assert matcher.match(request, computed) == (length - computed, True)
    ours = list(range(1, 1 - (-length // mine)))
    matcher.allocated(request, (ours,), length - computed)
    [job], _ = matcher.take_jobs()
    assert job.staged and not job.promised
    [pull] = job.groups
    keys, seen = ContentKeys(theirs), set()
    for local, remote, key, valid, shift in zip(
        pull.local.tolist(), pull.remote.tolist(), pull.keys.tolist(), pull.valid.tolist(), pull.shifts.tolist(),
        strict=True,
    ):  # fmt: skip
        place = remote - 100 + peers.asked[0].request.start // theirs
        end = min((place + 1) * theirs, length)
        assert valid == end - place * theirs and shift == (local - 1) * mine - place * theirs
        wanted = vr.tail_hash(there, end, theirs) if end % theirs else there.block_hashes[end // theirs - 1]
        assert key == keys.key(bytes(wanted), 0, lora_fingerprint_of(there))
        begin = max(place * theirs, (local - 1) * mine)
        seen |= {(local, token) for token in range(begin, min(end, local * mine))}
    assert seen == {(token // mine + 1, token) for token in range(computed, length)}
    matcher.on_load_ended("r", False)
    assert not matcher._checksum_index._made, "its checksums are of the source's blocks"
    assert peers.released == [7]


@pytest.mark.parametrize("mine, theirs", PAIRS)
def test_conversation_of_other_block_size_is_asked_by_its_hashes(mine, theirs):
    matcher, peers = made(mine, theirs)
    request = make_request("r", list(range(50)), mine, PEERS)
    assert matcher.match(request, 0) == (None, False)
    assert peers.asked[0].request.block_hashes == vr.hash_blocks(request, 50, theirs, HASH_FN, [])
    whole = 50 // theirs * theirs
    peers.grant(whole)
    assert matcher.match(request, 0) == (whole, True), "a block of ours may be filled in part"


@pytest.mark.parametrize("tokens", [52, 64])
def test_lease_beyond_the_prompts_hashes_is_refused(tokens):
    matcher, peers = made(8, 4)
    request = make_request("r", list(range(50)), 8, PEERS)
    assert matcher.match(request, 0) == (None, False)
    peers.grant(tokens)
    assert matcher.match(request, 0) == (0, False) and peers.released == [7]


@pytest.mark.parametrize("mine, theirs", [(8, 4), (4, 8)])
def test_followed_prefill_of_other_block_sizes_with_equal_hashes_lands_at_its_tokens(mine, theirs):
    """Tensor parallel sizes may differ so that one group has other block sizes, and the hashes cover as many tokens."""
    length, followed = 46, []

    def follow(address, max_wait, notify, rehash, **fields):
        request = m.LeaseRequest(1, "", follow=True, **fields)
        followed.append(FollowedLease(address, request, math.inf, max_wait=max_wait, notify=notify))
        return followed[0]

    peers = SimpleNamespace(follow=follow, stop_following=lambda *_: None)
    load = load_context([(mine, None), (4, 9)], 4, peers, config=KVTierConfig(pull_threshold=1))
    matcher = RequestMatcher(load, [FollowedPrefillSource(load)])
    request = make_request("r", list(range(length)), 4, {**HANDOFF, "kvtier": {"export": "e", "follow": True}})
    assert matcher.match(request, 0) == (None, False)
    sizes = theirs, 4
    blocks = [list(range(100, 100 - (-length // size))) for size in sizes]
    followed[0].outcome = LeasedBlocks(
        ("a", 1), "a/1", 7, 0, length, blocks, [], ReadPath.STAGED, False, hash_block_size=4, block_tokens=sizes,
    )  # fmt: skip
    followed[0].grants.append(followed[0].outcome)
    assert matcher.match(request, 0) == (length - 1, True)
    matcher.allocated(request, tuple(list(range(1, 1 - (-length // size))) for size in (mine, 4)), length - 1)
    [job], _ = matcher.take_jobs()
    for pull, ours, size in zip(job.groups, (mine, 4), sizes, strict=True):
        shifts = np.zeros(len(pull.local), int) if pull.shifts is None else pull.shifts
        assert (shifts == (pull.local - 1) * ours - (pull.remote - 100) * size).all()


@pytest.mark.parametrize("missing, taken", [((0, 1, 2, 3, 4, 5, 6, 7), True), ((8,), False)])
def test_windows_need_all_of_each_block_of_ours(missing, taken):
    """vLLM shares a block of a window with prefixes that end in it: all of it must be there, even what this prompt does
    not read."""
    matcher, peers = made(8, 4, windows=[10])
    request = make_request("r", list(range(48)), 8, HANDOFF)
    assert matcher.match(request, 0) == (None, False)
    peers.grant(48, groups=2)
    peers.asked[-1].outcome.blocks[1][:] = [0 if i in missing else 50 + i for i in range(12)]
    # The last token's window begins at token 37, in our block of tokens 32 to 39.
    assert matcher.match(request, 0) == ((47, True) if taken else (0, False))


def test_content_keys_of_other_block_size_are_that_engines():
    def identity(size):
        found = EngineIdentity.__new__(EngineIdentity)
        found.namespace = m.Namespace("m", "d", "h", "s", size, 2, 1, codecs="c")
        found._keys = found._keys_of(found.namespace)
        return found

    a, b = identity(16), identity(64)
    assert a.content_keys_of(64).compat_id == b.content_keys().compat_id != a.content_keys().compat_id
    assert a.content_keys_of(0) is a.content_keys_of(16) is a.content_keys()


def test_prompt_of_too_many_blocks_of_other_engine_is_not_hashed(monkeypatch):
    """An engine with blocks of a token: the hashes exceed a message, and the reactor would hash for seconds."""
    monkeypatch.setattr(peer_lease, "MAX_OTHER_HASHES", 64)
    for length, refused in (64, False), (65, True):
        matcher, peers = made(4, 1)
        asked = []
        peers.ask = lambda *_, rehash, **fields: asked.append(rehash) or PendingLease(  # noqa: B023
            ("a", 1), m.LeaseRequest(1, "", **fields), time.monotonic() + 60)  # fmt: skip
        matcher.match(make_request("r", list(range(length)), 4, HANDOFF), 0)
        connection = SimpleNamespace(welcome=SimpleNamespace(hash_block_size=1), hash_block_size=4)
        pending = PendingLease(("a", 1), m.LeaseRequest(1, "", 0, []), 0.0, rehash=asked[0])
        found = LeaseClient._rehash(connection, pending)
        assert isinstance(found, LookupMiss) == refused
        if refused:
            assert found.code == "layout" and "more than 64 blocks of 1 tokens" in found.reason
    assert peer_lease.MAX_OTHER_HASHES <= 1 << 17
