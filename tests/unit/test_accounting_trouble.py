"""What must not be counted wrongly, or cost an engine or a person more than a wrong number: odd peers, odd answers."""

import io
import socket
import threading
import time
from collections import deque
from types import SimpleNamespace

import msgspec
import pytest
from doctor_fakes import NAMESPACE, FakeEngine
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pull_fakes import Pair, batch_of, pull_of
from rich.console import Console
from support import Uncontained, make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier.cli.inspect import show
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.doctor import endpoint as doctor_endpoint
from vllm_kvtier.doctor.endpoint import EndpointProbe, NoEndpoint
from vllm_kvtier.doctor.engines import look_at
from vllm_kvtier.doctor.server import Server
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.scheduler.endpoint import SERVE_AFTER_ASK
from vllm_kvtier.scheduler.explaining import MOST_STRETCHES, stretches
from vllm_kvtier.scheduler.ledger import Keys, Ledger
from vllm_kvtier.scheduler.lifecycle import Lifecycle, State
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.offers import NoOffer, Offer, PendingAsk
from vllm_kvtier.scheduler.outcomes import Outcomes
from vllm_kvtier.scheduler.params import read
from vllm_kvtier.scheduler.peers import CODES, Peers, _Connection
from vllm_kvtier.scheduler.planner import Decision
from vllm_kvtier.scheduler.questions import Questions
from vllm_kvtier.scheduler.tier import HOST
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.store import messages as sm
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.adapters import Adapters
from vllm_kvtier.vllm_compat.stats import KVTierPromMetrics, KVTierStats, build
from vllm_kvtier.wire import messages as m
from vllm_kvtier.worker import pulls as pulls_module
from vllm_kvtier.worker.fetches import FetchResult
from vllm_kvtier.worker.queues import ABORTED, LoadResult

# -- what is counted ---------------------------------------------------------------------------------------------------


class World:
    """The real Matcher and Outcomes, with one request of 100 tokens and nobody to ask."""

    def __init__(self, life: State, **state):
        Lifecycle.violations = 0
        peers = SimpleNamespace(
            release=lambda *_: None, cancel=lambda *_: None, drop=lambda *_: None,
            ask=lambda address, **fields: SimpleNamespace(outcome=None),
        )  # fmt: skip
        self.counters = Counters()
        self.matcher = Matcher(
            KVTierConfig(), peers, Ledger([16]), lambda: Keys(3), [(16, None)], 16, lambda: ("me", 9), self.counters
        )
        self.request = make_request("r", list(range(100)), 16)
        self.t = self.matcher._tracked["r"] = Tracked(self.request, read(None), Lifecycle("r"), **state)
        self.t.life.state = life
        hurry = SimpleNamespace(judged=lambda results: set(), settle=lambda name, results: None)
        self.outcomes = Outcomes(self.matcher, hurry, None, self.counters, Uncontained())


def test_what_another_connector_has_loaded_is_not_ours():
    """MultiConnector tells each of its connectors of every request that ended loading."""
    world = World(State.LOCAL)
    world.outcomes.arrived([], {"r"})
    assert world.t.life.state is State.LOCAL and Lifecycle.violations == 0 and world.counters.take() == {}


def test_a_report_of_a_load_that_was_never_ordered_costs_nothing_but_a_complaint():
    world = World(State.LOCAL)
    world.outcomes.arrived([LoadResult("r", set(), "", 10, 0.1, 0.0)], {"r"})
    assert Lifecycle.violations == 1
    Lifecycle.violations = 0


def test_the_second_hit_of_a_preempted_request_is_timed_from_its_preemption():
    world = World(State.LOADED, begun_at=1.0, risen=64, accounted=True)
    began = time.monotonic()
    world.matcher._notice_preemption(world.t)
    assert world.t.life.state is State.NEW and world.t.begun_at >= began and world.t.risen == 0


@pytest.mark.parametrize("reason, outcome", [(ABORTED, "aborted"), ("the load did not end within 5 s", "failed")])
def test_a_load_that_failed_its_request_is_no_aborted_one(reason, outcome):
    """With kv_load_failure_policy "fail" vLLM ends the request before it tells what became of the load."""
    world = World(State.LOADING)
    world.t.life.state = State.ABANDONED
    world.outcomes._heard(LoadResult("r", {3}, reason, 0, 0.1, 0.0), False)
    assert world.outcomes._ended["r"].outcome == outcome


