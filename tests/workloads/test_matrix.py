"""docs/workloads.md is the rows' table. To write it anew: python -m tests.workloads.test_matrix"""

from pathlib import Path

from tests.workloads.programs import CLIENTS, PROGRAMS
from tests.workloads.rows import ROWS

PAGE = Path(__file__).parents[2] / "docs" / "workloads.md"
HEAD = """# What runs in an environment

Each row is a test (`tests/workloads/`): the program runs in a real environment under the shipped
filter, and again on the same files without one; the outputs are compared. This page is generated
from the rows.

| program | what it does | in an environment |
|---|---|---|
"""
PROGRAMS_HEAD = """
Whole programs, on both mechanisms:

| program | what it does |
|---|---|
"""
CLIENTS_HEAD = """
Clients that find the proxy by the variables alone, on both mechanisms, besides curl, pip, git, npm,
requests and httpx: """
FOOT = """
What does not find it needs a line of its own. Java: `-Dhttps.proxyHost=127.0.0.1
-Dhttps.proxyPort=3128`. node before 22.21: an agent of the library that the program uses. Looking
up a name fails everywhere (EAI_AGAIN): names are resolved by the proxy.

`socket(AF_INET, SOCK_DGRAM)` is refused, so psutil's `net_if_stats`, `hostname -I` and node's
`dgram` fail; listing the interfaces works. A server that a command starts with `&` ends with the
command.

Two habits that help: keep build caches below the workspace (`/tmp` is memory, a quarter of the
limit), and size thread pools from the CPU limit and not from the number of the host's processors.

How the network is reached: `docs/egress.md`.
"""


def page() -> str:
    """The whole page."""
    rows = [
        f"| {row.name} | {row.does} | "
        + (f"refused: {row.refused} |" if row.refused else "works, same output |")
        for row in ROWS
    ]
    programs = [f"| {each.name} | {each.does} |" for each in PROGRAMS]
    clients = ", ".join(f"{each.name} ({each.does})" for each in CLIENTS)
    parts = ("\n".join(rows), "\n".join(programs))
    return f"{HEAD}{parts[0]}\n{PROGRAMS_HEAD}{parts[1]}\n{CLIENTS_HEAD}{clients}.\n{FOOT}"


def test_the_page_of_workloads_is_what_the_rows_say() -> None:
    assert PAGE.read_text("utf-8") == page(), __doc__


def test_a_row_that_does_not_work_has_a_reason_and_a_control() -> None:
    for row in ROWS:
        assert bool(row.refused) == bool(row.outside), row.name
        assert row.outside != row.says, row.name


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
