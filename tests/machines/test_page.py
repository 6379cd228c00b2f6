"""The page of `make test-machines` says what failed, and never "yes" for what did not run."""

from pathlib import Path

import pytest

from tests.machines import __main__ as suite
from tests.machines.checks import CONTAINERS, CORE, PROCESSES, ROOTLESS, _ended
from tests.machines.machine import Failed
from tests.machines.page import page

REPORT = """<testsuites><testsuite><testcase name="a[docker]"/><testcase name="b"><failure message="no | group"/></testcase>
<testcase name="c"><skipped message="tier docker: no engine"/></testcase></testsuite></testsuites>"""


def test_each_aspect_has_a_test_for_each_kind_of_engine() -> None:
    assert set(CONTAINERS) == set(ROOTLESS) == set(PROCESSES) == set(CORE)


def test_report_names_failures_and_skips() -> None:
    found = _ended(REPORT)
    assert found == {"a[docker]": "ok", "b": "failure: no | group", "c": "skipped: tier docker: no engine"}
    assert _ended("") == {}


def test_page_gives_a_reason_for_each_no() -> None:
    row = {
        "system": "Debian 13",
        "kernel": "6.12",
        "commit": "abc",
        "engine": "process",
        "contract": {"logs": "ok", "kill": "failure: no | group"},
    }
    saved = {"system": "Debian 13", "kernel": "6.12", "by": "Podman 5.4", "saved": "skipped: tier", "commit": "abc"}
    failed = {"trixie": "it does not boot"}
    results = {"engines": [row], "system": [saved], "limits": [], "mesh": [], "failed": failed}
    text = page(results, "2026-01-01", "abc")
    (line,) = [line for line in text.splitlines() if "| process |" in line]
    assert line.count("yes") == 1 and line.count("no (") == 1
    assert line.count("not tried (") == len(CORE) - 2
    assert "| Podman 5.4 | not tried (3) |" in text
    assert "failure: no \\| group" in text and "did not run" in text and "- trixie: it does not boot" in text


def test_page_names_what_failed_and_what_did_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(suite, "PAGE", tmp_path / "page.md")
    tried = suite.Tried()
    with tried.noting("sid"):
        raise Failed("it does not boot")
    with pytest.raises(KeyboardInterrupt), tried.noting("trixie"):
        raise KeyboardInterrupt
    with suite.Tried().noting("a mesh"):
        pass
    text = (tmp_path / "page.md").read_text()
    assert "- sid: it does not boot" in text and "- trixie: this run did not come to its end" in text
    assert "- a mesh" not in text and not suite.Tried().passed()
