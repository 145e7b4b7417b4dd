"""Methods that Petridish is compared with: feature selection, and NNI's own strategies."""
