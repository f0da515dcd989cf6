"""Reinforcement learning from verifiable rewards for large reasoning models."""

__version__ = "0.1.0"
