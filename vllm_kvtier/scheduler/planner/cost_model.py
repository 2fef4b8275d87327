"""What loading and computing cost on this machine, learned from measurements, which fade.

``LoadRate``   seconds of a load = latency + bytes / bandwidth, one for each source. Starts as a guess, and returns
               to it after some minutes without measurements.
``StepCost``   seconds of a model step = base + token * tokens + pair * pairs + decode * decodes, and prompt once if
               it has new tokens; *pairs* are (token, earlier token) pairs that attention visits: for n new tokens
               after m old ones, n*m + n*n/2. *prompt* is what a step costs that only generates no more, whatever is
               in it: most engines replay one as a CUDA graph and launch the other kernel by kernel.

``Handover``   seconds from a load's end until its request is scheduled, where others run: in such steps.

All look at ratios of actual to expected, so that a load of 2 ms counts as much as one of 200. A ratio far from 1 is
pulled in to ``CLIP_LIMIT``, so that one hiccup changes little. Each further one on the same side doubles the limit, so
that a lasting change is followed fast.
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np

CLIP_LIMIT = 2.0


class Clip:
    """Pulls outliers in; see the module's text."""

    __slots__ = ("side", "streak")
    CHANGE_END_RATIO = 1.1  # a change is over when expectations have come this close

    def __init__(self) -> None:
        self.side = self.streak = 0

    def __call__(self, ratio: float, usual: float = CLIP_LIMIT) -> float:
        """ratio: actual / expected. usual: what is no surprise yet. Returns what of the ratio to believe."""
        up = self.CHANGE_END_RATIO if self.side > 0 else CLIP_LIMIT
        down = self.CHANGE_END_RATIO if self.side < 0 else CLIP_LIMIT
        side = 1 if ratio > up else -1 if ratio < 1 / down else 0
        self.streak = self.streak + 1 if side and side == self.side else 0
        self.side = side
        limit = max(CLIP_LIMIT, usual) * 2.0 ** min(self.streak, 30)
        return min(max(ratio, 1 / limit), limit)

    @property
    def changing(self) -> bool:
        """Whether the last three were all far off on the same side: what was known before is worth little."""
        return self.streak >= 2


class Error:
    """How far predictions were off lately: ``size`` is the mean of |ln(actual / predicted)|."""

    def __init__(self) -> None:
        self.size = 0.0

    def add(self, actual: float, predicted: float) -> None:
        self.size += (abs(math.log(actual / predicted)) - self.size) / 16


