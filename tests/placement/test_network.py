"""Jobs that ask for hosts by name go only where the owner allows all of them, and where an engine can keep them to those."""

from msgspec.structs import replace

from placement.filters import refusals
from placement.request import Request
from tests.consensus.worlds import A, make_advert

HOSTS = ("a.example:443", "b.example:443")


def asked(**more: object) -> Request:
    return Request(b"job", 0, "ada", network=HOSTS, **more)  # type: ignore[arg-type]


def test_owner_must_allow_all_hosts() -> None:
    lends = replace(make_advert(A), proxies=("process",), engines=("process",), network=(*HOSTS, "c.example:80"))
    assert refusals(asked(), lends) == []
    assert refusals(asked(), replace(lends, network=("c.example:80", "a.example:443"))) == [
        "its owner does not let jobs reach b.example:443 (network in its config.toml)"
    ]
    (reason,) = refusals(asked(), replace(lends, network=()))
    assert "a.example:443, b.example:443" in reason
    assert refusals(replace(asked(), network=()), replace(lends, network=(), proxies=())) == []


def test_engine_must_be_able_to_keep_a_job_to_its_hosts() -> None:
    lends = replace(make_advert(A), proxies=("docker",), engines=("process", "docker"), network=HOSTS, images=("x",))
    (reason,) = refusals(asked(), lends)
    assert reason.startswith("its process engine cannot keep a job to named hosts")
    assert refusals(asked(image="x"), lends) == []
