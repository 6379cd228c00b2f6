"""Lengths: the most that one field from another node may hold, and what a writer does so that every node can decode it.

The message that carries a field is bounded as a whole, too.
"""

from typing import Annotated

import msgspec

MOST_ID = 64  # bytes; an id of a node, a job, a disk or a manifest has 32 at most
MOST_TEXT = 1 << 16  # characters; earlier releases wrote the whole text of an error (own choice)
MOST_LISTED = 1024  # own choice: nodes of a large campus
SAID = 1000  # characters of a line, and of a reason that this release writes (own choice)

Id = Annotated[bytes, msgspec.Meta(max_length=MOST_ID)]
Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
Line = Annotated[str, msgspec.Meta(max_length=SAID)]
Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=MOST_LISTED)]
Texts = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_LISTED)]


def shortened(text: str, most: int = SAID) -> str:
    """Return a text that every node can decode: `most` characters at most, and no half of a surrogate pair."""
    whole = text if text.isascii() else text.encode(errors="replace").decode()
    return whole if len(whole) <= most else whole[: most - 1] + "…"
