"""What a command did to hostile files is listed exactly: each path, kind, size and digest.

The digests are computed here from bytes that the test knows, never from what the service says.
Source: DESIGN 3.9, CASES Part 2 number 20, FS-06, FS-07.
"""

import hashlib

import pytest
import trio

from sbxd.port.command import ChangeKind, ExecutionResult, FileChange
from sbxd.port.limits import MIB, ResourceLimits
from tests.redteam.live import live

pytestmark = [pytest.mark.needs("daemon"), pytest.mark.also("uml")]

ROOMY = ResourceLimits(
    cpu_millicores=2000,
    memory_bytes=128 * MIB,
    pids_max=64,
    workspace_bytes=64 * MIB,
    inodes_max=5000,
    wall_clock_seconds=120,
)
FILES_CHANGED_MAX = 1000  # `limits.files_changed_max` of the lanes


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def regular(path: str, content: bytes, change: ChangeKind = ChangeKind.CREATED) -> FileChange:
    return FileChange(path=path, change=change, size_bytes=len(content), sha256=sha256(content))


def link(path: str, target: bytes, change: ChangeKind = ChangeKind.CREATED) -> FileChange:
    """A link's digest is that of the text of its target."""
    return regular(path, target, change)


def listed(result: ExecutionResult) -> dict[str, FileChange]:
    assert result.exit_code == 0, result
    by_path = {change.path: change for change in result.files_changed}
    assert len(by_path) == len(result.files_changed), "a path is listed twice"
    assert not any(path.startswith(("/", "./", "../")) for path in by_path)
    return by_path


def shape(change: FileChange) -> tuple[ChangeKind, str | None]:
    return change.change, change.sha256


async def test_created_modified_deleted_and_untouched_are_told_apart() -> None:
    async with live() as environment:
        await environment.workspace.write("kept", b"kept")
        await environment.workspace.write("modified", b"before")
        await environment.workspace.write("gone", b"12345")
        result = await environment.run(
            "sh", "-c", "printf new > created; printf after > modified; rm gone; cat kept"
        )
        idle = await environment.run("true")
    assert listed(result) == {
        "created": regular("created", b"new"),
        "modified": regular("modified", b"after", ChangeKind.MODIFIED),
        "gone": FileChange(path="gone", change=ChangeKind.DELETED, size_bytes=5, sha256=None),
    }
    assert idle.files_changed == ()


async def test_what_nobody_may_read_is_still_listed_with_its_digest() -> None:
    source = """
os.mkdir("closed")
open("closed/inner", "wb").write(b"inner")
open("zero", "wb").write(b"secret")
os.chmod("zero", 0)
os.chmod("closed", 0)
try:
    open("zero")
except PermissionError:
    print("the control: the command itself may not")
"""
    async with live() as environment:
        result = await environment.python("import os\n" + source)
    found = listed(result)
    assert b"control" in result.stdout
    assert found["zero"] == regular("zero", b"secret")
    assert found["closed/inner"] == regular("closed/inner", b"inner")
    assert shape(found["closed"]) == (ChangeKind.CREATED, None)
    assert set(found) == {"zero", "closed", "closed/inner"}


@pytest.mark.case("FS-06")
async def test_pipes_sockets_and_links_are_listed_and_never_opened_or_followed() -> None:
    source = """
import os, socket
os.mkfifo("pipe")
socket.socket(socket.AF_UNIX).bind("sock")
os.symlink("/etc/shadow", "absolute")
os.symlink("../../../etc/passwd", "up")
os.symlink("loop-b", "loop-a")
os.symlink("loop-a", "loop-b")
os.symlink(".", "self")
os.symlink(b"target-\\xff", "odd-target")
os.symlink("nowhere", "dangling")
"""
    with trio.fail_after(60):
        async with live() as environment:
            found = listed(await environment.python(source))
    assert shape(found.pop("pipe")) == (ChangeKind.CREATED, None)
    assert shape(found.pop("sock")) == (ChangeKind.CREATED, None)
    targets = {
        "absolute": b"/etc/shadow",
        "up": b"../../../etc/passwd",
        "loop-a": b"loop-b",
        "loop-b": b"loop-a",
        "self": b".",
        "odd-target": b"target-\xff",
        "dangling": b"nowhere",
    }
    assert found == {path: link(path, target) for path, target in targets.items()}


