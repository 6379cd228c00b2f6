"""Container images: the mesh's list, this node's own rules, and bringing images to nodes."""

import asyncio
from typing import Any

import msgspec

from membership.events import MemberView
from membership.identity import NodeId
from membership.node import MembershipNode
from mesh.api import schemas
from mesh.api.handlers.lookup import find_node, nick_in, nicks_of
from mesh.api.requests import AllowImage, DenyImage, PruneImages, PushImage
from mesh.execution.engine import BadImage, EngineError
from mesh.images.allowlist import ANYTHING, Image, ListedEntry, ListError, check_alias, image_hash, user_of
from mesh.images.engine import StoredImage
from mesh.images.library import Library
from mesh.images.messages import Fetching, decode_fetching
from mesh.images.oci import digest_text
from mesh.images.rules import with_allowed, with_denied, without
from mesh.jobs.service import JobService
from mesh.model.spec import JobSpec
from mesh.rpc.client import PeerClient, PeerError
from mesh.util.errors import ExitCode, MeshError
from placement.filters import SHORT

ASK_S = 20.0


class ImageHandlers:
    def __init__(
        self, me: NodeId, membership: MembershipNode, library: Library, jobs: JobService, peers: PeerClient
    ) -> None:
        self._me, self._membership, self._library = me, membership, library
        self._jobs, self._peers = jobs, peers

    # --- for jobs

    def pin(self, name: str | None, engine: str | None) -> bytes | None:
        """Return the image id to pin in a new job; None if it goes by name. MeshError if the list refuses the image."""
        rules = self._library.rules
        if name is not None and engine == "process":
            raise MeshError("the process engine runs no image: leave out --image, or --engine process", ExitCode.USAGE)
        if name is None or rules.is_free(name):
            return None
        verdict = rules.of_mesh.judge(name, None)
        if not verdict.rule:
            return verdict.image.config if verdict.image is not None else None
        if any(name in advert.images for advert in self._jobs.mesh_view.adverts()):
            return None  # the owner of a node allows it there
        user = user_of(name)
        if user is not None:
            raise MeshError(
                f"{verdict.words}. A node of user {user} puts it there: `mesh image allow {name} --from IMAGE`",
                ExitCode.REFUSED,
            )
        who = ", ".join(sorted(credentials.nick for credentials in self._library.catalogue.signers())) or "its founder"
        raise MeshError(
            f"{verdict.words}. {who} may put it there with `mesh image allow {name}`; a node's owner may "
            f"allow it on that node with `mesh image allow {name} --here`",
            ExitCode.REFUSED,
        )

    def objections(self, spec: JobSpec) -> list[str]:
        """Return the objections of the mesh's list to a job's image."""
        if spec.image is None or spec.image_id is None:
            return []
        words = self._library.rules.of_mesh.judge(spec.image, spec.image_id).words
        return [words] if words else []

    # --- what there is

    async def all(self) -> schemas.images.Images:
        """Return the mesh's list, this node's rules and its fetched images."""
        unused = await self._library.fetched()
        library, rules = self._library, self._library.rules
        nicks, holders = nicks_of(self._membership), library.nodes_of()
        rows = [self._listed(alias, row, nicks, holders) for alias, row in sorted(rules.rows.items())]
        named: dict[str, list[str]] = {}
        for advert in self._jobs.mesh_view.adverts():
            for name in advert.images:
                named.setdefault(name, []).append(nicks.get(advert.node, advert.nick))
        return schemas.images.Images(
            listed=rules.listed is not None,
            anything=rules.anything,
            may_sign=library.catalogue.may_sign(),
            signers=sorted(credentials.nick for credentials in library.catalogue.signers()),
            images=[row for row in rows if row.alias != ANYTHING],
            own=schemas.images.OwnRules(
                allowed={
                    alias: schemas.images.Digests(**_digests(image))
                    for alias, image in sorted(rules.own.allowed.items())
                },
                denied=sorted(rules.own.denied),
            ),
            fetched=schemas.images.FetchedImages(
                images=[
                    schemas.images.FetchedImage(**self._named(image), unused_s=round(unused[image.id]))
                    for image in sorted(self._library.stored.values(), key=lambda image: image.id)
                    if image.id in unused
                ],
                most_bytes=self._library.bounds.most_bytes,
                most_unused_s=self._library.bounds.unused_s,
            ),
            by_name=[schemas.images.ByName(name=name, nodes=sorted(nodes)) for name, nodes in sorted(named.items())],
        )

    def _listed(
        self, alias: str, row: ListedEntry, nicks: dict[NodeId, str], holders: dict[bytes, list[NodeId]]
    ) -> schemas.images.Listed:
        library, image = self._library, row.entry.image
        state = how_far(library, image.config) if image is not None else Fetching(False)
        having = holders.get(image.config[:SHORT], []) if image is not None else []
        nodes = [nick_in(nicks, node) for node in having]
        return schemas.images.Listed(
            alias=alias,
            allowed=row.entry.allowed,
            by=nick_in(nicks, row.signer),
            counter=row.entry.counter,
            **_digests(image),
            denied_here=image is not None and bool(library.rules.judge(alias, image.config).rule),
            here=state.here,
            fetching="" if state.here or state.failed else state.words,
            problem=state.words if state.failed else "",
            nodes=sorted(nodes),
        )

    # --- what does not stay

    async def prune(self, order: PruneImages) -> schemas.images.AllPruned:
        """Remove what was fetched and is not used. `words`: why it goes, or why it could not."""
        library, bounds = self._library, self._library.bounds
        if order.unused_s is not None:
            bounds = msgspec.structs.replace(bounds, unused_s=order.unused_s)
        rows: list[schemas.images.Pruned] = []
        try:
            for one in await library.surplus(bounds):
                gone = order.dry_run or await library.remove(one.image)
                words = one.why if gone else "a container is made of it"
                rows.append(
                    schemas.images.Pruned(
                        **self._named(one.image), unused_s=round(one.unused_s), gone=gone, words=words
                    )
                )
        except EngineError as error:
            raise MeshError(str(error)) from error
        return schemas.images.AllPruned(dry_run=order.dry_run, images=rows)

    def _named(self, image: StoredImage) -> dict[str, Any]:
        return {"alias": self._library.name_of(image.id), "id": f"sha256:{image.id.hex()}", "bytes": image.size}

    # --- what may be run

    async def allow(self, order: AllowImage) -> schemas.images.Allowed:
        library = self._library
        first = library.rules.is_free(order.alias) and not order.here
        try:
            if order.alias == ANYTHING:
                if order.here or order.source or order.id:
                    raise ListError("`*` stands for every image, on the mesh's list: it has no --from, --id or --here")
                library.say(ANYTHING, None, True)
                return self._allowed(ANYTHING, None, first=first)
            row = library.rules.rows.get(check_alias(order.alias))
            if order.here and row is not None and row.entry.image is not None and not (order.source or order.id):
                image = row.entry.image  # the owner had denied it: the mesh's list decides again
                library.rule(without(library.rules.own, order.alias))
                return self._allowed(order.alias, image, here=True, by_list=True)
            image = await self._image(order.alias, order)
            if order.here:
                library.rule(with_allowed(library.rules.own, order.alias, image))
            else:
                library.say(order.alias, image, True)
        except ListError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        return self._allowed(order.alias, image, here=order.here, first=first)

    def _allowed(
        self, alias: str, image: Image | None, here: bool = False, first: bool = False, by_list: bool = False
    ) -> schemas.images.Allowed:
        library = self._library
        return schemas.images.Allowed(
            alias=alias,
            here=here,
            first=first,
            by_list=by_list,
            listed=library.rules.listed is not None,
            denied_here=image is not None and bool(library.rules.judge(alias, image.config).rule),
            on_engine=image is not None and library.here(image) is not None,
            **_digests(image),
        )

    async def _image(self, alias: str, order: AllowImage) -> Image:
        """Return the image that is meant, with both of its digests."""
        given, name = image_hash(order.id), order.source or order.id or alias
        if order.id and (given is None or order.source):
            raise MeshError(
                "--id takes sha256: and 64 hex digits, the image id of `docker images --no-trunc`, in place of --from",
                ExitCode.USAGE,
            )
        pushed = self._library.pushed(name) if given is None else None
        if pushed is not None:
            return pushed
        try:
            found = await self._library.engine.find(name)
        except EngineError as error:
            if given is None:
                raise MeshError(f"{error}: an image of another node is named by --id sha256:...") from error
            found = None
        if found is None and given is None:
            raise MeshError(
                f"image {name} is not on this node's engine: `docker images` lists what is; name it with --from",
                ExitCode.NOT_FOUND,
            )
        if found is None:
            assert given is not None
            return Image(given)
        self._library.stored[found.id] = found
        if order.here:
            return Image(found.id, b"", found.size)
        return msgspec.structs.replace(await self._push(found), size=found.size)

    async def _push(self, stored: StoredImage) -> Image:
        try:
            return await self._library.push(stored)
        except EngineError as error:
            raise MeshError(str(error)) from error

    async def deny(self, order: DenyImage) -> schemas.images.Denied:
        library, rules = self._library, self._library.rules
        row = rules.rows.get(order.alias)
        try:
            if order.alias != ANYTHING or not order.mesh:
                check_alias(order.alias)
            if order.mesh:
                if row is None or not row.entry.allowed:
                    raise MeshError(
                        f"{order.alias} is not on the mesh's list: `mesh image ls` shows what is", ExitCode.NOT_FOUND
                    )
                library.say(order.alias, None, False)
            else:
                library.rule(with_denied(rules.own, order.alias, await self._hashes(order.alias, row)))
        except ListError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        own = order.alias in library.rules.own.allowed
        return schemas.images.Denied(alias=order.alias, mesh=order.mesh, still_allowed_here=own and order.mesh)

    async def _hashes(self, alias: str, row: ListedEntry | None) -> frozenset[bytes]:
        """Return every image id that the alias may mean on this node."""
        found = {image.config for image in (self._library.rules.own.allowed.get(alias),) if image is not None}
        if row is not None and row.entry.image is not None:
            return frozenset({*found, row.entry.image.config})
        try:
            stored = await self._library.engine.find(alias)
        except EngineError:
            stored = None
        return frozenset({*found, *((stored.id,) if stored is not None else ())})

    # --- bringing them

    async def pull(self, alias: str) -> schemas.images.ImagePulled:
        """Start to fetch an image; `mesh image ls` shows the progress."""
        image = self._wanted(alias)
        try:
            pull = await self._library.fetch(image, alias)
        except BadImage as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        except EngineError as error:
            raise MeshError(str(error)) from error
        return schemas.images.ImagePulled(
            alias=alias, here=pull is None, words="" if pull is None else self._library.words(image), **_digests(image)
        )

    async def push(self, order: PushImage) -> schemas.images.Pushed:
        """Push an image into this node's registry; or ask nodes to fetch it, or how far they are."""
        if not order.nodes:
            return await self._into_registry(order.alias)
        image = self._wanted(order.alias)
        nodes = [find_node(self._membership, name) for name in dict.fromkeys(order.nodes)]
        replies = await asyncio.gather(*(self._ask(node, image, order.look) for node in nodes))
        rows: list[schemas.images.Fetching] = [
            schemas.images.Fetching(node=node.nick, here=answer.here, words=answer.words, failed=answer.failed)
            for node, answer in zip(nodes, replies, strict=True)
        ]
        return schemas.images.Pushed(alias=order.alias, manifest="", nodes=rows)

    async def _into_registry(self, name: str) -> schemas.images.Pushed:
        try:
            found = await self._library.engine.find(name)
            if found is None:
                raise MeshError(f"image {name} is not on this node's engine: `docker images`", ExitCode.NOT_FOUND)
            image = await self._library.push(found)
        except EngineError as error:
            raise MeshError(str(error)) from error
        return schemas.images.Pushed(alias=name, manifest=digest_text(image.manifest), nodes=[])

    def registry(self) -> schemas.images.Registry:
        access = self._library.registry.access
        return schemas.images.Registry(address=access.address, user="mesh", password=access.password)

    async def _ask(self, node: MemberView, image: Image, look: bool) -> Fetching:
        path, method = f"/v1/images/{image.config.hex()}/fetch", "GET" if look else "POST"
        if node.node_id == self._me:
            if not look:
                await self.pull(self._library.name_of(image.config))
            return how_far(self._library, image.config)
        try:
            return decode_fetching(await self._peers.call(node.node_id, method, path, timeout_s=ASK_S))
        except (PeerError, ValueError) as error:
            return Fetching(False, str(error), True)

    def _wanted(self, alias: str) -> Image:
        rules = self._library.rules
        if rules.is_free(alias):
            raise MeshError(
                "this mesh has no list of images, so nodes give none to each other: `mesh image allow ALIAS` begins one",
                ExitCode.REFUSED,
            )
        verdict = rules.of_mesh.judge(alias, None)
        if verdict.rule or verdict.image is None:
            raise MeshError(
                verdict.words or f"image {alias} is not on the mesh's list by its digest: `mesh image ls`",
                ExitCode.REFUSED,
            )
        return verdict.image


def how_far(library: Library, config: bytes) -> Fetching:
    """Return whether this node has an image, or the progress of fetching it."""
    image = library.rules.images.get(config) or Image(config)
    if library.here(image) is not None:
        return Fetching(True)
    pull = library.pulls.get(config)
    if pull is None:
        return Fetching(False)
    if not pull.task.done():
        return Fetching(False, library.words(image))
    if pull.task.cancelled():
        return Fetching(False, "it was stopped", True)
    error = pull.task.exception()
    return Fetching(False, str(error) if error is not None else "it was removed again", True)


def _digests(image: Image | None) -> dict[str, Any]:
    """Return the fields of `Digests`; empty without an image."""
    return {
        "id": f"sha256:{image.config.hex()}" if image is not None else "",
        "manifest": f"sha256:{image.manifest.hex()}" if image is not None and image.manifest else "",
        "bytes": image.size if image is not None else 0,
    }
