"""Thin wrappers over native kernels, and `torch_ops`, the torch twin of each.

Layers import the submodule they need, so that nothing is built or loaded before it is used. May
import `env` and `utils`.
"""
