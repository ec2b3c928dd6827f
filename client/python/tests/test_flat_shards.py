"""flat_shard(): pieces of flat tensors, as trainers have them that shard optimizer state."""

from __future__ import annotations

import copy

import nodes as on_nodes
import optstate
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from sharded import assert_close, assert_same_bits

STEPS = 5
nodes = on_nodes.nodes


def _flat(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


class Zero:
    """A trainer that shards as ZeRO does: all parameters in a row, of which each rank has one
    piece; the whole is gathered after each step."""

    def __init__(self, make, cuts):
        """make(pieces): an optimizer. cuts: where the ranks' pieces begin, and the end."""
        self.model, self.cuts, rank = sharded.make_model(), cuts, dist.get_rank()
        flat = _flat(self.model)
        self.mine = slice(cuts[rank], cuts[rank + 1])
        self.piece = torch.nn.Parameter(flat[self.mine].clone())
        optstate.flat_shard(self.piece, name="flat", global_numel=cuts[-1], begin=cuts[rank])
        self.optimizer = make([self.piece])

    def train(self, steps):
        for step in steps:
            self.model.zero_grad()
            sharded.loss_of(self.model, step).backward()
            gradients = [each.grad.flatten() for each in self.model.parameters()]
            gradient = torch.cat(gradients)
            dist.broadcast(gradient, 0)
            self.piece.grad = gradient[self.mine].clone()
            self.optimizer.step()
            self.gather()

    def gather(self):
        self.values = torch.cat([each for each in self._pieces()])
        parameters = list(self.model.parameters())
        sizes = [each.numel() for each in parameters]
        with torch.no_grad():
            for parameter, values in zip(parameters, self.values.split(sizes)):
                parameter.copy_(values.view(parameter.shape))

    def _pieces(self):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.piece.detach())
        return found


def _cuts(world):
    total = sum(each.numel() for each in sharded.make_model().parameters())
    return {1: [0, total], 2: [0, 20, total], 3: [0, 20, 20, total]}[world]


def _beside_torch(connection, rank, endpoint):
    cuts = _cuts(dist.get_world_size())
    mine = Zero(lambda pieces: optstate.AdamW(pieces, lr=0.01, endpoint=endpoint), cuts)
    theirs = Zero(lambda pieces: torch.optim.AdamW(pieces, lr=0.01), cuts)
    plain = sharded.make_model()
    unsharded = optstate.AdamW(plain.parameters(), lr=0.01, endpoint=endpoint, partition=None)
    mine.train(range(STEPS))
    theirs.train(range(STEPS))
    for step in range(STEPS):
        unsharded.zero_grad()
        sharded.loss_of(plain, step).backward()
        unsharded.step()
    assert_close([mine.values], [theirs.values])
    assert_same_bits([mine.values], [_flat(plain)])
    (entry,) = mine.optimizer.state_dict()["state"].values()
    (expected,) = theirs.optimizer.state_dict()["state"].values()
    assert_close([entry["exp_avg_sq"]], [expected["exp_avg_sq"]])
    assert mine.optimizer.gradient_norms().keys() == {"flat"}
    whole = optstate.whole_state_dict(mine.optimizer)["state"][0]
    for key in ("exp_avg", "exp_avg_sq"):
        state = unsharded.state_dict()["state"]
        assert_same_bits(
            [whole[key]], [torch.cat([each[key].flatten() for each in state.values()])]
        )


@pytest.mark.parametrize("world", [1, 3])
def test_it_trains_as_torch_does(world, daemon):
    ranks.run(_beside_torch, world, daemon.shm)


def _on_nodes(connection, rank, endpoints):
    endpoint = on_nodes.enter(rank, endpoints, 1)
    how = {"lr": 0.01, "endpoint": endpoint, "across_nodes": "sharded", "max_norm": 1e6}
    mine = Zero(lambda pieces: optstate.AdamW(pieces, **how), _cuts(2))
    theirs = Zero(lambda pieces: torch.optim.AdamW(pieces, lr=0.01), _cuts(2))
    mine.train(range(STEPS))
    theirs.train(range(STEPS))
    assert_close([mine.values], [theirs.values])
    assert mine.optimizer.gradient_norms().keys() == {"flat"}
    norm = mine.optimizer.last_outcome.gradient_norm
    expected = [None, None]
    dist.all_gather_object(expected, mine.piece.grad.double().square().sum().item())
    assert norm == pytest.approx(sum(expected) ** 0.5, rel=1e-6)
    return norm


