"""The table of a request's life, walked exhaustively: whatever happens, a lease is given back exactly once."""

from vllm_kvtier.scheduler.lifecycle import TRANSITIONS, Action, Event, Lifecycle, State

# What happened outside before an event: who owns an ask that is out, or a lease.
ASKED, LEASED = "asked", "leased"


def test_every_path_ends_with_nothing_held():
    """All paths over (state, ask outstanding, lease held); the obligations of a row match what is really held."""
    start = (State.NEW, False, False)
    seen, queue = {start}, [start]
    while queue:
        state, asked, leased = queue.pop()
        for (source, event), (target, action) in TRANSITIONS.items():
            if source is not state:
                continue
            now_asked, now_leased = asked, leased
            if event is Event.ASK:
                assert not asked and not leased, "a second ask while one is out"
                now_asked = True
            if event in (Event.GRANT, Event.REFUSE):
                assert asked
                now_asked, now_leased = False, event is Event.GRANT
            if event is Event.HOLD:  # the matcher keeps that lease until TAKE, or gives it back itself
                assert asked and not leased
                now_asked = False
            if event is Event.TAKE:
                assert not asked and not leased
                now_leased = True
            if action is Action.CANCEL_ASK:
                assert now_asked, f"{source} {event} cancels an ask that is not out"
                now_asked = False
            if action is Action.RELEASE:
                assert now_leased, f"{source} {event} releases a lease that is not held"
                now_leased = False
            if action is Action.CANCEL_LOAD:
                assert source is State.LOADING and target is State.ABANDONED, "the workers read nothing"
            if target in (State.GONE, State.LOCAL, State.LOADED, State.NEW):
                assert not now_asked and not now_leased, f"{source} {event} -> {target} leaves something held"
            if target in (State.OFFERED, State.LOADING, State.VERIFYING, State.ABANDONED):
                assert now_leased and not now_asked
            after = (target, now_asked, now_leased)
            if after not in seen:
                seen.add(after)
                queue.append(after)
    assert {state for state, _, _ in seen} == set(State), "a state that nothing leads to"


def test_every_living_state_can_be_left_by_finish_and_leads_to_gone():
    for state in State:
        if state is State.GONE:
            assert not [key for key in TRANSITIONS if key[0] is state], "nothing happens to what is gone"
        elif state is not State.ABANDONED:
            assert (state, Event.FINISH) in TRANSITIONS
    for event in (Event.LOAD_DONE, Event.LOAD_FAILED):
        assert TRANSITIONS[State.ABANDONED, event] == (State.GONE, Action.RELEASE)
        assert TRANSITIONS[State.LOADING, event][1] is Action.RELEASE
        assert TRANSITIONS[State.VERIFYING, event][1] is Action.RELEASE
    assert TRANSITIONS[State.LOADING, Event.FINISH] == (State.ABANDONED, Action.CANCEL_LOAD)
    # A load within a step ends with it, whatever becomes of the request.
    assert TRANSITIONS[State.VERIFYING, Event.FINISH] == (State.ABANDONED, Action.NONE)
    # While the workers read, nothing may give the lease back but their own report.
    for reading in (State.LOADING, State.VERIFYING):
        assert {event for state, event in TRANSITIONS if state is reading} == {
            Event.LOAD_DONE, Event.LOAD_FAILED, Event.FINISH,
        }  # fmt: skip


def test_what_the_table_does_not_know_has_no_effect_and_is_counted(caplog):
    before = Lifecycle.violations
    try:
        for state in State:
            for event in Event:
                life = Lifecycle("r")
                life.state = state
                action = life.fire(event)
                if (state, event) in TRANSITIONS:
                    assert (life.state, action) == TRANSITIONS[state, event]
                else:
                    assert (life.state, action) == (state, Action.NONE)
        assert Lifecycle.violations - before == len(State) * len(Event) - len(TRANSITIONS)
        assert "please report" in caplog.text
    finally:
        Lifecycle.violations = before
