"""Tensors of a GPU at a session without torch, with a model of CUDA's driver: its device memory is
host memory that nobody else reads. test_cuda.py does the same on a GPU."""

from __future__ import annotations

import contextlib
import ctypes

import numpy
import pytest
from optstate import _native, device_copies
from optstate import session_tensors as session_tensors_module
from optstate.errors import InternalError, InvalidArgumentError, UnimplementedError
from optstate.foreign_tensor import _capsule_is_valid, _capsule_pointer, _Tensor
from optstate.session import Session
from optstate.session_spec import ParameterSpec, SessionSpec
from optstate.session_tensors import SessionTensors
from test_foreign_tensors import hyperparams

CUDA, ROCM = 2, 10
SHAPES = {"w": (2, 3), "b": (4,)}


class Driver:
    """libcuda.so.1, of two devices. Memory of the second begins at `border`."""

    def __init__(self):
        self.calls = []
        self.errors = {}  # by function
        self.current = []
        self.owned = {}  # address: device

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            if name in self.errors:
                return self.errors[name]
            does = getattr(type(self), f"_{name}", None)
            return 0 if does is None else does(self, *arguments)

        return call

    def _cuPointerGetAttribute(self, result, attribute, address):  # noqa: N802
        assert attribute == 9
        if address not in self.owned:
            return 1
        result._obj.value = self.owned[address]
        return 0

    def _cuDeviceGet(self, result, ordinal):  # noqa: N802
        result._obj.value = ordinal
        return 0

    def _cuDevicePrimaryCtxRetain(self, result, device):  # noqa: N802
        result._obj.value = 1000 + device.value
        return 0

    def _cuCtxPushCurrent_v2(self, context):  # noqa: N802
        self.current.append(context)
        return 0

    def _cuCtxPopCurrent_v2(self, _):  # noqa: N802
        self.current.pop()
        return 0

    def _copy(self, device_address, to, source, size):
        assert self.current == [1000 + self.owned[device_address]]
        ctypes.memmove(to, source, size)
        return 0

    def _cuMemcpyDtoH_v2(self, to, source, size):  # noqa: N802
        return self._copy(source, to, source, size)

    def _cuMemcpyHtoD_v2(self, to, source, size):  # noqa: N802
        return self._copy(to, to, source, size)

    def _cuGetErrorString(self, error, text):  # noqa: N802
        text._obj.value = f"made up {error}".encode()
        return 0


class OnDevice:
    """An array of a library without DLPack, whose values come late, in a stream of its own."""

    def __init__(self, driver, values, device=0, stream=7, kind="interface"):
        self.values = numpy.ascontiguousarray(values)
        driver.owned[self.values.ctypes.data] = device
        self._kind, self._device = kind, device
        if kind == "interface":
            self.__cuda_array_interface__ = {
                **{k: self.values.__array_interface__[k] for k in ("shape", "typestr", "data")},
                "stream": stream,
                "version": 3,
            }


class WithDlpack(OnDevice):
    """An array of a library with DLPack, which has the consumer's stream wait."""

    def __init__(self, driver, values, device=0, type_=CUDA):
        super().__init__(driver, values, device, kind="dlpack")
        self._type = type_
        self.streams = []

    def __dlpack_device__(self):
        return self._type, self._device

    def __dlpack__(self, *, stream=None, max_version=None):
        self.streams.append(stream)
        capsule = self.values.__dlpack__()
        assert _capsule_is_valid(capsule, b"dltensor")
        tensor = _Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        tensor.device.type, tensor.device.id = self._type, self._device
        return capsule


class OfTorch(WithDlpack):
    """A tensor of torch, which gives a capsule while its device is the current one. It has an array
    interface of a version that knows no streams."""

    def __init__(self, driver, values, device):
        super().__init__(driver, values, device)
        self._driver = driver
        self.__cuda_array_interface__ = {
            **{k: self.values.__array_interface__[k] for k in ("shape", "typestr", "data")},
            "version": 2,
        }

    def __dlpack__(self, *, stream=None, max_version=None):
        if self._driver.current != [1000 + self._device]:
            raise BufferError("another device is the current one")
        return super().__dlpack__(stream=stream, max_version=max_version)


@pytest.fixture
def driver(monkeypatch):
    model = Driver()
    device_copies._context.cache_clear()
    monkeypatch.setattr(device_copies, "_driver", lambda: model)
    yield model
    device_copies._context.cache_clear()


@pytest.fixture
def session_tensors(daemon, job):
    f32 = _native.FLOAT32
    parameters = [
        ParameterSpec(name, list(shape), int(numpy.prod(shape)), f32, f32, 0)
        for name, shape in SHAPES.items()
    ]
    session = Session.open(SessionSpec(job, 2, [0], parameters, daemon.shm))
    yield session, SessionTensors(session, parameters)
    session.close()