@pytest.mark.parametrize("status, counted", [("FINISHED_LENGTH_CAPPED", True), ("FINISHED_ABORTED", False)])
def test_a_request_of_one_token_that_ends_with_its_hurried_load_counts(status, counted):
    """As every prefill for another engine does: vLLM ends it before it tells what became of the load."""
    offer = Offer(("there", 1), "other/1", 1, 0, 96, [[1]], [])
    world = World(State.VERIFYING, local=16, pulled=80, hurried=True, offer=offer)
    world.request.status = RequestStatus[status]
    world.matcher.finished(world.request)
    world.matcher.loaded("r", failed=False)
    parts = {"own cache": 16, "retained": 80, "computed": 4}
    expected = {"hits|retained": 1} | {f"prompt_tokens|{kind}": tokens for kind, tokens in parts.items()}
    assert world.counters.take() == (expected if counted else {}) and not len(world.matcher)


def test_what_was_waited_for_in_vain_was_waited_for():
    world = World(State.ASKING, asking=HOST, waits_since=time.monotonic() - 1.0, sources=deque())
    world.t.pending = SimpleNamespace(outcome=NoOffer("no store", "it went away"))
    assert world.matcher._asker.answered(world.t)
    counted = world.counters.take()
    assert counted.keys() == {"declined|no store", "waited_seconds"} and 1 <= counted["waited_seconds"][0] < 2


def test_who_is_asked_after_a_wait_is_timed():
    world = World(State.NEW, waits_since=time.monotonic() - 1.0, sources=deque())
    assert world.matcher._asker._ask_peer(world.t, ("there", 1), 0, b"")
    world.t.pending.outcome = NoOffer("nothing", "")
    assert world.matcher._asker.answered(world.t)
    assert world.counters.take().keys() == {"declined|nothing", "ask_seconds|retained"}


def test_a_peer_cannot_make_labels():
    """Whoever listens at an address that a client named says what it likes."""
    reactor = SimpleNamespace(on_stop=lambda _: None, call_later=lambda *_: SimpleNamespace(cancel=lambda: None))
    dealer = SimpleNamespace(close=lambda: None)
    peers = Peers(reactor, KVTierConfig(), None, lambda: None, lambda ranks: None)
    seen = set()
    for ask in (0, 1):
        for code in ("instance", "a word of its own", "another", *CODES):
            connection = _Connection(("there", 1), dealer, 0.0)
            peers._connections[connection.address] = connection
            connection.asked[1] = pending = PendingAsk(connection.address, m.Ask(1, "", 0, []), 0.0, again=True)
            pending.timer = SimpleNamespace(cancel=lambda: None)
            peers._receive(connection, [m.encode(m.Refused(ask, code, "because"))])
            assert pending.outcome.reason == "because"
            seen.add(pending.outcome.code)
    assert seen == CODES | {"refused"}


def test_a_number_that_cannot_be_shown_does_not_end_the_server(caplog):
    """vLLM calls this in the task that reads all of its engines' outputs."""
    registry = CollectorRegistry()
    types = {
        sort: lambda *given, _sort=sort, **more: _sort(*given, registry=registry, **more)
        for sort in (Counter, Gauge, Histogram)
    }
    metrics = KVTierPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    metrics.observe({"loads|ok": -1, "loads|failed": 2})
    assert registry.get_sample_value("vllm:kvtier_loads_total", {"engine": "0", "kind": "failed"}) == 2
    assert "loads cannot be shown" in caplog.text


def test_of_gauges_alone_no_line_is_logged():
    """vLLM 0.25 would write one with nothing in it, every ten seconds in which only tokens were generated."""
    counters = Counters()
    counters.show("planner_bandwidth", "host", 1e9)
    taken = counters.take()
    assert not KVTierStats(data=taken).is_empty(), "they go to the server"
    logged = build(taken)
    assert logged.is_empty() and not logged.aggregate(build({"prompt_tokens|computed": 7})).is_empty()


# -- promised reads ----------------------------------------------------------------------------------------------------


def test_a_source_serves_as_long_as_what_it_promised_is_read_again():
    """Unserved, a read hangs until its time limit, and ends the agent that reads."""
    assert SERVE_AFTER_ASK > 1 + 2 * sum(pulls_module.REREAD_AFTER)


def test_what_would_be_cut_off_is_not_read_again(monkeypatch):
    """What is wrong is known by then, and the rest is right."""
    now = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pulls_module, "time", SimpleNamespace(monotonic=lambda: now.now))
    pair = Pair()
    pair.there.make_sums([batch_of([3])], None)
    order = pair.order(pull_of([5, 6], [3, 4]), timeout=0.5)
    order.promised = True
    result = pair.run(order, 9)
    assert pair.pulls.active and pair.pulls.resting, "nobody need look at it all the time"
    now.now += pulls_module.REREAD_AFTER[0]
    assert not pair.pulls.resting
    for _ in range(20):
        assert result is None or now.now < 100.5
        if result is not None:
            break
        now.now += 0.05
        result = pair.goes_on(9)
    assert result.bad_blocks == {6} and result.checksum


