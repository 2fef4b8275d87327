"""What loading and computing cost on this machine, learned from what was seen, and forgotten again.

``LoadRate``   seconds of a load = latency + bytes / bandwidth, one for each source. Starts as a guess, and returns
               to it when nothing was heard for some minutes.
``StepCost``   seconds of a model step = base + token * tokens + pair * pairs + decode * decodes, and prompt once if
               it has new tokens; *pairs* are (token, earlier token) pairs that attention visits: for n new tokens
               after m old ones, n*m + n*n/2. *prompt* is what a step costs that only generates no more, whatever is
               in it: most engines replay one as a CUDA graph and launch the other kernel by kernel.

``Handover``   seconds from a load's end until its request is scheduled, where others run: in such steps.

All look at ratios of actual to expected, so that a load of 2 ms counts as much as one of 200. A ratio far from 1 is
pulled in to ``LIMIT``, so that one hiccup changes little; each further one on the same side doubles the limit, so that
a change that lasts is followed, and fast.
"""

import math
from collections.abc import Iterable, Sequence

LIMIT = 2.0


class Clip:
    """Pulls outliers in; see the module's text."""

    __slots__ = ("side", "streak")
    ENDS = 1.1  # a change is over when expectations have come this close

    def __init__(self) -> None:
        self.side = self.streak = 0

    def __call__(self, ratio: float, usual: float = LIMIT) -> float:
        """ratio: actual / expected. usual: what is no surprise yet. Returns what of the ratio to believe."""
        up = self.ENDS if self.side > 0 else LIMIT
        down = self.ENDS if self.side < 0 else LIMIT
        side = 1 if ratio > up else -1 if ratio < 1 / down else 0
        self.streak = self.streak + 1 if side and side == self.side else 0
        self.side = side
        limit = max(LIMIT, usual) * 2.0 ** min(self.streak, 30)
        return min(max(ratio, 1 / limit), limit)

    @property
    def changing(self) -> bool:
        """Whether the last three were all far off on the same side: what was known before is worth little."""
        return self.streak >= 2


class Error:
    """How far predictions were off lately: ``size`` is the mean of |ln(actual / predicted)|, ``bias`` without ||."""

    __slots__ = ("size", "bias")

    def __init__(self) -> None:
        self.size = self.bias = 0.0

    def add(self, actual: float, predicted: float) -> None:
        off = math.log(actual / predicted)
        self.size += (abs(off) - self.size) / 16
        self.bias += (off - self.bias) / 16


class LoadRate:
    """Latency and bandwidth of one source.

    bandwidth (bytes/s), latency (s): what is believed before anything is seen. half_life (s): how long without
    news until what was learned counts half.

    What is learned are the logarithms of two factors on that guess, one of the latency, one of the seconds a byte: an
    extended Kalman filter of two states. An observation is ln(actual / expected); its gradient is the two factors'
    shares of the expected time, so small loads teach the latency and large ones the bandwidth. Between observations
    both states return to 0 as an Ornstein-Uhlenbeck process does, their variances to that of the guess.
    """

    GUESS = 2.5  # variance of the guess: five times off is one standard deviation
    NOISE = 0.04  # variance of an observation: 20 %
    DRIFT = 0.001  # added to the variances by each observation: makes the last 7 decide
    DRIFT_CHANGING = 0.3

    def __init__(self, bandwidth: float, latency: float, half_life: float):
        self._latency, self._per_byte, self._half_life = latency, 1 / bandwidth, half_life
        self._state = (0.0, 0.0)  # latency, seconds a byte; as of self._last
        self._variance = (self.GUESS, 0.0, self.GUESS)  # of the first, of both, of the second
        self._last = 0.0
        self._clip = Clip()
        self.error = Error()

    def observe(self, nbytes: int, seconds: float, now: float) -> None:
        """nbytes: of the load and of all that was in front of it. seconds: from its start until it was usable."""
        fade = self._fading(now - seconds)  # while it was under way the source was not idle
        spread = self.GUESS * (1 - fade * fade) + (self.DRIFT_CHANGING if self._clip.changing else self.DRIFT)
        x, y = self._state[0] * fade, self._state[1] * fade
        a, b, c = self._variance
        a, b, c = fade * fade * a + spread, fade * fade * b, fade * fade * c + spread
        latency, moving = self._latency * math.exp(x), nbytes * self._per_byte * math.exp(y)
        expected = latency + moving
        self.error.add(seconds, expected)
        u, v = latency / expected, moving / expected
        gain_x, gain_y = a * u + b * v, b * u + c * v
        variance = gain_x * u + gain_y * v + self.NOISE
        gain_x, gain_y = gain_x / variance, gain_y / variance
        surprise = math.log(self._clip(seconds / expected, math.exp(3 * math.sqrt(variance))))
        # A factor of e**12 either way is no link's: keeps the arithmetic finite whatever is observed.
        self._state = (
            min(max(x + gain_x * surprise, -12.0), 12.0),
            min(max(y + gain_y * surprise, -12.0), 12.0),
        )
        self._variance = (
            a - gain_x * (a * u + b * v),
            b - gain_x * (b * u + c * v),
            c - gain_y * (b * u + c * v),
        )
        self._last = now

    def seconds(self, nbytes: int, now: float | None) -> float:
        """Expected seconds of a load with ``nbytes`` in front of and in it. now None: as last seen, not faded."""
        return self.latency(now) + nbytes / self.bandwidth(now)

    def latency(self, now: float | None) -> float:
        return self._latency * math.exp(self._state[0] * self._fading(now))

    def bandwidth(self, now: float | None) -> float:
        return 1 / (self._per_byte * math.exp(self._state[1] * self._fading(now)))

    def _fading(self, now: float | None) -> float:
        return 1.0 if now is None else 0.5 ** (max(0.0, now - self._last) / self._half_life)


