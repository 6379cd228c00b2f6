"""Prometheus's text format, version 0.0.4: a sheet of samples, each of a metric that is declared. Pure.

https://prometheus.io/docs/instrumenting/exposition_formats/. The library that writes it too costs 1.3 MiB and 10 ms in a daemon
(own measurement), for what is forty lines here; the tests read them with that library's parser.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram"]


class Metric(msgspec.Struct, frozen=True):
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


class Histogram:
    """Counts of values by upper bounds, which grow."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last is of what is above all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Sheet:
    """The samples of one scrape. An undeclared metric, or other labels than declared, is a KeyError."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._lines: dict[str, list[str]] = {name: [] for name in self._metrics}

    def put(self, name: str, value: float | None, **labels: str) -> None:
        """One sample; None is what is not known, and is left out."""
        self._check(name, labels)
        if value is not None:
            self._lines[name].append(f"{name}{_labels(labels)} {_number(value)}")

    def put_histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        self._check(name, labels)
        lines, total = self._lines[name], 0
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            total += count
            lines.append(f"{name}_bucket{_labels({**labels, 'le': _number(bound)})} {total}")
        lines += [f"{name}_sum{_labels(labels)} {_number(histogram.sum)}", f"{name}_count{_labels(labels)} {total}"]

    def text(self) -> str:
        parts = []
        for name, lines in self._lines.items():
            metric = self._metrics[name]
            if lines:
                parts += [f"# HELP {name} {_escaped(metric.help)}", f"# TYPE {name} {metric.kind}", *lines]
        return "\n".join(parts) + "\n"

    def _check(self, name: str, labels: Mapping[str, str]) -> None:
        if tuple(labels) != self._metrics[name].labels:
            raise KeyError(f"{name} has the labels {self._metrics[name].labels}, not {tuple(labels)}")


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    quote = '"'
    parts = [f"{key}={quote}{_escaped(value).replace(quote, chr(92) + quote)}{quote}" for key, value in labels.items()]
    return "{" + ",".join(parts) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
