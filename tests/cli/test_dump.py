"""A dump holds what a diagnosis needs, and no secret of the node in any encoding."""

import base64
import json
import os
import sqlite3
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from membership.identity import Identity
from membership.trust import TrustStore, found_mesh, make_invite
from mesh.checkpoints.key_shares import Share, encode_share
from mesh.cli.dump import secrets_of
from mesh.cli.main import cli
from mesh.daemon.layout import Layout, save_membership
from mesh.journal import Journal
from mesh.util.redaction import REMOVED, redacted, spellings, without

JOB = b"j" * 16


def every_writing(secret: bytes) -> list[bytes]:
    """Return the secret in common encodings, alone and between other bytes."""
    around = [secret] + [b"#" * before + secret + b"##" for before in range(5)]
    encoders = (
        base64.b64encode,
        base64.urlsafe_b64encode,
        base64.b32encode,
        base64.b16encode,
        lambda b: b.hex().encode(),
    )
    found = [b"raw " + secret + b" raw", repr(secret).encode()]
    found += [encode(text) for encode in encoders for text in around]
    return found + [base64.b32encode(text).lower() for text in around]


def is_in(secret: bytes, data: bytes) -> bool:
    """Search for the secret in every decoding of the text, independently of `redaction`."""
    low = data.lower()
    if secret in data or secret.hex().encode() in low or repr(secret)[2:-1].encode() in data:
        return True
    for before in range(5):
        whole = bytes(before) + secret + bytes(5)
        middle64 = base64.b64encode(whole)[4:][: len(secret) * 4 // 3 - 8]
        middle32 = base64.b32encode(whole)[8:][: len(secret) * 8 // 5 - 16]
        if any(one in data for one in (middle64, middle64.translate(bytes.maketrans(b"+/", b"-_")))):
            return True
        if middle32.lower() in low:
            return True
    return False


@given(st.binary(min_size=16, max_size=48), st.text().map(str.encode), st.text().map(str.encode))
def test_known_secret_is_redacted_in_every_encoding(secret: bytes, before: bytes, after: bytes) -> None:
    for writing in every_writing(secret):
        left = redacted(before + b"\n" + writing + b"\n" + after, [secret])
        assert not is_in(secret, left) or is_in(secret, before + after) or secret in REMOVED, writing


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        (b'{"command": "python t.py --api-key=Zq81 --token Aa55"}', [b"Zq81", b"Aa55"]),
        (b"HF_TOKEN=hf_abcdefgh1234 WANDB_API_KEY: 0123456789", [b"hf_abcdefgh1234", b"0123456789"]),
        (b"Authorization: Bearer abc.def-ghi123", [b"abc.def-ghi123"]),
        (b"git clone https://ada:pass1word@host/x", [b"pass1word"]),
        (b'password = "hunter2"\nPASSWD=xyzzy', [b"hunter2", b"xyzzy"]),
        (
            b"ghp_0123456789abcdef sk-live0123456789 AKIA0123456789ABCD",
            [b"0123456789abcdef", b"live0123456789", b"ABCD"],
        ),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\nBBBB\n-----END OPENSSH PRIVATE KEY-----\nx", [b"AAAA", b"BBBB"]),
    ],
)
def test_secret_like_values_are_redacted(line: bytes, secret: list[bytes]) -> None:
    left = redacted(line, [])
    assert REMOVED in left and not [one for one in secret if one in left], left


def test_lines_without_secrets_are_unchanged() -> None:
    line = b"job p2jyx5st: its steps: 12 of 20, on node1 at 10.0.0.7:7373; key rotated, tokens per second 88"
    assert b"12 of 20, on node1 at 10.0.0.7:7373" in redacted(line, [b"\x01" * 32])


async def planted(where: Layout) -> list[bytes]:
    """Write a node's state with every kind of secret and a log that contains them all; return the secrets."""
    where.make()
    identity, now = Identity.generate(), time.time()
    genesis, chain = found_mesh(identity, "m", "n", "ada", now)
    save_membership(where, genesis, chain, ("10.0.0.7:7373",))
    identity.save(where.key)
    journal = Journal(where.journal)
    await journal.open()
    realm_key, share = os.urandom(32), os.urandom(32)
    await journal.save_key(b"r" * 16, realm_key)
    await journal.save_shares(JOB, [encode_share(Share(b"l" * 8, 2, 1, share))])
    await journal.close()
    secrets = [identity.seed, realm_key, share]
    trust = TrustStore(genesis)
    invite = make_invite(identity, trust, trust.admit_chain(chain, now), (), 3600, now, user="bob").encode()
    token = b"Zm9vYmFyLTQ3MTE"
    babble = [writing for secret in secrets for writing in every_writing(secret)]
    where.log.write_bytes(b"\n".join([*babble, invite, b"token: " + token, b"the end is told"]))
    where.config.write_bytes(b'nick = "desk"\njoin = ["' + identity.seed.hex().encode() + b'"]\n')
    return [*secrets, invite, token]


