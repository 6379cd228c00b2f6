"""`python -m mesh.daemon.entry --state DIR`: what `mesh up` starts."""

import gc
import os
from collections.abc import Callable


def load() -> Callable[[], None]:
    """Load what a daemon consists of, and return what runs it."""
    # aiohttp would read the machine's certificate authorities: a seventh of the start (own measurement). They are for
    # servers outside the mesh alone, and `images/outside.py` reads them.
    authorities = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = os.devnull
    # Modules are no garbage: to look for some while they load is a seventh of the start (own measurement), and later in vain.
    gc.disable()
    from mesh.daemon.process import main as run

    gc.freeze()
    gc.enable()
    del os.environ["SSL_CERT_FILE"]
    if authorities is not None:
        os.environ["SSL_CERT_FILE"] = authorities
    return run


def main() -> None:
    load()()


if __name__ == "__main__":
    main()
