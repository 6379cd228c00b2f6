"""Questions, answers and scores on traces with known answers; forecasts use no data from after the question."""

import gzip
import json
import sqlite3
import subprocess
import sys
from array import array
from contextlib import closing
from math import exp, log
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.cli.main import cli
from mesh.forecast import tracefiles
from mesh.forecast.baselines import Counts, climatology, constant, hour_of_week
from mesh.forecast.evaluation import (
    BOOSTING,
    CLIMATOLOGY,
    CONSTANT,
    FROZEN,
    OURS,
    WEEKLY,
    cut_at,
    evaluate,
    parts,
)
from mesh.forecast.questions import answer, ask, cut_into_bins
from mesh.forecast.scores import auc, brier, ece, log_loss, reliability
from mesh.forecast.tracefiles import files_of, read_traces
from placement.availability import Trace, TraceError, trace_of_lent
from tests.placement.campuses import DAY_S, campus

forecasts = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=2, max_size=60)


@given(forecasts)
def test_scores_equal_those_of_scikit_learn(pairs: list[tuple[float, bool]]) -> None:
    from sklearn import metrics

    p, stayed = [chance for chance, _ in pairs], [there for _, there in pairs]
    clipped = [min(1 - 1e-6, max(1e-6, chance)) for chance in p]
    assert log_loss(p, stayed) == pytest.approx(metrics.log_loss(stayed, clipped, labels=[False, True]), abs=1e-9)
    assert brier(p, stayed) == pytest.approx(sum((a - b) ** 2 for a, b in pairs) / len(pairs))
    if len(set(stayed)) == 2:
        assert auc(p, stayed) == pytest.approx(metrics.roc_auc_score(stayed, p))
    else:
        assert auc(p, stayed) is None
    assert 0 <= ece(p, stayed) <= 1


def test_calibration_error_uses_ten_bins() -> None:
    assert ece([0.05, 0.05, 0.95, 0.95], [False, False, True, False]) == pytest.approx((2 * 0.05 + 2 * 0.45) / 4)


def test_questions_cover_lent_time_and_later_presence_answers_them() -> None:
    lent = {"a": [(0.0, 4000.0)], "b": [(1000.0, 1150.0), (3000.0, 9000.0)], "c": [(6000.0, 8000.0)]}
    bins = cut_into_bins(trace_of_lent(lent, 0.0, 9000.0))
    assert bins.bins == 30 and bins.runs == (((0, 13),), ((10, 30),), ((20, 26),)), "whole bins only"
    questions = ask(bins, (15, 60), 0.0)
    rows = list(zip(questions.node, questions.bin, questions.stayed[15], questions.stayed[60], strict=True))
    assert rows[:5] == [(0, 0, 1, 1), (0, 3, 1, 0), (0, 6, 1, 0), (0, 9, 1, 0), (0, 12, 0, 0)]
    assert [row[1:] for row in rows if row[0] == 1] == [
        (12, 1, 1),
        (15, 1, 1),
        (18, 1, -1),
        (21, 1, -1),
        (24, 1, -1),
        (27, -1, -1),
    ]
    left = [row[1:] for row in rows if row[0] == 2]
    assert left == [(21, 1, -1), (24, 0, -1)], "within the hour a stay of full length could not be observed"
    assert questions.features["age_h"][0] == pytest.approx(1 / 12)


@settings(max_examples=12)
@given(st.integers(0, 3), st.sampled_from(["lectures", "unlike", "bursts"]))
def test_forecasts_do_not_depend_on_later_data(seed: int, kind: str) -> None:
    """Two traces that differ only after the cut get equal features and forecasts before it."""
    trace, cut = campus(kind, seed, 2, nodes=4), DAY_S
    other = campus(kind, seed + 100, 2, nodes=4)
    changed = {}
    for node, stays in trace.nodes.items():
        before = [(stay.start, min(stay.end, cut)) for stay in stays if stay.start < cut]
        changed[node] = before + [(max(cut + 600, s.start), s.end) for s in other.nodes[node] if s.end > cut + 600]
    twin = trace_of_lent(changed, trace.first, trace.last)
    said = []
    for one in (trace, twin):
        bins = cut_into_bins(one)
        questions = ask(bins, (60,), 0.0)
        given_ = answer(bins, questions, 0.0, float("inf"))[60]
        features = list(zip(*questions.features.values(), strict=True))
        early = [place for place, number in enumerate(questions.bin) if questions.time(number) <= cut]
        said.append([(questions.node[place], given_[place], features[place]) for place in early])
    assert said[0] and said[0] == said[1]


