"""Lists of images that other nodes publish, as the library takes them."""

from pathlib import Path
from typing import Any, cast

from membership.records import Record
from mesh.images.allowlist import Entry, Image
from mesh.images.library import Library
from mesh.images.retention import Bounds
from tests.images.test_catalogue import Campus, record

A, B = Image(b"a" * 32, b"m" * 32), Image(b"b" * 32, b"n" * 32)


class Membership:
    """A fake of the membership: it has one record."""

    known: Record | None = None

    def record(self, node: bytes, section: str) -> Record | None:
        return self.known


def test_lists_of_members_have_no_node_publish_its_advert(tmp_path: Path) -> None:
    campus, membership, changes = Campus(), Membership(), list[str]()
    library = Library(
        tmp_path,
        0,
        True,
        (),
        ("*",),
        0,
        Bounds(0, 0.0),
        campus.admitter,
        campus.trust(campus.admitter_chain),
        cast(Any, membership),
        cast(Any, None),
        lambda node, what: None,
        lambda: changes.append("changed"),
    )
    library.catalogue.load()

    def hear(body: bytes) -> None:
        membership.known = record(body)
        library.hear(b"r" * 32, "images")

    for number, image in enumerate((A, B), 1):
        own = Entry("@eve/train", number, True, image)
        hear(campus.said(campus.guest, campus.guest_chain, number, own, personal=True))
        assert image.config in library.rules.shared and not changes
    hear(campus.said(campus.founder, campus.founder_chain, 1, Entry("tool", 1, True, A)))
    assert changes == ["changed"]
