"""`python -m mesh.daemon.entry --state DIR`: what `mesh up` starts."""

import gc
import os


def main() -> None:
    # Else numpy starts a thread for each core that waits in a loop: a tenth of the time of a short fetch (own measurement).
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Modules are no garbage: to look for some while they load is a seventh of the start (own measurement), and later in vain.
    gc.disable()
    from mesh.daemon.process import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
