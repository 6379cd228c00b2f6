"""System checkpoints by Podman: its conditions, its failures, and dumps of hostile nodes."""

import os
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests

from mesh.execution.docker.checkpoint import IMAGES, Made, made_of
from mesh.execution.docker.podman_checkpoint import API, RESTORE_LOG, SAVE_LOG, SAVED, SHM, dump, restore
from mesh.execution.engine import EngineError

MADE = Made("sha256:1", "alike")
ERROR = "(0.1) Error (criu/files-reg.c:1): File trace has bad size 3\n"


class FakePodman:
    """A container of a Podman that is stricter than Podman: it neither overwrites nor forgives what was left in its directory.

    `breaks`: CRIU fails with a partial result and a log.
    """

    id = "c" * 64

    def __init__(self, place: Path, state: str) -> None:
        self.place, self.state, self.breaks = place, state, False
        self.restored: dict[str, str] = {}
        self.calls: list[str] = []
        self.client = self.api = self
        self.base_url, self.api_version = "http://engine", "1.41"
        place.mkdir(parents=True)

    def get(self, url: str, timeout: float) -> requests.Response:
        assert url == f"http://engine/{API}/containers/{self.id}/json"
        return self._answer(200, f'{{"StaticDir": "{self.place}"}}')

    def post(self, url: str, timeout: float, params: dict[str, str] | None = None) -> requests.Response:
        what = url.removeprefix(f"http://engine/{API}/containers/{self.id}/")
        self.calls.append(what)
        return {"checkpoint": self._checkpoint, "init": self._init, "restore": self._restore}[what](params or {})

    def stop(self, timeout: int) -> None:
        if self.state not in {"created", "running"}:
            raise docker.errors.APIError("no", explanation=f"{self.state} cannot be stopped")
        self.state = "exited"

    def _checkpoint(self, params: dict[str, str]) -> requests.Response:
        if self.state != "running":
            return self._failure(f'"{self.state}" is not running, cannot checkpoint')
        assert params == {"leaveRunning": "true"}, "the guest must survive, and no archive is made"
        assert not list(self.place.glob("*checkpoint*")), "an earlier dump's files would be mixed with these"
        (self.place / SAVED).mkdir(mode=0o600)
        (self.place / SAVED / "inventory.img").write_text("memory")
        if self.breaks:
            (self.place / SAVE_LOG).write_text(ERROR)
            return self._failure("`runc checkpoint` failed: exit status 1")
        (self.place / SHM).write_text("shared")
        return self._answer(200, "{}")

    def _init(self, params: dict[str, str]) -> requests.Response:
        if self.state == "created":
            return self._answer(304)
        (self.place / "config.json").write_text("this node's settings")
        self.state = "created"
        return self._answer(204)

    def _restore(self, params: dict[str, str]) -> requests.Response:
        if self.state != "exited" or not (self.place / SAVED / "inventory.img").exists():
            return self._failure("a complete checkpoint for this container cannot be found")
        assert params == {} and (self.place / "config.json").read_text() == "this node's settings"
        files = [path for path in self.place.rglob("*") if not path.is_dir()]
        assert all(path.is_file() and not path.is_symlink() for path in files), "root would read what they point to"
        if self.breaks:
            (self.place / RESTORE_LOG).write_text(ERROR)
            return self._failure("runc: criu failed: type RESTORE errno 0: OCI runtime error")
        self.restored = {str(path.relative_to(self.place)): path.read_text() for path in files}
        self.state = "running"
        return self._answer(200, "{}")

    def _failure(self, cause: str) -> requests.Response:
        return self._answer(500, f'{{"message": "{cause}"}}'.replace('"running"', "'running'").replace('"paused"', ""))

    def _answer(self, status: int, body: str = "") -> requests.Response:
        answer = requests.Response()
        answer.status_code, answer._content = status, body.encode()
        return answer


@pytest.fixture
def running(tmp_path: Path) -> Any:
    return FakePodman(tmp_path / "one" / "userdata", "running")


@pytest.fixture
def made(tmp_path: Path) -> Any:
    return FakePodman(tmp_path / "two" / "userdata", "configured")


@pytest.fixture
def saved(tmp_path: Path, running: Any) -> Path:
    dump(running, tmp_path / "dump", MADE)
    return tmp_path / "dump"


def test_dump_moves_to_a_container_with_settings_of_its_own(saved: Path, running: Any, made: Any) -> None:
    assert running.state == "running" and list(running.place.iterdir()) == [], "a dump does not change the container"
    assert made_of(saved) == MADE
    restore(made, saved)
    assert made.state == "running" and made.calls == ["init", "restore"]
    assert made.restored == {"config.json": "this node's settings", f"{SAVED}/inventory.img": "memory", SHM: "shared"}
    assert [path.name for path in made.place.iterdir()] == ["config.json"], "memory is not kept twice"


def test_second_dump_is_not_mixed_with_what_an_abandoned_one_left(running: Any, tmp_path: Path) -> None:
    (running.place / SAVED).mkdir()
    (running.place / SAVED / "core-7.img").write_text("old")
    (running.place / SHM).write_text("old")
    dump(running, tmp_path / "dump", MADE)
    assert sorted(path.name for path in (tmp_path / "dump" / IMAGES).iterdir()) == [SHM, "inventory.img"]


def test_failures_give_the_reason_of_criu_and_leave_nothing(running: Any, made: Any, saved: Path) -> None:
    running.breaks = made.breaks = True
    with pytest.raises(EngineError, match=r"could not be saved: File trace has bad size 3 \(CRIU\)$"):
        dump(running, saved.parent / "more", MADE)
    assert list(running.place.iterdir()) == [], "a dump that failed takes no disk"
    with pytest.raises(EngineError, match=r"could not be restored: File trace has bad size 3 \(CRIU\)$"):
        restore(made, saved)
    assert [path.name for path in made.place.iterdir()] == ["config.json"]
    running.state = "paused"
    (running.place / SAVE_LOG).write_text(ERROR)
    with pytest.raises(EngineError, match="is not running, cannot checkpoint"):
        dump(running, saved.parent / "third", MADE)


@pytest.mark.parametrize("name", [SHM, "core-1.img", "config.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_hostile_dump_brings_only_files(saved: Path, made: Any, tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "secret").write_text("root's")
    path = saved / IMAGES / name
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(tmp_path / "secret")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    restore(made, saved)
    assert "root's" not in made.restored.values() and made.restored["config.json"] == "this node's settings"
    assert f"{SAVED}/{name}" not in made.restored


def test_hostile_dump_without_images_or_with_a_link_to_them_is_refused(saved: Path, made: Any, tmp_path: Path) -> None:
    (saved / IMAGES).rename(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="could not be restored"):
        restore(made, saved)
    (saved / IMAGES).symlink_to(tmp_path / "elsewhere")
    made.state = "created"
    with pytest.raises(EngineError, match="is a link"):
        restore(made, saved)
    assert made.state == "exited" and [path.name for path in made.place.iterdir()] == ["config.json"]
