"""Any document whatever decodes to settings or is a ConfigError, and settings can be judged."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sbxd.config import ConfigError, CredentialState, decode, startup_refusals
from sbxd.settings import Settings

KEYS = st.sampled_from(
    [
        *Settings.__struct_fields__,
        "defaults",
        "ceilings",
        "memory_bytes",
        "pids_max",
        "aliases",
        "default",
        "mode",
        "destinations",
        "host",
        "ports",
        "operator_names",
        "worker_uids",
        "allow_unenforced_limits",
    ]
) | st.text("ab`$.[]\n\0é- ", max_size=5)
SCALARS = (
    st.integers()
    | st.booleans()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["docker", "namespaces", "fake", "production", "deny", "allowlist", "10.0.0.1"]
    )
    | st.dates()
    | st.datetimes()
    | st.times()
)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=12,
    ),
    max_size=6,
)


def toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return repr(value).replace("e", "E")
        case int():
            return str(value)
        case str():
            escaped = "".join(
                character
                if character.isascii() and character.isalnum()
                else f"\\U{ord(character):08X}"
                for character in value
                if not 0xD800 <= ord(character) <= 0xDFFF
            )
            return f'"{escaped}"'
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{toml(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return str(value.isoformat())


def decodes_or_is_refused(raw: bytes) -> bool:
    try:
        decoded = decode(raw)
    except ConfigError:
        return False
    for credential in CredentialState:
        for refusal in startup_refusals(decoded, credential=credential):
            assert refusal.settings
            assert str(refusal)
    return True


@settings(max_examples=400, deadline=None)
@given(TREES)
def test_any_tree_decodes_or_is_a_config_error(tree: dict[str, Any]) -> None:
    document = "\n".join(f"{toml(key)} = {toml(value)}" for key, value in tree.items())
    decodes_or_is_refused(document.encode())


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "ignore"))
)
def test_any_bytes_decode_or_are_a_config_error(raw: bytes) -> None:
    decodes_or_is_refused(raw)


def test_the_generated_documents_can_be_settings() -> None:
    tree = {"sandbox": "namespaces", "limits": {"ceilings": {"memory_bytes": 2**32}}}
    document = "\n".join(f"{toml(key)} = {toml(value)}" for key, value in tree.items())
    assert decodes_or_is_refused(document.encode())
