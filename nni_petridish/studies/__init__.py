"""Studies over many searches."""
