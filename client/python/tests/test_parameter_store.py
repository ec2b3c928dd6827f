"""Parameters that are fetched one by one: the same steps as with a model in this process."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import socket
from collections.abc import Iterator

import optstate
import pytest
import torch
from daemon import Daemon, start_daemon_with_disks

# Few frames of small sub-groups, and few of their parameters in memory.
SMALL = {"sub_group_size": 4096, "max_in_cpu": "64KiB"}
SHAPES = {"a": (70, 100), "b": (5,), "none": (0, 3), "c": (33, 333)}


@pytest.fixture(scope="module")
def disk_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    running = start_daemon_with_disks(tmp_path_factory.mktemp("daemon"), "disk")
    yield running
    running.stop()


@pytest.fixture(params=["shm", "grpc_unix"])
def endpoint(request, disk_daemon) -> str:
    return getattr(disk_daemon, request.param)


def values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def specs(dtype: torch.dtype = torch.float32) -> dict[str, tuple]:
    return {name: (shape, dtype) for name, shape in SHAPES.items()}


def take_steps(store, steps, dtype=torch.float32):
    for step in steps:
        for name, gradient in values(100 + step, dtype).items():
            store.push(name, gradient)
        assert store.step(max_norm=3.0).applied


def reference(dtype, steps, optimizer=torch.optim.AdamW, **options):
    """Returns what optstate's optimizer over tensors makes of the same values."""
    tensors = {name: torch.nn.Parameter(v) for name, v in values(1, dtype).items()}
    served = getattr(optstate, optimizer.__name__)(tensors.items(), max_norm=3.0, **options)
    for step in steps:
        for name, gradient in values(100 + step, dtype).items():
            tensors[name].grad = gradient
        served.step()
    served.close()
    return {name: tensor.detach() for name, tensor in tensors.items()}


def assert_same(store, expected):
    for name, found in store.items():
        assert torch.equal(found, expected[name]), name


