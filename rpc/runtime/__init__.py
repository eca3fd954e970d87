"""The agent's foundation: its loop, its threads, blocking waits, and the settings of the process."""
