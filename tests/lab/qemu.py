"""The lane `qemu`: an emulated PC with Debian's own kernel, for what needs everything at once.

Its root is a scratch layer of its own over the lane's assembled root, which it sees through 9p;
its disk an xfs with project quota; its agent's stream a virtio serial port. The emulator runs from
a cached layer of its own, in a chroot, so the machine needs no package for it; the kernel is
started directly, with an initramfs that loads the few modules that the mounts need.

Invariant: the layer holds no file of the project; what decides its content is in the recipe.
"""

import lzma
import shutil
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from . import kernel
from .host import LabError

MEMORY = "3072"
# Loaded in this order, before the root is there.
_MODULES = (
    "kernel/crypto/crc32c_generic",
    "kernel/lib/libcrc32c",
    "kernel/fs/netfs/netfs",
    "kernel/net/9p/9pnet",
    "kernel/net/9p/9pnet_virtio",
    "kernel/fs/9p/9p",
    "kernel/drivers/block/virtio_blk",
    "kernel/fs/xfs/xfs",
    "kernel/drivers/block/loop",
    "kernel/fs/overlayfs/overlay",
)
_INIT = """#!/bin/busybox sh
export PATH=/bin
busybox mount -t devtmpfs devtmpfs /dev
busybox mount -t proc proc /proc
for module in {modules}; do busybox insmod /modules/$module.ko || busybox echo "no $module"; done
plan9="trans=virtio,version=9p2000.L,msize=512000"
mount_or_end() {{ busybox mount "$@" || exec busybox poweroff -f; }}
mount_or_end -t 9p -o ro,$plan9,cache=loose root /lower
mount_or_end -t tmpfs -o mode=0755 tmpfs /above
busybox mkdir /above/upper /above/work
mount_or_end -t overlay -o lowerdir=/lower,upperdir=/above/upper,workdir=/above/work overlay /root
mount_or_end -t 9p -o {source_mode},$plan9,cache=loose source /root/src
mount_or_end -t 9p -o $plan9,cache=none lab /root/lab
mount_or_end -t xfs -o prjquota /dev/vda /root/var/lib/sbxd
mount_or_end -t tmpfs -o mode=1777 tmpfs /root/tmp
busybox mount --move /dev /root/dev
busybox umount /proc
exec busybox switch_root /root /lib/systemd/systemd
"""


def build(whole: Path, target: Path) -> None:
    """Make the layer out of `whole`, a root file system with the emulator, a kernel and busybox.

    Raises: OSError.
    """
    (versions,) = (whole / "usr/lib/modules").iterdir()
    target.mkdir()
    for image in ("vmlinuz", "config"):
        shutil.copy2(whole / "boot" / f"{image}-{versions.name}", target / image)
    kept = target / "modules" / versions.name
    shutil.copytree(versions, kept, symlinks=True)
    for useless in ("boot", "usr/lib/modules", "var/lib/apt", "var/cache", "usr/share/doc"):
        shutil.rmtree(whole / useless, ignore_errors=True)
    whole.rename(target / "emulator")


def _initramfs(layer: Path, *, source_mode: str) -> bytes:
    (modules,) = (layer / "modules").iterdir()
    busybox = layer / "emulator/usr/bin/busybox"
    names = [Path(path).name for path in _MODULES]
    script = _INIT.format(modules=" ".join(names), source_mode=source_mode)
    entries: list[tuple[str, int, bytes, tuple[int, int]]] = [
        (folder, stat.S_IFDIR | 0o755, b"", (0, 0))
        for folder in ("above", "bin", "dev", "lower", "modules", "proc", "root")
    ]
    entries += [
        ("dev/console", stat.S_IFCHR | 0o600, b"", (5, 1)),
        ("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes(), (0, 0)),
        ("init", stat.S_IFREG | 0o755, script.encode(), (0, 0)),
    ]
    for path in _MODULES:
        data = lzma.decompress((modules / f"{path}.ko.xz").read_bytes())
        entries.append((f"modules/{Path(path).name}.ko", stat.S_IFREG | 0o644, data, (0, 0)))
    return _cpio(entries)


def _cpio(entries: Iterable[tuple[str, int, bytes, tuple[int, int]]]) -> bytes:
    """An archive in the kernel's format ("newc"): name, mode, content, device numbers."""
    archive = bytearray()
    trailer = ("TRAILER!!!", 0, b"", (0, 0))
    for number, (name, mode, data, device) in enumerate((*entries, trailer), 1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        archive += b"070701" + b"".join(b"%08x" % field for field in fields)
        archive += name.encode() + b"\0"
        archive += bytes(-len(archive) % 4)
        archive += data
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


def command(
    layer: Path, scratch: Path, root: Path, disk: Path, stream: socket.socket, *, writable: bool
) -> tuple[str, ...]:
    """Lay the emulator's own root out below `scratch` and say what starts the machine in it.

    root: the lane's. disk: its file system's. stream: the agent's, inherited by the process.
    """
    emulator = scratch / "emulator"
    kernel.overlay(
        [layer / "emulator"], scratch / "emulator-upper", scratch / "emulator-work", emulator
    )
    kernel.run("mount", "--rbind", str(root), str(_made(emulator / "lane/root")))
    kernel.bind(layer, emulator / "lane/kernel", "ro")
    kernel.bind(disk, emulator / "lane/disk")
    kernel.mount("tmpfs", emulator / "tmp", "mode=1777", kind="tmpfs")
    kernel.bind("/dev/urandom", emulator / "dev/urandom")
    kernel.bind("/dev/null", emulator / "dev/null")
    program = emulator / "usr/bin/qemu-system-x86_64"
    if not program.exists():
        raise LabError("the layer of lane qemu has no emulator: remove it from the cache")
    shared = "local,security_model=passthrough,multidevs=remap"
    initramfs = emulator / "lane/initramfs"
    initramfs.write_bytes(_initramfs(layer, source_mode="rw" if writable else "ro"))
    (emulator / "proc").mkdir(exist_ok=True)
    script = f'mount -t proc proc {emulator}/proc && exec chroot {emulator} "$@"'
    return (
        # It names files by /proc/self/fd when it reads their attributes.
        *("sh", "-c", script, "qemu", "/usr/bin/qemu-system-x86_64"),
        *("-M", "q35", "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", MEMORY),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"),
        *("-kernel", "/lane/kernel/vmlinuz", "-initrd", "/lane/initramfs"),
        *("-append", "console=ttyS0 quiet panic=-1 apparmor=1 security=apparmor"),
        *("-serial", "stdio"),
        # The first virtio device, which gives its port the name /dev/vport0p1.
        *("-device", "virtio-serial-pci"),
        *("-chardev", f"socket,id=agent,fd={stream.fileno()}"),
        *("-device", "virtserialport,chardev=agent,name=sbxd-lab"),
        *("-drive", "file=/lane/disk,if=none,id=disk,format=raw,cache=unsafe,discard=unmap"),
        *("-device", "virtio-blk-pci,drive=disk"),
        *("-virtfs", f"{shared},path=/lane/root,mount_tag=root,readonly=on"),
        *("-virtfs", f"{shared},path=/lane/root/src,mount_tag=source"),
        *("-virtfs", f"{shared},path=/lane/root/lab,mount_tag=lab"),
    )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
