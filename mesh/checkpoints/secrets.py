"""Secrets of a job: sealed by its submitter, opened by the node that runs it (docs/explanation/secrets.md)."""

import os
from collections.abc import Collection, Sequence
from hashlib import blake2b

import msgspec
from nacl.bindings import sodium_pad, sodium_unpad

from ckptstore.cipher import KEY_BYTES, StateCipher
from membership.identity import Identity, NodeId, encrypt_to
from membership.malformed import MALFORMED
from mesh.checkpoints.key_shares import seal_shares
from mesh.model.secrets import MOST_BYTES, MOST_READERS, SealedSecrets, SecretError, Use
from mesh.model.spec import JobSpec

PURPOSE = b"secrets of a job"
PADDED = 1024  # bytes: the length of the box tells no more about the values than this (own choice)


def seal_secrets(
    spec: JobSpec, cipher: StateCipher, uses: Sequence[Use], values: Sequence[bytes], readers: Collection[NodeId]
) -> SealedSecrets:
    """Seal the values for the job that this spec will be; `readers`: the only nodes that may open them, empty for all.

    SecretError if they are too many or too large.
    """
    if sum(map(len, values)) > MOST_BYTES:
        raise SecretError(f"the secrets of a job have at most {MOST_BYTES // 1024} KiB together")
    if len(readers) > MOST_READERS:
        raise SecretError(
            f"secrets are for at most {MOST_READERS} nodes, not {len(readers)}: name fewer in --secret-nodes"
        )
    second = os.urandom(KEY_BYTES) if readers else b""
    box = _box_cipher(cipher, second).encrypt(PURPOSE, sodium_pad(msgspec.msgpack.encode(values), PADDED))
    lock = seal_shares(cipher, [voter.node for voter in spec.witnesses], spec.author)
    sealed = tuple((node, encrypt_to(node, second)) for node in sorted(readers))
    return SealedSecrets(lock, box, tuple(uses), sealed)


def open_secrets(secrets: SealedSecrets, cipher: StateCipher, identity: Identity) -> list[bytes]:
    """Return the values in the order of `uses`; SecretError if this node is not to read them, or they are damaged."""
    try:
        second = b""
        if secrets.readers:
            second = identity.decrypt(dict(secrets.readers).get(identity.node_id, b""))
        padded = _box_cipher(cipher, second).decrypt(PURPOSE, secrets.box)
        values: list[bytes] = _decode(sodium_unpad(padded, PADDED))
    except (*MALFORMED, ValueError, RuntimeError) as error:
        raise SecretError(f"the job's secrets cannot be opened here: {error}") from error
    if len(values) != len(secrets.uses):
        raise SecretError("the job's secrets cannot be opened here: their number is wrong")
    return values


_decode = msgspec.msgpack.Decoder(list[bytes]).decode


def _box_cipher(cipher: StateCipher, second: bytes) -> StateCipher:
    return StateCipher(blake2b(second, key=cipher.key, digest_size=KEY_BYTES, person=b"mesh-secrets").digest())
