"""The whole list of operations that ours refuses and torch does, each with what to blame.

A program in which one of these is raised is run again without the operation to blame. Any other
exception of ours that torch does not raise too is a failure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import optstate


class Refusal(NamedTuple):
    """raised: its type. says: a regular expression of its text. blames: operations, of which
    the last one before it was the cause."""

    raised: type[BaseException]
    says: str
    blames: tuple[str, ...]


# README: parameters are added by add_param_group alone.
_SURGERY = ("pop_group", "pop_parameter", "reverse_groups", "reverse_parameters")

REFUSALS = (
    Refusal(RuntimeError, r"(is not what|has more than|other tensors than) w.* attached", _SURGERY),
    Refusal(RuntimeError, r"param_groups lost parameters", _SURGERY),
    # torch's state_dict() of state that no group has the parameter of any more.
    Refusal(KeyError, r"^\d{10,}$", _SURGERY),
    Refusal(KeyError, r"in no group of the optimizer any more", _SURGERY),
    # torch loads state by place, of whatever shape.
    Refusal(ValueError, r"loaded \w+ of parameter .* has shape", _SURGERY),
    # README: only max_norm is a group's own.
    Refusal(ValueError, r"has a (max_value|norm_type) of its own", ("set_option",)),
    # README: what memory hangs on cannot change in a group.
    Refusal(ValueError, r"but the job was registered with", ("set_option", "schedule")),
    Refusal(ValueError, r"decoupled_weight_decay (differs|must be the same)", ("set_option",)),
    # README: the option decides whether there is a buffer; a state_dict() reads it too.
    Refusal(KeyError, r"momentum", ("delete_option",)),
    Refusal(ValueError, r"loaded param_groups\[.*\] has no ", ("delete_option",)),
    # README: what a step is not taken with.
    Refusal(ValueError, r"Invalid beta parameter at index", ("set_option", "add_group")),
    Refusal(TypeError, r'the gradient of parameter ".*" is .*, but the job has', ("cast",)),
    Refusal(TypeError, r'parameter ".*" is torch.float64: optstate supports', ("cast",)),
    Refusal(TypeError, r'parameter ".*" is now .*, but the job has', ("cast",)),
    Refusal(ValueError, r"share memory", ("tie_data",)),
    # README: what does not fit raises in the next step.
    Refusal(RuntimeError, r"its step is 0, with which it begins anew", ("write_state",)),
    # The reference's scaler takes no step when there is nothing that it could look at.
    Refusal(RuntimeError, r"within a step: there are micro-steps pushed", ("accumulate",)),
    # README: names, or the order that the job began with.
    Refusal(UserWarning, r"parameters that have no names", ("reattach",)),
    # A layout is what it was registered as: the same names, shapes and dtypes in order.
    Refusal(
        optstate.FailedPreconditionError,
        r"in the job, .* here",
        ("reattach", *_SURGERY),
    ),
)


def refusal_of(error: BaseException) -> Refusal | None:
    for refusal in REFUSALS:
        if isinstance(error, refusal.raised) and re.search(refusal.says, str(error)):
            return refusal
    return None


def torchs_own_refusal(error: BaseException, before: set[str]) -> bool:
    """Returns whether torch refuses what ours does, after these operations: a state_dict() with
    state of parameters that no group has any more; an SGD whose momentum not all parameters
    have."""
    if isinstance(error, TypeError) and "but got NoneType" in str(error):
        return True
    return isinstance(error, KeyError) and bool(before & {"pop_group", "pop_parameter"})
