"""The daemon's audit, from its settings: one recorder, in its own part of the state directory."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from sbxd.audit.recorder import Recorder, open_recorder
from sbxd.settings import BOOT_ID_FILE, Settings


def open_audit(settings: Settings) -> AbstractAsyncContextManager[Recorder]:
    """What `sbxd.audit.recorder.open_recorder` makes, for this boot of this host.

    Raises OSError where the kernel does not name the boot; the rest when it is entered.
    """
    boot_id = Path(BOOT_ID_FILE).read_text("ascii").strip().replace("-", "")
    return open_recorder(
        Path(settings.state_directory) / "audit", settings.journal_socket, boot_id=boot_id
    )
