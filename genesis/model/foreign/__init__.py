"""A language model of transformers behind the interface of `genesis.model.language_model`."""
