"""Python's switch interval: for how long a thread that waits for the interpreter leaves it to one that computes.

With Python's 5 ms vLLM's thread would keep the interpreter, while it launches a step, from the thread that sends
answers, and from ours, whose messages peers wait for. With a shorter one these threads interrupt vLLM's scheduler, and
the device waits: 0.2 ms a step (64 requests, H100). The answers of a step are sent while the next one is scheduled;
they can go out during the launch behind it, which releases the interpreter all the time. So the interval is short from
the end of a step's scheduling until vLLM's scheduler is called again (``SchedulerLock``), and else as it was. A step
is scheduled before the outputs of the one before it are read, and many requests that come at once are decoded by a
thread meanwhile.

One setting for the process, as in Python. ``sys.setswitchinterval`` is called where a step's phases begin.
"""

import sys
from typing import ClassVar


class SwitchInterval:
    """Seconds. ``own``: what was set before, for vLLM's scheduling; ``short``: at most that, for all else."""

    own: ClassVar[float] = sys.getswitchinterval()
    short: ClassVar[float] = own

    @classmethod
    def lower(cls, seconds: float) -> None:
        """From now on ``short`` is ``seconds``; 0 leaves it, and it is never raised."""
        if 0 < seconds < cls.short:
            cls.short = seconds
        sys.setswitchinterval(cls.short)
