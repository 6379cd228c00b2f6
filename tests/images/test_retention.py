"""Choice of the fetched images to remove when space is short."""

import os
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as some

from mesh.images.blobs import IDLE_S
from mesh.images.engine import FETCHED, StoredImage, _stored
from mesh.images.retention import Bounds, Surplus, UsageMarks, surplus

sizes, ages = some.integers(0, 1 << 40), some.floats(0, 1e8)
shelves = some.lists(some.tuples(sizes, ages, some.booleans()), max_size=12)


@given(shelves, some.integers(0, 1 << 42), ages)
def test_surplus_is_minimal_and_unused(shelf: list[tuple[int, float, bool]], most_bytes: int, unused_s: float) -> None:
    images = [StoredImage(bytes([number]) * 32, (), size, fetched) for number, (size, _, fetched) in enumerate(shelf)]
    unused = {image.id: shelf[number][1] for number, image in enumerate(images) if image.fetched}
    gone = [one.image for one in surplus(images, unused, Bounds(most_bytes, unused_s))]
    stays = [image for image in images if image.fetched and image not in gone]
    assert all(image.fetched and unused[image.id] >= IDLE_S for image in gone)
    assert all(unused[image.id] < max(unused_s, IDLE_S) for image in stays)
    assert all(unused[one.id] >= unused[other.id] for one in gone for other in stays), "the longest unused first"
    left = sum(image.size for image in stays)
    assert left <= most_bytes or all(unused[image.id] < IDLE_S for image in stays)
    for last in gone[-1:]:
        assert unused[last.id] >= unused_s or left + last.size > most_bytes, "no more than it takes"


def test_last_use_survives_restart(tmp_path: Path) -> None:
    one, two = b"1" * 32, b"2" * 32
    shelf = UsageMarks(tmp_path)
    assert shelf.unused([one, two]) == {one: 0.0, two: 0.0}, "who is not known begins now"
    for image in (one, two):
        os.utime(tmp_path / "fetched" / image.hex(), (0, time.time() - 1000))
    shelf = UsageMarks(tmp_path)
    shelf.used(two)
    unused = shelf.unused([one, two])
    assert unused[one] >= 1000 and unused[two] < 1000
    assert shelf.unused([two]).keys() == {two} and [path.name for path in (tmp_path / "fetched").iterdir()] == [
        two.hex()
    ]


def test_marks_are_this_users_and_a_clock_that_was_set_back_makes_nothing_old(tmp_path: Path) -> None:
    root, image = tmp_path / "new" / "images", b"1" * 32
    mask = os.umask(0)
    try:
        UsageMarks(root).used(image)
    finally:
        os.umask(mask)
    mark = root / "fetched" / image.hex()
    assert (mark.parent.stat().st_mode & 0o777, mark.stat().st_mode & 0o777) == (0o700, 0o600)
    os.utime(mark, (0, time.time() + 1000))
    assert UsageMarks(root).unused([image]) == {image: 0.0}


def test_only_fetched_images_go_and_equally_old_ones_in_order() -> None:
    images = [StoredImage(bytes([number]) * 32, (), 1, number != 2) for number in (3, 2, 1)]
    gone = surplus(images, {image.id: 1e9 for image in images}, Bounds(0, 0.0))
    assert [one.image for one in gone] == [images[2], images[0]], "the other is the owner's"


def test_bounds_are_reached_and_told() -> None:
    first, second = (StoredImage(bytes([number]) * 32, (), 10, True) for number in (1, 2))
    unused = {first.id: 2 * IDLE_S, second.id: IDLE_S}
    assert surplus([first, second], unused, Bounds(20, 3 * IDLE_S)) == [], "just within them"
    size, age = "fetched images exceed their limit", "unused for too long"
    assert surplus([first, second], unused, Bounds(19, 3 * IDLE_S)) == [Surplus(first, 2 * IDLE_S, size)]
    assert surplus([first, second], unused, Bounds(20, 2 * IDLE_S)) == [Surplus(first, 2 * IDLE_S, age)]
    everything = surplus([first, second], unused, Bounds(0, 2 * IDLE_S))
    assert everything == [Surplus(first, 2 * IDLE_S, age), Surplus(second, IDLE_S, size)]


def test_new_image_stays() -> None:
    """A fetch may end while the marks of the others are read."""
    old, new = (StoredImage(bytes([number]) * 32, (), 1, True) for number in (1, 2))
    assert [one.image for one in surplus([old, new], {old.id: 1e9}, Bounds(0, 0.0))] == [old]


def test_image_that_the_owner_has_named_is_theirs() -> None:
    """An image that somebody on this machine has given another name is not removed."""
    digest = f"sha256:{'0' * 64}"
    ours = f"127.0.0.1:5000/{FETCHED}"

    def stored(*tags: str, digests: tuple[str, ...] = (f"{ours}@{digest}",)) -> StoredImage:
        found = _stored({"Id": digest, "RepoTags": list(tags), "RepoDigests": list(digests), "Size": 5})
        assert found is not None
        return found

    assert stored().fetched and stored(f"{ours}:x").fetched
    assert not stored("mine:1").fetched and stored("mine:1").names == ("mine:1",)
    assert not stored(digests=()).fetched and _stored({"Id": "short"}) is None
