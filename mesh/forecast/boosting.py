"""Gradient boosting: scikit-learn's HistGradientBoosting on the same questions, with every feature that the estimate uses.

Feature set and regularisation are the best of six choices on the last fifth of the time before the cut; the model is then fitted
to all of it. scikit-learn's defaults are left out: they over-fit both evaluation traces by 10 per cent or more.
"""

from collections.abc import Sequence
from typing import Any

from mesh.forecast.questions import Questions
from mesh.forecast.scores import log_loss

BASIC = ("age_h", "hour", "weekday", "node")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"max_iter": 150, "learning_rate": 0.05, "max_leaf_nodes": 15, "min_samples_leaf": 100, "l2_regularization": 1.0},
    {"max_iter": 100, "learning_rate": 0.05, "max_leaf_nodes": 8, "min_samples_leaf": 200, "l2_regularization": 10.0},
    {"max_iter": 60, "learning_rate": 0.05, "max_leaf_nodes": 6, "min_samples_leaf": 400, "l2_regularization": 30.0},
)
CHECKED = 0.2  # part of the time before the cut on which the choice is made
SEED = 0


def problem() -> str:
    """Return why it cannot run; an empty text if it can."""
    try:
        import sklearn.ensemble  # noqa: F401
    except ImportError as error:
        return f"scikit-learn cannot be imported ({error}): `pip install scikit-learn`"
    return ""


def boosted(
    questions: Questions, train: Sequence[int], test: Sequence[int], horizon_min: int
) -> tuple[list[float], str]:
    """Return the probabilities for the test questions, and a description of the chosen settings."""
    import numpy as np
    from sklearn.ensemble import HistGradientBoostingClassifier
    from threadpoolctl import threadpool_limits

    stayed = np.asarray(questions.stayed[horizon_min])
    first, last = questions.bin[train[0]], questions.bin[train[-1]]
    border = last - CHECKED * (last - first)
    window = horizon_min * 60 / 300
    early = np.asarray([place for place in train if questions.bin[place] + window <= border], int)
    late = np.asarray([place for place in train if questions.bin[place] > border], int)
    columns = {name: np.asarray(values) for name, values in questions.features.items()}

    def fitted(names: Sequence[str], settings: dict[str, Any], places: Any, asked: Any) -> list[float]:
        table = np.stack([columns[name] for name in names], 1)
        if len(set(stayed[places].tolist())) < 2:  # all outcomes are equal: nothing to learn
            return [float(stayed[places].mean())] * len(asked)
        model = HistGradientBoostingClassifier(random_state=SEED, early_stopping=False, **settings)
        # One thread: several threads wait for each other by spinning, and beside other work take ten times as long.
        with threadpool_limits(1, user_api="openmp"):
            model.fit(table[places], stayed[places])
            return [float(chance) for chance in model.predict_proba(table[asked])[:, 1]]

    choices = [(names, number) for names in (BASIC, tuple(columns)) for number in range(len(SETTINGS))]
    best = choices[-2]
    if len(early) and len(late):
        answers = [bool(value) for value in stayed[late]]
        best = min(choices, key=lambda it: log_loss(fitted(it[0], SETTINGS[it[1]], early, late), answers))
    names, number = best
    words = (
        f"{len(names)} features, {SETTINGS[number]['max_iter']} trees of {SETTINGS[number]['max_leaf_nodes']} leaves"
    )
    return fitted(names, SETTINGS[number], np.asarray(train, int), np.asarray(test, int)), words