def test_pieces_on_several_nodes(nodes):
    one, other = ranks.run(_on_nodes, 2, [each.shm for each in nodes])
    assert one == other


def _fails_to_fetch(connection, rank, endpoints):
    how = {"lr": 0.01, "endpoint": on_nodes.enter(rank, endpoints, 1), "across_nodes": "sharded"}
    mine = Zero(lambda pieces: optstate.AdamW(pieces, **how), _cuts(2))
    mine.train(range(1))
    attachment = mine.optimizer._served.attachment

    def failing(*_):
        del attachment.fetch
        raise optstate.errors.InternalError("made up")

    if rank == 1:
        attachment.fetch = failing
    with pytest.raises(optstate.errors.InternalError) as raised:
        optstate.whole_state_dict(mine.optimizer)
    whole = optstate.whole_state_dict(mine.optimizer)["state"][0]
    assert whole["exp_avg"].shape == (_cuts(2)[-1],)
    return str(raised.value)


def test_whole_state_of_which_a_node_cannot_fetch_its_own(nodes):
    said = ranks.run(_fails_to_fetch, 2, [each.shm for each in nodes])
    assert said == ["rank 1: made up", "made up"]


def _saved(connection, rank, endpoint, kind, path):
    def make(pieces):
        if kind == "torch":
            return torch.optim.AdamW(pieces, lr=0.01)
        return optstate.AdamW(pieces, lr=0.01, endpoint=endpoint)

    trainer = Zero(make, _cuts(dist.get_world_size()))
    trainer.train(range(4))
    if kind == "torch":
        state = trainer.optimizer.state_dict()
    else:
        state = optstate.whole_state_dict(trainer.optimizer)
    if rank == 0:
        torch.save({"flat": trainer.values, "optimizer": state}, path)


def _loaded(connection, rank, endpoint, kind, path):
    saved = torch.load(path)

    def make(pieces):
        with torch.no_grad():
            pieces[0].copy_(
                saved["flat"][_cuts(dist.get_world_size())[rank] :][: pieces[0].numel()]
            )
        if kind == "torch":
            return torch.optim.AdamW(pieces, lr=0.01)
        return optstate.AdamW(pieces, lr=0.01, endpoint=endpoint)

    trainer = Zero(make, _cuts(dist.get_world_size()))
    trainer.gather()
    trainer.optimizer.load_state_dict(saved["optimizer"])
    if kind == "optstate":
        state = optstate.whole_state_dict(trainer.optimizer)["state"][0]
        assert int(state["step"]) == 4
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same_bits([state[key]], [saved["optimizer"]["state"][0][key]])
    trainer.train(range(4, 8))
    plain = sharded.make_model()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(8):
        reference.zero_grad()
        sharded.loss_of(plain, step).backward()
        reference.step()
    assert_close([trainer.values], [_flat(plain)])


@pytest.mark.parametrize(
    ("saves", "loads", "worlds"),
    [
        ("optstate", "optstate", (2, 3)),
        ("optstate", "torch", (3, 1)),
        ("torch", "optstate", (1, 2)),
    ],
)
def test_another_number_of_ranks_takes_a_checkpoint(saves, loads, worlds, daemon, tmp_path):
    path = str(tmp_path / "checkpoint")
    ranks.run(_saved, worlds[0], daemon.shm, saves, path)
    ranks.run(_loaded, worlds[1], daemon.shm, loads, path)


def _piece(begin, end, numel=10, name="w", value=0.5):
    piece = torch.nn.Parameter(torch.full((end - begin,), value))
    return optstate.flat_shard(piece, name=name, global_numel=numel, begin=begin)


