"""Where `sbxctl` begins."""

from sbxd import extras

EXTRAS: dict[str, str] = dict.fromkeys(("click", "rich", "trio"), "cli")


def main() -> None:
    """Run the command line."""
    with extras.named("sbxctl", EXTRAS):
        from sbxctl.__main__ import main as run
    run()
