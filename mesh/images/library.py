"""The images of this node: those allowed, those present and those available elsewhere, published by advert and sections.

A shell around the catalogue (rules), the blobs, the registry (for this machine) and the fetcher (from other nodes). The start of
a job calls `ready`, which has the engine pull the image from this node's registry; the registry fetches what it lacks.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from membership.events import MemberView
from membership.identity import Identity, NodeId
from membership.node import MembershipNode
from membership.records import Record
from membership.trust import TrustStore
from mesh.execution.engine import BadImage, EngineError
from mesh.images.allowlist import Image, ListError, user_of
from mesh.images.apptainer import ApptainerImages
from mesh.images.blobs import BlobStore, FetchFailed
from mesh.images.catalogue import SECTION, Catalogue
from mesh.images.engine import PUSHED, ImageEngine, StoredImage
from mesh.images.fetcher import BlobFetcher, Origin
from mesh.images.oci import digest_text
from mesh.images.registry import RegistryServer
from mesh.images.retention import Bounds, Surplus, UsageMarks, surplus
from mesh.images.rules import OwnRules, Rules, Verdict, short
from mesh.images.upstream import Upstream
from mesh.rpc.client import PeerClient
from mesh.util.byte_text import part
from mesh.util.shared_task import SharedTask
from placement.advert import MAX_IMAGES, Advert, AdvertError, decode_advert
from placement.filters import SHORT, ImageOffer
from placement.rendezvous import rank

LIST_TTL_S = 14 * 86_400.0  # before it ends, other nodes publish an absent signer's list
ORPHAN_TTL_S = 3600.0
LOOK_S = 2.0  # between checks for lists that nobody publishes (own choice)
TURNS = 12  # after which every node that might publish a list has had a chance (own choice)
TRIM_S = 60.0
TELL_S = 0.5  # between reports of progress
NAMES_BYTES = 4096  # of names in an advert, which has 16 KiB in all (own choice)
AGAIN_S = 10.0  # before another try to write a list (own choice)

log = logging.getLogger(__name__)


class NotGiven(Exception):
    """This node does not give a blob; the text says why."""


class Library:
    """The images of one node.

    `blame` reports a node that sent wrong data; `changed` is called when this node's offer changes; `fetches`: the owner allows
    fetching, also from the public `registries`; `users`: whose personal images run here; `registry_port`: 0 for any; `bounds`:
    limits of fetched images.
    """

    def __init__(
        self,
        root: Path,
        cache_bytes: int,
        fetches: bool,
        registries: Sequence[str],
        users: Sequence[str],
        registry_port: int,
        bounds: Bounds,
        identity: Identity,
        trust: TrustStore,
        membership: MembershipNode,
        peers: PeerClient,
        blame: Callable[[NodeId, str], None],
        changed: Callable[[], None],
    ) -> None:
        self.catalogue = Catalogue(root, identity, trust, time.time, users)
        self.stored: dict[bytes, StoredImage] = {}
        self.pulls: dict[bytes, SharedTask] = {}
        self.bounds = bounds
        self._me, self._membership = identity.node_id, membership
        self._root, self._cache_bytes, self._fetches, self._changed = root, cache_bytes, fetches, changed
        self._peers, self._upstream, self._blame = peers, Upstream(registries if fetches else ()), blame
        self._seen: dict[NodeId, tuple[Record, Advert | None]] = {}
        self._registry_port = registry_port
        self._stores: dict[str, ImageEngine | ApptainerImages] = {
            "docker": ImageEngine(lambda: self.registry.access),
            "apptainer": ApptainerImages(root / "apptainer", lambda: self.registry.access),
        }
        self.engine = self._stores["docker"]
        self._engine_ok = False
        self._turn = asyncio.Semaphore()
        self._showing: dict[str, float] = {}
        self._writing: asyncio.Task[None] | None = None
        self._missed: dict[str, float] = {}  # since when no node ranked before this one publishes a list

    async def open(self) -> None:
        """Prepare the library before its first use. MeshError if the owner's rules cannot be read."""
        self._store = await asyncio.to_thread(BlobStore, self._root, self._cache_bytes)
        self._usage = await asyncio.to_thread(UsageMarks, self._root)
        await asyncio.to_thread(self.catalogue.load)
        store = self._store
        self.fetcher = BlobFetcher(self._me, store, self._peers, "/v1/images/blobs", self._origin, self._blame)
        self.registry = RegistryServer(
            store,
            self._root / "port",
            lambda digest: self._names(digest, self.rules.images.values()),
            self._manifest_of,
            self.fetcher.bring,
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
        if self._writing is not None:
            self._writing.cancel()
            with suppress(OSError):
                await self.catalogue.write()
        await asyncio.gather(*(pull.end() for pull in self.pulls.values()))
        await self.registry.close()
        await self.fetcher.close()
        for store in self._stores.values():
            store.close()

    # --- what there is

    @property
    def rules(self) -> Rules:
        return self.catalogue.rules

    async def look(self, ready: str) -> None:
        """List the images of the engine that is ready; "" if none is."""
        self._engine_ok = engine_ok = bool(ready)
        self.engine = self._stores.get(ready, self.engine)
        try:
            found = await self.engine.images() if engine_ok else []
        except EngineError as error:
            log.info("%s", error)
            return
        self.stored = {image.id: image for image in found}

    def ids(self, image: Image) -> set[bytes]:
        """Return the ids that engines may have for an image: of its configuration, its manifest, or its index."""
        chosen = self._store.peek(image.manifest).for_here
        blobs = self._store.variant(image.manifest).blobs
        more = [one.hash for one in (chosen, *blobs[:1]) if one is not None]
        return {image.config, image.manifest, *more} - {b""}

    def here(self, image: Image) -> StoredImage | None:
        """The image, if the engine has it."""
        return next((self.stored[one] for one in self.ids(image) if one in self.stored), None)

    def _whole(self, image: Image) -> bool:
        """Return whether all of an image is in this node's registry."""
        blobs = self._store.variant(image.manifest).blobs
        return bool(blobs) and all(self._store.has(blob.hash) for blob in blobs)

    def _names(self, digest: bytes, images: Collection[Image]) -> bool:
        """Return whether one of these images has this manifest or blob."""
        return any(digest in self._store.reach(image.manifest) for image in images)

    def offer(self) -> ImageOffer:
        """Return the advert's part about images: shortened hashes of allowed images only, to keep it small."""
        rules = self.rules
        tags = {name: image.id for image in self.stored.values() for name in image.names}
        tags |= {name: image.id for name, own in rules.own.allowed.items() if (image := self.here(own)) is not None}
        has = {config for config, image in rules.images.items() if self.here(image) is not None}
        has |= {config for config in rules.shared if self._fetches and self._whole(rules.shared[config])}
        nodes, fetches = self.nodes_of() if self._engine_ok else {}, set[bytes]()
        for alias, row in rules.rows.items() if self._engine_ok else ():
            one = row.entry.image
            if one is not None and one.config not in has and self._may_fetch(one):
                others = {*nodes.get(one.config[:SHORT], ())} - {self._me}
                fetches |= {one.config} if others or self._upstream.places([alias]) else set()
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
        for alias, row in self.rules.rows.items():
            if row.entry.image is not None and identity in self.ids(row.entry.image):
                return alias
        return digest_text(identity)

    def nodes_of(self) -> dict[bytes, list[NodeId]]:
        """Return the present nodes that claim to have each image, by shortened hash; also nodes that do not lend."""
        there = {member.node_id for member in self._membership.members() if _is_there(member)}
        found: dict[bytes, list[NodeId]] = {}
        for record in self._membership.records("advert"):
            if record.node not in there:
                continue
            known = self._seen.get(record.node)
            if known is None or known[0] is not record:
                known = self._seen[record.node] = (record, _advert_of(record))
            for one in known[1].image_ids if known[1] is not None else ():
                found.setdefault(one, []).append(record.node)
        return found

    # --- retention

    async def fetched(self) -> dict[bytes, float]:
        """Return for how many seconds each fetched image has not been used."""
        images = [image.id for image in self.stored.values() if image.fetched]
        return await asyncio.to_thread(self._usage.unused, images) if self._engine_ok else {}

    async def surplus(self, bounds: Bounds) -> list[Surplus]:
        unused = await self.fetched()
        return surplus(self.stored.values(), unused, bounds)

    async def remove(self, image: StoredImage) -> bool:
        """Remove an image from the engine; return whether it is gone. An image in use stays. EngineError on failure."""
        gone = await self.engine.remove(image)
        if gone:
            self.stored.pop(image.id, None)
            images = self.rules.images.values()
            reach = [self._store.reach(one.manifest) for one in images if image.id in self.ids(one)]
            needed = [self._store.reach(one.manifest) for one in images if image.id not in self.ids(one)]
            await asyncio.to_thread(self._store.drop, set().union(*reach) - set().union(*needed))
            log.info("image %s (%s) was removed from the engine", self.name_of(image.id), short(image.id))
            self._changed()
        return gone

    async def _make_room(self) -> None:
        try:
            for one in await self.surplus(self.bounds):
                await self.remove(one.image)
        except (EngineError, OSError) as error:
            log.info("fetched images stay for now: %s", error)

    # --- onto the engine

    async def ready(self, name: str, wanted: bytes | None, report: Callable[[str], None]) -> str:
        """Bring an image onto the engine; return its id. BadImage with the rule that refuses it; EngineError on failure."""
        image: StoredImage | None = None
        for came in (False, True):  # again after a fetch: the rules may have changed meanwhile
            verdict = self.rules.judge(name, wanted)
            if verdict.rule:
                raise BadImage(verdict.words)
            image = await self._find(name, verdict.image)
            if came or image is not None or verdict.image is None or not self._may_fetch(verdict.image):
                break
            await self._bring(verdict.image, name, report)
        if image is None:
            raise BadImage(_not_here(name, verdict))
        if image.id in self.rules.denied_hashes:
            raise BadImage(f"this node's owner denies image {name} (`mesh image deny`)")
        if image.fetched:
            await asyncio.to_thread(self._usage.used, image.id)
        return digest_text(image.id)

    async def _find(self, name: str, image: Image | None) -> StoredImage | None:
        """Find an allowed image on the engine; without `image`, what has this name."""
        if image is None:
            return await self.engine.find(name)
        ids = await asyncio.to_thread(self.ids, image)
        for digest in sorted(ids, key=lambda one: one != image.config):
            found = await self.engine.find(digest_text(digest))
            if found is not None and found.id in ids:
                self.stored[found.id] = found  # also one whose fetch was stopped, and which the engine got all the same
                return found
        return None

    async def fetch(self, image: Image, name: str) -> SharedTask | None:
        """Start to fetch an image of the list; None if it is here. BadImage if it may not run here."""
        verdict = self.rules.judge(name, image.config)
        if verdict.rule:
            raise BadImage(verdict.words)
        if not self._engine_ok:
            raise EngineError("no container engine answers on this node: `mesh status`")
        if await self._find(name, image) is not None:
            return None
        if not self._may_fetch(image):
            raise BadImage(f"image {name} is not on the mesh's list by its manifest, so no node gives it to another")
        pull = self._begin(image, name)
        pull.kept = True
        return pull

    def _may_fetch(self, image: Image) -> bool:
        return self._fetches and bool(image.manifest) and image.config in self.rules.shared

    def _begin(self, image: Image, name: str) -> SharedTask:
        pull = self.pulls.get(image.config)
        if pull is None or pull.task.done() or pull.task.cancelling():
            pull = self.pulls[image.config] = SharedTask(self._pull(image, name), f"image {short(image.config)}")
            pull.task.add_done_callback(_heard)
        return pull

    async def _bring(self, image: Image, name: str, report: Callable[[str], None]) -> None:
        """Fetch an image, and report the progress. The fetch ends when no caller waits for it."""
        pull = self._begin(image, name)
        await pull.wait(lambda: report(self.words(image)), TELL_S)
        if pull.task.cancelled():
            raise EngineError(
                f"image {name} is not fetched any more: this node is leaving, or the image may not be run here now"
            )

    async def _pull(self, image: Image, name: str) -> None:
        """Have the engine pull an image from this node's registry. One image at a time."""
        async with self._turn:
            if await self._find(name, image) is None:
                try:
                    await self._bring_manifests(image.manifest)
                    await self.engine.pull(image.manifest, image.config.hex()[:32])
                except (EngineError, FetchFailed) as error:
                    states = [self.fetcher.state(digest)[1] for digest in self._store.reach(image.manifest)]
                    words = "; ".join(dict.fromkeys(why for why in states if why))
                    missing = (
                        f"image {name} ({short(image.config)}) is not on this node, and could not be fetched: {words}"
                    )
                    raise (BadImage(missing) if words else EngineError(str(error))) from error
            if await self._find(name, image) is None:
                raise EngineError("the engine pulled the image, and has it under none of its digests")
        self._changed()

    async def _bring_manifests(self, digest: bytes) -> None:
        """Bring an image's manifests, which say that its blobs may be fetched. An engine that has them asks only for blobs."""
        await self.fetcher.bring(digest)
        for_here = (await asyncio.to_thread(self._store.peek, digest)).for_here
        if for_here is not None:
            await self.fetcher.bring(for_here.hash)

    def words(self, image: Image) -> str:
        """Return the progress of a pull."""
        blobs = self._store.variant(image.manifest).blobs
        if not blobs:
            return "is looked for on other nodes"
        here = (blob.size if self._store.has(blob.hash) else self.fetcher.state(blob.hash)[0] for blob in blobs)
        return part(sum(here), sum(blob.size for blob in blobs))

    # --- the registry

    async def push(self, stored: StoredImage) -> Image:
        """Have the engine push an image into this node's registry; return it with its digests there."""
        tag = stored.id.hex()[:32]
        await self.engine.push(stored, tag)
        pushed = self.pushed(f"{PUSHED}:{tag}")
        if pushed is None:
            raise EngineError("the engine pushed the image, and its manifest did not arrive")
        await asyncio.to_thread(self._store.tag, f"{PUSHED}:{tag}", None)
        return pushed

    def pushed(self, name: str) -> Image | None:
        """Return the image that was pushed under a name into this node's registry."""
        digest = self._store.tags.get(name) or self._store.tags.get(f"{name}:latest") or b""
        blobs = self._store.variant(digest).blobs
        known = blobs or self._store.peek(digest).manifests
        return Image(blobs[0].hash if blobs else digest, digest, sum(blob.size for blob in blobs)) if known else None

    def _manifest_of(self, alias: str) -> bytes | None:
        image = self.rules.judge(alias, None).image
        return image.manifest or None if image is not None else None

    def _origin(self, digest: bytes, name: str) -> Origin:
        """Return where a blob may be: of an image on the list, or, with `name`, of any image of the public registries."""
        rows = [(alias, row.entry.image) for alias, row in self.rules.rows.items()]
        images = {
            alias: image
            for alias, image in rows
            if image is not None and self._may_fetch(image) and self._names(digest, [image])
        }
        if not images and not name:
            raise FetchFailed("it is not on the list of images")
        nodes = self.nodes_of()
        size, is_manifest = self._store.described(digest) or (None, True)
        holders = {node: size for one in images.values() for node in nodes.get(one.config[:SHORT], ())}
        places = self._upstream.places([*images, *([name] if name else ())])
        fetch = partial(self._upstream.bring, self._store, places, digest, size, is_manifest)
        return Origin(holders, fetch if places else None)

    def given(self, digest: bytes, pieces: Sequence[int]) -> Iterator[bytes]:
        """Return pieces of a blob of the list, for another node. NotGiven if this node does not give them. Blocks."""
        if not self._names(digest, tuple(self.rules.shared.values())) or self._store.use(digest) is None:
            raise NotGiven("this node does not give that blob, or has none of that digest")
        return self._store.pieces(digest, pieces)

    # --- the mesh's list

    def hear(self, node: NodeId, section: str) -> None:
        """Take a new section of another node."""
        record, before = self._membership.record(node, section), self.rules.listed
        if record is not None and self.catalogue.hear(record):
            if self._writing is None or self._writing.done():
                self._writing = asyncio.create_task(self._write_lists(), name="write lists of images")
            self._end_pulls()
            # Not for a user's own images: any member could have all nodes publish their adverts again and again.
            if self.rules.listed != before:
                self._changed()

    async def _write_lists(self) -> None:
        """Write the lists that were heard; try again until it succeeds."""
        problems = self._membership.problems
        while self.catalogue.unwritten:
            try:
                await self.catalogue.write()
                problems.pop("images", None)
            except OSError as error:
                problems["images"] = f"the mesh's list of images cannot be written ({error}): a restart forgets it"
                await asyncio.sleep(AGAIN_S)

    def hear_all(self) -> None:
        for record in (*self._membership.records(SECTION), *self._membership.records(f"{SECTION}/")):
            self.hear(record.node, record.section)

    def say(self, alias: str, image: Image | None, allowed: bool) -> None:
        """Sign a new entry of the mesh's list. ListError if this node may not sign, or the entry is not valid."""
        if not self.catalogue.may_sign(alias):
            user = user_of(alias)
            if user is not None:
                raise ListError(f"only a node of user {user} may sign {alias}")
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
        self._end_pulls()
        self._changed()

    def _end_pulls(self) -> None:
        """End the fetches of images that may not run here any more."""
        for config, pull in self.pulls.items():
            if config not in self.rules.shared and not pull.task.done():
                pull.task.cancel()

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


def _heard(task: "asyncio.Task[None]") -> None:
    """Log an unexpected error of a pull that no caller awaits."""
    with suppress(asyncio.CancelledError):
        error = task.exception()
        if error is not None and not isinstance(error, EngineError):
            log.error("%s failed", task.get_name(), exc_info=error)
