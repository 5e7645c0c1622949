"""What unit tests share: hypothesis takes its time, since the machine may be busy."""

from hypothesis import settings

settings.register_profile("shardwise", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("shardwise")
