"""What operators are told, how long lists are paged, and what no reply ever holds."""

import hashlib
import re

import msgspec
import pytest
from trio.testing import MockClock

from sbxd.audit.events import Door, ImageImported, ImageRemoved, RequestRejected
from sbxd.client.admin import AdminClient
from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.lifecycle.environments import Description
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import ExecutionRejected
from sbxd.port.ids import EnvironmentId
from sbxd.settings import ImageSettings
from sbxd.wire import messages as m
from sbxd.wire.descriptions import EnvironmentInfo
from tests.service.memory import memory_daemon
from tests.service.raw import RawEnd, greeted_client
from tests.service.requests import SCRIPT, SPECIFICATION, command, provisioned, specification

HOST_TEXT = re.compile(
    r"/(var|run|sys|proc|home|root|etc|dev|src|work)\b|\.scope|\.slice|uid|fd ?\d"
)


def chunks(*sizes: int) -> "Chunks":
    return Chunks(list(sizes))


class Chunks:
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __aiter__(self) -> "Chunks":
        return self

    async def __anext__(self) -> bytes:
        if not self.sizes:
            raise StopAsyncIteration
        return bytes(self.sizes.pop(0))


async def test_describe_tells_the_settings_and_the_lifecycles_part(
    autojump_clock: MockClock,
) -> None:
    settings = msgspec.structs.replace(
        FAKE_SETTINGS, images=ImageSettings(aliases={"py": "sha256:" + "1" * 64}, default="py")
    )
    async with (
        memory_daemon(SCRIPT, settings=settings) as daemon,
        daemon.channel(Door.ADMIN) as channel,
    ):
        described = await AdminClient(channel).describe()
    assert described.mechanism == "fake"
    assert described.deployment_mode == "development"
    assert described.ceilings == settings.limits.ceilings
    assert described.default_image == "sha256:" + "1" * 64
    assert described.image_aliases == {"py": "sha256:" + "1" * 64}


async def test_the_first_image_is_the_default_and_a_second_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon, daemon.channel(Door.ADMIN) as channel:
        admin = AdminClient(channel)
        assert (await admin.describe()).default_image is None
        one = await admin.image_import(chunks(1000, 24), 1024, label="one")
        assert (await admin.describe()).default_image == one.digest
        two = await admin.image_import(chunks(2048), 2048)
        assert (await admin.describe()).default_image == one.digest
        await admin.image_remove(one.digest)
        assert (await admin.describe()).default_image == two.digest


async def test_what_is_quarantined_is_shown_as_posture(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT) as daemon, daemon.channel(Door.ADMIN) as channel:

        async def describe() -> Description:
            return Description("fake", 0, ("a" * 32,), 0, 0, ())

        daemon.environments.describe = describe  # type: ignore[method-assign]
        described = await AdminClient(channel).describe()
    assert [(item.name, item.state) for item in described.posture] == [
        ("audit", "ok"),
        ("quarantine", "degraded"),
    ]
    assert "a" * 32 in described.posture[1].detail


