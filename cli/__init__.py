"""The command line: one file per command, one for the console."""
