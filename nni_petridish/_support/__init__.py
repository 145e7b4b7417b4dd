"""Small tools that every room may use: lazy names of packages, bounded reading of files."""
