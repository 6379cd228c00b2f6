"""A town: daemons of several users in one mesh, and callers with the stolen key of any of them."""

import time
from typing import Any

import msgspec

from membership.envelope import MeshSealer
from membership.identity import Identity
from membership.trust import PROVIDER, ROLES, USER, TrustStore, admit_node, found_mesh
from mesh.consensus.effects import WitnessRecord, decode_witness_record
from mesh.consensus.messages import AnyMessage, encode_message
from mesh.daemon.layout import save_membership
from mesh.daemon.stack import LOOPBACK, Stack, StackNode
from mesh.rpc.client import Address, PeerClient, PeerError
from tests.e2e.commands import read
from tests.forks import start_daemon

# nick: user, roles, whether it lends
PEOPLE = {
    "ada1": ("ada", ROLES, False),
    "ada2": ("ada", ROLES, False),
    "bob": ("bob", ROLES, True),
    "carol": ("carol", ROLES, True),
    "dan": ("dan", ROLES, True),
    "mal": ("mal", (USER,), False),
    "eve": ("eve", (PROVIDER,), False),
}


class Town(Stack):
    """One daemon for each of `PEOPLE`; those that lend have one slot, for the processes of everybody."""

    def __init__(self, **overrides: Any) -> None:
        super().__init__(len(PEOPLE), overrides={"slots": 1, "process_engine_for": "all", "lease_s": 6.0, **overrides})
        for node, nick in zip(self.nodes, PEOPLE, strict=True):
            node.nick = nick

    def found(self) -> None:
        now = time.time()
        founder = Identity.generate()
        genesis, root_chain = found_mesh(founder, "town", "ada1", "ada", now)
        trust = TrustStore(genesis)
        trust.admit_chain(root_chain, now)
        for node in self.nodes:
            user, roles, _ = PEOPLE[node.nick]
            identity, chain = founder, root_chain
            if node.nick != "ada1":
                identity = Identity.generate()
                binding = trust.bind(user, identity.node_id, now, existing=node.nick == "ada2")
                sealer = MeshSealer(founder, trust.mesh_id)
                chain = admit_node(sealer, trust, root_chain, identity.node_id, node.nick, binding, roles, False, now)
                trust.admit_chain(chain, now)
            node.where.make()
            identity.save(node.where.key)
            save_membership(node.where, genesis, chain, ())

    def start(self, node: StackNode) -> None:
        lend = PEOPLE[node.nick][2]
        node.process = start_daemon(node.where, {**self.overrides, "lend": lend}, node.within)

    @staticmethod
    def sees(node: StackNode, count: int) -> bool:
        """Return whether `node` sees all nodes alive, and the offers of those that lend."""
        rows = [row for row in node.client.get("/v1/nodes")["nodes"] if row["state"] == "alive"]
        return len(rows) >= count and sum(bool(row["engines"]) for row in rows) >= sum(
            lend for *_, lend in PEOPLE.values()
        )

    def id(self, nick: str) -> bytes:
        return Identity.load(self.node(nick).where.key).node_id

    @property
    def mesh_id(self) -> bytes:
        return TrustStore(self.nodes[0].where.genesis.read_bytes()).mesh_id

    def addresses(self) -> dict[bytes, Address]:
        return {
            Identity.load(node.where.key).node_id: Address(LOOPBACK, int(read(node, "status")["api_port"]))
            for node in self.nodes
        }


class Actor:
    """A caller with the key of a node, or with a key that was never admitted; it speaks to daemons without one of its own."""

    def __init__(self, town: Town, nick: str, addresses: dict[bytes, Address]) -> None:
        self.town, self.nick = town, nick
        self.identity = Identity.load(town.node(nick).where.key) if nick in PEOPLE else Identity.generate()
        self.me = self.identity.node_id
        self.sealer = MeshSealer(self.identity, town.mesh_id)
        self.peers = PeerClient(self.identity, town.mesh_id, addresses.get)

    async def __aenter__(self) -> "Actor":
        await self.peers.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.peers.close()

    async def call(self, to: str, method: str, path: str, body: bytes = b"") -> bytes:
        return await self.peers.call(self.town.id(to), method, path, body)

    async def admitted(self, to: str, method: str, path: str, body: bytes = b"") -> bool:
        """Make a call; False if it was refused for who makes it."""
        try:
            async with self.peers.stream(self.town.id(to), method, path, body) as response:
                await response.content.readany()
        except PeerError as error:
            assert error.status not in {400, 500, 503}, error
            return error.status not in {None, 401, 403}
        return True

    async def tell(self, to: str, *messages: AnyMessage) -> None:
        body = msgspec.msgpack.encode([encode_message(message) for message in messages])
        await self.call(to, "POST", "/v1/messages", body)

    async def told(self, witness: str, job: bytes, *messages: AnyMessage) -> WitnessRecord:
        """Send messages to a witness; return its record once it has handled them."""
        if messages:
            await self.tell(witness, *messages)
        for _ in range(3):  # its worker runs between two calls of the same loop
            record = await self.record(witness, job)
        return record

    async def events(self, witness: str, job: bytes) -> list[bytes]:
        return list(msgspec.msgpack.decode(await self.call(witness, "GET", f"/v1/jobs/{job.hex()}/events")))

    async def record(self, witness: str, job: bytes) -> WitnessRecord:
        return decode_witness_record(await self.call(witness, "GET", f"/v1/jobs/{job.hex()}/witness-record"))
