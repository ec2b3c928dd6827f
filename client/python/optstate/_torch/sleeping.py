"""Puts the job of an optimizer to sleep, and wakes it: its memory is given back meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from optstate import errors, job_sleep
from optstate._torch.job.asleep import Asleep
from optstate._torch.job.attachment import Attachment
from optstate._torch.job.opening import Existing
from optstate._torch.ranks import Ranks
from optstate._torch.served import Served
from optstate._torch.warn import warn

logger = logging.getLogger("optstate")

# Names of DeepSpeed's OffloadStateTypeEnum: of what goes with the job, as a whole, ...
_OFFLOADED = ("optim_states", "hp_params", "contiguous_grad_buffer")
# ... and of what is in the trainer's memory alone.
_STAYS = {
    "lp_params": "the model's parameters stay in this process, as its own memory: move them or"
    " free them as any tensor",
    "lp_grads": "gradients are this process's own: optimizer.zero_grad() frees them",
}
_WHAT_IS_OFFLOADED = (
    "offload_states() offloads what the daemon has of the job, as a whole: the optimizer's state"
    " (optim_states), masters (hp_params), its copy of the parameters, and the memory shared with"
    " it (contiguous_grad_buffer)"
)
# Errors after which nobody knows whether the daemon goes on.
_UNCLEAR = (errors.DeadlineExceededError, errors.UnavailableError, errors.CancelledError)
# Seconds between two signs of life to ranks that wait in a collective, which has a timeout.
_SIGN_OF_LIFE_S = 20.0

_Result = TypeVar("_Result")


class Offloaded(NamedTuple):
    """Memory that offload_states() has given back, and where its bytes are."""

    memory_bytes: int  # of the daemon's files, once for all ranks
    directory: str  # on the daemon's machine


def check_offload(include: Iterable[Any] | None, to: Any) -> None:
    """Raises InvalidArgumentError for what cannot be offloaded so."""
    place = getattr(to, "value", to)
    if place == "cpu":
        raise errors.InvalidArgumentError(
            "to='cpu': the daemon has the state in host memory already. to='disk' gives that back"
        )
    if place not in ("disk", "nvme"):
        raise errors.InvalidArgumentError(
            f"Invalid to: {to!r} (disk or nvme, which both are the daemon's sleep_directory)"
        )
    if include is None:
        return
    given = [include] if isinstance(include, str) else list(include)
    names = [getattr(each, "value", each) for each in given]
    if not names:
        raise errors.InvalidArgumentError(f"include is empty. {_WHAT_IS_OFFLOADED}")
    for name in names:
        if name in _STAYS:
            raise errors.InvalidArgumentError(
                f"include={name!r}: {_STAYS[name]}. {_WHAT_IS_OFFLOADED}"
            )
        if name not in _OFFLOADED:
            raise errors.InvalidArgumentError(
                f"Invalid include: {name!r} (of {', '.join(_OFFLOADED)}). {_WHAT_IS_OFFLOADED}"
            )


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"Invalid timeout: {timeout} (seconds, or None)")


def _refuse(attachment: Attachment, why: str) -> None:
    raise errors.FailedPreconditionError(f'job "{attachment.job}" cannot be offloaded: {why}')


def _check_job(attachment: Attachment, *, is_inside_join: bool) -> None:
    """Raises an error, on every rank alike, when the job cannot sleep."""
    attachment.session.refuse_fork()
    if attachment.nodes is not None:
        raise errors.UnimplementedError(
            f'job "{attachment.job}" is on several nodes, which offload_states() does not put to'
            " sleep together: close() the optimizer on every rank, run `optctl sleep"
            f" {attachment.job}` on each node, and construct the optimizer again after `optctl"
            " wake`"
        )
    if attachment.is_private:
        _refuse(attachment, "it has no name, and ends with its last rank. Say job=NAME")
    if attachment.is_embedded:
        _refuse(
            attachment,
            "it is in this process's private daemon, with which it ends. Start a daemon of the"
            " node (optstated) with a sleep_directory, or say endpoint=",
        )
    if is_inside_join:
        _refuse(attachment, "ranks without inputs, inside Join, do not call offload_states()")


def _check_no_step(attachment: Attachment) -> None:
    """Raises FailedPreconditionError when something of a step is in the daemon."""
    if attachment.must_abort:
        attachment.abort_step()  # what a step that failed may have left
    if attachment.was_taken:
        _refuse(
            attachment,
            "the step that failed was committed after all: call step() first, which reads its"
            " result",
        )
    if attachment.micro_step or attachment.gradients.has_pushed:
        _refuse(
            attachment,
            f"gradients of step {attachment.next_step} are in the daemon. Call step() first, or"
            " abort_step(), which drops micro-steps, and leaves what is in .grad for step() after"
            " reload_states()",
        )


def _on_first(ranks: Ranks, work: Callable[[Callable[[], None]], _Result]) -> _Result:
    """Has rank 0 work; returns what it returns, or raises what it raises, on every rank.

    `work` calls its argument now and then, so that the other ranks, which wait in a collective,
    hear from it: what it does may last longer than a collective may.
    """
    if ranks.rank != 0:
        while True:
            is_over, failure, result = ranks.from_first(None)
            if failure is not None:
                raise errors.from_status(failure[0], f"rank 0: {failure[1]}")
            if is_over:
                return result
    last = time.monotonic()

    def goes_on() -> None:
        nonlocal last
        now = time.monotonic()
        if ranks.world_size > 1 and now - last >= _SIGN_OF_LIFE_S:
            last = now
            ranks.from_first((False, None, None))

    try:
        result = work(goes_on)
    except BaseException as failure:
        is_ours = isinstance(failure, errors.OptstateError)
        code = failure.code if is_ours else errors.CancelledError.code
        ranks.from_first((True, (code, str(failure)), None))
        raise
    ranks.from_first((True, None, result))
    return result


def _call(
    served: Served, asleep: Asleep, timeout: float | None, verb: str, goes_on: Callable[[], None]
) -> job_sleep.SleepCall:
    """Returns the call by which rank 0 puts the job to sleep or wakes it; it logs how far it is."""
    logged = 0

    def progress(copied: int, whole: int) -> None:
        nonlocal logged
        goes_on()
        tenths = 10 * copied // whole if whole else 0
        if tenths > logged:
            logged = tenths
            logger.info(
                'job "%s" is being %s: %d of %d MiB', asleep.job, verb, copied >> 20, whole >> 20
            )

    return job_sleep.SleepCall(
        job=asleep.job,
        endpoint=asleep.endpoint,
        timeout_s=served.settings.connect_timeout or 0,
        whole_timeout_s=timeout or 0,
        progress=progress,
    )


def _leave(served: Served, attachment: Attachment) -> Asleep:
    """Detaches every rank of the job, after the daemon has got what the trainer changed; or
    raises on every rank, which then are attached."""
    ranks = attachment.ranks
    # Not Attachment.announced(): the begin of a load has a failed job forget its state.
    ranks.agree(None)  # every rank has come, and no step is open
    error: Exception | None = None
    asleep: Asleep | None = None
    try:
        groups = list(attachment.parameters.groups.in_order(served.param_groups))
        attachment.options.check_groups(groups)
        attachment.parameters.check_tensors()
        if attachment.parameters.count:
            attachment.arrays.fetch_step_counts([0])  # raises the error of a failed job
        if served.replaced is not None:
            served.replaced.drop_changed()
        served.send_changes(attachment, groups)
        asleep = Asleep.of(attachment, dict(served.own_state()))
        if attachment.parameters.views is not None:
            attachment.parameters.views.keep()  # raises if there is no memory for that
    except Exception as failure:
        error = failure
    ranks.agree(error)
    assert asleep is not None
    views = attachment.parameters.views
    if views is not None:
        # The daemon's memory would otherwise last as long as the model's parameters.
        try:
            views.leave()
        except errors.OptstateError as failure:
            warn(f"the daemon's memory for parameters is not given back: {failure}")
    served.asleep = asleep
    lost: Exception | None = None
    try:
        served.detach(f'job "{asleep.job}" is asleep: call reload_states()')
    except errors.DataLossError as failure:
        lost = failure
    ranks.agree(lost)  # every rank has left
    return asleep


def _put_to_sleep(served: Served, asleep: Asleep, timeout: float | None) -> None:
    """Puts the job to sleep that every rank has left. When it is refused, attaches again."""

    def work(goes_on: Callable[[], None]) -> job_sleep.JobSleep:
        return job_sleep.put_to_sleep(_call(served, asleep, timeout, "put to sleep", goes_on))

    ranks = Ranks(served.process_group)
    try:
        slept = _on_first(ranks, work)
    except _UNCLEAR as unclear:
        raise type(unclear)(
            f"{unclear}. The optimizer has left the job: call offload_states() again, or"
            " reload_states() to go on"
        ) from unclear
    except errors.OptstateError as refused:
        try:
            _wake(served, asleep, timeout)
        except errors.OptstateError as failure:
            raise type(refused)(
                f"{refused}. The optimizer could not attach to the job again ({failure}): call"
                " reload_states()"
            ) from failure
        raise
    asleep.slept = slept
    served.detached_because = (
        f'job "{asleep.job}" is asleep in {slept.directory}: call reload_states()'
    )
    if ranks.rank == 0:
        logger.info(
            'job "%s" is asleep in %s at step %d: %d MiB of memory are given back',
            asleep.job,
            slept.directory,
            asleep.committed_step,
            slept.memory_bytes >> 20,
        )


def _wake(served: Served, asleep: Asleep, timeout: float | None) -> None:
    """Wakes the job, and attaches every rank to it again, or raises on every rank."""

    def work(goes_on: Callable[[], None]) -> job_sleep.JobSleep:
        return job_sleep.wake(
            _call(served, asleep, timeout, "woken", goes_on),
            created_at_ns=asleep.created_at_ns,
            committed_step=asleep.committed_step,
        )

    ranks = Ranks(served.process_group)
    woken = _on_first(ranks, work)
    _attach(served, asleep, ranks)
    if ranks.rank == 0 and not woken.was_so:
        logger.info('job "%s" is awake at step %d', asleep.job, asleep.committed_step)


def _attach(served: Served, asleep: Asleep, ranks: Ranks) -> None:
    """Attaches to the job, with its own parameters; what the trainer has changed of them since
    stays, as any change in place. Raises on every rank when it is not the job that was left."""
    settings, state = served.settings, served.state
    groups: Sequence[dict[str, Any]] = ()
    error: Exception | None = None
    try:
        groups = list(asleep.order.in_order(served.param_groups))
    except Exception as failure:
        error = failure
    ranks.agree(error)
    # Without an endpoint, a daemon that is away would be taken for none.
    served.settings = dataclasses.replace(settings, endpoint=asleep.endpoint)
    served.state = defaultdict(dict, {key: _copied(each) for key, each in asleep.own_state.items()})
    try:
        there = Existing(asleep.endpoint)
        overwritten = served.attach_groups(groups, asleep.job, existing=there)
    except BaseException:
        served.state = state
        raise
    finally:
        served.settings = settings
    attachment = served.attached()
    problems = [each for each in ranks.gather(asleep.problem_with(attachment)) if each]
    if problems:
        if overwritten is not None:
            overwritten.put_back(overwritten.indices)
        because = served.detached_because or ""
        with contextlib.suppress(errors.DataLossError):
            served.detach(because)
        served.state, served.steps_before = state, asleep.committed_step
        raise errors.FailedPreconditionError(
            f"{problems[0]}. This optimizer cannot go on with it; another one, which is constructed"
            " now, takes the job as it is"
        )
    if served.replaced is not None:
        served.replaced.note_read(attachment.parameters)
    if overwritten is not None and overwritten.count:
        overwritten.put_back(overwritten.indices)
    attachment.is_initialised = asleep.is_initialised
    served.asleep, served.detached_because, served.may_attach = None, None, True


def _copied(value: Any) -> Any:
    """Returns an entry that attaching may change, and that it changes again when it is repeated."""
    return dict(value) if isinstance(value, dict) else value


class Sleeping:
    """The part of ServedOptimizer that gives a job's memory back while it is not needed.

    Threads: one at a time, like the optimizer.
    """

    _served: Served

    @torch._disable_dynamo
    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        to: Any = "disk",
        *,
        timeout: float | None = None,
    ) -> Offloaded:
        """Puts the job to sleep: its files are copied to a disk of the daemon's machine, its engine
        ends, and its memory is given back, for a generator on the same node, say. Collective.

        Parameters that were changed in place are sent before. The parameters keep their values,
        and become this process's own memory, at the same addresses. Until reload_states(), what
        needs the job raises FailedPreconditionError: step(), state_dict(), load_state_dict(),
        state, ...; zero_grad(), backward() and param_groups work. close(), and the end of the
        process, leave the job asleep, also over restarts of the daemon and the machine: `optctl
        wake NAME` wakes it for another trainer. A second call does nothing.

        include: names of DeepSpeed's OffloadStateTypeEnum: optim_states, hp_params,
            contiguous_grad_buffer. A job sleeps as a whole, whichever are named. None: all.
        to: "disk" or "nvme": both are the daemon's sleep_directory.
        timeout: seconds after which it raises DeadlineExceededError; the daemon goes on. None:
            as long as it comes on.

        FailedPreconditionError: gradients have been pushed; the job has no name, or is in this
        process's private daemon; other ranks stay attached; the daemon has no directory for it.
        ResourceExhaustedError: the disk is full, or there is no memory for this process's own
        parameters. InvalidArgumentError: include, to. UnimplementedError: the job is on several
        nodes, or the daemon is older. After each of these the optimizer is attached as before.
        """
        check_offload(include, to)
        _check_timeout(timeout)
        served = self._served
        asleep = served.asleep
        if asleep is None:
            attachment = served.attached()
            join = served._join_config  # of torch's Join
            _check_job(attachment, is_inside_join=join is not None and join.enable)
            _check_no_step(attachment)
            asleep = _leave(served, attachment)
        if asleep.slept is None:
            _put_to_sleep(served, asleep, timeout)
        slept = asleep.slept
        assert slept is not None
        return Offloaded(slept.memory_bytes, slept.directory)

    @torch._disable_dynamo
    def reload_states(self, *, timeout: float | None = None) -> None:
        """Wakes the job that offload_states() put to sleep, and attaches to it again. Collective.

        The job is bit for bit what it was, at the same step. Parameters are the job's; those that
        this process has changed since keep their values, and are sent before the next step, as
        after any change in place. Does nothing when the job is not asleep.

        timeout: as of offload_states().

        FailedPreconditionError: somebody has woken the job and gone on with it, or it is another
        job of its name; the parameters here are as they were. ResourceExhaustedError: the memory
        has too little room; DataLossError: a file on the disk is damaged; NotFoundError: the job
        was deleted. After each of these the job sleeps on if it slept, and reload_states() may be
        called again.
        """
        _check_timeout(timeout)
        served = self._served
        asleep = served.asleep
        if asleep is None:
            served.attached()
            return
        _wake(served, asleep, timeout)
