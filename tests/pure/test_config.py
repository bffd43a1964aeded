"""The configuration: strict decoding that names the key, and the startup refusals."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from sbxd.config import (
    FILE_BYTES_MAX,
    ConfigError,
    CredentialState,
    StartupRefusal,
    decode,
    load,
    resolve_aliases,
    startup_refusals,
)
from sbxd.port.egress import EgressDestination, EgressMode
from sbxd.port.limits import GIB, MIB
from sbxd.settings import (
    DEFAULT_CEILINGS,
    DEFAULT_LIMITS,
    AuthMode,
    DeploymentMode,
    EgressSettings,
    ImageSettings,
    LimitSettings,
    ProcessEnvironmentSettings,
    SandboxMechanism,
    Settings,
)

DIGEST = "sha256:" + "a" * 64

REPOSITORY = Path(__file__).parents[2]
SHIPPED = sorted(
    path
    for folder in ("packaging", "tests/lab")
    for path in (REPOSITORY / folder).rglob("*.toml")
    # The packages' list of files, and what rpmlint is to pass over.
    if path.name not in ("files.toml", "rpmlint.toml")
)
DOCUMENTATION = REPOSITORY / "docs" / "configuration.md"

WHOLE = f"""
deployment_mode = "development"
auth_mode = "dev"
sandbox = "namespaces"

[limits]
command_hard_cap_seconds = 600
allow_unenforced_limits = ["memory"]

[limits.ceilings]
memory_bytes = 4294967296

[images]
default = "python"
aliases = {{ python = "{DIGEST}" }}

[service]
worker_uids = [1000]

[process_environment]
operator_names = ["TZ"]

