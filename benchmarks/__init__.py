"""Side by side with the systems that people use instead: step time, memory, bytes sent, and how they grow."""
