"""The math: pure torch functions that return unreduced values. No I/O, no state, no collectives.

Shape suffixes: `_B` rows, `_T` tokens, `_G` siblings, `_V` vocabulary, `_N` flat trained tokens.
"""
