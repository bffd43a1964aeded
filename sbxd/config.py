"""The configuration file: decoded once, strictly, and judged whole before anything starts.

Invariants: an unknown key, a wrong type and a value out of range are errors that name the key; a
table of limits that is given in part keeps the defaults of the rest; no input whatever raises
anything but ConfigError. `startup_refusals` reports everything at once, and each refusal names
the settings and the values that disagree: it is never a warning. Nothing here reads an
environment variable.
"""

import re
import tomllib
from collections.abc import Collection, Container, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec import Struct

from sbxd.policy.child_environment import operator_name_problems
from sbxd.policy.destinations import policy_problems
from sbxd.port.egress import EgressMode
from sbxd.port.limits import EnvironmentBudgets, ResourceLimits
from sbxd.settings import (
    DEFAULT_BUDGETS,
    DEFAULT_CEILINGS,
    DEFAULT_LIMITS,
    SMALLEST_WORKSPACE_BYTES,
    AuthMode,
    DeploymentMode,
    ImageSettings,
    SandboxMechanism,
    Settings,
)

FILE_BYTES_MAX = 1024 * 1024
# The mechanisms with a kernel of the sandbox's own. Every other value of the enum, present and
# future, is refused where these are required.
ISOLATING_MECHANISMS = frozenset({SandboxMechanism.MICROVM, SandboxMechanism.GVISOR})
# What this build can run; the others are refused at start, by name.
BUILT_MECHANISMS = (
    SandboxMechanism.GVISOR,
    SandboxMechanism.NAMESPACES,
    SandboxMechanism.FAKE,
)
UNENFORCEABLE_LIMITS = frozenset({"memory", "pids", "cpu", "io", "volume"})
# How far an operator may raise a ceiling (S1's table; the others are the operator's own).
HIGHEST_CEILINGS: Mapping[str, int] = {
    "pids_max": 4096,
    "inodes_max": 1_000_000,
    "wall_clock_seconds": 1800,
}

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ALIAS = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PATH = re.compile(r"^(.*) - at `(?:key in )?\$([^`]*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)


class ConfigError(Exception):
    """The file is not a configuration. `key` is the path of the offending key, "" for the file."""

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"{key}: {detail}" if key else detail)
        self.key = key
        self.detail = detail


class CredentialState(StrEnum):
    """Whether the service credential was given to the daemon."""

    PRESENT = "present"
    ABSENT = "absent"


class StartupRefusal(Struct, frozen=True, kw_only=True):
    """One reason not to start: the settings that disagree, why, and what to change."""

    settings: tuple[tuple[str, str], ...]
    detail: str
    fix: str

    def __str__(self) -> str:
        named = " and ".join(f"{key} = {value}" for key, value in self.settings)
        return f"{named}{': ' if named else ''}{self.detail}. {self.fix}."


class AliasResolution(Struct, frozen=True, kw_only=True):
    """The configured aliases, by whether the store holds their digest."""

    resolved: Mapping[str, str]
    missing: Mapping[str, str]


