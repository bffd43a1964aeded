"""`sbxctl egress` as a program, and what it makes of records and of the daemon's words."""

import json
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxctl import egress_learn
from sbxctl.advice import ADVICE
from sbxctl.egress import steps
from sbxctl.egress_test import row, target_of
from sbxctl.exits import Exit
from sbxctl.journal import JournalUnreadable, Query, unit
from sbxctl.lesson import Denial, as_toml, lesson
from sbxctl.specification import TEST_RUNS
from sbxd.audit.events import Door
from sbxd.client.admin import AdminClient
from sbxd.egress.decisions import ProxyReason
from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.fake.script import Script
from sbxd.policy.destinations import canonical_policy
from sbxd.policy.egress import Allowed, EgressRefusal, Refused
from sbxd.port.command import ExecutionResult, KillReason
from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy
from sbxd.port.errors import ExecutionRejected, ExecutionUnavailable
from sbxd.probes.egress import EGRESS_PROBES
from sbxd.probes.probe import Verdict
from sbxd.service.egress import EgressState, checked
from sbxd.settings import EgressSettings, Settings
from sbxd.wire.egress import EgressCaps, EgressChecked, EgressShown
from tests.service.fake_socket import sbxctl, socket_daemon
from tests.service.memory import memory_daemon

DESTINATIONS = (
    EgressDestination(host="files.example.org", ports=(443,)),
    EgressDestination(host="*.wild.example.org", ports=(443, 8443)),
)
SETTINGS = msgspec.structs.replace(
    FAKE_SETTINGS,
    egress=EgressSettings(mode=EgressMode.ALLOWLIST, destinations=DESTINATIONS, tunnels_max=7),
)
ALLOWED = Allowed(
    host="files.example.org",
    port=443,
    addresses=("93.184.215.14",),
    rule="files.example.org:443",
)
REFUSED = Refused(
    reason=EgressRefusal.ADDRESS_REFUSED,
    host="a.wild.example.org",
    port=443,
    rule="*.wild.example.org:443,8443",
    address="10.0.0.1",
    address_range="private 10.0.0.0/8",
    detail="a.wild.example.org resolves to 10.0.0.1\x1b[2J",
    remedy="for the model",
)


class Judge:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self, judged: Allowed | Refused = ALLOWED) -> None:
        self.judged = judged
        self.asked: list[tuple[str, int]] = []

    async def check(self, host: str, port: int) -> Allowed | Refused:
        self.asked.append((host, port))
        return self.judged

    def state(self) -> EgressState:
        return EgressState(host_network=("127.0.0.0/8",), allowed=3, refused={"malformed": 2})


# --- check --------------------------------------------------------------------------------------


async def test_an_allowed_destination_is_0_with_its_rule_and_addresses(tmp_path: Path) -> None:
    judge = Judge()
    async with socket_daemon(Script(), tmp_path, settings=SETTINGS, egress=judge) as daemon:
        ran = await daemon.sbxctl("egress", "check", "files.example.org:443")
        told = await daemon.sbxctl("egress", "check", "--json", "files.example.org:443")
    assert ran.code == told.code == Exit.OK
    assert b"allowed" in ran.stdout
    assert b"93.184.215.14" in ran.stdout
    document = json.loads(told.stdout)
    assert (document["allowed"], document["rule"]) == (True, "files.example.org:443")
    assert set(document["steps"].values()) == {"ok"}
    assert judge.asked == [("files.example.org", 443)] * 2


async def test_a_refused_one_is_247_with_address_range_and_the_operators_remedy(
    tmp_path: Path,
) -> None:
    egress = Judge(REFUSED)
    async with socket_daemon(Script(), tmp_path, settings=SETTINGS, egress=egress) as daemon:
        ran = await daemon.sbxctl("egress", "check", "--explain", "a.wild.example.org:443")
        told = await daemon.sbxctl("egress", "check", "--json", "a.wild.example.org:443")
    assert (ran.code, told.code) == (247, 247)
    text = ran.stdout.decode()
    for words in ("address_refused", "10.0.0.1", "private 10.0.0.0/8", "*.wild.example.org"):
        assert words in text
    assert ADVICE["address_refused"].remedy in text
    assert "for the model" not in text
    assert "\x1b" not in text
    assert json.loads(told.stdout)["steps"]["every address may be dialled"] == "refused"


