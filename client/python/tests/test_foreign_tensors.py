"""Tensors of other libraries, by DLPack and the array interfaces: read and written in place."""

from __future__ import annotations

import array
import ctypes
import gc
import weakref

import numpy
import optstate
import pytest
import torch
from optstate import _native
from optstate._torch.foreign import torch_tensor
from optstate.errors import InvalidArgumentError, OutOfRangeError, UnimplementedError
from optstate.foreign_tensor import foreign_tensor, offers_tensor
from optstate.session import Session
from optstate.session_spec import ParameterSpec, SessionSpec
from optstate.session_tensors import SessionTensors


class OnlyDlpack:
    """An object that has DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class OlderDlpack(OnlyDlpack):
    """An object from before DLPack 1, without a version and flags."""

    def __dlpack__(self):
        return self.tensor.__dlpack__()


class OnlyArrayInterface:
    """An object that has the array interface and nothing else."""

    def __init__(self, array_):
        self.array = array_

    @property
    def __array_interface__(self):
        return self.array.__array_interface__


class OnCuda:
    """A tensor of a device that is not there, without DLPack."""

    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (4096, False)}


class DlpackOnCuda:
    """Such a tensor with DLPack, whose capsule is not asked for where nothing can take it."""

    def __dlpack__(self, **_):
        raise BufferError("there is no such device")

    def __dlpack_device__(self):
        return 2, 1


WRAPPERS = [lambda values: values, OnlyDlpack, OlderDlpack, OnlyArrayInterface]
WRAPPER_NAMES = ["numpy", "dlpack", "older dlpack", "array interface"]


@pytest.fixture(params=WRAPPERS, ids=WRAPPER_NAMES)
def wrapper(request):
    return request.param


def test_host_memory_is_not_copied(wrapper):
    values = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    found = foreign_tensor(wrapper(values), "x")
    assert found.address == values.ctypes.data
    assert (found.shape, found.dtype, found.device) == ((3, 4), "float32", "cpu")
    assert found.is_contiguous and not found.is_read_only and found.extent == 12
    tensor = torch_tensor(wrapper(values), "x", writable=True)
    tensor += 1
    assert values[0, 0] == 1 and values[2, 3] == 12


@pytest.mark.parametrize("wrap", [OnlyDlpack, OlderDlpack])
def test_torch_is_a_producer_too(wrap):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        values = torch.arange(6).to(dtype).view(2, 3)
        tensor = torch_tensor(wrap(values), "x", writable=True)
        assert tensor.dtype is dtype and tensor.data_ptr() == values.data_ptr()
        assert torch.equal(tensor, values)


def test_strides_are_followed(wrapper):
    whole = numpy.arange(60, dtype=numpy.float32).reshape(6, 10)
    for part in (whole.T, whole[1:5:2, 3:], whole[:, 7], whole[2, 2:3], whole[6:]):
        found = torch_tensor(wrapper(part), "x")
        assert found.tolist() == part.tolist()
        assert foreign_tensor(wrapper(part), "x").is_contiguous == part.flags.c_contiguous


@pytest.mark.parametrize("wrap", [OnlyDlpack, OlderDlpack, OnlyArrayInterface])
def test_the_memory_lives_as_long_as_the_tensor(wrap):
    class Values(numpy.ndarray):  # unlike ndarray it can be referred to weakly
        pass

    values = numpy.ones(3, numpy.float32).view(Values)
    gone = weakref.ref(values)
    tensor = torch_tensor(wrap(values), "x")
    row = tensor[1:]
    del values, tensor
    gc.collect()
    assert gone() is not None and row.tolist() == [1, 1]
    del row
    gc.collect()
    assert gone() is None


def test_scalars_lists_and_nothing_at_all():
    assert torch_tensor(numpy.float32(3), "x").item() == 3
    assert torch_tensor([1.0, 2.0], "x").tolist() == [1, 2]
    assert torch_tensor(numpy.zeros((0, 3), numpy.float32), "x").shape == (0, 3)
    assert not offers_tensor([1.0]) and offers_tensor(OnCuda())
    with pytest.raises(InvalidArgumentError, match="x is a list, without __dlpack__"):
        foreign_tensor([1.0], "x")


def read_only():
    values = numpy.ones(3, numpy.float32)
    values.flags.writeable = False
    return values


@pytest.mark.parametrize("wrap", [WRAPPERS[0], OnlyDlpack, OnlyArrayInterface])
def test_what_is_read_only_is_read_and_not_written(wrap):
    try:
        found = torch_tensor(wrap(read_only()), "x")
    except InvalidArgumentError as error:  # of DLPack alone, with numpy before 2.1
        assert "readonly" in str(error) and wrap is OnlyDlpack
        return
    assert found.tolist() == [1, 1, 1]
    with pytest.raises(InvalidArgumentError, match="x is read-only"):
        torch_tensor(wrap(read_only()), "x", writable=True)


@pytest.mark.parametrize(
    "values, message",
    [
        (numpy.ones(4, ">f4"), "byte order"),
        (numpy.ones(4, complex), "dtype"),
        (OnlyArrayInterface(numpy.ones(4, complex)), "dtype"),
        (numpy.ones(4, numpy.float32)[::-1], "negative strides"),
        (OnlyArrayInterface(numpy.ones(4, numpy.float32)[::-1]), "negative strides"),
        (numpy.frombuffer(bytearray(17), numpy.float32, 4, offset=1), "address"),
        (OnlyArrayInterface(numpy.ones(4, "f4,i2")["f0"]), "whole elements"),
    ],
)
def test_what_cannot_be_read_says_why(values, message):
    with pytest.raises(InvalidArgumentError, match=message) as raised:
        foreign_tensor(values, 'the gradient of "w"')
    assert 'the gradient of "w"' in str(raised.value)


def test_a_protocol_that_breaks_its_word_is_refused():
    class NoCapsule(OnlyDlpack):
        def __dlpack__(self, **_):
            return 3

    class NoDevice:
        def __dlpack__(self, **_):
            raise AssertionError("asked before the device is known")

    class Bare:
        def __init__(self, **interface):
            self.__array_interface__ = interface

    for wrong, message in (
        (NoCapsule(torch.ones(2)), "no tensor's capsule"),
        (NoDevice(), "__dlpack_device__"),
        (Bare(shape=(2,), typestr="<f4"), "has no data"),
        (Bare(shape=(2,), typestr="<f4", data=b"12345678"), "has no address"),
        (Bare(shape=(2,), typestr="<f4", data=(64, False), mask=1), "masked"),
        (Bare(shape=(2,), typestr="<f4", data=(0, False)), "address 0x0"),
        (Bare(shape=(-2,), typestr="<f4", data=(64, False)), "shape"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            foreign_tensor(wrong, "x")


def test_overlapping_elements_are_not_written():
    repeated = torch.ones(1, 3).expand(4, 3)
    assert torch_tensor(OnlyDlpack(repeated), "x").shape == (4, 3)
    with pytest.raises(InvalidArgumentError, match="one place"):
        torch_tensor(OnlyDlpack(repeated), "x", writable=True)


@pytest.mark.parametrize("values, device", [(OnCuda(), "cuda"), (DlpackOnCuda(), "cuda:1")])
def test_a_device_that_is_not_there(values, device):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and the address of the test is none of its")
    assert foreign_tensor(values, "x").device == device
    with pytest.raises(UnimplementedError, match=f"x is on {device}, which this torch cannot"):
        torch_tensor(values, "x")


SHAPES = {"a": (70, 100), "b": (5,), "none": (0, 3)}


def arrays(seed):
    generator = numpy.random.default_rng(seed)
    return {n: generator.standard_normal(s).astype(numpy.float32) for n, s in SHAPES.items()}


def test_a_parameter_store_takes_them(daemon, job, wrapper):
    with (
        optstate.ParameterStore(
            {name: (shape, torch.float32) for name, shape in SHAPES.items()},
            lr=0.01,
            job=job,
            endpoint=daemon.shm,
            placement="host",
        ) as store,
        optstate.ParameterStore(
            {name: (shape, torch.float32) for name, shape in SHAPES.items()},
            lr=0.01,
            job=job + "-torch",
            endpoint=daemon.shm,
            placement="host",
        ) as plain,
    ):
        store.load({name: wrapper(values) for name, values in arrays(1).items()})
        plain.load({name: torch.from_numpy(values) for name, values in arrays(1).items()})
        for step in range(3):
            for name, values in arrays(10 + step).items():
                # Values that are not contiguous are read all the same.
                store.push(name, wrapper(numpy.asfortranarray(values)))
                plain.push(name, torch.from_numpy(values))
            store.step(max_norm=2.0)
            plain.step(max_norm=2.0)
        for name, shape in SHAPES.items():
            place = numpy.full(shape, numpy.nan, numpy.float32)
            store.fetch(name, wrapper(place))
            assert numpy.array_equal(place, plain.fetch(name).numpy()), name
        strided = numpy.full((140, 100), numpy.nan, numpy.float32)
        store.fetch("a", wrapper(strided[::2]))
        assert numpy.array_equal(strided[::2], plain.fetch("a").numpy())
        assert numpy.isnan(strided[1::2]).all()


def test_what_a_parameter_store_refuses(daemon, job):
    with optstate.ParameterStore(
        {"b": ((3,), torch.float32)}, job=job, endpoint=daemon.shm, placement="host"
    ) as store:
        store.load({"b": numpy.zeros(3, numpy.float32)})
        with pytest.raises(TypeError, match="float64"):
            store.push("b", numpy.zeros(3))
        with pytest.raises(ValueError, match='"b"'):
            store.push("b", numpy.zeros(4, numpy.float32))
        with pytest.raises(InvalidArgumentError, match='"b" is read-only'):
            store.fetch("b", read_only())
        with pytest.raises(TypeError, match="float64"):
            store.fetch("b", numpy.zeros(3))
        with pytest.raises(ValueError, match='"b"'):
            store.fetch("b", numpy.zeros((3, 1), numpy.float32))
        if not torch.cuda.is_available():
            with pytest.raises(UnimplementedError, match='gradient of "b" is on cuda'):
                store.push("b", OnCuda())
        # A buffer of the bytes is a place too, as it was before.
        buffer = numpy.full(12, 255, numpy.uint8)
        store.fetch("b", buffer)
        assert not buffer.any()


def hyperparams():
    groups = _native.array_of(_native.Hyperparams, 1)
    groups[0].value[:4] = [0.1, 0.9, 0.99, 1e-8]
    return groups


@pytest.fixture
def session_tensors(daemon, job):
    """A session without torch's tensors: Adam, two parameters in two dtypes, loaded with ones."""
    f32, bf16 = _native.FLOAT32, _native.BFLOAT16
    parameters = [
        ParameterSpec("w", [2, 3], 6, f32, f32, 0),
        ParameterSpec("h", [4], 4, bf16, bf16, 0),
    ]
    session = Session.open(SessionSpec(job, 2, [0], parameters, daemon.shm))
    tensors = SessionTensors(session, parameters)
    session.begin_load()
    tensors.load(0, numpy.ones((2, 3), numpy.float32))
    tensors.load(1, OnlyDlpack(torch.ones(4)))  # of another dtype: masters are float32
    session.finish_load()
    yield session, tensors
    session.close()