@pytest.mark.parametrize("placement", ["nvme", "host", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_a_model_in_memory(endpoint, job, placement, dtype):
    small = SMALL if placement == "nvme" else {}
    with optstate.ParameterStore(
        specs(dtype), lr=0.01, job=job, endpoint=endpoint, placement=placement, **small
    ) as store:
        assert store.needs_values and store.committed_step == 0
        assert store.load(values(1, dtype))
        assert not store.needs_values
        for name, expected in values(1, dtype).items():
            assert torch.equal(store.fetch(name), expected)
        take_steps(store, range(3), dtype)
        assert store.committed_step == 3
        assert_same(store, reference(dtype, range(3), lr=0.01))


@pytest.mark.parametrize("options", [{"master": "split"}, {"state_dtype": "dynamic8"}])
def test_formats(endpoint, job, options):
    dtype = torch.bfloat16
    with optstate.ParameterStore(
        specs(dtype), lr=0.01, job=job, endpoint=endpoint, **SMALL, **options
    ) as store:
        store.load(values(1, dtype).items())
        take_steps(store, range(3), dtype)
        assert_same(store, reference(dtype, range(3), lr=0.01, **options))


def test_a_job_is_gone_on_with(endpoint, job):
    def open_store():
        return optstate.ParameterStore(specs(), lr=0.01, job=job, endpoint=endpoint, **SMALL)

    with open_store() as store:
        store.load(values(1))
        take_steps(store, range(2))

    def no_values():
        raise AssertionError("values were asked for")
        yield

    with open_store() as store:
        assert store.committed_step == 2
        assert not store.load(no_values())  # those of the job stay
        take_steps(store, range(2, 4))
        assert_same(store, reference(torch.float32, range(4), lr=0.01))


def test_groups_and_schedules(endpoint, job):
    first, second = dict(list(specs().items())[:2]), dict(list(specs().items())[2:])
    groups = [{"params": first}, {"params": second.items(), "lr": 0.5, "max_norm": 1.0}]
    with optstate.ParameterStore(
        groups, "sgd", lr=0.1, momentum=0.9, job=job, endpoint=endpoint, **SMALL
    ) as store:
        assert store.param_groups[1]["params"] == ["none", "c"]
        store.load(values(1))
        tensors = {name: torch.nn.Parameter(v) for name, v in values(1).items()}
        served = optstate.SGD(
            [
                {"params": [tensors[name] for name in first]},
                {"params": [tensors[name] for name in second], "lr": 0.5, "max_norm": 1.0},
            ],
            lr=0.1,
            momentum=0.9,
        )
        for step in range(3):
            for name, gradient in values(100 + step).items():
                tensors[name].grad = gradient
                store.push(name, gradient)
            served.step()
            store.step()
            for groups in (served.param_groups, store.param_groups):
                groups[0]["lr"] *= 0.5
        served.close()
        assert_same(store, {name: tensor.detach() for name, tensor in tensors.items()})


def test_a_parameter_without_a_gradient_stays(endpoint, job):
    with optstate.ParameterStore(specs(), job=job, endpoint=endpoint, **SMALL) as store:
        store.load(values(1))
        store.push("a", values(2)["a"])
        store.step()
        assert torch.equal(store.fetch("c"), values(1)["c"])
        assert not torch.equal(store.fetch("a"), values(1)["a"])


def test_micro_steps(endpoint, job):
    with optstate.ParameterStore(
        specs(), "sgd", lr=1.0, job=job, endpoint=endpoint, accumulate=True, **SMALL
    ) as store:
        store.load(values(1))
        for step in range(2):
            for micro in range(3):
                for name, gradient in values(10 * step + micro).items():
                    store.push(name, gradient)
                store.end_micro_step()
            store.step()
        expected = values(1)
        for step in range(2):
            for name in SHAPES:
                gradients = [values(10 * step + micro)[name] for micro in range(3)]
                expected[name] = expected[name] - (gradients[0] + gradients[1] + gradients[2])
        for name, found in store.items():
            torch.testing.assert_close(found, expected[name])


def test_a_skipped_step_and_an_aborted_one(endpoint, job):
    with optstate.ParameterStore(specs(), job=job, endpoint=endpoint, **SMALL) as store:
        store.load(values(1))
        store.push("a", torch.full(SHAPES["a"], float("inf")))
        outcome = store.step()
        assert outcome.found_inf and not outcome.applied
        store.push("a", values(2)["a"])
        store.abort()
        store.step()
        assert_same(store, values(1))


def test_places_for_what_is_fetched(endpoint, job):
    with optstate.ParameterStore(specs(), job=job, endpoint=endpoint, **SMALL) as store:
        store.load(values(1))
        expected = values(1)["a"]
        out = torch.empty(SHAPES["a"])
        assert store.fetch("a", out) is out and torch.equal(out, expected)
        transposed = torch.empty(tuple(reversed(SHAPES["a"]))).t()
        assert torch.equal(store.fetch("a", transposed), expected)
        buffer = bytearray(4 * expected.numel())
        store.fetch("a", buffer)
        assert torch.equal(torch.frombuffer(buffer, dtype=torch.float32), expected.flatten())
        parameter = torch.nn.Parameter(torch.empty(SHAPES["a"]))
        store.fetch("a", parameter)
        assert torch.equal(parameter, expected)
        for wrong in (torch.empty(3), bytearray(5), bytes(4 * expected.numel())):
            with pytest.raises(ValueError, match='"a"'):
                store.fetch("a", wrong)
        with pytest.raises(TypeError, match="bfloat16"):
            store.fetch("a", torch.empty(SHAPES["a"], dtype=torch.bfloat16))
        with pytest.raises(KeyError, match="nothing"):
            store.fetch("nothing")


def test_what_is_pushed_and_loaded_is_checked(endpoint, job):
    with optstate.ParameterStore(specs(), job=job, endpoint=endpoint, **SMALL) as store:
        with pytest.raises(optstate.FailedPreconditionError, match="loading"):
            store.fetch("a")
        with pytest.raises(ValueError, match='"b"'):
            store.load({"a": values(1)["a"], "b": torch.zeros(6)})
        with pytest.raises(optstate.FailedPreconditionError):
            store.load({"a": values(1)["a"]})  # and the others?
        assert store.needs_values
        store.load(values(1))
        with pytest.raises(ValueError, match='"a"'):
            store.push("a", torch.zeros(3))
        with pytest.raises(TypeError, match="float64"):
            store.push("a", torch.zeros(SHAPES["a"], dtype=torch.float64))
        store.step()
        assert_same(store, values(1))


def test_arguments_are_checked():
    for wrong, message in (
        ({"optimizer": "sgdd"}, "optimizer"),
        ({"max_in_cpu": "64 apples"}, "max_in_cpu"),
        ({"reduction": "mine"}, "reduction"),
        ({"lr": float("nan")}, "learning rate"),
    ):
        with pytest.raises(ValueError, match=message):
            optstate.ParameterStore(specs(), **wrong)
    with pytest.raises(TypeError, match="alpha"):
        optstate.ParameterStore(specs(), alpha=1)
    with pytest.raises(TypeError, match="float64"):
        optstate.ParameterStore({"a": ((1,), torch.float64)})
    with pytest.raises(ValueError, match='"a"'):
        optstate.ParameterStore([("a", ((1,), torch.float32))] * 2)


def test_meta_device_parameters_are_a_layout(endpoint, job):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    with optstate.ParameterStore(
        model.named_parameters(), job=job, endpoint=endpoint, **SMALL
    ) as store:
        assert store.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
        store.load((name, torch.ones(p.shape)) for name, p in model.named_parameters())
        assert torch.equal(store.fetch("0.weight"), torch.ones(3, 4))


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


def network() -> torch.nn.Module:
    tied = Block(32)
    return torch.nn.Sequential(torch.nn.Embedding(50, 32), tied, Block(32), tied)


def losses_of(model, steps):
    for step in steps:
        tokens = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(step))
        yield model(tokens).square().mean()


def test_hooks_compute_with_a_module_on_the_meta_device(endpoint, job):
    torch.manual_seed(3)
    whole = network()
    initial = {name: p.detach().clone() for name, p in whole.named_parameters()}
    served = optstate.AdamW(whole.parameters(), lr=0.01)
    for loss in losses_of(whole, range(4)):
        served.zero_grad()
        loss.backward()
        served.step()
    served.close()
    with torch.device("meta"):
        model = network()
    with optstate.ParameterStore(
        model.named_parameters(), lr=0.01, job=job, endpoint=endpoint, **SMALL
    ) as store:
        store.load(initial)
        with store.hooks(model):
            for loss in losses_of(model, range(4)):
                assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters())
                loss.backward()
                assert all(p.grad is None for p in model.parameters())
                store.step()
        for name, parameter in whole.named_parameters():
            assert torch.equal(store.fetch(name), parameter), name


