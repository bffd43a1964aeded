r"""Which lines are a whole command of sh: by a table, and as the shells of this host say.

In the tables ⏎ is a newline and ⇥ a tab.
"""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxctl.syntax import is_unfinished

UNFINISHED = r"""
cat <<EOF
cat <<EOF⏎EO
cat <<EOF⏎ EOF
cat <<EOF⏎foo\⏎EOF
cat <<-EOF⏎⇥x
cat <<'E F'⏎$x
cat <<"E"⏎E2
cat <<\E⏎x
cat <<A <<B⏎A
cat <<A; cat <<'B'⏎A⏎b
if cat <<A⏎A
echo 'a
echo "a
echo "a 'b' \"
echo "a $(b
echo "a ${b
echo `a
echo `a \`
echo $((1 +
echo $((1 + (2))
echo a \
if true
if true; then
if true; then echo; else
for a in b c
for a
for a in b; do echo
while :; do
while :; do if :; then :; fi
until :; do
case x in
case x
case x in⏎a)
case x in a) echo;;
f() {
f()
f ( )
{ echo
{ echo }
( echo
(echo; (echo)
echo $(if true; then
a &&
a ||
a |
a | # b
echo $(cat <<E⏎x
echo "$(echo ')'
if (echo)
x=$(echo
echo "it's ${x:-'a
""".strip("\n").split("\n")
WHOLE = r"""
echo
echo a # if 'x
cat <<EOF⏎x⏎EOF
cat <<A <<B⏎A⏎B
cat <<-E⏎⇥x⏎⇥E
cat <<'E F'⏎$x⏎E F
cat <<'E'⏎x\⏎E
cat <<\E⏎x⏎E
cat <<E⏎foo\\⏎E
if cat <<A⏎A⏎then :; fi
echo 'a⏎b'
echo "a⏎b"
echo "a $(echo ")") b"
echo ${x:-"}"}
echo "${x:-'}"
echo "${x:-"a b"}"
echo `a \`b\` c`
echo $((1 + (2)))
if true; then echo; fi
if true⏎then⏎echo⏎fi
if true; then echo if; elif false; then :; else :; fi >x
for a in if done; do echo; done
for a⏎do echo⏎done
for a do echo; done
while :; do break; done | cat
case x in x) echo;; esac
case x in⏎(a|b) echo⏎;;⏎*) if true; then :; fi ;;⏎esac
case x in x) echo; esac
case x in esac
case if in if) ;; fi) ;; esac
case x in⏎# c⏎x) ;;⏎esac
f() { echo; }
f()⏎{⏎echo⏎}
f ( ) ( echo )
{ echo; }
{ { echo; } }
(echo)
( (echo); (echo) )
echo }
echo {
echo {a,b}
echo fi done esac then
if true; then (echo) fi
echo $(case x in x) echo;; esac)
echo $(case x in (x) echo;; esac)
echo "$(cat <<E⏎x⏎E⏎)"
a &&⏎b
a | ⏎b
a=1 if
! true
\⏎echo
echo \#
echo a#b'c'
echo $#
echo ${#x}
echo $x'y'
2>&1 echo
echo >&2 <x
echo 2>/dev/null &
a&
""".strip("\n").split("\n")
# What no further line would make right is sh's to refuse.
WRONG = ["fi", ";;", ")", "echo )", "done", "a;; b", "case x y", "}", "case x in (a|b", "echo <"]


def _lines(written: str) -> str:
    return written.replace("⏎", "\n").replace("⇥", "\t") + "\n"


@pytest.mark.parametrize("written", UNFINISHED)
def test_a_command_that_goes_on_with_the_next_line_is_unfinished(written: str) -> None:
    assert is_unfinished(_lines(written))


@pytest.mark.parametrize("written", WHOLE + WRONG)
def test_a_whole_command_and_a_wrong_one_are_run(written: str) -> None:
    assert not is_unfinished(_lines(written))


@pytest.mark.parametrize("written", WHOLE)
def test_no_line_but_the_last_makes_a_command_whole(written: str) -> None:
    lines = _lines(written).splitlines(keepends=True)
    for count in range(1, len(lines)):
        assert is_unfinished("".join(lines[:count])), lines[:count]


def _parsed(shell: list[str], text: str) -> bool:
    """Whether a shell takes the text for whole, without running it. None of them complains of a
    here-document without its end."""
    ran = subprocess.run(
        [*shell, "-n"], input=text.encode(), capture_output=True, check=False, timeout=60
    )
    return ran.returncode == 0


@pytest.mark.parametrize("shell", [["sh"], ["bash", "--posix"]], ids=["sh", "bash"])
def test_the_shells_of_this_host_agree(shell: list[str]) -> None:
    assert shutil.which(shell[0]), "the lab's packages have it"
    for written in WHOLE:
        assert _parsed(shell, _lines(written)), written
    for written in UNFINISHED:
        if "<<" not in written and not written.endswith("\\"):
            assert not _parsed(shell, _lines(written)), written


@given(st.text(st.sampled_from("ab '\"\\$(){}`#;&|<\n-if"), max_size=40))
def test_any_text_has_an_answer(text: str) -> None:
    assert is_unfinished(text + "\n") in (True, False)
