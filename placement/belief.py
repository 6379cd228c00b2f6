"""How far a model of many factors is to be believed, now and for long: learnt from how its forecasts have come out."""

from math import exp, expm1, log, log1p

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


# Theta before any data: on both traces the best is 0.1 to 0.35. It is worth about 400 forecasts; ours.
THETA, THETA_PRIOR = 0.25, 40.0
LEAST_THETA, MOST_THETA = 1e-3, 2


class Frailty:
    """How much nodes differ from what their factors say: theta in S = (1 + theta H)^(-1/theta), by Newton steps.

    Of a Gamma frailty (Vaupel et al. 1979) of that variance. 0: a hazard H is all there is to know, and S = exp(-H).
    """

    __slots__ = ("information", "others", "own", "theta")

    def __init__(self) -> None:
        self.own = self.theta = THETA
        self.information = THETA_PRIOR
        self.others = (0.0, 0.0)

    def stays(self, hazard: float) -> float:
        return exp(-log1p(self.theta * hazard) / self.theta)

    def learn(self, hazard: float, stayed: bool) -> None:
        """A forecast of this hazard has come out so."""
        if not 1e-9 < hazard < 1e9:  # such a forecast says nothing of theta
            return
        theta = self.theta
        slope = log1p(theta * hazard) / theta**2 - hazard / (theta * (1 + theta * hazard))  # of log S
        left = -expm1(-log1p(theta * hazard) / theta)
        odds = (1 - left) / left
        self.information = min(MOST, self.information + slope * slope * odds)
        step = (slope if stayed else -slope * odds) / self.information
        self.own = min(MOST_THETA, max(LEAST_THETA, self.own + step))
        self._pool()

    def adopt(self, information: float, theta: float) -> None:
        """What other nodes have come to, with so much information."""
        self.others = (information, theta)
        self._pool()

    def _pool(self) -> None:
        weight, theta = self.others
        self.theta = (self.information * self.own + weight * theta) / (self.information + weight)
