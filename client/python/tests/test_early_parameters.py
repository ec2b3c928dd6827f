"""Parameters come back part by part, while their step is being taken."""

from __future__ import annotations

import os
import signal
import threading

import optstate
import torch

NUMEL = 16 << 20
STEPS_MAX = 50
# A step that the engine has ended is over on the trainer's side within this.
PATIENCE_S = 0.5


class Stopper(threading.Thread):
    """Stops the engine when the first part of a step has come back."""

    def __init__(self, engine: int, parameter: torch.Tensor) -> None:
        super().__init__()
        self._engine = engine
        self._samples = parameter.detach()[:: 64 * 4096]
        self._before = self._samples.clone()
        self.returned = threading.Event()
        self.parts_of_a_step = False

    def _new(self) -> int:
        return int((self._samples != self._before).sum())

    def run(self) -> None:
        while self._new() == 0:
            pass
        os.kill(self._engine, signal.SIGSTOP)
        try:
            if not self.returned.wait(PATIENCE_S):
                self.parts_of_a_step = 0 < self._new() < self._samples.numel()
        finally:
            os.kill(self._engine, signal.SIGCONT)


def test_some_are_back_while_others_are_updated(own_daemon, job):
    parameter = torch.nn.Parameter(torch.ones(NUMEL, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    # Every step changes every element.
    optimizer = optstate.AdamW([parameter], lr=0.1, job=job, endpoint=own_daemon.shm, overlap=True)
    optimizer.step()
    engine = int(own_daemon.optctl("describe", "job", job)["engine_pid"])
    for _ in range(STEPS_MAX):
        stopper = Stopper(engine, parameter)
        stopper.start()
        optimizer.step()
        stopper.returned.set()
        stopper.join()
        assert parameter.detach().unique().numel() == 1
        if stopper.parts_of_a_step:
            break
    else:
        raise AssertionError(f"no step of {STEPS_MAX} came back in parts")
    optimizer.close()
