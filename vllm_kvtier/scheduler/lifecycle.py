"""The life of a request as this package sees it: one table of states, events and what each transition obliges to do.

A request that asks nobody goes NEW -> LOCAL -> GONE. One that pulls goes NEW -> ASKING -> OFFERED -> LOADING ->
LOADED -> GONE, with VERIFYING in place of LOADING if it is computed in the step that loads it; every other way out
(refusal, time-out, decline, failure, abort, preemption) is a row below.
"""

import enum

from vllm_kvtier.logs import get_logger

logger = get_logger("vllm.kvtier.lifecycle")


class State(enum.Enum):
    NEW = "new"  # nothing decided
    ASKING = "asking"  # a source was asked; its answer is awaited, with a deadline
    OFFERED = "offered"  # a lease is held; vLLM has not allocated blocks yet
    LOADING = "loading"  # blocks are allocated; the workers read into them
    VERIFYING = "verifying"  # read in the step that computes on it; the verdict comes with the step's output
    LOADED = "loaded"  # read and verified
    LOCAL = "local"  # computed here
    ABANDONED = "abandoned"  # finished or aborted while the workers still read; blocks are not free yet
    GONE = "gone"


class Event(enum.Enum):
    ASK = "ask"
    GRANT = "grant"
    REFUSE = "refuse"
    HOLD = "hold"  # the node store has something: kept back while the next source is asked for more
    TAKE = "take"  # nobody had more than what is held back
    TIMEOUT = "timeout"
    DECLINE = "decline"  # below the threshold, full local hit, no source left
    ALLOCATE = "allocate"
    HURRY = "hurry"  # allocated, for a load that the step's forward waits for
    LOAD_DONE = "load done"
    LOAD_FAILED = "load failed"
    PREEMPT = "preempt"
    FINISH = "finish"  # stopped, capped or aborted


class Action(enum.Enum):
    """What the transition obliges its caller to do for the other side's sake."""

    NONE = "none"
    CANCEL_ASK = "cancel ask"  # a grant that still comes is released on arrival
    RELEASE = "release"  # give the lease back
    CANCEL_LOAD = "cancel load"  # the workers need begin no more of it; the lease goes back when what runs has ended


S, E, A = State, Event, Action

TRANSITIONS: dict[tuple[State, Event], tuple[State, Action]] = {
    (S.NEW, E.ASK): (S.ASKING, A.NONE),
    (S.NEW, E.DECLINE): (S.LOCAL, A.NONE),
    (S.NEW, E.TAKE): (S.OFFERED, A.NONE),
    (S.NEW, E.PREEMPT): (S.NEW, A.NONE),
    (S.NEW, E.FINISH): (S.GONE, A.NONE),
    (S.ASKING, E.GRANT): (S.OFFERED, A.NONE),
    (S.ASKING, E.REFUSE): (S.NEW, A.NONE),  # the next source may be asked
    (S.ASKING, E.HOLD): (S.NEW, A.NONE),
    (S.ASKING, E.TIMEOUT): (S.NEW, A.CANCEL_ASK),
    (S.ASKING, E.DECLINE): (S.LOCAL, A.CANCEL_ASK),
    (S.ASKING, E.PREEMPT): (S.ASKING, A.NONE),
    (S.ASKING, E.FINISH): (S.GONE, A.CANCEL_ASK),
    (S.OFFERED, E.ALLOCATE): (S.LOADING, A.NONE),
    (S.OFFERED, E.DECLINE): (S.LOCAL, A.RELEASE),
    (S.OFFERED, E.TIMEOUT): (S.LOCAL, A.RELEASE),  # no blocks free for longer than the lease should be held
    (S.OFFERED, E.PREEMPT): (S.OFFERED, A.NONE),
    (S.OFFERED, E.FINISH): (S.GONE, A.RELEASE),
    (S.LOADING, E.LOAD_DONE): (S.LOADED, A.RELEASE),
    (S.LOADING, E.LOAD_FAILED): (S.LOCAL, A.RELEASE),
    (S.LOADING, E.FINISH): (S.ABANDONED, A.CANCEL_LOAD),  # the source may not reuse what is still being read
    (S.ABANDONED, E.LOAD_DONE): (S.GONE, A.RELEASE),
    (S.ABANDONED, E.LOAD_FAILED): (S.GONE, A.RELEASE),
    (S.OFFERED, E.HURRY): (S.VERIFYING, A.NONE),
    (S.VERIFYING, E.LOAD_DONE): (S.LOADED, A.RELEASE),
    (S.VERIFYING, E.LOAD_FAILED): (S.LOCAL, A.RELEASE),  # the step is taken back
    (S.VERIFYING, E.FINISH): (S.ABANDONED, A.NONE),  # nothing to stop: such a load ends with its step
    (S.LOADED, E.PREEMPT): (S.NEW, A.NONE),  # what was pulled is lost; the node store may have it
    (S.LOADED, E.FINISH): (S.GONE, A.NONE),
    (S.LOCAL, E.DECLINE): (S.LOCAL, A.NONE),
    (S.LOCAL, E.PREEMPT): (S.NEW, A.NONE),
    (S.LOCAL, E.FINISH): (S.GONE, A.NONE),
}

del S, E, A


class Lifecycle:
    """One request's state. An event that the table does not know is a bug: logged, counted, and without effect."""

    __slots__ = ("request_id", "state")
    violations = 0  # over all requests of the process; tests assert 0

    def __init__(self, request_id: str):
        self.request_id = request_id
        self.state = State.NEW

    def fire(self, event: Event) -> Action:
        row = TRANSITIONS.get((self.state, event))
        if row is None:
            Lifecycle.violations += 1
            logger.error(
                "kvtier: request %s: '%s' cannot happen in state '%s'; ignored (please report this)",
                self.request_id, event.value, self.state.value,
            )
            return Action.NONE
        self.state, action = row
        return action
