"""The life of a request as this package sees it: one table of states, events and what each transition obliges to do.

A request for which no source is asked goes NEW -> LOCAL -> GONE. One that pulls goes NEW -> LOOKUP -> HIT ->
LOADING -> LOADED -> GONE, with VERIFYING in place of LOADING if it is computed in the step that loads it; every other
way out (refusal, time-out, decline, failure, abort, preemption) is a row below.
"""

import enum

from vllm_kvtier.logs import get_logger

logger = get_logger(__name__)


class State(enum.Enum):
    NEW = "new"  # nothing decided
    LOOKUP = "lookup"  # a source was asked; its answer is awaited, with a deadline
    HIT = "hit"  # a lease is held; vLLM has not allocated blocks yet
    LOADING = "loading"  # blocks are allocated; the workers read into them
    VERIFYING = "verifying"  # read in the step that computes on it; verified with the step's output
    LOADED = "loaded"  # read and verified
    LOCAL = "local"  # computed here
    ABANDONED = "abandoned"  # finished or aborted while the workers still read; blocks are not free yet
    GONE = "gone"


class Event(enum.Enum):
    LOOKUP = "lookup"
    HIT = "hit"
    MISS = "miss"
    HOLD_HIT = "hold hit"  # a hit of a store is held while the next source is asked for more
    TAKE_HELD_HIT = "take held hit"  # no other source had more
    TIMEOUT = "timeout"
    DECLINE = "decline"  # below the threshold, full local hit, no source left
    ALLOCATE = "allocate"
    ALLOCATE_SYNC = "allocate, load synchronously"  # for a load, or the rest of one, that the step's forward waits for
    LOAD_DONE = "load done"
    LOAD_FAILED = "load failed"
    PREEMPT = "preempt"
    ASK_AGAIN = "ask again"  # vLLM has evicted tokens before those that were asked for, or the answer is old
    FINISH = "finish"  # stopped, capped or aborted


class Action(enum.Enum):
    """What the caller of a transition must do for the source."""

    NONE = "none"
    CANCEL_LOOKUP = "cancel lookup"  # a grant that still comes is released on arrival
    CANCEL_TO_ASK = "cancel to ask again"  # a lookup or its lease; the source keeps what it has for this request
    RELEASE = "release"  # release the lease
    CANCEL_LOAD = "cancel load"  # the workers begin no more of it; its lease is released when they report its end


S, E, A = State, Event, Action

TRANSITIONS: dict[tuple[State, Event], tuple[State, Action]] = {
    (S.NEW, E.LOOKUP): (S.LOOKUP, A.NONE),
    (S.NEW, E.DECLINE): (S.LOCAL, A.NONE),
    (S.NEW, E.TAKE_HELD_HIT): (S.HIT, A.NONE),
    (S.NEW, E.PREEMPT): (S.NEW, A.NONE),
    (S.NEW, E.FINISH): (S.GONE, A.NONE),
    (S.LOOKUP, E.HIT): (S.HIT, A.NONE),
    (S.LOOKUP, E.MISS): (S.NEW, A.NONE),  # the next source may be asked
    (S.LOOKUP, E.HOLD_HIT): (S.NEW, A.NONE),
    (S.LOOKUP, E.TIMEOUT): (S.NEW, A.CANCEL_LOOKUP),
    (S.LOOKUP, E.DECLINE): (S.LOCAL, A.CANCEL_LOOKUP),
    (S.LOOKUP, E.PREEMPT): (S.LOOKUP, A.NONE),
    (S.LOOKUP, E.ASK_AGAIN): (S.NEW, A.CANCEL_TO_ASK),
    (S.LOOKUP, E.FINISH): (S.GONE, A.CANCEL_LOOKUP),
    (S.HIT, E.ALLOCATE): (S.LOADING, A.NONE),
    (S.HIT, E.DECLINE): (S.LOCAL, A.RELEASE),
    (S.HIT, E.TIMEOUT): (S.LOCAL, A.RELEASE),  # no blocks free for longer than the lease should be held
    (S.HIT, E.PREEMPT): (S.HIT, A.NONE),
    (S.HIT, E.ASK_AGAIN): (S.NEW, A.CANCEL_TO_ASK),
    (S.HIT, E.FINISH): (S.GONE, A.RELEASE),
    (S.LOADING, E.LOAD_DONE): (S.LOADED, A.RELEASE),
    (S.LOADING, E.LOAD_FAILED): (S.LOCAL, A.RELEASE),
    (S.LOADING, E.FINISH): (S.ABANDONED, A.CANCEL_LOAD),  # the source may not reuse what is still being read
    (S.ABANDONED, E.LOAD_DONE): (S.GONE, A.RELEASE),
    (S.ABANDONED, E.LOAD_FAILED): (S.GONE, A.RELEASE),
    (S.HIT, E.ALLOCATE_SYNC): (S.VERIFYING, A.NONE),
    (S.LOADING, E.ALLOCATE_SYNC): (S.VERIFYING, A.NONE),  # its last part
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


class RequestLifecycle:
    """One request's state. An event that the table does not know is a bug: logged, counted, and without effect."""

    __slots__ = ("request_id", "state")
    violations = 0  # over all requests of the process; tests assert 0

    def __init__(self, request_id: str):
        self.request_id = request_id
        self.state = State.NEW

    def action(self, event: Event) -> Action:
        """What ``fire`` would return."""
        return TRANSITIONS.get((self.state, event), (self.state, Action.NONE))[1]

    def fire(self, event: Event) -> Action:
        row = TRANSITIONS.get((self.state, event))
        if row is None:
            RequestLifecycle.violations += 1
            logger.error(
                "kvtier: request %s: '%s' cannot happen in state '%s'; ignored (please report this)",
                self.request_id,
                event.value,
                self.state.value,
            )
            return Action.NONE
        self.state, action = row
        return action
