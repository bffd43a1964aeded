"""ClientHellos, made here byte by byte (and, in test_sni, by a TLS library)."""

GREASE = 0x2A2A


def vector(length_bytes: int, data: bytes) -> bytes:
    return len(data).to_bytes(length_bytes) + data


def extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2) + vector(2, data)


def server_name(*names: bytes, kind: int = 0) -> bytes:
    entries = b"".join(bytes([kind]) + vector(2, name) for name in names)
    return extension(0, vector(2, entries))


def message(extensions: bytes | None) -> bytes:
    body = b"\x03\x03" + b"r" * 32 + vector(1, b"s" * 32) + vector(2, b"\x2a\x2a\x13\x01")
    body += vector(1, b"\0")
    if extensions is not None:
        body += vector(2, extensions)
    return b"\x01" + vector(3, body)


def records(handshake: bytes, size: int = 16384) -> bytes:
    return b"".join(
        b"\x16\x03\x01" + vector(2, handshake[at : at + size])
        for at in range(0, len(handshake), size)
    )


def client_hello(name: str | None) -> bytes:
    """With GREASE on both sides of the name, if there is one."""
    named = b"" if name is None else server_name(name.encode())
    return records(message(extension(GREASE, b"") + named + extension(GREASE + 0x1010, b"\0")))
