"""8-bit state beside bitsandbytes' own: the map, the rounding of blocks, and training with it.

What the daemon keeps is seen through the client, as state_dict() gives it back. The bounds are
checked; what was found is printed as a table.

bitsandbytes has two ways to round a block on a CPU. For float64 it looks for the nearest value of
the map, which is its definition and what its kernels for GPUs do; for float32 it looks x up in
a table and is up to 3e-5 of the block's largest away from that (0.50.2): zeros become 2e-5 of it.
"""

from __future__ import annotations

import optstate
import torch
from eight_bit_peers import NUMEL_MIN, bitsandbytes, torchao_optimizers

BLOCK = 256
SEED = 20
STEPS = 300
ULP = 2.0**-23
OURS = {"state_dtype": "dynamic8", "endpoint": "embedded"}


def _state_of(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns exp_avg and exp_avg_sq after a first step: without memory of former steps these
    are the gradient and its square, rounded by the signed and by the unsigned map."""
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    with optstate.Adam([parameter], betas=(0.0, 0.0), **OURS) as optimizer:
        optimizer.step()
        assert optimizer.last_outcome.applied
        state = optimizer.state_dict()["state"][0]
    return state["exp_avg"], state["exp_avg_sq"]


def _check_map(functional) -> None:
    """A block that holds the whole map, and so 1, keeps every value of it."""
    signed = functional.create_dynamic_map(signed=True)
    unsigned = functional.create_dynamic_map(signed=False)
    for kind, values, found in (
        ("signed", signed, _state_of(signed)[0]),
        ("unsigned", unsigned, _state_of(unsigned.sqrt())[1]),
    ):
        apart = (found - values).abs() / values.abs().clamp(min=1e-30)
        print(f"| map, {kind}: furthest of 256 values, ulps | {apart.max() / ULP:.1f} | 4 |")
        # The two sides compute the values in another order of roundings.
        assert apart.max() <= 4 * ULP, kind
        assert found.unique().numel() == values.unique().numel()


def _blocks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    normal = torch.randn(64 * BLOCK, generator=generator)
    decades = 10 ** torch.empty(64 * BLOCK).uniform_(-9, 0, generator=generator)
    one = torch.zeros(4 * BLOCK)
    one[5::BLOCK] = -3.0
    return {
        "normal": normal,
        "nine decades": normal * decades,
        "tiny": normal * 1e-18,  # whose squares are near float32's smallest
        "huge": normal * 1e18,
        "zero": torch.zeros(2 * BLOCK),
        "one in a block": one,
        "equal": torch.full((2 * BLOCK,), -0.3),
        "a block and a tail": normal[: BLOCK + 100],
    }


def _rounded(values: torch.Tensor, code: torch.Tensor, functional) -> torch.Tensor:
    """Returns the values rounded to the nearest by bitsandbytes."""
    codes, largest = torch.ops.bitsandbytes.quantize_blockwise(values.double(), code, BLOCK)
    return functional.dequantize_blockwise(codes, absmax=largest, code=code, blocksize=BLOCK)


def _check_blocks(functional) -> None:
    """Every element becomes the value that bitsandbytes takes for the nearest."""
    for name, gradient in _blocks().items():
        for kind, exact, found in zip(
            ("signed", "unsigned"), (gradient, gradient.square()), _state_of(gradient)
        ):
            code = functional.create_dynamic_map(signed=kind == "signed")
            by_table = functional.dequantize_blockwise(
                *functional.quantize_blockwise(exact, code, blocksize=BLOCK)
            )
            share, by_table_share = (
                ((found - theirs).abs() > 4 * ULP * theirs.abs()).double().mean().item()
                for theirs in (_rounded(exact, code, functional), by_table)
            )
            # Squares that float32 holds with few bits lie between two values more often.
            most = 1e-3 if (name, kind) == ("tiny", "unsigned") else 0
            what = f"{name}, {kind}: share of elements that are another value (its table's)"
            print(f"| {what} | {share:.1e} ({by_table_share:.1e}) | {most} |")
            assert share <= most, (name, kind)


class _RoundedAdamW(torch.optim.Optimizer):
    """AdamW in float32, whose state bitsandbytes rounds to the nearest after each step."""

    def __init__(self, params, functional, lr, weight_decay=0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._functional, self._count = functional, 0
        self._codes = [functional.create_dynamic_map(signed=signed) for signed in (True, False)]

    @torch.no_grad()
    def step(self) -> None:
        self._count += 1
        (group,) = self.param_groups
        (parameter,) = group["params"]
        mean, square = self.state[parameter].get("moments") or (0, 0)
        mean = 0.9 * mean + 0.1 * parameter.grad
        square = 0.999 * square + 0.001 * parameter.grad.square()
        denominator = (square / (1 - 0.999**self._count)).sqrt() + 1e-8
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, denominator, value=-group["lr"] / (1 - 0.9**self._count))
        self.state[parameter]["moments"] = [
            _rounded(moment.view(-1), code, self._functional).view_as(moment)
            for moment, code in zip((mean, square), self._codes)
        ]


def _trained(kind, *more, **options) -> torch.Tensor:
    """The parameter after STEPS steps of a noisy regression; all runs see the same batches."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (64, 2 * NUMEL_MIN // 64)
    parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
    target = torch.randn(shape, generator=generator)
    optimizer = kind([parameter], *more, **options)
    for _ in range(STEPS):
        batch = torch.randn(32, shape[0], generator=generator)
        noise = torch.randn(32, shape[1], generator=generator)
        optimizer.zero_grad()
        (batch @ (parameter - target) + 0.1 * noise).square().mean().backward()
        optimizer.step()
    return parameter.detach().double()


def _check_training(peer) -> None:
    for name, options in (("AdamW", {"weight_decay": 0.1}), ("Adam", {})):
        options = {"lr": 1e-2, **options}
        exact = _trained(getattr(torch.optim, name), **options)
        mine = _trained(getattr(optstate, name), **options, **OURS)
        theirs = _trained(_RoundedAdamW, peer.functional, **options)
        _say_training(f"{name}, bitsandbytes to the nearest", exact, mine, theirs, 0.25)
        theirs = _trained(getattr(peer.optim, f"{name}8bit"), **options)
        _say_training(f"{name}8bit of bitsandbytes", exact, mine, theirs, 0.25)


def _say_training(name: str, exact, mine, theirs, most: float) -> None:
    """Ours and theirs are nearer to each other than `most` of what 8 bits cost theirs."""
    between, ours_off, theirs_off = (
        (one - other).square().mean().sqrt().item()
        for one, other in ((mine, theirs), (mine, exact), (theirs, exact))
    )
    print(f"| {name}, {STEPS} steps: rms ours - theirs | {between:.2e} | {most * theirs_off:.1e} |")
    print(f"| rms ours - float32's, theirs - float32's | {ours_off:.2e}, {theirs_off:.2e} | |")
    assert between <= most * theirs_off, name
    assert ours_off <= 1.1 * theirs_off, name


def _check_torchao(peer) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.1}
    exact = _trained(torch.optim.AdamW, **options)
    mine = _trained(optstate.AdamW, **options, **OURS)
    theirs = _trained(peer.AdamW8bit, **options)
    _say_training("AdamW8bit of torchao", exact, mine, theirs, 0.25)


def check() -> None:
    print("\n### 8-bit state beside bitsandbytes' and torchao's\n")
    peer, why = bitsandbytes()
    torchao, why_not = torchao_optimizers()
    for reason in filter(None, (why, why_not)):
        print(f"Not compared: {reason}\n")
    if peer is None and torchao is None:
        return
    print("| what | found | at most |\n|---|---|---|")
    if peer is not None:
        _check_map(peer.functional)
        _check_blocks(peer.functional)
        _check_training(peer)
    if torchao is not None:
        _check_torchao(torchao)


if __name__ == "__main__":
    check()
