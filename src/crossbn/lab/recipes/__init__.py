"""Trainings as the paper does them, any norm, any model, any data set."""
