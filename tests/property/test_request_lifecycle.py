"""The table of a request's life, walked exhaustively: whatever happens, a lease is given back exactly once."""

from vllm_kvtier.scheduler.matching.request_lifecycle import TRANSITIONS, Action, Event, RequestLifecycle, State

# What happened outside before an event: the owner of a pending lookup, or of a lease.
ASKED, LEASED = "asked", "leased"


def test_lifecycle_every_path_releases_lookup_and_lease():
    """All paths over (state, ask outstanding, lease held); the obligations of a row match what is really held."""
    start = (State.NEW, False, False)
    seen, queue = {start}, [start]
    while queue:
        state, asked, leased = queue.pop()
        for (source, event), (target, action) in TRANSITIONS.items():
            if source is not state:
                continue
            now_asked, now_leased = asked, leased
            if event is Event.LOOKUP:
                assert not asked and not leased, "a second ask while one is out"
                now_asked = True
            if event in (Event.HIT, Event.MISS):
                assert asked
                now_asked, now_leased = False, event is Event.HIT
            if event is Event.HOLD_HIT:  # the matcher keeps that lease until TAKE, or gives it back itself
                assert asked and not leased
                now_asked = False
            if event is Event.TAKE_HELD_HIT:
                assert not asked and not leased
                now_leased = True
            if action is Action.CANCEL_LOOKUP:
                assert now_asked, f"{source} {event} cancels an ask that is not out"
                now_asked = False
            if action is Action.CANCEL_TO_ASK:
                assert now_asked or now_leased, f"{source} {event} cancels nothing"
                now_asked = now_leased = False
            if action is Action.RELEASE:
                assert now_leased, f"{source} {event} releases a lease that is not held"
                now_leased = False
            if action is Action.CANCEL_LOAD:
                assert source is State.LOADING and target is State.ABANDONED, "the workers read nothing"
            if target in (State.GONE, State.LOCAL, State.LOADED, State.NEW):
                assert not now_asked and not now_leased, f"{source} {event} -> {target} leaves something held"
            if target in (State.HIT, State.LOADING, State.VERIFYING, State.ABANDONED):
                assert now_leased and not now_asked
            after = (target, now_asked, now_leased)
            if after not in seen:
                seen.add(after)
                queue.append(after)
    assert {state for state, _, _ in seen} == set(State), "a state that nothing leads to"


def test_lifecycle_every_state_is_left_by_finish():
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
    reported = {Event.LOAD_DONE, Event.LOAD_FAILED, Event.FINISH}
    for reading, last_part in ((State.LOADING, {Event.ALLOCATE_SYNC}), (State.VERIFYING, set())):
        assert {event for state, event in TRANSITIONS if state is reading} == reported | last_part
    assert TRANSITIONS[State.LOADING, Event.ALLOCATE_SYNC] == (State.VERIFYING, Action.NONE)


def test_lifecycle_undefined_transition_is_ignored_and_counted(caplog):
    before = RequestLifecycle.violations
    try:
        for state in State:
            for event in Event:
                life = RequestLifecycle("r")
                life.state = state
                action = life.fire(event)
                if (state, event) in TRANSITIONS:
                    assert (life.state, action) == TRANSITIONS[state, event]
                else:
                    assert (life.state, action) == (state, Action.NONE)
        assert RequestLifecycle.violations - before == len(State) * len(Event) - len(TRANSITIONS)
        assert "please report" in caplog.text
    finally:
        RequestLifecycle.violations = before
