"""Whether a node would run an image, by what its advert says: it has it, it can fetch it, or why not.

An image is asked for by its content (the hash of its configuration), if the mesh has a list of images, else by its name on the
node. Adverts hold only the beginnings of hashes: here nobody is trusted, and whoever starts the image compares all of it.
"""

import msgspec

from placement.advert import Advert
from placement.request import Request

SHORT = 8  # bytes of a hash in an advert


class ImageOffer(msgspec.Struct, frozen=True):
    """What a node's advert says of images; the fields are the advert's."""

    images: tuple[str, ...] = ()
    image_list: bool = False
    image_ids: tuple[bytes, ...] = ()
    image_fetches: tuple[bytes, ...] = ()
    image_denials: tuple[str, ...] = ()


def image_refusal(request: Request, advert: Advert) -> str | None:
    """Why this node does not run the image that is asked for."""
    name, wanted = request.image, request.image_id
    if wanted is None:
        if name in advert.images:
            return None
        if advert.image_list:
            return f"image {name} is not on the mesh's list, and the node's owner has not allowed it there"
        return f"has no image {name}"
    short = wanted[:SHORT]
    if name in advert.image_denials or short.hex() in advert.image_denials:
        return f"its owner denies image {name} (`mesh image deny`)"
    if short in advert.image_ids or short in advert.image_fetches:
        return None
    return f"image {name} ({wanted.hex()[:12]}) is not on this node, and it can fetch it from nobody"


def lacks(request: Request, advert: Advert) -> bool:
    """Whether it would have to fetch the image first."""
    return request.image_id is not None and request.image_id[:SHORT] not in advert.image_ids
