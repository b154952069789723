"""Who runs a whole graph of a region: one file per executor behind :class:`~.executable.Executable`."""
