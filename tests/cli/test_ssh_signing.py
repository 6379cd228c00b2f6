"""Which SSH key signs: the named one, else the one of the invite, from ~/.ssh or ssh-agent."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.cli import ssh_signing
from mesh.util.errors import ExitCode, MeshError


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keys `own` and `other` in ~/.ssh, `agent` in ssh-agent; what ssh-keygen was asked to sign with."""
    signed: list[Any] = []
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    for name in ("other", "own"):
        (tmp_path / ".ssh" / f"{name}.pub").write_text(name)
    (tmp_path / ".ssh" / "binary.pub").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(ssh_signing, "_fingerprint", lambda line: line.strip().encode())

    def run(command: list[str], **how: Any) -> Any:
        if command[0] == "ssh-add":
            return SimpleNamespace(stdout="agent\n")
        file = Path(command[-1])
        signed.append((file.name if file.parent.name == ".ssh" else file.read_text(), command[5], how["input"]))
        return SimpleNamespace(returncode=0, stdout=b"armor")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(ssh_signing, "read_armor", lambda text: text.encode())
    return signed


def test_key_of_the_invite_is_found(keys: list[Any], tmp_path: Path) -> None:
    assert ssh_signing.sign(b"own", None, b"mesh", b"text") == b"armor" and keys == [("own.pub", "mesh", b"text")]
    ssh_signing.sign(b"agent", None, b"mesh", b"text")
    assert keys[1][0] == "agent\n", "ssh-keygen asks ssh-agent for it"
    (tmp_path / "named").write_text("named")
    ssh_signing.sign(b"own", tmp_path / "named", b"mesh", b"text")
    assert keys[2][0] == "named", "the user knows better"


def test_key_that_is_nowhere_is_refused(keys: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_signing, "format_fingerprint", lambda wanted: "SHA256:x")
    with pytest.raises(MeshError, match=r"SHA256:x, which is neither in ~/.ssh nor in ssh-agent") as refused:
        ssh_signing.sign(b"third", None, b"mesh", b"text")
    assert refused.value.code == ExitCode.REFUSED and not keys


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (SimpleNamespace(returncode=1, stdout=b"", stderr=b"bad passphrase\n"), "cannot sign with .*: bad passphrase"),
        (SimpleNamespace(returncode=3, stdout=b"", stderr=b""), "exit code 3"),
        (SimpleNamespace(returncode=0, stdout=b"no armor", stderr=b""), "has made no signature"),
        (FileNotFoundError(), "ssh-keygen is missing: install openssh-client"),
    ],
)
def test_failure_to_sign_says_why(monkeypatch: pytest.MonkeyPatch, ends: Any, words: str) -> None:
    def run(command: list[str], **how: Any) -> Any:
        if isinstance(ends, Exception):
            raise ends
        return ends

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(MeshError, match=words):
        ssh_signing.sign(b"own", Path("/key"), b"mesh", b"text")


@pytest.mark.parametrize("fails", [OSError(), subprocess.TimeoutExpired("ssh-add", 1)])
def test_agent_that_does_not_answer_has_no_keys(
    keys: list[Any], monkeypatch: pytest.MonkeyPatch, fails: Exception
) -> None:
    def run(command: list[str], **how: Any) -> Any:
        raise fails

    monkeypatch.setattr(subprocess, "run", run)
    assert [line for line, _ in ssh_signing._own_keys()] == ["other", "own"]
