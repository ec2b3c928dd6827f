"""The base class of every optimizer of optstate, whichever class of torch it replaces."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable

from optstate._access import access
from optstate._storage import storage
from optstate._torch.collective.reducing import reducing
from optstate._torch.hybrid_options import take_hybrid_options
from optstate._torch.layout import (
    NamedParameters,
    check_group,
    optimizer_info,
    refuse_sharding_optimizer,
)
from optstate._torch.nodes.moves.handing_over import HandingOver
from optstate._torch.nodes.norm_members import places_of_duplicates
from optstate._torch.optimizer_info import hyperparams_of
from optstate._torch.options import (
    Scalar,
    checked_norm_type,
    limit,
    master_format,
    state_format,
)
from optstate._torch.reports import Reports
from optstate._torch.served import CLOSED, Served
from optstate._torch.settings import Settings
from optstate._torch.shared import Shared
from optstate._torch.sleeping import Sleeping
from optstate._torch.state_transfer import StateTransfer
from optstate._torch.stepping import Stepping
from optstate._torch.zero_options import with_overlap
from optstate.session_spec import LossScaler


class ServedOptimizer(
    Reports, Stepping, StateTransfer, Sleeping, HandingOver, torch.optim.Optimizer
):
    """The features that optstate's optimizers add to torch's of the same names.

    Keyword arguments beyond torch's:
        job: name of the job on this node. An existing job of this name is
            re-attached: the parameters are overwritten in place with the
            daemon's, of step ``committed_step``. None: a job of a unique name
            that ends with this optimizer.
        endpoint: "unix:PATH", "grpcs:HOST:PORT" (TLS), "grpc:HOST:PORT",
            "grpc:unix:PATH" or "embedded".
            None: $OPTSTATE_ENDPOINT, else the node's daemon when its socket
            exists, else "embedded", a private daemon that ends with the trainer.
        max_norm: clip the L2 norm of all gradients to this, in the daemon (as
            clip_grad_norm_, but in the same pass as the update). None, 0 and
            infinity: no clipping. It is also an attribute that may be changed between
            steps. A param group's own "max_norm" clips the group by its norm.
        norm_type: the norm for max_norm, as in clip_grad_norm_: 1, 2 or infinity.
        max_value: clamp each element of the unscaled, norm-clipped gradients to
            +-this (as clip_grad_value_). None, 0 and infinity: no clamping.
        process_group: the group whose ranks train the job together; None: the default
            group of torch.distributed if it is initialised, else this process.
        norm_group: the group of all ranks of several jobs that clip by one norm and take each
            step together or not at all, such as the stages of a pipeline, each with ranks of its
            own as process_group. None: the job clips by the norm of its own gradients.
        norm_duplicates: parameters that another job of norm_group has too, and counts: with
            tensor parallelism those that are replicated, on all jobs but one.
        model: a module that gives parameters stable names; or pass (name,
            parameter) pairs as params, as torch's optimizers accept.
        named_parameters: the same from a module or from (name, parameter) pairs, for
            frameworks that take a keyword called model for themselves.
        partition: which rank pushes which gradients. "greedy" (whole parameters; the
            default), "contiguous" (equal slices) or "local": each rank those of the shards
            that it owns, which is chosen for DTensors and flat pieces. Not with reduction="daemon".
            With across_nodes="sharded" it says in the same way what each node has of parameters
            that are no shards.
        across_nodes: with ranks on several nodes, each with a daemon of its own: "replicated":
            every node takes the same steps with the same gradients, which are averaged over
            all ranks (DistributedDataParallel), and a step is taken on all nodes or on none.
            "sharded": each node's daemon keeps the shards of its ranks (DTensors), or the state
            of some of the parameters, whose values then go to the other nodes (ZeRO-1; see
            consolidate_state_dict), and state moves when other nodes or ranks attach (see
            hand_over). max_norm of a group is refused then, and gradient_norms() is collective.
        stale_nodes: with across_nodes="replicated", what becomes of a node whose job lacks steps
            that others have taken without it: "refuse" (FailedPreconditionError on all ranks, the
            default), or "replace": its job is deleted, and it gets the others'. The name says that
            it is one run, in which the node with most steps is right.
        accumulate: reserve accumulators in the daemon for accumulate_step(). With
            reduction="daemon" a micro-step of all ranks is summed as soon as each
            has taken it; a rank without a gradient adds nothing to it.
        accumulate_dtype: dtype of the accumulators: "float32" (the default), or "gradient"
            for the gradients' own, which for 16 bits takes half the memory and rounds each
            sum to nearest even.
        reduction: "trainer": the gradients are reduced already, as after
            DistributedDataParallel. "daemon": each rank has its own, and the
            daemon averages them in the same pass as the update; no collective between
            the ranks of the node. Under DistributedDataParallel register
            optstate.ddp_hook, which disables its all-reduce. "collective": step() averages
            them over all ranks of process_group, on whichever nodes, with its all-reduce.
        communication_dtype: of reduction="collective", as are the next three, which all ranks
            give alike: the dtype in which the ranks send gradients and add them up, "float32" (the
            default) or "bfloat16": half the bytes, rounded to nearest even as they are sent and
            wherever the process group adds some up; or "int8": one byte an element, a scale for
            each 256, sums in float32, and what a step leaves out is sent with the next (error
            feedback, which takes 8 bytes an element). ValueError with other reductions, where
            step() reduces nothing. UnimplementedError in step(): the process group cannot add such
            up.
        bucket_cap_mb: MiB of the communication dtype that are reduced together, at least 4 KiB; a
            larger gradient is cut. None: about 25 MiB of gradients, and none is cut; of int8 6.25
            MiB
        gradient_predivide_factor: gradients are divided by it before they are sent, and multiplied
            by it afterwards, so that sums of many ranks stay within the range. The default is 1.
        reduction_op: "mean" (the default) or "sum".
        overlap: push each gradient as soon as backward() has accumulated it, so
            that the daemon processes it while backward() continues. Needs
            reduction="daemon" when there are several ranks. Changes that are
            made to .grad before step() are noticed and pushed again, except
            those that leave no trace: through .data or numpy, by a collective of
            torch.distributed, or by unscale_() without the scaler's own step().
            Parameters are read while others are updated, where the wire supports it.
        speculative: with overlap, let the daemon update parameters while backward() still
            pushes others, as if the step were taken with the options of the last ones and
            neither skipped nor clipped, and roll that back when it is; the results are the
            same. Parameters are copied then, and the daemon keeps a copy of the state. Not for
            LAMB, Adafactor and Muon, nor for state on disk.
        overlap_with_ddp: True: as reduction="daemon", overlap=True and speculative=True, for
            scripts with torch's ZeroRedundancyOptimizer. Register optstate.ddp_hook in place of
            torch's hooks, and call step(), which waits for the rest. A step that clipping or a
            loss_scaler changes is rolled back and taken in step(). UnimplementedError: not with
            ranks on several nodes, a norm_group, or what speculative is not for.
        state_dtype: dtype of the state arrays: torch.float32, torch.bfloat16 (rounded
            stochastically, reproducibly) or "dynamic8" (bitsandbytes' 8-bit map):
            4, 2 or 1.02 bytes an element. Adafactor's row_var and col_var are
            always float32.
        master: where the fp32 values of 16-bit parameters are kept: "float32"
            beside them, or "split": the bfloat16 parameter is the upper half and
            16 bits are beside it, 2 bytes less for the same steps. A parameter
            half way between two bfloat16 values is then the larger one, not the
            even one. float32 parameters are their own masters in either case.
        loss_scaler: an optstate.LossScaler, kept by the daemon with the job:
            ``optimizer.scale(loss).backward()``, then ``optimizer.step()``.
        resume: what load_state_dict() does before the first step after attaching to an
            existing job, when the job has other state than the checkpoint, whose model
            was perhaps loaded before, and overwritten. "checkpoint": it puts the job
            back to the checkpoint, along with the parameters that attaching replaced
            (kept in host memory until the first step; not those that were changed
            since). "job": a job that has taken steps goes on as it is, and only
            param_groups are taken. "error": it raises.
        parameters_as_views: over shared memory, parameters in host memory become views of
            the daemon's, so that nothing is copied out after a step and a change is noticed
            however it was made. Parameters that share memory with other tensors (e.g. a
            ``model.state_dict()`` that still exists) or are not contiguous are copied, and
            all parameters are copied with speculative=True.
        gradients_as_views: over shared memory, gradients in host memory become views of the
            area that the daemon reads, as soon as backward() has made them, so that step()
            copies none of them, and whatever is done to them before is in the step. None: with
            several ranks, but not with one, which loses time by views; memory() and the log
            message say which it is. True: always, which saves one rank the memory of its
            gradients. False: never. Gradients of less than 256 KiB, of which this rank pushes
            only a part, whose memory something else has (a list of the last step's,
            DistributedDataParallel) or that something replaces are copied in step() in any
            case, and all are with overlap=True.
        detect_changes: how to find changes without a trace (through .data or numpy, by a
            collective) of parameters that are copied and not views. "exact": by a 64-bit
            digest of what was copied, which is compared before each step. "sample": by a digest
            of one line in each page, by turns, so that a change of few elements is found late or,
            when the next step undoes it, not at all. "off": not found, and undone by the next
            step.
        placement: where the state of a new job lives. "host": in the daemon's memory, whole
            (the default). "nvme": on its disk (``optstated --nvme-dir DIR``), with a part in
            memory: state larger than memory, and durable steps. "auto": "host" where it fits,
            else "nvme". None, here and below: as the job has it.
        host_budget: of "nvme": memory for records of the state, in bytes or as "64MiB"; at
            least three sub-groups.
        durability: which steps survive a reboot; needs the daemon's disk too. "none" (the
            default); "step": each, before step() returns; "every 50" or "interval 30s": now and
            then, while training goes on.
        sub_group_size: elements that are swapped together, a multiple of 4096.
        offload_fraction: the part of the elements, from 0 to 1, that the CPU updates; the
            daemon's devices (``optstated --devices``) update the others, with the same bits.
            1 is the default. ``optctl set job NAME offload_fraction=0.3`` changes it while
            training runs. FailedPreconditionError: the daemon has no device. "auto": the first
            rank of the node tries some during the first steps, keeps the one whose updates take
            the least time, and logs it; without a device that is 1.
        device_budget: the memory of each of the daemon's devices, such as "8GiB", in which
            records of the share that devices update stay from step to step; only gradients
            and parameters are copied then. By default none. ``optctl set job NAME
            device_budget=8GiB`` changes it while training runs, and 0 there turns it off. Not
            with speculative=True.
        share_device_memory: tensors on a device where such records stay get their parameters
            from memory there, and their gradients are there for the daemon. It spares the host's
            memory, not time: measure both. Needs shared memory and offload_fraction=0.
        group: a group of the daemon's machine, by name or number, whose members may do with
            a new job what its owner may, but for changing who may use it. The owner is in it.
            None: the owner alone. A job that is there keeps who may use it, and the script is
            told if that differs; ``optctl set job NAME group=research`` changes it.
        private: True: for others than the owner, the group, the readers and operators there
            is no such job, in no list and by no name. Needs a daemon of the node.
        readers: who may look at a private job: users, and groups as "@ops".
        connect_timeout, step_timeout: seconds; None: 30 and 1800. step_timeout
            includes waiting for the other ranks.
        The keywords of Megatron's HybridDeviceOptimizer are checked: see take_hybrid_options.

    With several ranks the trainer reduces the gradients (as
    DistributedDataParallel does); each rank pushes the part it owns and reads
    all parameters back. Constructing, add_param_group, load_state_dict and step
    are collective: every rank calls them in the same order. Of DTensors (fully_shard,
    parallelize_module) each rank pushes and reads its own shards; state_dict() has DTensors.

    A non-finite gradient skips the step on all ranks; last_outcome reports it.
    Parameters that were changed in place (``p.copy_()``,
    ``model.load_state_dict``), on every rank alike, are sent to the daemon before
    the next step. So are changes that leave no trace, as through ``.data`` or numpy; see
    detect_changes.

    Threads: one at a time, as torch's. Processes: a forked child cannot use the optimizer.
    """

    # The daemon's name of the subclass's optimizer.
    _optstate_name = ""

    # The only attribute of an instance besides torch's own. No class attribute may hide it
    # from wrappers of the instance.
    _served: Served

    param_groups = Shared()
    max_norm = Shared()
    max_value = Shared()
    norm_type = Shared()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Shows the arguments of torch and of optstate as the class's signature."""
        super().__init_subclass__(**kwargs)
        if ServedOptimizer not in cls.__bases__:
            return
        torchs = inspect.signature(cls._torch_class().__init__).parameters.values()
        ours = inspect.signature(ServedOptimizer.__init__).parameters.values()
        kept = [each for each in torchs if each.kind is not each.VAR_KEYWORD]
        added = [each for each in ours if each.kind is each.KEYWORD_ONLY]
        cls.__signature__ = inspect.Signature([*kept, *added][1:])

    @classmethod
    def _torch_class(cls) -> type[torch.optim.Optimizer]:
        """Returns torch's optimizer class that this class serves from the daemon."""
        torchs = (each for each in cls.__mro__ if not issubclass(each, ServedOptimizer))
        return next(each for each in torchs if issubclass(each, torch.optim.Optimizer))

    def __init__(
        self,
        params: Any,
        *args: Any,
        job: str | None = None,
        endpoint: str | None = None,
        max_norm: Scalar | None = None,
        max_value: Scalar | None = None,
        norm_type: float = 2.0,
        process_group: Any | None = None,
        norm_group: Any | None = None,
        norm_duplicates: Iterable[torch.Tensor] = (),
        model: torch.nn.Module | None = None,
        named_parameters: torch.nn.Module | NamedParameters | None = None,
        partition: str | None = None,
        accumulate: bool = False,
        accumulate_dtype: str | None = None,
        reduction: str = "trainer",
        overlap: bool = False,
        state_dtype: torch.dtype | str | None = None,
        master: str = "float32",
        loss_scaler: LossScaler | None = None,
        connect_timeout: float | None = None,
        step_timeout: float | None = None,
        resume: str = "checkpoint",
        parameters_as_views: bool = True,
        gradients_as_views: bool | None = None,
        detect_changes: str = "exact",
        placement: str | None = None,
        host_budget: int | str | None = None,
        durability: str | None = None,
        sub_group_size: int | None = None,
        offload_fraction: float | str | None = None,
        device_budget: int | str | None = None,
        share_device_memory: bool = False,
        speculative: bool = False,
        overlap_with_ddp: bool = False,
        communication_dtype: torch.dtype | str | None = None,
        bucket_cap_mb: float | None = None,
        gradient_predivide_factor: float | None = None,
        reduction_op: str | None = None,
        across_nodes: str | None = None,
        stale_nodes: str = "refuse",
        group: str | int | None = None,
        private: bool = False,
        readers: Iterable[str] = (),
        **kwargs: Any,
    ) -> None:
        settings = Settings(
            endpoint,
            partition,
            accumulate,
            connect_timeout,
            step_timeout,
            self._optstate_name,
            state_format(state_dtype),
            reduction,
            loss_scaler,
            overlap,
            master_format(master),
            accumulate_dtype,
            resume,
            parameters_as_views,
            detect_changes,
            storage(
                placement,
                host_budget,
                durability,
                sub_group_size,
                offload_fraction,
                device_budget,
            ),
            gradients_as_views,
            speculative=speculative,
            across_nodes=across_nodes,
            stale_nodes=stale_nodes,
            in_norm_group=norm_group is not None,
            access=access(group, private, readers),
            tunes_offload=offload_fraction == "auto",
            shares_device_memory=share_device_memory,
            reducing=reducing(
                communication_dtype,
                bucket_cap_mb,
                gradient_predivide_factor,
                reduction_op,
                reduction="daemon" if overlap_with_ddp else reduction,
            ),
        )
        settings = with_overlap(settings, overlap_with_ddp)
        take_hybrid_options(kwargs, overlap=settings.overlap, served=self._torch_class())
        refuse_sharding_optimizer()
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                "params is a module: give its parameters(). A framework that takes a keyword"
                " called model for the parameters (transformers.Trainer) leaves named_parameters="
                " alone, which means the same"
            )
        if model is not None and named_parameters is not None:
            raise ValueError("model= and named_parameters= are two names of one thing: give one")
        self._served = served = Served(settings, process_group)  # torch's constructor uses it
        super().__init__(params, *args, **kwargs)
        served.state = defaultdict(dict)  # the daemon has Adagrad's initial state
        if job is not None and (not isinstance(job, str) or not job):
            raise ValueError(f"Invalid job: {job!r} (a name, or None)")
        if job is None and settings.access is not None:
            raise ValueError(f"{settings.access} needs job=: a job without a name is one script's")
        limit(max_norm, "max_norm")
        limit(max_value, "max_value")
        checked_norm_type(norm_type)
        served.max_norm, served.max_value, served.norm_type = max_norm, max_value, norm_type
        served.norm_group = norm_group
        places = places_of_duplicates(norm_duplicates, served.tensors(), norm_group)
        served.settings = dataclasses.replace(settings, norm_duplicates=places)
        served.fix_options(self.defaults)
        served.name_by(named_parameters if model is None else model)
        served.attach(job)

    # Methods that attach and detach.

    def attach(
        self,
        job: str | None = None,
        endpoint: str | None = None,
        process_group: Any | None = None,
        norm_group: Any | None = None,
    ) -> None:
        """Attaches a copied or unpickled optimizer, which has no job before.

        A new job starts with the state that the copy holds; an existing job
        overwrites parameters and state with the daemon's. process_group: replaces
        the copied one; required (else RuntimeError) if pickling dropped a group. norm_group:
        required (else RuntimeError) if the original had one, which copies lack.
        Collective.
        """
        served = self._served
        if served.attachment is not None:
            raise RuntimeError(f'the optimizer is attached to job "{self.job}" already')
        if not served.may_attach:
            served.check_usable()
        if process_group is not None:
            served.process_group, served.lacks_process_group = process_group, False
        if served.lacks_process_group:
            raise RuntimeError(
                "the optimizer was pickled, and its process_group was not: call"
                " attach(process_group=...) with the ranks that train the job together"
            )
        if norm_group is not None:
            served.norm_group = norm_group
            served.settings = dataclasses.replace(served.settings, in_norm_group=True)
        if served.settings.in_norm_group and served.norm_group is None:
            raise RuntimeError(
                "the optimizer was copied or unpickled, and its norm_group was not: call"
                " attach(norm_group=...) with the ranks of all jobs that clip by one norm"
            )
        if endpoint is not None:
            served.settings = dataclasses.replace(served.settings, endpoint=endpoint)
        served.attach(job)

    def close(self) -> None:
        """Detaches from the job. Idempotent; the optimizer cannot be used afterwards.

        A named job stays in the daemon, or asleep; a private one ends with its last rank.
        """
        self._served.asleep = None
        self._served.detach(CLOSED)

    def __enter__(self) -> ServedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Methods that extend the job.

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, as torch's method does; collective after construction.

        The job goes on at its step, with the new parameters beside the old ones.
        A trainer that re-attaches to the job later must construct all groups at once.
        A parameter that the module of model= has by now gets its name there. ValueError, on all
        ranks and with nothing changed: ranks have other values of a new parameter.
        """
        if self._served.asleep is not None:
            self._served.check_usable()
        super().add_param_group(param_group)
        was_attached = False
        try:
            index = len(self.param_groups) - 1
            check_group(self.param_groups[index], index)
            hyperparams_of(
                optimizer_info(self.param_groups, self._optstate_name),
                self.param_groups[index],
                index,
            )
            was_attached = self._served.attachment is not None
            if was_attached:
                self._served.add_group(self._served.attachment)
        except BaseException:
            # If detached meanwhile, the job may have the new parameters: attach() needs them.
            if not was_attached or self._served.attachment is not None:
                self.param_groups.pop()
            raise


Joinable.register(ServedOptimizer)
