"""What `mesh` starts."""

import gc


def main() -> None:
    # Modules are no garbage: to look for some while they load, and at the end, is a sixth of what a command takes (measured).
    gc.disable()
    from mesh.cli.main import main as run

    run()
