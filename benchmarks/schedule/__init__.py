"""What the schedule search is held against."""