class LoadRate:
    """Latency and bandwidth of one source.

    bandwidth (bytes/s), latency (s): what is believed before anything is seen. half_life (s): how long without
    news until what was learned counts half.

    What is learned are the logarithms of two factors on that guess, one of the latency, one of the seconds a byte: an
    extended Kalman filter of two states. An observation is ln(actual / expected); its gradient is the two factors'
    shares of the expected time, so small loads teach the latency and large ones the bandwidth. Between observations
    both states return to 0 as an Ornstein-Uhlenbeck process does, their variances to that of the guess.
    """

    PRIOR_VARIANCE = 2.5  # variance of the guess: five times off is one standard deviation
    NOISE_VARIANCE = 0.04  # variance of an observation: 20 %
    DRIFT = 0.001  # added to the variances by each observation: makes the last 7 decide
    DRIFT_CHANGING = 0.3

    def __init__(self, bandwidth: float, latency: float, half_life: float):
        self._latency, self._per_byte, self._half_life = latency, 1 / bandwidth, half_life
        self._state = (0.0, 0.0)  # latency, seconds a byte; as of self._last
        self._variance = (self.PRIOR_VARIANCE, 0.0, self.PRIOR_VARIANCE)  # of the first, of both, of the second
        self._last = 0.0
        self._clip = Clip()
        self.error = Error()

    def observe(self, nbytes: int, seconds: float, now: float, lasting: bool = False) -> None:
        """nbytes: of the load and of all that was in front of it. seconds: from its start until it was usable.
        lasting: this one is no hiccup, however far off it is."""
        fade = self._fading(now - seconds)  # while it was under way the source was not idle
        changing = lasting or self._clip.changing
        spread = self.PRIOR_VARIANCE * (1 - fade * fade) + (self.DRIFT_CHANGING if changing else self.DRIFT)
        x, y = self._state[0] * fade, self._state[1] * fade
        a, b, c = self._variance
        a, b, c = fade * fade * a + spread, fade * fade * b, fade * fade * c + spread
        latency, moving = self._latency * math.exp(x), nbytes * self._per_byte * math.exp(y)
        expected = latency + moving
        self.error.add(seconds, expected)
        u, v = latency / expected, moving / expected
        gain_x, gain_y = a * u + b * v, b * u + c * v
        variance = gain_x * u + gain_y * v + self.NOISE_VARIANCE
        gain_x, gain_y = gain_x / variance, gain_y / variance
        ratio = seconds / expected
        surprise = math.log(ratio if lasting else self._clip(ratio, math.exp(3 * math.sqrt(variance))))
        # A factor of e**12 either way is no link's: keeps the arithmetic finite whatever is observed.
        self._state = (min(max(x + gain_x * surprise, -12.0), 12.0), min(max(y + gain_y * surprise, -12.0), 12.0))
        self._variance = (a - gain_x * (a * u + b * v), b - gain_x * (b * u + c * v), c - gain_y * (b * u + c * v))
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
    """Time from a load's end until it is of use, if other requests run, in steps that only generate: vLLM sees the end
    with the output of a step, when the next one is under way. One, until it was measured, and again after a long time.

    half_life (s): how long without news until what was learned counts half. Short: as long as it is believed to be
    long, few loads are begun that would show that it is not."""

    INITIAL_STEPS, MIN_STEPS = 1.0, 0.05

    def __init__(self, half_life: float):
        self._half_life, self._steps, self._seen, self._last = half_life, self.INITIAL_STEPS, 0, 0.0
        self._clip = Clip()

    def observe(self, steps: float, now: float) -> None:
        self._seen += 1
        believed = self.steps(now)
        found = believed * self._clip(steps / believed)
        self._steps = max(self.MIN_STEPS, believed + (found - believed) / min(self._seen + 3, 8))
        self._last = now

    def steps(self, now: float) -> float:
        fade: float = 0.5 ** (max(0.0, now - self._last) / self._half_life)
        return self.INITIAL_STEPS + (self._steps - self.INITIAL_STEPS) * fade


