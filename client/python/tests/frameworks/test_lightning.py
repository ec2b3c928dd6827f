"""Lightning's Trainer and Fabric: wrappers, mixed precision with clipping, checkpoints."""

from __future__ import annotations

import logging
import warnings

import optstate
import pytest
import torch
from beside_torch import OPTIONS, assert_same_parameters, assert_same_state, assert_views
from tiny import batch, loss_on, tiny_model

lightning = pytest.importorskip("lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

STEPS = 8


class Module(lightning.LightningModule):
    def __init__(self, optimizer_class, keywords, manual=False) -> None:
        super().__init__()
        self.model = tiny_model()
        self.optimizer_class, self.keywords = optimizer_class, keywords
        self.automatic_optimization = not manual
        self.seen = []

    def training_step(self, rows, index):
        loss = loss_on(self.model, rows[0][0])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            if isinstance(optimizer, optstate.AdamW):
                parameter = self.model[0].weight
                self.seen.append(
                    (
                        optimizer.committed_step,
                        int(optimizer.fetch_state(parameter)["step"]),
                        len(optimizer.state_dict()["state"]),
                        optimizer.job,
                    )
                )
        return loss

    def configure_optimizers(self):
        optimizer = self.optimizer_class(self.parameters(), **OPTIONS, **self.keywords)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self):
        rows = torch.stack([batch(step) for step in range(STEPS)])
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=1)


class Kill(lightning.Callback):
    """Ends a run between two steps, as a signal would."""

    class Killed(Exception):
        pass

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise self.Killed


def scaled(settings, plugins):
    """float16 with a GradScaler, which Lightning has on GPUs alone unless it is given."""
    if settings.get("precision") != "16-mixed":
        return settings
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    return {**settings, "precision": None, "plugins": [plugin]}


def fit(directory, module, *, checkpoint=None, callbacks=(), **settings):
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=directory, every_n_train_steps=4, save_top_k=-1, filename="{step}"
    )
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saves, *callbacks],
        **scaled(settings, lightning.pytorch.plugins),
    )
    trainer.fit(module, ckpt_path=checkpoint)
    return trainer


def inner(trainer):
    return trainer.optimizers[0]


SETTINGS = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05},
    "bf16": {"precision": "bf16-mixed"},
    "bf16, clipped": {"precision": "bf16-mixed", "gradient_clip_val": 0.05},
    "fp16, clipped": {"precision": "16-mixed", "gradient_clip_val": 0.05},
    "fp16, by value": {
        "precision": "16-mixed",
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "two micro-steps": {"accumulate_grad_batches": 2, "max_epochs": 2},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_fit(settings, tmp_path, job):
    modules, trainers = [], []
    for optimizer_class, keywords in ((torch.optim.AdamW, {}), (optstate.AdamW, {"job": job})):
        module = Module(optimizer_class, keywords)
        directory = tmp_path / optimizer_class.__module__
        trainers.append(fit(directory, module, **SETTINGS[settings]))
        modules.append(module)
    assert_same_parameters(modules[1], modules[0])
    assert_same_state(inner(trainers[1]).state_dict(), inner(trainers[0]).state_dict())
    assert_views(inner(trainers[1]))


def test_manual_optimization(tmp_path, job):
    """The result of self.optimizers() is a class of ours without our attributes."""
    torchs = Module(torch.optim.AdamW, {}, manual=True)
    fit(tmp_path / "torch", torchs)
    ours = Module(optstate.AdamW, {"job": job}, manual=True)
    fit(tmp_path / "ours", ours)
    assert_same_parameters(ours, torchs)
    assert ours.seen == [(step, step, 4, job) for step in range(1, STEPS + 1)]


def checkpoint_of(directory, step):
    return str(directory / f"step={step}.ckpt")


@pytest.fixture(scope="module")
def resumed_with_torch(tmp_path_factory):
    """Returns a run of torch that is resumed; its data begin anew, as loaders keep no position."""
    directory = tmp_path_factory.mktemp("torch")
    fit(directory, Module(torch.optim.AdamW, {}))
    module = Module(torch.optim.AdamW, {})
    trainer = fit(directory / "resumed", module, checkpoint=checkpoint_of(directory, 4))
    return module, inner(trainer)


@pytest.mark.parametrize("job_is", ["new", "live"])
def test_resuming_from_a_checkpoint(job_is, resumed_with_torch, tmp_path, job):
    killed = Module(optstate.AdamW, {"job": job})
    with pytest.raises(Kill.Killed):
        fit(tmp_path, killed, callbacks=[Kill(6)])
    ours = Module(optstate.AdamW, {"job": job if job_is == "live" else f"{job}-new"})
    trainer = fit(tmp_path / "resumed", ours, checkpoint=checkpoint_of(tmp_path, 4))
    torchs, reference = resumed_with_torch
    assert_same_parameters(ours, torchs)
    assert_same_state(inner(trainer).state_dict(), reference.state_dict())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_fabric(precision, tmp_path, job):
    runs = []
    for optimizer_class, keywords in ((torch.optim.AdamW, {}), (optstate.AdamW, {"job": job})):
        settings = scaled({"precision": precision}, lightning.fabric.plugins)
        fabric = lightning.Fabric(accelerator="cpu", devices=1, **settings)
        module = tiny_model()
        optimizer = optimizer_class(module.parameters(), **OPTIONS, **keywords)
        model, wrapped = fabric.setup(module, optimizer)
        for step in range(6):
            wrapped.zero_grad()
            fabric.backward(loss_on(model, batch(step)))
            fabric.clip_gradients(model, wrapped, max_norm=0.05)
            wrapped.step()
            if step == 3:
                path = str(tmp_path / f"{optimizer_class.__module__}.pt")
                fabric.save(path, {"model": model, "optimizer": wrapped})
        fabric.load(path, {"model": model, "optimizer": wrapped})
        for step in range(4, 6):
            wrapped.zero_grad()
            fabric.backward(loss_on(model, batch(step)))
            wrapped.step()
        runs.append((module, wrapped))
    (torchs, reference), (ours, wrapped) = runs
    assert_same_parameters(ours, torchs)
    assert_same_state(wrapped.state_dict(), reference.state_dict())
    assert wrapped.committed_step == 8 and wrapped.job == job
    assert wrapped.fetch_state(ours[0].weight)["step"] == 6
