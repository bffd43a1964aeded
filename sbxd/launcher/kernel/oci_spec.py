"""The OCI runtime specification of one gVisor sandbox, built whole by us: a pure function.

Invariants: nothing in it is a caller's: no annotation, no hook, no argument, no variable, no path
of the host (the paths are those of the small root that runsc is given); process 1 is the guest's
init from a descriptor; the root is read-only; there is no network namespace to join, so there is
no interface. It names no user namespace, since runsc is in the environment's own from its start.
"""

from dataclasses import dataclass

IMAGE = "/image"
WORKSPACE = "/workspace"
INIT_NAME = "sbx-init"
# To change a command's identity, and to kill what a command left, whoever it has become.
CAPABILITIES = ("CAP_KILL", "CAP_SETGID", "CAP_SETUID")
NAMESPACES = ("pid", "network", "ipc", "uts", "mount")


@dataclass(frozen=True)
class SentrySpec:
    """What differs from one environment to the next. Sizes in bytes."""

    hostname: str
    tmp_bytes: int
    shm_bytes: int


def build(spec: SentrySpec) -> dict[str, object]:
    """The document, as what JSON can hold."""
    return {
        "ociVersion": "1.0.0",
        "hostname": spec.hostname,
        "root": {"path": IMAGE, "readonly": True},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [INIT_NAME],
            "env": ["HOME=/"],  # else runsc looks for one in the image's /etc/passwd
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {
                "bounding": list(CAPABILITIES),
                "permitted": list(CAPABILITIES),
                "effective": list(CAPABILITIES),
            },
        },
        "mounts": [
            {
                "destination": "/proc",
                "type": "proc",
                "source": "proc",
                "options": ["nosuid", "nodev", "noexec"],
            },
            # An empty one: runsc would add the guest kernel's own, which no command needs.
            {
                "destination": "/sys",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "nodev", "noexec", "ro", "size=4096", "mode=0555"],
            },
            _tmpfs("/tmp", spec.tmp_bytes, []),  # noqa: S108  (the guest's own)
            _tmpfs("/dev/shm", spec.shm_bytes, ["noexec"]),  # noqa: S108
            {
                "destination": WORKSPACE,
                "type": "bind",
                "source": WORKSPACE,
                "options": ["bind", "rw", "nosuid", "nodev"],
            },
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in NAMESPACES],
        },
    }


def _tmpfs(destination: str, size_bytes: int, options: list[str]) -> dict[str, object]:
    return {
        "destination": destination,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "nodev", *options, "mode=1777", f"size={size_bytes}"],
    }