def test_hooks_are_for_the_stores_own_parameters(endpoint, job):
    with optstate.ParameterStore(specs(), job=job, endpoint=endpoint, **SMALL) as store:
        with pytest.raises(ValueError, match="no such parameter"):
            store.hooks(torch.nn.Linear(2, 2))


def test_hints_are_seen_by_operators(disk_daemon, job):
    with optstate.ParameterStore(
        specs(), job=job, endpoint=disk_daemon.grpc_unix, **SMALL
    ) as store:
        store.load(values(1))
        take_steps(store, range(1))
        before = disk_daemon.optctl("describe", "job", job)["disk"]["parameter_cache"]
        store.prefetch(["a", "c"])
        store.fetch("a")
        store.release(store.names)
        after = disk_daemon.optctl("describe", "job", job)["disk"]["parameter_cache"]
        assert int(after["bytes"]) <= 64 << 10
        assert after != before
        text = disk_daemon.run_optctl("describe", "job", job)
        assert "parameters" in text and "on disk" in text


def test_an_optimizer_over_tensors_is_refused(disk_daemon, job):
    tensors = {name: torch.nn.Parameter(v) for name, v in values(1).items()}
    with optstate.ParameterStore(
        specs(), lr=0.01, job=job, endpoint=disk_daemon.shm, **SMALL
    ) as store:
        store.load(values(1))
    for endpoint in (disk_daemon.shm, disk_daemon.grpc_unix):
        with pytest.raises(optstate.FailedPreconditionError, match="ParameterStore"):
            optstate.AdamW(tensors.items(), lr=0.01, job=job, endpoint=endpoint, placement="nvme")


