"""Making a GPU's context before torch is imported."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rwkv_batch.ops.compiled import gpu_context as context
from rwkv_batch.ops.compiled.gpu_context import prepare_context


class FakeDriver:
    """Of so many GPUs. contexts: on which one has been made."""

    def __init__(self, gpus: int) -> None:
        self.gpus, self.contexts = gpus, []

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, handle, index):
        handle._obj.value = 40 + index
        return 0 if index < self.gpus else 101

    def cuDevicePrimaryCtxRetain(self, context, handle):
        self.contexts.append(handle.value - 40)
        return 0


def install_torch(monkeypatch, folder, cuda: bool) -> None:
    """From now on the torch that would be imported is one of that kind, in an empty folder."""
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / ("libtorch_cuda.so" if cuda else "libtorch_cpu.so")).touch()
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(context, "find_spec", {"torch": spec}.get)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    fake = FakeDriver(2)
    libraries = {context.DRIVER: fake}
    named = SimpleNamespace(**{name: getattr(ctypes, name) for name in ("c_int", "c_void_p", "byref")})
    monkeypatch.setattr(context, "ctypes", named)
    named.CDLL = libraries.__getitem__
    install_torch(monkeypatch, tmp_path, cuda=True)
    return fake


@pytest.mark.parametrize(
    ("device", "wanted"), [("auto", [0]), ("cuda", [0]), ("cuda:1", [1]), ("cuda:2", [])]
)
def test_the_context_of_that_gpu(driver, device, wanted):
    prepare_context(device).join()
    assert driver.contexts == wanted


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "mps"])
def test_other_devices_have_none(driver, device):
    assert prepare_context(device) is None and driver.contexts == []


def test_a_torch_without_cuda_needs_none(driver, monkeypatch, tmp_path):
    install_torch(monkeypatch, tmp_path / "other", cuda=False)
    assert prepare_context("auto") is None and driver.contexts == []


def test_no_driver(monkeypatch, tmp_path):
    install_torch(monkeypatch, tmp_path, cuda=True)
    monkeypatch.setattr(context, "DRIVER", "libno-such-driver.so.1")
    prepare_context("auto").join()


def test_nothing_that_takes_long_is_imported():
    code = "import sys; import rwkv_batch.ops.compiled.gpu_context; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_where_there_can_be_no_thread_torch_makes_the_context(monkeypatch, driver, tmp_path):
    def start(thread):
        raise RuntimeError("can't start new thread")

    install_torch(monkeypatch, tmp_path / "torch", cuda=True)
    monkeypatch.setattr(context.Thread, "start", start)
    assert prepare_context("cuda") is None and not driver.contexts
