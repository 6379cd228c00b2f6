"""How far a model of many factors is to be believed: learnt from how its forecasts have come out."""

from math import exp, log

# Kappa before any data, and the Fisher information that is worth; past MOST the old is forgotten. Both traces come to 1
# soon from wherever it begins; on machines without any pattern a low beginning saves 5 per cent of the log-loss.
KAPPA, PRIOR, MOST = 0.6, 5.0, 500.0


class Belief:
    """How far the factors are to be believed: kappa in lambda = mean^(1 - kappa) product^kappa, by Newton steps.

    Each step uses what the product said beforehand, so factors that only fit noise are soon not believed.
    """

    __slots__ = ("information", "kappa", "others", "own")

    def __init__(self) -> None:
        self.own = self.kappa = KAPPA
        self.information = PRIOR
        self.others = (0.0, 0.0)

    def learn(self, events: float, hours: float, mean: float, product: float) -> None:
        """So many departures in these hours, of which the mean and the product expect so many an hour."""
        logarithm = log(product / mean)
        expected = mean * exp(self.kappa * logarithm) * hours
        self.information = min(MOST, self.information + expected * logarithm * logarithm)
        self.own = min(1.0, max(0.0, self.own + (events - expected) * logarithm / self.information))
        self._pool()

    def adopt(self, information: float, kappa: float) -> None:
        """What other nodes have come to, with so much information."""
        self.others = (information, kappa)
        self._pool()

    def _pool(self) -> None:
        weight, kappa = self.others
        self.kappa = (self.information * self.own + weight * kappa) / (self.information + weight)