@pytest.mark.parametrize("value", ["x", "x:", ":", "x:http", "x:1234567", "", "x:-1", "x:٤"])
async def test_what_has_no_such_form_is_245(tmp_path: Path, value: str) -> None:
    ran = await sbxctl("--socket", str(tmp_path / "none"), "egress", "check", "--", value)
    assert ran.code == Exit.USAGE
    assert "write HOST:PORT" in ran.stderr


async def test_what_is_no_host_or_port_is_judged_and_not_a_usage_error(tmp_path: Path) -> None:
    async with socket_daemon(Script(), tmp_path, settings=SETTINGS) as daemon:
        for value, reason in (
            ("[::1]:443", "host_malformed"),
            ("https://files.example.org:443", "host_malformed"),
            ("10.0.0.1:443", "host_malformed"),
            ("files.example.org:0", "port_malformed"),
            ("files.example.org:0443", "port_malformed"),
            ("files.example.org:99999", "port_malformed"),
            ("other.example.org:443", "host_not_listed"),
        ):
            ran = await daemon.sbxctl("egress", "check", "--json", value)
            assert json.loads(ran.stdout)["reason"] == reason
            assert ran.code == Exit.EGRESS_REFUSED


@pytest.mark.parametrize("reason", EgressRefusal)
def test_every_reason_of_a_listed_rule_is_refused_at_one_step(reason: EgressRefusal) -> None:
    found = [step for _, step in steps(_checked(reason))]
    if reason.value.endswith("not_public_https"):  # of code, never of the operator's list
        assert found == ["ok"] * 5
        return
    at = found.index("refused")
    assert found == ["ok"] * at + ["refused"] + ["not reached"] * (4 - at)


def _checked(reason: EgressRefusal) -> EgressChecked:
    return checked(1, msgspec.structs.replace(REFUSED, reason=reason))


async def test_a_worker_cannot_ask() -> None:
    """The verb is none of a worker's protocol."""
    judge = Judge()
    async with memory_daemon(Script(), settings=SETTINGS, egress=judge) as daemon:
        async with daemon.channel(Door.WORKER) as channel:
            with pytest.raises((ExecutionUnavailable, ExecutionRejected)):
                await AdminClient(channel).egress_check("files.example.org", 443)
        assert judge.asked == []
        async with daemon.channel(Door.ADMIN) as channel:
            await AdminClient(channel).egress_check("files.example.org", 443)
    assert judge.asked == [("files.example.org", 443)], "the control"


# --- show ---------------------------------------------------------------------------------------


async def test_show_has_policy_caps_host_network_and_counts(tmp_path: Path) -> None:
    async with socket_daemon(Script(), tmp_path, settings=SETTINGS, egress=Judge()) as daemon:
        shown = await daemon.sbxctl("egress", "show")
        told = json.loads((await daemon.sbxctl("egress", "show", "--json")).stdout)
    assert told["policy"]["mode"] == "allowlist"
    assert told["caps"]["tunnels_max"] == 7
    assert (told["allowed"], told["refused"]) == (3, {"malformed": 2})
    for words in ("*.wild.example.org:443,8443", "127.0.0.0/8", "refused: malformed"):
        assert words in shown.stdout.decode()


def test_the_caps_that_are_shown_are_all_that_there_are() -> None:
    policy = set(EgressPolicy.__struct_fields__)
    assert set(EgressCaps.__struct_fields__) == set(EgressSettings.__struct_fields__) - policy


# --- advice -------------------------------------------------------------------------------------


