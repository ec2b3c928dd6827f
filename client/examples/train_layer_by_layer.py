"""Trains a network whose parameters do not fit into this process's memory, a layer at a time.

    optstated --nvme-dir /some/disk &
    python train_layer_by_layer.py --endpoint grpc:unix:/run/optstate/optstated.sock --job big

Parameters, masters and AdamW's state lie on the daemon's disk. This process has at any time the
parameters of two layers, a gradient, and each layer's input. Forward, the next layer is prefetched
while one is computed. Backward, a layer is computed once more from its input, and its gradients
are pushed as soon as they are there. Run twice with one job name, it goes on where it ended.

Over gRPC, because in shared memory this process would have the memory of all gradients.

--in-memory trains the same network with torch alone, all of it in this process: what this example
is not.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
from collections.abc import Iterator

import optstate
import torch

BATCH = 8


def keep_the_heap_small() -> None:
    """Has glibc give the memory of layers back to the kernel as soon as they are freed.

    By itself it raises the size from which it does so to that of the largest block that was freed,
    up to 32 MiB; then what is freed stays, in pieces, and the process grows.
    """
    m_mmap_threshold = -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_threshold, 1 << 20)


def names_of(layer: int) -> list[str]:
    return [f"layers.{layer}.weight", f"layers.{layer}.bias"]


def shapes(layers: int, width: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for layer in range(layers):
        weight, bias = names_of(layer)
        found[weight] = ((width, width), torch.float32)
        found[bias] = ((width,), torch.float32)
    return found


def initial_values(layers: int, width: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Makes the values one after the other, as they are asked for."""
    generator = torch.Generator().manual_seed(0)
    for layer in range(layers):
        weight, bias = names_of(layer)
        yield weight, torch.randn(width, width, generator=generator) / width**0.5
        yield bias, torch.zeros(width)


def batch_of(step: int, width: int) -> torch.Tensor:
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step))


def apply_layer(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return inputs + torch.tanh(torch.nn.functional.linear(inputs, weight, bias))


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def take_step(store: optstate.ParameterStore, layers: int, width: int) -> float:
    """Takes one step; returns the loss."""
    inputs = [batch_of(store.committed_step, width)]
    for layer in range(layers):  # forward: inputs are kept, parameters are not
        if layer + 1 < layers:
            store.prefetch(names_of(layer + 1))
        weight, bias = store.fetch_many(names_of(layer))
        with torch.no_grad():
            inputs.append(apply_layer(inputs[-1], weight, bias))
        store.release(names_of(layer))
    outputs = inputs.pop().requires_grad_()
    loss = loss_of(outputs)
    loss.backward()
    gradient = outputs.grad
    for layer in reversed(range(layers)):  # backward: each layer once more, with a graph
        if layer > 0:
            store.prefetch(names_of(layer - 1))
        weight, bias = (each.requires_grad_() for each in store.fetch_many(names_of(layer)))
        into = inputs.pop().requires_grad_()
        apply_layer(into, weight, bias).backward(gradient)
        gradient = into.grad
        for name, parameter in zip(names_of(layer), (weight, bias)):
            store.push(name, parameter.grad)
        store.release(names_of(layer))
    store.step()
    return loss.item()


def train(options: argparse.Namespace) -> str:
    """Trains with parameters in the daemon; returns a digest of their bits."""
    with optstate.ParameterStore(
        shapes(options.layers, options.width),
        "adamw",
        lr=1e-3,
        job=options.job,
        placement=options.placement,
        host_budget=options.host_budget,
        max_in_cpu=options.max_in_cpu,
        endpoint=options.endpoint,
    ) as store:
        store.load(initial_values(options.layers, options.width))
        while store.committed_step < options.steps:
            loss = take_step(store, options.layers, options.width)
            print(f"step {store.committed_step}: loss {loss:.6f}", flush=True)
        digest = hashlib.sha256()
        for name, values in store.items():
            digest.update(name.encode())
            digest.update(values.numpy())
        return digest.hexdigest()


def train_in_memory(options: argparse.Namespace) -> str:
    """Trains with all parameters in this process; returns a digest of their bits."""
    values = dict(initial_values(options.layers, options.width))
    parameters = {name: torch.nn.Parameter(value) for name, value in values.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    for step in range(options.steps):
        outputs = batch_of(step, options.width)
        for layer in range(options.layers):
            outputs = apply_layer(outputs, *(parameters[name] for name in names_of(layer)))
        loss = loss_of(outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
    digest = hashlib.sha256()
    for name, parameter in parameters.items():
        digest.update(name.encode())
        digest.update(parameter.detach().numpy())
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoint", help="grpc:unix:PATH of the daemon's socket")
    parser.add_argument("--job", help="its name; without one the job ends with this process")
    parser.add_argument("--placement", default="nvme", choices=("nvme", "host", "auto"))
    parser.add_argument("--host-budget", help='memory for records, such as "64MiB"')
    parser.add_argument("--max-in-cpu", help='the daemon\'s memory for parameters, "64MiB"')
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--in-memory", action="store_true", help="train with torch alone")
    options = parser.parse_args(arguments)
    keep_the_heap_small()
    print("parameters", (train_in_memory if options.in_memory else train)(options), flush=True)


if __name__ == "__main__":
    main()
