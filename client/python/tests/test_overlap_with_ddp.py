"""overlap_with_ddp=True, a keyword of torch's ZeroRedundancyOptimizer: steps that are begun during
backward(). It is what it stands for, or it is refused with what to give instead."""

from __future__ import annotations

import warnings

import nodes as on_nodes
import optstate
import pytest
import ranks
import sharded
import torch
from torch.nn.parallel import DistributedDataParallel
from training import bits, loss_of, small_model

nodes = on_nodes.nodes
STEPS = 12
STANDS_FOR = {"reduction": "daemon", "overlap": True, "speculative": True}
# Options by which a step that was begun may be undone.
CASES = {
    "plain": {},
    "clipped": {"max_norm": 0.05},
    "scaled": {"loss_scaler": optstate.LossScaler(init_scale=64.0, growth_interval=3)},
}


def _trained(rank, endpoint, case, **how):
    """Returns the parameters' bits after training under DDP, and which steps were applied."""
    module = small_model()
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, optstate.ddp_hook)
    optimizer = optstate.AdamW(
        module.parameters(), lr=0.01, endpoint=endpoint, **CASES[case], **how
    )
    applied = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, 2 * step + rank)
        if case == "scaled" and step == 9 and rank == 1:
            loss = loss * float("inf")
        optimizer.scale(loss).backward()
        optimizer.step()
        applied.append(optimizer.last_outcome.applied)
    optimizer.close()
    return bits(module.parameters()), applied


def _veto(connection, rank, endpoint):
    """Returns what is said, with each keyword, about steps that may be undone."""
    said = {}
    for case in CASES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _trained(rank, endpoint, case, overlap_with_ddp=True)
            _trained(rank, endpoint, case, **STANDS_FOR)
        texts = [str(each.message) for each in caught]
        said[case] = [each for each in texts if "rolled back" in each]
    return said


def test_what_may_undo_a_step_is_said_once(daemon):
    for said in ranks.run(_veto, 2, daemon.shm):
        assert said["plain"] == []
        [clipped], [scaled] = said["clipped"], said["scaled"]
        assert "with max_norm" in clipped and "with loss_scaler" in scaled


def _beside_others(connection, rank, endpoint):
    found = {}
    for case in CASES:
        found[case] = [
            _trained(rank, endpoint, case, overlap_with_ddp=True),
            _trained(rank, endpoint, case, **STANDS_FOR),
            _trained(rank, endpoint, case, reduction="daemon"),
        ]
    # torch's own under DDP, which reduces by another order of additions.
    module = small_model()
    model = DistributedDataParallel(module)
    reference = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(STEPS):
        reference.zero_grad()
        loss_of(model, 2 * step + rank).backward()
        reference.step()
    return found, bits(module.parameters())


def test_steps_have_the_same_bits_also_when_they_are_undone(daemon):
    (found, expected), (other, _) = ranks.run(_beside_others, 2, daemon.shm)
    assert found == other
    for case, (asked, stands_for, plain) in found.items():
        assert asked == stands_for == plain
        assert asked[1].count(False) == (1 if case == "scaled" else 0)
    mine, theirs = (
        [torch.frombuffer(bytearray(each), dtype=torch.float32) for each in content]
        for content in (found["plain"][0][0], expected)
    )
    sharded.assert_close(mine, theirs)


def test_the_job_is_that_of_what_it_stands_for(daemon, job):
    module = small_model()
    optimizer = optstate.AdamW(module.parameters(), lr=0.01, job=job, overlap_with_ddp=True)
    for step in range(2):
        assert not optimizer._served.attachment.gradients.has_pushed
        loss_of(module, step).backward()
        assert optimizer._served.attachment.gradients.has_pushed
        optimizer.step()
        optimizer.zero_grad()
    assert "speculation" in daemon.optctl("describe", "job", job)  # of speculative jobs alone
    optimizer.close()
    with optstate.AdamW(small_model().parameters(), overlap_with_ddp=False) as without:
        loss_of(small_model(), 0).backward()
        assert not without._served.attachment.gradients.has_pushed
        assert without._served.settings.reduction == "trainer"


INSTEAD = 'Give reduction="daemon", overlap=True in its place'


