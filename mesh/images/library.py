"""The images of this node: those allowed, those present and those available elsewhere, published by advert and sections.

A shell around the catalogue (rules), the blobs, the registry (for this machine) and the fetcher (from other nodes). The start of
a job calls `ready`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from membership.events import MemberView
from membership.identity import Identity, NodeId
from membership.node import MembershipNode
from membership.records import Record
from membership.trust import TrustStore
from mesh.execution.engine import BadImage, EngineError
from mesh.images.allowlist import Image, ListError
from mesh.images.blobs import BlobStore
from mesh.images.catalogue import SECTION, Catalogue
from mesh.images.engine import PUSHED, ImageEngine, StoredImage
from mesh.images.fetcher import ImageFetcher, Pull
from mesh.images.oci import Manifest, ManifestError, digest_text
from mesh.images.registry import RegistryServer
from mesh.images.retention import Bounds, Surplus, UsageMarks, surplus
from mesh.images.rules import OwnRules, Rules, Verdict, short
from mesh.rpc.client import PeerClient
from placement.advert import MAX_IMAGES, Advert, AdvertError, decode_advert
from placement.filters import SHORT, ImageOffer
from placement.rendezvous import rank

LIST_TTL_S = 14 * 86_400.0  # before it ends, other nodes publish an absent signer's list
ORPHAN_TTL_S = 3600.0
LOOK_S = 2.0  # between checks for lists that nobody publishes (own choice)
TURNS = 12  # after which every node that might publish a list has had a chance (own choice)
TRIM_S = 60.0
NAMES_BYTES = 4096  # of names in an advert, which has 16 KiB in all (own choice)
AT_ONCE = 8  # streams to other nodes; more would slow all of them (own choice)

log = logging.getLogger(__name__)


class NotGiven(Exception):
    """This node does not give an image, or not now (`busy`); the text says why."""

    def __init__(self, text: str, busy: bool = False) -> None:
        super().__init__(text)
        self.busy = busy


class Library:
    """The images of one node.

    `blame` reports a node that sent wrong data; `changed` is called when this node's offer changes; `fetches`: the owner allows
    fetching; `registry_port`: 0 for any; `bounds`: limits of fetched images.
    """

    def __init__(
        self,
        root: Path,
        cache_bytes: int,
        fetches: bool,
        registry_port: int,
        bounds: Bounds,
        identity: Identity,
        trust: TrustStore,
        membership: MembershipNode,
        peers: PeerClient,
        blame: Callable[[NodeId, str], None],
        changed: Callable[[], None],
    ) -> None:
        self.catalogue = Catalogue(root, identity, trust, time.time)
        self.stored: dict[bytes, StoredImage] = {}
        self._me, self._membership = identity.node_id, membership
        self._root, self._cache_bytes, self._fetches, self._changed = root, cache_bytes, fetches, changed
        self._peers, self._blame = peers, blame
        self.bounds = bounds
        self._seen: dict[NodeId, tuple[Record, Advert | None]] = {}
        self._registry_port = registry_port
        self._engine = ImageEngine(lambda: self.registry.access)
        self._engine_ok = False
        self._streams = 0
        self._showing: dict[str, float] = {}
        self._missed: dict[str, float] = {}  # since when no node ranked before this one publishes a list

    async def open(self) -> None:
        """Prepare the library before its first use. MeshError if the owner's rules cannot be read."""
        self._store = await asyncio.to_thread(BlobStore, self._root, self._cache_bytes)
        self._usage = await asyncio.to_thread(UsageMarks, self._root)
        await asyncio.to_thread(self.catalogue.load)
        self.fetcher = ImageFetcher(self._me, self._store, self._peers, self.holders, self._blame, self._load)
        self.registry = RegistryServer(
            self._store, self._root / "port", self._may_pull, self._manifest_of, self._arrival
        )
        await self.registry.open(self._registry_port)
        self.hear_all()
        self.show()

    async def run(self) -> None:
        trim_at, show_at = 0.0, time.monotonic() + LIST_TTL_S / 4
        while True:
            await asyncio.sleep(LOOK_S)
            self._show_orphans()
            if time.monotonic() >= show_at:
                show_at = time.monotonic() + LIST_TTL_S / 4
                self.show()
            if time.monotonic() >= trim_at:
                trim_at = time.monotonic() + TRIM_S
                await asyncio.to_thread(self._store.trim)
                await self._make_room()

    async def close(self) -> None:
        await self.fetcher.close()
        await self.registry.close()
        self._engine.close()

    # --- what there is

    @property
    def rules(self) -> Rules:
        return self.catalogue.rules

    async def look(self, engine_ok: bool) -> None:
        """List the images on the engine."""
        self._engine_ok = engine_ok
        found: list[StoredImage] = []
        if engine_ok:
            try:
                found = await self._engine.images()
            except EngineError as error:
                log.info("%s", error)
                return
        self.stored = {image.id: image for image in found}

    def ids(self, image: Image) -> set[bytes]:
        """Return the ids that engines may have for an image: of its configuration, its manifest, or its index."""
        found = {image.config, image.manifest} - {b""}
        if (manifest := self._manifest(image.manifest)) is not None:
            chosen = manifest.for_here
            found |= {chosen.hash} if chosen is not None else set()
            found |= {blob.hash for blob in self._variant(image).blobs[:1]}
        return found

    def _manifest(self, digest: bytes) -> Manifest | None:
        with suppress(ManifestError, OSError):
            return self._store.manifest(digest) if digest else None
        return None

    def _variant(self, image: Image) -> Manifest:
        """Return the manifest of an image for this machine; an empty one if it is not here."""
        manifest = self._manifest(image.manifest)
        if manifest is not None and manifest.for_here is not None:
            manifest = self._manifest(manifest.for_here.hash)
        return manifest or Manifest("", (), ())

    def _reach(self, image: Image) -> set[bytes]:
        """Return the digests of an image's manifests and blobs, as far as its manifests are here."""
        manifest = self._manifest(image.manifest)
        if manifest is None:
            return {image.manifest} - {b""}
        children = [one.hash for one in manifest.manifests]
        known = [manifest, *(found for one in children if (found := self._manifest(one)) is not None)]
        return {image.manifest, *children, *(blob.hash for one in known for blob in one.blobs)}

    def _whole(self, image: Image) -> bool:
        """Return whether all of an image is in this node's registry."""
        blobs = self._variant(image).blobs
        return bool(blobs) and all(self._store.has(blob.hash) for blob in blobs)

    def here(self, image: Image) -> StoredImage | None:
        """The image, if the engine has it."""
        return next((self.stored[one] for one in self.ids(image) if one in self.stored), None)

    def offer(self) -> ImageOffer:
        """Return the advert's part about images: shortened hashes of allowed images only, to keep it small."""
        rules = self.rules
        tags = {name: image.id for image in self.stored.values() for name in image.names}
        tags |= {name: image.id for name, own in rules.own.allowed.items() if (image := self.here(own)) is not None}
        shared = rules.shared if self._fetches else {}
        has = {config for config, image in rules.images.items() if self.here(image) is not None}
        has |= {config for config, image in shared.items() if self._whole(image)}
        fetches: set[bytes] = set()
        lacks = {config for config in shared.keys() - has if shared[config].manifest}
        if lacks and self._engine_ok:
            elsewhere = {one for advert in self._adverts() if advert.node != self._me for one in advert.image_ids}
            fetches = {config for config in lacks if config[:SHORT] in elsewhere}
        denials = [*rules.own.denied, *(config[:SHORT].hex() for config in rules.denied_hashes)]
        return ImageOffer(
            images=_short_enough(rules.names(tags)) if self._engine_ok else (),
            image_list=rules.listed is not None and not rules.anything,
            image_ids=tuple(sorted(config[:SHORT] for config in has))[:MAX_IMAGES],
            image_fetches=tuple(sorted(config[:SHORT] for config in fetches))[:MAX_IMAGES],
            image_denials=_short_enough(sorted(denials)),
        )

    def name_of(self, identity: bytes) -> str:
        """Return the name on the list of an image with this id on the engine."""
        for alias, row in (self.rules.listed or {}).items():
            if row.entry.image is not None and identity in self.ids(row.entry.image):
                return alias
        return digest_text(identity)

    def holders(self, config: bytes) -> list[NodeId]:
        """Return the other nodes that claim to have an image."""
        return [ad.node for ad in self._adverts() if config[:SHORT] in ad.image_ids and ad.node != self._me]

    def nodes_of(self) -> dict[bytes, list[NodeId]]:
        """Return the nodes that claim to have each image, by shortened hash."""
        found: dict[bytes, list[NodeId]] = {}
        for advert in self._adverts():
            for one in advert.image_ids:
                found.setdefault(one, []).append(advert.node)
        return found

    def _adverts(self) -> list[Advert]:
        """Return the adverts of all present nodes; nodes that do not lend may have images too."""
        there = {member.node_id for member in self._membership.members() if _is_there(member)}
        found = []
        for record in self._membership.records("advert"):
            if record.node not in there:
                continue
            known = self._seen.get(record.node)
            if known is None or known[0] is not record:
                known = self._seen[record.node] = (record, _advert_of(record))
            if known[1] is not None:
                found.append(known[1])
        return found

    # --- retention

    async def fetched(self) -> dict[bytes, float]:
        """Return for how many seconds each fetched image has not been used."""
        if not self._engine_ok:
            return {}
        return await asyncio.to_thread(
            self._usage.unused, [image.id for image in self.stored.values() if image.fetched]
        )

    async def surplus(self, bounds: Bounds) -> list[Surplus]:
        unused = await self.fetched()
        return surplus(self.stored.values(), unused, bounds)

    async def remove(self, image: StoredImage) -> bool:
        """Remove an image from the engine; return whether it is gone. An image in use stays. EngineError on failure."""
        gone = await self._engine.remove(image)
        if gone:
            self.stored.pop(image.id, None)
            theirs = [one for one in self.rules.images.values() if image.id in self.ids(one)]
            needed = {one for other in self.rules.images.values() if other not in theirs for one in self._reach(other)}
            await asyncio.to_thread(self._store.drop, {one for its in theirs for one in self._reach(its)} - needed)
            log.info("image %s (%s) was removed from the engine", self.name_of(image.id), short(image.id))
            self._changed()
        return gone

    async def _make_room(self) -> None:
        try:
            for one in await self.surplus(self.bounds):
                await self.remove(one.image)
        except (EngineError, OSError) as error:
            log.info("fetched images stay for now: %s", error)

    # --- starts of jobs

    async def ready(self, name: str, wanted: bytes | None, report: Callable[[str], None]) -> str:
        """Bring an image onto the engine; return its id. BadImage with the rule that refuses it; EngineError on failure."""
        verdict = self.rules.judge(name, wanted)
        if verdict.rule:
            raise BadImage(verdict.words)
        image = await self._find(name, verdict)
        if image is None and verdict.image is not None and self._may_fetch(verdict.image):
            await self.fetcher.bring(verdict.image, name, report)
            verdict = self.rules.judge(name, wanted)  # the rules may have changed meanwhile
            if verdict.rule:
                raise BadImage(verdict.words)
            image = await self._find(name, verdict)
        if image is None:
            raise BadImage(_not_here(name, verdict))
        if image.id in self.rules.denied_hashes:
            raise BadImage(f"this node's owner denies image {name} (`mesh image deny`)")
        if image.fetched:
            await asyncio.to_thread(self._usage.used, image.id)
        return f"sha256:{image.id.hex()}"

    async def _find(self, name: str, verdict: Verdict) -> StoredImage | None:
        """Find an allowed image on the engine."""
        image = verdict.image
        if image is None:
            return await self._engine.find(name)
        ids = await asyncio.to_thread(self.ids, image)
        for digest in sorted(ids, key=lambda one: one != image.config):
            found = await self._engine.find(digest_text(digest))
            if found is not None and found.id in ids:
                return found
        return None

    async def named(self, name: str) -> StoredImage | None:
        """Return the image of that name on this node's engine."""
        return await self._engine.find(name)

    # --- prefetching

    async def fetch(self, image: Image, name: str) -> Pull | None:
        """Start to fetch an image of the list; None if it is here. BadImage if it may not run here."""
        verdict = self.rules.judge(name, image.config)
        if verdict.rule:
            raise BadImage(verdict.words)
        if not self._engine_ok:
            raise EngineError("no container engine answers on this node: `mesh status`")
        if await self._find(name, Verdict("", image=image)) is not None:
            return None
        if not self._may_fetch(image):
            raise BadImage(f"image {name} is not on the mesh's list by its manifest, so no node gives it to another")
        pull = self.fetcher.begin(image, name)
        pull.kept = True
        return pull

    def _may_fetch(self, image: Image) -> bool:
        return self._fetches and bool(image.manifest) and image.config in self.rules.shared

    async def _load(self, image: Image) -> None:
        """Have the engine pull an image from this node's registry."""
        found = None
        if self._engine_ok:
            verdict = Verdict("", image=image)
            found = await self._find("", verdict)
            if found is None:
                await self._engine.pull(image.manifest, image.config.hex()[:32])
                found = await self._find("", verdict)
                if found is None:
                    raise EngineError("the engine pulled the image, and has it under none of its digests")
            self.stored[found.id] = found
        self._changed()

    # --- the registry

    async def push(self, stored: StoredImage) -> Image:
        """Have the engine push an image into this node's registry; return it with its digests there."""
        tag = stored.id.hex()[:32]
        await self._engine.push(stored, tag)
        pushed = self.pushed(f"{PUSHED}:{tag}")
        if pushed is None:
            raise EngineError("the engine pushed the image, and its manifest did not arrive")
        await asyncio.to_thread(self._store.tag, f"{PUSHED}:{tag}", None)
        return pushed

    def pushed(self, name: str) -> Image | None:
        """Return the image that was pushed under a name into this node's registry."""
        digest = self._store.tags.get(name) or self._store.tags.get(f"{name}:latest")
        if digest is None or self._manifest(digest) is None:
            return None
        blobs = self._variant(Image(digest, digest)).blobs
        return Image(blobs[0].hash if blobs else digest, digest, sum(blob.size for blob in blobs))

    def _may_pull(self, digest: bytes) -> bool:
        return any(digest in self._reach(image) for image in self.rules.images.values())

    def _manifest_of(self, alias: str) -> bytes | None:
        image = self.rules.judge(alias, None).image
        return image.manifest or None if image is not None else None

    async def _arrival(self, digest: bytes) -> bool:
        """Wait for a blob of the list that is not here, and fetch its image if nobody does."""
        if self._store.has(digest):
            return True
        for image in self.rules.shared.values():
            if self._may_fetch(image) and digest in self._reach(image):
                self.fetcher.begin(image, self.name_of(image.config)).kept = True
                return await self.fetcher.arrival(image, digest)
        return False

    # --- other nodes

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream for the duration of the block."""
        if self._streams >= AT_ONCE:
            raise NotGiven("this node gives images to enough others now", busy=True)
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def give(self, config: bytes, digests: set[bytes]) -> list[Path]:
        """Return the verified files of some of an image's blobs. NotGiven if this node does not give all of them."""
        image = self.rules.shared.get(config)
        if image is None or not digests <= await asyncio.to_thread(self._reach, image):
            raise NotGiven("this node does not give that image, or it has no such blobs")
        paths = [await asyncio.to_thread(self._store.use, digest) for digest in sorted(digests)]
        found = [path for path in paths if path is not None]
        if len(found) < len(paths):
            raise NotGiven("this node does not have all of the image")
        return found

    def pieces(self, wanted: Sequence[bytes]) -> Iterator[bytes]:
        """Read pieces of given blobs; end early if one is gone."""
        with suppress(OSError):
            for piece in wanted:
                yield self._store.read(piece[:32], int.from_bytes(piece[32:]))

    # --- the mesh's list

    def hear(self, node: NodeId, section: str) -> None:
        """Take a new section of another node."""
        record = self._membership.record(node, section)
        if record is not None and self.catalogue.hear(record):
            self._rules_changed()

    def hear_all(self) -> None:
        for record in (*self._membership.records(SECTION), *self._membership.records(f"{SECTION}/")):
            self.hear(record.node, record.section)

    def say(self, alias: str, image: Image | None, allowed: bool) -> None:
        """Sign a new entry of the mesh's list. ListError if this node may not sign, or the entry is not valid."""
        if not self.catalogue.may_sign():
            names = sorted(credentials.nick for credentials in self.catalogue.signers())
            raise ListError(
                f"this node may not sign the mesh's list of images: only the founder and admitters may "
                f"({', '.join(names) or 'none is known here'}). For this node alone: --here"
            )
        self.catalogue.say(alias, image, allowed, self._membership.chain)
        self.show()
        self._rules_changed()

    def rule(self, own: OwnRules) -> None:
        """Replace the owner's rules."""
        self.catalogue.own = own
        self._rules_changed()

    def _rules_changed(self) -> None:
        self.fetcher.keep_only(self.rules.shared)
        self._changed()

    def show(self) -> None:
        """Publish this node's own list again."""
        body = self.catalogue.shown(self._membership.chain)
        if body is not None:
            self._membership.publish(SECTION, body, LIST_TTL_S)

    def _show_orphans(self) -> None:
        """Publish lists of absent signers; nodes take turns in rendezvous order."""
        now, mine = time.monotonic(), dict[str, bytes]()
        signers = self.catalogue.heard_of
        showing = {node for node in signers if self._membership.record(node, SECTION) is not None}
        if len(showing) == len(signers) and not self._showing:
            return
        shown: dict[str, set[NodeId]] = {}
        for record in self._membership.records(f"{SECTION}/"):
            shown.setdefault(record.section, set()).add(record.node)
        there = [(member.node_id, 1) for member in self._membership.members() if _is_there(member)]
        for signer, body in self.catalogue.orphans(showing).items():
            section = f"{SECTION}/{signer[:8].hex()}"
            order = [node for node, _ in rank(signer, there)]
            before = order[: order.index(self._me)] if self._me in order else order
            if shown.get(section, set()).intersection(before):
                self._missed.pop(section, None)
                continue
            since = self._missed.setdefault(section, now)
            if section in self._showing or now - since >= LOOK_S * min(len(before), TURNS):
                mine[section] = body
        for section, body in mine.items():
            if now - self._showing.get(section, -ORPHAN_TTL_S) > ORPHAN_TTL_S / 4:
                self._showing[section] = now
                self._membership.publish(section, body, ORPHAN_TTL_S)
        for section in self._showing.keys() - mine.keys():
            del self._showing[section]
            self._membership.withdraw(section)


def _short_enough(names: Sequence[str]) -> tuple[str, ...]:
    """Return as many names as fit into an advert."""
    found, room = list[str](), NAMES_BYTES
    for name in names[:MAX_IMAGES]:
        room -= len(name.encode()) + 2
        if room < 0:
            break
        found.append(name)
    return tuple(found)


def _is_there(member: MemberView) -> bool:
    return member.present and member.state != "unreachable"


def _advert_of(record: Record) -> Advert | None:
    try:
        return decode_advert(record.node, record.body)
    except AdvertError:
        return None


def _not_here(name: str, verdict: Verdict) -> str:
    if verdict.image is None:
        return f"image {name} is not on this node: see `docker images`, or `docker pull {name}` first"
    return f"image {name} ({short(verdict.image.config)}) is not on this node, and no node may give it"
