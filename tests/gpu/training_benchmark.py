"""Trains a GPT on a GPU: tokens a second and device memory, with the optimizer here or there.

Every way of keeping the optimizer has a model of its own, all with the same weights; they take
turns, so that what else the machine does meets all of them. --out gets Google Benchmark's JSON.
Exits with 77, saying why, where torch finds no GPU; --tiny trains a small model on the CPU, to try
the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import optstate
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python/tests"))
from daemon import Daemon  # noqa: E402

SKIPPED_STATUS = 77
CONTEXT = 1024
HEAD_WIDTH = 64
LEARNING_RATE = 1e-4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, -1, HEAD_WIDTH)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Logits of the next token; the weights of the first and the last layer are one parameter."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        return functional.linear(self.norm(x), self.tokens.weight)


class MasterAdamW:
    """torch's fused AdamW over float32 masters on the GPU: nothing is offloaded."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._masters = [each.detach().float() for each in parameters]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._adamw = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, fused=True)

    def zero_grad(self) -> None:
        for each in self._parameters:
            each.grad = None

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(
            [each.grad for each in self._masters], [each.grad for each in self._parameters]
        )
        self._adamw.step()
        torch._foreach_copy_([each.detach() for each in self._parameters], self._masters)


def megatrons(parameters: list[nn.Parameter], fraction: float) -> object | None:
    """Megatron's HybridDeviceOptimizer, with all that makes it fast; None where it is not there."""
    try:
        from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    except ImportError:
        return None
    return HybridDeviceOptimizer(
        parameters,
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        pin_cpu_grads=True,
        pin_cpu_params=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        lr=LEARNING_RATE,
        fused=True,
    )


class Way:
    """One way of keeping the optimizer, with a model of its own."""

    def __init__(self, name: str, setup: Setup, make: Callable[[GPT], object]) -> None:
        self.name = name
        self.setup = setup
        before = setup.allocated()
        self.model = setup.make_model()
        self.optimizer = make(self.model)
        self.steps_ms: list[float] = []
        self.phases_ms: dict[str, float] = {}
        self.is_there = self.optimizer is not None
        if not self.is_there:
            return
        for i in range(2):
            self.step(i)
        self.optimizer.zero_grad()
        # It holds parameters, masters and state between two steps.
        self.held_bytes = setup.allocated() - before

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.setup.backward(self.model, number)
        self.optimizer.step()

    def measure(self, first: int, count: int) -> None:
        self.setup.wait()
        begin = time.perf_counter()
        for i in range(first, first + count):
            self.step(i)
        self.setup.wait()
        self.steps_ms.append((time.perf_counter() - begin) / count * 1e3)
        self.optimizer.zero_grad()

    @property
    def step_ms(self) -> float:
        return statistics.median(self.steps_ms)


class Setup:
    """The model and the batches that all ways share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        tiny = arguments.tiny
        self.device = torch.device("cpu" if tiny else "cuda")
        self.dtype = torch.bfloat16
        self.vocabulary = 512 if tiny else 50304
        self.width = 128 if tiny else arguments.width
        self.depth = 2 if tiny else arguments.depth
        self.batch = 2 if tiny else arguments.batch
        self.micro_batches = arguments.micro_batches
        generator = torch.Generator().manual_seed(3)
        shape = (4, self.batch, CONTEXT + 1)
        self._batches = torch.randint(self.vocabulary, shape, generator=generator).to(self.device)
        torch.manual_seed(1)
        self._weights = GPT(self.vocabulary, self.width, self.depth).to(self.dtype).state_dict()
        self.parameter_count = sum(each.numel() for each in self._weights.values())

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * CONTEXT * self.micro_batches

    def make_model(self) -> GPT:
        with self.device:
            model = GPT(self.vocabulary, self.width, self.depth).to(self.dtype)
        model.load_state_dict(self._weights)
        return model

    def backward(self, model: GPT, number: int) -> None:
        for micro in range(self.micro_batches):
            batch = self._batches[(number * self.micro_batches + micro) % len(self._batches)]
            logits = model(batch[:, :-1])
            loss = functional.cross_entropy(
                logits.view(-1, self.vocabulary), batch[:, 1:].reshape(-1)
            )
            (loss / self.micro_batches).backward()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def allocated(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()


class NoOptimizer:
    """Forward and backward alone."""

    def __init__(self, model: GPT) -> None:
        self._model = model

    def zero_grad(self) -> None:
        for each in self._model.parameters():
            each.grad = None

    def step(self) -> None:
        pass


# Ours, by job: all by the CPU, by both, by the device, and with records that stay on the device.
OURS: dict[str, dict[str, object]] = {
    "offload:1.0": {"offload_fraction": 1.0},
    "speculative": {"speculative": True},
    "offload:0.5": {"offload_fraction": 0.5},
    "offload:0.0": {"offload_fraction": 0.0},
    "offload:0.5/resident": {"offload_fraction": 0.5, "device_budget": "16GiB"},
    "offload:0.0/resident": {"offload_fraction": 0.0, "device_budget": "16GiB"},
    "offload:0.0/resident/shared": {
        "offload_fraction": 0.0,
        "device_budget": "16GiB",
        "share_device_memory": True,
    },
}


def job_of(name: str) -> str:
    return name.replace(":", "-").replace("/", "-")


def make_ways(setup: Setup, endpoint: str, overlap: bool) -> Iterator[Way]:
    def ours(name: str) -> Callable[[GPT], object]:
        def make(model: GPT) -> object:
            return optstate.AdamW(
                model.parameters(),
                lr=LEARNING_RATE,
                endpoint=endpoint,
                job=job_of(name),
                overlap=overlap,
                **OURS[name],
            )

        return make

    yield Way("none", setup, NoOptimizer)
    if setup.device.type == "cuda":
        yield Way("torch_on_gpu", setup, lambda model: MasterAdamW(list(model.parameters())))
        for fraction in (1.0, 0.5):
            yield Way(
                f"megatron/offload:{fraction}",
                setup,
                lambda model, fraction=fraction: megatrons(list(model.parameters()), fraction),
            )
    for name in OURS:
        yield Way(f"optstate/{name}", setup, ours(name))


def phases_ms(daemon: Daemon, job: str) -> dict[str, float]:
    """Returns the mean time of each phase of a job's steps, as the daemon measures it."""
    found = daemon.optctl("describe", "job", job).get("step_phases", [])
    return {
        f"{each['phase']}_ms": each.get("sum_s", 0) / sum(map(int, each["steps"])) * 1e3
        for each in found
        if sum(map(int, each["steps"]))
    }


