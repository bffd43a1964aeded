"""Construction as a whole: what a failed step leaves, and what the launcher may rely on."""

import errno
import resource
from pathlib import Path

import pytest

from sbxd.jail.frames import Park, RunFailed
from tests.kernel.jail_environment import LaunchFailed, environment, filter_refusing

pytestmark = pytest.mark.needs("root", "cgroup2")


def failure(**changes: object) -> tuple[str, int]:
    """The step and errno of a launch that fails; no child may be left."""
    with pytest.raises(LaunchFailed) as caught, environment(**changes):
        raise AssertionError("the launch succeeded")
    report = caught.value.report
    assert report["children"] is False, "a failed launch leaves no process, not even a zombie"
    return report["step"], report["errno"]


@pytest.mark.parametrize("name", ["proc", "dev", "tmp", "workspace"])
def test_an_image_without_a_mount_point_is_refused_by_the_step_that_needs_it(name: str) -> None:
    assert failure(without=name) == (f"init.mount_{name}", errno.ENOENT)


@pytest.mark.case("ESC-05")
@pytest.mark.parametrize("name", ["proc", "dev", "tmp", "workspace"])
def test_a_mount_point_that_is_a_link_is_refused(name: str) -> None:
    assert failure(without=f"link:{name}") == (f"init.mount_{name}", errno.ENOTDIR)


@pytest.mark.parametrize("program", ["workload", "init", "steward"])
def test_a_plan_without_a_filter_is_refused(program: str) -> None:
    assert failure(**{f"seccomp_{program}": ""}) == ("check_the_plan", errno.EINVAL)


@pytest.mark.parametrize("program", ["init", "steward"])
def test_a_filter_that_the_kernel_refuses_stops_construction(program: str) -> None:
    broken = bytes(8).hex()
    step, number = failure(**{f"seccomp_{program}": broken})
    assert (step, number) == (f"{program}.confine_system_calls", errno.EINVAL)


def test_a_workload_filter_that_the_kernel_refuses_stops_the_command() -> None:
    with environment(seccomp_workload=bytes(8).hex()) as built:
        assert built.run("true").failure == ("confine_system_calls", errno.EINVAL)


@pytest.mark.parametrize("name", ["tmp_bytes", "shm_bytes"])
def test_a_tmpfs_without_a_size_is_refused(name: str) -> None:
    assert failure(**{name: 0}) == ("check_the_plan", errno.EINVAL)


def test_a_port_that_cannot_be_bound_stops_construction() -> None:
    """And the control: one that can be does not."""
    assert failure(proxy_port=-1) == ("receive_the_proxy_socket", errno.EPIPE)
    with environment(proxy_port=3128) as built:
        assert built.run("true").status == 0


def test_an_init_that_dies_while_it_is_built_is_an_error_at_once() -> None:
    step, number = failure(maps="kill")
    assert step in ("release_both", "await_init")
    assert number == errno.EPIPE


def test_an_init_that_stands_still_is_an_error_after_the_deadline() -> None:
    assert failure(maps="stop") == ("await_init", errno.ETIMEDOUT)


def test_a_helper_that_is_killed_leaves_neither_init_nor_steward() -> None:
    with pytest.raises(LaunchFailed) as caught, environment(maps="vanish"):
        raise AssertionError("the launch succeeded")
    report = caught.value.report
    assert report["errno"] == 9, "the helper was killed"
    assert report["others"] == [256, 256], "both ended by themselves, at the end of their gates"


def test_a_map_that_cannot_be_written_stops_construction() -> None:
    assert failure(maps="refuse") == ("write_the_maps", errno.EPERM)


def test_an_unknown_limit_stops_the_command_and_a_known_one_does_not() -> None:
    with environment(rlimits={"CORE": [0, 0], "WISHES": [3, 3]}) as built:
        built.number = 1
        leaf = built.leaf()
        built.send(Park(1), leaf)
        assert built.receive() == RunFailed(1, errno.EINVAL, "set_limits")
    with environment(rlimits={"RLIMIT_CORE": [0, 0]}) as built:
        assert built.run("true").status == 0


def test_a_limit_above_the_callers_own_becomes_the_callers_own() -> None:
    source = """
        import json, resource
        print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE),
                          resource.getrlimit(resource.RLIMIT_STACK)]))
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = {"NOFILE": [64, hard + 1], "STACK": [1 << 20, -1]}
    with environment(rlimits=limits) as built:
        nofile, stack = built.script(source).json()
    assert nofile == [64, hard]
    assert stack == [1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]]


def test_the_box_holds_no_process_when_launch_returns() -> None:
    with environment() as built:
        assert built.facts["populated"] == ""
        controllers = built.read_box("cgroup.controllers").split()
        for name in controllers:
            assert built.write_box("cgroup.subtree_control", f"+{name}") == str(len(name) + 1)
        assert built.run("true").status == 0


@pytest.mark.needs("nsdelegate")
def test_construction_and_commands_work_where_cgroup_namespaces_are_boundaries() -> None:
    assert "nsdelegate" in Path("/proc/self/mountinfo").read_text()
    with environment() as built:
        assert set(built.read_box("cgroup.controllers").split()) >= {"memory", "pids"}
        assert built.write_box("cgroup.subtree_control", "+memory +pids") == "13"
        assert built.run("cat", "/proc/self/cgroup").stdout.startswith(b"0::/exec-1")


@pytest.mark.needs("nsdelegate")
def test_a_cgroup_namespace_rooted_at_inits_leaf_cannot_make_commands_there() -> None:
    with environment(cgroup_namespace="init") as built:
        leaf = built.leaf()
        built.send(Park(1), leaf)
        assert built.receive() == RunFailed(1, errno.ENOENT, "park")


def test_two_environments_do_not_disturb_each_other() -> None:
    with environment() as one, environment(base=1_900_000_300) as two:
        assert one.run("sh", "-c", "echo 1 > mark; ls").stdout == b"mark\n"
        assert two.run("sh", "-c", "ls").stdout == b""


def test_the_filters_are_the_ones_of_the_plan() -> None:
    number = 1022
    source = f"""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall({number})
        print(ctypes.get_errno())
    """
    with environment(seccomp_init=filter_refusing(number, errno.EXDEV).hex()) as built:
        assert built.script(source).stdout == b"%d\n" % errno.EXDEV, "a command inherits init's"
    with environment() as built:
        assert built.script(source).stdout == b"%d\n" % errno.ENOSYS
