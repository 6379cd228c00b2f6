"""Mutual TLS 1.3 between nodes. Both ends prove their node keys in the handshake, before a byte of a request is read.

A node's certificate follows from its node id and the mesh id alone, so anybody can compute it and nothing has to be published
or pinned. It is issued by a key that everyone in the mesh can derive: Python's TLS asks a client for a certificate only if an
issuer is known. That signature proves nothing. The proof is the handshake's own signature, by the key in the certificate,
together with the comparison in `PeerObject`: the peer's certificate is exactly that of a node which may connect.
"""

import os
import ssl
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import cast

from membership.identity import ID_BYTES, Identity, NodeId, short_id, to_base32

SUFFIX = ".mesh"
# DER (X.690) of the parts that never change.
_ED25519 = bytes.fromhex("300506032b6570")  # SEQUENCE { OID 1.3.101.112 }, RFC 8410
_PUBLIC_KEY = bytes.fromhex("302a300506032b6570032100")  # followed by the 32 bytes of the key
_PRIVATE_KEY = bytes.fromhex("302e020100300506032b657004220420")  # PKCS #8, followed by the 32 bytes of the seed
_COMMON_NAME = bytes.fromhex("0603550403")
_VALIDITY = (
    b"\x17\x0d700101000000Z",
    b"\x18\x0f99991231235959Z",
)  # no expiry (RFC 5280, 4.1.2.5): membership is checked instead
_IS_ISSUER = bytes.fromhex("a3133011300f0603551d130101ff040530030101ff")  # basicConstraints, critical, CA:TRUE
_SIGNATURE_BYTES = 74  # of a certificate's end: the algorithm, and a bit string of 64 bytes

Refuse = Callable[[NodeId], str]


def node_name(node: NodeId) -> str:
    """Return the name under which a client asks for a node. It is no DNS name; `PeerClient` resolves it."""
    return to_base32(node) + SUFFIX


def server_context(identity: Identity, mesh_id: bytes, refuse: Refuse) -> ssl.SSLContext:
    """Return the context of a node's server. `refuse` returns why a node may not connect; empty if it may."""
    return _context(ssl.PROTOCOL_TLS_SERVER, identity, mesh_id, refuse)


def client_context(identity: Identity, mesh_id: bytes) -> ssl.SSLContext:
    """Return a context for calls to any node. The server's name must be the `node_name` of the node that answers."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity, mesh_id, lambda node: "")


def certificate(node: NodeId, mesh_id: bytes) -> bytes:
    """Return the only certificate of a node in this mesh (DER)."""
    return _issue(mesh_id, node_name(node), node, b"\x02", b"")


class PeerObject(ssl.SSLObject):
    """One TLS connection with a peer. `peer` is known once the handshake is done."""

    peer: NodeId

    def do_handshake(self) -> None:
        super().do_handshake()
        context = cast(PeerContext, self.context)
        presented = self.getpeercert(binary_form=True) or b""
        peer = presented[:-_SIGNATURE_BYTES][-ID_BYTES:]
        if len(peer) != ID_BYTES or presented != certificate(peer, context.mesh_id):
            raise ssl.SSLCertVerificationError("the certificate is not that of a node of this mesh")
        if not self.server_side and self.server_hostname != node_name(peer):
            raise ssl.SSLCertVerificationError(f"the answering node is {short_id(peer)}")
        if reason := context.refuse(peer):
            raise ssl.SSLCertVerificationError(reason)
        self.peer = peer


class PeerContext(ssl.SSLContext):
    sslobject_class = PeerObject
    mesh_id: bytes
    refuse: Refuse


def _context(protocol: int, identity: Identity, mesh_id: bytes, refuse: Refuse) -> PeerContext:
    context = PeerContext(protocol)
    context.mesh_id, context.refuse = mesh_id, refuse
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # `PeerObject` checks the name against the key
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=_issuer(mesh_id))
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection proves its key anew
    pem = ssl.DER_cert_to_PEM_cert(certificate(identity.node_id, mesh_id)).encode()
    key = ssl.DER_cert_to_PEM_cert(_PRIVATE_KEY + identity.seed).replace("CERTIFICATE", "PRIVATE KEY").encode()
    file = os.memfd_create("tls")  # the library reads only files, and the key must not lie in one
    try:
        os.write(file, key + pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context


@lru_cache(64)
def _issuing_key(mesh_id: bytes) -> Identity:
    """Return the key that issues all certificates of a mesh. It is no secret."""
    return Identity(blake2b(mesh_id, digest_size=32, person=b"mesh-tls").digest())


def _issuer(mesh_id: bytes) -> bytes:
    return _issue(mesh_id, mesh_id.hex(), _issuing_key(mesh_id).node_id, b"\x01", _IS_ISSUER)


@lru_cache(4096)  # more than a campus has nodes; making one takes 40 us
def _issue(mesh_id: bytes, subject: str, key: bytes, serial: bytes, extensions: bytes) -> bytes:
    """Return an X.509 certificate (DER, RFC 5280) that ends in key, extensions and signature."""
    issuer = _issuing_key(mesh_id)
    version = _der(0xA0, _der(0x02, b"\x02"))
    names = _name(mesh_id.hex()), _der(0x30, *_VALIDITY), _name(subject)
    body = _der(0x30, version, _der(0x02, serial), _ED25519, *names, _PUBLIC_KEY + key, extensions)
    return _der(0x30, body, _ED25519, _der(0x03, b"\0", issuer.sign(b"", body)))


def _name(text: str) -> bytes:
    return _der(0x30, _der(0x31, _der(0x30, _COMMON_NAME, _der(0x0C, text.encode()))))


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    length = bytes([size]) if size < 128 else b"\x82" + size.to_bytes(2, "big") if size > 255 else bytes([0x81, size])
    return bytes([tag]) + length + content
