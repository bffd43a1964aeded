"""Examples for each verb's help and for its manual page, as data: a test parses every one."""

from collections.abc import Mapping

import click

ID = "0123456789abcdef0123456789abcdef"
DIGEST = "sha256:" + "0123456789abcdef" * 4

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "run": (
        "sbxctl run -- python3 -c 'print(1)'",
        "sbxctl run --memory 256M --timeout 30 --put a.py --get out.csv -- python3 a.py",
        "sbxctl run --json -- make -j4",
    ),
    "exec": (f"sbxctl exec {ID} -- ls -l",),
    "shell": ("sbxctl shell", "sbxctl shell --memory 1G --network", f"sbxctl shell {ID}"),
    "cp": (f"sbxctl cp data.csv {ID}:in/", f"sbxctl cp {ID}:out/report.csv ."),
    "ls": ("sbxctl ls", "sbxctl ls --json"),
    "inspect": (f"sbxctl inspect {ID}",),
    "destroy": (f"sbxctl destroy {ID}",),
    "image build": ("sbxctl image build",),
    "image import": ("sbxctl image import rootfs.tar --label 'python, October'",),
    "image pull": ("sbxctl image pull docker.io/library/python:3.13-slim",),
    "image ls": ("sbxctl image ls",),
    "image rm": (f"sbxctl image rm {DIGEST}",),
    "image prune": ("sbxctl image prune",),
    "egress check": ("sbxctl egress check example.org:443 --explain",),
    "egress show": ("sbxctl egress show",),
    "egress test": ("sbxctl egress test",),
    "egress learn": ("sbxctl egress learn --since -2h",),
    "config check": ("sbxctl config check", "sbxctl config check new.toml"),
    "config show": ("sbxctl config show --changed",),
    "doctor": ("sbxctl doctor", "sbxctl doctor --json"),
    "status": ("sbxctl status", "sbxctl status --json"),
    "top": ("sbxctl top", "sbxctl top --once --json"),
    "pool show": ("sbxctl pool show",),
    "metrics": ("sbxctl metrics", "sbxctl metrics --textfile sbxd.prom"),
    "audit": ("sbxctl audit --tenant acme --reason MEMORY --since 1h", "sbxctl audit -f"),
    "audit verify": ("sbxctl audit verify",),
    "logs": ("sbxctl logs --since 1h", "sbxctl logs launcher -f"),
    "quarantine ls": ("sbxctl quarantine ls",),
    "quarantine clear": ("sbxctl quarantine clear sbx-0123",),
    "reap": ("sbxctl reap",),
    "reconcile": ("sbxctl reconcile",),
    "seccomp dump": ("sbxctl seccomp dump --profile workload",),
}


def annotate(group: click.Group, words: tuple[str, ...] = ()) -> None:
    """Put each verb's examples below its help."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            annotate(command, (*words, name))
        if found := EXAMPLES.get(" ".join((*words, name))):
            command.epilog = "\b\nExamples:\n" + "\n".join(f"  {each}" for each in found)