NAMES = [
    b"new\nline",
    b"tab\there",
    b"quote\"'`$(x)",
    b"-rf",
    b"\xff\xfe",
    b"esc\x1b[2J",
    b" space ",
    b"...",
    b"\\backslash",
    "ünïcode\u202e".encode(),
    b"n" * 255,
    b"A/b\nc/\xff",
]


@pytest.mark.case("FS-07")
async def test_hostile_names_are_listed_as_they_are_and_can_be_read_back() -> None:
    source = f"""
import os
for name in {NAMES!r}:
    os.makedirs(os.path.dirname(name) or b".", exist_ok=True)
    with open(name, "wb") as file:
        file.write(b"of " + name)
"""
    async with live() as environment:
        found = listed(await environment.python(source))
        names = [name.decode("utf-8", "surrogateescape") for name in NAMES]
        assert set(found) == {*names, "A", "A/b\nc"}
        for raw, name in zip(NAMES, names, strict=True):
            assert found[name] == regular(name, b"of " + raw)


async def test_both_names_of_a_hard_link_are_listed() -> None:
    async with live() as environment:
        found = listed(await environment.run("sh", "-c", "printf same > one; ln one two"))
        assert found == {"one": regular("one", b"same"), "two": regular("two", b"same")}
        later = listed(await environment.run("sh", "-c", "printf more >> one"))
        assert later["one"] == regular("one", b"samemore", ChangeKind.MODIFIED)
        assert later["two"] == regular("two", b"samemore", ChangeKind.MODIFIED)


async def test_a_file_replaced_by_a_link_is_modified_and_not_deleted() -> None:
    async with live() as environment:
        await environment.workspace.write("file", b"content")
        await environment.run("mkdir", "folder")
        result = await environment.run(
            "sh", "-c", "rm file; ln -s /etc/shadow file; rmdir folder; ln -s /etc folder"
        )
    found = listed(result)
    assert found["file"] == link("file", b"/etc/shadow", ChangeKind.MODIFIED)
    assert found["folder"] == link("folder", b"/etc", ChangeKind.MODIFIED)
    assert set(found) == {"file", "folder"}, "the link was followed"


async def test_a_rename_is_a_deletion_and_a_creation() -> None:
    async with live() as environment:
        await environment.workspace.write("old", b"content")
        await environment.run("sh", "-c", "mkdir a; printf x > a/inner")
        found = listed(await environment.run("sh", "-c", "mv old new; mv a b"))
    assert found["old"].change is ChangeKind.DELETED
    assert found["new"] == regular("new", b"content")
    assert found["a"].change is found["a/inner"].change is ChangeKind.DELETED
    assert found["b/inner"] == regular("b/inner", b"x")
    assert set(found) == {"old", "new", "a", "a/inner", "b", "b/inner"}


async def test_a_forged_time_hides_no_modification() -> None:
    source = """
import os
before = os.stat("file")
with open("file", "r+b") as file:
    file.write(b"FORGED")
os.utime("file", ns=(before.st_atime_ns, before.st_mtime_ns))
after = os.stat("file")
assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
"""
    async with live() as environment:
        await environment.workspace.write("file", b"before")
        await environment.workspace.write("other", b"other")
        found = listed(await environment.python(source))
        assert found == {"file": regular("file", b"FORGED", ChangeKind.MODIFIED)}
        mapped = """
import mmap, os
before = os.stat("file")
with open("file", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
    view[0:6] = b"MAPPED"
os.utime("file", ns=(before.st_atime_ns, before.st_mtime_ns))
"""
        found = listed(await environment.python(mapped))
        assert found == {"file": regular("file", b"MAPPED", ChangeKind.MODIFIED)}


