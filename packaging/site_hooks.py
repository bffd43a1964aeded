"""For mkdocs: a link to what is in the tree and not in the site is shown as the file's name.

Deliberately absent: a copy of those files. The site is read beside the source.
"""

import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./|examples/)([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """mkdocs calls this with each page."""
    return _OUTSIDE.sub(r"\1 (`\2`)", markdown)
