"""Strategies of the Trainer side by side: the times of their steps, what they cost first, and which one pays."""
