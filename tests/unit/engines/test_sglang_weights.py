"""What a rank says of weights that are replaced while it runs, whichever of SGLang's ways they come by."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.sglang import weights as module
from kvferry.engines.sglang.weights import (
    Weights,
    after_attaching,
    after_checking,
    after_flush,
    after_naming,
    after_release,
    around_begin,
    around_end,
    around_update,
)

START = "the checkpoint's digest"
REFUSED = "Weights were updated, but the cache was not flushed because requests are still running or queued."


class Server:
    """As much of a server of SGLang's as the hooks meet: its scheduler, its manager, and what updates its weights."""

    def __init__(self, start: str = START) -> None:
        self.weights = Weights(start)
        self.told: list[str] = []
        self._session: object = None
        self.cached, self.is_idle = 0, True
        self.memory_saver_adapter = SimpleNamespace(enabled=True)
        self.draft_worker: object = None
        self.of_sessions: dict[str, Any] = {}
        cache = SimpleNamespace(evictable_size=lambda: self.cached, protected_size=lambda: 0)
        cache.session_records = lambda: self.of_sessions
        self.scheduler = SimpleNamespace(
            disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=self),
            tree_cache=cache,
            disable_radix_cache=False,
        )

    def renew_weights(self) -> None:
        self.told.append(self.weights.said)

    def is_fully_idle(self, *, ignore_waiting: bool) -> bool:
        assert ignore_waiting, "who waits has computed nothing"
        return self.is_idle

    def flush(self) -> bool:
        if self.is_idle:
            self.cached, self.of_sessions = 0, {}
        after_flush(self.is_idle, self.scheduler, empty_cache=True)
        return self.is_idle

    def update(self, *, success: bool = True, message: str = "", flushes: bool = True, **request: Any) -> None:
        def original(*_: Any) -> Any:
            if success and flushes and not self.flush():
                return SimpleNamespace(success=False, message=REFUSED)
            return SimpleNamespace(success=success, message=message)

        around_update(original, self, SimpleNamespace(**{"weight_version": None, **request}))

    def from_disk(self, path: str, **more: Any) -> None:
        self.update(model_path=path, load_format="auto", **more)

    def pieces(self, *versions: str | None, **more: Any) -> None:
        self.begin()
        for version in versions:
            self.update(weight_version=version, selector="all", **more)
        self.end()

    def begin(self, selector: str = "all") -> None:
        around_begin(lambda *_: SimpleNamespace(success=True), self, SimpleNamespace(selector=selector))
        self._session = object()

    def end(self) -> None:
        self._session = None
        around_end(lambda *_: SimpleNamespace(success=True), self, None)

    def name(self, version: str) -> None:
        after_naming(None, self.scheduler, SimpleNamespace(new_version=version))

    @property
    def said(self) -> str:
        assert not self.told or self.told[-1] == self.weights.said, "peers were not told"
        return self.weights.said


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Options of the server about its model, as SGLang has them."""
    monkeypatch.setattr(
        module,
        "weights_of",
        lambda path, revision, *_: f"the digest of {path}" + (f" at {revision}" if revision else ""),
    )
    given = SimpleNamespace(revision=None)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", SimpleNamespace(get_model=lambda: given))
    return given


@pytest.fixture(autouse=True)
def embedded(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What images were embedded to, by their digests, as SGLang keeps it."""
    kept: dict[int, str] = {}
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.mm_schedule", SimpleNamespace(embedding_cache=kept))
    return kept


def test_a_server_that_is_updated_from_files_says_what_one_says_that_starts_with_them():
    server = Server()
    server.from_disk("/new", weight_version="7")
    assert server.said == "the digest of /new"
    server.name("8")
    assert server.said == "the digest of /new", "files say more than a name does"
    server.from_disk("/old")
    assert server.said == "the digest of /old"


