"""The one place that says which version this is; the wheel's metadata reads it."""

__version__ = "0.1.0"
