"""Calls nvJPEG directly, because torchvision's decode_jpeg runs only one call at a time.

On an H200 that is also running a CUDA graph, one decoder decodes 10,000 photographs per second, two
decode 15,000: one parses files while the other waits for the hardware.

The library comes with the package nvidia-nvjpeg, with torchvision or with a CUDA toolkit.
"""

import ctypes
import sys
from contextlib import AbstractContextManager, nullcontext
from ctypes import byref, c_int, c_size_t, c_void_p, sizeof
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# nvjpegBackend_t: decoding engines; or entropy decoding on the CPU and the rest on the GPU's
# multiprocessors: of the two backends of that kind, only this one gives the same bits for any batch
_HARDWARE, _HYBRID = 3, 1
_RGB = 3  # nvjpegOutputFormat_t: one plane after the other
_NO_MEMORY, _NO_ENGINE = 5, 7  # nvjpegStatus_t
_IMAGE = np.dtype([("channel", np.uint64, 4), ("pitch", np.uint64, 4)])  # nvjpegImage_t


class NvJpeg:
    """Decodes JPEGs on a device; not for several threads at the same time.

    has_engines: whether the device has engines for that, which cost training little.
    """

    def __init__(self, device: torch.device):
        self._library, self._device = _load_library(), device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._handle, self._state = c_void_p(), c_void_p()
        try:
            with self._make_current():
                status = self._create(_HARDWARE)
                self.has_engines = status != _NO_ENGINE
                _refuse(status if self.has_engines else self._create(_HYBRID), "nvjpegCreateEx")
                self._call("nvjpegJpegStateCreate", byref(self._state))
        except BaseException:
            self.close()
            raise

    def _create(self, backend: int) -> int:
        status: int = self._library.nvjpegCreateEx(backend, None, None, 0, byref(self._handle))
        return status

    def _call(self, name: str, *values: object) -> None:
        _refuse(getattr(self._library, name)(self._handle, *values), name)

    def _make_current(self) -> AbstractContextManager[object]:
        """Context in which this thread's CUDA calls go to the device."""
        return torch.cuda.device(self._device) if self._stream else nullcontext()

    def close(self) -> None:
        """Free the library's memory; may be called twice."""
        with self._make_current():
            if self._state:
                self._library.nvjpegJpegStateDestroy(self._state)
            if self._handle:
                self._library.nvjpegDestroy(self._handle)
        self._handle, self._state = c_void_p(), c_void_p()

    def __call__(self, files: list[Tensor]) -> list[Tensor]:
        """The images on the device; raises RuntimeError if one cannot be decoded."""
        sides = self._read_sides(files)
        sizes = sides.prod(axis=1)
        flat = torch.empty(int(3 * sizes.sum()), dtype=torch.uint8, device=self._device)
        images = np.zeros(len(files), _IMAGE)
        starts = flat.data_ptr() + 3 * (np.cumsum(sizes) - sizes)
        images["channel"][:, :3] = starts[:, None] + sizes[:, None] * np.arange(3)
        images["pitch"][:, :3] = sides[:, 1:]
        data = np.array([file.data_ptr() for file in files], np.uint64)
        lengths = np.array([len(file) for file in files], np.uint64)
        arrays = [c_void_p(array.ctypes.data) for array in (data, lengths, images)]
        with self._make_current():
            if self._stream:  # queued work may still read the memory
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            stream = c_void_p(self._stream.cuda_stream if self._stream else None)
            self._call("nvjpegDecodeBatchedInitialize", self._state, len(files), 1, _RGB)
            try:
                self._call("nvjpegDecodeBatched", self._state, *arrays, stream)
            finally:
                if self._stream:
                    self._stream.synchronize()  # the host: files are read until then
        parts = flat.split((3 * sizes).tolist())
        return [part.view(3, *side) for part, side in zip(parts, sides.tolist(), strict=True)]

    def _read_sides(self, files: list[Tensor]) -> NDArray[np.int64]:
        """The height and width in the header of each JPEG."""
        sides, read = np.empty((len(files), 2), np.int64), self._library.nvjpegGetImageInfo
        few, widths, heights = (c_int * 2)(), (c_int * 4)(), (c_int * 4)()
        components, subsampling = byref(few), byref(few, sizeof(c_int))
        for side, file in zip(sides, files, strict=True):
            data = c_void_p(file.data_ptr()), c_size_t(len(file))
            status = read(self._handle, *data, components, subsampling, widths, heights)
            _refuse(status, "nvjpegGetImageInfo")
            side[:] = heights[0], widths[0]
        return sides


def _refuse(status: int, name: str) -> None:
    """Raise an error for any status except success."""
    if status == _NO_MEMORY:
        raise torch.OutOfMemoryError(f"--gpu-decode: {name} is out of memory")
    if status:
        raise RuntimeError(f"{name} returned {status}")


def find_package() -> str:
    """The package that holds nvJPEG of the CUDA version that torch was built for."""
    major = _find_cuda_version()
    return f"nvidia-nvjpeg-cu{major}" if major in ("11", "12") else "nvidia-nvjpeg"


def _find_cuda_version() -> str:
    """The major version of CUDA that torch was built for; empty if it was built without."""
    return (torch.version.cuda or "").partition(".")[0]


def _load_library() -> Any:
    """nvJPEG of the CUDA version that torch was built for; OSError if there is none."""
    major = _find_cuda_version()
    file = f"libnvjpeg*.so.{major}"
    folders = (f"nvidia/cu{major}/lib", "nvidia/nvjpeg/lib", "torchvision.libs")
    found = [path for name in folders for site in sys.path for path in Path(site, name).glob(file)]
    name = str(found[0]) if found else f"libnvjpeg.so.{major}"
    library: Any = ctypes.CDLL(name)
    # PyDLL keeps Python's lock: getting it back takes longer than reading a header
    library.nvjpegGetImageInfo = ctypes.PyDLL(name).nvjpegGetImageInfo
    return library
