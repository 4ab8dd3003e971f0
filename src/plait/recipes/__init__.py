"""Recipes: their keys, files and stages, the algorithms that they name, and what is wrong in them."""
