"""One search, from its configuration file to its last model."""
