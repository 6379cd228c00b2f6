"""Build commands for a wheel with the guard's libraries, if PyPI's `ziglang` is installed to build portable ones.

Without it the wheel is pure, and the guard is compiled at first use. `MESH_WHEEL_MACHINE=aarch64` builds for that machine.

    pip install 'setuptools>=77' click msgspec pynacl ziglang && pip wheel . --no-deps --no-build-isolation
"""

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

from setuptools import Command
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

MACHINE_ENV = "MESH_WHEEL_MACHINE"


def target() -> str | None:
    """Return the machine to build for; None without a portable compiler."""
    if importlib.util.find_spec("ziglang") is None or sys.platform != "linux":
        return None
    return os.environ.get(MACHINE_ENV) or platform.machine()


class BuildGuard(Command):
    """Adds the libraries to the wheel."""

    description = "compile the guard for shared GPUs"
    user_options = ()
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        machine = target()
        if machine is None or self.editable_mode or self.build_lib is None:
            return
        sys.path.insert(0, str(Path(__file__).parents[1]))  # the sources of a build are not installed
        self.compile_for(machine, Path(self.build_lib))

    def compile_for(self, machine: str, tree: Path) -> None:
        from cuda_guard.build import compile_into, portable_compiler

        home = tree / "cuda_guard" / "lib" / machine
        shutil.rmtree(home.parent, ignore_errors=True)  # left by an earlier build, perhaps for another machine
        compile_into(home, portable_compiler(machine), ("-Wl,-s",))

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands = [  # noqa: RUF012
        *build.sub_commands,
        ("build_guard", lambda _: True),
        ("build_edge", lambda _: True),
        ("build_share", lambda _: True),
    ]


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        machine = target()
        return super().get_tag() if machine is None else ("py3", "none", f"manylinux2014_{machine}")

    def finalize_options(self) -> None:
        if target() is not None:
            self.distribution.has_ext_modules = lambda: True  # a platform wheel
        super().finalize_options()
