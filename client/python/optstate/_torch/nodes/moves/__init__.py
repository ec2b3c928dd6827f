"""State that moves between nodes, because a job goes on with others, or with other ranks."""
