"""What users add in one file of their own: `genesis fit` finds it by its import path."""
