"""Starting a job: what the launcher gave a process, its threads and its GPU, and scripts for batch systems."""
