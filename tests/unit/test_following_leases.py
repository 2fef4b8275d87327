"""An engine that follows a prefill of another one: grants of stretches, the last grant, and every other end."""

import dataclasses

import msgspec
import pytest
from endpoint_support import BLOCK_HASHES, HASH_BLOCK_SIZE, Asker, Source, SourceProcess, export, making
from support import eventually

from vllm_kvtier.scheduler.leases import lease_server
from vllm_kvtier.scheduler.leases.exports import Export, GroupBlocks, LeaseKind, Refusal
from vllm_kvtier.wire import messages as m

pytestmark = pytest.mark.usefixtures("run_dir")
TOKENS = len(BLOCK_HASHES) * HASH_BLOCK_SIZE


@pytest.fixture
def make():
    yield from making()


class Running:
    """A source with a prefill that goes on: ``computed`` tokens so far. ``found``: what it answers instead."""

    def __init__(self, make, **options):
        self.computed, self.found, self.asked = 0, None, []
        self.source = make(Source, stretch=self._stretch, **options)

    def _stretch(self, ask, connection, seconds, answer):
        self.asked.append(ask.start)
        if self.found is not None or self.computed <= ask.start:
            answer(self.found or Refusal.NOT_READY)
            return
        ids = [0] * (ask.start // HASH_BLOCK_SIZE) + self.ids(ask.start, self.computed)
        groups = [GroupBlocks(HASH_BLOCK_SIZE, ids)]
        stretch = Export("", LeaseKind.STRETCH, self.computed, (), b"", b"", groups, self.ids(ask.start, self.computed),
                         -1, 0.0)  # fmt: skip
        answer(self.source.table.lease_cached(stretch, ask.start, connection, seconds, True))

    @staticmethod
    def ids(start, end):
        return list(range(1 + start // HASH_BLOCK_SIZE, 1 + end // HASH_BLOCK_SIZE))

    def compute(self, tokens):
        self.computed = tokens
        self.source.on_reactor(lambda: self.source.endpoint.checksums_ready(1))

    def finish(self, found=Refusal.UNKNOWN, exported=True, **fields):
        if exported:
            self.source.table.add(export(**fields))
        self.found = found
        self.source.endpoint.changed()

    def parked(self):
        return self.source.on_reactor(lambda: len(self.source.endpoint._parked))


def follow(asker, source, start=0, max_wait=20.0, **fields):
    notes = []
    fields = {"export": "e", "digest": b"digest", "block_hashes": BLOCK_HASHES[-1:], "stretches": True, **fields}
    return asker.peers.follow(source.address, max_wait, lambda: notes.append(1), start=start, **fields), notes


def spans(pending):
    return [(leased.start, leased.tokens, leased.final, leased.blocks) for leased in pending.grants]


def test_stretches_are_granted_as_steps_compute_them_and_then_the_export(make):
    running, asker = Running(make), make(Asker)
    pending, notes = follow(asker, running.source, start=HASH_BLOCK_SIZE)
    eventually(lambda: running.parked() == 1)
    assert pending.outcome is None
    for number, tokens in enumerate((3 * HASH_BLOCK_SIZE, 5 * HASH_BLOCK_SIZE), 1):
        running.compute(tokens)
        eventually(lambda: len(pending.grants) == number)  # noqa: B023
    assert pending.outcome is pending.grants[0] and not pending.complete
    running.finish()
    eventually(lambda: pending.complete)
    a, b, c, end = (n * HASH_BLOCK_SIZE for n in (1, 3, 5, 8))
    assert spans(pending) == [
        (a, b, False, [running.ids(a, b)]), (b, c, False, [running.ids(b, c)]), (a, end, True, [running.ids(a, end)]),
    ]  # fmt: skip
    assert len(notes) == 3 and pending.ended is None and running.parked() == 0
    assert (asker.held(), running.source.leases()) == (3, 3)
    asker.peers.release(pending.grants[0], False)
    eventually(lambda: running.source.freed == running.ids(a, b))
    asker.peers.stop_following(pending, done=True)
    eventually(lambda: not any(running.source.table.counts().values()) and asker.held() == 0)
    asker.peers.stop_following(pending, done=True)
    eventually(lambda: asker.held() == 0)


def test_export_that_is_there_is_granted_at_once(make):
    running, asker = Running(make), make(Asker)
    running.finish(tokens=TOKENS - 1)
    pending, _ = follow(asker, running.source)
    eventually(lambda: pending.complete)
    assert spans(pending) == [(0, TOKENS - 1, True, [running.ids(0, TOKENS)])] and not running.asked


def test_last_grant_waits_for_checksums(make):
    running, asker = Running(make), make(Asker)
    pending, _ = follow(asker, running.source)
    eventually(lambda: running.parked() == 1)
    running.finish(ready=7)
    running.compute(TOKENS)  # of an earlier step
    assert running.parked() == 1 and not pending.grants
    running.source.on_reactor(lambda: running.source.endpoint.checksums_ready(7))
    eventually(lambda: pending.complete)


def test_waiting_follower_takes_little_memory_whatever_it_sent(make):
    running, asker = Running(make), make(Asker)
    pending, _ = follow(asker, running.source, block_hashes=[bytes(64)] * 100_000 + BLOCK_HASHES[-1:])
    eventually(running.parked)
    assert running.source.on_reactor(lambda: running.source.endpoint._parked[0].request.block_hashes) == (
        BLOCK_HASHES[-1:]
    )
    running.finish()
    eventually(lambda: pending.complete)
    for large in ({"digest": bytes(65)}, {"lora_fingerprint": bytes(65)}):
        with pytest.raises(msgspec.DecodeError):
            m.decode_engine(m.encode(m.LeaseRequest(1, "source/1", 0, [], **large)))


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("why", [Refusal.UNKNOWN, Refusal.DIGEST])
def test_prefill_without_export_ends_following(make, why, granted):
    running, asker = Running(make), make(Asker)
    pending, notes = follow(asker, running.source)
    eventually(lambda: running.parked() == 1)
    if granted:
        running.compute(8)
        eventually(lambda: pending.grants)
    running.finish(why, exported=False)
    eventually(lambda: pending.ended)
    assert pending.ended.code == why.value and bool(pending.grants) == granted == (pending.outcome is not pending.ended)
    eventually(lambda: notes)
    assert running.parked() == 0


def test_wrong_digest_of_finished_prefill_is_refused(make):
    running, asker = Running(make), make(Asker)
    running.finish()
    pending, _ = follow(asker, running.source, digest=b"other")
    eventually(lambda: pending.ended)
    assert pending.outcome.code == "digest_mismatch"


@pytest.mark.parametrize("granted", [False, True])
def test_follower_that_stops_gets_and_holds_nothing(make, granted):
    running, asker = Running(make), make(Asker)
    pending, _ = follow(asker, running.source)
    eventually(lambda: running.parked() == 1)
    if granted:
        running.compute(8)
        eventually(lambda: pending.grants)
    asker.peers.stop_following(pending, done=False)
    eventually(lambda: running.parked() == 0 and running.source.leases() == 0)
    running.compute(16)
    running.finish()
    assert len(pending.grants) == granted and asker.held() == 0


def test_stretch_that_is_leased_when_follower_has_left_goes_back(make):
    """The scheduler side answers late."""
    running, asker = Running(make), make(Asker)
    late = []
    running.source.endpoint._events = running.source.endpoint._events.__class__(
        **{**vars(running.source.endpoint._events), "lease_stretch": lambda *ask: late.append(ask)}
    )
    pending, _ = follow(asker, running.source)
    eventually(lambda: late)
    asker.peers.stop_following(pending, done=False)
    eventually(lambda: running.parked() == 0)
    running.computed = 8
    running._stretch(*late[0])
    eventually(lambda: running.source.leases() == 0 and running.source.freed == running.ids(0, 8))


def test_following_ends_without_news(make):
    running, asker = Running(make), make(Asker)
    pending, _ = follow(asker, running.source, max_wait=0.1)  # heartbeats come later
    eventually(lambda: pending.ended)
    assert pending.outcome.code in ("timeout", "checksums_not_ready")
    eventually(lambda: running.parked() == 0)
    granted = export(name="other", kind=LeaseKind.HANDOFF)
    running.source.table.add(granted)
    assert asker.answer(running.source.address, export="other", digest=b"digest").tokens, "the engine is not avoided"


def test_grant_extends_the_wait(make):
    running, asker = Running(make), make(Asker)
    pending, _ = follow(asker, running.source, max_wait=5.0)
    eventually(lambda: running.parked() == 1)
    before = pending.deadline
    running.compute(8)
    eventually(lambda: pending.grants)
    assert pending.deadline > before


def test_prefill_that_waits_is_waited_for_while_its_engine_answers(make):
    """Up to a limit."""
    running, asker = Running(make), make(Asker)
    pending, _ = follow(asker, running.source)
    first = pending.deadline
    eventually(lambda: pending.deadline > first)
    assert pending.ended is None and running.parked() == 1
    pending.last_deadline = 0.0  # passed
    eventually(lambda: pending.ended)
    assert pending.ended.code == "timeout"
    eventually(lambda: running.parked() == 0)


def test_sign_of_an_engine_that_lacks_the_prefill_prolongs_nothing(make):
    """The prefill may have been lost on its way, or be at another rank."""
    running, asker = Running(make), make(Asker)
    events = running.source.endpoint._events
    running.source.endpoint._events = dataclasses.replace(events, will_prefill=lambda export: False)
    pending, _ = follow(asker, running.source, max_wait=1.5)
    first = pending.deadline
    eventually(lambda: pending.ended)
    assert pending.deadline == first
    eventually(lambda: running.parked() == 0)


def test_requests_that_wait_are_bounded(make, monkeypatch):
    monkeypatch.setattr(lease_server, "MAX_PARKED", 3)
    running, asker = Running(make), make(Asker)
    waiting = [follow(asker, running.source, export=f"e{n}")[0] for n in range(5)]
    eventually(lambda: all(each.ended for each in waiting[3:]))
    assert {each.ended.code for each in waiting[3:]} == {"peer_busy"} and running.parked() == 3
    running.source.table.add(export(ready=7))
    refused = asker.answer(running.source.address)
    assert refused.code == "checksums_not_ready" and not any(each.outcome for each in waiting[:3])
    asker.peers.stop_following(waiting[0], done=False)
    pending = asker.ask(running.source.address)
    eventually(lambda: running.parked() == 3)
    running.source.on_reactor(lambda: running.source.endpoint.checksums_ready(7))
    eventually(lambda: pending.outcome)
    assert pending.outcome.tokens == TOKENS


def test_dropped_prefill_is_reported(make):
    running, asker = Running(make), make(Asker)
    asker.peers.release_export(running.source.address, "e")
    eventually(lambda: running.source.dropped == ["e"])


def test_lost_connection_ends_following(make):
    asker = make(Asker, handshake_timeout=10.0)
    with SourceProcess() as source:
        pending, notes = follow(asker, source, export="other")
        eventually(lambda: asker.peers._connections and next(iter(asker.peers._connections.values())).asked)
        source.kill()
        eventually(lambda: pending.ended)
    assert pending.outcome.code == "unreachable"
    eventually(lambda: notes)


def test_engine_that_closes_ends_following(make):
    """It goes to sleep, or cannot identify its weights any more."""
    running, asker = Running(make), make(Asker)
    fresh, _ = follow(asker, running.source)
    old, _ = follow(asker, running.source, export="other")
    eventually(lambda: running.parked() == 2)
    running.source.on_reactor(lambda: running.source.endpoint.close("it sleeps"))
    eventually(lambda: fresh.ended and old.ended)
    assert running.parked() == 0


def test_follow_request_of_unknown_client_is_refused(make):
    running = Running(make)
    ask = m.LeaseRequest(1, "source/1", 0, [], export="e", follow=True)
    running.source.on_reactor(lambda: running.source.endpoint._receive([b"stranger", m.encode(ask)]))
    assert running.parked() == 0


def test_connection_that_ends_with_a_grant_gets_no_other_one(make):
    """Sending the first one finds that it is gone."""
    running, asker = Running(make), make(Asker)
    follow(asker, running.source)
    follow(asker, running.source)
    eventually(lambda: running.parked() == 2)
    endpoint, sent = running.source.endpoint, []

    def send(identity, message):
        sent.append(message)
        endpoint._remove_connection(identity)

    endpoint._send = send
    running.source.table.add(export())
    running.source.on_reactor(endpoint._on_changed)
    assert len(sent) == 1 and running.parked() == running.source.leases() == running.source.reactor.errors == 0


def test_checksums_that_come_while_a_stretch_is_leased_are_granted_next(make):
    running, asker = Running(make), make(Asker)
    late, events = [], running.source.endpoint._events
    running.source.endpoint._events = dataclasses.replace(events, lease_stretch=lambda *ask: late.append(ask))
    pending, _ = follow(asker, running.source)
    eventually(lambda: late)
    running.compute(2 * HASH_BLOCK_SIZE)
    running._stretch(*late[0])
    eventually(lambda: len(late) == 2 and len(pending.grants) == 1)
    assert late[1][0].start == 2 * HASH_BLOCK_SIZE


def test_heartbeats_come_before_a_followed_prefill_is_given_up(make):
    running, asker = Running(make), make(Asker, lease_seconds=60.0, transfer_timeout=3.0)
    pending, _ = follow(asker, running.source, max_wait=3.0)
    first = pending.deadline
    eventually(lambda: pending.deadline > first or pending.ended)
    assert pending.ended is None
