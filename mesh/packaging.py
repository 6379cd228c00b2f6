"""Build hooks: a wheel's commit, libraries, manual page, shell completions and systemd unit.

The last three are made of the commands themselves, and so need what they import: click, msgspec, PyNaCl.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Command
from setuptools.command.sdist import sdist

from cuda_guard.wheel import BuildGuard

ROOT = Path(__file__).parents[1]
COMPLETIONS = {
    "bash": "bash-completion/completions/mesh",
    "zsh": "zsh/site-functions/_mesh",
    "fish": "fish/vendor_completions.d/mesh.fish",
}


class BuildNative(BuildGuard):
    """Adds the library of byte planes, too."""

    def compile_for(self, machine: str, tree: Path) -> None:
        super().compile_for(machine, tree)
        from ckptstore.planes import FILE, compile_into
        from cuda_guard.build import portable_compiler

        home = tree / "ckptstore" / "lib"
        shutil.rmtree(home, ignore_errors=True)
        compile_into(home / machine / FILE, portable_compiler(machine) or [])


class BuildShare(Command):
    """Build the files below share/, where bash-completion, zsh, fish, man-db and systemd look for them."""

    description = "make the manual page, completions and the unit"
    user_options = ()
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.build_base: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))
        self.set_undefined_options("build", ("build_base", "build_base"))

    def run(self) -> None:
        if self.editable_mode or self.build_lib is None or self.build_base is None:
            return
        _note_commit(Path(self.build_lib))
        from mesh.cli.debug import completion_script
        from mesh.cli.manual import page
        from mesh.daemon.systemd import template

        made = {place: completion_script(shell) for shell, place in COMPLETIONS.items()}
        made |= {"man/man1/mesh.1": page(), "systemd/user/campus-mesh.service": template()}
        for place, text in made.items():
            path = Path(self.build_base) / "share" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            files = self.distribution.data_files or []
            self.distribution.data_files = [*files, (f"share/{Path(place).parent}", [str(path)])]

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class SourceArchive(sdist):
    """Source archive with a note of its commit, since it has no git history."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        _note_commit(Path(base_dir))


def _note_commit(tree: Path) -> None:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # a build has the sources, but the package is not installed
    from mesh.util.release import COMMIT, built_from

    commit = built_from(ROOT)
    if commit:
        (tree / "mesh" / COMMIT).write_text(f"{commit}\n", encoding="utf-8")
