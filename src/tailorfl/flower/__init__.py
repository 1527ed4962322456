"""tailorfl on Flower: clients that are sites of their own, with their own data, on their own machines.

Nothing here is imported by the rest of the package; Flower itself comes with the extra ``flower``.
"""
