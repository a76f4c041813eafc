"""Models: where they come from, how they are read, and what a pair must have in common.

This file imports nothing, so that the catalogue and the fetching of weights stay usable without torch.
"""

__all__: list[str] = []
