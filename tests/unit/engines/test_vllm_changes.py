"""What is asked of vLLM's core is watched, and a change ends what is from before."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.vllm.adapters import Adapters
from kvferry.engines.vllm.changes import Changes, watch
from kvferry.engines.vllm.identity import Conditions
from kvferry.engines.vllm.kept import drop_encoded
from kvferry.engines.vllm.weights import parameter_sums
from kvferry.errors import SettingsError, UsageError


class Side:
    """What sends and fetches."""

    def __init__(self) -> None:
        self.being_sent: list[Any] = []
        self.outdated: list[tuple[list[str], str]] = []

    def outdate(self, requests: Any, reason: str, arrived: Any = ()) -> None:
        self.arrived = set(arrived)
        self.outdated.append(([each.request_id for each in requests], reason))


class EncoderCacheManager:
    """As vLLM's: what no request refers to is dropped where there is no other room, for five images in all."""

    def __init__(self) -> None:
        self.cached: dict[str, set[str]] = {"image": set(), "a:image": set()}
        self.freed: list[str] = []

    @property
    def num_freeable_slots(self) -> int:
        return 5 - sum(map(bool, self.cached.values()))

    def can_allocate(
        self, request: Any, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        wanted = request.get_num_encoder_embeds(input_id) + num_embeds_to_schedule
        if not wanted <= min(encoder_compute_budget, self.num_freeable_slots):
            return False
        while wanted > 5 - len(self.cached):
            self.freed.append(next(key for key, by in self.cached.items() if not by))
            del self.cached[self.freed[-1]]
        return True


def worker(encoder_cache: Any) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(encoder_cache=encoder_cache))


class Executor:
    """Workers that have these weights."""

    def __init__(self) -> None:
        self.sums: dict[str, int] | Exception = {"w": 1}
        self.asked: list[Any] = []
        self.sleeping_tags: set[str] = set()
        first, second = {"image": "old", "a:image": "old"}, {"image": "old", "a:image": "old"}
        self.workers = [worker(first), worker(SimpleNamespace(encoder_outputs=second))]
        self.encoded = [first, second]

    def collective_rpc(self, method: Any, *_: Any, **kwargs: Any) -> Any:
        self.asked.append(method)
        if not callable(method):
            return [None]
        if method is drop_encoded:
            return [method(worker, *kwargs["args"]) for worker in self.workers]
        if isinstance(self.sums, Exception):
            raise self.sums
        return [dict(self.sums)]


class Offloading:
    """A connector beside ours: as vLLM's, it is not reset twice between two steps."""

    def __init__(self) -> None:
        self.kept, self.answer, self.may_be_reset = "old", True, True
        self.connector_scheduler = SimpleNamespace(manager=SimpleNamespace())

    def reset_cache(self) -> Any:
        assert self.may_be_reset
        self.may_be_reset = False
        self.kept = "" if self.answer else self.kept
        return self.answer


def core_class() -> Any:
    """As much of vLLM's as is watched."""

    class OfThisCore(Executor):
        def init_kv_output_aggregator(self, connector: Any) -> None:
            self.aggregates_of = connector

    class Core:
        def __init__(self, connector: Any, sums: dict[str, int] | Exception) -> None:
            self.model_executor = OfThisCore()
            self.loras: list[Any] = []
            self.done: list[str] = []
            self.scheduler = SimpleNamespace(
                get_kv_connector=lambda: connector,
                finished_recving_kv_req_ids={"waiting", "of another adapter"},
                encoder_cache_manager=EncoderCacheManager(),
                pause_state=0,
                ec_connector=None,
            )
            self.model_executor.sums = sums
            self.model_executor.init_kv_output_aggregator(connector)

        def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
            for name, value in (kwargs or {}).items():
                setattr(self.model_executor, name, value)
            if method == "fails" or "fails" in (kwargs or {}):
                raise RuntimeError("the worker failed")
            return self.model_executor.collective_rpc(method, timeout, args, kwargs)

        def set_weight_version(self, weight_version: str) -> None:
            self.version = weight_version

        def add_request(self, request: Any, request_wave: int = 0) -> None:
            self.done.append(request.request_id)

        def list_loras(self) -> set[int]:
            return {each.lora_int_id for each in self.loras}

        def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
            self.done.append(f"reset {reset_running_requests} {reset_connector}")
            return True

        def add_lora(self, lora_request: Any) -> bool:
            self.loras.append(lora_request)
            return True

        def sleep(self, level: int = 1, mode: str = "abort") -> None:
            self.done.append(f"sleep {level}")
            self.model_executor.sleeping_tags |= {"weights", "kv_cache"} if level else set()

        def wake_up(self, tags: Any = None) -> None:
            self.done.append("awake")
            self.model_executor.sleeping_tags.clear()

        def release_kv_cache_memory(self) -> None:
            self.done.append("released")

    for _ in range(2):
        watch(Core, OfThisCore)
    return Core


