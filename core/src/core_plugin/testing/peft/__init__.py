"""What every PEFT method must do: in its layers (level 1), its life (2), and on two ranks (3)."""
