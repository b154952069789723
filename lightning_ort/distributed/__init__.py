"""Several processes that train one model: how gradients are combined, and how one learns what became of the others."""

from lightning_ort.distributed.adasum import adasum, adasum_hook
from lightning_ort.distributed.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm", "adasum", "adasum_hook"]
