"""Ready jobs: data, models and the training loop behind ``shardwise train``. They use the public API as any script does."""
