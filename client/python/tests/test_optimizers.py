"""Every optimizer against the one of torch (Lion: against its paper's), in float64 too."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import optstate
import pytest
import torch
from training import gradients, parameters_of, set_gradients

STEPS = 200
SHAPES = [[4099], [64, 65], [17], [1], [0], []]
MATRICES = [[64, 65], [65, 64], [32, 128]]  # for Muon


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, with lion-pytorch's order of operations."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                exp_avg = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = exp_avg * beta1 + grad * (1 - beta1)
                p.add_(update.sign(), alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


# name: ours, torch's, and sets of options beside lr.
CASES = {
    "SGD": [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.5, "maximize": True},
    ],
    "Adagrad": [
        {},
        {"lr_decay": 0.01, "weight_decay": 0.1},
        {"initial_accumulator_value": 0.5},
        {"maximize": True, "eps": 1e-3},
    ],
    "RMSprop": [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"centered": True, "alpha": 0.9},
        {"centered": True, "momentum": 0.8, "maximize": True},
    ],
    "NAdam": [
        {},
        {"weight_decay": 0.1, "momentum_decay": 0.01},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True, "betas": (0.8, 0.95)},
    ],
    "RAdam": [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True, "betas": (0.8, 0.95)},
    ],
    "Lion": [{}, {"weight_decay": 0.1}, {"maximize": True, "betas": (0.8, 0.95)}],
}
TORCHS = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Lion": Lion,
}
ALL = [(name, options) for name, cases in CASES.items() for options in cases]
IDS = [f"{name}-{'-'.join(options) or 'defaults'}" for name, options in ALL]
TINY_LR = {"Lion"}  # its updates are of the size of lr


def run(optimizer_class, parameters, seed, options, steps=STEPS, dtype=None):
    lr = 1e-3 if optimizer_class in (Lion, optstate.Lion) else 1e-2
    optimizer = optimizer_class(parameters, lr=lr, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for values in gradients(SHAPES, seed, steps, missing=0.1):
        if dtype is not None:
            values = [None if value is None else value.to(dtype) for value in values]
        set_gradients(parameters, values)
        optimizer.step()
        scheduler.step()
    return optimizer


def flat(parameters):
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in parameters])


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_error_is_not_above_torchs(name, options, seed, record_property):
    """200 steps with a schedule and missing gradients: the error against float64 is
    not above that of torch's fp32, in the mean over the elements (see test_numerics)."""
    torchs = parameters_of(SHAPES, seed, torch.float32)
    exact = parameters_of(SHAPES, seed, torch.float64)
    ours = parameters_of(SHAPES, seed, torch.float32)
    run(TORCHS[name], exact, seed, options)
    run(TORCHS[name], torchs, seed, options)
    run(getattr(optstate, name), ours, seed, options)
    truth = flat(exact)
    our_error, torch_error = flat(ours) - truth, flat(torchs) - truth
    excess = our_error.square() - torch_error.square()
    standard_error = excess.std() / math.sqrt(excess.numel())
    ratio = (our_error.square().mean() / torch_error.square().mean()).sqrt().item()
    record_property("error_ratio", ratio)
    print(f"{name} {options}: rms error / torch's {ratio:.3f}")
    # Where signs decide (Lion), an element whose sign is in doubt goes elsewhere, in
    # torch's run too; such runs are compared by the elements that agree.
    assert excess.mean() <= 4 * standard_error or ratio <= 1.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_16_bit_parameters_follow_the_float32_run(name, dtype, seed):
    options = CASES[name][-1]
    start = parameters_of(SHAPES, seed, dtype)
    masters = [torch.nn.Parameter(each.detach().float()) for each in start]
    stream = run(getattr(optstate, name), start, seed, options, 20, dtype)
    reference = getattr(optstate, name)
    lr = 1e-3 if name in TINY_LR else 1e-2
    optimizer = reference(masters, lr=lr, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for values in gradients(SHAPES, seed, 20, missing=0.1):
        rounded = [None if value is None else value.to(dtype).float() for value in values]
        set_gradients(masters, rounded)
        optimizer.step()
        scheduler.step()
    for mine, master in zip(start, masters):
        assert torch.equal(mine, master.to(dtype))
    stream.close()


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_state_goes_to_torch_and_back(name, options, seed):
    """Half the steps here, then half in torch from our state_dict, and the other way
    round, come to the same as all the steps in one."""
    ours, theirs = (parameters_of(SHAPES, seed, torch.float32) for _ in range(2))
    first = run(getattr(optstate, name), ours, seed, options, 10)
    reference = run(TORCHS[name], theirs, seed, options, 10)
    state = first.state_dict()
    carried = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    continued = TORCHS[name](carried, lr=1e-2, **options)
    continued.load_state_dict(state)
    returned = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    back = getattr(optstate, name)(returned, lr=1e-2, **options)
    back.load_state_dict(continued.state_dict())
    from_torch = [torch.nn.Parameter(each.detach().clone()) for each in theirs]
    taken = getattr(optstate, name)(from_torch, lr=1e-2, **options)
    taken.load_state_dict(reference.state_dict())
    for values in gradients(SHAPES, seed + 1, 10):
        for optimizer, parameters in (
            (first, ours),
            (continued, carried),
            (back, returned),
            (taken, from_torch),
        ):
            set_gradients(parameters, [value.clone() for value in values])
            optimizer.step()
    for mine, there, again, taken_over in zip(ours, carried, returned, from_torch):
        assert torch.equal(mine, again)
        torch.testing.assert_close(mine, there, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine, taken_over, rtol=1e-4, atol=1e-4)


def test_signatures_are_torchs_and_ours():
    import inspect

    for name in (*CASES, "Adam", "AdamW"):
        parameters = inspect.signature(getattr(optstate, name)).parameters
        if name != "Lion":
            torchs = inspect.signature(TORCHS.get(name, getattr(torch.optim, name))).parameters
            assert list(torchs) == list(parameters)[: len(torchs)]
        for ours in ("job", "endpoint", "max_norm", "reduction", "overlap", "loss_scaler"):
            assert parameters[ours].kind is inspect.Parameter.KEYWORD_ONLY


def test_options_are_fixed_and_bad_values_named():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optstate.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="momentum of param_groups"):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.param_groups[0]["weight_decay"] = -1
    with pytest.raises(ValueError, match="Invalid weight_decay value: -1.0"):
        optimizer.step()
    with pytest.raises(ValueError, match="Invalid state_dtype"):
        optstate.SGD([parameter], state_dtype=torch.float64)
    with pytest.raises(ValueError, match="Invalid accumulate_dtype"):
        optstate.SGD([parameter], accumulate=True, accumulate_dtype="bfloat16")
    with pytest.raises(ValueError, match="Invalid reduction"):
        optstate.SGD([parameter], reduction="both")


