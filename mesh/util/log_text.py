"""A program's output as text: UTF-8, without terminal escape sequences (ECMA-48) but, where wanted, colours; each line in its
last state."""

import codecs
import re

from mesh.util.sanitize import fit

MOST = 128 * 1024  # characters of a job's output on a page, about 1,500 lines (own choice)
HELD_MOST = 4096  # characters of an incomplete sequence; a longer one is not a sequence
# Sequences: CSI; then OSC, DCS, SOS, PM and APC up to their terminator; then those of two characters.
_ORDER = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
)
_BEGUN = re.compile(
    r"(?:(?:\x1b\[|\x9b)[0-?]*[ -/]*|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*\x1b?|\x1b[ -/]*)\Z"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")  # SGR, "select graphic rendition"
_NO_COLOUR = "\x1b[m"


class LogText:
    """Incremental decoder: bytes in any pieces in, text out. It keeps lone carriage returns for `lines`."""

    def __init__(self, colours: bool = False) -> None:
        self._colours, self._coloured = colours, False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes) -> str:
        text = self._held + self._decoder.decode(data)
        begun = _BEGUN.search(text, max(0, len(text) - HELD_MOST))
        self._held = text[begun.start() :] if begun else ""
        if text.endswith("\r") and not self._held:
            self._held = "\r"
        return self._fit(text[: len(text) - len(self._held)])

    def finish(self) -> str:
        """Return what is still held, and the end of all colours."""
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return self._fit(text) + (_NO_COLOUR if self._coloured else "")

    def _fit(self, text: str) -> str:
        made, end = [], 0
        text = text.replace("\r\n", "\n").replace("\b", "")
        for order in _ORDER.finditer(text):
            made.append(fit(text[end : order.start()]))
            end = order.end()
            if self._colours and _COLOUR.fullmatch(order[0]):
                self._coloured = True
                made.append(order[0])
        return "".join([*made, fit(text[end:])])


def lines(text: str) -> str:
    """Return the visible text of lines that were overwritten after a carriage return (progress bars)."""
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n")) if "\r" in text else text