class Request:
    def __init__(self, name: str, lora: str = "") -> None:
        self.request_id, self.cache_salt, self.block_hashes = name, "tenant", [f"hash of {name}"]
        self.lora_request = SimpleNamespace(lora_name=lora, lora_int_id=1) if lora else None
        self.num_output_tokens = 0

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"hash with {self.cache_salt}")


@pytest.fixture
def given() -> Any:
    """A core with a connector of ours beside another, and two requests of which one has blocks."""
    return started({"w": 1})


def started(sums: dict[str, int] | Exception) -> Any:
    """Makes it, with workers whose weights are these."""
    side, conditions = Side(), Conditions()
    evicted: list[set[int]] = []
    changes = Changes(side, conditions)  # type: ignore[arg-type]
    pool = SimpleNamespace(num_gpu_blocks=3, evict_blocks=evicted.append)
    block: Any = object()
    changes.bind(lambda name: [[block] if name == "running" else []], pool)
    beside = Offloading()
    core = core_class()(SimpleNamespace(_connectors=[beside, SimpleNamespace(changes=changes)]), sums)
    requests = {name: Request(name, lora) for name, lora in (("running", "a"), ("waiting", ""))}
    for request in requests.values():
        changes.came_in(request)
    return SimpleNamespace(
        side=side,
        core=core,
        evicted=evicted,
        requests=requests,
        changes=changes,
        weights=conditions.weights,
        beside=beside,
    )


def test_what_changes_no_weights_ends_nothing(given: Any):
    assert given.core.collective_rpc("get_statistics") == [None]
    assert given.side.outdated == given.evicted == []
    assert given.weights.text == ""


def test_weights_that_have_changed_whatever_was_asked_end_all_from_before(given: Any):
    given.side.being_sent = [Request("sent"), given.requests["running"]]
    given.core.collective_rpc("a_trainers_own", None, (), {"sums": {"w": 2}})
    ((names, reason),) = given.side.outdated
    assert sorted(names) == ["running", "sent", "waiting"]
    assert "weights were replaced" in reason
    assert given.evicted == [{0, 1, 2}]
    assert given.weights.text.startswith("content ")


def test_what_has_come_and_not_been_used_is_not_used(given: Any):
    """vLLM would take it up in its next step."""
    given.core.collective_rpc("reload_weights", kwargs={"sums": {"w": 2}})
    assert given.side.arrived == {"waiting"}
    assert given.core.scheduler.finished_recving_kv_req_ids == {"of another adapter"}


def test_what_a_running_request_computes_from_old_and_new_is_found_by_nobody(given: Any):
    given.core.collective_rpc("reload_weights", kwargs={"sums": {"w": 2}})
    running, waiting = given.requests["running"], given.requests["waiting"]
    assert waiting.block_hashes == ["hash of waiting"]
    (digest,) = running.block_hashes
    assert digest.startswith("hash with tenant ")
    assert digest != "hash with tenant "


def replace(given: Any, number: int) -> None:
    given.core.collective_rpc("reload_weights", kwargs={"sums": {"w": number}})


def step(given: Any) -> None:
    given.changes.scheduled()
    given.beside.kept, given.beside.may_be_reset = "computed", True


def test_what_a_connector_beside_ours_keeps_is_dropped(given: Any):
    """It would find it by its tokens, and have it sent as new."""
    assert given.beside.kept == "old"
    for number in (2, 3):
        replace(given, number)
        assert given.beside.kept == ""
    assert given.beside.reset_cache() is True, "as vLLM asks when it resets caches, before the next step"
    assert given.weights.text.startswith("content ")
    step(given)
    replace(given, 4)
    assert given.beside.kept == ""