def test_value_clipping_is_clip_grad_value(seed):
    ours, torchs = (parameters_of(SHAPES, seed, torch.float32) for _ in range(2))
    optimizer = optstate.SGD(ours, lr=0.1, max_value=0.3)
    reference = torch.optim.SGD(torchs, lr=0.1)
    for values in gradients(SHAPES, seed, 5):
        set_gradients(ours, values)
        set_gradients(torchs, [value.clone() for value in values])
        torch.nn.utils.clip_grad_value_(torchs, 0.3)
        optimizer.step()
        reference.step()
    for mine, theirs in zip(ours, torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_norm_types_are_clip_grad_norms(norm_type, seed):
    shapes = [shape for shape in SHAPES if 0 not in shape]  # torch's Linf takes no empty ones
    ours, torchs = (parameters_of(shapes, seed, torch.float32) for _ in range(2))
    optimizer = optstate.SGD(ours, lr=0.1, max_norm=0.5, norm_type=norm_type)
    reference = torch.optim.SGD(torchs, lr=0.1)
    for values in gradients(shapes, seed, 5):
        set_gradients(ours, values)
        set_gradients(torchs, [value.clone() for value in values])
        norm = torch.nn.utils.clip_grad_norm_(torchs, 0.5, norm_type)
        optimizer.step()
        reference.step()
        assert optimizer.last_outcome.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    for mine, theirs in zip(ours, torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_groups_are_clipped_by_their_own_norms(norm_type, seed):
    shapes = [[50], [60]]
    ours, torchs = (parameters_of(shapes, seed, torch.float32) for _ in range(2))
    groups = [{"params": ours[:1], "max_norm": 0.1}, {"params": ours[1:], "max_norm": 0.2}]
    optimizer = optstate.SGD(groups, lr=0.1, norm_type=norm_type)
    reference = torch.optim.SGD(torchs, lr=0.1)
    for values in gradients(shapes, seed, 5):
        set_gradients(ours, values)
        set_gradients(torchs, [value.clone() for value in values])
        for parameter, limit in zip(torchs, (0.1, 0.2)):
            torch.nn.utils.clip_grad_norm_([parameter], limit, norm_type)
        optimizer.step()
        reference.step()
    for mine, theirs in zip(ours, torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_loss_scaler_of_the_daemon_is_grad_scaler(seed, job):
    """Scale by scale through overflows, and across a new trainer."""
    (parameter,) = parameters_of([[100]], seed, torch.float32)
    settings = optstate.LossScaler(init_scale=1024.0, growth_interval=3)
    optimizer = optstate.SGD([parameter], lr=0.1, job=job, loss_scaler=settings)
    torchs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    other = torch.nn.Parameter(parameter.detach().clone())
    reference = torch.optim.SGD([other], lr=0.1)
    for step in range(30):
        overflow = step % 7 == 5
        for each, scale, opt in (
            (parameter, optimizer.scale, optimizer),
            (other, torchs.scale, None),
        ):
            each.grad = None
            scale((each * each).sum()).backward()
            if overflow:
                each.grad[3] = math.inf
            if opt is None:
                torchs.step(reference)
                torchs.update()
            else:
                opt.step()
                assert opt.last_outcome.applied != overflow
        assert optimizer.loss_scale == torchs.get_scale(), step
        if step == 15:  # the trainer is replaced
            optimizer.close()
            optimizer = optstate.SGD([parameter], lr=0.1, job=job, loss_scaler=settings)
    torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-7)


def grown(optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    return optimizer


def copied(optimizer):
    other = copy.deepcopy(optimizer)
    optimizer.close()
    other.attach()
    return other


def pickled(optimizer):
    with optimizer:
        other = pickle.loads(pickle.dumps(optimizer))
    other.attach()
    return other


@pytest.mark.parametrize("goes_on", [grown, copied, pickled])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_loss_scaler_that_goes_on_in_another_job_forgets_nothing(goes_on, dynamic):
    """The scale, the steps since it changed, and the overflows that it still bears."""
    overflows = (2, 9, 10, 11, 20)

    def scales(goes_on_after):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = optstate.SGD(
            [parameter],
            lr=0.0,
            loss_scaler=optstate.LossScaler(
                init_scale=1024.0, growth_interval=4, hysteresis=2, dynamic=dynamic
            ),
        )
        found = []
        for step in range(24):
            if step == goes_on_after:
                optimizer = goes_on(optimizer)
            for each in optimizer.param_groups[0]["params"]:
                value = math.inf if step in overflows else 1.0
                each.grad = torch.full_like(each, value)
            optimizer.step()
            found.append(optimizer.loss_scale)
        optimizer.close()
        return found

    whole = scales(None)
    assert len(set(whole)) == (3 if dynamic else 1)
    for step in range(1, 24):
        assert scales(step) == whole, step


@pytest.mark.parametrize("accumulate", [False, True])
def test_overlap_gives_equal_bits(accumulate, seed):
    """Pushed during backward() or at step(): the same, also when gradients change in
    between, add up, or are dropped."""

    def train(overlap):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 10)
        )
        optimizer = optstate.AdamW(
            model.parameters(), lr=1e-2, overlap=overlap, accumulate=accumulate, max_norm=1.0
        )
        for step in range(12):
            optimizer.zero_grad()
            if accumulate:
                model(torch.randn(8, 30)).square().mean().backward()
                optimizer.accumulate_step()
            model(torch.randn(8, 30)).square().mean().backward()
            if step % 4 == 1 and not accumulate:
                model(torch.randn(8, 30)).square().mean().backward()  # adds up
            if step % 4 == 2 and not accumulate:
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
            if step % 4 == 3 and not accumulate:
                model[0].bias.grad = None  # pushed already
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    for mine, theirs in zip(train(True), train(False)):
        assert torch.equal(mine, theirs)


def test_overlap_cannot_take_back_a_micro_step():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optstate.SGD([parameter], lr=0.1, overlap=True, accumulate=True)
    parameter.square().sum().backward()
    optimizer.accumulate_step()
    parameter.square().sum().backward()
    parameter.grad.mul_(2)
    with pytest.raises(RuntimeError, match="abort_step"):
        optimizer.step()
    optimizer.abort_step()
    optimizer.zero_grad()
    parameter.square().sum().backward()
    optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 1 - 0.1 * 2.0))


