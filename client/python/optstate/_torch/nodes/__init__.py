"""One job on several nodes: each has a daemon of its own, and all take the same steps."""
