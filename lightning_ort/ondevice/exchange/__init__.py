"""Weights and optimizer states from a training in torch to one on a device, and back."""

from lightning_ort.ondevice.exchange.copying import copy_from_torch, copy_to_torch

__all__ = ["copy_from_torch", "copy_to_torch"]
