"""Makers, conversions and validation of `BlockLayout`."""
