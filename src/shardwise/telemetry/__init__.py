"""Measures steps and hands the records to whoever listens."""
