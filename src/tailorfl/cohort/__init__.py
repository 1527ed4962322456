"""Clients with the same network, trained together as one tensor program."""

from tailorfl.cohort.cohort import Cohort
from tailorfl.cohort.engine import Engine
from tailorfl.cohort.objective import Batch, Client, Objective, cross_entropy, squared_error

__all__ = ["Batch", "Client", "Cohort", "Engine", "Objective", "cross_entropy", "squared_error"]
