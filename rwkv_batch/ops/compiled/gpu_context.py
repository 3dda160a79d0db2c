"""The context of a GPU, which can be made before torch is there. Imports nothing that takes long."""

import ctypes
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

DRIVER = "libcuda.so.1"
DRIVERS = ((DRIVER, "cuInit", "cuDeviceGetCount"), ("libamdhip64.so", "hipInit", "hipGetDeviceCount"))


def prepare_context(device: str) -> Thread | None:
    """Begin to make the context that torch will use on a device, in a thread, which is returned.

    It takes a third of a second, and can be ready once torch is imported. device: as of EngineConfig. None
    if that is no NVIDIA GPU, torch has no use for one, or there can be no thread. What fails here fails in
    torch too, which says why.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdecimal() or not _torch_has_cuda():
        return None
    thread = Thread(target=_make, args=(int(index or 0),), daemon=True)
    with suppress(RuntimeError):  # there can be none; torch makes the context
        thread.start()
        return thread
    return None


def count_gpus() -> int:
    """GPUs that a process here may use: of NVIDIA's, or else of AMD's; 0 where there is no driver."""
    for library, init, count in DRIVERS:
        found = ctypes.c_int()
        with suppress(OSError, AttributeError):
            driver = ctypes.CDLL(library)
            if getattr(driver, init)(0) == 0 and getattr(driver, count)(ctypes.byref(found)) == 0:
                return found.value
    return 0


def pci_address(device: str) -> str | None:
    """Of an NVIDIA GPU, such as 0000:3b:00.0. device: as of EngineConfig. None: it is none, or not known."""
    kind, _, index = device.partition(":")
    handle, text = ctypes.c_int(), ctypes.create_string_buffer(32)
    if kind != "cuda" or not (index or "0").isdecimal():
        return None
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL(DRIVER)
        if (
            driver.cuInit(0) == 0
            and driver.cuDeviceGet(ctypes.byref(handle), int(index or 0)) == 0
            and driver.cuDeviceGetPCIBusId(text, len(text), handle) == 0
        ):
            return text.value.decode()
    return None


def _make(index: int) -> None:
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(OSError, AttributeError):  # no driver
        driver = ctypes.CDLL(DRIVER)
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), index) == 0:
            # Held as long as the process lives, as torch would hold it.
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


def _torch_has_cuda() -> bool:
    """Whether the torch that would be imported was built for CUDA."""
    spec = find_spec("torch")
    return (
        spec is not None
        and spec.origin is not None
        and (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()
    )