def test_informed_models_beat_climatology_on_a_predictable_trace() -> None:
    outcome = evaluate(campus("unlike", 3, 8, nodes=6), (60,), 0.7)
    scores = {row.model: row for row in outcome.rows()}
    assert set(scores) == {OURS, FROZEN, CLIMATOLOGY, CONSTANT, WEEKLY, BOOSTING} and not outcome.notes[1:]
    assert scores[OURS].log_loss < scores[CLIMATOLOGY].log_loss - 0.05
    assert scores[BOOSTING].log_loss < scores[CLIMATOLOGY].log_loss - 0.05
    assert scores[OURS].auc is not None and scores[OURS].auc > 0.7 and scores[CLIMATOLOGY].auc == 0.5
    assert len({row.n for row in scores.values()}) == 1


def test_constant_model_is_near_optimal_on_a_memoryless_trace() -> None:
    random = Random(5)
    spans: dict[str, list[tuple[float, float]]] = {}
    for node in range(20):
        now, mine = 0.0, []
        while now < 15 * DAY_S:
            length = random.expovariate(0.3 / 3600)
            mine.append((now, now + length))
            now += length + 1800
        spans[f"n{node}"] = mine
    outcome = evaluate(trace_of_lent(spans, 0.0, 15 * DAY_S), (60,), 0.7, boosted=False)
    best = -(exp(-0.3) * -0.3 + (1 - exp(-0.3)) * log(1 - exp(-0.3)))
    scores = {row.model: row.log_loss for row in outcome.rows()}
    assert scores[CONSTANT] == pytest.approx(best, abs=0.03) and scores[OURS] < 1.02 * scores[CONSTANT]


@pytest.mark.parametrize("until", [1.0, 1e12, 1e-9])
def test_cut_without_questions_on_one_side_is_refused(until: float) -> None:
    with pytest.raises(TraceError, match=r"no question for 60 minutes lies (before|after) the cut"):
        evaluate(campus("steady", 1, 1), (60,), until, boosted=False)


def test_too_short_or_too_long_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="shorter than two bins"):
        cut_into_bins(trace_of_lent({"a": []}, 0.0, 300.0))
    with pytest.raises(TraceError, match="too large: 1 nodes"):
        cut_into_bins(Trace(0.0, 1e12, {"a": ()}))


def as_csv(trace: Trace) -> str:
    lines = ["node,start,end,cores,user"]
    for node, stays in trace.nodes.items():
        free = trace.first
        for stay in (*stays, None):
            start = trace.last if stay is None else stay.start
            if start > free:
                lines.append(f"{node},{free:.0f},{start:.0f},1,u")
            free = trace.last if stay is None else stay.end
        lines.append(f"{node},{trace.last:.0f},{trace.last:.0f},1,u")
    return "\n".join(lines)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    (tmp_path / "jobs.csv").write_text(as_csv(campus("unlike", 1, 6)))
    (tmp_path / "spot").mkdir()
    random = Random(1)
    for name in ("a", "b"):
        data = [int(random.random() < 0.9) * 2 for _ in range(1500)]
        (tmp_path / "spot" / f"{name}.json").write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": data}))
    return tmp_path


def test_command_prints_every_model_with_the_documented_fields(traces: Path) -> None:
    common = ["--horizon", "60,240", "--train-until", "0.7", "--json"]
    for trace, kind in (("jobs.csv", "swf-nodes"), ("spot", "spot-json"), ("spot/a.json", "spot-json")):
        done = CliRunner().invoke(
            cli, ["debug", "survive", "eval", "--trace", str(traces / trace), "--format", kind, *common]
        )
        assert done.exit_code == 0, done.output
        rows = json.loads(done.stdout)["rows"]
        assert {row["model"] for row in rows} == {OURS, FROZEN, CLIMATOLOGY, CONSTANT, WEEKLY, BOOSTING}
        for row in rows:
            assert list(row) == ["model", "horizon_min", "n", "log_loss", "brier", "auc", "ece"]
            assert row["horizon_min"] in {60, 240} and row["n"] > 0 and 0 <= row["brier"] <= 1


