"""The process environment of a command: built from nothing, never filtered.

Invariants: the result starts as the empty mapping, and only three things put a name in it. Tier 0
(credentials of the platform, of providers and of the host) never appears, whatever is configured;
its list exists so that a test can say so. Tier 1 is there only because an operator listed the
name in `process_environment.operator_names`. Tier 2 is synthesised here. No tenant and no model
can add a name. Nothing in this module reads the environment of any process.

The worker's side calls `worker_environment` for what a specification carries; the service calls
`build` for what a command gets, and judges every name again.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import PurePosixPath
from types import MappingProxyType

from msgspec import Struct

from sbxd.port.environment import WORKSPACE_ROOT, BridgeEndpoint
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.port.network import PROXY_ADDRESS, PROXY_PORT

IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BRIDGE_SOCKET_NAME = "SBX_BRIDGE_SOCKET"
BRIDGE_TOKEN_NAME = "SBX_BRIDGE_TOKEN"  # noqa: S105  (the name of a variable, not a secret)
VALUE_BYTES_MAX = 32_768
# One command's environment travels beside its argv (64 KiB) in one frame to init.
ENVIRONMENT_BYTES_MAX = 96 * 1024

_TMP = "/tmp"  # noqa: S108  (a path inside the environment, private to it)
TIER_TWO_CONSTANTS: Mapping[str, str] = MappingProxyType(
    {
        "HOME": str(WORKSPACE_ROOT),
        "PWD": str(WORKSPACE_ROOT),
        "PATH": IMAGE_PATH,
        "TMPDIR": _TMP,
        "LANG": "C.UTF-8",
        # The name that uid 10001 has in every image (`sbxd.launcher.kernel.image_names`).
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        # A cache of the moment is no change of the workspace.
        "MPLCONFIGDIR": f"{_TMP}/.matplotlib",
        # A file with a second name cannot be read back through the port.
        "UV_LINK_MODE": "copy",
        # Left out is PYTHONUNBUFFERED: without a buffer Python loses what one write does not take,
        # and a gVisor pipe takes less than a large write.
    }
)
# Reserved, in every case of their letters: set by the service alone, and only for a command that
# has both yeses for the network.
PROXY_NAMES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "FTP_PROXY"})
# HTTP_PROXY is for the CONNECT that a client makes of it, where it does: a plain request is
# answered by 405 and the reason. ALL_PROXY is left out: with it clients tunnel what is no web
# request, to ports that are not listed. The sandbox's own services are reached directly.
PROXY_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"),
            f"http://{PROXY_ADDRESS}:{PROXY_PORT}",
        ),
        **dict.fromkeys(
            ("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1,127.0.0.0/8,0.0.0.0,sandbox"
        ),
        # node's fetch and https look for the others only with this (node 22.21 and later).
        "NODE_USE_ENV_PROXY": "1",
    }
)

TIER_ZERO_NAMES = frozenset(
    {
        "CREDENTIALS_DIRECTORY",
        "DATABASE_URL",
        "DB_URL",
        "DBUS_SESSION_BUS_ADDRESS",
        "DBUS_SYSTEM_BUS_ADDRESS",
        "DOCKER_CONFIG",
        "DOCKER_HOST",
        "GNUPGHOME",
        "GPG_AGENT_INFO",
        "KRB5CCNAME",
        "KUBECONFIG",
        "LISTEN_FDNAMES",
        "LISTEN_FDS",
        "LISTEN_PID",
        "MONGODB_URI",
        "NETRC",
        "NOTIFY_SOCKET",
        "PGHOST",
        "PGPASSFILE",
        "PGPASSWORD",
        "PGSERVICEFILE",
        "PGUSER",
        "POSTGRES_URL",
        "REDIS_URL",
        "SSH_AGENT_PID",
        "SSH_AUTH_SOCK",
        "SSH_CLIENT",
        "SSH_CONNECTION",
        "SUDO_COMMAND",
        "WATCHDOG_PID",
        "XDG_RUNTIME_DIR",
    }
)
TIER_ZERO_PREFIXES = (
    "ANTHROPIC_",
    "AWS_",
    "AZURE_",
    "CLOUDSDK_",
    "COHERE_",
    "GCLOUD_",
    "GCP_",
    "GEMINI_",
    "GITHUB_",
    "GITLAB_",
    "GOOGLE_",
    "GROQ_",
    "HUGGING_FACE_",
    "KUBERNETES_",
    "MINIO_",
    "MISTRAL_",
    "OPENAI_",
    "OPENROUTER_",
    "S3_",
    "SBXD_",
    "VAULT_",
)
# A name is tier 0 when one of its words (between underscores) is one of these…
TIER_ZERO_WORDS = frozenset(
    {
        "APIKEY",
        "CREDENTIAL",
        "CREDENTIALS",
        "CREDS",
        "DSN",
        "JWT",
        "PASSPHRASE",
        "PASSWD",
        "PASSWORD",
        "PASSWORDS",
        "PAT",
        "PGPASSWORD",
        "PWD",
        "SECRET",
        "SECRETS",
        "TOKEN",
        "TOKENS",
    }
)
# …or when KEY follows one of these.
TIER_ZERO_KEY_KINDS = frozenset(
    {"ACCESS", "ACCOUNT", "API", "APP", "AUTH", "ENCRYPTION", "MASTER", "PRIVATE", "SERVICE"}
    | {"SIGNING", "SSH", "STORAGE"}
)

# Names by which a value becomes code that a loader or an interpreter runs. Tier 1 like every
# other name, hence refused unless listed; named here so that the refusal can say what they do.
LOADER_NAMES = frozenset(
    {
        "BASH_ENV",
        "ENV",
        "GCONV_PATH",
        "GLIBC_TUNABLES",
        "IFS",
        "JAVA_TOOL_OPTIONS",
        "LOCPATH",
        "NODE_OPTIONS",
        "NODE_PATH",
        "PERL5LIB",
        "PERL5OPT",
        "PROMPT_COMMAND",
        "PS4",
        "RUBYLIB",
        "RUBYOPT",
        "SHELLOPTS",
        "_JAVA_OPTIONS",
    }
)
LOADER_PREFIXES = ("BASH_FUNC", "LD_", "MALLOC_", "PYTHON")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class Tier(StrEnum):
    """Who may put a name into a command's environment."""

    NEVER = "tier 0"
    OPERATOR = "tier 1"
    SYNTHESISED = "tier 2"


