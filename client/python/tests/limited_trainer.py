"""Runs a program once its imports are done: prints "imported", waits for a line, goes on.

A test measures in between what the interpreter and torch take, and limits the rest.
"""

import gc
import runpy
import sys

import optstate  # noqa: F401
import torch

torch.set_num_threads(1)
# The first use of each loads memory that is no parameter either.
(torch.randn(8, 8, requires_grad=True) @ torch.randn(8, 8)).tanh().sum().backward()
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
gc.collect()
print("imported", flush=True)
sys.stdin.readline()
program = sys.argv[1]
sys.argv = sys.argv[1:]
runpy.run_path(program, run_name="__main__")