def test_a_name_of_the_hubs_is_read_at_the_revision_that_sglang_reads(given: SimpleNamespace):
    """Which is the one that the server was started with, whatever it is updated to."""
    given.revision = "v1"
    server = Server()
    server.from_disk("org/model")
    assert server.said == "the digest of org/model at v1"


def test_files_that_are_written_while_they_are_read_are_nobodys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As where a trainer writes its next checkpoint over the last one."""
    written = 0
    monkeypatch.setattr(module, "weights_of", lambda *_: f"the digest of version {written}")
    one, other = Server(), Server()

    def update(server: Server, *, overwritten: bool) -> None:
        def original(*_: Any) -> Any:
            nonlocal written
            written += overwritten
            server.flush()
            return SimpleNamespace(success=True, message="")

        around_update(original, server, SimpleNamespace(model_path=str(tmp_path), load_format="auto"))

    for server in (one, other):
        update(server, overwritten=True)
    assert one.said != other.said
    assert "written while" in one.said
    for server in (one, other):
        update(server, overwritten=False)
    assert one.said == other.said == "the digest of version 2"


Way = Callable[[Server], object]

WAYS: dict[str, tuple[Way, ...]] = {
    "files": (lambda server: server.from_disk("/new"),),
    "other files": (lambda server: server.from_disk("/newer"),),
    "pieces with a version": (lambda server: server.pieces(None, "7"),),
    "pieces with another": (lambda server: server.pieces(None, "8"),),
    "pieces without": (lambda server: server.pieces(None, None),),
    "pieces without, twice": (lambda server: server.pieces(None),) * 2,
    "what another process wrote": (lambda server: server.pieces(),) * 3,
    "a checkpoint engine": (lambda server: server.update(weight_version="9"),),
    "pieces that are named later": (lambda server: server.pieces(None), lambda server: server.name("10")),
    "pieces after named ones": (lambda server: server.pieces("7"), lambda server: server.pieces(None)),
}


def updated(way: str) -> Server:
    server = Server()
    for step in WAYS[way]:
        step(server)
    return server


@pytest.mark.parametrize("way", WAYS)
def test_two_servers_agree_where_they_were_updated_alike_and_nowhere_else(way: str):
    said = updated(way).said
    assert said == updated(way).said != Server().said
    assert said not in {updated(other).said for other in WAYS.keys() - {way}}


def test_a_version_may_be_any_text():
    """Before, half of a character that takes two in UTF-16, as JSON can have it, ended the scheduler."""
    one, other, third = Server(), Server(), Server()
    for server, version in ((one, "\ud800"), (other, "\ud800"), (third, "\ud801")):
        server.pieces(version)
    assert one.said == other.said != third.said
    one.said.encode()


def test_a_name_or_a_flush_that_changes_nothing_ends_no_rooms():
    server = Server()
    server.pieces("7")
    told = len(server.told)
    server.name("7")
    server.flush()
    assert len(server.told) == told


def test_what_a_trainer_names_is_the_same_whatever_the_servers_have_started_with():
    one, other = Server(), Server("another checkpoint")
    one.pieces("7")
    other.pieces("7")
    assert one.said == other.said


@pytest.mark.parametrize("opened_for", ["all", "draft"])
def test_what_a_draft_models_weights_are_called_is_no_name_of_the_models(opened_for: str):
    """Before, two servers whose drafts came under one name agreed, whatever weights their models had."""
    one, other, same, broken = Server(), Server(), Server(), Server()
    for server, version in ((one, "6"), (other, "7"), (same, "7"), (broken, "7")):
        server.pieces(version)
    broken.pieces("7", success=False, message="out of memory")
    for server in (one, other, same, broken):
        server.begin(opened_for)
        server.update(weight_version="8", selector="draft")
        server.end()
    assert other.said == same.said
    assert len({one.said, other.said, broken.said}) == 3


def test_halfway_replaced_weights_are_nobody_elses():
    one, other = Server(), Server()
    one.begin()
    other.begin()
    one.update(weight_version="7", selector="all")
    other.update(weight_version="7", selector="all")
    assert one.said != other.said
    one.end()
    other.end()
    assert one.said == other.said


def test_pieces_that_come_after_files_are_theirs_no_more():
    """Before, files were an end of what was half-way, and what came after them was not seen."""
    started, one, other, further = Server("the digest of /new"), Server(), Server(), Server()
    for each in (one, other, further):
        each.begin()
        each.update(weight_version="6", selector="all")
        each.from_disk("/new")
        each.update(weight_version=None, selector="all")
    assert one.said not in (started.said, other.said), "the rest is still to come"
    further.update(weight_version="7", selector="all")
    for each in (one, other, further):
        each.end()
    assert one.said == other.said
    assert further.said == "weight_version 7"
    assert len({started.said, one.said, further.said}) == 3


@pytest.mark.parametrize("how", ["files", "pieces"])
def test_weights_are_unknown_after_an_update_that_failed_until_the_next_one(how: str):
    one, other = Server(), Server()
    for each in (one, other):
        if how == "files":
            each.from_disk("/new", success=False, message="Failed to update weights: .... Rolling back")
        else:
            each.pieces("7", success=False, message="out of memory")
    assert one.said != other.said
    for each in (one, other):
        each.from_disk("/new") if how == "files" else each.pieces("8")
    assert one.said == other.said


@pytest.mark.parametrize("how", ["pieces", "a checkpoint engine"])
def test_an_update_without_a_name_that_failed_counts_as_one(how: str):
    """Before, a server that it failed on agreed, after the next one, with a server that has only the failed one's."""

    def update(server: Server, **more: Any) -> None:
        server.pieces(None, **more) if how == "pieces" else server.update(**more)

    missed, earlier = Server(), Server()
    update(missed, success=False, message="out of memory")
    update(earlier)
    update(missed)
    assert missed.said != earlier.said
    update(earlier)
    assert missed.said == earlier.said


