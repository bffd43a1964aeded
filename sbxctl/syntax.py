"""Whether typed lines are a whole command of sh, or one that goes on with the next line.

Invariants: pure; nothing is expanded or run. A text is unfinished exactly where a POSIX shell (IEEE
1003.1, Shell Command Language 2.3 and 2.10) would read on: an open quotation, substitution or
here-document, a trailing backslash or operator, a compound command without its end. What is wrong
is not unfinished: the shell says what is wrong with it. Deliberately absent: aliases.
"""

import re
from typing import final

_CLOSED_BY = {
    "if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}",
}  # fmt: skip
_LEADS_ON = frozenset({"then", "elif", "else", "do", "!"})
_NAME_FOLLOWS = frozenset({"for", "case"})
# What ends a word, but for quotes.
_ENDS_WORD = frozenset(" \t\n;&|<>()")
_LIST_OPERATOR = re.compile(r"&&|\|\||;;|[;&|]")
_REDIRECTION = re.compile(r"<<-|<<|<&|<>|<|>>|>&|>\||>")
_FUNCTION = re.compile(r"\([ \t]*\)")


def is_unfinished(text: str) -> bool:
    """Whether a shell that has read these lines would read another one before it runs anything.

    text: one or more lines, each with its newline.
    """
    scanner = _Scanner(text)
    try:
        scanner.commands(nested=False)
    except _Unfinished:
        return True
    except _Wrong:
        return False
    return False


class _Unfinished(Exception):
    """The text ends within something."""


class _Wrong(Exception):
    """No further line makes it right."""


