"""Where `sbxd-worker` begins."""

from sbxd import extras

EXTRAS: dict[str, str] = dict.fromkeys(("aiosqlite", "click"), "artifacts")


def main() -> None:
    """Run the command line."""
    with extras.named("sbxd-worker", EXTRAS):
        from sbxd.worker_cli.__main__ import main as run
    run()
