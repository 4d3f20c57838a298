"""What every device must do: alone (level 1), in a group (2), and sharded (3)."""
