"""How content leaves: as an attachment, under a name that is safe on the reader's machine.

Invariants: the stored name is never changed (the original is occasionally the evidence), only
what is served is; every header value is printable ASCII without a line break, whatever the name
holds; a media type that a browser might run is served as bytes. The rules are RFC 6266 for the
header and RFC 8187 for what is not ASCII in it.
"""

import re
import unicodedata
from collections.abc import Mapping
from urllib.parse import quote

FALLBACK_NAME = "artifact"
NAME_BYTES_MAX = 180
OCTETS = "application/octet-stream"

_TOKEN = r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}"  # noqa: S105  (RFC 6838's, not a secret)
_MEDIA_TYPE = re.compile(rf"{_TOKEN}/{_TOKEN}(?:; ?charset=[A-Za-z0-9][A-Za-z0-9_-]{{0,39}})?\Z")
# What no browser executes, whatever is in it. A list of what is safe, since new types appear.
_PASSIVE = re.compile(
    r"(?:text/(?:plain|csv|tab-separated-values|markdown)"
    r"|image/(?:png|jpeg|gif|webp|avif|bmp|tiff)"
    r"|(?:audio|video)/(?:mpeg|mp4|ogg|webm|wav|flac|aac|quicktime)"
    r"|application/(?:json|x-ndjson|zip|gzip|zstd|x-tar|x-7z-compressed|x-sqlite3"
    r"|vnd\.apache\.parquet|msword|vnd\.ms-excel|vnd\.ms-powerpoint"
    r"|vnd\.openxmlformats-officedocument\.[a-z.]{1,60}|vnd\.oasis\.opendocument\.[a-z]{1,30}))"
    r"(?:;.*)?\Z",
    re.IGNORECASE,
)
# Characters that a file system, a shell or a header gives a meaning.
_RESERVED = re.compile(r'[<>:"|?*%\'`$;&\\/]')
_WINDOWS_DEVICE = re.compile(r"(?:CON|PRN|AUX|NUL|COM[0-9¹²³]|LPT[0-9¹²³])(?:\.|\Z)", re.IGNORECASE)
# Control, format (bidirectional overrides, zero width), surrogates, private use, unassigned; the
# two separators of lines.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# attr-char of RFC 8187 besides letters and digits.
_ATTRIBUTE_CHARACTERS = "!#$&+-.^_`|~"


def is_media_type(text: str) -> bool:
    """Whether this is `type/subtype` with at most a charset."""
    return _MEDIA_TYPE.match(text) is not None


def served_name(filename: str) -> str:
    """A single safe path component of at most NAME_BYTES_MAX bytes of UTF-8, never empty."""
    last = re.split(r"[\\/]", filename.rstrip("\\/"))[-1]
    # Names normalise to something shorter or longer; what comes out is judged, not what came in.
    normal = unicodedata.normalize("NFC", "".join(filter(_is_safe, last)))
    visible = "".join(filter(_is_safe, _RESERVED.sub("_", normal)))
    bare = re.sub(r"\s+", " ", visible).strip(" .")
    if _WINDOWS_DEVICE.match(bare):
        bare = f"_{bare}"
    return _shortened(bare) or FALLBACK_NAME


def content_disposition(filename: str) -> str:
    """The header's value: an ASCII name for old readers, the real one for the rest."""
    name = served_name(filename)
    ascii_name = "".join(c if c.isascii() else "_" for c in name)
    value = f'attachment; filename="{ascii_name}"'
    if ascii_name != name:
        value += f"; filename*=UTF-8''{quote(name, safe=_ATTRIBUTE_CHARACTERS)}"
    return value


def served_media_type(media_type: str) -> str:
    """The stored type where it is well-formed and known to be passive, else octets."""
    if is_media_type(media_type) and _PASSIVE.match(media_type):
        return media_type
    return OCTETS


def attachment_headers(filename: str, media_type: str, size_bytes: int) -> Mapping[str, str]:
    """The headers that content is always served with."""
    return {
        "Content-Type": served_media_type(media_type),
        "Content-Length": str(size_bytes),
        "Content-Disposition": content_disposition(filename),
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "private, no-store",
    }


def _is_safe(character: str) -> bool:
    return unicodedata.category(character) not in _UNSAFE_CATEGORIES


def _shortened(name: str) -> str:
    """At most NAME_BYTES_MAX bytes, whole characters, with a short extension kept."""
    if len(name.encode()) <= NAME_BYTES_MAX:
        return name
    stem, dot, extension = name.rpartition(".")
    tail = f"{dot}{extension}" if stem and len(extension.encode()) <= 20 else ""
    head = stem if tail else name
    kept = head.encode()[: NAME_BYTES_MAX - len(tail.encode())].decode("utf-8", "ignore")
    return f"{kept.rstrip(' .')}{tail}"