def fused_over_copy(numel: int) -> dict[str, float]:
    """torch's fused AdamW of float32 beside a copy of as many bytes on the device."""
    parameter = torch.nn.Parameter(torch.randn(numel, device="cuda") * 0.01)
    parameter.grad = torch.randn(numel, device="cuda") * 0.01
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    touched = 7 * 4 * numel  # parameter, gradient, two states; all but the gradient are written
    source, target = torch.empty(2, touched // 2, dtype=torch.uint8, device="cuda")

    def seconds_of(work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(8):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / 8

    pairs = [
        (seconds_of(optimizer.step), seconds_of(lambda: target.copy_(source))) for _ in range(20)
    ]
    update, copy = (statistics.median(side) for side in zip(*pairs))
    return {
        "ratio": copy / update,
        "GB_per_s": touched / update / 1e9,
        "copy_GB_per_s": touched / copy / 1e9,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a way, in a round")
    parser.add_argument("--no-overlap", action="store_true")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if not arguments.tiny and not torch.cuda.is_available():
        print("skipped: torch finds no GPU")
        return SKIPPED_STATUS
    setup = Setup(arguments)
    print(
        f"{setup.parameter_count / 1e6:.0f} M parameters in bfloat16, {setup.tokens} tokens a step",
        flush=True,
    )
    found: list[dict[str, object]] = []
    with contextlib.ExitStack() as stack:
        daemon = Daemon("--devices", "emulated:1" if arguments.tiny else "cuda")
        stack.callback(daemon.stop)
        ways: list[Way] = []
        for way in make_ways(setup, daemon.shm, not arguments.no_overlap):
            if way.is_there:
                ways.append(way)
                print(f"  {way.name}: holds {way.held_bytes / 1e9:.2f} GB", flush=True)
            else:
                print(f"  {way.name}: skipped, it is not installed", flush=True)
        for round_number in range(arguments.rounds):
            for way in ways:
                way.measure(2 + round_number * arguments.steps, arguments.steps)
        for way in ways:
            who, _, name = way.name.partition("/")
            way.phases_ms = phases_ms(daemon, job_of(name)) if who == "optstate" else {}
        alone_ms = ways[0].step_ms
        base = next((way for way in ways if way.name == "torch_on_gpu"), ways[0])
        for way in ways:
            found.append(
                {
                    "name": f"Training/{way.name}",
                    # The base is an optimizer that is on the GPU whole.
                    "ratio": base.step_ms / way.step_ms,
                    "tokens_per_s": setup.tokens / way.step_ms * 1e3,
                    "step_ms": way.step_ms,
                    "exposed_ms": way.step_ms - alone_ms,
                    "held_GB": way.held_bytes / 1e9,
                    **way.phases_ms,
                }
            )
        print(daemon.run_optctl("describe", "device"))
    if not arguments.tiny:
        del ways
        torch.cuda.empty_cache()
        found.append({"name": "TorchFused/AdamW/float32", **fused_over_copy(64 << 20)})
    for one in found:
        print(json.dumps(one))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"benchmarks": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
