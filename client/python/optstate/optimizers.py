"""torch's optimizers, with the state in the daemon.

``torch.optim.AdamW(model.parameters(), lr=3e-4)`` becomes
``optstate.AdamW(model.parameters(), lr=3e-4, job="my-run")``. Everything torch
documents about its optimizer holds; ServedOptimizer documents what is added.
"""

from __future__ import annotations

from typing import Any

import torch

from optstate._torch.optimizer_info import check_arguments
from optstate._torch.options import Scalar
from optstate.torch_optimizer import ServedOptimizer


class _Lion(torch.optim.Optimizer):
    """Hyperparameters of Lion, which torch does not have."""

    def __init__(
        self,
        params: Any,
        lr: Scalar = 1e-4,
        betas: tuple[Scalar, Scalar] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
    ) -> None:
        check_arguments(lr, betas, weight_decay)
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize},
        )


class _LAMB(torch.optim.Optimizer):
    """Hyperparameters of LAMB, which torch does not have."""

    def __init__(
        self,
        params: Any,
        lr: Scalar = 1e-3,
        betas: tuple[Scalar, Scalar] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
    ) -> None:
        check_arguments(lr, betas, weight_decay, eps)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)


class AdamW(ServedOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with the state in the daemon; see ServedOptimizer."""

    _optstate_name = "adamw"


class Adam(ServedOptimizer, torch.optim.Adam):
    """torch.optim.Adam with the state in the daemon; see ServedOptimizer."""

    _optstate_name = "adam"


class SGD(ServedOptimizer, torch.optim.SGD):
    """torch.optim.SGD with the state in the daemon; see ServedOptimizer."""

    _optstate_name = "sgd"


class Adagrad(ServedOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad with the state in the daemon; see ServedOptimizer."""

    _optstate_name = "adagrad"


class RMSprop(ServedOptimizer, torch.optim.RMSprop):
    """torch.optim.RMSprop with the state in the daemon; see ServedOptimizer."""

    _optstate_name = "rmsprop"


class NAdam(ServedOptimizer, torch.optim.NAdam):
    """torch.optim.NAdam with the state in the daemon; see ServedOptimizer."""

    _optstate_name = "nadam"


class RAdam(ServedOptimizer, torch.optim.RAdam):
    """torch.optim.RAdam with the state in the daemon; see ServedOptimizer."""

    _optstate_name = "radam"


class Lion(ServedOptimizer, _Lion):
    """Lion (Chen et al. 2023, as in lion-pytorch) in the daemon; see ServedOptimizer."""

    _optstate_name = "lion"


class LAMB(ServedOptimizer, _LAMB):
    """LAMB (You et al. 2020) in the daemon; see ServedOptimizer.

    Behaves as apex's FusedLAMB with use_nvlamb=True: the trust ratio is applied without weight
    decay too. Defaults: weight_decay is 0 (apex: 0.01), max_norm None (apex's max_grad_norm: 1).
    """

    _optstate_name = "lamb"


class Adafactor(ServedOptimizer, torch.optim.Adafactor):
    """torch.optim.Adafactor with the state in the daemon; see ServedOptimizer."""

    _optstate_name = "adafactor"


if hasattr(torch.optim, "Muon"):

    class Muon(ServedOptimizer, torch.optim.Muon):
        """torch.optim.Muon with the state in the daemon; see ServedOptimizer."""

        _optstate_name = "muon"
