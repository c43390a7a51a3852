"""`genesis rehearse`: a recipe trained once straight and once with SIGKILLs and restarts; both must end bit-equal."""
