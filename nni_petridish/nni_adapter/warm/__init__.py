"""Warm trials: what every growth of an experiment needs is imported once.

NNI starts a process for each trial, and a trial imports torch, NNI's own dependencies and more for
seconds before its first step. So the tuner starts one more process, the `server`. The first trial
that asks it makes it import all that; then it forks a process for each trial that asks. The trial
that NNI started, the `client`, only waits for that process: it hands on signals and ends with its
exit code. Whenever anything is not as expected the trial imports for itself.
"""
