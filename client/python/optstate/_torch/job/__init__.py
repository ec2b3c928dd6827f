"""An optimizer's attachment to its job."""
