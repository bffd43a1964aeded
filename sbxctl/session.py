"""One admin connection for one verb, and what its failures mean on a command line.

Every verb is an async function that takes an AdminClient; `run_verb` connects, runs it under trio,
and turns the port's errors into one sentence on stderr and an exit code of `sbxctl.exits`.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import trio

from sbxctl.exits import Exit
from sbxctl.report import say, tell
from sbxd.client.admin import AdminClient, connect_admin
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    SandboxEscapeSuspected,
    UnavailableCode,
    WorkspaceError,
    WorkspaceEscape,
)

Verb = Callable[[AdminClient], Awaitable[int]]


def run_verb(socket: str, verb: Verb, *, when_down: Callable[[], None] = lambda: None) -> NoReturn:
    """Run one verb and exit with its code. when_down: called where the daemon does not answer."""

    async def connected() -> int:
        async with connect_admin(socket) as admin:
            return await verb(admin)

    try:
        code = trio.run(connected)
    except ExecutionRejected as error:
        code = fail(Exit.REJECTED, error.detail, hint=_rejection_hint(error))
    except ExecutionUnavailable as error:
        when_down()
        code = fail(Exit.UNAVAILABLE, error.detail, hint=_unavailable_hint(error, socket))
    except SandboxEscapeSuspected as error:
        code = fail(
            Exit.ESCAPE_SUSPECTED,
            f"{error.code}: {error.detail}",
            hint="the environment was destroyed; see `journalctl -u sbxd`",
        )
    except (WorkspaceError, WorkspaceEscape) as error:
        code = fail(Exit.WORKSPACE, str(error))
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    sys.exit(code)


def fail(code: Exit, what: str, *, hint: str = "") -> int:
    """Say what failed and what to do about it, on stderr."""
    say(what)
    if hint:
        tell(f"  → {hint}", err=True)
    return code


def _rejection_hint(error: ExecutionRejected) -> str:
    match error.code:
        case RejectedCode.UNKNOWN_IMAGE:
            return "list the images with `sbxctl image ls`, make one with `sbxctl image build`"
        case RejectedCode.IMAGE_IN_USE:
            return "`sbxctl image ls` shows what holds it, `sbxctl ls` the live environments"
        case RejectedCode.INVALID_IMAGE:
            return "docs/images.md says what an image may hold; nothing of it was kept"
        case RejectedCode.NOT_AUTHORIZED:
            return "run as root or as a member of group sbxd-admin"
        case RejectedCode.ENVIRONMENT_GONE:
            return "list the live environments with `sbxctl ls`"
        case RejectedCode.COMMAND_NOT_FOUND:
            return "name a program of the image absolutely or by its name on the image's PATH"
        case _:
            return ""


def _unavailable_hint(error: ExecutionUnavailable, socket: str) -> str:
    if error.code is UnavailableCode.CONFINEMENT_MISMATCH:
        return (
            "`journalctl SBX_EVENT=ConfinementMismatched` names the layer, `sbxctl doctor` what "
            "this host has; until that is understood, run nothing here that nobody trusts"
        )
    if error.code is not UnavailableCode.UNREACHABLE:
        return "try again; `sbxctl doctor` and `journalctl -u sbxd -u sbxd-launcher` say more"
    if not os.path.exists(socket):
        return f"{socket} does not exist: start it with `systemctl enable --now sbxd-admin.socket`"
    if not os.access(socket, os.W_OK):
        return "run as root or as a member of group sbxd-admin"
    return "`sbxctl doctor` says what is wrong, `sbxctl logs daemon launcher` what they said"
