"""What the agent runs on: its loop, its threads, blocking waits, and the settings of the process."""
