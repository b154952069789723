"""Files that are complete when they appear under their name."""
