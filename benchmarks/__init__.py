"""Step time, compile time and memory of training strategies in ``Trainer.fit``; run as ``python -m benchmarks``."""
