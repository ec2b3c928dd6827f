"""Where parameters' names come from: a job knows its parameters by them."""

from __future__ import annotations

import optstate
import pytest
from training import small_model

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize("how", ["module", "pairs", "generator"])
def test_named_parameters_is_another_name_of_model(how, job, daemon):
    model = small_model()
    given = {
        "module": model,
        "pairs": list(model.named_parameters()),
        "generator": model.named_parameters(),
    }[how]
    optimizer = optstate.AdamW(model.parameters(), job=job, named_parameters=given)
    assert [each["name"] for each in daemon.parameters(job)] == NAMES
    optimizer.close()
    again = small_model()
    with optstate.AdamW(again.parameters(), job=job, model=again):
        pass


def test_names_of_named_groups(job, daemon):
    """Names are taken as torch takes them in each group, in whatever order."""
    pairs = list(small_model().named_parameters())
    with optstate.AdamW([{"params": pairs[3:]}, {"params": pairs[:3], "lr": 1e-4}], job=job):
        assert [each["name"] for each in daemon.parameters(job)] == NAMES[3:] + NAMES[:3]


def test_what_cannot_be_names_is_refused(job):
    model = small_model()
    with pytest.raises(ValueError, match="named_parameters"):
        optstate.AdamW(model.parameters(), job=job, model=model, named_parameters=model)
    with pytest.raises(TypeError, match="named_parameters must be"):
        optstate.AdamW(model.parameters(), job=job, named_parameters=model.parameters())
    with pytest.raises(TypeError, match="named_parameters="):
        optstate.AdamW(model, job=job)
