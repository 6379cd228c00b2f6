"""The settings that an owner may write down."""

import os
import stat
from pathlib import Path

import pytest

from mesh.daemon import layout
from mesh.daemon.config import load_settings, parsed_setting
from mesh.daemon.layout import Layout, node_layout
from mesh.model.spec import MIN_LEASE_S
from mesh.util.errors import ConfigError, MeshError


@pytest.mark.parametrize(("text", "mbps"), [("", 0.0), ("upload_mbps = 0", 0.0), ("upload_mbps = 250", 250.0)])
def test_upload_budget_is_read(tmp_path: Path, text: str, mbps: float) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert load_settings(tmp_path / "config.toml", {}).upload_mbps == mbps


@pytest.mark.parametrize(
    ("text", "allowed"), [("", True), ("gpu_sharing = true", True), ("gpu_sharing = false", False)]
)
def test_an_owner_may_lend_whole_gpus_only(tmp_path: Path, text: str, allowed: bool) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert load_settings(tmp_path / "config.toml", {}).gpu_sharing is allowed
    (tmp_path / "config.toml").write_text("gpu_sharing = 1")
    with pytest.raises(ConfigError, match="gpu_sharing"):
        load_settings(tmp_path / "config.toml", {})


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "true", "'fast'"])
def test_invalid_upload_budgets_are_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.toml").write_text(f"upload_mbps = {value}")
    with pytest.raises(ConfigError, match="upload_mbps"):
        load_settings(tmp_path / "config.toml", {})


@pytest.mark.parametrize("key", ["lease_s", "grace_s"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "-inf", "86400.5"])
def test_times_that_no_job_may_have_are_refused(tmp_path: Path, key: str, value: str) -> None:
    (tmp_path / "config.toml").write_text(f"{key} = {value}")
    with pytest.raises(ConfigError, match=f"{key} must be .* seconds"):
        load_settings(tmp_path / "config.toml", {})


def test_bounds_of_times_are_those_of_jobs(tmp_path: Path) -> None:
    for text in ("lease_s = 0", "lease_s = 0.05"):
        (tmp_path / "config.toml").write_text(text)
        with pytest.raises(ConfigError, match="lease_s must be"):
            load_settings(tmp_path / "config.toml", {})
    (tmp_path / "config.toml").write_text(f"lease_s = {MIN_LEASE_S}\ngrace_s = 0")
    assert load_settings(tmp_path / "config.toml", {}).grace_s == 0


@pytest.mark.parametrize("word", ["null", "NULL"])
def test_no_word_stands_for_an_unset_number(word: str) -> None:
    with pytest.raises(ConfigError, match="store_quota_gib"):
        parsed_setting("store_quota_gib", [word])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("slots = 'many'", "config.toml, line 1: slots is a whole number, not 'many'"),
        ("lend = true\n\nslots = 99999", "config.toml, line 3: slots must be 0 to 1024"),
        ("# slots\nslot = 1", "config.toml, line 2: there is no setting 'slot': did you mean 'slots'?"),
        ("join = 'desk'", 'line 1: join is a list of texts, as \\["a", "b"\\], not'),
        ("port = 65536", "line 1: port must be 0 to 65535, not 65536"),
        ("max_cpus = 'all'", "line 1: max_cpus is a number, not 'all'"),
        ("[data]\nx = 7", "line 1: data is a table of texts, as"),
        ("= =", "config.toml"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=word):
        load_settings(tmp_path / "config.toml", {})


def test_state_directory_is_private(tmp_path: Path) -> None:
    where = Layout(tmp_path / "a" / "state")
    where.make()
    assert stat.S_IMODE(where.root.stat().st_mode) == 0o700
    where.root.chmod(0o777)
    where.make()
    assert stat.S_IMODE(where.root.stat().st_mode) == 0o700
    assert not where.exposed()
    (tmp_path / "a").chmod(0o777)
    assert str(tmp_path / "a") in where.exposed()
    (tmp_path / "a").chmod(0o770)
    assert str(tmp_path / "a") in where.exposed(), "its group is others, too"
    (tmp_path / "a").chmod(0o1777)
    assert not where.exposed(), "as /tmp is"


def test_socket_of_a_long_state_path_is_in_no_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: another user who had made that directory in /tmp could listen there, and read what the commands send."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    uid = 4_000_000 + os.getpid()
    place = Path(f"/tmp/campus-mesh-{uid}")
    where = Layout(tmp_path / ("long" * 25))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    try:
        for name in ("socket", "kill_socket"):
            with pytest.raises(MeshError, match=f"{place} belongs to another user.*--state"):
                getattr(where, name)
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/own")
        assert where.socket.parent == Path("/run/own")
    finally:
        place.rmdir()


def test_state_directory_of_two_users_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Layout(tmp_path)
    (tmp_path / "journal.sqlite").touch()
    before = tmp_path.stat().st_mode
    uid = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: uid + 4_000_000)
    with pytest.raises(ConfigError, match="sudo chown -R uid 4"):
        where.make()
    assert tmp_path.stat().st_mode == before


@pytest.mark.parametrize("value", ["''", "'eth0'", "'enp3s0.7'", "'br-lan'"])
def test_interface_names_are_checked(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.toml").write_text(f"edge_device = {value}")
    assert load_settings(tmp_path / "config.toml", {}).edge_device == value.strip("'")


@pytest.mark.parametrize(
    "line",
    [
        *(f"edge_device = {value}" for value in ("'..'", "'eth 0'", "'a/b'", "'sixteen-letters-'", "'eth0:1'", "0")),
        *(f"edge_mbps = {value}" for value in ("-1", "nan", "inf", "1e7", "'fast'")),
        "edge = 'on'",
        "image_registries = ['https://docker.io']",
        "image_registries = ['ghcr.io/lab']",
        "conda_channels = ['conda-forge']",
        "edge_device = 'eth0'\nedge = 'off'",
    ],
)
def test_contradicting_edge_settings_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "config.toml").write_text(line)
    with pytest.raises(ConfigError, match=line.partition(" ")[0]):
        load_settings(tmp_path / "config.toml", {})


def test_configuration_follows_xdg_unless_the_state_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MESH_STATE", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    own = node_layout()
    assert (
        own.root == tmp_path / ".local/state/campus-mesh" and own.policy == tmp_path / ".config/campus-mesh/policy.toml"
    )
    own.make()
    assert stat.S_IMODE(own.config.parent.stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "c"))
    assert (
        node_layout().root == tmp_path / "s/campus-mesh"
        and node_layout().config == tmp_path / "c/campus-mesh/config.toml"
    )
    monkeypatch.setenv("MESH_STATE", str(tmp_path / "m"))
    assert node_layout().config == tmp_path / "m/config.toml"
    assert node_layout(str(tmp_path / "n")).policy == tmp_path / "n/policy.toml"


def test_node_is_no_member_before_all_its_files_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(layout, "write_durably", lambda path, data: written.append(path.name))
    layout.save_membership(layout.Layout(tmp_path), b"genesis", b"chain", ("10.0.0.7:7373",))
    assert written[-1] == "genesis" and sorted(written) == ["chain", "genesis", "seeds"]
