"""Writes what a command shows in the lab's lane `container` into the documents.

`python -m tests.docs.capture`, as root: between `<!-- capture: NAME -->` and its end stands what
the command of that name said. `test_commands.py` holds that what is shown is still said.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.docs.blocks import documents
from tests.lab import session
from tests.package.hosts import Done, Host

# A command that is at work while it is looked at.
BUSY = "import time; print('up', flush=True)\nwhile time.monotonic(): pass"
TOP = f"""
sbxctl run --timeout 30 -- python3 -c "{BUSY}" >/run/busy 2>/dev/null &
until grep -q up /run/busy; do sleep 0.2; done
sbxctl top --once
kill $!
wait
"""
CAPTURES: Mapping[str, tuple[str, ...]] = {
    "doctor": ("sbxctl", "doctor"),
    "top": ("/bin/sh", "-c", TOP),
    "audit": ("sbxctl", "audit", "--lines", "8"),
}
_MARK = re.compile(r"(<!-- capture: (\w+) -->\n).*?(<!-- end of capture -->)", re.DOTALL)


@contextmanager
def lane() -> Iterator[Host]:
    """A lane with the daemon and an image, ended on leaving."""
    started = session.start(session.Wish(lane="container"), None, lambda text: None)
    try:
        yield Host(started)
    finally:
        started.release()


def captured(text: str) -> dict[str, str]:
    """What a document shows, by the capture's name."""
    return {
        name: re.sub(r"^```.*\n", "", shown, flags=re.M)
        for name, shown in re.findall(
            r"<!-- capture: (\w+) -->\n(.*?)<!-- end of capture -->", text, re.DOTALL
        )
    }


def with_captures(text: str, said: Mapping[str, str]) -> str:
    """A document with what was said between its marks."""
    return _MARK.sub(lambda found: f"{found[1]}```text\n{said[found[2]]}```\n{found[3]}", text)


def marked() -> list[Path]:
    """The documents with a capture."""
    return [file for file in documents() if _MARK.search(file.read_text())]


def said_by(host: Host) -> dict[str, str]:
    """What each command says there."""
    done: dict[str, Done] = {name: host.run(*command) for name, command in CAPTURES.items()}
    return {name: _tidy(each.out) for name, each in done.items()}


def _tidy(out: str) -> str:
    """Without blanks at the ends of lines, and what a kernel's builder added to its name."""
    plain = re.sub(r" +$", "", out, flags=re.M)
    return re.sub(r"(ok  kernel  [0-9.]+)\S*", r"\1", plain)


if __name__ == "__main__":
    with lane() as host:
        said = said_by(host)
    for file in marked():
        file.write_text(with_captures(file.read_text(), said))
