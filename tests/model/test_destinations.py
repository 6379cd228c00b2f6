"""Destinations: names and ports in one spelling, and no address in any spelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.model.destinations import MOST_DESTINATIONS, DestinationError, destination, destinations


def test_one_spelling() -> None:
    assert destination("API.Wandb.AI.:443") == destination("api.wandb.ai:443") == "api.wandb.ai:443"
    assert destination("xn--bcher-kva.example:8443") == "xn--bcher-kva.example:8443"
    assert destinations(["pypi", "pypi.org:443", "a.example:80"]) == (
        *("a.example:80", "files.pythonhosted.org:443", "pypi.org:443"),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("api.wandb.ai", "has no port: write it as api.wandb.ai:443"),
        ("conda", "or name a group"),
        *(
            (f"{host}:443", "no host by its name")
            for host in ("127.0.0.1", "0x7f.1", "127.1", "127.0.0.0x1", "1.2.3.08")
        ),
        *((f"{host}:443", "no host by its name") for host in ("2130706433", "localhost", "[::1]", "::1", "a.b..c", "")),
        *(
            (f"{host}:443", "no host by its name")
            for host in ("*.example.org", "-a.example", "a-.example", "a_b.example")
        ),
        *(
            (f"{host}:443", "no host by its name")
            for host in ("user@a.example", "a.example/", "a.example..", "a b.example")
        ),
        *(
            (f"{host}:443", "no host by its name")
            for host in (f"{'a' * 64}.example", f"{'a.' * 126}example", "a.ex\nample")
        ),
        ("bücher.example:443", "xn--"),
        ("a.exam\u212ale:443", "xn--"),  # the sign of Kelvin is a k in lower case
        *(
            (f"a.example:{port}", "no port from 1")
            for port in ("0", "65536", "080", "99999999999999999999", "+1", "٤٤٣")
        ),
        ("a.example: 443", "no port from 1"),
    ],
)
def test_what_is_no_destination(text: str, reason: str) -> None:
    with pytest.raises(DestinationError, match=reason.replace("*", r"\*")):
        destination(text)


@given(st.text(max_size=40))
def test_any_text_is_refused_or_comes_to_rest(text: str) -> None:
    for candidate in (text, f"{text}:443", f"{text}.example:80"):
        try:
            found = destination(candidate)
        except DestinationError:
            continue
        assert destination(found) == found and found.isascii() and found == found.lower()


def test_destinations_are_bounded() -> None:
    with pytest.raises(DestinationError, match="at most 64"):
        destinations(f"h{number}.example:443" for number in range(MOST_DESTINATIONS + 1))
    with pytest.raises(DestinationError, match="2048 characters"):
        destinations(f"{'a' * 60}.h{number}.example:443" for number in range(40))
