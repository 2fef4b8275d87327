"""How long something is, in tokens (or turns): a number, a range or a lognormal, as one word of the command line."""

import argparse
import math
import random
from dataclasses import dataclass

FORMS = "N, N-M (uniform), or lognormal:mean=N,sigma=X[,min=N][,max=N]"
_UNLIMITED = 1 << 20


@dataclass(frozen=True)
class Lengths:
    """Whole numbers within [low, high]; without ``sigma`` all equally likely, else lognormal with this mean.

    What the lognormal draws outside the limits is set to them, so that narrow ones move the mean.
    """

    low: int
    high: int
    mean: float = 0.0
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises argparse.ArgumentTypeError with the forms that there are."""
        try:
            kind, colon, rest = text.partition(":")
            if colon and kind == "lognormal":
                made = cls._lognormal(dict(part.split("=") for part in rest.split(",")))
            else:
                low, _, high = text.partition("-")
                made = cls(int(low), int(high or low))
        except (ValueError, KeyError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no length; give {FORMS}") from error
        if not 0 <= made.low <= made.high or made.sigma < 0:
            raise argparse.ArgumentTypeError(f"{text!r}: 0 <= min <= max and sigma >= 0 are needed")
        return made

    @classmethod
    def _lognormal(cls, parts: dict[str, str]) -> "Lengths":
        mean, sigma = float(parts.pop("mean")), float(parts.pop("sigma"))
        made = cls(int(parts.pop("min", 1)), int(parts.pop("max", _UNLIMITED)), mean, sigma)
        if parts or mean <= 0:
            raise ValueError(parts)
        return made

    def draw(self, rng: random.Random) -> int:
        if not self.mean:
            return rng.randint(self.low, self.high)
        # The mean of a lognormal is exp(mu + sigma^2 / 2).
        drawn = rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(self.high, max(self.low, round(drawn)))

    def __str__(self) -> str:
        if self.mean:
            return f"lognormal:mean={self.mean:g},sigma={self.sigma:g},min={self.low},max={self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"