class Handover:
    """How long a load that has ended is of no use yet, among others, as a number of steps that only generate: vLLM sees
    its end with the output of a step, and the next one is under way by then. One, until more is known and when nothing
    was heard for long.

    half_life (s): how long without news until what was learned counts half. Short: as long as it is believed to be
    long, few loads are begun that would show that it is not."""

    USUAL, LEAST = 1.0, 0.05

    def __init__(self, half_life: float):
        self._half_life, self._steps, self._seen, self._last = half_life, self.USUAL, 0, 0.0
        self._clip = Clip()

    def observe(self, steps: float, now: float) -> None:
        self._seen += 1
        believed = self.steps(now)
        found = believed * self._clip(steps / believed)
        self._steps = max(self.LEAST, believed + (found - believed) / min(self._seen + 3, 8))
        self._last = now

    def steps(self, now: float) -> float:
        return self.USUAL + (self._steps - self.USUAL) * 0.5 ** (max(0.0, now - self._last) / self._half_life)


class StepCost:
    """What a step of this engine costs: a least-squares fit of relative errors.

    Steps are kept by size (decode steps, then by powers of four of new tokens), and each size forgets only by
    its own steps: a thousand decode steps leave what one long prefill taught. The five coefficients are at
    least 0. Beyond ``FAR`` times what was seen nothing is believed: ``covers`` says so for tokens in a step, and
    the growth with context ends there.
    """

    FAR = 4
    ENOUGH = 3  # steps with new tokens until the fit is used; the first ones of an engine compile kernels
    SCALE = (1.0, 1e-3, 1e-7, 1e-2, 1.0)  # brings the features near 1
    FORGET = 15 / 16  # of a size's weight at its next step: the last 16 decide

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}  # size -> upper triangle of the normal matrix, then the right side
        self._clips: dict[int, Clip] = {}
        self._costs = (0.0,) * UNKNOWNS
        self._since_fit = 0
        self._widest = self._deepest = 0.0
        self.prefills = 0
        self.error = Error()

    @property
    def known(self) -> bool:
        return self.prefills >= self.ENOUGH

    @property
    def coefficients(self) -> tuple[float, float, float, float, float]:
        """Seconds a step, a token, a pair, a decode, and a step with new tokens besides."""
        return tuple(c * s for c, s in zip(self._costs, self.SCALE, strict=True))

    def covers(self, tokens: int) -> bool:
        """Whether steps about as large as ``tokens`` have been seen."""
        return self.known and tokens <= self.FAR * self._widest

    def observe(self, seconds: float, work: Iterable[tuple[int, int]], decodes: int) -> None:
        """work: (new tokens, tokens before them) of each request in the step that is not decoding."""
        tokens = pairs = 0
        for new, before in work:
            tokens += new
            pairs += new * before + new * new / 2
            self._deepest = max(self._deepest, float(before + new))
        scale = self.SCALE
        x = (1.0, tokens * scale[1], pairs * scale[2], decodes * scale[3], float(tokens > 0))
        size = 1 + (tokens.bit_length() - 1) // 2 if tokens else 0
        sums = self._sums.setdefault(size, [0.0] * (len(_PLACE) + UNKNOWNS))
        clip = self._clips.setdefault(size, Clip())
        expected = seconds
        if self.known and sums[0]:
            predicted = sum(cost * each for cost, each in zip(self._costs, x, strict=True))
            if predicted > 0:
                if tokens:
                    self.error.add(seconds, predicted)
                expected, seconds = predicted, clip(seconds / predicted) * predicted
        keep = 0.5 if clip.changing else self.FORGET
        if clip.changing and tokens:  # the engine's pace has changed: what other sizes taught is old too
            for other in self._sums:
                self._sums[other] = [0.75 * s for s in self._sums[other]]
            sums = self._sums[size]
        x = [each / expected for each in x]
        y = seconds / expected
        new = [x[i] * x[j] for i, j in _PLACE] + [each * y for each in x]
        self._sums[size] = [keep * s + n for s, n in zip(sums, new, strict=True)]
        if tokens:
            self.prefills += 1
            self._widest = max(float(tokens), self._widest * 0.999)
            self._deepest *= 0.9999
        self._since_fit += 1
        if self._since_fit >= (16 if not tokens else 4 if self.prefills > 16 else 1):
            self._since_fit = 0
            self._costs = _least_squares([sum(column) for column in zip(*self._sums.values(), strict=True)])

    def prefill_seconds(self, start: int, end: int, steps: int, decodes: float) -> float:
        """Seconds that tokens [start, end) of one request add, in ``steps`` steps of their own."""
        base, token, pair, decode, prompt = self.coefficients
        deep = max(self.FAR * self._deepest, start)
        pairs = (min(end, deep) ** 2 - start**2) / 2 + deep * max(0, end - deep)
        return steps * (base + prompt + decode * decodes) + token * (end - start) + pair * pairs