@final
class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        # Here-documents whose bodies begin after the next newline: delimiter, as it is written,
        # whether tabs are stripped.
        self._documents: list[tuple[str, bool, bool]] = []

    # --- commands -------------------------------------------------------------------------------

    def commands(self, *, nested: bool) -> None:
        """Read to the end of the text or, nested, past the parenthesis that closes a command
        substitution."""
        closers: list[str] = []
        begins = True  # a reserved word may stand here
        lacks = False  # a command must follow
        while True:
            self._blanks()
            if self._at >= len(self._text):
                if closers or lacks or nested or self._documents:
                    raise _Unfinished
                return
            char = self._text[self._at]
            if char == "\n":
                self._newline()
                begins = True
            elif match := _LIST_OPERATOR.match(self._text, self._at):
                self._at = match.end()
                begins, lacks = True, match[0] in ("&&", "||", "|")
                if match[0] == ";;":
                    if not closers or closers[-1] != "esac":
                        raise _Wrong
                    begins = self._pattern(closers)
            elif match := _REDIRECTION.match(self._text, self._at):
                self._redirection(match)
                begins = lacks = False
            elif char == "(":
                if not begins and (function := _FUNCTION.match(self._text, self._at)):
                    self._at = function.end()
                    begins = lacks = True
                elif begins:
                    self._at += 1
                    closers.append(")")
                    lacks = False
                else:
                    raise _Wrong
            elif char == ")":
                self._at += 1
                if not closers and nested:
                    return
                self._close(closers, ")")
                begins, lacks = True, False
            else:
                word = self._word()
                if not begins:
                    continue
                begins, lacks = self._reserved(word, closers)

    def _reserved(self, word: str, closers: list[str]) -> tuple[bool, bool]:
        """What a word means where a command may begin: whether another may begin after it, and
        whether one must."""
        if word in _CLOSED_BY:
            closers.append(_CLOSED_BY[word])
            if word in _NAME_FOLLOWS:
                self._blanks()
                self._word()
            if word == "case":
                self._skip_lines()
                if self._word() != "in":
                    raise _Wrong
                return self._pattern(closers), False
            return word != "for", False
        if word in _CLOSED_BY.values():
            self._close(closers, word)
            return True, False
        return word in _LEADS_ON, False

    def _close(self, closers: list[str], closer: str) -> None:
        if not closers or closers.pop() != closer:
            raise _Wrong

    def _pattern(self, closers: list[str]) -> bool:
        """Read the patterns of one branch of a case, or the word that ends it."""
        self._skip_lines()
        if self._text[self._at] == "(":
            self._at += 1
        while True:
            self._blanks()
            if self._at >= len(self._text):
                raise _Unfinished
            char = self._text[self._at]
            if char == ")":
                self._at += 1
                return True
            if char == "|":
                self._at += 1
            elif char in _ENDS_WORD:
                raise _Wrong
            elif self._word() == "esac":
                self._close(closers, "esac")
                return True

    def _redirection(self, match: re.Match[str]) -> None:
        self._at = match.end()
        self._blanks()
        start = self._at
        if not self._word():
            raise _Wrong
        if match[0] in ("<<", "<<-"):
            written = self._text[start : self._at].replace("\\\n", "")
            delimiter = re.sub(r"\\(.)|['\"]", lambda found: found[1] or "", written)
            self._documents.append((delimiter, delimiter == written, match[0] == "<<-"))

    # --- lines ----------------------------------------------------------------------------------

    def _blanks(self) -> None:
        """Past blanks, joined lines and a comment."""
        while self._at < len(self._text):
            if self._text[self._at] in " \t":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
                if self._at >= len(self._text):
                    raise _Unfinished
            elif self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return

    def _skip_lines(self) -> None:
        """To the next thing that is no newline, which there must be."""
        self._blanks()
        while self._at < len(self._text) and self._text[self._at] == "\n":
            self._newline()
            self._blanks()
        if self._at >= len(self._text):
            raise _Unfinished

    def _newline(self) -> None:
        """Past it, and past the here-documents that begin there."""
        self._at += 1
        documents, self._documents = self._documents, []
        for delimiter, is_expanded, strips in documents:
            joined = False
            while True:
                end = self._text.find("\n", self._at)
                if end < 0:
                    raise _Unfinished
                line, self._at = self._text[self._at : end], end + 1
                if not joined and (line.lstrip("\t") if strips else line) == delimiter:
                    break
                slashes = len(line) - len(line.rstrip("\\"))
                joined = is_expanded and slashes % 2 == 1

    # --- words ----------------------------------------------------------------------------------

    def _word(self) -> str:
        """Past one word, which is returned as it is written; empty where none is."""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in _ENDS_WORD:
            self._part(is_quoted=False)
        return self._text[start : self._at]

    def _part(self, *, is_quoted: bool) -> None:
        """Past one character, or one quotation or substitution. is_quoted: between " and "."""
        text, at = self._text, self._at
        char = text[at]
        if char == "\\":
            self._at += 2
            # A newline that is taken away joins with what follows: there must be something.
            if self._at >= len(text):
                raise _Unfinished
        elif char == "'" and not is_quoted:
            self._at = self._after("'", at + 1)
        elif char == '"' and not is_quoted:
            self._at += 1
            self._until('"', is_quoted=True)
        elif char == "`":
            self._at += 1
            while self._peek() != "`":
                self._at += 2 if self._peek() == "\\" else 1
            self._at += 1
        elif text.startswith("$((", at):
            self._at += 3
            self._parentheses()
        elif text.startswith("$(", at):
            self._at += 2
            self.commands(nested=True)
        elif text.startswith("${", at):
            self._at += 2
            self._until("}", is_quoted=is_quoted)
        else:
            self._at += 1

    def _until(self, closer: str, *, is_quoted: bool) -> None:
        while self._peek() != closer:
            if closer == "}" and is_quoted and self._peek() == '"':
                self._at += 1
                self._until('"', is_quoted=True)
            else:
                self._part(is_quoted=is_quoted)
        self._at += 1

    def _parentheses(self) -> None:
        """Past the two that end an arithmetic expansion."""
        depth = 2
        while depth:
            char = self._peek()
            if char in "()":
                depth += 1 if char == "(" else -1
                self._at += 1
            else:
                self._part(is_quoted=False)

    def _peek(self) -> str:
        if self._at >= len(self._text):
            raise _Unfinished
        return self._text[self._at]

    def _after(self, closer: str, start: int) -> int:
        end = self._text.find(closer, start)
        if end < 0:
            raise _Unfinished
        return end + 1