class LAMB(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, with the bias correction of apex' FusedLAMB."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m_hat = m / (1 - beta1 ** state["step"])
                v_hat = v / (1 - beta2 ** state["step"])
                update = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * p
                p_norm, u_norm = p.norm().item(), update.norm().item()
                trust = p_norm / u_norm if p_norm > 0 and u_norm > 0 else 1.0
                p.add_(update, alpha=-group["lr"] * trust)


# None without elements: torch's Adafactor divides by their number.
WHOLE_SHAPES = [[4099], [64, 65], [65, 64], [3, 5, 7], [17], [1], []]
WHOLE = [
    ("LAMB", LAMB, {}),
    ("LAMB", LAMB, {"weight_decay": 0.1}),
    ("Adafactor", torch.optim.Adafactor, {}),
    ("Adafactor", torch.optim.Adafactor, {"weight_decay": 0.1, "d": 2.0, "beta2_decay": -0.5}),
    ("Adafactor", torch.optim.Adafactor, {"maximize": True, "eps": (1e-6, 1e-2)}),
]


def run_whole(optimizer_class, parameters, seed, options, steps):
    optimizer = optimizer_class(parameters, lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    shapes = [list(parameter.shape) for parameter in parameters]
    for values in gradients(shapes, seed, steps, missing=0.1):
        set_gradients(
            parameters, [None if v is None else v.to(parameters[0].dtype) for v in values]
        )
        optimizer.step()
        scheduler.step()
    return optimizer


@pytest.mark.parametrize(("name", "torchs_class", "options"), WHOLE)
def test_whole_parameter_optimizers(name, torchs_class, options, seed):
    ours, torchs = (parameters_of(WHOLE_SHAPES, seed, torch.float32) for _ in range(2))
    exact = parameters_of(WHOLE_SHAPES, seed, torch.float64)
    run_whole(torchs_class, exact, seed, options, STEPS)
    run_whole(torchs_class, torchs, seed, options, STEPS)
    run_whole(getattr(optstate, name), ours, seed, options, STEPS)
    truth = flat(exact)
    our_error = (flat(ours) - truth).square().mean().sqrt().item()
    torch_error = (flat(torchs) - truth).square().mean().sqrt().item()
    print(f"{name} {options}: rms error {our_error:.3e}, torch's {torch_error:.3e}")
    assert our_error <= 1.1 * torch_error + 1e-9


@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}])
def test_muon(options, seed):
    """torch's Newton-Schulz runs in bfloat16, so that one rounding moves what follows: the
    runs stay together as two of torch's do whose gradients differ in the last bit."""
    ours, torchs, other = (parameters_of(MATRICES, seed, torch.float32) for _ in range(3))
    optimizers = [
        optstate.Muon(ours, lr=1e-2, **options),
        torch.optim.Muon(torchs, lr=1e-2, **options),
        torch.optim.Muon(other, lr=1e-2, **options),
    ]
    for values in gradients(MATRICES, seed, 50):
        for each, parameters in zip(optimizers, (ours, torchs, other)):
            nudge = 1 + 2**-20 if parameters is other else 1
            set_gradients(parameters, [value * nudge for value in values])
            each.step()
    for mine, theirs, nudged in zip(ours, torchs, other):
        moved = (nudged - theirs).norm().item()
        assert (mine - theirs).norm().item() <= 3 * moved + 1e-3 * theirs.norm().item()
    with pytest.raises(ValueError, match="2D"):
        optstate.Muon([torch.nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    ("name", "torchs_class"),
    [("Adafactor", torch.optim.Adafactor), ("Muon", torch.optim.Muon)],
)
def test_whole_state_goes_to_torch_and_back(name, torchs_class, seed):
    shapes = [[16, 9], [9, 16]] if name == "Muon" else WHOLE_SHAPES
    ours = parameters_of(shapes, seed, torch.float32)
    first = run_whole(getattr(optstate, name), ours, seed, {}, 5)
    carried = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    continued = torchs_class(carried, lr=1e-2)
    continued.load_state_dict(first.state_dict())
    returned = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    back = getattr(optstate, name)(returned, lr=1e-2)
    back.load_state_dict(continued.state_dict())
    for values in gradients(shapes, seed + 1, 5):
        for optimizer, parameters in ((first, ours), (continued, carried), (back, returned)):
            set_gradients(parameters, [value.clone() for value in values])
            optimizer.step()
    for mine, there, again in zip(ours, carried, returned):
        assert torch.equal(mine, again)
        torch.testing.assert_close(mine, there, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "dynamic8"], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Lion", "LAMB", "Adafactor", "Muon"])
def test_small_state_follows_the_float32_run(name, state_dtype, seed):
    """200 steps towards a target: with less state the loss comes down as far."""
    options = {"SGD": {"momentum": 0.9}}.get(name, {})
    lr = {"SGD": 0.05, "Lion": 3e-3, "Muon": 0.1}.get(name, 1e-2)
    # Of a matrix Adafactor keeps so little that it is float32 in any case.
    shape = (5600,) if name == "Adafactor" else (70, 80)
    torch.manual_seed(seed + 1)
    target = torch.randn(shape)
    losses = []
    for dtype in (None, state_dtype):
        torch.manual_seed(seed)
        parameter = torch.nn.Parameter(torch.randn(shape))
        optimizer = getattr(optstate, name)([parameter], lr=lr, state_dtype=dtype, **options)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = (parameter - target).square().mean()
            loss.backward()
            parameter.grad.mul_(100)
            optimizer.step()
        losses.append(loss.item())
        states = optimizer.state_dict()["state"][0]
        assert all(torch.isfinite(value).all() for value in states.values())
        optimizer.close()
    print(f"{name} {state_dtype}: loss {losses[1]:.3e}, with float32 {losses[0]:.3e}")
    assert losses[1] <= 1.5 * losses[0] + 1e-3


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "dynamic8"], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Adafactor", "Muon"])
def test_small_state_is_reproducible_and_survives(name, state_dtype, seed, job):
    """Equal bits over both wires and partitions, and after a new trainer took over."""
    make = functools.partial(getattr(optstate, name), state_dtype=state_dtype)
    shapes = MATRICES if name == "Muon" else SHAPES

    def train(job_name, endpoint=None, stop=None):
        parameters = parameters_of(shapes, seed, torch.float32)
        optimizer = make(parameters, job=job_name, endpoint=endpoint)
        for step, values in enumerate(gradients(shapes, seed, 10)):
            if step == stop:
                optimizer.close()
                parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in parameters]
                optimizer = make(parameters, job=job_name)
            set_gradients(parameters, values)
            optimizer.step()
        return parameters

    whole = train(f"{job}-whole")
    for other in (train(f"{job}-embedded", "embedded"), train(f"{job}-twice", stop=5)):
        assert all(map(torch.equal, whole, other))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "LAMB", "Adafactor", "Muon"])
