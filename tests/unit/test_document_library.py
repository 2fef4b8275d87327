"""The library demo's judgement of a store with a disk: what it must not let pass, and what it must."""

import importlib.util
import os

import msgspec
import pytest

from vllm_kvtier.devtools.clients import Answer, PromptTokens
from vllm_kvtier.devtools.stores import StoreFailed, counts_when_idle, end_store, open_tier, store_counts, tier_of
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.types import IndexStats
from vllm_kvtier.store.launcher import serves, start_store, store_path
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.tiers.base import TierCounts

NUMBER_BYTES = 12
METRICS = """\
vllm:kvtier_load_decisions_total{engine="0",kind="faster",model_name="model"} 5.0
vllm:kvtier_load_decisions_total{engine="1",kind="faster",model_name="model"} 2.0
vllm:kvtier_promotion_waits_total{engine="0",kind="promotion",model_name="model"} 8.0
vllm:kvtier_promotion_waits_created{engine="0",kind="promotion",model_name="model"} 1.7e+09
vllm:kvtier_loads_total{engine="0",kind="ok",model_name="model"} 4.0
"""


@pytest.fixture(scope="module")
def demo(root):
    folder = root / "examples"
    spec = importlib.util.spec_from_file_location("document_library", folder / "document_library.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # as when it is run: it shares what the other demos have
        spec.loader.exec_module(module)
    return module


def counts(commits: int, on_disk: int) -> m.Counts:
    """Of a pool of 1,000 pages that holds 10 blocks of 50; with so many blocks on disk."""
    index = IndexStats(commits=commits, entries=10, used_pages=500, evictions=commits - 10)
    disk = TierCounts("disk", "ready", blocks=on_disk, used_bytes=on_disk * 50 * m.PAGE, read_bytes=4096)
    size = 1000 * m.PAGE
    return m.Counts(1, "i", "v", 7, 1.0, "aging", False, size, size, size, "", [], index, [disk])


@pytest.fixture
def good(demo):
    """All computed first, then all but the last tokens from disk, ten times sooner."""

    def asked(number: int, pulled: int):
        tokens = PromptTokens(computed=1500 - pulled, cached=0, pulled=pulled)
        first_token = 0.1 if pulled else 1.0
        return demo.Asked(tokens, first_token, f"It is {demo.code(number)[1]}.", pulled)

    loaded = {demo.COMPUTED: 0, demo.FROM_DISK: 1472, demo.RESTARTED: 1472}
    passes = {name: [asked(number, pulled) for number in range(NUMBER_BYTES)] for name, pulled in loaded.items()}
    decisions = {name: {"decisions: faster": NUMBER_BYTES} if pulled else {} for name, pulled in loaded.items()}
    library = demo.Library(counts(200, 190), counts(700, 200), counts(0, 200), 0.1, counts(500, 200))
    return demo.Played(passes, decisions, [demo.Failures()] * 2, [], library)


@pytest.fixture
def judge(demo):
    def judge(played, recalls=True, times=10):
        return demo.judge(played, recalls, times)

    return judge


def changed(played, name, number, **changes):
    asked = list(played.passes[name])
    asked[number] = msgspec.structs.replace(asked[number], **changes)
    return played._replace(passes={**played.passes, name: asked})


def answer(text, **logprobs):
    """A referee's: ``text`` of one token, beside others with their log-probabilities."""
    top = [{"token": token, "logprob": logprob} for token, logprob in {text: -0.7, **logprobs}.items()]
    steps = [{"token": text, "logprob": -0.7, "top_logprobs": top}]
    return Answer(text=text, finish_reason="stop", usage=None, params=None, seconds=0, logprobs=steps)


@pytest.mark.parametrize("recalls", [False, True])
def test_document_library_good_result_passes(demo, judge, good, recalls):
    assert judge(good, recalls) == []
    assert demo.times_memory(good.library) == 10


@pytest.mark.parametrize("later", ["FROM_DISK", "RESTARTED"])
def test_document_library_failures_are_detected(demo, judge, good, later):
    name = getattr(demo, later)
    [problem] = judge(changed(good, name, 3, answer="It is 00000."))
    assert f"'It is 00000.' {name}" in problem
    computed = PromptTokens(computed=1500, cached=0, pulled=0)
    played, slow = good, good
    for number in range(NUMBER_BYTES):
        played = changed(played, name, number, tokens=computed, from_disk=0)
        slow = changed(slow, name, number, first_token=1.1)
    [problem] = judge(played)
    assert problem.startswith(f"{name}: no document came from disk") and "decisions: faster 12" in problem
    [problem] = judge(slow)
    assert problem == f"{name}: 12 documents took 13.20 s from disk, 12.00 s to compute."


def test_document_library_computed_or_cached_documents_pass(demo, judge, good):
    """Where the planner expected it to be sooner; or because memory still had it."""
    computed = PromptTokens(computed=1500, cached=0, pulled=0)
    played = changed(good, demo.FROM_DISK, 0, tokens=computed, from_disk=0, first_token=1.5)
    played = changed(played, demo.FROM_DISK, 1, from_disk=0)
    assert judge(played) == []
    assert played.passes[demo.FROM_DISK][1].from_memory == 1472
    first = played.passes[demo.COMPUTED]
    cells = demo.pass_cells(first, played.passes[demo.FROM_DISK])
    assert cells == ["1,808", "0", "1,472", "14,720", "100", "1,500", "10.0 x"]
    assert demo.pass_cells(first, first)[-1] == "-"


def test_document_library_first_pass_failures_are_detected(demo, judge, good):
    early = PromptTokens(computed=500, cached=0, pulled=1000)
    [problem] = judge(changed(good, demo.COMPUTED, 2, tokens=early))
    assert "1000 tokens were loaded before anything was stored" in problem
    for number in range(3):
        assert judge(good) == [], "the model may be wrong about a few, as long as it is so each time"
        for name in demo.PASSES:
            good = changed(good, name, number, answer="It is 00000.")
    assert judge(good) == ["of 12 codes only 9 were recalled."]
    assert judge(good, recalls=False) == []


def test_document_library_too_few_documents_fail(judge, good):
    [problem] = judge(good, times=11)
    assert "need 10.0 times" in problem and "11 were asked for" in problem


def test_document_library_lost_disk_blocks_are_a_failure(judge, good):
    [problem] = judge(good._replace(library=good.library._replace(after=counts(0, 199))))
    assert problem == "of 200 blocks on disk 199 were found after the kill."


def test_failures_before_and_after_restart_count(demo, judge, good):
    lives = [demo.Failures(integrity=1), demo.Failures(integrity=2, loads=1)]
    assert [problem[:8] for problem in judge(good._replace(failures=lives))] == ["3 blocks", "1 loads "]


def test_document_library_near_ties_are_excused_only_for_other_models(demo, judge, good):
    played = changed(good, demo.FROM_DISK, 0, answer="b")
    played = changed(changed(played, demo.COMPUTED, 0, answer="a"), demo.RESTARTED, 0, answer="a")
    others = [answer(a.answer) for a in good.passes[demo.COMPUTED][1:]]
    assert judge(played._replace(referee=[answer("a", b=-0.8), *others]), recalls=False) == []
    assert len(judge(played._replace(referee=[answer("a", b=-3.0), *others]), recalls=False)) == 1
    assert judge(played) == [], "one that knows the answers did not know this one"
    knew = changed(good, demo.FROM_DISK, 0, answer="b")
    assert any("'b'" in problem for problem in judge(knew._replace(referee=[answer("a", b=-0.8), *others])))


def test_document_library_documents_are_distinct(demo):
    codes = [demo.code(number) for number in range(300)]
    assert len({name for name, _ in codes}) == 300
    texts = [str(demo.document(number)) for number in range(40)]
    assert len({text.partition("Read this file")[2] for text in texts}) == 40
    for number, (_, digits) in enumerate(codes[:40]):
        asked = demo.document(number)
        assert [digits in message["content"] for message in asked] == [False, True, False, False, False, False]


def test_document_library_reads_decisions_from_metrics(demo):
    assert demo.decisions_in("") == {}
    assert demo.decisions_in(METRICS) == {"decisions: faster": 7, "waits: promotion": 8}


def test_document_library_tables_fit_80_columns(demo, good):
    """80 columns, and nothing is cut off."""
    with demo.console.capture() as capture:
        demo.console.width = 80
        demo.show(good, True)
    shown = capture.get()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert "4 more" in shown and "10.0 times the store's memory" in shown
    assert demo.cells([good.passes[name][:1] for name in demo.PASSES]) == [
        "1,500", "1,000", "100", "1,472", "100", "1,472",
    ]  # fmt: skip


def test_document_library_engine_has_own_store_and_disk(demo, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("sys.argv", ["document_library.py", "--gpus", "1"])
    args = demo.arguments()
    assert (args.recalls, args.gpus, args.store_size, args.times) == (True, ["1"], "36MiB", 10)
    engine = demo.make_engine(args, tmp_path, tmp_path / "disk")
    extra = engine.kv["kv_connector_extra_config"]
    assert (extra["store_disk_path"], extra["store_size"]) == (str(tmp_path / "disk"), "36MiB")
    assert engine._env["XDG_RUNTIME_DIR"] == str(tmp_path)
    assert extra["store_idle_seconds"] > engine.ready_seconds
    monkeypatch.setattr("sys.argv", ["document_library.py", "--model", "another/model"])
    assert demo.arguments().store_size == "1GiB"


def test_document_library_store_is_read_and_ended(tmp_path, run_dir):
    path = store_path()
    with pytest.raises(StoreFailed, match="no node store listens"):
        store_counts(path)
    end_store(path)  # nothing to end is no error
    start_store(path, StoreOptions(size="1MiB", idle_seconds=30, disk_path=str(tmp_path / "disk"), disk_size="8MiB"))
    found, taken = open_tier(path)
    assert tier_of(found).state == "ready" and taken < 30 and found.pid != os.getpid()
    assert counts_when_idle(path).index.reservations == 0
    with pytest.raises(StoreFailed, match="no tier 'nodes'"):
        open_tier(path, "nodes")
    end_store(path)
    assert not serves(path)
