"""Parsing of durations, sizes, arrays and deadlines; tables; progress messages; the clean-up after signals."""

import subprocess
import sys
import threading
import time
from contextlib import redirect_stdout
from io import BufferedWriter, RawIOBase, StringIO, TextIOWrapper
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli import listing, output, progress
from mesh.cli.output import table
from mesh.cli.progress import waiting_for
from mesh.cli.terminal import ARRAY, DEADLINE, SIZE, ago, job_path
from mesh.util.duration import DurationError, duration_words, lasting, parse_duration
from mesh.util.errors import MeshError
from mesh.util.size import SizeError, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("30s", 30), ("2m", 120), ("1.5h", 5400), ("1d", 86_400), ("0", 0), ("1h30m", 5400), ("1d2s", 86_402)],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.text(max_size=12))
def test_duration_parser_returns_seconds_or_raises_with_example(text: str) -> None:
    try:
        assert 0 <= parse_duration(text) < 1e9
    except ValueError as error:
        assert "30s" in str(error)


@pytest.mark.parametrize("text", ["30m1h", "1m1m", "m", "", "-1s", "1 h", "٣s", "nan", "inf", "9" * 400, "2m30"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("columns", ["40", "60", "200"])
def test_whole_table_wraps_without_losing_words(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = "met; the definition differs: the paper counts loss alone"
    table(["CLAIM", "VERDICT"], [["overhead", words]], whole=True)
    _, *lines = capsys.readouterr().out.splitlines()
    assert " ".join(line.removeprefix("overhead").strip() for line in lines) == words
    assert all(len(line) <= int(columns) for line in lines)


@given(st.integers(0, 10**10 - 1))
def test_formatted_duration_round_trips(tenths: int) -> None:
    assert parse_duration(duration_words(tenths / 10)) == pytest.approx(tenths / 10)


@pytest.mark.parametrize(
    ("text", "mebibytes"), [("512", 512), ("512m", 512), ("6g", 6144), ("6GiB", 6144), ("1.5gb", 1536), ("1t", 1 << 20)]
)
def test_sizes_are_parsed(text: str, mebibytes: int) -> None:
    assert SIZE.convert(text, None, None) == mebibytes


@given(st.text(max_size=12))
def test_size_parser_returns_mebibytes_or_raises_with_example(text: str) -> None:
    try:
        assert 0 <= SIZE.convert(text, None, None) < 2**31
    except click.BadParameter as error:
        assert "6g" in str(error)


@pytest.mark.parametrize(
    ("text", "indices", "limit"),
    [("1-4%2", (1, 2, 3, 4), 2), ("0-30:10", (0, 10, 20, 30), 0), ("7", (7,), 0), ("1,3-4,3%9", (1, 3, 4), 9)],
)
def test_arrays_are_parsed(text: str, indices: tuple[int, ...], limit: int) -> None:
    assert ARRAY.convert(text, None, None) == (indices, limit)


@given(st.text(max_size=12) | st.text("0123456789-:,%", max_size=12))
def test_array_parser_returns_indices_or_raises(text: str) -> None:
    try:
        indices, limit = ARRAY.convert(text, None, None)
        assert 1 <= len(indices) <= 100_000 and len(set(indices)) == len(indices) and limit >= 0
    except click.BadParameter as error:
        assert any(word in str(error) for word in ("not an array", "indices", "a step of 0"))


def test_a_deadline_is_a_duration_or_a_date() -> None:
    assert DEADLINE.convert("2h", None, None) == pytest.approx(time.time() + 7200, abs=5)
    assert time.localtime(DEADLINE.convert("2030-02-03 04:05", None, None))[:5] == (2030, 2, 3, 4, 5)
    assert time.localtime(DEADLINE.convert("2030-12-31", None, None))[:5] == (2031, 1, 1, 0, 0), "the end of the day"
    with pytest.raises(click.BadParameter, match="neither"):
        DEADLINE.convert("tomorrow", None, None)


@given(st.text(max_size=30))
def test_job_name_is_escaped_in_url_path(text: str) -> None:
    try:
        path = job_path(text)
    except MeshError:
        assert not text.strip()
        return
    assert path.startswith("/v1/jobs/") and "/" not in path.removeprefix("/v1/jobs/") and "?" not in path


def test_table_is_as_wide_as_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    table(["JOB", "COMMAND"], [["a", "x" * 100], ["long-name", "y"]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("a          xxx") and lines[1].endswith("…") and max(map(len, lines)) == 30
    assert lines[2] == "long-name  y"


@pytest.mark.parametrize(
    ("columns", "left"), [("200", "JOB USER MOVES COMMAND"), ("30", "JOB USER COMMAND"), ("24", "JOB COMMAND")]
)
def test_table_drops_columns_on_narrow_terminal(
    columns: str, left: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table(["JOB", "USER", "MOVES", "COMMAND"], [["7kq2abcd", "ada", "0", "python3 train.py"]], spare=["MOVES", "USER"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == left.split() and all(len(line) <= int(columns) for line in lines)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ("80", "abcd  april-17  failed  python train.py --config base.yaml --lr 0.7  exit 3"),
        ("55", "abcd  april-17  failed  python trai…ml --lr 0.7  exit 3"),
        ("44", "abcd  april-17  python tr…l --lr 0.7  exit 3"),
    ],
)
def test_commands_of_one_sweep_differ_however_narrow_the_terminal(
    columns: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    row = ["abcd", "april-17", "failed", "python train.py --config base.yaml --lr 0.7", "exit 3"]
    header = ["JOB", "NAME", "STATE", "COMMAND", "DETAIL"]
    table(header, [row], spare=["STATE", "COMMAND"], cut={"COMMAND": 20, "NAME": 20})
    assert capsys.readouterr().out.splitlines()[1] == line


@pytest.mark.parametrize(
    ("columns", "line"),
    [("26", "abcd  0123456789  endings."), ("25", "abcd  0123…6789  endings."), ("24", "abcd  012…6789  endings.")],
)
def test_name_is_cut_by_no_more_than_the_terminal_lacks(
    columns: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table(["JOB", "NAME", "DETAIL"], [["abcd", "0123456789", "endings."]], cut={"NAME": 4})
    assert capsys.readouterr().out.splitlines()[1] == line


def test_table_is_not_truncated_without_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda fd: (_ for _ in ()).throw(OSError("no terminal")))
    table(["JOB", "COMMAND"], [["a", "x" * 300]], spare=["JOB"])
    assert capsys.readouterr().out.splitlines()[1] == "a    " + "x" * 300


@given(st.text(max_size=40))
def test_hostile_names_print_no_control_characters(name: str) -> None:
    with redirect_stdout(StringIO()) as shown:
        table(["NODE", "USER"], [[name, "ada"], ["desk\x1b[2J", name]])
    lines = shown.getvalue().split("\n")
    assert len(lines) == 4 and all(line.isprintable() for line in lines)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_state", "'/x/my node'")


@pytest.mark.usefixtures("named")
def test_suggested_commands_are_about_the_node_that_the_user_has_named(capsys: pytest.CaptureFixture[str]) -> None:
    output.say("not lending: `mesh down && mesh up`, or `mesh --state DIR up`")
    output.say("waiting for desk (`mesh up` there): see `mesh status`")
    table(["JOB", "WHY"], [["`mesh ps`", "see `mesh logs a`"]])
    table(["JOB", "COMMAND"], [["a", "sh -c 'echo `mesh ps`'"]])
    output.quote_line("command  sh -c 'echo `mesh ps`'")
    assert capsys.readouterr().out.splitlines() == [
        "not lending: `mesh --state '/x/my node' down && mesh --state '/x/my node' up`, or `mesh --state DIR up`",
        "waiting for desk (`mesh up` there): see `mesh --state '/x/my node' status`",
        "JOB        WHY",
        "`mesh ps`  see `mesh --state '/x/my node' logs a`",
        "JOB  COMMAND",
        "a    sh -c 'echo `mesh ps`'",
        "command  sh -c 'echo `mesh ps`'",
    ]


def test_ages_are_formatted_briefly() -> None:
    now = time.time() * 1000
    assert [ago(now - s * 1000) for s in (5, 65, 3700, 90_000)] == ["5s", "1m5s", "1h1m", "1d1h"]
    assert [lasting(s) for s in (0, 59.9, 60, 3600, 3659, 86_400, 30 * 86_400)] == [
        "0s",
        "59s",
        "1m",
        "1h",
        "1h",
        "1d",
        "30d",
    ]


def test_progress_reports_slow_operations_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with waiting_for("waiting"):
        pass
    assert capsys.readouterr().err == ""
    with waiting_for("waiting for the other side"):
        deadline = time.monotonic() + 20
        heard = ""
        while not heard and time.monotonic() < deadline:
            time.sleep(0.05)
            heard = capsys.readouterr().err
    assert heard.startswith("mesh: waiting for the other side ... 2 s")


def test_progress_is_reported_when_it_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    texts, read = iter(["", "one", "one", "", "two"]), threading.Event()

    def next_text() -> str:
        try:
            return next(texts)
        except StopIteration:
            read.set()
            return "two"

    assert progress.active == 0
    with progress.progress(next_text, every_s=0.001, first_s=0.001):
        assert progress.active == 1 and read.wait(20)
    assert progress.active == 0
    assert capsys.readouterr().err == "mesh: one\nmesh: two\n"


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("sent 1.0 of 2.0 MiB", 12),
        ("sent 0 of 2.0 MiB", 0),
        ("sent 3 of 2 bytes", 24),
        ("sent 0 of 0 bytes", None),
        ("waits", None),
    ],
)
def test_progress_has_a_bar_on_terminals(
    text: str, full: int | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress.report(text)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress.report(text)
    bar = "" if full is None else f"[{'#' * full}{'.' * (24 - full)}] "
    assert capsys.readouterr().err == f"mesh: {text}\nmesh: {bar}{text}\n"


class Raw(RawIOBase):
    """A file that shows what has reached it."""

    def __init__(self, tty: bool = False) -> None:
        self.got, self._tty = b"", tty

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._tty

    def write(self, data: Any) -> int:
        self.got += bytes(data)
        return len(data)


@pytest.mark.parametrize("err", [False, True])
def test_output_of_a_job_arrives_at_once(err: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, name = Raw(), "stderr" if err else "stdout"
    monkeypatch.setattr(sys, name, TextIOWrapper(BufferedWriter(raw)))
    out = output.Output(err=err)
    out.write(b"50 %\r\x1b[31m")
    assert raw.got == b"50 %\r\x1b[31m", "a pipe gets the bytes of the job"
    raw = Raw(tty=True)
    monkeypatch.setattr(sys, name, TextIOWrapper(BufferedWriter(raw)))
    out = output.Output(err=err)
    out.write(b"\x1b[31mred\xc3")
    assert raw.got == b"\x1b[31mred"
    out.close()
    assert raw.got.startswith("\x1b[31mred\ufffd".encode()) and raw.got.endswith(b"\x1b[m")


def test_watched_page_arrives_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for tty in (False, True):
        raw, seen = Raw(tty), []

        def sleep(seconds: float, raw: Raw = raw, seen: list[bytes] = seen) -> None:
            seen.append(raw.got)
            if len(seen) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(sys, "stdout", TextIOWrapper(BufferedWriter(raw)))
        monkeypatch.setattr(listing.time, "sleep", sleep)
        with pytest.raises(KeyboardInterrupt):
            listing.show_answer(lambda: {}, lambda answer: output.say("page"), watch=True, as_json=False)
        page = b"\x1b[H\x1b[Jpage\n" if tty else b"page\n"
        assert seen == ([page, page + page] if tty else [page, page])


CLEANED_UP = """
import signal
from mesh.cli.signals import cleaned_up

def clean_up():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)
    print("clean")

with cleaned_up() as cleanup:
    cleanup.callback(clean_up)
    signal.raise_signal(signal.SIG)
    print("went on")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_end_a_command_but_not_its_clean_up(name: str) -> None:
    program = CLEANED_UP.replace("signal.SIG)", f"signal.{name})")
    command = ["env", "--default-signal=INT,TERM,HUP", sys.executable, "-c", program]  # the test run may ignore them
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "clean\n" and done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_clean_up_leaves_a_hangup_that_nohup_ignores() -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    program = ignoring + CLEANED_UP.replace("signal.SIG)", "signal.SIGHUP)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "went on\nclean\n" and done.returncode == 0


def test_long_name_is_cut_on_terminals_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [["a", "n" * 60, "true"]]
    for columns, shown in (("100", "n" * 60), ("20", "nnnn…nnnnn"), (None, "n" * 60)):
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        else:
            monkeypatch.delenv("COLUMNS")
            monkeypatch.setattr("os.get_terminal_size", lambda fd: (_ for _ in ()).throw(OSError("no terminal")))
        table(["JOB", "NAME", "COMMAND"], rows, cut={"NAME": 10, "COMMAND": 2})
        assert capsys.readouterr().out.splitlines()[1].split() == ["a", shown, "true"]


def test_units_of_durations_and_sizes() -> None:
    assert [duration_words(seconds) for seconds in (0, 0.04, 0.06, 59.96, 3600, 90_061.5, -1)] == [
        "0s",
        "0s",
        "0.1s",
        "1m",
        "1h",
        "1d1h1m1.5s",
        "0s",
    ]
    assert parse_duration("2d") == 172_800 and parse_duration("1e3") == 1000
    assert [lasting(seconds) for seconds in (61, 7260, 90_000, -5)] == ["1m1s", "2h1m", "1d1h", "0s"]
    for text in ("1e9", "1000000000", "1m30", "1h1h"):
        with pytest.raises(DurationError):
            parse_duration(text)
    assert [parse_size(text) for text in ("0", "1", "1mb", "2TB", "0.5g")] == [0, 1, 1, 2 << 20, 512]
    for text in ("2048t", "-1", "inf", "1k", "g", "", "1e400"):
        with pytest.raises(SizeError, match="is not a size"):
            parse_size(text)
