"""Pure nouns of the design: no process groups, no devices, no clocks."""
