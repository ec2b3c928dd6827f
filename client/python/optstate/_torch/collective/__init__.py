"""Gradients that the client averages cross ranks in a step."""