class Network(StrEnum):
    """Whether the command has both yeses, and hence the proxy."""

    NONE = "NONE"
    PROXY = "PROXY"


class NameProblem(Struct, frozen=True, kw_only=True):
    """A name of `operator_names` that cannot be there."""

    name: str
    detail: str


class OperatorNamesRefused(ValueError):
    """The operator's list holds names that cannot be listed: a configuration error at startup."""

    def __init__(self, problems: tuple[NameProblem, ...]) -> None:
        super().__init__("; ".join(f"{each.name}: {each.detail}" for each in problems))
        self.problems = problems


class ListState(StrEnum):
    """Whether the tier-1 list could be read."""

    READ = "READ"
    UNREADABLE = "UNREADABLE"


class WorkerEnvironment(Struct, frozen=True, kw_only=True):
    """What a specification carries. list_state UNREADABLE: tier 2 alone, and the caller logs a
    configuration error; the run goes on."""

    environment: Mapping[str, str]
    list_state: ListState


def tier_of(name: str) -> Tier:
    """The tier of a name. Case does not matter for tier 0 and for the proxy variables."""
    upper = name.upper()
    if name in TIER_TWO_CONSTANTS or name in (BRIDGE_SOCKET_NAME, BRIDGE_TOKEN_NAME):
        return Tier.SYNTHESISED
    if upper in PROXY_NAMES or name in PROXY_VARIABLES:
        return Tier.SYNTHESISED
    words = upper.split("_")
    if (
        upper in TIER_ZERO_NAMES
        or upper.startswith(TIER_ZERO_PREFIXES)
        or not TIER_ZERO_WORDS.isdisjoint(words)
        or any(
            word in ("KEY", "KEYS") and words[position] in TIER_ZERO_KEY_KINDS
            for position, word in enumerate(words[1:])
        )
    ):
        return Tier.NEVER
    return Tier.OPERATOR


def is_loader_name(name: str) -> bool:
    """Whether a loader or an interpreter runs or loads what the variable says."""
    upper = name.upper()
    return upper in LOADER_NAMES or upper.startswith(LOADER_PREFIXES)


def operator_name_problems(names: Sequence[str]) -> tuple[NameProblem, ...]:
    """Why names cannot be in the operator's list; empty when all can."""
    problems = []
    for name in names:
        detail = ""
        if not _NAME.fullmatch(name):
            detail = "not a name of letters, digits and underscores"
        else:
            match tier_of(name):
                case Tier.NEVER:
                    detail = "a tier-0 name, which never reaches an environment: remove it"
                case Tier.SYNTHESISED:
                    detail = "set by the service itself, so listing it has no effect: remove it"
                case Tier.OPERATOR:
                    continue
        problems.append(NameProblem(name=name, detail=detail))
    return tuple(problems)


