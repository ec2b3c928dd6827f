"""Settings that shards exclude: an error says so on every rank, and what to do."""

from __future__ import annotations

import optstate
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from sharded import assert_same_bits, wholes


def _mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def _refused(connection, rank, endpoint):
    model = sharded.fsdp(sharded.make_model())
    matrices = [each for each in model.parameters() if each.dim() == 2]
    said = {}
    for what, error, make in (
        ("lamb", optstate.UnimplementedError, lambda: optstate.LAMB(matrices)),
        ("adafactor", optstate.UnimplementedError, lambda: optstate.Adafactor(matrices)),
        ("muon", optstate.UnimplementedError, lambda: optstate.Muon(matrices)),
        ("reduction", ValueError, lambda: optstate.AdamW(matrices, reduction="daemon")),
        ("greedy", ValueError, lambda: optstate.AdamW(matrices, partition="greedy")),
        ("overlap", ValueError, lambda: optstate.AdamW(matrices, overlap=True)),
    ):
        with pytest.raises(error) as raised:
            make()
        said[what] = str(raised.value)
    # Nothing of that stands in the way of what comes next.
    optimizer = optstate.AdamW(model.parameters(), endpoint=endpoint)
    sharded.train(model, optimizer, range(2))
    return said


def test_optimizers_and_options(daemon):
    for said in ranks.run(_refused, 2, daemon.shm):
        for name in ("lamb", "adafactor", "muon"):
            assert f"an update of {name} needs it whole" in said[name]
            assert '"0.0" is sharded' in said[name] and "AdamW" in said[name]
        assert "leave reduction out" in said["reduction"]
        assert "Leave partition out" in said["greedy"]
        assert "leave overlap out" in said["overlap"]


def _partial(connection, rank):
    from torch.distributed.tensor import DTensor, Partial

    tensor = DTensor.from_local(torch.ones(4), _mesh(), [Partial()])
    with pytest.raises(TypeError, match="Partial placement") as raised:
        optstate.AdamW([torch.nn.Parameter(tensor)])
    return str(raised.value)


def test_partial_placements(daemon):
    for said in ranks.run(_partial, 2):
        assert 'parameter "0.0"' in said and "Redistribute" in said


def _meta(connection, rank):
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4)
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=_mesh())
    with pytest.raises(TypeError, match="is on the meta device"):
        optstate.AdamW(model.parameters())
    return True


def test_meta_parameters(daemon):
    assert ranks.run(_meta, 2) == [True, True]


def _stages(connection, rank):
    """Ranks with other parameters; and one whose own check fails, which ends the others too."""
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh()
    model = torch.nn.Linear(4, 4 + rank)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="process_group=") as raised:
        optstate.AdamW(model.parameters())
    model = sharded.fsdp(sharded.make_model())
    parameters = list(model.parameters())
    if rank == 1:
        parameters[2] = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises((TypeError, optstate.OptstateError), match="complex"):
        optstate.AdamW(parameters)
    return str(raised.value)


def test_ranks_that_disagree(daemon):
    for said in ranks.run(_stages, 2):
        assert "[4, 4] on rank 0" in said and "[5, 4]" in said


def _a_part_of_the_mesh(connection, rank):
    model = sharded.fsdp(sharded.make_model())
    group = dist.new_group([0])
    if rank == 0:
        with pytest.raises(ValueError, match="all ranks of its mesh"):
            optstate.AdamW(model.parameters(), process_group=group)
    return True


def test_ranks_that_hold_no_whole_parameter(daemon):
    assert ranks.run(_a_part_of_the_mesh, 2) == [True, True]


