"""The text of a construction: the golden file, and the lists that docstrings repeat."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from sbxd.jail import build, construct, steward_process, workload
from sbxd.jail.describe import LISTS, describe
from sbxd.jail.plan import IdBlock, JailPlan

GOLDEN = Path(__file__).parents[1] / "golden" / "jail-plan.txt"
COMMAND_H = Path(__file__).parents[2] / "guest" / "command.h"
STEPS_OF_C = re.compile(r"^    STEP\((\w+)\),$", re.M)
TWICE = frozenset({"die_with_init"})  # a change of credentials clears it
PLAN = JailPlan(
    environment_id="env-1",
    hostname="sandbox",
    ids=IdBlock(1_879_048_192),
    image_fd=10,
    workspace_fd=11,
    box_fd=12,
    init_leaf_fd=13,
    steward_leaf_fd=14,
    init_channel_fd=15,
    steward_channel_fd=16,
    command_program_fd=17,
    seccomp_workload=b"",
    seccomp_init=b"",
    seccomp_steward=b"",
    tmp_bytes=64 << 20,
    shm_bytes=64 << 20,
    rlimits={"NOFILE": (1024, 1024), "CORE": (0, 0)},
    apparmor_label="sbxd-workload",
    landlock_version=7,
)


def test_the_order_of_construction_is_the_golden_one() -> None:
    """After a deliberate change: write the output of describe() to the golden file."""
    assert describe(PLAN) == GOLDEN.read_text().splitlines()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (construct, "LAUNCH_STEPS"),
        (construct, "INTERMEDIATE_STEPS"),
        (build, "INIT_STEPS"),
        (steward_process, "STEWARD_STEPS"),
        (workload, "PARK_STEPS"),
        (workload, "COMMAND_STEPS"),
    ],
)
def test_the_docstring_numbers_the_steps_that_run(module: ModuleType, name: str) -> None:
    match = re.search(rf"^{name}\b.*\n((?: *\d+\. \w+\n)+)", module.__doc__ or "", re.M)
    assert match is not None
    written = re.findall(r"^ *(\d+)\. (\w+)$", match[1], re.M)
    names = [
        step[0] if isinstance(step, tuple) else step.__name__ for step in getattr(module, name)
    ]
    assert written == [(str(n), name) for n, name in enumerate(names, 1)]


def test_the_program_of_a_command_takes_the_steps_that_are_written() -> None:
    assert STEPS_OF_C.findall(COMMAND_H.read_text()) == [name for name, _ in workload.COMMAND_STEPS]


def test_every_step_says_what_it_does_and_is_named_once_in_its_list() -> None:
    for _, steps in LISTS:
        names = [name for name, _ in steps if name not in TWICE]
        assert len(set(names)) == len(names)
        assert all(text.strip() for _, text in steps)


def position(steps: tuple[object, ...], name: str) -> int:
    return [getattr(step, "__name__", "") for step in steps].index(name)


def test_the_filter_is_the_last_thing_before_the_program() -> None:
    assert [name for name, _ in workload.COMMAND_STEPS[-4:]] == [
        "forbid_new_privileges",
        "confine_files",
        "confine_system_calls",
        "become_the_program",
    ]


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("wait_for_maps", "become_root_of_the_namespace"),
        ("make_mounts_private", "put_image_over_root"),
        ("make_proc", "pivot_into_image"),
        ("forbid_new_namespaces", "pivot_into_image"),
        ("join_a_new_keyring", "confine_system_calls"),
        ("confine_system_calls", "drop_capabilities"),
    ],
)
def test_inits_order_keeps_what_depends_on_it(earlier: str, later: str) -> None:
    assert position(build.INIT_STEPS, earlier) < position(build.INIT_STEPS, later)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("become_the_workload", "drop_capabilities"),
        ("become_the_workload", "die_with_init"),
        ("become_the_workload", "enter_the_working_directory"),
        ("enter_the_working_directory", "close_descriptors"),
    ],
)
def test_a_commands_order_keeps_what_depends_on_it(earlier: str, later: str) -> None:
    names = [name for name, _ in workload.COMMAND_STEPS]
    assert names.index(earlier) < len(names) - 1 - names[::-1].index(later)
