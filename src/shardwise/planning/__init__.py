"""What is known before a job is started: hardware, and the memory that model states take on it. Imports no runtime, starts nothing."""
