"""Experiments: each lists its runs, runs one of them, and turns the records of many into rows of a table."""

from crossbn.lab.experiments.experiment import Comparison, Experiment, Measure, Scale, UnavailableError
from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.statistics import Spread

__all__ = ["EXPERIMENTS", "Comparison", "Experiment", "Measure", "Scale", "Spread", "UnavailableError"]
