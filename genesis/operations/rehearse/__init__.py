"""`genesis rehearse`: trains a recipe once without interruption and once with kills; both must end bit-equal."""
