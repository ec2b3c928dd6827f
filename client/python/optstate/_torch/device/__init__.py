"""Copies between an accelerator's tensors and the memory that is shared with the daemon."""
