"""What every strategy must do: of itself (level 1), in training (2), with files and faults (3)."""
