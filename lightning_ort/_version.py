"""The version of lightning_ort."""

__version__ = "0.1.0"
