"""Lowering: an FX graph becomes a loop program."""