def test_a_session_steps_with_tensors_of_devices(driver, session_tensors):
    session, tensors = session_tensors
    session.begin_load()
    tensors.load(0, OnDevice(driver, numpy.ones((2, 3), numpy.float32)))
    tensors.load(1, WithDlpack(driver, numpy.full(4, 2, numpy.float32), device=1))
    session.finish_load()
    gradient = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    of_b = WithDlpack(driver, numpy.full(4, 0.5, numpy.float32), device=1)
    tensors.push(1, 0, {1: of_b, 0: OnDevice(driver, gradient)})
    # The library has the stream of the copies wait, or names the one to be waited for.
    assert of_b.streams == [1]
    assert ("cuStreamSynchronize", 7) in driver.calls
    outcome = session.commit(1, hyperparams())
    assert outcome.gradient_norm == pytest.approx((55 + 1) ** 0.5)
    places = [
        OnDevice(driver, numpy.full((2, 3), numpy.nan, numpy.float32)),
        WithDlpack(driver, numpy.full(4, numpy.nan, numpy.float32), device=1),
    ]
    tensors.read(dict(enumerate(places)))
    for index, place in enumerate(places):
        address, size = session.parameter(index)
        assert place.values.tobytes() == ctypes.string_at(address, size)
    assert driver.calls[-2] == ("cuStreamSynchronize", 1)
    moment = OnDevice(driver, numpy.zeros((2, 3), numpy.float32), stream=None)
    tensors.fetch(_native.STATE_0, 0, moment)
    assert moment.values == pytest.approx(0.1 * gradient)
    assert not driver.current


def test_a_tensor_of_another_device_than_the_current_one(driver, session_tensors, monkeypatch):
    session, tensors = session_tensors
    session.begin_load()
    for index, shape in enumerate(SHAPES.values()):
        tensors.load(index, numpy.zeros(shape, numpy.float32))
    session.finish_load()
    gradient = OfTorch(driver, numpy.ones(4, numpy.float32), device=1)
    tensors.push(1, 0, {1: gradient})
    assert gradient.streams == [1] and not driver.current
    # Where the device cannot be made the current one, all of its streams are waited for.
    monkeypatch.setattr(session_tensors_module, "current_device", contextlib.nullcontext)
    tensors.push(1, 0, {0: OfTorch(driver, numpy.ones((2, 3), numpy.float32), device=1)})
    assert ("cuCtxSynchronize",) in driver.calls
    assert session.commit(1, hyperparams()).gradient_norm == pytest.approx(10**0.5)


def test_host_and_device_in_one_push(driver, session_tensors):
    session, tensors = session_tensors
    session.begin_load()
    tensors.load(0, numpy.zeros((2, 3), numpy.float32))
    tensors.load(1, OnDevice(driver, numpy.zeros(4, numpy.float32)))
    session.finish_load()
    gradient = OnDevice(driver, numpy.full(4, 2, numpy.float32))
    tensors.push(1, 0, {0: numpy.ones((2, 3), numpy.float32), 1: gradient})
    assert session.commit(1, hyperparams()).gradient_norm == pytest.approx((6 + 16) ** 0.5)


def test_what_is_refused(driver, session_tensors):
    session, tensors = session_tensors
    session.begin_load()
    for index, shape in enumerate(SHAPES.values()):
        tensors.load(index, numpy.zeros(shape, numpy.float32))
    session.finish_load()
    values = numpy.ones((2, 3), numpy.float32)
    nobodys = OnDevice(driver, values.copy())
    driver.owned.clear()
    for wrong, kind, message in (
        (nobodys, InvalidArgumentError, "where no device has memory"),
        (OnDevice(driver, values.T), InvalidArgumentError, "shape"),
        (OnDevice(driver, values.astype("f8")), InvalidArgumentError, "float64, not float32"),
        (OnDevice(driver, values.copy(), stream=0), InvalidArgumentError, "names the stream 0"),
        (OnDevice(driver, values.copy(), stream="x"), InvalidArgumentError, "names the stream 'x'"),
        (WithDlpack(driver, values, type_=ROCM), UnimplementedError, "is on rocm:0"),
    ):
        with pytest.raises(kind, match=message) as raised:
            tensors.push(1, 0, {0: wrong})
        assert 'the gradient of "w"' in str(raised.value)
    good = OnDevice(driver, values)
    for name, error, kind in (
        ("cuMemcpyDtoH_v2", 1, InvalidArgumentError),
        ("cuMemcpyDtoH_v2", 700, InternalError),
        ("cuStreamSynchronize", 719, InternalError),
        ("cuInit", 100, UnimplementedError),
    ):
        driver.errors = {name: error}
        with pytest.raises(kind, match=f"{name}: error {error}, made up {error}"):
            tensors.push(1, 0, {0: good})
        assert not driver.current
    driver.errors = {}
    tensors.push(1, 0, {0: good})  # nothing had happened


def test_without_a_driver(monkeypatch, session_tensors):
    def no_library(name):
        raise OSError(f"{name}: cannot open shared object file")

    model = Driver()
    device_copies._driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(UnimplementedError, match="there is no driver.*Copy the tensor to host"):
        session_tensors[1].push(1, 0, {0: OnDevice(model, numpy.ones((2, 3), numpy.float32))})
