"""Experiments: their configuration, runs on disk, comparisons."""
