"""Entry point of `mesh`."""

import gc


def main() -> None:
    # Garbage collection during imports and at exit is a sixth of a command's time (measured).
    gc.disable()
    from mesh.cli.main import main as run

    run()
