"""What Lightning sees: strategy, accelerator, precision plug-in."""
