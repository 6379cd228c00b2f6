"""Bounds on what other nodes may claim, and values that never fall."""

from pathlib import Path

import pytest

from membership.config import SwimConfig
from membership.ratelimit import BURST_S, TokenBuckets
from membership.records import MAX_LIFE_S, RecordTable
from membership.snapshot import RevocationFile, Snapshot, SnapshotFile
from membership.suspicion import AccuserCredit
from membership.trust import TrustError, TrustStore
from membership.wire import MAX_INCARNATION, Alive, Suspect, WireError, decode_evidence, encode
from tests.membership.test_records import GENESIS, NOW, PEER, ROOT, sealed, table

NODE, OTHER = b"n" * 32, b"o" * 32


def test_two_records_of_one_version_do_not_replace_each_other() -> None:
    records = table()
    records.apply(sealed(PEER, "facts", 1, 1, b"first"), NOW)
    assert records.apply(sealed(PEER, "facts", 1, 1, b"second"), NOW) == "not newer"


def test_record_does_not_outlive_a_month() -> None:
    assert table().apply(sealed(PEER, "facts", 1, 1, life_s=MAX_LIFE_S + 3600), NOW) == "invalid"


def test_large_section_that_another_node_signed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = sealed(PEER, "facts", 1, 1, b"x" * 100)
    monkeypatch.setattr("membership.records.MAX_BODY_BYTES", 99)
    assert table().apply(large, NOW) == "invalid"


@pytest.mark.parametrize("bound", ["MAX_SECTIONS", "MAX_NODES"])
def test_table_is_bounded(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"membership.records.{bound}", 1)
    records: RecordTable = table()
    records.apply(sealed(ROOT, "facts", 1, 1), NOW)
    more = sealed(ROOT, "jobs/a", 1, 1) if bound == "MAX_SECTIONS" else sealed(PEER, "facts", 1, 1)
    assert records.apply(more, NOW) == "full"


@pytest.mark.parametrize(
    "evidence",
    [
        Suspect(NODE, 1, MAX_INCARNATION),
        Alive(NODE, 1, 0, "host", 0, False),
        Alive(NODE, 1, 0, "", 7373, False),
    ],
    ids=["incarnation", "port", "host"],
)
def test_impossible_evidence_is_refused(evidence: Alive | Suspect) -> None:
    with pytest.raises(WireError, match="impossible"):
        decode_evidence(NODE, encode(evidence))


def test_accuser_is_believed_again_after_the_window() -> None:
    config = SwimConfig.lan()
    credit = AccuserCredit(config)
    for _ in range(config.accuser_credit):
        credit.refuted(OTHER, 100.0)
    assert not credit.believed(OTHER, 100.0 + config.accuser_window_s)
    assert credit.believed(OTHER, 101.0 + config.accuser_window_s)


def test_quiet_source_saves_no_more_than_a_full_bucket() -> None:
    buckets = TokenBuckets(10.0)
    assert buckets.allow("a", 0.0)
    assert sum(buckets.allow("a", 1e6) for _ in range(1000)) == 10.0 * BURST_S


def test_epoch_on_disk_never_falls(tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "peers.json")
    file.write(Snapshot(epoch=7))
    file.write(Snapshot(epoch=3))
    assert SnapshotFile(tmp_path / "peers.json").read().epoch == 7


def test_damaged_revocations_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "revoked"
    path.write_bytes(b"\xc1")
    with pytest.raises(TrustError, match="is damaged"):
        RevocationFile(path).read_into(TrustStore(GENESIS), NOW)
