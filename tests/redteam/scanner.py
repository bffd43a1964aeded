"""Searches for credentials: by what they look like, and by their exact values.

The same source runs on both sides: imported by the tests, and as a program inside a sandbox, where
it searches all that it can read (`python3 scanner.py`, the exact values on stdin). Standard
library only. Invariants: bounded in files and bytes; no value is printed, only its number and the
places. Files of the image, which an operator chose and which are full of examples, are searched for
exact values alone.
"""

import json
import math
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

FILE_BYTES_MAX = 4 << 20
FILES_MAX = 200_000
PLACES_MAX = 20
ENTROPY_BITS_MIN = 3.0

PATTERNS = {
    "AWS key id": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{22,})",
    "GitLab token": rb"\bglpat-[A-Za-z0-9_-]{20}",
    "Google key": rb"\bAIza[A-Za-z0-9_-]{35}",
    "model provider's key": rb"\bsk-[A-Za-z0-9_-]{20,}",
    "payment provider's key": rb"\b[rs]k_live_[A-Za-z0-9]{16,}",
    "chat token": rb"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "vault token": rb"\bhvs\.[A-Za-z0-9_-]{20,}",
    "hub token": rb"\bhf_[A-Za-z0-9]{30,}",
    "registry token": rb"\bnpm_[A-Za-z0-9]{36}",
    "JWT": rb"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    "private key": rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
    "URL with a password": rb"\b[a-z][a-z0-9+.-]*://[^\s:/@]*:[^\s:/@]+@[^\s/@]+",
}
_COMPILED = {kind: re.compile(pattern) for kind, pattern in PATTERNS.items()}
# A name that says what it is, and a long value behind it, which must look random besides.
_ASSIGNED = re.compile(
    rb"(?i)\b[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)['\"]?\s*[=:]\s*['\"]?"
    rb"([A-Za-z0-9+/_.~=-]{16,})"
)


def kinds(content: bytes) -> set[str]:
    """What in this looks like a credential; empty when nothing does."""
    found = {kind for kind, pattern in _COMPILED.items() if pattern.search(content)}
    if any(entropy_bits(value) >= ENTROPY_BITS_MIN for value in _ASSIGNED.findall(content)):
        found.add("value of a telling name")
    return found


def entropy_bits(value: bytes) -> float:
    """Of each byte, by how often the bytes of this value occur in it."""
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())


class Search:
    """Collects the places of what is found. exact: by the number of the value."""

    def __init__(self, values: Sequence[bytes]) -> None:
        self._values = values
        self.exact: dict[int, list[str]] = {}
        self.looks: dict[str, list[str]] = {}
        self.files = 0
        self.bytes = 0

    def exactly(self, place: str, content: bytes) -> None:
        """Search for the exact values."""
        for number, value in enumerate(self._values):
            if value in content:
                self.exact.setdefault(number, []).append(place)

    def wholly(self, place: str, content: bytes) -> None:
        """Search for exact values and for what looks like a credential."""
        self.exactly(place, content)
        for kind in kinds(content):
            self.looks.setdefault(kind, []).append(place)

    def everything(self) -> None:
        """This process' surroundings, and all below / that it can read. Raises OverflowError
        when there is too much of it."""
        environment = b"\n".join(name + b"=" + value for name, value in os.environb.items())
        self.wholly("environ", environment)
        self.wholly("uname", repr(os.uname()).encode())
        for place, content, of_image in _readable():
            if self.files == FILES_MAX:
                raise OverflowError(f"more than {FILES_MAX} files")
            self.files += 1
            self.bytes += len(content)
            (self.exactly if of_image else self.wholly)(place, content)


def _readable() -> Iterator[tuple[str, bytes, bool]]:
    """Place, name with content, and whether it is the image's, of everything below /."""
    with open("/proc/self/mountinfo") as file:
        mounts = {line.split(" ")[4] for line in file} - {"/"}
    for folder, folders, names in os.walk("/"):
        folders[:] = [f for f in folders if os.path.join(folder, f) != "/proc/thread-self"]
        for name in [*names, *folders]:
            path = os.path.join(folder, name)
            of_image = not any(path == m or path.startswith(m + "/") for m in mounts)
            yield path, os.fsencode(path) + b"\n" + _content(path), of_image


def _content(path: str) -> bytes:
    """A file's beginning, or a link's target. Empty for what cannot be read, and for the memory
    of the search itself, which holds what it searches for."""
    if path.startswith("/proc/") and path.endswith(("/mem", "/stack")):
        return b""
    try:
        if os.path.islink(path):
            return os.fsencode(os.readlink(path))
        if not stat.S_ISREG(os.stat(path).st_mode):
            return b""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(descriptor, FILE_BYTES_MAX)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def main() -> None:
    """Search everything for the values of stdin (a JSON list of hexadecimal ones) and print what
    was found, as JSON."""
    search = Search([bytes.fromhex(value) for value in json.load(sys.stdin)])
    search.everything()
    json.dump(
        {
            "exact": {n: places[:PLACES_MAX] for n, places in search.exact.items()},
            "looks": {kind: places[:PLACES_MAX] for kind, places in search.looks.items()},
            "files": search.files,
            "bytes": search.bytes,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