def test_an_update_that_raises_leaves_unknown_weights():
    server = Server()

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        around_update(fails, server, SimpleNamespace(model_path="/new", load_format="auto"))
    assert server.said.startswith("an update has failed")


def test_an_update_that_was_refused_before_it_began_changes_nothing():
    server = Server()
    server.from_disk("/nowhere", success=False, message="Failed to get weights iterator: no such directory.")
    server.update(success=False, message="must run between begin_weight_update() and ...", selector="all")
    assert (server.said, server.told) == (START, [])


def test_an_update_that_a_draft_model_refuses_has_replaced_the_models_weights():
    """SGLang updates the draft model after it, and answers what the last one says."""
    server = Server()
    server.draft_worker = object()
    server.from_disk("/new", success=False, message="Failed to get weights iterator: no such revision.")
    assert server.said.startswith("an update has failed")


def test_another_backends_servers_are_left_alone():
    scheduler = SimpleNamespace(disagg_decode_prealloc_queue=SimpleNamespace(kv_manager=object()))
    after_flush(True, scheduler)
    updater = SimpleNamespace(scheduler=scheduler, _session=None)
    result = SimpleNamespace(success=True)
    for around in (around_update, around_begin, around_end):
        assert around(lambda *_: result, updater, SimpleNamespace()) is result
    after_naming(None, scheduler, SimpleNamespace(new_version="7"))


