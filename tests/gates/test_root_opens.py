"""What programs that run as root open or change by name, each with why nobody else can turn it
elsewhere.

Root may meet folders that a less trusted account writes: the daemon's below /var/lib/sbxd, the
metrics folder, an operator's working folder. A path that is followed there is the account's choice.
So a call either goes through a descriptor of its folder and follows no link, or it is in `BY_NAME`.

The rule is a function from source to places, which must find what is planted.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum

import pytest

from tests.gates.imports import within
from tests.gates.source import REPOSITORY, Module, aliases, called, load

# `sbxctl` is run by root as often as not; the launcher, its helpers and what they start are root.
ROOTS = ("sbxctl", "sbxd.launcher", "sbxd.jail", "sbxd.rights")


class Whose(StrEnum):
    """Who decides what stands at the path."""

    KERNEL = "a file of /proc, /sys or /dev"
    ROOT = "below folders that root alone may write; checked where it is opened"
    ASKED = "named by whoever runs the command, and read or written for them"
    NEW = "made here under a name that nobody could have taken"
    SEALED = "a descriptor, or a name inside a root of our own making"
    LESS_TRUSTED = "in a less trusted account's folder"


BY_NAME: Mapping[str, tuple[Whose, str]] = {
    "sbxctl.archive::prepared": (Whose.ASKED, "--from"),
    "sbxctl.faults::__exit__": (Whose.KERNEL, "/dev/null"),
    "sbxctl.metrics::_replace": (
        Whose.LESS_TRUSTED,
        "the timer runs it as the folder's owner; what it replaces is new and has no link",
    ),
    "sbxctl.run::read_stdin": (Whose.ASKED, "--stdin"),
    "sbxctl.service_state::has_ended": (Whose.KERNEL, "/run/systemd, listed alone"),
    "sbxctl.doctor::_cgroup": (Whose.KERNEL, "/sys/fs/cgroup"),
    "sbxctl.doctor::_user_namespaces": (Whose.KERNEL, "/proc/sys"),
    "sbxctl.stream::endless": (Whose.KERNEL, "/dev/null"),
    "sbxctl.tars::open_directory": (Whose.ASKED, "DIR; everything below goes by descriptor"),
    "sbxctl.transfer::get_file": (Whose.ASKED, "the target, made anew beside it and renamed"),
    "sbxctl.transfer::put_file": (Whose.ASKED, "the source"),
    "sbxctl.untrusted::__init__": (
        Whose.LESS_TRUSTED,
        "the folder, following no link; its files then by descriptor, as their owner's",
    ),
    "sbxd.jail.build::leave_the_standard_streams": (Whose.SEALED, "/dev/null of the new root"),
    "sbxd.jail.landlock::make_ruleset": (Whose.SEALED, "/ of the new root"),
    "sbxd.jail.mounts::put_on_root": (Whose.SEALED, "/ of the new root"),
    "sbxd.jail.steward_process::keep_two_descriptors": (Whose.SEALED, "/workspace of its root"),
    "sbxd.jail.workload::offer_itself_to_the_oom_killer": (Whose.KERNEL, "/proc/self"),
    "sbxd.launcher.canary::running": (Whose.KERNEL, "/dev/null"),
    "sbxd.launcher.destroy::_remove_unit": (Whose.KERNEL, "/sys/fs/cgroup"),
    "sbxd.launcher.fast::_resize_tmpfs": (Whose.KERNEL, "/proc/PID/root of a child of its own"),
    "sbxd.launcher.kernel.cgroup::open_directory": (Whose.KERNEL, "/sys/fs/cgroup"),
    "sbxd.launcher.kernel.cgroup::open_or_null": (Whose.KERNEL, "/dev/null"),
    "sbxd.launcher.kernel.hostpaths::apparmor_profiles": (Whose.KERNEL, "/sys/kernel/security"),
    "sbxd.launcher.kernel.hostpaths::boot_id": (Whose.KERNEL, "/proc/sys"),
    "sbxd.launcher.kernel.hostpaths::flag_file": (Whose.KERNEL, "/proc and /sys"),
    "sbxd.launcher.kernel.hostpaths::loop_backing_files": (Whose.KERNEL, "/sys/block"),
    "sbxd.launcher.kernel.hostpaths::open_blobs": (
        Whose.LESS_TRUSTED,
        "the state folder, which is root's; the daemon's folder then by openat2 beneath it",
    ),
    "sbxd.launcher.kernel.hostpaths::open_trusted": (Whose.ROOT, "programs; owner and mode"),
    "sbxd.launcher.kernel.hostpaths::operator_profiles": (Whose.ROOT, "/etc/sbxd; owner and mode"),
    "sbxd.launcher.kernel.hostpaths::private_directory": (Whose.ROOT, "/var/lib/sbxd"),
    "sbxd.launcher.kernel.hostpaths::state_disk": (Whose.KERNEL, "/sys/dev/block"),
    "sbxd.launcher.kernel.image_names::_write": (Whose.SEALED, "a descriptor"),
    "sbxd.launcher.kernel.inventory::_backing_device": (Whose.KERNEL, "/dev/loop"),
    "sbxd.launcher.kernel.inventory::_cgroups": (Whose.KERNEL, "/sys/fs/cgroup"),
    "sbxd.launcher.kernel.inventory::_mounts": (Whose.KERNEL, "/proc/self"),
    "sbxd.launcher.kernel.inventory::_processes": (Whose.KERNEL, "/proc"),
    "sbxd.launcher.kernel.loop_image::_node": (Whose.KERNEL, "/dev/loop"),
    "sbxd.launcher.kernel.loop_image::create": (Whose.KERNEL, "/proc/self/fd"),
    "sbxd.launcher.kernel.mounts::start_holder": (Whose.KERNEL, "/proc/PID/ns"),
    "sbxd.launcher.kernel.mounts::write_maps": (Whose.KERNEL, "/proc/PID"),
    "sbxd.launcher.kernel.probe::_clone_into_cgroup": (Whose.KERNEL, "/dev/null"),
    "sbxd.launcher.kernel.probe::_guest_program": (Whose.ROOT, "/usr/lib/sbxd"),
    "sbxd.launcher.kernel.probe::_mount_options": (Whose.KERNEL, "/proc/self"),
    "sbxd.launcher.kernel.process::run": (Whose.KERNEL, "/dev/null"),
    "sbxd.launcher.kernel.runsc::_arrange": (Whose.KERNEL, "/dev/null"),
    "sbxd.launcher.kernel.runsc::_tell": (Whose.SEALED, "below its folder, by an opener"),
    "sbxd.launcher.kernel.runsc::boot": (Whose.SEALED, "below its folder, by an opener"),
    "sbxd.launcher.kernel.seccomp::profile_text": (Whose.ROOT, "/usr/lib/sbxd"),
    "sbxd.launcher.kernel.systemd::connect": (Whose.ROOT, "/run/systemd/private"),
    "sbxd.launcher.kernel.static_program::command": (Whose.ROOT, "/usr/lib/sbxd"),
    "sbxd.launcher.kernel.static_program::sealed": (Whose.SEALED, "a memfd"),
    "sbxd.launcher.sentry::_build": (Whose.KERNEL, "/dev/null"),
    "sbxd.launcher.sentry::_run_canary": (Whose.KERNEL, "/dev/null"),
    "sbxd.launcher.sentry::_start": (Whose.ROOT, "/usr/lib/sbxd"),
    "sbxd.launcher.verify::_look_at_command": (Whose.KERNEL, "/proc/PID/fd"),
    "sbxd.launcher.verify::_read": (Whose.KERNEL, "/proc/PID"),
    "sbxd.launcher.warm_up::warm_up": (Whose.KERNEL, "/dev/null"),
}
# Names below a descriptor that are followed if they are links: what stands there is the kernel's
# or was made by this very process.
FOLLOWED: Mapping[str, str] = {
    "sbxd.jail.build::forbid_new_namespaces": "/proc, held open",
    "sbxd.jail.mounts::cover_all_but": "`.`, and files of a file system that was just made",
    "sbxd.launcher.kernel.cgroup::make_leaf": "a control group",
    "sbxd.launcher.kernel.cgroup::wait_empty": "a control group",
    "sbxd.launcher.kernel.runsc::_child": "the sandbox's folder, given away after this",
    "sbxd.launcher.prepare::_build": "a control group",
    "sbxd.launcher.sentry::_build": "a control group",
}
# The folders of the package that a less trusted account owns, and so what root must not trust.
OWNED_BY_OTHERS = {
    "/var/lib/sbxd/audit",
    "/var/lib/sbxd/images",
    "/var/lib/sbxd/journal",
    "/run/sbxd-metrics",
}
# What the package's scripts, which root runs, do below folders that others may write.
SCRIPTS: Mapping[str, str] = {
    "rm -f /run/sbxd-metrics/sbxd.prom": "removes a name, follows nothing",
    "unlink /run/sbxd-metrics/sbxd.prom": "removes a name, follows nothing",
    "rmdir /run/sbxd /run/sbxd-launcher /run/sbxd-metrics": "removes empty folders by name",
    "find /var/lib/sbxd -xdev -mindepth 1 -maxdepth 1": "root's folder; rm goes by descriptor",
    "find /var/lib/sbxd-worker -depth -type d -empty": "-delete goes by descriptor",
    "rmdir /var/lib/sbxd": "root's folder",
}

_OPENING = re.compile(
    r"(?:open|io\.open|trio\.open_file|anyio\.open_file|os\.(?:open|mkdir|makedirs|rename|renames"
    r"|replace|unlink|remove|link|symlink|chmod|chown|lchown|rmdir|listdir|scandir|walk|truncate"
    r"|mknod|mkfifo|setxattr|utime)|shutil\.(?:copy\w*|move|rmtree|chown|unpack_archive))\Z"
)
_OF_PATHS = frozenset(
    {"read_text", "read_bytes", "write_text", "write_bytes", "iterdir", "glob", "rglob", "touch"}
    | {"symlink_to", "hardlink_to", "unlink", "chmod", "mkdir", "open"}
)
_NOT_FOLLOWING = re.compile(
    r"O_NOFOLLOW|O_EXCL|O_TMPFILE|_OPEN_DIRECTORY|_FOLDER|_NEW\b|_OLD\b|\bflags\b"
)


def opens(tree: ast.Module) -> Iterator[tuple[str, bool, bool]]:
    """Function of each call that opens, lists or changes a path; whether it goes through a
    descriptor of the folder; whether a link at its name is followed."""
    names = aliases(tree)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in _own(function):
            if not isinstance(node, ast.Call):
                continue
            name = called(node, names)
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if _OPENING.match(name):
                yield function.name, *_how(name, node)
            elif method in _OF_PATHS and not name.startswith("os."):
                yield function.name, False, True


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, without the functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _own(child)


def _how(name: str, call: ast.Call) -> tuple[bool, bool]:
    given = {each.arg for each in call.keywords}
    held = bool(given & {"dir_fd", "src_dir_fd"}) or _of_descriptor(name, call)
    if name == "os.open":
        return held, not _NOT_FOLLOWING.search(ast.unparse(call))
    return held, False


def _of_descriptor(name: str, call: ast.Call) -> bool:
    """A listing or a stamp of a descriptor: the argument is a plain name of one."""
    descriptors = ("directory", "folder", "place", "listed", "top", "blobs", "file", "erasing")
    return name in ("os.listdir", "os.scandir", "os.utime") and any(
        isinstance(each, ast.Name) and each.id in descriptors for each in call.args[:1]
    )


def of_root(product: Mapping[str, Module]) -> Iterator[tuple[str, bool, bool]]:
    for name, module in product.items():
        if within(name, ROOTS):
            for function, held, followed in opens(module.tree):
                yield f"{name}::{function}", held, followed


@pytest.fixture(scope="module")
def product() -> dict[str, Module]:
    return load()


@pytest.mark.case("DMN-10")
def test_what_root_opens_by_name_is_listed_with_whose_it_is(product: dict[str, Module]) -> None:
    found = {place for place, held, _ in of_root(product) if not held}
    assert found == BY_NAME.keys()


@pytest.mark.case("DMN-10")
def test_below_a_descriptor_root_follows_no_link_that_another_could_make(
    product: dict[str, Module],
) -> None:
    found = {place for place, held, followed in of_root(product) if held and followed}
    assert found == FOLLOWED.keys()


@pytest.mark.case("DMN-10")
def test_what_root_opens_in_a_less_trusted_folder_is_this_and_no_more() -> None:
    assert {place for place, (whose, _) in BY_NAME.items() if whose is Whose.LESS_TRUSTED} == {
        "sbxctl.metrics::_replace",
        "sbxctl.untrusted::__init__",
        "sbxd.launcher.kernel.hostpaths::open_blobs",
    }


@pytest.mark.case("DMN-10")
def test_the_packages_folders_of_others_and_what_its_scripts_do_there_are_listed() -> None:
    packaging = REPOSITORY / "packaging"
    rows = (packaging / "tmpfiles.d" / "sbxd.conf").read_text("utf-8").splitlines()
    owned = {row.split()[1] for row in rows if row.startswith("d ") and row.split()[3] != "root"}
    assert owned == OWNED_BY_OTHERS
    unused = set(SCRIPTS)
    scripts = [
        *packaging.glob("deb/p*[!y]"),
        *packaging.glob("rpm/*.sh"),
        packaging / "installed.sh",
    ]
    assert len(scripts) == 9
    for script in scripts:
        for line in map(str.strip, script.read_text("utf-8").splitlines()):
            if not re.match(r"(?!if |elif |echo |#).*/(?:var/lib|run)/sbxd", line):
                continue
            known = {each for each in SCRIPTS if each in line}
            assert known, f"{script.name}: {line}"
            unused -= known
    assert not unused


@pytest.mark.parametrize(
    ("text", "held", "followed"),
    [
        ("open(path)", False, False),
        ("os.open(path, os.O_RDONLY)", False, True),
        ("os.open(name, os.O_RDONLY, dir_fd=at)", True, True),
        ("os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at)", True, False),
        ("Path(name).read_text()", False, True),
        ("shutil.rmtree(path)", False, False),
        ("os.listdir(path)", False, False),
    ],
)
def test_what_is_planted_is_found(text: str, held: bool, followed: bool) -> None:
    tree = ast.parse(f"import os, shutil\nfrom pathlib import Path\ndef f():\n    {text}\n")
    assert list(opens(tree)) == [("f", held, followed)]


@pytest.mark.parametrize("text", ["os.getpid()", "held.read_line()", "path.exists()"])
def test_control_what_opens_nothing_is_not_found(text: str) -> None:
    tree = ast.parse(f"import os\ndef f():\n    {text}\n")
    assert not list(opens(tree))
