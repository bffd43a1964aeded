"""Put the answers to every system call into a classic BPF program that is as short as may be.

The kernel and the Sentry read a filter for each process that is to become a command, and ask it
about every number when they do: its length is on the way of each command and in each Sentry's
memory (decision 0175). So calls that lie beside each other and have one answer share a range, the
ranges are searched by halves, and a word of an argument is loaded once for all who ask for it.

Invariants: pure; equal answers give equal bytes. What a profile says is none of this module's
business, and no library has a part in it: its tests hold the programs against libseccomp's.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct

KILL_PROCESS = 0x8000_0000
INSTRUCTIONS_MAX = 4096  # the kernel's limit

_INSTRUCTION = Struct("=HBBI")
_RETURN, _LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST = 0x06, 0x20, 0x54, 0x05, 0x15, 0x35
_JUMP_MAX = 255
_WORD = 0xFFFF_FFFF
# Where struct seccomp_data has the number, the architecture and the arguments (64 bits each).
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32_BIT = 0x4000_0000
_NO_CALL = 0xFFFF_FFFF  # what a tracer makes of a call that it skips
# linux/audit.h: only what is little-endian, for the order of an argument's two words.
ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}

Tests = Mapping[int, tuple[int, int]]  # argument index -> mask and value, of 64 bits
_Words = frozenset[tuple[int, int, int]]  # offset, mask, value, of 32 bits


@dataclass(frozen=True)
class Call:
    """The answers to one system call: the action of the case whose tests all hold, of which no call
    meets two, or else `otherwise`."""

    cases: Sequence[tuple[Tests, int]]
    otherwise: int


@dataclass
class _Graph:
    """What is to be done, as nodes that are made once each: (code, operand, next, other next)."""

    nodes: list[tuple[int, int, int, int]] = field(default_factory=list)
    _known: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def node(self, code: int, operand: int, then: int = -1, otherwise: int = -1) -> int:
        wanted = (code, operand, then, otherwise)
        if wanted not in self._known:
            self._known[wanted] = len(self.nodes)
            self.nodes.append(wanted)
        return self._known[wanted]

    def answer(self, action: int) -> int:
        return self.node(_RETURN, action)

    def branch(self, code: int, operand: int, then: int, otherwise: int) -> int:
        return then if then == otherwise else self.node(code, operand, then, otherwise)


def assemble(machine: str, calls: Mapping[int, Call], default: int) -> bytes:
    """The program: struct sock_filter[], native byte order.

    machine: whose calls these are; every other architecture's, x32 among them, kills the process.
    calls: by number. default: the action for every other number. Raises ValueError for a machine
    that is not known and for a program that is longer than the kernel takes.
    """
    if machine not in ARCHITECTURES:
        raise ValueError(f"there are no filters for {machine}")
    graph = _Graph()
    refused, killed = graph.answer(default), graph.answer(KILL_PROCESS)
    by_number = _search(graph, _ranges(graph, calls, refused))
    if machine == "x86_64":
        foreign = graph.branch(_EQUAL, _NO_CALL, refused, killed)
        by_number = graph.branch(_AT_LEAST, _X32_BIT, foreign, by_number)
    native = graph.node(_LOAD, _NUMBER, by_number)
    known = graph.branch(_EQUAL, ARCHITECTURES[machine], native, killed)
    code = _Layout(graph).place_all(graph.node(_LOAD, _ARCHITECTURE, known))
    if len(code) > INSTRUCTIONS_MAX:
        raise ValueError(f"{len(code)} instructions are more than the kernel takes")
    return b"".join(_INSTRUCTION.pack(*each) for each in code)


def _ranges(graph: _Graph, calls: Mapping[int, Call], refused: int) -> list[tuple[int, int]]:
    """(first number, what is done from it on), ascending from 0."""
    found = [(0, refused)]
    for number in sorted(calls):
        call = calls[number]
        cases = [(_words(tests), action) for tests, action in call.cases]
        done = _decide(graph, cases, graph.answer(call.otherwise))
        for start, what in ((number, done), (number + 1, refused)):
            if found[-1][0] == start:
                found.pop()
            if not found or found[-1][1] != what:
                found.append((start, what))
    return found


def _search(graph: _Graph, ranges: Sequence[tuple[int, int]]) -> int:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    low, high = _search(graph, ranges[:middle]), _search(graph, ranges[middle:])
    return graph.branch(_AT_LEAST, ranges[middle][0], high, low)


def _words(tests: Tests) -> _Words:
    """The tests of the two words of each argument. A word of which nothing is asked has none."""
    words = set()
    for index, (mask, value) in tests.items():
        for shift in (0, 32):
            if asked := mask >> shift & _WORD:
                offset = _ARGUMENTS + 8 * index + shift // 8
                words.add((offset, asked, value >> shift & _WORD))
    return frozenset(words)


def _decide(graph: _Graph, cases: Sequence[tuple[_Words, int]], otherwise: int) -> int:
    """The action of the case that is met. The order of cases does not matter: none meets two."""
    if not cases:
        return otherwise
    if not all(words for words, _ in cases):
        (action,) = {action for words, action in cases if not words}
        return graph.answer(action)
    # First the word that most ask for, of these the one with the fewest answers, then the highest:
    # what is asked of the upper half of an argument is nearly always that it be 0.
    asked = Counter((offset, mask) for words, _ in cases for offset, mask, _ in words)
    values = Counter((o, m) for o, m, _ in {each for words, _ in cases for each in words})
    offset, mask = max(asked, key=lambda each: (asked[each], -values[each], *each))
    by_value: dict[int, list[tuple[_Words, int]]] = {}
    rest = []
    for words, action in cases:
        mine = [each for each in words if each[:2] == (offset, mask)]
        if mine:
            by_value.setdefault(mine[0][2], []).append((words.difference(mine), action))
        else:
            rest.append((words, action))
    after = _decide(graph, rest, otherwise)
    chain = after
    for value in sorted(by_value, reverse=True):
        chain = graph.branch(_EQUAL, value, _decide(graph, by_value[value], after), chain)
    if mask != _WORD:
        chain = graph.node(_AND, mask, chain)
    return graph.node(_LOAD, offset, chain)


class _Layout:
    """Gives every node its place, from the last instruction to the first, since all jumps are
    forward and short: what is too far away is given once more, or a long jump to it."""

    def __init__(self, graph: _Graph) -> None:
        self._nodes = graph.nodes
        self._code: list[tuple[int, int, int, int]] = []  # the last instruction first
        self._places: dict[int, int] = {}

    def place_all(self, first: int) -> list[tuple[int, int, int, int]]:
        pending = [first]
        while pending:  # no recursion: a rule may have thousands of values
            _, _, *after = self._nodes[pending[-1]]
            later = [each for each in after if each >= 0 and each not in self._places]
            if later:
                pending.append(later[0])
            elif (wanted := pending.pop()) not in self._places:
                self._place(wanted)
        return self._code[::-1]

    def _place(self, wanted: int) -> None:
        code, operand, then, otherwise = self._nodes[wanted]
        if_true, if_false = 0, 0
        if otherwise >= 0:
            self._bring_near(then, farthest=_JUMP_MAX - 1)  # the other one may bring one more
            self._bring_near(otherwise, farthest=_JUMP_MAX)
            if_true, if_false = self._distance(then), self._distance(otherwise)
        elif then >= 0:  # a load or a mask: what is next must follow at once
            self._bring_near(then, farthest=0)
        self._append(wanted, (code, if_true, if_false, operand))

    def _append(self, wanted: int, instruction: tuple[int, int, int, int]) -> None:
        self._places[wanted] = len(self._code)
        self._code.append(instruction)

    def _distance(self, wanted: int) -> int:
        """How many instructions the next one would have to jump over."""
        return len(self._code) - self._places[wanted] - 1

    def _bring_near(self, wanted: int, *, farthest: int) -> None:
        if self._distance(wanted) <= farthest:
            return
        code, operand, _, _ = self._nodes[wanted]
        if code == _RETURN:
            self._append(wanted, (code, 0, 0, operand))
        else:
            self._append(wanted, (_JUMP, 0, 0, self._distance(wanted)))
