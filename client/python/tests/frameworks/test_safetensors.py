"""safetensors saves views as ordinary tensors, and what is loaded from its files is trained on."""

from __future__ import annotations

import optstate
import pytest
import torch
from beside_torch import OPTIONS, assert_same_parameters
from tiny import batch, loss_on, tiny_model

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


def trained(optimizer_class, load, path, **keywords):
    """Saves the model between steps, and loads it again two steps later, as `load` does."""
    model = tiny_model()
    optimizer = optimizer_class(model.parameters(), **OPTIONS, **keywords)
    for step in range(6):
        if step == 2:
            safetensors.save_model(model, path)
            saved = {name: each.clone() for name, each in model.state_dict().items()}
        if step == 4:
            load(model, path)
            for name, each in model.state_dict().items():
                assert torch.equal(each, saved[name])
        optimizer.zero_grad()
        loss_on(model, batch(step)).backward()
        optimizer.step()
    return model, optimizer


def by_load_model(model, path):
    safetensors.load_model(model, path)


def by_state_dict(model, path):
    model.load_state_dict(safetensors.load_file(path))


def by_data(model, path):
    values = safetensors.load_file(path)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values[name])


def by_mapped_memory(model, path):
    """The parameters' memory becomes the mapped file's."""
    values = safetensors.load_file(path)
    for name, parameter in model.named_parameters():
        parameter.data = values[name]


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("load", [by_load_model, by_state_dict, by_data, by_mapped_memory])
@pytest.mark.filterwarnings("ignore:.* without a trace")
def test_a_model_that_is_saved_and_loaded(load, views, job, tmp_path):
    torchs, _ = trained(torch.optim.AdamW, load, tmp_path / "torch.safetensors")
    ours, optimizer = trained(
        optstate.AdamW, load, tmp_path / "ours.safetensors", job=job, parameters_as_views=views
    )
    assert_same_parameters(ours, torchs)
    optimizer.close()


def test_a_model_whose_file_is_mapped_gets_views(job, tmp_path):
    model = tiny_model()
    path = tmp_path / "model.safetensors"
    safetensors.save_model(model, path)
    before = path.read_bytes()
    model.load_state_dict(safetensors.load_file(path), assign=True)
    with optstate.AdamW(model.parameters(), **OPTIONS, job=job) as optimizer:
        assert optimizer.memory().copies == 0
        loss_on(model, batch(0)).backward()
        optimizer.step()
    assert path.read_bytes() == before
