"""Turns the Markdown that the project's documents are written in into the man macros.

It knows headings, paragraphs, fenced code, lists of one level and tables, which come out as
tagged paragraphs; and in a line code, bold and links. Lines that are comments are left out. Nothing
in a text becomes a request or an escape of its own: `escape` sees every character.
"""

import re

_FENCE = "```"
_COMMENT = re.compile(r"<!-- .* -->")
_ITEM = re.compile(r"(- |[0-9]+\. )(.*)")
_INLINE = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|\[([^\]]+)\]\([^)]*\)")


def convert(markdown: str) -> str:
    """The text of a page below its `.TH`."""
    out: list[str] = []
    waiting: list[str] = []  # lines of one paragraph or list item

    def flush() -> None:
        if waiting:
            out.append(inline(" ".join(waiting)))
            waiting.clear()

    visible = (line for line in markdown.splitlines() if not _COMMENT.fullmatch(line.strip()))
    lines = iter(_tables_as_rows(list(visible)))
    for line in lines:
        if line.startswith(_FENCE):
            flush()
            out += [".PP", ".RS 4", ".nf"]
            for code in lines:
                if code.startswith(_FENCE):
                    break
                out.append(escape(code) or ".sp")
            out += [".fi", ".RE"]
        elif line.startswith("#"):
            flush()
            level, _, title = line.partition(" ")
            chapter = level in ("#", "##")
            out.append(f".SH {inline(title.upper())}" if chapter else f".SS {inline(title)}")
        elif line.startswith("|"):
            flush()
            first, *others = (cell.strip() for cell in line.strip().strip("|").split("|"))
            out += [".TP", inline(first), inline("; ".join(cell for cell in others if cell))]
        elif item := _ITEM.match(line):
            flush()
            out.append('.IP "\\(bu" 2' if item[1] == "- " else f'.IP "{item[1].strip()}" 4')
            waiting.append(item[2])
        elif line.strip():
            if not waiting and out and out[-1] == "":
                out.append(".PP")
            waiting.append(line.strip())
        else:
            flush()
            out.append("")
    flush()
    return "".join(f"{line}\n" for line in out if line)


def _tables_as_rows(lines: list[str]) -> list[str]:
    """Without the heading of each table and the rule below it."""
    rules = {n for n, line in enumerate(lines) if re.fullmatch(r"\|[-:| ]+\|", line)}
    return [line for n, line in enumerate(lines) if n not in rules and n + 1 not in rules]


def escape(text: str) -> str:
    """Text in which nothing is taken for a request or an escape."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def inline(text: str) -> str:
    """One paragraph's text, with its code and bold parts in bold."""
    out, place = [], 0
    for match in _INLINE.finditer(text):
        out.append(_escape_within(text[place : match.start()]))
        code, bold, link = match.groups()
        if link is not None:
            out.append(inline(link))
        else:
            out.append(f"\\fB{_escape_within(code or bold)}\\fR")
        place = match.end()
    out.append(_escape_within(text[place:]))
    joined = "".join(out)
    return f"\\&{joined}" if joined[:1] in (".", "'") else joined


def _escape_within(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")