def test_a_session_steps_with_numpy_alone(session_tensors):
    session, tensors = session_tensors
    gradient = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    of_half = torch.full((4,), 0.5, dtype=torch.bfloat16)
    tensors.push(1, 0, {1: OnlyDlpack(of_half), 0: gradient})
    outcome = session.commit(1, hyperparams())
    assert outcome.gradient_norm == pytest.approx((55 + 1) ** 0.5)
    found = numpy.full((2, 3), numpy.nan, numpy.float32)
    half = torch.zeros(4, dtype=torch.bfloat16)
    tensors.read({0: found, 1: OnlyDlpack(half)})
    address, size = session.parameter(0)
    assert found.tobytes() == ctypes.string_at(address, size)
    assert found[0, 0] == 1 and (found.flat[1:] < 1).all() and (half < 1).all()
    moment = numpy.zeros((2, 3), numpy.float32)
    tensors.fetch(_native.STATE_0, 0, moment)
    assert moment == pytest.approx(0.1 * gradient)
    count, norm = numpy.zeros((), numpy.int64), numpy.zeros(1)
    tensors.fetch(_native.STEP_COUNT, 0, count)
    tensors.fetch(_native.GRADIENT_NORM, 1, norm)
    assert count == 1 and norm[0] == pytest.approx(1.0)


