"""The real Matcher and HostTier in an engine that a test plays, with a store and peers that answer when told to.

Leases of the store and of peers, and the planner's loads, must balance at every moment; what is ordered from the
workers must be the slots of exactly the blocks that vLLM allocated.
"""

import time
from types import SimpleNamespace

import pytest
from tier_fakes import make_tier
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.ledger import Keys, Ledger
from vllm_kvtier.scheduler.lifecycle import Lifecycle, State
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.offers import Loan, NoOffer, Offer, PendingAsk
from vllm_kvtier.scheduler.planner import Decision
from vllm_kvtier.scheduler.tier import HostAsk, HostOffer
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.messages import HASH, Done, Found, Holder
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.wire import messages as m
from vllm_kvtier.worker.work import FailedOrder, LoadOrder

UNIT = 4
KEYS = Keys(7)
GROUPS = {
    "full": [(UNIT, None)],
    "windows": [(UNIT, None), (UNIT, 6)],
    "sizes": [(2 * UNIT, None), (UNIT, 9)],
}
ONE = [(UNIT, None)]


class FakePeers:
    """Asks stay open until ``answer``; every lease that was offered must come back exactly once."""

    def __init__(self, groups, clock):
        self.groups, self.clock = groups, clock
        self.open: list[PendingAsk] = []
        self.offered: dict[int, PendingAsk] = {}
        self.held: set[int] = set()
        self.dropped: list[tuple] = []
        self.introduced = ["a/1", "b/1"]

    def ask(self, address, timeout=2.0, near="", **fields):
        assert timeout > 0 and set(fields) <= {
            "start", "variant", "reply_host", "reply_port", "chain", "export", "digest", "lend", "mapped",
            "patience",
        }  # fmt: skip
        pending = PendingAsk(address, m.Ask(len(self.offered), "", **fields), self.clock() + 2.0)
        m.decode_engine(m.encode(pending.ask))  # it can be sent
        self.open.append(pending)
        return pending

    def cancel(self, pending):
        pending.cancelled = True
        if isinstance(pending.outcome, Offer):
            self.give_back(pending.outcome.lease)

    def release(self, offer, done):
        self.give_back(offer.lease)

    def give_back(self, lease):
        assert lease in self.held, f"lease {lease} is given back twice"
        self.held.discard(lease)

    def drop(self, address, export):
        self.dropped.append((address, export))

    def answer(self, pending, outcome):
        self.open.remove(pending)
        if isinstance(outcome, Offer):
            self.held.add(outcome.lease)
            if pending.cancelled or pending.outcome is not None:
                self.give_back(outcome.lease)  # as Peers does with late grants
                return
        pending.outcome = outcome

    def offer(self, pending, tokens, blocks=None, start=None):
        lease = len(self.offered) + 1
        self.offered[lease] = pending
        start = pending.ask.start if start is None else start
        if blocks is None:
            blocks = [list(range(1, 1 + -(-tokens // size) - start // size)) for size, _ in self.groups]
        fields = (pending.address, self.introduced[lease % 2], lease, start, tokens, blocks, [])
        if pending.ask.lend:
            return Loan(*fields, mapped=pending.ask.mapped, alike=lease % 3 > 0, nbytes=1000 * len(blocks[0]))
        return Offer(*fields)


def end_all(matcher, live, peers) -> None:
    """Every request of ``live`` (by name: request, status) ends, and every ask is answered that nobody waits for."""
    for name, r in list(live.items()):
        if r.status != "aborted":
            r.request.status = RequestStatus.FINISHED_ABORTED
            matcher.finished(r.request)
        if r.status in ("loading", "aborted"):
            matcher.loaded(name, False)
    for pending in list(peers.open):
        assert pending.cancelled or pending.outcome, "an ask that nobody waits for was not cancelled"
        peers.answer(pending, peers.offer(pending, 40))


class FakePlanner:
    """Says what it is told to say; loads under way must balance."""

    def __init__(self):
        self.load, self.open, self.near, self.brief, self.vain = True, [], True, False, False
        self.waiting = set()

    def step_seconds(self):
        return 0.01

    def handover_seconds(self):
        return 0.01

    def hopeless(self, start, end, prompt, trial=True, least=0.0):
        assert 0 <= start < end < prompt
        return self.vain

    def decide(self, source, start, end, nbytes, prompt, least):
        assert least in (0.0, 0.01)
        assert source in ("host", "gpu") and 0 <= start < end <= prompt and nbytes > 0
        return Decision(self.load, 0.1, 0.2, "faster" if self.load else "slower")

    def will_compute(self, request_id, start, prompt):
        assert 0 <= start <= prompt
        self.waiting.add(request_id)

    def forget(self, request_id):
        self.waiting.discard(request_id)

    def load_seconds(self, source, nbytes):
        return 0.1 if (source == "gpu") is self.near else 0.2

    def loading(self, source):
        return any(each == source for each, _ in self.open)

    def moving_seconds(self, source, nbytes):
        return 0.001 if self.brief else 0.1

    def compute_seconds(self, start, end, prompt):
        assert 0 <= start < end <= prompt
        return 0.05

    def started(self, source, nbytes):
        self.open.append((source, nbytes))

    def ended(self, source, nbytes):
        self.open.remove((source, nbytes))  # ValueError for what never began, as the real one


class World:
    def __init__(self, groups, clock=time.monotonic, make_hurry=lambda planner: None, **options):
        Lifecycle.violations = 0
        self.groups = groups
        self.align = max(size for size, _ in groups)
        self.config = KVTierConfig(**{"bidirectional": True, "pull_threshold": 4, **options})
        made = make_tier(groups)
        self.tier, self.client = made.tier, made.client
        self.peers, self.planner, self.counters = FakePeers(groups, clock), FakePlanner(), Counters()
        self.hurry = make_hurry(self.planner)
        self.matcher = Matcher(
            self.config, self.peers, Ledger(), lambda: KEYS, groups, UNIT, lambda: ("me", 9), self.counters,
            True, self.tier, self.planner, self.hurry, "ours/1", lambda tokens: 100 * tokens,
            lambda: 0 if self.full else 1 << 20, self.cached_about,
        )  # fmt: skip
        self.full = False
        self.holders: list[Holder] = []  # that the store names in its next answer
        self.stored: dict[tuple[int, bytes], int] = {}  # (group, hash) -> slot: the store has it
        self.last = 0

    def cached_about(self, chain):
        """Tokens of it in the engine's prefix cache, as far as they are known before it is matched."""
        return 0

    # -- the store -------------------------------------------------------------------------------------------------

    def store(self, request, tokens=None):
        """Put a request's blocks there."""
        for g, (size, _) in enumerate(self.groups):
            for i in range((request.num_tokens if tokens is None else tokens) // size):
                self.last += 16
                self.stored.setdefault((g, self.hash(request, g, i)), self.last)

    def hash(self, request, g, i):
        return bytes(request.block_hashes[(i + 1) * self.groups[g][0] // UNIT - 1])[:HASH]

    def answer(self, pending):
        """As the index does: the longest run from the start whose blocks are there, all ends aligned."""
        asked = pending.asked
        total = len(asked.chain) // HASH * UNIT
        start = asked.start * UNIT
        for tokens in range(total // self.align * self.align, start, -self.align):
            rows = []
            for g, (size, window) in enumerate(self.groups):
                needed = 0 if window is None else max(0, tokens - window) // size
                row = []
                for i in range(start // size, tokens // size):
                    unit = (i + 1) * size // UNIT
                    slot = self.stored.get((g, asked.chain[(unit - 1) * HASH : unit * HASH]))
                    row.append(0 if i < needed else slot)
                rows.append(row)
            if all(None not in row for row in rows):
                self.client.answer(pending, tokens // UNIT, rows, self.holders)
                return
        self.client.refuse(pending, holders=self.holders)

    def lie(self, pending, rng):
        start, size = pending.asked.start, self.groups[0][0]
        units = start + self.align // UNIT
        rows = [[16 * (i + 1) for i in range(self.align // size)] for size, _ in self.groups]
        match rng.randrange(8):
            case 0:
                self.client.refuse(pending, Failed("hung"))
            case 1:
                self.client.refuse(pending, Done(1, 3))
            case 2:
                self.client.answer(pending, units + 1000, [[5] * (1000 + len(row)) for row in rows])
            case 3:
                self.client.answer(pending, units, rows[:-1])
            case 4:
                self.client.answer(pending, units, [row + [7] for row in rows])
            case 5:
                self.client.answer(pending, units, [[(1 << 20) - 1 for _ in row] for row in rows])
            case 6:
                self.client.answer(pending, units, [[0] * len(row) for row in rows])
            case 7:
                units = start + size // UNIT + (1 if size > UNIT else 0)
                self.client.answer(pending, units, [[3] for _ in rows] if size > UNIT else rows[1:])

    # -- vLLM --------------------------------------------------------------------------------------------------------

    def tables(self, computed, external):
        """Block tables as vLLM makes them: none behind the windows of the first token to compute."""
        total, out = computed + external, []
        for size, window in self.groups:
            skipped = 0 if window is None else max(0, total - window + 1) // size
            ids = []
            for i in range(-(-total // size)):
                self.last += 1
                ids.append(0 if i < skipped else self.last)
            out.append(ids)
        return tuple(out)

    def check_load(self, order, request, tables, computed, total, leased):
        """``leased``: whether the slots are the store's, not a liar's."""
        assert isinstance(order, LoadOrder) and order.instance == "life 1" and order.timeout > 0
        rows = {g.group: g for g in order.groups}
        for g, (size, _) in enumerate(self.groups):
            expected = []
            for i in range(computed // size, -(-total // size)):
                if tables[g][i]:
                    full = bytes(request.block_hashes[(i + 1) * size // UNIT - 1])
                    slot = self.stored.get((g, full[:HASH])) if leased else None
                    expected.append((tables[g][i], KEYS.key(full, g, b""), slot))
            got = rows.get(g)
            assert (got is None) == (not expected)
            if got is not None:
                assert got.blocks.tolist() == [block for block, _, _ in expected]
                assert got.keys.tolist() == [key for _, key, _ in expected]
                if leased:
                    assert got.slots.tolist() == [slot for _, _, slot in expected]
                assert (got.slots > 0).all(), "page 0 of the store's memory is nobody's"

    def balanced(self, alive=True):
        tracked = list(self.matcher._tracked.values())
        busy = (State.OFFERED, State.LOADING, State.VERIFYING, State.ABANDONED)
        host = [t.offer for t in tracked if t.life.state in busy and isinstance(t.offer, HostOffer)]
        host += [t.held for t in tracked if t.held is not None]
        peers = [t.offer for t in tracked if t.life.state in busy and not isinstance(t.offer, HostOffer)]
        for t in tracked:
            if isinstance(t.pending, HostAsk):
                answer = t.pending._pending.outcome
                if isinstance(answer, Found) and answer.lease and not isinstance(t.pending._outcome, NoOffer):
                    host.append(SimpleNamespace(lease=answer.lease, session=t.pending._pending.session))
            elif t.pending is not None and t.life.state is State.ASKING and isinstance(t.pending.outcome, Offer):
                peers.append(t.pending.outcome)
        for ask, *_ in self.matcher._asker.ahead._asks.values():
            answer = ask._pending.outcome
            if isinstance(answer, Found) and answer.lease:
                host.append(SimpleNamespace(lease=answer.lease, session=ask._pending.session))
        assert {o.lease for o in host if o.session == self.client.session and self.client.connected} == self.client.held
        assert {o.lease for o in peers} == self.peers.held
        loads = [
            (t.offer.place, t.offer.nbytes)
            for t in tracked
            if t.life.state in busy[1:] and t.offer.place and not isinstance(t.load, FailedOrder)
        ]
        failed = [t.planned_for for t in tracked if t.planned_for is not None and isinstance(t.load, FailedOrder)]
        loads += [(offer.place, offer.nbytes) for offer in failed]
        assert sorted(loads) == sorted(self.planner.open)
        loading = {t.request.request_id for t in tracked if t.life.state in (State.LOADING, State.ABANDONED)}
        assert set(self.matcher._inbound.values()) <= loading
        assert Lifecycle.violations == 0


@pytest.fixture(autouse=True)
def no_violations():
    Lifecycle.violations = 0
    yield
    assert Lifecycle.violations == 0


def params(*hosts):
    return {"do_remote_decode": True, "kvtier": {"sources": [{"host": h, "port": 1} for h in hosts]}}


def offered(world, request, computed=0):
    """What the matcher says once the store has answered."""
    assert world.matcher.match(request, computed) == (None, False)
    [pending] = world.client.open
    world.answer(pending)
    return world.matcher.match(request, computed)