@pytest.fixture
def features(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Options of the server, as SGLang has them."""
    given = SimpleNamespace(enable_weights_cpu_backup=False)
    context = SimpleNamespace(get_exec=lambda: SimpleNamespace(features=given))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang.srt.constants", SimpleNamespace(GPU_MEMORY_TYPE_WEIGHTS="weights"))
    return given


@pytest.mark.parametrize("tags", [None, [], ["weights"], ["kv_cache", "weights"]])
def test_weights_whose_memory_was_given_away_are_unknown_until_they_are_updated(
    features: SimpleNamespace, tags: list[str] | None
):
    one, other = Server(), Server()
    for each in (one, other):
        after_release(None, each, SimpleNamespace(tags=tags))
    assert "without --enable-weights-cpu-backup" in one.said != other.said
    for each in (one, other):
        each.pieces("7")
    assert one.said == other.said


def test_weights_that_keep_their_memory_or_a_copy_are_as_they_were(features: SimpleNamespace):
    server = Server()
    after_release(None, server, SimpleNamespace(tags=["kv_cache"]))
    server.memory_saver_adapter.enabled = False  # nothing is given away then
    after_release(None, server, SimpleNamespace(tags=["weights"]))
    server.memory_saver_adapter.enabled = features.enable_weights_cpu_backup = True
    after_release(None, server, SimpleNamespace(tags=["weights"]))
    assert (server.said, server.told) == (START, [])


def test_weights_that_were_drawn_by_chance_are_nobodys_until_they_are_updated():
    """As trainers' tests do, to see that an update brings all of them."""
    one, other = Server(), Server()
    for each in (one, other):
        for action, selector in (("snapshot", "all"), ("reset_tensors", "draft"), ("compare", "all")):
            after_checking(None, each, SimpleNamespace(action=action, selector=selector))
        assert (each.said, each.told) == (START, [])
        after_checking(None, each, SimpleNamespace(action="reset_tensors", selector="all"))
    assert one.said != other.said
    for each in (one, other):
        each.begin()
        after_checking(None, each, SimpleNamespace(action="reset_tensors", selector="all"))
        each.update(weight_version="7", selector="all")
        each.end()
    assert one.said == other.said == "weight_version 7"


BROKEN: dict[str, Callable[[Server], None]] = {
    "half of an update": lambda server: server.pieces("7", success=False, message="out of memory"),
    "their memory": lambda server: after_release(None, server, SimpleNamespace(tags=["weights"])),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_name_does_not_mend_weights_that_are_lost(features: SimpleNamespace, how: str):
    """Whoever names the weights of all servers after an update names those of the one where it failed, too."""
    whole, broken = Server(), Server()
    for server in (whole, broken):
        server.pieces("6")
    BROKEN[how](broken)
    for server in (whole, broken):
        server.name("8")
    assert broken.said != whole.said == "weight_version 8"
    for server in (whole, broken):
        server.pieces("9")
    assert broken.said == whole.said


# ---- what was cached before -----------------------------------------------------------------------------------------


UNFLUSHED: dict[str, Callable[[Server], None]] = {
    "files": lambda server: server.from_disk("/new", flushes=False),
    "pieces": lambda server: server.pieces("7", "7", flushes=False),
    "what another process wrote": lambda server: server.pieces(),
    "a checkpoint engine": lambda server: server.update(weight_version="7", flushes=False),
}
OLDER = "the prefix cache is of those before: flush it"


def test_what_is_cached_stays_the_name_of_nobodys_weights_until_it_is_flushed():
    for way, update in UNFLUSHED.items():
        one, other, flushed = Server(), Server(), Server()
        for server in (one, other):
            server.cached = 128
        for server in (one, other, flushed):
            update(server)
        assert OLDER in one.said != other.said, way
        one.flush()
        assert one.said == flushed.said, way
        assert OLDER in other.said, way


def test_an_update_that_flushes_makes_good_one_that_did_not_and_says_nothing_in_between():
    server = Server()
    server.cached = 128
    server.from_disk("/new", flushes=False)
    server.from_disk("/newer")
    assert server.said == "the digest of /newer"
    assert len(server.told) == 2, "the first's weights are nobody's by then"


def test_a_server_that_runs_requests_will_cache_what_they_have():
    server = Server()
    server.is_idle = False
    server.from_disk("/new", flushes=False)
    server.flush()
    assert OLDER in server.said, "the flush was refused"
    server.is_idle = True
    server.flush()
    assert server.said == "the digest of /new"


def test_an_update_whose_flush_was_refused_is_good_once_there_was_one():
    for update in (lambda server: server.from_disk("/new"), lambda server: server.pieces("7")):
        server, expected = Server(), Server()
        update(expected)
        server.is_idle = False
        update(server)
        assert OLDER in server.said
        server.is_idle = True
        server.flush()
        assert server.said == expected.said


def test_without_a_prefix_cache_nothing_is_found_again():
    server = Server()
    server.scheduler.disable_radix_cache, server.is_idle = True, False
    server.from_disk("/new", flushes=False)
    assert server.said == "the digest of /new"


@pytest.mark.parametrize("disable_radix_cache", [True, False])
def test_what_a_session_holds_is_found_again_whatever_the_prefix_cache_has(disable_radix_cache: bool):
    """A streaming session's next request goes on from it, also without a prefix cache, or where that has no page."""
    server, without = Server(), Server()
    for each in (server, without):
        each.scheduler.disable_radix_cache = disable_radix_cache
    server.of_sessions = {"a": SimpleNamespace(holds_kv=True)}
    without.of_sessions = {"a": SimpleNamespace(holds_kv=False)}
    for each in (server, without):
        each.from_disk("/new", flushes=False)
    assert OLDER in server.said
    assert without.said == "the digest of /new"
    server.flush()
    assert server.said == without.said


@pytest.mark.parametrize("store", ["storage", "LMCache", "linker", "decode offload"])
def test_what_is_stored_below_the_prefix_cache_is_of_those_before_though_it_is_flushed(store: str):
    """SGLang's flush leaves it, and would send what it finds there under the new weights' name."""
    one, other = Server(), Server()
    for each in (one, other):
        if store == "storage":
            each.scheduler.tree_cache.enable_storage = True
        elif store == "linker":
            each.scheduler.tree_cache.linker = object()
        elif store == "decode offload":
            each.scheduler.disable_radix_cache = True
            each.scheduler.decode_offload_manager = object()
        else:
            each.scheduler.enable_lmcache = True
        each.update(weight_version="7")
        each.flush()
    assert one.said != other.said
    assert "start the server again" in one.said


@pytest.mark.parametrize("flushes", [True, False])
@pytest.mark.parametrize(
    "update",
    [
        lambda server, **more: server.from_disk("/new", **more),
        lambda server, **more: server.update(weight_version="7", **more),
        lambda server, **more: server.pieces("7", **more),
    ],
    ids=["from files", "at once", "piece by piece"],
)
def test_images_are_embedded_anew(embedded: dict[int, str], update: Callable[..., None], flushes: bool):
    """No flush of SGLang's drops what it has of them, which would go into caches of the new weights' name."""
    embedded[1] = "by the weights before"
    update(Server(), flushes=flushes)
    assert not embedded


def test_images_that_were_embedded_half_way_are_embedded_anew(embedded: dict[int, str]):
    server = Server()
    server.begin()
    server.update(weight_version="7", selector="all")
    embedded[1] = "by some of the weights before"
    server.end()
    assert not embedded


def test_a_store_that_is_attached_after_an_update_may_have_what_those_before_have_computed():
    one, other, unchanged = Server(), Server(), Server()
    for each in (one, other):
        each.from_disk("/new")
        after_attaching(SimpleNamespace(success=False), each.scheduler, None)
        assert each.said == "the digest of /new"
    for each in (one, other, unchanged):
        after_attaching(SimpleNamespace(success=True), each.scheduler, None)
    assert "start the server again" in one.said != other.said
    assert (unchanged.said, unchanged.told) == (START, [])


def test_what_host_memory_alone_caches_is_of_those_before_until_it_is_flushed():
    """SGLang's sizes are of what is on the device."""
    one, other = Server(), Server()
    for each in (one, other):
        each.scheduler.tree_cache.cache_controller = object()
        each.update(weight_version="6")
        each.update(weight_version="7", flushes=False)
    assert one.said != other.said
    assert "flush it" in one.said
    for each in (one, other):
        each.flush()
    assert one.said == other.said
