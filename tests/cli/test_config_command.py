"""`mesh config` changes one setting of the owner's file, keeps the rest, and refuses values invalid for the daemon."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import membership.durable
from membership.trust import TrustStore
from mesh.cli.main import cli
from mesh.daemon.config import Settings, load_settings
from mesh.daemon.layout import Layout
from mesh.daemon.setting_notes import DEFAULT
from mesh.util.errors import ConfigError

OWN = '# the lab\'s second desk\nnick = "desk"   # as on its sticker\n\nslots = 2\n'


def run(state: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--state", str(state), "config", *words], prog_name="mesh")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(OWN)
    return tmp_path


def test_config_set_keeps_comments_and_order(state: Path) -> None:
    assert run(state, "set", "slots", "4").output == "slots = 4\n"
    assert run(state, "set", "accepts", "ada", "lin").output == "accepts = ada lin\n"
    assert run(state, "set", "lend", "true").exit_code == 0
    text = (state / "config.toml").read_text()
    assert text == OWN.replace("slots = 2", "slots = 4") + 'accepts = ["ada", "lin"]\nlend = true\n'
    assert run(state, "get", "accepts").stdout == "ada lin\n"
    assert run(state, "unset", "slots").output == "slots = 1 (the default)\n"
    assert run(state, "unset", "slots").exit_code == 0, "a second unset has no effect"
    assert load_settings(state / "config.toml", {}) == Settings(nick="desk", accepts=("ada", "lin"), lend=True)


@pytest.mark.parametrize("line", ['"a/b/c" = "/srv"', 'x = "srv"', 'x = "/"', 'x = "/./."', '"X" = "/srv"', "x = 5"])
def test_directories_that_stand_for_data_sets_are_checked(state: Path, line: str) -> None:
    good = '\n[data]\n"ada/pictures" = "/srv/pictures"\nwords = "/srv/words"\n'
    (state / "config.toml").write_text(OWN + good)
    assert run(state, "get", "data").stdout == "ada/pictures=/srv/pictures words=/srv/words\n"
    (state / "config.toml").write_text(f"{OWN}{good}{line}\n")
    with pytest.raises(ConfigError, match="data"):
        load_settings(state / "config.toml", {})


def test_init_uses_nick_from_config_file(state: Path) -> None:
    assert CliRunner().invoke(cli, ["--state", str(state), "init", "lab"]).exit_code == 0
    where = Layout(state)
    assert TrustStore(where.genesis.read_bytes()).check_chain(where.chain.read_bytes(), time.time()).nick == "desk"


def test_config_ls_distinguishes_file_values_from_defaults(state: Path) -> None:
    answer = json.loads(run(state, "ls", "--json").output)
    assert answer["schema"] == 1 and answer["file"] == str(state / "config.toml")
    rows = {row["key"]: row for row in answer["settings"]}
    assert set(rows) == set(Settings.__struct_fields__)
    assert (rows["slots"]["value"], rows["slots"]["written"], rows["port"]["written"]) == (2, True, False)
    assert run(state, "ls", "-q").output.split() == ["nick", "slots"]


def test_each_setting_says_what_it_means_and_what_holds_without_a_value(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    rows = json.loads(run(state, "ls", "--json").output)["settings"]
    assert [row["key"] for row in rows if len(row["means"]) < 10] == []
    assert [row["key"] for row in rows if row["default"] is None and DEFAULT not in row["means"]] == []
    table = {line.split()[0]: " ".join(line.split()[1:]) for line in run(state, "ls").stdout.splitlines()}
    assert table["data_quota_gib"].startswith("no limit default disk for data sets; above it, those unused")
    assert table["shm_gib"].startswith("half of its memory default /dev/shm of one job")
    done = run(state, "get", "max_disk_gib")
    assert done.stdout == "half of what is free when it starts\n"
    assert done.stderr == "max_disk_gib, in GiB: disk of one job; default: half of what is free when it starts\n"
    done = run(state, "get", "slots")
    assert (done.stdout, done.stderr) == ("2\n", "slots: guests without a GPU at the same time; default: 1\n")
    assert run(state, "unset", "max_cpus").stdout == "max_cpus = no limit (the default)\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("set", "slot", "1"), "there is no setting 'slot': did you mean 'slots'?"),
        (("set", "slots", "many"), "slots is a whole number, not 'many'"),
        (("set", "lend", "perhaps"), "lend is true or false, not 'perhaps'"),
        (("set", "profile", "wan"), "profile is lan or local, not 'wan'"),
        (("set", "upload_mbps", "fast"), "upload_mbps is a number, not 'fast'"),
        (("set", "slots", "1", "2"), "slots has one value, not 2"),
        (("set", "slots", "--", "-1"), "slots must be 0 to 1024, not -1"),
        (("set", "data", "x"), "data is a table: write it into the file, as [data] and lines NAME ="),
        (("set", "edge_device", "a/b"), "edge_device must be the name of a network interface"),
    ],
)
def test_config_refuses_settings_invalid_for_the_daemon(state: Path, words: tuple[str, ...], text: str) -> None:
    done = run(state, *words)
    assert done.exit_code == 2 and text in done.stderr
    assert (state / "config.toml").read_text() == OWN


def test_config_leaves_unparsable_file_unchanged(state: Path) -> None:
    (state / "config.toml").write_text("slots = = 2\n")
    for words in (("ls",), ("get", "slots"), ("set", "slots", "1")):
        done = run(state, *words)
        assert done.exit_code == 1 and "config.toml" in done.stderr
    assert (state / "config.toml").read_text() == "slots = = 2\n"
    (state / "config.toml").write_text('slots = "two"\n')
    assert run(state, "set", "slots", "2").exit_code == 0, "a wrong value can be corrected"


def test_crash_during_config_write_leaves_old_or_new_file(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(membership.durable.os, "fsync", full)
        done = run(state, "set", "slots", "4")
    assert done.exit_code == 1 and "No space left on device" in done.stderr
    assert (state / "config.toml").read_text() == OWN
    elsewhere = state / "kept.toml"
    (state / "config.toml").rename(elsewhere)
    (state / "config.toml").symlink_to(elsewhere)
    assert run(state, "set", "slots", "4").exit_code == 0
    assert (state / "config.toml").is_symlink() and "slots = 4" in elsewhere.read_text()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.sampled_from(Settings.__struct_fields__), st.lists(st.text(max_size=8), min_size=1, max_size=3))
def test_config_file_is_valid_after_any_change(state: Path, key: str, values: list[str]) -> None:
    before = (state / "config.toml").read_text()
    done = run(state, "set", key, "--", *values)
    assert done.exit_code in (0, 2), done.output
    load_settings(state / "config.toml", {})
    if done.exit_code:
        assert (state / "config.toml").read_text() == before