def test_split_master_takes_the_steps_of_the_float32_one(name, seed):
    """bfloat16 parameters: equal but for those half way between two bfloat16."""
    shapes = [(65, 130), (30, 10) if name == "Muon" else (300,)]
    results = []
    for master in ("float32", "split"):
        parameters = parameters_of(shapes, seed, torch.bfloat16)
        optimizer = getattr(optstate, name)(parameters, lr=1e-3, master=master)
        for values in gradients(shapes, seed, 20):
            set_gradients(parameters, [value.bfloat16() for value in values])
            optimizer.step()
        results.append(parameters)
        optimizer.close()
    different = total = 0
    for one, other in zip(*results):
        different += (one != other).sum().item()
        total += one.numel()
        torch.testing.assert_close(one, other, rtol=0.008, atol=0)
    print(f"{name}: {different} of {total} parameters lay half way")
    assert different < total / 1000


def test_split_master_needs_bfloat16(job):
    half = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(optstate.InvalidArgumentError, match="split master.*float16"):
        optstate.AdamW([half], job=job, master="split").step()
    with pytest.raises(ValueError, match="Invalid master"):
        optstate.AdamW([half], master="half")
    # float32 parameters are their own.
    full = torch.nn.Parameter(torch.zeros(4))
    full.grad = torch.ones(4)
    optstate.AdamW([full], job=f"{job}-full", master="split").step()
    assert full.abs().sum() > 0


@pytest.mark.parametrize("sign", [1, -1])
def test_split_master_half_way_comes_back(sign, job):
    """A master that rounds away from 0, not to even, is the parameter's all the same."""
    master = torch.tensor([sign * (1 + 2**-8), sign * 1.25])
    parameter = torch.nn.Parameter(torch.tensor([sign * (1 + 2**-7), sign * 1.25]).bfloat16())
    optimizer = optstate.SGD([parameter], lr=1.0, job=job, master="split")
    state = optimizer.state_dict()
    state["state"][0] = {"master_param": master}
    optimizer.load_state_dict(state)
    parameter.grad = torch.tensor([sign * 2**-8, 0.0]).bfloat16()
    optimizer.step()
    assert torch.equal(parameter, torch.tensor([sign * 1.0, sign * 1.25]).bfloat16())