def _laid_out(rank, how, other):
    """Returns a matrix of 6 x 6 of which 3 ranks have two rows each, but for rank `other`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, both = _mesh(), init_device_mesh("cpu", (1, 3))  # on every rank
    size, where, mesh_of_it = {
        "rows": ((2, 6), [Shard(0)], mesh),
        "replicated": ((6, 6), [Replicate()], mesh),
        "columns": ((6, 2), [Shard(1)], mesh),
        "other mesh": ((6, 6), [Shard(0), Replicate()], both),
        "other mesh, same rows": ((2, 6), [Replicate(), Shard(0)], both),
        "plain": ((6, 6), None, None),
    }[how if rank == other else "rows"]
    local = torch.zeros(size)
    if where is None:
        return torch.nn.Parameter(local)
    return torch.nn.Parameter(
        DTensor.from_local(local, mesh_of_it, where, run_check=False, shape=(6, 6), stride=(6, 1))
    )


def _one_lays_it_out_otherwise(connection, rank, cases):
    said = []
    for how, other in cases:
        first = sharded.fsdp(torch.nn.Sequential(torch.nn.Linear(4, 4)))[0].weight
        pairs = [("first", first), ("second", _laid_out(rank, how, other))]
        with pytest.raises(ValueError, match="all ranks of its mesh") as raised:
            optstate.AdamW(pairs)
        said.append(str(raised.value))
    with optstate.AdamW([_laid_out(rank, "other mesh, same rows", 1)]) as optimizer:
        assert optimizer.committed_step == 0  # the parts are the same
    return said


LAYOUTS = {
    "replicated": "[6, 6], (Replicate(),) on a mesh of [3]",
    "other mesh": "[6, 6], (Shard(dim=0), Replicate()) on a mesh of [1, 3]",
    "columns": "[6, 2], (Shard(dim=1),) on a mesh of [3]",
    "plain": "[6, 6], whole, and no DTensor",
}


def test_the_rank_that_lays_a_parameter_out_otherwise_is_named(daemon):
    cases = [(how, other) for how in LAYOUTS for other in (1, 2)]
    of_ranks = ranks.run(_one_lays_it_out_otherwise, 3, cases)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    for (how, other), said in zip(cases, of_ranks[0]):
        assert 'of parameter "second" the 3 ranks of the job hold' in said
        assert "rank 0 has [2, 6], (Shard(dim=0),) on a mesh of [3]" in said
        assert f"Rank {other} is the first that lays it out otherwise" in said
        assert f"rank {other} has {LAYOUTS[how]}" in said
        # Two rows, two rows and two columns are as many elements as the matrix has.
        counts = "60 elements, and it has 36"
        assert (counts if how != "columns" else "in parts of different ranks") in said


def _the_first_differs(connection, rank):
    with pytest.raises(ValueError) as raised:
        optstate.AdamW([_laid_out(rank, "replicated", 0)])
    return str(raised.value)


def test_rank_0_that_lays_a_parameter_out_otherwise(daemon):
    for said in ranks.run(_the_first_differs, 3):
        assert "Rank 1 is the first" in said
        assert "rank 0 has [6, 6], (Replicate(),)" in said and "rank 1 has [2, 6]" in said


def _replicas(connection, rank):
    """Plain tensors beside shards, and replicas of a shard, are equal on all ranks."""
    from torch.distributed.tensor import DTensor, Replicate

    model = sharded.fsdp(sharded.make_model())
    plain = torch.nn.Parameter(torch.full((3,), float(rank)))
    with pytest.raises(ValueError, match="other values on other ranks") as raised:
        optstate.AdamW([*model.parameters(), plain])
    said = [str(raised.value)]
    replica = DTensor.from_local(torch.full((3,), float(rank)), _mesh(), [Replicate()])
    with pytest.raises(ValueError, match="other values on other ranks") as raised:
        optstate.AdamW([torch.nn.Parameter(replica)])
    return [*said, str(raised.value)]


def test_replicas_that_differ(daemon):
    for said in ranks.run(_replicas, 3):
        assert '"0.6"' in said[0] and '"0.0"' in said[1]


def _attach(connection, rank, endpoint, job, how):
    if how == "tensor parallel":
        from torch.distributed.tensor import Shard, distribute_tensor

        model = sharded.make_model()
        for module in model.modules():
            for name, each in list(module.named_parameters(recurse=False)):
                where = [Shard(each.dim() - 1)]
                made = torch.nn.Parameter(distribute_tensor(each.detach(), _mesh(), where))
                module.register_parameter(name, made)
    elif how == "plain":
        model = sharded.make_model()
    else:
        model = sharded.fsdp(sharded.make_model())
    before = wholes(model)
    try:
        optimizer = optstate.AdamW(
            model.parameters(), lr=0.01, model=model, endpoint=endpoint, job=job
        )
    except optstate.FailedPreconditionError as error:
        assert_same_bits(wholes(model), before)
        return str(error)
    sharded.train(model, optimizer, range(optimizer.committed_step, 3))
    return optimizer.committed_step


@pytest.mark.parametrize(
    ("world", "how", "difference"),
    [
        (3, "fsdp", "the layout is shards of 2 ranks in the job, shards of 3 ranks here"),
        (1, "fsdp", "the layout is shards of 2 ranks in the job, shards of 1 rank here"),
        (2, "tensor parallel", 'parameter 0 "0.weight", the shard of rank 0 is'),
        (2, "plain", "the layout is shards of 2 ranks in the job, whole parameters here"),
    ],
)
def test_another_mesh(world, how, difference, daemon, job):
    assert ranks.run(_attach, 2, daemon.shm, job, "fsdp") == [3, 3]
    for said in ranks.run(_attach, world, daemon.shm, job, how):
        assert difference in said and f"optctl delete job {job}" in said
        assert how == "plain" or ("checkpoint" in said and 'across_nodes="sharded"' in said)
    assert ranks.run(_attach, 2, daemon.shm, job, "fsdp") == [3, 3]  # nothing was lost
    assert daemon.optctl("describe", "job", job)["committed_step"] == "3"