def test_trace_file_reads_the_same_with_gzip_or_a_byte_order_mark(tmp_path: Path) -> None:
    text = as_csv(campus("steady", 1, 1, nodes=2)).encode()
    found = []
    for name, data in {"a": text, "b": b"\xef\xbb\xbf" + text, "c": gzip.compress(text)}.items():
        (tmp_path / name).write_bytes(data)
        found.append(read_traces([tmp_path / name], "swf-nodes", 0.0))
    assert found[0] == found[1] == found[2]
    for broken in (gzip.compress(text)[:-9], b"\x1f\x8b" + text):
        (tmp_path / "d").write_bytes(broken)
        with pytest.raises(TraceError, match="not a valid gzip file"):
            read_traces([tmp_path / "d"], "swf-nodes", 0.0)


def test_evaluation_reports_its_progress() -> None:
    told: list[str] = []
    evaluate(campus("steady", 1, 3, nodes=2), (60,), 0.7, boosted=False, progress=told.append)
    assert "day 3 of 3 by mesh" in told and "day 1 of 3 by mesh-frozen" in told


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--trace", "nothing", "--format", "swf-nodes"], 4, "nothing: No such file"),
        (["--trace", "jobs.csv", "--format", "spot-json"], 2, "jobs.csv: not a valid availability trace"),
        (["--trace", "jobs.csv", "--format", "fta"], 2, "line 1: 1 columns"),
        (["--trace", "jobs.csv", "--format", "wtmp"], 2, "not a valid wtmp file"),
        (["--trace", "jobs.csv", "--format", "last"], 2, "last -F"),
        (["--trace", "jobs.csv", "--format", "journal"], 2, "not a node's journal"),
        (["--trace", "jobs.csv", "--format", "swf-nodes", "--horizon", "0"], 2, "minutes from 1 to 10080"),
        (["--trace", "jobs.csv", "--format", "swf-nodes", "--horizon", "60,x"], 2, "minutes from 1 to 10080"),
        (["--trace", "jobs.csv", "--format", "swf-nodes", "--train-until", "1"], 2, "lies after the cut"),
        (["--trace", "jobs.csv", "--format", "swf-nodes", "--train-until", "-3"], 2, "x>0"),
        (["--trace", "jobs.csv", "--trace", "jobs.csv", "--format", "swf-nodes"], 2, "have a node 'n0'"),
    ],
)
def test_command_error_names_the_cause(
    traces: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(traces)
    done = CliRunner().invoke(cli, ["debug", "survive", "eval", *arguments])
    assert done.exit_code == code and words in done.output


def test_command_imports_no_numpy_before_it_is_needed() -> None:
    code = "import sys, mesh.cli.survive, mesh.forecast.evaluation; sys.exit('numpy' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_other_models_are_evaluated_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    outcome = evaluate(campus("steady", 2, 3), (60,), 0.7)
    assert BOOSTING not in {row.model for row in outcome.rows()}
    assert "pip install scikit-learn" in outcome.notes[0] and isinstance(outcome.questions.node, array)


def test_departures_are_counted_by_local_hour_of_the_week_before_the_cut() -> None:
    hour = 3600.0
    bins = cut_into_bins(trace_of_lent({"a": [(0.0, 1.5 * hour)], "b": [(0.0, 4 * hour)]}, 0.0, 8 * hour))
    counts = Counts(bins, 3 * hour, 0.0)
    thursday = 3 * 24  # the epoch began on one
    assert [counts.hours[thursday + number] for number in range(4)] == pytest.approx([2, 1.5 + 1 / 12, 1, 0])
    assert [counts.events[thursday + number] for number in range(4)] == [0, 1, 0, 0], "the later one lies after the cut"
    assert counts.hazard == pytest.approx(1.5 / (4.5 + 1 / 12))
    east = Counts(bins, 3 * hour, 2 * hour)
    assert east.hours[thursday + 2] == pytest.approx(2) and east.hours[thursday] == 0
    assert Counts(bins, 0.0, 0.0).hazard == 0.5, "nothing was seen yet"


def test_simple_models_have_their_closed_forms() -> None:
    assert climatology([1, 1, 0]) == pytest.approx(2.5 / 4) and climatology([]) == 0.5
    hour = 3600.0
    bins = cut_into_bins(trace_of_lent({"a": [(0.0, 10 * hour)]}, 0.0, 10 * hour))
    counts = Counts(bins, 4 * hour, 0.0)
    assert constant(counts, 30) == pytest.approx(exp(-counts.hazard / 2))
    questions = ask(bins, (60,), 0.0)
    which = [place for place, number in enumerate(questions.bin) if questions.time(number) == 21_900]
    (chance,) = hour_of_week(counts, questions, which, 60)
    assert chance == pytest.approx(exp(-counts.hazard)), "hours without data have the mean hazard"
    seen = [place for place, number in enumerate(questions.bin) if questions.time(number) == 3900]
    (chance,) = hour_of_week(counts, questions, seen, 60)
    assert chance == pytest.approx(exp(-1 / (1 + 1 / counts.hazard))), "an hour in which nobody left has less"


def test_question_counts_for_one_side_of_the_cut() -> None:
    bins = cut_into_bins(trace_of_lent({"a": [(0.0, 9000.0)]}, 0.0, 9000.0))
    questions = ask(bins, (15,), 0.0)
    cut = questions.time(questions.bin[5])
    train, test = parts(questions, 15, cut)
    assert [questions.time(questions.bin[place]) for place in train][-1] == cut - 900, "its outcome is known at the cut"
    assert test[0] == 5 and len(test) + len(train) == 9, "the last one has no outcome"
    assert cut_at(trace_of_lent({"a": [(0.0, 10.0)]}, 100.0, 200.0), 0.25) == 125.0
    assert cut_at(trace_of_lent({"a": [(0.0, 10.0)]}, 100.0, 200.0), 1) == 200.0
    assert cut_at(trace_of_lent({"a": [(0.0, 10.0)]}, 100.0, 200.0), 150.0) == 150.0


def test_tenths_of_forecasts_are_compared_with_outcomes() -> None:
    rows = reliability([0.0, 0.05, 0.1, 1.0, 0.99], [False, True, True, True, False])
    assert [count for count, _, _ in rows] == [2, 1, 2]
    assert [mean for _, mean, _ in rows] == pytest.approx([0.025, 0.1, 0.995])
    assert [part for _, _, part in rows] == pytest.approx([0.5, 1.0, 0.5])


def test_files_of_a_directory_are_read_in_order_without_those_of_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TraceError, match="has no files"):
        files_of([tmp_path])
    for name in ("b", "a", "a.sqlite-wal", "a.sqlite-shm"):
        (tmp_path / name).write_text("x")
    (tmp_path / "inner").mkdir()
    assert files_of([tmp_path, tmp_path / "b"]) == [tmp_path / "a", tmp_path / "b", tmp_path / "b"]
    monkeypatch.setattr(tracefiles, "LARGEST", 100)
    (tmp_path / "large").write_bytes(b"x" * 101)
    (tmp_path / "packed").write_bytes(gzip.compress(b"x" * 101))
    for name, words in (("large", "larger than"), ("packed", "larger than .* unpacked")):
        with pytest.raises(TraceError, match=f"{name}: {words}"):
            read_traces([tmp_path / name], "fta", 0.0)
    (tmp_path / "broken").write_bytes(gzip.compress(b"x")[:9])
    with pytest.raises(TraceError, match="broken: not a valid gzip file"):
        read_traces([tmp_path / "broken"], "fta", 0.0)


def test_own_journal_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "desk" / "journal.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE stays (start_ms INTEGER, end_ms INTEGER)")
    with pytest.raises(TraceError, match="has no stays yet"):
        read_traces([path], "journal", 0.0)
    with closing(sqlite3.connect(path)) as db, db:
        db.executemany("INSERT INTO stays VALUES (?, ?)", [(1000, 3000), (5000, 4000), (6000, 9500)])
    trace = read_traces([path], "journal", 0.0)
    assert (trace.first, trace.last) == (1.0, 9.5)
    assert [(stay.start, stay.end, stay.ended) for stay in trace.nodes["desk"]] == [(1.0, 3.0, True), (6.0, 9.5, False)]
    path.write_text("no database")
    with pytest.raises(TraceError, match="not a node's journal"):
        read_traces([path], "journal", 0.0)
