"""The calls of nvJPEG, with a library that decodes on the CPU where there is no GPU."""

import ctypes
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import simplejpeg
import torch

from phalanx.data.loading import nvjpeg
from phalanx.data.loading.gpu_decode import find_gpu_decode_problem
from phalanx.data.loading.nvjpeg import NvJpeg
from small_jpegs import CPU
from small_photos import encode, photo

NO_MEMORY, BAD_JPEG, NO_ENGINE = 5, 3, 7
SIZES = [(40 + 7 * n, 90 - 3 * n) for n in range(20)]


class Library:
    """The functions of libnvjpeg that are called, on the CPU."""

    def __init__(self, *, has_engine=True):
        self.has_engine, self.backends, self.freed = has_engine, [], 0
        self.batch, self.answer, self.state_answer = 0, 0, 0

    def nvjpegCreateEx(self, backend, device_memory, pinned_memory, flags, handle):
        self.backends.append(backend)
        if backend == nvjpeg._HARDWARE and not self.has_engine:
            return NO_ENGINE
        handle._obj.value = 1
        return 0

    def nvjpegJpegStateCreate(self, handle, state):
        state._obj.value = int(self.state_answer == 0)
        return self.state_answer

    def nvjpegJpegStateDestroy(self, state):
        self.freed += 1

    def nvjpegDestroy(self, handle):
        self.freed += 1

    def nvjpegGetImageInfo(self, handle, data, length, components, subsampling, widths, heights):
        header = read(data.value, length.value)
        try:
            heights[0], widths[0], _, _ = simplejpeg.decode_jpeg_header(header)
        except ValueError:
            return BAD_JPEG
        return 0

    def nvjpegDecodeBatchedInitialize(self, handle, state, count, threads, layout):
        assert layout == 3
        self.batch = count
        return 0

    def nvjpegDecodeBatched(self, handle, state, data, lengths, images, stream):
        count, self.batch = self.batch, 0
        starts = (ctypes.c_size_t * count).from_address(data.value)
        sizes = (ctypes.c_size_t * count).from_address(lengths.value)
        planes = (ctypes.c_size_t * (8 * count)).from_address(images.value)
        for n in range(count):
            try:
                pixels = simplejpeg.decode_jpeg(read(starts[n], sizes[n]))
            except ValueError:
                return BAD_JPEG
            for channel in range(3):
                plane = np.ascontiguousarray(pixels[..., channel])
                assert planes[8 * n + 4 + channel] == plane.shape[1]
                ctypes.memmove(planes[8 * n + channel], plane.ctypes.data, plane.size)
        return self.answer


def read(address, size):
    return ctypes.string_at(address, size)


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(nvjpeg, "_load_library", lambda: library)
    return library


def files_of(sizes, spoil=lambda data: data):
    return [to_tensor(spoil(encode(photo(n, size=size)))) for n, size in enumerate(sizes)]


def to_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("count", [1, 3, 17, 20, 64])
def test_images_come_in_the_order_of_their_files(library, count):
    decode, files = NvJpeg(CPU), files_of([SIZES[n % len(SIZES)] for n in range(count)])
    for image, file in zip(decode(files), files, strict=True):
        expected = torch.from_numpy(simplejpeg.decode_jpeg(file.numpy())).permute(2, 0, 1)
        assert torch.equal(image, expected)
    decode.close()
    decode.close()
    assert library.freed == 2


def test_a_bad_file_is_refused_and_the_next_call_works(library):
    decode, files = NvJpeg(CPU), files_of(SIZES)
    for bad in (b"\xff\xd8 and then nothing \xff\xd9", files[0].numpy().tobytes()[:600]):
        spoiled = [*files[:5], to_tensor(bad), *files[6:]]
        with pytest.raises(RuntimeError, match="returned 3"):
            decode(spoiled)
    assert len(decode(files)) == len(files)


def test_calls_that_allocate_or_free_are_made_with_their_device_current(library, monkeypatch):
    depth, calls = [0], []

    @contextmanager
    def make_current(self):
        depth[0] += 1
        yield
        depth[0] -= 1

    def note(name, function, *values):
        calls.append((name, depth[0]))
        return function(*values)

    monkeypatch.setattr(NvJpeg, "_make_current", make_current)
    functions = [name for name in dir(library) if name.startswith("nvjpeg")]
    for name in functions:
        monkeypatch.setattr(library, name, partial(note, name, getattr(library, name)))
    decode = NvJpeg(CPU)
    decode(files_of(SIZES[:2]))
    decode.close()
    assert {name for name, _ in calls} == set(functions)
    assert all(depth == 1 for name, depth in calls if name != "nvjpegGetImageInfo")


