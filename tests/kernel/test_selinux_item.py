"""What doctor says of SELinux, on kernels that have it and on those that have not.

No lane has SELinux: the kernel's one file is played here.
"""

import pytest

from sbxd.launcher.kernel import hostpaths, probe
from sbxd.launcher.requests import ProbeItem


def item(monkeypatch: pytest.MonkeyPatch, selinux: str, apparmor: str) -> ProbeItem:
    files = {"selinux": selinux, "apparmor": apparmor}
    monkeypatch.setattr(hostpaths, "flag_file", lambda name: files[name])
    monkeypatch.setattr(hostpaths, "apparmor_profiles", lambda: "sbxd-workload (enforce)\n")
    return probe._selinux("selinux")


@pytest.mark.parametrize(
    ("selinux", "apparmor", "state", "words"),
    [
        ("1", "", "ok", "enforcing"),
        ("0", "", "degraded", "permissive"),
        ("", "Y", "ok", "off; AppArmor is on"),
        ("", "", "degraded", "off, and so is AppArmor"),
    ],
)
def test_its_mode_is_told_and_what_to_do_where_nothing_judges_files(
    monkeypatch: pytest.MonkeyPatch, selinux: str, apparmor: str, state: str, words: str
) -> None:
    found = item(monkeypatch, selinux, apparmor)
    assert (found.state, words in found.detail) == (state, True)
    assert bool(found.fix) == (state != "ok")


@pytest.mark.needs("daemon", "lane-container")
def test_a_host_with_neither_is_told_so() -> None:
    (found,) = (each for each in probe.run() if each.name == "selinux")
    assert found.state == "degraded"
