"""Every message that a user can meet without a daemon, as it stands: usage, refusals, and what to do next.

`python -m tests.cli.test_messages` writes them anew; the difference is to be read like code.
"""

import re
import shlex
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from mesh.api.errors import ExitCode
from mesh.cli.main import SECTIONS, cli

FILE = Path(__file__).parent / "messages.txt"
CLICKS = re.compile(  # they are another with another version of it
    r"Error: (No such|Missing|Option '|Invalid value for .* is not (a valid|in the range|one of))"
)
LINES = [line for line in FILE.read_text().splitlines() if line.startswith("$ ")]


def met(line: str, state: Path) -> str:
    """What `mesh ...` says, and its exit code, in a directory in which nothing is."""
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
def test_a_message_is_as_it_stands(line: str, expected: dict[str, str], tmp_path: Path) -> None:
    assert met(line, tmp_path / "s") == expected[line]


def test_every_exit_code_is_a_documented_one(expected: dict[str, str]) -> None:
    codes = {int(block.rsplit(" ", 1)[1]) for block in expected.values()}
    assert codes <= {int(code) for code in ExitCode}


@pytest.mark.parametrize("name", [name for rows in SECTIONS.values() for name, _, _ in rows])
def test_each_command_refuses_what_it_does_not_know_and_has_help(name: str, tmp_path: Path) -> None:
    assert met(f"$ mesh {name} --no-such-option", tmp_path).endswith("! (in click words)\nexit 2")
    assert met(f"$ mesh {name} --help", tmp_path).endswith("exit 0")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        FILE.write_text("\n\n".join(met(line, Path(empty) / "s") for line in LINES) + "\n")
