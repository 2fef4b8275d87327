"""The demo's judgement of a store: what it must not let pass, and what it must."""

import importlib.util

import msgspec
import pytest

from vllm_kvtier.devtools.clients import Answer, PromptTokens
from vllm_kvtier.devtools.engines import Engine
from vllm_kvtier.store.launcher import serves, start_store, store_path
from vllm_kvtier.store.options import StoreOptions

COUNTS = {"pid": 1, "index": {"evictions": 0}}
WELL = '''\
vllm:kvtier_loads_total{engine="0",kind="ok",model_name="model"} 18.0
vllm:kvtier_loads_created{engine="0",kind="failed",model_name="model"} 1.7e+09
vllm:kvtier_pulls_total{engine="0",kind="failed",model_name="model"} 4.0
'''
ILL = '''\
vllm:kvtier_loads_total{engine="0",kind="failed",model_name="model"} 2.0
vllm:kvtier_integrity_failures_total{engine="0",kind="store",model_name="model"} 3.0
vllm:kvtier_integrity_failures_total{engine="0",kind="engine",model_name="model"} 1.0
vllm:kvtier_integrity_failures_created{engine="0",kind="store",model_name="model"} 1.7e+09
'''


@pytest.fixture(scope="module")
def demo(root):
    folder = root / "examples"
    spec = importlib.util.spec_from_file_location("host_cache_demo", folder / "host_cache_demo.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # as when it is run: it shares what the other demo has
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def good(demo):
    """Passes as they should be: all computed first, then all but the last tokens loaded."""

    def asked(code: str, pulled: int):
        tokens = PromptTokens(computed=1500 - pulled, cached=0, pulled=pulled)
        return demo.Asked(tokens=tokens, first_token=0.25, answer=f"It is {code}.")

    loaded = {demo.COMPUTED: 0, demo.STORED: 1472, demo.RESTARTED: 1472}
    return {name: [asked(code, pulled) for code in demo.SUBJECTS.values()] for name, pulled in loaded.items()}


@pytest.fixture
def judge(demo):
    def judge(passes, recalls=True, referee=(), failures=(), counts=COUNTS):
        return demo.judge(passes, recalls, list(referee), list(failures or [demo.Failures()] * 2), counts)

    return judge


def changed(passes, name, index, **changes):
    asked = list(passes[name])
    asked[index] = msgspec.structs.replace(asked[index], **changes)
    return {**passes, name: asked}


def answer(text, **logprobs):
    """A referee's: ``text`` of one token, beside others with their log-probabilities."""
    top = [{"token": token, "logprob": logprob} for token, logprob in {text: -0.7, **logprobs}.items()]
    steps = [{"token": text, "logprob": -0.7, "top_logprobs": top}]
    return Answer(text=text, finish_reason="stop", usage=None, params=None, seconds=0, logprobs=steps)


@pytest.mark.parametrize("recalls", [False, True])
def test_host_cache_demo_good_passes_are_accepted(judge, good, recalls):
    assert judge(good, recalls) == []


@pytest.mark.parametrize("later", ["STORED", "RESTARTED"])
def test_host_cache_demo_failures_are_detected(demo, judge, good, later):
    name = getattr(demo, later)
    computed = PromptTokens(computed=1500, cached=0, pulled=0)
    cached = PromptTokens(computed=28, cached=1472, pulled=0)
    for passes, words in (
        (changed(good, name, 3, answer="It is 00000."), f"'It is 00000.' {name}"),
        (changed(good, name, 8, tokens=computed), f"1500 tokens was loaded {name}; 0 were still in the cache"),
        (changed(good, name, 0, tokens=cached), f"1500 tokens was loaded {name}; 1472 were still in the cache"),
    ):
        for recalls in (False, True):
            [problem] = judge(passes, recalls)
            assert words in problem


def test_host_cache_demo_first_pass_failures_are_detected(demo, judge, good):
    early = PromptTokens(computed=500, cached=0, pulled=1000)
    [problem] = judge(changed(good, demo.COMPUTED, 2, tokens=early))
    assert "1000 tokens were loaded before anything was stored" in problem
    for name in demo.PASSES:  # wrong each time: equal, but no recall
        good = changed(good, name, 2, answer="It is 00000.")
    [problem] = judge(good)
    assert "the code is 91834" in problem
    assert judge(good, recalls=False) == []


def test_failures_before_and_after_restart_count(demo, judge, good):
    lives = [demo.Failures(integrity=1), demo.Failures(integrity=2)]
    for failures, words in ((lives, "3 blocks"), (lives[::-1], "3 blocks"), ([demo.Failures(loads=1)], "1 loads")):
        [problem] = judge(good, failures=failures)
        assert problem.startswith(words)


def test_host_cache_demo_store_too_small_is_reported(demo, judge, good):
    counts = {"pid": 1, "index": {"evictions": 7}}
    assert judge(good, counts=counts) == [], "what was asked for was there nevertheless"
    computed = PromptTokens(computed=1500, cached=0, pulled=0)
    [problem] = judge(changed(good, demo.STORED, 1, tokens=computed), counts=counts)
    assert "evicted 7 blocks" in problem and "--store-size" in problem


def test_host_cache_demo_prompts_fitting_gpu_cache_fail(demo, judge, good):
    small = PromptTokens(computed=4, cached=0, pulled=0)
    passes = {**good, demo.COMPUTED: [msgspec.structs.replace(a, tokens=small) for a in good[demo.COMPUTED]]}
    [problem] = judge(passes)
    assert "0.0 times the cache" in problem
    assert demo.cache_times(good[demo.COMPUTED]) == pytest.approx(9 * 1500 / 4480)


def test_host_cache_demo_near_ties_are_excused_only_for_other_models(demo, judge, good):
    passes = changed(good, demo.STORED, 0, answer="b")
    passes = changed(changed(passes, demo.COMPUTED, 0, answer="a"), demo.RESTARTED, 0, answer="a")
    others = [answer(a.answer) for a in good[demo.COMPUTED][1:]]
    assert judge(passes, recalls=False, referee=[answer("a", b=-0.8), *others]) == []
    assert judge(passes, recalls=False, referee=[answer("b", a=-0.8), *others]) == []
    assert len(judge(passes, recalls=False, referee=[answer("a", b=-3.0), *others])) == 1
    assert len(judge(passes, recalls=False, referee=[answer("b", a=-3.0), *others])) == 1, "the first was another's"
    assert any("b" in p for p in judge(passes, recalls=True, referee=[answer("a", b=-0.8), *others]))


def test_host_cache_demo_reads_failures_from_metrics(demo):
    assert demo.failures_in("") == demo.failures_in(WELL) == demo.Failures()
    assert demo.failures_in(WELL + ILL) == demo.Failures(integrity=4, loads=2)


def test_host_cache_demo_documents_share_no_block(demo):
    texts = [str(demo.document(subject)) for subject in demo.SUBJECTS]
    assert len({text[: text.index("Read this file")] for text in texts}) == len(demo.SUBJECTS)
    assert len({text.partition("Read this file")[2] for text in texts}) == len(demo.SUBJECTS)
    for subject, code in demo.SUBJECTS.items():
        asked = demo.document(subject)
        assert [code in message["content"] for message in asked] == [False, True, False, False, False, False]


def test_host_cache_demo_table_cells_add_up(demo, good):
    assert demo.cells([good[name][:1] for name in demo.PASSES]) == ["1,500", "250", "250", "1,472", "250", "1,472"]
    assert demo.cells([good[name] for name in demo.PASSES])[:4] == ["13,500", "2,250", "2,250", "13,248"]


def test_host_cache_demo_engine_has_own_store(demo, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("sys.argv", ["host_cache_demo.py", "--gpus", "1"])
    args = demo.arguments()
    assert (args.recalls, args.gpus, args.store_size) == (True, ["1"], "256MiB")
    engine = demo.make_engine(args, tmp_path, tmp_path / "run")
    assert isinstance(engine, Engine)
    assert engine._env["XDG_RUNTIME_DIR"] == str(tmp_path / "run")
    assert engine.kv["kv_connector_extra_config"]["store_size"] == "256MiB"
    assert engine.kv["kv_connector_extra_config"]["store_idle_seconds"] > engine.ready_seconds
    monkeypatch.setattr("sys.argv", ["host_cache_demo.py", "--model", "another/model"])
    args = demo.arguments()
    assert (args.recalls, args.gpus, args.store_size) == (False, [], "4GiB")


def test_host_cache_demo_without_store_raises_with_cause(demo, run_dir):
    with pytest.raises(demo.StoreFailed, match="no node store"):
        demo.store_counts(run_dir)
    demo.end_store(run_dir, None)  # nothing to end is no error


def test_host_cache_demo_store_is_read_and_ended(demo, run_dir, monkeypatch):
    path = store_path()
    start_store(path, StoreOptions(size="1MiB", idle_seconds=30))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    counts = demo.store_counts(run_dir)
    assert counts["requested_bytes"] == 1 << 20
    assert counts["index"]["evictions"] == 0
    rows = dict(demo.store_rows(counts))
    assert rows["pool"].startswith("1 MiB") and rows["holds"].startswith("0 blocks")
    demo.end_store(run_dir, counts)
    assert not serves(path)
    demo.end_store(run_dir, None)
