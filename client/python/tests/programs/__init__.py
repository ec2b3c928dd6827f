"""Random training programs, run beside torch.

A program is drawn from a seed (`drawing`): a model, an optimizer with its options, and
operations of a training script in any order (`operations`). `execution` runs it once with
torch's class and once with ours and compares after every operation; `shrinking` makes a program
that fails small, as text that `tests/random_programs.py` takes.
"""
