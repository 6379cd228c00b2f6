"""`python -m mesh.daemon.entry --state DIR`: what `mesh up` starts."""

import gc


def main() -> None:
    # Modules are no garbage: to look for some while they load is a seventh of the start (own measurement), and later in vain.
    gc.disable()
    from mesh.daemon.process import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
