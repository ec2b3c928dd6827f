"""The gradients of a step, from backward() to the daemon."""
