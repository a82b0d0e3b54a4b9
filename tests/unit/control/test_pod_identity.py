"""Which pod a process says that it runs in, and how starts of a container are told apart."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvferry import Settings
from kvferry.control.kubernetes import pod_of
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.errors import SettingsError

POD = {"pod_uid": "u-1", "pod_name": "prefill-0", "pod_namespace": "serving"}


def test_a_process_runs_in_no_pod_unless_the_settings_say_so():
    assert pod_of(Settings()) is None
    assert SystemPlatform().identity(Settings()) == SystemPlatform().process


def test_a_pod_is_what_the_downward_api_says():
    pod = SystemPlatform().identity(Settings(**POD)).pod
    assert pod is not None
    assert (pod.uid, pod.name, pod.namespace, pod.container) == ("u-1", "prefill-0", "serving", "")


@pytest.mark.parametrize("missing", POD)
def test_half_a_pod_is_refused(missing: str):
    given = {name: value for name, value in POD.items() if name != missing}
    with pytest.raises(SettingsError, match="belong together"):
        Settings(**given)


def test_all_ranks_of_one_start_of_a_container_have_one_word_and_every_start_its_own(tmp_path: Path):
    (tmp_path / "log").write_text("loading\nhalf a line")
    settings = Settings(**POD, pod_termination_log=tmp_path / "log")
    first, second = pod_of(settings), pod_of(settings)
    assert first is not None
    assert first == second
    assert len(first.container) == 32
    assert first.container in (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().startswith("loading\n"), "what was there stays"
    (tmp_path / "log").write_text("")
    third = pod_of(settings)
    assert third is not None
    assert third.container != first.container


def test_a_message_that_was_written_over_has_no_word_of_ours(tmp_path: Path):
    """The kubelet reads the last 4096 bytes."""
    (tmp_path / "log").write_text("kvferry container 3f2a\n" + "x" * 5000 + "\n")
    pod = pod_of(Settings(**POD, pod_termination_log=tmp_path / "log"))
    assert pod is not None
    assert pod.container != "3f2a"


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path):
    with pytest.raises(SettingsError, match="KVFERRY_POD_TERMINATION_LOG"):
        pod_of(Settings(**POD, pod_termination_log=tmp_path / "missing" / "log"))
    assert stat.S_ISDIR(tmp_path.stat().st_mode)
