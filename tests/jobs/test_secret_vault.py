"""The user's secrets at rest: sealed to this node, bounded, and never mistaken for each other."""

from pathlib import Path

import pytest

from membership.identity import Identity
from mesh.jobs import secret_vault
from mesh.jobs.secret_vault import SecretVault
from mesh.model.secrets import MOST_VALUE_BYTES, SecretError

ME = Identity.generate()


def test_secret_is_kept_sealed_and_read_again(tmp_path: Path) -> None:
    vault = SecretVault(tmp_path / "secrets", ME)
    assert vault.all() == []
    assert not vault.set("KEY", b"canary\n") and not vault.set("BLOB", b"\0\xff")
    assert [kept.name for kept in vault.all()] == ["BLOB", "KEY"]
    assert all(b"canary" not in path.read_bytes() for path in (tmp_path / "secrets").iterdir())
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0
    again = SecretVault(tmp_path / "secrets", ME)
    assert again.values([("KEY", "KEY"), ("BLOB", "/run/secrets/blob")]) == [b"canary\n", b"\0\xff"]
    assert vault.set("KEY", b"new") and vault.values([("KEY", "K")]) == [b"new"]
    assert vault.remove("KEY") and not vault.remove("KEY")
    with pytest.raises(SecretError, match="`mesh secret set KEY`"):
        vault.values([("KEY", "KEY")])


def test_binary_secret_is_no_variable(tmp_path: Path) -> None:
    vault = SecretVault(tmp_path, ME)
    for value in (b"\xff", b"a\0b"):
        vault.set("BLOB", value)
        with pytest.raises(SecretError, match="write BLOB:/run/secrets/FILE"):
            vault.values([("BLOB", "BLOB")])


def test_another_node_and_a_renamed_file_give_nothing(tmp_path: Path) -> None:
    vault = SecretVault(tmp_path, ME)
    vault.set("KEY", b"value")
    with pytest.raises(SecretError, match="cannot be read"):
        SecretVault(tmp_path, Identity.generate()).values([("KEY", "KEY")])
    (tmp_path / "KEY").rename(tmp_path / "OTHER")
    with pytest.raises(SecretError, match="that of another one"):
        vault.values([("OTHER", "OTHER")])


def test_vault_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_vault, "MOST_KEPT", 2)
    vault = SecretVault(tmp_path, ME)
    vault.set("A", bytes(MOST_VALUE_BYTES))
    vault.set("B", b"b")
    for name, value in [("C", b"c"), ("A", bytes(MOST_VALUE_BYTES + 1)), ("A", b""), ("../x", b"x"), ("a.new", b"x")]:
        with pytest.raises(SecretError):
            vault.set(name, value)
    vault.set("A", b"a")
    assert {path.name for path in tmp_path.iterdir()} == {"A", "B"}


@pytest.mark.parametrize("name", ["../KEY", "", ".", "a.new", "a/b", "1KEY", "KEY\n", "x" * 65])
def test_name_is_not_a_path(tmp_path: Path, name: str) -> None:
    vault = SecretVault(tmp_path / "secrets", ME)
    vault.set("KEPT", b"value")
    (tmp_path / "KEY").write_text("another file")
    (tmp_path / "secrets" / "KEPT.new").write_text("left by a write that was cut off")
    for act in (lambda: vault.set(name, b"value"), lambda: vault.remove(name)):
        with pytest.raises(SecretError, match="a secret is named with"):
            act()
    assert (tmp_path / "KEY").read_text() == "another file" and [kept.name for kept in vault.all()] == ["KEPT"]
