"""What `mesh cp` reads of a job that goes on."""

import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mesh.api.files import _tar_pieces


def names(tar: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        return opened.getnames()


def test_a_directory_that_its_job_removes_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpts = tmp_path / "ckpts"
    for step in (1, 2):
        (ckpts / f"step-{step}").mkdir(parents=True)
        (ckpts / f"step-{step}" / "state").write_text(str(step))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").touch()
    (ckpts / "link").symlink_to(tmp_path / "elsewhere")
    look = os.scandir

    def late(path: Any) -> Any:
        """It goes between the look at what it is in and the look into it."""
        if not isinstance(path, int) and Path(path).name == "step-1":
            shutil.rmtree(path)
        return look(path)

    whole = names(b"".join(_tar_pieces(ckpts)))
    below = {f"ckpts/{name}" for name in ("link", "step-1", "step-2", "step-1/state", "step-2/state")}
    assert whole[0] == "ckpts" and set(whole[1:]) == below and len(whole) == 6
    monkeypatch.setattr(os, "scandir", late)
    left = names(b"".join(_tar_pieces(ckpts)))
    assert "ckpts/step-2/state" in left and "ckpts/step-1/state" not in left
    assert names(b"".join(_tar_pieces(ckpts / "link"))) == ["link"]
