"""What a program printed, as text for a page: UTF-8, without a terminal's orders (ECMA-48), lines as they stood last."""

import codecs
import re

MOST = 128 * 1024  # characters of a job's output that a page holds; ours: about 1,500 lines
HELD_MOST = 4096  # characters of an order that is not over; what is longer is none
# Orders: CSI, then OSC, DCS, SOS, PM and APC up to their end, then those of two characters.
_ORDER = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
)
_BEGUN = re.compile(
    r"(?:(?:\x1b\[|\x9b)[0-?]*[ -/]*|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*\x1b?|\x1b[ -/]*)\Z"
)
_OTHERS = re.compile("[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class LogText:
    """Bytes go in as they come, cut anywhere; text comes out. A lone carriage return stays: `lines` does as it says."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes) -> str:
        text = self._held + self._decoder.decode(data)
        begun = _BEGUN.search(text, max(0, len(text) - HELD_MOST))
        self._held = text[begun.start() :] if begun else ""
        if text.endswith("\r") and not self._held:
            self._held = "\r"
        text = text[: len(text) - len(self._held)]
        return _OTHERS.sub("\ufffd", _ORDER.sub("", text.replace("\r\n", "\n")).replace("\b", ""))


def lines(text: str) -> str:
    """What is left to see where programs went back to the beginning of a line (progress bars)."""
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n")) if "\r" in text else text
