"""Certificate chains of members, made with the founder's key as an admitter makes them."""

from membership.envelope import MeshSealer
from membership.identity import Identity, NodeId
from membership.trust import ROLES, TrustStore, User, admit_node


def admitted(
    founder: Identity,
    genesis: bytes,
    chain: bytes,
    node: NodeId,
    nick: str,
    user: str | User,
    now: float,
    *,
    roles: tuple[str, ...] = ROLES,
    admit: bool = False,
) -> bytes:
    """Return the chain of a node that the holder of `chain` admits. Under its own user's name, as a machine of that user."""
    store = TrustStore(genesis)
    own = store.admit_chain(chain, now)
    if isinstance(user, str):
        user = own.binding if user == own.user else store.bind(user, node, now)
    return admit_node(MeshSealer(founder, store.mesh_id), store, chain, node, nick, user, roles, admit, now)
