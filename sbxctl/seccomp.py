"""`sbxctl seccomp dump`: what a syscall profile compiles to, on this host and now.

The launcher's own program compiles it, from the installed files, as it does at its start; nothing
is asked of a running service. The launcher's journal names the digests that it runs with.
"""

import subprocess
import sys
from pathlib import Path

import click

import sbxd
from sbxctl.exits import Exit

# Of the package that is imported here, whatever the working directory holds.
_CODE = str(Path(sbxd.__file__).parents[1])


@click.group("seccomp")
def seccomp() -> None:
    """Show the syscall filters."""


@seccomp.command("dump")
@click.option("--profile", default="workload", show_default=True, metavar="NAME")
@click.option("--text", "form", flag_value="text", default="text", help="For reading (default).")
@click.option("--bpf", "form", flag_value="bpf", help="struct sock_filter[], as the kernel loads.")
def dump(profile: str, form: str) -> None:
    """Compile a profile as the launcher would and print it.

    NAME is workload, init, steward, or NAME.json of /etc/sbxd/seccomp; one that would open what
    the workload's refuses is refused here with the same words. To see what the running launcher
    has, compare the digest with its journal.
    """
    command = [sys.executable, "-P", "-m", "sbxd.launcher", f"--dump-seccomp={profile}"]
    if form == "bpf":
        command.append("--bpf")
    done = subprocess.run(command, env={"PYTHONPATH": _CODE}, stdin=subprocess.DEVNULL)
    sys.exit(Exit.OK if done.returncode == 0 else Exit.REJECTED)
