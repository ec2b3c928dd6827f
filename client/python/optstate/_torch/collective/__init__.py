"""What crosses ranks in a step: gradients that the client averages."""
