"""Two numbers that calibrate the survival estimate, learnt on line from the outcomes of its own forecasts."""

from math import exp, expm1, log, log1p

# Kappa before any data, and the Fisher information of that prior. Both traces reach 1 soon from any start; on machines without
# a pattern a low start saves 5 per cent of the log-loss.
KAPPA, KAPPA_PRIOR = 0.6, 5.0
# Theta before any data: the best value on both traces is 0.1 to 0.35. The prior is worth about 400 forecasts (own choice).
THETA, THETA_PRIOR = 0.25, 40.0
LEAST_THETA, MOST_THETA = 1e-3, 2.0
MOST_INFORMATION = 500.0  # above it, old outcomes are forgotten (own choice)


class Parameter:
    """A number learnt by Newton steps. `value` pools `own` with the values of other nodes, weighted by Fisher information."""

    __slots__ = ("information", "least", "most", "others", "own", "value")

    def __init__(self, value: float, information: float, least: float, most: float) -> None:
        self.own = self.value = value
        self.information, self.least, self.most = information, least, most
        self.others = (0.0, 0.0)

    def adopt(self, information: float, value: float) -> None:
        """Pool the value that other nodes have learnt from outcomes worth this information."""
        self.others = (information, value)
        self._pool()

    def step(self, score: float, information: float) -> None:
        """Take a Newton step; both arguments are those of one outcome's likelihood."""
        self.information = min(MOST_INFORMATION, self.information + information)
        self.own = min(self.most, max(self.least, self.own + score / self.information))
        self._pool()

    def _pool(self) -> None:
        weight, value = self.others
        self.value = (self.information * self.own + weight * value) / (self.information + weight)


class Slope(Parameter):
    """The calibration slope kappa (Cox 1958) in lambda = mean^(1 - kappa) product^kappa.

    Each step uses the product as it was before the outcome, so factors that only fit noise lower kappa.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(KAPPA, KAPPA_PRIOR, 0.0, 1.0)

    def learn(self, events: float, hours: float, mean: float, product: float) -> None:
        """Learn from the departures in these hours; `mean` and `product` are rates an hour."""
        logarithm = log(product / mean)
        expected = mean * exp(self.value * logarithm) * hours
        self.step((events - expected) * logarithm, expected * logarithm * logarithm)


class Frailty(Parameter):
    """The variance theta in S = (1 + theta H)^(-1/theta): a Gamma frailty (Vaupel et al. 1979). At 0, S = exp(-H)."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(THETA, THETA_PRIOR, LEAST_THETA, MOST_THETA)

    def survival(self, hazard: float) -> float:
        return exp(-log1p(self.value * hazard) / self.value)

    def learn(self, hazard: float, stayed: bool) -> None:
        """Learn from the outcome of a forecast with this integrated hazard."""
        if not 1e-9 < hazard < 1e9:  # such a forecast has no information about theta
            return
        theta = self.value
        slope = log1p(theta * hazard) / theta**2 - hazard / (theta * (1 + theta * hazard))  # of log S
        left = -expm1(-log1p(theta * hazard) / theta)
        odds = (1 - left) / left
        self.step(slope if stayed else -slope * odds, slope * slope * odds)