@pytest.mark.parametrize(
    ("options", "error", "texts"),
    [
        ({"reduction": "collective"}, ValueError, ["leave one out"]),
        ({"partition": "greedy"}, ValueError, ["partition='greedy'", "leave it out"]),
        (
            {"across_nodes": "replicated"},
            optstate.UnimplementedError,
            ["across_nodes='replicated'", "Leave it out", "DistributedDataParallel"],
        ),
        ({"across_nodes": "sharded"}, optstate.UnimplementedError, ["Leave it out"]),
        ({"placement": "nvme"}, optstate.UnimplementedError, ['placement="nvme"', INSTEAD]),
        ({"durability": "step"}, optstate.UnimplementedError, ["durability", INSTEAD]),
        ({"device_budget": "1GiB"}, optstate.UnimplementedError, ["device_budget", INSTEAD]),
        ({"offload_fraction": "auto"}, optstate.UnimplementedError, ['"auto"', INSTEAD]),
        ({"bucket_cap_mb": 25}, ValueError, ["bucket_cap_mb= says how step() reduces"]),
        ({"overlap_with_ddp": 1}, TypeError, ["overlap_with_ddp is 1, not True or False"]),
    ],
    ids=str,
)
def test_what_it_cannot_be_had_with(job, options, error, texts):
    module = small_model()
    before = bits(module.parameters())
    with pytest.raises(error) as raised:
        optstate.AdamW(module.parameters(), job=job, **{"overlap_with_ddp": True, **options})
    said = str(raised.value)
    assert "overlap_with_ddp" in said or "bucket_cap_mb" in options
    assert all(text in said for text in texts), said
    assert bits(module.parameters()) == before
    with optstate.AdamW(small_model().parameters(), job=job) as optimizer:
        assert optimizer.committed_step == 0


@pytest.mark.parametrize("name", ["LAMB", "Adafactor", "Muon"])
def test_optimizers_whose_steps_are_not_begun_early(name):
    matrices = [each for each in small_model().parameters() if each.dim() == 2]
    with pytest.raises(optstate.UnimplementedError) as raised:
        getattr(optstate, name)(matrices, lr=0.01, overlap_with_ddp=True)
    assert f"overlap_with_ddp=True cannot be had with {name.lower()}" in str(raised.value)
    assert INSTEAD in str(raised.value)
    getattr(optstate, name)(matrices, lr=0.01, reduction="daemon", overlap=True).close()


def _refused_by_ranks(connection, rank, endpoint):
    said = []
    with pytest.raises(ValueError) as raised:
        model = sharded.fsdp(sharded.make_model())
        optstate.AdamW(model.parameters(), endpoint=endpoint, overlap_with_ddp=True)
    said.append(str(raised.value))
    group = torch.distributed.group.WORLD
    with pytest.raises(optstate.UnimplementedError) as raised:
        optstate.AdamW(small_model().parameters(), norm_group=group, overlap_with_ddp=True)
    said.append(str(raised.value))
    module = small_model()
    optimizer = optstate.AdamW(module.parameters(), endpoint=endpoint, overlap_with_ddp=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(module, rank)).backward()
    with pytest.raises(RuntimeError) as raised:
        scaler.step(optimizer)
    said.append(str(raised.value))
    assert optimizer.committed_step == 0
    return said


def test_ranks_are_told_what_to_give_instead(daemon):
    for shards, norm_group, scaler in ranks.run(_refused_by_ranks, 2, daemon.shm):
        assert "overlap_with_ddp=True cannot be had with parameters that are sharded" in shards
        assert "leave overlap_with_ddp out" in shards
        assert "overlap_with_ddp=True cannot be had with norm_group" in norm_group
        assert "with overlap_with_ddp=True on several ranks" in scaler
        assert "loss_scaler=optstate.LossScaler" in scaler


def _on_several_nodes(connection, rank, endpoints):
    endpoint = on_nodes.enter(rank, endpoints, 1)
    with pytest.raises(optstate.UnimplementedError) as raised:
        optstate.AdamW(small_model().parameters(), endpoint=endpoint, overlap_with_ddp=True)
    return str(raised.value)


def test_several_nodes_are_told_to_leave_it_out(nodes):
    for said in ranks.run(_on_several_nodes, 2, [each.shm for each in nodes]):
        assert "overlap_with_ddp=True cannot be had with ranks on 2 nodes" in said
        assert "Leave it out" in said


def test_a_script_that_does_not_call_step_is_told_once():
    """As scripts for ZeroRedundancyOptimizer do not; nothing would be trained, without a word."""
    module = small_model()
    optimizer = optstate.AdamW(module.parameters(), overlap_with_ddp=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            loss_of(module, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(module, 2).backward()
    with pytest.warns(UserWarning, match="is taken when step\\(\\) is called") as warned:
        loss_of(module, 3).backward()
        loss_of(module, 4).backward()
    assert len(warned) == 1 and warned[0].filename == __file__
    optimizer.step()
    assert optimizer.committed_step == 3