def dumped(where: Layout, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--state", str(where.root), "debug", "dump", *arguments], prog_name="mesh")


async def test_dump_contains_no_secret_of_the_node(tmp_path: Path) -> None:
    where = Layout(tmp_path / "state")
    secrets = await planted(where)
    assert set(secrets[:3]) <= set(secrets_of(where)[0])
    target = tmp_path / "dump.tar.gz"
    done = dumped(where, "-o", str(target), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["left_out"] == told["unread_secrets"] == [] and target.stat().st_mode & 0o777 == 0o600
    with tarfile.open(target) as tar:
        bundle = {member.name.removeprefix("mesh-dump/"): tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert {
        "status.json",
        "doctor.json",
        "daemon.log",
        "config.toml",
        "versions.json",
        "kernel.txt",
        "README.txt",
    } <= set(bundle)
    assert b"the end is told" in bundle["daemon.log"] and b'nick = "desk"' in bundle["config.toml"]
    assert "no daemon" in json.loads(bundle["status.json"])["problem"] and "node.key" not in bundle
    everything = b"\n".join(bundle.values())
    for secret in secrets:
        assert not is_in(secret, everything)
        assert not [one for one in spellings(secret) if one in everything]
    assert b"PRIVATE KEY" not in everything and b"mesh1-" not in everything

    again = dumped(where, "-o", str(target))
    assert again.exit_code == 1 and "exists already" in again.output
    nowhere = dumped(where, "-o", str(tmp_path / "none" / "x.tar.gz"))
    assert nowhere.exit_code == 1 and "cannot write" in nowhere.output
    assert dumped(Layout(tmp_path / "nobody")).exit_code == 4


def test_dump_warns_about_unreadable_journal(tmp_path: Path) -> None:
    where = Layout(tmp_path / "state")
    where.make()
    where.journal.write_bytes(b"no journal" * 1000)
    done = dumped(where, "-o", str(tmp_path / "x.tar.gz"))
    assert done.exit_code == 0 and "some secrets could not be read" in done.stderr
    assert sqlite3.sqlite_version


def test_node_that_does_not_exist_is_told_how_to_name_one(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["--state", str(tmp_path / "none"), "debug", "dump"], prog_name="mesh")
    command = done.stderr.split("`")[1].removeprefix("mesh ").replace("DIR", str(tmp_path)).split()
    assert done.exit_code == 4 and CliRunner().invoke(cli, [*command, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        (b"join with mesh1-abcdefgh_ijk\n " + b"x" * 60, b"x" * 60),
        (b"cookie eyJhbGciOiJI.eyJzdWIiOiIx.c2ln", b"eyJzdWIiOiIx"),
        (b"Proxy-Authorization: basic YWRhOnB3", b"YWRhOnB3"),
        (b"pip install --index https://tok-0123@host/simple", b"tok-0123"),
        (b"--wandb-secret-key Zq81", b"Zq81"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA and the end is cut off", b"AAAA"),
        (b"PASSPHRASES = Zq81; my_access_key_2: Zq82", b"Zq8"),
        *((prefix + b"0123456789", b"0123456789") for prefix in (b"hf_", b"glpat-", b"xoxb-", b"npm_", b"pypi-")),
    ],
)
def test_what_looks_like_a_secret_is_redacted_alone(line: bytes, secret: bytes) -> None:
    assert secret not in redacted(line, [])


def test_short_words_are_no_secrets() -> None:
    assert without(b"a shorter job 1234567", [b"1234567", b"job"]) == b"a shorter job 1234567"
    assert without(b"it is 12345678", [b"12345678"]) == b"it is [removed]"
    assert without(b"Zq81Zq81 zQ81zQ81", [b"Zq81Zq81"]) == b"[removed] zQ81zQ81", "case counts"
