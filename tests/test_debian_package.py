"""The Debian package: made of the wheel and the locked packages, installed below a directory, tried and removed. Needs PyPI."""

import gzip
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mesh.util.version import VERSION

ROOT = Path(__file__).parents[1]
SYSTEM_PYTHON = "/usr/bin/python3"


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not shutil.which("dpkg-deb") or os.geteuid() != 0, reason="needs root and dpkg")
def test_package_installs_runs_and_goes(tmp_path: Path) -> None:
    run(SYSTEM_PYTHON, "-m", "venv", tmp_path / "tools")
    run("git", "clone", "--quiet", ROOT, tmp_path / "source")
    pip = f"{tmp_path}/tools/bin/python -m pip"
    run(*pip.split(), "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, tmp_path / "source")
    (wheel,) = tmp_path.glob("*.whl")
    run("bash", ROOT / ".ci/deb", wheel, ROOT / ".ci/requirements.lock", tmp_path, PIP=pip)
    (package,) = tmp_path.glob("*.deb")
    python = run(SYSTEM_PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2], end='')")
    assert package.name.startswith(f"campus-mesh_{VERSION}+py{python}_")

    system = tmp_path / "system"
    for place in ("var/lib/dpkg/info", "var/lib/dpkg/updates"):
        (system / place).mkdir(parents=True)
    (system / "var/lib/dpkg/status").touch()
    dpkg = ("dpkg", f"--root={system}", "--log=/dev/null", "--force-depends")
    run(*dpkg, "--install", package)
    said = run(system / "usr/lib/campus-mesh/bin/python", "-m", "mesh.cli", "--version")
    assert said.startswith(f"mesh {VERSION}")
    assert (system / "usr/bin/mesh").readlink() == Path("../lib/campus-mesh/bin/mesh")
    first = (system / "usr/lib/campus-mesh/bin/mesh").read_text().splitlines()[0]
    assert first == "#!/usr/lib/campus-mesh/bin/python"
    share = system / "usr/share"
    assert b".TH" in gzip.decompress((share / "man/man1/mesh.1.gz").read_bytes())
    run("bash", "-n", share / "bash-completion/completions/mesh")
    assert (share / "zsh/vendor-completions/_mesh").is_file()
    assert "mesh up --foreground" in (system / "usr/lib/systemd/user/campus-mesh.service").read_text()
    assert "/tmp" not in (system / "usr/lib/campus-mesh/pyvenv.cfg").read_text(), "no path of the build"
    assert run(*dpkg, "--verify", "campus-mesh") == ""
    run(*dpkg, "--remove", "campus-mesh")
    assert not (system / "usr/lib/campus-mesh").exists() and not (system / "usr/bin/mesh").is_symlink()
