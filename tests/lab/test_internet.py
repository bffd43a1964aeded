"""The lab's internet itself: what the tests of the egress boundary stand on."""

import socket
import ssl
import urllib.request
from collections.abc import Iterator

import pytest

from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.lab.internet_content import GREETING

pytestmark = [pytest.mark.needs("root", "systemd"), pytest.mark.also("uml")]


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built:
        yield built


def resolved(name: str) -> set[str]:
    return {str(found[4][0]) for found in socket.getaddrinfo(name + ".", 443, type=1)}


def test_the_host_reaches_every_kind_of_server(internet: Internet) -> None:
    context = ssl.create_default_context(cadata=internet.ca.decode())
    for name in ("files.lab-allowed.com", "other.lab-public.com", "private.lab-allowed.com"):
        with urllib.request.urlopen(
            f"https://{name}/files/greeting.txt", timeout=20, context=context
        ) as answer:
            assert answer.read() == GREETING
    assert {f"{lab.ALLOWED} 443", f"{lab.PRIVATE} 443"} <= set(internet.connections())


def test_the_name_server_says_what_the_zone_says_and_counts(internet: Internet) -> None:
    assert resolved("six.lab-allowed.com") == {lab.ALLOWED_6}
    assert resolved("mixed.lab-allowed.com") == {lab.ALLOWED, lab.PRIVATE}
    assert len(resolved("many.lab-allowed.com")) == 21
    with pytest.raises(socket.gaierror):
        resolved("nowhere.lab-allowed.com")
    assert internet.questions().count("six.lab-allowed.com AAAA") == 1


def test_a_name_that_rebinds_answers_otherwise_each_time(internet: Internet) -> None:
    answers = [resolved("rebinding.lab-allowed.com") for _ in range(3)]
    assert answers == [{lab.ALLOWED}, {lab.PRIVATE}, {lab.METADATA}]
