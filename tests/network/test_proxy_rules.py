"""The bytes that a job may use of the network, and of how many jobs they are counted."""

import pytest

from mesh.network.proxy_rules import ProxyRules, Refusal


def test_job_uses_its_bytes_and_no_more() -> None:
    rules = ProxyRules((), 100)
    rules.spend(b"one", 60)
    rules.spend(b"one", 40)
    rules.spend(b"two", 100)
    with pytest.raises(Refusal, match=r"used its .* of the network here") as told:
        rules.spend(b"one", 1)
    assert told.value.status == 429
    with pytest.raises(Refusal):
        rules.spend(b"three", 101)


def test_bytes_of_the_last_jobs_are_counted() -> None:
    rules = ProxyRules((), 100)
    for number in range(4096):
        rules.spend(b"%d" % number, 100)
    with pytest.raises(Refusal):
        rules.spend(b"0", 1)
    rules.spend(b"another", 100)
    assert len(rules._used) == 4096
    rules.spend(b"1", 100)
    with pytest.raises(Refusal):
        rules.spend(b"0", 1)
