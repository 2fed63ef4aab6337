"""Random inputs in large numbers, over everything that reads what others wrote.

    python -m tests.fuzz --count 100000

Each input follows from (seed, surface, number), so that `--only SURFACE --number N` tries one again.
A surface is a function that takes a `random.Random` and raises where something is wrong.
"""
