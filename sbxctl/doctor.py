"""`sbxctl doctor`: what this host can enforce, what is missing, and the exact fix.

The daemon's own probes (made by the launcher, which may look) are the answer when it runs. When it
cannot be reached, doctor says why, from what any user may read: the configuration among it, and
what systemd knows of the service. It changes nothing.
"""

import grp
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import click
import trio

from sbxctl.config import problems_of
from sbxctl.exits import Exit
from sbxctl.journal_kept import kept_item
from sbxctl.report import print_json, show_posture
from sbxctl.runsc_age import judged
from sbxd.client.admin import connect_admin
from sbxd.port.errors import ExecutionRejected, ExecutionUnavailable
from sbxd.settings import CONFIGURATION_FILE
from sbxd.wire.descriptions import PostureItem

CONTROLLERS = ("cpu", "memory", "pids")
# The daemon's exit status when it refuses its configuration or its host (sbxd(8)).
REFUSED = 2
SHOW = ("systemctl", "show", "--property=ActiveState,ExecMainStatus", "sbxd.service")
# A start that is about to fail has closed the connection already.
UNDER_WAY = frozenset({"activating", "deactivating"})
SYSTEMCTL_SECONDS = 10.0
SETTLE_SECONDS = 0.1


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def doctor(socket: str, as_json: bool) -> None:
    """Say what this host can enforce and how to get what is missing.

    Exit code 0 when nothing is missing, 246 when something is.
    """
    today = datetime.now(UTC).date()
    found = (*trio.run(_from_daemon, socket), kept_item())
    items = [judged(item, today) for item in found]
    if as_json:
        print_json(items)
    else:
        show_posture(items)
    sys.exit(Exit.HOST_DEGRADED if any(i.state == "missing" for i in items) else Exit.OK)


async def _from_daemon(socket: str) -> tuple[PostureItem, ...]:
    try:
        async with connect_admin(socket) as admin:
            described = await admin.describe()
            images = await admin.image_list()
    except (ExecutionUnavailable, ExecutionRejected) as error:
        return (*_local(socket), await _silent(error.detail))
    summary = (
        f"{described.version}, mechanism {described.mechanism}, {described.deployment_mode}, "
        f"{described.environments} environments, reserve {described.reserve_ready} of "
        f"{described.reserve_target}"
    )
    items = [PostureItem(name="sbxd", state="ok", detail=summary)]
    default = described.default_image
    if default is None or default not in {image.digest for image in images}:
        named = "the store has no default image" if default is None else f"{default} is not there"
        items.append(
            PostureItem(
                name="image",
                state="missing",
                detail=f"{named}, so `sbxctl run` needs --image",
                fix="sbxctl image build, or sbxctl image import PATH",
            )
        )
    else:
        items.append(PostureItem(name="image", state="ok", detail=default))
    return (*items, *described.posture)


def _local(socket: str) -> tuple[PostureItem, ...]:
    configuration = _configuration(Path(CONFIGURATION_FILE))
    return (_systemd(), _cgroup(), _user_namespaces(), configuration, _socket(socket))


async def _silent(why: str) -> PostureItem:
    """The daemon, which did not answer."""
    if await _exit_status() == REFUSED:
        return PostureItem(
            name="sbxd",
            state="missing",
            detail="refused to start, with this configuration on this host, and is not started "
            "again by itself",
            fix="sbxctl logs daemon -p err says each reason; then systemctl restart sbxd",
        )
    return PostureItem(
        name="sbxd",
        state="missing",
        detail=f"no answer: {why}",
        fix="systemctl status sbxd sbxd-launcher; journalctl -u sbxd -u sbxd-launcher",
    )


async def _exit_status() -> int | None:
    """Of the service's last run, once that is over; None where it is not, or is not known."""
    with trio.move_on_after(SYSTEMCTL_SECONDS):
        while True:
            try:
                done = await trio.run_process(SHOW, capture_stdout=True, capture_stderr=True)
            except (OSError, subprocess.CalledProcessError):
                return None
            lines = done.stdout.decode().splitlines()
            known = dict(line.split("=", 1) for line in lines if "=" in line)
            if known.get("ActiveState") not in UNDER_WAY:
                status = known.get("ExecMainStatus", "")
                return int(status) if status.isdecimal() else None
            await trio.sleep(SETTLE_SECONDS)
    return None


def _configuration(file: Path) -> PostureItem:
    told = [str(each) for each in problems_of(file)]
    if not told:
        return PostureItem(name="configuration", state="ok", detail=str(file))
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    return PostureItem(
        name="configuration",
        state="missing",
        detail=f"{file} is refused: {told[0]}{more}",
        fix="correct it until `sbxctl config check` is content; then systemctl restart sbxd",
    )


def _systemd() -> PostureItem:
    if Path("/run/systemd/system").is_dir():
        return PostureItem(name="systemd", state="ok", detail="is PID 1")
    return PostureItem(
        name="systemd",
        state="missing",
        detail="is not PID 1 here, so no scope can be made",
        fix="use a host booted by systemd; to try sbxd here: tests/lab/run --lane uml --shell",
    )


def _cgroup() -> PostureItem:
    path = Path("/sys/fs/cgroup/cgroup.controllers")
    if not path.exists():
        return PostureItem(
            name="cgroup v2",
            state="missing",
            detail="the unified hierarchy is not mounted at /sys/fs/cgroup",
            fix="boot with systemd.unified_cgroup_hierarchy=1 and without cgroup_no_v1 exceptions",
        )
    have = path.read_text().split()
    lacking = [name for name in CONTROLLERS if name not in have]
    if lacking:
        return PostureItem(
            name="cgroup v2",
            state="missing",
            detail=f"controllers not available: {', '.join(lacking)}",
            fix="free them from cgroup v1 (boot with cgroup_no_v1=all); "
            "memory may need cgroup_enable=memory",
        )
    return PostureItem(name="cgroup v2", state="ok", detail=f"controllers: {', '.join(have)}")


def _user_namespaces() -> PostureItem:
    path = Path("/proc/sys/user/max_user_namespaces")
    try:
        if int(path.read_text()) > 0:
            return PostureItem(name="user namespaces", state="ok", detail="allowed")
    except OSError:
        pass
    return PostureItem(
        name="user namespaces",
        state="missing",
        detail="user.max_user_namespaces is 0 or the kernel has none",
        fix="sysctl user.max_user_namespaces=15000",
    )


def _socket(socket: str) -> PostureItem:
    try:
        status = os.stat(socket)
    except OSError as error:
        return PostureItem(
            name="admin socket",
            state="missing",
            detail=f"{socket}: {error.strerror}",
            fix="systemctl enable --now sbxd-admin.socket, and run sbxctl as root or in group "
            "sbxd-admin",
        )
    if not stat.S_ISSOCK(status.st_mode):
        return PostureItem(
            name="admin socket",
            state="missing",
            detail=f"{socket} is no socket",
            fix=f"rm {socket}",
        )
    if not os.access(socket, os.W_OK):
        group = _group_name(status.st_gid)
        return PostureItem(
            name="admin socket",
            state="missing",
            detail=f"{socket} is not writable for you",
            fix=f"run as root, or: usermod -aG {group} $USER",
        )
    return PostureItem(name="admin socket", state="ok", detail=socket)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
