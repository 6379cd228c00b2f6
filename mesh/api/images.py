"""Images between nodes (dockets and pieces, by hash), and `mesh image`: what people at this node ask and order of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from membership.events import MemberView
from membership.identity import NodeId, short_id
from membership.trust import Standing
from mesh.api.errors import ExitCode, MeshError
from mesh.api.orders import AllowImage, DenyImage, PruneImages, PushImage
from mesh.api.peer import PeerError
from mesh.api.streams import given
from mesh.api.wire import Cargo
from mesh.engine.engine import BadImage, EngineError
from mesh.engine.imagestore import StoredImage
from mesh.images.allowlist import ANYTHING, Image, ListError, Said, check_alias, image_hash
from mesh.images.giving import NotGiven, TooBusy
from mesh.images.questions import Fetching, decode_fetching, decode_pieces, encode
from mesh.images.rules import Rules, short, with_allowed, with_denied, without
from mesh.jobs.spec import JobSpec
from placement.images import SHORT

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon
    from mesh.images.library import Library

ASK_S = 20.0

Admit = Callable[[web.Request], Awaitable[tuple[Standing, bytes]]]


class ImageApi:
    """`admit` checks who calls."""

    def __init__(self, daemon: "Daemon", admit: Admit) -> None:
        self._daemon, self._admit = daemon, admit

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/images/{image}", self._offer),
            web.get("/v1/images/{image}/docket", self._docket),
            web.post("/v1/images/{image}/pieces", self._pieces),
            web.get("/v1/images/{image}/fetch", self._fetching),
            web.post("/v1/images/{image}/fetch", self._fetch),
        ]

    async def _offer(self, request: web.Request) -> web.Response:
        await self._admit(request)
        try:
            return web.Response(body=encode(await self._library.giving.offer(_config(request))))
        except NotGiven as error:
            raise web.HTTPNotFound(text=str(error)) from error

    async def _docket(self, request: web.Request) -> web.Response:
        await self._admit(request)
        try:
            return web.Response(body=encode(await self._library.giving.answer(_config(request))))
        except NotGiven as error:
            raise web.HTTPNotFound(text=str(error)) from error

    async def _pieces(self, request: web.Request) -> web.StreamResponse:
        standing, body = await self._admit(request)
        giving = self._library.giving
        try:
            wanted = decode_pieces(body)
            with giving.stream():
                pieces = await giving.pieces(_config(request), wanted)
                cargo = Cargo("image", standing.node_id)
                return (await given(request, self._daemon.wire, pieces, cargo)).response
        except NotGiven as error:
            raise web.HTTPNotFound(text=str(error)) from error
        except TooBusy as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error

    async def _fetch(self, request: web.Request) -> web.Response:
        """Somebody wishes that this node have an image: whoever may run jobs here could bring that about anyway."""
        standing, _ = await self._admit(request)
        config, accepts = _config(request), self._daemon.settings.accepts
        own = standing.user == self._daemon.membership.standing.user
        if not own and "*" not in accepts and standing.user not in accepts:
            raise web.HTTPForbidden(text=f"this node takes nothing of {standing.user}")
        image = self._library.rules.shared.get(config)
        if image is None:
            known = self._library.rules.judge(self._library.name_of(config), config)
            raise web.HTTPForbidden(text=known.words or f"image {short(config)} is not on the mesh's list")
        try:
            await self._library.fetch(image, self._library.name_of(config))
        except EngineError as error:
            raise web.HTTPForbidden(text=str(error)) from error
        return self._how_far(config)

    async def _fetching(self, request: web.Request) -> web.Response:
        await self._admit(request)
        return self._how_far(_config(request))

    def _how_far(self, config: bytes) -> web.Response:
        return web.Response(body=encode(how_far(self._library, config)))

    @property
    def _library(self) -> "Library":
        return self._daemon.library


class ImageDesk:
    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon

    @property
    def _library(self) -> "Library":
        return self._daemon.library

    # --- for jobs

    def pin(self, name: str | None, engine: str | None) -> bytes | None:
        """The hash that a job which is submitted now shall run by; None if it goes by name. MeshError if the list refuses it."""
        rules = self._library.rules
        if name is None or engine == "process" or rules.listed is None:
            return None
        verdict = Rules(rules.listed).judge(name, None)
        if not verdict.rule:
            return verdict.image.config if verdict.image is not None else None
        if any(name in advert.images for advert in self._daemon.jobs.outlook.adverts()):
            return None  # the owner of a node allows it there
        who = ", ".join(sorted(standing.nick for standing in self._library.catalogue.signers())) or "its founder"
        raise MeshError(
            f"{verdict.words}. Who may put it there: {who}, by `mesh image allow {name}`; for his own node alone its owner, by "
            f"`mesh image allow {name} --here`",
            ExitCode.REFUSED,
        )

    def objections(self, spec: JobSpec) -> list[str]:
        """What the mesh's list has against a job's image by now."""
        listed = self._library.rules.listed
        if spec.image is None or spec.image_id is None or listed is None:
            return []
        words = Rules(listed).judge(spec.image, spec.image_id).words
        return [words] if words else []

    # --- what there is

    async def all(self) -> "answers.images.Images":
        """`mesh image ls`."""
        unused = await self._library.fetched()
        library, rules = self._library, self._library.rules
        nicks, holders = self._nicks(), library.nodes_of()
        rows = [self._listed(alias, said, nicks, holders) for alias, said in sorted((rules.listed or {}).items())]
        named: dict[str, list[str]] = {}
        for advert in self._daemon.jobs.outlook.adverts():
            for name in advert.images:
                named.setdefault(name, []).append(nicks.get(advert.node, advert.nick))
        return {
            "listed": rules.listed is not None,
            "anything": rules.anything,
            "may_sign": library.catalogue.may_sign(),
            "signers": sorted(standing.nick for standing in library.catalogue.signers()),
            "images": [row for row in rows if row["alias"] != ANYTHING],
            "own": {
                "allowed": {alias: _digests(image) for alias, image in sorted(rules.own.allowed.items())},
                "denied": sorted(rules.own.denied),
            },
            "fetched": {
                "images": [
                    {**self._named(image), "unused_s": round(unused[image.id])}
                    for image in sorted(self._library.stored.values(), key=lambda image: image.id)
                    if image.id in unused
                ],
                "most_bytes": self._library.bounds.most_bytes,
                "most_unused_s": self._library.bounds.unused_s,
            },
            "by_name": [{"name": name, "nodes": sorted(nodes)} for name, nodes in sorted(named.items())],
        }

    def _listed(
        self, alias: str, said: Said, nicks: dict[NodeId, str], holders: dict[bytes, list[NodeId]]
    ) -> "answers.images.Listed":
        library, image = self._library, said.word.image
        state = how_far(library, image.config) if image is not None else Fetching(False)
        having = holders.get(image.config[:SHORT], []) if image is not None else []
        nodes = [nicks.get(node, short_id(node)) for node in having]
        return {
            "alias": alias,
            "allowed": said.word.allowed,
            "by": nicks.get(said.signer, short_id(said.signer)),
            "counter": said.word.counter,
            **_digests(image),
            "denied_here": image is not None and bool(library.rules.judge(alias, image.config).rule),
            "here": state.here,
            "fetching": "" if state.here or state.failed else state.words,
            "problem": state.words if state.failed else "",
            "nodes": sorted(nodes),
        }

    # --- what does not stay

    async def prune(self, order: PruneImages) -> "answers.images.AllPruned":
        """Remove what was fetched and is not used. `words`: why it goes, or why it could not."""
        library, bounds = self._library, self._library.bounds
        if order.unused_s is not None:
            bounds = msgspec.structs.replace(bounds, unused_s=order.unused_s)
        rows: list[answers.images.Pruned] = []
        try:
            for one in await library.surplus(bounds):
                gone = order.dry_run or await library.remove(one.image)
                words = one.why if gone else "a container is made of it"
                rows.append({**self._named(one.image), "unused_s": round(one.unused_s), "gone": gone, "words": words})
        except EngineError as error:
            raise MeshError(str(error)) from error
        return {"dry_run": order.dry_run, "images": rows}

    def _named(self, image: StoredImage) -> "answers.images.Named":
        return {"alias": self._library.name_of(image.id), "id": f"sha256:{image.id.hex()}", "bytes": image.size}

    # --- what may be run

    async def allow(self, order: AllowImage) -> "answers.images.Allowed":
        library = self._library
        first = library.rules.listed is None and not order.here
        try:
            if order.alias == ANYTHING:
                if order.here or order.source or order.id:
                    raise ListError("`*` stands for every image, on the mesh's list: it has no --from, --id or --here")
                library.say(ANYTHING, None, True)
                return self._allowed(ANYTHING, None, first=first)
            said = (library.rules.listed or {}).get(check_alias(order.alias))
            if order.here and said is not None and said.word.image is not None and not (order.source or order.id):
                image = said.word.image  # what he denied, he lets the mesh's list decide again
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
    ) -> "answers.images.Allowed":
        library = self._library
        return {
            "alias": alias,
            "here": here,
            "first": first,
            "by_list": by_list,
            "listed": library.rules.listed is not None,
            "denied_here": image is not None and bool(library.rules.judge(alias, image.config).rule),
            "on_engine": image is not None and library.here(image) is not None,
            **_digests(image),
        }

    async def _image(self, alias: str, order: AllowImage) -> Image:
        """What is meant, by both of its digests."""
        given, name = image_hash(order.id), order.source or order.id or alias
        if order.id and (given is None or order.source):
            raise MeshError(
                "--id takes sha256: and 64 hex digits, the image id of `docker images --no-trunc`, in place of --from",
                ExitCode.USAGE,
            )
        try:
            found = await self._library.named(name)
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
        if self._library.problem and not order.here:
            raise MeshError(
                f"image {name} cannot be signed from here: {self._library.problem}. Allow it where another engine has it, by its "
                f"--id, or on this node alone, by --here",
                ExitCode.REFUSED,
            )
        self._library.stored[found.id] = found
        return Image(found.id, found.manifests[0] if found.manifests else b"", found.size)

    async def deny(self, order: DenyImage) -> "answers.images.Denied":
        library, rules = self._library, self._library.rules
        said = (rules.listed or {}).get(order.alias)
        try:
            if order.alias != ANYTHING or not order.mesh:
                check_alias(order.alias)
            if order.mesh:
                if said is None or not said.word.allowed:
                    raise MeshError(
                        f"{order.alias} is not on the mesh's list: `mesh image ls` shows what is", ExitCode.NOT_FOUND
                    )
                library.say(order.alias, None, False)
            else:
                library.rule(with_denied(rules.own, order.alias, await self._hashes(order.alias, said)))
        except ListError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        own = order.alias in library.rules.own.allowed
        return {"alias": order.alias, "mesh": order.mesh, "still_allowed_here": own and order.mesh}

    async def _hashes(self, alias: str, said: Said | None) -> frozenset[bytes]:
        """All that the alias may mean on this node."""
        found = {image.config for image in (self._library.rules.own.allowed.get(alias),) if image is not None}
        if said is not None and said.word.image is not None:
            return frozenset({*found, said.word.image.config})
        try:
            stored = await self._library.named(alias)
        except EngineError:
            stored = None
        return frozenset({*found, *((stored.id,) if stored is not None else ())})

    # --- bringing them

    async def pull(self, alias: str) -> "answers.images.ImagePulled":
        """Begin to bring it here; `mesh image ls` says how far it is."""
        image = self._wanted(alias)
        try:
            pull = await self._library.fetch(image, alias)
        except BadImage as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        except EngineError as error:
            raise MeshError(str(error)) from error
        return {"alias": alias, "here": pull is None, "words": "" if pull is None else pull.words, **_digests(image)}

    async def push(self, order: PushImage) -> "answers.images.Pushed":
        """Ask nodes to fetch it, or how far they are."""
        image = self._wanted(order.alias)
        nodes = [self._daemon.desk.find_node(name) for name in dict.fromkeys(order.nodes)]
        if not nodes:
            raise MeshError("name the nodes that are to have it: `mesh nodes` lists them", ExitCode.USAGE)
        told = await asyncio.gather(*(self._ask(node, image, order.look) for node in nodes))
        rows: list[answers.images.Fetching] = [
            {"node": node.nick, "here": answer.here, "words": answer.words, "failed": answer.failed}
            for node, answer in zip(nodes, told, strict=True)
        ]
        return {"alias": order.alias, "nodes": rows}

    async def _ask(self, node: MemberView, image: Image, look: bool) -> Fetching:
        path, method = f"/v1/images/{image.config.hex()}/fetch", "GET" if look else "POST"
        if node.node_id == self._daemon.me:
            if not look:
                await self.pull(self._library.name_of(image.config))
            return how_far(self._library, image.config)
        try:
            return decode_fetching(await self._daemon.peers.call(node.node_id, method, path, timeout_s=ASK_S))
        except (PeerError, ValueError) as error:
            return Fetching(False, str(error), True)

    def _wanted(self, alias: str) -> Image:
        rules = self._library.rules
        if rules.listed is None:
            raise MeshError(
                "this mesh has no list of images, so nodes give none to each other: `mesh image allow ALIAS` begins one",
                ExitCode.REFUSED,
            )
        verdict = Rules(rules.listed).judge(alias, None)
        if verdict.rule or verdict.image is None:
            raise MeshError(
                verdict.words or f"image {alias} is not on the mesh's list by its digest: `mesh image ls`",
                ExitCode.REFUSED,
            )
        return verdict.image

    def _nicks(self) -> dict[NodeId, str]:
        return {member.node_id: member.nick for member in self._daemon.membership.members()}


def how_far(library: "Library", config: bytes) -> Fetching:
    """Whether this node has an image, or how it is getting on with it."""
    image = library.rules.images.get(config) or Image(config)
    if library.here(image) is not None:
        return Fetching(True)
    pull = library.supply.pulls.get(config)
    if pull is None:
        return Fetching(False)
    if not pull.task.done():
        return Fetching(False, pull.words)
    if pull.task.cancelled():
        return Fetching(False, "it was stopped", True)
    error = pull.task.exception()
    return Fetching(False, str(error) if error is not None else "it was removed again", True)


def _digests(image: Image | None) -> "answers.images.Digests":
    """Empty where none is meant."""
    return {
        "id": f"sha256:{image.config.hex()}" if image is not None else "",
        "manifest": f"sha256:{image.manifest.hex()}" if image is not None and image.manifest else "",
        "bytes": image.size if image is not None else 0,
    }


def _config(request: web.Request) -> bytes:
    found = image_hash(f"sha256:{request.match_info['image']}")
    if found is None:
        raise web.HTTPBadRequest(text="not an image's hash")
    return found
