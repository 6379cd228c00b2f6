"""Recorded texts of all messages that need no daemon: usage, refusals and next steps.

`python -m tests.cli.test_messages` records them again; review the difference like code.
"""

import errno
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from mesh.cli.main import SECTIONS, cli, debug, job
from mesh.util.errors import ExitCode

FILE = Path(__file__).parent / "messages.txt"
CLICKS = re.compile(  # these texts depend on the version of click
    r"Error: (No such|Missing|Option '|Invalid value for .* is not (a valid|in the range|one of))"
)
LINES = [line for line in FILE.read_text().splitlines() if line.startswith("$ ")]


def met(line: str, state: Path) -> str:
    """Return the output and exit code of `mesh ...` in an empty directory."""
    words = shlex.split(line.removeprefix("$ mesh").replace("STATE", str(state)))
    env = {"COLUMNS": "120", "MESH_STATE": str(state), "NO_COLOR": "1"}
    done = CliRunner().invoke(cli, words, prog_name="mesh", env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), (line, done.exception)
    said = [
        f"! {'(in click words)' if CLICKS.match(text) else text}"
        for text in done.stderr.splitlines()
        if text and not text.startswith(("Usage:", "Try "))
    ]
    return "\n".join([line, *done.stdout.splitlines(), *said, f"exit {done.exit_code}"]).replace(str(state), "STATE")


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    blocks = FILE.read_text().strip().split("\n\n")
    return {block.splitlines()[0]: block for block in blocks}


@pytest.mark.parametrize("line", LINES)
def test_message_matches_recorded_text(line: str, expected: dict[str, str], tmp_path: Path) -> None:
    assert met(line, tmp_path / "s") == expected[line]


def test_every_exit_code_is_documented(expected: dict[str, str]) -> None:
    codes = {int(block.rsplit(" ", 1)[1]) for block in expected.values()}
    assert codes <= {int(code) for code in ExitCode}


def test_file_that_cannot_be_read_is_named_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    said = met(f"$ mesh join --file {tmp_path / 'binary'}", tmp_path / "s")
    assert "! mesh: a file is not text in UTF-8" in said and said.endswith("exit 2")
    (tmp_path / "s" / "config.toml").mkdir(parents=True)
    said = met("$ mesh config ls", tmp_path / "s")
    assert "STATE/config.toml cannot be read: Is a directory." in said and said.endswith("exit 1")

    def failing(path: Path) -> bool:
        raise problem

    monkeypatch.setattr(Path, "is_dir", failing)
    for number, text, code in (
        (errno.EACCES, "Permission denied. Run this as", 5),
        (errno.EIO, "Input/output error.", 1),
    ):
        problem = OSError(number, os.strerror(number), str(tmp_path / "s"))
        for line in ("killall", "debug dump"):
            said = met(f"$ mesh {line}", tmp_path / "s")
            assert f"! mesh: STATE: {text}" in said and said.endswith(f"exit {code}")


def test_full_disk_under_the_output_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mesh.cli", "--state", str(tmp_path), "config", "ls"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("mesh: a file cannot be used: No space left on device.")
    assert "Traceback" not in done.stderr


def names() -> list[str]:
    groups = {"": SECTIONS, "job ": job.sections, "debug ": debug.sections}
    return [group + name for group, sections in groups.items() for rows in sections.values() for name, _, _ in rows]


@pytest.mark.parametrize("name", names())
def test_each_command_refuses_unknown_options_and_has_help(name: str, tmp_path: Path) -> None:
    code = 125 if name == "run" else 2
    assert met(f"$ mesh {name} --no-such-option", tmp_path).endswith(f"! (in click words)\nexit {code}")
    assert met(f"$ mesh {name} --help", tmp_path).endswith("exit 0")


def test_help_overview_fits_on_a_screen() -> None:
    done = CliRunner().invoke(cli, ["--help"], prog_name="mesh", env={"COLUMNS": "80"})
    lines = done.output.splitlines()
    assert len(lines) <= 43 and max(map(len, lines)) <= 80
    assert sum(len(rows) for rows in SECTIONS.values()) <= 33


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        FILE.write_text("\n\n".join(met(line, Path(empty) / "s") for line in LINES) + "\n")
