"""Every way to change a weight, and the loop that tests make them in."""

from __future__ import annotations

import ctypes
import threading

import optstate
import torch
from training import loss_of, small_model

OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def in_views(optimizer) -> set[int]:
    return optimizer._served.attachment.parameters._in_view


def step_of(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


# Every way to change a weight: `change(model)`.


def under_no_grad(model):
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def data_whole(model):
    model[0].weight.data.copy_(torch.linspace(-1, 1, model[0].weight.numel()).view(16, 8))


def data_one_element(model):
    model[3].weight.data[3, 5] = 7.0


def data_clamp(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def data_of_data(model):
    torch.clamp_(model[0].bias.data, max=0.0)


def by_numpy(model):
    model[0].weight.detach().numpy()[2] = 0.25


def by_memoryview(model):
    memoryview(model[0].bias.detach().numpy())[1] = 0.5


def by_init(model):
    torch.manual_seed(3)
    torch.nn.init.normal_(model[2].weight)
    torch.nn.init.zeros_(model[2].bias)


def by_load_state_dict(model):
    model.load_state_dict(small_model(seed=5).state_dict())


def by_load_state_dict_assign(model):
    """Other Parameters, which the optimizer does not have: as in torch."""
    model.load_state_dict(small_model(seed=5).state_dict(), assign=True)


def by_set(model):
    with torch.no_grad():
        model[0].weight.set_(torch.full((16, 8), 0.125))


def by_other_data(model):
    model[0].weight.data = torch.full((16, 8), 0.125)


def by_untyped_storage(model):
    model[0].bias.untyped_storage().fill_(0)


def by_storage_copy(model):
    model[0].bias.untyped_storage().copy_(torch.ones(16).untyped_storage())


def by_dlpack(model):
    torch.from_dlpack(model[0].bias.detach()).fill_(0.25)


def by_apply(model):
    model[0].bias.detach().apply_(lambda value: value / 2)


def by_pointer(model):
    weight = model[0].weight
    ctypes.memset(weight.data_ptr(), 0, weight.numel() * weight.element_size())


def by_another_thread(model):
    thread = threading.Thread(target=data_whole, args=(model,))
    thread.start()
    thread.join()


def by_vector(model):
    vector = torch.nn.utils.parameters_to_vector(model.parameters()) * 0.5
    torch.nn.utils.vector_to_parameters(vector.detach().clone(), model.parameters())


def by_swapping_an_average(model):
    """An EMA that is put in for an evaluation, and taken out again."""
    own = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter))
    for parameter, value in zip(model.parameters(), own):
        parameter.data.copy_(value)


def by_foreach(model):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def by_state_dict(model):
    for value in model.state_dict().values():
        value.mul_(0.5)


def by_a_dtype_there_and_back(model):
    model.double().float()


def by_parametrization(model):
    """Taken off again, it leaves what the weight was made to be."""
    torch.manual_seed(4)
    torch.nn.utils.parametrizations.orthogonal(model[3], "weight")
    torch.nn.utils.parametrize.remove_parametrizations(model[3], "weight")


def by_weight_norm(model):
    weight = model[0].weight
    with torch.no_grad():
        norm = weight.norm(dim=1, keepdim=True)
    weight.data = torch._weight_norm(weight.detach(), norm / 2, 0)


def by_a_row_exchanged(model):
    """Equal sums of all elements."""
    weight = model[0].weight.data
    weight[[1, 2]] = weight[[2, 1]].clone()


def by_copy_from_shared_memory(model):
    """Copies a value from shared memory, as parameters come from another process."""
    model[0].weight.data.copy_(torch.full((16, 8), 0.5).share_memory_())


CHANGES = [
    under_no_grad,
    data_whole,
    data_one_element,
    data_clamp,
    data_of_data,
    by_numpy,
    by_memoryview,
    by_init,
    by_load_state_dict,
    by_load_state_dict_assign,
    by_set,
    by_other_data,
    by_untyped_storage,
    by_storage_copy,
    by_dlpack,
    by_apply,
    by_pointer,
    by_another_thread,
    by_vector,
    by_swapping_an_average,
    by_foreach,
    by_state_dict,
    by_a_dtype_there_and_back,
    by_parametrization,
    by_weight_norm,
    by_a_row_exchanged,
    by_copy_from_shared_memory,
]
# After these some parameters are elsewhere.
MOVES = [
    by_set,
    by_other_data,
    by_vector,
    by_a_dtype_there_and_back,
    by_parametrization,
    by_weight_norm,
]


def trained(change, when, make):
    model = small_model()
    optimizer = make(model)
    if when == "before the first step":
        change(model)
    for step in range(6):
        if when == "between steps" and step in (2, 3, 5):
            change(model)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if when == "after backward" and step in (0, 2, 3, 5):
            change(model)
        optimizer.step()
    return model, optimizer


def served(model, endpoint, *, kind=optstate.AdamW, **options):
    if kind is optstate.AdamW:
        options = {**OPTIONS, **options}
    return kind(model.named_parameters(), endpoint=endpoint, **options)
