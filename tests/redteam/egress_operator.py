"""`sbxctl egress` as an operator runs it in a lane."""

import json
import subprocess
from typing import Any


def sbxctl(*arguments: str, user: int | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["sbxctl", "egress", *arguments],
        capture_output=True,
        timeout=300,
        check=False,
        text=True,
        cwd="/",
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )


def documents(*arguments: str) -> Any:
    return json.loads(sbxctl(*arguments, "--json").stdout)
