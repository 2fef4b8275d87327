"""What the examples judge: they must pass what is right, and say what is not. Played with real engines in
``tests/engines/test_examples_engines.py``."""

import importlib.util
import subprocess
import sys

import pytest

from vllm_kvtier.devtools.clients import Answer, PromptTokens

NAMES = ("agent_loop", "dp_sharing", "move_conversation")


@pytest.fixture(scope="module")
def load(root):
    folder = root / "examples"

    def load(name: str):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)  # as when it is run
            spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def agents(load):
    return load("agent_loop")


@pytest.fixture(scope="module")
def sharing(load):
    return load("dp_sharing")


@pytest.fixture(scope="module")
def moving(load):
    return load("move_conversation")


@pytest.mark.parametrize("name", ["multiturn_demo", "host_cache_demo", "document_library"])
def test_demo_devices_may_be_named(load, monkeypatch, name):
    module = load(name)
    for words, devices, named in (("MIG-5c", None, ["MIG-5c"]), ("0", "GPU-5a", ["GPU-5a"]), ("1", "4,5", ["5"])):
        monkeypatch.setattr("sys.argv", [name, "--gpus", words])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if devices is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        assert module.arguments().gpus == named


@pytest.fixture
def options(monkeypatch):
    def options(module, *words: str, devices: str | None = None):
        monkeypatch.setattr("sys.argv", [module.__name__, *words])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if devices is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        return module.options()

    return options