async def test_a_file_rewritten_at_once_after_a_snapshot_is_seen() -> None:
    """Same size, within a tick of the clock: only the digest tells."""
    async with live() as environment:
        for number in range(8):
            text = f"{number:04}"
            found = listed(await environment.run("sh", "-c", f"printf {text} > file"))
            assert found["file"].sha256 == sha256(text.encode())
            await environment.workspace.write("file", b"tool")
            found = listed(await environment.run("sh", "-c", "printf look > file"))
            assert found["file"] == regular("file", b"look", ChangeKind.MODIFIED)


async def test_what_a_tool_writes_between_commands_is_not_the_commands() -> None:
    async with live() as environment:
        await environment.run("true")
        await environment.workspace.write("by-tool", b"x")
        assert (await environment.run("true")).files_changed == ()
        found = listed(await environment.run("rm", "by-tool"))
    assert set(found) == {"by-tool"}


async def test_a_deep_tree_is_walked_to_its_end() -> None:
    source = """
import os
for depth in range(500):
    os.mkdir("d")
    os.chdir("d")
open("leaf", "wb").write(b"deep")
"""
    with trio.fail_after(120):
        async with live() as environment:
            found = listed(await environment.python(source))
    leaf = "d/" * 500 + "leaf"
    assert len(found) == 501
    assert found[leaf] == regular(leaf, b"deep")


@pytest.mark.case("RES-10")
async def test_a_sparse_file_of_a_tebibyte_ends_in_bounded_time() -> None:
    source = """
import os
with open("sparse", "wb") as file:
    try:
        file.truncate(2 ** 40)
    except OSError:
        file.truncate(2 ** 34)
print(os.stat("sparse").st_size)
open("beside", "wb").write(b"beside")
"""
    with trio.fail_after(120):
        async with live() as environment:
            result = await environment.python(source)
            after = await environment.run("sh", "-c", "printf more > later")
    found = listed(result)
    size = int(result.stdout)
    assert size >= 2**34
    assert found["sparse"].size_bytes == size
    assert found["sparse"].change is ChangeKind.CREATED
    assert found["beside"] == regular("beside", b"beside")
    assert listed(after) == {"later": regular("later", b"more")}


async def test_thousands_of_files_are_a_bounded_list_with_a_flag() -> None:
    source = "[open(f'f{n:05}', 'w').close() for n in range(3000)]"
    async with live(ROOMY) as environment:
        result = await environment.python(source)
        removed = await environment.python("import os; [os.unlink(n) for n in os.listdir()]")
        few = await environment.run("sh", "-c", "printf x > one")
    assert result.files_changed_truncated
    assert len(result.files_changed) == FILES_CHANGED_MAX
    for change in result.files_changed:
        assert change == regular(change.path, b"")
    assert len(listed(result)) == FILES_CHANGED_MAX
    assert removed.files_changed_truncated
    assert all(each.change is ChangeKind.DELETED for each in removed.files_changed)
    assert not few.files_changed_truncated
    assert listed(few) == {"one": regular("one", b"x")}


async def test_changes_of_a_killed_command_are_listed() -> None:
    async with live() as environment:
        result = await environment.run(
            "sh", "-c", "printf done > file; sleep 600", timeout_seconds=4
        )
    assert result.timed_out
    assert result.files_changed == (regular("file", b"done"),)


async def test_directories_and_modes_are_changes_too() -> None:
    async with live() as environment:
        found = listed(await environment.run("mkdir", "-p", "a/b"))
        assert {path: shape(each) for path, each in found.items()} == {
            "a": (ChangeKind.CREATED, None),
            "a/b": (ChangeKind.CREATED, None),
        }
        await environment.workspace.write("a/file", b"x")
        found = listed(await environment.run("chmod", "755", "a/file"))
        assert found["a/file"] == regular("a/file", b"x", ChangeKind.MODIFIED)
        found = listed(await environment.run("rm", "-r", "a"))
        assert set(found) == {"a", "a/b", "a/file"}


async def test_an_empty_command_litters_nothing() -> None:
    async with live() as environment:
        assert (await environment.run("true")).files_changed == ()
        assert (await environment.python("pass")).files_changed == ()
        assert await environment.workspace.listdir(".") == []