@pytest.mark.parametrize("answer", [None, False])
def test_nothing_is_exchanged_as_long_as_it_may_keep_something(
    given: Any, answer: bool | None, caplog: pytest.LogCaptureFixture
):
    given.beside.answer = answer
    replace(given, 2)
    assert "Offloading may still have what was computed before" in caplog.text
    given.core.set_weight_version("step-1")
    assert given.weights.text.startswith("unknown "), "a name says nothing of what it keeps"
    given.beside.answer, given.beside.may_be_reset = True, True
    given.changes.came_in(Request("next"))
    assert given.beside.kept == ""
    assert given.weights.text == "named step-1"


def test_what_cannot_be_dropped_in_the_middle_of_a_step_is_dropped_after_it(given: Any):
    given.beside.may_be_reset = False
    replace(given, 2)
    assert given.weights.text.startswith("unknown ")
    step(given)
    given.changes.between_steps()
    assert given.beside.kept == ""
    assert given.weights.text.startswith("content ")


def test_two_of_ours_beside_each_other_are_refused_at_the_start(given: Any):
    """One of them would be told of no change."""
    sides = [SimpleNamespace(changes=Changes(Side(), Conditions())) for _ in range(2)]  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="kv_both"):
        core_class()(SimpleNamespace(_connectors=[*sides, given.beside]), {"w": 1})


def test_what_it_has_in_files_vllm_leaves_there(given: Any):
    given.beside.connector_scheduler.manager.secondary_tiers = ["files"]
    replace(given, 2)
    assert given.weights.text.startswith("unknown ")


def test_what_it_stores_anew_after_a_reset_of_a_running_request_is_found_by_nobody(given: Any):
    """vLLM's stores all of it once more, and hashes no block twice."""
    keys, running = ["hash of running"], given.requests["running"]
    state = SimpleNamespace(group_states=(SimpleNamespace(offload_keys=keys),))
    given.beside.connector_scheduler._req_status = {"running": state}
    replace(given, 2)
    keys += running.block_hashes[len(keys) :]
    assert keys == running.block_hashes != ["hash of running"]


def test_what_it_still_reads_of_blocks_is_read_before_they_are_fetched_into(given: Any):
    given.beside.connector_scheduler._current_batch_allocated_block_ids = {7}
    table = [SimpleNamespace(block_id=number, is_null=not number) for number in range(3)]
    given.changes.loads_into([table, []])
    assert given.beside.connector_scheduler._current_batch_allocated_block_ids == {1, 2, 7}


def test_what_old_weights_made_of_an_image_is_dropped(given: Any):
    """Keys and values are computed from it, and would be sent as those of the new ones."""
    replace(given, 2)
    assert given.core.scheduler.encoder_cache_manager.cached == {}
    assert given.core.model_executor.encoded == [{}, {}]
    assert given.weights.text.startswith("content ")


def test_nothing_is_exchanged_as_long_as_a_request_needs_what_old_weights_made_of_an_image(
    given: Any, caplog: pytest.LogCaptureFixture
):
    """Another one with this image would have it too."""
    cached = given.core.scheduler.encoder_cache_manager.cached
    cached["image"].add("running")
    replace(given, 2)
    assert cached == {"image": {"running"}}
    assert "vLLM's encoder cache may still have what was computed before" in caplog.text
    assert given.weights.text.startswith("unknown ")
    cached["image"].clear()
    cached["another image"] = {"next"}
    given.changes.between_steps()
    assert cached == {"another image": {"next"}}
    assert given.core.model_executor.encoded == [{}, {}]
    assert given.weights.text.startswith("content ")


def test_what_was_computed_while_something_was_there_from_before_is_found_by_nobody_once_it_is_dropped(given: Any):
    """It may have been computed from that, and would be sent as the new weights'."""
    cached = given.core.scheduler.encoder_cache_manager.cached
    cached["image"].add("running")
    replace(given, 2)
    (digest,) = given.requests["running"].block_hashes
    given.evicted.clear()
    cached["image"].clear()
    given.changes.between_steps()
    assert given.weights.text.startswith("content ")
    assert given.evicted == [{0, 1, 2}]
    assert given.requests["running"].block_hashes != [digest]
    given.changes.between_steps()
    assert len(given.evicted) == 1


def test_what_workers_could_not_be_told_to_drop_is_not_dropped(given: Any):
    workers, given.core.model_executor.workers = given.core.model_executor.workers, [None]
    replace(given, 2)
    assert given.weights.text.startswith("unknown ")
    given.core.model_executor.workers = [*workers, worker(None)]
    given.changes.between_steps()
    assert given.core.model_executor.encoded == [{}, {}]
    assert given.weights.text.startswith("content ")