UNKNOWNS = 5
# Of prompts of one length nobody knows what the tokens cost and what any prompt costs: the tokens, for the most part.
_SURE = (1.001, 1.001, 1.001, 1.001, 1.02)
_PLACE = {(i, j): k for k, (i, j) in enumerate((i, j) for i in range(UNKNOWNS) for j in range(i, UNKNOWNS))}


def _least_squares(sums: Sequence[float]) -> tuple[float, ...]:
    """Coefficients >= 0 from normal equations: the most negative one is dropped until none is."""
    active = [i for i in range(UNKNOWNS) if sums[_PLACE[i, i]] > 0]
    while active:
        # What is more than 1 on the diagonal settles what the observations leave open.
        rows = [
            [sums[_PLACE[min(i, j), max(i, j)]] * (_SURE[i] if i == j else 1.0) for j in active]
            + [sums[len(_PLACE) + i]]
            for i in active
        ]
        values = _solve(rows)
        worst = min(range(len(active)), key=values.__getitem__)
        if values[worst] >= 0:
            result = [0.0] * UNKNOWNS
            for i, value in zip(active, values, strict=True):
                result[i] = value
            return tuple(result)
        del active[worst]
    return (0.0,) * UNKNOWNS


def _solve(rows: list[list[float]]) -> list[float]:
    """Gaussian elimination of a positive definite system; each row ends with its right side."""
    n = len(rows)
    for i in range(n):
        pivot = rows[i]
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            for j in range(i + 1, n + 1):
                row[j] -= factor * pivot[j]
    values = [0.0] * n
    for i in reversed(range(n)):
        row = rows[i]
        values[i] = (row[n] - sum(row[j] * values[j] for j in range(i + 1, n))) / row[i]
    return values
