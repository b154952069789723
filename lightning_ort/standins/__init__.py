"""Objects that stand in for parts of a LightningModule while a step runs, so that a step is one graph.

``self.log`` and ``self.outputs.append`` are Python that Dynamo cannot put into a graph, or that makes it compile
again for every length of the list. The stand-ins only collect, which it can follow; what they collected reaches
Lightning and the list when the step has ended.
"""

from __future__ import annotations

from lightning_ort.standins.lists import GrowingLists, appended_attributes
from lightning_ort.standins.log import LogRecorder
from lightning_ort.standins.results import results_stay

__all__ = ["GrowingLists", "LogRecorder", "appended_attributes", "results_stay"]