def test_max_in_cpu_is_for_parameters_on_disk(disk_daemon, job):
    with pytest.raises(optstate.InvalidArgumentError, match="max_in_cpu"):
        optstate.ParameterStore(
            specs(), job=job, endpoint=disk_daemon.shm, placement="host", max_in_cpu="1MiB"
        )
    with pytest.raises(optstate.InvalidArgumentError, match="set at least"):
        optstate.ParameterStore(
            specs(), job=job, endpoint=disk_daemon.shm, sub_group_size=4096, max_in_cpu="4KiB"
        )


def test_a_daemon_without_a_disk_says_what_to_set(daemon, job):
    with pytest.raises(optstate.FailedPreconditionError, match="--nvme-dir"):
        optstate.ParameterStore(specs(), job=job, endpoint=daemon.shm)


def engine_of(daemon: Daemon, job: str) -> int:
    return int(daemon.optctl("describe", "job", job)["engine_pid"])


def test_an_engine_that_dies_within_a_step_costs_nothing(disk_daemon, endpoint, job):
    """Over gRPC the memory of gradients was given back: the next engine has them."""
    with optstate.ParameterStore(specs(), lr=0.01, job=job, endpoint=endpoint, **SMALL) as store:
        store.load(values(1))
        for step in range(4):
            for index, (name, gradient) in enumerate(values(100 + step).items()):
                store.push(name, gradient)
                if index == step:
                    os.kill(engine_of(disk_daemon, job), signal.SIGKILL)
            assert store.step(max_norm=3.0).applied
        assert_same(store, reference(torch.float32, range(4), lr=0.01))


def cut_connections(path: pathlib.Path) -> int:
    """Ends this process's connections to a socket; returns how many there were."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.getpeername() == str(path):
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
        except OSError:
            continue  # no socket, not connected, or closed since
    return cut


def test_a_connection_that_is_lost_costs_the_step(disk_daemon, job):
    """The daemon drops what the rank has staged, and the rank has given its memory back."""
    with optstate.ParameterStore(
        specs(), lr=0.01, job=job, endpoint=disk_daemon.grpc_unix, **SMALL
    ) as store:
        store.load(values(1))
        take_steps(store, range(1))
        store.push("a", values(101)["a"])
        assert cut_connections(disk_daemon.socket) > 0
        with pytest.raises(optstate.AbortedError, match="run the step again"):
            store.push("b", values(101)["b"])
            store.step()
        take_steps(store, range(1, 3))
        assert_same(store, reference(torch.float32, range(3), lr=0.01))


def test_a_durable_job_survives_a_loss_of_power(tmp_path: pathlib.Path, job):
    daemon = start_daemon_with_disks(tmp_path, "disk")
    try:
        options = {"lr": 0.01, "job": job, "endpoint": daemon.grpc_unix, "durability": "step"}
        with optstate.ParameterStore(specs(), **options, **SMALL) as store:
            store.load(values(1))
            take_steps(store, range(2))
            engine = engine_of(daemon, job)
            daemon.kill()
            os.kill(engine, signal.SIGKILL)
            shutil.rmtree(daemon.directory / "state")
            daemon.start()
        with optstate.ParameterStore(specs(), **options, **SMALL) as store:
            assert store.committed_step == 2
            take_steps(store, range(2, 4))
            assert_same(store, reference(torch.float32, range(4), lr=0.01))
    finally:
        daemon.stop()
