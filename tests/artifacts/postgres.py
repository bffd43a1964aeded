"""A real PostgreSQL server for the tests: Debian's package, a cluster of the test run's own.

It listens on a Unix socket in its own folder alone and is stopped at the end. PostgreSQL refuses
to run as root: under root it runs as the package's user.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

PACKAGED = Path("/usr/lib/postgresql")
SECONDS_MAX = 120


def programs() -> Path:
    """The folder of the newest server that the package installed."""
    found = [path for path in PACKAGED.glob("*/bin") if (path / "initdb").exists()]
    assert found, f"no server below {PACKAGED}: install the Debian package postgresql"
    return max(found, key=lambda path: int(path.parent.name))


@contextmanager
def server() -> Iterator[str]:
    """Runs for the block; yields a connection URI of its superuser."""
    bin_folder = programs()
    # Not below pytest's folder, which belongs to root alone.
    folder = Path(tempfile.mkdtemp(prefix="sbxd-pg-"))
    owner = pwd.getpwnam("postgres") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    os.chown(folder, owner.pw_uid, owner.pw_gid)

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [bin_folder / program, *arguments],
            cwd=folder,
            user=owner.pw_uid if os.geteuid() == 0 else None,
            group=owner.pw_gid if os.geteuid() == 0 else None,
            extra_groups=[] if os.geteuid() == 0 else None,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=SECONDS_MAX,
        )

    data = folder / "data"
    options = f"-k {folder} -c listen_addresses='' -c fsync=off -c max_connections=50"
    try:
        run("initdb", "-D", str(data), "-A", "trust", "-U", "sbxd", "--no-sync")
        log = str(folder / "log")
        run("pg_ctl", "start", "-w", "-t", "60", "-D", str(data), "-l", log, "-o", options)
        try:
            yield f"postgresql://sbxd@/postgres?host={quote(str(folder), safe='')}"
        finally:
            run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(data))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_schema(uri: str, schema: str) -> str:
    """The same server, seen through a schema of the test's own."""
    return f"{uri}&options={quote(f'-c search_path={schema}', safe='')}"
