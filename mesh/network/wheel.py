"""The build step that compiles the edge's programs into a wheel if clang is installed; otherwise they are compiled at first use.

They are the same on every machine of the same byte order, so one wheel serves all.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import Command


class BuildEdge(Command):
    description = "compile the programs of the network edge"
    user_options = ()
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        able = shutil.which("clang") and importlib.util.find_spec("msgspec")
        if not able or self.editable_mode or self.build_lib is None:
            return
        sys.path.insert(0, str(Path(__file__).parents[2]))  # during a build the sources are not installed
        from mesh.network.program import compile_into

        home = Path(self.build_lib) / "mesh" / "network" / "lib"
        shutil.rmtree(home, ignore_errors=True)  # from an earlier version
        compile_into(home)

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}