[egress]
mode = "allowlist"
destinations = [{{ host = "*.example.org", ports = [443] }}]
"""


def development(**changes: Any) -> Settings:
    fields: dict[str, Any] = {
        "deployment_mode": DeploymentMode.DEVELOPMENT,
        "auth_mode": AuthMode.DEV,
        "sandbox": SandboxMechanism.NAMESPACES,
    }
    return Settings(**(fields | changes))


def refusals(settings: Settings) -> tuple[StartupRefusal, ...]:
    return startup_refusals(settings, credential=CredentialState.PRESENT)


def keys(settings: Settings) -> list[tuple[str, ...]]:
    return [tuple(key for key, _ in refusal.settings) for refusal in refusals(settings)]


def test_an_empty_document_is_the_packages_default() -> None:
    settings = decode(b"")
    assert settings == Settings()
    assert settings.deployment_mode is DeploymentMode.PRODUCTION
    assert settings.auth_mode is AuthMode.TOKEN
    assert settings.sandbox is SandboxMechanism.GVISOR


def test_a_whole_document_is_decoded_and_starts() -> None:
    settings = decode(WHOLE.encode())
    assert settings.sandbox is SandboxMechanism.NAMESPACES
    assert settings.egress.destinations[0].ports == (443,)
    assert refusals(settings) == ()


def test_one_ceiling_that_is_set_keeps_the_others() -> None:
    limits = decode(b"[limits.ceilings]\nmemory_bytes = 4294967296").limits
    assert limits.ceilings == structs.replace(DEFAULT_CEILINGS, memory_bytes=4 * GIB)
    assert limits.defaults == DEFAULT_LIMITS
    limits = decode(b"[limits.defaults]\npids_max = 100").limits
    assert limits.defaults == structs.replace(DEFAULT_LIMITS, pids_max=100)
    assert limits.ceilings == DEFAULT_CEILINGS


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ("surprise = 1", "surprise"),
        ("[limits]\nsurprise = 1", "limits.surprise"),
        ("[limits.ceilings]\nsurprise = 1", "limits.ceilings.surprise"),
        ("[limits.ceilings]\nmemory_bytes = '1'", "limits.ceilings.memory_bytes"),
        ("[limits.ceilings]\nmemory_bytes = 1", "limits.ceilings.memory_bytes"),
        ("[limits.ceilings]\nmemory_bytes = 1e9", "limits.ceilings.memory_bytes"),
        ("[limits.ceilings]\nmemory_bytes = true", "limits.ceilings.memory_bytes"),
        (f"[limits.ceilings]\nmemory_bytes = {10**30}", "limits.ceilings.memory_bytes"),
        ("[limits.defaults]\npids_max = 0", "limits.defaults.pids_max"),
        ("[limits]\nstart_budget_seconds = 61", "limits.start_budget_seconds"),
        ("[limits]\nstart_budget_seconds = 0", "limits.start_budget_seconds"),
        ("[limits]\nfiles_changed_max = 10001", "limits.files_changed_max"),
        ("[limits]\ncommand_hard_cap_seconds = 1801", "limits.command_hard_cap_seconds"),
        ("limits = 1", "limits"),
        ("[limits]\nceilings = 1", "limits.ceilings"),
        ("sandbox = 'runc'", "sandbox"),
        ("sandbox = 1", "sandbox"),
        ("auth_mode = 'none'", "auth_mode"),
        ("images = 1", "images"),
        ("[images]\naliases = 1", "images.aliases"),
        ("[images.aliases]\npython = 1", "images.aliases.python"),
        ("[service]\nworker_uids = [-1]", "service.worker_uids[0]"),
        (
            "[process_environment]\noperator_names = ['A-B']",
            "process_environment.operator_names[0]",
        ),
        ("[[egress.destinations]]\nhost = 'a'\nports = [1]", "egress"),
        (
            "[egress]\nmode='allowlist'\n[[egress.destinations]]\nhost='a'\nports=[0]",
            "egress.destinations[0].ports[0]",
        ),
        (
            "[egress]\nmode='allowlist'\n[[egress.destinations]]\nhost='a'",
            "egress.destinations[0]",
        ),
        ("state_directory = 'relative'", "state_directory"),
        ("not toml", ""),
        ("a = 1\na = 2", ""),
        ("a = " + "[" * 50_000, ""),
        ("a = " + "1" * 5000, ""),
    ],
)
def test_a_document_with_an_error_is_refused_naming_the_key(document: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        decode(document.encode())
    assert refused.value.key == key
    assert refused.value.detail


def test_docker_is_answered_with_the_name_of_its_successor() -> None:
    with pytest.raises(ConfigError, match='"namespaces"') as refused:
        decode(b'sandbox = "docker"')
    assert refused.value.key == "sandbox"


def test_text_that_is_not_utf8_and_a_file_above_the_cap_are_refused() -> None:
    for raw in (b"\xff", b"#" * (FILE_BYTES_MAX + 1)):
        with pytest.raises(ConfigError):
            decode(raw)


def test_a_file_is_loaded_and_a_missing_one_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "sbxd.toml"
    path.write_text(WHOLE)
    assert load(path) == decode(WHOLE.encode())
    for wrong in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError):
            load(wrong)


def test_a_development_host_without_more_starts() -> None:
    assert refusals(development()) == ()
    absent = startup_refusals(development(), credential=CredentialState.ABSENT)
    assert absent == ()


def test_production_and_token_each_need_the_credential() -> None:
    for settings in (
        Settings(),
        development(auth_mode=AuthMode.TOKEN, sandbox=SandboxMechanism.GVISOR),
    ):
        assert refusals(settings) == ()
        (refusal,) = startup_refusals(settings, credential=CredentialState.ABSENT)
        assert dict(refusal.settings)["service credential"] == "absent"


def test_production_does_not_let_workers_in_without_a_credential() -> None:
    assert keys(Settings(auth_mode=AuthMode.DEV)) == [("deployment_mode", "auth_mode")]


def test_a_mechanism_that_this_build_cannot_run_is_refused() -> None:
    (refusal,) = startup_refusals(
        development(sandbox=SandboxMechanism.MICROVM),
        credential=CredentialState.PRESENT,
        available_mechanisms=(SandboxMechanism.NAMESPACES,),
    )
    assert refusal.settings == (("sandbox", "microvm"),)
    assert "namespaces" in refusal.fix


def test_an_emulated_processor_is_refused_in_production() -> None:
    assert keys(Settings(allow_software_emulation=True)) == [
        ("deployment_mode", "allow_software_emulation")
    ]
    assert keys(development(allow_software_emulation=True)) == []


@pytest.mark.parametrize("name", DEFAULT_LIMITS.__struct_fields__)
def test_a_default_above_its_ceiling_is_refused_with_both_values(name: str) -> None:
    ceiling = getattr(DEFAULT_LIMITS, name) - 1
    limits = LimitSettings(ceilings=structs.replace(DEFAULT_CEILINGS, **{name: ceiling}))
    (refusal,) = refusals(development(limits=limits))
    assert refusal.settings == (
        (f"limits.defaults.{name}", str(ceiling + 1)),
        (f"limits.ceilings.{name}", str(ceiling)),
    )


@pytest.mark.parametrize(
    ("name", "highest"),
    [("pids_max", 4096), ("inodes_max", 1_000_000), ("wall_clock_seconds", 1800)],
)
def test_a_ceiling_of_the_table_can_be_lowered_and_not_raised(name: str, highest: int) -> None:
    def with_ceiling(value: int) -> Settings:
        ceilings = structs.replace(DEFAULT_CEILINGS, **{name: value})
        return development(limits=LimitSettings(ceilings=ceilings))

    assert keys(with_ceiling(highest)) == []
    assert keys(with_ceiling(highest + 1)) == [(f"limits.ceilings.{name}",)]


@pytest.mark.parametrize("name", ["cpu_millicores", "memory_bytes", "workspace_bytes"])
def test_a_ceiling_that_is_the_operators_can_be_raised(name: str) -> None:
    ceilings = structs.replace(DEFAULT_CEILINGS, **{name: getattr(DEFAULT_CEILINGS, name) * 4})
    assert keys(development(limits=LimitSettings(ceilings=ceilings))) == []


def test_a_default_volume_below_the_smallest_is_refused() -> None:
    limits = LimitSettings(defaults=structs.replace(DEFAULT_LIMITS, workspace_bytes=MIB))
    assert keys(development(limits=limits)) == [("limits.defaults.workspace_bytes",)]


def test_unenforced_limits_are_for_development_and_from_a_closed_list() -> None:
    listed = LimitSettings(allow_unenforced_limits=("memory", "volume"))
    assert keys(development(limits=listed)) == []
    assert keys(Settings(limits=listed)) == [("deployment_mode", "limits.allow_unenforced_limits")]
    unknown = LimitSettings(allow_unenforced_limits=("everything",))
    assert keys(development(limits=unknown)) == [("limits.allow_unenforced_limits",)]


@pytest.mark.parametrize(
    "digest", ["latest", "python:3.12", "sha256:" + "a" * 63, "sha256:" + "A" * 64, "a" * 64, ""]
)
def test_an_alias_of_something_that_is_no_digest_is_refused(digest: str) -> None:
    images = ImageSettings(aliases={"python": digest})
    assert keys(development(images=images)) == [("images.aliases.python",)]
    assert keys(development(images=ImageSettings(aliases={"python": DIGEST}))) == []


def test_an_alias_with_an_odd_name_and_an_unknown_default_are_refused() -> None:
    images = ImageSettings(aliases={"Py\nthon": DIGEST}, default="other")
    assert keys(development(images=images)) == [
        ("images.aliases.'Py\\nthon'",),
        ("images.default",),
    ]


def test_a_tier_zero_name_in_the_operators_list_is_refused_and_named() -> None:
    names = ProcessEnvironmentSettings(operator_names=("TZ", "DATABASE_URL", "PATH", "HTTP_PROXY"))
    found = refusals(development(process_environment=names))
    assert [dict(each.settings)["process_environment.operator_names"] for each in found] == [
        "DATABASE_URL",
        "PATH",
        "HTTP_PROXY",
    ]


def test_a_destination_outside_the_grammar_is_refused_with_its_position() -> None:
    policy = EgressSettings(
        mode=EgressMode.ALLOWLIST,
        destinations=(
            EgressDestination(host="fine.example", ports=(443,)),
            EgressDestination(host="10.0.0.1", ports=(443,)),
        ),
    )
    (refusal,) = refusals(development(egress=policy))
    assert refusal.settings == (("egress.destinations[1].host", "'10.0.0.1'"),)


@pytest.mark.parametrize("sandbox", [SandboxMechanism.GVISOR, SandboxMechanism.NAMESPACES])
def test_destinations_are_for_every_mechanism(sandbox: SandboxMechanism) -> None:
    policy = EgressSettings(
        mode=EgressMode.ALLOWLIST,
        destinations=(EgressDestination(host="example.com", ports=(443,)),),
    )
    assert keys(development(egress=policy, sandbox=sandbox)) == []


def test_an_allowlist_without_a_destination_is_refused() -> None:
    policy = EgressSettings(mode=EgressMode.ALLOWLIST)
    assert keys(development(egress=policy)) == [("egress.mode", "egress.destinations")]


def test_all_problems_are_reported_at_once() -> None:
    settings = Settings(
        sandbox=SandboxMechanism.FAKE,
        limits=LimitSettings(allow_unenforced_limits=("memory",)),
        images=ImageSettings(aliases={"python": "latest"}),
        process_environment=ProcessEnvironmentSettings(operator_names=("API_TOKEN",)),
        egress=EgressSettings(mode=EgressMode.ALLOWLIST),
    )
    found = startup_refusals(settings, credential=CredentialState.ABSENT)
    assert len(found) == 7
    assert all(refusal.fix and refusal.detail for refusal in found)


def test_aliases_are_split_by_what_the_store_holds() -> None:
    images = ImageSettings(aliases={"b": DIGEST, "a": "sha256:" + "b" * 64})
    resolution = resolve_aliases(images, {DIGEST})
    assert resolution.resolved == {"b": DIGEST}
    assert resolution.missing == {"a": "sha256:" + "b" * 64}


def test_every_default_of_the_settings_is_within_its_own_bounds() -> None:
    assert msgspec.convert(msgspec.to_builtins(Settings()), Settings) == Settings()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_configuration_that_is_shipped_starts(path: Path) -> None:
    assert [str(refusal) for refusal in refusals(load(path))] == []


def documented_example() -> bytes:
    return DOCUMENTATION.read_text("utf-8").split("```toml\n")[1].split("```")[0].encode()


def test_the_example_of_the_documentation_starts() -> None:
    settings = decode(documented_example())
    assert settings.sandbox is SandboxMechanism.GVISOR
    assert refusals(settings) == ()


def test_the_documentation_has_every_key_and_its_default() -> None:
    rows = dict(
        re.findall(r"^\| `([a-z0-9_.]+)` \| ([^|]*) \|", DOCUMENTATION.read_text("utf-8"), re.M)
    )
    assert rows == {key: shown(value) for key, value in flat(Settings())}


def flat(struct: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, msgspec.Struct):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def shown(value: Any) -> str:
    match value:
        case bool():
            return f"`{str(value).lower()}`"
        case int() if value >= MIB:
            return f"{value // GIB} GiB" if value % GIB == 0 else str(value)
        case int():
            return str(value)
        case () | {} | None:
            return "none"
    return f'`"{value}"`'
