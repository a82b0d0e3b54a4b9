"""Memory from CUDA's driver: taken, given back, and whether other processes can map it. The driver is a fake."""

from __future__ import annotations

import pytest
from tests.support.fake_driver import FakeDriverLibrary

from kvferry.applications.doctor.machine import allocator
from kvferry.errors import SettingsError
from kvferry.findings import Severity
from kvferry.layout import Device, MemoryKind, Region
from kvferry.staging import allocate, memory
from kvferry.staging.cuda_driver import CudaDriver, CudaDriverError
from kvferry.staging.memory import why_not_mapped

GPU = Device(MemoryKind.VRAM, 3)
MIB = 1 << 20


@pytest.fixture
def library() -> FakeDriverLibrary:
    return FakeDriverLibrary()


@pytest.fixture
def on_fake_gpu(library: FakeDriverLibrary, monkeypatch: pytest.MonkeyPatch) -> FakeDriverLibrary:
    monkeypatch.setattr(memory, "require_cuda", lambda device: None)
    monkeypatch.setattr(memory, "CudaDriver", lambda: CudaDriver(library))
    return library


def test_staging_memory_is_the_drivers_until_it_is_closed(on_fake_gpu: FakeDriverLibrary):
    with allocate(MIB + 1, GPU) as taken:
        assert on_fake_gpu.allocated == {taken.address: MIB + 1}
        assert taken.region == Region(1 << 40, MIB + 1)
        assert on_fake_gpu.retained == {3: 1}, "the context must live as long as the memory"
        assert not on_fake_gpu.current, "the thread has another context than before"
    assert not on_fake_gpu.allocated
    assert on_fake_gpu.retained == {3: 0}


def test_memory_that_is_kept_for_good_is_not_given_back(on_fake_gpu: FakeDriverLibrary):
    taken = allocate(MIB, GPU)
    taken.keep_for_good()
    taken.close()
    assert len(on_fake_gpu.allocated) == 1
    memory._KEPT_FOR_GOOD.pop()


def test_memory_is_taken_while_another_thread_captures_and_the_thread_is_as_it_was_afterwards(
    on_fake_gpu: FakeDriverLibrary,
):
    on_fake_gpu.is_capturing = True
    with allocate(1 << 20, GPU):
        assert (len(on_fake_gpu.allocated), on_fake_gpu.capture_mode) == (1, 0)
    assert (len(on_fake_gpu.allocated), on_fake_gpu.capture_mode) == (0, 0)


def test_a_thread_that_is_bound_to_a_gpu_goes_on_while_others_capture(
    library: FakeDriverLibrary, monkeypatch: pytest.MonkeyPatch
):
    cuda = pytest.importorskip("kvferry.staging.cuda")
    monkeypatch.setattr(cuda.torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(cuda.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "CudaDriver", lambda: CudaDriver(library))
    assert library.capture_mode == 0
    cuda.bind_thread(3)
    assert library.capture_mode == 1, "an engine's capture would refuse what the thread does, and end"


def test_what_does_not_fit_is_refused_with_what_to_do(on_fake_gpu: FakeDriverLibrary):
    with pytest.raises(SettingsError, match=rf"{1 << 31} bytes .*VRAM:3 .*OUT_OF_MEMORY.*STAGING_RING_MIB") as caught:
        allocate(1 << 31, GPU)
    assert isinstance(caught.value.__cause__, CudaDriverError)
    assert caught.value.__cause__.is_out_of_memory
    assert on_fake_gpu.retained == {3: 0}
    assert not on_fake_gpu.current


def test_a_pool_that_no_other_process_can_map_is_said(library: FakeDriverLibrary):
    driver = CudaDriver(library)
    pool = [Region(1 << 40, MIB), Region((1 << 40) + (1 << 30), MIB), Region(0, 0)]
    assert why_not_mapped(pool, GPU, driver) == ""
    library.virtual.add(pool[1].address)
    said = why_not_mapped(pool, GPU, driver)
    assert f"VRAM:3 (at {pool[1].address:#x}) is not of the kind" in said
    assert "expandable_segments" in said
    assert "KVFERRY_PATH=staged" in said
    assert why_not_mapped([Region(4096, 64)], GPU, driver) == "", "the driver does not know it, and says nothing"


def test_of_a_pool_in_cpu_memory_no_driver_is_asked(library: FakeDriverLibrary):
    driver, before = CudaDriver(library), list(library.calls)
    assert why_not_mapped([Region(1 << 40, MIB)], Device(), driver) == ""
    assert library.calls == before


def test_doctor_says_what_torchs_allocator_gives(library: FakeDriverLibrary):
    driver = CudaDriver(library)
    (found,) = allocator(1 << 40, driver)
    assert found.severity is Severity.GOOD
    library.virtual.add(1 << 40)
    (found,) = allocator(1 << 40, driver)
    assert found.severity is Severity.WARNING
    assert "PYTORCH_CUDA_ALLOC_CONF" in found.remedy
    (found,) = allocator(4096, driver)
    assert "CUDA_ERROR_INVALID_VALUE" in found.what
