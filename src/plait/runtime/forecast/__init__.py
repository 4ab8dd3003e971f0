"""What a run will take, before anything is loaded: its plan, its memory, and the least time of generation."""
