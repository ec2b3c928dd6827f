"""The modules that import torch, behind optimizers.py, torch_optimizer.py and ddp.py.

`served` holds the data of one optimizer. `stepping` and `state_transfer` are what the optimizer
does with it; `state_mapping` and `state_edits` are its `state`. They stand on rooms: `job` is the
attachment to a job, `parameters` and `gradients` are those of the trainer, and `state` is arrays
and entries as a checkpoint has them. The rooms stand on the modules that remain.
"""
