"""Arrays and entries of state, as a checkpoint has them."""