def load(path: Path) -> Settings:
    """Read and decode the configuration file.

    Raises:
        ConfigError: it cannot be read, is larger than 1 MiB, or `decode` refuses it.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as problem:
        raise ConfigError("", f"{path} cannot be read: {problem.strerror}") from None
    return decode(raw)


def decode(raw: bytes) -> Settings:
    """Decode a TOML document; what it leaves out has the default of `sbxd.settings`.

    Raises:
        ConfigError: it is not TOML, or a key is unknown, of the wrong type or out of range.
    """
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError("", f"the file is larger than {FILE_BYTES_MAX} bytes")
    try:
        # ValueError covers text that is not UTF-8, tomllib's own error and over-long integers.
        tree: dict[str, object] = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ConfigError("", f"not a TOML document: {problem}") from None
    if tree.get("sandbox") == "docker":
        raise ConfigError(
            "sandbox",
            'there is no mechanism "docker"; the shared-kernel mechanism for development is '
            'called "namespaces"',
        )
    _check_aliases_are_text(tree)
    _merge_limits(tree, "defaults", DEFAULT_LIMITS)
    _merge_limits(tree, "ceilings", DEFAULT_CEILINGS)
    _merge_limits(tree, "budgets", DEFAULT_BUDGETS)
    try:
        return msgspec.convert(tree, Settings, strict=True)
    except (msgspec.ValidationError, RecursionError) as problem:
        raise _as_config_error(str(problem)) from None


def startup_refusals(
    settings: Settings,
    *,
    credential: CredentialState,
    available_mechanisms: Collection[SandboxMechanism] = tuple(SandboxMechanism),
) -> tuple[StartupRefusal, ...]:
    """Every reason not to start with these settings; empty when there is none.

    Args:
        credential: whether the service credential was given.
        available_mechanisms: what this build and host can run.
    """
    return (
        *_mechanism_refusals(settings, available_mechanisms),
        *_credential_refusals(settings, credential),
        *_limit_refusals(settings),
        *_reserve_refusals(settings),
        *_image_refusals(settings.images),
        *_environment_refusals(settings),
        *_egress_refusals(settings),
        *_lease_refusals(settings),
    )


def resolve_aliases(images: ImageSettings, known_digests: Container[str]) -> AliasResolution:
    """Split the configured aliases by whether the image store holds what they stand for."""
    resolved: dict[str, str] = {}
    missing: dict[str, str] = {}
    for alias, digest in sorted(images.aliases.items()):
        (resolved if digest in known_digests else missing)[alias] = digest
    return AliasResolution(resolved=resolved, missing=missing)


def _mechanism_refusals(
    settings: Settings, available: Collection[SandboxMechanism]
) -> list[StartupRefusal]:
    refusals = []
    sandbox = ("sandbox", str(settings.sandbox))
    isolating = " or ".join(f'"{each}"' for each in sorted(ISOLATING_MECHANISMS))
    if settings.sandbox not in ISOLATING_MECHANISMS:
        reason = "code that nobody trusts needs a kernel of its own here"
        if settings.deployment_mode is DeploymentMode.PRODUCTION:
            refusals.append(
                StartupRefusal(
                    settings=(("deployment_mode", str(settings.deployment_mode)), sandbox),
                    detail=reason,
                    fix=f"Set sandbox to {isolating}",
                )
            )
        if settings.auth_mode is not AuthMode.DEV:
            refusals.append(
                StartupRefusal(
                    settings=(("auth_mode", str(settings.auth_mode)), sandbox),
                    detail=reason,
                    fix=f'Set sandbox to {isolating}, or auth_mode to "dev" on a development host',
                )
            )
    if settings.sandbox not in available:
        refusals.append(
            StartupRefusal(
                settings=(sandbox,),
                detail="this build or host cannot run that mechanism",
                fix="Set sandbox to one of: " + ", ".join(sorted(available)),
            )
        )
    if (
        settings.allow_software_emulation
        and settings.deployment_mode is not DeploymentMode.DEVELOPMENT
    ):
        refusals.append(
            StartupRefusal(
                settings=(
                    ("deployment_mode", str(settings.deployment_mode)),
                    ("allow_software_emulation", "true"),
                ),
                detail="an emulated processor is for tests alone",
                fix="Remove allow_software_emulation",
            )
        )
    return refusals


def _credential_refusals(settings: Settings, credential: CredentialState) -> list[StartupRefusal]:
    mode = ("deployment_mode", str(settings.deployment_mode))
    auth = ("auth_mode", str(settings.auth_mode))
    given = ("service credential", str(credential))
    refusals = []
    if (
        settings.deployment_mode is not DeploymentMode.DEVELOPMENT
        and settings.auth_mode is AuthMode.DEV
    ):
        refusals.append(
            StartupRefusal(
                settings=(mode, auth),
                detail="workers would connect without showing a credential",
                fix='Set auth_mode to "token"',
            )
        )
    if credential is CredentialState.ABSENT and (
        settings.deployment_mode is not DeploymentMode.DEVELOPMENT
        or settings.auth_mode is not AuthMode.DEV
    ):
        refusals.append(
            StartupRefusal(
                settings=(mode, auth, given),
                detail="no worker could be authenticated",
                fix="Give the daemon its service-credential (LoadCredential= of its unit)",
            )
        )
    return refusals


def _reserve_refusals(settings: Settings) -> list[StartupRefusal]:
    reserve = settings.reserve
    if reserve.slots <= reserve.most:
        return []
    return [
        StartupRefusal(
            settings=(
                ("reserve.slots", str(reserve.slots)),
                ("reserve.slots_max", str(reserve.most)),
            ),
            detail="more slots are to be kept in any case than there may be at most",
            fix="Lower reserve.slots or raise reserve.slots_max",
        )
    ]


def _limit_refusals(settings: Settings) -> list[StartupRefusal]:
    limits = settings.limits
    refusals = []
    for name in ResourceLimits.__struct_fields__:
        default, ceiling = getattr(limits.defaults, name), getattr(limits.ceilings, name)
        if default > ceiling:
            refusals.append(
                StartupRefusal(
                    settings=(
                        (f"limits.defaults.{name}", str(default)),
                        (f"limits.ceilings.{name}", str(ceiling)),
                    ),
                    detail="the default is above the ceiling",
                    fix="Lower the default or raise the ceiling",
                )
            )
        highest = HIGHEST_CEILINGS.get(name)
        if highest is not None and ceiling > highest:
            refusals.append(
                StartupRefusal(
                    settings=((f"limits.ceilings.{name}", str(ceiling)),),
                    detail=f"the highest that this ceiling may be is {highest}",
                    fix="Lower the ceiling",
                )
            )
    if limits.defaults.workspace_bytes < SMALLEST_WORKSPACE_BYTES:
        refusals.append(
            StartupRefusal(
                settings=(
                    ("limits.defaults.workspace_bytes", str(limits.defaults.workspace_bytes)),
                ),
                detail=f"the smallest volume that can be made is {SMALLEST_WORKSPACE_BYTES} bytes",
                fix="Raise the default",
            )
        )
    allowed = limits.allow_unenforced_limits
    listed = ("limits.allow_unenforced_limits", ", ".join(allowed))
    if allowed and settings.deployment_mode is not DeploymentMode.DEVELOPMENT:
        refusals.append(
            StartupRefusal(
                settings=(("deployment_mode", str(settings.deployment_mode)), listed),
                detail="a limit may go unenforced on a development host alone",
                fix="Remove the list, and make the host able to enforce them (`sbxctl doctor`)",
            )
        )
    unknown = sorted(set(allowed) - UNENFORCEABLE_LIMITS)
    if unknown:
        refusals.append(
            StartupRefusal(
                settings=(listed,),
                detail=f"no such limit: {', '.join(map(ascii, unknown))}",
                fix="Name only: " + ", ".join(sorted(UNENFORCEABLE_LIMITS)),
            )
        )
    return refusals


def _image_refusals(images: ImageSettings) -> list[StartupRefusal]:
    refusals = []
    for alias, digest in images.aliases.items():
        key = f"images.aliases.{alias if _ALIAS.fullmatch(alias) else ascii(alias)}"
        if not _ALIAS.fullmatch(alias):
            refusals.append(
                StartupRefusal(
                    settings=((key, ascii(digest)),),
                    detail="not the name of an alias",
                    fix="Use lower-case letters, digits, dots, hyphens and underscores, at most 64",
                )
            )
        if not _DIGEST.fullmatch(digest):
            refusals.append(
                StartupRefusal(
                    settings=((key, ascii(digest)),),
                    detail="not a manifest digest; tags are refused, since they move",
                    fix="Write sha256: and 64 hex digits, as `sbxctl image ls` shows them",
                )
            )
    if images.default is not None and images.default not in images.aliases:
        refusals.append(
            StartupRefusal(
                settings=(("images.default", ascii(images.default)),),
                detail="not one of images.aliases",
                fix="Name an alias of the configuration, or remove the key",
            )
        )
    return refusals


def _environment_refusals(settings: Settings) -> list[StartupRefusal]:
    return [
        StartupRefusal(
            settings=(("process_environment.operator_names", problem.name),),
            detail=problem.detail.partition(":")[0],
            fix=f"Remove {problem.name} from the list",
        )
        for problem in operator_name_problems(settings.process_environment.operator_names)
    ]


def _egress_refusals(settings: Settings) -> list[StartupRefusal]:
    refusals = [
        StartupRefusal(
            settings=(
                (
                    f"egress.destinations[{problem.position}].{problem.part}",
                    ascii(getattr(settings.egress.destinations[problem.position], problem.part)),
                ),
            ),
            detail=problem.detail,
            fix="Write a name such as example.org or *.example.org, and its ports",
        )
        for problem in policy_problems(settings.egress)
    ]
    if settings.egress.mode is EgressMode.ALLOWLIST and not settings.egress.destinations:
        refusals.append(
            StartupRefusal(
                settings=(("egress.mode", str(settings.egress.mode)), ("egress.destinations", "")),
                detail="an allowlist without a destination",
                fix='List at least one destination, or set egress.mode to "deny"',
            )
        )
    return refusals


def _check_aliases_are_text(tree: Mapping[str, object]) -> None:
    """msgspec names no key within a mapping, so these are checked here."""
    images = tree.get("images")
    aliases = images.get("aliases") if isinstance(images, dict) else None
    if isinstance(aliases, dict):
        for alias, digest in aliases.items():
            if not isinstance(digest, str):
                raise ConfigError(
                    f"images.aliases.{alias}", "expected the text of a digest (sha256:…)"
                )


def _merge_limits(
    tree: dict[str, object], name: str, defaults: ResourceLimits | EnvironmentBudgets
) -> None:
    """An operator who sets one limit of a table keeps the defaults of the others."""
    limits = tree.get("limits")
    if isinstance(limits, dict) and isinstance(limits.get(name), dict):
        tree["limits"] = {
            **limits,
            name: {**msgspec.structs.asdict(defaults), **limits[name]},
        }


def _as_config_error(text: str) -> ConfigError:
    key = ""
    found = _PATH.match(text)
    if found:
        text, key = found[1], found[2].removeprefix(".")
    unknown = _UNKNOWN.match(text)
    if unknown:
        key = f"{key}.{unknown[1]}" if key else unknown[1]
        text = "there is no such key"
    return ConfigError(key, text[:1].lower() + text[1:])


def _lease_refusals(settings: Settings) -> list[StartupRefusal]:
    """Of an environment one authority must speak, not two that may contradict each other."""
    refusals = []
    speaks_for: dict[int, str] = {}
    for name, authority in sorted(settings.leases.authorities.items()):
        for uid in authority.owner_uids:
            other = speaks_for.setdefault(uid, name)
            if other != name:
                refusals.append(
                    StartupRefusal(
                        settings=(
                            (f"leases.authorities.{other}.owner_uids", str(uid)),
                            (f"leases.authorities.{name}.owner_uids", str(uid)),
                        ),
                        detail="two authorities would speak for the environments of one uid",
                        fix="Name each uid in one authority",
                    )
                )
    return refusals
