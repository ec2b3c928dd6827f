"""gradients_as_views=: when gradients become views, and where that is said."""

from __future__ import annotations

import logging
import pickle

import optstate
import pytest
import ranks
import torch
from gradients_in_place import in_place
from training import loss_of, small_model


class _Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def _train(endpoint, job, model=None, **options):
    """Returns the texts logged, memory(), and the gradients in the area by step."""
    heard = _Heard()
    logger = logging.getLogger("optstate")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    model = small_model() if model is None else model
    optimizer = optstate.SGD(
        model.named_parameters(), lr=0.1, job=job, endpoint=endpoint, **options
    )
    logger.removeHandler(heard)
    with optimizer:
        said = optimizer.memory().makes_gradient_views
        found = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if optimizer._served.settings.overlap:
                assert not in_place(optimizer)
            found.append(len(in_place(optimizer)))
            assert bool(optimizer.memory().gradient_views) == bool(found[-1])
            optimizer.step()
        assert optimizer.memory().makes_gradient_views == said
    return " ".join(heard.texts), said, found


def _of_rank(connection, rank, endpoint, job, options):
    return _train(endpoint, job, **options)


VIEWS, COPIES = [6] * 3, [0] * 3


@pytest.mark.parametrize(
    "world_size, asked, becomes_views",
    [
        (1, None, False),
        (1, True, True),
        (1, False, False),
        (2, None, True),
        (2, True, True),
        (2, False, False),
    ],
)
def test_the_way(world_size, asked, becomes_views, daemon, job):
    options = {"reduction": "daemon", "gradients_as_views": asked}
    results = ranks.run(_of_rank, world_size, daemon.shm, job, options)
    for _, said, found in results:
        assert (said, found) == (becomes_views, VIEWS if becomes_views else COPIES)
    how = "gradients become views" if becomes_views else "gradients are copied"
    assert [text.endswith(how) for text, *_ in results] == [True] + [False] * (world_size - 1)


def test_a_process_without_a_group_is_one_rank(daemon, job):
    text, said, found = _train(daemon.shm, job)
    assert (said, found) == (False, COPIES)
    assert text.endswith("gradients are copied")


def test_several_ranks_that_reduce_themselves(daemon, job):
    """Each pushes a part of the gradients, which is the part that becomes views."""
    results = ranks.run(_of_rank, 2, daemon.shm, job, {})
    assert [said for _, said, _ in results] == [True, True]
    assert sum(found[0] for *_, found in results) == 6


@pytest.mark.parametrize("asked", [None, True])
def test_overlap_pushes_what_would_become_views(asked, daemon, job):
    options = {"reduction": "daemon", "overlap": True, "gradients_as_views": asked}
    for _, said, found in ranks.run(_of_rank, 2, daemon.shm, job, options):
        assert (said, found) == (False, COPIES)


def test_asked_for_over_a_wire_that_copies(daemon, job):
    text, said, found = _train(daemon.grpc_unix, job, gradients_as_views=True)
    assert (said, found) == (False, COPIES)
    assert text.endswith("gradients are copied")


@pytest.mark.parametrize("asked", [None, True, False])
def test_every_message_says_it(asked, daemon, job):
    how = "gradients become views" if asked else "gradients are copied"
    model = small_model()
    for message, given in (
        ("is new", model),
        ("attached again at step 3", model),  # with its values
        ("goes on: training begins with the parameters of step 6", small_model()),
    ):
        text, *_ = _train(daemon.shm, job, given, gradients_as_views=asked)
        assert message in text and text.endswith(how)


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_copy_has_the_choice_and_not_what_became_of_it(asked, daemon):
    model = small_model()
    with optstate.SGD(model.parameters(), lr=0.1, gradients_as_views=asked) as optimizer:
        pickled = pickle.dumps(optimizer)
    copy = pickle.loads(pickled)
    assert copy._served.settings.gradient_views is asked
    copy.attach(endpoint=daemon.shm)
    assert copy.memory().makes_gradient_views == bool(asked)
    copy.close()


@pytest.mark.parametrize("asked", ["auto", 2, ""])
def test_a_choice_that_is_none(asked):
    with pytest.raises(ValueError, match="gradients_as_views"):
        optstate.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, gradients_as_views=asked)
