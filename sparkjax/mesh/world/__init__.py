"""Many processes as one machine: who they are, whether they agree, and who is still there."""