def worker_environment(
    operator_names: Sequence[str] | None, values: Mapping[str, str]
) -> WorkerEnvironment:
    """What the worker's side puts into `EnvironmentSpec.environment`: tier 1 alone.

    Args:
        operator_names: the operator's list, or None when it could not be read or parsed.
        values: where the values of listed names come from. Names that are not listed are never
            looked at; listed names without a value are left out.

    Raises:
        OperatorNamesRefused: the list holds a name of tier 0 or tier 2.
    """
    if operator_names is None:
        return WorkerEnvironment(environment={}, list_state=ListState.UNREADABLE)
    problems = operator_name_problems(operator_names)
    if problems:
        raise OperatorNamesRefused(problems)
    environment: dict[str, str] = {}
    for name in operator_names:
        if name in values:
            environment[name] = values[name]
    return WorkerEnvironment(environment=environment, list_state=ListState.READ)


def check_specification(environment: Mapping[str, str], operator_names: Collection[str]) -> None:
    """Judge the environment of a specification, name by name.

    A tier-2 name is accepted with exactly the value that the service gives it.

    Raises:
        ExecutionRejected: ENVIRONMENT_NAME_REFUSED, `field` "environment.NAME" (or "environment"
            for the size of the whole). The text never holds a value.
    """
    size = 0
    for name, value in environment.items():
        if not _NAME.fullmatch(name):
            raise _rejected(ascii(name), "not a name of letters, digits and underscores")
        match tier_of(name):
            case Tier.NEVER:
                raise _rejected(name, "a tier-0 name (a credential's), which is never passed")
            case Tier.SYNTHESISED:
                if TIER_TWO_CONSTANTS.get(name) != value:
                    raise _rejected(name, "set by the service itself: remove it")
            case Tier.OPERATOR:
                if name not in operator_names:
                    what = "changes what a loader or interpreter runs and " * is_loader_name(name)
                    raise _rejected(
                        name, f"{what}is not listed in process_environment.operator_names"
                    )
        length = len(value.encode("utf-8", "surrogatepass"))
        if "\0" in value or length > VALUE_BYTES_MAX:
            raise _rejected(name, f"its value holds NUL or is above {VALUE_BYTES_MAX} bytes")
        size += len(name) + length + 2
    if size > ENVIRONMENT_BYTES_MAX:
        raise ExecutionRejected(
            RejectedCode.ENVIRONMENT_NAME_REFUSED,
            f"environment: {size} bytes in all, and the most is {ENVIRONMENT_BYTES_MAX}",
            field="environment",
        )


def build(
    environment: Mapping[str, str],
    operator_names: Collection[str],
    *,
    working_directory: PurePosixPath = WORKSPACE_ROOT,
    bridge: BridgeEndpoint | None = None,
    network: Network = Network.NONE,
) -> dict[str, str]:
    """The whole environment of one command.

    Args:
        environment: what the specification carries; judged again.
        operator_names: `process_environment.operator_names`.
        working_directory: absolute, /workspace or below it (`sbxd.policy.containment.resolve`).
        bridge: the orchestration bridge of this turn, if there is one.
        network: what adds PROXY_VARIABLES, and nothing else does.

    Raises:
        ExecutionRejected: as `check_specification`.
    """
    check_specification(environment, operator_names)
    built: dict[str, str] = {}
    built.update(environment)
    built.update(TIER_TWO_CONSTANTS)
    built["PWD"] = str(working_directory)
    if network is Network.PROXY:
        built.update(PROXY_VARIABLES)
    if bridge is not None:
        built[BRIDGE_SOCKET_NAME] = bridge.socket_path
        built[BRIDGE_TOKEN_NAME] = bridge.token
    return built


def encode(environment: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    """Name and value pairs as bytes, sorted by name (UTF-8 with surrogateescape)."""
    return tuple(
        (name.encode("ascii"), environment[name].encode("utf-8", "surrogateescape"))
        for name in sorted(environment)
    )


def _rejected(name: str, detail: str) -> ExecutionRejected:
    return ExecutionRejected(
        RejectedCode.ENVIRONMENT_NAME_REFUSED,
        f"environment.{name}: {detail}",
        field=f"environment.{name}",
    )
