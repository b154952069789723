"""Testers that make their own cases: programs, files and options, from seeds."""