def test_there_is_advice_for_every_reason_and_for_no_other() -> None:
    assert set(ADVICE) == {each.value for each in (*EgressRefusal, *ProxyReason)}
    assert all(each.meaning and each.remedy for each in ADVICE.values())


# --- learn --------------------------------------------------------------------------------------


def denial(host: str | None, port: int | None = 443, **more: str) -> Denial:
    reason = more.get("reason", "host_not_listed")
    return Denial(reason=reason, host=host, port=port, run_id=more.get("run_id", "run-1"))


def test_what_was_not_covered_is_suggested_exactly_and_once() -> None:
    learned = lesson(
        [
            denial("b.example.com"),
            denial("a.example.com", run_id="run-2"),
            denial("a.example.com", 8443, reason="port_not_listed"),
            denial("a.example.com"),
        ],
        DESTINATIONS,
    )
    assert [(each.host, each.ports, each.asked) for each in learned.suggestions] == [
        ("a.example.com", (443, 8443), 3),
        ("b.example.com", (443,), 1),
    ]
    assert learned.suggestions[0].runs == ("run-1", "run-2")
    assert (len(learned.wildcards), len(learned.never), len(learned.listed)) == (0, 0, 0)


@pytest.mark.parametrize(
    "reason",
    sorted(ADVICE.keys() - {"mode_deny", "host_not_listed", "port_not_listed"}),
)
def test_no_other_reason_is_ever_suggested(reason: str) -> None:
    learned = lesson([denial("a.example.com", reason=reason)], ())
    assert learned.suggestions == ()
    assert [(each.host, each.reason) for each in learned.never] == [("a.example.com", reason)]
    assert lesson([denial("a.example.com")], ()).suggestions, "the control"


@pytest.mark.parametrize("reason", ["address_refused", "host_network", "address_malformed"])
def test_a_name_that_led_to_a_refused_address_is_not_suggested_with_any_port(reason: str) -> None:
    found = [denial("a.example.com", 22), denial("a.example.com", reason=reason)]
    for order in (found, found[::-1]):
        assert lesson(order, ()).suggestions == ()


@pytest.mark.parametrize(
    "host",
    ["10.0.0.1", "localhost", "com", "x.invalid", "*.example.com", "A.example.com", "a..b", "",
     'a.example.com", ports = [1] }, { host = "b.example.com', "a.example.com\n", "a_b.example.com",
     None],
)  # fmt: skip
def test_what_cannot_be_listed_is_not_suggested(host: str | None) -> None:
    assert lesson([denial(host)], ()).suggestions == ()


def test_what_is_listed_is_told_apart() -> None:
    learned = lesson(
        [denial("files.example.org"), denial("a.wild.example.org", 8443)], DESTINATIONS
    )
    assert learned.suggestions == ()
    assert [each.host for each in learned.listed] == ["a.wild.example.org", "files.example.org"]


@pytest.mark.parametrize(("count", "is_suggested"), [(2, False), (3, True), (5, True)])
def test_a_wildcard_needs_three_siblings_with_the_same_port(count: int, is_suggested: bool) -> None:
    names = [f"{letter}.cdn.example.com" for letter in "abcdefg"[:count]]
    learned = lesson([denial(name) for name in names] + [denial("a.cdn.example.com", 22)], ())
    assert bool(learned.wildcards) is is_suggested
    assert len(learned.suggestions) == count, "the names are suggested all the same"
    if is_suggested:
        (wildcard,) = learned.wildcards
        assert (wildcard.host, wildcard.ports) == ("*.cdn.example.com", (443,))
        assert wildcard.names == tuple(names)


def test_a_wildcard_is_never_of_a_top_level_domain_and_never_uncommented() -> None:
    learned = lesson([denial(f"{letter}.com") for letter in "abcd"], ())
    assert learned.wildcards == ()
    siblings = lesson([denial(f"{letter}.example.com") for letter in "abcd"], ())
    (line,) = [each for each in as_toml(siblings, ()).splitlines() if "*." in each]
    assert line.strip().startswith("#")


