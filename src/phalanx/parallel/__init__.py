"""Many ranks, one run."""
