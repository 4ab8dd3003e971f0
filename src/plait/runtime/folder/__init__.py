"""A run's folder: who holds it, what is in it, how it is begun, resumed, cut back and exported."""
