"""``python -m lightning_ort`` is ``lightning-ort``."""

from __future__ import annotations

import sys

from lightning_ort.cli import main

sys.exit(main())