def test_what_a_session_refuses_changes_nothing(session_tensors):
    session, tensors = session_tensors
    good = numpy.ones((2, 3), numpy.float32)
    half = OnlyDlpack(torch.ones(4, dtype=torch.bfloat16))
    for wrong, kind, message in (
        (numpy.ones((3, 2), numpy.float32), InvalidArgumentError, "shape"),
        (numpy.ones((2, 3)), InvalidArgumentError, "float64, not float32"),
        (numpy.ones((3, 2), numpy.float32).T, InvalidArgumentError, "not contiguous"),
        (OnCuda(), InvalidArgumentError, "shape"),
        ([1.0], InvalidArgumentError, "is a list"),
    ):
        with pytest.raises(kind, match=message) as raised:
            tensors.push(1, 0, {0: wrong, 1: half})
        assert 'the gradient of "w"' in str(raised.value)
    with pytest.raises(InvalidArgumentError, match="float32, not bfloat16"):
        tensors.push(1, 0, {0: good, 1: numpy.ones(4, numpy.float32)})
    with pytest.raises(OutOfRangeError, match="there are 2"):
        tensors.push(1, 0, {2: good})
    with pytest.raises(InvalidArgumentError, match="read-only"):
        tensors.read({0: numpy.zeros((2, 3), numpy.float32), 1: half_place()})
    with pytest.raises(InvalidArgumentError, match="int64"):
        tensors.fetch(_native.STEP_COUNT, 0, numpy.zeros(1))
    with pytest.raises(InvalidArgumentError):
        tensors.fetch(_native.MASTER, 0, numpy.zeros(5, numpy.float32))
    # None of these pushes is in the step.
    assert session.commit(1, hyperparams()).gradient_norm == 0
    found = numpy.zeros((2, 3), numpy.float32)
    session.read_parameters(array.array("I", [0]), array.array("Q", [found.ctypes.data]))
    assert (found == 1).all()


def half_place():
    """A place for "h" that is read-only: numpy has no bfloat16, so the flag is set by hand."""

    class ReadOnly(OnlyArrayInterface):
        dtype = "bfloat16"

        @property
        def __array_interface__(self):
            address = self.array.ctypes.data
            return {"shape": (4,), "typestr": "<V2", "data": (address, True), "version": 3}

    return ReadOnly(numpy.zeros(4, numpy.uint16))
