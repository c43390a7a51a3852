"""Benchmarks: each compares contenders in one run and writes a record."""
