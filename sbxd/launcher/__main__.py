"""The launcher's command: `sbxd-launcher [--socket PATH] [--runsc PATH]`, or
`sbxd-launcher --dump-seccomp PROFILE [--bpf]`.

Takes its listening SOCK_SEQPACKET socket from systemd (LISTEN_FDS), or makes one at --socket.
Everything is imported before the first request and then frozen, because each fork copies it.
--dump-seccomp prints what a profile compiles to, and that is all it does.
"""

import argparse
import gc
import os
import pwd
import socket
import sys
from typing import NoReturn

from sbxd.jail import syscalls
from sbxd.launcher import filters, notify
from sbxd.launcher.kernel import hostpaths, process, runsc
from sbxd.launcher.loop import Launcher

SERVICE_USER = "sbxd"
BACKLOG = 8
WIDTH_MIN, WIDTH_MAX = 4, 16


def main() -> None:
    """Run until SIGTERM. Exits with 1 when the host is not fit, and says why."""
    arguments = _arguments()
    if arguments.dump_seccomp is not None:
        _dump(arguments.dump_seccomp, bpf=arguments.bpf)
        return
    if os.geteuid() != 0:
        _give_up("it must be started by root")
    os.umask(0o077)
    syscalls.set_process_name(b"sbxd-launcher")
    environ = dict(os.environ)
    os.environ.clear()
    listener = _listener(arguments.socket, notify.passed_sockets(environ))
    try:
        for directory in (
            hostpaths.uids_directory(),
            hostpaths.volumes_directory(),
            hostpaths.unpacked_directory(),
        ):
            os.close(hostpaths.private_directory(directory))
        programs = filters.load()
    except (OSError, filters.FiltersUnavailable) as problem:
        _give_up(str(problem))
    gvisor = runsc.find(arguments.runsc)
    if isinstance(gvisor, runsc.Runsc):
        said = f"runsc {gvisor.path}: version {gvisor.version}, sha256 {gvisor.sha256}"
    else:
        said = f"the mechanism gvisor is not available: {gvisor.detail}"
    process.say(process.INFO, said)
    process.become_subreaper()
    launcher = Launcher(
        listener,
        programs,
        allowed_uids=frozenset({0, *_service_uid()}),
        notifier=notify.Notifier(environ.get("NOTIFY_SOCKET")),
        watchdog_seconds=notify.watchdog_seconds(environ),
        runsc=gvisor,
        width=max(WIDTH_MIN, min(WIDTH_MAX, 2 * (os.cpu_count() or 1))),
    )
    gc.collect()
    gc.freeze()
    launcher.run()


def _give_up(why: str) -> NoReturn:
    process.say(process.ERROR, f"sbxd-launcher: {why}")
    sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sbxd-launcher", description=__doc__)
    parser.add_argument("--socket", help="make the listening socket at this path")
    parser.add_argument("--runsc", default=hostpaths.RUNSC, help="gVisor's program")
    parser.add_argument("--dump-seccomp", metavar="PROFILE", help="print a compiled profile")
    parser.add_argument("--bpf", action="store_true", help="as struct sock_filter[], not as text")
    return parser.parse_args()


def _dump(name: str, *, bpf: bool) -> None:
    # Not imported above: the launcher's own process holds no compiler.
    from sbxd.launcher.kernel import seccomp, seccomp_text

    try:
        text, compiled = seccomp_text.read(name)
    except (OSError, seccomp.ProfileError) as problem:
        sys.exit(f"seccomp profile {name}: {problem}")
    sys.stdout.buffer.write(
        compiled.bpf if bpf else seccomp_text.table(name, text, compiled).encode("ascii")
    )


def _listener(path: str | None, passed: list[int]) -> socket.socket:
    if path is None:
        if len(passed) != 1:
            _give_up("systemd passed no socket; give --socket")
        os.set_inheritable(passed[0], False)
        listener = socket.socket(fileno=passed[0])
        if (listener.family, listener.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            _give_up("the passed socket is not AF_UNIX, SOCK_SEQPACKET")
        return listener
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def _service_uid() -> list[int]:
    try:
        return [pwd.getpwnam(SERVICE_USER).pw_uid]
    except KeyError:
        return []


if __name__ == "__main__":
    main()
