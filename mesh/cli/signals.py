"""Clean up what a command started on this machine, whichever signal ends it, except SIGKILL."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def cleaned_up() -> Iterator[ExitStack]:
    """Yield a stack to register the clean-up with. SIGTERM and SIGHUP act as Ctrl-C; during the clean-up all are ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with ExitStack() as cleanup:
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup(1) ignores SIGHUP
                signal.signal(number, end)
        try:
            yield cleanup
        finally:
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)
