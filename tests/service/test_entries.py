"""A program whose extra is not installed says in one sentence which one it is."""

import sys
from collections.abc import Callable

import pytest

import sbxctl.entry
import sbxd.worker_cli.entry


@pytest.mark.parametrize(
    ("main", "extra"),
    [(sbxctl.entry.main, "sbxd[cli]"), (sbxd.worker_cli.entry.main, "sbxd[artifacts]")],
    ids=["sbxctl", "sbxd-worker"],
)
def test_a_library_that_is_missing_is_named_with_what_to_install(
    main: Callable[[], None],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [n for n in sys.modules if n.endswith(".__main__")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "click", None)  # as if it were not there
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 245
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"pip install '{extra}'" in said


def test_control_with_the_library_the_program_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sbxctl", "--version"])
    sbxctl.entry.main()
    assert "sbxctl" in capsys.readouterr().out
