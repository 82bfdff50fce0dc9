"""onlynorm: build, tune and explain neural networks through only their normalization layers."""

__version__ = "0.1.0"