def test_what_an_adapter_made_of_an_image_is_dropped_with_it(given: Any):
    given.core.add_request(Request("next"))
    cached = given.core.scheduler.encoder_cache_manager.cached
    cached["image"].add("of no adapter")
    given.changes.adapters.replaced("a")
    assert given.core.model_executor.encoded == [{"image": "old"}, {"image": "old"}]
    assert given.weights.text == ""


def test_what_an_encoder_elsewhere_made_of_an_image_vllm_leaves_there(given: Any):
    given.core.scheduler.ec_connector = object()
    replace(given, 2)
    assert given.weights.text.startswith("unknown ")


def test_what_has_come_is_not_used_where_an_adapter_changes_with_a_request_before_anything_was_asked(given: Any):
    waiting = given.requests["waiting"]
    waiting.lora_request = SimpleNamespace(lora_name="a", lora_int_id=1)
    given.core.add_request(Request("next"))
    given.changes.adapters.replaced("a")
    assert given.side.arrived == {"waiting"}
    assert given.core.scheduler.finished_recving_kv_req_ids == {"of another adapter"}


def test_weights_that_a_call_changed_before_it_failed_have_changed(given: Any):
    with pytest.raises(RuntimeError, match="the worker failed"):
        given.core.collective_rpc("fails", kwargs={"sums": {"w": 2}})
    assert len(given.evicted) == 1


def test_in_the_middle_of_an_update_they_are_like_no_others(given: Any):
    given.core.collective_rpc("start_weight_update", kwargs={"sums": NotImplementedError("on meta")})
    asked = len(given.core.model_executor.asked)
    texts = {given.weights.text}
    given.core.collective_rpc("update_weights")
    texts.add(given.weights.text)
    assert len(given.core.model_executor.asked) == asked + 1, "nobody looks at what is half there"
    given.core.collective_rpc("finish_weight_update", kwargs={"sums": {"w": 2}})
    given.core.set_weight_version("step-1")
    assert given.weights.text == "named step-1"
    assert given.core.version == "step-1"
    assert len(texts) == 2
    assert len(given.evicted) == 3


def test_nobody_looks_at_or_names_what_is_half_there(given: Any):
    """Some of it may still be on its way, and what is named so was computed by what nobody else has."""
    given.core.collective_rpc("start_weight_update")
    given.core.collective_rpc("update_weights", kwargs={"sums": {"w": 2}})
    for ask in (partial(given.core.collective_rpc, "get_statistics"), given.core.reset_prefix_cache):
        ask()
        assert given.weights.text.startswith("content unknown ")
        given.core.set_weight_version("step-1")
        assert given.weights.text.startswith("content unknown ")
    given.core.collective_rpc("finish_weight_update", kwargs={"sums": {"w": 3}})
    given.core.set_weight_version("step-1")
    assert given.weights.text == "named step-1"


def test_an_update_that_fails_is_over(given: Any):
    given.core.collective_rpc("start_weight_update")
    with pytest.raises(RuntimeError, match="the worker failed"):
        given.core.collective_rpc("update_weights", kwargs={"sums": {"w": 2}, "fails": True})
    assert given.weights.text.startswith("content unknown ")
    given.core.set_weight_version("step-1")
    assert given.weights.text == "named step-1"


def test_weights_that_cannot_be_looked_at_are_like_no_others_until_they_are_named(
    given: Any, caplog: pytest.LogCaptureFixture
):
    given.core.collective_rpc("reload_weights", kwargs={"sums": ValueError("a type that nobody knows")})
    assert given.weights.text.startswith("content unknown ")
    assert "until they are named" in caplog.text
    given.core.set_weight_version("step-1")
    assert given.weights.text == "named step-1"


def test_weights_that_a_trainer_changed_unasked_are_found_when_they_are_named(given: Any):
    """It may load into the model in the worker's own process: nobody is asked before, and the start counts."""
    given.core.model_executor.sums = {"w": 2}
    given.core.set_weight_version("step-1")
    assert given.evicted == [{0, 1, 2}]
    ((names, reason),) = given.side.outdated
    assert sorted(names) == ["running", "waiting"]
    assert "weights were replaced" in reason
    assert given.weights.text == "named step-1"


