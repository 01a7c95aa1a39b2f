"""Tables and figures from a store, without a model."""
