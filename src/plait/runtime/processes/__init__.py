"""A run as processes: alone in this one, or supervised from it, a worker for each rank."""
