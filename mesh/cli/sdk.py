"""`mesh job sdk`: give a project the files of campus-mesh that its programs import."""

from pathlib import Path

import click

from mesh.cli.output import say
from mesh.util.errors import MeshError

FILES = ("job.py", "sdk/integrations/hf.py", "sdk/integrations/lightning.py")


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
def sdk(directory: Path) -> None:
    """Copy `mesh/job.py`, and what the Hugging Face Trainer and Lightning need, into DIRECTORY (default: this one).

    For programs whose Python has no campus-mesh: in an image, or with --uv or --conda. Files of an older release are replaced.
    """
    package = Path(__file__).parents[1]
    for name in FILES:
        target = directory / "mesh" / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((package / name).read_bytes())
        except OSError as error:
            raise MeshError(f"{target} cannot be written: {error.strerror}") from error
        say(str(target))
    say("programs in that directory can `from mesh import job`", err=True)
