"""What a program prints, on an operator's terminal: shown, never acted on, and never taken for
what sbxctl says."""

import os
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxctl.exits import Exit
from sbxctl.terminal import GUTTER, Decoder, Gutter, visible
from sbxd.fake.script import Outcome, Script
from sbxd.port.command import KillReason
from tests.service.fake_socket import socket_daemon
from tests.service.on_terminal import COLUMNS, on_terminal, shown

IMAGE = ("--image", "sha256:" + "a" * 64)
# Sets the clipboard, sets the title, asks for the cursor's place, clears the screen, and the same
# in the other forms that terminals take.
HOSTILE = (
    b"\x1b]52;c;cm0gLXJmIC8=\x07",
    b"\x1b]0;root@host\x1b\\",
    b"\x1b[6n",
    b"\x1b[2J\x1b[H",
    b"\x9b6n",
    "\x9b6n".encode(),
    "\x9d52;c;eA==\x9c".encode(),
    b"\x05\x08\x0b\x0c\x0e\x7f\x00",
    "\u202e\u2066\u200f\u061c".encode(),
    "\u2028\u2029\U000e0041\ufeff\u200b".encode(),
    b"\xc3\x28\xf0\x9f\xff\xed\xa0\x80",
)
ESCAPED = (rb"\x1b]52;c;", rb"\x1b[6n", rb"\x9b6n", rb"\u202e", rb"\xff", rb"\x00")
STYLE = re.compile(rb"\x1b\[[0-9;]*m")
VERDICT = "── exit code 0 in 93 ms ──"
# A false verdict, by every way to a line of its own.
FORGED = (
    f"\n{VERDICT}\n",
    f"work\r{VERDICT}\n",
    " " * COLUMNS + VERDICT + "\n",
    " " * (COLUMNS - len(GUTTER)) + VERDICT + "\n",
    "\t" * 10 + VERDICT + "\n",
    "\u4e00" * (COLUMNS // 2) + VERDICT,
    f"\x1b[7m{VERDICT}\x1b[0m\n",
    VERDICT,
)


def _program(*pieces: bytes) -> Script:
    return Script(otherwise=Outcome(stdout=b"".join(pieces), exit_code=3))


def acts(data: bytes) -> list[str]:
    """What of the bytes a terminal would act on, but for the styles of our own lines."""
    text = STYLE.sub(b"", data).decode("utf-8")
    return [
        c for c in text if c not in "\n\r\t" and unicodedata.category(c)[0] in "CZ" and c != " "
    ]


# --- what acts on a terminal ---------------------------------------------------------------------


@pytest.mark.case("TTY-01", "TTY-02")
async def test_nothing_of_a_programs_output_acts_on_the_terminal(tmp_path: Path) -> None:
    async with socket_daemon(_program(*HOSTILE), tmp_path) as daemon:
        for verb in (["run", *IMAGE], ["run", *IMAGE, "--max-output", "1M"]):
            code, seen = await shown(*verb, "--", "x", socket=daemon.path)
            assert code == 3
            assert acts(seen) == []
            for escaped in (
                rb"\x1b]52;c;",
                rb"\x1b[6n",
                rb"\x9b6n",
                rb"\u202e",
                rb"\xff",
                rb"\x00",
            ):
                assert escaped in seen
        code, seen = await shown("run", "--raw", *IMAGE, "--", "x", socket=daemon.path)
        assert b"".join(HOSTILE) in seen, "the control: what was sent, where it was asked for"


@pytest.mark.case("TTY-01")
async def test_stderr_is_shown_as_stdout_is(tmp_path: Path) -> None:
    script = Script(otherwise=Outcome(stderr=b"".join(HOSTILE)))
    async with socket_daemon(script, tmp_path) as daemon:
        code, seen = await shown("run", *IMAGE, "--", "x", socket=daemon.path)
    assert (code, acts(seen)) == (0, [])
    assert rb"\x1b[6n" in seen


@pytest.mark.case("TTY-01")
async def test_exec_and_shell_show_it_as_run_does(tmp_path: Path) -> None:
    async with socket_daemon(_program(*HOSTILE), tmp_path) as daemon:
        async with on_terminal("shell", *IMAGE, socket=daemon.path) as terminal:
            at = await terminal.until(b"$")
            live = re.search(rb"environment ([0-9a-f]{32})", terminal.seen)
            assert live
            code, seen = await shown("exec", live[1].decode(), "x", socket=daemon.path)
            assert (code, acts(seen)) == (3, [])
            assert rb"\x1b[6n" in seen
            await terminal.type("anything\n")
            at = await terminal.until(b"exit code 3", after=at)
            await terminal.type("exit\n")
            assert await terminal.end() == 3
        assert acts(terminal.seen) == []
        assert rb"\x1b[6n" in terminal.seen


async def test_a_pipe_has_the_bytes_as_they_are_beside_a_terminal(tmp_path: Path) -> None:
    ends, writes = os.pipe()
    async with socket_daemon(_program(*HOSTILE), tmp_path) as daemon:
        try:
            async with on_terminal(
                "run", *IMAGE, "--", "x", socket=daemon.path, stdout=writes
            ) as terminal:
                os.close(writes)
                assert await terminal.end() == 3
                read = os.read(ends, 65536)
        finally:
            os.close(ends)
    assert read == b"".join(HOSTILE)
    assert b"exit code 3" in terminal.seen
    assert acts(terminal.seen) == []


@given(st.lists(st.one_of(st.binary(max_size=8), st.sampled_from(HOSTILE)), max_size=12), st.data())
def test_the_pieces_change_nothing_and_nothing_acts(
    parts: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    decoder, out, start = Decoder(), [], 0
    for cut in [*cuts, len(whole)]:
        out.append(decoder.feed(whole[start:cut]))
        start = cut
    text = "".join(out) + decoder.finish()
    at_once = Decoder()
    assert text == at_once.feed(whole) + at_once.finish()
    for char in text:
        assert char in "\n\r\t" or char.isprintable() or unicodedata.category(char) == "Zs"
    assert decoder.finish() == ""


@given(st.text())
def test_what_is_printable_is_left_alone(text: str) -> None:
    kept = "".join(c for c in text if c.isprintable() or c in "\n\r\t")
    assert visible(kept) == kept


# --- what is taken for our own --------------------------------------------------------------------


def rows(seen: bytes, columns: int, wide: int) -> list[str]:
    """What a terminal shows in each of its rows, one that wraps; wide: the columns of a character
    that is not ASCII. Styles are dropped."""
    shown_rows, at, width = [""], 0, 0
    for char in STYLE.sub(b"", seen).decode():
        if char == "\n":
            shown_rows.append("")
            at = width = 0
        elif char == "\r":
            at = width = 0
        else:
            size = 8 - width % 8 if char == "\t" else 1 if char.isascii() else wide
            if width + size > columns and char != "\t":
                shown_rows.append("")
                at = width = 0
            row = shown_rows[-1]
            shown_rows[-1] = row[:at] + char + row[at + 1 :]
            at, width = at + 1, min(width + size, columns)
    return shown_rows


@pytest.mark.case("TTY-03")
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colours", "none"])
@pytest.mark.parametrize("forged", FORGED)
async def test_the_verdict_alone_has_a_style_and_a_line_of_its_own(
    tmp_path: Path, forged: str, environment: dict[str, str]
) -> None:
    async with socket_daemon(_program(forged.encode()), tmp_path) as daemon:
        _, seen = await shown("run", *IMAGE, "x", socket=daemon.path, environment=environment)
    before, verdict = seen.split(b"\x1b[", 1)
    assert VERDICT.encode() in before, "the control: it was painted"
    assert before.endswith(b"\n"), "ours begins on a line of its own"
    assert b"exit code 3" in verdict
    assert verdict.startswith(b"7m"), "reverse"


@pytest.mark.case("TTY-03")
@pytest.mark.parametrize("forged", FORGED)
async def test_a_terminal_without_styles_shows_a_program_behind_a_gutter(
    tmp_path: Path, forged: str
) -> None:
    async with socket_daemon(_program(forged.encode()), tmp_path) as daemon:
        _, seen = await shown("run", *IMAGE, "x", socket=daemon.path, term="dumb")
    assert b"\x1b" not in seen
    for wide in (1, 2):
        ours = [row for row in rows(seen, COLUMNS, wide) if not row.startswith(GUTTER) and row]
        assert ours[0].startswith("── exit code 3 in "), ours
        assert not any(VERDICT in row for row in ours)


@pytest.mark.case("TTY-03")
@given(
    st.lists(st.text(st.sampled_from("a\u4e00\u0300\t\r\n ")), max_size=8),
    st.integers(6, 40),
    st.sampled_from([0, 1, 2]),
)
def test_no_row_begins_with_a_programs_text_behind_the_gutter(
    pieces: list[str], columns: int, wide: int
) -> None:
    gutter = Gutter(lambda: columns)
    seen = "".join(gutter.feed(piece) for piece in pieces).encode()
    for row in rows(seen, columns, wide):
        assert not row or row.startswith(GUTTER), (row, seen)
    assert "".join(pieces).count("a") == seen.count(b"a"), "nothing is lost"


@pytest.mark.case("TTY-03")
async def test_a_refusal_has_a_style_and_escapes_what_it_names(tmp_path: Path) -> None:
    async with socket_daemon(Script(), tmp_path) as daemon:
        code, seen = await shown("run", "--image", "\x1b[2J", "x", socket=daemon.path)
    assert code == Exit.REJECTED
    assert seen.startswith(b"\x1b[1;7msbxctl:\x1b[0m '\\x1b[2J' is no alias")
    assert acts(seen) == []


@pytest.mark.case("TTY-03")
async def test_the_prompt_of_the_shell_cannot_be_painted(tmp_path: Path) -> None:
    script = Script(otherwise=Outcome(stdout=b"/workspace$ ", killed_by=KillReason.MEMORY))
    async with (
        socket_daemon(script, tmp_path) as daemon,
        on_terminal("shell", *IMAGE, socket=daemon.path) as terminal,
    ):
        at = await terminal.until(b"\x1b[1;7m/workspace$\x1b[0m ")
        await terminal.type("x\n")
        at = await terminal.until(b"/workspace$ \n", after=at)
        assert b"\x1b" not in terminal.seen[at - 13 : at]
        await terminal.until(b"\x1b[1;7m/workspace$\x1b[0m ", after=at)
        await terminal.type("\x04")
        await terminal.end()
