"""A peer is judged by the kernel's word and its credential, and every refusal sounds the same."""

import errno
import hmac
import os
import socket
import struct

import pytest

from sbxd.audit.events import Door, PeerRefusal
from sbxd.service.peer import (
    NOT_AUTHORIZED,
    VERSION,
    PeerCredentials,
    judge_hello,
    judge_peer,
    read_peer_credentials,
)
from sbxd.settings import AuthMode, DeploymentMode, ServiceSettings, Settings
from sbxd.wire.messages import PROTOCOL_VERSION, Hello

CREDENTIAL = b"service-credential-0123456789"


def peer(uid: int, *groups: int) -> PeerCredentials:
    return PeerCredentials(pid=9, uid=uid, gid=100, groups=frozenset({100, *groups}))


def settings(
    *,
    uids: tuple[int, ...] = (),
    gids: tuple[int, ...] = (),
    deployment_mode: DeploymentMode = DeploymentMode.PRODUCTION,
    auth_mode: AuthMode = AuthMode.TOKEN,
) -> Settings:
    return Settings(
        deployment_mode=deployment_mode,
        auth_mode=auth_mode,
        service=ServiceSettings(worker_uids=uids, worker_gids=gids),
    )


def hello(credential: bytes | None, version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(protocol_version=version, client="test", credential=credential)


def test_the_kernel_says_who_the_peer_is() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        found = read_peer_credentials(ours)
    assert (found.pid, found.uid, found.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert found.groups == {os.getgid(), *os.getgroups()}


class ManyGroups:
    """A peer in more groups than can be read."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        if optname == socket.SO_PEERCRED:
            return struct.pack("=iII", 1, 2, 3)
        raise OSError(errno.ERANGE, "too many")


def test_a_peer_of_too_many_groups_has_its_primary_one_alone() -> None:
    assert read_peer_credentials(ManyGroups()).groups == {3}


def test_what_is_no_unix_socket_has_no_peer() -> None:
    with socket.socket(socket.AF_INET) as other, pytest.raises((OSError, KeyError)):
        read_peer_credentials(other)


@pytest.mark.parametrize(
    ("who", "configured", "refused"),
    [
        (peer(0), settings(), False),
        (peer(0), settings(uids=(1000,)), False),
        (peer(1000), settings(uids=(1000,)), False),
        (peer(1001), settings(uids=(1000,)), True),
        (peer(1001, 50), settings(gids=(50,)), False),
        (peer(1001, 51), settings(gids=(50,)), True),
        (peer(50), settings(gids=(50,)), True),
        (peer(1000), settings(), True),
        (peer(1000), settings(deployment_mode=DeploymentMode.DEVELOPMENT), False),
        (peer(1), settings(uids=(2,), deployment_mode=DeploymentMode.DEVELOPMENT), True),
    ],
)
def test_the_worker_socket_admits_configured_uids_and_groups(
    who: PeerCredentials, configured: Settings, refused: bool
) -> None:
    expected = PeerRefusal.UID_NOT_CONFIGURED if refused else None
    assert judge_peer(Door.WORKER, who, configured) is expected


def test_the_admin_socket_admits_whom_its_file_mode_let_connect() -> None:
    assert judge_peer(Door.ADMIN, peer(1000), settings()) is None


@pytest.mark.parametrize(
    ("presented", "reason"),
    [
        (None, PeerRefusal.CREDENTIAL_MISSING),
        (b"", PeerRefusal.CREDENTIAL_WRONG),
        (CREDENTIAL[:-1], PeerRefusal.CREDENTIAL_WRONG),
        (CREDENTIAL + b"0", PeerRefusal.CREDENTIAL_WRONG),
        (b"x" * len(CREDENTIAL), PeerRefusal.CREDENTIAL_WRONG),
    ],
)
def test_a_wrong_credential_is_refused_with_one_text(
    presented: bytes | None, reason: PeerRefusal
) -> None:
    verdict = judge_hello(Door.WORKER, hello(presented), settings(), CREDENTIAL)
    assert verdict == (reason, NOT_AUTHORIZED)


def test_the_right_credential_is_accepted() -> None:
    assert judge_hello(Door.WORKER, hello(CREDENTIAL), settings(), CREDENTIAL) is None


@pytest.mark.parametrize("own", [None, b""])
def test_a_service_without_a_credential_accepts_none(own: bytes | None) -> None:
    for presented in (None, b"", CREDENTIAL):
        assert judge_hello(Door.WORKER, hello(presented), settings(), own) is not None


def test_the_comparison_takes_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def spy(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return False

    monkeypatch.setattr(hmac, "compare_digest", spy)
    assert judge_hello(Door.WORKER, hello(CREDENTIAL), settings(), CREDENTIAL) is not None
    assert compared == [(CREDENTIAL, CREDENTIAL)]


def test_no_credential_is_asked_for_in_development_or_at_the_admin_socket() -> None:
    assert judge_hello(Door.WORKER, hello(None), settings(auth_mode=AuthMode.DEV), None) is None
    assert judge_hello(Door.ADMIN, hello(None), settings(), CREDENTIAL) is None


def test_a_version_is_judged_only_for_whom_the_credential_admits() -> None:
    foreign = PROTOCOL_VERSION + 1
    unknown = judge_hello(Door.WORKER, hello(b"wrong", foreign), settings(), CREDENTIAL)
    known = judge_hello(Door.WORKER, hello(CREDENTIAL, foreign), settings(), CREDENTIAL)
    assert unknown == (PeerRefusal.CREDENTIAL_WRONG, NOT_AUTHORIZED)
    assert known == (PeerRefusal.VERSION_UNSUPPORTED, VERSION)
