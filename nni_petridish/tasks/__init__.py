"""Problems that networks are trained on, and training itself."""
