"""Hugging Face's Trainer: the daemon's optimizer by its keywords, checkpoints, resuming."""

from __future__ import annotations

import logging

import optstate
import pytest
import torch
from beside_torch import (
    OPTIONS,
    assert_same_losses,
    assert_same_parameters,
    assert_same_state,
    assert_views,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS = 8
SAVED_AT = 4


class Killed(Exception):
    """Ends a run between two steps, as a signal would."""


class KillAfter(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise Killed


def tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=16,
        vocab_size=64,
        n_positions=16,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def tiny_data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (64, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(directory, model, *, callbacks=(), optimizers=(None, None), keywords=None, **more):
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=STEPS,
        save_steps=SAVED_AT,
        per_device_train_batch_size=4,
        learning_rate=OPTIONS["lr"],
        weight_decay=0.1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **more,
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=tiny_data(),
        callbacks=list(callbacks),
        optimizers=optimizers,
        optimizer_cls_and_kwargs=keywords,
    )


def served(**keywords):
    return optstate.AdamW, {**OPTIONS, **keywords}


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def optimizer_of(trainer) -> optstate.AdamW:
    """Without Accelerate's wrapper."""
    found = trainer.optimizer
    return getattr(found, "optimizer", found)


def saved_state(directory, step: int) -> dict:
    return torch.load(directory / f"checkpoint-{step}" / "optimizer.pt", weights_only=True)


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    """torch.optim.AdamW in an uninterrupted run."""
    directory = tmp_path_factory.mktemp("torch")
    trainer = trainer_of(directory, tiny_model(), keywords=(torch.optim.AdamW, dict(OPTIONS)))
    trainer.train()
    return trainer, directory


def assert_as(torchs, trainer) -> None:
    """Parameters and state at the end are those of torch's uninterrupted run."""
    assert trainer.state.global_step == STEPS
    assert_same_parameters(trainer.model, torchs.model)
    assert_same_state(optimizer_of(trainer).state_dict(), torchs.optimizer.state_dict())


def test_a_run_and_its_checkpoints(torchs, tmp_path, job):
    reference, directory = torchs
    trainer = trainer_of(tmp_path, tiny_model(), keywords=served(job=job))
    trainer.train()
    assert_same_losses(losses_of(trainer), losses_of(reference))
    assert_as(reference, trainer)
    for step in (SAVED_AT, STEPS):
        assert_same_state(saved_state(tmp_path, step), saved_state(directory, step))
    assert optimizer_of(trainer).committed_step == STEPS
    assert optimizer_of(trainer).job == job
    assert_views(optimizer_of(trainer))


@pytest.mark.parametrize("how", ["model", "named_parameters"])
def test_names_by_keyword(torchs, tmp_path, job, daemon, how):
    """The Trainer takes a keyword called model for itself, and parts the parameters into two
    groups."""
    model = tiny_model()
    if how == "model":
        keywords = served(job=job, named_parameters=model)
    else:
        keywords = served(job=job, named_parameters=model.named_parameters())
    trainer = trainer_of(tmp_path, model, keywords=keywords)
    trainer.train()
    assert_as(torchs[0], trainer)
    names = [each["name"] for each in daemon.parameters(job)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_an_optimizer_made_before(tmp_path, job):
    trainers = []
    for optimizer_class, keywords in ((torch.optim.AdamW, {}), (optstate.AdamW, {"job": job})):
        model = tiny_model()
        optimizer = optimizer_class(model.parameters(), **OPTIONS, **keywords)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        directory = tmp_path / optimizer_class.__module__
        trainer = trainer_of(directory, model, optimizers=(optimizer, scheduler))
        trainer.train()
        trainers.append(trainer)
    torchs, ours = trainers
    assert_same_losses(losses_of(ours), losses_of(torchs))
    assert_as(torchs, ours)


def test_gradients_of_two_batches(tmp_path, job):
    trainers = []
    for keywords in ((torch.optim.AdamW, dict(OPTIONS)), served(job=job)):
        directory = tmp_path / keywords[0].__module__
        trainer = trainer_of(
            directory, tiny_model(), keywords=keywords, gradient_accumulation_steps=2, bf16=True
        )
        trainer.train()
        trainers.append(trainer)
    torchs, ours = trainers
    assert_same_losses(losses_of(ours), losses_of(torchs))
    assert_as(torchs, ours)


def killed_run(directory, job: str, **keywords) -> None:
    """Takes 6 of 8 steps, with a checkpoint of step 4, and leaves its job to the daemon."""
    trainer = trainer_of(
        directory,
        tiny_model(),
        keywords=served(job=job, **keywords),
        callbacks=[KillAfter(6)],
    )
    with pytest.raises(Killed):
        trainer.train()
    optimizer_of(trainer).close()


@pytest.mark.parametrize("how", ["keywords", "made before"])
@pytest.mark.parametrize("job_is", ["new", "live"])
def test_resuming_from_a_checkpoint(torchs, tmp_path, job, job_is, how):
    """Parameters and state go on from the checkpoint, whatever the job has."""
    killed_run(tmp_path, job)
    if job_is == "new":
        job = f"{job}-new"
    model = tiny_model()
    if how == "keywords":
        trainer = trainer_of(tmp_path, model, keywords=served(job=job))
    else:
        decay = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = optstate.AdamW(groups, **OPTIONS, job=job)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
        trainer = trainer_of(tmp_path, model, optimizers=(optimizer, scheduler))
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED_AT}"))
    assert_as(torchs[0], trainer)


def test_a_checkpoint_that_is_not_wanted_over_a_live_job(tmp_path, job):
    """resume="error": it is said, and the job is as it was."""
    killed_run(tmp_path, job)
    trainer = trainer_of(tmp_path, tiny_model(), keywords=served(job=job, resume="error"))
    with pytest.raises((RuntimeError, ValueError), match=job):
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED_AT}"))
    optimizer_of(trainer).close()
    again = optstate.AdamW  # the job still has 6 steps
    model = tiny_model()
    groups = trainer_of(tmp_path / "other", model, keywords=(again, {**OPTIONS, "job": job}))
    groups.create_optimizer()
    assert groups.optimizer.committed_step == 6


def test_starting_anew_over_a_live_job_is_said(tmp_path, job, caplog):
    killed_run(tmp_path, job)
    trainer = trainer_of(
        tmp_path / "anew", tiny_model(), keywords=served(job=job), callbacks=[KillAfter(1)]
    )
    with caplog.at_level(logging.INFO, logger="optstate"), pytest.raises(Killed):
        trainer.train()
    (said,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert said.name == "optstate"
    assert "begins with the parameters of step 6" in said.getMessage()
    assert f"optctl delete job {job}" in said.getMessage()
