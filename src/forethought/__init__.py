"""Forethought: language-model agents that get better by imagining, searching and learning."""

__version__ = "0.1.0"
