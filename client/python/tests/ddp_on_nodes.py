"""Training under DistributedDataParallel on several nodes of one machine, for tests of several
modules: replicas (across_nodes="replicated"), and parameters that nodes share out ("sharded")."""

from __future__ import annotations

import nodes as on_nodes
import optstate
import pytest
import torch
from training import bits, loss_of, small_model

STEPS = 5


def make(rank, endpoints, per_node, job, kind="AdamW", seed=0, across="replicated", **kwargs):
    """Returns a model, the same under DistributedDataParallel, and its optimizer, which is of one
    node when there is one endpoint."""
    from torch.nn.parallel import DistributedDataParallel

    endpoint = on_nodes.enter(rank, endpoints, per_node)
    module = small_model(seed)
    model = DistributedDataParallel(module)
    parameters = list(module.named_parameters())
    if kind == "Muon":
        parameters = [(name, each) for name, each in parameters if each.ndim == 2]
    if len(endpoints) > 1:
        kwargs = {"across_nodes": across, **kwargs}
    optimizer = getattr(optstate, kind)(parameters, lr=0.01, job=job, endpoint=endpoint, **kwargs)
    return module, model, optimizer


def _remove_gradients(module, case, step):
    """Removes what is missing in this case. Of two nodes that share the parameters out, one has
    the first parameter, and the other one has the rest."""
    first, *rest = module.parameters()
    missing = []
    if case == "missing" and step != 2:
        missing = [module[3].bias]
    elif case == "missing on a node":
        missing = {1: [first], 3: rest}.get(step, [])
    for parameter in missing:
        parameter.grad = None


def _backward(module, model, optimizer, case, step, rank):
    """Each rank has its own data, as with a DistributedSampler."""
    for micro_step in range(2 if case == "accumulate" else 1):
        if micro_step:
            optimizer.accumulate_step()
        optimizer.zero_grad()
        loss_of(model, 100 * step + 10 * micro_step + rank).backward()
    if case == "inf":  # as DistributedDataParallel would have averaged it
        if step in (1, 3) and rank == 1:
            module[0].weight.grad[0, 0] = float("inf")
        torch.distributed.all_reduce(module[0].weight.grad)
    if case == "scaler" and step == 2:
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.found_inf = torch.tensor(float(rank == 0))
    _remove_gradients(module, case, step)


def train(connection, rank, endpoints, per_node, job, case, kwargs, pause=None, until=STEPS):
    """Trains to a step. Returns bits of the parameters and of the whole state, each step's
    (gradient norm, whether it was applied), and the last step.

    case: an optimizer's name, or what is unusual about the steps of AdamW.
    """
    kind = case if case[0].isupper() else "AdamW"
    module, model, optimizer = make(rank, endpoints, per_node, job, kind, **kwargs)
    if pause is not None:
        pause(connection, rank, optimizer)
    outcomes = []
    for step in range(optimizer.committed_step, until):
        _backward(module, model, optimizer, case, step, rank)
        optimizer.step()
        for name in ("grad_scale", "found_inf"):  # as a GradScaler does
            optimizer._served.__dict__.pop(name, None)
        outcomes.append((optimizer.last_outcome.gradient_norm, optimizer.last_outcome.applied))
    optimizer.consolidate_state_dict(to=None)
    state = optimizer.state_dict()["state"]
    tensors = [value for _, entry in sorted(state.items()) for value in entry.values()]
    result = bits(module.parameters()), bits(tensors), outcomes, optimizer.committed_step
    optimizer.close()
    return result


def same_on_all(results):
    for each in results[1:]:
        assert repr(each) == repr(results[0])
    return results[0]


def assert_as_on_one_node(results, expected):
    """Every rank has one node's bits, and norms that are equal to 12 digits."""
    for each in results:
        assert each[:2] == expected[:2] and each[3] == expected[3]
        taken = expected[2][len(expected[2]) - len(each[2]) :]
        assert [applied for _, applied in each[2]] == [applied for _, applied in taken]
        for (norm, _), (expected_norm, _) in zip(each[2], taken):
            assert norm == pytest.approx(expected_norm, rel=1e-12, nan_ok=True)
    return same_on_all(results)