def test_weights_that_a_trainer_changed_unasked_are_found_when_caches_are_reset(given: Any):
    """As trainers do that share a process with the engine, and call nothing else of it."""
    assert given.core.reset_prefix_cache()
    assert given.side.outdated == given.evicted == []
    given.core.model_executor.sums = {"w": 2}
    assert given.core.reset_prefix_cache(True, reset_connector=True)
    assert given.core.done == ["reset False False", "reset True True"]
    assert given.evicted == [{0, 1, 2}]
    assert given.weights.text.startswith("content ")


class Answers:
    """Those of two workers, as vLLM's executor of several processes takes them: up to the first that is an error."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._answers: list[list[Any]] = [[], []]

    def __call__(self, method: Any, *_: Any, args: Any = (), **__: Any) -> list[Any]:
        for answers in self._answers:
            try:
                answers.append(method(self._worker, *args) if callable(method) else method)
            except Exception as error:
                answers.append(error)
        found = []
        for answers in self._answers:
            found.append(answers.pop(0))
            if isinstance(found[-1], Exception):
                raise RuntimeError("Worker failed") from found[-1]
        return found


def test_no_question_of_ours_fails_in_a_worker(given: Any):
    """vLLM would leave what the others answer where it is, and take it for the answers to its next question."""
    given.core.model_executor.collective_rpc = Answers(SimpleNamespace())
    for method in ("reload_weights", "get_statistics"):
        assert given.core.collective_rpc(method) == [method] * 2
        assert "unknown " in given.weights.text


@pytest.mark.parametrize("name", [None, "step-1"])
def test_weights_that_cannot_be_looked_at_are_what_they_were_where_caches_are_reset(name: str | None):
    """Nobody says that they have changed, and trainers reset caches after they have named them, too."""
    given = started(ValueError("a type that nobody knows"))
    if name:
        given.core.set_weight_version(name)
    given.evicted.clear()
    given.core.reset_prefix_cache()
    assert given.weights.text == (f"named {name}" if name else "")
    assert given.evicted == []


def test_a_name_alone_ends_nothing(given: Any):
    given.core.set_weight_version("step-1")
    assert given.side.outdated == given.evicted == []
    assert given.weights.text == "named step-1"


def test_weights_of_the_start_that_cannot_be_read_are_those_of_the_start(caplog: pytest.LogCaptureFixture):
    given = started(ValueError("a type that nobody knows"))
    assert "cannot be read: ValueError: a type that nobody knows" in caplog.text
    assert given.weights.text == ""


def test_an_adapter_that_is_loaded_in_place_ends_what_it_has_computed(given: Any, tmp_path: Any):
    def load(content: bytes) -> None:
        (tmp_path / "adapter_model.bin").write_bytes(content)
        (tmp_path / "adapter_config.json").write_text("{}")
        lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path), load_inplace=True)
        assert given.core.add_lora(lora)

    load(b"1")
    load(b"1")
    assert given.side.outdated == []
    load(b"22")
    ((names, reason),) = given.side.outdated
    assert names == ["running"]
    assert "LoRA adapter 'a' was replaced" in reason
    assert len(given.core.loras) == 3
    assert len(given.evicted) == 1


@pytest.mark.parametrize("is_used", [True, False])
def test_an_adapter_that_vllm_has_dropped_with_weights_is_what_its_next_request_loads(
    given: Any, is_used: bool, tmp_path: Any
):
    """Unless one that goes on has loaded it already, when nobody looked."""
    (tmp_path / "adapter_model.bin").write_bytes(b"1")
    (tmp_path / "adapter_config.json").write_text("{}")
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path), load_inplace=False)
    first, second = Request("first"), Request("second")
    first.lora_request = second.lora_request = lora
    given.core.add_lora(lora)
    given.changes.ended(given.requests["running"])
    if is_used:
        given.changes.came_in(first)
    given.core.collective_rpc("get_statistics")
    (tmp_path / "adapter_model.bin").write_bytes(b"22")
    adapters = given.changes.adapters
    assert adapters.identity(first).startswith("unknown "), "vLLM has it"
    given.core.loras.clear()
    given.core.collective_rpc("reload_weights")
    is_known = adapters.identity(second) == Adapters().identity(second)
    assert is_known != is_used
    assert adapters.are_proved == is_used, "a step loads it"


def test_an_adapter_whose_files_were_written_while_a_step_loaded_it_ends_what_that_has_computed(
    given: Any, tmp_path: Any
):
    running = given.requests["running"]
    (tmp_path / "adapter_config.json").write_text("{}")
    running.lora_request = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path), load_inplace=False)
    given.changes.adapters.identity(running)
    given.changes.scheduled()
    (tmp_path / "adapter_config.json").write_text("{ }")
    given.changes.scheduled()
    assert given.evicted == [], "nothing is computed"
    running.num_output_tokens = 1
    given.changes.scheduled()
    ((names, reason),) = given.side.outdated
    assert names == ["running"]
    assert "LoRA adapter 'a' was replaced" in reason
    given.changes.ended(running)
    assert len(given.evicted) == 1


def test_what_one_request_has_computed_proves_nothing_of_what_the_next_one_loads_in_place(given: Any, tmp_path: Any):
    running, following = given.requests["running"], Request("next", "a")
    given.changes.came_in(following)
    (tmp_path / "adapter_config.json").write_text("{}")
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path), load_inplace=True)
    running.num_output_tokens = 1
    for request in (running, following):
        request.lora_request = lora
        given.changes.adapters.identity(request)
        given.changes.scheduled()
    (tmp_path / "adapter_config.json").write_text("{ }")
    given.changes.ended(running)
    following.num_output_tokens = 1
    given.changes.ended(following)
    assert "LoRA adapter 'a' was replaced" in given.side.outdated[0][1]


def test_a_pause_is_seen_as_long_as_it_lasts(given: Any):
    assert not given.changes.is_paused
    given.core.add_request(given.requests["waiting"])
    for state in (0, 1, 2, 0):
        given.core.scheduler.pause_state = state
        assert given.changes.is_paused == bool(state)


def test_a_reset_ends_what_is_on_its_way_and_leaves_what_runs(given: Any):
    given.changes.ended(given.requests["waiting"])
    given.changes.reset()
    assert given.side.outdated == [(["running"], "the engine's caches were reset")]
    assert given.evicted == []
    assert given.requests["running"].block_hashes == ["hash of running"]


@pytest.fixture
def sleeper(given: Any) -> Any:
    """The same, of a vLLM that tells connectors of sleep."""
    given.changes.follows_sleep = True
    return given


def test_memory_is_not_given_back_where_connectors_are_not_told_of_it(given: Any):
    given.core.sleep(0, mode="keep")
    for ask in (given.core.sleep, given.core.release_kv_cache_memory):
        with pytest.raises(UsageError, match=r"use vLLM 0\.33, with which it is registered anew"):
            ask()
    assert given.core.done == ["sleep 0"]


def test_memory_is_given_back_where_they_are(sleeper: Any):
    sleeper.core.sleep()
    sleeper.core.wake_up()
    sleeper.core.release_kv_cache_memory()
    assert sleeper.core.done == ["sleep 1", "awake", "released"]
    assert sleeper.evicted == []
    assert sleeper.weights.text == ""


def test_weights_that_lost_their_memory_are_like_no_others_until_they_are_there_again(sleeper: Any):
    sleeper.core.sleep(2)
    assert sleeper.weights.text.startswith("content unknown ")
    asked = sleeper.core.model_executor.asked
    looks = asked.count(parameter_sums)
    sleeper.core.collective_rpc("get_statistics")
    assert asked.count(parameter_sums) == looks, "nobody looks where there is no memory"
    sleeper.core.model_executor.sums = {"w": 0}
    sleeper.core.wake_up()
    assert sleeper.weights.text.startswith("content ")
    sleeper.core.collective_rpc("reload_weights", kwargs={"sums": {"w": 1}})
    assert sleeper.weights.text == "", "they are those of the start"
    assert len(sleeper.evicted) == 2


def test_weights_that_are_kept_elsewhere_during_sleep_keep_their_name(sleeper: Any):
    sleeper.core.set_weight_version("step-1")
    sleeper.core.sleep()
    sleeper.core.reset_prefix_cache()
    sleeper.core.collective_rpc("get_statistics")
    sleeper.core.wake_up()
    assert sleeper.weights.text == "named step-1"
    assert sleeper.evicted == []


def test_a_core_that_has_no_scheduler_yet_is_left_alone():
    """The second of a process: vLLM asks workers as it starts, such as for the length that has found room."""
    core = core_class()(None, {"w": 1})
    del core.scheduler
    assert core.collective_rpc("update_max_model_len") == [None]


def test_a_core_without_a_connector_of_ours_is_left_alone():
    core = core_class()(None, {"w": 1})
    assert core.collective_rpc("reload_weights") == [None]
    assert core.model_executor.asked == ["reload_weights"]
