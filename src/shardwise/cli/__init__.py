"""The command line: one file a command. Environment variables are read here and nowhere else."""
