"""Personalized federated learning: every client gets a model of its own."""

__version__ = "0.1.0"