@pytest.mark.parametrize("name", NAMES)
def test_example_help_names_purpose_and_exit_code(root, name):
    script = root / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "exit code is not 0" in done.stdout, done.stderr
    assert all(word in done.stdout for word in ("--model", "--gpus", "--quick"))
    wrong = subprocess.run([sys.executable, script, "--nonsense"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "--nonsense" in wrong.stderr


def test_examples_readme_lists_every_script(root):
    said = (root / "examples" / "README.md").read_text()
    scripts = [path.name for path in (root / "examples").glob("*.py") if not path.name.startswith("_")]
    assert scripts and all(f"python examples/{name}" in said for name in scripts), scripts


@pytest.mark.parametrize("name", NAMES)
def test_example_devices_are_named_or_visible_ones(load, options, name):
    module = load(name)
    assert options(module).gpus == [] and options(module).recalls
    assert options(module, "--gpus", "1").gpus == ["1"]
    assert options(module, devices="GPU-5a,GPU-5b").gpus[0] == "GPU-5a"
    assert options(module, "--gpus", "1", devices="4,GPU-5b").gpus == ["GPU-5b"], "an index into the visible ones"
    assert options(module, "--gpus", "MIG-5c").gpus == ["MIG-5c"]
    assert options(module, devices="").gpus == options(module, devices="-1").gpus == []
    for words, devices in (("2", "4,5"), ("0", ""), ("first", None)):
        with pytest.raises(SystemExit):
            options(module, "--gpus", words, devices=devices)
    assert not options(module, "--model", "another/model").recalls


# -- agent_loop ----------------------------------------------------------------------------------------------------


@pytest.fixture
def trail(agents, tmp_path):
    """An agent that has read its first record."""
    agent = agents.Agent(0, 4, tmp_path, recalls=True)
    name, code = agent.trail[0]
    agent.ask(name)
    agent.call("read_record", code=agent.hear(name, f"The code for {name} is {code}.", code))
    return agent


def test_agent_loop_code_opens_record_with_next_code(trail):
    name, code = trail.trail[1]
    call, result = trail.messages[-2]["tool_calls"][0], trail.messages[-1]
    assert result["role"] == "tool" and result["tool_call_id"] == call["id"]
    assert f"The code for {name} is {code}." in result["content"] and call["function"]["name"] == "read_record"


def test_agent_loop_wrong_code_opens_no_record(trail):
    trail.ask("whatever")
    said = trail.hear("whatever", "The code for whatever is 00000.", trail.trail[1][1])
    assert said == "00000" and trail.call("read_record", code=said) == "There is no record 00000."


def test_agent_loop_tools_accept_malformed_arguments(trail):
    trail.ask("whatever")
    assert trail.hear("whatever", "I do not know.", "12345") == "none"
    assert trail.call("add", first="none", second="12345") == "These are no numbers."
    assert trail.call("add", first="40512", second="77120") == "117632"


def test_agent_loop_summary_keeps_the_code_only(trail):
    before = trail.messages[-1]["content"]
    trail.edit(0)
    name, code = trail.trail[1]
    assert trail.messages[-1]["content"] == f"The code for {name} is {code}." and len(before) > 500


def test_agent_loop_edit_keeps_sent_prompts(trail):
    asked = trail.ask("whatever")
    before = [dict(message) for message in asked]
    trail.edit(0)
    trail.call("add", first="1", second="2")
    assert asked == before != trail.messages[: len(asked)]


@pytest.fixture
def rounds(agents):
    """Both rounds of two agents as they should be: without kvtier all is computed, with it what is new."""

    def asked(turn: int, agent: int, found: int, disk: int):
        total, known, edited = 500 * (turn + 1), 480 * turn, turn == 2
        found = min(found, 300) if edited else found
        tokens = PromptTokens(computed=total - found, cached=0, pulled=found)
        code = str(10000 + 10 * turn + agent)
        answer = f"It is {code}."
        return agents.Asked(tokens, min(disk, found), 0.2, answer, code, [], 300 if edited else known, edited)

    def one(with_: bool):
        turns = {
            (turn, agent): asked(turn, agent, 480 * turn if with_ else 0, 200 if with_ else 0)
            for turn in range(6)
            for agent in range(2)
        }
        return agents.Played(turns, [("30000", 30000), ("40000", 40000)], agents.Failures())

    return {agents.PLAIN: one(False), agents.KVTIER: one(True)}


def changed(played, name, place, **changes):
    turns = {**played[name].turns, place: played[name].turns[place]._replace(**changes)}
    return {**played, name: played[name]._replace(turns=turns)}


def test_agent_loop_good_rounds_pass(agents, rounds):
    assert agents.judge(rounds, True, {}) == []
    assert agents.judge(rounds, False, {}) == []


@pytest.mark.parametrize("recalls", [True, False])
def test_agent_loop_failures_are_detected(agents, rounds, recalls):
    def said(played, *words: str) -> None:
        problems = agents.judge(played, recalls, {})
        assert len(problems) == 1 and all(word in problems[0] for word in words), problems

    place, nothing = (4, 1), PromptTokens(computed=2500, cached=0, pulled=0)
    said(changed(rounds, agents.KVTIER, place, answer="It is 99999."), "turn 5 of agent b", "99999")
    said(changed(rounds, agents.KVTIER, place, tokens=nothing, disk=0), "turn 5 of agent b", "found 0 tokens")
    beyond = PromptTokens(computed=500, cached=500, pulled=500)
    said(changed(rounds, agents.KVTIER, (2, 0), tokens=beyond), "edited at token 300", "1000 were found")
    for failures, word in ((agents.Failures(integrity=2), "checksum"), (agents.Failures(loads=3), "3 loads")):
        said({**rounds, agents.KVTIER: rounds[agents.KVTIER]._replace(failures=failures)}, word)


def test_recalled_codes_must_add_up(agents, rounds):
    wrong = {**rounds, agents.KVTIER: rounds[agents.KVTIER]._replace(sums=[("30000", 30000), ("1", 40000)])}
    assert len(agents.judge(wrong, True, {})) == 1 and agents.judge(wrong, False, {}) == []


def test_agent_loop_rounds_without_disk_hits_fail(agents, rounds):
    turns = {place: each._replace(disk=0) for place, each in rounds[agents.KVTIER].turns.items()}
    no_disk = {**rounds, agents.KVTIER: rounds[agents.KVTIER]._replace(turns=turns)}
    assert [p for p in agents.judge(no_disk, True, {}) if "nothing came from disk" in p]
    forgot_nothing = {**rounds, agents.PLAIN: rounds[agents.KVTIER]}
    assert [p for p in agents.judge(forgot_nothing, True, {}) if "too little was forgotten" in p]


def test_agent_loop_table_cells_add_up(agents, rounds):
    plain, asked = (list(rounds[name].turns.values())[-2:] for name in (agents.PLAIN, agents.KVTIER))
    assert agents.cells(plain, asked) == ["6,000", "6,000", "400", "0", "4,400", "400", "1,200", "400"]


# -- dp_sharing ----------------------------------------------------------------------------------------------------


def test_dp_sharing_plan_asks_every_rank_for_every_document(sharing):
    plan = sharing.plan(24, 0)
    assert len(plan) == 24 and plan != sharing.plan(24, 1)
    assert {(document, rank) for document, _, rank in plan} == {(d, r) for d in range(4) for r in range(2)}


def test_dp_sharing_ranks_share_one_server_on_devices(sharing, options, tmp_path, capsys):
    def engines(*words: str, name: str = sharing.SHARED):
        return sharing.Ranks(options(sharing, *words), tmp_path, name).engines

    extra = [one.kv["kv_connector_extra_config"] for one in engines()]
    assert len(extra) == 2 and all(each["store_size"] == "512MiB" for each in extra)
    alone = engines(name=sharing.ALONE)[0].kv["kv_connector_extra_config"]
    assert (alone["peer_fetch"], alone["store"]) == ("off", "off")
    assert len(engines("--gpus", "0")) == 2
    for words in (("--gpus", "0,1"), ("--one-server",)):
        (one,) = engines(*words)
        assert "--data-parallel-size" in one.command
    for words in (("--one-server", "--gpus", "0"), ("--requests", "3")):
        with pytest.raises(SystemExit):
            options(sharing, *words)


@pytest.fixture
def shared(sharing):
    """Both rounds as they should be: with sharing a document is computed the first time, and copied the second."""

    def asked(document: int, rank: int, source: str | None):
        local, pulled = (0, 1152) if source else (0, 0)
        report = {"prompt_tokens": 1200, "local_tokens": local, "pulled_tokens": pulled, "pulled_from": source}
        report["computed_tokens"] = 1200 - local - pulled
        code = sharing.SUBJECTS[sharing.STATED[document][rank]]
        return sharing.Asked(document, rank, rank, report, 0.2, f"It is {code}.", 1152)

    def one(second: str | None):
        every = [asked(d, r, second if r else None) for d in range(sharing.DOCUMENTS) for r in range(2)]
        return sharing.Played(every, sharing.Failures(), {})

    return {sharing.ALONE: one(None), sharing.SHARED: one("gpu 127.0.0.1:7000")}


def with_request(played, name, number, **changes):
    asked = list(played[name].asked)
    asked[number] = asked[number]._replace(**changes)
    return {**played, name: played[name]._replace(asked=asked)}


def test_dp_sharing_good_result_passes(sharing, shared):
    assert sharing.judge(shared, True) == [] and sharing.judge(shared, False) == []
    assert sharing.judge({sharing.SHARED: shared[sharing.SHARED]}, True) == [], "--quick"
    assert sharing.computed_times(shared[sharing.ALONE].asked) == {0: 2, 1: 2, 2: 2, 3: 2}
    copied = shared[sharing.SHARED].asked[1]
    assert (copied.own, copied.other, copied.host, copied.computed) == (0, 1152, 0, 48)


def test_dp_sharing_failures_are_detected(sharing, shared):
    def said(played, word: str, recalls: bool = False) -> None:
        problems = sharing.judge(played, recalls)
        assert any(word in problem for problem in problems), problems

    one = shared[sharing.SHARED].asked[3]
    said(with_request(shared, sharing.SHARED, 3, answer="It is 1."), "request 4: answered 'It is 1.' with sharing")
    both = with_request(with_request(shared, sharing.SHARED, 3, answer="1"), sharing.ALONE, 3, answer="1")
    said(both, "the code is", recalls=True)
    computed = {**one.report, "pulled_tokens": 0, "pulled_from": None, "computed_tokens": 1200}
    said(with_request(shared, sharing.SHARED, 3, report=computed), "document 2 was computed 2 times with sharing")
    found = {**one.report, "pulled_from": "host"}
    said(with_request(shared, sharing.ALONE, 3, report=found), "document 2 was computed 1 times by 2 ranks without")
    host = [each._replace(report={**each.report, "pulled_from": "host"}) for each in shared[sharing.SHARED].asked]
    said({**shared, sharing.SHARED: shared[sharing.SHARED]._replace(asked=host)}, "nothing was copied from the other")
    for failures, word in ((sharing.Failures(integrity=1), "checksum"), (sharing.Failures(loads=1), "failed")):
        said({**shared, sharing.SHARED: shared[sharing.SHARED]._replace(failures=failures)}, word)


def test_dp_sharing_near_ties_are_excused_for_other_models(sharing, shared):
    top = [{"token": "It is 1.", "logprob": -0.7}, {"token": shared[sharing.ALONE].asked[3].answer, "logprob": -0.75}]
    step = {"token": "It is 1.", "logprob": -0.7, "top_logprobs": top}
    judge = Answer(text="It is 1.", finish_reason="stop", usage=None, params=None, seconds=0, logprobs=[step])
    differs = with_request(shared, sharing.SHARED, 3, answer="It is 1.")
    excused = {**differs, sharing.SHARED: differs[sharing.SHARED]._replace(referee={3: judge})}
    assert sharing.judge(excused, False) == [] and sharing.judge(differs, False) != []


# -- move_conversation ---------------------------------------------------------------------------------------------


@pytest.fixture
def rows(moving):
    """Four moves as they should be."""
    first, last = moving.NAMES[0], moving.NAMES[-1]
    talk = moving.Talk([], list(range(1650)), {first: "11111", last: "22222"})
    told = moving.Told(list(range(64)), "It is 11111.")

    def moved(pulled: int, source: str | None):
        report = {"pulled_tokens": pulled, "pulled_from": source, "computed_tokens": 1658 - pulled}
        return moving.Moved(list(range(8)), list(range(8, 64)), "It is 11111.", 0.1, report, "It is 22222.")

    sources = ((1632, "127.0.0.1:7000"), (1632, "gpu 127.0.0.1:7000"), (0, None), (1632, "host"))
    return {move: (talk, told, moved(*source)) for move, source in zip(moving.MOVES, sources, strict=True)}


def with_move(rows, move, **changes):
    talk, told, moved = rows[move]
    return {**rows, move: (talk, told, moved._replace(**changes))}


@pytest.mark.parametrize("recalls", [True, False])
def test_move_conversation_good_rows_pass(moving, rows, recalls):
    assert moving.judge(rows, recalls, set()) == []
    words = [moving.source(moved) for _, _, moved in rows.values()]
    assert words == ["A's cache, NIXL", "A's cache", "computed", "node's memory"]


def test_move_conversation_failures_are_detected(moving, rows):
    def said(rows, word: str, recalls: bool = True, ties=()) -> None:
        problems = moving.judge(rows, recalls, set(ties))
        assert len(problems) == 1 and word in problems[0], problems

    other = [8, 9, 99, *range(11, 64)]
    said(with_move(rows, moving.STREAMED, went_on=other), "mid-stream, to C: differs from A's answer at token 10")
    assert moving.judge(with_move(rows, moving.STREAMED, went_on=other), False, {moving.STREAMED}) == []
    short = list(range(8, 60))
    said(with_move(rows, moving.STREAMED, went_on=short), "differs")
    said(with_move(rows, moving.SLICED, text="It is 12345."), "the answer was 'It is 12345.'")
    said(with_move(rows, moving.SLICED, later="It is 12345."), "the answer was 'It is 12345.'")
    fewer = {"pulled_tokens": 1600, "pulled_from": "host"}
    said(with_move(rows, moving.KILLED_C, report=fewer), "1600 tokens were moved")
    said(with_move(rows, moving.KILLED_B, report=fewer), "1600 tokens came from host")
    over = {"produced": list(range(64)), "went_on": []}
    said(with_move(rows, moving.SLICED, **over), "behind 64 of 64 tokens")


def test_move_conversation_near_tie_needs_both_tokens(moving):
    top = {"token_id:5": -0.5, "token_id:6": -0.6, "token_id:7": -3.0}
    assert moving.nearly_tied(top, 5, 6)
    assert not moving.nearly_tied(top, 5, 7) and not moving.nearly_tied(top, 5, 8)


def test_move_conversation_engine_b_has_no_store(moving, options, tmp_path):
    a, b, c = (moving.make_engine(options(moving, "--gpus", "0,1"), n, tmp_path) for n in range(3))
    stores = [one.kv["kv_connector_extra_config"].get("store") for one in (a, b, c)]
    assert stores == [None, "off", None] and (a.name, b.name, c.name) == ("A", "B", "C")
    assert all(one.kv["kv_connector_extra_config"]["bidirectional"] for one in (a, b, c))


# -- what they share ------------------------------------------------------------------------------------------------


def test_common_prefix_of_texts(load):
    common = load("_support").common
    assert common([1, 2, 3], [1, 2, 4, 5]) == 2 and common([1, 2], [1, 2, 3]) == 2 and common([], [1]) == 0


def test_example_await_store_retries_until_timeout(load, monkeypatch, run_dir):
    support = load("_support")
    with pytest.raises(support.StoreFailed, match="no node store listens"):
        support.await_store(0.05)
    answers = [support.StoreFailed("not yet"), support.StoreFailed("not yet"), None]

    def counts(path: str) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(support, "store_counts", counts)
    support.await_store(30.0)
    assert not answers


def test_example_exit_codes_follow_problems_and_failures(load, options, capsys, monkeypatch, tmp_path):
    support, module = load("_support"), load("agent_loop")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    args, seen = options(module), []

    def plays(problems):
        def play(_, folder):
            seen.append(folder)
            assert support.os.environ["XDG_RUNTIME_DIR"] == str(folder / "run")
            return problems

        return play

    def fails(_, folder):
        raise support.StoreFailed("no store [here]")

    assert support.run(args, plays([]), "All is well.") == 0 and "All is well." in capsys.readouterr().out
    assert not seen[0].exists()
    assert support.run(args, plays(["the code is [wrong]."]), "All is well.") == 1
    assert seen[1].exists(), "logs are kept where something went wrong"
    said = capsys.readouterr().out
    assert "NOT RIGHT the code is [wrong]." in said and "All is well." not in said
    assert support.run(args, fails, "All is well.") == 2 and "no store [here]" in capsys.readouterr().out
    assert support.os.environ["XDG_RUNTIME_DIR"] == str(tmp_path)