class StepCost:
    """What a step of this engine costs: a least-squares fit of relative errors.

    Steps are kept by size (decode steps, then by powers of four of new tokens), and each size forgets only by its own
    steps: a thousand decode steps leave what one long prefill taught. The five coefficients are at least 0. Beyond
    ``MAX_EXTRAPOLATION`` times what was seen nothing is believed: ``covers`` says so for the tokens in a step, and the
    growth with context ends there.
    """

    MAX_EXTRAPOLATION = 4
    MIN_PREFILLS = 3  # steps with new tokens until the fit is used; the first ones of an engine compile kernels
    FEATURE_SCALE = (1.0, 1e-3, 1e-7, 1e-2, 1.0)  # brings the features near 1
    WEIGHT_DECAY = 15 / 16  # of a size's weight at its next step: the last 16 decide

    def __init__(self) -> None:
        # size -> normal equations, [5, 6] row by row, the right side last: as floats, since numpy takes ten times as
        # long for so few, and longer still in a thread that comes back from a wait
        self._equations: dict[int, list[float]] = {}
        self._clips: dict[int, Clip] = {}
        self._costs = [0.0] * 5
        self.coefficients = [0.0] * 5  # seconds a step, a token, a pair, a decode, and a step with new tokens besides
        self._since_fit, self.fit_due = 0, False
        self._widest = self._deepest = 0.0
        self.prefills = 0
        self.error = Error()

    @property
    def known(self) -> bool:
        return self.prefills >= self.MIN_PREFILLS

    def covers(self, tokens: int) -> bool:
        """Whether steps about as large as ``tokens`` have been seen."""
        return self.known and tokens <= self.MAX_EXTRAPOLATION * self._widest

    def observe(self, seconds: float, work: Iterable[tuple[int, int]], decodes: int) -> None:
        """work: (new tokens, tokens before them) of each request in the step that is not decoding."""
        if self.fit_due:
            self.fit()
        tokens, pairs = 0, 0.0
        for new, before in work:
            tokens += new
            pairs += new * before + new * new / 2
            self._deepest = max(self._deepest, float(before + new))
        features = 1.0, tokens, pairs, decodes, float(tokens > 0)
        x = [value * scale for value, scale in zip(features, self.FEATURE_SCALE, strict=True)]
        size = 1 + (tokens.bit_length() - 1) // 2 if tokens else 0
        equations, clip = self._equations.setdefault(size, [0.0] * 30), self._clips.setdefault(size, Clip())
        expected = seconds
        if self.known and equations[0]:
            predicted = sum(cost * value for cost, value in zip(self._costs, x, strict=True))
            if predicted > 0:
                if tokens:
                    self.error.add(seconds, predicted)
                expected, seconds = predicted, clip(seconds / predicted) * predicted
        if clip.changing and tokens:  # the engine's pace has changed: what other sizes taught is old too
            for other in self._equations.values():
                other[:] = [value * 0.75 for value in other]
        x = [value / expected for value in x]
        decay = 0.5 if clip.changing else self.WEIGHT_DECAY
        products = itertools.product(x, [*x, seconds / expected])
        equations[:] = [old * decay + a * b for old, (a, b) in zip(equations, products, strict=True)]
        if tokens:
            self.prefills += 1
            self._widest = max(float(tokens), self._widest * 0.999)
            self._deepest *= 0.9999
        self._since_fit += 1
        self.fit_due |= self._since_fit >= (16 if not tokens else 4 if self.prefills > 16 else 1)

    def fit(self) -> None:
        """What was observed, before the coefficients are used: an idle engine has the time for it, and the output of
        the step that was observed has not."""
        self._since_fit, self.fit_due = 0, False
        self._costs = _least_squares(np.sum(list(self._equations.values()), axis=0).reshape(5, 6)).tolist()
        self.coefficients = [cost * scale for cost, scale in zip(self._costs, self.FEATURE_SCALE, strict=True)]

    def prefill_seconds(self, start: int, end: int, steps: int, decodes: float) -> float:
        """Seconds that tokens [start, end) of one request add, in ``steps`` steps of their own."""
        if self.fit_due:
            self.fit()
        base, token, pair, decode, prompt = self.coefficients
        deep = max(self.MAX_EXTRAPOLATION * self._deepest, start)
        pairs = (min(end, deep) ** 2 - start**2) / 2 + deep * max(0, end - deep)
        return steps * (base + prompt + decode * decodes) + token * (end - start) + pair * pairs


# Added to the diagonal: settles what the observations leave open. Prompts of one length do not tell the cost of their
# tokens from the cost of any prompt: it is the tokens', for the most part.
_REGULARIZATION = np.array((0.001, 0.001, 0.001, 0.001, 0.02))


def _least_squares(equations: np.ndarray) -> np.ndarray:
    """Coefficients >= 0 from normal equations, float64 [5, 6]: the most negative one is dropped until none is."""
    matrix, right = equations[:, :5] + np.diag(_REGULARIZATION * equations.diagonal()), equations[:, 5]
    found = np.zeros(5)
    active = np.flatnonzero(equations.diagonal() > 0)
    while len(active):
        values = np.linalg.solve(matrix[np.ix_(active, active)], right[active])
        if values.min() >= 0:
            found[active] = values
            break
        active = np.delete(active, values.argmin())
    return found
