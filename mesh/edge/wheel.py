"""Puts the edge's compiled programs into a wheel, where clang is at hand; without them they are compiled at first use.

They are the same for every machine of the same byte order, so the wheel stays one for all.
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
        sys.path.insert(0, str(Path(__file__).parents[2]))  # a build has the sources, but has not installed them
        from mesh.edge.program import compile_into

        home = Path(self.build_lib) / "mesh" / "edge" / "lib"
        shutil.rmtree(home, ignore_errors=True)  # of an earlier version
        compile_into(home)

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}
