"""The settings that an owner may write down."""

import os
import stat
from pathlib import Path

import pytest

from mesh.daemon import layout
from mesh.daemon.config import Settings, ceilings_of, load_settings, parsed_setting, written_settings
from mesh.daemon.layout import Layout, node_layout
from mesh.daemon.seeds import checked_seeds, read_seeds
from mesh.daemon.setting_notes import unit_of, unset_words
from mesh.execution.ceilings import KEPT_MIB
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


GIB = ("store_quota_gib", "foreign_quota_gib", "image_cache_gib", "data_quota_gib", "image_keep_gib", "env_cache_gib")
PORTS = ("port", "api_port", "web_port", "registry_port", "metrics_port")
CEILINGS = ("max_memory_gib", "max_cpus", "shm_gib", "max_disk_gib", "max_disk_mib_s", "max_log_gib")
BOUNDS = [
    (PORTS, ("-1", "65536"), "must be 0 to 65535"),
    ((*GIB, "network_gib"), ("-0.1", "nan", "2e9"), "must be a number of GiB"),
    (("keep_days", "image_keep_days"), ("-1", "nan", "2e6"), "must be a number of days"),
    (CEILINGS, ("0", "nan", "2e6"), "must be a number from 0.01"),
    (("slots",), ("-1",), "must be 0 to"),
    (("max_pids",), ("15", "4194305"), "must be 16 to"),
    (("relay_nodes",), ("-1", "1000000"), "must be 0 to"),
    (("relay_mbps",), ("0", "0.09", "nan", "2e6"), "must be megabits per second"),
    (("metrics_address",), ("'localhost'", "''"), "must be an address"),
    (("network",), ("['https://pypi.org']",), ""),
    (("uv_index",), ("'pypi.org/simple'", "'wheels'"), "must be an address or an absolute path"),
]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        *((f"{key} = {value}", f"{key}.*{word}") for keys, some, word in BOUNDS for key in keys for value in some),
        ("egress = 'list'\negress_allow = ['10.0.0.0/8x']", "10.0.0.0/8x"),
        ("[data]\n" + "\n".join(f"d{number} = '/srv/{number}'" for number in range(65)), "at most 64 directories"),
    ],
)
def test_values_out_of_bounds_are_refused(tmp_path: Path, line: str, word: str) -> None:
    (tmp_path / "config.toml").write_text(line)
    with pytest.raises(ConfigError, match=word):
        load_settings(tmp_path / "config.toml", {})


def test_values_at_the_bounds_are_taken(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        "port = 65535\nslots = 0\nrelay_nodes = 0\nrelay_mbps = 0.1\nmax_pids = 16\nkeep_days = 0\nstore_quota_gib = 0\n"
        "network_gib = 0\nmax_log_gib = 0.01\nmetrics_address = '::1'\nuv_index = '/srv/wheels'\n"
        "[data]\n" + "\n".join(f"d{number} = '/srv/{number}'" for number in range(64))
    )
    settings = load_settings(tmp_path / "config.toml", {"port": 1})
    assert settings.port == 1, "the command line stands above the file"
    assert settings.slots == 0 and len(settings.data) == 64


def test_file_that_cannot_be_read_is_no_missing_file(tmp_path: Path) -> None:
    assert written_settings(tmp_path / "config.toml") == {}
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path / "config.toml", {})


def test_defaults_trust_nobody() -> None:
    """The defaults expose neither the machine nor the data of jobs."""
    own = Settings()
    assert not own.lend and not own.open and own.trusted == () and own.encrypt and own.image_users == ("mine",)
    assert (own.egress, own.network, own.metrics_address) == ("none", (), "127.0.0.1")
    assert (own.process_engine_for, own.process_home, own.gpu_bypass) == ("own", "private", "pause")


def test_words_of_a_command_line_are_read_as_the_setting_has_it() -> None:
    assert parsed_setting("accepts", [""]) == () and parsed_setting("accepts", ["ada", "bob"]) == ("ada", "bob")
    assert parsed_setting("slots", ["3"]) == 3 and parsed_setting("lend", ["true"]) is True
    with pytest.raises(ConfigError, match="slots has one value, not 2"):
        parsed_setting("slots", ["3", "4"])
    with pytest.raises(ConfigError, match="data is a table"):
        parsed_setting("data", ["x"])


def test_guest_may_have_all_but_what_the_machine_keeps() -> None:
    mib = 1024
    assert ceilings_of(64 * mib, Settings()).memory_mib == 56 * mib, "an eighth is kept"
    assert ceilings_of(4 * mib, Settings()).memory_mib == 4 * mib - KEPT_MIB, "of a small machine more"
    assert ceilings_of(1, Settings()).memory_mib == 1
    assert ceilings_of(64 * mib, Settings(max_memory_gib=100)).memory_mib == 64 * mib, "no more than there is"
    most = ceilings_of(64 * mib, Settings(max_memory_gib=0.5, shm_gib=1, max_disk_gib=2, max_disk_mib_s=3, max_cpus=4))
    assert (most.memory_mib, most.shm_mib, most.disk_mib) == (512, mib, 2 * mib)
    assert (most.cpus, most.disk_bps, most.log_mib) == (4, 3 * 2**20, mib)


def test_long_state_directory_has_its_sockets_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    near, far = Path("/s/" + "x" * 87), Path("/s/" + "x" * 88)
    assert Layout(near).socket == near / "mesh.sock" and len(str(near / "mesh.sock")) == 100
    assert Layout(far).socket.parent == Path("/run/user/7") != Layout(far).root
    assert Layout(far).socket != Layout(far).kill_socket != Layout(Path(f"{far}y")).kill_socket
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert Layout(far).socket.parent == Path(f"/tmp/campus-mesh-{os.getuid()}")


def test_configuration_that_others_can_replace_is_told(tmp_path: Path) -> None:
    where = Layout(tmp_path / "state", tmp_path / "open" / "config")
    where.make()
    assert not where.exposed()
    (tmp_path / "open").chmod(0o777)
    assert str(tmp_path / "open") in where.exposed()


def test_file_of_another_user_in_the_state_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "journal.sqlite").touch()
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = real(path)
        if path.name != "journal.sqlite":
            return found
        return os.stat_result((*found[:4], found.st_uid + 4_000_000, *found[5:10]))

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(ConfigError, match=r"journal.sqlite belongs to uid 4"):
        Layout(tmp_path).make()


def test_state_directory_that_its_group_may_read_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o740)
    Layout(tmp_path).make()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_seeds_that_cannot_be_read_are_told_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_seeds(tmp_path / "seeds") == []
    (tmp_path / "seeds").write_text("10.0.0.7:7373\n10.0.0.8:0x\ndesk")
    assert read_seeds(tmp_path / "seeds") == ["10.0.0.7:7373", "desk"] and "10.0.0.8:0x" in caplog.text
    assert checked_seeds(("desk:1", "10.0.0.7")) == ("desk:1", "10.0.0.7")
    with pytest.raises(ConfigError, match=r"join: .*10\.0\.0\.8:0x"):
        checked_seeds(("desk", "10.0.0.8:0x"))


def test_units_of_settings_are_told() -> None:
    assert [unit_of(key) for key in ("max_disk_mib_s", "lease_s", "keep_days", "slots")] == [
        "MiB/s",
        "seconds",
        "days",
        "",
    ]
    assert unset_words("disk of one job; default: half of what is free") == "half of what is free"
    assert unset_words("slots") == "-"