async def test_an_audit_that_takes_nothing_is_shown_as_posture_with_what_to_do(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon, daemon.channel(Door.ADMIN) as channel:
        admin = AdminClient(channel)
        before = await admin.describe()
        daemon.audit.fail()
        (item,) = [item for item in (await admin.describe()).posture if item.name == "audit"]
        daemon.audit.recover()
        after = await admin.describe()
    assert item.state == "missing"
    assert "new work is refused" in item.detail
    assert "what runs goes on" in item.detail
    assert "systemctl status systemd-journald" in item.fix
    # The control: with a journal there is nothing to do.
    assert [item.state for item in (*before.posture, *after.posture)] == ["ok", "ok"]


async def test_images_are_imported_listed_and_removed(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT) as daemon, daemon.channel(Door.ADMIN) as channel:
        admin = AdminClient(channel)
        size = 3 * m.INITIAL_CREDIT_BYTES
        image = await admin.image_import(chunks(size - 5, 5), size, label="large")
        assert image.size_bytes == size
        assert await admin.image_list() == (image,)
        await admin.image_remove(image.digest)
        with pytest.raises(ExecutionRejected):
            await admin.image_remove(image.digest)
        assert [type(event) for event in daemon.audit.events][-3:] == [
            ImageImported,
            ImageRemoved,
            RequestRejected,
        ]
        assert (await admin.reconcile()).destroyed == ()


async def test_an_upload_of_another_size_than_announced_is_the_callers_error(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon, daemon.channel(Door.ADMIN) as channel:
        admin = AdminClient(channel)
        with pytest.raises(ValueError, match="fewer"):
            await admin.image_import(chunks(1000), 1024)
        with pytest.raises(ValueError, match="more"):
            await admin.image_import(chunks(1025), 1024)
        assert await admin.image_list() == ()
        await admin.image_import(chunks(1024), 1024)


async def test_a_long_list_of_environments_arrives_in_pages(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        worker = await greeted_client(await daemon.connect())
        handles = [await provisioned(worker, n, run=f"run-{n}") for n in range(1, 41)]
        for position, handle in enumerate(handles):
            argv = ("forever",) if position else ("stdin", "x" * 1000)
            await worker.send(
                m.Execute(request_id=100 + position, handle=handle, command=command(*argv))
            )
        infos = await daemon.environments.list()

        async def listed() -> tuple[EnvironmentInfo, ...]:
            wide = tuple(b"y" * 5000 for _ in range(100))
            return tuple(msgspec.structs.replace(i, running_argv=wide) for i in infos) * 8

        daemon.environments.list = listed  # type: ignore[method-assign]
        async with daemon.channel(Door.ADMIN) as channel:
            admin = AdminClient(channel)
            found = await admin.list()
            assert [each.handle for each in found] == [each.handle for each in await listed()]
            assert all(len(word) <= 256 for each in found for word in each.running_argv or ())


async def test_inspect_finds_one_environment_or_says_it_is_gone(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon, daemon.channel(Door.ADMIN) as channel:
        admin = AdminClient(channel)
        handle = await admin.environments.provision(SPECIFICATION)
        assert (await admin.inspect(handle.environment_id)).handle == handle
        with pytest.raises(ExecutionRejected):
            await admin.inspect(EnvironmentId("0" * 32))


async def test_no_reply_tells_of_the_host(autojump_clock: MockClock) -> None:
    """API-14: provoke every refusal that a worker can, and read what it is told."""
    async with memory_daemon(SCRIPT, known_digests=frozenset({SPECIFICATION.image_digest})) as d:
        raw = await greeted_client(await d.connect())
        handle = await provisioned(raw)
        never = msgspec.structs.replace(handle, environment_id="0" * 32)
        stale = msgspec.structs.replace(handle, lease_epoch=9)
        huge = msgspec.structs.replace(SPECIFICATION.limits, cpu_millicores=1_000_000)
        asked: list[m.Request] = [
            m.Provision(
                request_id=10,
                specification=msgspec.structs.replace(
                    specification("a"), image_digest="sha256:" + "0" * 64
                ),
            ),
            m.Provision(
                request_id=11, specification=msgspec.structs.replace(SPECIFICATION, limits=huge)
            ),
            m.Execute(request_id=12, handle=never, command=command("true")),
            m.Execute(request_id=13, handle=stale, command=command("true")),
            m.Execute(request_id=14, handle=handle, command=command("no-such")),
            m.Execute(request_id=15, handle=handle, command=command("./x")),
            m.WorkspaceRead(request_id=16, handle=handle, path=b"../x", maximum_bytes=1),
            m.WorkspaceRead(request_id=17, handle=handle, path=b"missing", maximum_bytes=1),
            m.WorkspaceList(request_id=18, handle=handle, path=b"missing"),
            m.WorkspaceProvenanceQuery(request_id=19, handle=handle, path=b"/abs"),
            m.WorkspaceRead(request_id=20, handle=never, path=b"x", maximum_bytes=1),
        ]
        replies = []
        for request in asked:
            await raw.send(request)
            replies.append(await raw.receive())
        details = [getattr(reply, "detail", None) for reply in replies]
        assert all(isinstance(detail, str) for detail in details), replies
        told = "\n".join(str(detail) for detail in details).replace("/workspace", "")
        assert HOST_TEXT.search(told) is None, told
        assert HOST_TEXT.search("at /var/lib: errno 2") is not None


async def test_a_read_larger_than_asked_is_too_large(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        handle = await provisioned(raw)
        await write(raw, handle, b"12345")
        await raw.send(m.WorkspaceRead(request_id=3, handle=handle, path=b"file", maximum_bytes=4))
        reply = await raw.receive()
        assert isinstance(reply, m.WorkspaceFailed)
        assert reply.code == "TOO_LARGE"
        await raw.send(m.WorkspaceRead(request_id=4, handle=handle, path=b"file", maximum_bytes=5))
        assert await raw.receive() == m.Content(request_id=4, data=b"12345")
        digest = hashlib.sha256(b"12345").hexdigest()
        assert await raw.receive() == m.ContentEnd(request_id=4, size_bytes=5, sha256=digest)


async def write(raw: RawEnd, handle: EnvironmentHandle, data: bytes) -> None:
    await raw.send(
        m.WorkspaceWrite(request_id=2, handle=handle, path=b"file", size_bytes=len(data))
    )
    await raw.send(m.Upload(request_id=2, data=data))
    assert await raw.receive() == m.Done(request_id=2)


async def test_a_command_that_cannot_be_is_refused_before_its_stdin_and_the_lifecycle_is_asked(
    autojump_clock: MockClock,
) -> None:
    asked = []

    async def execute(*arguments: object, **keywords: object) -> object:
        asked.append(arguments)
        raise AssertionError

    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        handle = await provisioned(raw)
        daemon.environments.execute = execute  # type: ignore[method-assign,assignment]
        await raw.send(
            m.Execute(request_id=2, handle=handle, command=command("./relative"), stdin_bytes=1000)
        )
        reply = await raw.receive()
        assert isinstance(reply, m.Rejected)
        assert reply.code == "INVALID_COMMAND"
        assert asked == []