HOSTILE = st.one_of(
    st.text(max_size=40),
    st.from_regex(r"[a-c]\.[a-c]\.(com|org)", fullmatch=True),
    st.sampled_from(["10.0.0.1", "x.invalid", 'a"]\n[egress', "*.com", "a.b.c.example.org"]),
)


@given(
    st.lists(
        st.builds(
            Denial,
            reason=st.sampled_from(sorted(ADVICE)),
            host=st.one_of(st.none(), HOSTILE),
            port=st.one_of(st.none(), st.integers(-1, 70_000)),
            run_id=st.just("run"),
        ),
        max_size=30,
    )
)
def test_whatever_was_asked_for_the_toml_is_a_configuration(found: list[Denial]) -> None:
    learned = lesson(found, DESTINATIONS)
    text = as_toml(learned, DESTINATIONS)
    loaded = msgspec.convert(tomllib.loads(text), Settings)
    canonical_policy(loaded.egress)  # raises for what is outside the grammar
    wanted = [(each.host, each.ports) for each in learned.suggestions]
    listed = [(each.host, each.ports) for each in loaded.egress.destinations]
    assert listed == [(each.host, each.ports) for each in DESTINATIONS] + wanted
    counts = [each.asked for each in (*learned.suggestions, *learned.listed)]
    counts += [each.asked for each in learned.never]
    assert sum(counts) == len(found), "each denial is accounted for once"


def record(**fields: object) -> dict[str, object]:
    return {
        "SBX_EVENT": "EgressRefused",
        "SBX_REASON": "host_not_listed",
        "SBX_HOST": "a.example.com",
        "SBX_PORT": "443",
        "SBX_RUN_ID": "run-1",
        "SBX_TENANT_ID": "tenant",
        **fields,
    }


def test_records_become_denials_and_counts() -> None:
    records = [
        record(),
        record(SBX_HOST=None, SBX_PORT=None, SBX_REASON="malformed"),
        record(SBX_HOST=[1, 2], SBX_PORT="x"),
        record(SBX_EVENT="EgressRefusalsCounted", SBX_TOTAL="5"),
        record(SBX_EVENT="EgressRefusalsCounted", SBX_TOTAL=["5", "6"]),
        record(SBX_REASON=None),
    ]
    found = list(egress_learn.denials(records))
    assert [(each.host, each.port) for each in found] == [
        ("a.example.com", 443), (None, None), (None, None),
    ]  # fmt: skip
    assert egress_learn.counted(records) == 5


def test_only_the_operators_runs_are_of_the_suite() -> None:
    of_suite = record(SBX_RUN_ID=f"{TEST_RUNS}1", SBX_TENANT_ID="operator")
    somebodys = record(SBX_RUN_ID=f"{TEST_RUNS}1")  # a tenant may choose that name
    others = record(SBX_TENANT_ID="operator")
    assert [egress_learn.of_a_test(each) for each in (of_suite, somebodys, others)] == [
        *(True, False, False)
    ]


def test_the_journal_is_asked_for_what_the_daemons_unit_wrote_alone() -> None:
    words = Query(matches=(unit(), "SBX_RUN_ID=run-1"), since="--output=cat").argv()
    assert "_SYSTEMD_UNIT=sbxd.service" in words
    assert "SBX_RUN_ID=run-1" in words
    assert "--since=--output=cat" in words, "a value is never an option"


