"""A pause between two push-pulls with one address, whoever wishes for them."""

ADDRESSES_KEPT = 4096
KEPT_S = 60.0


class Pauses:
    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._last: dict[tuple[str, int], float] = {}

    def over(self, address: tuple[str, int], now: float) -> bool:
        """Whether it may be now; if so, the next pause begins."""
        if now - self._last.get(address, -1e9) < self._pause_s:
            return False
        self._last[address] = now
        if len(self._last) > ADDRESSES_KEPT:
            self._last = {address: at for address, at in self._last.items() if now - at < KEPT_S}
        return True