# -- questions ---------------------------------------------------------------------------------------------------------


def test_questions_that_go_on_and_on_let_steps_go_on():
    questions, woken = Questions.__new__(Questions), []
    questions._jobs, questions._wake = deque(), lambda: woken.append(1)

    def again() -> None:
        assert len(woken) < 10
        questions._on_engine(again)

    questions._on_engine(again)
    questions.run()
    assert len(woken) == 2, "and the thread is woken for the next one"


def test_no_more_stretches_are_made_than_are_told():
    spans = [[sm.Span(1, "memory" if i % 2 else "") for i in range(sm.MAX_SPANS)] for _ in range(3)]
    told = stretches(spans, [(4, None), (4, None), (4, 64)], 4 * sm.MAX_SPANS)
    assert len(told) == MOST_STRETCHES and told[0] == m.Stretch(0, 0, 4, "")


def test_an_adapter_comes_while_another_is_asked_for():
    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            adapters._known[f"new {len(adapters._known)}",] = SimpleNamespace(digest=b"2", path="")
            return str.__eq__(self, other)

    adapters = Adapters()
    adapters._known |= {
        (Name("a"),): SimpleNamespace(digest=b"1", path="path"), (Name("b"),): SimpleNamespace(digest=b"3", path="")
    }  # fmt: skip
    found = adapters.named("a")
    assert found is not None and found[1] == b"1" and found[0].lora_path == "path"


# -- doctor and inspect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["[fd00::1]:7200", "[/red]:7200", "[bold]:1"])
def test_an_address_is_shown_as_it_is(name):
    console = Console(width=120, record=True, file=io.StringIO())
    found = m.Explanation(1, 100, 16, engines=[m.Source(name, 64)], tiers=[m.Source("[/x]", 3, "ready")])
    show("here:1", found, console)
    text = console.export_text()
    assert f"lent by {name}" in text and "with [/x]" in text


@pytest.mark.parametrize("number", ["sixteen", "-5", "9" * 5000, "٣"])
def test_an_engine_that_tells_no_number(number):
    reason = f"the block size differs: {doctor_endpoint._NO_NUMBER} here, {number} there"
    probe = msgspec.structs.replace(NAMESPACE, hash_block_tokens=doctor_endpoint._NO_NUMBER)
    assert doctor_endpoint._learned(probe, reason) is None
    assert doctor_endpoint._learned(probe, reason.replace(number, "32")) == {"hash_block_tokens": 32}


@pytest.mark.parametrize(
    "said",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100000,
    ],
)
def test_a_port_that_speaks_no_http(said):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as sock:
                sock.recv(1000)
                sock.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(KVTierError):
                Server(f"127.0.0.1:{listener.getsockname()[1]}", 5.0).version()
        finally:
            thread.join()


def test_an_older_engine_is_not_taken_for_a_busy_one(monkeypatch):
    def words(self):
        raise NoEndpoint("other version", "it runs an older vllm-kvtier")

    monkeypatch.setattr(EndpointProbe, "words", words)
    engine = FakeEngine()
    try:
        [check] = look_at("", engine.address, None).checks
    finally:
        engine.stop()
    assert check.state == "warn" and "older" in check.sentence and "scheduler" not in check.sentence
    assert "same vllm-kvtier" in check.remedy


@pytest.mark.parametrize("among, hurried, heard", [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_what_others_steps_delay_is_learned_of_loads_that_wait_for_them(among, hurried, heard):
    now, told = time.monotonic(), []
    lender = {"instance": "b/1", "address": ("b", 1), "lease": "x"}
    offer = SimpleNamespace(place="gpu", nbytes=10, alike=False, mapped=False, **lender)
    world = World(
        State.LOADING, offer=offer, plan=Decision(True, 0.01, 0.1, "faster"), among=among, hurried=hurried,
        begun_at=now - 0.06, offered_at=now - 0.05, ordered_at=now - 0.05,
    )  # fmt: skip
    world.outcomes._planner = SimpleNamespace(observe_load=lambda *_: None, observe_handover=told.append)
    world.outcomes.arrived([FetchResult("r", set(), False, "", 10, 0.02)], {"r"})
    assert world.t.life.state is State.LOADED and len(told) == heard
    assert all(0.03 <= seconds < 1 for seconds in told), "from the end of the load"