def _several(connection, rank, endpoint, job):
    """Pieces of several tensors, in the middle of one; a replica on all ranks; whole parameters; a
    job that is attached again, and a copy."""

    def parameters():
        return [
            *(_piece(*[(0, 0), (0, 7), (7, 10)][rank], name=name) for name in ("w", "v")),
            _piece(0, 10, name="replica", value=0.25),
            torch.nn.Parameter(torch.ones(4)),
        ]

    def train(params, optimizer):
        for step in range(3):
            for index, each in enumerate(params):
                each.grad = (
                    torch.full_like(each, 0.1 * (index + step + 1)) if each.numel() else None
                )
            optimizer.step()

    mine, theirs = parameters(), parameters()
    groups = [{"params": mine[:2]}, {"params": mine[2:], "lr": 0.1}]
    optimizer = optstate.AdamW(groups, lr=0.01, job=job, endpoint=endpoint, max_norm=100.0)
    reference = torch.optim.AdamW(
        [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.1}], lr=0.01
    )
    train(mine, optimizer)
    train(theirs, reference)
    assert_close(mine, theirs)
    assert optimizer.gradient_norms().keys() == {"w", "v", "replica", "1.1"}
    # The norms are of whole tensors, over the ranks; a replica counts once.
    assert optimizer.gradient_norms()["w"] == pytest.approx(0.3 * 10**0.5)
    assert optimizer.gradient_norms()["replica"] == pytest.approx(0.5 * 10**0.5)
    other = copy.deepcopy(optimizer)
    other.attach()
    copies = other.param_groups[0]["params"] + other.param_groups[1]["params"]
    optimizer.close()
    again = parameters()
    attached = optstate.AdamW(
        [{"params": again[:2]}, {"params": again[2:], "lr": 0.1}],
        lr=0.01,
        job=job,
        endpoint=endpoint,
        max_norm=100.0,
    )
    assert attached.committed_step == 3
    assert_same_bits(again, mine)
    for params, each in ((again, attached), (copies, other), (theirs, reference)):
        train(params, each)
    assert_same_bits(again, copies)
    assert_close(again, theirs)


def test_several_pieces(daemon, job):
    ranks.run(_several, 3, daemon.shm, job)


def _wrong(connection, rank, endpoint):
    def refused(make, error=ValueError, **kwargs):
        with pytest.raises(error) as raised:
            optstate.AdamW([make()], **kwargs)
        return str(raised.value)

    said = {
        "gap": refused(lambda: _piece(*[(0, 4), (6, 10)][rank])),
        "end": refused(lambda: _piece(*[(0, 4), (4, 9)][rank])),
        "overlap": refused(lambda: _piece(*[(0, 6), (4, 10)][rank])),
        "within": refused(lambda: _piece(*[(0, 10), (2, 5)][rank])),
        "both": refused(lambda: _piece(*[(0, 6), (5, 9)][rank])),
        "whole": refused(lambda: _piece(*[(0, 5), (5, 10)][rank], numel=10 + rank)),
        "name": refused(lambda: _piece(*[(0, 5), (5, 10)][rank], name=f"w{rank}")),
        "values": refused(lambda: _piece(0, 10, value=float(rank))),
        "unsaid": refused(
            lambda: _piece(0, 10) if rank else torch.nn.Parameter(torch.full((10,), 0.5))
        ),
        "daemon": refused(lambda: _piece(*[(0, 5), (5, 10)][rank]), reduction="daemon"),
    }
    with pytest.raises(optstate.UnimplementedError) as raised:
        optstate.LAMB([_piece(0, 10)])
    said["lamb"] = str(raised.value)
    optimizer = optstate.AdamW([_piece(*[(0, 5), (5, 10)][rank])], endpoint=endpoint)
    (piece,) = optimizer.param_groups[0]["params"]
    if rank:
        piece.grad = torch.ones(5)
    optimizer.step()
    with pytest.raises(ValueError) as raised:
        optstate.whole_state_dict(optimizer)
    said["uneven"] = str(raised.value)
    return said


def test_pieces_that_are_no_tensor(daemon):
    for said in ranks.run(_wrong, 2, daemon.shm):
        assert "no rank has elements 4 to 5, between rank 0 and rank 1" in said["gap"]
        assert "no rank has elements 9 to 9, between rank 1 and the end" in said["end"]
        assert "rank 0 and rank 1 both have elements 4 to 5" in said["overlap"]
        assert "rank 0 and rank 1 both have elements 2 to 4" in said["within"]
        assert "rank 0 and rank 1 both have elements 5 to 5" in said["both"]
        assert '"w" [10] on rank 0, and "w" [11]' in said["whole"]
        assert '"w0" [10] on rank 0, and "w1" [10]' in said["name"]
        assert '"w" has other values on other ranks' in said["values"]
        assert "on rank 1" in said["unsaid"] and "perhaps empty" in said["unsaid"]
        assert "leave reduction out" in said["daemon"]
        assert "an update of lamb needs it whole" in said["lamb"]
        assert "updated [0.0, 1.0] times" in said["uneven"]


def test_what_is_no_piece():
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"view\(-1\)"):
        optstate.flat_shard(matrix, name="w", global_numel=4, begin=0)
    for begin in (-1, 3):
        with pytest.raises(ValueError, match="does not lie within"):
            _piece(begin, begin + 8)
    with pytest.raises(ValueError, match="Invalid name"):
        _piece(0, 10, name="")
