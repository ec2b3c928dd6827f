"""The parameters of a job in the trainer: views, copies, and what the script does to them."""
