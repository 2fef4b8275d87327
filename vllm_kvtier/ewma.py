"""Exponentially weighted moving averages."""


class Ewma:
    """An average in which the latest observation has the weight ``weight``. ``value``: before the first observation,
    the initial guess."""

    __slots__ = ("value", "weight")

    def __init__(self, value: float, weight: float):
        self.value, self.weight = value, weight

    def observe(self, observation: float) -> float:
        """Add an observation. Returns the average."""
        self.value += self.weight * (observation - self.value)
        return self.value
