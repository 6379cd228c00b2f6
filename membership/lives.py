"""Our own word, from elsewhere: of a former life (a wiped disk, a clock that is behind), or of a second machine with our key."""

from collections import deque

REMEMBERED = 8


class OtherLives:
    """A former life is dead and is outbid once; a run that outbids us again after that is alive."""

    def __init__(self, boot: int) -> None:
        self._boot = boot
        self._outbid_by: deque[int] = deque(maxlen=REMEMBERED)

    def outbids_again(self, boot: int) -> bool:
        """Whether the run that began with this epoch must be a second machine."""
        if boot in self._outbid_by:
            return True
        self._outbid_by.append(boot)
        return False

    def is_older(self, boot: int) -> bool:
        """Whether that run was started before ours, which then should go."""
        return boot < self._boot
