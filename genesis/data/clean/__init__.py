"""Raw text to text worth training on: filters, deduplication and decontamination, run by datatrove."""
