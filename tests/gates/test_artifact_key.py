"""gate.sandbox.artifact_key_opaque: a storage key is made of the tenant's and the artifact's id and
of nothing else.

Structural: the key function has exactly these two parameters, of these two types; its module knows
no metadata and joins no path; and it is the one place where a key is made. The last part plants
violations.
"""

import ast
import inspect
import re
import typing
from collections.abc import Iterator

import msgspec
import pytest

from sbxd.artifacts.identifiers import ArtifactIds
from sbxd.policy import storage_key as module
from sbxd.policy.storage_key import storage_key
from sbxd.port.artifact import ArtifactId, ArtifactMetadata
from sbxd.port.ids import TenantId
from tests.gates.source import Module, called, load

pytestmark = pytest.mark.gate("gate.sandbox.artifact_key_opaque")

# What a caller supplies, by any way.
SUPPLIED = frozenset({"filename", "media_type", "origin", "trust", "run_id", "metadata", "name"})
ALLOWED_IMPORTS = {
    ("re", "re"),
    ("sbxd.port.artifact", "ARTIFACT_ID_PATTERN"),
    ("sbxd.port.artifact", "ArtifactId"),
    ("sbxd.port.ids", "IDENTIFIER_PATTERN"),
    ("sbxd.port.ids", "TenantId"),
}
KEY = "sbxd.policy.storage_key"
TREE = "sbxd.artifacts.tree"
ID = ArtifactIds(lambda: 1_700_000_000_000, lambda n: b"\x5a" * n).new()


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)


def supplied(tree: ast.Module) -> list[str]:
    """Names and attributes of what a caller supplies."""
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return sorted(named & SUPPLIED)


def joins(tree: ast.Module) -> list[int]:
    """Lines that make a path or a name: a join, a `/` of paths, a Path, an f-string with a "/"."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            last = called(node, {}).rpartition(".")[2]
            if last in {"join", "joinpath", "Path", "PurePath", "PurePosixPath", "with_name"}:
                found.append(node.lineno)
        elif (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)) or (
            isinstance(node, ast.JoinedStr)
            and any(isinstance(v, ast.Constant) and "/" in str(v.value) for v in node.values)
        ):
            found.append(node.lineno)
    return found


@pytest.fixture(scope="module")
def product() -> dict[str, Module]:
    return load()


def test_the_parameters_are_the_two_ids() -> None:
    signature = inspect.signature(storage_key)
    assert list(signature.parameters) == ["tenant_id", "artifact_id"]
    assert all(
        p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and p.default is inspect.Parameter.empty
        for p in signature.parameters.values()
    )
    hints = typing.get_type_hints(storage_key)
    assert hints == {"tenant_id": TenantId, "artifact_id": ArtifactId, "return": str}


def test_its_module_knows_nothing_that_a_caller_supplies(product: dict[str, Module]) -> None:
    tree = product[KEY].tree
    assert set(imports(tree)) <= ALLOWED_IMPORTS
    assert supplied(tree) == []
    assert len(joins(tree)) == 1  # the key itself
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert functions == ["storage_key"]


def test_the_supplied_fields_are_those_of_the_metadata() -> None:
    fields = {field.name for field in msgspec.structs.fields(ArtifactMetadata)}
    assert {"filename", "media_type", "origin", "trust", "run_id"} <= fields & SUPPLIED
    # Not supplied by a caller: the tenant, and what the store computes.
    assert fields - SUPPLIED == {
        "tenant_id", "size_bytes", "sha256", "created_at", "expires_at", "flags",
    }  # fmt: skip


def test_the_tree_is_told_keys_and_ids_and_no_metadata(product: dict[str, Module]) -> None:
    tree = product[TREE].tree
    ours = {each for each in imports(tree) if each[0].startswith("sbxd.")}
    assert ours == {
        ("sbxd.port.artifact", "ArtifactId"),
        ("sbxd.port.artifact", "ArtifactUnavailable"),
        ("sbxd.port.artifact", "ArtifactUnavailableCode"),
    }
    assert supplied(tree) in ([], ["name"])
    assert joins(tree) == []


def test_a_key_is_made_in_one_place_and_by_the_two_ids(product: dict[str, Module]) -> None:
    calls = [
        node
        for name, found in product.items()
        if name.startswith(("sbxd.artifacts", "sbxd.tools", "sbxd.client", "sbxd.worker_cli"))
        for node in ast.walk(found.tree)
        if isinstance(node, ast.Call) and called(node, {}).rpartition(".")[2] == "storage_key"
    ]
    assert len(calls) >= 2
    for call in calls:
        words = [ast.unparse(argument).rpartition(".")[2] for argument in call.args]
        assert words == ["tenant_id", "artifact_id"], ast.unparse(call)


def test_the_key_is_opaque_and_spread() -> None:
    assert storage_key(TenantId("alice"), ID) == f"alice/{ID[-2:]}/{ID}"
    ids = ArtifactIds(lambda: 1_700_000_000_000, __import__("os").urandom)
    shards = {storage_key(TenantId("a"), ids.new()).split("/")[1] for _ in range(5000)}
    assert len(shards) > 200


@pytest.mark.parametrize(
    "tenant", ["", ".", "..", "../x", "a/b", "a\n", "a\x00", "-a", "é", "a" * 129, " a"]
)
def test_what_is_no_tenant_id_has_no_key(tenant: str) -> None:
    with pytest.raises(ValueError, match="tenant"):
        storage_key(TenantId(tenant), ID)


@pytest.mark.parametrize(
    "artifact_id",
    [
        "",
        "..",
        "../../etc/passwd",
        ID.upper(),
        ID + "\n",
        ID[:-1],
        ID.replace("-7", "-4", 1),
        "x" * 36,
    ],
)
def test_what_is_no_uuid7_has_no_key(artifact_id: str) -> None:
    with pytest.raises(ValueError, match="artifact"):
        storage_key(TenantId("alice"), ArtifactId(artifact_id))


@pytest.mark.parametrize(
    "text",
    [
        "from sbxd.port.artifact import ArtifactMetadata\n",
        "import os\n",
    ],
)
def test_control_a_planted_import_is_found(text: str) -> None:
    assert not set(imports(ast.parse(text))) <= ALLOWED_IMPORTS


def test_control_what_is_supplied_and_what_joins_is_found() -> None:
    assert supplied(ast.parse("def f(filename): return filename")) == ["filename"]
    assert supplied(ast.parse("x = m.media_type")) == ["media_type"]
    for text in ("os.path.join(a, b)", "Path(a)", "a / b", "f'{a}/{b}'", "p.with_name(n)"):
        assert joins(ast.parse(text)) == [1], text
    assert re.search("filename", inspect.getsource(module)) is None
