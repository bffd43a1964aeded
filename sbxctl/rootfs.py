"""Makes a root file system where an operator has none."""

import os
import shutil
import subprocess
from pathlib import Path

import click


def build_debian(out: Path, *, suite: str, packages: tuple[str, ...]) -> None:
    """Make a Debian root file system with mmdebstrap as a tar at `out`.

    Raises click.ClickException when mmdebstrap is missing or fails.
    """
    tool = shutil.which("mmdebstrap")
    if tool is None:
        raise click.ClickException(
            "mmdebstrap is not installed: run `apt-get install mmdebstrap`, "
            "or import a root file system with `sbxctl image import`"
        )
    argv = [
        tool,
        "--variant=minbase",
        f"--include={','.join(packages)}",
        "--aptopt=Apt::Install-Recommends false",
        '--customize-hook=rm -rf "$1"/var/cache/apt "$1"/var/lib/apt/lists/* "$1"/usr/share/doc/*',
        '--customize-hook=mkdir -p "$1"/workspace',
        # mmdebstrap leaves the builder's: its name and its resolver's address.
        '--customize-hook=: >"$1"/etc/hostname; : >"$1"/etc/resolv.conf',
        "--quiet",
        suite,
        str(out),
    ]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1735689600"}
    if subprocess.run(argv, env=environment, check=False).returncode != 0:
        raise click.ClickException("mmdebstrap failed; its own message is above")
