"""What depends on the device or on torch's private names. Everything above is neutral."""
