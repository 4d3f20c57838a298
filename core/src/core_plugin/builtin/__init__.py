"""The implementations that core-plugin brings, each behind an entry point like anyone's."""
