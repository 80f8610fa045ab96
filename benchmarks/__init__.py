"""Benchmarks: commands that measure on the present GPU and write what they found as JSON and Markdown."""