def test_a_library_out_of_memory_is_no_bad_image(library):
    library.answer = NO_MEMORY
    with pytest.raises(torch.OutOfMemoryError, match="--gpu-decode: nvjpegDecodeBatched"):
        NvJpeg(CPU)(files_of(SIZES[:2]))


def test_a_decoder_that_cannot_be_made_whole_is_freed(library):
    library.state_answer = NO_MEMORY
    with pytest.raises(torch.OutOfMemoryError, match="nvjpegJpegStateCreate is out of memory"):
        NvJpeg(CPU)
    assert library.freed == 1, "its handle; it has no state"


def test_gpus_without_decoding_engines_decode_on_their_multiprocessors(library):
    library.has_engine = False
    assert len(NvJpeg(CPU)(files_of(SIZES))) == len(SIZES)
    assert library.backends == [3, 1]


def test_the_library_is_found_in_any_folder_of_packages(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, kind, lambda name: opened.append(name) or SimpleNamespace(
            nvjpegGetImageInfo=None
        ))  # fmt: skip
    monkeypatch.setattr("sys.path", [str(tmp_path / "empty"), str(tmp_path)])
    places = [
        "torchvision.libs/libnvjpeg.36e1",
        "nvidia/nvjpeg/lib/libnvjpeg",
        "nvidia/cu13/lib/libnvjpeg",
    ]
    for place in places:
        path = tmp_path / f"{place}.so.12"  # of another version
        path.parent.mkdir(parents=True)
        path.touch()
    for place in places:
        path = tmp_path / f"{place}.so.13"
        nvjpeg._load_library()
        path.touch()
        nvjpeg._load_library()
        assert opened[-2:] == [str(path)] * 2
    assert opened[:2] == ["libnvjpeg.so.13"] * 2  # of the system


@pytest.mark.parametrize(
    ("cuda", "package"), [("12.8", "nvidia-nvjpeg-cu12"), ("13.0", "nvidia-nvjpeg")]
)
def test_the_package_of_torchs_cuda_version_is_named(cuda, package, monkeypatch):
    def load(name):
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr(ctypes, "CDLL", load)
    told = find_gpu_decode_problem(torch.device("cuda"))
    name = f"libnvjpeg.so.{cuda[:2]}: no such file"
    assert told == f"libnvjpeg, of the package {package}, cannot be loaded ({name})"


def test_why_a_gpu_cannot_decode_is_told(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    monkeypatch.setattr("sys.path", [])
    told = find_gpu_decode_problem(device)
    assert told.startswith("libnvjpeg, of the package nvidia-nvjpeg, cannot be loaded (libnvjpeg.")
    library = Library()
    library.answer = 6
    monkeypatch.setattr(nvjpeg, "_load_library", lambda: library)
    monkeypatch.setattr("phalanx.data.loading.gpu_decode.NvJpeg", lambda device: NvJpeg(CPU))
    told = find_gpu_decode_problem(device)
    assert told == "nvJPEG cannot decode on cuda (nvjpegDecodeBatched returned 6)"
    assert library.freed == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", [True, False], ids=["engine", "multiprocessors"])
def test_the_gpus_images_are_nearly_the_cpus_and_the_same_every_time(monkeypatch, engine):
    if not engine:
        monkeypatch.setattr(nvjpeg, "_HARDWARE", nvjpeg._HYBRID)
    decode = NvJpeg(torch.device("cuda"))
    files = files_of([(300 + 7 * n, 280 - n) for n in range(70)])
    images = [image.cpu() for image in decode(files)]
    for image, file in zip(images, files, strict=True):
        expected = simplejpeg.decode_jpeg(file.numpy()).transpose(2, 0, 1)
        assert np.abs(image.numpy() - expected.astype(int)).mean() < 2
    for order in (torch.randperm(70), torch.arange(70).flip(0), torch.tensor([3])):
        for n, image in zip(order.tolist(), decode([files[n] for n in order]), strict=True):
            assert torch.equal(image.cpu(), images[n])
    decode.close()