def journalctl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Another journalctl, which notes how it was called."""
    program = folder / "journalctl"
    program.write_text(f'#!/bin/sh\necho "$*" >> {folder}/calls\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_records_are_read_and_what_is_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "\n".join(["no JSON", "[1]", json.dumps(record()), json.dumps(record(SBX_PORT="1"))])
    (tmp_path / "lines").write_text(lines + "\n")
    journalctl(tmp_path, monkeypatch, f"cat {tmp_path}/lines")
    found = egress_learn.journal(run_id="run-1", since=None)
    assert [each["SBX_PORT"] for each in found] == ["443", "1"]
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith("EgressRefused SBX_EVENT=EgressRefusalsCounted SBX_RUN_ID=run-1")


def test_no_more_records_are_read_than_the_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress_learn, "RECORDS_MAX", 5)
    journalctl(tmp_path, monkeypatch, "while echo '{}'; do :; done")
    assert len(egress_learn.journal(run_id=None, since="-1h")) == 5


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 0", "group systemd-journal"),
        ("echo 'no such time' >&2; exit 1", "no such time"),
    ],
)
def test_a_journal_that_shows_nothing_is_no_proof_that_nothing_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    journalctl(tmp_path, monkeypatch, script)
    with pytest.raises(JournalUnreadable, match=says):
        egress_learn.journal(run_id=None, since="-1h")


def test_an_empty_journal_of_a_daemon_that_is_to_be_seen_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journalctl(tmp_path, monkeypatch, "case \"$*\" in *--lines=1*) echo '{}';; esac")
    assert egress_learn.journal(run_id=None, since="-1h") == []


async def test_no_id_of_a_run_is_245(tmp_path: Path) -> None:
    ran = await sbxctl(
        *("--socket", str(tmp_path / "none"), "egress", "learn", "--run", "x SBX_EVENT=y")
    )
    assert ran.code == Exit.USAGE


# --- test ---------------------------------------------------------------------------------------


def shown(*destinations: EgressDestination) -> EgressShown:
    caps = {name: getattr(EgressSettings(), name) for name in EgressCaps.__struct_fields__}
    mode = EgressMode.ALLOWLIST if destinations else EgressMode.DENY
    return EgressShown(
        request_id=1,
        policy=EgressPolicy(mode=mode, destinations=destinations),
        caps=EgressCaps(**caps),
        host_network=(),
        allowed=0,
        refused={},
    )


def test_the_target_is_a_listed_name_with_443_where_there_is_one() -> None:
    other = EgressDestination(host="a.example.org", ports=(8443,))
    target = target_of(shown(other, *DESTINATIONS))
    assert (target.host, target.port, target.unlisted_port) == ("files.example.org", 443, 1)
    assert target_of(shown(other)).port == 8443
    assert target_of(shown(DESTINATIONS[1])).host is None
    assert target_of(shown()).has_proxy is False


def test_the_unlisted_port_is_listed_by_no_destination_that_covers_the_name() -> None:
    host = "a.wild.example.org"
    one = EgressDestination(host=host, ports=(443,))
    rest = EgressDestination(host="*.wild.example.org", ports=(1, 2))
    assert target_of(shown(one, rest)).unlisted_port == 3


def ended(stdout: bytes, *, exit_code: int | None, killed: KillReason | None) -> ExecutionResult:
    return ExecutionResult(
        exit_code=exit_code,
        stdout=stdout,
        stderr=b"",
        stdout_truncated=False,
        stderr_truncated=False,
        timed_out=killed is KillReason.TIMEOUT,
        killed_by=killed,
        files_changed=(),
        duration_ms=1,
    )


@pytest.mark.parametrize("killed", [None, KillReason.TIMEOUT])
def test_a_program_that_does_not_end_by_itself_proves_nothing(killed: KillReason | None) -> None:
    result = ended(b"{}", exit_code=None if killed else 1, killed=killed)
    found = row(EGRESS_PROBES[0], result)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.note


@pytest.mark.parametrize("stdout", [b"", b"{", b"[]", b"null", b"{}"])
def test_an_answer_that_is_none_is_no_pass(stdout: bytes) -> None:
    for each in EGRESS_PROBES:
        assert row(each, ended(stdout, exit_code=0, killed=None)).verdict is Verdict.INCONCLUSIVE
