"""Every attack of this folder is tried on gVisor as well, but for those that this table names.

What is here is not weaker there: either the attempt has another outcome on a guest's kernel (then
the row says which), or the test looks at what only a command on the host's kernel has.
"""

import pytest

from tests.lab.features import OFFERED, LaneKind, parse

OTHERWISE = {
    # A process of the guest is none of the host's.
    "test_the_workload_on_the_host_is_a_stranger_with_no_power": "test_gvisor_lab has its own",
    "test_a_neighbours_pid_on_the_host_gives_no_way_in": "no process of the guest is to be found",
    "test_two_environments_have_other_uids_on_the_host_and_other_file_systems": "test_gvisor_lab",
    "test_a_process_that_waits_uninterruptibly_is_ended_by_the_timeout": (
        "the host shows no state of a guest's process; stopped ones are ended alike"
    ),
    "test_an_environment_whose_next_process_is_killed_runs_its_next_command": "none waits there",
    "test_a_process_that_is_killed_while_it_is_looked_at_is_no_false_alarm": "none waits there",
    "test_a_process_that_is_in_no_slot_or_is_one_too_many_is_seen": "none waits there",
    "test_a_scope_that_is_stopped_under_a_command_is_told_as_lost": "waits for a host's process",
    "test_a_manager_that_is_executed_anew_disturbs_no_command": "waits for a host's process",
    # The guest's kernel is another one.
    "test_nothing_that_the_host_mounts_reaches_the_environment": "its mounts are the guest's own",
    "test_a_crash_leaves_no_core_and_the_limit_cannot_be_changed": "its core limit is 0",
    "test_no_other_process_can_be_seen_and_the_own_children_can": "process 1 shows",
    "test_the_kernel_shows_one_interface_no_route_and_another_namespace": "no /proc/self/ns/net",
    "test_the_hosts_own_names_and_users_are_not_shown": "a boot id of the guest's own is readable",
    "test_the_probe_of_the_domain_finds_what_it_is_to_find": "no Landlock",
    "test_no_call_follows_a_directory_that_becomes_a_link": "no RENAME_EXCHANGE to swap with",
    "test_pipes_sockets_and_links_are_listed_and_never_opened_or_followed": (
        "pipes and sockets live in the guest alone: the volume never has one"
    ),
    "test_names_of_one_file_are_charged_to_the_volume": "a link costs too long to fill the volume",
    "test_a_sparse_file_costs_what_it_holds": "st_blocks is told from the size",
    "test_descriptors_run_out_inside_and_nowhere_else": "its counts are those of the host's kernel",
    "test_a_foreign_call_ends_the_process_that_makes_it": "no i386 calls",
    "[exhaustion]": "the guest's kernel has limits of its own for timers, watches and descriptors",
    "[refused-arguments]": "its controls: no SCHED_BATCH, no personality",
    "[sockets]": "unknown families are EINVAL",
    "[terminals]": "/dev/tty is there, without a terminal (EIO)",
    "[identity]": "no CapAmb in /proc/self/status",
    "[core-limit]": "0, see above",
    "[mounts]": "/dev is one file system, and its mounts show no nosuid",
    "[proc]": "the guest's own cmdline, cgroups and sentry-meminfo",
    "[devices]": "fuse, tun, tty and ptmx of the guest's own",
    "[processes]": "process 1 shows",
}


def is_otherwise(name: str) -> bool:
    function, bracket, parameter = name.partition("[")
    return function in OTHERWISE or bracket + parameter in OTHERWISE


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = OFFERED[LaneKind.GVISOR]
    for item in items:
        if "tests/redteam/" not in item.nodeid:
            continue
        needs = parse(name for mark in item.iter_markers("needs") for name in mark.args)
        if needs and needs <= here and not is_otherwise(item.name):
            item.add_marker(pytest.mark.also("gvisor"))
