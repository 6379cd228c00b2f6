"""The GPU files that a guest of the `apptainer` engine gets, where its program does not matter."""

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from cuda_guard.guard import Mount
from mesh.execution.apptainer import gpus
from mesh.execution.apptainer.gpus import LIBRARIES, mounts_of
from mesh.execution.engine import EngineError

VERSION = "570.86.15"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a machine with two GPUs, and return the directory of its driver's libraries, where others lie, too."""
    directory = tmp_path / "lib"
    directory.mkdir()
    links = {
        "libcuda": ("libcuda.so", "libcuda.so.1"),
        "libnvidia-ml": ("libnvidia-ml.so.1",),
        "libnvidia-nvvm": ("libnvidia-nvvm.so.4",),
        "libGLX_nvidia": ("libGLX_nvidia.so.0",),
    }
    for stem, names in links.items():
        (directory / f"{stem}.so.{VERSION}").touch()
        for name in names:
            (directory / name).symlink_to(f"{stem}.so.{VERSION}")
    (directory / "libnvidia-container.so.1.17.4").touch()
    (directory / "libnvidia-container.so.1").symlink_to("libnvidia-container.so.1.17.4")
    (directory / "libc.so.6").touch()
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", *gpus.CONTROLS):
        (devices / name).symlink_to("/dev/null")
    monkeypatch.setattr(gpus, "DEVICES", devices)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(directory))
    monkeypatch.setenv("PATH", "")
    opened = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: opened.append(1))
    monkeypatch.setattr(pynvml, "nvmlShutdown", opened.pop)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMinorNumber", lambda number: number)
    yield directory
    assert not opened, "NVML is let go of"


def handle(uuid: str) -> int:
    if uuid not in {"GPU-0", "GPU-1"}:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return int(uuid[-1])


def test_sees_its_own_gpus_only(driver: Path) -> None:
    seen = {mount.target for mount in mounts_of(["GPU-1"], ()) if not mount.read_only}
    assert seen == {gpus.DEVICES / name for name in ("nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")}


def test_sees_the_drivers_libraries_by_the_names_that_programs_load(driver: Path) -> None:
    found = {mount.target: mount.source for mount in mounts_of(["GPU-0"], ()) if mount.read_only}
    names = {"libcuda": ("so", "so.1"), "libnvidia-ml": ("so.1",), "libnvidia-nvvm": ("so.4",)}
    assert found == {
        LIBRARIES / f"{stem}.{ending}": driver / f"{stem}.so.{VERSION}"
        for stem, endings in names.items()
        for ending in (*endings, f"so.{VERSION}")  # some libraries need others by their whole version
    }


def test_a_driver_without_versions_in_its_names_is_shown_alone(driver: Path) -> None:
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (driver / name).unlink()
        (driver / name).touch()
    (driver / "libnvidia-other.so.1").touch()
    found = {mount.target.name for mount in mounts_of(["GPU-0"], ()) if mount.read_only}
    assert found == {"libcuda.so.1", "libnvidia-ml.so.1"}


def test_the_guard_stands_in_for_the_driver_under_each_name(driver: Path) -> None:
    guard = Mount(Path("/guard/libcuda.so.1"), driver / "libcuda.so.1")
    found = mounts_of(["GPU-0"], [guard])
    sources = {mount.target: mount.source for mount in found}
    assert {sources[LIBRARIES / name] for name in ("libcuda.so", "libcuda.so.1", f"libcuda.so.{VERSION}")} == {
        guard.source
    }
    assert driver / f"libcuda.so.{VERSION}" not in sources.values() and guard in found


def test_a_gpu_that_the_machine_has_not_is_an_error(driver: Path) -> None:
    with pytest.raises(EngineError, match="cannot be found"):
        mounts_of(["GPU-9"], ())


@pytest.mark.parametrize("name", ["nvidia1", "nvidia-uvm"])
def test_a_device_file_that_is_missing_is_named_with_the_next_step(driver: Path, name: str) -> None:
    (gpus.DEVICES / name).unlink()
    with pytest.raises(EngineError, match=f"{name} is not there .`nvidia-modprobe"):
        mounts_of(["GPU-1"], ())
    (gpus.DEVICES / name).touch()
    with pytest.raises(EngineError, match="is not there"):
        mounts_of(["GPU-1"], ())


def test_a_machine_without_the_driver_is_an_error(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_driver", lambda: None)
    with pytest.raises(EngineError, match="library path"):
        mounts_of(["GPU-0"], ())
