"""The parameters of a model that does not fit: fetched by name, layer by layer."""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Union

import torch

from optstate import _native
from optstate._access import access
from optstate._storage import bytes_of, storage
from optstate._torch.foreign import torch_tensor
from optstate._torch.job.opening import private_name
from optstate._torch.layer_hooks import LayerHooks
from optstate._torch.layout import DTYPE_CODES
from optstate._torch.optimizer_info import OptimizerInfo, hyperparams_of, infos, max_norm_of
from optstate._torch.options import checked_norm_type, limit, master_format, state_format
from optstate._torch.tensors import in_memory
from optstate.foreign_tensor import offers_tensor
from optstate.session import Session, StepOutcome
from optstate.session_spec import LossScaler, ParameterSpec, SessionSpec

# A parameter's shape and dtype: such a pair, or any tensor, one on the meta device too.
Spec = Union[tuple[Sequence[int], torch.dtype], torch.Tensor]
# The parameters of one param group, by name.
Parameters = Union[Mapping[str, Spec], Iterable[tuple[str, Spec]]]

_GROUP_KEYS = ("params", "max_norm")


class ParameterStore:
    """Parameters, masters and optimizer state of one job, none of them in this process.

    With ``placement="nvme"`` parameters lie on disk, and the daemon has ``max_in_cpu`` bytes of
    them in memory (DeepSpeed's offload_param). A layer is fetched when it is needed::

        store = optstate.ParameterStore(
            model_on_meta_device.named_parameters(), "adamw", lr=3e-4, job="big",
            placement="nvme", max_in_cpu="2GiB", endpoint="grpc:unix:/run/optstate/optstated.sock",
        )
        store.load(initial_values)               # (name, tensor) pairs, one at a time
        for step in range(store.committed_step, steps):
            for layer in layers:                 # forward
                store.prefetch(next_layer)
                weight = store.fetch("layer.weight")
                ...
                store.release(["layer.weight"])
            for layer in reversed(layers):       # backward
                store.push("layer.weight", gradient)
            store.step()

    parameters: names with shapes and dtypes, such as ``model.named_parameters()`` of a model on
        the meta device or ``{"w": ((4, 4), torch.float32)}``; or several param groups as torch
        writes them, ``[{"params": ..., "lr": ...}, ...]``. Names are the job's.
    optimizer: "adamw", "adam", "sgd", "lion", ...; ``hyperparameters``: its own, as torch calls
        them, which groups may have too. ``param_groups`` has them, and may be changed between
        steps.
    job: the name of the job, which outlives this process. A job that exists is gone on with. None:
        a private job, which ends with the store.
    placement: "nvme", "host" (parameters lie in the daemon's memory) or "auto".
    max_in_cpu: bytes, or a text such as "64MiB", of the daemon's memory for parameters on disk.
        Two records' parameters at least.
    endpoint: over "unix:" this process has the memory of all gradients, in the segment that it
        shares with the daemon. Over "grpc:unix:" it has that of one push at a time.
    The others are those of optstate.AdamW.

    Threads: one at a time. Memory: of the values, no more than what the caller holds, and one
    gradient while it is pushed.
    Size: one method for each thing that is done with parameters or steps.
    """

    def __init__(
        self,
        parameters: Parameters | Sequence[dict[str, Any]],
        optimizer: str = "adamw",
        *,
        job: str | None = None,
        placement: str | None = "nvme",
        host_budget: int | str | None = None,
        max_in_cpu: int | str | None = None,
        durability: str | None = None,
        sub_group_size: int | None = None,
        endpoint: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        reduction: str = "trainer",
        accumulate: bool = False,
        state_dtype: torch.dtype | str | None = None,
        master: str = "float32",
        loss_scaler: LossScaler | None = None,
        connect_timeout: float | None = None,
        step_timeout: float | None = None,
        group: str | int | None = None,
        private: bool = False,
        readers: Iterable[str] = (),
        **hyperparameters: Any,
    ) -> None:
        if optimizer not in infos():
            raise ValueError(f"Invalid optimizer: {optimizer!r} (one of {', '.join(infos())})")
        if reduction not in ("trainer", "daemon"):
            raise ValueError(f"Invalid reduction: {reduction!r} (trainer or daemon)")
        who = access(group, private, readers)
        if job is None and who is not None:
            raise ValueError(f"{who} needs job=: a job without a name is one script's")
        self._info = infos()[optimizer]
        self.param_groups, self._specs = _groups(parameters, self._info, hyperparameters)
        self._index: dict[str, int] = {}
        for p, spec in enumerate(self._specs):
            if self._index.setdefault(spec.name, p) != p:
                raise ValueError(f'two parameters are called "{spec.name}"')
        self._group_options = [self._info.option_bits(group) for group in self.param_groups]
        self._dtypes = {code: dtype for dtype, code in DTYPE_CODES.items()}
        self._micro_step = 0
        on_disk = placement in ("nvme", "auto")
        self._session = Session.open(
            SessionSpec(
                job=private_name() if job is None else job,
                optimizer=self._info.kind,
                group_options=self._group_options,
                parameters=self._specs,
                endpoint=endpoint,
                partition=_native.REPLICATED if reduction == "daemon" else 1,
                rank=rank,
                world_size=world_size,
                accumulate=accumulate,
                ephemeral=job is None,
                connect_timeout_s=connect_timeout or 0,
                step_timeout_s=step_timeout or 0,
                state_format=_native.STATE_FORMATS[state_format(state_dtype)],
                master_format=_native.MASTER_FORMATS[master_format(master)],
                loss_scaler=loss_scaler,
                storage=storage(placement, host_budget, durability, sub_group_size)._replace(
                    parameters_on_disk=on_disk,
                    parameter_cache_bytes=bytes_of("max_in_cpu", max_in_cpu),
                ),
                access=who,
                fetches_parameters=True,
            )
        )

    def __enter__(self) -> ParameterStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Detaches from the job. A named job stays; idempotent."""
        self._session.close()

    @property
    def names(self) -> list[str]:
        """Returns the parameters' names, in the job's order."""
        return list(self._index)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each parameter, by name."""
        return {spec.name: (tuple(spec.shape), self._dtypes[spec.dtype]) for spec in self._specs}

    @property
    def committed_step(self) -> int:
        return self._session.committed_step

    @property
    def loss_scale(self) -> float:
        """Returns the factor for the next loss; 0 without a LossScaler."""
        return self._session.loss_scale

    @property
    def needs_values(self) -> bool:
        """Returns whether the job is new, so that load() has to come before all else."""
        return self._session.load_required_from < len(self._specs)

    def load(self, values: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> bool:
        """Loads the initial values of a new job, one after the other, in any order.

        `values`: (name, tensor) pairs, which may be made as they are asked for; each is sent
        before the next is asked for. Values may have any of the dtypes of parameters: masters
        are made of them. Returns False, and asks for none, when the job has its values already:
        then those stay. Waits for the other ranks, each of which loads everything. When it
        raises, the job has no values, and load() can be called again.
        """
        if not self.needs_values:
            return False
        self._session.begin_load()
        for name, value in values.items() if isinstance(values, Mapping) else values:
            p = self._number(name)
            tensor = self._checked(name, in_memory(torch_tensor(value, f'the value of "{name}"')))
            code = DTYPE_CODES.get(tensor.dtype)
            if code is None:
                raise TypeError(f'"{name}" is {tensor.dtype}: load float32, bfloat16 or float16')
            self._session.load(_native.MASTER, p, code, tensor.data_ptr())
        self._session.finish_load()
        self._session.load_required_from = len(self._specs)
        return True

    def fetch(self, name: str, out: torch.Tensor | Any | None = None) -> torch.Tensor:
        """Returns a parameter at the committed step, in its own dtype.

        `out`: a tensor of its shape, of torch or another library (see push()), or a writable
        buffer of its bytes, which gets the values; else a new tensor does. A read-only tensor is
        an InvalidArgumentError.
        """
        return self.fetch_many([name], None if out is None else [out])[0]

    def fetch_many(
        self, names: Sequence[str], outs: Sequence[Any] | None = None
    ) -> list[torch.Tensor]:
        """Does fetch() for each name; over gRPC without a round trip for each."""
        if outs is not None and len(outs) != len(names):
            raise ValueError(f"{len(names)} names, {len(outs)} places")
        numbers = [self._number(name) for name in names]
        results, places = [], []
        for i, p in enumerate(numbers):
            result = self._place(p, None if outs is None else outs[i])
            results.append(result)
            spec = self._specs[p]
            is_place = result.is_cpu and result.is_contiguous() and not result.is_neg()
            places.append(
                result if is_place else torch.empty(spec.shape, dtype=self._dtypes[spec.dtype])
            )
        self._session.fetch_many(
            array.array("i", [_native.PARAMETER] * len(numbers)),
            array.array("I", numbers),
            array.array("Q", [place.data_ptr() for place in places]),
        )
        for result, place in zip(results, places):
            if result is not place:
                with torch.no_grad():
                    result.copy_(place)
        return results

    def prefetch(self, names: Iterable[str]) -> None:
        """Has the daemon read parameters ahead, and keep them until release() or step().

        What it has no room for it leaves out. Returns at once.
        """
        self._session.prefetch(array.array("I", map(self._number, names)))

    def release(self, names: Iterable[str]) -> None:
        """Says that these parameters are not needed in memory any more."""
        self._session.release(array.array("I", map(self._number, names)))

    def push(self, name: str, gradient: torch.Tensor | Any) -> None:
        """Pushes the gradient of one parameter for the next step; the caller may reuse it.

        In any order, once a step; parameters without a gradient are left alone. A wrong shape
        or dtype raises before anything is sent. `gradient`: a tensor of torch, or any object with
        DLPack, ``__cuda_array_interface__`` or ``__array_interface__``, which is read where it is.
        InvalidArgumentError: it cannot be, and why; UnimplementedError: it is on a device that
        torch cannot reach.
        """
        p = self._number(name)
        what = f'the gradient of "{name}"'
        tensor = self._checked(name, in_memory(torch_tensor(gradient, what)))
        dtype = self._dtypes[self._specs[p].gradient_dtype]
        if tensor.dtype is not dtype:
            raise TypeError(f"{what} is {tensor.dtype}, not {dtype}")
        self._session.push_gradients(
            self.committed_step + 1,
            self._micro_step,
            array.array("I", [p]),
            array.array("Q", [tensor.data_ptr()]),
        )

    def end_micro_step(self) -> None:
        """Ends a micro-step of accumulate=True: what is pushed next is added to it."""
        self._session.end_micro_step(self.committed_step + 1, self._micro_step)
        self._micro_step += 1

    def step(
        self,
        *,
        grad_scale: float | None = None,
        max_norm: float | None = None,
        max_value: float | None = None,
        norm_type: float = 2.0,
        found_inf: bool = False,
    ) -> StepOutcome:
        """Takes the step with what was pushed; waits for the other ranks.

        grad_scale: what losses were multiplied by; None: loss_scale, or 1. After an error
        nothing of the step is staged: push all of it again.
        """
        groups = _native.array_of(_native.Hyperparams, len(self.param_groups))
        for i, group in enumerate(self.param_groups):
            if self._info.option_bits(group) != self._group_options[i]:
                raise ValueError(f"param_groups[{i}] has other options than it was begun with")
            for k, value in enumerate(hyperparams_of(self._info, group, i)):
                groups[i].value[k] = value
            groups[i].max_norm = max_norm_of(group, i)
        self._micro_step = 0
        return self._session.commit(
            self.committed_step + 1,
            groups,
            grad_scale=self.loss_scale or 1.0 if grad_scale is None else grad_scale,
            max_norm=limit(max_norm, "max_norm"),
            max_value=limit(max_value, "max_value"),
            norm_type=checked_norm_type(norm_type),
            found_inf=found_inf,
        )

    def abort(self) -> None:
        """Drops what this rank has pushed of the next step."""
        self._micro_step = 0
        self._session.abort(self.committed_step + 1)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns (name, values) pairs of all parameters, fetched one at a time: a checkpoint is
        written from it without room for the model."""
        for name in self._index:
            yield name, self.fetch(name)

    def hooks(self, module: torch.nn.Module) -> LayerHooks:
        """Returns a context in which a module, such as one on the meta device, computes with the
        store's parameters of its names.

        Each submodule's own parameters are fetched for its forward() and again for its backward
        pass, and the next submodule's prefetched, as they followed each other before. Gradients
        are pushed as they are made, so backward() comes once a step (with accumulate=True, once a
        micro-step), then step(). The module's parameters are replaced by ones without memory.
        """
        return LayerHooks(self, module)

    def _number(self, name: str) -> int:
        found = self._index.get(name)
        if found is None:
            raise KeyError(f'the job has no parameter "{name}"')
        return found

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        shape = tuple(self._specs[self._number(name)].shape)
        if tuple(tensor.shape) != shape:
            raise ValueError(f'"{name}" has the shape {shape}, not {tuple(tensor.shape)}')
        return tensor

    def _place(self, p: int, out: Any) -> torch.Tensor:
        """Returns the tensor that gets a parameter's values."""
        spec = self._specs[p]
        dtype = self._dtypes[spec.dtype]
        if out is None:
            return torch.empty(tuple(spec.shape), dtype=dtype)
        if not isinstance(out, torch.Tensor) and offers_tensor(out):
            out = torch_tensor(out, f'the place for "{spec.name}"', writable=True)
            # A flat array, also one of bytes, is a buffer.
            is_buffer = out.dim() == 1 and out.is_contiguous() and out.dtype in (dtype, torch.uint8)
            if is_buffer and out.numel() * out.element_size() == spec.numel * dtype.itemsize:
                out = out.view(dtype).view(tuple(spec.shape))
        if not isinstance(out, torch.Tensor):
            view = memoryview(out)
            if view.readonly or view.nbytes != spec.numel * dtype.itemsize:
                raise ValueError(
                    f'the buffer for "{spec.name}" must be writable and have'
                    f" {spec.numel * dtype.itemsize} bytes, not {view.nbytes}"
                )
            if spec.numel == 0:
                return torch.empty(tuple(spec.shape), dtype=dtype)
            return torch.frombuffer(out, dtype=dtype).view(tuple(spec.shape))
        if out.dtype is not dtype:
            raise TypeError(f'"{spec.name}" is {dtype}, the tensor for it {out.dtype}')
        return self._checked(spec.name, out)


def _groups(
    parameters: Any, info: OptimizerInfo, defaults: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[ParameterSpec]]:
    """Returns param groups, whose "params" are names, and the layout's parameters."""
    groups: list[dict[str, Any]] = []
    specs: list[ParameterSpec] = []
    given = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    if given and all(isinstance(each, dict) for each in given):
        parts = given
    else:
        parts = [{"params": given}]
    known = {name.partition(".")[0] for name in info.hyperparams} | set(info.options)
    for index, part in enumerate(parts):
        group = {**dict.fromkeys(info.options, False), **defaults, **part}
        for key in group:
            if key not in known and key not in _GROUP_KEYS:
                raise TypeError(f"{info.name} has no hyperparameter {key} (param_groups[{index}])")
        members = part["params"]
        pairs = list(members.items() if isinstance(members, Mapping) else members)
        specs += [_spec(name, spec, index) for name, spec in pairs]
        group["params"] = [name for name, _ in pairs]
        hyperparams_of(info, group, index)  # raises where a value is wrong
        groups.append(group)
    return groups, specs


def _spec(name: str, spec: Spec, group: int) -> ParameterSpec:
    shape, dtype = (spec.shape, spec.dtype) if isinstance(spec, torch.Tensor) else spec
    if dtype not in DTYPE_CODES:
        raise TypeError(f'"{name}" is {dtype}: optstate supports float32, bfloat16 and float16')
    shape = tuple(int(size) for size in shape)
    code = DTYPE_CODES[dtype]
    return ParameterSpec(name, shape, torch.Size(shape).numel(), code, code, group)
