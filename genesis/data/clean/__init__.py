"""Cleans raw text for training: filters, deduplication and decontamination, run by datatrove."""
