"""Tensors on a GPU whose records the daemon keeps on it: the bits of host memory, whatever happens.

tests/gpu/run runs this file on a machine with a GPU. Everywhere else it is skipped, and
test_device_memory.py and test_device_gradients.py run the same paths with emulated devices.
"""

from __future__ import annotations

import os
import signal

import optstate
import pytest
import sharded
import torch
import torch.distributed as dist
from daemon import Daemon
from optstate._torch.device import daemon_memory, gradient_memory
from optstate._torch.device.daemon_memory import DaemonMemory
from optstate._torch.device.gradient_memory import GradientMemory
from test_cuda import OVERLAP, SHAPES, STEPS, Pair, same_bits
from torch.distributed.device_mesh import init_device_mesh
from training import loss_of, small_model

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no GPU, so nothing of this has run here"
)

KEPT = {"offload_fraction": 0.0, "device_budget": "1GiB", "share_device_memory": True}
# Every optimizer whose updates need whole parameters.
WHOLE = ["LAMB", "Adafactor"] + ["Muon"] * hasattr(optstate, "Muon")


@pytest.fixture(scope="module")
def cuda_daemon():
    running = Daemon("--devices", "cuda")
    yield running
    running.stop()


@OVERLAP
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_of_records_that_stay_on_the_device(
    cuda_daemon, monkeypatch, caplog, dtype, overlap
):
    """They are copied there, where the driver shares memory between processes."""
    copied = []
    values = DaemonMemory.values

    def counted(self, place, dtype):
        copied.append(place.end - place.begin)
        return values(self, place, dtype)

    monkeypatch.setattr(DaemonMemory, "values", counted)
    monkeypatch.setattr(daemon_memory, "_said", set())
    pair = Pair(SHAPES, dtype, endpoint=cuda_daemon.shm, overlap=overlap, **KEPT)
    for _ in range(STEPS):
        pair.step()
    pair.close()
    refusals = [each.message for each in caplog.records if "host memory" in each.message]
    if refusals:
        pytest.skip(f"parameters came through host memory: {refusals}")
    assert sum(copied) >= sum(torch.Size(each).numel() for each in SHAPES)


@OVERLAP
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_for_records_that_stay_on_the_device(
    cuda_daemon, monkeypatch, caplog, dtype, overlap
):
    """The daemon takes them from memory there, where the driver shares it between processes."""
    marked = []
    mark = GradientMemory.mark

    def counted(self, step, indices):
        marked.append(list(indices))
        mark(self, step, indices)

    monkeypatch.setattr(GradientMemory, "mark", counted)
    monkeypatch.setattr(gradient_memory, "_said", set())
    pair = Pair(SHAPES, dtype, endpoint=cuda_daemon.shm, overlap=overlap, **KEPT)
    for _ in range(STEPS):
        pair.step()
    pair.close()
    refusals = [each.message for each in caplog.records if "host memory" in each.message]
    if refusals:
        pytest.skip(f"gradients went through host memory: {refusals}")
    assert marked


def updated_by_devices(daemon, job):
    uses = daemon.optctl("describe", "job", job)["device_updates"]
    return int(uses["device_elements"]), uses.get("problem", "")


@OVERLAP
@pytest.mark.parametrize("name", ["AdamW", *WHOLE])
def test_an_engine_that_is_killed_and_a_part_that_changes(cuda_daemon, job, name, overlap):
    """The next engine loads records anew and maps the memory of the rank anew. Devices keep copies
    of parameters for optimizers that need them whole, and share nothing with the rank."""
    shapes = [(300, 333), (1025, 64), (7, 3)]
    options = {**KEPT, "share_device_memory": False} if name in WHOLE else KEPT
    pair = Pair(shapes, name=name, endpoint=cuda_daemon.shm, job=job, overlap=overlap, **options)
    for fraction in (0.0, 0.4, 1.0, 0.0):
        pair.optimizer.set_offload_fraction(fraction)
        for _ in range(STEPS):
            pair.step(may_wait=True)
        engine = cuda_daemon.optctl("describe", "job", job)["engine_pid"]
        os.kill(int(engine), signal.SIGKILL)
        pair.step(may_wait=True)
    for _ in range(STEPS):
        pair.step(may_wait=True)
    elements, problem = updated_by_devices(cuda_daemon, job)
    assert elements > 0 and not problem
    pair.close()


@OVERLAP
def test_an_operator_takes_the_records_back(cuda_daemon, job, overlap):
    pair = Pair(SHAPES, endpoint=cuda_daemon.shm, job=job, overlap=overlap, **KEPT)
    for budget in ("1GiB", "0", "1MiB", "1GiB"):
        cuda_daemon.run_optctl("set", "job", job, f"device_budget={budget}")
        for _ in range(STEPS + 1):
            pair.step(may_wait=True)
    pair.close()


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_sharded_parameters_with_nccl(cuda_daemon, tmp_path, backend):
    """FSDP2 on a GPU, with ours and with torch's. NCCL takes one rank of a device."""
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        mine, theirs = (sharded.fsdp(sharded.make_model().cuda(), mesh=mesh) for _ in range(2))
        optimizer = optstate.AdamW(mine.parameters(), lr=0.01, model=mine, endpoint=cuda_daemon.shm)
        reference = torch.optim.AdamW(theirs.parameters(), lr=0.01)
        for step in range(STEPS):
            for model, each in ((mine, optimizer), (theirs, reference)):
                each.zero_grad()
                inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).cuda()
                (model(inputs) - inputs[:, :1].sin()).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                each.step()
        sharded.assert_close(sharded.wholes(mine), sharded.wholes(theirs))
        assert optimizer.committed_step == STEPS
        optimizer.close()
    finally:
        dist.destroy_process_group()


@OVERLAP
def test_a_checkpoint_has_what_the_device_has(cuda_daemon, job, overlap):
    """state_dict() reads records that stay on the device; loading writes them there."""
    models = [small_model(3).cuda() for _ in range(2)]
    endpoint = cuda_daemon.shm
    optimizers = [
        optstate.AdamW(
            model.parameters(),
            lr=0.01,
            endpoint=endpoint,
            job=f"{job}-{i}",
            overlap=overlap,
            **KEPT,
        )
        for i, model in enumerate(models)
    ]

    def train(which, steps):
        for step in steps:
            optimizers[which].zero_grad()
            inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).cuda()
            models[which](inputs).square().mean().backward()
            optimizers[which].step()

    train(0, range(STEPS))
    train(1, range(1))
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for which in range(2):
        train(which, range(STEPS, 2 * STEPS))
    for optimizer in optimizers:
        optimizer.close()
    assert same_bits(models[0].parameters(), models[1].parameters())
    assert loss_of(models[0].cpu(), 0).isfinite()
