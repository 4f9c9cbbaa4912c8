"""Experiments: each lists its runs, runs one of them, and turns the records of many into rows of a table."""
