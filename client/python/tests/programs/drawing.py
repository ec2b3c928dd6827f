"""Draws programs."""

from __future__ import annotations

import random
from typing import Any

from programs import operations  # noqa: F401  (registers them)
from programs.program import Program, Weight
from programs.references import SERVED
from programs.registry import KINDS

SHAPES = ((4,), (3, 5), (1,), (), (0,), (2, 3, 4), (17,), (3, 0, 2), (33, 4), (130,), (4,), (3, 5))
MATRICES = ((3, 5), (8, 3), (4, 4), (3, 8), (3, 5))

_BETAS = ((0.9, 0.999), (0.5, 0.75), (0.0, 0.5))
# torch's options, each with values beside the default.
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "SGD": {
        "momentum": (0.5, 0.9, 0.9),
        "dampening": (0.3,),
        "weight_decay": (0.01, 0.3),
        "nesterov": (True,),
        "maximize": (True,),
    },
    "Adam": {
        "betas": _BETAS,
        "eps": (1e-3,),
        "weight_decay": (0.01, 0.3),
        "amsgrad": (True,),
        "maximize": (True,),
        "decoupled_weight_decay": (True,),
    },
    "AdamW": {
        "betas": _BETAS,
        "eps": (1e-3,),
        "weight_decay": (0.0, 0.3),
        "amsgrad": (True,),
        "maximize": (True,),
    },
    "Adagrad": {
        "lr_decay": (0.01,),
        "weight_decay": (0.01,),
        "initial_accumulator_value": (0.5,),
        "maximize": (True,),
        "eps": (1e-3,),
    },
    "RMSprop": {
        "alpha": (0.5,),
        "eps": (1e-3,),
        "weight_decay": (0.01,),
        "momentum": (0.5, 0.9),
        "centered": (True,),
        "maximize": (True,),
    },
    "NAdam": {
        "betas": _BETAS[:2],
        "weight_decay": (0.01,),
        "momentum_decay": (0.05,),
        "decoupled_weight_decay": (True,),
        "maximize": (True,),
    },
    "RAdam": {
        "betas": _BETAS[:2],
        "weight_decay": (0.01,),
        "decoupled_weight_decay": (True,),
        "maximize": (True,),
    },
    "Lion": {"betas": ((0.5, 0.75),), "weight_decay": (0.01, 0.3), "maximize": (True,)},
    "LAMB": {"betas": ((0.5, 0.75),), "weight_decay": (0.01, 0.3), "maximize": (True,)},
    "Adafactor": {
        "beta2_decay": (-0.5,),
        "d": (2.0,),
        "weight_decay": (0.01,),
        "maximize": (True,),
    },
    "Muon": {"momentum": (0.5,), "weight_decay": (0.0,), "nesterov": (False,)},
}
RATES = (1e-3, 1e-2, 0.05)


def _options(rng: random.Random, optimizer: str) -> dict[str, Any]:
    options = {
        name: rng.choice(values)
        for name, values in OPTIONS[optimizer].items()
        if rng.random() < 0.35
    }
    options["lr"] = rng.choice(RATES)
    if options.get("nesterov") and optimizer == "SGD":
        options["momentum"] = 0.9
        options.pop("dampening", None)
    if optimizer == "Adafactor":
        options["eps"] = (1e-12, 1e-3)  # else it is each dtype's own
    if rng.random() < 0.1 and optimizer in ("SGD", "Adam", "AdamW"):
        options[rng.choice(("foreach", "fused"))] = rng.choice((True, False))
    return options


def _group_options(rng: random.Random, optimizer: str) -> dict[str, Any]:
    own = {
        name: rng.choice(values)
        for name, values in OPTIONS[optimizer].items()
        if rng.random() < 0.15
        and name not in ("nesterov", "decoupled_weight_decay", "initial_accumulator_value")
    }
    if rng.random() < 0.5:
        own["lr"] = rng.choice(RATES)
    return own


def _weight(rng: random.Random, optimizer: str, dtypes: tuple[str, ...], groups: int) -> Weight:
    shapes = MATRICES if optimizer == "Muon" else SHAPES
    if optimizer == "Adafactor":  # torch's divides by the number of elements
        shapes = tuple(shape for shape in shapes if 0 not in shape)
    return Weight(
        rng.choice(shapes),
        rng.choice(dtypes),
        rng.choice(("contiguous",) * 6 + ("transposed", "strided")),
        rng.randrange(groups),
        rng.choice((1, 1, 1, 1, 2, 3)),
        # torch's Adagrad has state of frozen parameters too, from its constructor on.
        rng.random() < 0.1 and optimizer != "Adagrad",
    )


def _served(rng: random.Random, scaler: str | None) -> dict[str, Any]:
    served: dict[str, Any] = {}
    if rng.random() < 0.25:
        served["max_norm"] = rng.choice((0.3, 1.0, 5.0))
        if rng.random() < 0.3:
            served["norm_type"] = rng.choice((1.0, float("inf")))
    if rng.random() < 0.1:
        served["max_value"] = 0.2
    if rng.random() < 0.3:
        served["accumulate"] = True
    if rng.random() < 0.25:
        served["overlap"] = True
    if rng.random() < 0.5:  # else as the number of ranks has it
        served["gradients_as_views"] = rng.random() < 0.7
    if rng.random() < 0.5:
        served["parameters_as_views"] = rng.random() < 0.3
    if rng.random() < 0.3:
        served["detect_changes"] = "exact"
    return served


def draw(seed: int, ranks: int = 1) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    optimizer = rng.choice(SERVED)
    dtypes = rng.choice((("float32",),) * 3 + (("float32", "bfloat16"), ("bfloat16",)))
    scaler = rng.choice((None, None, None, None, "trainer", "daemon"))
    if scaler is None and rng.random() < 0.15 and optimizer != "Adafactor":
        dtypes = ("float16", "float32")
    groups = rng.choice((1, 1, 2, 3))
    weights = tuple(
        _weight(rng, optimizer, dtypes, groups) for _ in range(rng.choice((1, 2, 3, 5)))
    )
    served = _served(rng, scaler)
    if ranks > 1:
        served.pop("overlap", None)
        if rng.random() < 0.5:
            served["reduction"] = "daemon"
            scaler = None if scaler == "trainer" else scaler
    options = _options(rng, optimizer)
    if scaler is not None and not served.keys().isdisjoint(("accumulate", "max_norm", "max_value")):
        # torch's scaler leaves it to a fused optimizer to unscale, and the reference needs
        # unscaled gradients before that.
        options.pop("fused", None)
    program = Program(
        optimizer=optimizer,
        weights=weights,
        options=options,
        operations=(),
        group_options=tuple(_group_options(rng, optimizer) for _ in range(groups)),
        served=served,
        # Without names rank 0 alone is warned, and gives up.
        names=rng.choice(("pairs", "model", "none" if ranks == 1 else "pairs")),
        has_job=rng.random() < 0.5,
        wire=rng.choice(("shm", "shm", "shm", "grpc_unix", "grpc_tcp")),
        scaler=scaler,
        seed=seed,
    )
    kinds = [kind for kind in KINDS.values() if kind.suits(program)]
    chosen = rng.choices(kinds, [kind.weight for kind in kinds], k=rng.randrange(4, 24))
    made = tuple((k.name, {n: draw(rng) for n, draw in k.draws.items()}) for k in chosen)
    return Program(**{**program.__dict__, "operations": made})
